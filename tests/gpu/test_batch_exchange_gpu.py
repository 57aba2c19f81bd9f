"""Batches balanced without the host, by several ranks on one GPU: rows, plans, copied experts and sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ep.dispatch.nvshmem import batch_exchange
from moe_ep.eplb.batch_rounds import place_rows, place_rows_reference, rank_plan, rank_plan_reference
from moe_ep.layer.methods import relative_error, tolerance
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceNoOP
from tests.dispatch.backend_cases import Case
from tests.gpu.ranks_of_one_gpu import Ranks, on_one_gpu

pytestmark = pytest.mark.gpu

E, SPARE, TOP_K, K = 32, 2, 4, 256
# Tokens of each rank in turn; how popular experts are, by Zipf's law, or one expert for all.
BATCHES: dict[str, tuple[tuple[int, ...], float | None]] = {
    "even": ((300,), 0.0),
    "skewed": ((300, 77, 1), 0.5),
    "very skewed": ((300,), 1.2),
    "one expert": ((250, 300), None),
    "empty ranks": ((0, 300, 0, 0), 1.2),
    "nothing": ((0,), 0.0),
}


class Balanced:
    """Ranks whose experts are known by the number that fills them, one slot more on each for a replica."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
        on_one_gpu(monkeypatch, num_ranks)
        self.num_ranks, self.width = num_ranks, E // num_ranks + 1
        torch.manual_seed(0)
        spare = torch.randperm(E)[:num_ranks]
        self.slots = torch.cat([torch.arange(E).view(num_ranks, -1), spare[:, None]], dim=1).flatten()
        filled = self.slots.view(num_ranks, -1, 1).expand(-1, -1, 1000).cuda()
        self.resident = [of_rank.clone().contiguous() for of_rank in filled]
        self.scratch = [torch.full((SPARE, 1000), -1, dtype=torch.int64, device="cuda") for _ in range(num_ranks)]
        as_bytes = [[of_rank.view(torch.uint8)] for of_rank in self.resident]
        addresses = [[part.data_ptr() for part in parts] for parts in as_bytes]
        monkeypatch.setattr(
            batch_exchange, "PeerMemory", lambda *_: SimpleNamespace(addresses=addresses, close=lambda: None)
        )
        num_ids = num_ranks * (self.width + SPARE)
        case = Case(dtype=torch.bfloat16, hidden_size=K, topk=TOP_K, num_experts=num_ids, tokens=(1,), capacity=300)
        self.ranks = Ranks(case, num_ranks, "nvshmem_high_throughput")
        exchanges = [backend.batch_exchange() for backend in self.ranks.backends]
        self.exchanges: list[Any] = exchanges
        self.copies = [
            exchange.open(as_bytes[rank], [self.scratch[rank].view(torch.uint8)], num_ranks * self.width)
            for rank, exchange in enumerate(exchanges)
        ]
        # Kernels are loaded while no rank waits for another.
        ids = torch.zeros(1, TOP_K, dtype=torch.int64, device="cuda")
        plan = rank_plan(torch.zeros(num_ranks, E, dtype=torch.int32, device="cuda"), self.slots.cuda(), 0, SPARE)
        place_rows(ids, plan)
        self.ranks.together(lambda rank: exchanges[rank].gather(ids, E))

    def check(self, batch: str, seed: int) -> int:
        """The copies that were made."""
        tokens, exponent = BATCHES[batch]
        generator = torch.Generator().manual_seed(seed)
        popularity = torch.arange(1, E + 1)[torch.randperm(E, generator=generator)].double() ** -(exponent or 0.0)
        inputs = []
        for rank in range(self.num_ranks):
            num = tokens[rank % len(tokens)]
            rows = torch.randn(num, K, generator=generator).bfloat16().cuda()
            ids = torch.multinomial(popularity.expand(max(num, 1), E), TOP_K, generator=generator)[:num]
            if exponent is None:
                ids = torch.tensor([7, -1, -1, -1]).repeat(num, 1)
            inputs.append((rows, torch.rand(num, TOP_K, generator=generator).cuda(), ids.cuda()))
        slots = self.slots.cuda()

        def begin(rank: int) -> Any:
            ids = inputs[rank][2]
            counts = self.exchanges[rank].gather(ids, E)
            plan = rank_plan(counts, slots, rank, SPARE)
            return counts, plan, place_rows(ids, plan)

        begun = self.ranks.together(begin)
        expected = torch.stack([ids[ids >= 0].bincount(minlength=E) for _, _, ids in inputs]).int()
        for rank, (counts, plan, placed) in enumerate(begun):
            assert torch.equal(counts, expected), (batch, rank)
            reference = rank_plan_reference(counts, slots, rank, SPARE, 0)
            assert all(map(torch.equal, plan, reference)), (batch, rank)
            assert torch.equal(placed, place_rows_reference(inputs[rank][2], plan)), (batch, rank)
            rows, weights, _ = inputs[rank]
            self.ranks.args[rank] = (rows, weights, placed, *self.ranks.args[rank][3:])
        # Not at once: streams of all ranks together are more than the GPU has queues.
        pending = self.ranks.together(lambda rank: self.copies[rank].start(begun[rank][1].sources))
        copied = self.ranks.together(lambda rank: pending[rank].receive())
        received = self.ranks.prepare()
        results = []
        for rank, (rows, _, _, ids, weights) in enumerate(received):
            held = torch.cat([self.resident[rank][:, 999], self.scratch[rank][:, 999]]).float()
            numbers = held[(ids - rank * (self.width + SPARE)).clamp(min=0).long()]
            total = expert(rows, numbers) * torch.where(ids >= 0, weights, 0.0)[..., None]
            results.append(total.sum(dim=1).bfloat16())
        of_prepare = [(result[4], result[3]) for result in received]
        outputs = self.ranks.finalize(results, of_prepare, TopKWeightAndReduceNoOP())
        self.ranks.together(lambda rank: copied[rank].release())
        for output, (rows, weights, ids) in zip(outputs, inputs, strict=True):
            wanted = (expert(rows, ids.float()) * torch.where(ids >= 0, weights, 0.0)[..., None]).sum(dim=1)
            assert not len(rows) or relative_error(output, wanted) < tolerance(torch.bfloat16), batch
        for backend in self.ranks.backends:
            backend.check()
        assert len({each.total for each in copied}) == 1 and sum(each.here for each in copied) == copied[0].total
        return copied[0].total


def expert(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The stand-in for experts: `[T, top_k, K]` of rows `[T, K]` and numbers `[T, top_k]`."""
    return rows.float()[:, None] * (1 + numbers[..., None] / 8) + numbers[..., None]


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_batches_of_ranks_on_one_gpu(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    balanced = Balanced(monkeypatch, num_ranks)
    copies = {batch: balanced.check(batch, seed) for seed in range(2) for batch in BATCHES}
    assert copies["one expert"] > 0 == copies["nothing"] and copies["very skewed"] > 0

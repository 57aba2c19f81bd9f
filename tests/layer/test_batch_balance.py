"""A batch that is balanced by its own counts gives what it gives without: every backend, EPLB beneath, packed experts.

In batch-invariant layers a token's sum has one order wherever its experts are, so that all bits must agree.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep.dispatch.all_to_all import AllToAllPrepareFinalize
from moe_ep.dispatch.rank_group import RankGroup
from moe_ep.dispatch.torch_distributed import RankExchange
from moe_ep.distributed.exchange import gather_texts
from moe_ep.eplb import EplbConfig, EPLBManager
from moe_ep.layer import BatchBalance, FusedMoE
from moe_ep.layer.batch_balance import Thresholds
from moe_ep.layer.methods import OnlineIntConfig, relative_error, tolerance
from moe_ep.layer.stack import SharedExperts
from moe_ep.observability import stages
from moe_ep.observability.metrics import Metric, MetricsSink
from moe_ep.observability.monitor import LayerMonitor
from tests.layer.moe_oracle import load, make_weights
from tests.ranks import ranks

BACKENDS = ("all_to_all", "batched_all_to_all", "allgather_reducescatter")
E, K, N, TOP_K = 10, 64, 32, 3
ALWAYS = BatchBalance(min_rows=0, copy_cost_rows=0)
# Tokens of each rank in turn; how popular experts are, by Zipf's law, or one expert for all.
BATCHES: dict[str, tuple[tuple[int, ...], float | None]] = {
    "even": ((40, 40, 40, 40), 0.0),
    "skewed": ((40, 13, 50, 1), 0.5),
    "very skewed": ((60, 60, 60, 60), 1.2),
    "one expert": ((33, 20, 7, 9), None),
    "empty ranks": ((0, 70, 0, 0), 1.2),
    "nothing": ((0, 0, 0, 0), 0.0),
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16 with biases": {"params_dtype": torch.bfloat16, "has_bias": True},
    "int4": {"quant_config": OnlineIntConfig()},
    "shared experts, round robin": {"shared_experts": True, "expert_placement_strategy": "round_robin"},
    "EPLB": {"enable_eplb": True, "num_redundant_experts": 2},
}


class Copies(stages.Listener):
    """How many experts were copied for the batches of a block."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def copied(self, layer: Any, num_copies: int, expert_bytes: int) -> None:
        assert expert_bytes > 0
        self.found.append(num_copies)


def make_layer(name: str, **more: Any) -> FusedMoE:
    options = {"top_k": TOP_K, "max_num_tokens": 24} | CASES[name] | more
    if options.pop("shared_experts", False):
        torch.manual_seed(3)
        options["shared_experts"] = SharedExperts(K, N)
    layer = FusedMoE(**{"num_experts": E, "hidden_size": K, "intermediate_size": N} | options)
    return load(layer, make_weights(layer.num_experts, K, N, has_bias=layer.moe_config.has_bias))


def batch_of(rank: int, batch: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, exponent = BATCHES[batch]
    generator = torch.Generator().manual_seed(rank)
    shape = (tokens[rank], TOP_K)
    rows = torch.randn(shape[0], K, generator=generator).to(dtype)
    weights = torch.rand(shape, generator=generator)
    if exponent is None:
        ids = torch.tensor([7, -1, -1]).expand(shape)
    else:
        popularity = torch.arange(1, E + 1).double() ** -exponent
        ids = torch.multinomial(popularity.expand(max(shape[0], 1), E), TOP_K, generator=generator)[: shape[0]]
    return rows, weights, ids


def compare(rank: int, world_size: int, backend: str, name: str, moved: bool) -> dict[str, list[int]]:
    with mock.patch.dict(os.environ, MOE_EP_RANKS_PER_HOST="2" if backend == "two_level" else "0"):
        return copies_of_batches(rank, backend, name, moved)


def copies_of_batches(rank: int, backend: str, name: str, moved: bool) -> dict[str, list[int]]:
    """Checks all batches; returns the copies that were made for each."""
    common = {"all2all_backend": backend, "batch_invariant": True}
    plain, balanced = (make_layer(name, **common, batch_balance=choice) for choice in ("off", ALWAYS))
    if moved:
        slots = [[0, 1, 2, 3, 0, 4, 5, 6, 7, 8, 9, 5]]
        for layer in (plain, balanced):
            manager = EPLBManager([layer], EplbConfig(planner="thread", asynchronous=False))
            manager.rearrange(torch.tensor(slots))
            manager.close()
    copies: dict[str, list[int]] = {}
    for batch in BATCHES:
        rows, weights, ids = batch_of(rank, batch, plain.moe_config.in_dtype)
        expected = plain(rows, topk_weights=weights, topk_ids=ids)
        with stages.listening(listener := Copies()):
            output = balanced(rows, topk_weights=weights, topk_ids=ids)
        assert torch.equal(output, expected), (batch, (output - expected).abs().max())
        copies[batch] = listener.found
    if balanced.eplb_state is not None:
        assert torch.equal(balanced.eplb_state.expert_load_view, plain.eplb_state.expert_load_view)
    return copies


def check_copies(results: list[dict[str, list[int]]]) -> None:
    first, *others = results
    assert all(other == first for other in others)
    assert sum(first["one expert"]) > 0 == sum(first["nothing"])


@pytest.mark.parametrize("world_size, backend, name", [
    *((2, backend, "EPLB") for backend in BACKENDS),
    *((2, "all_to_all", name) for name in CASES if name != "EPLB"),
    (2, "batched_all_to_all", "int4"),
    (4, "batched_all_to_all", "plain"),
    (4, "all_to_all", "plain"),
    (4, "two_level", "EPLB"),
])  # fmt: skip
def test_the_same_bits_as_without(world_size: int, backend: str, name: str) -> None:
    check_copies(ranks(world_size).run(compare, backend, name, False))


def test_on_top_of_a_placement_that_was_planned() -> None:
    check_copies(ranks(2).run(compare, "all_to_all", "EPLB", True))


def few_experts(rank: int, world_size: int, name: str, num_experts: int, cost: float | None) -> list[int]:
    options = {"num_experts": num_experts, "top_k": 1, "all2all_backend": "all_to_all", "batch_invariant": True}
    many_slots = BatchBalance(spare_slots=num_experts + 1, min_rows=0, copy_cost_rows=cost)
    plain, balanced = (make_layer(name, **options, batch_balance=choice) for choice in ("off", many_slots))
    rows = torch.randn(400 + rank, K).to(plain.moe_config.in_dtype)
    ids, weights = torch.zeros(len(rows), 1, dtype=torch.int32), torch.ones(len(rows), 1)
    with stages.listening(listener := Copies()):
        output = balanced(rows, topk_weights=weights, topk_ids=ids)
    assert torch.equal(output, plain(rows, topk_weights=weights, topk_ids=ids))
    return listener.found


@pytest.mark.parametrize("cost", [0.0, None])
@pytest.mark.parametrize("num_experts", [1, 2])
@pytest.mark.parametrize("name", ["plain", "bf16 with biases", "int4"])
def test_ranks_without_experts_take_copies(name: str, num_experts: int, cost: float | None) -> None:
    first, *others = ranks(4).run(few_experts, name, num_experts, cost)
    assert first[0] > 1
    assert all(other == first for other in others)


class Sink(MetricsSink):
    """Sums what is put."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()

    def put(self, metric: Metric, value: float, **labels: str) -> None:
        self.sums[metric.name] += value


def without_invariance(rank: int, world_size: int) -> None:
    for options in ({}, {"top_k": 1}, {"params_dtype": torch.bfloat16}):
        plain, balanced = (make_layer("plain", **options, batch_balance=choice) for choice in ("off", ALWAYS))
        rows, weights, ids = batch_of(rank, "very skewed", plain.moe_config.in_dtype)
        weights, ids = weights[:, : plain.top_k], ids[:, : plain.top_k]
        expected = plain(rows, topk_weights=weights, topk_ids=ids)
        with LayerMonitor(sink := Sink(), rank=rank, sample_every=1):
            output = balanced(rows, topk_weights=weights, topk_ids=ids)
        assert relative_error(output, expected) < tolerance(plain.moe_config.in_dtype)
        # One row makes a sum of its own, wherever it is computed.
        assert plain.top_k > 1 or torch.equal(output, expected)
        assert sink.sums["moe_ep_batch_copies_total"] > 0 < sink.sums["moe_ep_batch_copy_bytes_total"]
        assert sink.sums["moe_ep_batch_balance_seconds"] > 0 < sink.sums["moe_ep_batch_copy_seconds"]


def test_sums_differ_by_rounding_and_copies_are_counted() -> None:
    ranks(2).run(without_invariance)


def when_it_pays(rank: int, world_size: int) -> None:
    rows, weights, ids = batch_of(rank, "very skewed", torch.float32)
    for choice, expected in (("auto", 0), (BatchBalance(min_rows=181), 0), (BatchBalance(min_rows=180), 1)):
        layer = make_layer("plain", batch_balance=choice, all2all_backend="all_to_all")
        with stages.listening(listener := Copies()):
            layer(rows, topk_weights=weights, topk_ids=ids)
        assert len(listener.found) == expected  # of small experts a copy takes longer than their rows
    balancer, gpu = make_layer("plain", batch_balance="auto").balancer, torch.device("cuda")
    # On a GPU that plans itself, rows that take its experts 100 times as long as the plan, or half as many.
    row_s = 6 * layer.moe_config.hidden_dim * layer.moe_config.intermediate_size_per_partition / 650e12
    probed, always = thresholds = balancer.thresholds(gpu, on_device=True)
    assert [probed * row_s, always * row_s] == pytest.approx([50 * 28e-6, 100 * 28e-6], rel=0.001)
    assert balancer.thresholds(gpu, on_device=False) is None
    assert balancer.takes(always, thresholds) and not balancer.takes(probed - 1, thresholds)
    # Between them one batch of 16 is, and those that follow one with copies.
    assert [balancer.takes(probed, thresholds) for _ in range(33)] == [n % 16 == 0 for n in range(33)]
    balancer.had_copies = True
    assert all(balancer.takes(always - 1, thresholds) for _ in range(5))
    expensive = make_layer("plain", batch_balance=BatchBalance(min_rows=0, copy_cost_rows=1e6))
    with stages.listening(listener := Copies()):
        expensive(rows, topk_weights=weights, topk_ids=ids)
    assert sum(listener.found) == 0


def what_the_last_batch_had(rank: int, world_size: int) -> None:
    layer = make_layer("plain", batch_balance=BatchBalance(min_rows=0), all2all_backend="all_to_all")
    found = []
    for kind, cost in (("very skewed", 0), ("even", 1e6), ("one expert", 0)):
        rows, weights, ids = batch_of(rank, kind, torch.float32)
        layer.balancer.options = BatchBalance(min_rows=0, copy_cost_rows=cost)
        layer(rows, topk_weights=weights, topk_ids=ids)
        found.append(layer.balancer.had_copies)
    assert found == [True, False, True]


def test_all_ranks_know_whether_the_last_batch_had_copies() -> None:
    ranks(2).run(what_the_last_batch_had)


class OpensTogether(RankExchange):
    """An exchange whose `open` is a collective step, as where peers keep addresses."""

    opens_together = True

    def __init__(self, ranks: RankGroup) -> None:
        super().__init__(ranks)
        self.group = ranks.group

    def open(self, resident: Sequence[torch.Tensor], scratch: Sequence[torch.Tensor], num_slots: int) -> Any:
        gather_texts("addresses of experts", "", self.group)
        return super().open(resident, scratch, num_slots)


def replace_on_rank_0(rank: int, world_size: int, backend: str, opens_together: bool) -> list[bool]:
    """Rank 0 alone gets other weights at other addresses; returns whether the batches that follow are balanced."""
    made = mock.patch.object(AllToAllPrepareFinalize, "batch_exchange", lambda self: OpensTogether(self.ranks))
    with made if opens_together else nullcontext():
        plain, balanced = (
            make_layer("plain", all2all_backend=backend, batch_invariant=True, batch_balance=choice)
            for choice in ("off", ALWAYS)
        )
        rows, weights, ids = batch_of(rank, "very skewed", torch.float32)
        for number in range(3):
            expected = plain(rows, topk_weights=weights, topk_ids=ids)
            assert torch.equal(balanced(rows, topk_weights=weights, topk_ids=ids), expected)
            assert balanced.balancer.had_copies
            if rank == 0 and number == 0:
                for layer in (plain, balanced):
                    layer.w2_weight.data = layer.w2_weight.data * 2
            elif rank == 0:
                balanced.forget_kernels()
    # Batches between the two limits are balanced after copies, and to probe.
    balancer = balanced.balancer
    after_copies = [balancer.takes(1, Thresholds(1, 2)) for _ in range(3)]
    balancer.had_copies = False
    return [*after_copies, *(balancer.takes(1, Thresholds(1, 2)) for _ in range(20))]


@pytest.mark.parametrize("backend, opens_together", [
    ("all_to_all", False), ("batched_all_to_all", False), ("all_to_all", True),
])  # fmt: skip
def test_one_rank_may_replace_its_weights(backend: str, opens_together: bool) -> None:
    first, second = ranks(2).run(replace_on_rank_0, backend, opens_together)
    assert first == second and first[:3] == [True] * 3 and sum(first[3:]) == 1


def go_on_over_other_ranks(rank: int, world_size: int) -> None:
    common = {"all2all_backend": "all_to_all", "batch_invariant": True}
    plain, balanced = (make_layer("EPLB", **common, batch_balance=choice) for choice in ("off", ALWAYS))
    rows, weights, ids = batch_of(rank, "one expert", torch.float32)
    expected = plain(rows, topk_weights=weights, topk_ids=ids)
    for group in (dist.group.WORLD, dist.new_group()):
        slots = balanced.eplb_state.physical_to_logical_map.tolist()
        balanced.regroup(balanced.parallel_config, group, slots)
        assert not balanced.balancer.had_copies
        assert torch.equal(balanced(rows, topk_weights=weights, topk_ids=ids), expected)
        assert balanced.balancer.had_copies


def test_a_layer_goes_on_over_other_ranks() -> None:
    ranks(2).run(go_on_over_other_ranks)


def test_small_batches_and_expensive_copies_are_left_alone() -> None:
    ranks(2).run(when_it_pays)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="batch_balance is 'on'"):
        make_layer("plain", batch_balance="on", ep_size=1)
    with pytest.raises(ValueError, match="spare_slots"):
        BatchBalance(spare_slots=0)
    with pytest.raises(ValueError, match="copy_cost_rows"):
        BatchBalance(copy_cost_rows=-1.0)

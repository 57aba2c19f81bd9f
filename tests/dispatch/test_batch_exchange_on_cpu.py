"""The kernels that balance a batch, on a CPU, their threads in random order: counts, plans, rows and copies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moe_ep.dispatch.nvshmem import arena, batch_exchange
from moe_ep.dispatch.nvshmem.backend import FailureRecord
from moe_ep.dispatch.nvshmem.batch_exchange import DeviceExchange
from moe_ep.distributed.failure_detection import FailureDetector
from moe_ep.eplb.batch_rounds import RankPlan, place_rows_reference, rank_plan_reference
from moe_ep.errors import DispatchTimeoutError
from moe_ep.expert_map import expert_owner_table
from moe_ep.kernels import batch_plan, jit
from tests.dispatch.emulated_gpu import COMPILER, Session, compile_kernels

# The first rank has one slot more, and there are replicas. Blocks have few threads, so that rows need several.
E, P, R, SPARE = 9, 13, 4, 2
THREADS = {"batch_counts": 64, "batch_plan": 512, "batch_rows": 32, "batch_copies": 32, "batch_release": 32}
# Bytes of an expert's tensors: whole vectors, a tail, and rows that do not begin at multiples of 16.
PARTS = (4096, 1040, 24, 7)
OWNERS = expert_owner_table(R, P).tolist()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    sizes = {"EXPERTS": E, "SLOTS": P, "RANKS": R, "SPARE": SPARE, "IDS_64": 0}
    return compile_kernels(tmp_path_factory.mktemp("emulated"), THREADS, **sizes)


def draw(seed: int) -> tuple[list[torch.Tensor], torch.Tensor, int]:
    """Ids of each rank, int32 `[T, 2]`, slots `[P]`, and what a copy costs."""
    torch.manual_seed(seed)
    popularity = torch.arange(1, E + 1)[torch.randperm(E)].double() ** -[0.0, 0.5, 1.2][seed % 3]
    tokens = [[40, 3, 17, 60], [0, 70, 0, 0], [33, 33, 33, 33]][seed % 4 % 3]
    ids = [torch.multinomial(popularity.expand(max(n, 1), E), 2)[:n].int() for n in tokens]
    for of_rank in ids:
        of_rank[torch.rand(of_rank.shape) < 0.1] = -1
        if seed % 5 == 2:
            of_rank[:, 0], of_rank[:, 1] = seed % E, E + 1
    if seed % 3 == 1:  # not where wide loads may begin
        ids = [torch.cat([of_rank.new_zeros(1, 2), of_rank])[1:] for of_rank in ids]
    slots = torch.cat([torch.arange(E), torch.randint(-1, E, (P - E,))])
    return ids, slots if seed % 2 else slots[torch.randperm(P)], [0, 0, 3][seed % 3]


class FakeStream:
    """Of work that is queued in one order anyway."""

    def __init__(self, device: Any = None) -> None:
        pass

    def wait_stream(self, other: FakeStream) -> None:
        pass

    def record_event(self) -> None:
        pass

    def wait_event(self, event: None) -> None:
        pass


class Balancing(Session):
    """Ranks that balance batches; each changes its experts once it may."""

    def __init__(self, library: ctypes.CDLL, seed: int, timeout_ns: int = 0) -> None:
        super().__init__(library, R, seed)
        # Numbers of batches begin anew: everything seems to be of the last one.
        words = torch.full((R, batch_exchange.symmetric_bytes(R) // 4), -2, dtype=torch.int32)
        self.memory = words.view(torch.uint8)
        counts = [OWNERS.count(rank) for rank in range(R)]
        self.resident = [[torch.zeros(n, size, dtype=torch.uint8) for size in PARTS] for n in counts]
        self.scratch = [[torch.zeros(SPARE, size, dtype=torch.uint8) for size in PARTS] for _ in range(R)]
        self.copies: list[list[int]] = [[] for _ in range(R)]
        self._held: list[object] = []
        words = [torch.zeros(4 + R, dtype=torch.int32) for _ in range(R)]
        self.records = [FailureRecord(self._ranks(rank), timeout_ns / 1e9, words[rank]) for rank in range(R)]
        self.exchanges = [self._exchange(rank) for rank in range(R)]

    def _ranks(self, rank: int) -> Any:
        # Programs wait, so that others may run meanwhile.
        return SimpleNamespace(
            rank=rank,
            size=R,
            ep_ranks=range(R),
            detector=FailureDetector("", 0, 1),
            wait_for_sizes=lambda name, has_come: None,
        )

    def _exchange(self, rank: int) -> DeviceExchange:
        self.add_memory(rank, self.memory[rank])
        pointers = [memory.data_ptr() for memory in self.memory]
        region = arena.Region(self.memory[rank], pointers, tuple(range(R)))
        device = torch.device("cpu")
        symmetric: Any = SimpleNamespace(device=device, order=nullcontext(), reserve=lambda *_: region)
        exchange = DeviceExchange(symmetric, self._ranks(rank), torch.zeros(2).int(), self.records[rank])
        exchange.epoch = (1 << 32) - 2
        return exchange

    def fill(self, rank: int, batch: int) -> None:
        """Experts with bytes of their own in each batch."""
        generator = torch.Generator().manual_seed(100 * batch + rank)
        for part in self.resident[rank]:
            part.copy_(torch.randint(0, 256, part.shape, generator=generator))

    def program(self, rank: int, seeds: list[int]) -> Iterator[None]:
        exchange, zeros = self.exchanges[rank], torch.zeros

        def load(source: jit.KernelSource, _: torch.device) -> Any:
            def launch(params: Any, grid: tuple[int, ...], threads: int) -> None:
                self.queue_kernel(rank, source.entry, params, grid[0])

            return SimpleNamespace(launch=launch)

        def peers(gather: Any, its_rank: int, tensors: Any) -> Any:
            return SimpleNamespace(addresses=[[part.data_ptr() for part in parts] for parts in self.resident])

        patches = [
            patch.multiple(batch_exchange, load_kernel=load, PeerMemory=peers),
            patch.multiple(torch.cuda, Stream=FakeStream, current_stream=FakeStream, stream=nullcontext),
            patch.object(torch, "zeros", lambda *args, pin_memory=False, **options: zeros(*args, **options)),
            patch.object(batch_exchange.weakref, "finalize", lambda *args: SimpleNamespace(atexit=True)),
        ]

        def steps() -> Iterator[None]:
            copies = exchange.open(self.resident[rank], self.scratch[rank], P)
            self._held.append(copies)
            self.fill(rank, 0)
            for batch, seed in enumerate(seeds):
                of_ranks, slots, cost = draw(seed)
                ids = of_ranks[rank]
                counts = exchange.gather(ids, E)
                plan, params, held = batch_plan.prepare_plan(counts, slots, rank, SPARE, cost)
                self.queue_kernel(rank, "batch_plan", params, 1, early=True)
                out, params, of_rows = batch_plan.prepare_rows(ids, plan)
                self._held += [counts, plan, held, out, of_rows]
                if ids.numel():
                    blocks = -(-ids.numel() // THREADS["batch_rows"])
                    self.queue_kernel(rank, "batch_rows", params, blocks, early=True)
                pending = copies.start(plan.sources)
                while copies.copies_of(exchange.epoch) is None and not self.has_failed(rank):
                    yield
                copied = pending.receive()
                arguments = (rank, batch, seed, counts, plan, out)
                self.queue_host(rank, lambda arguments=arguments: self.check(*arguments))
                copied.release()
                self.queue_host(rank, lambda batch=batch: self.fill(rank, batch + 1) is None)
                self.copies[rank].append(copied.total)
                yield

        running = steps()
        while True:
            for each in patches:
                each.start()
            try:
                next(running)
            except (StopIteration, DispatchTimeoutError):
                return
            finally:
                for each in patches:
                    each.stop()
            yield

    def has_failed(self, rank: int) -> bool:
        return bool(self.records[rank].words[0])

    def check(self, rank: int, batch: int, seed: int, counts: torch.Tensor, plan: RankPlan, out: torch.Tensor) -> bool:
        of_ranks, slots, cost = draw(seed)
        known = torch.stack([ids[(ids >= 0) & (ids < E)].long().bincount(minlength=E) for ids in of_ranks])
        assert torch.equal(counts, known.int()), (seed, rank)
        expected = rank_plan_reference(counts, slots, rank, SPARE, cost)
        for name, one, other in zip(plan._fields, plan, expected, strict=True):
            assert torch.equal(one, other), (seed, rank, name)
        assert torch.equal(out, place_rows_reference(of_ranks[rank], plan)), (seed, rank)
        for scratch, slot in enumerate(plan.sources[rank].tolist()):
            if slot >= 0:
                owner = OWNERS[slot]
                local, generator = slot - OWNERS.index(owner), torch.Generator().manual_seed(100 * batch + owner)
                for part, size in enumerate(PARTS):
                    known = torch.randint(0, 256, (OWNERS.count(owner), size), generator=generator)
                    assert torch.equal(self.scratch[rank][part][scratch].long(), known[local]), (seed, rank, slot, part)
        return True


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_batches_in_a_row(library: ctypes.CDLL) -> None:
    num_copies = 0
    for seed in range(0, 24, 4):
        session = Balancing(library, seed)
        for rank in range(R):
            session.add_host(session.program(rank, list(range(seed, seed + 4))))
        assert session.run(), f"seed {seed} does not end"
        assert all(copies == session.copies[0] and len(copies) == 4 for copies in session.copies), seed
        assert not any(map(session.has_failed, range(R)))
        num_copies += sum(session.copies[0])
    assert num_copies > 24


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_a_rank_that_comes_too_late_is_missed(library: ctypes.CDLL) -> None:
    session = Balancing(library, 0, timeout_ns=200_000)
    session.queue_host(1, lambda: session.has_failed(0))
    for rank in range(R):
        session.add_host(session.program(rank, [1, 2]))
    assert session.run()
    with pytest.raises(DispatchTimeoutError, match="rank 1"):
        session.records[0].check()


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_plans_of_more_slots_than_lanes(tmp_path: Path) -> None:
    num_experts, num_slots, num_ranks = 80, 90, 2
    sizes = {"EXPERTS": num_experts, "SLOTS": num_slots, "RANKS": num_ranks, "SPARE": SPARE, "IDS_64": 0}
    library = compile_kernels(tmp_path, {"batch_plan": 512}, **sizes)
    num_copies = 0
    for seed in range(6):
        torch.manual_seed(seed)
        popularity = torch.arange(1, num_experts + 1)[torch.randperm(num_experts)].double() ** -(seed % 3)
        counts = torch.stack([torch.multinomial(popularity, 600, replacement=True) for _ in range(num_ranks)])
        counts = torch.stack([of_rank.bincount(minlength=num_experts) for of_rank in counts]).int()
        slots = torch.cat([torch.arange(num_experts), torch.randint(-1, num_experts, (num_slots - num_experts,))])
        slots = slots[torch.randperm(num_slots)] if seed % 2 else slots
        session = Session(library, 1, seed)
        plan, params, held = batch_plan.prepare_plan(counts, slots, 1, SPARE, 0)
        session.queue_kernel(0, "batch_plan", params, 1)
        assert session.run() and held
        assert all(map(torch.equal, plan, rank_plan_reference(counts, slots, 1, SPARE, 0))), seed
        num_copies += int((plan.sources >= 0).sum())
    assert num_copies > 0


SIZES = [(256, 288, 32, 2), (16, 16, 2, 1)]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_kernels_compile_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="the bindings of NVRTC are not installed")
    sources = [batch_plan.rows_source(257, 8, torch.int64)]
    for sizes in SIZES:
        assert batch_plan.plan_fits(*sizes)
        sources.append(batch_plan.plan_source(*sizes))
    for name in batch_exchange.THREADS:
        sources.append(batch_exchange.kernel_source(name, 8, 257))
    for source in sources:
        assert jit.compile_only(source, arch)[1:3] == (0, 0), source

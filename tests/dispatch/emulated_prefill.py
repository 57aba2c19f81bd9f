"""Prefill's kernels on a CPU, as emulated_gpu.py has them: the backend itself launches them, on the memory of several
ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from moe_ep.config import FusedMoEQuantConfig
from moe_ep.dispatch.batch import wire_dtype
from moe_ep.dispatch.nvshmem import arena, high_throughput
from moe_ep.dispatch.nvshmem.high_throughput import Block, Layout
from moe_ep.dispatch.rank_group import Placement
from moe_ep.dispatch.torch_distributed import owners_of
from moe_ep.distributed.failure_detection import FailureDetector
from moe_ep.errors import DispatchTimeoutError
from moe_ep.kernels.align import sort_slots_by_expert
from moe_ep.kernels.arrival import ArrivalParams
from moe_ep.kernels.quantize import quantize_rows, row_values, split_rows
from moe_ep.modular_kernel.contracts import Dispatched, Pending
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceContiguous, TopKWeightAndReduceNoOP
from tests.dispatch.backend_cases import (
    Case,
    Setting,
    as_tuple,
    check_standard,
    dispatch_args,
    expected_output,
    make_setting,
    prepare_args,
    run_experts,
)
from tests.dispatch.emulated_gpu import Session, compile_kernels

# More than one group of columns with a scale, the last not full.
HIDDEN, TOPK, CAPACITY = 272, 4, 7
# Of batches that overlap experts: a result has two parts.
LONG = 1040
WARPS = 4
# A warp of the first kernel has a lane for each warp.
THREADS = {"plan": 1024, **dict.fromkeys(("dispatch", "ids", "rows", "combine"), 32 * WARPS)}
# Kernels that stand for experts (emulated/experts.cu).
EXPERTS_THREADS = 64
NUM_EXPERTS = 7
_POISON = 0x7F
# Built from the sources of `combine` and `dispatch`: for slots, and for rows that experts read in 8 bits.
_SLOTS, _CODES = "combine_slots", "dispatch_codes"


def compile_prefill(folder: Path, layout: Layout, dtype: torch.dtype = torch.bfloat16) -> ctypes.CDLL:
    """A batch's kernels, and beside those that overlap experts also a kernel that stands for these."""
    # Without the device library, which is emulated.
    sources = replace(layout, device_api=False).sources(dtype)
    defines = {name: int(value) for name, value in sources["plan"].defines} | {"DEVICE_API": int(layout.device_api)}
    threads = {f"high_throughput_{name}": THREADS[name.split("_")[0]] for name in layout.kernels}
    if layout.overlaps:
        threads["experts"] = EXPERTS_THREADS
    for name in {_SLOTS, _CODES}.intersection(layout.kernels):
        redefined = dict(sources[name].defines)
        redefined |= {"DEVICE_API": str(defines["DEVICE_API"]), sources[name].entry: f"high_throughput_{name}"}
        (folder / f"high_throughput_{name}.cu").write_text(
            "".join(f"#undef {key}\n#define {key} {value}\n" for key, value in redefined.items())
            + f'#include "{sources[name].path.name}"\n'
        )
    return compile_kernels(folder, threads, **defines)


def layout_of(code_dtype: torch.dtype | None = None, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Layout:
    """That of two ranks."""
    return Layout(
        num_ranks=2,
        capacity=CAPACITY,
        topk=TOPK,
        code_dtype=code_dtype,
        f32_results=dtype is torch.float16,
        **{"hidden_size": LONG if more.get("overlaps") else HIDDEN, **more},
    )


class ExpertsParams(ctypes.Structure):
    """Params of emulated/experts.cu."""

    _fields_ = (
        ("arrival", ArrivalParams),
        *((name, ctypes.c_void_p) for name in ("rows", "sorted", "num_tokens", "numbers", "hidden", "slots", "sync")),
        ("num_experts", ctypes.c_int),
    )


@dataclass
class Step:
    """A batch of one rank.

    Attributes:
        known_rows: rows that are handed over without a wait for their number; None where it is waited for.
        has_arrived: its rows, ids and weights were as they should be when experts took them.
        kept: memory that its kernels use.
    """

    setting: Setting
    output: torch.Tensor
    known_rows: int | None
    has_arrived: bool = False
    kept: Any = None

    @property
    def is_right(self) -> bool:
        return self.has_arrived and torch.equal(self.output, expected_output(self.setting, len(self.setting.inputs)))


class Prefill(Session):
    """Ranks with a backend each.

    Args:
        layout: with batches in flight of the session's own. Where it overlaps, a kernel stands for experts.
        timeout_ns: of a wait, by the emulated clock; 0 for none.

    Attributes:
        batches_in_flight: as of the backends.
        reads_codes: experts read rows as they are sent in 8 bits.
        replays: as in CUDA graphs: hosts wait for no number of rows, and do not look whether something has failed.
        steps: of each rank, as far as they were dispatched.
        stalls: by rank and kernel, what the next launch of it comes behind.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        layout: Layout,
        seed: int,
        timeout_ns: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        num_ranks, self.passed_dtype = layout.num_ranks, layout.passed_dtype
        super().__init__(library, num_ranks, seed, blocks=3)  # all of a kernel, as the backend must have them
        self.dtype, self.hidden_size = dtype, layout.hidden_size
        self.code_dtype, self.timeout_ns = layout.code_dtype, timeout_ns
        self.num_sms, self.replays = self.random.choice([1, 2, 3]), self.random.random() < 0.5
        self.replays |= self.passed_dtype is not None  # a host that passes codes on would wait for their number at once
        self.batches_in_flight = self.random.choice([1, 1, 2])
        self.reads_codes = self.code_dtype is not None and self.random.random() < 0.5
        self._combines_at_once = self.random.choices([False, True], k=100)
        self.layout = replace(layout, batches_in_flight=self.batches_in_flight)
        self.memory = torch.full((num_ranks, self.layout.symmetric_bytes), _POISON, dtype=torch.uint8)
        for rank, memory in enumerate(self.memory):
            self.add_memory(rank, memory)
        # Numbers of batches pass 32 bits; flags of rows may have been left by one whose number has the same 32.
        first = self.random.choice([0, (1 << 32) - 2])
        self._fill("counts", torch.int32, ctypes.c_int32(first).value)
        self._fill("done", torch.int32, ctypes.c_int32(first).value)
        self._fill("row_flags", torch.int64, first + 2 - (1 << 32))
        self._fill("result_flags", torch.int64, first + 2 - (1 << 32))
        with patch.object(torch, "zeros", _unpinned(torch.zeros)), patch.object(torch.cuda, "synchronize"):
            self.backends = [self._backend(rank, first) for rank in range(num_ranks)]
        self.steps: list[list[Step]] = [[] for _ in range(num_ranks)]
        self.stalls: dict[tuple[int, str], Callable[[], bool]] = {}

    def _fill(self, name: str, dtype: torch.dtype, value: int) -> None:
        for batch in range(self.batches_in_flight):
            begin = batch * self.layout.batch_bytes + self.layout.offsets[name]
            self.memory[:, begin : begin + self.layout.sizes[name]].view(dtype).fill_(value)

    def _backend(self, rank: int, first: int) -> Any:
        """One as its constructor leaves it, that has had the batch of number `first`."""
        backend: Any = high_throughput.HighThroughputPrepareFinalize.__new__(
            high_throughput.HighThroughputPrepareFinalize
        )
        config = make_setting(self.draw_case(), rank, self.num_ranks).config
        ranks: Any = SimpleNamespace(
            rank=rank, size=self.num_ranks, ep_ranks=range(self.num_ranks), detector=FailureDetector("", 0, 1)
        )
        ranks.wait_for_sizes = lambda name, have_come: None  # programs wait, so that others may run meanwhile
        order: Any = nullcontext()
        order.device = torch.device("cpu")
        # Of ranks that the device library puts to, none has the others' addresses.
        is_mapped = [each == rank or not self.layout.device_api for each in range(self.num_ranks)]
        pointers = [memory.data_ptr() * mapped for memory, mapped in zip(self.memory, is_mapped, strict=True)]
        region = arena.Region(self.memory[rank], pointers, tuple(range(self.num_ranks)))
        symmetric: Any = SimpleNamespace(device=order.device, order=order, reserve=lambda *_: region)
        block = Block(symmetric, self.layout, ranks, config.in_dtype)
        block.start(first)
        for parts in block.batches:
            parts.common.timeout_ns = self.timeout_ns
            parts.slots.fill_(1)  # not where anything lies, but in bounds
            parts.rows.view(torch.uint8).fill_(_POISON)
        backend.moe_config, backend.quant_config, backend.ranks = config, None, ranks
        backend.placement = Placement(owners_of(config), rank)
        backend.block = backend.memory = block
        backend.layout, backend.num_sms, backend.exact_rows = self.layout, self.num_sms, not self.replays
        backend.kernels = {name: SimpleNamespace(launch=self._launch(rank, name)) for name in self.layout.kernels}
        backend.overlap_sms = backend.combine_blocks = self.num_sms
        if self.random.random() < 0.5:
            backend.pad_rows()
        if self.replays:
            backend.check = lambda: None
        return backend

    def _launch(self, rank: int, name: str) -> Callable[..., None]:
        def launch(params: Any, grid: tuple[int, ...], threads: int, early: bool = False) -> None:
            stall = self.stalls.pop((rank, name.split("_")[0]), None)
            if stall is not None:
                self.queue_host(rank, stall)
            self.queue_kernel(rank, f"high_throughput_{name}", params, grid[0], early=early)

        return launch

    def draw_case(self) -> Case:
        most = [0, 1, CAPACITY, self.random.randint(0, CAPACITY)]
        passed_dtype = self.random.choice([None, self.passed_dtype])
        return Case(
            tokens=tuple(self.random.choice(most) for _ in range(self.num_ranks)),
            num_experts=NUM_EXPERTS,
            topk=TOPK,
            hidden_size=self.hidden_size,
            dtype=self.dtype,
            routing=self.random.choice(["random", "random", "masked", "any", "one_rank", "none"]),
            capacity=CAPACITY,
            code_dtype=self.code_dtype or passed_dtype,
            whole=self.reads_codes or passed_dtype is not None,
            seed=self.random.randrange(1000),
        )

    def has_failed(self, rank: int) -> bool:
        """As the host finds it."""
        return bool(self.backends[rank].block.record.words[0])

    def missing(self, rank: int) -> list[int]:
        """The ranks that a failed wait of the rank names."""
        words = self.backends[rank].block.record.words
        return words[-self.num_ranks :].nonzero().flatten().tolist()

    def is_told(self, rank: int) -> bool:
        """All that the rank has is right, or it can know that something is not."""
        return self.has_failed(rank) or all(step.is_right for step in self.steps[rank])

    def begin(self, rank: int, cases: Sequence[Case]) -> None:
        """Has the rank's host dispatch and combine batches of those cases, every rank's in one order."""

        def program() -> Iterator[None]:
            opened = []
            for number, case in enumerate(cases):
                opened.append((yield from self._dispatch(rank, case)))
                if len(opened) == self.batches_in_flight or self._combines_at_once[number]:
                    while opened:
                        self._combine(*opened.pop(0))
                yield
            for each in opened:
                self._combine(*each)

        self.add_host(self._until_failure(program()))

    def _until_failure(self, program: Iterator[None]) -> Iterator[None]:
        while True:
            with (
                patch.multiple(high_throughput, THREADS=32 * WARPS, WARPS=WARPS),
                patch.object(torch.cuda, "is_current_stream_capturing", lambda: self.replays),
            ):
                try:
                    next(program)
                except (StopIteration, DispatchTimeoutError):
                    return
            yield

    def _dispatch(self, rank: int, case: Case) -> Generator[None, None, tuple[Any, Step, Dispatched]]:
        backend, setting = self.backends[rank], make_setting(case, rank, self.num_ranks)
        config = FusedMoEQuantConfig(
            dispatch_dtype=self.code_dtype, input_dtype=self.code_dtype if self.reads_codes else None
        )
        rows, routing, config = dispatch_args((*prepare_args(setting, "cpu")[:-1], config))
        routing.most_tokens = self.random.choice([None, max(case.tokens), CAPACITY])
        if case.code_dtype == self.code_dtype:
            pending = backend.dispatch_async(rows, routing, config)
        else:
            assert backend.passes_codes(case.code_dtype)
            codes, scales = split_rows(
                quantize_rows(rows, case.code_dtype, True), self.hidden_size, case.code_dtype, True
            )
            passed = backend.pass_on(Dispatched(rows=codes, row_scales=scales), routing)
            pending = Pending(lambda: None, lambda: passed)
        parts = max(backend.block.batches, key=lambda parts: parts.number)
        known_rows = backend.rows_without_wait(len(rows), routing.most_tokens)
        step = Step(setting, torch.full_like(rows, float("nan")), known_rows)
        self.steps[rank].append(step)
        while known_rows is None and parts.rows_of(parts.number) is None:
            yield
        return backend, step, pending.receive()

    def _combine(self, backend: Any, step: Step, received: Dispatched) -> None:
        if received.arrival is not None:
            self._overlap(backend, step, received)
            return
        # Rows that experts have summed, or their slots.
        leaves_slots = self.layout.sums_slots and self.random.random() < 0.5
        shape = received.topk_ids.shape if leaves_slots else (len(received.rows),)
        results = torch.full((*shape, self.hidden_size), float("nan"), dtype=wire_dtype(self.dtype))
        kind = "contiguous" if leaves_slots else "noop"

        def experts() -> bool:
            rows, scales, _, ids, weights = as_tuple(received)
            count = int((ids >= 0).any(dim=1).sum())
            if scales is not None:
                rows = row_values(rows, scales).to(self.dtype)
            arrived = (rows[:count], None, None, ids[:count], weights[:count])
            try:
                assert len(rows) == (count if step.known_rows is None else step.known_rows)
                assert (ids[count:] == -1).all()
                check_standard(step.setting, arrived, padded=False)
            except (AssertionError, IndexError):
                return True
            step.has_arrived = True
            if count:
                results[:count] = run_experts(step.setting, arrived, kind)[0]
            return True

        self.queue_host(step.setting.rank, experts)
        reduce_impl = TopKWeightAndReduceContiguous() if leaves_slots else TopKWeightAndReduceNoOP()
        backend.combine_async(step.output, results, received, reduce_impl)

    def _overlap(self, backend: Any, step: Step, received: Dispatched) -> None:
        """Sorts the ids that have arrived, and launches experts and combine beside the dispatch of the rows."""
        rank, ids, rows = step.setting.rank, received.topk_ids, received.rows
        experts = [number for number, local in sorted(step.setting.local.items(), key=lambda pair: pair[1])]
        lists = torch.zeros(max(ids.numel(), 1), dtype=torch.int32)
        counts, numbers = torch.zeros(len(experts), dtype=torch.int32), torch.tensor(experts, dtype=torch.int32)
        slots = torch.full((*ids.shape, LONG), float("nan"), dtype=self.dtype)
        hidden = torch.full((max(ids.numel(), 1), LONG), float("nan"), dtype=self.dtype)
        sync = torch.zeros(2 + 2 * len(experts), dtype=torch.int32)
        expert_map = backend.placement.expert_map(ids.device)
        arrival = received.arrival.params
        arrival.leaving = self.random.choice([0, 0, 1])
        pointers = (tensor.data_ptr() for tensor in (rows, lists, counts, numbers, hidden, slots, sync))
        params = ExpertsParams(arrival, *pointers, len(experts))

        def sort() -> bool:
            known = torch.where((ids >= 0) & (ids < len(expert_map)), ids, -1)  # what a failed exchange has left is any
            if ids.numel():
                by_expert, num_tokens = sort_slots_by_expert(known, len(experts), expert_map)
                lists[: len(by_expert)] = by_expert.clamp(max=ids.numel() - 1)
                counts.copy_(num_tokens)
            return True

        step.has_arrived = True  # what comes of the rows is looked at
        step.kept = (params, lists, counts, numbers, hidden, slots, sync)
        self.queue_host(rank, sort)
        if ids.numel():
            received.arrival.start()
            self.queue_kernel(rank, "experts", params, self.random.choice([2, 3]), early=True)
        backend.combine_async(step.output, slots, received, TopKWeightAndReduceContiguous())


def _unpinned(zeros: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.zeros of a machine without GPUs."""
    return lambda *args, pin_memory=False, **options: zeros(*args, **options)

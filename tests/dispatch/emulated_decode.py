"""Decode's kernels on a CPU, as emulated_gpu.py has them: steps of several ranks, and what must come out."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_ep.dispatch.batch import wire_dtype
from moe_ep.dispatch.nvshmem import low_latency
from moe_ep.dispatch.nvshmem.kernels import structure
from moe_ep.dispatch.nvshmem.low_latency import KERNELS, RECEIVE, SEND, BatchLayout, local_indices
from moe_ep.kernels.routing import DeferredTopK
from moe_ep.routing.topk import topk_reference
from tests.dispatch.backend_cases import (
    Case,
    Setting,
    expected_of_slots,
    expected_output,
    expert,
    make_setting,
)
from tests.dispatch.emulated_gpu import Session, compile_kernels

HIDDEN, TOPK, CAPACITY = 128, 4, 5
GROUP_THREADS = 64
NUM_ROUTED = 7  # experts where the dispatch chooses them
MOST_EXPERTS = 8  # of a rank
# Packets of 8-bit rows are put together by so many.
QUANTIZING_THREADS = 256


def compile_decode(
    folder: Path,
    num_ranks: int,
    code_dtype: torch.dtype | None = None,
    slot_results: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    routed: bool = False,
) -> ctypes.CDLL:
    """Both kernels, with packets and flags, and experts that combine where they can; `routed`: the dispatch chooses
    experts from ROUTER's logits."""
    defines = {"HIDDEN": HIDDEN, "TOPK": TOPK, "RANKS": num_ranks, "EIGHT_BIT": int(code_dtype is not None)}
    defines |= {"INT8": int(code_dtype == torch.int8), "ACT_BF16": int(dtype is torch.bfloat16)}
    defines["SLOT_RESULTS"] = int(slot_results)
    if routed:
        defines |= {"ROUTED": 1, **{name: int(value) for name, value in choice_of(torch.empty(1, NUM_ROUTED)).defines}}
    threads = GROUP_THREADS if code_dtype is None else QUANTIZING_THREADS
    names = (*KERNELS, "layer") if can_combine(code_dtype, slot_results, dtype) else KERNELS
    return compile_kernels(folder, dict.fromkeys(names, threads), EXPERTS=MOST_EXPERTS, **defines)


def can_combine(code_dtype: torch.dtype | None, slot_results: bool, dtype: torch.dtype) -> bool:
    """Whether experts may combine batches of such rows."""
    return code_dtype is None and not slot_results and dtype is torch.bfloat16


def choice_of(logits: torch.Tensor) -> DeferredTopK:
    """The choice that the dispatch makes of a rank's logits `[T, NUM_ROUTED]`."""
    return DeferredTopK(
        logits, TOPK, scoring_func="sigmoid", renormalize=True, num_expert_group=1, topk_group=1,
        e_score_correction_bias=None, routed_scaling_factor=1.0,
    )  # fmt: skip


@dataclass
class Batch:
    """A step of one rank: what its kernels read and write."""

    setting: Setting
    by_reference: bool
    owners: torch.Tensor
    locals: torch.Tensor
    output: torch.Tensor
    counts: torch.Tensor
    row_ids: torch.Tensor
    rows: torch.Tensor
    results: torch.Tensor
    weights: torch.Tensor
    positions: torch.Tensor
    dequantized: torch.Tensor
    slot_results: bool
    choice: DeferredTopK | None

    @property
    def global_ids(self) -> list[int]:
        """Of this rank's experts."""
        owner = self.setting.owner
        return [expert_id for expert_id in sorted(owner) if owner[expert_id] == self.setting.rank]

    @property
    def is_right(self) -> bool:
        if self.choice is not None and not torch.equal(
            self.choice.topk_ids, self.setting.inputs[self.setting.rank].ids
        ):
            return False
        if self.slot_results:
            return torch.equal(self.output, expected_of_slots(self.setting))
        return torch.equal(self.output, expected_output(self.setting, len(self.setting.inputs)))


class Decode(Session):
    """Ranks that decode.

    What kernels leave unwritten is 0 where it is an index and NaN elsewhere, so that even a wrong one stays in bounds.

    Args:
        timeout_ns: of a wait, by the emulated clock; 0 for none.
        blocks: of each kernel, all at a time; None draws them, and how many of them run at a time.
        code_dtype: of rows on the wire.
        slot_results: as the layout has it.
        dtype: of rows. Results of f16 rows are 2**16 times as large as those of bf16 ones, and weights as much smaller.
        routed: of compile_decode.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        num_ranks: int,
        seed: int,
        timeout_ns: int = 0,
        blocks: int | None = None,
        code_dtype: torch.dtype | None = None,
        slot_results: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        routed: bool = False,
    ) -> None:
        super().__init__(library, num_ranks, seed, blocks)
        self.routed = routed
        self.dtype, self.gain = dtype, 2.0**16 if dtype is torch.float16 else 1.0
        self.timeout_ns, self._blocks = timeout_ns, blocks
        self.layout = BatchLayout(
            num_ranks=num_ranks,
            capacity=CAPACITY,
            hidden_size=HIDDEN,
            topk=TOPK,
            code_dtype=code_dtype,
            slot_results=slot_results,
            f32_results=dtype is torch.float16,
        )
        self._may_combine = can_combine(code_dtype, slot_results, dtype)
        self.row_packet_tokens = self.random.choice([0, 1, self.layout.row_packet_tokens])
        if self.layout.is_quantized:  # whose rows are packets whatever their number
            self.row_packet_tokens = self.layout.row_packet_tokens
        # Batches are counted anew behind 2^32, and old flags written again behind each 2^20.
        first = self.random.choice([1, (1 << 20) - 1, -2])
        words = self.layout.batch_bytes // 4
        self.memory = torch.full((num_ranks, words), first - 1, dtype=torch.int32).view(torch.uint8)
        for rank, memory in enumerate(self.memory):
            self.add_memory(rank, memory)
        self.counters = torch.full((num_ranks, 3), first << 32)
        self._published = torch.zeros(num_ranks, num_ranks * CAPACITY * TOPK * HIDDEN // 2, dtype=torch.int64)
        self.status = torch.tensor([[0, 2**num_ranks - 1]] * num_ranks, dtype=torch.int32)
        self.record = torch.zeros(num_ranks, 4 + num_ranks, dtype=torch.int32)
        self.batches: list[Batch] = []
        self._kept: list[torch.Tensor] = []

    def has_failed(self, rank: int) -> bool:
        """As the host finds it."""
        return bool(self.record[rank, 0])

    def slow_weights(self, source: int, rank: int, pause_ns: int) -> None:
        """From here on `source` stores the lines with router weights on `rank` behind a pause."""
        layout = self.layout
        part = layout.sizes["meta"] // (2 * self.num_ranks)
        for turn in range(2):
            begin = layout.offsets["meta"] + (turn * self.num_ranks + source) * part
            first = ctypes.c_void_p(self.memory[rank, begin:].data_ptr())
            self.library.slow_lines(first, ctypes.c_long(part), layout.meta_lines, 1, ctypes.c_long(pause_ns))

    def draw_case(self) -> Case:
        return Case(
            tokens=tuple(self.random.randint(0, CAPACITY) for _ in range(self.num_ranks)),
            num_experts=NUM_ROUTED if self.routed else self.random.choice([4, 5, 7]),
            topk=TOPK,
            hidden_size=HIDDEN,
            dtype=self.dtype,
            routing="random" if self.routed else self.random.choice(["random", "random", "masked", "any", "one_rank"]),
            placement=self.random.choice(["linear", "round_robin"]),
            capacity=CAPACITY,
            code_dtype=self.layout.code_dtype,
            seed=self.random.randrange(1000),
        )

    def queue_step(self, case: Case, by_reference: bool, experts_wait: Callable[[int], bool] | None = None) -> None:
        """Dispatch, experts and combine of all ranks; experts of a rank begin when experts_wait(rank) says so.

        Some ranks' experts combine the batch, where rows of all tokens are packets; their kernel comes up while the
        dispatch runs, unless they wait.
        """
        waits = experts_wait or (lambda _: True)
        for rank in range(self.num_ranks):
            batch = self._make_batch(make_setting(case, rank, self.num_ranks), by_reference)
            combines = self.combines(rank)
            self._queue_dispatch(batch, is_listed=not combines)
            if combines:
                if experts_wait is not None:
                    self.queue_host(rank, lambda rank=rank: experts_wait(rank))
                self._queue_layer(batch)
                self.batches.append(batch)
                continue
            self.queue_host(rank, lambda batch=batch: waits(batch.setting.rank) and self._run_experts(batch))
            self._queue_combine(batch)
            self.batches.append(batch)

    def combines(self, rank: int) -> bool:
        """Whether this rank's experts combine the next batch."""
        fits = self._may_combine and self.row_packet_tokens == self.layout.row_packet_tokens
        return fits and self.random.random() < 0.6

    def _make_batch(self, setting: Setting, by_reference: bool) -> Batch:
        num_local, most = setting.config.num_local_experts, self.num_ranks * CAPACITY
        choice, weights = None, setting.inputs[setting.rank].weights / self.gain
        if self.routed:
            setting, choice = _with_logits(setting)
            weights = choice.topk_weights
        owners = torch.tensor([setting.owner[i] for i in range(setting.case.num_experts)], dtype=torch.int32)
        return Batch(
            setting=setting,
            by_reference=by_reference,
            owners=owners,
            locals=local_indices(owners),
            output=torch.full_like(setting.inputs[setting.rank].rows, float("nan")),
            counts=torch.zeros(num_local, dtype=torch.int32),
            row_ids=torch.zeros(num_local, most, dtype=torch.int32),
            rows=torch.full((num_local, most, HIDDEN), float("nan"), dtype=self.dtype),
            results=torch.full((num_local, most, HIDDEN), float("nan"), dtype=wire_dtype(self.dtype)),
            weights=weights,
            positions=torch.zeros(most, TOPK, dtype=torch.int32),
            dequantized=torch.full((most, HIDDEN), float("nan"), dtype=torch.bfloat16),
            slot_results=self.layout.slot_results,
            choice=choice,
        )

    def _queue_dispatch(self, batch: Batch, is_listed: bool) -> None:
        rows = batch.setting.inputs[batch.setting.rank].rows
        out = None if batch.by_reference else batch.rows
        if batch.by_reference and self.layout.is_quantized:
            out = batch.dequantized
        router = {"router": batch.choice.take()} if batch.choice is not None else {}
        params = low_latency.dispatch_type(self.num_ranks, self.routed)(
            common=self._common(batch),
            rows=rows.data_ptr(),
            weights=batch.weights.data_ptr(),
            locals=batch.locals.data_ptr(),
            out=None if out is None else out.data_ptr(),
            expert_num_tokens=batch.counts.data_ptr(),
            expert_row_ids=batch.row_ids.data_ptr() if batch.by_reference else None,
            positions=batch.positions.data_ptr() if is_listed else None,
            num_local_experts=len(batch.counts),
            shares=1 if batch.by_reference else self.random.choice([1, 2]),
            take_parts=self.random.choice([1, 8]),
            **router,
        )
        self._queue_halves(batch.setting.rank, "low_latency_dispatch", params)

    def _queue_layer(self, batch: Batch) -> None:
        """Experts that combine."""
        rank = batch.setting.rank
        numbers = torch.tensor([*batch.global_ids, 0, 0], dtype=torch.int32)  # and the tickets
        self._kept.append(numbers)
        params = layer_type(self.num_ranks)(
            batch=low_latency.batch_type(self.num_ranks)(common=self._common(batch), output=batch.output.data_ptr()),
            numbers=numbers.data_ptr(),
            results=self._published[rank].data_ptr(),
            ticket=numbers[-2:].data_ptr(),
            num_experts=len(numbers) - 2,
            launch=len(self._kept),
        )
        self.queue_kernel(rank, "layer", params, self._blocks or self.random.choice([1, 2, 4]), early=True)

    def _queue_combine(self, batch: Batch) -> None:
        params = low_latency.combine_type(self.num_ranks)(
            common=self._common(batch),
            results=batch.results.data_ptr(),
            positions=batch.positions.data_ptr(),
            output=batch.output.data_ptr(),
            weights=batch.weights.data_ptr(),
            weighted=1,
            output_parts=self.random.choice([1, 3]),
        )
        self._queue_halves(batch.setting.rank, "low_latency_combine", params)

    def _run_experts(self, batch: Batch) -> bool:
        first = self.layout.offsets["rows"]
        rows = self.memory[batch.setting.rank, first : first + self.layout.sizes["rows"]].view(self.dtype)
        rows = batch.dequantized if self.layout.is_quantized else rows
        for local, expert_id in enumerate(batch.global_ids):
            count = int(batch.counts[local])
            ids = batch.row_ids[local, :count].long()
            arrived = rows.view(-1, HIDDEN)[ids] if batch.by_reference else batch.rows[local, :count]
            batch.results[local, :count] = expert(expert_id, arrived).to(batch.results.dtype) * self.gain
        return True

    def _common(self, batch: Batch) -> ctypes.Structure:
        rank, num_ranks = batch.setting.rank, self.num_ranks
        inputs = batch.setting.inputs[rank]
        return low_latency.common_type(num_ranks)(
            buffers=low_latency.buffers_type(num_ranks)(
                peers=(ctypes.c_uint64 * num_ranks)(*(self.memory[r].data_ptr() for r in range(num_ranks))),
                pes=(ctypes.c_int * num_ranks)(*range(num_ranks)),
                reachable=2**num_ranks - 1,
                rank=rank,
                capacity=CAPACITY,
                row_packet_tokens=self.row_packet_tokens,
                **self.layout.offsets,
            ),
            status=self.status[rank].data_ptr(),
            record=self.record[rank].data_ptr(),
            timeout_ns=self.timeout_ns,
            counters=self.counters[rank].data_ptr(),
            topk_ids=(inputs.ids if batch.choice is None else batch.choice.topk_ids).data_ptr(),
            owners=batch.owners.data_ptr(),
            num_ids=len(batch.owners),
            num_tokens=len(inputs.rows),
            packet_parts=self.random.choice([1, 2, 8]),
            packet_tasks=1024,
            most_tokens=self.random.randint(max(max(batch.setting.case.tokens), 1), CAPACITY),
        )

    def _queue_halves(self, rank: int, name: str, params: ctypes.Structure) -> None:
        """As one launch, or a half each."""
        in_halves = self.random.random() < 0.3
        blocks = self._blocks or self.random.choice([1, 2, 4])
        for phases in (SEND, RECEIVE) if in_halves else (SEND | RECEIVE,):
            params.common.phases = phases
            self.queue_kernel(rank, name, params, blocks, groups=2, early=True)


@functools.cache
def layer_type(num_ranks: int) -> Any:
    """`Params` of emulated/layer.cu."""
    pointers = tuple((name, ctypes.c_void_p) for name in ("numbers", "results", "ticket"))
    numbers = (("num_experts", ctypes.c_int), ("launch", ctypes.c_int))
    return structure(("batch", low_latency.batch_type(num_ranks)), *pointers, *numbers)


def _with_logits(setting: Setting) -> tuple[Setting, DeferredTopK]:
    """The setting with ids that its rank's logits choose, and that choice, whose weights the expected output has."""
    rank, generator = setting.rank, torch.Generator().manual_seed(setting.case.seed)
    mine = setting.inputs[rank]
    choice = choice_of(torch.randn(len(mine.rows), NUM_ROUTED, generator=generator))
    choice.topk_ids.fill_(-7)
    _, ids = topk_reference(choice.logits, TOPK, scoring_func="sigmoid")
    inputs = list(setting.inputs)
    inputs[rank] = mine._replace(ids=ids, weights=choice.topk_weights)
    return setting._replace(inputs=inputs), choice

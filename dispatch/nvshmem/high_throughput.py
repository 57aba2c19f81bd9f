"""Prefill over NVLink: a token is written once into the memory of each rank that has one of its experts.

Rows go straight to where the experts read them, in the order and with the ids of `all_to_all`, so 16-bit rows are not
copied after they arrived, nor are those that experts read in 8 bits, which are quantized before; other 8-bit rows are
quantized and converted on their way, and results are added up on the token's rank as they arrive. To place them, a
separate kernel first exchanges row counts. This saves a pass over memory and flow control, and costs symmetric memory
for the most rows that can arrive, R * max_num_tokens. All layers of one shape share that memory, with room for
`batches_in_flight` between dispatch and combine.

With overlap=True ids are sent first, and rows while the experts that wait for them run; results leave while the last
ones are computed (docs/kernels.md, "Prefill, overlapped").

cuda/high_throughput.cuh says what the parts of a block of symmetric memory hold and why no barrier is needed between
batches. From top to bottom: the layout of a block, the block of all batches of one shape, the kernels' parameters, and
the backend.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig, check_row_dtypes
from moe_ep.dispatch.batch import Batch, check_tensor
from moe_ep.dispatch.nvshmem import arena, kernels
from moe_ep.dispatch.nvshmem.backend import NvshmemPrepareFinalize, SymmetricBuffers
from moe_ep.dispatch.nvshmem.batch_exchange import MOST_EXPERTS, DeviceExchange
from moe_ep.dispatch.nvshmem.kernels import BufferLayout, align, structure
from moe_ep.dispatch.rank_group import RankGroup
from moe_ep.dispatch.torch_distributed import CombineCall
from moe_ep.kernels import jit
from moe_ep.kernels.arrival import Arrival, ArrivalParams, Limits
from moe_ep.kernels.quantize import GROUP_SIZE, quantized_row_bytes
from moe_ep.modular_kernel.contracts import BatchExchange, Dispatched, FusedMoEActivationFormat, Pending
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceContiguous

NAME = "nvshmem_high_throughput"
KERNELS = ("plan", "dispatch", "combine")
# The combine that is given the slots of each row, beside the one that is given their sums.
_SLOTS = "combine_slots"
# The dispatch of rows that experts read in 8 bits, which it sends as if they were some columns of 16 bits.
_CODES = "dispatch_codes"
OVERLAPPED_KERNELS = ("plan", "ids", "rows", "combine")
_PART = 1024  # columns of a result that have a flag, where the combine adds up slots
_EXPERT_FLAGS = 1024  # the most experts of a rank beside which rows are sent
_LINE_BYTES = 16
_LINES_OF_COUNTS = 4
_FLAG_BYTES = 8
# Bytes of one write over a link.
_LINK_LINE_BYTES = 128
# Within 5 % of the best on 4 H200 (docs/benchmarks/dispatch.md); 8-bit rows are made and read by instructions.
DEFAULT_NUM_SMS = 24
DEFAULT_NUM_SMS_QUANTIZED = 48
# SMs of a combine that adds up slots. On 2 H200s dispatch and combine take 7 % longer with 132, and 8 % with 64.
SLOT_SUMMING_SMS = 96
THREADS = 1024
WARPS = THREADS // 32
# With at most so many SMs, some blocks of a dispatch of 8-bit rows only send.
_FEW_SMS = 32
# Quantizing a row takes as long as storing this part of one that is not quantized.
_QUANTIZING = 0.4


@dataclass(frozen=True, kw_only=True)
class Layout(BufferLayout):
    """The symmetric block; cuda/high_throughput.cuh says what its parts hold."""

    @property
    def kernels(self) -> tuple[str, ...]:
        if self.overlaps:
            return OVERLAPPED_KERNELS
        more = ((_SLOTS, self.sums_slots), (_CODES, self.keeps_codes))
        return (*KERNELS, *(name for name, is_used in more if is_used))

    def sources(self, dtype: torch.dtype) -> dict[str, jit.KernelSource]:
        return {name: kernel_source(name, self, dtype) for name in self.kernels}

    @property
    def sums_slots(self) -> bool:
        """Whether the combine may be given slots, of bf16, and of ranks whose memory is in reach."""
        return not self.f32_results and not self.device_api

    @property
    def max_rows(self) -> int:
        """Rows that can arrive."""
        return self.num_ranks * self.capacity

    @property
    def max_results(self) -> int:
        """Rows that a combine can return."""
        return self.capacity * min(self.num_ranks, self.topk)

    @property
    def takes_rows(self) -> bool:
        """Whether received rows are copied out of symmetric memory."""
        return self.is_quantized or self.device_api

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the wire, of the larger one where it may also be sent as codes;
        cuda/high_throughput_dispatch.cu draws rows that are converted."""
        columns, codes = 2 * self.hidden_size, self.code_row_bytes
        if self.is_quantized:
            columns = self.hidden_size + align(2 * -(-self.hidden_size // GROUP_SIZE), 4)
        if self.takes_rows:
            columns = self._with_tail(columns)
        return max(columns, self._with_tail(codes) if self.device_api else codes)

    def _with_tail(self, column_bytes: int) -> int:
        """Bytes of a row on the wire that is followed by its ids and weights."""
        return align(column_bytes + 8 * self.topk, _LINK_LINE_BYTES)

    @property
    def plain_row_bytes(self) -> int:
        """Bytes of a received row in plain memory; 0 if it stays where it arrives."""
        return max(2 * self.hidden_size, self.code_row_bytes) if self.takes_rows else 0

    @property
    def keeps_codes(self) -> bool:
        """Whether rows may be handed over in 8 bits, as they were sent or given."""
        return self.is_quantized or self.passed_dtype is not None

    @property
    def code_row_bytes(self) -> int:
        """Bytes of a row that is handed over in 8 bits; 0 if none are."""
        return align(quantized_row_bytes(self.hidden_size, whole=True), _LINK_LINE_BYTES) if self.keeps_codes else 0

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {
            "counts": 2 * _LINE_BYTES * _LINES_OF_COUNTS * self.num_ranks,
            "done": _LINE_BYTES * self.num_ranks,
            "row_flags": _FLAG_BYTES * self.max_rows,
            "result_flags": _FLAG_BYTES * self.max_results * (-(-self.hidden_size // _PART) if self.sums_slots else 1),
            "ids": 4 * self.topk * self.max_rows,
            "weights": 4 * self.topk * self.max_rows,
            "rows": self.row_bytes * self.max_rows,
            "results": self.result_bytes * self.max_results,
            "staged_rows": self.row_bytes * self.capacity if self.device_api else 0,
            "staged_results": self.result_bytes * self.max_rows if self.device_api else 0,
            **({"source_flags": _FLAG_BYTES * self.num_ranks} if self.overlaps else {}),
        }

    @property
    def plain_bytes(self) -> int:
        """Bytes of plain device memory beside it: slots, and rows if they do not stay where they arrive."""
        return self.batches_in_flight * (self.plain_row_bytes * self.max_rows + 4 * self.capacity * self.num_ranks)


def kernel_source(name: str, layout: Layout, dtype: torch.dtype) -> jit.KernelSource:
    """One of the layout's kernels, for batches of that dtype."""
    if name == _CODES:
        defines = {"HIDDEN": layout.code_row_bytes // 2, "EIGHT_BIT": 0, "INT8": 0}
        return kernels.kernel_source("high_throughput_dispatch", layout, dtype, **defines)
    more = {"SLOTS": 1} if name == _SLOTS else {}
    return kernels.kernel_source(f"high_throughput_{name.removesuffix('_slots')}", layout, dtype, **more)


class Block(SymmetricBuffers):
    """Buffers of the layout's batches in flight.

    Attributes:
        exchange: for balancing batches.
    """

    NAME, INSTEAD = NAME, "all_to_all"
    layout: Layout

    def __init__(
        self, symmetric: arena.SymmetricArena, layout: Layout, ranks: RankGroup, in_dtype: torch.dtype
    ) -> None:
        super().__init__(symmetric, layout, ranks)
        self.exchange = DeviceExchange(symmetric, ranks, self.status, self.record)
        self.batches = [BatchParts(self, index, in_dtype) for index in range(layout.batches_in_flight)]
        self.start(0)

    def take(self) -> BatchParts:
        """Parts for a new batch: free ones, or else those of the oldest batch, which is given up.

        Ranks that make the same calls in the same order take the same ones.
        """
        parts = min(self.batches, key=lambda parts: (parts.is_open, parts.number))
        parts.number = 1 + max(each.number for each in self.batches)
        parts.is_open = True
        return parts

    def begins_anew(self) -> bool:
        # Batches take several sets of buffers in turn.
        return len(self.batches) == 1 and not self.batches[0].is_open

    def _epochs(self) -> Sequence[int]:
        return [max(self.exchange.epoch, *(int(parts.epoch) for parts in self.batches))]

    def _go_on(self, told: Sequence[Sequence[int]]) -> None:
        self.start(max(epoch for (epoch,) in told))

    def start(self, epoch: int) -> None:
        """Lets every set of buffers go on behind the batch of this number; all ranks call it before the next."""
        for parts in self.batches:
            parts.numbers.zero_()
            parts.epoch.fill_(epoch)
            parts.arriving.zero_()
            parts.number, parts.is_open = 0, False
        self.exchange.epoch = epoch & 0xFFFFFFFF
        self._let_kernels_wait()


class BatchParts:
    """The buffers and counters of one batch in flight.

    Attributes:
        number: of the batch that has it; later ones have larger numbers.
        is_open: it is between prepare and finalize.
        common: what the kernels share.
        numbers: int32: epoch (2), finished blocks, what was taken (3), the placement.
        epoch: int64 `[1]`, a view: the number of the last batch.
        slots: int32 `[C, R]`, of this rank's tokens.
        rows, ids, weights: `[R * C, …]`, what arrives, as the experts read it.
        codes: uint8 `[R * C, code_row_bytes]`, rows that the experts read in 8 bits; None if they never do.
        arriving: int64 `[1]` in host memory, where the first kernel writes number << 32 | rows that arrive.
        expert_flags: int64, the batch's number once all results of that expert are stored, then the same for `order`;
            None without overlap.
        order: int32 `[R * C]`, what arrives in the order in which results are sent.
    """

    def __init__(self, block: Block, index: int, in_dtype: torch.dtype) -> None:
        layout, device = block.layout, block.part(index, "ids").device
        self._num_ranks = layout.num_ranks
        self.number, self.is_open = 0, False
        self.numbers = torch.zeros(6 + 4 * layout.num_ranks + 1, dtype=torch.int32, device=device)
        self.epoch = self.numbers[:2].view(torch.int64)
        self.slots = torch.empty((layout.capacity, layout.num_ranks), dtype=torch.int32, device=device)
        first, peers = self.numbers.data_ptr(), (peer + index * layout.batch_bytes for peer in block.region.peers)
        self.common = common_type(layout.num_ranks)(
            peers=(ctypes.c_uint64 * layout.num_ranks)(*peers),
            pes=(ctypes.c_int * layout.num_ranks)(*block.region.pes),
            **{name: layout.offsets[name] for name in _OFFSETS},
            status=block.status.data_ptr(),
            record=block.record.words.data_ptr(),
            timeout_ns=int(block.record.timeout_s * 1e9),
            epoch=first,
            finished=first + 8,
            taken=first + 12,
            placement=first + _PLACEMENT,
            rank=block.ranks.rank,
        )
        self._params: dict[str, Any] = {}
        self.arriving = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self._arriving = self.arriving.numpy()
        symmetric = block.part(index, "rows")
        plain = symmetric.new_empty(layout.max_rows * layout.plain_row_bytes)

        def rows_in(memory: torch.Tensor, row_bytes: int) -> torch.Tensor:
            return memory[: layout.max_rows * row_bytes].view(layout.max_rows, row_bytes)

        self.rows = rows_in(plain if layout.takes_rows else symmetric, 2 * layout.hidden_size).view(in_dtype)
        self.codes: torch.Tensor | None = None
        if layout.keeps_codes:
            self.codes = rows_in(plain if layout.device_api else symmetric, layout.code_row_bytes)
        self.ids = block.part(index, "ids").view(torch.int32).view(layout.max_rows, layout.topk)
        self.weights = block.part(index, "weights").view(torch.float32).view(layout.max_rows, layout.topk)
        self.expert_flags: torch.Tensor | None = None
        if layout.overlaps:
            self.expert_flags = torch.zeros(_EXPERT_FLAGS + 1, dtype=torch.int64, device=device)
            self.order = torch.empty(layout.max_rows, dtype=torch.int32, device=device)
            self.ordered = self.expert_flags[_EXPERT_FLAGS:]
            self._row_flags, self.source_flags = (block.part(index, n) for n in ("row_flags", "source_flags"))

    def params(self, name: str, pointers: Sequence[int | None], numbers: Sequence[int]) -> Any:
        """`Params` of the kernel of that name, the same object in every call."""
        params = self._params.get(name)
        if params is None:
            common = common_type(self._num_ranks)
            params = kernels.params_type(common, len(pointers), len(numbers))(common=self.common)
            self._params[name] = params
        params.pointers[:], params.numbers[:] = pointers, numbers
        return params

    def arrival(self, leaving: int) -> ArrivalParams:
        """Parameters of experts that wait for this batch's rows."""
        common, first = self.common, self.numbers.data_ptr()
        return ArrivalParams(
            row_flags=self._row_flags.data_ptr(),
            source_flags=self.source_flags.data_ptr(),
            first_rows=first + _PLACEMENT + 4 * self._num_ranks,  # Placement.begin
            epoch=first,
            finished=jit.pointer(self.expert_flags),
            limits=common.limits,
            num_sources=self._num_ranks,
            leaving=leaving,
        )

    def rows_of(self, number: int) -> int | None:
        """Rows that arrive here in the batch of that number, once the first kernel has written their count."""
        word = int(self._arriving[0])
        return word & 0xFFFFFFFF if (word >> 32) - number & 0xFFFFFFFF == 0 else None


# Buffers whose offsets are members of `Common`, in its order.
_OFFSETS = (
    *("counts", "done", "row_flags", "result_flags", "ids", "weights", "rows", "results"),
    *("staged_rows", "staged_results"),
)
_PLACEMENT = 24  # where it begins in BatchParts.numbers


@functools.cache
def common_type(num_ranks: int) -> Any:
    """`Common` of cuda/high_throughput.cuh."""
    return structure(
        ("peers", ctypes.c_uint64 * num_ranks),
        *((name, ctypes.c_uint64) for name in _OFFSETS),
        ("limits", Limits),
        *((name, ctypes.c_void_p) for name in ("epoch", "finished", "taken", "placement")),
        ("rank", ctypes.c_int),
        ("pes", ctypes.c_int * num_ranks),
        anonymous=("limits",),
    )


class _Sent(NamedTuple):
    parts: BatchParts
    number: int
    batch: Batch
    moved: torch.Tensor  # the rows that the kernel sends
    rows: int
    check: Callable[[], None]
    arrival: Arrival | None


class HighThroughputPrepareFinalize(NvshmemPrepareFinalize, unchecked=True):
    """Standard format over NVLink for up to max_num_tokens of every rank; prefill.

    Rows, ids and weights are those of `all_to_all`, bit for bit and always in one order, and so is what the combine
    leaves. They are views of memory that is valid until `batches_in_flight` more batches were prepared by layers of
    this shape. The host waits for one number, the rows that arrive, while they are in flight. Without `exact_rows`,
    under CUDA-graph capture, and after `pad_rows` where the most tokens of a rank are known or at least half the
    capacity, it waits for nothing: R times as many rows are returned, ids of -1 where none arrived.

    Every wait ends after MOE_EP_NVSHMEM_TIMEOUT_S, and the next call (or `check`) raises DispatchTimeoutError.

    Args:
        moe_config: in_dtype f16 or bf16, K a multiple of 16; capacity is its max_num_tokens.
        quant_config: its dispatch_dtype is that of rows on the wire.
        process_group: the EP ranks, at most 8.
        owners: int32 `[E + shared]`, the rank of the group that each id goes to; None for that of the placement.
        num_sms: SMs that move rows; None for MOE_EP_NVSHMEM_NUM_SMS, or what is nearly the best.
        batches_in_flight: batches that may be between prepare and finalize; each has symmetric memory of its own.
        exact_rows: hand over the rows that arrived where no CUDA graph is captured; False for all that may arrive.
        overlap: the experts start before their rows are here, which only some experts can, beside bf16 and within one
            host; rows that are sent in 8 bits are multiplied so. None for MOE_EP_OVERLAP. The same on every rank.
        overlap_sms: SMs that such experts may fill, beside the num_sms of dispatch and combine; None for all.
        passed_dtype: int8 or e4m3 if `pass_on` may be given codes of it, as within a host by `two_level`; None for
            none. The same on every rank.

    Raises:
        ValueError: what the kernels cannot do, or ranks that are configured differently.
    """

    NAME, INSTEAD = Block.NAME, Block.INSTEAD
    MAX_RANKS = 8
    LAYOUT = Layout
    layout: Layout
    _pads_rows = False

    def __init__(
        self,
        *,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        owners: torch.Tensor | None = None,
        num_sms: int | None = None,
        batches_in_flight: int = 1,
        exact_rows: bool = True,
        overlap: bool | None = None,
        overlap_sms: int | None = None,
        passed_dtype: torch.dtype | None = None,
    ) -> None:
        check_row_dtypes(passed_dtype=passed_dtype)
        super().__init__(moe_config=moe_config, quant_config=quant_config, process_group=process_group, owners=owners)
        if num_sms is None:
            num_sms = env.NVSHMEM_NUM_SMS.get() or None
        overlap = env.OVERLAP.get() if overlap is None else overlap
        sizes = (("num_sms", num_sms), ("batches_in_flight", batches_in_flight), ("overlap_sms", overlap_sms))
        for name, value in sizes:
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.exact_rows = exact_rows
        device_api = not arena.SymmetricArena.of(self.ranks.group).is_mapped
        self.layout = Layout.of(
            moe_config, quant_config, batches_in_flight=batches_in_flight, device_api=device_api, overlaps=overlap,
            passed_dtype=passed_dtype,
        )  # fmt: skip
        self._check_overlap()
        self.overlap_sms = overlap_sms
        self.block = self._share_memory(Block, moe_config.in_dtype)
        sms = torch.cuda.get_device_properties(self.block.device).multi_processor_count
        self.num_sms = self._sms_of_a_batch(num_sms, sms)
        # Blocks that add up slots claim what there is to do, so they may start one after another, as experts make room.
        self.combine_blocks = self.num_sms
        if num_sms is None and overlap_sms is None:
            self.combine_blocks = sms if overlap else min(sms, SLOT_SUMMING_SMS)

    def _check_overlap(self) -> None:
        """ValueError where rows cannot be sent beside the experts."""
        layout, config = self.layout, self.moe_config
        reasons = (
            (config.in_dtype is not torch.bfloat16, f"rows are {config.in_dtype}; they must be torch.bfloat16"),
            (layout.is_quantized, f"rows are sent as {layout.code_dtype}; leave dispatch_dtype out"),
            (layout.passed_dtype is not None, f"codes of {layout.passed_dtype} are passed on; leave passed_dtype out"),
            (layout.device_api, "a rank's memory is out of reach; all ranks must be on one host"),
            (
                config.num_local_experts > _EXPERT_FLAGS,
                f"a rank has {config.num_local_experts} experts; it may have {_EXPERT_FLAGS}",
            ),
        )
        for holds, reason in reasons:
            if layout.overlaps and holds:
                raise ValueError(f"overlap is True and {reason}, or choose overlap=False (MOE_EP_OVERLAP=0)")

    def _sms_of_a_batch(self, asked: int | None, sms: int) -> int:
        """As asked, or close to the best. Blocks wait for all blocks of other ranks, so all must fit at once."""
        batches = self.layout.batches_in_flight
        most = max(sms // batches, 1)
        if asked is None:
            converts = self.layout.is_quantized and self.layout.takes_rows
            return min(DEFAULT_NUM_SMS_QUANTIZED if converts else DEFAULT_NUM_SMS, most)
        if asked > most:
            raise ValueError(
                f"num_sms is {asked} with {batches} batches in flight; all of them must fit on the GPU's {sms} SMs at "
                f"once, ask for {most} at most"
            )
        return asked

    @staticmethod
    def size_hint(
        moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig | None = None, batches_in_flight: int = 1
    ) -> dict[str, int]:
        """Bytes that one backend of this shape takes on each rank.

        Returns:
            "symmetric": of the arena, and "plain": of device memory beside it; both shared by all backends of this
            shape.
        """
        layout = Layout.of(moe_config, quant_config, batches_in_flight=batches_in_flight)
        return {"symmetric": layout.symmetric_bytes, "plain": layout.plain_bytes}

    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def supports_cuda_graph(self) -> bool:
        return True

    def most_rows(self) -> int | None:
        return self.layout.max_rows

    def overlaps_experts(self) -> bool:
        return self.layout.overlaps

    def sums_slots(self) -> bool:
        return self.layout.sums_slots

    def pad_rows(self) -> None:
        self._pads_rows = True

    def rows_without_wait(self, num_tokens: int, most_tokens: int | None = None) -> int | None:
        """Rows that a batch returns, of which those behind the ones that arrived have ids of -1; None where the host
        waits for their number.

        Args:
            most_tokens: as in `Routing`.
        """
        most = self.layout.capacity if most_tokens is None else min(most_tokens, self.layout.capacity)
        waits = self.exact_rows and not torch.cuda.is_current_stream_capturing()
        if waits and not (self._pads_rows and (most_tokens is not None or 2 * num_tokens >= most)):
            return None
        return self.layout.num_ranks * most

    def batch_exchange(self) -> BatchExchange | None:
        """None across hosts, beside overlapped experts, for layers of very many, and once a rank was declared dead."""
        layout, num_experts = self.layout, self.moe_config.num_experts
        suits = not layout.device_api and not layout.overlaps and num_experts <= MOST_EXPERTS
        return self.block.exchange if suits and len(self.block.alive) == self.ranks.size else None

    def _send(self, batch: Batch) -> Pending[Dispatched]:
        self.check()
        self._check_batch(batch)
        layout, num_tokens, num_ids = self.layout, batch.topk_ids.size(0), batch.owners.numel()
        known_rows = self.rows_without_wait(num_tokens, batch.most_tokens)
        parts = self.block.take()
        number, check = parts.number, self._begin_batch()
        where = [batch.topk_ids, batch.owners, parts.slots, parts.arriving if known_rows is None else None]
        most_rows = known_rows or 0
        codes, moved, arrived = parts.codes if batch.keeps_codes else None, batch.rows, parts.rows
        if codes is not None:
            moved, arrived = batch.wire_rows(codes.new_empty((num_tokens, layout.code_row_bytes))), codes
        with self.block.order:
            self._launch("plan", parts, where, [num_ids, num_tokens, number])
            if layout.overlaps:
                tensors = [batch.topk_ids, batch.topk_weights, batch.owners, parts.slots]
                self._launch("ids", parts, tensors, [num_ids, num_tokens, most_rows])
            else:
                tensors = [moved, batch.topk_ids, batch.topk_weights, batch.owners, parts.slots, arrived]
                senders = senders_of(layout, self.num_sms)
                name = "dispatch" if codes is None else _CODES
                self._launch(name, parts, tensors, [num_ids, num_tokens, most_rows, *senders])
        arrival = self._arrival(parts, batch) if layout.overlaps else None

        def receive() -> Dispatched:
            check()
            rows = known_rows
            if rows is None:  # the host waits for their number while they are in flight
                self.ranks.wait_for_sizes("dispatch", lambda: parts.rows_of(number) is not None)
                self.check()
                rows = parts.rows_of(number) or 0
            is_full = rows == layout.max_rows
            given = arrived if is_full else arrived[:rows]
            given, scales = (given, None) if codes is None else batch.received(given)
            return Dispatched(
                rows=given,
                row_scales=scales,
                topk_ids=parts.ids[:rows],  # another object for every batch, which `prepare` tells batches apart by
                topk_weights=parts.weights if is_full else parts.weights[:rows],
                arrival=arrival,
                handle=_Sent(parts, number, batch, moved, rows, check, arrival),
            )

        return Pending(lambda: None, receive)

    def _arrival(self, parts: BatchParts, batch: Batch) -> Arrival:
        """For experts that wait for the batch's rows, which are sent when they are about to be launched."""
        number, is_sent = parts.number, False

        def start() -> None:
            nonlocal is_sent
            if is_sent or parts.number != number:
                return
            is_sent = True
            sent = (batch.rows, batch.topk_ids, batch.owners, parts.slots, self.layout.offsets["source_flags"])
            tensors = (*sent, batch.expert_map, parts.order, parts.ordered)
            with self.block.order:
                self._launch("rows", parts, tensors, [batch.owners.numel(), batch.topk_ids.size(0)])

        return Arrival(params=parts.arrival(self.num_sms), start=start, most_blocks=self.overlap_sms)

    def _return(self, sent: _Sent, call: CombineCall) -> Pending[None]:
        output, expert_output, dispatched, _ = call
        self.check()
        sent.check()
        if sent.number != sent.parts.number:
            raise RuntimeError(
                f"another batch was dispatched before this one was finalized and {NAME} has room for "
                f"{self.layout.batches_in_flight}; finalize each before, or make the backend with more "
                f"batches_in_flight"
            )
        num_tokens = sent.batch.topk_ids.size(0)
        shape = (num_tokens, self.layout.hidden_size)
        check_tensor("output", output, shape, self.moe_config.in_dtype, output.device, contiguous=True)
        parts, slots = sent.parts, (sent.rows, self.layout.topk, self.layout.hidden_size)
        takes_slots = sent.arrival is not None or self._takes_slots(call, slots)
        if sent.arrival is not None:
            sent.arrival.start()  # where no experts were run
        tensors: list[torch.Tensor | int | None]
        if takes_slots:
            check_tensor(
                "expert_output", expert_output, slots, self.moe_config.in_dtype, output.device, contiguous=True
            )
            if dispatched.rows_are_weighted:
                parts.weights.fill_(1.0)
            expert_map = sent.batch.expert_map
            tensors, numbers = [expert_output, parts.slots, output, expert_map], [expert_map.numel(), num_tokens]
            if sent.arrival is not None:
                tensors += [parts.expert_flags, parts.order, parts.ordered, parts.source_flags]
        else:
            tensors, numbers = [self._reduced(call, sent.rows, contiguous=True), parts.slots, output], [num_tokens]
        with self.block.order:
            self._launch(_SLOTS if takes_slots and sent.arrival is None else "combine", parts, tensors, numbers)
        parts.is_open = False
        return Pending(lambda: None, lambda: None)

    def _takes_slots(self, call: CombineCall, shape: tuple[int, ...]) -> bool:
        """Whether the experts left slots as the kernel reads them; other forms are reduced before."""
        results, is_plain = call.expert_output, call.reduce_impl == TopKWeightAndReduceContiguous()
        fits = isinstance(results, torch.Tensor) and results.shape == shape and results.is_contiguous()
        return self.layout.sums_slots and is_plain and fits and results.dtype == self.moe_config.in_dtype

    def _launch(
        self,
        name: str,
        parts: BatchParts,
        tensors: Sequence[torch.Tensor | int | None],
        numbers: Sequence[int],
    ) -> None:
        pointers = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in tensors]
        params = parts.params(name, pointers, numbers)
        claims = name == _SLOTS or (name == "combine" and self.layout.overlaps)
        blocks = 1 if name == "plan" else self.combine_blocks if claims else self.num_sms
        early = name in ("dispatch", _CODES, "ids", "rows") or (name == "combine" and self.layout.overlaps)
        self.kernels[name].launch(params, (blocks,), THREADS, early=early)


@functools.cache
def senders_of(layout: Layout, num_sms: int) -> tuple[int, int]:
    """Blocks of a dispatch that send, and warps of each that do, where others take what arrives.

    Half of every block's warps do, and one releases flags beside them. Where few SMs make 8-bit rows, stores at home
    would queue behind those to busy links, so almost all warps of some blocks send and the other blocks take, in shares
    of what each stores if tokens go to any experts.

    Example: 24 SMs, K=7168, top-8: of 8 ranks 10 blocks send, of 4 ranks 12.
    """
    if not layout.is_quantized or layout.device_api or num_sms > _FEW_SMS:
        return num_sms, WARPS // 2
    plain, others = 2 * layout.hidden_size, layout.num_ranks - 1
    to_a_rank = 1 - (others / layout.num_ranks) ** layout.topk
    sent = to_a_rank * (others * layout.row_bytes + plain) + _QUANTIZING * plain
    taken = to_a_rank * others * plain
    return max(round(num_sms * sent / (sent + taken)), 1), WARPS - 1

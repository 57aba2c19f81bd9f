"""Decode over NVLink: one kernel for the dispatch, one for the combine; a rank waits for its own rows alone.

Kernels write rows straight into the other ranks' memory; cuda/low_latency_dispatch.cu and low_latency_combine.cu say
what they do. From top to bottom: the layout of a batch in symmetric memory, the channel of all batches of one shape,
the kernels' parameters and launches, and the backend.

The protocol, for each batch in flight (cuda/protocol.cuh and low_latency.cuh hold the device's part):

    epoch   the batch's number, in the upper half of the ticket counters of its buffers, on each rank's own device. The
            dispatch sets the combine's counters to its epoch and the combine the dispatch's to the next, so nothing
            on the host counts, and a captured graph may be replayed.
    flags   everything a peer writes carries the epoch: in each line or packet, or in a flag that is released behind a
            row. Epochs only grow, so what is left of earlier batches is never taken for new, and nothing needs to be
            cleared. They have 32 bits and begin again with 0; before, what was not written for long is written with
            an old one (cuda/low_latency.cuh).
    rows    are written for a next batch only after this rank's combine, which waited for a result for every row that it
            had sent; by then the peer had read them. Results are written only after the owner's header came, which it
            sent behind its own combine before.
    header  and meta lines are written to every peer, also to one that this rank had no rows for and so waited for
            nothing from. Even and odd epochs have their own: to write those of epoch e + 2 a rank must have had every
            header of e + 1, which is sent behind the last reading of e.

So there is no barrier, and one set of buffers would do for batches that follow each other; there are as many sets as
batches may be open at once. To ranks of other hosts rows, results and slots are put from an outbox, and the flag
behind them; what lies in an outbox is not written again before the other rank has answered, for the reasons above.
Which set a batch takes is the first that is free, so ranks that make the calls in the same order agree on it, also
where they replay graphs that were captured for different numbers of tokens.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist

from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.dispatch.batch import Batch, check_tensor, keep_for, wire_dtype
from moe_ep.dispatch.nvshmem.arena import SymmetricArena
from moe_ep.dispatch.nvshmem.backend import NvshmemPrepareFinalize, SymmetricBuffers
from moe_ep.dispatch.nvshmem.kernels import CUDA, BufferLayout, align, kernel_source, structure
from moe_ep.dispatch.nvshmem.order import Order
from moe_ep.dispatch.rank_group import RankGroup
from moe_ep.dispatch.torch_distributed import CombineCall, Result, check_delegated
from moe_ep.distributed.membership import is_elastic
from moe_ep.errors import ConfigError
from moe_ep.kernels import jit
from moe_ep.kernels.arrival import Limits, PeerBatch, PeerBuild
from moe_ep.kernels.quantize import quantized_row_bytes
from moe_ep.kernels.routing import RouterParams
from moe_ep.modular_kernel.contracts import Dispatched, ExpertTokensMetadata, FusedMoEActivationFormat, Pending
from moe_ep.modular_kernel.workspace import current_stream

_LINE_BYTES = 16
# Batches between prepare and finalize that have buffers of their own.
BATCHES_IN_FLIGHT = 2
# 16-bit rows of up to so many tokens of a rank are sent as flag-in-data packets of 128 bytes; those of more tokens are
# stored where experts read them by reference.
ROW_PACKET_TOKENS = 32
# As cuda/low_latency.cuh describes them, and in the order of its members.
BUFFERS = (
    "header", "meta", "row_flags", "result_flags", "rows", "results", "row_packets", "result_packets", "meta_outbox",
    "outbox",
)  # fmt: skip
_LOCALS_OF_LINE, _WEIGHTS_OF_LINE = 4, 2
# A warp stores four packets at a time.
_PACKET_BYTES, _DATA_OF_PACKET, _PACKETS_OF_WARP = 128, 112, 4
_EPOCH_SHIFT = 32
_NUM_EPOCHS = 1 << 32
SEND, RECEIVE = 1, 2
# kMostRows of cuda/low_latency_layer.cuh.
MOST_COMBINING_ROWS = 32
KERNELS = ("low_latency_dispatch", "low_latency_combine")
_THREADS = 512
# Warps of a block that receive.
WARPS = _THREADS // 64


def _packet_bytes(num_bytes: int) -> int:
    return _PACKETS_OF_WARP * _PACKET_BYTES * -(-num_bytes // (_PACKETS_OF_WARP * _DATA_OF_PACKET))


@dataclass(frozen=True, kw_only=True)
class BatchLayout(BufferLayout):
    """The buffers of decoding. With device_api nothing is sent as packets, elsewhere all results and 8-bit rows are.

    Example: 8 ranks, 128 tokens, K=7168, top-8, bf16 on the wire: 35.9 MB a batch.
    """

    batches_in_flight: int = BATCHES_IN_FLIGHT

    @classmethod
    def of(cls, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig | None, **more: Any) -> Self:
        return super().of(moe_config, quant_config, slot_results=moe_config.batch_invariant, **more)

    def sources(self, dtype: torch.dtype) -> dict[str, jit.KernelSource]:
        return {name: kernel_source(name, self, dtype) for name in KERNELS}

    @property
    def row_packet_tokens(self) -> int:
        """Up to so many tokens of a rank, its rows are sent as packets."""
        if self.device_api:
            return 0
        return self.capacity if self.is_quantized else min(ROW_PACKET_TOKENS, self.capacity)

    @property
    def meta_lines(self) -> int:
        return -(-self.topk // _LOCALS_OF_LINE) - (-self.topk // _WEIGHTS_OF_LINE)

    @property
    def row_bytes(self) -> int:
        return align(quantized_row_bytes(self.hidden_size), 16) if self.is_quantized else 2 * self.hidden_size

    @property
    def row_packet_bytes(self) -> int:
        """Bytes of a row as packets; those of 8 bits have their scales beside the epochs."""
        return _packet_bytes((1 if self.is_quantized else 2) * self.hidden_size)

    @cached_property
    def sizes(self) -> dict[str, int]:
        rows = self.num_ranks * self.capacity
        results = (self.topk if self.slot_results else self.num_ranks) * self.capacity
        meta, puts = 2 * _LINE_BYTES * self.meta_lines * rows, int(self.device_api)
        return {
            "header": _LINE_BYTES * self.num_ranks,
            "meta": meta,
            "row_flags": 8 * rows,
            "result_flags": 8 * rows * puts,
            "rows": self.row_bytes * rows * int(puts or not self.is_quantized),
            "results": self.result_bytes * rows * puts,
            "row_packets": self.row_packet_bytes * self.num_ranks * self.row_packet_tokens,
            "result_packets": _packet_bytes(self.result_bytes) * results * (1 - puts),
            "meta_outbox": meta * puts,
            "outbox": self.result_bytes * rows * puts,
        }


def latest(epochs: Sequence[int]) -> int:
    """The last of epochs that are close together, as a signed number of 32 bits; 0 comes behind 2**32 - 1.

    Example: [0xfffffffe, 1, 0] gives 1.
    """
    ahead = max((epoch - epochs[0] + _NUM_EPOCHS // 2) % _NUM_EPOCHS for epoch in epochs)
    return (epochs[0] + ahead) % _NUM_EPOCHS - _NUM_EPOCHS // 2


class Channel(SymmetricBuffers):
    """Buffers for BATCHES_IN_FLIGHT batches."""

    NAME, INSTEAD = "nvshmem_low_latency", "batched_all_to_all"
    layout: BatchLayout

    @torch.inference_mode(False)
    def __init__(self, symmetric: SymmetricArena, layout: BatchLayout, ranks: RankGroup) -> None:
        super().__init__(symmetric, layout, ranks)
        self.counters = torch.empty((BATCHES_IN_FLIGHT, 3), dtype=torch.int64, device=self.device)
        self._free = [True] * BATCHES_IN_FLIGHT
        self.start([1] * BATCHES_IN_FLIGHT)
        self._buffers = [self._buffers_of(batch) for batch in range(BATCHES_IN_FLIGHT)]
        self._rows = [self.part(batch, "rows").view(-1, layout.row_bytes) for batch in range(BATCHES_IN_FLIGHT)]
        self._timeout_ns = int(self.record.timeout_s * 1e9)

    def take(self) -> int:
        """Takes the first free set of buffers; raises RuntimeError if all are taken."""
        for batch, is_free in enumerate(self._free):
            if is_free:
                self._free[batch] = False
                return batch
        raise RuntimeError(
            f"{BATCHES_IN_FLIGHT} batches are between prepare and finalize and nvshmem_low_latency has buffers for no "
            f"more; finalize one first, or call recover() on every rank where they were given up"
        )

    def begins_anew(self) -> bool:
        return all(self._free)

    def give_back(self, batch: int) -> None:
        self._free[batch] = True

    def rows(self, batch: int, dtype: torch.dtype) -> torch.Tensor:
        """A view: received rows `[R * C, K]`, where their senders put them; of 16-bit wire dtypes."""
        return self._rows[batch].view(dtype)

    def common(self, batch: int) -> Any:
        """The part of the kernels' parameters that does not depend on the tokens."""
        return common_type(self.ranks.size)(
            buffers=self._buffers[batch],
            counters=self.counters[batch].data_ptr(),
            status=self.status.data_ptr(),
            record=self.record.words.data_ptr(),
            timeout_ns=self._timeout_ns,
        )

    def _epochs(self) -> Sequence[int]:
        return [latest([counter >> _EPOCH_SHIFT for counter in both]) for *both, _ in self.counters.tolist()]

    def _go_on(self, told: Sequence[Sequence[int]]) -> None:
        self._free = [True] * BATCHES_IN_FLIGHT
        self.start([latest(epochs) + 1 for epochs in zip(*told, strict=True)])

    def start(self, epochs: Sequence[int]) -> None:
        """Lets each set of buffers go on with the batch of its number; all ranks call it before the next."""
        upper = [latest([epoch]) << _EPOCH_SHIFT for epoch in epochs]
        self.counters.copy_(torch.tensor(upper, dtype=torch.int64)[:, None])
        self._let_kernels_wait()

    def _buffers_of(self, batch: int) -> Any:
        start, size = batch * self.layout.batch_bytes, self.ranks.size
        return buffers_type(size)(
            peers=(ctypes.c_uint64 * size)(*(pointer + start if pointer else 0 for pointer in self.region.peers)),
            pes=(ctypes.c_int * size)(*self.region.pes),
            reachable=sum(1 << rank for rank, pointer in enumerate(self.region.peers) if pointer),
            **self.layout.offsets,
            rank=self.ranks.rank,
            capacity=self.layout.capacity,
            row_packet_tokens=self.layout.row_packet_tokens,
        )


class Halves:
    """A kernel launched at once, or in a sending and a later receiving half, each on the stream current at its launch.

    Args:
        check: raises if the kernel must not run any more.
        held: the tensors that it reads and writes; memory of the stream that is current now.
    """

    def __init__(
        self,
        kernel: jit.Kernel,
        params: Any,
        to_send: int,
        to_receive: int,
        blocks: int,
        order: Order,
        check: Callable[[], None],
        held: Sequence[torch.Tensor],
        then: Callable[[], None] | None = None,
    ) -> None:
        self._kernel, self._params = kernel, params
        self._tasks = {SEND: to_send, RECEIVE: to_receive}
        self._blocks, self._order, self._check, self._then = blocks, order, check, then
        self._held, self._stream = held, current_stream(order.device)
        self._left = SEND | RECEIVE

    def send(self) -> None:
        self._launch(SEND & self._left)

    def receive(self) -> None:
        """Launches everything that was not launched yet; may be called again."""
        if self._left:
            self._launch(self._left)
            if current_stream(self._order.device) != self._stream:
                keep_for(torch.cuda.current_stream(self._order.device), self._held)
            self._held = ()
            if self._then is not None:
                self._then()

    def _launch(self, phases: int) -> None:
        self._check()
        self._params.common.phases = phases
        tasks = max(count for phase, count in self._tasks.items() if phase & phases)
        with self._order:
            self._kernel.launch(self._params, (min(max(tasks, 1), self._blocks), 1, 1), _THREADS, early=True)
        self._left &= ~phases


@functools.cache
def buffers_type(num_ranks: int) -> Any:
    """`Buffers` of cuda/low_latency.cuh."""
    return structure(
        ("peers", ctypes.c_uint64 * num_ranks),
        *((name, ctypes.c_uint64) for name in BUFFERS),
        ("pes", ctypes.c_int * num_ranks),
        ("reachable", ctypes.c_uint32),
        *((name, ctypes.c_int) for name in ("rank", "capacity", "row_packet_tokens")),
    )


@functools.cache
def common_type(num_ranks: int) -> Any:
    """`Common` of cuda/low_latency.cuh."""
    return structure(
        ("buffers", buffers_type(num_ranks)),
        ("limits", Limits),
        *((name, ctypes.c_void_p) for name in ("counters", "topk_ids", "owners")),
        *(
            (name, ctypes.c_int)
            for name in ("num_ids", "num_tokens", "phases", "packet_parts", "packet_tasks", "most_tokens")
        ),
        anonymous=("limits",),
    )


@functools.cache
def dispatch_type(num_ranks: int, routed: bool = False) -> Any:
    """`Params` of cuda/low_latency_dispatch.cu, built with ROUTED or without."""
    pointers = ("rows", "weights", "locals", "out", "expert_num_tokens", "expert_row_ids", "positions")
    return structure(
        ("common", common_type(num_ranks)),
        *((name, ctypes.c_void_p) for name in pointers),
        *((name, ctypes.c_int) for name in ("num_local_experts", "shares", "take_parts")),
        *((("router", RouterParams),) if routed else ()),
    )


@functools.cache
def combine_type(num_ranks: int) -> Any:
    """`Params` of cuda/low_latency_combine.cu."""
    return structure(
        ("common", common_type(num_ranks)),
        *((name, ctypes.c_void_p) for name in ("results", "positions", "output", "weights")),
        *((name, ctypes.c_int) for name in ("weighted", "output_parts")),
    )


@functools.cache
def batch_type(num_ranks: int) -> Any:
    """`Batch` of cuda/low_latency_layer.cuh."""
    return structure(("common", common_type(num_ranks)), ("output", ctypes.c_void_p))


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How work is divided among blocks and warps; results have the same bits for any values.

    Attributes:
        packet_parts: the most blocks that share sending one row as packets.
        packet_tasks: the approximate total of these parts: with many rows, each row has fewer.
        take_parts: the most warps that share moving a received row to where it is read.
        output_parts: blocks that share adding up one token.
        expected_tokens: the least number of tokens assumed for other ranks when blocks are counted; the actual number
            is known only on the device.
        list_blocks: the most blocks that list experts if received rows are copied.
        blocks: the most blocks of a kernel.
        routed_tokens: the most tokens for which the dispatch itself chooses experts by softmax; with more, a block
            would choose for several tokens in turn. Grouped routing takes a warp longer than a separate kernel.
        combining_rows: the most tokens of all ranks together for which experts combine a batch if they can, at most
            MOST_COMBINING_ROWS; each rank counts with the most tokens that it may have. 0 for none.
    """

    packet_parts: int = 8
    packet_tasks: int = 1024
    take_parts: int = 8
    output_parts: int = 4
    expected_tokens: int = 4
    list_blocks: int = 264
    blocks: int = 264
    routed_tokens: int = 16
    combining_rows: int = MOST_COMBINING_ROWS

    def blocks_of_expert(self, mean_rows: float, num_local_experts: int) -> int:
        """How many blocks list the same expert and share its rows: one for each row that a full expert has.

        Args:
            mean_rows: rows of an expert on average; a full one has two standard deviations more where routing is even.
        """
        full = math.ceil(mean_rows + 2 * math.sqrt(mean_rows))
        return max(1, min(self.list_blocks // max(num_local_experts, 1), full))


def local_indices(owners: torch.Tensor) -> torch.Tensor:
    """int32 `[num_ids]`: where each id is on its rank, whose experts are in the order of their ids.

    Example: owners [0, 1, 0, 1] give [0, 0, 1, 1].
    """
    same = owners[:, None] == owners[None, :]
    return same.tril(-1).sum(dim=1, dtype=torch.int32)


class _Sent(NamedTuple):
    batch: int
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    positions: torch.Tensor
    expert_rows: tuple[int, int]
    check: Callable[[], None]
    is_combined: bool = False


class LowLatencyPrepareFinalize(NvshmemPrepareFinalize, unchecked=True):
    """BatchedExperts format over NVLink with room for max_num_tokens of every rank; captured in CUDA graphs.

    Experts that say supports_row_ids() get their rows by reference: `[R * C, K]`, where the senders put them, with the
    numbers of each expert's rows in `expert_row_ids`. Others get a copy for each expert, `[El, R * C, K]`. Either way
    an expert's rows are ordered by (source rank, token). The combine has the bits of `batched_all_to_all`, also in a
    batch-invariant layer, where it returns a result for each slot instead of one for each rank.

    Every wait ends after MOE_EP_NVSHMEM_TIMEOUT_S, and the next call (or `check`) raises DispatchTimeoutError.

    Args:
        moe_config: in_dtype f16 or bf16, K a multiple of 16; capacity is its max_num_tokens.
        quant_config: its dispatch_dtype is that of rows on the wire.
        process_group: the EP ranks, at most 16; those of other hosts are reached by NVSHMEM's device library.

    Raises:
        ValueError: what the kernels cannot do, or ranks that are configured differently.
    """

    NAME, INSTEAD = Channel.NAME, Channel.INSTEAD
    MAX_RANKS = 16
    LAYOUT = BatchLayout
    layout: BatchLayout

    def __init__(
        self,
        *,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        super().__init__(moe_config=moe_config, quant_config=quant_config, process_group=process_group)
        self.tuning = tuning or Tuning()
        self.by_reference = False
        symmetric = SymmetricArena.of(self.ranks.group)
        self.layout = BatchLayout.of(moe_config, quant_config, device_api=not symmetric.carries_packets)
        if self.layout.slot_results and self.layout.device_api:
            raise ConfigError(
                f"batch_invariant is set and some of the {moe_config.ep_size} ranks are not joined by NVLink, where "
                f"{self.NAME} cannot return results of single slots; choose all2all_backend={self.INSTEAD!r}"
            )
        self.channel = self._share_memory(Channel)
        self._routed: dict[Any, jit.Kernel] = {}
        self._owner_table = self.placement.owners(self.channel.device)
        self._local_table = local_indices(self.placement.on_host).to(self.channel.device)

    @staticmethod
    def size_hint(moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig | None = None) -> dict[str, int]:
        """Bytes that one backend of this shape takes on each rank.

        Returns:
            "symmetric": of the arena, shared by all backends of this shape; "expanded" and "by_reference": the plain
            device memory of one batch beside it, for the one face or the other; "expert_outputs": what the experts
            return for one batch, in scratch that layers share.
        """
        layout = BatchLayout.of(moe_config, quant_config)
        El, rows = moe_config.num_local_experts, layout.num_ranks * layout.capacity
        numbers, row_bytes = 4 * El + 4 * rows * layout.topk, 2 * layout.hidden_size
        return {
            "symmetric": layout.symmetric_bytes,
            "expanded": El * rows * row_bytes + numbers,
            "by_reference": 4 * El * rows + numbers + (rows * row_bytes if layout.is_quantized else 0),
            "expert_outputs": El * rows * layout.result_bytes,
        }

    @classmethod
    def depends_on_batch(cls) -> str | None:
        return None

    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.BatchedExperts

    def supports_cuda_graph(self) -> bool:
        return True

    def hand_over_row_ids(self) -> None:
        self.by_reference = True

    def most_deferred_tokens(self) -> int:
        layout = self.layout
        has_router = not layout.device_api and layout.topk == self.moe_config.experts_per_token
        # Weights may differ in the last bit from those of more tokens.
        return self.tuning.routed_tokens if has_router and not layout.slot_results else 0

    @cached_property
    def _build(self) -> PeerBuild:
        defines = kernel_source("low_latency_combine", self.layout, self.moe_config.in_dtype).defines
        return PeerBuild(defines=defines, folder=CUDA, topk=self.layout.topk)

    def peer_build(self) -> PeerBuild | None:
        layout = self.layout
        is_plain = not (layout.device_api or layout.is_quantized or layout.slot_results or layout.f32_results)
        # A kernel for each number of ranks, which those that remain would have to compile before they serve again.
        may_change = is_elastic(self.ranks.group)
        return self._build if is_plain and not may_change and layout.num_ranks <= self._combining_rows() else None

    def _combining_rows(self) -> int:
        return min(self.tuning.combining_rows, MOST_COMBINING_ROWS)

    def _routed_kernel(self, deferred: Any) -> jit.Kernel | None:
        """Returns the dispatch kernel that makes the deferred choice itself; None before the first uncaptured pass."""
        kernel = self._routed.get(deferred.defines)
        if kernel is None and not torch.cuda.is_current_stream_capturing():
            source = kernel_source("low_latency_dispatch", self.layout, self.moe_config.in_dtype)
            source = replace(source, defines=(*source.defines, *deferred.defines, ("ROUTED", "1")))
            kernel = self._routed[deferred.defines] = jit.load(source, self.channel.order.device)
        return kernel

    def _in_flight(
        self, device: torch.device, begin: Callable[[], Pending[Result]], inputs: Sequence[object]
    ) -> Pending[Result]:
        """Launches the sending half of the kernel at once, and the receiving half on the stream that waits."""
        pending = begin()
        pending.start()
        return pending

    def _send(self, batch: Batch) -> Pending[Dispatched]:
        self.check()
        self._check_batch(batch)
        layout, config, device = self.layout, self.moe_config, batch.rows.device
        El, max_rows = config.num_local_experts, layout.num_ranks * layout.capacity
        new = functools.partial(torch.empty, device=device)
        most_tokens = max(layout.capacity if batch.most_tokens is None else min(batch.most_tokens, layout.capacity), 1)
        is_left = batch.experts_combine and layout.num_ranks * most_tokens <= self._combining_rows()
        counts, positions = new(El, dtype=torch.int32), new(max_rows * layout.topk, dtype=torch.int32)
        row_ids = new((El, max_rows), dtype=torch.int32) if self.by_reference else None
        out = None
        if not self.by_reference and not is_left:
            out = new((El, max_rows, layout.hidden_size), dtype=config.in_dtype)
        elif layout.is_quantized:
            out = new((max_rows, layout.hidden_size), dtype=config.in_dtype)
        # After all allocations, which may fail.
        index = self.channel.take()
        rows = self.channel.rows(index, config.in_dtype) if out is None else out
        num_tokens = batch.topk_ids.size(0)
        mean_rows = num_tokens * layout.num_ranks * layout.topk / self._owner_table.numel()
        shares = 1 if self.by_reference else self.tuning.blocks_of_expert(mean_rows, El)
        kernel, router = self.kernels["low_latency_dispatch"], {}
        if batch.deferred is not None:
            routed = self._routed_kernel(batch.deferred) if batch.deferred.is_plain_softmax else None
            if routed is None or num_tokens > self.tuning.routed_tokens:
                batch.deferred.settle()
            else:
                kernel, router = routed, {"router": batch.deferred.take()}
        params = dispatch_type(layout.num_ranks, bool(router))(
            common=self._common(index, batch.topk_ids, most_tokens),
            rows=batch.rows.data_ptr(),
            weights=batch.topk_weights.data_ptr(),
            locals=self._local_table.data_ptr(),
            out=None if out is None else out.data_ptr(),
            expert_num_tokens=counts.data_ptr(),
            expert_row_ids=None if row_ids is None else row_ids.data_ptr(),
            positions=None if is_left else positions.data_ptr(),
            num_local_experts=El,
            shares=shares,
            take_parts=self.tuning.take_parts,
            **router,
        )
        to_send = 1 + num_tokens * self.tuning.packet_parts
        to_receive = El * shares
        if is_left:
            to_receive = -(-layout.num_ranks * most_tokens // WARPS)
        elif self.by_reference:
            expected = max(num_tokens, self.tuning.expected_tokens) * layout.num_ranks
            to_receive += -(-expected * self.tuning.take_parts // WARPS)
        made = [tensor for tensor in (out, row_ids) if tensor is not None]
        check = self._begin_batch()
        launch = Halves(
            kernel, params, to_send, to_receive, self.tuning.blocks,
            self.channel.order, check, [batch.rows, batch.topk_ids, batch.topk_weights, counts, positions, *made],
        )  # fmt: skip
        meta = ExpertTokensMetadata(counts, None, row_ids)
        sent = _Sent(index, batch.topk_ids, batch.topk_weights, positions, (El, max_rows), check, is_left)

        def receive() -> Dispatched:
            launch.receive()
            if is_left:
                return Dispatched(rows=batch.rows, peers=self._peers(index, batch.topk_ids, most_tokens), handle=sent)
            return Dispatched(rows=rows, expert_tokens_meta=meta, handle=sent)

        return Pending(launch.receive, receive, launch.send)

    def _peers(self, index: int, topk_ids: torch.Tensor, most_tokens: int) -> PeerBatch:
        """Returns the batch in the form for experts that combine it."""
        layout = self.layout
        return PeerBatch(
            params=batch_type(layout.num_ranks)(common=self._common(index, topk_ids, most_tokens)),
            build=self._build,
            rows=self.channel.part(index, "row_packets").data_ptr(),
            num_rows=layout.num_ranks * most_tokens,
            launching=self.channel.order,
        )

    def _return(self, sent: _Sent, call: CombineCall) -> Pending[None]:
        output, expert_output, dispatched, reduce_impl = call
        self.check()
        sent.check()
        if sent.is_combined:
            self.channel.give_back(sent.batch)
            if output.data_ptr() != expert_output.data_ptr():
                output.copy_(expert_output)
            return Pending(lambda: None, lambda: None)
        check_delegated(self.NAME, reduce_impl)
        layout, num_tokens = self.layout, sent.topk_ids.size(0)
        in_dtype, sent_dtype = self.moe_config.in_dtype, wire_dtype(self.moe_config.in_dtype)
        if in_dtype is expert_output.dtype is torch.float16:  # of experts that cannot write f32
            expert_output = expert_output.float()
        for name, tensor, shape, dtype in (
            ("fused_expert_output", expert_output, (*sent.expert_rows, layout.hidden_size), sent_dtype),
            ("output", output, (num_tokens, layout.hidden_size), in_dtype),
        ):
            check_tensor(name, tensor, shape, dtype, output.device, contiguous=True)
        params = combine_type(layout.num_ranks)(
            common=self._common(sent.batch, sent.topk_ids),
            results=expert_output.data_ptr(),
            positions=sent.positions.data_ptr(),
            output=output.data_ptr(),
            weights=sent.topk_weights.data_ptr(),
            weighted=int(not dispatched.rows_are_weighted),
            output_parts=self.tuning.output_parts,
        )
        to_send = max(num_tokens, self.tuning.expected_tokens) * layout.num_ranks * self.tuning.packet_parts
        to_receive = num_tokens * self.tuning.output_parts
        held = (sent.topk_ids, sent.topk_weights, sent.positions, output, expert_output)
        launch = Halves(
            self.kernels["low_latency_combine"], params, to_send, to_receive, self.tuning.blocks,
            self.channel.order, sent.check, held,
            lambda: self.channel.give_back(sent.batch),
        )  # fmt: skip
        return Pending(launch.receive, launch.receive, launch.send)

    def _common(self, index: int, topk_ids: torch.Tensor, most_tokens: int = 0) -> Any:
        common = self.channel.common(index)
        common.topk_ids = topk_ids.data_ptr()
        common.owners = self._owner_table.data_ptr()
        common.num_ids = self._owner_table.numel()
        common.num_tokens, common.most_tokens = topk_ids.size(0), most_tokens
        common.packet_parts, common.packet_tasks = self.tuning.packet_parts, self.tuning.packet_tasks
        return common

"""Base of the backends on torch.distributed: checks, the handle of a batch, and the asynchronous forms.

A backend implements dispatch and combine, each as a `Pending`: the collective steps are in flight when it is made,
`wait()` waits for the data and queues the remaining work on it, and `receive()` returns the result. `dispatch` and
`combine` do all of it at once, `dispatch_async` and `combine_async` return the `Pending` to the caller.

On the CPU these are asynchronous collectives. On CUDA the asynchronous forms run on the backend's own stream, which
waits for the caller's stream when they are called; `wait()` makes the stream that is current at that time wait for
them. Several batches may be in flight; all ranks must make the calls of all batches in the same order. Tensors passed
to an asynchronous form must not be written before `wait()` was called.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from moe_ep.activation import MoEActivation
from moe_ep.arguments import as_int32, check_tensors
from moe_ep.config import ACTIVATION_DTYPES, FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.dispatch.batch import (
    Batch,
    check_arguments,
    check_made_for,
    check_tensor,
    keep_for,
    side_by_side,
    wire_dtype,
)
from moe_ep.dispatch.rank_group import Placement, RankGroup, owners_of
from moe_ep.eplb.packing import ExpertRows
from moe_ep.errors import ConfigError
from moe_ep.expert_map import expert_owner_table
from moe_ep.kernels.dispatch_rows import sum_rows
from moe_ep.modular_kernel.contracts import BatchExchange, Copied, Dispatched, Dispatcher, Pending, Routing
from moe_ep.modular_kernel.weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
    undelegated,
)
from moe_ep.modular_kernel.workspace import current_stream

Result = TypeVar("Result")

_CODES = (None, torch.float8_e4m3fn, torch.int8)
_ACTIVATIONS = tuple(MoEActivation)


@dataclass(slots=True)
class Handle:
    """The state of a dispatch that its combine needs.

    Attributes:
        sent: the backend's own part.
        stream: the stream that the batch's memory belongs to; 0 on the CPU.
    """

    sent: Any
    stream: int
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    is_combined: bool = False


class CombineCall(NamedTuple):
    """The arguments of `Dispatcher.combine`."""

    output: torch.Tensor
    expert_output: torch.Tensor
    dispatched: Dispatched
    reduce_impl: TopKWeightAndReduce


class SlotsSent(NamedTuple):
    """The state of a dispatch that the combine of single slots needs.

    Attributes:
        slots: int32 `[T, topk]`: the returned row of each of this rank's slots (`payload.make_slot_plan`).
        weights: f32 `[T, topk]`.
        returning: the number of rows that each rank returns.
        arrived: for each rank, the slots of its tokens whose expert is on this rank.
    """

    slots: torch.Tensor
    weights: torch.Tensor
    returning: list[int]
    arrived: list[int]


class TorchDistributedPrepareFinalize(Dispatcher):
    """Base of the backends on torch.distributed; a subclass says how rows are transferred.

    Args:
        moe_config: shapes, placement and, in max_num_tokens, the capacity per rank; the same on every rank.
        quant_config: its dispatch_dtype is the dtype of rows on the wire, on every rank; None leaves it to prepare.
        process_group: the EP ranks in ep_rank order; None for the default group.
        owners: int32 `[E + shared]`, the rank of the group that each id goes to; None for the placement's.

    Attributes:
        side_stream: the stream of the asynchronous forms on CUDA, from their first call on.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: a group whose size is not ep_size, or num_local_experts that does not fit the placement.
    """

    def __init__(
        self,
        *,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        owners: torch.Tensor | None = None,
    ) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config
        self.ranks = RankGroup(moe_config, process_group)
        self.placement = Placement(owners_of(moe_config) if owners is None else owners, moe_config.ep_rank)
        if moe_config.num_local_experts != self.placement.num_local:
            raise ValueError(
                f"num_local_experts is {moe_config.num_local_experts}; with {moe_config.num_experts} routed and "
                f"{moe_config.num_fused_shared_experts} shared experts EP rank {moe_config.ep_rank} of "
                f"{moe_config.ep_size} holds {self.placement.num_local}"
            )
        self.side_stream: torch.cuda.Stream | None = None

    @classmethod
    def unusable_reason(cls) -> str | None:
        if not dist.is_available():
            return "this torch was built without torch.distributed; install a build that has it"
        return None

    def topk_indices_dtype(self) -> torch.dtype | None:
        """The dtype of ids that the backend computes with; other integer dtypes are converted."""
        return torch.int32

    def num_dispatchers(self) -> int:
        return self.ranks.size

    @classmethod
    def depends_on_batch(cls) -> str | None:
        return None

    def output_is_reduced(self) -> bool:
        return True

    def accepts_f32_output(self) -> bool:
        return True

    def supports_async(self) -> bool:
        return True

    def batch_exchange(self) -> BatchExchange | None:
        return RankExchange(self.ranks)

    def check(self) -> None:
        self.ranks.detector.check()

    def report_failure(self, error: Exception) -> None:
        self.ranks.detector.report(error)

    def dispatch(self, hidden_states: torch.Tensor, routing: Routing, quant_config: FusedMoEQuantConfig) -> Dispatched:
        return self._begin(hidden_states, routing, quant_config).receive()

    def dispatch_async(
        self, hidden_states: torch.Tensor, routing: Routing, quant_config: FusedMoEQuantConfig
    ) -> Pending[Dispatched]:
        return self._in_flight(
            hidden_states.device,
            lambda: self._begin(hidden_states, routing, quant_config),
            (hidden_states, routing),
        )

    def combine(
        self,
        output: torch.Tensor,
        expert_output: torch.Tensor,
        dispatched: Dispatched,
        reduce_impl: TopKWeightAndReduce,
    ) -> None:
        self._begin_combine(CombineCall(output, expert_output, dispatched, reduce_impl)).receive()

    def combine_async(
        self,
        output: torch.Tensor,
        expert_output: torch.Tensor,
        dispatched: Dispatched,
        reduce_impl: TopKWeightAndReduce,
    ) -> Pending[None]:
        call = CombineCall(output, expert_output, dispatched, reduce_impl)
        return self._in_flight(output.device, lambda: self._begin_combine(call), call[:3])

    def combine_slots(self, output: torch.Tensor, expert_output: torch.Tensor, dispatched: Dispatched) -> None:
        """Runs the combine of a batch-invariant layer without its sum: `output` `[T, topk, K]` gets the unweighted
        result of each slot, and zeros if a slot has no expert."""
        handle: Handle = dispatched.handle
        if not isinstance(handle.sent, SlotsSent):
            raise ConfigError(
                f"batch_invariant is set and a level of two_level is {type(self).__name__}, which returns no results "
                f"of single slots; choose all_to_all"
            )
        slots = handle.sent.slots.view(-1, 1)
        each = replace(handle, sent=handle.sent._replace(slots=slots), shape=(slots.size(0), output.size(2)))
        as_they_are = replace(dispatched, handle=each, rows_are_weighted=True)
        self.combine(output.view(*each.shape), expert_output, as_they_are, TopKWeightAndReduceContiguous())
        handle.is_combined = True

    def passes_codes(self, dtype: torch.dtype | None) -> bool:
        """Whether `pass_on` accepts codes of this dtype."""
        return True

    def pass_on(self, arrived: Dispatched, routing: Routing) -> Dispatched:
        """Dispatches rows that another backend returned as codes, without dequantizing them."""
        return self._begin(arrived.rows, routing, FusedMoEQuantConfig.unquantized(), arrived.row_scales).receive()

    @abstractmethod
    def _send(self, batch: Batch) -> Pending[Dispatched]:
        """Sends a batch; the result's handle is the backend's own type."""

    @abstractmethod
    def _return(self, sent: Any, call: CombineCall) -> Pending[None]:
        """Sends results back to the tokens' ranks; `receive` writes the output.

        Args:
            sent: the backend's handle.
        """

    def _in_flight(
        self, device: torch.device, begin: Callable[[], Pending[Result]], inputs: Sequence[object]
    ) -> Pending[Result]:
        """Starts `begin`; on CUDA on the backend's own stream, after the work of the current stream.

        Args:
            inputs: the tensors that `begin` reads and writes.
        """
        if device.type != "cuda":
            return begin()
        if self.side_stream is None:
            self.side_stream = torch.cuda.Stream(device)
        side, caller = self.side_stream, torch.cuda.current_stream(device)
        side.wait_stream(caller)
        with torch.cuda.stream(side):
            pending = begin()
            pending.wait()
            done = side.record_event()
        # The side stream reads inputs whose memory belongs to the caller's. They are held until `wait`, which makes the
        # caller's stream wait for the reads; where another stream waits, the allocator is told of the side stream.
        held, consumers = [inputs], []

        def wait() -> None:
            if held:
                consumer = torch.cuda.current_stream(device)
                consumer.wait_event(done)
                consumers.append(consumer)
                if consumer != caller:
                    keep_for(side, held)
                held.clear()

        def receive() -> Result:
            wait()
            result = pending.receive()
            for consumer in (*consumers, torch.cuda.current_stream(device)):
                keep_for(consumer, result)
            return result

        return Pending(wait, receive)

    def _begin(
        self,
        hidden_states: torch.Tensor,
        routing: Routing,
        quant_config: FusedMoEQuantConfig,
        scales: torch.Tensor | None = None,
    ) -> Pending[Dispatched]:
        """Checks a batch and sends it.

        Args:
            scales: the scales of hidden_states if they are codes, as in `pass_on`.
        """
        weights, ids, is_weighted = routing.topk_weights, routing.topk_ids, routing.apply_router_weight_on_input
        deferred = routing.deferred
        if deferred is not None and is_weighted:
            deferred.settle()
            deferred = None
        with self.ranks.detector:
            known_ids = self.placement.num_ids
            if routing.num_experts != known_ids:
                raise ValueError(
                    f"num_experts is {routing.num_experts}; the backend was made for {known_ids} ids "
                    f"({self.moe_config.num_experts} routed, {self.moe_config.num_fused_shared_experts} shared)"
                )
            if routing.expert_map is not None:
                self.placement.check(routing.expert_map)
            capacity = self.max_num_tokens_per_rank()
            if scales is None:
                check_arguments(hidden_states, weights, ids, is_weighted, known_ids, capacity)
                check_made_for(self.moe_config, hidden_states, ids)
            self._must_agree(quant_config, is_weighted, hidden_states.device)
            rows = (hidden_states * weights).to(hidden_states.dtype) if is_weighted else hidden_states
            code_dtype = self._wire(quant_config).dispatch_dtype if scales is None else hidden_states.dtype
            batch = Batch(
                rows=side_by_side(rows) if scales is None else rows,
                topk_ids=side_by_side(as_int32(ids)),
                topk_weights=weights.contiguous(),
                owners=self.placement.owners(rows.device),
                expert_map=self.placement.expert_map(rows.device),
                code_dtype=code_dtype,
                keeps_codes=scales is not None or (code_dtype is not None and code_dtype == quant_config.input_dtype),
                scales=scales,
                deferred=deferred,
                most_tokens=routing.most_tokens,
                experts_combine=routing.experts_combine and not is_weighted,
            )
            pending = self._send(batch)

        stream, shape = _stream_of(rows), (rows.size(0), rows.size(1))

        def receive() -> Dispatched:
            dispatched = pending.receive()
            dispatched.rows_are_weighted = is_weighted
            dispatched.handle = Handle(dispatched.handle, stream, shape, self.moe_config.in_dtype, rows.device)
            return dispatched

        return Pending(pending.wait, receive, pending.start)

    def _begin_combine(self, call: CombineCall) -> Pending[None]:
        output, handle = call.output, call.dispatched.handle
        with self.ranks.detector:
            if handle.is_combined:
                raise RuntimeError("this batch was combined already; dispatch it again to combine it again")
            # Two-level dispatch adds up a host's results in f32.
            is_wide = isinstance(output, torch.Tensor) and output.dtype == wire_dtype(handle.dtype)
            dtype = output.dtype if is_wide else handle.dtype
            check_tensor("output", output, handle.shape, dtype, handle.device)
            if _stream_of(output) != handle.stream:
                keep_for(torch.cuda.current_stream(handle.device), handle.sent)
            send = self._return_slots if isinstance(handle.sent, SlotsSent) else self._return
            pending = send(handle.sent, call)
            handle.is_combined = True
            return pending

    def _reduced(self, call: CombineCall, num_rows: int, contiguous: bool = False) -> torch.Tensor:
        """Returns the sum of this rank's experts for every received row, contiguous `[num_rows, K]`; Standard format.

        Outputs that the experts reduced already (NoOP) are not copied if the dtype is right; experts that delegate
        left one row per slot.
        """
        output, expert_output, dispatched, reduce_impl = call
        check_tensors(fused_expert_output=expert_output)
        reduce_impl, dtype, rows = undelegated(reduce_impl), wire_dtype(output.dtype), None
        ids: Any = dispatched.topk_ids  # which every backend of this format returns
        weights: Any = dispatched.topk_weights
        if expert_output.dtype != dtype and not isinstance(reduce_impl, TopKWeightAndReduceNoOP):
            rows = expert_output.new_empty((len(dispatched.rows), expert_output.size(-1)), dtype=dtype)
        rows = reduce_impl.apply(rows, expert_output, weights, ids, dispatched.rows_are_weighted)
        if rows.dtype == output.dtype:
            rows = rows.to(dtype)
        rows, shape = rows.contiguous(), (num_rows, output.size(1))
        check_tensor("fused_expert_output (reduced)", rows, shape, dtype, output.device, contiguous)
        return rows

    def _return_slots(self, sent: SlotsSent, call: CombineCall) -> Pending[None]:
        """Runs the combine of a batch-invariant layer, Standard format: every slot's row returns to the token's rank,
        which weights and adds them in slot order. So no sum depends on the placement of experts."""
        output, expert_output, dispatched, _ = call
        ids: Any = dispatched.topk_ids
        dtype, hidden_size = wire_dtype(output.dtype), output.size(1)
        check_tensor("fused_expert_output", expert_output, (*ids.shape, hidden_size), dtype, output.device)
        rows = expert_output.reshape(-1, hidden_size)[(ids.flatten() >= 0).nonzero().flatten()]
        returned = rows.new_empty((sum(sent.returning), hidden_size))
        steps = self.ranks.steps("combine", output.device)
        steps.all_to_all(returned, rows, sent.returning, sent.arrived)
        weights = None if dispatched.rows_are_weighted else sent.weights
        return steps.then(lambda: sum_rows(returned, sent.slots, output, weights))

    def _wire(self, quant_config: FusedMoEQuantConfig) -> FusedMoEQuantConfig:
        return quant_config if self.quant_config is None else self.quant_config

    def _must_agree(self, quant_config: FusedMoEQuantConfig, is_weighted: bool, device: torch.device) -> None:
        """Raises ConfigError on every rank if a setting that determines messages or results differs between ranks."""
        if self.ranks.have_agreed:
            return
        config = self.moe_config
        settings = {
            "the kind of backend, as a checksum,": zlib.crc32(type(self).__name__.encode()),
            "num_experts, redundant ones included,": config.num_experts,
            "the number of fused shared experts": config.num_fused_shared_experts,
            "the placement of experts, as a checksum,": self.placement.checksum(config.num_experts),
            "top_k": config.experts_per_token,
            "hidden_size": config.hidden_dim,
            "max_num_tokens": self.max_num_tokens_per_rank() or 0,
            "params_dtype, of f32, f16 and bf16 (0 to 2),": ACTIVATION_DTYPES.index(config.in_dtype),
            f"activation, of {_ACTIVATIONS[0]} to {_ACTIVATIONS[-1]} (0 to {len(_ACTIVATIONS) - 1}),": (
                _ACTIVATIONS.index(config.activation)
            ),
            "apply_router_weight_on_input": int(is_weighted),
            "batch_invariant": int(config.batch_invariant),
            "dispatch_dtype, of none, e4m3 and int8 (0 to 2),": _CODES.index(self._wire(quant_config).dispatch_dtype),
        }
        self.ranks.must_agree(settings, device)


class RankExchange:
    """`BatchExchange` by collectives of the backend's group; counts are on the host."""

    on_device = opens_together = False

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks, self.rank, self.size = ranks, ranks.rank, ranks.size

    def open(self, resident: Sequence[torch.Tensor], scratch: Sequence[torch.Tensor], num_slots: int) -> _RankCopies:
        return _RankCopies(self._ranks, ExpertRows(resident), ExpertRows(scratch), num_slots)

    def gather(self, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
        known = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts).flatten().long()
        counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, known, torch.ones_like(known))
        everyones = counts.new_empty(self.size * num_experts)
        steps = self._ranks.steps("balancing of a batch", counts.device)
        steps.all_gather(everyones, counts[:-1])
        return torch.tensor(steps.on_host(everyones.view(self.size, -1)).get(), device="cpu")


class _RankCopies:
    """`ExpertCopies` of a RankExchange: an expert is one row of bytes."""

    def __init__(self, ranks: RankGroup, resident: ExpertRows, scratch: ExpertRows, num_slots: int) -> None:
        self._ranks, self._resident, self._scratch = ranks, resident, scratch
        self._owners = expert_owner_table(ranks.size, num_slots).tolist()

    def start(self, sources: torch.Tensor) -> Pending[Copied]:
        rank, owners = self._ranks.rank, self._owners
        copies = [
            (owners[slot], to, scratch, slot)
            for to, of_rank in enumerate(sources.tolist())
            for scratch, slot in enumerate(of_rank)
            if slot >= 0
        ]
        # Both sides order copies by the other rank, and then by its slots.
        sends = [(to, slot - owners.index(rank)) for source, to, _, slot in sorted(copies) if source == rank]
        receives = [(source, scratch) for source, to, scratch, _ in sorted(copies) if to == rank]
        rows = torch.empty(len(sends), self._resident.row_bytes, dtype=torch.uint8, device=self._resident.device)
        self._resident.pack([slot for _, slot in sends], list(rows))
        sent, received = (
            [[other for other, _ in part].count(peer) for peer in range(self._ranks.size)] for part in (sends, receives)
        )
        arrived = rows.new_empty(len(receives), rows.size(1))
        steps = self._ranks.steps("balancing of a batch", rows.device)
        steps.all_to_all(arrived, rows, received, sent)

        def write() -> Copied:
            self._scratch.write(list(arrived), [scratch for _, scratch in receives])
            return Copied(len(copies), len(receives))

        return steps.then(write)


def _stream_of(tensor: torch.Tensor) -> int:
    """The handle of the current stream of its GPU; 0 on the CPU."""
    return current_stream(tensor.device) if tensor.is_cuda else 0


def check_delegated(backend: str, reduce_impl: TopKWeightAndReduce) -> None:
    """Raises ValueError unless the experts leave weighting and reducing to the backend, as batched experts must."""
    if not isinstance(reduce_impl, TopKWeightAndReduceDelegate):
        raise ValueError(
            f"weight_and_reduce_impl is {reduce_impl!r}; {backend} weights and reduces itself, so batched experts must "
            f"leave it to it (TopKWeightAndReduceDelegate)"
        )

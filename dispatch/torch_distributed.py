"""The frame of the backends on torch.distributed: what is checked, what is remembered, and the asynchronous forms.

A backend says how a batch is dispatched and how it is combined, each as a `Pending`: the collective steps are under way
when it is made, `wait()` waits for the data and `receive()` gives the result. prepare and finalize do all of it at
once; prepare_async and finalize_async hand the two halves to the caller.

On CUDA the asynchronous forms run on a stream of the backend's own, which waits for the caller's stream when they are
called; `hook()` makes the stream that is current then wait for them. On the CPU they are asynchronous collectives.
Several batches may be under way; what finalize needs of each is kept by prepare and found again by the topk_ids that
finalize is given (`OpenBatches`). All ranks must make the calls of all batches in one order. Tensors handed to an
asynchronous form must not be written before its hook() was called.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_ep.config import ACTIVATION_DTYPES, FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.dispatch.batch import (
    Batch,
    OpenBatches,
    Pending,
    check_arguments,
    check_made_for,
    check_tensor,
    keep_for,
    side_by_side,
    wire_dtype,
)
from moe_ep.dispatch.placement import Placement, owners_of
from moe_ep.dispatch.rank_group import RankGroup
from moe_ep.dispatch.side_stream import SideStream
from moe_ep.modular_kernel.contracts import FusedMoEPrepareAndFinalize, PrepareResult
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce
from moe_ep.modular_kernel.workspace import current_stream


class _Sent(NamedTuple):
    """A batch between prepare and finalize: what the combine needs, the stream that its memory belongs to (0 on the
    CPU), and what the output must be."""

    handle: Any
    stream: int
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


class TorchDistributedPrepareFinalize(FusedMoEPrepareAndFinalize):
    """Everything of a backend but how rows travel.

    Args:
        moe_config: shapes, placement and, in max_num_tokens, the capacity per rank; the same on every rank.
        quant_config: its dispatch_dtype is that of rows on the wire, on every rank; None leaves it to prepare's.
        process_group: the EP ranks in ep_rank order; None for the default group.
        owners: int32 `[E + shared]`, the rank of the group that each id goes to; None for that of the placement.

    Raises:
        RuntimeError: torch.distributed is not initialised.
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
        self._open: OpenBatches[_Sent] = OpenBatches()
        self._side = SideStream()

    @classmethod
    def unusable_reason(cls) -> str | None:
        if not dist.is_available():
            return "this torch was built without torch.distributed; install a build that has it"
        return None

    def topk_indices_dtype(self) -> torch.dtype | None:
        """What it computes with; any other integer type is converted."""
        return torch.int32

    def num_dispatchers(self) -> int:
        return self.ranks.size

    def output_is_reduced(self) -> bool:
        return True

    def accepts_f32_output(self) -> bool:
        return True

    def supports_async(self) -> bool:
        return True

    @abstractmethod
    def _dispatch(self, batch: Batch) -> Pending[tuple[PrepareResult, Any]]:
        """Sends a batch; receives what prepare returns, and what the combine will need."""

    @abstractmethod
    def _combine(
        self,
        handle: Any,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> Pending[None]:
        """Sends results home; receiving them writes `output`."""

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
    ) -> PrepareResult:
        return self._begin(
            a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config
        ).receive()

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
    ) -> tuple[Callable[[], None], Callable[[], PrepareResult]]:
        args = (a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config)
        if a1.is_cuda:
            return self._side.run(a1.device, self.prepare, *args)
        pending = self._begin(*args)
        return pending.wait, pending.receive

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None:
        args = (output, fused_expert_output, topk_weights, topk_ids)
        self._begin_combine(*args, apply_router_weight_on_input, weight_and_reduce_impl).receive()

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        args = (output, fused_expert_output, topk_weights, topk_ids)
        if output.is_cuda:
            return self._side.run(
                output.device, self.finalize, *args, apply_router_weight_on_input, weight_and_reduce_impl
            )
        pending = self._begin_combine(*args, apply_router_weight_on_input, weight_and_reduce_impl)
        return pending.wait, pending.receive

    def _begin(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
    ) -> Pending[PrepareResult]:
        with self.ranks.notes:
            known_ids = self.placement.num_ids
            if num_experts != known_ids:
                raise ValueError(
                    f"num_experts is {num_experts}; the backend was made for {known_ids} ids "
                    f"({self.moe_config.num_experts} routed, {self.moe_config.num_fused_shared_experts} shared)"
                )
            if expert_map is not None:
                self.placement.check(expert_map)
            capacity = self.max_num_tokens_per_rank()
            check_arguments(a1, topk_weights, topk_ids, apply_router_weight_on_input, known_ids, capacity)
            check_made_for(self.moe_config, a1, topk_ids)
            self._must_agree(quant_config, a1.device)
            rows = (a1 * topk_weights).to(a1.dtype) if apply_router_weight_on_input else a1
            batch = Batch(
                rows=side_by_side(rows),
                topk_ids=side_by_side(topk_ids.to(torch.int32)),
                topk_weights=topk_weights.contiguous(),
                owners=self.placement.owners(a1.device),
                expert_map=self.placement.expert_map(a1.device),
                quantized=self._wire(quant_config).dispatch_dtype is not None,
            )
            pending = self._dispatch(batch)

        what = (_stream_of(rows), (rows.size(0), rows.size(1)), rows.dtype, rows.device)

        def receive() -> PrepareResult:
            result, handle = pending.receive()
            self._open.put(topk_ids if result[3] is None else result[3], _Sent(handle, *what))
            return result

        return Pending(pending.wait, receive, pending.start)

    def _begin_combine(self, output: torch.Tensor, fused_expert_output: torch.Tensor, *args: Any) -> Pending[None]:
        """Sends results home; a batch whose results are refused stays open.

        Args:
            args: the others of finalize, topk_weights and topk_ids first.
        """
        with self._open.taken(args[1]) as sent, self.ranks.notes:
            # Two-level dispatch adds up a host's results in f32.
            wire = wire_dtype(sent.dtype) if self.accepts_f32_output() else sent.dtype
            is_wide = isinstance(output, torch.Tensor) and output.dtype == wire
            check_tensor("output", output, sent.shape, wire if is_wide else sent.dtype, sent.device)
            if _stream_of(output) != sent.stream:
                keep_for(torch.cuda.current_stream(sent.device), sent.handle)
            return self._combine(sent.handle, output, fused_expert_output, *args)

    def _wire(self, quant_config: FusedMoEQuantConfig) -> FusedMoEQuantConfig:
        return quant_config if self.quant_config is None else self.quant_config

    def _must_agree(self, quant_config: FusedMoEQuantConfig, device: torch.device) -> None:
        """ConfigError on every rank where they do not have in common what makes their messages fit."""
        if self.ranks.have_agreed:
            return
        config = self.moe_config
        settings = {
            "num_experts, redundant ones included,": config.num_experts,
            "the number of fused shared experts": config.num_fused_shared_experts,
            "the placement of experts, as a checksum,": self.placement.checksum(config.num_experts),
            "top_k": config.experts_per_token,
            "hidden_size": config.hidden_dim,
            "max_num_tokens": self.max_num_tokens_per_rank() or 0,
            "params_dtype, of f32, f16 and bf16 (0 to 2),": ACTIVATION_DTYPES.index(config.in_dtype),
            "whether rows travel as fp8": int(self._wire(quant_config).dispatch_dtype is not None),
        }
        self.ranks.must_agree(settings, device)


def _stream_of(tensor: torch.Tensor) -> int:
    """The handle of the current stream of its GPU; 0 on the CPU."""
    return current_stream(tensor.device) if tensor.is_cuda else 0

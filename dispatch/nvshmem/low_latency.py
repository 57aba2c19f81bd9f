"""Decode over NVLink: a dispatch is one kernel, a combine is one, and no rank waits for more than its own rows.

Kernels write rows straight into the other ranks' memory. cuda/low_latency_dispatch.cu and low_latency_combine.cu say
what they do; `channel` has the protocol.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.dispatch.batch import Batch, check_tensor
from moe_ep.dispatch.nvshmem import arena
from moe_ep.dispatch.nvshmem.backend import NvshmemPrepareFinalize, facts_of
from moe_ep.dispatch.nvshmem.channel import Channel
from moe_ep.dispatch.nvshmem.kernels import KERNELS, WARPS, Halves, combine_type, dispatch_type, kernel_source
from moe_ep.dispatch.nvshmem.layout import BATCHES_IN_FLIGHT, BatchLayout
from moe_ep.dispatch.nvshmem.low_latency_setup import Tuning, layout_of, local_indices
from moe_ep.dispatch.torch_distributed import Result, check_delegated
from moe_ep.kernels import jit
from moe_ep.modular_kernel.contracts import (
    Compilation,
    Dispatched,
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    Pending,
)
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce


class _Sent(NamedTuple):
    batch: int
    topk_ids: torch.Tensor
    positions: torch.Tensor
    expert_rows: tuple[int, int]
    check: Callable[[], None]


class LowLatencyPrepareFinalize(NvshmemPrepareFinalize, unchecked=True):
    """BatchedExperts format over NVLink with room for max_num_tokens of every rank; captured in CUDA graphs.

    Experts that say supports_row_ids() get their rows by reference: `[R * C, K]`, where the senders put them, with the
    numbers of each expert's rows in `expert_row_ids`. Others get a copy for each expert, `[El, R * C, K]`. Either way
    an expert's rows are ordered by (source rank, token). The combine has the bits of `batched_all_to_all`.

    Every wait ends after MOE_EP_NVSHMEM_TIMEOUT_S, and the next call (or `check`) raises DispatchTimeoutError.

    Args:
        moe_config: in_dtype f16 or bf16, K a multiple of 16; capacity is its max_num_tokens.
        quant_config: its dispatch_dtype is that of rows on the wire.
        process_group: the EP ranks, at most 16; those of other hosts are reached by NVSHMEM's device library.

    Raises:
        ValueError: what the kernels cannot do, or ranks that are configured differently.
    """

    NAME = "nvshmem_low_latency"
    INSTEAD = "batched_all_to_all"
    MAX_RANKS = 16
    _layout: BatchLayout

    def __init__(
        self,
        *,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        super().__init__(moe_config=moe_config, quant_config=quant_config, process_group=process_group)
        self._check_config()
        self.tuning = tuning or Tuning()
        self.by_reference = False
        symmetric = arena.SymmetricArena.of(self.ranks.group)
        self._layout = layout_of(moe_config, quant_config, device_api=not symmetric.carries_packets)
        facts = facts_of(
            moe_config,
            fp8=self._layout.fp8,
            device_api=self._layout.device_api,
            batches_in_flight=BATCHES_IN_FLIGHT,
        )
        self._channel = self._meeting = Channel.of(symmetric, self._layout, self.ranks, facts)
        device = torch.device("cuda", torch.cuda.current_device())
        self._kernels = jit.load_all(
            {name: kernel_source(name, self._layout, moe_config.in_dtype) for name in KERNELS}, device
        )
        self._owner_table = self.placement.owners(device)
        self.placement.expert_map(device)  # not made under capture
        self._local_table = local_indices(self.placement.on_host).to(device)

    @staticmethod
    def size_hint(moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig | None = None) -> dict[str, int]:
        """Bytes that one backend of this shape takes on each rank.

        Returns:
            "symmetric": of the arena, shared by all backends of this shape; "expanded" and "by_reference": the plain
            device memory of one batch beside it, for the one face or the other; "expert_outputs": what the experts
            return for one batch, in scratch that layers share.
        """
        layout = layout_of(moe_config, quant_config)
        El, rows = moe_config.num_local_experts, layout.num_ranks * layout.capacity
        numbers, row_bytes = 4 * El + 4 * rows * layout.topk, 2 * layout.hidden_size
        return {
            "symmetric": layout.symmetric_bytes,
            "expanded": El * rows * row_bytes + numbers,
            "by_reference": 4 * El * rows + numbers + (rows * row_bytes if layout.fp8 else 0),
            "expert_outputs": El * rows * row_bytes,
        }

    @classmethod
    def compilations(
        cls, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig, device: torch.device
    ) -> Sequence[Compilation]:
        if cls.unusable_reason() is not None or cls.refuses(moe_config) is not None:
            return ()
        layout = layout_of(moe_config, quant_config)
        return [kernel_source(name, layout, moe_config.in_dtype) for name in KERNELS]

    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.BatchedExperts

    def supports_cuda_graph(self) -> bool:
        return True

    def around_replay(self) -> AbstractContextManager[None] | None:
        # A graph's batch goes through the set of buffers that was free when it was captured: the first of all.
        return self._turn() if self._channel.is_idle() else None

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self.check()
        with self._channel.order:
            yield

    def hand_over_row_ids(self) -> None:
        self.by_reference = True

    def _in_flight(
        self, device: torch.device, begin: Callable[[], Pending[Result]], inputs: Sequence[object]
    ) -> Pending[Result]:
        """The sending half of the kernel is launched at once, the receiving half on the stream that waits."""
        pending = begin()
        pending.start()
        return pending

    def _send(self, batch: Batch) -> Pending[Dispatched]:
        self.check()
        self._check_batch(batch)
        layout, config, device = self._layout, self.moe_config, batch.rows.device
        El, max_rows = config.num_local_experts, layout.num_ranks * layout.capacity
        new = functools.partial(torch.empty, device=device)
        counts, positions = new(El, dtype=torch.int32), new(max_rows * layout.topk, dtype=torch.int32)
        row_ids = new((El, max_rows), dtype=torch.int32) if self.by_reference else None
        out = None
        if not self.by_reference:
            out = new((El, max_rows, layout.hidden_size), dtype=config.in_dtype)
        elif layout.fp8:
            out = new((max_rows, layout.hidden_size), dtype=config.in_dtype)
        # Behind what may fail for want of memory.
        index = self._channel.take()
        rows = self._channel.rows(index, config.in_dtype) if out is None else out
        num_tokens = batch.topk_ids.size(0)
        shares = 1 if self.by_reference else self._blocks_of_expert(num_tokens)
        params = dispatch_type(layout.num_ranks)(
            common=self._common(index, batch.topk_ids),
            rows=batch.rows.data_ptr(),
            weights=batch.topk_weights.data_ptr(),
            locals=self._local_table.data_ptr(),
            out=None if out is None else out.data_ptr(),
            expert_num_tokens=counts.data_ptr(),
            expert_row_ids=None if row_ids is None else row_ids.data_ptr(),
            positions=positions.data_ptr(),
            num_local_experts=El,
            shares=shares,
            take_parts=self.tuning.take_parts,
        )
        to_send = 1 + num_tokens * self.tuning.packet_parts
        to_receive = El * shares
        if self.by_reference:
            expected = max(num_tokens, self.tuning.expected_tokens) * layout.num_ranks
            to_receive += -(-expected * self.tuning.take_parts // WARPS)
        made = [tensor for tensor in (out, row_ids) if tensor is not None]
        check = self._begin_batch()
        launch = Halves(
            self._kernels["low_latency_dispatch"], params, to_send, to_receive, self.tuning.blocks,
            self._channel.order, check, [batch.rows, batch.topk_ids, batch.topk_weights, counts, positions, *made],
        )  # fmt: skip
        meta = ExpertTokensMetadata(counts, None, row_ids)
        sent = _Sent(index, batch.topk_ids, positions, (El, max_rows), check)

        def receive() -> Dispatched:
            launch.receive()
            return Dispatched(rows=rows, expert_tokens_meta=meta, handle=sent)

        return Pending(launch.receive, receive, launch.send)

    def _return(
        self,
        sent: _Sent,
        output: torch.Tensor,
        expert_output: torch.Tensor,
        dispatched: Dispatched,
        reduce_impl: TopKWeightAndReduce,
    ) -> Pending[None]:
        self.check()
        sent.check()
        check_delegated(self.NAME, reduce_impl)
        layout, num_tokens = self._layout, sent.topk_ids.size(0)
        for name, tensor, shape in (
            ("fused_expert_output", expert_output, (*sent.expert_rows, layout.hidden_size)),
            ("output", output, (num_tokens, layout.hidden_size)),
        ):
            check_tensor(name, tensor, shape, self.moe_config.in_dtype, output.device, contiguous=True)
        params = combine_type(layout.num_ranks)(
            common=self._common(sent.batch, sent.topk_ids),
            results=expert_output.data_ptr(),
            positions=sent.positions.data_ptr(),
            output=output.data_ptr(),
            weighted=int(not dispatched.rows_are_weighted),
            output_parts=self.tuning.output_parts,
        )
        to_send = max(num_tokens, self.tuning.expected_tokens) * layout.num_ranks * self.tuning.packet_parts
        to_receive = num_tokens * self.tuning.output_parts
        held = (sent.topk_ids, sent.positions, output, expert_output)
        launch = Halves(
            self._kernels["low_latency_combine"], params, to_send, to_receive, self.tuning.blocks,
            self._channel.order, sent.check, held,
            lambda: self._channel.give_back(sent.batch),
        )  # fmt: skip
        return Pending(launch.receive, launch.receive, launch.send)

    def _blocks_of_expert(self, num_tokens: int) -> int:
        rows = num_tokens * self._layout.num_ranks * self._layout.topk
        return self.tuning.blocks_of_expert(rows / self._owner_table.numel(), self.moe_config.num_local_experts)

    def _common(self, index: int, topk_ids: torch.Tensor) -> Any:
        common = self._channel.common(index)
        common.topk_ids = topk_ids.data_ptr()
        common.owners = self._owner_table.data_ptr()
        common.num_ids = self._owner_table.numel()
        common.num_tokens = topk_ids.size(0)
        common.packet_parts, common.packet_tasks = self.tuning.packet_parts, self.tuning.packet_tasks
        return common

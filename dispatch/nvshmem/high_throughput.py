"""Prefill over NVLink: a token is written once into the memory of each rank that has one of its experts.

Rows go straight to where the experts read them, in the order and with the ids of `all_to_all`, so 16-bit rows are not
copied after they arrived; e4m3 ones are turned into plain rows as they come, and results are added up at home as they
come. For that the ranks first tell each other how many rows they send, in a kernel of its own; the price is symmetric
memory for the most rows that can arrive, R * max_num_tokens, and the gain is one pass over memory less and no flow
control. All layers of one shape share that memory, with room for `batches_in_flight` between prepare and finalize.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.dispatch.batch import Batch, check_tensor
from moe_ep.dispatch.nvshmem import arena
from moe_ep.dispatch.nvshmem.backend import NvshmemPrepareFinalize, facts_of
from moe_ep.dispatch.nvshmem.high_throughput_block import (
    KERNELS,
    NAME,
    BatchParts,
    Block,
    Layout,
    kernel_source,
)
from moe_ep.kernels import jit
from moe_ep.modular_kernel.contracts import Compilation, Dispatched, FusedMoEActivationFormat, Pending
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce

# Within 5 % of the best on 4 H200 (docs/benchmarks/high_throughput.md); e4m3 rows are made and read by instructions.
DEFAULT_NUM_SMS = 24
DEFAULT_NUM_SMS_FP8 = 48
_THREADS = 1024
_WARPS = _THREADS // 32
# Up to so many SMs an fp8 dispatch has some that only send.
_FEW_SMS = 32
# Making a token's codes takes as long as storing so much of a plain row.
_CODES = 0.4


class _Sent(NamedTuple):
    parts: BatchParts
    number: int
    num_tokens: int
    rows: int
    check: Callable[[], None]


class HighThroughputPrepareFinalize(NvshmemPrepareFinalize, unchecked=True):
    """Standard format over NVLink for up to max_num_tokens of every rank; prefill.

    Rows, ids and weights are those of `all_to_all`, bit for bit and always in one order, and so is what the combine
    leaves. They are views of memory that is valid until `batches_in_flight` more batches were prepared by layers of
    this shape. The host waits for one number, the rows that arrive, while they travel. Without `exact_rows`, and under
    CUDA-graph capture, it waits for nothing: all R * max_num_tokens rows are returned, ids of -1 where none arrived.

    Every wait ends after MOE_EP_NVSHMEM_TIMEOUT_S, and the next call (or `check`) raises DispatchTimeoutError.

    Args:
        moe_config: in_dtype f16 or bf16, K a multiple of 16; capacity is its max_num_tokens.
        quant_config: its dispatch_dtype is that of rows on the wire.
        process_group: the EP ranks, at most 8.
        owners: int32 `[E + shared]`, the rank of the group that each id goes to; None for that of the placement.
        num_sms: SMs that move rows; None for MOE_EP_NVSHMEM_NUM_SMS, or what is nearly the best.
        batches_in_flight: batches that may be between prepare and finalize; each has symmetric memory of its own.
        exact_rows: hand over the rows that arrived where no CUDA graph is captured; False for all R * max_num_tokens.

    Raises:
        ValueError: what the kernels cannot do, or ranks that are configured differently.
    """

    NAME = NAME
    INSTEAD = "all_to_all"
    MAX_RANKS = 8
    _layout: Layout

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
    ) -> None:
        super().__init__(moe_config=moe_config, quant_config=quant_config, process_group=process_group, owners=owners)
        self._check_config()
        if num_sms is None:
            num_sms = env.NVSHMEM_NUM_SMS.get() or None
        for name, value in (("num_sms", num_sms), ("batches_in_flight", batches_in_flight)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.exact_rows = exact_rows
        device_api = not arena.SymmetricArena.of(self.ranks.group).is_mapped
        self._layout = _layout(moe_config, quant_config, batches_in_flight, device_api)
        facts = facts_of(moe_config, fp8=self._layout.fp8, device_api=device_api, batches_in_flight=batches_in_flight)
        self._block = self._meeting = Block.of(self._layout, self.ranks, moe_config.in_dtype, facts)
        device = torch.device("cuda", torch.cuda.current_device())
        self.num_sms = self._sms_of_a_batch(num_sms, device)
        self._kernels = jit.load_all(
            {name: kernel_source(name, self._layout, moe_config.in_dtype) for name in KERNELS}, device
        )
        self.placement.expert_map(device)  # not made under capture

    def _sms_of_a_batch(self, asked: int | None, device: torch.device) -> int:
        """As asked, or what is nearly the best. Blocks wait for all blocks of other ranks, so all must fit at once."""
        batches, sms = self._layout.batches_in_flight, torch.cuda.get_device_properties(device).multi_processor_count
        most = max(sms // batches, 1)
        if asked is None:
            return min(DEFAULT_NUM_SMS_FP8 if self._layout.fp8 else DEFAULT_NUM_SMS, most)
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
        layout = _layout(moe_config, quant_config, batches_in_flight)
        return {"symmetric": layout.symmetric_bytes, "plain": layout.plain_bytes}

    @classmethod
    def compilations(
        cls, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig, device: torch.device
    ) -> Sequence[Compilation]:
        if cls.unusable_reason() is not None or cls.refuses(moe_config) is not None:
            return ()
        layout = _layout(moe_config, quant_config, 1, False)
        return [kernel_source(name, layout, moe_config.in_dtype) for name in KERNELS]

    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def supports_cuda_graph(self) -> bool:
        return True

    def most_rows(self) -> int | None:
        return self._layout.max_rows

    def _send(self, batch: Batch) -> Pending[Dispatched]:
        self.check()
        self._check_batch(batch)
        exact = self.exact_rows and not torch.cuda.is_current_stream_capturing()
        layout, num_tokens, num_ids = self._layout, batch.topk_ids.size(0), batch.owners.numel()
        parts = self._block.take()
        number, check = parts.number, self._begin_batch()
        where = [batch.topk_ids, batch.owners, parts.slots, parts.arriving if exact else None]
        tensors = [batch.rows, batch.topk_ids, batch.topk_weights, batch.owners, parts.slots, parts.rows]
        with self._block.order:
            self._launch("plan", parts, where, [num_ids, num_tokens, number])
            senders = senders_of(layout, self.num_sms)
            self._launch("dispatch", parts, tensors, [num_ids, num_tokens, 0 if exact else layout.max_rows, *senders])

        def receive() -> Dispatched:
            check()
            rows = self._arrived(parts, number) if exact else layout.max_rows
            return Dispatched(
                rows=parts.rows[:rows],
                topk_ids=parts.ids[:rows],
                topk_weights=parts.weights[:rows],
                handle=_Sent(parts, number, num_tokens, rows, check),
            )

        return Pending(lambda: None, receive)

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
        if sent.number != sent.parts.number:
            raise RuntimeError(
                f"another batch was dispatched before this one was finalized and {NAME} has room for "
                f"{self._layout.batches_in_flight}; finalize each before, or make the backend with more "
                f"batches_in_flight"
            )
        rows = self._reduced(expert_output, dispatched, reduce_impl, sent.rows, output, contiguous=True)
        shape = (sent.num_tokens, self._layout.hidden_size)
        check_tensor("output", output, shape, self.moe_config.in_dtype, output.device, contiguous=True)
        with self._block.order:
            self._launch("combine", sent.parts, [rows, sent.parts.slots, output], [sent.num_tokens])
        sent.parts.is_open = False
        return Pending(lambda: None, lambda: None)

    def _arrived(self, parts: BatchParts, number: int) -> int:
        """Waits on the host for the number of rows, while they travel."""
        self.ranks.wait_for_sizes("dispatch", lambda: parts.rows_of(number) is not None)
        self.check()
        return parts.rows_of(number) or 0

    def _launch(
        self, name: str, parts: BatchParts, tensors: Sequence[torch.Tensor | None], numbers: Sequence[int]
    ) -> None:
        params = parts.params(name, [jit.pointer(tensor) for tensor in tensors], numbers)
        blocks = 1 if name == "plan" else self.num_sms
        self._kernels[name].launch(params, (blocks,), _THREADS, early=name == "dispatch")


@functools.cache
def senders_of(layout: Layout, num_sms: int) -> tuple[int, int]:
    """Blocks of a dispatch that send, and warps of each that do, where others take what arrives.

    Half of every block's warps do, and one releases flags beside them. Where few SMs make e4m3 rows, stores at home
    would wait behind those to busy links, so almost all warps of some blocks send and the other blocks take, in shares
    of what each stores if tokens go to any experts.

    Example: 24 SMs, K=7168, top-8: of 8 ranks 10 blocks send, of 4 ranks 12.
    """
    if not layout.fp8 or layout.device_api or num_sms > _FEW_SMS:
        return num_sms, _WARPS // 2
    plain, others = 2 * layout.hidden_size, layout.num_ranks - 1
    to_a_rank = 1 - (others / layout.num_ranks) ** layout.topk
    sent = to_a_rank * (others * layout.row_bytes + plain) + _CODES * plain
    taken = to_a_rank * others * plain
    return max(round(num_sms * sent / (sent + taken)), 1), _WARPS - 1


def _layout(
    moe_config: FusedMoEConfig,
    quant_config: FusedMoEQuantConfig | None,
    batches_in_flight: int,
    device_api: bool = False,
) -> Layout:
    return Layout(
        num_ranks=moe_config.ep_size,
        capacity=max(moe_config.max_num_tokens, 1),
        hidden_size=moe_config.hidden_dim,
        topk=moe_config.experts_per_token + moe_config.num_fused_shared_experts,
        fp8=quant_config is not None and quant_config.dispatch_dtype is not None,
        device_api=device_api,
        batches_in_flight=batches_in_flight,
    )

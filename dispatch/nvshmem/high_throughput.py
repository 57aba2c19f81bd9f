"""Prefill over NVLink: a token is written once into the memory of each rank that has one of its experts.

Rows go straight to where the experts read them, in the order and with the ids of `all_to_all`, so 16-bit rows are not
copied after they arrived; e4m3 ones are dequantized in a pass of their own. For that the ranks first tell each other
how many rows they send, in a kernel of its own; the price is symmetric memory for the most rows that can arrive, R *
max_num_tokens, and the gain is one pass over memory less and no flow control. All layers of one shape share that
memory, with room for one batch between prepare and finalize.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.contracts import FusedMoEActivationFormat, PrepareResult
from moe_ep.dispatch.batch import Batch, Pending
from moe_ep.dispatch.nvshmem import arena
from moe_ep.dispatch.nvshmem.high_throughput_block import KERNELS, NAME, Block, Layout, kernel_source, params_type
from moe_ep.dispatch.payload import make_send_plan
from moe_ep.dispatch.rank_group import HostCopy
from moe_ep.dispatch.standard import reduced_rows
from moe_ep.dispatch.torch_distributed import TorchDistributedPrepareFinalize
from moe_ep.kernels import jit
from moe_ep.kernels.dispatch_rows import sum_rows
from moe_ep.kernels.quantize import dequantize_rows, quantized_row_bytes
from moe_ep.topk_weight_and_reduce import TopKWeightAndReduce

MAX_RANKS = 8
# Within 5 % of the best with 16-bit rows on 4 H200 (docs/benchmarks/nvshmem.md).
DEFAULT_NUM_SMS = 32
_THREADS = {"counts": 64, "dispatch": 1024, "combine": 1024}


@dataclass(frozen=True)
class _Handle:
    batch: int
    slots: torch.Tensor
    rows: int


class HighThroughputPrepareFinalize(TorchDistributedPrepareFinalize):
    """Standard format over NVLink for up to max_num_tokens of every rank; prefill.

    Rows, ids and weights are those of `all_to_all`, bit for bit, and so is what the combine leaves. They are views of
    symmetric memory (but for rows that were e4m3), valid until the next prepare of a layer of this shape. The host
    waits for one number, the rows that arrive, while they travel. Under CUDA-graph capture it waits for nothing: all R
    * max_num_tokens rows are returned, with ids of -1 where none arrived.

    Every wait ends after MOE_EP_NVSHMEM_TIMEOUT_S, and the next call (or `check`) raises DispatchTimeoutError.

    Args:
        moe_config: in_dtype f16 or bf16, K a multiple of 16; capacity is its max_num_tokens.
        quant_config: its dispatch_dtype is that of rows on the wire.
        process_group: the EP ranks, at most 8 that reach each other's memory.
        num_sms: SMs that move rows.

    Raises:
        ValueError: what the kernels cannot do, or ranks that are configured differently.
    """

    def __init__(
        self,
        *,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        num_sms: int = DEFAULT_NUM_SMS,
    ) -> None:
        super().__init__(moe_config=moe_config, quant_config=quant_config, process_group=process_group)
        _check_supported(moe_config)
        if num_sms < 1:
            raise ValueError(f"num_sms is {num_sms}; it must be at least 1")
        self.num_sms = num_sms
        self._layout = Layout(
            num_ranks=moe_config.ep_size,
            capacity=max(moe_config.max_num_tokens, 1),
            hidden_size=moe_config.hidden_dim,
            topk=moe_config.experts_per_token + moe_config.num_fused_shared_experts,
            fp8=quant_config is not None and quant_config.dispatch_dtype is not None,
        )
        facts = {"layout": self._layout, "in_dtype": moe_config.in_dtype, "num_experts": moe_config.num_experts}
        self._block = Block.of(self._layout, self.ranks, facts)
        device = torch.device("cuda", torch.cuda.current_device())
        self._kernels = {
            name: jit.load(kernel_source(name, self._layout, moe_config.in_dtype), device) for name in KERNELS
        }
        self._owners_of(device)

    @classmethod
    def unusable_reason(cls) -> str | None:
        return arena.unusable_reason() or jit.unusable_reason()

    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def supports_cuda_graph(self) -> bool:
        return True

    def supports_async(self) -> bool:
        """One batch at a time."""
        return False

    def max_num_tokens_per_rank(self) -> int | None:
        return self.moe_config.max_num_tokens

    def check(self) -> None:
        """DispatchTimeoutError where a wait of a kernel that has ended was in vain; waits for nothing."""
        self._block.record.check()

    def _dispatch(self, batch: Batch) -> Pending[tuple[PrepareResult, _Handle]]:
        self.check()
        self._check_batch(batch)
        layout, block = self._layout, self._block
        slots, counts = make_send_plan(batch.topk_ids, batch.owners, layout.num_ranks)
        self._launch("counts", [counts])
        waits = not torch.cuda.is_current_stream_capturing()
        on_host = HostCopy(block.total, self.ranks, "dispatch") if waits else None
        max_rows = 0 if waits else layout.max_rows
        tensors = [batch.rows, batch.topk_ids, batch.topk_weights, batch.owners, slots]
        self._launch("dispatch", tensors, [batch.owners.numel(), batch.topk_ids.size(0), max_rows])
        block.batches += 1
        handle = _Handle(block.batches, slots, layout.max_rows if on_host is None else on_host.get()[0])
        if on_host is not None:
            self.check()

        def receive() -> tuple[PrepareResult, _Handle]:
            if layout.fp8:
                codes = block.part("rows", torch.uint8, handle.rows)[:, : quantized_row_bytes(layout.hidden_size)]
                rows = dequantize_rows(codes, layout.hidden_size, batch.rows.dtype)
            else:
                rows = block.part("rows", batch.rows.dtype, handle.rows)
            ids = block.part("ids", torch.int32, handle.rows)
            return (rows, None, None, ids, block.part("weights", torch.float32, handle.rows)), handle

        return Pending(lambda: None, receive)

    def _combine(
        self,
        handle: _Handle,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> Pending[None]:
        self.check()
        if handle.batch != self._block.batches:
            raise RuntimeError(
                f"another batch was dispatched before this one was finalized and {NAME} has room for one; finalize "
                f"each before the next prepare of any layer of this shape"
            )
        rows = reduced_rows(
            weight_and_reduce_impl, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
        )
        expected = (handle.rows, self._layout.hidden_size)
        if rows.shape != expected or rows.dtype != self.moe_config.in_dtype:
            raise ValueError(
                f"reduced expert output is {tuple(rows.shape)} of {rows.dtype}; it must be {expected} of "
                f"{self.moe_config.in_dtype}"
            )
        self._launch("combine", [rows])
        sum_rows(self._block.part("results", rows.dtype), handle.slots, output)
        return Pending(lambda: None, lambda: None)

    def _launch(self, name: str, tensors: Sequence[torch.Tensor], numbers: Sequence[int] = ()) -> None:
        params = params_type(self._layout.num_ranks, len(tensors), len(numbers))()
        params.common = self._block.common()
        params.pointers[:] = [tensor.data_ptr() for tensor in tensors]
        if numbers:
            params.numbers[:] = numbers
        blocks = 1 if name == "counts" else self.num_sms
        self._kernels[name].launch(params, (blocks, 1, 1), _THREADS[name])

    def _check_batch(self, batch: Batch) -> None:
        layout, config = self._layout, self.moe_config
        shape = (batch.rows.size(1), batch.topk_ids.size(1), batch.rows.dtype, batch.quantized)
        made_for = (layout.hidden_size, layout.topk, config.in_dtype, layout.fp8)
        if shape != made_for:
            raise ValueError(
                f"the batch has (K, topk, dtype, fp8 on the wire) {shape} and {NAME} was made for {made_for}; give the "
                f"backend the configuration of the batches"
            )


def _check_supported(moe_config: FusedMoEConfig) -> None:
    rules = (
        (moe_config.ep_size <= MAX_RANKS, "ep_size", moe_config.ep_size, f"be at most {MAX_RANKS}"),
        (moe_config.hidden_dim % 16 == 0, "hidden_dim", moe_config.hidden_dim, "be a multiple of 16"),
        (moe_config.in_dtype is not torch.float32, "in_dtype", moe_config.in_dtype, "be torch.float16 or bfloat16"),
    )
    for holds, name, value, rule in rules:
        if not holds:
            raise ValueError(
                f"{name} is {value}; for {NAME} it must {rule}; all2all_backend='all_to_all' has no such rule"
            )

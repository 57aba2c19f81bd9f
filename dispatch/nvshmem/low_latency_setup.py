"""What low-latency backends are made with: their buffers, where experts are, how work is divided."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.dispatch.nvshmem.layout import BatchLayout


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How work is divided; any values give the same bits.

    Attributes:
        packet_parts: blocks that share sending a row as packets, at most.
        packet_tasks: such parts in all, about: where there are many rows each has fewer.
        take_parts: warps that share bringing a received row to where it is read, at most.
        output_parts: blocks that share adding up one token.
        expected_tokens: how many the other ranks are taken to have at least where blocks are counted; what they do have
            is known on the device alone.
        list_blocks: blocks that list experts where received rows are copied, at most.
        blocks: of a kernel, at most.
    """

    packet_parts: int = 8
    packet_tasks: int = 1024
    take_parts: int = 8
    output_parts: int = 4
    expected_tokens: int = 4
    list_blocks: int = 264
    blocks: int = 264

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


def layout_of(
    moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig | None, device_api: bool = False
) -> BatchLayout:
    """The buffers of one batch.

    Args:
        device_api: as in BatchLayout.
    """
    return BatchLayout(
        num_ranks=moe_config.ep_size,
        capacity=moe_config.max_num_tokens,
        hidden_size=moe_config.hidden_dim,
        topk=moe_config.experts_per_token + moe_config.num_fused_shared_experts,
        fp8=quant_config is not None and quant_config.dispatch_dtype is not None,
        device_api=device_api,
    )

"""From an experts module of transformers to this rank's share of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_ep.config import FusedMoEParallelConfig
from moe_ep.hf.experts import ExpertsShape, expert_tensors
from moe_ep.hf.routed_experts import RoutedExperts

# Above the capacity up to which "auto" takes a backend of fixed capacity: exact sizes, any number of tokens.
PREFILL_MAX_NUM_TOKENS = 4096


def make_routed_experts(
    shape: ExpertsShape,
    top_k: int,
    parallel_config: FusedMoEParallelConfig,
    *,
    device: torch.device | str,
    process_group: dist.ProcessGroup | None = None,
    max_num_tokens: int = PREFILL_MAX_NUM_TOKENS,
    **options: Any,
) -> RoutedExperts:
    """The layer that takes the place of an experts module, its parameters not loaded yet."""
    with torch.device(device):
        return RoutedExperts(
            num_experts=shape.num_experts,
            top_k=top_k,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            params_dtype=shape.dtype,
            activation=shape.activation,
            swiglu_limit=shape.swiglu_limit,
            has_bias=shape.has_bias,
            num_identities=shape.num_identities,
            prefix=shape.name,
            parallel_config=parallel_config,
            process_group=process_group,
            max_num_tokens=max_num_tokens,
            **options,
        )


def load_shard(layer: RoutedExperts, module: Any) -> None:
    """Copies this rank's experts out of an experts module that holds all of them, and finishes the layer."""
    params = dict(layer.named_parameters(recurse=False))
    for (suffix, shard_id), tensor in expert_tensors(module).items():
        gemm = "w2" if shard_id == "w2" else "w13"
        layer.weight_loader(params[f"{gemm}_{suffix}"], tensor, layer.layer_name, shard_id, expert_id=0)
    layer.process_weights_after_loading()

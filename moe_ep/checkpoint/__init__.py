"""Checkpoints of Hugging Face form: read by byte ranges, described by family, fed to the layer, written."""

from __future__ import annotations

from moe_ep.checkpoint.loading import (
    ExpertMatrices,
    LatentWeights,
    RouterWeights,
    SharedExpertsWeights,
    check_beside_experts,
    embed_rows,
    layer_options,
    load_latent,
    load_moe_layer,
    load_norm,
    load_norm_bias,
    load_output_norm,
    load_router,
    load_shared_experts,
    read_expert,
    read_linear,
)
from moe_ep.checkpoint.model_spec import model_spec
from moe_ep.checkpoint.plan import check_experts, expert_tensors, layer_quantization
from moe_ep.checkpoint.reader import CheckpointReader
from moe_ep.checkpoint.spec import MoEModelSpec

__all__ = [
    "CheckpointReader",
    "ExpertMatrices",
    "LatentWeights",
    "MoEModelSpec",
    "RouterWeights",
    "SharedExpertsWeights",
    "check_beside_experts",
    "check_experts",
    "embed_rows",
    "expert_tensors",
    "layer_options",
    "layer_quantization",
    "load_latent",
    "load_moe_layer",
    "load_norm",
    "load_norm_bias",
    "load_output_norm",
    "load_router",
    "load_shared_experts",
    "model_spec",
    "read_expert",
    "read_linear",
]

"""Checkpoints of Hugging Face form: read by byte ranges, described by family, fed to the layer, written."""

from __future__ import annotations

from moe_ep.checkpoint.loader import (
    RouterWeights,
    SharedExpertsWeights,
    embed_rows,
    load_moe_layer,
    load_norm,
    load_router,
    load_shared_experts,
)
from moe_ep.checkpoint.models import MoEModelSpec, RoutingSpec, SharedExpertsSpec, model_spec
from moe_ep.checkpoint.reader import CheckpointReader, TensorInfo

__all__ = [
    "CheckpointReader",
    "MoEModelSpec",
    "RouterWeights",
    "RoutingSpec",
    "SharedExpertsSpec",
    "SharedExpertsWeights",
    "TensorInfo",
    "embed_rows",
    "load_moe_layer",
    "load_norm",
    "load_router",
    "load_shared_experts",
    "model_spec",
]

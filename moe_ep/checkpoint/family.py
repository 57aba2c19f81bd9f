"""What a model family says of itself, and names that several families share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moe_ep.activation import MoEActivation
from moe_ep.checkpoint import family_configs as configs
from moe_ep.checkpoint import family_routing as routing
from moe_ep.checkpoint import family_rules as rules
from moe_ep.checkpoint.config_values import Config
from moe_ep.checkpoint.spec import Projections, RoutingSpec, SharedExpertsSpec

GATE_DOWN_UP = Projections(gate="gate_proj", down="down_proj", up="up_proj")
GATE_W1 = Projections(gate="w1", down="w2", up="w3")
# Models that see have the language model in a part of their own.
LANGUAGE_PART = {
    "layers_module": "model.language_model.layers",
    "embedding": "model.language_model.embed_tokens.weight",
}
WHOLE_LANGUAGE_MODEL = {
    "layers_module": "language_model.model.layers",
    "embedding": "language_model.model.embed_tokens.weight",
}
# Where the config is silent.
FIRST_DENSE = {"first_k_dense_replace": 1}
_SOFTMAX = routing.softmax_routing(renormalize=False)


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family does its own way.

    Attributes:
        intermediate_size: the config's key for N.
        text_config: the part of the config that is about the language model.
        names: fields of `MoEModelSpec` that say where tensors are and what they mean.
        fields: more of them, which the config decides.
        limits: the config's keys that say where gate and up end; any other such key is refused.
    """

    moe_module: str = "mlp"
    projections: Projections = GATE_DOWN_UP
    intermediate_size: str = "moe_intermediate_size"
    moe_layers: Callable[[Config], tuple[int, ...]] = rules.all_layers
    routing: Callable[[Config], RoutingSpec] = _SOFTMAX
    shared_experts: Callable[[Config], SharedExpertsSpec | None] = rules.no_shared_experts
    activation: Callable[[Config], MoEActivation] = rules.named_activation
    text_config: Callable[[Config], Config] = configs.whole_config
    names: dict[str, Any] = field(default_factory=dict)
    fields: Callable[[Config], dict[str, Any]] = rules.no_fields
    limits: tuple[str, ...] = ()

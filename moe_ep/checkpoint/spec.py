"""The description of a checkpoint's MoE layers: shapes, routing, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moe_ep.activation import MoEActivation
from moe_ep.errors import ConfigError


class Projections(NamedTuple):
    """Names of an expert's matrices on disk, in the order that `FusedMoE.make_expert_params_mapping` takes.

    Ungated experts have no up: their only input projection is `gate` here, whatever the files call it.
    """

    gate: str
    down: str
    up: str = ""

    def by_role(self) -> dict[str, str]:
        """The names by role: gate, down, and up if the experts are gated."""
        return {role: name for role, name in self._asdict().items() if name}


GATE_DOWN_UP = Projections(gate="gate_proj", down="down_proj", up="up_proj")
GATE_W1 = Projections(gate="w1", down="w2", up="w3")
PROJECTIONS = (GATE_DOWN_UP, GATE_W1)
# The MoE block's name in transformers 5, and in files of Mixtral and MiniMax, DeepSeek-V4, and Step.
OTHER_BLOCKS = ("mlp", "block_sparse_moe", "ffn", "moe")
_FUSED = Projections("experts.gate_up_proj", "experts.down_proj")


class Gate(NamedTuple):
    """An activation and its clamp limit, as `FusedMoE` takes them."""

    activation: MoEActivation
    swiglu_limit: float | None


class Latent(NamedTuple):
    """Routed experts of another width than the model's: their input is `down @ x`, the output `up @ norm(their sum)`.

    Attributes:
        size: the width of the experts.
        down, up: names of the two matrices inside the MoE block, `[size, K]` and `[K, size]`.
        norm: name of the RMS norm, or None without one.
    """

    size: int
    down: str
    up: str
    norm: str | None = None


@dataclass(frozen=True, kw_only=True)
class RoutingSpec:
    """The routing arguments of `FusedMoE` and `select_experts`, by the same names.

    Attributes:
        has_correction_bias: whether the router has an `e_score_correction_bias`.
        apply_router_weight_on_input: whether router weights multiply the experts' inputs instead of their outputs.
        zero_expert_num, zero_expert_type: identity experts, the last columns of the router's logits.
        custom_routing_function: replaces top-k of the scores in families with another rule.
    """

    renormalize: bool
    scoring_func: str = "softmax"
    use_grouped_topk: bool = False
    num_expert_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    has_correction_bias: bool = False
    apply_router_weight_on_input: bool = False
    zero_expert_num: int = 0
    zero_expert_type: str | None = None
    custom_routing_function: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None

    def select_experts_options(self) -> dict[str, Any]:
        """The keyword arguments of `select_experts` among these."""
        others = ("has_correction_bias", "apply_router_weight_on_input")
        return {name: value for name, value in vars(self).items() if name not in others}


@dataclass(frozen=True, kw_only=True)
class SharedExpertsSpec:
    """The shared experts, which every token visits; one MLP on disk.

    Attributes:
        module: the MLP's name inside a layer.
        num_experts: the number of experts of the routed experts' size that the MLP stands for; 1 if its size differs.
        intermediate_size: of all of them together.
        has_gate: whether `sigmoid(hidden_states @ gate)` scales the output.
        fused: names of the two linear layers if gate and up are one; None if they are separate.
        projections: names of gate, down and up if they differ from the routed experts'.
        factor: scales the output.
        swiglu_limit, step_limits: as in `MoEModelSpec`, for the shared experts.
    """

    module: str
    num_experts: int
    intermediate_size: int
    has_gate: bool = False
    fused: tuple[str, str] | None = None
    projections: Projections | None = None
    factor: float = 1.0
    swiglu_limit: float | None = None
    step_limits: tuple[float | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MoEModelSpec:
    """One checkpoint's MoE layers: shapes, routing and tensor names.

    Attributes:
        family: `model_type` of the config.
        moe_layers: indices of the layers with experts; the others are dense.
        table_layers: those of them that choose experts by a table of token ids instead of a router.
        moe_module: name of the MoE block inside a layer; empty if its parts are in the layer itself.
        other_blocks: other names of the MoE block, of transformers or the family's authors, used with other names of
            the projections.
        projections: names of gate, down and up on disk; without up if the activation is ungated.
        layers_module: the prefix of the layers' names.
        norm: the norm before the MoE block, inside a layer; None if the block's input is not the output of one norm:
            an RMS norm without weights replaces it.
        output_norm: the RMS norm of the MoE block's output, inside a layer, or None.
        router: the router inside the MoE block (has_router_bias: its logits have a bias); None for a router that is not
            one matrix, or has another rule, which only the model in transformers computes.
        correction_bias_tensor: the `e_score_correction_bias` inside the MoE block.
        correction_bias_may_miss: whether files may lack it, which means zeros.
        has_bias: whether experts have biases; missing ones are zeros.
        latent: set if the routed experts are of another width than the model; the router and shared experts are not.
        fused: names inside the MoE block of tensors that hold all experts; without up if gate's tensor holds both.
        interleaved: whether gate and up rows of fused experts alternate.
        swiglu_limit: clamp limit of the routed experts, as in `FusedMoE`.
        step_limits: clamp limit of the routed experts by layer of the model, for layers whose activation is swiglustep;
            None for the others, empty if there are none.
        embedding_multiplier, residual_multiplier: factors of the embeddings, and of a block's output.
        norm_offset: added to the weights of norms.
        has_layer_norm: whether the norm before the experts is a layer norm, not an RMS norm.
        has_norm_bias: whether that has a bias.
    """

    family: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    dtype: torch.dtype
    rms_norm_eps: float
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    activation: MoEActivation
    routing: RoutingSpec
    shared_experts: SharedExpertsSpec | None
    moe_module: str
    projections: Projections
    table_layers: tuple[int, ...] = ()
    other_blocks: tuple[str, ...] = ()
    embedding: str = "model.embed_tokens.weight"
    layers_module: str = "model.layers"
    norm: str | None = "post_attention_layernorm"
    output_norm: str | None = None
    router: str | None = "gate"
    has_router_bias: bool = False
    correction_bias_tensor: str = "gate.e_score_correction_bias"
    correction_bias_may_miss: bool = False
    has_bias: bool = False
    latent: Latent | None = None
    fused: Projections = _FUSED
    interleaved: bool = False
    swiglu_limit: float | None = None
    step_limits: tuple[float | None, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    norm_offset: float = 0.0
    has_layer_norm: bool = False
    has_norm_bias: bool = False

    @property
    def num_router_columns(self) -> int:
        """Columns of the router's logits: routed experts, then identity experts."""
        return self.num_experts + self.routing.zero_expert_num

    @property
    def expert_hidden_size(self) -> int:
        """K of the routed experts."""
        return self.hidden_size if self.latent is None else self.latent.size

    @property
    def router_layers(self) -> tuple[int, ...]:
        """The layers with a router."""
        return tuple(layer for layer in self.moe_layers if layer not in self.table_layers)

    def moe_prefix(self, layer: int) -> str:
        """The MoE block of a layer, such as `model.layers.3.mlp`; ValueError for a layer without experts."""
        if layer not in self.moe_layers:
            raise ValueError(f"layer is {layer}; it must be one of the layers with experts, {list(self.moe_layers)}")
        return f"{self.layers_module}.{layer}.{self.moe_module}".removesuffix(".")

    def expert_prefix(self, layer: int) -> str:
        """The prefix of a layer's experts, such as `model.layers.3.mlp.experts`."""
        return f"{self.moe_prefix(layer)}.experts"

    def fused_stem(self, layer: int, role: str) -> str:
        """What the names of tensors of all experts begin with; those of gate hold up too where up has none."""
        return f"{self.moe_prefix(layer)}.{getattr(self.fused, role) or self.fused.gate}"

    def expert_module_names(self, layer: int, expert: int, role: str) -> list[str]:
        """The name of an expert's linear layer in the files, and other names that quantization configs may use.

        Tools write the names of the model they quantized: the family's own, those of transformers 5, where some blocks
        and projections are renamed, or the name of the module of all experts.
        """
        own = f"{self.expert_prefix(layer)}.{expert}.{getattr(self.projections, role)}"
        blocks = [self.moe_prefix(layer), *(f"{self.layers_module}.{layer}.{other}" for other in self.other_blocks)]
        is_renamed = self.other_blocks or self.projections != PROJECTIONS[0]
        projections = {getattr(each, role) for each in (self.projections, *PROJECTIONS)} if is_renamed else ()
        others = [f"{block}.experts.{expert}.{name}" for block in blocks for name in sorted(projections) if name]
        return list(dict.fromkeys((own, *others, *(f"{block}.experts" for block in blocks))))

    def router_weight(self, layer: int) -> str:
        """Name of the router's weight, `[num_router_columns, K]`; ConfigError for a router of another form."""
        if self.router is None:
            raise ConfigError(
                f"the routers of {self.family} models, or what is before them or the experts, have a form that moe_ep "
                f"does not compute; moe_ep.parallelize and moe-ep generate run the whole model, with those of "
                f"transformers"
            )
        return f"{self.moe_prefix(layer)}.{self.router}.weight"

    def correction_bias(self, layer: int) -> str | None:
        """Name of the router's `e_score_correction_bias`, `[E]`, or None where the family has none."""
        name = f"{self.moe_prefix(layer)}.{self.correction_bias_tensor}"
        return name if self.routing.has_correction_bias else None

    def router_bias(self, layer: int) -> str | None:
        """Name of the bias of the router's logits, `[E]`, or None where the family has none."""
        return f"{self.moe_prefix(layer)}.{self.router}.bias" if self.has_router_bias else None

    def norm_weight(self, layer: int) -> str | None:
        """Name of the weight of the norm before the MoE block, `[K]`, or None without one."""
        return None if self.norm is None else f"{self.layers_module}.{layer}.{self.norm}.weight"

    def norm_bias(self, layer: int) -> str | None:
        """Name of that norm's bias, `[K]`, or None where it has none."""
        return f"{self.layers_module}.{layer}.{self.norm}.bias" if self.has_norm_bias else None

    def output_norm_weight(self, layer: int) -> str | None:
        """Name of the weight of the norm behind the MoE block, `[K]`, or None without one."""
        return None if self.output_norm is None else f"{self.layers_module}.{layer}.{self.output_norm}.weight"

    def select_experts_options(self) -> dict[str, Any]:
        """The keyword arguments of `select_experts` that the model decides; the correction bias is in the files."""
        return {"top_k": self.top_k, **self.routing.select_experts_options()}

    def gate(self, layer: int) -> Gate:
        """The activation of a layer's routed experts."""
        return self._gate(self, layer)

    def shared_gate(self, layer: int) -> Gate | None:
        """The activation of a layer's shared experts, or None without any."""
        return None if self.shared_experts is None else self._gate(self.shared_experts, layer)

    def _gate(self, limits: MoEModelSpec | SharedExpertsSpec, layer: int) -> Gate:
        step_limit = limits.step_limits[layer] if limits.step_limits else None
        if step_limit is not None:
            return Gate(MoEActivation.SWIGLUSTEP, step_limit)
        return Gate(self.activation, limits.swiglu_limit)

    def latent_norm_weight(self, layer: int) -> str | None:
        """Name of the weight of the norm of the sum of experts of another width, `[latent.size]`, or None without."""
        if self.latent is None or self.latent.norm is None:
            return None
        return f"{self.moe_prefix(layer)}.{self.latent.norm}.weight"

    def shared_projections(self) -> Projections:
        """Names of gate, down and up of the shared experts."""
        own = None if self.shared_experts is None else self.shared_experts.projections
        return own or self.projections

    def shared_experts_prefix(self, layer: int) -> str | None:
        """The shared experts' MLP, such as `model.layers.3.mlp.shared_experts`, or None."""
        if self.shared_experts is None:
            return None
        return f"{self.layers_module}.{layer}.{self.shared_experts.module}"

"""MoE layers of known models as presets, from their published config.json files."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ep.activation import MoEActivation
from moe_ep.checkpoint.spec import MoEModelSpec, RoutingSpec
from moe_ep.errors import ConfigError, one_of
from moe_ep.scalar_type import scalar_types


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """How the numbers of the experts' weights are stored.

    Attributes:
        quant_type: a name of `scalar_types`, or None for plain weights of the activations' dtype.
        group_size: input columns that share a scale.
        bits: of a weight.
        scale_bits: of a scale.
    """

    quant_type: str | None = "uint4b8"
    group_size: int = 128
    bits: int = 4
    scale_bits: int = 16

    @property
    def bytes_per_weight(self) -> float:
        """Its code and its share of a scale."""
        scale_bits = 0 if self.quant_type is None else self.scale_bits / self.group_size
        return (self.bits + scale_bits) / 8

    @property
    def quant_type_id(self) -> int | None:
        return None if self.quant_type is None else getattr(scalar_types, self.quant_type).id


INT4 = WeightFormat()
FP8 = WeightFormat(quant_type="float8_e4m3fn", bits=8)
MXFP4 = WeightFormat(quant_type="float4_e2m1f", group_size=32, scale_bits=8)
_SOFTMAX_ROUTING = RoutingSpec(renormalize=True)
BF16 = WeightFormat(quant_type=None, bits=16)
_GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """One MoE layer of a model, and how many there are.

    Attributes:
        hidden_size: K of the experts.
        intermediate_size: N of one expert.
        num_layers: MoE layers of the model.
        weights: the experts' number format that the benchmarks use.
        swiglu_limit: as in `FusedMoE`.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_layers: int
    routing: RoutingSpec = _SOFTMAX_ROUTING
    weights: WeightFormat = INT4
    activation: MoEActivation = MoEActivation.SILU
    has_bias: bool = False
    swiglu_limit: float | None = None

    @property
    def weights_per_expert(self) -> int:
        """Numbers of gate, up and down, or of up and down where the activation is not gated."""
        return (3 if self.activation.is_gated else 2) * self.hidden_size * self.intermediate_size

    @property
    def bytes_per_expert(self) -> float:
        """Bytes of the weights and scales of one expert."""
        return self.weights_per_expert * self.weights.bytes_per_weight

    @property
    def flops_per_row(self) -> int:
        """Floating-point operations for one row of one expert."""
        return 2 * self.weights_per_expert


_DEEPSEEK_ROUTING = {"scoring_func": "sigmoid", "renormalize": True, "has_correction_bias": True}

PRESETS: dict[str, Geometry] = {
    preset.name: preset
    for preset in (
        Geometry(
            name="deepseek-v3", hidden_size=7168, intermediate_size=2048, num_experts=256, top_k=8, num_layers=58,
            routing=RoutingSpec(
                use_grouped_topk=True, num_expert_group=8, topk_group=4, routed_scaling_factor=2.5,
                **_DEEPSEEK_ROUTING,  # type: ignore[arg-type]
            ),
        ),
        Geometry(
            name="deepseek-v4-flash", hidden_size=4096, intermediate_size=2048, num_experts=256, top_k=6, num_layers=43,
            routing=RoutingSpec(
                renormalize=True, scoring_func="sqrtsoftplus", has_correction_bias=True, routed_scaling_factor=1.5
            ),
            weights=MXFP4, swiglu_limit=10.0,
        ),
        Geometry(
            name="kimi-k2", hidden_size=7168, intermediate_size=2048, num_experts=384, top_k=8, num_layers=60,
            routing=RoutingSpec(routed_scaling_factor=2.827, **_DEEPSEEK_ROUTING),  # type: ignore[arg-type]
        ),
        # The hidden size is that of the latent rows that its experts read, half the model's.
        Geometry(
            name="kimi-k3", hidden_size=3584, intermediate_size=3072, num_experts=896, top_k=16, num_layers=92,
            routing=RoutingSpec(**_DEEPSEEK_ROUTING),  # type: ignore[arg-type]
            weights=MXFP4, activation=MoEActivation.SITU,
        ),
        Geometry(
            name="qwen3-235b", hidden_size=4096, intermediate_size=1536, num_experts=128, top_k=8, num_layers=94
        ),
        Geometry(name="qwen3-30b", hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8, num_layers=48),
        Geometry(
            name="mixtral-8x7b", hidden_size=4096, intermediate_size=14336, num_experts=8, top_k=2, num_layers=32
        ),
        Geometry(
            name="gpt-oss-120b", hidden_size=2880, intermediate_size=2880, num_experts=128, top_k=4, num_layers=36,
            weights=MXFP4, activation=MoEActivation.SWIGLUOAI, has_bias=True,
        ),
        Geometry(name="small", hidden_size=256, intermediate_size=128, num_experts=16, top_k=4, num_layers=4),
    )
}  # fmt: skip


def preset(name: str) -> Geometry:
    """The preset of that name; ValueError that lists them for another."""
    if name not in list(PRESETS):  # it may be of any type
        raise ValueError(one_of("geometry", name, list(PRESETS)))
    return PRESETS[name]


def of_model(spec: MoEModelSpec, name: str) -> Geometry:
    """The layers of a checkpoint, with int4 weights in the largest groups that divide both matrices' columns.

    Raises:
        ConfigError: there are none.
    """
    columns = (spec.expert_hidden_size, spec.moe_intermediate_size)
    group_size = next((size for size in _GROUP_SIZES if not any(number % size for number in columns)), None)
    if group_size is None:
        raise ConfigError(
            f"{name} has experts of hidden size {columns[0]} and intermediate size {columns[1]}; one of the groups "
            f"{', '.join(map(str, _GROUP_SIZES))} of int4 weights must divide both"
        )
    return Geometry(
        name=name,
        hidden_size=spec.expert_hidden_size,
        intermediate_size=spec.moe_intermediate_size,
        num_experts=spec.num_experts,
        top_k=spec.top_k,
        num_layers=len(spec.moe_layers),
        routing=spec.routing,
        weights=WeightFormat(group_size=group_size),
        activation=spec.activation,
        has_bias=spec.has_bias,
        swiglu_limit=spec.swiglu_limit,
    )

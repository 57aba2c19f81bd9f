"""Experts with made-up weights, each a function of its number alone, so that any rank can make any of them to check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from moe_ep.activation import apply_activation
from moe_ep.bench.geometries import WeightFormat
from moe_ep.config import FusedMoEConfig
from moe_ep.layer.interface import MoELayer
from moe_ep.layer.methods.base import w13_rows
from moe_ep.layer.methods.canonical import CanonicalFusedMoEMethod
from moe_ep.modular_kernel.choice import ExpertsNames
from moe_ep.quantization.canonical_weights import CanonicalWeights, dequantize


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Quantized weights in this format, drawn with this seed where they will stay.

    Attributes:
        packed: the processed weights by the logical experts of the slots: layers made with the same object share them,
            so that another backend or capacity costs no drawing and packing.
    """

    quant_method: ClassVar[str] = "synthetic"

    weights: WeightFormat
    device: torch.device
    seed: int = 0
    packed: dict[tuple[int, ...], _Packed] = field(default_factory=dict, compare=False)


class _Packed(NamedTuple):
    types: dict[str, tuple[int, int]]
    device: torch.device | None
    experts_names: ExpertsNames | None
    buffers: dict[str, torch.Tensor]


class SyntheticFusedMoEMethod(CanonicalFusedMoEMethod):
    """Nothing is loaded: codes and scales are drawn when the layer is first used; biases are 0."""

    quant_config: SyntheticConfig

    def create_weights(
        self,
        layer: MoELayer,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.add_biases(layer, num_experts, w13_rows(self.moe_config), hidden_size, params_dtype)

    def process_weights_after_loading(self, layer: MoELayer) -> None:
        key = tuple(local_logical_experts(layer))
        packed = self.quant_config.packed
        if key not in packed:
            super().process_weights_after_loading(layer)
            buffers = {name: data for name, data in layer.named_buffers(recurse=False) if "_processed_" in name}
            packed[key] = _Packed(self._types, self._packed_on, self._experts_names, buffers)
            return
        self._types, self._packed_on, self._experts_names, buffers = packed[key]
        for name, data in buffers.items():
            layer.register_buffer(name, data)

    def unpack(self, layer: MoELayer, gemm: str) -> CanonicalWeights:
        experts = local_logical_experts(layer)
        made = draw_expert(experts[0], gemm, self.quant_config, self.moe_config)
        codes = made.codes.new_empty(len(experts), *made.codes.shape)
        scales = made.scales.new_empty(len(experts), *made.scales.shape)
        for slot, expert in enumerate(experts):
            made = draw_expert(expert, gemm, self.quant_config, self.moe_config)
            codes[slot], scales[slot] = made.codes, made.scales
        return made._replace(codes=codes, scales=scales)


def local_logical_experts(layer: MoELayer) -> list[int]:
    """The logical expert of each of this rank's routed slots, at the start."""
    by_slot = {
        slot: physical % layer.num_experts
        for physical in range(layer.slots.num_physical_experts)
        for slot in layer.slots.of_id(physical)
    }
    return [by_slot[slot] for slot in range(layer.slots.num_local_routed)]


def draw_expert(expert: int, gemm: str, config: SyntheticConfig, moe_config: FusedMoEConfig) -> CanonicalWeights:
    """The "w13" or "w2" of a logical expert, `[out, in]`; outputs of the layer have a scale near that of its inputs."""
    K, N = moe_config.hidden_dim, moe_config.intermediate_size_per_partition
    rows, columns = (w13_rows(moe_config), K) if gemm == "w13" else (K, N)
    seed = (config.seed * 1_000_003 + expert) * 2 + (gemm == "w2")
    generator = torch.Generator(config.device).manual_seed(seed)
    kind, group_size = config.weights, config.weights.group_size
    codes = torch.randint(
        0, 1 << kind.bits, (rows, columns), dtype=torch.uint8, device=config.device, generator=generator
    )
    groups, deviation = (rows, columns // group_size), (1 << kind.bits) / 12**0.5
    if kind.quant_type == "float8_e4m3fn":
        codes &= 0xBF  # magnitudes below 2, and no NaN
        deviation = 0.6
    if kind.scale_bits == 8:
        # e8m0: powers of two; e2m1 numbers have a deviation near 3.
        exponent = 127 - round(columns**0.5 * 3).bit_length()
        scales = torch.full(groups, exponent, dtype=torch.uint8, device=config.device)
    else:
        spread = torch.rand(groups, device=config.device, generator=generator) + 0.5
        scales = (spread / (deviation * columns**0.5)).to(moe_config.in_dtype)
    if kind.quant_type_id is None:
        raise ValueError("weights are plain; a synthetic layer needs a quant_type")
    return CanonicalWeights(codes, scales, None, None, kind.quant_type_id, group_size)


def reference_output(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    config: SyntheticConfig,
    moe_config: FusedMoEConfig,
) -> torch.Tensor:
    """The reference output of such a layer, f32 `[T, K]`, from dequantized weights one expert at a time."""
    total = torch.zeros(hidden_states.shape, device=hidden_states.device)
    for expert in topk_ids.unique().tolist():
        if expert < 0:
            continue
        token, slot = torch.nonzero(topk_ids == expert, as_tuple=True)
        gate_up = F.linear(hidden_states[token].float(), dequantize(draw_expert(expert, "w13", config, moe_config)))
        hidden = apply_activation(moe_config.activation, gate_up, clamp_limit=moe_config.swiglu_limit)
        output = F.linear(hidden, dequantize(draw_expert(expert, "w2", config, moe_config)))
        total.index_add_(0, token, output * topk_weights[token, slot, None])
    return total

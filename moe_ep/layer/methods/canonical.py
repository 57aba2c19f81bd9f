"""The steps from loaded weights to experts that all quantized weights share, quantized in the checkpoint or on load.

A subclass unpacks the loaded parameters to `CanonicalWeights`, and the chosen experts convert those to their own
layout. The layer holds the fields `[El, ...]` of that layout (`ExpertWeights`) for each GEMM as buffers
`w13_processed_weight`, `w13_processed_scales` and so on; a field that is None has no buffer.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch._subclasses.fake_tensor import is_fake

from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.errors import one_of
from moe_ep.layer.interface import MoELayer
from moe_ep.layer.methods.base import FusedMoEMethodBase, UnquantizedFusedMoEMethod
from moe_ep.modular_kernel.choice import ExpertsNames, choose_experts
from moe_ep.modular_kernel.contracts import ExpertWeights, FusedMoEActivationFormat
from moe_ep.quantization.canonical_weights import (
    CanonicalWeights,
    agree_on_type,
    dequantize,
    quantize_fp8,
    quantize_int,
)
from moe_ep.registry import EXPERTS

_GEMMS = ("w13", "w2")


class CanonicalFusedMoEMethod(FusedMoEMethodBase):
    """Base of methods whose weights pass through `CanonicalWeights`; subclasses create parameters and unpack them."""

    _packed_on: torch.device | None = None
    _experts_names: ExpertsNames | None = None

    def __init__(self, moe_config: FusedMoEConfig, quant_config: Any = None) -> None:
        super().__init__(moe_config, quant_config)
        # (quant_type_id, group_size) of each GEMM.
        self._types: dict[str, tuple[int, int]] = {}

    @abstractmethod
    def unpack(self, layer: MoELayer, gemm: str) -> CanonicalWeights:
        """Returns the loaded parameters of "w13" or "w2" in the canonical form, with the leading dimension El."""

    def process_weights_after_loading(self, layer: MoELayer) -> None:
        """Unpacks both GEMMs, converts them to one number type, packs them for the experts, and frees the loaded
        parameters.

        Raises:
            RuntimeError: torch.export is tracing the layer, with tensors that have no values.
        """
        if any(is_fake(param) for param in layer.parameters(recurse=False)):
            raise RuntimeError(
                f"the weights of {layer.layer_name} are not processed yet, which torch.export cannot trace; call its "
                f"process_weights_after_loading() before"
            )
        params = {name: param for name, param in layer.named_parameters(recurse=False) if not name.endswith("_bias")}
        again, empty = layer.loader.slots_loaded_again, layer.loader.empty_slots
        if again is None and empty:
            # An empty slot gets some expert's tensors, so that its values are valid; no map names it.
            filled = next((slot for slot in range(layer.slots.num_local) if slot not in empty), None)
            for param in params.values() if filled is not None else ():
                if param.stride(0):  # otherwise all slots share one value
                    param.data[empty] = param.data[filled].clone()
        if again is not None:
            for param in params.values():
                param.data = param.data[again]
        unpacked = () if again == [] else agree_on_type(self.unpack(layer, "w13"), self.unpack(layer, "w2"))
        for name in params:
            delattr(layer, name)
        layer.loader.close()
        if again is None:
            for gemm, weights in zip(_GEMMS, unpacked, strict=True):
                self._types[gemm] = (weights.quant_type_id, weights.group_size)
            self.pack(layer, *unpacked)
        elif unpacked:
            self._pack_again(layer, *unpacked, again)

    def begin_reload(self, layer: MoELayer) -> None:
        """Creates the checkpoint's parameters again, except for the biases, which the experts read directly."""
        biases = {name: param for name, param in layer.named_parameters(recurse=False) if name.endswith("_bias")}
        config = self.moe_config
        with self.gemm_weights(layer)[0].device:
            self.create_weights(
                layer,
                num_experts=layer.slots.num_local,
                hidden_size=config.hidden_dim,
                intermediate_size_per_partition=config.intermediate_size_per_partition,
                params_dtype=config.in_dtype,
            )
        for name, bias in biases.items():
            layer.register_parameter(name, bias)

    def reload_bytes(self, layer: MoELayer) -> int:
        return sum(tensor.nbytes for tensor in self.weight_tensors(layer))

    def pack(self, layer: MoELayer, w13: CanonicalWeights, w2: CanonicalWeights) -> None:
        """Chooses experts for the weights' device, and stores the weights in their layout in the layer."""
        self._packed_on = w13.codes.device
        self._experts_names = choose_experts(layer.experts, self.moe_config, (w13, w2), self._packed_on)
        experts = EXPERTS.load(self._experts_names[FusedMoEActivationFormat.Standard])
        both = experts.pack_weights(w13, w2, self.moe_config, self.packed_input_dtype(layer))
        for gemm, packed in zip(_GEMMS, both, strict=True):
            for field, tensor in packed._asdict().items():
                name = f"{gemm}_processed_{field}"
                if tensor is not None:
                    layer.register_buffer(name, tensor)
                elif name in layer._buffers:  # from a previous layout, for another device
                    delattr(layer, name)

    def _pack_again(self, layer: MoELayer, w13: CanonicalWeights, w2: CanonicalWeights, slots: list[int]) -> None:
        """Overwrites the weights in use in the given slots, in the same layout."""
        experts = EXPERTS.load(self.experts_names(layer)[FusedMoEActivationFormat.Standard])
        device = self.gemm_weights(layer)[0].device
        parts = [
            CanonicalWeights._make(value.to(device) if isinstance(value, torch.Tensor) else value for value in part)
            for part in (w13, w2)
        ]
        types = {gemm: (part.quant_type_id, part.group_size) for gemm, part in zip(_GEMMS, parts, strict=True)}
        packed = itertools.chain(*experts.pack_weights(*parts, self.moe_config, self.packed_input_dtype(layer)))
        for new, held in zip(packed, itertools.chain(*_processed(layer)), strict=True):
            if types != self._types or (new is None) != (held is None):
                raise ValueError(
                    f"the weights that {layer.layer_name} was given again have another number type, or zero points or "
                    f"an order of columns where those in use have none; load them into a new layer"
                )
            if held is not None:
                with torch.inference_mode():  # can write to tensors whether or not they were created in it
                    for slot, expert in zip(slots, new, strict=True):
                        held[slot].copy_(expert)
        self.rebuild_derived_state(layer, slots)

    def experts_names(self, layer: MoELayer) -> ExpertsNames:
        """The experts that the weights were packed for. Weights in canonical form that moved to another device are
        packed for it first."""
        if self._experts_names is None:
            raise RuntimeError(
                f"the weights of {layer.layer_name} are not processed; call process_weights_after_loading"
            )
        w1, _ = self.gemm_weights(layer)
        if w1.dtype is torch.uint8 and w1.device != self._packed_on:
            self.pack(layer, self.canonical(layer, "w13"), self.canonical(layer, "w2"))
        return self._experts_names

    def canonical(self, layer: MoELayer, gemm: str) -> CanonicalWeights:
        """The weights, if they are still in the canonical form: one code per byte."""
        held, (type_id, group_size) = _processed(layer)[_GEMMS.index(gemm)], self._types[gemm]
        return CanonicalWeights(
            codes=held.weight,
            scales=held.scales,
            zero_points=held.zero_points,
            g_idx=held.g_idx,
            quant_type_id=type_id,
            group_size=group_size,
            global_scales=held.global_scales,
        )

    def gemm_weights(self, layer: MoELayer) -> tuple[torch.Tensor, torch.Tensor]:
        return cast(torch.Tensor, layer.w13_processed_weight), cast(torch.Tensor, layer.w2_processed_weight)

    def get_fused_moe_quant_config(self, layer: MoELayer) -> FusedMoEQuantConfig:
        (w13_type, w13_group), (w2_type, w2_group) = (self._types[gemm] for gemm in _GEMMS)
        w13, w2 = _processed(layer)
        return FusedMoEQuantConfig(
            quant_type_id=w13_type,
            group_size=w13_group,
            w2_quant_type_id=w2_type,
            w2_group_size=w2_group,
            w1_scale=w13.scales,
            w2_scale=w2.scales,
            w1_zp=w13.zero_points,
            w2_zp=w2.zero_points,
            w1_bias=self.bias(layer, "w13"),
            w2_bias=self.bias(layer, "w2"),
            g1_alphas=w13.global_scales,
            g2_alphas=w2.global_scales,
        )

    def expert_kwargs(self, layer: MoELayer) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        for gemm, held in zip(_GEMMS, _processed(layer), strict=True):
            kwargs[f"{gemm}_g_idx"] = held.g_idx
            # Only experts that sort columns know this argument.
            if held.g_idx_sort_indices is not None:
                kwargs[f"{gemm}_g_idx_sort_indices"] = held.g_idx_sort_indices
        return kwargs

    def weight_tensors(self, layer: MoELayer) -> list[torch.Tensor]:
        return [tensor for held in _processed(layer) for tensor in held if tensor is not None]


def _processed(layer: MoELayer) -> tuple[ExpertWeights, ExpertWeights]:
    """w13 and w2 in the layout of the experts, as the layer holds them."""
    w13, w2 = (
        ExpertWeights(*[cast(Any, layer._buffers.get(f"{gemm}_processed_{field}")) for field in ExpertWeights._fields])
        for gemm in _GEMMS
    )
    return w13, w2


# ==== Plain weights, quantized on load to 4- or 8-bit integers or 8-bit floats ====

GROUP_SIZES = (128, 64, 32)


class OnlineConfig(ABC):
    """How plain weights are quantized on load."""

    quant_method: ClassVar[str]

    @abstractmethod
    def group_size_for(self, *sizes: int) -> int:
        """The group size for matrices with these numbers of input columns; ValueError if none fits."""

    @abstractmethod
    def quantize(self, weight: torch.Tensor, group_size: int) -> CanonicalWeights:
        """Quantizes a plain weight `[..., N, K]` to the canonical form."""


@dataclass(frozen=True, kw_only=True)
class OnlineIntConfig(OnlineConfig):
    """Quantization on load to integers: symmetric, round to nearest.

    Attributes:
        bits: 4 or 8.
        group_size: number of input columns that share a scale; None means the largest of 128, 64 and 32 that fits.

    Raises:
        ValueError: any other number of bits.
    """

    quant_method: ClassVar[str] = "online_int"

    bits: int = 4
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(one_of("bits", self.bits, ["4", "8"]))

    def group_size_for(self, *sizes: int) -> int:
        asked = GROUP_SIZES if self.group_size is None else (self.group_size,)
        fitting = [size for size in asked if not any(columns % size for columns in sizes)]
        if not fitting:
            raise ValueError(
                f"the matrices have {' and '.join(map(str, sizes))} input columns; quantizing to integers needs "
                f"multiples of a group size ({', '.join(map(str, asked))}); load these weights unquantized or as fp8"
            )
        return fitting[0]

    def quantize(self, weight: torch.Tensor, group_size: int) -> CanonicalWeights:
        return quantize_int(weight, self.bits, group_size)


@dataclass(frozen=True, kw_only=True)
class OnlineFp8Config(OnlineConfig):
    """Quantization on load to e4m3 with one scale per row."""

    quant_method: ClassVar[str] = "online_fp8"

    def group_size_for(self, *sizes: int) -> int:
        return -1

    def quantize(self, weight: torch.Tensor, group_size: int) -> CanonicalWeights:
        return quantize_fp8(weight)


# The names that `--quantize` takes.
ONLINE: dict[str, OnlineConfig] = {
    "int4": OnlineIntConfig(bits=4),
    "int8": OnlineIntConfig(bits=8),
    "fp8": OnlineFp8Config(),
}


class OnlineFusedMoEMethod(CanonicalFusedMoEMethod):
    """A method with the parameters of plain weights until they are processed, and quantized weights from then on."""

    def __init__(self, moe_config: FusedMoEConfig, quant_config: OnlineConfig) -> None:
        super().__init__(moe_config, quant_config)
        self._plain = UnquantizedFusedMoEMethod(moe_config)
        self.group_size = quant_config.group_size_for(moe_config.hidden_dim, moe_config.intermediate_size_per_partition)

    def create_weights(self, layer: MoELayer, *args: Any, **kwargs: Any) -> None:
        self._plain.create_weights(layer, *args, **kwargs)

    def unpack(self, layer: MoELayer, gemm: str) -> CanonicalWeights:
        return self.quant_config.quantize(layer.get_parameter(f"{gemm}_weight").data, self.group_size)

    def as_quantized(self, weight: torch.Tensor) -> torch.Tensor:
        """The values, in f32, to which the layer quantizes a plain weight `[N, K]` of the checkpoint."""
        return dequantize(self.quant_config.quantize(weight.to(self.moe_config.in_dtype), self.group_size))

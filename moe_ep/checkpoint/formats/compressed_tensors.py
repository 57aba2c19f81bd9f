"""compressed-tensors (`quant_method: compressed-tensors`): config groups, each a scheme for the modules it names.

A group's `format` gives the layout of its weights, by default the model's. A model of `mixed-precision` has groups of
several formats. The keys are those of https://github.com/vllm-project/compressed-tensors
(src/compressed_tensors/quantization/quant_config.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from moe_ep.checkpoint.config_values import QUANT_CONFIG, flag, unexpected
from moe_ep.checkpoint.formats.fp4 import PACKED_MXFP4, PACKED_NVFP4
from moe_ep.checkpoint.formats.fp8 import MXFP8, Float8Config
from moe_ep.checkpoint.formats.layout import (
    ASYMMETRIC,
    FLOATS,
    SYMMETRIC,
    QuantizationConfig,
    Role,
    ScaledConfig,
    ScaleShape,
    TensorLayout,
    groups_in_order,
    needed_g_idx,
    pack_words,
    require_multiple,
    unpack_words,
)
from moe_ep.checkpoint.formats.modules import ModuleSchemes, Scheme, if_readable, ignored_modules
from moe_ep.errors import CheckpointError, one_of
from moe_ep.layer.weight_loading import FusedMoeWeightScaleSupported as Kind
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.scalar_type import scalar_types

# ==== pack-quantized ====
#
# compressed-tensors `pack-quantized`: codes of 4 or 8 bits packed along K into int32, low bits first.
#
# With b the bits and g the group size, a linear layer of N outputs and K inputs is stored as
#
#     weight_packed      int32 [N, K b / 32]             code of column k: bits [b * (k % (32 / b)), ...) of its word
#     weight_scale       f16, bf16 or f32 [N, K / g]     [N, 1] for a scale a row, [1] for one of all
#     weight_zero_point  int32 [ceil(N b / 32), K / g]   asymmetric schemes only; packed along N. Of one scale for all,
#                                                        and of blocks: int8, shaped as the scales, without the offset
#     weight_shape       int64 [2]                       N, K
#     weight_g_idx       int32 [K]                       the group of every column, where groups are scattered
#
# Gemma 4 was published with fused experts: `gate_up_proj_packed` int32 [E, 2N, K b / 32] and `gate_up_proj_scale`
# [E, 2N, K / g].
#
# The value of column k of row n is `scale * (q - z)` with q = code - 2^(b-1), and z stored with the same offset. The
# format is that of compressed-tensors (https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized).
#
# Example, 4 bits: the values -7, -6, ... 0 of columns 0..7 are the int32 0x87654321.


@dataclass(frozen=True, kw_only=True)
class PackQuantizedConfig(ScaledConfig):
    """One scheme of packed integers.

    Attributes:
        bits: 4 or 8.
        symmetric: whether there are no zero points.
        scattered: whether the columns of a group may be scattered ("actorder": "group"); without a weight_g_idx in the
            file they are in order.
    """

    quant_method: ClassVar[str] = "pack-quantized"

    bits: int
    symmetric: bool = True
    scattered: bool = False

    @property
    def act_order(self) -> bool:
        return self.scattered

    @property
    def _packs_zero_points(self) -> bool:
        return self.scale.kind in (Kind.CHANNEL, Kind.GROUP)

    @property
    def fused_endings(self) -> dict[str, tuple[str, ...]]:
        return {"weight_packed": ("_packed",), "weight_scale": ("_scale",), "bias": ("_bias",)}

    def weight_tensors(self, out_features: int, in_features: int) -> dict[str, TensorLayout]:
        pack = 32 // self.bits
        require_multiple("in_features", in_features, pack, f"pack-quantized with {self.bits} bits")
        groups = self.scale.shape(out_features, in_features)[-1]
        group_size = self.scale.columns if self.scale.columns > 1 else -1
        int32, in_order = (torch.int32,), partial(groups_in_order, in_features, group_size)
        layouts = {
            "weight_packed": TensorLayout(int32, (out_features, in_features // pack), out_dim=0, in_dim=1),
            "weight_scale": self.scale.layout(FLOATS, out_features, in_features),
            "weight_shape": TensorLayout(
                (torch.int64, torch.int32),
                (2,),
                lambda: torch.tensor([out_features, in_features], device="cpu"),
                Role.CHECKED,
            ),
            "weight_g_idx": TensorLayout(
                int32,
                (in_features,),
                in_order,
                Role.INDEX if self.scattered else Role.CHECKED,
                in_dim=0,
                in_order=in_order,
            ),
        }
        if not self.symmetric and self._packs_zero_points:
            shape = (-(-out_features // pack), groups)
            layouts["weight_zero_point"] = TensorLayout(int32, shape, role=Role.GROUPS, out_dim=0, in_dim=1)
        elif not self.symmetric:
            layouts["weight_zero_point"] = self.scale.layout((torch.int8,), out_features, in_features)
        return layouts

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> CanonicalWeights:
        packed = tensors["weight_packed"]
        num_rows, g_idx = packed.shape[-2], tensors.get("weight_g_idx")
        scales, group_size = self.scale.per_row(tensors["weight_scale"], num_rows), self.scale.group_size
        zero_points = None
        if not self.symmetric and not self._packs_zero_points:
            offset = (tensors["weight_zero_point"].to(torch.int16) + (1 << (self.bits - 1))).to(torch.uint8)
            zero_points = self.scale.per_row(offset, num_rows)
        elif not self.symmetric:
            along_rows = unpack_words(tensors["weight_zero_point"].transpose(-1, -2).contiguous(), self.bits)
            zero_points = along_rows.transpose(-1, -2)[..., :num_rows, :].contiguous()
        return CanonicalWeights(
            codes=unpack_words(packed, self.bits),
            scales=scales,
            quant_type_id=(SYMMETRIC if self.symmetric else ASYMMETRIC)[self.bits].id,
            group_size=group_size,
            zero_points=zero_points,
            g_idx=None if g_idx is None else needed_g_idx("weight_g_idx", g_idx, group_size, scales.shape[-1]),
        )


def pack_quantized(weights: CanonicalWeights, bits: int) -> dict[str, torch.Tensor]:
    """The tensors of one matrix of a symmetric scheme by the last part of their names: the inverse of `unpack`."""
    return {
        "weight_packed": pack_words(weights.codes, bits),
        "weight_scale": weights.scales,
        "weight_shape": torch.tensor(weights.codes.shape),
    }


# ==== int-quantized ====
#
# Signed bytes with a scale per row: `int-quantized` of compressed-tensors, and the same of other tools.
#
#     weight        int8 [N, K]           the values, not offset
#     weight_scale  f16, bf16 or f32 [N, 1]   or [1], or [N, K / g]; of blocks [ceil(N / bn), ceil(K / bk)]
#
# The values are `weight * weight_scale` (https://github.com/vllm-project/compressed-tensors). DeepSeek was also
# published in this form for https://github.com/sgl-project/sglang, as w8a8_int8 (a scale per row) and blockwise_int8
# (blocks, with scales named weight_scale_inv).


@dataclass(frozen=True, kw_only=True)
class IntQuantizedConfig(ScaledConfig):
    """One scheme of signed bytes; `scale` says which weights share a scale."""

    quant_method: ClassVar[str] = "int-quantized"

    def weight_tensors(self, out_features: int, in_features: int) -> dict[str, TensorLayout]:
        scale = self.scale.layout(FLOATS, out_features, in_features)
        return {
            "weight": TensorLayout((torch.int8,), (out_features, in_features), out_dim=0, in_dim=1),
            "weight_scale": replace(scale, other_names=("weight_scale_inv",)),
            "weight_zero_point": TensorLayout(
                (torch.int8,),
                (out_features, 1),
                lambda: torch.zeros(out_features, 1, dtype=torch.int8, device="cpu"),
                Role.CHECKED,
            ),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> CanonicalWeights:
        weight = tensors["weight"]
        # A flipped sign bit adds 128 to a two's complement byte.
        return CanonicalWeights(
            codes=weight.view(torch.uint8) ^ 0x80,
            scales=self.scale.per_row(tensors["weight_scale"], weight.shape[-2]),
            quant_type_id=scalar_types.uint8b128.id,
            group_size=self.scale.group_size,
        )


METHOD = "compressed-tensors"
# Formats without further settings: the scheme and the bits of its codes.
_FIXED: dict[str, tuple[QuantizationConfig, int]] = {
    "mxfp4-pack-quantized": (PACKED_MXFP4, 4),
    "mxfp8-quantized": (MXFP8, 8),
    "nvfp4-pack-quantized": (PACKED_NVFP4, 4),
}
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", *_FIXED)
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
# Values of actorder, as text, that scatter the columns of a group.
_SCATTERED = ("group", "dynamic", "true")
_INPUT_DTYPES = {"int": torch.int8, "float": torch.float8_e4m3fn}


def compressed_tensors_schemes(values: Mapping[str, Any]) -> ModuleSchemes | None:
    """The schemes of a checkpoint; None where only activations or cached keys are quantized.

    Raises:
        CheckpointError: no group in a format and with a strategy and bits that are known, sparse weights, or no groups.
    """
    sparsity = values.get("sparsity_config") or {}
    sparsity = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if sparsity != "dense":
        raise CheckpointError(f"{QUANT_CONFIG}sparsity_config: {one_of('format', sparsity, ['dense'])}")
    _check_transforms(values.get("transform_config"))
    groups = values.get("config_groups")
    if not groups and values.get("kv_cache_scheme"):
        return None
    if not isinstance(groups, Mapping) or not groups:
        raise unexpected("quantization_config", "config_groups with a scheme in it", groups)
    names: list[tuple[list[str], Scheme]] = []
    expressions: list[tuple[list[str], Scheme]] = []
    for name, group in groups.items():
        targets = group.get("targets") if isinstance(group, Mapping) else None
        if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
            raise unexpected(f"quantization_config: {name}", "targets, a list of modules", targets)
        scheme = if_readable(partial(_of_group, name, group, values.get("format")))
        names.append(([target for target in targets if not target.startswith("re:")], scheme))
        expressions += [([target], scheme) for target in targets if target.startswith("re:")]
    # Names take precedence over expressions, which are tried in alphabetical order, as in the library's match_targets.
    expressions.sort(key=lambda entry: entry[0])
    schemes = names + expressions
    if all(scheme is None for _, scheme in schemes):
        return None
    return ModuleSchemes(METHOD, schemes, ignored_modules(values))


def _of_group(name: str, group: Mapping[str, Any], form: Any) -> QuantizationConfig | None:
    # A group may be for activations alone, such as queries and keys.
    if "weights" in group and group["weights"] is None:
        return None
    try:
        scheme = _scheme(group, str(group.get("format") or form or ""))
    except CheckpointError as error:
        raise CheckpointError(f"{QUANT_CONFIG}{name}: {error}") from None
    return replace(scheme, input_dtype=_input_dtype(group.get("input_activations")))


def _input_dtype(activations: Any) -> torch.dtype | None:
    """The 8-bit dtype that input_activations quantize activations to; None for any other."""
    if not isinstance(activations, Mapping) or activations.get("num_bits") != 8:
        return None
    return _INPUT_DTYPES.get(str(activations.get("type", "int")).lower())


def _check_transforms(transforms: Any) -> None:
    """Refuses transforms of activations; those of weights are part of the weights."""
    if not transforms:
        return
    try:
        groups = transforms["config_groups"].values()
        locations = [str(part["location"]) for group in groups for part in group["apply"]]
    except (AttributeError, KeyError, TypeError):
        raise unexpected(
            "quantization_config: transform_config", "config_groups, each with apply", transforms
        ) from None
    of_activations = [location for location in locations if not location.startswith("weight_")]
    if of_activations:
        raise unexpected(
            "quantization_config: transform_config",
            "transforms of weights alone",
            of_activations[0],
            ", which is not computed; quantize without it",
        )


def _scheme(group: Mapping[str, Any], form: str) -> QuantizationConfig:
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"expected weights, found {weights!r}")
    lower = {key: weights[key].lower() for key in ("type", "strategy") if isinstance(weights.get(key), str)}
    weights = {**weights, **lower}
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if form == "naive-quantized":
        form = f"{kind}-quantized"
    if form not in FORMATS:
        raise CheckpointError(one_of("format", form, FORMATS))
    if form in _FIXED:
        scheme, num_bits = _FIXED[form]
        _require(weights, group_size=scheme.column_block, num_bits=num_bits)
        return scheme
    symmetric = flag(weights, "symmetric", True, "weights: ")
    scale = _scale_shape(weights)
    if form == "pack-quantized":
        if bits not in (4, 8) or kind != "int":
            raise CheckpointError(f"weights of {bits} bits ({kind}); pack-quantized ones must be int of 4 or 8 bits")
        scattered = str(weights.get("actorder")).lower() in _SCATTERED
        return PackQuantizedConfig(bits=bits, scale=scale, symmetric=symmetric, scattered=scattered)
    _require(weights, symmetric=True, type=form.removesuffix("-quantized"))
    if form == "int-quantized" and bits == 4:
        # One byte per code, as 8-bit ones.
        return IntQuantizedConfig(scale=scale)
    _require(weights, num_bits=8)
    return IntQuantizedConfig(scale=scale) if form == "int-quantized" else Float8Config(scale=scale)


def _require(weights: Mapping[str, Any], **expected: Any) -> None:
    for key, value in expected.items():
        found = weights.get(key, value)
        if found != value:
            raise CheckpointError(f"{key} of the weights is {found!r}; this format is read where it is {value!r}")


def _scale_shape(weights: Mapping[str, Any]) -> ScaleShape:
    group_size, block = weights.get("group_size"), weights.get("block_structure")
    grouped = isinstance(group_size, int) and group_size > 0
    strategy = weights.get("strategy") or ("group" if grouped else "channel" if group_size == -1 else "tensor")
    if strategy not in STRATEGIES:
        raise CheckpointError(one_of("strategy", strategy, STRATEGIES))
    if strategy in ("tensor", "channel"):
        return ScaleShape(Kind(strategy))
    if strategy == "block":
        if isinstance(block, str) and re.fullmatch(r"\d+x\d+", block, re.ASCII):  # as it was written first: 128x128
            block = [int(size) for size in block.split("x")]
        return ScaleShape.of_blocks("block_structure", block)
    if not isinstance(group_size, int) or group_size < 1:
        raise CheckpointError(f"group_size is {group_size!r}; with strategy {strategy} it must be at least 1")
    return ScaleShape(Kind.GROUP, columns=group_size)

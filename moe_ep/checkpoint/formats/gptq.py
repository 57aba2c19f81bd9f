"""GPTQ (`quant_method: gptq`): 4- and 8-bit codes packed along K into int32, with group scales and zero points.

With pack = 32 / bits and g the group size, a linear layer of N outputs and K inputs is stored as

    qweight  int32 [K / pack, N]     column k is bits [bits * (k % pack), ...) of row k // pack
    qzeros   int32 [K / g, N / pack] packed alike, but along N; checkpoint_format gptq stores z - 1, gptq_v2 stores z
    scales   f16 or bf16 [K / g, N]
    g_idx    int32 [K]               the group of every column; unsorted where desc_act was used

and the value of column k of row n is `scales[g_idx[k], n] * (code - z[g_idx[k], n])`. The format is that of AutoGPTQ
and GPTQModel (https://github.com/ModelCloud/GPTQModel).

Example, 4 bits: the codes 1, 2, 3, ... 8 of columns 0..7 are the int32 0x87654321.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from moe_ep.checkpoint.config_values import QUANT_CONFIG, flag
from moe_ep.checkpoint.formats.layout import (
    ASYMMETRIC,
    FLOATS,
    SYMMETRIC,
    QuantizationConfig,
    Role,
    TensorLayout,
    groups_in_order,
    needed_g_idx,
    pack_words,
    require_multiple,
    unpack_words,
)
from moe_ep.errors import CheckpointError, one_of
from moe_ep.quantization.canonical_weights import CanonicalWeights

_STORED_LESS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, kw_only=True)
class GPTQConfig(QuantizationConfig):
    """`quantization_config` of a GPTQ checkpoint.

    Attributes:
        bits: 4 or 8.
        group_size: input columns that share a scale, -1 for all of them.
        desc_act: whether columns were quantized in order of activation size, so that g_idx is unsorted.
        sym: whether all zero points are in the middle; the file's content decides, not this.
        checkpoint_format: gptq (zero points stored less one) or gptq_v2.

    Raises:
        ValueError: other bits, formats, or a group_size that is neither -1 nor positive.
    """

    quant_method: ClassVar[str] = "gptq"

    bits: int
    group_size: int
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: str = "gptq"

    def __post_init__(self) -> None:
        if self.bits not in tuple(SYMMETRIC):
            raise ValueError(one_of("bits", self.bits, [str(known) for known in SYMMETRIC]))
        if self.checkpoint_format not in tuple(_STORED_LESS):
            raise ValueError(one_of("checkpoint_format", self.checkpoint_format, list(_STORED_LESS)))
        if not isinstance(self.group_size, int) or (self.group_size < 1 and self.group_size != -1):
            raise ValueError(f"group_size is {self.group_size!r}; it must be -1 (all columns) or at least 1")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GPTQConfig:
        """The configuration in config.json; keys that do not affect the experts' tensors are ignored.

        Raises:
            CheckpointError: bits or group_size missing, or a value that is not supported.
        """
        for key in ("bits", "group_size"):
            if key not in values:
                raise CheckpointError(f"{QUANT_CONFIG}expected {key}, found {sorted(values)}")
        try:
            return cls(
                bits=values["bits"],
                group_size=values["group_size"],
                desc_act=flag(values, "desc_act", False, QUANT_CONFIG),
                sym=flag(values, "sym", True, QUANT_CONFIG),
                checkpoint_format=values.get("checkpoint_format") or values.get("format") or "gptq",
            )
        except ValueError as error:
            raise CheckpointError(f"{QUANT_CONFIG}{error}") from None

    @property
    def pack_factor(self) -> int:
        """Codes in an int32."""
        return 32 // self.bits

    def num_groups(self, in_features: int) -> int:
        """Groups of a row of `in_features` columns; the last one may be short."""
        return 1 if self.group_size == -1 else -(-in_features // self.group_size)

    @property
    def column_block(self) -> int:
        return 1 if self.group_size == -1 else self.group_size

    @property
    def act_order(self) -> bool:
        return self.desc_act

    @property
    def may_have_zero_points(self) -> bool:
        return not self.sym

    def weight_tensors(self, out_features: int, in_features: int) -> dict[str, TensorLayout]:
        for name, size in (("out_features", out_features), ("in_features", in_features)):
            require_multiple(name, size, self.pack_factor, f"GPTQ with {self.bits} bits")
        groups, pack = self.num_groups(in_features), self.pack_factor
        int32, in_order = (torch.int32,), partial(groups_in_order, in_features, self.group_size)
        return {
            "qweight": TensorLayout(int32, (in_features // pack, out_features), out_dim=1, in_dim=0),
            "qzeros": TensorLayout(int32, (groups, out_features // pack), role=Role.GROUPS, out_dim=1, in_dim=0),
            "scales": TensorLayout(FLOATS, (groups, out_features), role=Role.GROUPS, out_dim=1, in_dim=0),
            # Left out where it says nothing, or of an expert that calibration never reached: AutoGPTQ and GPTQModel
            # begin with columns in order and keep that, whatever desc_act says.
            "g_idx": TensorLayout(int32, (in_features,), in_order, Role.INDEX, in_dim=0, in_order=in_order),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> CanonicalWeights:
        """Zero points that are all `2**(bits - 1)` become the type's bias.

        Raises:
            CheckpointError: zero points or groups out of range.
        """
        scales, g_idx = tensors["scales"].transpose(-1, -2).contiguous(), tensors.get("g_idx")
        zero_points = self._zero_points(tensors["qzeros"])
        return CanonicalWeights(
            codes=unpack_words(tensors["qweight"].transpose(-1, -2), self.bits),
            scales=scales,
            quant_type_id=(SYMMETRIC if zero_points is None else ASYMMETRIC)[self.bits].id,
            group_size=self.group_size,
            zero_points=zero_points,
            g_idx=None if g_idx is None else needed_g_idx("g_idx", g_idx, self.group_size, scales.shape[-1]),
        )

    def _zero_points(self, qzeros: torch.Tensor) -> torch.Tensor | None:
        """uint8 `[..., N, G]`, or None if all are in the middle."""
        stored = unpack_words(qzeros, self.bits).transpose(-1, -2).contiguous()
        stored_less, largest = _STORED_LESS[self.checkpoint_format], 2**self.bits - 1
        if stored_less and bool((stored == largest).any()):
            raise CheckpointError(
                f"qzeros: expected zero points stored less one, so at most {largest - 1}, found {largest}; "
                f"a zero point of 0 was lost when it was written: quantize again with checkpoint_format gptq_v2"
            )
        if bool((stored == 2 ** (self.bits - 1) - stored_less).all()):
            return None
        return stored + stored_less


class GPTQTensors(NamedTuple):
    """The four tensors of a linear layer, as on disk."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    g_idx: torch.Tensor


def pack_gptq(weights: CanonicalWeights, config: GPTQConfig) -> GPTQTensors:
    """The inverse of `GPTQConfig.unpack`: the tensors as a writer of `config.checkpoint_format` stores them.

    Args:
        weights: integers of the config's bits, with rows and columns that fill whole int32.

    Raises:
        ValueError: a zero point 0 in checkpoint_format gptq, which cannot hold it.
    """
    num_columns, zero_points = weights.codes.shape[-1], weights.zero_points
    if zero_points is None:
        zero_points = torch.full_like(weights.scales, SYMMETRIC[config.bits].bias, dtype=torch.uint8)
    stored_less = _STORED_LESS[config.checkpoint_format]
    if stored_less and not zero_points.all():
        raise ValueError("zero_points hold a 0; checkpoint_format gptq stores them less one, use gptq_v2")
    g_idx = weights.g_idx
    if g_idx is None:
        g_idx = groups_in_order(num_columns, config.group_size, weights.codes.device)
        g_idx = g_idx.expand(*weights.codes.shape[:-2], num_columns).contiguous()
    return GPTQTensors(
        qweight=pack_words(weights.codes, config.bits).transpose(-1, -2).contiguous(),
        qzeros=pack_words((zero_points - stored_less).transpose(-1, -2), config.bits),
        scales=weights.scales.transpose(-1, -2).contiguous(),
        g_idx=g_idx,
    )

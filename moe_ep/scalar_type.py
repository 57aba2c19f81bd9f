"""Number types of quantized weights and their 64-bit ids.

The id packs the fields from the low bits up: exponent bits (8), mantissa bits (8), signed (1), bias (32),
finite values only (1), kind of NaN (8). It is the encoding of vLLM's `ScalarType.id`
(vllm/scalar_type.py), so ids can be exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from moe_ep.errors import check_whole


class NanRepr(IntEnum):
    """How a float type writes NaN."""

    NONE = 0
    IEEE_754 = 1
    EXTD_RANGE_MAX_MIN = 2


_FIELDS = (("exponent", 8), ("mantissa", 8), ("signed", 1), ("bias", 32), ("finite_values_only", 1), ("nan_repr", 8))


@dataclass(frozen=True)
class ScalarType:
    """A number type of a few bits: value = code - bias for integers, the usual reading for floats.

    Example: uint4b8 holds codes 0..15 that stand for -8..7.
    """

    exponent: int
    mantissa: int
    signed: bool
    bias: int = 0
    finite_values_only: bool = False
    nan_repr: NanRepr = NanRepr.IEEE_754

    @property
    def size_bits(self) -> int:
        return self.exponent + self.mantissa + int(self.signed)

    @property
    def is_float(self) -> bool:
        return self.exponent > 0

    @property
    def id(self) -> int:
        """The 64-bit id; 4-bit unsigned with bias 8 gives 1125899907892224."""
        value = shift = 0
        for name, bits in _FIELDS:
            field = int(getattr(self, name))
            value |= (field & ((1 << bits) - 1)) << shift
            shift += bits
        return value

    @classmethod
    def from_id(cls, type_id: int) -> ScalarType:
        """The type of an id; ValueError for one that is not of this encoding, TypeError for no whole number."""
        check_whole(quant_type_id=type_id)
        fields, rest = {}, type_id
        for name, bits in _FIELDS:
            fields[name] = rest & ((1 << bits) - 1)
            rest >>= bits
        if rest or type_id < 0 or fields["nan_repr"] not in list(NanRepr):
            raise ValueError(f"quant_type_id is {type_id}; it is not an id of a scalar type, see scalar_types")
        return cls(
            fields["exponent"],
            fields["mantissa"],
            bool(fields["signed"]),
            fields["bias"],
            bool(fields["finite_values_only"]),
            NanRepr(fields["nan_repr"]),
        )

    def __str__(self) -> str:
        for name, scalar_type in vars(scalar_types).items():
            if scalar_type == self:
                return name
        return f"ScalarType({self.id})"


class scalar_types:
    """The types that the experts here know."""

    uint4 = ScalarType(0, 4, False)
    uint4b8 = ScalarType(0, 4, False, bias=8)
    uint8 = ScalarType(0, 8, False)
    uint8b128 = ScalarType(0, 8, False, bias=128)
    float8_e4m3fn = ScalarType(4, 3, True, finite_values_only=True, nan_repr=NanRepr.EXTD_RANGE_MAX_MIN)
    float4_e2m1f = ScalarType(2, 1, True, finite_values_only=True, nan_repr=NanRepr.NONE)

"""AWQ (`quant_method: awq`, version gemm): 4-bit codes packed along N into int32, with group scales and zero points.

With g the group size, a linear layer of N outputs and K inputs is stored as

    qweight  int32 [K, N / 8]      nibble i of word c is row 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]
    qzeros   int32 [K / g, N / 8]  packed alike
    scales   f16 [K / g, N]

and the value of column k of row n is `scales[k // g, n] * (code - z[k // g, n])`. The format is that of AutoAWQ
(https://github.com/casper-hansen/AutoAWQ, awq/modules/linear/gemm.py).

Example: the codes 1, 2, 3, ... 8 of rows 0..7 of a column are the int32 0x86427531.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from moe_ep.checkpoint.config_values import QUANT_CONFIG
from moe_ep.checkpoint.formats.layout import (
    FLOATS,
    QuantizationConfig,
    Role,
    TensorLayout,
    require_multiple,
    unpack_words,
)
from moe_ep.errors import CheckpointError, one_of
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.scalar_type import scalar_types

PACK = 8
# The nibble of row 8 c + i in word c: the inverse of the order above.
_NIBBLE_OF_ROW = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, kw_only=True)
class AWQConfig(QuantizationConfig):
    """`quantization_config` of an AWQ checkpoint.

    Attributes:
        group_size: input columns that share a scale, -1 for all of them.
    """

    quant_method: ClassVar[str] = "awq"

    group_size: int

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AWQConfig:
        """The configuration in config.json.

        Raises:
            CheckpointError: bits other than 4, a version other than gemm, or an invalid group_size.
        """
        bits = values.get("bits", values.get("w_bit"))
        group_size = values.get("group_size", values.get("q_group_size"))
        # transformers writes the first and the second, GPTQModel the second and the third.
        versions = (values.get(key) for key in ("version", "format", "checkpoint_format"))
        version = str(next(filter(None, versions), "gemm")).lower()
        if values.get("backend") == "llm-awq":
            version = "llm-awq"
        if bits != 4:
            raise CheckpointError(QUANT_CONFIG + one_of("bits", bits, ["4"]))
        if version != "gemm":
            raise CheckpointError(
                f"{QUANT_CONFIG}{one_of('version', version, ['gemm'])}, the layouts of the other versions differ"
            )
        if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
            raise CheckpointError(
                f"{QUANT_CONFIG}group_size is {group_size!r}; it must be -1 (all columns) or at least 1"
            )
        return cls(group_size=group_size)

    @property
    def column_block(self) -> int:
        return 1 if self.group_size == -1 else self.group_size

    def weight_tensors(self, out_features: int, in_features: int) -> dict[str, TensorLayout]:
        require_multiple("out_features", out_features, PACK, "AWQ")
        groups = 1 if self.group_size == -1 else -(-in_features // self.group_size)
        int32 = (torch.int32,)
        return {
            "qweight": TensorLayout(int32, (in_features, out_features // PACK), out_dim=1, in_dim=0),
            "qzeros": TensorLayout(int32, (groups, out_features // PACK), role=Role.GROUPS, out_dim=1, in_dim=0),
            "scales": TensorLayout(FLOATS, (groups, out_features), role=Role.GROUPS, out_dim=1, in_dim=0),
        }

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> CanonicalWeights:
        return CanonicalWeights(
            codes=_rows_first(tensors["qweight"]),
            scales=tensors["scales"].transpose(-1, -2).contiguous(),
            zero_points=_rows_first(tensors["qzeros"]),
            quant_type_id=scalar_types.uint4.id,
            group_size=self.group_size,
        )


def _rows_first(packed: torch.Tensor) -> torch.Tensor:
    """int32 `[..., R, N / 8]` -> uint8 `[..., N, R]`."""
    nibbles = unpack_words(packed, 4).unflatten(-1, (-1, PACK))
    order = torch.tensor(_NIBBLE_OF_ROW, device=packed.device)
    return nibbles[..., order].flatten(-2).transpose(-1, -2).contiguous()

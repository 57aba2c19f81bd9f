"""What a format says about one tensor of a linear layer on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from moe_ep.checkpoint.formats.canonical import CanonicalWeights

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class TensorLayout:
    """Expected dtypes and shape of a tensor of a linear layer.

    Attributes:
        default: makes what stands for the tensor where a checkpoint or a layer leaves it out; None where neither may.
    """

    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]
    default: Callable[[], torch.Tensor] | None = None


class QuantizationConfig(Protocol):
    """What a format's configuration offers the loader."""

    quant_method: ClassVar[str]

    def tensors(self, out_features: int, in_features: int) -> dict[str, TensorLayout]:
        """The tensors of a linear layer `[out_features, in_features]` by the last part of their names."""
        ...

    def unpack(self, tensors: Mapping[str, torch.Tensor]) -> CanonicalWeights:
        """The canonical form of one linear layer's tensors."""
        ...


def plain_tensors(out_features: int, in_features: int) -> dict[str, TensorLayout]:
    """The tensors of a linear layer that is not quantized."""
    return {"weight": TensorLayout(FLOATS, (out_features, in_features)), "bias": bias_layout(out_features)}


def bias_layout(out_features: int) -> TensorLayout:
    """A bias, which may be left out; AutoGPTQ wrote zeros for every linear layer, whether it has a bias or not."""
    return TensorLayout(FLOATS, (out_features,), lambda: torch.zeros(out_features))

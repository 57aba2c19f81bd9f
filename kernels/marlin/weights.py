"""The packed weights of both GEMMs with their scales and other tensors, checked once and used for many passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from moe_ep.activation import MoEActivation
from moe_ep.kernels.marlin.types import ACTIVATION_DTYPES, WeightType, check_packed_zeros, check_sizes, packed_sizes
from moe_ep.scalar_type import scalar_types

E8M0 = (torch.float8_e8m0fnu, torch.uint8)  # powers of two, or their bits


class Weights(NamedTuple):
    """Packed weights of all local experts; see repack.py for the layouts.

    Attributes:
        bias: `[E, rows]` in natural order (gate, then up), or None.
        alphas: f32 `[E]` or `[E, 2]`, global scales, or None.
        g_idx: int32 `[E, columns]`, the group of every packed column, or None.
        sort_indices: int32 `[E, columns]`, the input column of every packed one, or None where they are the same.
        gated: rows are gate and up rows, interleaved.
        has_regular_groups: whether the packed columns of each group are adjacent, equally many per group; otherwise
            g_idx holds the group of each column.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bias: torch.Tensor | None
    alphas: torch.Tensor | None
    g_idx: torch.Tensor | None
    sort_indices: torch.Tensor | None
    gated: bool
    num_rows: int
    num_columns: int
    has_regular_groups: bool = True


def check_weights(
    which: int,
    kind: WeightType,
    act_dtype: torch.dtype,
    gated: bool,
    is_k_full: bool,
    parts: tuple[Any, ...],
) -> Weights:
    """Checks the weights of w1 (`which` 1) or w2 (2); a ValueError names the argument that does not fit.

    `parts` are the first seven of Weights.
    """
    name, (qweight, scales, zeros, bias, alphas, g_idx, sort_indices) = f"w{which}", parts
    num_rows, num_columns = packed_sizes(name, qweight, kind)
    num_experts = qweight.size(0)
    check_sizes(name, num_rows, num_columns, gated)
    has_regular_groups = g_idx is None or is_k_full
    _check_scales(name, kind, act_dtype, scales, num_experts, num_rows, num_columns, has_regular_groups)
    check_packed_zeros(f"{name}_zeros", zeros, kind, scales)
    _check_like(f"bias{which}", bias, act_dtype, (num_experts, num_rows))
    is_nvfp4 = kind.scalar_type == scalar_types.float4_e2m1f and scales.dtype == torch.float8_e4m3fn
    if is_nvfp4 and kind.for_eight_bit_rows:
        raise ValueError(f"{name} is {qweight.dtype}; nvfp4 is packed as int32, pass it as pack_marlin made it")
    if is_nvfp4 and alphas is None:
        raise ValueError(f"global_scale{which} is missing; float4_e2m1f with float8_e4m3fn scales (nvfp4) needs it")
    if alphas is not None:
        two = gated and alphas.dim() == 2
        _check_like(f"global_scale{which}", alphas, torch.float32, (num_experts, 2) if two else (num_experts,))
    _check_like(f"g_idx{which}", g_idx, torch.int32, (num_experts, num_columns))
    _check_like(f"sort_indices{which}", sort_indices, torch.int32, (num_experts, num_columns))
    for label, tensor in ((name, qweight), (f"{name}_scale", scales)):
        if not tensor.is_contiguous():
            raise ValueError(f"{label} is not contiguous; pass it as pack_marlin made it")
    return Weights(
        qweight, scales, zeros, bias, alphas, g_idx, sort_indices, gated, num_rows, num_columns, has_regular_groups
    )


def group_size_of(kind: WeightType, num_columns: int, num_groups: int) -> int | None:
    """The group size of rows with this many groups, -1 for one group; None if the type does not support it."""
    if num_groups == 1 and -1 in kind.group_sizes:
        return -1
    size = num_columns // num_groups if num_groups and num_columns % num_groups == 0 else 0
    return size if size in kind.group_sizes else None


def _check_scales(
    name: str,
    kind: WeightType,
    act_dtype: torch.dtype,
    scales: torch.Tensor,
    num_experts: int,
    num_rows: int,
    num_columns: int,
    has_regular_groups: bool,
) -> None:
    if scales.dim() != 3 or scales.size(0) != num_experts or scales.size(2) != num_rows:
        raise ValueError(
            f"{name}_scale has shape {tuple(scales.shape)}; {name} asks for ({num_experts}, groups, {num_rows})"
        )
    if kind.scalar_type == scalar_types.float4_e2m1f:
        allowed: tuple[torch.dtype, ...] = (torch.float8_e4m3fn, *E8M0)
        sizes: tuple[int, ...] = (16,) if scales.dtype == torch.float8_e4m3fn else (32,)
    else:
        allowed, sizes = (act_dtype,), kind.group_sizes
    if scales.dtype not in allowed:
        raise ValueError(
            f"{name}_scale is {scales.dtype}; {kind.scalar_type} with {act_dtype} activations takes "
            f"{' or '.join(str(dtype) for dtype in allowed)}"
        )
    if not has_regular_groups:
        return
    size = group_size_of(kind, num_columns, scales.size(1))
    if size is None or size not in sizes:
        raise ValueError(
            f"{name}_scale has {scales.size(1)} groups for {num_columns} columns; {kind.scalar_type} takes groups of "
            f"{', '.join(str(allowed_size) for allowed_size in sizes)} columns (-1: one group)"
        )


def _check_like(
    name: str, tensor: torch.Tensor | None, dtype: torch.dtype, shape: torch.Size | tuple[int, ...]
) -> None:
    if tensor is None:
        return
    if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be {dtype} {tuple(shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous; pass {name}.contiguous()")


def check_activation_dtype(dtype: torch.dtype) -> None:
    """Raises ValueError unless the kernels support activations of this dtype."""
    if dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"hidden_states is {dtype}; it must be {' or '.join(str(d) for d in ACTIVATION_DTYPES)}")


T = TypeVar("T")


class WeightPair:
    """w13 and w2 that fit each other, with values that are derived from them and cached.

    Experts keep a pair from pass to pass: the contents of its tensors may change, but their storage must not move.

    Attributes:
        kind: number type of both.
        act_dtype: dtype of the activations that they were checked for.
        clamp_limit: as in gate_limit.
        input_dtype: int8 or float8_e4m3fn if rows may be rounded to it, otherwise act_dtype.
        columns, groups: (K, N), and the number of scale groups of w13 and w2 along them.
        batch_invariant: whether a row's result has the same bits whatever the other rows are.
        device: the device of all their tensors.
    """

    def __init__(
        self,
        kind: WeightType,
        activation: MoEActivation,
        act_dtype: torch.dtype,
        w13: Weights,
        w2: Weights,
        clamp_limit: float | None = None,
        input_dtype: torch.dtype | None = None,
    ) -> None:
        self.kind, self.activation, self.act_dtype = kind, activation, act_dtype
        self.clamp_limit = clamp_limit
        self.input_dtype = input_dtype or act_dtype
        self.batch_invariant = False
        self.w13, self.w2 = w13, w2
        self.columns = (w13.num_columns, w2.num_columns)
        self.groups = (w13.scales.size(1), w2.scales.size(1))
        self.num_experts = w13.qweight.size(0)
        self.device = w13.qweight.device
        self._known: dict[Any, Any] = {}

    def once(self, of: Callable[..., T], *args: Any) -> T:
        """Returns `of(self, *args)`, computed by the first call and cached."""
        key = (of, *args)
        if key not in self._known:
            self._known[key] = of(self, *args)
        return self._known[key]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out cached values, because a copy has its own tensors."""
        return self.__dict__ | {"_known": {}}

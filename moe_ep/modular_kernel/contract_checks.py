"""Whether a backend and experts of somebody's own keep to their contracts; the error names the one that does not.

Those of moe_ep itself are used as they are: its tests check them, and a layer's pass has no time for it. Only what the
host knows is looked at, so that nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, cast

import torch

from moe_ep.arguments import INTEGERS
from moe_ep.modular_kernel.contracts import (
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEPermuteExpertsUnpermute,
    FusedMoEPrepareAndFinalize,
    PrepareResult,
)
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce

_PREPARED = "(rows, scales or None, metadata or None, ids or None, weights or None)"
_OURS = "moe_ep."


def checked_backend(backend: Any) -> FusedMoEPrepareAndFinalize:
    """What to call the backend by: itself, or around somebody's own, checks of what it returns.

    Raises:
        TypeError, ValueError: as `check_backend`.
    """
    check_backend(backend)
    if type(backend).__module__.startswith(_OURS):
        return cast(FusedMoEPrepareAndFinalize, backend)
    return cast(FusedMoEPrepareAndFinalize, _CheckedBackend(backend))


def checked_experts(experts: Any) -> FusedMoEPermuteExpertsUnpermute:
    """As `checked_backend`, of experts.

    Raises:
        TypeError: as `check_experts`.
    """
    check_experts(experts)
    if type(experts).__module__.startswith(_OURS):
        return cast(FusedMoEPermuteExpertsUnpermute, experts)
    return cast(FusedMoEPermuteExpertsUnpermute, _CheckedExperts(experts))


class _Checked:
    """Has everything that the checked one has."""

    def __init__(self, checked: Any) -> None:
        self._checked = checked

    def __getattr__(self, name: str) -> Any:
        if name == "_checked" or name.startswith("__"):  # what a copy that is being made asks for
            raise AttributeError(name)
        return getattr(self._checked, name)


class _CheckedBackend(_Checked):
    def prepare(self, a1: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *args: Any) -> Any:
        return check_prepared(
            self._checked, self._checked.prepare(a1, topk_weights, topk_ids, *args), a1, topk_ids.size(-1)
        )

    def finalize(self, output: torch.Tensor, *args: Any) -> None:
        check_wrote(self._checked, "finalize", self._checked.finalize(output, *args), output)


class _CheckedExperts(_Checked):
    def moe_problem_size(self, *args: Any) -> tuple[int, int, int, int, int]:
        return check_problem_size(self._checked, self._checked.moe_problem_size(*args))

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        return check_workspace_dtype(self._checked, self._checked.workspace_dtype(act_dtype))

    def workspace_shapes(self, *args: Any) -> list[tuple[int, ...]]:
        return check_workspace_shapes(self._checked, self._checked.workspace_shapes(*args))

    def apply(self, output: torch.Tensor, *args: Any) -> None:
        check_wrote(self._checked, "apply", self._checked.apply(output, *args), output)


def check_backend(backend: Any) -> None:
    """Checks what a backend says of itself.

    Raises:
        TypeError: no instance of the contract, or an answer of another type.
        ValueError: a capacity below 1.
    """
    if not isinstance(backend, FusedMoEPrepareAndFinalize):
        raise TypeError(f"prepare_finalize is {backend!r}; it must be an instance of a FusedMoEPrepareAndFinalize")
    _check_format(backend)
    capacity, ids = backend.max_num_tokens_per_rank(), backend.topk_indices_dtype()
    if capacity is not None and (not isinstance(capacity, Integral) or capacity < 1):
        wrong = ValueError if isinstance(capacity, Integral) else TypeError
        raise wrong(f"{_of(backend, 'max_num_tokens_per_rank')} {capacity!r}; it must be at least 1, or None")
    if ids is not None and ids not in INTEGERS:
        raise TypeError(f"{_of(backend, 'topk_indices_dtype')} {ids!r}; it must be an integer dtype of torch, or None")


def check_experts(experts: Any) -> None:
    """Checks what experts say of themselves.

    Raises:
        TypeError: no instance of the contract, or an answer of another type.
    """
    if not isinstance(experts, FusedMoEPermuteExpertsUnpermute):
        raise TypeError(f"fused_experts is {experts!r}; it must be an instance of a FusedMoEPermuteExpertsUnpermute")
    if not hasattr(experts, "quant_config"):
        raise TypeError(
            f"{type(experts).__name__} has no quant_config; its constructor must call super().__init__(moe_config, "
            f"quant_config)"
        )
    _check_format(experts)
    reduce_impl = experts.finalize_weight_and_reduce_impl()
    if not isinstance(reduce_impl, TopKWeightAndReduce):
        raise TypeError(
            f"{_of(experts, 'finalize_weight_and_reduce_impl')} {reduce_impl!r}; it must be a TopKWeightAndReduce, as "
            f"TopKWeightAndReduceNoOP() of experts that weight and sum by themselves"
        )


def check_prepared(
    backend: FusedMoEPrepareAndFinalize, prepared: Any, hidden_states: torch.Tensor, num_topk: int
) -> PrepareResult:
    """Returns what `prepare` returned for this rank's tokens.

    Raises:
        TypeError: something that is no such tuple.
        ValueError: tensors of other shapes and dtypes than the backend's format has.
    """
    if not isinstance(prepared, (tuple, list)) or len(prepared) != 5:
        held = f" of {len(prepared)}" if isinstance(prepared, (tuple, list)) else ""
        raise TypeError(f"{_of(backend, 'prepare')} a {type(prepared).__name__}{held}; it must be {_PREPARED}")
    rows, scales, meta, ids, weights = prepared
    if (
        not isinstance(rows, torch.Tensor)
        or not (scales is None or isinstance(scales, torch.Tensor))
        or not (meta is None or isinstance(meta, ExpertTokensMetadata))
        or not (ids is None or isinstance(ids, torch.Tensor))
        or not (weights is None or isinstance(weights, torch.Tensor))
    ):
        kinds = ", ".join(type(part).__name__ for part in prepared)
        raise TypeError(f"{_of(backend, 'prepare')} ({kinds}); it must be {_PREPARED}")
    standard = backend.activation_format() is FusedMoEActivationFormat.Standard
    by_reference = meta is not None and meta.expert_row_ids is not None
    K, dims = hidden_states.size(-1), 2 if standard or by_reference else 3
    if rows.dim() != dims or rows.size(-1) != K or (scales is None and rows.dtype != hidden_states.dtype):
        shape = f"(rows, {K})" if dims == 2 else f"(local experts, rows, {K})"
        raise ValueError(
            f"{_of(backend, 'prepare')} rows of {rows.dtype} {tuple(rows.shape)}; they must be {shape} of "
            f"{hidden_states.dtype}, or of another dtype with scales"
        )
    if not standard and (meta is None or ids is not None or weights is not None):
        raise ValueError(
            f"{_of(backend, 'prepare')} rows in the BatchedExperts format {'without' if meta is None else 'with'} "
            f"{'metadata' if meta is None else 'ids or weights'}; they come with expert_num_tokens, and the backend "
            f"keeps ids and weights for finalize"
        )
    if standard:
        _check_choices(backend, rows.size(0), ids, weights, (hidden_states.size(0), num_topk))
    return rows, scales, meta, ids, weights


def check_workspace_shapes(experts: FusedMoEPermuteExpertsUnpermute, shapes: Any) -> list[tuple[int, ...]]:
    """Returns the three shapes that `workspace_shapes` returned; TypeError or ValueError where they are none."""
    try:
        found = [tuple(shape) for shape in shapes]
    except TypeError:
        found = []
    if len(found) != 3 or any(not isinstance(size, (int, Integral)) for shape in found for size in shape):
        raise TypeError(
            f"{_of(experts, 'workspace_shapes')} {shapes!r}; it must be the shapes of workspace13, of workspace2 and "
            f"of the output, each a tuple of whole numbers"
        )
    if any(size < 0 for shape in found for size in shape):
        raise ValueError(f"{_of(experts, 'workspace_shapes')} {shapes!r}; no size may be below 0")
    return found


def check_workspace_dtype(experts: FusedMoEPermuteExpertsUnpermute, dtype: Any) -> torch.dtype:
    """Returns what `workspace_dtype` returned; TypeError where it is no dtype."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{_of(experts, 'workspace_dtype')} {dtype!r}; it must be a dtype of torch")
    return dtype


def check_problem_size(experts: FusedMoEPermuteExpertsUnpermute, sizes: Any) -> tuple[int, int, int, int, int]:
    """Returns what `moe_problem_size` returned; TypeError where it is not five numbers."""
    if not isinstance(sizes, Sequence) or len(sizes) != 5:
        raise TypeError(f"{_of(experts, 'moe_problem_size')} {sizes!r}; it must be (E, M, N, K, topk)")
    E, M, N, K, topk = sizes
    return E, M, N, K, topk


def check_wrote(part: Any, method: str, returned: Any, output: torch.Tensor) -> None:
    """TypeError where a method that writes `output` in place returned another tensor: output was hardly written."""
    if returned is not None and returned is not output and isinstance(returned, torch.Tensor):
        raise TypeError(
            f"{_of(part, method)} a tensor; it must write output in place, as output.copy_(...), and return nothing"
        )


def _of(part: Any, method: str) -> str:
    return f"{type(part).__name__}.{method} returned"


def _check_format(part: Any) -> None:
    form = part.activation_format()
    if not isinstance(form, FusedMoEActivationFormat):
        names = " or ".join(str(known) for known in FusedMoEActivationFormat)
        raise TypeError(f"{_of(part, 'activation_format')} {form!r}; it must be {names}")


def _check_choices(
    backend: Any,
    num_rows: int,
    ids: torch.Tensor | None,
    weights: torch.Tensor | None,
    given: tuple[int, int],
) -> None:
    """Ids and weights of the received rows; None for both leaves this rank's own, of the shape `given`."""
    if ids is None and weights is None:
        if num_rows != given[0]:
            raise ValueError(
                f"{_of(backend, 'prepare')} {num_rows} rows for {given[0]} tokens and no ids; return ids and weights "
                f"of the rows that arrived"
            )
        return
    if (
        ids is None
        or weights is None
        or ids.dim() != 2
        or ids.size(0) != num_rows
        or weights.shape != ids.shape
        or ids.dtype not in INTEGERS
        or not weights.is_floating_point()
    ):
        described = [None if part is None else f"{part.dtype} {tuple(part.shape)}" for part in (ids, weights)]
        raise ValueError(
            f"{_of(backend, 'prepare')} ids {described[0]} and weights {described[1]} of {num_rows} rows; ids must be "
            f"integers ({num_rows}, topk), and weights floats of the same shape"
        )

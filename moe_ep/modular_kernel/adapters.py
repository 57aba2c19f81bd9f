"""Adapters through which the modular kernel calls backends and experts with structs, whichever form of the contract
they implement.

They check in every pass that what a class returns fits its contract, with errors that name the class, unless the class
sets `unchecked=True`, as those of moe_ep do. The checks use only what the host knows and never wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from moe_ep.arguments import INTEGERS
from moe_ep.config import FusedMoEQuantConfig
from moe_ep.modular_kernel.contracts import (
    Dispatched,
    ExpertsCall,
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEPermuteExpertsUnpermute,
    FusedMoEPrepareAndFinalize,
    Routing,
)
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce

_PREPARED = "(rows, scales or None, metadata or None, ids or None, weights or None)"


def as_dispatcher(backend: FusedMoEPrepareAndFinalize) -> Any:
    """Returns an object with `dispatch` and `combine` for this backend.

    Raises:
        TypeError, ValueError: as `check_backend`.
    """
    check_backend(backend)
    if backend.is_unchecked:
        return backend
    by_signature = not _implements(type(backend), "dispatch", ("prepare", "finalize"))
    return _CheckedDispatcher(backend, by_signature=by_signature)


def as_experts(experts: FusedMoEPermuteExpertsUnpermute) -> Any:
    """Returns an object with `run` and the size and scratch methods of these experts.

    Raises:
        TypeError: as `check_experts`.
    """
    check_experts(experts)
    if experts.is_unchecked:
        return experts
    return _CheckedExperts(experts, by_signature=not _implements(type(experts), "run", ("apply",)))


def _implements(kind: type, method: str, others: tuple[str, ...]) -> bool:
    """Whether the class implements this form of the contract; if it has several forms, the most derived one decides."""
    for base in kind.__mro__:
        if method in vars(base):
            return True
        if any(name in vars(base) for name in others):
            return False
    return False


class _CheckedDispatcher:
    """Calls a user-defined backend in the form that it implements, and checks what it returns."""

    def __init__(self, backend: Any, *, by_signature: bool) -> None:
        self._backend, self._by_signature = backend, by_signature

    def dispatch(self, hidden_states: torch.Tensor, routing: Routing, quant_config: FusedMoEQuantConfig) -> Dispatched:
        if self._by_signature:
            method, dispatched = "prepare", self._prepare(hidden_states, routing, quant_config)
        else:
            method, dispatched = "dispatch", self._backend.dispatch(hidden_states, routing, quant_config)
        return check_dispatched(self._backend, method, dispatched, hidden_states)

    def _prepare(self, hidden_states: torch.Tensor, routing: Routing, quant_config: FusedMoEQuantConfig) -> Dispatched:
        weights, ids, is_weighted = routing.topk_weights, routing.topk_ids, routing.apply_router_weight_on_input
        prepared = self._backend.prepare(
            hidden_states, weights, ids, routing.num_experts, routing.expert_map, is_weighted, quant_config
        )
        if not isinstance(prepared, (tuple, list)) or len(prepared) != 5:
            held = f" of {len(prepared)}" if isinstance(prepared, (tuple, list)) else ""
            raise TypeError(
                f"{_of(self._backend, 'prepare')} a {type(prepared).__name__}{held}; it must be {_PREPARED}"
            )
        rows, scales, meta, its_ids, its_weights = prepared
        return Dispatched(
            rows=rows, row_scales=scales, expert_tokens_meta=meta, topk_ids=its_ids, topk_weights=its_weights,
            rows_are_weighted=is_weighted,
            handle=(weights if its_weights is None else its_weights, ids if its_ids is None else its_ids),
        )  # fmt: skip

    def combine(
        self, output: torch.Tensor, expert_output: torch.Tensor, dispatched: Dispatched, impl: TopKWeightAndReduce
    ) -> None:
        if self._by_signature:
            method, more = "finalize", (*dispatched.handle, dispatched.rows_are_weighted)
        else:
            method, more = "combine", (dispatched,)
        returned = getattr(self._backend, method)(output, expert_output, *more, impl)
        check_wrote(self._backend, method, returned, output)


class _CheckedExperts:
    """Calls user-defined experts in the form that they implement, and checks what they return."""

    def __init__(self, experts: Any, *, by_signature: bool) -> None:
        self._experts, self._by_signature = experts, by_signature

    def moe_problem_size(self, *args: Any) -> tuple[int, int, int, int, int]:
        sizes = self._experts.moe_problem_size(*args)
        if not isinstance(sizes, Sequence) or len(sizes) != 5:
            raise TypeError(f"{_of(self._experts, 'moe_problem_size')} {sizes!r}; it must be (E, M, N, K, topk)")
        E, M, N, K, topk = sizes
        return E, M, N, K, topk

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        dtype = self._experts.workspace_dtype(act_dtype)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{_of(self._experts, 'workspace_dtype')} {dtype!r}; it must be a dtype of torch")
        return dtype

    def workspace_shapes(self, *args: Any) -> list[tuple[int, ...]]:
        return check_workspace_shapes(self._experts, self._experts.workspace_shapes(*args))

    def run(self, call: ExpertsCall) -> None:
        if self._by_signature:
            returned = self._experts.apply(
                call.output, call.hidden_states, call.w1, call.w2, call.topk_weights, call.topk_ids, call.activation,
                call.global_num_experts, call.expert_map, call.row_scales, self._experts.quant_config.a2_scale,
                *call.scratch, call.meta, call.rows_are_weighted,
            )  # fmt: skip
        else:
            returned = self._experts.run(call)
        check_wrote(self._experts, "apply" if self._by_signature else "run", returned, call.output)


def check_backend(backend: Any) -> None:
    """Checks what a backend's methods state about it.

    Raises:
        TypeError: not an instance of the contract, or a method returns another type.
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
    """Checks what the methods of experts state about them.

    Raises:
        TypeError: not an instance of the contract, or a method returns another type.
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


def check_dispatched(
    backend: FusedMoEPrepareAndFinalize, method: str, dispatched: Any, hidden_states: torch.Tensor
) -> Dispatched:
    """Checks and returns what a backend dispatched for this rank's tokens.

    Raises:
        TypeError: a value that is not a `Dispatched`.
        ValueError: tensors whose shapes or dtypes do not fit the backend's format.
    """
    if not isinstance(dispatched, Dispatched):
        raise TypeError(f"{_of(backend, method)} a {type(dispatched).__name__}; it must be a Dispatched")
    rows, scales, meta = dispatched.rows, dispatched.row_scales, dispatched.expert_tokens_meta
    ids, weights = dispatched.topk_ids, dispatched.topk_weights
    if (
        not isinstance(rows, torch.Tensor)
        or not (scales is None or isinstance(scales, torch.Tensor))
        or not (meta is None or isinstance(meta, ExpertTokensMetadata))
        or not (ids is None or isinstance(ids, torch.Tensor))
        or not (weights is None or isinstance(weights, torch.Tensor))
    ):
        kinds = ", ".join(type(part).__name__ for part in (rows, scales, meta, ids, weights))
        raise TypeError(f"{_of(backend, method)} ({kinds}); it must be {_PREPARED}")
    standard = backend.activation_format() is FusedMoEActivationFormat.Standard
    by_reference = meta is not None and meta.expert_row_ids is not None
    K, dims = hidden_states.size(-1), 2 if standard or by_reference else 3
    if rows.dim() != dims or rows.size(-1) != K or (scales is None and rows.dtype != hidden_states.dtype):
        shape = f"(rows, {K})" if dims == 2 else f"(local experts, rows, {K})"
        raise ValueError(
            f"{_of(backend, method)} rows of {rows.dtype} {tuple(rows.shape)}; they must be {shape} of "
            f"{hidden_states.dtype}, or of another dtype with scales"
        )
    if not standard and (meta is None or ids is not None or weights is not None):
        raise ValueError(
            f"{_of(backend, method)} rows in the BatchedExperts format {'without' if meta is None else 'with'} "
            f"{'metadata' if meta is None else 'ids or weights'}; they come with expert_num_tokens, and the backend "
            f"keeps ids and weights for finalize"
        )
    if standard:
        _check_choices(_of(backend, method), rows.size(0), ids, weights, hidden_states.size(0))
    return dispatched


def check_workspace_shapes(experts: FusedMoEPermuteExpertsUnpermute, shapes: Any) -> list[tuple[int, ...]]:
    """Returns the three shapes that `workspace_shapes` returned; raises TypeError or ValueError if they are not."""
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


def check_wrote(part: Any, method: str, returned: Any, output: torch.Tensor) -> None:
    """Raises TypeError if a method that must write `output` in place returned another tensor: it probably did not."""
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
    returned: str, num_rows: int, ids: torch.Tensor | None, weights: torch.Tensor | None, num_tokens: int
) -> None:
    """Checks ids and weights of the received rows; both may be None, which means those of this rank."""
    if ids is None and weights is None:
        if num_rows != num_tokens:
            raise ValueError(
                f"{returned} {num_rows} rows for {num_tokens} tokens and no ids; return ids and weights "
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
            f"{returned} ids {described[0]} and weights {described[1]} of {num_rows} rows; ids must be "
            f"integers ({num_rows}, topk), and weights floats of the same shape"
        )

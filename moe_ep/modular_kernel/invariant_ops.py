"""Torch operations whose result for a row does not depend on the other rows.

A BLAS library chooses its kernel, its blocking and its split of K by the number of rows and threads, and on a CPU torch
computes the last elements of a tensor with other code than the rest. Inside `invariant_ops` these operations run in a
form that depends only on the shape of the weights:

    products         on a CPU tiles of exactly TILE_ROWS rows, padded with zeros, each computed by one thread; on a GPU
                     one Triton kernel with a fixed tile, which adds up K in order (`moe_ep.kernels.invariant`)
    transcendental   on a CPU whole vectors: tensors are padded, and split where torch would start another thread's part
    means of rows    on a GPU the product with a column of ones, because torch's reduction depends on the number of rows

All other operations of the layers and the supported models treat every row alike: other elementwise operations round
exactly, and sums, norms and softmax along the last dimension add up each row in one order. Products of two batches of
matrices (attention), einsum and convolutions are not covered.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import linear, pad
from torch.overrides import TorchFunctionMode

from moe_ep.registry import choose_form

# Whole vectors of f32 on any CPU, so that no element of a tile is computed by scalar code.
TILE_ROWS = 32
# The most elements that torch's vectorized loops take at a time, and the number that it gives to one thread.
_VECTORS, _ONE_THREADS_ELEMENTS = 64, 32768
_TRANSCENDENTAL = frozenset(
    ("silu", "gelu", "sigmoid", "tanh", "softplus", "exp", "log", "cos", "sin", "erf", "mish", "logsigmoid")
)
_lock = threading.RLock()
_is_active: ContextVar[bool] = ContextVar("_is_active", default=False)
_NOTHING: AbstractContextManager[None] = nullcontext()


def invariant_ops(enabled: bool = True) -> AbstractContextManager[None]:
    """Returns a context manager in which a row's results do not depend on the other rows; no effect unless enabled."""
    return _block() if enabled and not _is_active.get() else _NOTHING


@contextlib.contextmanager
def _block() -> Iterator[None]:
    token = _is_active.set(True)
    try:
        with _InvariantOps():
            yield
    finally:
        _is_active.reset(token)


class _InvariantOps(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        form = _FORMS.get(getattr(func, "__name__", ""))
        # Torch has turned the mode off here, also for everything that a Python operator calls, such as a layer's node.
        token = _is_active.set(False)
        try:
            if form is not None and args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
                result = form(func, *args, **kwargs)
                if result is not None:
                    return result
            return func(*args, **kwargs)
        finally:
            _is_active.reset(token)


def _matmul(func: Any, input: torch.Tensor, other: Any, **kwargs: Any) -> torch.Tensor | None:
    is_product = isinstance(other, torch.Tensor) and other.dim() == 2 and input.dim() >= 2 and not kwargs
    return invariant_linear(input, other.t()) if is_product else None


def _addmm(func: Any, bias: torch.Tensor, input: torch.Tensor, other: torch.Tensor, **kwargs: Any) -> Any:
    return invariant_linear(input, other.t(), bias) if bias.dim() == 1 and not kwargs else None


def _transcendental(func: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
    if input.is_cuda or "out" in kwargs:
        return None
    inplace = kwargs.pop("inplace", False)
    size = input.numel()
    flat = input.reshape(-1)
    if size % _VECTORS:
        flat = pad(flat, (0, -size % _VECTORS))
    parts = [func(part, *args, **kwargs) for part in flat.split(_ONE_THREADS_ELEMENTS)]
    result = (parts[0] if len(parts) == 1 else torch.cat(parts))[:size].view(input.shape)
    return input.copy_(result) if inplace else result


def _mean(func: Any, input: torch.Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    if not input.is_cuda or kwargs or dims not in ((-1,), (input.dim() - 1,)):
        return None
    total = invariant_linear(input, input.new_ones(1, input.size(-1))) / input.size(-1)
    return total if keepdim else total.squeeze(-1)


_FORMS: dict[str, Callable[..., Any]] = {
    "linear": lambda func, *args, **kwargs: invariant_linear(*args, **kwargs),
    "matmul": _matmul, "mm": _matmul, "__matmul__": _matmul, "addmm": _addmm, "mean": _mean,
    **dict.fromkeys(_TRANSCENDENTAL, _transcendental),
}  # fmt: skip


def invariant_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiplies inputs `[..., in]` by weights `[out, in]` and adds a bias `[out]`; each row's bits depend on no other.

    Each row of the result is rounded once to the input's dtype.
    """
    rows = input.reshape(-1, input.size(-1))
    form = choose_form(_linear_in_tiles, "invariant:triton_linear", rows, weight)
    return form(rows, weight, bias).view(*input.shape[:-1], weight.size(0))


def _linear_in_tiles(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _in_tiles(rows, lambda tile: linear(tile, weight, bias))


def invariant_products(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiplies rows `[B, n, in]` by weights `[B, out, in]` on a CPU; each row's bits depend on no other row."""
    transposed = weights.transpose(1, 2)
    return _in_tiles(rows, lambda tile: torch.bmm(tile, transposed))


def _in_tiles(rows: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Computes multiply(rows) for rows `[..., n, in]` in tiles of TILE_ROWS rows."""
    num_rows = rows.size(-2)
    if num_rows == 0:
        return multiply(rows)
    if num_rows % TILE_ROWS:
        rows = pad(rows, (0, 0, 0, -num_rows % TILE_ROWS))
    with _one_thread():
        tiles = [multiply(tile) for tile in rows.split(TILE_ROWS, dim=-2)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=-2))[..., :num_rows, :]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limits torch to one thread within the block, because MKL and oneDNN split K by the number of threads. Each rank
    of a gang has a share of the cores, so that number depends on the number of ranks."""
    with _lock:  # The number of threads is a setting of the whole process.
        before = torch.get_num_threads()
        if before == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

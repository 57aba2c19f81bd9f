"""Rotary positions of transformers models in one kernel, where the models' own code launches ten."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from moe_ep.registry import choose_form

# What models call the function that turns queries and keys, in the Python module of their code.
_NAME = "apply_rotary_pos_emb"
_HEAD_DIM = 16
_TOLERANCE = 1e-6
Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class FusedRotary:
    """The functions of a model's code that turn queries and keys, where ours does the same on an example."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._functions: list[tuple[Any, Rotary, Rotary]] = []
        device = next(model.parameters()).device
        ours = choose_form(_unsupported, "rotary:triton_rotary", next(model.parameters()))
        if ours is _unsupported:
            return
        for name in {type(part).__module__: None for part in model.modules()}:
            code = sys.modules.get(name)
            theirs = getattr(code, _NAME, None)
            if theirs is not None and (widths := _widths(theirs, ours, device)):
                self._functions.append((code, theirs, partial(_rotate, theirs, ours, widths)))

    @contextmanager
    def used(self) -> Iterator[None]:
        """A block in which ours stand in their places, for all models of that code."""
        for code, _, function in self._functions:
            setattr(code, _NAME, function)
        try:
            yield
        finally:
            for code, theirs, _ in self._functions:
                setattr(code, _NAME, theirs)


def _unsupported(*_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for a kernel that cannot run here; the model's own function stays in its place."""
    raise RuntimeError("there is no plain form of the rotary kernel; use the model's own function")


def _rotate(theirs: Rotary, ours: Rotary, widths: set[float], *args: Any, **kwargs: Any) -> Any:
    """Ours for `[B, heads, T, head_dim]` that lie as `[B, T, heads, head_dim]`, and cos and sin of a known width."""
    if len(args) == 4 and not kwargs and len({tensor.dtype for tensor in args}) == 1:
        query, key = (tensor.transpose(1, 2) for tensor in args[:2])
        # Some versions of a model's code make them transposed.
        cos, sin = (angles.contiguous() for angles in args[2:])
        if _fits(query, key, cos, sin, widths):
            query, key = ours(query, key, cos, sin)
            return query.transpose(1, 2), key.transpose(1, 2)
    return theirs(*args, **kwargs)


def _fits(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, widths: set[float]) -> bool:
    """Whether the kernel reads these as they lie; it stretches cos and sin over sequences, and over nothing else."""
    if query.dim() != 4 or not (query.is_contiguous() and key.is_contiguous()):
        return False
    batch, num_tokens, _, head_dim = query.shape
    return (
        key.shape == (batch, num_tokens, key.size(2), head_dim)
        and cos.shape == sin.shape
        and cos.shape[:-1] in ((1, num_tokens), (batch, num_tokens))
        and cos.size(-1) / head_dim in widths
    )


def _widths(theirs: Rotary, ours: Rotary, device: torch.device) -> set[float]:
    """For how many columns of cos and sin, over head_dim, both do the same."""
    generator = torch.Generator().manual_seed(0)
    found = set()
    for width in (1.0, 0.5):
        angles = (2, 3, int(_HEAD_DIM * width))
        sizes = (2, 3, 4, _HEAD_DIM), (2, 3, 1, _HEAD_DIM), angles, angles
        drawn = (torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") for size in sizes)
        query, key, cos, sin = (tensor.to(device) for tensor in drawn)
        got = [tensor.transpose(1, 2) for tensor in ours(query, key, cos, sin)]
        try:
            expected = theirs(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
            if all(map(_same, got, expected)):
                found.add(width)
        except Exception:  # It takes or gives something else, and says so in its own way.
            continue
    return found


def _same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=_TOLERANCE, atol=_TOLERANCE)

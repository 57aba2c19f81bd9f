"""Functions that have two forms: plain torch, the reference, which runs anywhere, and Triton kernels for GPUs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Plain = TypeVar("Plain", bound=Callable[..., Any])


def form_for(plain: Plain, triton_form: str, *tensors: torch.Tensor) -> Plain:
    """The Triton form if all tensors are on GPUs and not empty and Triton is installed, otherwise the plain one.

    Args:
        triton_form: "module.function" in moe_ep.kernels, with the same arguments and results as the plain form.
    """
    if all(tensor.is_cuda and tensor.numel() for tensor in tensors):
        return _imported(triton_form) or plain
    return plain


@functools.cache
def _imported(triton_form: str) -> Any:
    """The function, or None if Triton is not installed."""
    module, function = triton_form.rsplit(".", 1)
    try:
        return getattr(importlib.import_module(f"moe_ep.kernels.{module}"), function)
    except ImportError:
        return None

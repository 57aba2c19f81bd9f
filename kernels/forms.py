"""Functions of two forms: plain torch, which is the reference and runs anywhere, and Triton kernels on GPUs."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Plain = TypeVar("Plain", bound=Callable[..., Any])


def form_for(plain: Plain, triton_form: str, *tensors: torch.Tensor) -> Plain:
    """The Triton form where all tensors are on GPUs and hold something and Triton is installed, else the plain one.

    Args:
        triton_form: "module.function" of moe_ep.kernels, with the arguments and results of the plain form.
    """
    if all(tensor.is_cuda and tensor.numel() for tensor in tensors):
        return _imported(triton_form) or plain
    return plain


@functools.cache
def _imported(triton_form: str) -> Any:
    """The function, or None where Triton is not installed."""
    module, function = triton_form.rsplit(".", 1)
    try:
        return getattr(importlib.import_module(f"moe_ep.kernels.{module}"), function)
    except ImportError:
        return None

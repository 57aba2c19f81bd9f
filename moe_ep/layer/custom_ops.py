"""`torch.ops.moe_ep.*`: one node per layer for torch.compile and CUDA-graph capture.

A graph cannot hold a module, so a node holds the layer's name and looks the layer up here when it runs. Each operator
exists twice: if a layer cannot be captured, torch.compile gets the operator whose name ends in _uncaptured, which it
runs between the CUDA graphs that it captures of the rest.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary

import torch

from moe_ep.arguments import check_same_device
from moe_ep.layer.interface import MoELayer

_layers: WeakValueDictionary[str, Any] = WeakValueDictionary()
_numbers = itertools.count()
_naming = threading.Lock()


def register_layer(layer: object, prefix: str) -> str:
    """Registers a layer by a weak reference and returns its name: `prefix`, with a number appended if it is taken, or
    a generated name if it is empty. Raises TypeError if it is not a string."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix is {prefix!r}; it must be the layer's name, or empty for a generated one")
    with _naming:
        name = prefix or f"moe_layer_{next(_numbers)}"
        while name in _layers:
            name = f"{prefix or 'moe_layer'}#{next(_numbers)}"
        _layers[name] = layer
    return name


def find_layer(name: str) -> MoELayer:
    """Returns the layer registered under `name`; raises RuntimeError if it no longer exists."""
    layer = _layers.get(name)
    if layer is None:
        raise RuntimeError(
            f"there is no MoE layer named {name!r}; a graph runs only while the layer it was made from exists"
        )
    return layer


def _kernel(name: str, *, shared: bool) -> Callable[..., Any]:
    """Returns an operator's kernel; its output is `[T, K]`, or (shared, routed) with shared experts."""

    def kernel(hidden_states: torch.Tensor, *rest: Any) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        *inputs, layer_name = rest
        output = find_layer(layer_name).forward_node(hidden_states, *inputs)
        if isinstance(output, tuple) is not shared:
            has, other = ("no ", name) if shared else ("", f"{name}_shared")
            raise RuntimeError(f"layer {layer_name!r} has {has}shared experts; call torch.ops.moe_ep.{other}")
        return output

    return kernel


def operator(name: str, layer_name: str) -> Callable[..., Any]:
    """The operator of `torch.ops.moe_ep` that a layer calls."""
    if torch.compiler.is_compiling() and not _can_capture(layer_name):
        name += _UNCAPTURED
    return getattr(torch.ops.moe_ep, name)


def _can_capture(layer_name: str) -> bool:
    return find_layer(layer_name).supports_cuda_graph()


# Lets torch.compile call the function instead of tracing it. torch.compiler.assume_constant_result does the same, but
# imports torch._dynamo (see `_define`).
_can_capture._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _fake(hidden_states: torch.Tensor, *rest: Any) -> torch.Tensor:
    # Also called with real hidden_states if other inputs are on the meta device.
    for tensor in rest[:-1]:
        check_same_device("hidden_states", hidden_states.device, router_logits=tensor)
    return hidden_states.new_empty(hidden_states.shape)


def _fake_shared(hidden_states: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    output = _fake(hidden_states, *rest)
    return torch.empty_like(output), output


def _define(
    name: str, signature: str, tags: tuple[torch.Tag, ...], kernel: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Defines an operator without `torch.library.custom_op`, whose first call imports torch._dynamo: seconds and
    145 MB in every worker."""
    _library.define(name + signature, tags=tags)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_ep::{name}", fake, lib=_library)
    op = getattr(torch.ops.moe_ep, name).default

    def as_made(*args: Any) -> Any:
        """Runs the kernel outside of `torch.autocast`: a layer computes in the dtypes that it was made for."""
        with without_autocast():
            return op(*args)

    for key in _AUTOCAST_KEYS:
        _library.impl(name, as_made, key)


def without_autocast() -> AbstractContextManager[None]:
    """Returns a context manager that turns `torch.autocast` off."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)


_UNCAPTURED = "_uncaptured"
_AUTOCAST_KEYS = ("AutocastCPU", "AutocastCUDA")
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_AUTOCAST |= torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
_library = torch.library.Library("moe_ep", "FRAGMENT")
for _name, _inputs in (
    ("moe_forward", "Tensor router_logits"),
    ("moe_forward_routed", "Tensor topk_weights, Tensor topk_ids"),
):
    _signature = f"(Tensor hidden_states, {_inputs}, str layer_name)"
    for _suffix, _tags in (("", ()), (_UNCAPTURED, (torch.Tag.cudagraph_unsafe,))):
        _define(f"{_name}{_suffix}", f"{_signature} -> Tensor", _tags, _kernel(_name, shared=False), _fake)
        _define(
            f"{_name}_shared{_suffix}", f"{_signature} -> (Tensor, Tensor)", _tags,
            _kernel(_name, shared=True), _fake_shared,
        )  # fmt: skip

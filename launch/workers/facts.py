"""Facts of a worker's process that reports tell: which backend and experts ran, on which versions and device."""

from __future__ import annotations

import platform
from typing import Any

import torch

import moe_ep
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS, Registry


def backend_name(prepare_finalize: Any) -> str:
    """The registry's name of a dispatch backend, or its class where it has none."""
    return _name_in(ALL2ALL_BACKENDS, prepare_finalize)


def experts_name(experts: Any) -> str:
    """The registry's name of what computes a layer's experts, or its class where it has none."""
    return _name_in(EXPERTS, experts)


def _name_in(registry: Registry, chosen: Any) -> str:
    target = f"{type(chosen).__module__}:{type(chosen).__name__}"
    return next((name for name in registry if registry[name].target == target), target)


def versions() -> dict[str, str]:
    """Of what decides how fast it runs and what comes out."""
    found = {"moe_ep": moe_ep.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda or ""
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()

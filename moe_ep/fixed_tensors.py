"""Modules whose own tensors keep their dtypes when a model is cast, and their tables when it leaves the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import nn


class FixedTensors(nn.Module):
    """A module that moves between devices, and whose own parameters and buffers keep their dtypes.

    `model.to(torch.bfloat16)` would round scales and correction biases, and the dtype of fp4 scales distinguishes two
    formats. After construction on the meta device, `model.to_empty(device=...)` would leave garbage in non-persistent
    buffers, which no state_dict restores: here they keep their values, if they have any. Submodules are cast and
    emptied as usual.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        tables = {name: self._buffers[name] for name in self._non_persistent_buffers_set}
        if recurse:
            for module in self.children():
                module._apply(fn)

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        super()._apply(moved, recurse=False)
        for name, table in tables.items():
            there = self._buffers[name]
            if table is not None and there is not None:
                self._buffers[name] = table if table.is_meta else table.to(there.device)
        return self


def table_device() -> torch.device:
    """The device to create such tables on: the default device, or the host if that is meta and would hold no values."""
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device

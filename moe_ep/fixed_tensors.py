"""Modules whose tensors mean what they are: casting leaves their types alone, and moving leaves their tables filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import nn


class FixedTensors(nn.Module):
    """A module that moves between devices, and whose own parameters and buffers keep their dtypes.

    `model.to(torch.bfloat16)` would round scales and correction biases, and the type of fp4 scales tells one format
    from another. `model.to_empty(device=...)` after construction on the meta device would leave garbage in buffers that
    no state_dict brings back (those that are not persistent): they keep their values, or stay without any. Submodules
    are cast and emptied as ever.
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
    """Where such tables are made: the default device, or the host where that is meta and would hold no values."""
    device = torch.get_default_device()
    return torch.device("cpu") if device.type == "meta" else device

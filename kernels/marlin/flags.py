"""Flags that kernels leave as they found them or count up: cleared once, so that no launch needs a memset."""

from __future__ import annotations

import torch

from moe_ep.workspace import current_stream

_LEAST = 8192
_buffers: dict[tuple[int, int, str], list[torch.Tensor]] = {}


def stream_flags(device: torch.device, kernel: str, numel: int) -> torch.Tensor:
    """int32 flags of the current stream for one kernel, zero at first; like the scratch, one set a stream.

    Outgrown ones are kept: a captured graph may still use them.
    """
    buffers = _buffers.setdefault((device.index or 0, current_stream(device), kernel), [])
    if not buffers or buffers[-1].numel() < numel:
        buffers.append(torch.zeros(max(numel, _LEAST), dtype=torch.int32, device=device))
    return buffers[-1]

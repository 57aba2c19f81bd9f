"""Flags that kernels reset after use or only count up, so they are cleared once and no launch needs a memset."""

from __future__ import annotations

import torch

from moe_ep.workspace import current_stream

_LEAST = 8192
_buffers: dict[tuple[int, int, str], list[torch.Tensor]] = {}


def stream_flags(device: torch.device, kernel: str, numel: int) -> torch.Tensor:
    """The int32 flags of one kernel on the current stream, initially zero.

    If they become too small, the old ones are kept, since a captured graph may still use them.
    """
    buffers = _buffers.setdefault((device.index or 0, current_stream(device), kernel), [])
    if not buffers or buffers[-1].numel() < numel:
        buffers.append(torch.zeros(max(numel, _LEAST), dtype=torch.int32, device=device))
    return buffers[-1]

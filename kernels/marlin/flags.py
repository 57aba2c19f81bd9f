"""Flags that kernels reset after use or only count up, so they are cleared once and no launch needs a memset."""

from __future__ import annotations

import torch

from moe_ep.modular_kernel.workspace import current_stream, outside_of_pools

_LEAST = 8192
_buffers: dict[tuple[int, int, str], list[torch.Tensor]] = {}
# Flags for the next stream that has none when it is captured. If they were made under capture, only that graph would
# clear them, and a graph captured later on the same stream might be replayed before it.
_spare: dict[tuple[int, str], torch.Tensor] = {}


def stream_flags(device: torch.device, kernel: str, numel: int) -> torch.Tensor:
    """The int32 flags of one kernel on the current stream, initially zero.

    If they become too small, the old ones are kept, since a captured graph may still use them.
    """
    index = device.index or 0
    buffers = _buffers.setdefault((index, current_stream(device), kernel), [])
    if not buffers or buffers[-1].numel() < numel or (index, kernel) not in _spare:
        _add_flags(buffers, device, (index, kernel), max(numel, _LEAST))
    return buffers[-1]


def _add_flags(buffers: list[torch.Tensor], device: torch.device, owner: tuple[int, str], numel: int) -> None:
    """Appends flags if there are none of that size, and makes spare ones unless the stream is being captured."""
    capturing = torch.cuda.is_current_stream_capturing()
    if not buffers or buffers[-1].numel() < numel:
        flags = _spare.pop(owner, None) if capturing else None
        if flags is None or flags.numel() < numel:
            flags = _zeros(numel, device, capturing)
        buffers.append(flags)
    spare = _spare.get(owner)
    if not capturing and (spare is None or spare.numel() < buffers[-1].numel()):
        _spare[owner] = _zeros(buffers[-1].numel(), device, capturing)


def _zeros(numel: int, device: torch.device, capturing: bool) -> torch.Tensor:
    def make() -> torch.Tensor:
        return torch.zeros(numel, dtype=torch.int32, device=device)

    # A thread that captures would have to wait for another one's allocation, which ends its capture.
    return make() if capturing else outside_of_pools(make, device)

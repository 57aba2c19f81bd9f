"""The clock of a GPU's SMs while each step ran, read by a kernel between steps."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch

from moe_ep.kernels import jit

_WARP = 32
SOURCE = jit.KernelSource(Path(__file__).with_suffix(".cu"), "step_stamp", (("WARP", str(_WARP)),))


class StampParams(ctypes.Structure):
    """`StampParams` of step_clock.cu."""

    _fields_ = (("out", ctypes.c_void_p),)


class StepClock:
    """Marks the ends of steps on the current stream.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._kernel = jit.load(SOURCE, device)
        self._device = device
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._stamps: list[torch.Tensor] = []

    def mark(self) -> None:
        """Ends a step, or begins the first."""
        stamp = torch.empty(self._num_sms, 3, dtype=torch.int64, device=self._device)
        self._kernel.launch(StampParams(stamp.data_ptr()), (self._num_sms, 1, 1), _WARP)
        self._stamps.append(stamp)

    def mhz(self) -> list[float]:
        """Of each step, the median over SMs that both of its marks saw; waits for the GPU."""
        return clocks_between(torch.stack(self._stamps).cpu().numpy())


def clocks_between(stamps: np.ndarray) -> list[float]:
    """MHz between each two of the marks `[M, blocks, 3]` of nanoseconds, cycles and SM; nan where no SM is in both."""
    found = np.full((len(stamps), int(stamps[..., 2].max()) + 1, 2), np.nan)
    found[np.arange(len(stamps))[:, None], stamps[..., 2]] = stamps[..., :2] - stamps[0, 0, :2]
    passed = np.diff(found, axis=0)
    return (np.nanmedian(passed[..., 1] / passed[..., 0], axis=1) * 1e3).tolist()

"""Where the time of a pass goes: named stages that can be recorded, and cost nothing when nobody records.

The runtime marks route, dispatch, experts and combine with `with stage("dispatch"):`. `record(device)` collects
their durations, with CUDA events on a GPU and the host clock elsewhere.

Example:
    with stages.record(hidden_states.device) as recorder:
        layer(hidden_states, router_logits)
    recorder.durations_ms()     # {"route": [0.12], "dispatch": [0.40], "experts": [1.9], "combine": [0.35]}
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

STAGES = ("route", "dispatch", "experts", "combine")

_NOTHING: AbstractContextManager[None] = nullcontext()
_active: StageRecorder | None = None


class StageRecorder:
    """Durations of stages in the order in which they ran, in milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, object, object]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._spans.append((name, start, self._now()))

    def clear(self) -> None:
        """Forgets what was recorded."""
        self._spans.clear()

    def _now(self) -> object:
        if not self._cuda:
            return time.perf_counter()
        # In a CUDA graph an external event is recorded anew by every replay; durations_ms() then tells of the last one.
        event = torch.cuda.Event(enable_timing=True, external=torch.cuda.is_current_stream_capturing())
        event.record()
        return event

    def durations_ms(self) -> dict[str, list[float]]:
        """Durations by stage, oldest first; waits for the GPU when the spans are there."""
        if self._cuda:
            torch.cuda.synchronize()
        result: dict[str, list[float]] = {}
        for name, start, end in self._spans:
            if self._cuda:
                duration = start.elapsed_time(end)  # type: ignore[attr-defined]
            else:
                duration = (end - start) * 1e3  # type: ignore[operator]
            result.setdefault(name, []).append(duration)
        return result


def stage(name: str) -> AbstractContextManager[None]:
    """Marks the block as the stage `name`; does nothing unless a recorder is active."""
    return _NOTHING if _active is None else _active.span(name)


@contextmanager
def record(device: torch.device | str = "cpu") -> Iterator[StageRecorder]:
    """Records every stage that runs inside the block; recorders do not nest."""
    global _active
    if _active is not None:
        raise RuntimeError("stages are being recorded already; end the outer record() first")
    _active = StageRecorder(torch.device(device))
    try:
        yield _active
    finally:
        _active = None

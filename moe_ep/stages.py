"""Where the time of a pass goes: named stages that listeners may watch, and that cost nothing when nobody does.

The runtime marks route, dispatch, experts and combine with `with stage("dispatch"):`, and what balancing does too;
`tell_routing` says where tokens go. `record(device)` collects durations of passes, with CUDA events on a GPU and the
host clock elsewhere; metrics and traces (`moe_ep.observability`) listen too.

Example:
    with stages.record(hidden_states.device) as recorder:
        layer(hidden_states, router_logits)
    recorder.durations_ms()     # {"route": [0.12], "dispatch": [0.40], "experts": [1.9], "combine": [0.35]}
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from moe_ep.layer import FusedMoE

STAGES = ("route", "dispatch", "experts", "combine")

_NOTHING: AbstractContextManager[None] = nullcontext()


class Listener:
    """Watches the stages of every layer of this process."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """What is entered around a stage."""
        return _NOTHING

    def routed(self, layer: FusedMoE, topk_ids: torch.Tensor) -> None:
        """Called with the physical ids `[T, top_k]` that a layer's tokens chose, -1 for none; between stages."""
        return


_listeners: tuple[Listener, ...] = ()
# What graphs record into. An event that is gone when its graph is replayed takes the process with it, and how long a
# graph lives nobody here knows.
_captured: list[torch.cuda.Event] = []


def listen(listener: Listener) -> None:
    """Tells a listener of everything from here on; several may listen at once."""
    global _listeners
    _listeners = (*_listeners, listener)


def stop_listening(listener: Listener) -> None:
    """Tells it no more; nothing changes where it was not listening."""
    global _listeners
    _listeners = tuple(other for other in _listeners if other is not listener)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tells a listener of everything that happens inside the block."""
    listen(listener)
    try:
        yield
    finally:
        stop_listening(listener)


def stage(name: str) -> AbstractContextManager[None]:
    """Marks the block as the stage `name`."""
    if not _listeners:
        return _NOTHING
    return _listeners[0].span(name) if len(_listeners) == 1 else _spans(name)


def tell_routing(layer: FusedMoE, topk_ids: torch.Tensor) -> None:
    """Says where the tokens of a pass go."""
    for listener in _listeners:
        listener.routed(layer, topk_ids)


@contextmanager
def _spans(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for listener in _listeners:
            stack.enter_context(listener.span(name))
        yield


class StageRecorder(Listener):
    """Durations of stages in the order in which they ran, in milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, object, object]] = []

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._recorded(name) if name in STAGES else _NOTHING

    @contextmanager
    def _recorded(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._spans.append((name, start, self._now()))

    def clear(self) -> None:
        """Forgets what was recorded."""
        self._spans.clear()

    def _now(self) -> object:
        return timing_event() if self._cuda else time.perf_counter()

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


def timing_event() -> torch.cuda.Event:
    """A CUDA event, recorded. Under capture every replay records it anew, and its times are those of the last one."""
    capturing = torch.cuda.is_current_stream_capturing()
    event = torch.cuda.Event(enable_timing=True, external=capturing)
    event.record()
    if capturing:
        _captured.append(event)
    return event


@contextmanager
def record(device: torch.device | str = "cpu") -> Iterator[StageRecorder]:
    """Records every stage that runs inside the block; recorders do not nest."""
    if any(isinstance(listener, StageRecorder) for listener in _listeners):
        raise RuntimeError("stages are being recorded already; end the outer record() first")
    recorder = StageRecorder(torch.device(device))
    with listening(recorder):
        yield recorder

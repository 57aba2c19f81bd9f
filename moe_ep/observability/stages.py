"""Named stages of a pass, which listeners can time; without listeners they cost next to nothing.

The runtime marks route, dispatch, experts and combine, and the steps of balancing (`eplb_batch_plan` and
`eplb_batch_copies` where a batch is balanced by its own counts), with `with stage("dispatch"):`; `tell_routing` reports
where tokens go.
`record(device)` collects the durations of the former four, with CUDA events on a GPU and the host clock elsewhere;
metrics and traces (`moe_ep.observability`) are listeners too.

Example:
    with stages.record(hidden_states.device) as recorder:
        layer(hidden_states, router_logits)
    recorder.durations_ms()     # {"route": [0.12], "dispatch": [0.40], "experts": [1.9], "combine": [0.35]}
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

STAGES = ("route", "dispatch", "experts", "combine")

_NOTHING: AbstractContextManager[None] = nullcontext()


class Listener:
    """Watches the stages of every layer of this process."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """A context manager that is entered around each stage."""
        return _NOTHING

    def routed(self, layer: Any, topk_ids: torch.Tensor) -> None:
        """Called between stages with a `FusedMoE` and the physical ids `[T, top_k]` of its tokens, -1 for no expert."""
        return

    def copied(self, layer: Any, num_copies: int, expert_bytes: int) -> None:
        """Called with a `FusedMoE` where a batch is balanced: experts copied for it between all ranks, bytes of one."""
        return


_listeners: tuple[Listener, ...] = ()
# Events that were recorded under capture. Replaying a graph whose event has been freed crashes the process, and the
# lifetime of graphs is not known here, so they are kept forever.
_captured: list[torch.cuda.Event] = []


def listen(listener: Listener) -> None:
    """Adds a listener; there may be several."""
    global _listeners
    _listeners = (*_listeners, listener)


def stop_listening(listener: Listener) -> None:
    """Removes a listener, if it is there."""
    global _listeners
    _listeners = tuple(other for other in _listeners if other is not listener)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Adds a listener for the duration of the block."""
    listen(listener)
    try:
        yield
    finally:
        stop_listening(listener)


def are_listened_to() -> bool:
    return bool(_listeners)


def stage(name: str) -> AbstractContextManager[None]:
    """Marks the block as the stage `name`."""
    if not _listeners:
        return _NOTHING
    return _listeners[0].span(name) if len(_listeners) == 1 else _spans(name)


def hears_routing() -> bool:
    """Whether a listener wants to know which experts tokens use."""
    return any(type(listener).routed is not Listener.routed for listener in _listeners)


def tell_routing(layer: Any, topk_ids: torch.Tensor) -> None:
    """Tells the listeners which experts the tokens of a pass use."""
    for listener in _listeners:
        listener.routed(layer, topk_ids)


def tell_copies(layer: Any, num_copies: int, expert_bytes: int) -> None:
    """Tells the listeners how many experts were copied for a batch."""
    for listener in _listeners:
        listener.copied(layer, num_copies, expert_bytes)


@contextmanager
def _spans(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for listener in _listeners:
            stack.enter_context(listener.span(name))
        yield


class StageRecorder(Listener):
    """Records the durations of stages, in the order in which they ran."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []

    def span(self, name: str) -> AbstractContextManager[None]:
        return self._recorded(name) if name in STAGES else super().span(name)

    @contextmanager
    def _recorded(self, name: str) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._spans.append((name, start, self._now()))

    def clear(self) -> None:
        """Discards what was recorded."""
        self._spans.clear()

    def _now(self) -> Any:
        return timing_event() if self._cuda else time.perf_counter()

    def durations_ms(self) -> dict[str, list[float]]:
        """Durations in milliseconds by stage, oldest first; waits for the GPU if the stages ran there."""
        if self._cuda:
            torch.cuda.synchronize()
        result: dict[str, list[float]] = {}
        for name, start, end in self._spans:
            result.setdefault(name, []).append(start.elapsed_time(end) if self._cuda else (end - start) * 1e3)
        return result


def timing_event() -> torch.cuda.Event:
    """Records a CUDA event. One recorded under capture is recorded again by every replay, and has the last time."""
    capturing = torch.cuda.is_current_stream_capturing()
    event = torch.cuda.Event(enable_timing=True, external=capturing)
    event.record()
    if capturing:
        _captured.append(event)
    return event


@contextmanager
def record(device: torch.device | str = "cpu") -> Iterator[StageRecorder]:
    """Records every stage inside the block; recorders cannot be nested."""
    if any(isinstance(listener, StageRecorder) for listener in _listeners):
        raise RuntimeError("stages are being recorded already; end the outer record() first")
    recorder = StageRecorder(torch.device(device))
    with listening(recorder):
        yield recorder

"""Asynchronous forms on CUDA: a synchronous one on a stream of the backend's own, in two halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_ep.dispatch.batch import keep_for


class SideStream:
    """A backend's own stream, made when it is first used."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def run(
        self, device: torch.device, call: Callable[..., Any], *args: Any
    ) -> tuple[Callable[[], None], Callable[[], Any]]:
        """Queues call(*args) behind what the current stream has, and returns its two halves: the first makes the stream
        that is current then wait for it, the second gives its result."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        side, caller = self._stream, torch.cuda.current_stream(device)
        side.wait_stream(caller)
        with torch.cuda.stream(side):
            result = call(*args)
            done = side.record_event()
        # What was handed over is read on a stream that its memory does not belong to: it lives until the hook, behind
        # which the stream that it does belong to has waited, or else longer.
        held = [args]

        def hook() -> None:
            if held:
                consumer = torch.cuda.current_stream(device)
                consumer.wait_event(done)
                keep_for(consumer, result)
                if consumer != caller:
                    keep_for(side, held)
                held.clear()

        def receive() -> Any:
            hook()
            return result

        return hook, receive

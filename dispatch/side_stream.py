"""Asynchronous forms on CUDA: a synchronous one on a stream of the backend's own, in two halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_ep.contracts import PrepareResult
from moe_ep.dispatch.batch import Pending


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
        side = self._stream
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            result = call(*args)
            done = side.record_event()
        # What was handed over lives until the hook: it is read on a stream that its memory does not belong to.
        held = [args]

        def hook() -> None:
            if held:
                consumer = torch.cuda.current_stream(device)
                consumer.wait_event(done)
                for tensor in _tensors_of(result):
                    tensor.record_stream(consumer)
                held.clear()

        def receive() -> Any:
            hook()
            return result

        return hook, receive


def _tensors_of(result: PrepareResult | Pending | None) -> list[torch.Tensor]:
    if result is None or isinstance(result, Pending):
        return []
    rows, scales, meta, ids, weights = result
    counts = None if meta is None else meta.expert_num_tokens
    return [tensor for tensor in (rows, scales, counts, ids, weights) if tensor is not None]

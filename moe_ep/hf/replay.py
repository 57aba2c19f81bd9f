"""CUDA graphs of a layer's calls with few tokens.

A model that runs eagerly waits for the host, which takes several times longer to launch the kernels of such a call one
by one than the GPU takes to run them. So a call that comes again and again is captured, and replayed from then on.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch

from moe_ep.modular_kernel.workspace import current_stream

logger = logging.getLogger(__name__)

# Calls of a kind that run eagerly before it is captured: what is compiled or allocated once is so by then. Whoever
# captures the whole model makes fewer before, and needs no graphs of its layers.
EAGER_CALLS = 4
# Kinds that a layer captures; calls of more kinds run eagerly.
MOST_KINDS = 16

# What a graph is for: the caller's own distinction, the stream, and shapes, dtypes and devices of the inputs.
Kind = tuple[object, ...]
Function = Callable[..., torch.Tensor]


class CallGraphs:
    """Graphs of one layer's calls, by their kinds.

    A kind's first calls run eagerly, the next one is captured, and from there on they are replays: inputs are copied
    to where the graph reads them, and the result is a copy of what it wrote. So a caller sees no difference. Graphs of
    one stream run one after the other and share that memory, whichever layer they are of. A copy of the layer begins
    with no graphs.
    """

    def __init__(self) -> None:
        self._made_for: tuple[object, ...] = ()
        self._num_eager: dict[Kind, int] = {}
        self._captured: dict[Kind, _Captured] = {}

    def run(
        self,
        function: Function,
        inputs: tuple[torch.Tensor, ...],
        which: object,
        of: tuple[object, ...],
        around: AbstractContextManager[None] | None = None,
    ) -> torch.Tensor:
        """function(*inputs), a tensor; it is run, or replayed, once.

        Args:
            inputs: on the GPU.
            which: tells calls apart that do not run the same kernels.
            of: what graphs depend on but for the inputs, as the addresses of weights; where it differs from that of
                the call before, all graphs are given up.
            around: what a replay runs in, of a function that other ranks take part in; None where none do.

        Raises:
            RuntimeError: such a function cannot be captured. What others do not take part in runs eagerly then.
        """
        if of != self._made_for:
            self.clear()
            self._made_for = of
        place = _place(inputs[0].device)
        kind = (which, place.stream, *[(tensor.shape, tensor.dtype, tensor.get_device()) for tensor in inputs])
        captured = self._captured.get(kind)
        if captured is not None:
            with around or nullcontext():
                return place.replay(captured, inputs)
        if not self._is_due(kind):
            return function(*inputs)
        output, made = place.capture(function, inputs)
        if isinstance(made, _Captured):
            self._captured[kind] = made
        else:
            _give_up(made, is_alone=around is None)
        return output

    def _is_due(self, kind: Kind) -> bool:
        if not _is_possible:
            return False
        if kind not in self._num_eager and len(self._num_eager) == MOST_KINDS:
            return False
        self._num_eager[kind] = self._num_eager.get(kind, 0) + 1
        return self._num_eager[kind] > EAGER_CALLS

    def clear(self) -> None:
        """Gives all graphs up."""
        self._made_for, self._num_eager, self._captured = (), {}, {}

    def __deepcopy__(self, memo: dict[int, Any]) -> CallGraphs:
        return CallGraphs()

    def __reduce__(self) -> Any:
        return CallGraphs, ()


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[torch.Tensor, ...]
    output: torch.Tensor


@dataclass
class _Place:
    """What the graphs that are replayed on one stream have in common.

    Attributes:
        stream: the handle of that stream.
        side: the stream that they are captured on, whose scratch they use.
        pool: the graphs' memory.
        first: keeps the pool, which ends with its last graph.
        tensors: inputs and outputs of graphs that exist, by where they stand in a call, shape and dtype.
    """

    stream: int
    side: torch.cuda.Stream
    pool: Any
    first: torch.cuda.CUDAGraph | None = None
    tensors: WeakValueDictionary[Kind, torch.Tensor] = field(default_factory=WeakValueDictionary)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def capture(
        self, function: Function, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, _Captured | RuntimeError]:
        """function(*inputs), run once outside of a capture, and the graph of it or why there is none."""
        made: _Captured | RuntimeError
        with self.lock, torch.inference_mode(False), torch.no_grad():
            held = tuple(self._tensor(number, tensor) for number, tensor in enumerate(inputs))
            for to, tensor in zip(held, inputs, strict=True):
                to.copy_(tensor)
            current = torch.cuda.current_stream(inputs[0].device)
            self.side.wait_stream(current)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self.side):
                result = function(*held)
                made = _Captured(graph, held, self._tensor(None, result))
                try:
                    with self._capturing(graph):
                        made.output.copy_(function(*held))
                except RuntimeError as error:
                    made = error
                else:
                    self.first = self.first or graph
            current.wait_stream(self.side)
            return result.clone(), made

    def replay(self, captured: _Captured, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        with self.lock:
            for to, tensor in zip(captured.inputs, inputs, strict=True):
                to.copy_(tensor)
            captured.graph.replay()
            return captured.output.clone()

    def _tensor(self, number: int | None, like: torch.Tensor) -> torch.Tensor:
        key = (number, like.shape, like.dtype)
        tensor = self.tensors.get(key)
        if tensor is None:
            tensor = self.tensors[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return tensor

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """As `torch.cuda.graph`, which collects all of Python's garbage and frees cached memory before each capture.

        Garbage is not collected under capture, since what it frees may end that.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
        finally:
            if collects:
                gc.enable()


def _give_up(reason: RuntimeError, *, is_alone: bool) -> None:
    """Nothing is captured from here on, as without torch's caching of memory nothing can be."""
    global _is_possible
    _is_possible = False
    story = "as one of them cannot be captured in a CUDA graph"
    if is_alone:
        logger.warning("calls of few tokens run eagerly, %s: %s", story, reason)
    else:  # What other ranks take part in may have been left half way.
        raise RuntimeError(
            f"calls of few tokens cannot be replayed, {story}; set MOE_EP_REPLAY_MAX_TOKENS=0: {reason}"
        ) from reason


_is_possible = True
_places: dict[tuple[torch.device, int], _Place] = {}
_making = threading.Lock()


def may_capture(device: torch.device) -> bool:
    """Whether what runs on this device now can be captured: on a GPU, unless somebody does that already."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _place(device: torch.device) -> _Place:
    """That of the device's current stream."""
    key = (device, current_stream(device))
    place = _places.get(key)
    if place is None:
        with _making:
            made = _Place(key[1], torch.cuda.Stream(device), torch.cuda.graph_pool_handle())
            place = _places.setdefault(key, made)
    return place

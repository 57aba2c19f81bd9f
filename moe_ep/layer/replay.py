"""CUDA graphs of a layer's calls: a call that recurs is captured, and replayed from then on.

For few tokens the host needs several times longer to launch a call's kernels one by one than the GPU needs to run them.
With several ranks the number of tokens changes from pass to pass, so calls are padded to one of a few numbers of rows,
and sizes stay on the device. Code that captures the whole model warms up with fewer calls than a capture here requires,
so its layers make no graphs.
"""

from __future__ import annotations

import functools
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

# Eager calls of a kind before its capture; they do one-time compilation and allocation.
EAGER_CALLS = 4
# The most kinds that a layer captures; calls of further kinds run eagerly.
MOST_KINDS = 24

# The key of a graph: the caller's part, the stream, and shapes, dtypes and devices of the inputs.
Kind = tuple[object, ...]
# Takes a mask of the valid rows, bool `[rows]`, or None if all are valid; then the inputs `[rows, ...]`.
Function = Callable[..., torch.Tensor]


@functools.cache
def bucket(num_tokens: int) -> int:
    """Returns the number of rows to which a call is padded: a power of two, or 1.5 times one.

    Example: 1 to 9 tokens take 1, 2, 3, 4, 6, 6, 8, 8 and 12 rows.
    """
    power = 1 << (max(num_tokens, 1) - 1).bit_length()
    between = power * 3 // 4
    return between if 0 < num_tokens <= between else power


_NOTHING: AbstractContextManager[None] = nullcontext()


class CallGraphs:
    """The CUDA graphs of one layer's calls, by kind.

    The first calls of a kind run eagerly, the next one is captured, and later ones are replayed. A replay copies the
    inputs to where the graph reads them and returns a copy of what it wrote, so callers see no difference. Graphs of
    one stream run one after the other and share this memory across layers. A copy of the layer starts without graphs.
    """

    def __init__(self) -> None:
        self._made_for: tuple[object, ...] = ()
        self._num_eager: dict[Kind, int] = {}
        self._captured: dict[Kind, CapturedCall] = {}

    def run(
        self,
        function: Function,
        inputs: tuple[torch.Tensor, ...],
        kernels: object,
        depends_on: tuple[object, ...],
        num_rows: int | None = None,
        around: AbstractContextManager[None] | None = None,
        may_capture: Callable[[], bool] = lambda: True,
    ) -> torch.Tensor:
        """Runs or replays function(mask, *inputs) once, and returns its tensor.

        Args:
            inputs: tensors on the GPU.
            kernels: distinguishes calls that do not run the same kernels.
            depends_on: what graphs depend on besides the inputs, such as addresses of tables; if it differs from that
                of the previous call, all graphs are dropped.
            num_rows: the number of rows to which graphs are padded; the mask excludes the padding. None means no
                padding.
            around: a context manager for replays of a collective function; None for any other.
            may_capture: returns whether the function can be captured; called only if there is no graph.

        Raises:
            RuntimeError: a collective function cannot be captured. Any other function then runs eagerly.
        """
        if depends_on != self._made_for:
            self.clear()
            self._made_for = depends_on
        place = stream_graphs(inputs[0].device)
        first = 0 if num_rows is None else 1
        kinds = [(tensor.shape[first:], tensor.dtype, tensor.get_device()) for tensor in inputs]
        kind = (kernels, num_rows, place.stream, *kinds)
        captured = self._captured.get(kind)
        if captured is not None:
            with around or _NOTHING:
                return place.replay(captured, inputs)
        if not may_capture() or not self._is_due(kind):
            return function(None, *inputs)
        output, made = place.capture(function, inputs, num_rows)
        if isinstance(made, CapturedCall):
            self._captured[kind] = made
        else:
            _give_up(made, is_alone=around is None)
        return output

    def _is_due(self, kind: Kind) -> bool:
        if not is_possible:
            return False
        if kind not in self._num_eager and len(self._num_eager) == MOST_KINDS:
            return False
        self._num_eager[kind] = self._num_eager.get(kind, 0) + 1
        return self._num_eager[kind] > EAGER_CALLS

    def clear(self) -> None:
        """Drops all graphs."""
        self._made_for, self._num_eager, self._captured = (), {}, {}

    def __deepcopy__(self, memo: dict[int, Any]) -> CallGraphs:
        return CallGraphs()

    def __reduce__(self) -> Any:
        return CallGraphs, ()


@dataclass
class Inputs:
    """The tensors that graphs of one kind of calls read.

    Attributes:
        mask: bool `[rows]`, True for the first `num_marked` rows; None if all rows are valid.
    """

    tensors: tuple[torch.Tensor, ...]
    mask: torch.Tensor | None
    num_marked: int = 0

    def write(self, inputs: tuple[torch.Tensor, ...]) -> None:
        num_rows = inputs[0].size(0)
        for to, tensor in zip(self.tensors, inputs, strict=True):
            (to if to.size(0) == num_rows else to[:num_rows]).copy_(tensor)
        if self.mask is not None and num_rows != self.num_marked:
            # Written once for all layers of a pass, whose graphs read the same mask.
            self.mask[:num_rows] = True
            self.mask[num_rows:] = False
            self.num_marked = num_rows


@dataclass(frozen=True)
class CapturedCall:
    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    output: torch.Tensor


@dataclass
class StreamGraphs:
    """State shared by graphs that are replayed on one stream.

    Attributes:
        stream: the handle of that stream.
        side: the stream on which graphs are captured, whose scratch they use.
        pool: the graphs' memory pool.
        first: a graph that keeps the pool alive, which is freed with its last graph.
        held: inputs and outputs of existing graphs, by their shapes and dtypes.
    """

    stream: int
    side: torch.cuda.Stream
    pool: Any
    first: torch.cuda.CUDAGraph | None = None
    held: WeakValueDictionary[Kind, Any] = field(default_factory=WeakValueDictionary)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def capture(
        self, function: Function, inputs: tuple[torch.Tensor, ...], num_rows: int | None
    ) -> tuple[torch.Tensor, CapturedCall | RuntimeError]:
        """Runs function(mask, *inputs) once and captures it; returns the result, and the graph or the error that
        prevented it."""
        made: CapturedCall | RuntimeError
        with self.lock, torch.inference_mode(False), torch.no_grad():
            held = self._inputs(inputs, num_rows)
            held.write(inputs)
            current = torch.cuda.current_stream(inputs[0].device)
            self.side.wait_stream(current)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self.side):
                result = function(held.mask, *held.tensors)
                made = CapturedCall(graph, held, self._output(result))
                try:
                    with self._capturing(graph):
                        made.output.copy_(function(held.mask, *held.tensors))
                except RuntimeError as error:
                    made = error
                else:
                    self.first = self.first or graph
            current.wait_stream(self.side)
            return result[: inputs[0].size(0)].clone(), made

    def replay(self, captured: CapturedCall, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        with self.lock:
            captured.inputs.write(inputs)
            captured.graph.replay()
            num_rows, output = inputs[0].size(0), captured.output
            return (output if output.size(0) == num_rows else output[:num_rows]).clone()

    def _inputs(self, inputs: tuple[torch.Tensor, ...], num_rows: int | None) -> Inputs:
        shapes = [tensor.shape if num_rows is None else (num_rows, *tensor.shape[1:]) for tensor in inputs]
        key = (num_rows, *shapes, *[tensor.dtype for tensor in inputs])
        held: Inputs | None = self.held.get(key)
        if held is None:
            device = inputs[0].device
            tensors = (
                torch.zeros(shape, dtype=tensor.dtype, device=device)
                for shape, tensor in zip(shapes, inputs, strict=True)
            )
            mask = None if num_rows is None else torch.zeros(num_rows, dtype=torch.bool, device=device)
            held = self.held[key] = Inputs(tuple(tensors), mask)
        return held

    def _output(self, like: torch.Tensor) -> torch.Tensor:
        key = (like.shape, like.dtype)
        tensor: torch.Tensor | None = self.held.get(key)
        if tensor is None:
            tensor = self.held[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return tensor

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Like `torch.cuda.graph`, but without its garbage collection and its release of cached memory.

        Python's garbage collector is off during capture, since freeing tensors may invalidate the capture.
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
    """Stops capturing in this process: a capture that fails once, for example without torch's caching allocator, always
    fails."""
    global is_possible
    is_possible = False
    story = "as one of them cannot be captured in a CUDA graph"
    if is_alone:
        logger.warning("calls of few tokens run eagerly, %s: %s", story, reason)
    else:  # A collective call may have stopped halfway.
        raise RuntimeError(
            f"calls of few tokens cannot be replayed, {story}; set MOE_EP_REPLAY_MAX_TOKENS=0: {reason}"
        ) from reason


is_possible = True
_places: dict[tuple[torch.device, int], StreamGraphs] = {}
_making = threading.Lock()


def may_capture(device: torch.device) -> bool:
    """Whether work on this device can be captured now: on a GPU, outside of any other capture."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def stream_graphs(device: torch.device) -> StreamGraphs:
    """Returns the graph state of the device's current stream."""
    key = (device, current_stream(device))
    place = _places.get(key)
    if place is None:
        with _making:
            made = StreamGraphs(key[1], torch.cuda.Stream(device), torch.cuda.graph_pool_handle())
            place = _places.setdefault(key, made)
    return place

"""The MoE layer of a parallelized model: it takes the weights and ids of the model's own router."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.arguments import check_no_gradients, check_tensors
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.errors import check_at_least
from moe_ep.hf.experts import ExpertsShape, expert_tensors
from moe_ep.hf.steps import Step, StepCoordinator
from moe_ep.layer.custom_ops import without_autocast
from moe_ep.layer.dispatcher import LayerDispatcher
from moe_ep.layer.elastic import ElasticSlots
from moe_ep.layer.fused_moe import FusedMoE
from moe_ep.modular_kernel import FusedMoEPrepareAndFinalize, make_prepare_finalize
from moe_ep.modular_kernel.workspace import current_stream
from moe_ep.observability import stages
from moe_ep.registry import choose_form
from moe_ep.routing.router import PrecomputedRouter

# ==== Replay ====
#
# Captures a layer's calls with few tokens in CUDA graphs, and replays them.
#
# Launching the kernels of such a call one by one takes the host several times longer than the GPU needs to run them. So
# a call that recurs is captured, and replayed from then on.

logger = logging.getLogger(__name__)

# Eager calls of a kind before its capture; they compile and allocate what is needed once. Code that captures the whole
# model makes fewer calls before, and needs no graphs of its layers.
EAGER_CALLS = 4
# Kinds that a layer captures at most; calls of further kinds run eagerly.
MOST_KINDS = 16

# The key of a graph: the caller's own part, the stream, and shapes, dtypes and devices of the inputs.
Kind = tuple[object, ...]
Function = Callable[..., torch.Tensor]


class CallGraphs:
    """The CUDA graphs of one layer's calls, by kind.

    The first calls of a kind run eagerly, the next one is captured, and later ones are replays: inputs are copied to
    where the graph reads them, and the result is a copy of what it wrote, so callers see no difference. Graphs of one
    stream run one after the other and share this memory across layers. A copy of the layer begins without graphs.
    """

    def __init__(self) -> None:
        self._made_for: tuple[object, ...] = ()
        self._num_eager: dict[Kind, int] = {}
        self._captured: dict[Kind, CapturedCall] = {}

    def run(
        self,
        function: Function,
        inputs: tuple[torch.Tensor, ...],
        which: object,
        of: tuple[object, ...],
        around: AbstractContextManager[None] | None = None,
    ) -> torch.Tensor:
        """Runs or replays function(*inputs) once, and returns its tensor.

        Args:
            inputs: on the GPU.
            which: tells calls apart that do not run the same kernels.
            of: what graphs depend on besides the inputs, such as the addresses of weights; if it differs from that of
                the previous call, all graphs are dropped.
            around: a context manager for replays of a function that is collective; None for any other.

        Raises:
            RuntimeError: a collective function cannot be captured. Any other runs eagerly then.
        """
        if of != self._made_for:
            self.clear()
            self._made_for = of
        place = stream_graphs(inputs[0].device)
        kind = (which, place.stream, *[(tensor.shape, tensor.dtype, tensor.get_device()) for tensor in inputs])
        captured = self._captured.get(kind)
        if captured is not None:
            with around or nullcontext():
                return place.replay(captured, inputs)
        if not self._is_due(kind):
            return function(*inputs)
        output, made = place.capture(function, inputs)
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


@dataclass(frozen=True)
class CapturedCall:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[torch.Tensor, ...]
    output: torch.Tensor


@dataclass
class StreamGraphs:
    """State shared by graphs that are replayed on one stream.

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
    ) -> tuple[torch.Tensor, CapturedCall | RuntimeError]:
        """Runs function(*inputs) once, and captures it; returns the result, and the graph or why there is none."""
        made: CapturedCall | RuntimeError
        with self.lock, torch.inference_mode(False), torch.no_grad():
            held = tuple(self._tensor(number, tensor) for number, tensor in enumerate(inputs))
            for to, tensor in zip(held, inputs, strict=True):
                to.copy_(tensor)
            current = torch.cuda.current_stream(inputs[0].device)
            self.side.wait_stream(current)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self.side):
                result = function(*held)
                made = CapturedCall(graph, held, self._tensor(None, result))
                try:
                    with self._capturing(graph):
                        made.output.copy_(function(*held))
                except RuntimeError as error:
                    made = error
                else:
                    self.first = self.first or graph
            current.wait_stream(self.side)
            return result.clone(), made

    def replay(self, captured: CapturedCall, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
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
    """Stops capturing for this process: what fails once, as without torch's caching allocator, fails always."""
    global is_possible
    is_possible = False
    story = "as one of them cannot be captured in a CUDA graph"
    if is_alone:
        logger.warning("calls of few tokens run eagerly, %s: %s", story, reason)
    else:  # A collective call may have stopped half way.
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
    """The place of the device's current stream."""
    key = (device, current_stream(device))
    place = _places.get(key)
    if place is None:
        with _making:
            made = StreamGraphs(key[1], torch.cuda.Stream(device), torch.cuda.graph_pool_handle())
            place = _places.setdefault(key, made)
    return place


def count_choices(topk_ids: torch.Tensor, counts: torch.Tensor) -> None:
    """Adds 1 to counts[id] for every id of int32 `[T, top_k]` that is not negative; counts is int64 `[num_experts]`."""
    choose_form(_count_reference, "choices:triton_count_choices", topk_ids)(topk_ids, counts)


def _count_reference(topk_ids: torch.Tensor, counts: torch.Tensor) -> None:
    flat = topk_ids.flatten().long()
    counts.scatter_add_(0, flat.clamp(min=0), (flat >= 0).long())


class StepDispatcher(LayerDispatcher):
    """A layer's dispatcher in a model whose ranks agree on every step, with a second backend for small steps.

    Args:
        layer_dispatcher: that of the layer, whose groups and backend this takes over.
        coordinator: knows the step that all ranks are making; None where they call their layers in lockstep.
        decode_max_num_tokens: the capacity of the second backend, for steps in which no rank has more tokens; None
            without one.
    """

    def __init__(
        self,
        layer_dispatcher: LayerDispatcher,
        coordinator: StepCoordinator | None,
        decode_max_num_tokens: int | None,
        decode_backend: str,
    ) -> None:
        self.__dict__.update(vars(layer_dispatcher))
        self.coordinator = coordinator
        self._decode_max_num_tokens, self._decode_backend_name = decode_max_num_tokens, decode_backend
        self._decode_backend: FusedMoEPrepareAndFinalize | None = None

    @property
    def step(self) -> Step | None:
        """The step under way."""
        return None if self.coordinator is None else self.coordinator.current

    @property
    def is_decode_step(self) -> bool:
        """Whether the step under way uses the second backend; the same on every rank."""
        step = self.step
        return step is not None and step.most_tokens <= self.most_decode_tokens

    @property
    def most_decode_tokens(self) -> int:
        """The most tokens of any rank in steps that use the second backend; -1 without one."""
        return -1 if self._decode_max_num_tokens is None else self._decode_max_num_tokens

    @property
    def prepare_finalize(self) -> FusedMoEPrepareAndFinalize:
        """The backend of the step under way."""
        if not self.is_decode_step:
            return super().prepare_finalize
        if self._decode_backend is None:
            moe_config = replace(self.method.moe_config, max_num_tokens=cast(int, self._decode_max_num_tokens))
            name = self._decode_backend_name if self.parallel.use_all2all else "no_ep"
            self._decode_backend = make_prepare_finalize(name, moe_config, None, self.groups.ep)
        return self._decode_backend

    def regroup(self, process_group: dist.ProcessGroup | None) -> None:
        super().regroup(process_group)
        self._decode_backend = None

    def backends(self) -> Iterator[FusedMoEPrepareAndFinalize]:
        yield from super().backends()
        if self._decode_backend is not None:
            yield self._decode_backend

    def most_tokens(self, num_tokens: int) -> int:
        step = self.step
        return super().most_tokens(num_tokens) if step is None else step.most_tokens


class RoutedExperts(FusedMoE):
    """The routed experts of one layer, sharded over ranks, for a model that routes by itself.

    Takes the arguments of `FusedMoE` that do not concern routing, and:

    Args:
        coordinator: knows the step that all ranks are making, which spares each layer the question how many tokens
            the others have. None where the ranks call their layers in lockstep by themselves.
        decode_max_num_tokens: with it, steps in which no rank has more tokens than this use a second backend of that
            capacity, which can be captured in a CUDA graph; all others use the layer's own.
        num_identities: experts that return what they read, whose ids follow the others'.

    Attributes:
        load: int64 `[num_physical]`, rows that this rank sent to each physical expert since `counts_load` was set.
        row_mask: bool `[T]`, rows that count; the others go to no expert. None where all do.
    """

    load: torch.Tensor
    dispatcher: StepDispatcher
    # Counted over all layers of the model, dense ones included.
    layer_index: int = 0

    @torch.inference_mode(False)
    def __init__(
        self,
        *,
        coordinator: StepCoordinator | None = None,
        decode_max_num_tokens: int | None = None,
        decode_backend: str = "auto",
        num_identities: int = 0,
        **layer: Any,
    ) -> None:
        if decode_max_num_tokens is not None:
            check_at_least(1, decode_max_num_tokens=decode_max_num_tokens)
        super().__init__(**layer)
        self.dispatcher = StepDispatcher(self.dispatcher, coordinator, decode_max_num_tokens, decode_backend)
        self.precomputed = PrecomputedRouter(self.num_experts, self.top_k, num_identities)
        self._graphs, self._replay_tokens = CallGraphs(), env.REPLAY_MAX_TOKENS.get()
        self.counts_load = False
        self.register_buffer("load", torch.zeros(self.moe_config.num_experts, dtype=torch.int64), persistent=False)

    @property
    def row_mask(self) -> torch.Tensor | None:
        return self.precomputed.row_mask

    @row_mask.setter
    def row_mask(self, mask: torch.Tensor | None) -> None:
        self.precomputed.row_mask = mask

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum `[T, K]` of each token's experts; a collective step of the layer's ranks.

        Args:
            hidden_states: `[T, K]`, any float dtype: the experts keep theirs when a model is cast, and the result is of
                this one; T may differ from rank to rank and be 0.
            topk_ids: integer `[T, top_k]`, logical; from E on identity experts', where there are any; others outside of
                [0, E) for no expert.
            topk_weights: `[T, top_k]`, any float dtype.

        Raises:
            ValueError: other shapes or dtypes, or tensors on several devices.
            RuntimeError: gradients are asked for.
        """
        check_tensors(hidden_states=hidden_states, topk_ids=topk_ids, topk_weights=topk_weights)
        if not hidden_states.is_floating_point():
            raise ValueError(f"hidden_states is {hidden_states.dtype}; it must be of a float dtype")
        return self._call(hidden_states.to(self.moe_config.in_dtype), topk_weights, topk_ids).to(hidden_states.dtype)

    def _call(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The graph node; a replay of its body where that has run so before."""
        if torch.compiler.is_compiling() or not self._may_replay(inputs[0]):
            rows, topk_weights, topk_ids = inputs
            return super().forward(rows, topk_weights=topk_weights, topk_ids=topk_ids)
        check_no_gradients(f"the experts of {self.layer_name}", *inputs[:2])
        with torch.no_grad(), without_autocast(), self._called():  # as in the node
            return self._replayed(*inputs)

    def forward_routed(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """The body of the graph node."""
        inputs = hidden_states, topk_weights, topk_ids
        with self._called():
            # A compiled model runs this node between its CUDA graphs if there are other ranks.
            if self.parallel_config.spans_ranks and self._may_replay(hidden_states):
                return self._replayed(*inputs)
            return self._eagerly(*inputs)

    def _eagerly(self, *inputs: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, super().forward_routed(*inputs))

    def _called(self) -> AbstractContextManager[None]:
        coordinator = self.dispatcher.coordinator
        return nullcontext() if coordinator is None else coordinator.calling(self)

    def _replayed(self, *inputs: torch.Tensor) -> torch.Tensor:
        """A call of few tokens."""
        self.check_loaded()
        around = None
        if self.parallel_config.spans_ranks:
            around = self._around_replay()
            if around is None:
                return self._eagerly(*inputs)
        which, made_for = self.dispatcher.is_decode_step, (*self.tensor_addresses(), *self._addresses_of_tables())
        return self._graphs.run(self._eagerly, inputs, which=which, of=made_for, around=around)

    def _may_replay(self, rows: torch.Tensor) -> bool:
        """Whether a graph can stand for this call: what follows from it is the output, and the load that EPLB counts,
        of these inputs and the other ranks'."""
        least = 0 if self.parallel_config.spans_ranks else 1
        return (
            self._replay_tokens > 0
            and may_capture(rows.device)
            and rows.dim() == 2
            and least <= rows.size(0) <= self._replay_tokens
            and not (self.counts_load or stages.are_listened_to())
            and self.row_mask is None
            and not self.router_wrappers
            and self.shared_experts is None
            and self.parts_support_cuda_graph()
        )

    def _around_replay(self) -> AbstractContextManager[None] | None:
        """Returns a context manager that must wrap a replay of this call, or None if a replay cannot stand in for it.

        The call must be one pass through the backend, whatever the other ranks bring.
        """
        step, capacity = self.dispatcher.step, self.prepare_finalize.max_num_tokens_per_rank()
        if step is None or capacity is None or step.most_tokens > capacity:
            return None
        return self.prepare_finalize.around_replay()

    def _addresses_of_tables(self) -> Iterator[int]:
        """Addresses of the tables that EPLB writes and CUDA graphs read."""
        if self.eplb_state is not None:
            yield from (tensor.data_ptr() for tensor in self.eplb_state._buffers.values() if tensor is not None)

    def forget_kernels(self) -> None:
        super().forget_kernels()
        self._graphs.clear()

    def regroup(self, *ranks: Any) -> None:
        super().regroup(*ranks)
        self.load = self.load.new_zeros(self.moe_config.num_experts)

    def to_physical(self, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = super().to_physical(topk_weights, topk_ids)
        if self.counts_load:
            count_choices(ids, self.load)
        return weights, ids

    def serve(self) -> None:
        """This layer's part of a step in which this rank has no tokens."""
        device, top_k = self.load.device, self.moe_config.experts_per_token
        nothing = torch.empty(0, self.moe_config.hidden_dim, dtype=self.moe_config.in_dtype, device=device)
        self(nothing, torch.empty(0, top_k, dtype=torch.int32, device=device), torch.empty(0, top_k, device=device))


# Above the capacity up to which "auto" takes a backend of fixed capacity: exact sizes, any number of tokens.
PREFILL_MAX_NUM_TOKENS = 4096


def make_routed_experts(
    shape: ExpertsShape,
    top_k: int,
    parallel_config: FusedMoEParallelConfig,
    *,
    device: torch.device | str,
    process_group: dist.ProcessGroup | None = None,
    max_num_tokens: int = PREFILL_MAX_NUM_TOKENS,
    slots: ElasticSlots | None = None,
    **options: Any,
) -> RoutedExperts:
    """The layer that takes the place of an experts module, its parameters not loaded yet."""
    if slots is not None:
        num_redundant = slots.num_redundant_experts(shape.num_experts)
        options |= {"enable_eplb": True, "num_redundant_experts": num_redundant}
    with torch.device(device):
        layer = RoutedExperts(
            num_experts=shape.num_experts,
            top_k=top_k,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            params_dtype=shape.dtype,
            activation=shape.activation,
            swiglu_limit=shape.swiglu_limit,
            has_bias=shape.has_bias,
            num_identities=shape.num_identities,
            prefix=shape.name,
            parallel_config=parallel_config,
            process_group=process_group,
            max_num_tokens=max_num_tokens,
            **options,
        )
    if slots is not None:
        slots.place(layer)
    return layer


def load_shard(layer: RoutedExperts, module: Any) -> None:
    """Copies this rank's experts out of an experts module that holds all of them, and finishes the layer."""
    params = dict(layer.named_parameters(recurse=False))
    for (suffix, shard_id), tensor in expert_tensors(module).items():
        gemm = "w2" if shard_id == "w2" else "w13"
        layer.weight_loader(params[f"{gemm}_{suffix}"], tensor, layer.layer_name, shard_id, expert_id=0)
    layer.process_weights_after_loading()

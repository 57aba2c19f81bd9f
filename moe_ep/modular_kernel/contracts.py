"""The two contracts of a MoE layer, the structs that pass between them, and the two activation formats.

A dispatch backend moves rows between ranks, experts compute them, and neither knows the other. Each contract has two
forms. `Dispatcher` and `Experts` take and return structs, and `Dispatched` holds an explicit handle for the combine.
`FusedMoEPrepareAndFinalize` and `FusedMoEPermuteExpertsUnpermute` are the same contracts with vLLM's signatures. A
class may implement either form, and the modular kernel runs both (`moe_ep.modular_kernel.adapters`). A `Dispatcher` has
`prepare` and `finalize` too, and `Experts` have `apply`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import torch

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.errors import check_below, check_router_weight_on_input
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce

if TYPE_CHECKING:
    from moe_ep.quantization.canonical_weights import CanonicalWeights

Result = TypeVar("Result")

# Batches between prepare and finalize that a backend remembers for callers without handles; the oldest is forgotten.
MAX_OPEN_BATCHES = 8


class FusedMoEActivationFormat(Enum):
    """The layout of rows between dispatch and experts.

    Standard: `[num_recv_tokens, K]`, each row with its topk_ids and topk_weights.
    BatchedExperts: `[num_local_experts, max_tokens, K]`; the first expert_num_tokens[e] rows of expert e are valid.
    """

    Standard = "standard"
    BatchedExperts = "batched_experts"


@dataclass(frozen=True)
class ExpertTokensMetadata:
    """How many rows each local expert has, and where they are.

    Attributes:
        expert_num_tokens: int32 `[El]`, on the device.
        expert_num_tokens_cpu: the same on the host, if it is known without a synchronization.
        expert_row_ids: int32 `[El, max_rows]`. If given, the input is batched by reference: hidden_states is
            `[num_rows, K]` and expert e's i-th row is `expert_row_ids[e, i]`; the output is batched as usual.
    """

    expert_num_tokens: torch.Tensor
    expert_num_tokens_cpu: torch.Tensor | None = None
    expert_row_ids: torch.Tensor | None = None

    @classmethod
    def make_from_list(cls, counts: list[int], device: torch.device | str) -> ExpertTokensMetadata:
        """Creates the metadata from counts that are known on the host.

        Raises:
            TypeError: counts is not a list of whole numbers.
            ValueError: a count below 0 or too large for int32, or an invalid device.
        """
        if isinstance(counts, str) or not isinstance(counts, Sequence):
            raise TypeError(f"counts is {counts!r}; it must be a list of whole numbers, one for each local expert")
        for count in counts:
            check_below("2^31", 1 << 31, counts=count)
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError):
            raise ValueError(
                f"device is {device!r}; it must be a torch.device or the name of one, as cpu or cuda:0"
            ) from None
        on_host = torch.tensor(counts, dtype=torch.int32, device="cpu")
        return cls(on_host.to(device, non_blocking=True), on_host)


class ExpertWeights(NamedTuple):
    """Quantized weights `[El, ...]` of one GEMM of all local experts, in the layout that its implementation reads.

    Attributes:
        global_scales: f32 `[El]`, or `[El, 2]` if gate and up have separate factors.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None = None
    g_idx: torch.Tensor | None = None
    g_idx_sort_indices: torch.Tensor | None = None
    global_scales: torch.Tensor | None = None


@dataclass(slots=True, kw_only=True)
class Routing:
    """Which experts compute this rank's tokens.

    Attributes:
        topk_weights: f32 `[T, topk]`.
        topk_ids: `[T, topk]`, global (physical) ids; -1 for no expert, for which no row is sent.
        num_experts: number of ids that can occur, over all ranks.
        expert_map: int32 `[num_experts]`, global -> local, -1 if not local; None if all are local, or if the backend
            knows where they are.
        apply_router_weight_on_input: multiply rows by their weight before they are sent; topk must be 1.
        deferred: the router's choice if it is still to be made, for at most `most_deferred_tokens` tokens; weights and
            ids have no values until its `settle` was called.
        most_tokens: an upper bound on the tokens of each rank, the same on every rank; None if it is unknown.
        experts_combine: whether the experts can combine the batch, if the backend offers that (`peer_build`).
    """

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    num_experts: int
    expert_map: torch.Tensor | None = None
    apply_router_weight_on_input: bool = False
    deferred: Any = None
    most_tokens: int | None = None
    experts_combine: bool = False


@dataclass(slots=True, kw_only=True)
class Dispatched:
    """The rows that arrived on this rank in one dispatch, and the handle that the combine of the same batch needs.

    Attributes:
        rows: Standard `[num_recv, K]`; BatchedExperts `[El, capacity, K]`, or `[num_rows, K]` if batched by reference.
        row_scales: f32 `[..., 1]` or `[..., ceil(K / 128)]` for int8 and e4m3 rows; None for rows in the activations'
            dtype.
        expert_tokens_meta: how many rows each local expert has; always given with BatchedExperts.
        topk_ids: `[num_recv, topk]`, Standard only: global ids of the rows, -1 where the expert is not on this rank.
            None means those of this rank's tokens.
        topk_weights: f32 `[num_recv, topk]`, Standard only.
        rows_are_weighted: whether rows were multiplied by their weight before they were sent.
        arrival: state of rows in flight, by which the experts wait for each row (`overlaps_experts`); None if all rows
            have arrived.
        deferred: as in `Routing`, if rows stay on this rank and the experts make the choice.
        peers: the batch, if the experts combine it and so write the layer's output; `rows` are then this rank's own,
            and there are no counts.
        handle: what the backend keeps for the combine; opaque to everything else, and valid for one combine.
    """

    rows: torch.Tensor
    row_scales: torch.Tensor | None = None
    expert_tokens_meta: ExpertTokensMetadata | None = None
    topk_ids: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    rows_are_weighted: bool = False
    arrival: Any = None
    deferred: Any = None
    peers: Any = None
    handle: Any = None


class Pending(NamedTuple, Generic[Result]):
    """An exchange in flight.

    Attributes:
        wait: waits for the data; on a GPU the stream that is current at the call waits. May be called again.
        receive: returns the result, waiting first if `wait` was not called. May be called once.
        start: sends what was not sent yet; `wait` and `receive` do so too.
    """

    wait: Callable[[], None]
    receive: Callable[[], Result]
    start: Callable[[], None] = lambda: None


class Copied(NamedTuple):
    """Experts that were copied for one batch.

    Attributes:
        total, here: the number of copies on all ranks, and of those into this rank's scratch slots.
        release: must be called once on every rank. Later work on the current stream may then change this rank's
            experts, because no rank still copies them for the batch.
    """

    total: int
    here: int
    release: Callable[[], None] = lambda: None


class ExpertCopies(Protocol):
    """Copies experts of one layer between its ranks."""

    def start(self, sources: torch.Tensor) -> Pending[Copied]:
        """Starts copying; a collective step.

        Args:
            sources: integer `[R, spare_slots]` on the device of the counts: the slot that is copied into each scratch
                slot, numbered over all ranks in rank order; -1 for none.
        """


class BatchExchange(Protocol):
    """A backend's exchanges for balancing a batch, beside dispatch and combine; `gather` is a collective step.

    Attributes:
        rank, size: this process's rank among the EP ranks, and their number.
        on_device: whether counts and plan stay on the GPU, so that the host never waits.
        opens_together: whether `open` is a collective step too, because peers keep the addresses of a rank's experts.
            Before each batch the ranks then agree on the host whether any of them must open it again.
    """

    rank: int
    size: int
    on_device: bool
    opens_together: bool

    def open(self, resident: Sequence[torch.Tensor], scratch: Sequence[torch.Tensor], num_slots: int) -> ExpertCopies:
        """Prepares copies of a layer's experts.

        Args:
            resident, scratch: each tensor of an expert as uint8 `[slots, bytes]`, in this rank's slots.
            num_slots: resident slots of all ranks; if they do not divide evenly, the first ranks have one more.
        """

    def gather(self, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
        """Counts the `ids` of each expert on every rank: integer `[R, E]`, on the host or on the device of `ids`."""


# (rows, their scales, metadata, global physical ids of the rows or None, their weights or None)
PrepareResult = tuple[
    torch.Tensor, torch.Tensor | None, ExpertTokensMetadata | None, torch.Tensor | None, torch.Tensor | None
]


class Compilation(Protocol):
    """A kernel that can be compiled before it is needed; two that compare equal are the same kernel."""

    def __hash__(self) -> int: ...

    def compile_ahead(self, device: torch.device) -> None:
        """Compiles the kernel into the cache on disk, unless it is there already."""


class ModularPart(ABC):
    """Base of both contracts.

    Class arguments:
        unchecked: the modular kernel does not check what this class returns, because the class has its own tests; not
            inherited.
    """

    is_unchecked: ClassVar[bool] = False

    def __init_subclass__(cls, *, unchecked: bool = False, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.is_unchecked = unchecked

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Why this class cannot run on this machine, and how to fix that, in one line; None if it can."""
        return None

    @classmethod
    def compilations(
        cls, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig, device: torch.device
    ) -> Sequence[Compilation]:
        """The kernels that a layer of this configuration compiles in its first pass on this device, slowest first; none
        by default.

        A warm-up calls `compile_ahead` on each, in any process that shares MOE_EP_CACHE_DIR.
        """
        return ()

    @abstractmethod
    def activation_format(self) -> FusedMoEActivationFormat:
        """The format of the rows that a backend's prepare returns and its finalize accepts, or that experts compute."""


class FusedMoEPrepareAndFinalize(ModularPart):
    """Moves rows to the ranks that hold their experts, and the results back.

    Subclasses written against these signatures run in the modular kernel as they are. New backends are easier to write
    as a `Dispatcher`.
    """

    # The number of columns must be a multiple of this.
    hidden_size_multiple: ClassVar[int] = 1

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedMoEPrepareAndFinalize:
        """Returns the backend itself: like the process group that it belongs to, it is shared between layers."""
        return self

    @classmethod
    def refuses(cls, moe_config: FusedMoEConfig) -> str | None:
        """Why this backend cannot move the rows of a layer with this configuration, in one line; None if it can."""
        return None

    @classmethod
    def depends_on_batch(cls) -> str | None:
        """Why a token's result may depend on the other tokens, or on where its experts are, although
        `moe_config.batch_invariant` is set; None if it never does."""
        return "it does not say that it adds up every token's slots in their order"

    @abstractmethod
    def topk_indices_dtype(self) -> torch.dtype | None:
        """The dtype that topk_ids must have; None for any integer dtype."""

    @abstractmethod
    def max_num_tokens_per_rank(self) -> int | None:
        """The capacity: the most tokens that one rank may pass to prepare; None if there is no limit."""

    @abstractmethod
    def num_dispatchers(self) -> int:
        """Number of ranks that can send rows here, including this one."""

    @abstractmethod
    def output_is_reduced(self) -> bool:
        """Whether finalize returns complete sums, so that no all-reduce is needed after it."""

    def finalize_only_copies(self) -> bool:
        """Whether finalize only copies rows that the experts have already weighted and summed. If so, the experts write
        the output directly."""
        return False

    def supports_cuda_graph(self) -> bool:
        """Whether a step can be captured: static shapes, no host synchronization."""
        return False

    def around_replay(self) -> AbstractContextManager[None] | None:
        """Returns a context manager that must wrap a CUDA-graph replay of one whole call, after `check`. Peers may run
        the same call eagerly.

        Returns None if such a replay cannot stand in for an eager call, or cannot while another batch is between
        prepare and finalize. The graph must have been captured while this returned a context manager.
        """
        return None

    def most_deferred_tokens(self) -> int:
        """The most tokens for which `dispatch` accepts a choice that is still to be made (`Routing.deferred`); it makes
        the choice or passes it on."""
        return 0

    def peer_build(self) -> Any:
        """The build options for experts that combine the batches of this backend (`Dispatched.peers`); None if the
        backend always combines itself."""
        return None

    def overlaps_experts(self) -> bool:
        """Whether `dispatch` leaves rows in flight (`Dispatched.arrival`), and `combine` accepts slots
        `[num_recv, topk, K]` that the experts have not finished. Used only with experts that do not refuse it."""
        return False

    def sums_slots(self) -> bool:
        """Whether `combine` weights and sums slots `[num_recv, topk, K]` while it moves rows, which saves the experts a
        pass over memory. The modular kernel then calls the experts' `leave_slots`."""
        return False

    def most_rows(self) -> int | None:
        """The number of rows that prepare returns under CUDA-graph capture, if it differs from eager mode, in which
        prepare returns the rows that arrived; otherwise None. Scratch is always allocated for this many rows."""
        return None

    def accepts_f32_output(self) -> bool:
        """Whether finalize accepts f32 expert outputs with f16 activations, and keeps them in range until the sum.

        An expert's own output, or one rank's part of a sum, may exceed 65504 although the layer's result does not, so
        f16 layers combine rows in f32. A backend that returns False gets f16 rows.
        """
        return False

    def check(self) -> None:
        """Raises DispatchTimeoutError if a wait on the device has timed out; does not wait for the device itself.

        Backends whose steps raise on the host need not override it.
        """
        return

    def batch_exchange(self) -> BatchExchange | None:
        """The exchange for balancing a batch by its own counts; None if the backend has none."""
        return None

    def pad_rows(self) -> None:
        """Allows `dispatch` to return padding rows with ids of -1 after those that arrived, also outside of CUDA-graph
        capture, if that saves the host a wait. Called for experts in the Standard format, which skip such ids."""
        return

    def hand_over_row_ids(self) -> None:
        """Allows `dispatch` to pass rows by reference (expert_row_ids) if it saves a copy; called if the experts accept
        them."""
        return

    def report_failure(self, error: Exception) -> None:
        """Called when a pass fails on this rank before or between its collective steps. Makes the ranks that wait for
        this one fail with an error that names it. Does nothing by default."""
        return

    def supports_async(self) -> bool:
        """Whether prepare_async and finalize_async are implemented."""
        return False

    @abstractmethod
    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
    ) -> PrepareResult:
        """Dispatches this rank's rows, quantized for the wire if requested.

        Args:
            a1: `[T, K]`, this rank's tokens; T may differ between ranks and be 0.
            topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input: as in `Routing`.

        Returns:
            (rows, scales | None, metadata | None, ids | None, weights | None). Standard: the ids of received rows are
            global, -1 if the expert is not on this rank. BatchedExperts: ids and weights are None, and the backend
            keeps what finalize needs.

        Raises:
            ValueError: T above the capacity, before anything is sent; wrong shapes or dtypes.
            DispatchTimeoutError: a peer did not take part before the deadline.
        """

    @abstractmethod
    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None:
        """Weights and sums the results and returns them to the tokens' ranks; writes `output` `[T, K]` in place."""

    def prepare_async(self, *args: Any, **kwargs: Any) -> tuple[Callable[[], None], Callable[[], PrepareResult]]:
        """Splits prepare: takes the same arguments, starts sending and returns (hook, receiver). `hook()` waits for the
        data, `receiver()` returns what prepare would have returned.

        Raises:
            RuntimeError: the backend has no asynchronous form.
        """
        self._refuse_async()

    def finalize_async(self, *args: Any, **kwargs: Any) -> tuple[Callable[[], None], Callable[[], None]]:
        """Splits finalize: takes the same arguments, starts sending and returns (hook, receiver). `receiver()` writes
        `output`.

        Raises:
            RuntimeError: the backend has no asynchronous form.
        """
        self._refuse_async()

    def _refuse_async(self) -> NoReturn:
        raise RuntimeError(
            f"{type(self).__name__} has no asynchronous form; call the synchronous one, or ask supports_async() first"
        )


class Dispatcher(FusedMoEPrepareAndFinalize):
    """A dispatch backend whose combine takes the handle that its dispatch returned.

    `prepare` and `finalize` are thin entry points over `dispatch` and `combine`. Their signatures have no place for a
    handle, so the backend remembers what it dispatched, keyed by the topk_ids tensor (its identity, not its values)
    that `finalize` will be given. If a single batch is open, any tensor finds it.
    """

    @abstractmethod
    def dispatch(self, hidden_states: torch.Tensor, routing: Routing, quant_config: FusedMoEQuantConfig) -> Dispatched:
        """Sends this rank's rows to the ranks of their experts; a collective step of the ranks.

        Args:
            hidden_states: `[T, K]`, this rank's tokens; T may differ between ranks and be 0.
            quant_config: the experts' configuration. Its dispatch_dtype applies if the backend was made without one.
                Rows that are sent in its input_dtype are returned in that dtype, with their scales.

        Raises:
            ValueError: T above the capacity, before anything is sent; wrong shapes or dtypes.
            DispatchTimeoutError: a peer failed, or did not take part before the deadline.
        """

    @abstractmethod
    def combine(
        self,
        output: torch.Tensor,
        expert_output: torch.Tensor,
        dispatched: Dispatched,
        reduce_impl: TopKWeightAndReduce,
    ) -> None:
        """Weights and sums the experts' results and returns them to the tokens' ranks; a collective step.

        Args:
            output: `[T, K]` for the tokens that were dispatched, written in place.
            expert_output: the results of all rows that arrived, in the shape that `reduce_impl` expects.
            dispatched: what `dispatch` returned for the batch.

        Raises:
            ValueError: tensors that do not belong to the batch; it can be combined again with others.
            DispatchTimeoutError: a peer failed, or did not take part before the deadline.
        """

    def dispatch_async(
        self, hidden_states: torch.Tensor, routing: Routing, quant_config: FusedMoEQuantConfig
    ) -> Pending[Dispatched]:
        """Starts `dispatch`, so that the caller can compute between sending and receiving. The tensors passed in must
        not be written before `wait` was called. Raises RuntimeError unless `supports_async`."""
        self._refuse_async()

    def combine_async(
        self,
        output: torch.Tensor,
        expert_output: torch.Tensor,
        dispatched: Dispatched,
        reduce_impl: TopKWeightAndReduce,
    ) -> Pending[None]:
        """Starts `combine`, like `dispatch_async`; raises RuntimeError unless `supports_async`."""
        self._refuse_async()

    def prepare(self, *args: Any, **kwargs: Any) -> PrepareResult:
        call = self._dispatch_call(*args, **kwargs)
        return self._remember(call[1], self.dispatch(*call))

    def finalize(self, *args: Any, **kwargs: Any) -> None:
        call = _bound(FusedMoEPrepareAndFinalize.finalize, self, *args, **kwargs)
        with self._remembered(call) as dispatched:
            self.combine(call.output, call.fused_expert_output, dispatched, call.weight_and_reduce_impl)

    def prepare_async(self, *args: Any, **kwargs: Any) -> tuple[Callable[[], None], Callable[[], PrepareResult]]:
        call = self._dispatch_call(*args, **kwargs)
        pending = self.dispatch_async(*call)
        return pending.wait, lambda: self._remember(call[1], pending.receive())

    def finalize_async(self, *args: Any, **kwargs: Any) -> tuple[Callable[[], None], Callable[[], None]]:
        call = _bound(FusedMoEPrepareAndFinalize.finalize, self, *args, **kwargs)
        with self._remembered(call) as dispatched:
            pending = self.combine_async(call.output, call.fused_expert_output, dispatched, call.weight_and_reduce_impl)
        return pending.wait, pending.receive

    def _dispatch_call(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Routing, FusedMoEQuantConfig]:
        """Converts the arguments of prepare to those of dispatch."""
        call = _bound(FusedMoEPrepareAndFinalize.prepare, self, *args, **kwargs)
        given = ("topk_weights", "topk_ids", "num_experts", "expert_map", "apply_router_weight_on_input")
        routing = Routing(**{name: getattr(call, name) for name in given})
        return call.a1, routing, call.quant_config

    # Batches between `prepare` and `finalize`, each with the topk_ids that finalize will be given.
    _remembered_batches: tuple[tuple[torch.Tensor, Dispatched], ...] = ()

    def _remember(self, routing: Routing, dispatched: Dispatched) -> PrepareResult:
        if dispatched.arrival is not None:
            raise RuntimeError(
                f"{type(self).__name__} overlaps experts, which prepare's results have no place for; call dispatch and "
                f"combine, or choose overlap=False (MOE_EP_OVERLAP=0)"
            )
        key = routing.topk_ids if dispatched.topk_ids is None else dispatched.topk_ids
        self._remembered_batches = (*self._remembered_batches[1 - MAX_OPEN_BATCHES :], (key, dispatched))
        rows, scales, meta = dispatched.rows, dispatched.row_scales, dispatched.expert_tokens_meta
        return rows, scales, meta, dispatched.topk_ids, dispatched.topk_weights

    def _forget_batches(self) -> None:
        """Drops the batches between `prepare` and `finalize` after they were abandoned."""
        self._remembered_batches = ()

    @contextmanager
    def _remembered(self, call: Any) -> Iterator[Dispatched]:
        """Yields the batch that a `finalize` call belongs to; it stays open if the block raises ValueError."""
        open_batches = self._remembered_batches
        found = next((pair for pair in open_batches if pair[0] is call.topk_ids), None)
        if found is None and len(open_batches) == 1:
            found = open_batches[0]
        if found is None:
            raise RuntimeError(
                f"topk_ids is not the tensor of one of the {len(open_batches)} batches between prepare and finalize; "
                f"pass the one that prepare returned, or where it returned none the one it was given"
            )
        self._remembered_batches = tuple(pair for pair in open_batches if pair is not found)
        own: dict[str, Any] = {"rows_are_weighted": call.apply_router_weight_on_input}
        if found[1].topk_ids is not None:
            own |= {"topk_ids": call.topk_ids, "topk_weights": call.topk_weights}
        try:
            yield dataclasses.replace(found[1], **own)
        except ValueError:
            self._remembered_batches = (*self._remembered_batches, found)
            raise


_signature = functools.cache(inspect.signature)


def _bound(method: Callable[..., Any], *args: Any, **kwargs: Any) -> SimpleNamespace:
    """Binds a method's arguments and returns them by name."""
    return SimpleNamespace(**_signature(method).bind(*args, **kwargs).arguments)


class FusedMoEPermuteExpertsUnpermute(ModularPart):
    """Computes this rank's experts: w13, activation, w2.

    Subclasses written against the signature of `apply` run in the modular kernel as they are. New experts are easier to
    write as `Experts`.
    """

    def __init__(self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig | None = None) -> None:
        if quant_config is not None and not isinstance(quant_config, FusedMoEQuantConfig):
            raise TypeError(
                f"quant_config is {quant_config!r}; it must be a FusedMoEQuantConfig, or None for plain weights"
            )
        self.moe_config = moe_config
        self.quant_config = quant_config or FusedMoEQuantConfig.unquantized()

    @classmethod
    def refuses(
        cls, moe_config: FusedMoEConfig, weights: tuple[CanonicalWeights, ...], device: torch.device
    ) -> str | None:
        """Why these experts cannot compute a layer with this configuration on this device, in one line; None if they
        can.

        Args:
            weights: w13 and w2 in the canonical quantized form; empty if they are plain.
        """
        return cls.unusable_reason()

    @classmethod
    def depends_on_batch(cls, moe_config: FusedMoEConfig, device: torch.device) -> str | None:
        """Why a row's result may depend on other rows although `moe_config.batch_invariant` is set; None if it never
        does."""
        return "they do not say that a row's result depends on no other row"

    @classmethod
    def pack_weights(
        cls,
        w13: CanonicalWeights,
        w2: CanonicalWeights,
        moe_config: FusedMoEConfig,
        input_dtype: torch.dtype | None = None,
    ) -> tuple[ExpertWeights, ExpertWeights]:
        """Converts canonical quantized weights `[El, out, in]` to the layout of these experts; unchanged by default.

        Args:
            input_dtype: int8 or e4m3 if rows may be rounded to it; the weights must also work with rows of in_dtype.
        """
        first, second = (
            ExpertWeights(part.codes, part.scales, part.zero_points, part.g_idx, global_scales=part.global_scales)
            for part in (w13, w2)
        )
        return first, second

    @abstractmethod
    def supports_expert_map(self) -> bool:
        """Whether topk_ids may contain experts of other ranks, which expert_map marks."""

    @abstractmethod
    def supports_chunking(self) -> bool:
        """Whether the rows may be computed in several chunks of M."""

    def num_local_experts(self, w1: torch.Tensor) -> int:
        """The number of local experts: those of w1, unless the class holds further weights."""
        return w1.size(0)

    def supports_row_ids(self) -> bool:
        """Whether input batched by reference (expert_row_ids) is accepted."""
        return False

    def most_deferred_tokens(self) -> int:
        """The most tokens for which `run` accepts a choice that is still to be made (`ExpertsCall.deferred`)."""
        return 0

    def combines_batches(self, build: Any) -> bool:
        """Whether `run` can now combine a batch of a backend with this `peer_build` (`ExpertsCall.peers`); called
        before each pass."""
        return False

    def refuses_overlap(self) -> str | None:
        """Why these experts cannot start before their rows have arrived (`ExpertsCall.arrival`), in one clause; None if
        they can."""
        return "they need all rows before they begin"

    def leave_slots(self) -> None:
        """Allows `run` to leave weighting and summing of slots to the backend's combine, which it must do if rows are
        still in flight (`arrival`). Called if the backend sums slots."""
        return

    def supports_cuda_graph(self) -> bool:
        """Whether a pass can be captured: static shapes, no host synchronization."""
        return True

    @classmethod
    def refuses_input_dtype(
        cls, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig, device: torch.device, **kwargs: Any
    ) -> str | None:
        """Why these experts cannot round rows to `quant_config.input_dtype` on this device, in one clause; None if they
        can. The dtype goes with the weights (`moe_ep.quantization.input_rows`).

        Args:
            kwargs: further constructor arguments.
        """
        return f"{cls.__name__} computes rows as they are"

    def may_round_rows(self) -> bool:
        """Whether rows may be rounded to `quant_config.input_dtype` before they are multiplied."""
        return False

    def takes_quantized_rows(self) -> bool:
        """Whether rows that were sent in `quant_config.input_dtype` may be passed as they were sent: int8 or e4m3 codes
        with f32 scales (`row_scales`)."""
        return False

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """How the output still has to be weighted and summed, if at all."""

    @abstractmethod
    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: ExpertTokensMetadata | None,
        activation: MoEActivation | str,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of workspace13 (outputs of both GEMMs), workspace2 (the activation's output) and the
        output."""

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        """The dtype of the two workspaces and, unless it is f32 (`supports_f32_output`), of the output."""
        return act_dtype

    def supports_f32_output(self) -> bool:
        """Whether `apply` can write an f32 output with f16 activations (see `accepts_f32_output` of the backends).

        Experts keep the values between their GEMMs in f16's range in any case.
        """
        return False

    def activation(self, activation: MoEActivation | str, output: torch.Tensor, input: torch.Tensor) -> None:
        """Applies the activation to `input`, `[..., 2N]` (`[..., N]` if ungated), and writes `output` `[..., N]`."""
        apply_activation(activation, input, output, clamp_limit=self.moe_config.swiglu_limit)

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """Returns (E, M, N, K, topk). N is w1.size(1), gate and up together; M is the number of rows, per expert if
        they are batched."""
        E, N = w1.size(0), w1.size(1)
        M = a1.size(1) if a1.dim() == 3 else a1.size(0)
        return E, M, N, a1.size(-1), topk_ids.size(-1)

    @abstractmethod
    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation | str,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Computes the experts and writes `output` in place; only the valid rows of batched input are read and
        written."""


class ExpertsCall(NamedTuple):
    """The input of experts and the output that they write.

    Attributes:
        output: written, in the activations' dtype or f32. Standard: `[M, K]`, the weighted sums over the experts on
            this rank; if the config is batch_invariant, `[M, topk, K]`, their unweighted results by slot.
            BatchedExperts: `[El, max_rows, K]`, the unweighted results of the valid rows.
        hidden_states: `[M, K]`; batched `[El, max_rows, K]`, or `[num_rows, K]` if rows come by reference.
        w1, w2: in the experts' layout.
        topk_weights: f32 `[M, topk]`, Standard only; 1 where the rows were weighted before they were dispatched.
        topk_ids: `[M, topk]`, global ids, -1 for no expert.
        expert_map: int32, global -> local, -1 if not local; None if the ids are local.
        scratch: workspace13 and workspace2, of the shapes that `workspace_shapes` returned, or larger.
        meta: the number of rows of each expert, and where they are; always given for batched rows.
        row_scales: as in `Dispatched`.
        global_num_experts: number of ids that can occur.
        rows_are_weighted, arrival, deferred, peers: as in `Dispatched`.
    """

    output: torch.Tensor
    hidden_states: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None
    activation: MoEActivation | str
    scratch: tuple[torch.Tensor, torch.Tensor]
    meta: ExpertTokensMetadata | None
    row_scales: torch.Tensor | None = None
    global_num_experts: int = -1
    rows_are_weighted: bool = False
    arrival: Any = None
    deferred: Any = None
    peers: Any = None

    @property
    def batch(self) -> ExpertTokensMetadata:
        """The metadata of batched rows; raises ValueError if there is none."""
        if self.meta is None:
            raise ValueError(
                "expert_tokens_meta is None; batched experts need the number of rows of each expert, as the "
                "prepare step returns it"
            )
        return self.meta


class Experts(FusedMoEPermuteExpertsUnpermute):
    """Experts that take their arguments as one struct; `apply` takes them one by one and calls `run`."""

    @abstractmethod
    def run(self, call: ExpertsCall) -> None:
        """Computes the experts and writes `call.output`; only the valid rows of batched input are read and written."""

    def apply(self, *args: Any, **kwargs: Any) -> None:
        """Calls `run`; a2_scale is ignored, because it is part of these experts' quant_config."""
        call = _bound(FusedMoEPermuteExpertsUnpermute.apply, self, *args, **kwargs)
        weights = call.topk_weights
        if call.apply_router_weight_on_input and self.activation_format() is FusedMoEActivationFormat.Standard:
            check_router_weight_on_input(call.topk_ids.size(-1))
            weights = torch.ones_like(weights)
        self.run(
            ExpertsCall(
                call.output, call.hidden_states, call.w1, call.w2, weights, call.topk_ids, call.expert_map,
                call.activation, (call.workspace13, call.workspace2), call.expert_tokens_meta, call.a1q_scale,
                call.global_num_experts, call.apply_router_weight_on_input,
            )
        )  # fmt: skip

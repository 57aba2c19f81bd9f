"""The two contracts of a MoE layer, and the two formats in which rows pass between them.

A prepare/finalize backend knows how rows travel, experts know how to compute them, and neither knows the other.
`moe_ep.modular_kernel` joins one of each; everything here can be imported from there too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.errors import check_at_least
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce

if TYPE_CHECKING:
    from moe_ep.quantization.canonical_weights import CanonicalWeights


class FusedMoEActivationFormat(Enum):
    """The layout of rows between dispatch and experts.

    Standard: `[num_recv_tokens, K]`, each row with its topk_ids and topk_weights.
    BatchedExperts: `[num_local_experts, max_tokens, K]`; of expert e the first expert_num_tokens[e] rows count.
    """

    Standard = "standard"
    BatchedExperts = "batched_experts"


@dataclass(frozen=True)
class ExpertTokensMetadata:
    """How many rows each local expert has, and where they are.

    Attributes:
        expert_num_tokens: int32 `[El]`, on the device.
        expert_num_tokens_cpu: the same on the host, if it is known without a synchronisation.
        expert_row_ids: int32 `[El, max_rows]`. If given, the input is batched by reference: hidden_states is
            `[num_rows, K]` and expert e's i-th row is `expert_row_ids[e, i]`; the output is batched as usual.
    """

    expert_num_tokens: torch.Tensor
    expert_num_tokens_cpu: torch.Tensor | None = None
    expert_row_ids: torch.Tensor | None = None

    @classmethod
    def make_from_list(cls, counts: list[int], device: torch.device | str) -> ExpertTokensMetadata:
        """Creates the metadata from counts that are known on the host; raises for those that are no counts."""
        for count in counts:
            check_at_least(0, counts=count)
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


# (rows, their scales, metadata, global physical ids of the rows or None, their weights or None)
PrepareResult = tuple[
    torch.Tensor, torch.Tensor | None, ExpertTokensMetadata | None, torch.Tensor | None, torch.Tensor | None
]


class FusedMoEPrepareAndFinalize(ABC):
    """Moves rows to the ranks that hold their experts, and the results back."""

    # The number of columns must be a multiple of this.
    hidden_size_multiple: ClassVar[int] = 1

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedMoEPrepareAndFinalize:
        """Returns the backend itself: like the process group that it belongs to, it is shared between layers."""
        return self

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Why this backend cannot run on this machine, and how to fix that, in one line; None if it can."""
        return None

    @classmethod
    def refuses(cls, moe_config: FusedMoEConfig) -> str | None:
        """Why this backend cannot move the rows of a layer like this, in one line; None if it can."""
        return None

    @abstractmethod
    def activation_format(self) -> FusedMoEActivationFormat:
        """The format that prepare returns and finalize accepts."""

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
        """Whether a step can be captured: static shapes, no host synchronisation."""
        return False

    def around_replay(self) -> AbstractContextManager[None] | None:
        """What a replay on the current stream runs in, of a CUDA graph of one whole call that was captured when this
        returned a block too; other ranks may run theirs eagerly. Entered, it raises what `check` raises.

        None where such a replay cannot stand for a call: never, or while another batch is between prepare and finalize.
        """
        return None

    def most_rows(self) -> int | None:
        """Number of rows that prepare returns under CUDA-graph capture, if that is more than actually arrived, as it
        returns in eager mode; scratch is always allocated for this many. None if the two do not differ."""
        return None

    def accepts_f32_output(self) -> bool:
        """Whether finalize takes expert outputs in f32 beside f16 activations, and keeps them in range up to the sum.

        An expert's own output, or one rank's part of a sum, may exceed 65504 although the layer's result does not. So
        in f16 layers rows are combined in f32. A backend that returns False gets f16 rows.
        """
        return False

    def check(self) -> None:
        """Raises DispatchTimeoutError if a wait on the device has timed out; does not wait for the device itself.

        Backends whose steps raise on the host need not override it.
        """
        return

    def hand_over_row_ids(self) -> None:
        """Called if the experts accept rows by reference (expert_row_ids): pass them that way if it saves a copy."""
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
        """Dispatches this rank's rows, quantized for the wire if asked for.

        Args:
            a1: `[T, K]`, this rank's tokens; T may differ between ranks and be 0.
            topk_weights: f32 `[T, topk]`.
            topk_ids: `[T, topk]`, global (physical) ids; -1 is sent nowhere.
            num_experts: number of ids that can occur, over all ranks.
            expert_map: int32 `[num_experts]`, global -> local, -1 if not local; None if all are local.
            apply_router_weight_on_input: multiply rows by their weight before they leave (topk must be 1).

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

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
    ) -> tuple[Callable[[], None], Callable[[], PrepareResult]]:
        """prepare in two halves: starts sending and returns (hook, receiver). `hook()` waits for the data, `receiver()`
        returns what prepare would have returned."""
        raise RuntimeError(
            f"{type(self).__name__} has no asynchronous form; call prepare, or ask supports_async() first"
        )

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """finalize in two halves: starts sending and returns (hook, receiver); `receiver()` writes `output`."""
        raise RuntimeError(
            f"{type(self).__name__} has no asynchronous form; call finalize, or ask supports_async() first"
        )


class FusedMoEPermuteExpertsUnpermute(ABC):
    """Computes this rank's experts: w13, activation, w2."""

    def __init__(self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig | None = None) -> None:
        self.moe_config = moe_config
        self.quant_config = quant_config or FusedMoEQuantConfig.unquantized()

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Why these experts cannot run on this machine, and how to fix that, in one line; None if they can."""
        return None

    @classmethod
    def refuses(
        cls, moe_config: FusedMoEConfig, weights: tuple[CanonicalWeights, ...], device: torch.device
    ) -> str | None:
        """Why these experts cannot compute a layer like this on this device, in one line; None if they can.

        Args:
            weights: w13 and w2 in the canonical quantized form; empty if they are plain.
        """
        return cls.unusable_reason()

    @classmethod
    def pack_weights(
        cls, w13: CanonicalWeights, w2: CanonicalWeights, moe_config: FusedMoEConfig
    ) -> tuple[ExpertWeights, ExpertWeights]:
        """Converts canonical quantized weights `[El, out, in]` to the layout of these experts; unchanged by default."""
        first, second = (
            ExpertWeights(part.codes, part.scales, part.zero_points, part.g_idx, global_scales=part.global_scales)
            for part in (w13, w2)
        )
        return first, second

    @abstractmethod
    def activation_format(self) -> FusedMoEActivationFormat:
        """The format of both input and output."""

    @abstractmethod
    def supports_expert_map(self) -> bool:
        """Whether ids of experts on other ranks may occur, as told by expert_map."""

    @abstractmethod
    def supports_chunking(self) -> bool:
        """Whether the rows may be computed in several chunks of M."""

    def supports_row_ids(self) -> bool:
        """Whether input batched by reference (expert_row_ids) is accepted."""
        return False

    def supports_cuda_graph(self) -> bool:
        """Whether a pass can be captured: static shapes, no host synchronisation."""
        return True

    def may_round_rows(self) -> bool:
        """Whether rows may be rounded to `quant_config.input_dtype` before they are multiplied."""
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
        """Shapes of workspace13 (for the outputs of both GEMMs), workspace2 (for the activation's) and the output."""

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        """The dtype of the two workspaces and, unless it is f32 (`supports_f32_output`), of the output."""
        return act_dtype

    def supports_f32_output(self) -> bool:
        """Whether `apply` can write an f32 output beside f16 activations (see `accepts_f32_output` of the backends).

        Experts keep what lies between their GEMMs in f16's range in any case.
        """
        return False

    def activation(self, activation: MoEActivation | str, output: torch.Tensor, input: torch.Tensor) -> None:
        """Applies the activation: input `[..., 2N]` (or N), output `[..., N]`."""
        apply_activation(activation, input, output, clamp_limit=self.moe_config.swiglu_limit)

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """Returns (E, M, N, K, topk): N is w1.size(1), all its rows, and M the rows, per expert if they are batched."""
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
        """Computes the experts and writes `output` in place; of batched input only the rows that count are read and
        written."""

"""The two contracts of a MoE layer, and the two formats in which rows pass from one to the other.

A prepare/finalize backend knows how rows travel; experts know how they are computed; neither knows the other.
`moe_ep.modular_kernel` joins two of them; everything here is importable from there too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.topk_weight_and_reduce import TopKWeightAndReduce

if TYPE_CHECKING:
    from moe_ep.checkpoint.formats.canonical import CanonicalWeights


class FusedMoEActivationFormat(Enum):
    """How rows lie between dispatch and experts.

    Standard: `[num_recv_tokens, K]`, each row with its topk_ids and topk_weights.
    BatchedExperts: `[num_local_experts, max_tokens, K]`, expert e's rows first, as many as expert_num_tokens[e].
    """

    Standard = "standard"
    BatchedExperts = "batched_experts"


@dataclass(frozen=True)
class ExpertTokensMetadata:
    """How many rows each local expert has, and where they are.

    Attributes:
        expert_num_tokens: int32 `[El]`, on the device.
        expert_num_tokens_cpu: the same on the host, where it is known without a synchronisation.
        expert_row_ids: int32 `[El, max_rows]`: with it the input is batched by reference, hidden_states is
            `[num_rows, K]` and expert e's i-th row is `expert_row_ids[e, i]`; the output is batched as ever.
    """

    expert_num_tokens: torch.Tensor
    expert_num_tokens_cpu: torch.Tensor | None = None
    expert_row_ids: torch.Tensor | None = None

    @classmethod
    def make_from_list(cls, counts: list[int], device: torch.device | str) -> ExpertTokensMetadata:
        """From counts known on the host."""
        on_host = torch.tensor(counts, dtype=torch.int32)
        return cls(on_host.to(device, non_blocking=True), on_host)


class ExpertWeights(NamedTuple):
    """Quantized weights of one GEMM of all local experts, in the layout of the experts that take them, `[El, ...]`.

    Attributes:
        global_scales: f32 `[El]`, or `[El, 2]` where gate and up have factors of their own.
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

    # Rows have a multiple of so many columns.
    hidden_size_multiple: ClassVar[int] = 1

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedMoEPrepareAndFinalize:
        """The same backend: it is this rank's part of its group, and layers share it as they share the group."""
        return self

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Why this backend cannot run on this machine, with the mend, in one line; None where it can."""
        return None

    @abstractmethod
    def activation_format(self) -> FusedMoEActivationFormat:
        """The format that prepare returns and finalize takes."""

    @abstractmethod
    def topk_indices_dtype(self) -> torch.dtype | None:
        """The dtype topk_ids must have; None for any integer."""

    @abstractmethod
    def max_num_tokens_per_rank(self) -> int | None:
        """Capacity: the most tokens one rank may hand to prepare; None where there is no limit."""

    @abstractmethod
    def num_dispatchers(self) -> int:
        """Ranks that can send rows here, this one included."""

    @abstractmethod
    def output_is_reduced(self) -> bool:
        """Whether finalize leaves complete sums, so that no all-reduce is due after it."""

    def finalize_only_copies(self) -> bool:
        """Whether finalize just copies rows that the experts have weighted and summed: they may then write the output
        themselves."""
        return False

    def supports_cuda_graph(self) -> bool:
        """Whether a step can be captured: static shapes, no host synchronisation."""
        return False

    def most_rows(self) -> int | None:
        """Rows that prepare hands over under CUDA-graph capture, where eager passes get those that arrived; scratch for
        so many is made in either case. None where both are the same."""
        return None

    def check(self) -> None:
        """Raises DispatchTimeoutError where a wait on the device that is over was in vain; waits for nothing itself.

        Nothing to do for backends whose steps raise by themselves.
        """
        return

    def hand_over_row_ids(self) -> None:
        """The experts take rows by reference (expert_row_ids): hand them over so where that saves a copy."""
        return

    def supports_async(self) -> bool:
        """Whether prepare_async and finalize_async exist."""
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
        """Quantizes rows for the wire where asked, and dispatches them.

        Args:
            a1: `[T, K]`, this rank's tokens; T may differ from rank to rank and be 0.
            topk_weights: f32 `[T, topk]`.
            topk_ids: `[T, topk]`, global (physical) ids; -1 goes nowhere.
            num_experts: ids that can occur, over all ranks.
            expert_map: int32 `[num_experts]`, global -> local, -1 where not local; None when all are local.
            apply_router_weight_on_input: multiply rows by their weight before they leave (topk must be 1).

        Returns:
            (rows, scales | None, metadata | None, ids | None, weights | None). Standard: ids of the received rows are
            global, -1 where the expert is not on this rank. BatchedExperts: ids and weights are None, the backend
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
        """Weights, reduces and brings the results home: writes `output` `[T, K]` in place."""

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
        """prepare in two: sends at once, and returns (hook, receiver). `hook()` waits for the data, `receiver()`
        gives what prepare would have returned."""
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
        """finalize in two: sends at once, and returns (hook, receiver); `receiver()` writes `output`."""
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
        """Why these experts cannot run on this machine, with the mend, in one line; None where they can."""
        return None

    @classmethod
    def refuses(
        cls, moe_config: FusedMoEConfig, weights: tuple[CanonicalWeights, ...], device: torch.device
    ) -> str | None:
        """Why these experts cannot compute such a layer on such a device, in one line; None where they can.

        Args:
            weights: w13 and w2 in the canonical quantized form; empty where they are plain.
        """
        return cls.unusable_reason()

    @classmethod
    def pack_weights(
        cls, w13: CanonicalWeights, w2: CanonicalWeights, moe_config: FusedMoEConfig
    ) -> tuple[ExpertWeights, ExpertWeights]:
        """Canonical quantized weights `[El, out, in]` in the layout of these experts; as they are by default."""
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
        """Whether ids of experts elsewhere may occur, marked by expert_map."""

    @abstractmethod
    def supports_chunking(self) -> bool:
        """Whether rows may be computed in several passes over M."""

    def supports_row_ids(self) -> bool:
        """Whether input batched by reference (expert_row_ids) is understood."""
        return False

    def supports_cuda_graph(self) -> bool:
        """Whether a pass can be captured: static shapes, no host synchronisation."""
        return True

    @abstractmethod
    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """What is left to do with the output: nothing, or one of the strategies."""

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
        """Shapes of workspace13 (serves both GEMM outputs), workspace2 (the activation's) and the output."""

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        """The dtype of all three."""
        return act_dtype

    def activation(self, activation: MoEActivation | str, output: torch.Tensor, input: torch.Tensor) -> None:
        """Applies the activation: input `[..., 2N]` (or N), output `[..., N]`."""
        apply_activation(activation, input, output)

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """(E, M, N, K, topk): N = w1.size(1), all its rows; M = rows, of each expert for a batched input."""
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
        """Computes the experts and writes `output` in place; only rows that belong to an expert are read or written."""

"""The two contracts of a MoE layer and the object that joins them.

A prepare/finalize backend knows how rows travel; experts know how they are computed; neither knows the other. They
meet in one of two formats. `FusedMoEModularKernel` runs prepare -> experts -> finalize and owns the scratch between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_ep import env
from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS
from moe_ep.stages import stage
from moe_ep.topk_weight_and_reduce import TopKWeightAndReduce
from moe_ep.workspace import workspace_manager


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


# (rows, their scales, metadata, global physical ids of the rows or None, their weights or None)
PrepareResult = tuple[
    torch.Tensor, torch.Tensor | None, ExpertTokensMetadata | None, torch.Tensor | None, torch.Tensor | None
]


class FusedMoEPrepareAndFinalize(ABC):
    """Moves rows to the ranks that hold their experts, and the results back."""

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


class FusedMoEModularKernel(nn.Module):
    """Joins a prepare/finalize backend with experts of the same format.

    Raises:
        ValueError: the two speak different formats.
    """

    def __init__(
        self,
        prepare_finalize: FusedMoEPrepareAndFinalize,
        fused_experts: FusedMoEPermuteExpertsUnpermute,
        shared_experts: nn.Module | None = None,
    ) -> None:
        super().__init__()
        ours, theirs = prepare_finalize.activation_format(), fused_experts.activation_format()
        if ours is not theirs:
            raise ValueError(
                f"prepare_finalize {type(prepare_finalize).__name__} speaks {ours.name} and fused_experts "
                f"{type(fused_experts).__name__} speaks {theirs.name}; choose two of the same activation format"
            )
        self.prepare_finalize = prepare_finalize
        self.fused_experts = fused_experts
        self.shared_experts = shared_experts
        self._side_stream: torch.cuda.Stream | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        inplace: bool = False,
        activation: MoEActivation | str = "silu",
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Runs the layer's experts on this rank's tokens; a collective step of all ranks of the backend's group.

        Args:
            hidden_states: `[T, K]`; T may be 0.
            w1, w2: local weights, in the layout of the experts.
            topk_weights: f32 `[T, topk]`.
            topk_ids: `[T, topk]`, global physical ids, -1 for none.
            inplace: write the result over hidden_states.
            global_num_experts: ids that can occur; -1 means the local ones are all there are.
            shared_experts_input: what the shared experts read; None means hidden_states.

        Returns:
            `[T, K]`, or (shared output, `[T, K]`) where there are shared experts.
        """
        if apply_router_weight_on_input and topk_ids.size(-1) != 1:
            raise ValueError(
                f"apply_router_weight_on_input needs top_k 1 and topk_ids has {topk_ids.size(-1)} columns; "
                f"apply the weights on the output instead"
            )
        if global_num_experts == -1:
            global_num_experts = w1.size(0)
        shared_input = hidden_states if shared_experts_input is None else shared_experts_input
        shared_output = self._start_shared_experts(shared_input)
        if inplace:
            self._join_shared_experts(shared_output)
        output = hidden_states if inplace else torch.empty_like(hidden_states)

        with stage("dispatch"):
            rows, row_scales, meta, ids, weights = self.prepare_finalize.prepare(
                hidden_states,
                topk_weights,
                topk_ids,
                global_num_experts,
                expert_map,
                apply_router_weight_on_input,
                self.fused_experts.quant_config,
            )
        ids = topk_ids if ids is None else ids
        weights = topk_weights if weights is None else weights
        with stage("experts"):
            expert_output = self._run_experts(
                hidden_states.dtype, rows, row_scales, meta, ids, weights, w1, w2,
                activation, global_num_experts, expert_map, apply_router_weight_on_input,
            )  # fmt: skip
        with stage("combine"):
            self.prepare_finalize.finalize(
                output,
                expert_output,
                weights,
                ids,
                apply_router_weight_on_input,
                self.fused_experts.finalize_weight_and_reduce_impl(),
            )
        if shared_output is None:
            return output
        self._join_shared_experts(shared_output)
        return shared_output, output

    def _run_experts(
        self,
        act_dtype: torch.dtype,
        rows: torch.Tensor,
        row_scales: torch.Tensor | None,
        meta: ExpertTokensMetadata | None,
        ids: torch.Tensor,
        weights: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        activation: MoEActivation | str,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
    ) -> torch.Tensor:
        """The experts on everything that arrived, in as many passes over M as the chunk size asks for."""
        experts = self.fused_experts
        E, M, N, K, topk = experts.moe_problem_size(rows, w1, w2, ids)
        standard = experts.activation_format() is FusedMoEActivationFormat.Standard
        chunk = min(M, env.CHUNK_SIZE.get()) if standard and experts.supports_chunking() else M

        def shapes(num_rows: int) -> tuple[tuple[int, ...], ...]:
            return experts.workspace_shapes(num_rows, N, K, topk, global_num_experts, E, meta, activation)

        scratch13, scratch2, _ = shapes(chunk)
        dtype = experts.workspace_dtype(act_dtype)
        workspace13, workspace2, output = workspace_manager().get(
            [(scratch13, dtype), (scratch2, dtype), (shapes(M)[2], dtype)], rows.device
        )
        if standard and M == 0:
            return output
        parts = [slice(None)] if chunk == M else [slice(start, start + chunk) for start in range(0, M, chunk)]
        for part in parts:
            experts.apply(
                output[part],
                rows[part],
                w1,
                w2,
                weights[part],
                ids[part],
                activation,
                global_num_experts,
                expert_map,
                None if row_scales is None else row_scales[part],
                experts.quant_config.a2_scale,
                workspace13,
                workspace2,
                meta if chunk == M else None,
                apply_router_weight_on_input,
            )
        return output

    def _start_shared_experts(self, shared_input: torch.Tensor) -> torch.Tensor | None:
        """Runs the shared experts beside the rest: on a stream of their own on a GPU."""
        if self.shared_experts is None:
            return None
        if not shared_input.is_cuda:
            return self.shared_experts(shared_input)
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(shared_input.device)
        self._side_stream.wait_stream(torch.cuda.current_stream(shared_input.device))
        with torch.cuda.stream(self._side_stream):
            return self.shared_experts(shared_input)

    def _join_shared_experts(self, shared_output: torch.Tensor | None) -> None:
        if shared_output is None or self._side_stream is None:
            return
        current = torch.cuda.current_stream(shared_output.device)
        current.wait_stream(self._side_stream)
        shared_output.record_stream(current)


def make_prepare_finalize(
    backend: str,
    moe_config: FusedMoEConfig,
    quant_config: FusedMoEQuantConfig | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> FusedMoEPrepareAndFinalize:
    """A dispatch backend by name, with a capacity of `moe_config.max_num_tokens` per rank.

    Args:
        backend: a name of `moe_ep.registry.ALL2ALL_BACKENDS`, or "auto".
        process_group: the EP group, in ep_rank order; None for the default group.

    Raises:
        ValueError: an unknown name (the known ones are listed) or a group whose size is not ep_size.
        BackendUnavailableError: it cannot run on this machine.
        ImportError: an optional package is missing.
    """
    from moe_ep.backend_choice import choose_backend

    name = choose_backend(backend, moe_config, process_group)
    cls = ALL2ALL_BACKENDS.load(name)
    return cls(moe_config=moe_config, quant_config=quant_config, process_group=process_group)


def make_experts(
    name: str,
    moe_config: FusedMoEConfig,
    quant_config: FusedMoEQuantConfig | None = None,
    **kwargs: Any,
) -> FusedMoEPermuteExpertsUnpermute:
    """Experts by name of `moe_ep.registry.EXPERTS`; keyword arguments go to the class.

    Raises:
        ValueError: an unknown name; the known ones are listed.
    """
    return EXPERTS.load(name)(moe_config, quant_config, **kwargs)

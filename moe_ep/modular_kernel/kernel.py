"""The modular kernel, which joins a dispatch backend with experts, and factories that create either by name.

`FusedMoEModularKernel` runs dispatch -> experts -> combine and owns the scratch in between. The contracts of the two
sides are in `moe_ep.modular_kernel.contracts`, the reduce strategies in `moe_ep.modular_kernel.weight_and_reduce`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_ep import env
from moe_ep.activation import MoEActivation
from moe_ep.arguments import check_local_experts, check_no_gradients, check_tensors
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.distributed.process_groups import check_member
from moe_ep.errors import ConfigError, check_flags, check_router_weight_on_input, check_whole
from moe_ep.modular_kernel.adapters import as_dispatcher, as_experts, check_backend
from moe_ep.modular_kernel.choice import choose_backend
from moe_ep.modular_kernel.contracts import (
    Dispatched,
    ExpertsCall,
    FusedMoEActivationFormat,
    FusedMoEPermuteExpertsUnpermute,
    FusedMoEPrepareAndFinalize,
    Routing,
)
from moe_ep.modular_kernel.invariant_ops import invariant_ops
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceNoOP
from moe_ep.modular_kernel.workspace import Request, num_bytes, workspace_manager
from moe_ep.observability.stages import stage
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS


class FusedMoEModularKernel(nn.Module):
    """Joins a prepare/finalize backend with experts of the same activation format.

    Every pass checks what a user-defined backend or experts return against the contract, and errors name the class
    (`moe_ep.modular_kernel.adapters`).

    Args:
        f32_partial_sums: return f32 for f16 activations if the experts can: a rank's part of a sum over TP ranks may
            exceed 65504 although the sum does not.

    Raises:
        ValueError: the formats of backend and experts differ.
        TypeError: one of them is not an instance of its contract, or a method returns another type; shared_experts is
            not a module.
    """

    def __init__(
        self,
        prepare_finalize: FusedMoEPrepareAndFinalize,
        fused_experts: FusedMoEPermuteExpertsUnpermute,
        shared_experts: nn.Module | None = None,
        *,
        f32_partial_sums: bool = False,
    ) -> None:
        super().__init__()
        if shared_experts is not None and not callable(shared_experts):
            raise TypeError(f"shared_experts is {shared_experts!r}; it must be a module from [T, K] to [T, K], or None")
        self._dispatcher, self._experts = as_dispatcher(prepare_finalize), as_experts(fused_experts)
        rows_as, experts_as = prepare_finalize.activation_format(), fused_experts.activation_format()
        if rows_as is not experts_as:
            raise ValueError(
                f"prepare_finalize is {type(prepare_finalize).__name__} with activation format {rows_as.name} and "
                f"fused_experts is {type(fused_experts).__name__} with {experts_as.name}; choose two of the same format"
            )
        varies = prepare_finalize.depends_on_batch()
        if fused_experts.moe_config.batch_invariant and varies is not None:
            raise ConfigError(
                f"batch_invariant is set and prepare_finalize is {type(prepare_finalize).__name__}, which cannot keep "
                f"it: {varies}"
            )
        overlaps = prepare_finalize.overlaps_experts()
        if overlaps and (refusal := fused_experts.refuses_overlap()) is not None:
            raise ConfigError(
                f"overlap is True and fused_experts is {type(fused_experts).__name__}: {refusal}; choose overlap=False "
                f"(MOE_EP_OVERLAP=0)"
            )
        # The most rows computed at a time; None for all at once.
        is_chunked = rows_as is FusedMoEActivationFormat.Standard and fused_experts.supports_chunking() and not overlaps
        self._chunk_size = env.CHUNK_SIZE.get() if is_chunked else None
        self._most_rows = prepare_finalize.most_rows()
        # The slots of all chunks would take more memory than chunking saves.
        is_whole = self._chunk_size is None or (self._most_rows or self._chunk_size) <= self._chunk_size
        if overlaps or (prepare_finalize.sums_slots() and is_whole):
            fused_experts.leave_slots()
        if fused_experts.supports_row_ids():
            prepare_finalize.hand_over_row_ids()
        if rows_as is FusedMoEActivationFormat.Standard:
            prepare_finalize.pad_rows()
        self.prepare_finalize = prepare_finalize
        self.fused_experts = fused_experts
        self.shared_experts = shared_experts
        self._standard = rows_as is FusedMoEActivationFormat.Standard
        reduce_impl = fused_experts.finalize_weight_and_reduce_impl()
        self._finished_rows = prepare_finalize.finalize_only_copies() and reduce_impl == TopKWeightAndReduceNoOP()
        # In f16 layers an expert's own output may exceed the range although the weighted sum does not.
        self._f32_output = fused_experts.supports_f32_output() and prepare_finalize.accepts_f32_output()
        is_f16 = fused_experts.moe_config.in_dtype is torch.float16
        can_return_f32 = is_f16 and self._finished_rows and fused_experts.supports_f32_output()
        self._f32_partial_sums = f32_partial_sums and can_return_f32
        # The most tokens for which a kernel of the backend or experts may make the router's choice.
        self.most_deferred_tokens = prepare_finalize.most_deferred_tokens()
        if self._standard:
            self.most_deferred_tokens = min(self.most_deferred_tokens, fused_experts.most_deferred_tokens())
        self._peer_build = prepare_finalize.peer_build()
        # The backend hands 8-bit rows over as codes only to experts that read them so.
        quant_config = fused_experts.quant_config
        keeps_codes = fused_experts.takes_quantized_rows()
        self._quant_config = quant_config if keeps_codes else quant_config.with_input_dtype(None)
        # The scratch size for the largest number of rows, by the shapes that determine it.
        self._least_bytes: dict[tuple[object, ...], int] = {}
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
        deferred: Any = None,
        most_tokens: int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Runs the layer's experts on this rank's tokens; all ranks of the backend's group must call it.

        Args:
            hidden_states: `[T, K]`; T may be 0.
            w1, w2: local weights, in the experts' layout.
            topk_weights: f32 `[T, topk]`.
            topk_ids: `[T, topk]`, global physical ids, -1 for no expert.
            inplace: write the result over hidden_states.
            global_num_experts: number of ids that can occur; -1 means all experts are local.
            expert_map: int32 `[global_num_experts]`, global -> local, -1 if not local; None means all experts are
                local, or in the batched format that the backend knows where they are.
            shared_experts_input: the input of the shared experts; None means hidden_states.
            deferred, most_tokens: as in `Routing`.

        Returns:
            `[T, K]`, contiguous unless inplace, or (shared output, `[T, K]`) if there are shared experts.

        Raises:
            ValueError: more ids than w1 has experts, and no expert_map; a map on the host that names other experts than
                w1 has.
            TypeError: inplace or apply_router_weight_on_input is not a bool.
            RuntimeError: hidden_states or topk_weights requires a gradient, and gradients are enabled.
        """
        try:
            check_flags(inplace=inplace, apply_router_weight_on_input=apply_router_weight_on_input)
            check_tensors(hidden_states=hidden_states, w1=w1, w2=w2, topk_weights=topk_weights, topk_ids=topk_ids)
            if w1.dim() < 2:
                raise ValueError(f"w1 is of shape {tuple(w1.shape)}; it must have dimensions of experts and of rows")
            if not isinstance(global_num_experts, int):
                check_whole(global_num_experts=global_num_experts)
            check_no_gradients("the experts of the modular kernel", hidden_states, topk_weights)
            if apply_router_weight_on_input:
                check_router_weight_on_input(topk_ids.size(-1))
            routing = Routing(
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                num_experts=w1.size(0) if global_num_experts == -1 else global_num_experts,
                expert_map=expert_map,
                apply_router_weight_on_input=apply_router_weight_on_input,
                deferred=deferred,
                most_tokens=most_tokens,
                experts_combine=self._peer_build is not None and self.fused_experts.combines_batches(self._peer_build),
            )
            self._check_map(routing, self.fused_experts.num_local_experts(w1))
            shared_output = self._start_shared_experts(
                hidden_states if shared_experts_input is None else shared_experts_input
            )
            if inplace:
                self._join_shared_experts(shared_output)
            partial = torch.float32 if self._f32_partial_sums else hidden_states.dtype
            output = hidden_states if inplace else hidden_states.new_empty(hidden_states.shape, dtype=partial)
            experts = self.fused_experts
            with stage("dispatch"):
                if deferred is not None and topk_ids.size(0) > self.most_deferred_tokens:
                    deferred.settle()
                    routing.deferred = None
                dispatched = self._dispatcher.dispatch(hidden_states, routing, self._quant_config)
            with stage("experts"), invariant_ops(experts.moe_config.batch_invariant):
                target = None if inplace and dispatched.peers is None else output
                # Weights may require gradients, but scratch must not keep an autograd graph.
                with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
                    dtype = hidden_states.dtype
                    expert_output = self._run_experts(target, dtype, routing, dispatched, w1, w2, activation)
            with stage("combine"):
                reduce_impl = experts.finalize_weight_and_reduce_impl()
                self._dispatcher.combine(output, expert_output, dispatched, reduce_impl)
        except Exception as error:
            self.prepare_finalize.report_failure(error)
            raise
        if shared_output is None:
            return output
        self._join_shared_experts(shared_output)
        return shared_output, output

    def _check_map(self, routing: Routing, num_local_experts: int) -> None:
        if routing.expert_map is not None:
            check_local_experts(routing.expert_map, num_local_experts)
        elif self._standard and routing.num_experts > num_local_experts:
            raise ValueError(
                f"global_num_experts is {routing.num_experts}, w1 has {num_local_experts} experts and expert_map is "
                f"None, that is, all are local; pass the map of this rank's experts"
            )

    def _run_experts(
        self,
        target: torch.Tensor | None,
        act_dtype: torch.dtype,
        routing: Routing,
        dispatched: Dispatched,
        w1: torch.Tensor,
        w2: torch.Tensor,
        activation: MoEActivation | str,
    ) -> torch.Tensor:
        """Runs the experts on all rows that arrived, in chunks of at most MOE_EP_CHUNK_SIZE rows where they allow it.

        Args:
            target: the layer's output, if it may be written before all rows are read; the experts write it directly if
                their results are final, and it is contiguous and of their output's dtype.
        """
        rows, meta = dispatched.rows, dispatched.expert_tokens_meta
        ids = routing.topk_ids if dispatched.topk_ids is None else dispatched.topk_ids
        weights = routing.topk_weights if dispatched.topk_weights is None else dispatched.topk_weights
        if dispatched.rows_are_weighted and self._standard:
            weights = torch.ones_like(weights)
        experts = self._experts
        E, M, N, K, topk = experts.moe_problem_size(rows, w1, w2, ids)
        dtype, limit = experts.workspace_dtype(act_dtype), self._chunk_size
        in_f32 = self._f32_output or self._f32_partial_sums
        output_dtype = torch.float32 if act_dtype is torch.float16 and in_f32 else dtype
        is_finished = self._finished_rows or dispatched.peers is not None
        if target is not None and not (is_finished and target.dtype == output_dtype and target.is_contiguous()):
            target = None

        def requests(num_rows: int) -> tuple[Request, ...]:
            """Requests scratch for one chunk of that many rows, and the output of all chunks."""
            if dispatched.peers is not None:  # experts that combine a batch allocate what they need
                return ((0,), dtype), ((0,), dtype), ((M, K) if target is None else (0,), output_dtype)
            sizes = (N, K, topk, routing.num_experts, E, meta, activation)
            rows_at_once = num_rows if limit is None else min(num_rows, limit)
            scratch13, scratch2, shape = experts.workspace_shapes(rows_at_once, *sizes)
            if rows_at_once < num_rows:
                shape = experts.workspace_shapes(num_rows, *sizes)[2]
            return (scratch13, dtype), (scratch2, dtype), (shape if target is None else (0,), output_dtype)

        least_bytes = 0
        if self._most_rows is not None:
            key = (E, N, K, topk, dtype, activation)
            if key not in self._least_bytes:
                self._least_bytes[key] = num_bytes(*requests(self._most_rows))
            least_bytes = self._least_bytes[key]
        workspace13, workspace2, made = workspace_manager().get(rows.device, *requests(M), least_bytes=least_bytes)
        output = made if target is None else target
        if self._standard and M == 0:
            return output
        call = ExpertsCall(
            output, rows, w1, w2, weights, ids, routing.expert_map, activation, (workspace13, workspace2), meta,
            dispatched.row_scales, routing.num_experts, dispatched.rows_are_weighted, dispatched.arrival,
            dispatched.deferred, dispatched.peers,
        )  # fmt: skip
        if limit is None or limit >= M:
            experts.run(call)
            return output
        if call.deferred is not None:
            call.deferred.settle()
        scales = dispatched.row_scales
        for part in (slice(start, start + limit) for start in range(0, M, limit)):
            # The metadata describes all rows, so chunks do without it.
            experts.run(
                call._replace(
                    output=output[part],
                    hidden_states=rows[part],
                    topk_weights=weights[part],
                    topk_ids=ids[part],
                    meta=None,
                    deferred=None,
                    row_scales=None if scales is None else scales[part],
                )
            )
        return output

    def _start_shared_experts(self, shared_input: torch.Tensor) -> torch.Tensor | None:
        """Runs the shared experts; on a GPU on a separate stream, in parallel with the rest."""
        if self.shared_experts is None:
            return None
        if not shared_input.is_cuda:
            return self.shared_experts(shared_input)
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(shared_input.device)
        self._side_stream.wait_stream(torch.cuda.current_stream(shared_input.device))
        shared_input.record_stream(self._side_stream)
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
    """Creates a dispatch backend by name, with a capacity of `moe_config.max_num_tokens` per rank.

    Args:
        backend: a name from `moe_ep.registry.ALL2ALL_BACKENDS`, or "auto".
        process_group: the EP group, in ep_rank order; None for the default group.

    Raises:
        ValueError: an unknown name (the known ones are listed), a group whose size is not ep_size, or one that this
            process is not in.
        BackendUnavailableError: it cannot run on this machine; the message has the pip line of a missing package.
        TypeError: moe_config is not a FusedMoEConfig, or process_group not a process group.
    """
    _check_moe_config(moe_config)
    check_member(process_group)
    name = choose_backend(backend, moe_config, process_group)
    made: FusedMoEPrepareAndFinalize = ALL2ALL_BACKENDS.load(name)(
        moe_config=moe_config, quant_config=quant_config, process_group=process_group
    )
    check_backend(made)
    return made


def make_experts(
    name: str,
    moe_config: FusedMoEConfig,
    quant_config: FusedMoEQuantConfig | None = None,
    **kwargs: Any,
) -> FusedMoEPermuteExpertsUnpermute:
    """Creates experts by their name in `moe_ep.registry.EXPERTS`; keyword arguments are passed to the class.

    Raises:
        ValueError: an unknown name; the known ones are listed.
        TypeError: moe_config or quant_config has another type.
    """
    _check_moe_config(moe_config)
    return EXPERTS.load(name)(moe_config, quant_config, **kwargs)


def _check_moe_config(moe_config: FusedMoEConfig) -> None:
    if not isinstance(moe_config, FusedMoEConfig):
        raise TypeError(f"moe_config is {moe_config!r}; it must be a FusedMoEConfig, as the moe_config of a layer")

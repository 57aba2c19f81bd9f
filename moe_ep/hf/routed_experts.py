"""The MoE layer for models that route by themselves: it takes weights and ids in place of router logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from moe_ep import env
from moe_ep.arguments import check_no_gradients, check_tensors
from moe_ep.eplb.mapping import eplb_map_to_physical_and_record
from moe_ep.errors import check_at_least
from moe_ep.hf.choices import count_choices, pack_choices, unpack_choices
from moe_ep.hf.replay import CallGraphs, may_capture
from moe_ep.layer import FusedMoE
from moe_ep.layer.custom_ops import operator, without_autocast
from moe_ep.modular_kernel import FusedMoEModularKernel, FusedMoEPrepareAndFinalize, make_prepare_finalize
from moe_ep.observability import stages
from moe_ep.observability.stages import stage

if TYPE_CHECKING:
    from moe_ep.hf.steps import Step, StepCoordinator


class RoutedExperts(FusedMoE):
    """The routed experts of one layer, divided over ranks, for choices that somebody else made.

    Takes the arguments of `FusedMoE` that do not concern routing, and:

    Args:
        coordinator: knows the step that all ranks are making, which spares each layer the question how many tokens
            the others have. None where the ranks call their layers in lockstep by themselves.
        decode_max_num_tokens: with it, steps in which no rank has more tokens than this travel by a second backend of
            that capacity, which a CUDA graph can hold; all others by the layer's own.
        decode_backend: its name.
        num_identities: experts that return what they read, whose ids follow the others'.

    Attributes:
        load: int64 `[num_physical]`, rows that this rank sent to each physical expert since `counts_load` was set.
        row_mask: bool `[T]`, rows that count; the others go to no expert. None where all do.
    """

    load: torch.Tensor
    # The base class asks for its backend while it is made, before these are known.
    _coordinator: StepCoordinator | None = None
    _kernels = ("_modular_kernel", "_decode_kernel")
    _backends = ("_prepare_finalize", "_decode_prepare_finalize")
    _decode_max_num_tokens: int | None = None

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
        # Choices travel in the place of router logits.
        self.num_router_columns = self.moe_config.experts_per_token
        self._coordinator = coordinator
        self._decode_max_num_tokens = decode_max_num_tokens
        self._decode_backend = decode_backend
        self._num_identities = num_identities
        self._decode_prepare_finalize: FusedMoEPrepareAndFinalize | None = None
        self._decode_kernel: FusedMoEModularKernel | None = None
        self._graphs, self._replay_tokens = CallGraphs(), env.REPLAY_MAX_TOKENS.get()
        self.counts_load = False
        self.row_mask: torch.Tensor | None = None
        self.register_buffer("load", torch.zeros(self.moe_config.num_experts, dtype=torch.int64), persistent=False)

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
        check_no_gradients(f"the experts of {self.layer_name}", hidden_states, topk_weights)
        if not hidden_states.is_floating_point():
            raise ValueError(f"hidden_states is {hidden_states.dtype}; it must be of a float dtype")
        rows = hidden_states.to(self.moe_config.in_dtype)
        output = self._run(rows, topk_ids, topk_weights).to(hidden_states.dtype)
        if self._num_identities:
            is_identity = topk_ids >= self.num_experts
            kept = hidden_states * topk_weights.masked_fill(~is_identity, 0.0).sum(-1, keepdim=True)
            # Rows of other tokens need not be finite.
            output += torch.where(is_identity.any(-1, keepdim=True), kept, 0.0)
        return output

    def forward_routed(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """The body of the graph node: the routed output, without identity experts."""
        inputs = hidden_states, topk_ids, topk_weights
        with self._called():
            # Of a compiled model, which runs the node between its CUDA graphs if there are other ranks.
            if self._spans_ranks() and self._may_replay(hidden_states):
                return self._replayed(*inputs)
            return self._eagerly(*inputs)

    def _eagerly(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        shape = (*hidden_states.shape[:1], self.moe_config.experts_per_token)
        if hidden_states.dim() == 2 and (topk_ids.shape != shape or topk_weights.shape != shape):
            raise ValueError(
                f"topk_ids has shape {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)}; with these "
                f"hidden_states the layer {self.layer_name} takes {shape} of both"
            )
        with stage("route"):
            choices = pack_choices(topk_ids, topk_weights, self.num_experts, self.row_mask)
        return cast(torch.Tensor, self.forward_impl(hidden_states, choices))

    def _run(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The graph node; a replay of its body where that has run so before."""
        if torch.compiler.is_compiling() or not self._may_replay(inputs[0]):
            return operator("moe_forward_routed", self.layer_name)(*inputs, self.layer_name)
        with torch.no_grad(), without_autocast(), self._called():  # as in the node
            return self._replayed(*inputs)

    def _called(self) -> AbstractContextManager[None]:
        return nullcontext() if self._coordinator is None else self._coordinator.calling(self)

    def _replayed(self, *inputs: torch.Tensor) -> torch.Tensor:
        """A call of few tokens."""
        self.check_loaded()
        around = None
        if self._spans_ranks():
            around = self._around_replay()
            if around is None:
                return self._eagerly(*inputs)
        made_for = self._modular_kernel, self._decode_kernel, *self._addresses(), *self._addresses_of_tables()
        return self._graphs.run(self._eagerly, inputs, which=self.is_decode_step, of=made_for, around=around)

    def _may_replay(self, rows: torch.Tensor) -> bool:
        """Whether a graph can stand for this call: what follows from it is the output, and the load that EPLB counts,
        of these inputs and the other ranks'."""
        least = 0 if self._spans_ranks() else 1
        return (
            self._replay_tokens > 0
            and may_capture(rows.device)
            and rows.dim() == 2
            and least <= rows.size(0) <= self._replay_tokens
            and not (self.counts_load or stages.are_listened_to())
            and self.row_mask is None
            and self.shared_experts is None
            and self._parts_support_cuda_graph()
        )

    def _around_replay(self) -> AbstractContextManager[None] | None:
        """What a replay of this call, which other ranks take part in, runs in; None where none can stand for it. It
        must be one pass through the backend, whatever the other ranks bring."""
        step, capacity = self._step, self.prepare_finalize.max_num_tokens_per_rank()
        if step is None or capacity is None or step.most_tokens > capacity:
            return None
        return self.prepare_finalize.around_replay()

    def _addresses_of_tables(self) -> Iterator[int]:
        """Of those that EPLB writes to, which graphs read and kernels are given."""
        if self.eplb_state is not None:
            yield from (tensor.data_ptr() for tensor in self.eplb_state._buffers.values() if tensor is not None)

    def _forget_kernels(self) -> None:
        super()._forget_kernels()
        self._graphs.clear()

    def serve(self) -> None:
        """This layer's part of a step in which this rank has no tokens."""
        device, top_k = self.load.device, self.moe_config.experts_per_token
        nothing = torch.empty(0, self.moe_config.hidden_dim, dtype=self.moe_config.in_dtype, device=device)
        self(nothing, torch.empty(0, top_k, dtype=torch.int32, device=device), torch.empty(0, top_k, device=device))

    def _select_experts(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        choices: torch.Tensor,
        *,
        indices_type: torch.dtype | None,
        enable_eplb: bool,
        e_score_correction_bias: None,
        **eplb: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Stands in for `select_experts`: the choices are made, physical ids are what is left to find."""
        weights, ids = unpack_choices(choices)
        if enable_eplb:
            ids = eplb_map_to_physical_and_record(
                ids,
                eplb["expert_load_view"],
                eplb["logical_to_physical_map"],
                eplb["logical_replica_count"],
                ep_rank=self.parallel_config.token_rank,
                ep_size=self.parallel_config.ep_size,
            )
        if self.counts_load:
            count_choices(ids, self.load)
        return weights, ids.to(indices_type or torch.int32), None

    def _check_inputs(self, hidden_states: torch.Tensor, choices: torch.Tensor) -> None:
        super()._check_inputs(hidden_states, choices[:, 0])

    @property
    def _step(self) -> Step | None:
        return None if self._coordinator is None else self._coordinator.current

    @property
    def is_decode_step(self) -> bool:
        """Whether the step under way travels by the second backend; the same on every rank."""
        step = self._step
        return (
            self._decode_max_num_tokens is not None
            and step is not None
            and step.most_tokens <= self._decode_max_num_tokens
        )

    @property
    def prepare_finalize(self) -> FusedMoEPrepareAndFinalize:
        """The backend that moves the rows of the step under way."""
        if not self.is_decode_step:
            return super().prepare_finalize
        if self._decode_prepare_finalize is None:
            moe_config = replace(self.moe_config, max_num_tokens=self._decode_max_num_tokens)  # type: ignore[arg-type]
            backend = self._decode_backend if moe_config.moe_parallel_config.use_all2all else "no_ep"
            self._decode_prepare_finalize = make_prepare_finalize(backend, moe_config, None, self.groups.ep)
        return self._decode_prepare_finalize

    @property
    def modular_kernel(self) -> FusedMoEModularKernel:
        """The backend of the step under way and the experts, joined when the weights are ready."""
        if not self.is_decode_step:
            return super().modular_kernel
        if self._decode_kernel is None:
            self.process_weights_after_loading()
            experts = self.quant_method.select_gemm_impl(self.prepare_finalize, self)
            self._keep_kernel("_decode_kernel", FusedMoEModularKernel(self.prepare_finalize, experts))
        return self._decode_kernel  # type: ignore[return-value]

    def _num_chunks(self, num_tokens: int, capacity: int, device: torch.device) -> int:
        step = self._step
        if step is None:
            return super()._num_chunks(num_tokens, capacity, device)
        return max(1, -(-step.most_tokens // capacity))

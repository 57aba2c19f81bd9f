"""The MoE layer of a parallelized model: it takes the weights and ids of the model's own router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moe_ep.arguments import check_tensors
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.errors import check_at_least
from moe_ep.hf.experts import ExpertsShape, expert_tensors
from moe_ep.hf.steps import Step, StepCoordinator
from moe_ep.layer.dispatcher import LayerDispatcher
from moe_ep.layer.elastic import ElasticSlots
from moe_ep.layer.fused_moe import FusedMoE
from moe_ep.modular_kernel import FusedMoEPrepareAndFinalize, make_prepare_finalize
from moe_ep.registry import choose_form
from moe_ep.routing.router import PrecomputedRouter


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

    Attributes:
        most_decode_tokens: the same number; -1 for None.
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
        self.most_decode_tokens = -1 if decode_max_num_tokens is None else decode_max_num_tokens
        self._decode_backend_name = decode_backend
        self._decode_backend: FusedMoEPrepareAndFinalize | None = None

    @property
    def step(self) -> Step | None:
        """The step under way."""
        return None if self.coordinator is None else self.coordinator.current

    @property
    def prepare_finalize(self) -> FusedMoEPrepareAndFinalize:
        """The backend of the step under way, the same on every rank."""
        step = self.step
        if step is None or step.most_tokens > self.most_decode_tokens:
            return super().prepare_finalize
        if self._decode_backend is None:
            moe_config = replace(self.method.moe_config, max_num_tokens=self.most_decode_tokens)
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
        precomputed: the router; its `row_mask` says which rows go to experts.
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
        self.counts_load = False
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
        if not hidden_states.is_floating_point():
            raise ValueError(f"hidden_states is {hidden_states.dtype}; it must be of a float dtype")
        rows = hidden_states.to(self.moe_config.in_dtype)
        return super().forward(rows, topk_weights=topk_weights, topk_ids=topk_ids).to(hidden_states.dtype)

    def _run(self, *inputs: Any, **options: Any) -> Any:
        coordinator = self.dispatcher.coordinator
        with nullcontext() if coordinator is None else coordinator.calling(self):
            return super()._run(*inputs, **options)

    def _may_replay(self, rows: torch.Tensor) -> bool:
        return not self.counts_load and super()._may_replay(rows)

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

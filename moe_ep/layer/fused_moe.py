"""The MoE layer: routes tokens and runs their experts, whichever rank holds them.

A layer is composed of parts that can be replaced and tested alone: a router (`moe_ep.routing.router`), a dispatcher
(`moe_ep.layer.dispatcher`), a quantization method that makes, loads and computes the experts (`moe_ep.layer.methods`),
and shared experts. A pass calls, in this order: forward -> torch.ops.moe_ep.moe_forward -> forward_node -> router ->
modular kernel -> dispatch.prepare, experts, dispatch.finalize.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_ep import env
from moe_ep.activation import MoEActivation
from moe_ep.arguments import check_id_range, check_integers, check_no_gradients, check_tensors
from moe_ep.config import (
    DispatchConfig,
    ExpertsConfig,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingConfig,
    RoutingFunction,
)
from moe_ep.distributed.process_groups import LayerGroups, resolve_parallel_config
from moe_ep.eplb.mapping import eplb_map_to_physical_and_record
from moe_ep.errors import ConfigError, MoeEpError, check_router_weight_on_input, check_whole
from moe_ep.expert_map import determine_expert_map
from moe_ep.fixed_tensors import table_device
from moe_ep.layer.batch_balance import BatchBalance, BatchBalancer, Thresholds
from moe_ep.layer.custom_ops import operator, register_layer, without_autocast
from moe_ep.layer.dispatcher import LayerDispatcher
from moe_ep.layer.expert_slots import ExpertSlots, LayerEplbState
from moe_ep.layer.interface import MoELayer
from moe_ep.layer.methods.base import make_method
from moe_ep.layer.replay import CallGraphs, bucket, may_capture
from moe_ep.layer.weight_loading import (
    ExpertMapping,
    ExpertWeightLoader,
    check_mapping,
    make_expert_params_mapping,
    matching_rows,
)
from moe_ep.modular_kernel import FusedMoEModularKernel, FusedMoEPrepareAndFinalize
from moe_ep.modular_kernel.invariant_ops import invariant_ops
from moe_ep.observability.stages import are_listened_to, hears_routing, stage, tell_routing
from moe_ep.quantization.input_rows import InputRows, resolve_input_dtype
from moe_ep.routing.router import PrecomputedRouter, Router, TopKRouter, append_shared_experts

if TYPE_CHECKING:
    from moe_ep.checkpoint.reader import CheckpointReader

# Held by the thread that prepares a layer for its first pass; passes of other threads wait for it.
_FIRST_USE = threading.RLock()


class ModularKernels:
    """The modular kernels of a layer, one for each of its backends.

    Their experts keep references to the layer's scales and biases, so they are dropped when those are replaced. A copy
    of the layer makes its own.
    """

    def __init__(self) -> None:
        # Keyed by id(backend); the kernel keeps its backend alive.
        self._by_backend: dict[int, FusedMoEModularKernel] = {}
        # The addresses of the tensors that the kernels were made for.
        self._made_for: tuple[int, ...] = ()

    def get(self, backend: FusedMoEPrepareAndFinalize) -> FusedMoEModularKernel | None:
        return self._by_backend.get(id(backend))

    def keep(self, kernel: FusedMoEModularKernel, addresses: tuple[int, ...]) -> None:
        if self.are_stale(addresses):
            self.clear()
        self._made_for = addresses
        self._by_backend[id(kernel.prepare_finalize)] = kernel

    def are_stale(self, addresses: tuple[int, ...]) -> bool:
        """Whether there are kernels that were made for tensors at other addresses."""
        return bool(self._by_backend) and self._made_for != addresses

    def clear(self) -> None:
        self._by_backend = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModularKernels:
        return ModularKernels()

    def __reduce__(self) -> Any:
        return ModularKernels, ()


class FusedMoE(MoELayer):
    """A MoE layer with E routed experts, divided over the ranks of a process group; every token uses top_k of them.

    If no sizes are given, they come from torch.distributed: all ranks are data-parallel and form one EP group. With EP,
    each of the dp x tp ranks holds whole experts. Without it, TP divides N, and the output is a partial sum that
    `reduce_results` completes. If the ranks hold the same tokens (EP over plain TP ranks), each computes its own
    experts for all tokens, and the output is again a partial sum.

    Args:
        num_experts: logical routed experts E.
        top_k: experts per token.
        hidden_size, intermediate_size: K, and N of one expert.
        params_dtype: dtype of the activations and of plain weights; None means torch's default dtype. It is fixed:
            `.to(dtype)` does not cast the layer.
        reduce_results: all-reduce the output over the TP ranks if it is a partial sum; otherwise the caller must.
        renormalize, use_grouped_topk, num_expert_group, topk_group, custom_routing_function, scoring_func,
            routed_scaling_factor, e_score_correction_bias: as in `moe_ep.routing.select_experts`. The bias may be the
            router's own parameter, loaded later, or the router itself: its attribute of that name is read in every
            pass, so it may be replaced, as `load_state_dict(assign=True)` does. It is not saved with the layer.
        apply_router_weight_on_input: multiply the rows by their weights before they are sent; needs top_k 1.
        activation: a `MoEActivation` or its name.
        swiglu_limit: clamp limit of gate and up in a gated activation (`moe_ep.activation.gate_limit`); None for the
            activation's own limit, if it has one.
        tp_size, dp_size, ep_size, is_sequence_parallel: how the ranks divide the layer (`FusedMoEParallelConfig.make`).
        enable_eplb: map ids to replicas and record the load, for an `EPLBManager`.
        has_bias: the experts have biases, w13_bias `[El, 2N]` and w2_bias `[El, K]`.
        all2all_backend: a name from the dispatch registry; "auto" takes MOE_EP_ALL2ALL_BACKEND if it is set, and
            otherwise chooses.
        quant_config: an object whose `quant_method` names the quantization method; None for plain weights.
        prefix: the layer's name in graphs and messages; generated if empty, made unique if already taken.
        num_redundant_experts: physical experts beyond E, which EPLB uses for replicas.
        zero_expert_num: identity experts, the last columns of the router logits.
        expert_mapping: the mapping that `load_weights` uses, from `make_expert_params_mapping`.
        n_shared_experts: fused shared experts, computed like routed experts that every token uses with weight 1.
        shared_experts: a module from `[T, K]` to `[T, K]`, complete on every rank, whose output is added.
        process_group: the layer's dp_size * tp_size ranks; None for the default group.
        parallel_config: all sizes and this rank's place, instead of the separate arguments.
        max_num_tokens: capacity of a fixed-capacity backend, in tokens per rank and pass.
        dispatch_dtype: dtype of rows on the wire: None for that of the activations, torch.float8_e4m3fn or torch.int8.
            Experts that read such rows (`input_dtype`) get them as they were sent.
        router: replaces the router that the routing arguments describe, which must then be left out; a model that
            routes by itself needs none (`forward`).
        experts: a name from the experts registry that fits the backend's format; "auto" chooses.
        input_dtype: the dtype to which quantized experts round their input rows. torch.int8 or torch.float8_e4m3fn:
            always on CPUs, and on GPUs where that is faster (large M per expert). "checkpoint": the dtype that the
            checkpoint was made for, on GPUs only and where that is faster. "none", or the activations' dtype: rows are
            not rounded. None takes it from MOE_EP_INPUT_DTYPE, whose default is checkpoint.
        batch_invariant: a token's result has the same bits whatever the other tokens are, whichever rank it is on and
            wherever its experts are (docs/rollouts.md); None takes it from MOE_EP_BATCH_INVARIANT.
        batch_balance: "auto" copies hot experts to other ranks for one large batch where that pays (docs/eplb.md),
            "off" never does; a `BatchBalance` sets the smallest batch and the number of slots.

    Raises:
        ValueError: sizes, names or options that do not fit together.
        BackendUnavailableError: the backend cannot run on this machine.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        quant_config: Any = None,
        tp_size: int | None = None,
        ep_size: int | None = None,
        dp_size: int | None = None,
        prefix: str = "",
        custom_routing_function: RoutingFunction | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: torch.Tensor | nn.Module | None = None,
        apply_router_weight_on_input: bool = False,
        activation: MoEActivation | str = "silu",
        enable_eplb: bool = False,
        num_redundant_experts: int = 0,
        has_bias: bool = False,
        is_sequence_parallel: bool = False,
        zero_expert_num: int = 0,
        zero_expert_type: str | None = None,
        expert_mapping: ExpertMapping | None = None,
        n_shared_experts: int | None = None,
        all2all_backend: str = "auto",
        shared_experts: nn.Module | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        parallel_config: FusedMoEParallelConfig | None = None,
        max_num_tokens: int = 256,
        expert_placement_strategy: str = "linear",
        dispatch_dtype: torch.dtype | None = None,
        experts: str = "auto",
        swiglu_limit: float | None = None,
        input_dtype: torch.dtype | str | None = None,
        router: Router | None = None,
        batch_invariant: bool | None = None,
        batch_balance: str | BatchBalance = "auto",
    ) -> None:
        routing = RoutingConfig(
            top_k=top_k,
            renormalize=renormalize,
            use_grouped_topk=use_grouped_topk,
            num_expert_group=num_expert_group,
            topk_group=topk_group,
            custom_routing_function=custom_routing_function,
            scoring_func=scoring_func,
            routed_scaling_factor=routed_scaling_factor,
            zero_expert_num=zero_expert_num,
            zero_expert_type=zero_expert_type,
        )
        experts_config = ExpertsConfig(
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            params_dtype=params_dtype or torch.get_default_dtype(),
            activation=activation,
            swiglu_limit=swiglu_limit,
            has_bias=has_bias,
            quant_config=quant_config,
            num_redundant_experts=num_redundant_experts,
            enable_eplb=enable_eplb,
            num_fused_shared_experts=n_shared_experts or 0,
            implementation=experts,
            input_dtype=input_dtype,
            batch_invariant=env.BATCH_INVARIANT.get() if batch_invariant is None else batch_invariant,
        )
        dispatch = DispatchConfig(
            max_num_tokens=max_num_tokens,
            dispatch_dtype=dispatch_dtype,
            reduce_results=reduce_results,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        if apply_router_weight_on_input:
            check_router_weight_on_input(top_k + experts_config.num_fused_shared_experts)
        if expert_mapping is not None:
            check_mapping(expert_mapping)
        if shared_experts is not None and not callable(shared_experts):
            raise TypeError(f"shared_experts is {shared_experts!r}; it must be a module from [T, K] to [T, K]")
        if router is not None:
            _check_router(router, routing, e_score_correction_bias)
        parallel_config = resolve_parallel_config(
            parallel_config,
            process_group,
            tp_size=tp_size,
            dp_size=dp_size,
            ep_size=ep_size,
            is_sequence_parallel=is_sequence_parallel,
            all2all_backend=all2all_backend,
            expert_placement_strategy=expert_placement_strategy,
        )
        super().__init__()
        self._kernels = ModularKernels()
        self._graphs, self._replay_tokens = CallGraphs(), env.REPLAY_MAX_TOKENS.get()
        self.balancer: BatchBalancer | None = None
        # The torch wrapper that was found not to affect the layer.
        self._wrapper = 0
        self.layer_name = register_layer(self, prefix)
        self.parallel_config = parallel_config
        self._make_experts(experts_config, routing.top_k, dispatch.max_num_tokens, expert_mapping)
        self.router = TopKRouter(routing, num_experts, e_score_correction_bias) if router is None else router
        self.precomputed = router if isinstance(router, PrecomputedRouter) else PrecomputedRouter(num_experts, top_k)
        # Each wraps the router of a pass, for example to record its choices.
        self.router_wrappers: tuple[Callable[[Router], Router], ...] = ()
        self.shared_experts = shared_experts
        self.dispatch_config = dispatch
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.dispatch_dtype = dispatch_dtype
        self.dispatcher = LayerDispatcher(self.layer_name, dispatch, self.quant_method, process_group)
        self.balancer = BatchBalancer.make(self.quant_method, batch_balance)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str] | CheckpointReader,
        layer: int,
        dtype: torch.dtype | None = None,
        *,
        allow_nonfinite: bool = False,
        **options: Any,
    ) -> Self:
        """Makes one MoE layer of a checkpoint and loads it, reading only the byte ranges of this rank's experts.

        Sizes, activation, routing, quantization and the router's correction bias come from the checkpoint. The router's
        matrix and shared experts are not loaded: they belong to the model around the layer (`MoEStack` has them).

        Args:
            path: the checkpoint's folder, or a reader of it.
            layer: the layer's index among all layers of the model, dense ones included.
            dtype: dtype of the activations and of plain weights; None for the config's.
            allow_nonfinite: whether weights may hold NaN or infinity; a reader has its own setting.
            options: arguments of `FusedMoE`, such as sizes of the parallel groups, which override the checkpoint's.

        Raises:
            CheckpointError: a checkpoint that does not hold what its config says.
            ValueError: a layer without experts, or options that do not fit, such as another num_experts.
            TypeError: a layer that is not a whole number, or an unknown option.

        Example:
            >>> layer = FusedMoE.from_checkpoint("path/to/checkpoint", layer=3, dtype=torch.bfloat16)
        """
        from moe_ep.checkpoint import CheckpointReader, layer_options, load_moe_layer, model_spec

        check_whole(layer=layer)
        opened = nullcontext(path) if isinstance(path, CheckpointReader) else CheckpointReader(path, allow_nonfinite)
        with opened as reader:
            spec = model_spec(reader.config, reader)
            if (num_experts := options.get("num_experts", spec.num_experts)) != spec.num_experts:
                raise ConfigError(
                    f"num_experts is {num_experts!r} and the checkpoint has {spec.num_experts} experts; leave it out"
                )
            made = cls(**layer_options(reader, spec, layer, dtype) | options)
            load_moe_layer(reader, spec, layer, made)
        return made

    @torch.inference_mode(False)  # passes update its tensors (EPLB's loads) in or out of inference mode
    def _make_experts(
        self, config: ExpertsConfig, top_k: int, max_num_tokens: int, expert_mapping: ExpertMapping | None
    ) -> None:
        """Places the experts on the ranks and creates the parameters of this rank's experts."""
        parallel, redundant = self.parallel_config, config.num_redundant_experts
        num_shared = config.num_fused_shared_experts
        self.num_experts, self.num_redundant_experts = config.num_experts, redundant
        self.num_fused_shared_experts = num_shared
        self.activation = MoEActivation.parse(config.activation)
        self.experts = config.implementation
        self.input_dtype = resolve_input_dtype(config.input_dtype, config.params_dtype)
        self.expert_mapping = expert_mapping
        _check_redundancy(config, parallel)
        self.eplb_state = LayerEplbState(config.num_experts, redundant) if config.enable_eplb else None
        num_physical = config.num_experts + redundant
        check_id_range(num_physical + num_shared, torch.int32)
        expert_map = _expert_map(parallel, num_physical, num_shared)
        there = None if expert_map is None else expert_map.to(table_device())
        self.register_buffer("expert_map", there, persistent=False)
        self.slots = ExpertSlots(
            num_experts=config.num_experts,
            num_redundant_experts=redundant,
            num_fused_shared_experts=num_shared,
            expert_map=expert_map,
            replicas=None if self.eplb_state is None else self.eplb_state.replicas,
        )
        num_parts = parallel.tp_size if parallel.shards_experts else 1
        if config.intermediate_size % num_parts:
            raise ValueError(
                f"intermediate_size is {config.intermediate_size}; without expert parallelism it must be a multiple of "
                f"tp_size ({num_parts})"
            )
        self.moe_config = FusedMoEConfig(
            num_experts=num_physical,
            experts_per_token=top_k,
            hidden_dim=config.hidden_size,
            intermediate_size_per_partition=config.intermediate_size // num_parts,
            num_local_experts=self.slots.num_local,
            moe_parallel_config=parallel,
            in_dtype=config.params_dtype,
            max_num_tokens=max_num_tokens,
            activation=self.activation,
            swiglu_limit=config.swiglu_limit,
            has_bias=config.has_bias,
            num_fused_shared_experts=num_shared,
            batch_invariant=config.batch_invariant,
        )
        self.loader = ExpertWeightLoader(
            name=self.layer_name,
            slots=self.slots,
            gated=self.activation.is_gated,
            tp_rank=parallel.tp_rank if parallel.shards_experts else 0,
            tp_size=num_parts,
        )
        self.quant_method = make_method(self.moe_config, config.quant_config)
        if config.enable_eplb and not self.quant_method.supports_eplb:
            raise ConfigError(
                f"enable_eplb is set and {type(self.quant_method).__name__} cannot move experts; unset it"
            )
        self.quant_method.create_weights(
            self,
            num_experts=self.slots.num_local,
            hidden_size=config.hidden_size,
            intermediate_size_per_partition=self.moe_config.intermediate_size_per_partition,
            params_dtype=config.params_dtype,
        )
        self._processed = self._reloading = False
        self._refused = ""

    # ---- A pass

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
        *,
        topk_weights: torch.Tensor | None = None,
        topk_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the layer's output `[T, K]`. All ranks of the layer must call it; T may differ between them and be 0.

        A model that routes by itself passes topk_weights and topk_ids in place of router_logits. A layer on a single
        rank may be called by several threads at once.

        Args:
            hidden_states: `[T, K]` of params_dtype, any strides; the output is contiguous.
            router_logits: `[T, E + zero_expert_num]`, f32, f16 or bf16.
            topk_weights: `[T, top_k]`, any float dtype.
            topk_ids: integer `[T, top_k]`, logical; ids outside of [0, E) mean no expert.

        Raises:
            ValueError: shapes or dtypes that do not fit the layer, or neither or both of logits and choices; under
                CUDA-graph capture, T above the capacity.
            RuntimeError: the weights are only partly loaded, or an input requires a gradient.
        """
        given = hidden_states, router_logits, topk_weights, topk_ids
        if torch.compiler.is_compiling():
            name, router, inputs = self._checked(*given)
        else:
            with self.groups:
                name, router, inputs = self._checked(*given)
                if self._may_replay(hidden_states):
                    no_grad = torch.no_grad() if torch.is_grad_enabled() else nullcontext()
                    with no_grad, without_autocast():  # as in the node
                        return cast(torch.Tensor, self._run(router, hidden_states, *inputs, may_replay=True))
        if self.shared_experts is None:
            return operator(name, self.layer_name)(hidden_states, *inputs, self.layer_name)
        shared, routed = operator(f"{name}_shared", self.layer_name)(hidden_states, *inputs, self.layer_name)
        # If the caller still has to sum over the TP ranks, only one of them may add the shared output.
        if self.dispatch_config.reduce_results or self.dispatcher.takes_complete_terms:
            routed = routed + shared
        return routed

    def _checked(
        self, hidden_states: torch.Tensor, router_logits: Any, topk_weights: Any, topk_ids: Any
    ) -> tuple[str, Router, tuple[torch.Tensor, ...]]:
        """Checks a call's inputs; returns its operator, its router, and the tensors that the router chooses by."""
        name, router, inputs = "moe_forward", self.router, {"router_logits": router_logits}
        if topk_weights is not None or topk_ids is not None:
            if router_logits is not None:
                raise ValueError("router_logits is given together with topk_weights or topk_ids; pass one or the other")
            inputs = {"topk_weights": topk_weights, "topk_ids": topk_ids}
            name, router = "moe_forward_routed", self.precomputed
        check_tensors(hidden_states=hidden_states, **inputs)
        first, *_ = values = tuple(inputs.values())
        check_no_gradients(f"the experts of {self.layer_name}", hidden_states, first)
        return name, router, values

    def forward_impl(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Like `forward` without a graph node. Returns the routed output, all-reduced if asked for; with shared
        experts, (shared, routed)."""
        self._checked(hidden_states, router_logits, None, None)
        return self.forward_node(hidden_states, router_logits)

    def forward_routed(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Like `forward_impl`, with the choices of the model's own router."""
        check_tensors(topk_weights=topk_weights, topk_ids=topk_ids)
        self._checked(hidden_states, None, topk_weights, topk_ids)
        return self.forward_node(hidden_states, topk_weights, topk_ids)

    def forward_node(
        self, hidden_states: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        router = self.router if len(inputs) == 1 else self.precomputed
        with self.groups:
            return self._run(router, hidden_states, *inputs)

    def _run(
        self, router: Router, hidden_states: torch.Tensor, *inputs: torch.Tensor, may_replay: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        # Inside a graph node, which torch.compile captures unless there are other ranks.
        if may_replay is None:
            may_replay = self.parallel_config.spans_ranks and self._may_replay(hidden_states)
        self.check_loaded()
        if self.parallel_config.spans_ranks:
            self._check_not_broadcast()
        self._drop_stale_kernels()
        self._check_inputs(router, hidden_states, *inputs)
        with invariant_ops(self.batch_invariant):
            shared, routed = self._in_chunks(router, hidden_states.contiguous(), *inputs, may_replay=may_replay)
        if self.dispatch_config.reduce_results:
            routed = self.dispatcher.all_reduce(routed).to(hidden_states.dtype)
        return routed if shared is None else (shared.contiguous(), routed)

    def _check_inputs(self, router: Router, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> None:
        """Raises ValueError for shapes, dtypes and devices that do not fit the layer and its router."""
        self.check_rows("hidden_states", hidden_states)
        try:
            router.check(hidden_states, *inputs)
        except ValueError as error:
            raise ValueError(f"{error}, of the layer {self.layer_name}") from None

    def forward_impl_chunked(
        self, full_hidden_states: torch.Tensor, full_router_logits: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Runs the tokens in chunks of at most the backend's capacity, or all at once if it has none.

        Every rank makes as many passes as the rank with the most tokens needs.

        Returns:
            (shared output or None, routed output), both `[T, K]`.
        """
        check_tensors(full_hidden_states=full_hidden_states, full_router_logits=full_router_logits)
        check_no_gradients(f"the experts of {self.layer_name}", full_hidden_states, full_router_logits)
        self.check_loaded()
        self._check_inputs(self.router, full_hidden_states, full_router_logits)
        return self._in_chunks(self.router, full_hidden_states, full_router_logits, may_replay=False)

    def _in_chunks(
        self, router: Router, hidden_states: torch.Tensor, *inputs: torch.Tensor, may_replay: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        for wrapped in self.router_wrappers:
            router = wrapped(router)
        num_tokens = hidden_states.size(0)
        # A call may be replayed only if it is not being captured now.
        is_captured = hidden_states.is_cuda and not may_replay and torch.cuda.is_current_stream_capturing()
        most_tokens = self.dispatcher.most_tokens_of_pass(num_tokens, is_captured)
        balanced = not is_captured and self._is_balanced(num_tokens, most_tokens, hidden_states.device)
        capacity = self.prepare_finalize.max_num_tokens_per_rank()
        if most_tokens is None or capacity is None or most_tokens <= capacity:
            most_tokens = self._filled_up(most_tokens, capacity)
            if may_replay and not balanced:
                routed = self._replayed(router, most_tokens, hidden_states, *inputs)
                if routed is not None:
                    return None, routed
            return self._forward_tokens(router, hidden_states, *inputs, balanced=balanced, most_tokens=most_tokens)
        chunks = []
        for start in range(0, most_tokens, capacity):
            part = slice(min(start, num_tokens), min(start + capacity, num_tokens))
            of_part, most = [tensor[part] for tensor in inputs], min(most_tokens - start, capacity)
            chunks.append(
                self._forward_tokens(
                    router.of_rows(part), hidden_states[part], *of_part, balanced=balanced, most_tokens=most
                )
            )
        shared = [shared for shared, _ in chunks if shared is not None]
        return torch.cat(shared) if shared else None, torch.cat([routed for _, routed in chunks])

    def _filled_up(self, most_tokens: int | None, capacity: int | None) -> int | None:
        """Returns the rows to which a replay over ranks with at most most_tokens is padded. Eager calls make room for
        as many, so that both choose the same kernels. Without a replay it returns most_tokens."""
        if most_tokens is None or capacity is None:
            return most_tokens
        num_rows = min(bucket(most_tokens), capacity)
        return num_rows if num_rows <= self._replay_tokens else most_tokens

    def _may_replay(self, rows: torch.Tensor) -> bool:
        """Whether a graph may stand in for calls with these rows: the only effects are the output and EPLB's load."""
        least = 0 if self.parallel_config.spans_ranks else 1
        return (
            rows.dim() == 2
            and least <= rows.size(0) <= self._replay_tokens
            and may_capture(rows.device)
            and not are_listened_to()
            and not self.router_wrappers
            and self.shared_experts is None
        )

    def _replayed(
        self, router: Router, num_rows: int | None, hidden_states: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns the output of a call that is replayed, or whose kind is captured after some calls; None if it may not
        be. Over several ranks, not all of which need to replay, graphs are padded to num_rows."""
        backend, around, reads = self.prepare_finalize, None, router.graph_key(hidden_states.device)
        if reads is None:
            return None
        if self.parallel_config.spans_ranks:
            fits = num_rows is not None and hidden_states.size(0) <= num_rows <= self._replay_tokens
            around = backend.around_replay() if fits else None
            if around is None:
                return None
        if self.eplb_state is not None:
            tables = self.eplb_state.buffers(recurse=False)
            reads = (*reads, *(tensor.data_ptr() for tensor in tables))

        def compute(row_mask: torch.Tensor | None, *held: torch.Tensor) -> torch.Tensor:
            chosen_by = router if row_mask is None else router.masked(row_mask)
            return self._forward_tokens(chosen_by, *held, balanced=False, most_tokens=num_rows)[1]

        given = (hidden_states, *inputs)
        return self._graphs.run(
            compute, given, (type(router), backend), reads, num_rows, around, self.parts_support_cuda_graph
        )

    def _is_balanced(self, num_tokens: int, most_tokens: int | None, device: torch.device) -> bool:
        """Whether to balance an uncaptured batch by its own counts; the same on every rank."""
        thresholds = self._balance_thresholds(device)
        if self.balancer is None or thresholds is None:
            return False
        # A chunk has no more tokens than the capacity.
        capacity = self.prepare_finalize.max_num_tokens_per_rank()
        if capacity is None or most_tokens is None:
            most = self.dispatcher.most_tokens(num_tokens)
        else:
            most = min(capacity, most_tokens)
        return self.balancer.takes(most * self.top_k, thresholds)

    def _balance_thresholds(self, device: torch.device) -> Thresholds | None:
        exchange = None if self.balancer is None else self.prepare_finalize.batch_exchange()
        if self.balancer is None or exchange is None:
            return None
        return self.balancer.thresholds(device, exchange.on_device)

    @property
    def balanced_from(self) -> int | None:
        """The smallest batch that may be balanced by its own counts, in tokens of the busiest rank; None for never."""
        # Before its weights are loaded, a layer may be on the meta device.
        thresholds = None if self.balancer is None else self._balance_thresholds(self.device)
        return None if thresholds is None else -(-thresholds.probed // self.top_k)

    def _forward_tokens(
        self,
        router: Router,
        hidden_states: torch.Tensor,
        *inputs: torch.Tensor,
        balanced: bool,
        most_tokens: int | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Returns (shared output, routed output) of one pass in which no rank has more than most_tokens tokens."""
        deferred = None if balanced else self._defer(router, hidden_states, *inputs)
        result = zero_expert_result = None
        known: dict[str, Any] = {}
        if most_tokens is not None and self.prepare_finalize.most_rows() is not None:
            if hidden_states.size(0) > most_tokens:  # other ranks would have no room for the rows
                raise ValueError(
                    f"hidden_states has {hidden_states.size(0)} rows and the ranks agreed on at most {most_tokens} "
                    f"tokens for this pass; give one_pass, or the model, as many tokens as its layers get rows"
                )
            known["most_tokens"] = most_tokens
        if deferred is not None:
            chosen = deferred.topk_weights, deferred.topk_ids
            result = self.quant_method.apply(self, hidden_states, *chosen, deferred=deferred, **known)
        else:
            with stage("route"):
                topk_weights, logical_ids, zero_expert_result = router.route(hidden_states, *inputs)
                topk_weights, topk_ids = self.to_physical(topk_weights, logical_ids)
            tell_routing(self, topk_ids)
            if balanced and self.balancer is not None:
                result = self.balancer.run(self, hidden_states, topk_weights, logical_ids)
            if result is None:
                result = self.quant_method.apply(self, hidden_states, topk_weights, topk_ids, **known)
        shared, routed = result if isinstance(result, tuple) else (None, result)
        if self.shared_experts is not None:
            self._check_shared(shared, routed)
        if zero_expert_result is not None and self.dispatcher.takes_complete_terms:
            routed += zero_expert_result
        return shared, routed

    def _defer(self, router: Router, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> Any:
        """Returns the choice that is left to the backend or the experts (`Routing.deferred`); None if the router makes
        it now."""
        if not hidden_states.is_cuda or self.eplb_state is not None or self.num_fused_shared_experts or hears_routing():
            return None
        if hidden_states.size(0) > self.modular_kernel.most_deferred_tokens:
            return None
        return router.defer(hidden_states, *inputs)

    def to_physical(self, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Maps logical ids to physical experts, records the load, and appends fused shared experts.

        Raises:
            ValueError: weights or ids that are not tensors, or ids that are not integers.
        """
        check_tensors(topk_weights=topk_weights, topk_ids=topk_ids)
        check_integers(topk_ids=topk_ids)
        parallel, eplb, num_shared = self.parallel_config, self.eplb_state, self.num_fused_shared_experts
        if eplb is not None:
            slots_per_rank = eplb.expert_load_view.numel() // parallel.ep_size
            topk_ids = eplb_map_to_physical_and_record(
                topk_ids,
                eplb.expert_load_view,
                *eplb.maps(topk_ids.numel(), slots_per_rank),
                ep_rank=parallel.token_rank,
                ep_size=parallel.ep_size,
            )
        if num_shared:
            first_id = self.moe_config.num_experts
            topk_weights, topk_ids = append_shared_experts(topk_weights, topk_ids, first_id, num_shared)
            if parallel.use_ep and not parallel.use_all2all:
                # TP ranks hold the same tokens and whole experts: each gives only its share of rows to shared experts.
                rows = torch.arange(topk_ids.size(0), device=topk_ids.device)
                topk_ids[:, -num_shared:].masked_fill_((rows % parallel.tp_size != parallel.tp_rank)[:, None], -1)
        dtype = self.prepare_finalize.topk_indices_dtype() or torch.int32
        return topk_weights, topk_ids if topk_ids.dtype is dtype else topk_ids.to(dtype)

    def _check_shared(self, shared: object, routed: torch.Tensor) -> None:
        if not isinstance(shared, torch.Tensor) or shared.shape != routed.shape:
            held = tuple(shared.shape) if isinstance(shared, torch.Tensor) else type(shared).__name__
            raise ValueError(
                f"shared_experts of {self.layer_name} returned {held}; it must be a tensor of its input's shape "
                f"{tuple(routed.shape)}"
            )

    def check_rows(self, name: str, rows: torch.Tensor, hidden_size: int | None = None) -> None:
        """Raises ValueError unless the tensor is `[T, K]` in the layer's dtype; K is hidden_size if given, which a
        model around the layer may have different from the layer's."""
        K, dtype = hidden_size or self.moe_config.hidden_dim, self.moe_config.in_dtype
        if rows.dim() != 2 or rows.size(1) != K or rows.dtype != dtype:
            raise ValueError(
                f"{name} is {tuple(rows.shape)} of {rows.dtype}; the layer {self.layer_name} takes (T, {K}) of "
                f"{dtype}; cast them, or make the layer with another params_dtype"
            )

    def extra_repr(self) -> str:
        sizes, parallel = self.moe_config, self.parallel_config
        backend = next(self.dispatcher.backends(), None)
        kernel = None if backend is None else self._kernels.get(backend)
        chosen = {"backend": backend, "experts": None if kernel is None else kernel.fused_experts}
        return (
            f"num_experts={self.num_experts}, num_redundant_experts={self.num_redundant_experts}, "
            f"num_local_experts={sizes.num_local_experts}, top_k={sizes.experts_per_token}, "
            f"hidden_size={sizes.hidden_dim}, intermediate_size_per_partition={sizes.intermediate_size_per_partition}, "
            f"tp_size={parallel.tp_size}, dp_size={parallel.dp_size}, ep_size={parallel.ep_size}, "
            f"quant_method={type(self.quant_method).__name__}, activation={self.activation}, "
            f"params_dtype={sizes.in_dtype}"
            + "".join(f", {name}={type(part).__name__}" for name, part in chosen.items() if part is not None)
        )

    # ---- The parts

    @property
    def groups(self) -> LayerGroups:
        """The process groups of the layer's ranks."""
        return self.dispatcher.groups

    @property
    def hidden_size(self) -> int:
        """K."""
        return self.moe_config.hidden_dim

    @property
    def top_k(self) -> int:
        """Experts per token, fused shared experts aside."""
        return self.moe_config.experts_per_token

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's result has the same bits in every batch."""
        return self.moe_config.batch_invariant

    @property
    def local_num_experts(self) -> int:
        """This rank's slots El, fused shared experts included."""
        return self.moe_config.num_local_experts

    @property
    def reduce_results(self) -> bool:
        """Whether the output is all-reduced over the TP ranks."""
        return self.dispatch_config.reduce_results

    @property
    def num_router_columns(self) -> int:
        """The columns of router_logits, identity experts included."""
        return self.router.num_columns if isinstance(self.router, TopKRouter) else self.num_experts

    @property
    def e_score_correction_bias(self) -> torch.Tensor | None:
        """The router's bias, `[E]`, or None; it can be assigned (`TopKRouter.e_score_correction_bias`)."""
        return self.router.e_score_correction_bias if isinstance(self.router, TopKRouter) else None

    @e_score_correction_bias.setter
    def e_score_correction_bias(self, bias: torch.Tensor | nn.Module | None) -> None:
        if not isinstance(self.router, TopKRouter):
            raise ValueError(
                f"e_score_correction_bias is assigned and the router of {self.layer_name} is a "
                f"{type(self.router).__name__}, which has none"
            )
        self.router.e_score_correction_bias = bias

    @property
    def device(self) -> torch.device:
        """Where the layer's tensors are."""
        tensors = (*self._parameters.values(), *self._buffers.values())
        return next(tensor.device for tensor in tensors if tensor is not None)

    @property
    def asks_for_tokens(self) -> bool:
        """Whether the ranks must know each other's number of tokens."""
        return self.dispatcher.asks_for_tokens or self.balanced_from is not None

    @property
    def prepare_finalize(self) -> FusedMoEPrepareAndFinalize:
        """The backend that moves this layer's rows."""
        return self.dispatcher.prepare_finalize

    @property
    def modular_kernel(self) -> FusedMoEModularKernel:
        """The backend joined with the experts; created once the weights are ready."""
        backend = self.dispatcher.prepare_finalize
        kernel = self._kernels.get(backend)
        if kernel is None:
            with _FIRST_USE:
                kernel = self._kernels.get(backend)
                if kernel is None:
                    kernel = self._make_kernel(backend)
        return kernel

    def _make_kernel(self, backend: FusedMoEPrepareAndFinalize) -> FusedMoEModularKernel:
        try:
            self.process_weights_after_loading()
            experts = self.quant_method.select_gemm_impl(backend, self)
            is_partial = self.dispatch_config.reduce_results and self.dispatcher.adds_up_over(backend)
            kernel = FusedMoEModularKernel(backend, experts, self.shared_experts, f32_partial_sums=is_partial)
        except AttributeError as error:
            # nn.Module would report it as a missing attribute of the layer.
            raise RuntimeError(f"the experts of {self.layer_name} cannot be made: {error}") from error
        try:
            addresses = self.tensor_addresses()
        except RuntimeError:  # such as under torch.export, which asks here but does not run the kernel
            addresses = (0,)
        self._kernels.keep(kernel, addresses)
        return kernel

    def forget_kernels(self) -> None:
        """Drops the modular kernels, whose experts keep references to scales and biases that are being replaced."""
        self._kernels.clear()
        self._graphs.clear()
        if self.balancer is not None:
            self.balancer.forget()

    def _drop_stale_kernels(self) -> None:
        """Drops the modular kernels that were made for other tensors: `torch.func.functional_call`, an assignment to
        `.data`, and wrappers that write to `_parameters` replace tensors without notifying the layer.

        Raises:
            RuntimeError: a torch.func transform is applied over the layer's own tensors.
        """
        try:
            addresses = self.tensor_addresses()
        except RuntimeError as error:
            raise RuntimeError(
                f"a transform of torch.func is over tensors of {self.layer_name}; its experts are for inference, so "
                f"take grad, jvp and vmap over others, and pass plain tensors for these"
            ) from error
        if self._kernels.are_stale(addresses):
            self.forget_kernels()

    def tensor_addresses(self) -> tuple[int, ...]:
        """The addresses of the layer's tensors, some of which modular kernels keep references to."""
        tensors = (*self._parameters.values(), *self._buffers.values())
        return tuple([tensor.data_ptr() for tensor in tensors if tensor is not None])

    def supports_cuda_graph(self) -> bool:
        """Whether a pass can be captured in a CUDA graph while other ranks run eagerly; creates backend and experts if
        needed."""
        # A captured dispatch asks no rank for its number of tokens.
        return not self.parallel_config.use_all2all and self.parts_support_cuda_graph()

    def parts_support_cuda_graph(self) -> bool:
        """Whether a pass can be captured if all ranks replay it together."""
        return self.prepare_finalize.supports_cuda_graph() and self.modular_kernel.fused_experts.supports_cuda_graph()

    def check(self) -> None:
        """Raises DispatchTimeoutError if a finished kernel of this rank timed out on another rank; never waits.

        Eager passes begin with this check. Code that replays a CUDA graph calls it after waiting for the results."""
        for backend in self.dispatcher.backends():
            backend.check()

    @property
    def input_rows(self) -> InputRows:
        """The dtype of the rows that the experts compute with, and the reason for it."""
        return self.quant_method.input_rows(self)

    @property
    def rounds_rows_to(self) -> torch.dtype | None:
        """The dtype to which the experts of the layer's backend may round rows; None if they do not round."""
        experts = self.modular_kernel.fused_experts
        return experts.quant_config.input_dtype if experts.may_round_rows() else None

    def must_reduce_shared_expert_outputs(self) -> bool:
        """Whether the combine step returns complete sums. If so, no all-reduce follows it, and partial sums of shared
        experts must be reduced separately."""
        return self.prepare_finalize.output_is_reduced()

    def maybe_all_reduce_tensor_model_parallel(self, x: torch.Tensor) -> torch.Tensor:
        """Sums `x` over the TP ranks, in place, if the layer's outputs are partial sums; otherwise returns `x`."""
        return self.dispatcher.all_reduce(x)

    # ---- Weights

    make_expert_params_mapping = staticmethod(make_expert_params_mapping)

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copies a checkpoint tensor into every local slot that currently holds its expert.

        Args:
            param: one of the layer's expert parameters.
            loaded_weight: the full tensor of one expert (this rank's TP part is cut out of it), or of all experts with
                a leading dimension E, in which case expert_id is ignored. It is not read if the expert is not local.
            weight_name: its name, for messages.
            shard_id: w1 (gate, or all of an ungated w13), w3 (up) or w2 (down).
            expert_id: physical expert; fused shared experts follow the redundant ones. After EPLB has moved experts,
                the tensor goes to the expert's current slots.

        Returns:
            Whether a local expert took it, if return_success is set; None otherwise.

        Raises:
            ValueError: an unknown parameter, id or shard, a value that is not a tensor, or a tensor without values or
                of another shape or dtype.
            RuntimeError: the parameters were already processed and freed, or experts are moving.
        """
        self._check_at_rest()
        # Compares identities, so that another layer's parameter of the same name is refused.
        param_name = next((name for name, own in self._parameters.items() if own is param), "")
        taken = self.loader.load(param_name, param, loaded_weight, weight_name, shard_id, expert_id)
        return taken if return_success else None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads tensors by their checkpoint names; returns the names of the parameters that received data.

        Raises:
            ValueError: the layer was made without expert_mapping, or has no parameter for a name.
            TypeError: a dict in place of its items(), or an entry that is not a pair of a name and a tensor.
            RuntimeError: as `weight_loader`.
        """
        self._check_at_rest()
        if self.expert_mapping is None:
            raise ValueError(
                "load_weights needs expert_mapping; make the layer with make_expert_params_mapping's result"
            )
        params = dict(self.named_parameters())
        taken = set()
        for name, tensor, param_name, shard_id, expert_id in matching_rows(weights, self.expert_mapping):
            if param_name not in params:
                raise ValueError(f"{name}: the layer {self.layer_name} has no parameter {param_name} to load it into")
            if self.loader.load(param_name, params[param_name], tensor, name, shard_id, expert_id):
                taken.add(param_name)
        return taken

    def is_local_expert(self, physical_expert_id: int) -> bool:
        """Whether this physical expert is loaded into a local slot; ValueError for an id that does not exist."""
        return bool(self.slots.of_id(physical_expert_id))

    def process_weights_after_loading(self) -> None:
        """Converts loaded weights to the form that the experts read. The first pass calls it if needed.

        Raises:
            RuntimeError: loading has begun and tensors are missing, or they are on the meta device.
        """
        self._check_complete()
        with _FIRST_USE:
            held = self.quant_method.expert_tensors(self) if self._processed else self.parameters(recurse=False)
            if any(tensor.is_meta for tensor in held):
                raise RuntimeError(
                    f"the weights of {self.layer_name} are on the meta device and have no values; call "
                    f"to_empty(device=...), and load them"
                )
            if not self._processed:
                # Creates ordinary tensors in the checkpoint's dtypes, whatever mode the first pass runs in.
                with torch.inference_mode(False), torch.no_grad(), without_autocast():
                    self.quant_method.process_weights_after_loading(self)
                self.quant_method.input_rows(self)  # raises if input_dtype does not fit these weights
                self.loader.complete()
                self._processed, self._reloading = True, False

    def begin_reload(self) -> None:
        """Prepares for loading all or some of the experts again, with room for them beside the weights in use.

        Load as the first time, then call `process_weights_after_loading`. The weights are written in place into the
        experts' current slots, so CUDA graphs stay valid; experts that are not loaded keep theirs. Parameters that are
        not packed, such as plain weights and biases, change while they are loaded. No pass may run in between.

        Raises:
            RuntimeError: loading has begun and tensors are missing, or experts are moving: those that were fetched
                before would overwrite what is loaded now.
        """
        self._check_at_rest()
        self.process_weights_after_loading()
        self.quant_method.begin_reload(self)
        self.loader.reopen()
        self._processed, self._reloading = False, True

    def _check_at_rest(self) -> None:
        """Raises RuntimeError if experts are moving."""
        if self.eplb_state is not None and self.eplb_state.is_moving():
            raise RuntimeError(
                f"experts are still moving, and the weights of {self.layer_name} cannot be loaded again meanwhile; "
                f"call finish of the EPLBManager on every rank first"
            )

    def check_open(self, what: str) -> None:
        """Raises RuntimeError if the parameters were processed and freed already; `what` names the tensor to load."""
        self.loader.check_open(what)

    def refuse(self, why: str) -> None:
        """Makes every later pass raise, because its weights would give wrong results."""
        self._refused = why

    def check_not_refused(self) -> None:
        """Raises MoeEpError after `refuse`."""
        if self._refused:
            raise MoeEpError(f"{self.layer_name} cannot run: {self._refused}; make and load the model again")

    def check_loaded(self) -> None:
        """Raises RuntimeError, naming what is missing, if loading has begun and is not complete, or after `refuse`."""
        self.check_not_refused()
        if self.eplb_state is not None and self.eplb_state.in_doubt:
            raise RuntimeError(
                f"{self.layer_name} cannot run: a rearrangement failed before all ranks had said that they moved its "
                f"experts; make an EPLBManager on every rank, which compares where they are"
            )
        self._check_complete()
        if self._reloading:
            raise RuntimeError(
                f"the weights of {self.layer_name} are being loaded again; call process_weights_after_loading first"
            )

    def _check_complete(self) -> None:
        missing = self.loader.missing()
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise RuntimeError(f"the weights of {self.layer_name} are not complete: {missing[0]}{more} were not loaded")

    def expert_weights(self) -> list[torch.Tensor]:
        """Views `[local routed slots, ...]` of everything that must move with a routed expert."""
        self.process_weights_after_loading()
        return [tensor[: self.slots.num_local_routed] for tensor in self.quant_method.expert_tensors(self)]

    def set_eplb_state(
        self,
        moe_layer_idx: int,
        expert_load_view: torch.Tensor,
        logical_to_physical_map: torch.Tensor,
        logical_replica_count: torch.Tensor,
    ) -> None:
        """Replaces the layer's own EPLB tensors by views of row moe_layer_idx of the model's.

        Args:
            expert_load_view: int32 `[L, num_physical]`.
            logical_to_physical_map: int `[L, E, max_replicas]`, -1 padded.
            logical_replica_count: int `[L, E]`.

        Raises:
            ValueError: the layer was made without enable_eplb, or shapes that do not fit.
        """
        state = self._state_of_eplb()
        state.set(moe_layer_idx, expert_load_view, logical_to_physical_map, logical_replica_count)

    def _state_of_eplb(self) -> LayerEplbState:
        if self.eplb_state is None:
            raise ConfigError(f"the layer {self.layer_name} was made without EPLB; make it with enable_eplb=True")
        return self.eplb_state

    # ---- Other ranks

    @torch.inference_mode(False)
    def place(self, physical_to_logical: Sequence[int]) -> None:
        """Sets the logical expert of each physical one, before the layer is loaded.

        Args:
            physical_to_logical: one entry per physical expert of the layer, in rank order; -1 for an empty slot.

        Raises:
            ConfigError: the layer was made without enable_eplb.
            RuntimeError: weights were loaded already, which this call would not move.
            ValueError: another number of physical experts, or a logical expert that does not exist.
        """
        state = self._state_of_eplb()
        if self._processed or self._reloading or self.loader.has_begun or state.is_balanced():
            raise RuntimeError(
                f"{self.layer_name} has weights, and place would not move them to the slots that it names; call place "
                f"before loading, or move experts by an EPLBManager's rearrange"
            )
        placement, num_physical = list(physical_to_logical), self.moe_config.num_experts
        if len(placement) != num_physical or not all(-1 <= expert < self.num_experts for expert in placement):
            raise ValueError(
                f"physical_to_logical is {placement}; it must name an expert below num_experts ({self.num_experts}), "
                f"or -1 for an empty slot, for each of {num_physical} physical experts"
            )
        self.relabel_slots(placement)

    @torch.inference_mode(False)
    def relabel_slots(self, physical_to_logical: Sequence[int]) -> None:
        """Like `place`, also for a layer with weights. They stay where they are: the caller loads what is missing."""
        state = self._state_of_eplb()
        state.place(physical_to_logical, self.num_experts, state.expert_load_view.device)

    @torch.inference_mode(False)
    def regroup(
        self,
        parallel_config: FusedMoEParallelConfig,
        process_group: dist.ProcessGroup | None,
        physical_to_logical: Sequence[int],
    ) -> None:
        """Moves the layer to other ranks; this rank keeps its slots and their contents.

        Every rank calls it while no rank runs a pass of the layer. The next pass makes the backend, a collective step.

        Args:
            parallel_config: the new ranks, with as many slots per rank as before.
            process_group: the new ranks; None for this process alone.
            physical_to_logical: as in `place`, over the slots of the new ranks.

        Raises:
            ConfigError: as `place`.
        """
        device = self.device
        self.relabel_slots(physical_to_logical)
        num_physical = len(physical_to_logical)
        self.parallel_config, self.num_redundant_experts = parallel_config, num_physical - self.num_experts
        expert_map = _expert_map(parallel_config, num_physical, self.num_fused_shared_experts)
        self.register_buffer("expert_map", None if expert_map is None else expert_map.to(device), persistent=False)
        self.slots.place(self.num_redundant_experts, expert_map)
        self.moe_config = replace(self.moe_config, num_experts=num_physical, moe_parallel_config=parallel_config)
        self.quant_method.moe_config = self.moe_config
        self.dispatcher.regroup(process_group)
        self.forget_kernels()
        if self.balancer is not None:
            self.balancer.regroup()

    # ---- Tensors that are moved, replaced or copied

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self.forget_kernels()
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "e_score_correction_bias":  # nn.Module would register it
            object.__setattr__(self, name, value)
            return
        if name in self._parameters and self.parallel_config.spans_ranks:
            self._check_not_sharded(name, value)
        # load_state_dict(assign=True) does this.
        if isinstance(value, torch.Tensor) and (name in self._parameters or name in self._buffers):
            self.forget_kernels()
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if self.parallel_config.spans_ranks:
            self._check_not_sharded(name, param)
        super().register_parameter(name, param)

    @staticmethod
    def _check_not_sharded(name: str, tensor: object) -> None:
        """Raises ConfigError if `fully_shard` would treat each rank's own experts as shards of one tensor."""
        # Code that makes such a tensor has imported the module already.
        tensors = sys.modules.get("torch.distributed.tensor")
        if tensors is not None and isinstance(tensor, tensors.DTensor):
            raise ConfigError(
                f"{name} of a layer over several ranks would become a DTensor, and each rank has experts of its own "
                f"there; leave the layer out, as by fully_shard(model, ignored_params=set(layer.parameters()))"
            )

    def _check_not_broadcast(self) -> None:
        """Raises ConfigError in a pass of a DistributedDataParallel that broadcasts rank 0's experts to every rank."""
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is None or id(wrapper) == self._wrapper:
            return
        for path, part in wrapper.module.named_modules():
            if part is not self:
                continue
            held = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
            names = {f"{path}.{name}" if path else name for name, _ in held}
            if names - wrapper.parameters_to_ignore:
                raise ConfigError(
                    f"DistributedDataParallel has given every rank what rank 0 holds of {self.layer_name}, where each "
                    f"has experts of its own; name the layer's parameters and buffers to DistributedDataParallel."
                    f"_set_params_and_buffers_to_ignore_for_model before it is made, and load the layer again"
                )
        self._wrapper = id(wrapper)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Gives a copy, which is a separate layer, its own name."""
        super().__setstate__(state)
        # A shallow copy shares them with the original, which keeps its name.
        self.loader, self.dispatcher = copy.copy(self.loader), copy.copy(self.dispatcher)
        self.layer_name = self.loader.name = self.dispatcher.layer_name = register_layer(self, self.layer_name)


def _expert_map(parallel: FusedMoEParallelConfig, num_physical: int, num_shared: int) -> torch.Tensor | None:
    """The layer's map `[physical + shared]`; `determine_expert_map` adds the shared experts' part with the mask."""
    size, rank, strategy = parallel.ep_size, parallel.ep_rank, parallel.expert_placement_strategy
    return determine_expert_map(size, rank, num_physical, strategy, num_shared, return_expert_mask=True)[1]


def _check_router(router: Router, routing: RoutingConfig, bias: object) -> None:
    """Raises unless `router` is a router and the routing arguments are left at their defaults."""
    if not isinstance(router, Router):
        raise TypeError(f"router is {router!r}; it must be a moe_ep.routing.Router")
    if routing != RoutingConfig(top_k=routing.top_k) or bias is not None:
        raise ValueError(
            f"router is a {type(router).__name__} and other routing arguments are given, which it would ignore; pass "
            f"one or the other"
        )


def _check_redundancy(config: ExpertsConfig, parallel: FusedMoEParallelConfig) -> None:
    E, redundant, ep_size = config.num_experts, config.num_redundant_experts, parallel.ep_size
    if config.enable_eplb and parallel.use_ep and parallel.expert_placement_strategy != "linear":
        raise ConfigError(
            f"expert_placement_strategy is {parallel.expert_placement_strategy!r} and enable_eplb is set, which needs "
            f"'linear': EPLB numbers physical experts in the order of the ranks"
        )
    if config.enable_eplb and (E + redundant) % ep_size:
        raise ConfigError(
            f"num_experts ({E}) + redundant ({redundant}) must be a multiple of ep_size ({ep_size}); "
            f"pass num_redundant_experts={redundant + -(E + redundant) % ep_size}"
        )
    if redundant > E * ep_size:
        raise ConfigError(
            f"num_redundant_experts is {redundant}; with {E} experts on {ep_size} ranks it may be {E * ep_size} at "
            f"most, which is more than every rank needs to hold all of them"
        )

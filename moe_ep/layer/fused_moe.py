"""The MoE layer: routes tokens and runs their experts, whichever rank holds them.

A forward pass, from top to bottom: forward -> torch.ops.moe_ep.moe_forward -> forward_impl -> forward_impl_chunked
-> select_experts -> quant_method.apply -> modular kernel -> dispatch.prepare, experts, dispatch.finalize.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_ep import env
from moe_ep.activation import MoEActivation
from moe_ep.arguments import check_no_gradients, check_same_device, check_tensors
from moe_ep.config import FusedMoEParallelConfig, FusedMoEQuantConfig, input_dtype_of
from moe_ep.distributed.passes import most_tokens
from moe_ep.distributed.process_groups import resolve_parallel_config
from moe_ep.errors import check_at_least, check_router_weight_on_input
from moe_ep.layer.custom_ops import operator
from moe_ep.layer.layer_parts import LayerParts
from moe_ep.layer.methods import FusedMoEMethodBase, UnquantizedFusedMoEMethod
from moe_ep.layer.weight_loading import ExpertMapping, FusedMoeWeightScaleSupported
from moe_ep.observability.stages import stage, tell_routing
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS
from moe_ep.routing import select_experts
from moe_ep.routing.checks import check_routing

__all__ = ["FusedMoE", "FusedMoEMethodBase", "FusedMoeWeightScaleSupported", "UnquantizedFusedMoEMethod"]


class FusedMoE(LayerParts):
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
            router's own parameter, loaded later, or the router itself, whose attribute of that name is read at every
            pass and may thus be replaced, as by `load_state_dict(assign=True)`. It is not saved with the layer.
        apply_router_weight_on_input: multiply the rows by their weights before they are sent; needs top_k 1.
        activation: a `MoEActivation` or its name.
        swiglu_limit: where gate and up end in a gated activation (`moe_ep.activation.gate_limit`); None for the
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
        dispatch_dtype: dtype of rows on the wire: None for that of the activations, or torch.float8_e4m3fn.
        experts: a name from the experts registry that fits the backend's format; "auto" chooses.
        input_dtype: torch.float8_e4m3fn lets experts with weights of that type round rows to it where that is faster
            (Hopper, many rows an expert); None takes it from MOE_EP_INPUT_DTYPE, which does not by default.

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
        custom_routing_function: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
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
        input_dtype: torch.dtype | None = None,
    ) -> None:
        if apply_router_weight_on_input:
            check_router_weight_on_input(top_k + (n_shared_experts or 0))
        check_at_least(0, zero_expert_num=zero_expert_num)
        if shared_experts is not None and not callable(shared_experts):
            raise TypeError(f"shared_experts is {shared_experts!r}; it must be a module from [T, K] to [T, K]")
        EXPERTS.check(experts, also=("auto",))
        FusedMoEQuantConfig(dispatch_dtype=dispatch_dtype, input_dtype=input_dtype)  # which checks both
        ALL2ALL_BACKENDS.check(all2all_backend, also=("auto",))
        super().__init__(
            num_experts=num_experts,
            top_k=top_k,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            params_dtype=params_dtype or torch.get_default_dtype(),
            parallel_config=resolve_parallel_config(
                parallel_config,
                process_group,
                tp_size=tp_size,
                dp_size=dp_size,
                ep_size=ep_size,
                is_sequence_parallel=is_sequence_parallel,
                all2all_backend=all2all_backend,
                expert_placement_strategy=expert_placement_strategy,
            ),
            activation=activation,
            swiglu_limit=swiglu_limit,
            quant_config=quant_config,
            enable_eplb=enable_eplb,
            num_redundant_experts=num_redundant_experts,
            num_fused_shared_experts=n_shared_experts or 0,
            has_bias=has_bias,
            max_num_tokens=max_num_tokens,
            expert_mapping=expert_mapping,
            prefix=prefix,
        )
        routing: dict[str, Any] = {
            "top_k": top_k,
            "use_grouped_topk": use_grouped_topk,
            "num_expert_group": num_expert_group,
            "topk_group": topk_group,
            "custom_routing_function": custom_routing_function,
            "scoring_func": scoring_func,
            "routed_scaling_factor": routed_scaling_factor,
            "zero_expert_num": zero_expert_num,
            "zero_expert_type": zero_expert_type,
        }
        self.e_score_correction_bias = e_score_correction_bias
        check_routing(num_experts + zero_expert_num, e_score_correction_bias=self.e_score_correction_bias, **routing)
        self.reduce_results = reduce_results
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.num_router_columns = num_experts + zero_expert_num
        self.shared_experts = shared_experts
        self.dispatch_dtype = dispatch_dtype
        self.input_dtype = input_dtype or input_dtype_of(env.INPUT_DTYPE.get())
        self.experts = experts
        self._routing = routing | {
            "renormalize": renormalize,
            "num_fused_shared_experts": self.num_fused_shared_experts,
            "global_num_experts": self.moe_config.num_experts,
            "ep_rank": self.parallel_config.token_rank,
            "ep_size": self.parallel_config.ep_size,
        }
        self._join(process_group)

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """Returns the layer's output `[T, K]`. All ranks of the layer must call it; T may differ between them and be 0.

        A layer on a single rank may be called by several threads at once.

        Args:
            hidden_states: `[T, K]` of params_dtype, any strides; the output is contiguous.
            router_logits: `[T, E + zero_expert_num]`, f32, f16 or bf16.

        Raises:
            ValueError: shapes or dtypes that do not fit the layer; under CUDA-graph capture, T above the capacity.
            RuntimeError: the weights are only partly loaded, or an input requires a gradient.
        """
        check_tensors(hidden_states=hidden_states, router_logits=router_logits)
        check_no_gradients(f"the experts of {self.layer_name}", hidden_states, router_logits)
        if self.shared_experts is None:
            return operator("moe_forward", self.layer_name)(hidden_states, router_logits, self.layer_name)
        run = operator("moe_forward_shared", self.layer_name)
        shared, routed = run(hidden_states, router_logits, self.layer_name)
        # If the caller still has to sum over the TP ranks, only one of them may add the shared output.
        if self.reduce_results or self._takes_complete_terms:
            routed = routed + shared
        return routed

    def forward_impl(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The body of the graph node: the routed output, all-reduced if asked for; with shared experts, (shared,
        routed)."""
        self.check_loaded()
        self.check_own_experts()
        self._forget_kernels_of_others()
        self._check_inputs(hidden_states, router_logits)
        hidden_states = hidden_states.contiguous()
        shared, routed = self.forward_impl_chunked(hidden_states, router_logits)
        if self.reduce_results:
            routed = self.maybe_all_reduce_tensor_model_parallel(routed)
        return routed if shared is None else (shared.contiguous(), routed)

    def forward_impl_chunked(
        self, full_hidden_states: torch.Tensor, full_router_logits: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Runs the tokens in chunks of at most the backend's capacity, or all at once if it has none.

        Every rank makes as many passes as the rank with the most tokens needs.

        Returns:
            (shared output or None, routed output), both `[T, K]`.
        """
        num_tokens, capacity = full_hidden_states.size(0), self.prepare_finalize.max_num_tokens_per_rank()
        if capacity is None:
            return self._forward_tokens(full_hidden_states, full_router_logits)
        num_chunks = self._num_chunks(num_tokens, capacity, full_hidden_states.device)
        if num_chunks == 1:
            return self._forward_tokens(full_hidden_states, full_router_logits)
        chunks = []
        for start in range(0, num_chunks * capacity, capacity):
            part = slice(min(start, num_tokens), min(start + capacity, num_tokens))
            chunks.append(self._forward_tokens(full_hidden_states[part], full_router_logits[part]))
        shared = [shared for shared, _ in chunks if shared is not None]
        return torch.cat(shared) if shared else None, torch.cat([routed for _, routed in chunks])

    def _num_chunks(self, num_tokens: int, capacity: int, device: torch.device) -> int:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            if num_tokens > capacity:
                raise ValueError(
                    f"hidden_states has {num_tokens} tokens under CUDA-graph capture and the capacity is {capacity}; "
                    f"capture at most {capacity}, or make the layer with a larger max_num_tokens"
                )
            return 1
        return max(1, -(-most_tokens(num_tokens, self.groups.ep) // capacity))

    def _forward_tokens(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Returns (shared output, routed output) of one pass."""
        eplb = self.eplb_state
        with stage("route"):
            topk_weights, topk_ids, zero_expert_result = self._select_experts(
                hidden_states,
                router_logits,
                e_score_correction_bias=self._bias_on(hidden_states.device),
                indices_type=self.prepare_finalize.topk_indices_dtype(),
                enable_eplb=eplb is not None,
                expert_load_view=None if eplb is None else eplb.expert_load_view,
                logical_to_physical_map=None if eplb is None else eplb.logical_to_physical_map,
                logical_replica_count=None if eplb is None else eplb.logical_replica_count,
            )
            self._divide_fused_shared_experts(topk_ids)
        tell_routing(self, topk_ids)
        result = self.quant_method.apply(self, hidden_states, topk_weights, topk_ids)
        shared, routed = result if isinstance(result, tuple) else (None, result)
        if self.shared_experts is not None:
            self._check_shared(shared, routed)
        if zero_expert_result is not None and self._takes_complete_terms:
            routed += zero_expert_result
        return shared, routed

    def _select_experts(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, **state: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`select_experts` with the layer's settings; a subclass whose model does its own routing overrides it."""
        return select_experts(hidden_states, router_logits.contiguous(), **self._routing, **state)

    def _check_shared(self, shared: object, routed: torch.Tensor) -> None:
        if not isinstance(shared, torch.Tensor) or shared.shape != routed.shape:
            held = tuple(shared.shape) if isinstance(shared, torch.Tensor) else type(shared).__name__
            raise ValueError(
                f"shared_experts of {self.layer_name} returned {held}; it must be a tensor of its input's shape "
                f"{tuple(routed.shape)}"
            )

    def check_rows(self, name: str, rows: torch.Tensor, hidden_size: int | None = None) -> None:
        """Raises ValueError unless the tensor has rows `[T, K]` that the layer takes, or of the hidden_size that a
        model around it has."""
        K, dtype = hidden_size or self.moe_config.hidden_dim, self.moe_config.in_dtype
        if rows.dim() != 2 or rows.size(1) != K or rows.dtype != dtype:
            raise ValueError(
                f"{name} is {tuple(rows.shape)} of {rows.dtype}; the layer {self.layer_name} takes (T, {K}) of "
                f"{dtype}; cast them, or make the layer with another params_dtype"
            )

    def _check_inputs(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> None:
        self.check_rows("hidden_states", hidden_states)
        if router_logits.shape != (hidden_states.size(0), self.num_router_columns):
            raise ValueError(
                f"router_logits has shape {tuple(router_logits.shape)}; with these hidden_states the layer "
                f"{self.layer_name} takes ({hidden_states.size(0)}, {self.num_router_columns})"
            )
        check_same_device("hidden_states", hidden_states.device, router_logits=router_logits)

    def extra_repr(self) -> str:
        sizes, parallel, kernel = self.moe_config, self.parallel_config, self._modular_kernel
        chosen = {"backend": self._prepare_finalize, "experts": None if kernel is None else kernel.fused_experts}
        return (
            f"num_experts={self.num_experts}, num_redundant_experts={self.num_redundant_experts}, "
            f"num_local_experts={sizes.num_local_experts}, top_k={sizes.experts_per_token}, "
            f"hidden_size={sizes.hidden_dim}, intermediate_size_per_partition={sizes.intermediate_size_per_partition}, "
            f"tp_size={parallel.tp_size}, dp_size={parallel.dp_size}, ep_size={parallel.ep_size}, "
            f"quant_method={type(self.quant_method).__name__}, activation={self.activation}, "
            f"params_dtype={sizes.in_dtype}"
            + "".join(f", {name}={type(part).__name__}" for name, part in chosen.items() if part is not None)
        )

    def _divide_fused_shared_experts(self, topk_ids: torch.Tensor) -> None:
        """If TP ranks hold the same tokens and whole experts, each gives only its share of rows to shared experts."""
        parallel, num_shared = self.parallel_config, self.num_fused_shared_experts
        if num_shared and parallel.use_ep and not parallel.use_all2all:
            rows = torch.arange(topk_ids.size(0), device=topk_ids.device)
            topk_ids[:, -num_shared:].masked_fill_((rows % parallel.tp_size != parallel.tp_rank)[:, None], -1)

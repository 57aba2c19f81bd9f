"""The configuration of a MoE layer, as frozen dataclasses.

They hold plain values and tensors, know nothing about backends, and check their values when they are created.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any

import torch

from moe_ep.activation import MoEActivation, gate_limit
from moe_ep.arguments import check_tensors
from moe_ep.errors import ConfigError, check_at_least, check_below, check_flags, check_whole, one_of
from moe_ep.quantization.input_rows import INPUT_DTYPES, dtype_name, pair_refusal, resolve_input_dtype
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS
from moe_ep.scalar_type import ScalarType

EXPERT_PLACEMENT_STRATEGIES = ("linear", "round_robin")
ACTIVATION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCORING_FUNCS = ("softmax", "sigmoid", "sqrtsoftplus")
ZERO_EXPERT_TYPES = ("identity",)

# custom_routing_function(hidden_states=, gating_output=, topk=, renormalize=) -> (weights, ids)
RoutingFunction = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class FusedMoEParallelConfig:
    """How the ranks of a layer divide the work, and this rank's place among them.

    There are dp_size x tp_size ranks, rank = dp_rank * tp_size + tp_rank. With expert parallelism (ep_size > 1) they
    all form one EP group, and every expert is whole on its rank; without it, tp_size ranks shard the intermediate
    size N of every expert.
    """

    tp_size: int = 1
    tp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    is_sequence_parallel: bool = False
    all2all_backend: str = "auto"
    expert_placement_strategy: str = "linear"

    def __post_init__(self) -> None:
        check_at_least(1, tp_size=self.tp_size, dp_size=self.dp_size, ep_size=self.ep_size)
        for kind in ("tp", "dp", "ep"):
            check_below(
                f"{kind}_size", getattr(self, f"{kind}_size"), **{f"{kind}_rank": getattr(self, f"{kind}_rank")}
            )
        ALL2ALL_BACKENDS.check(self.all2all_backend, also=("auto",))
        if self.expert_placement_strategy not in EXPERT_PLACEMENT_STRATEGIES:
            raise ValueError(
                one_of("expert_placement_strategy", self.expert_placement_strategy, EXPERT_PLACEMENT_STRATEGIES)
            )
        check_flags(is_sequence_parallel=self.is_sequence_parallel)
        if self.is_sequence_parallel and self.shards_experts:
            raise ConfigError(
                f"is_sequence_parallel is set, tp_size is {self.tp_size} and ep_size 1: ranks that divide every expert "
                f"need the same tokens; pass ep_size={self.tp_size * self.dp_size}, or leave it out"
            )

    @classmethod
    def make(
        cls,
        tp_size: int | None = None,
        dp_size: int | None = None,
        ep_size: int | None = None,
        *,
        rank: int = 0,
        world_size: int | None = None,
        is_sequence_parallel: bool = False,
        all2all_backend: str = "auto",
        expert_placement_strategy: str = "linear",
    ) -> FusedMoEParallelConfig:
        """Creates the configuration of one rank; sizes that are not given are derived from the others.

        If none is given, all `world_size` ranks are data-parallel and form the EP group. If only `tp_size` or `dp_size`
        is given, there is expert parallelism if dp_size > 1. `ep_size` must be 1 or tp_size * dp_size.

        Args:
            rank: this process's rank among the tp_size * dp_size ranks.
            world_size: the number of ranks; None means as many as the sizes require.

        Raises:
            ValueError: sizes below 1 or that do not match each other, or a rank out of range.
            TypeError: a size or rank that is not a whole number.
        """
        given = {"tp_size": tp_size, "dp_size": dp_size, "ep_size": ep_size}
        check_at_least(1, **{name: size for name, size in given.items() if size is not None})
        check_whole(rank=rank)
        if world_size is not None:
            check_at_least(1, world_size=world_size)
        if dp_size is None:
            ranks = ep_size if ep_size is not None and ep_size > 1 else tp_size or world_size or 1
            dp_size = max(1, ranks // (tp_size or 1))
        tp_size = tp_size or 1
        ranks = tp_size * dp_size
        if ep_size is None:
            ep_size = ranks if dp_size > 1 else 1
        if ep_size not in (1, ranks):
            raise ValueError(
                f"ep_size is {ep_size}; it must be 1 (no expert parallelism) or tp_size * dp_size "
                f"({tp_size} * {dp_size} = {ranks})"
            )
        if world_size is not None and ranks > world_size:
            raise ValueError(
                f"tp_size ({tp_size}) * dp_size ({dp_size}) asks for {ranks} ranks and there are {world_size}; "
                f"start {ranks} processes or lower the sizes"
            )
        if ranks == 1:  # every rank holds its own complete layer
            rank = 0
        if not 0 <= rank < ranks:
            raise ValueError(
                f"rank is {rank}; it must be at least 0 and below tp_size * dp_size ({ranks}); make the layer on its "
                f"own ranks only, with their process_group"
            )
        return cls(
            tp_size=tp_size,
            tp_rank=rank % tp_size,
            dp_size=dp_size,
            dp_rank=rank // tp_size,
            ep_size=ep_size,
            ep_rank=rank if ep_size > 1 else 0,
            is_sequence_parallel=is_sequence_parallel,
            all2all_backend=all2all_backend,
            expert_placement_strategy=expert_placement_strategy,
        )

    @cached_property
    def use_ep(self) -> bool:
        """Whether experts are divided over ranks."""
        return self.ep_size > 1

    @cached_property
    def use_all2all(self) -> bool:
        """Whether ranks hold different tokens, so that tokens must be sent to the ranks of their experts.

        False for expert parallelism over plain tensor-parallel ranks: they all hold the same tokens, each computes
        its own experts, and the outputs are all-reduced.
        """
        return self.use_ep and (self.tp_size < self.ep_size or self.is_sequence_parallel)

    @property
    def token_rank(self) -> int:
        """The EP rank whose tokens these are: 0 on all ranks that hold the same tokens, since they must choose the same
        replicas for them."""
        return self.ep_rank if self.use_all2all else 0

    @cached_property
    def spans_ranks(self) -> bool:
        """Whether a pass needs other ranks."""
        return self.use_ep or self.tp_size > 1

    @property
    def shards_experts(self) -> bool:
        """Whether the tensor-parallel ranks divide the intermediate size N of every expert."""
        return not self.use_ep and self.tp_size > 1


def check_keeps_batch_invariant(backend: str) -> None:
    """Raises ConfigError for a backend whose results may depend on the batch."""
    varies = {name: ALL2ALL_BACKENDS.load(name).depends_on_batch() for name in ALL2ALL_BACKENDS}
    if varies[backend] is not None:
        raise ConfigError(
            f"all2all_backend is {backend!r} and batch_invariant is set, which it cannot keep: {varies[backend]}; "
            f"choose one of {', '.join(name for name, reason in varies.items() if reason is None)}"
        )


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How a layer's router chooses experts; `moe_ep.routing.select_experts` says what each setting means.

    Raises:
        ValueError: settings that do not fit together.
        TypeError: a count that is not a whole number, or a routing function that is not callable.
    """

    top_k: int
    renormalize: bool = True
    use_grouped_topk: bool = False
    num_expert_group: int | None = None
    topk_group: int | None = None
    custom_routing_function: RoutingFunction | None = None
    scoring_func: str = "softmax"
    routed_scaling_factor: float = 1.0
    zero_expert_num: int = 0
    zero_expert_type: str | None = None

    def __post_init__(self) -> None:
        check_at_least(1, top_k=self.top_k)
        check_at_least(0, zero_expert_num=self.zero_expert_num)
        if self.scoring_func not in SCORING_FUNCS:
            raise ValueError(one_of("scoring_func", self.scoring_func, SCORING_FUNCS))
        factor = self.routed_scaling_factor
        if not isinstance(factor, Real) or isinstance(factor, bool) or not math.isfinite(factor):
            raise ValueError(f"routed_scaling_factor is {factor!r}; it must be a finite number")
        check_flags(renormalize=self.renormalize, use_grouped_topk=self.use_grouped_topk)
        needs_type = self.zero_expert_num or self.zero_expert_type is not None
        if needs_type and self.zero_expert_type not in ZERO_EXPERT_TYPES:
            raise ValueError(one_of("zero_expert_type", self.zero_expert_type, ZERO_EXPERT_TYPES))
        if self.custom_routing_function is not None:
            if not callable(self.custom_routing_function):
                raise TypeError(f"custom_routing_function is {self.custom_routing_function!r}; it must be a function")
            if self.use_grouped_topk:
                raise ValueError(
                    "custom_routing_function is given together with use_grouped_topk, which it replaces; leave one out"
                )
        if self.use_grouped_topk:
            if self.num_expert_group is None or self.topk_group is None:
                raise ValueError(
                    f"use_grouped_topk needs num_expert_group and topk_group, which are {self.num_expert_group} and "
                    f"{self.topk_group}; pass both"
                )
            check_at_least(1, num_expert_group=self.num_expert_group)
            check_whole(topk_group=self.topk_group)
            if not 1 <= self.topk_group <= self.num_expert_group:
                raise ValueError(
                    f"topk_group is {self.topk_group}; it must be at least 1 and at most num_expert_group "
                    f"({self.num_expert_group})"
                )

    @property
    def groups(self) -> tuple[int, int]:
        """(number of groups, groups to keep); (1, 1) if experts are not grouped."""
        if not self.use_grouped_topk or self.num_expert_group is None or self.topk_group is None:
            return 1, 1
        return self.num_expert_group, self.topk_group

    def check(self, num_columns: int, e_score_correction_bias: torch.Tensor | None) -> None:
        """Raises ValueError unless the settings and the bias fit router logits with num_columns columns."""
        if self.top_k > num_columns:
            raise ValueError(
                f"top_k is {self.top_k}; it must be at least 1 and at most the columns of router_logits ({num_columns})"
            )
        if self.zero_expert_num >= num_columns:
            raise ValueError(
                f"zero_expert_num is {self.zero_expert_num}; it must be at least 0 and below the columns of "
                f"router_logits ({num_columns})"
            )
        num_groups, kept_groups = self.groups
        if num_columns % num_groups:
            raise ValueError(
                f"num_expert_group is {num_groups}; it must divide the columns of router_logits ({num_columns})"
            )
        available = kept_groups * (num_columns // num_groups)
        if self.use_grouped_topk and self.top_k > available:
            raise ValueError(
                f"top_k is {self.top_k}; it must be at most the {available} experts of topk_group ({kept_groups}) "
                f"groups"
            )
        if e_score_correction_bias is not None:
            self.check_bias(num_columns, e_score_correction_bias)

    def check_bias(self, num_columns: int, bias: torch.Tensor) -> None:
        """Raises ValueError unless the bias has a value for each column, and no routing function replaces it."""
        check_tensors(e_score_correction_bias=bias)
        if bias.shape != (num_columns,) or not bias.is_floating_point():
            raise ValueError(
                f"e_score_correction_bias has shape {tuple(bias.shape)} of {bias.dtype}; it must have one value of a "
                f"float dtype for each column of router_logits, ({num_columns},)"
            )
        if self.custom_routing_function is not None:
            raise ValueError(
                "custom_routing_function is given together with e_score_correction_bias, which it replaces; leave one "
                "out"
            )


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The experts of a layer over all its ranks, as `moe_ep.FusedMoE` takes them.

    Raises:
        ValueError: counts out of range, or unknown names.
        TypeError: a count that is not a whole number.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    params_dtype: torch.dtype
    activation: MoEActivation | str = "silu"
    swiglu_limit: float | None = None
    has_bias: bool = False
    quant_config: Any = None
    num_redundant_experts: int = 0
    enable_eplb: bool = False
    num_fused_shared_experts: int = 0
    implementation: str = "auto"
    input_dtype: torch.dtype | str | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, num_experts=self.num_experts, hidden_size=self.hidden_size)
        check_at_least(1, intermediate_size=self.intermediate_size)
        check_flags(has_bias=self.has_bias, enable_eplb=self.enable_eplb, batch_invariant=self.batch_invariant)
        redundant, shared = self.num_redundant_experts, self.num_fused_shared_experts
        check_at_least(0, num_redundant_experts=redundant, n_shared_experts=shared)
        if redundant and not self.enable_eplb:
            raise ConfigError(
                f"num_redundant_experts is {redundant} and enable_eplb is not set, so no token would use them; set it, "
                f"or leave the redundant experts out"
            )
        for name in ("num_experts", "hidden_size", "intermediate_size", "num_redundant_experts"):
            object.__setattr__(self, name, int(getattr(self, name)))  # a numpy integer lacks methods of int
        EXPERTS.check(self.implementation, also=("auto",))
        object.__setattr__(self, "input_dtype", resolve_input_dtype(self.input_dtype, self.params_dtype))
        object.__setattr__(self, "activation", MoEActivation.parse(self.activation))


@dataclass(frozen=True, kw_only=True)
class DispatchConfig:
    """How a layer's tokens reach their experts and come back, as `moe_ep.FusedMoE` takes it.

    Raises:
        ValueError: a capacity below 1, or an unknown dtype.
        TypeError: a capacity that is not a whole number.
    """

    max_num_tokens: int = 256
    dispatch_dtype: torch.dtype | None = None
    reduce_results: bool = False
    apply_router_weight_on_input: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, max_num_tokens=self.max_num_tokens)
        check_flags(reduce_results=self.reduce_results, apply_router_weight_on_input=self.apply_router_weight_on_input)
        check_row_dtypes(dispatch_dtype=self.dispatch_dtype)


@dataclass(frozen=True, kw_only=True)
class FusedMoEConfig:
    """The shapes of one MoE layer on one rank.

    Attributes:
        num_experts: routed (physical) experts E over all ranks, including redundant ones.
        experts_per_token: top_k, not counting fused shared experts.
        hidden_dim: K.
        intermediate_size_per_partition: N on this rank.
        num_local_experts: El, this rank's slots, including fused shared experts.
        in_dtype: dtype of the activations: f32, f16 or bf16.
        max_num_tokens: capacity of a fixed-capacity backend, in tokens per rank and pass.
        swiglu_limit: clamp limit of gate and up (`moe_ep.activation.gate_limit`); None for the activation's own.
        num_fused_shared_experts: experts that every rank holds after its routed slots; their ids start at num_experts.
        batch_invariant: a token's result has the same bits whatever the other tokens are and wherever its experts are.
            Experts in the Standard format then write one row per slot, and the token's rank adds them up.
    """

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size_per_partition: int
    num_local_experts: int
    moe_parallel_config: FusedMoEParallelConfig
    in_dtype: torch.dtype
    max_num_tokens: int
    activation: MoEActivation | str = "silu"
    has_bias: bool = False
    num_fused_shared_experts: int = 0
    swiglu_limit: float | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        check_at_least(
            1,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            hidden_dim=self.hidden_dim,
            intermediate_size_per_partition=self.intermediate_size_per_partition,
            max_num_tokens=self.max_num_tokens,
        )
        check_at_least(
            0, num_local_experts=self.num_local_experts, num_fused_shared_experts=self.num_fused_shared_experts
        )
        if not isinstance(self.moe_parallel_config, FusedMoEParallelConfig):
            raise TypeError(
                f"moe_parallel_config is {self.moe_parallel_config!r}; it must be a FusedMoEParallelConfig, as "
                f"FusedMoEParallelConfig.make() for one rank"
            )
        check_flags(has_bias=self.has_bias, batch_invariant=self.batch_invariant)
        parallel = self.moe_parallel_config
        if self.batch_invariant and parallel.use_ep and not parallel.use_all2all:
            raise ConfigError(
                f"batch_invariant is set and the {parallel.tp_size} tensor-parallel ranks hold the same tokens and "
                f"different experts (ep_size {parallel.ep_size}), so sums would follow the experts' placement; divide "
                f"the tokens (dp_size, or is_sequence_parallel), or leave it out"
            )
        if self.batch_invariant and parallel.use_all2all and parallel.all2all_backend != "auto":
            check_keeps_batch_invariant(parallel.all2all_backend)
        if self.num_local_experts > self.global_num_experts:
            raise ValueError(
                f"num_local_experts is {self.num_local_experts}; it must not exceed num_experts ({self.num_experts}) + "
                f"num_fused_shared_experts ({self.num_fused_shared_experts})"
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token (top_k) is {self.experts_per_token}; it must not exceed num_experts "
                f"({self.num_experts})"
            )
        if self.in_dtype not in ACTIVATION_DTYPES:
            raise ValueError(
                one_of("in_dtype (params_dtype)", str(self.in_dtype), [str(dtype) for dtype in ACTIVATION_DTYPES])
            )
        object.__setattr__(self, "activation", MoEActivation.parse(self.activation))
        gate_limit(self.activation, self.swiglu_limit)

    @property
    def ep_size(self) -> int:
        return self.moe_parallel_config.ep_size

    @property
    def ep_rank(self) -> int:
        return self.moe_parallel_config.ep_rank

    @property
    def global_num_experts(self) -> int:
        """The number of ids that can occur in topk_ids: routed (physical) and fused shared experts."""
        return self.num_experts + self.num_fused_shared_experts


def check_row_dtypes(**dtypes: torch.dtype | None) -> None:
    """Raises ValueError for a dtype that rows cannot be rounded to."""
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in INPUT_DTYPES):
            raise ValueError(
                f"{name} is {dtype}; it must be None (the activations' dtype), torch.float8_e4m3fn or torch.int8"
            )


@dataclass(frozen=True, kw_only=True)
class FusedMoEQuantConfig:
    """How the experts' weights are quantized, with their scales and biases, and the dtype of rows on the wire.

    Attributes:
        quant_type_id: `ScalarType.id` of the weights; None if they are plain.
        group_size: number of input columns that share a scale; -1 for a whole row.
        w2_quant_type_id, w2_group_size: those of w2, if they differ from w1's.
        w1_scale, w2_scale, w1_zp, w2_zp: scales and zero points in the layout of the chosen experts.
        w1_bias, w2_bias: `[El, 2N]` and `[El, K]`.
        g1_alphas, g2_alphas: global scales per expert, f32 `[El]` (or `[El, 2]` for w13).
        a1_scale, a2_scale: static activation scales.
        dispatch_dtype: dtype of rows on the wire: None for that of the activations, or torch.float8_e4m3fn or
            torch.int8 (with one f32 scale per 128 columns, or per row where input_dtype is the same).
        input_dtype: torch.int8 or torch.float8_e4m3fn if experts round rows to it: always on CPUs, on GPUs where that
            is faster. None: rows are not rounded.
        faster_rows_only: on GPUs, round to input_dtype only where that was measured to be faster there. Set if the
            checkpoint and not the user asks for it.
    """

    quant_type_id: int | None = None
    group_size: int | None = None
    w1_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w1_zp: torch.Tensor | None = None
    w2_zp: torch.Tensor | None = None
    w1_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    g1_alphas: torch.Tensor | None = None
    g2_alphas: torch.Tensor | None = None
    a1_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None
    dispatch_dtype: torch.dtype | None = None
    w2_quant_type_id: int | None = None
    w2_group_size: int | None = None
    input_dtype: torch.dtype | None = None
    faster_rows_only: bool = False

    def __post_init__(self) -> None:
        check_row_dtypes(dispatch_dtype=self.dispatch_dtype, input_dtype=self.input_dtype)
        for name in ("quant_type_id", "w2_quant_type_id"):
            if getattr(self, name) is not None:
                ScalarType.from_id(getattr(self, name))
        for name in ("group_size", "w2_group_size"):
            size = getattr(self, name)
            if size is not None and size != -1:
                check_at_least(1, **{name: size})

    @classmethod
    def unquantized(cls) -> FusedMoEQuantConfig:
        """Plain weights, and rows on the wire in the activations' dtype."""
        return cls()

    @property
    def is_quantized(self) -> bool:
        return self.quant_type_id is not None

    def refuses_rows_of(self, dtype: torch.dtype) -> str | None:
        """Why int8 or e4m3 rows do not fit these weights, in one clause; None if they do."""
        w2_type = self.quant_type_id if self.w2_quant_type_id is None else self.w2_quant_type_id
        for type_id, scales in ((self.quant_type_id, self.w1_scale), (w2_type, self.w2_scale)):
            if type_id is None or scales is None:
                return f"weights are plain; {dtype_name(dtype)} rows go with quantized ones"
            if (refusal := pair_refusal(dtype, ScalarType.from_id(type_id), scales.dtype)) is not None:
                return refusal
        return None

    def with_input_dtype(self, dtype: torch.dtype | None, faster_only: bool = False) -> FusedMoEQuantConfig:
        """Returns this configuration with another dtype that experts round rows to, or None for no rounding."""
        return replace(self, input_dtype=dtype, faster_rows_only=faster_only)

"""Arguments that cannot work, alone or together, are refused where they come in, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ep import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.errors import ConfigError
from moe_ep.layer import FusedMoE
from moe_ep.scalar_type import scalar_types
from tests.layer.small_layer import E, make_layer

FLAGS = [
    "renormalize", "use_grouped_topk", "reduce_results", "apply_router_weight_on_input", "enable_eplb", "has_bias",
    "is_sequence_parallel",
]  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["false", 1, None, torch.tensor(True)])
def test_what_is_no_flag(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        make_layer(**{"top_k": 1, name: value})


@pytest.mark.parametrize("redundant", [1, 2, E])
def test_redundant_experts_need_eplb(redundant: int) -> None:
    with pytest.raises(ConfigError, match=f"num_redundant_experts is {redundant}.*enable_eplb"):
        make_layer(num_redundant_experts=redundant)
    assert make_layer(num_redundant_experts=redundant, enable_eplb=True).slots.num_local == E + redundant


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tp_size": 2, "ep_size": 1, "is_sequence_parallel": True}, "is_sequence_parallel"),
        ({"ep_size": 3, "dp_size": 2}, "ep_size"),
        ({"tp_size": 0}, "tp_size"),
        ({"dp_size": 1.0}, "dp_size"),
        ({"zero_expert_type": "copy"}, "zero_expert_type"),
        ({"zero_expert_num": 2}, "zero_expert_type"),
        ({"zero_expert_num": -1, "zero_expert_type": "identity"}, "zero_expert_num"),
        ({"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}, "num_expert_group"),
        ({"use_grouped_topk": True, "num_expert_group": 3}, "topk_group"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor"),
        ({"routed_scaling_factor": True}, "routed_scaling_factor"),
        ({"scoring_func": None}, "scoring_func"),
        ({"scoring_func": ["softmax"]}, "scoring_func"),
        ({"custom_routing_function": max, "use_grouped_topk": True}, "custom_routing_function"),
        ({"custom_routing_function": max, "e_score_correction_bias": torch.zeros(E)}, "custom_routing_function"),
        ({"e_score_correction_bias": torch.zeros(E, dtype=torch.int32)}, "e_score_correction_bias"),
        ({"expert_mapping": "experts"}, "expert_mapping"),
        ({"expert_mapping": [("w13_", "gate", "w1")]}, "expert_mapping"),
        ({"expert_mapping": [("w13_", "gate", 0, "w4")]}, "expert_mapping"),
        ({"quant_config": "int4"}, "quant_config"),
        ({"params_dtype": torch.float8_e4m3fn}, "params_dtype"),
        ({"dispatch_dtype": torch.float16}, "dispatch_dtype"),
        ({"input_dtype": torch.int32}, "input_dtype"),
        ({"experts": "fastest"}, "experts"),
        ({"all2all_backend": None}, "all2all_backend"),
        ({"expert_placement_strategy": 1}, "expert_placement_strategy"),
        ({"swiglu_limit": 0.0}, "swiglu_limit"),
        ({"activation": "silu_no_mul", "swiglu_limit": 7.0}, "swiglu_limit"),
        ({"n_shared_experts": -1}, "n_shared_experts"),
        ({"n_shared_experts": "two"}, "n_shared_experts"),
        ({"shared_experts": 3}, "shared_experts"),
        ({"top_k": 1, "n_shared_experts": 1, "apply_router_weight_on_input": True}, "apply_router_weight_on_input"),
        ({"max_num_tokens": 0}, "max_num_tokens"),
        ({"prefix": None}, "prefix"),
        ({"top_k": E + 1}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"process_group": "world"}, "process_group"),
        ({"parallel_config": {"ep_size": 1}}, "parallel_config"),
    ],
)
def test_what_cannot_work_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        make_layer(**options)


def test_eplb_needs_experts_in_the_order_of_ranks() -> None:
    parallel = FusedMoEParallelConfig.make(ep_size=2, expert_placement_strategy="round_robin")
    with pytest.raises(ConfigError, match="round_robin"):
        FusedMoE(8, 2, 32, 32, parallel_config=parallel, enable_eplb=True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"quant_type_id": "uint4b8"}, "quant_type_id"),
        ({"w2_quant_type_id": -3}, "quant_type_id"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": -2}, "group_size"),
        ({"w2_group_size": 1.5}, "w2_group_size"),
        ({"dispatch_dtype": "fp8"}, "dispatch_dtype"),
    ],
)
def test_a_quantization_that_does_not_exist(options: dict[str, Any], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        FusedMoEQuantConfig(**options)
    assert FusedMoEQuantConfig(quant_type_id=scalar_types.uint4b8.id, group_size=-1).is_quantized


def test_no_rank_has_more_experts_than_there_are() -> None:
    settings: dict[str, Any] = {
        "num_experts": 4,
        "experts_per_token": 2,
        "hidden_dim": 32,
        "intermediate_size_per_partition": 32,
        "moe_parallel_config": FusedMoEParallelConfig(),
        "in_dtype": torch.float32,
        "max_num_tokens": 8,
    }
    assert FusedMoEConfig(**settings, num_local_experts=5, num_fused_shared_experts=1).num_local_experts == 5
    with pytest.raises(ValueError, match="num_local_experts is 5"):
        FusedMoEConfig(**settings, num_local_experts=5)

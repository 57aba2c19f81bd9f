"""What becomes of a token's slots: routers of the caller's, identity and shared experts, replicas; what is refused."""

from __future__ import annotations

import pytest
import torch

from moe_ep.errors import check_router_weight_on_input
from moe_ep.routing import select_experts
from tests.routing.routing_rules import Rule


def swap_best_two(hidden_states, gating_output, topk, renormalize):
    """A custom router: the best ids in rising order of score, none for the last, weights from the hidden states."""
    ids = gating_output.topk(topk).indices.flip(1)
    ids[:, -1] = -1
    weights = hidden_states[:, :topk] + float(renormalize)
    return weights.double(), ids


def test_custom_routing() -> None:
    hidden_states = torch.tensor([[1.0, 2.0, 9.0]])
    weights, ids, _ = select_experts(
        hidden_states, torch.tensor([[0.0, 3.0, 1.0]]), 2, False, True,
        custom_routing_function=swap_best_two, routed_scaling_factor=10.0,
    )  # fmt: skip
    assert ids.tolist() == [[2, -1]] and ids.dtype == torch.int32
    assert weights.tolist() == [[20.0, 0.0]] and weights.dtype == torch.float32


def test_custom_ids_of_no_column_are_no_expert() -> None:
    def astray(hidden_states, gating_output, topk, renormalize):
        return torch.ones(1, topk), torch.tensor([[3, 4, -7]])

    weights, ids, _ = select_experts(
        torch.ones(1, 2), torch.zeros(1, 4), 3, False, False, custom_routing_function=astray
    )
    assert ids.tolist() == [[3, -1, -1]] and weights.tolist() == [[1.0, 0.0, 0.0]]


def test_custom_routing_and_zero_experts() -> None:
    def everything(hidden_states, gating_output, topk, renormalize):
        return torch.ones(1, topk), torch.arange(topk)[None]

    weights, ids, result = select_experts(
        torch.tensor([[1.0, -2.0]]), torch.zeros(1, 4), 4, False, False,
        custom_routing_function=everything, zero_expert_num=2, zero_expert_type="identity",
    )  # fmt: skip
    assert ids.tolist() == [[0, 1, -1, -1]]
    assert weights.tolist() == [[1.0, 1.0, 0.0, 0.0]]
    assert result.tolist() == [[2.0, -4.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_expert_result_is_rounded_once_to_the_dtype_of_the_hidden_states(dtype: torch.dtype) -> None:
    hidden_states = (torch.arange(100).view(2, 50) / 7).to(dtype)
    _, ids, result = select_experts(
        hidden_states, torch.tensor([[0.0, 1.0], [9.0, 0.0]]), 1, False, False,
        zero_expert_num=1, zero_expert_type="identity",
    )  # fmt: skip
    assert ids.tolist() == [[-1], [0]]
    weight = torch.tensor([0.0, 1.0]).softmax(0)[1]
    assert result.dtype == dtype
    assert torch.equal(
        result, torch.stack([(hidden_states[0].float() * weight).to(dtype), torch.zeros(50, dtype=dtype)])
    )


def test_zero_experts_add_nothing_to_tokens_that_chose_none() -> None:
    hidden_states = torch.tensor([[float("nan")] * 4, [float("inf")] * 4, [1.0] * 4])
    _, ids, result = select_experts(
        hidden_states, torch.tensor([[9.0, 0.0], [9.0, 0.0], [0.0, 9.0]]), 1, False, True,
        zero_expert_num=1, zero_expert_type="identity",
    )  # fmt: skip
    assert ids.tolist() == [[0], [0], [-1]]
    assert result.tolist() == [[0.0] * 4, [0.0] * 4, [1.0] * 4]


@pytest.mark.parametrize("num_shared", [1, 2])
@pytest.mark.parametrize("global_num_experts", [None, 12, 16])
def test_shared_experts_follow_the_routed_slots(num_shared: int, global_num_experts: int | None) -> None:
    rule = Rule(routed_scaling_factor=2.0)
    hidden_states, logits, _ = rule.make(5)
    routed_weights, routed_ids, _ = select_experts(hidden_states, logits, **rule.arguments())
    weights, ids, _ = select_experts(
        hidden_states, logits, **rule.arguments(),
        global_num_experts=global_num_experts, num_fused_shared_experts=num_shared,
    )  # fmt: skip
    assert torch.equal(weights[:, :3], routed_weights) and torch.equal(ids[:, :3], routed_ids)
    first = global_num_experts or 12
    assert ids[:, 3:].tolist() == [list(range(first, first + num_shared))] * 5
    assert (weights[:, 3:] == 1).all()


def test_eplb_gives_physical_ids_and_counts_routed_slots_only() -> None:
    """3 experts and an identity one; expert 1 has two replicas; a shared expert is appended behind 4 physical ones."""
    load = torch.zeros(4, dtype=torch.int32)
    weights, ids, _ = select_experts(
        torch.ones(3, 2),
        torch.tensor([[3.0, 2, 1, 0], [0, 3, 1, 2], [1, 2, 0, 3]]),
        2, False, False,
        zero_expert_num=1,
        zero_expert_type="identity",
        num_fused_shared_experts=1,
        enable_eplb=True,
        expert_load_view=load,
        logical_to_physical_map=torch.tensor([[2, -1], [0, 3], [1, -1]]),
        logical_replica_count=torch.tensor([1, 2, 1]),
    )  # fmt: skip
    # Expert 1 has three tokens: two for its first candidate, one for the other.
    assert ids.tolist() == [[2, 0, 4], [0, -1, 4], [-1, 3, 4]]
    assert load.tolist() == [2, 0, 1, 1]
    assert (weights[:, 2] == 1).all() and weights[1, 1] == weights[2, 0] == 0


@pytest.mark.parametrize(
    "rule", [Rule(), Rule(num_expert_group=4, topk_group=2, bias=True, zero_expert_num=4)], ids=str
)
def test_no_tokens(rule: Rule) -> None:
    hidden_states, logits, bias = rule.make(0)
    load = torch.zeros(12, dtype=torch.int32)
    weights, ids, zero_result = select_experts(
        hidden_states, logits, **rule.arguments(), e_score_correction_bias=bias, num_fused_shared_experts=2,
        enable_eplb=True, expert_load_view=load, logical_to_physical_map=torch.arange(12)[:, None],
        logical_replica_count=torch.ones(12, dtype=torch.int64),
    )  # fmt: skip
    assert weights.shape == ids.shape == (0, 5)
    assert load.sum() == 0
    assert zero_result is None if rule.zero_expert_num == 0 else zero_result.shape == (0, 4)


def no_ids(hidden_states, gating_output, topk, renormalize):
    return torch.ones(2, 2), torch.zeros(2, 2)


def wrong_shape(hidden_states, gating_output, topk, renormalize):
    return torch.ones(2, 1), torch.zeros(2, 1)


# Eight logical and ten physical experts.
EPLB = {
    "enable_eplb": True,
    "expert_load_view": torch.zeros(10, dtype=torch.int32),
    "logical_to_physical_map": torch.arange(8)[:, None],
    "logical_replica_count": torch.ones(8, dtype=torch.int32),
}

BAD: list[tuple[dict, str]] = [
    ({"router_logits": torch.zeros(3, 8)}, r"router_logits has shape \(3, 8\) and hidden_states \(2, 4\)"),
    ({"router_logits": torch.zeros(8)}, r"router_logits has shape \(8,\)"),
    ({"router_logits": None}, "router_logits is None; it must be a tensor"),
    ({"router_logits": torch.zeros(2, 8, dtype=torch.int64)}, "router_logits is torch.int64; it must be f32, f16 or"),
    ({"router_logits": torch.zeros(2, 8, device="meta")}, "router_logits is on meta and hidden_states on cpu; move"),
    ({"top_k": 2.0}, "top_k is 2.0; it must be a whole number"),
    ({"use_grouped_topk": True, "num_expert_group": 4.0, "topk_group": 2}, "num_expert_group is 4.0; it must be a who"),
    ({"zero_expert_num": 1.0}, "zero_expert_num is 1.0; it must be a whole number"),
    ({"e_score_correction_bias": [0.0] * 8}, "e_score_correction_bias is a list; it must be a tensor"),
    ({"e_score_correction_bias": torch.zeros(8, dtype=torch.int32)}, r"\(8,\) of torch.int32; it must have one value"),
    ({"custom_routing_function": no_ids}, "custom_routing_function returned ids of torch.float32; they must be uint8"),
    ({"top_k": 0}, "top_k is 0; it must be at least 1"),
    ({"top_k": 9}, "top_k is 9"),
    ({"scoring_func": "tanh"}, "scoring_func is 'tanh'; it must be one of softmax, sigmoid"),
    ({"scoring_func": ["softmax"]}, r"scoring_func is \[.softmax.\]; it must be one of softmax, sigmoid"),
    ({"e_score_correction_bias": torch.zeros(7)}, r"e_score_correction_bias has shape \(7,\)"),
    ({"use_grouped_topk": True}, "use_grouped_topk needs num_expert_group and topk_group, which are None and None"),
    ({"use_grouped_topk": True, "num_expert_group": 3, "topk_group": 1}, "num_expert_group is 3; it must divide"),
    ({"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 5}, "topk_group is 5; it must be at least 1"),
    ({"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 1}, "top_k is 2; it must be at most"),
    ({"zero_expert_num": 8, "zero_expert_type": "identity"}, "zero_expert_num is 8"),
    ({"zero_expert_num": 1, "zero_expert_type": "zero"}, "zero_expert_type is 'zero'; it must be one of identity"),
    ({"zero_expert_num": 1}, "zero_expert_type is None"),
    ({"global_num_experts": 7}, r"global_num_experts is 7; it must be at least the routed experts .* \(8\)"),
    ({"global_num_experts": 8.5}, "global_num_experts is 8.5; it must be a whole number"),
    (EPLB | {"global_num_experts": 9}, r"global_num_experts is 9; it must be at least the physical experts .* \(10\)"),
    (EPLB | {"logical_replica_count": torch.ones(7)}, "logical_replica_count is of 7 experts and router_logits of 8"),
    ({"global_num_experts": 2**15 + 1, "indices_type": torch.int16}, "32769 experts have ids up to 32768, which torch"),
    ({"e_score_correction_bias": torch.zeros(8, device="meta")}, "e_score_correction_bias is on meta and router_logi"),
    ({"custom_routing_function": lambda **_: None}, r"returned a NoneType; it must be \(weights, ids\)"),
    ({"num_fused_shared_experts": -1}, "num_fused_shared_experts is -1"),
    ({"indices_type": torch.float32}, "indices_type is 'torch.float32'; it must be one of torch.int16, torch.int32"),
    (
        {"enable_eplb": True, "logical_to_physical_map": torch.eye(8), "logical_replica_count": torch.ones(8)},
        "enable_eplb needs expert_load_view, logical_to_physical_map and logical_replica_count",
    ),
    (
        {"enable_eplb": True, "expert_load_view": torch.zeros(8), "logical_to_physical_map": torch.eye(8)},
        "enable_eplb needs expert_load_view, logical_to_physical_map and logical_replica_count",
    ),
    ({"custom_routing_function": wrong_shape}, r"returned weights \(2, 1\).*shape \(T, top_k\) = \(2, 2\)"),
    (
        {"custom_routing_function": wrong_shape, "e_score_correction_bias": torch.zeros(8)},
        "custom_routing_function is given together with",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_arguments(changes: dict, message: str) -> None:
    arguments = {
        "hidden_states": torch.zeros(2, 4),
        "router_logits": torch.zeros(2, 8),
        "top_k": 2,
        "use_grouped_topk": False,
        "renormalize": True,
    }
    with pytest.raises((ValueError, TypeError), match=message):
        select_experts(**{**arguments, **changes})


def test_router_weight_on_input_needs_one_expert() -> None:
    check_router_weight_on_input(1)
    with pytest.raises(ValueError, match="apply_router_weight_on_input needs top_k 1 and top_k is 2"):
        check_router_weight_on_input(2)

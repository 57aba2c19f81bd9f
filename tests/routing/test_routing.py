"""Which experts a token gets, against a loop over tokens in Python floats, and the worked examples."""

from __future__ import annotations

import itertools

import pytest
import torch

from moe_ep.routing import select_experts
from moe_ep.routing.topk import SCORING_FUNCS
from tests.routing.routing_rules import Rule, route_by_hand

# f32 arithmetic of a softmax over at most 64 columns against Python's f64.
WEIGHT_RTOL, WEIGHT_ATOL = 1e-5, 1e-7


def assert_routed_alike(rule: Rule, num_tokens: int, dtype: torch.dtype = torch.float32) -> None:
    hidden_states, logits, bias = rule.make(num_tokens)
    weights, ids, zero_result = select_experts(
        hidden_states, logits.to(dtype), **rule.arguments(), e_score_correction_bias=bias
    )
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert weights.shape == ids.shape == (num_tokens, rule.top_k)
    expected_zero = torch.zeros_like(hidden_states)
    for token, row in enumerate(logits.tolist()):
        expected_weights, expected_ids = route_by_hand(rule, row, None if bias is None else bias.tolist())
        for slot, expert in enumerate(expected_ids):
            if expert >= rule.num_experts:
                expected_zero[token] += expected_weights[slot] * hidden_states[token]
                expected_weights[slot], expected_ids[slot] = 0.0, -1
        assert ids[token].tolist() == expected_ids
        torch.testing.assert_close(weights[token], torch.tensor(expected_weights), rtol=WEIGHT_RTOL, atol=WEIGHT_ATOL)
    if rule.zero_expert_num:
        torch.testing.assert_close(zero_result, expected_zero, rtol=WEIGHT_RTOL, atol=1e-6)
    else:
        assert zero_result is None


RULES = [
    Rule(
        scoring_func=scoring_func, renormalize=renormalize, num_expert_group=groups, topk_group=kept, bias=bias,
        routed_scaling_factor=factor,
    )
    for scoring_func, renormalize, (groups, kept), bias, factor in itertools.product(
        SCORING_FUNCS, (True, False), ((1, 1), (4, 1), (4, 2), (3, 3), (12, 4)), (True, False), (1.0, 2.5)
    )
] + [
    Rule(scoring_func=scoring_func, renormalize=renormalize, bias=bias, zero_expert_num=num, routed_scaling_factor=6.0)
    for scoring_func, renormalize, bias, num in itertools.product(
        SCORING_FUNCS, (True, False), (True, False), (1, 12)
    )
] + [Rule(num_experts=1, top_k=1), Rule(num_experts=5, top_k=5), Rule(num_experts=64, top_k=32, bias=True)]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_against_a_loop(rule: Rule) -> None:
    assert_routed_alike(rule, num_tokens=24)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_logits_of_any_dtype_are_computed_in_f32(dtype: torch.dtype, bias: bool) -> None:
    assert_routed_alike(Rule(scoring_func="sigmoid", bias=bias, num_expert_group=4, topk_group=2), 8, dtype)


GROUPED = {
    "router_logits": torch.tensor([[2, -1, 0.5, 0, 1, 1.2, -2, 3]]),
    "hidden_states": torch.zeros(1, 4),
    "top_k": 2,
    "use_grouped_topk": True,
    "num_expert_group": 4,
    "topk_group": 2,
    "scoring_func": "sigmoid",
}
GROUPED_BIAS = torch.tensor([0, 0, 0, 0, 0.3, 0.3, 0, -0.9])


@pytest.mark.parametrize(("renormalize", "expected"), [(False, [0.7685, 0.7311]), (True, [0.5125, 0.4875])])
def test_worked_example_with_bias(renormalize: bool, expected: list[float]) -> None:
    weights, ids, _ = select_experts(**GROUPED, renormalize=renormalize, e_score_correction_bias=GROUPED_BIAS)
    assert ids.tolist() == [[5, 4]]
    torch.testing.assert_close(weights, torch.tensor([expected]), rtol=0, atol=5e-5)


def test_worked_example_without_bias() -> None:
    assert select_experts(**GROUPED, renormalize=False)[1].tolist() == [[7, 0]]


def test_one_group_is_as_none() -> None:
    grouped = GROUPED | {"num_expert_group": 1, "topk_group": 1}
    assert select_experts(**grouped, renormalize=False)[1].tolist() == [[7, 0]]
    with pytest.raises(ValueError, match="num_expert_group is 0"):
        select_experts(**grouped | {"num_expert_group": 0}, renormalize=False)


def plain(logits: torch.Tensor, top_k: int, **more) -> tuple[torch.Tensor, ...]:
    return select_experts(torch.zeros(logits.size(0), 2), logits, top_k, False, True, **more)


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0], [-0.0, 0.0, -0.0, 0.0, 0.0, -1.0]])
    assert plain(logits, 3)[1].tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, 2]]


def test_scores_that_round_alike_are_still_told_apart() -> None:
    """Both sigmoids are 1.0 in f32."""
    logits = torch.tensor([[30.0, 31.0, 0.0]])
    assert plain(logits, 2, scoring_func="sigmoid")[1].tolist() == [[1, 0]]


@pytest.mark.parametrize("bias", [None, torch.zeros(8)])
@pytest.mark.parametrize("scoring_func", SCORING_FUNCS)
def test_ids_are_valid_and_distinct_whatever_the_logits_hold(scoring_func: str, bias: torch.Tensor | None) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan] * 8, [-inf] * 8, [inf] * 8, [nan, 1, -inf, 2, inf, nan, 0, -1]])
    ids = select_experts(
        torch.zeros(4, 2), logits, 3, True, True, 2, 4, None, scoring_func, e_score_correction_bias=bias
    )[1]
    for row in ids.tolist():
        assert len(set(row)) == 3 and all(0 <= expert < 8 for expert in row)
    if bias is None:
        # Of the groups with inf and 2 the largest, and NaN behind what is smallest.
        assert ids[3].tolist() == [4, 3, 2]


def test_small_scores_are_renormalized_too() -> None:
    weights, _, _ = select_experts(
        torch.zeros(1, 2), torch.tensor([[-60.0, -70.0, -60.0]]), 2, False, True, scoring_func="sigmoid"
    )
    assert weights.tolist() == [[0.5, 0.5]]


def test_sigmoid_scores_that_are_all_zero_give_zero_weights() -> None:
    weights, _, _ = plain(torch.full((1, 4), -1e4), 2, scoring_func="sigmoid")
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("indices_type", [None, torch.int32, torch.int64, torch.int16])
def test_indices_type(indices_type: torch.dtype | None) -> None:
    _, ids, _ = plain(torch.eye(4), 2, indices_type=indices_type)
    assert ids.dtype == (indices_type or torch.int32)
    assert ids.tolist() == [[0, 1], [1, 0], [2, 0], [3, 0]]

"""Routing against a loop over tokens in Python floats, and the worked examples."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch

from moe_ep.errors import check_router_weight_on_input
from moe_ep.routing import select_experts

# f32 arithmetic of a softmax over at most 64 columns against Python's f64.
WEIGHT_RTOL, WEIGHT_ATOL = 1e-5, 1e-7


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One way of routing: everything the oracle and select_experts both need."""

    num_experts: int = 12
    top_k: int = 3
    scoring_func: str = "softmax"
    renormalize: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    bias: bool = False
    routed_scaling_factor: float = 1.0
    zero_expert_num: int = 0

    @property
    def num_columns(self) -> int:
        return self.num_experts + self.zero_expert_num

    def make(self, num_tokens: int, seed: int = 0, hidden_size: int = 4) -> tuple[torch.Tensor, ...]:
        """(hidden_states, router_logits, bias | None). Logits lie on a coarse grid, so that many are equal."""
        generator = torch.Generator().manual_seed(seed)
        hidden_states = torch.randn(num_tokens, hidden_size, generator=generator)
        logits = torch.randint(-8, 9, (num_tokens, self.num_columns), generator=generator) / 4
        bias = torch.randint(-3, 4, (self.num_columns,), generator=generator) / 8
        return hidden_states, logits, bias if self.bias else None

    def arguments(self) -> dict:
        return {
            "top_k": self.top_k,
            "use_grouped_topk": self.num_expert_group > 1,
            "renormalize": self.renormalize,
            "topk_group": self.topk_group,
            "num_expert_group": self.num_expert_group,
            "scoring_func": self.scoring_func,
            "routed_scaling_factor": self.routed_scaling_factor,
            "zero_expert_num": self.zero_expert_num,
            "zero_expert_type": "identity" if self.zero_expert_num else None,
        }


def best(values: dict[int, float], count: int) -> list[int]:
    """Keys of the largest values, lowest key first among equals. Values a rounding apart count as equal."""
    return sorted(values, key=lambda key: (-round(values[key], 5), key))[:count]


def route_by_hand(rule: Rule, logits: list[float], bias: list[float] | None) -> tuple[list[float], list[int]]:
    """One token: (weights, ids), identity experts still among them."""
    if rule.scoring_func == "softmax":
        powers = [math.exp(value) for value in logits]
        scores = [power / sum(powers) for power in powers]
    else:
        scores = [1 / (1 + math.exp(-value)) for value in logits]
    choice = {e: score + (bias[e] if bias else 0.0) for e, score in enumerate(scores)}
    size = rule.num_columns // rule.num_expert_group
    group_scores = {}
    for group in range(rule.num_expert_group):
        members = sorted((choice[e] for e in range(group * size, (group + 1) * size)), reverse=True)
        group_scores[group] = sum(members[:2]) if bias else members[0]
    kept = best(group_scores, rule.topk_group)
    ids = best({e: value for e, value in choice.items() if e // size in kept}, rule.top_k)
    weights = [scores[e] for e in ids]
    if rule.renormalize:
        weights = [weight / sum(scores[e] for e in ids) for weight in weights]
    return [weight * rule.routed_scaling_factor for weight in weights], ids


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
        ("softmax", "sigmoid"), (True, False), ((1, 1), (4, 1), (4, 2), (3, 3), (12, 4)), (True, False), (1.0, 2.5)
    )
] + [
    Rule(scoring_func=scoring_func, renormalize=renormalize, bias=bias, zero_expert_num=num, routed_scaling_factor=6.0)
    for scoring_func, renormalize, bias, num in itertools.product(
        ("softmax", "sigmoid"), (True, False), (True, False), (1, 12)
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
    with pytest.raises(ValueError, match="num_expert_group is 0; it must divide"):
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
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
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


def wrong_shape(hidden_states, gating_output, topk, renormalize):
    return torch.ones(2, 1), torch.zeros(2, 1)


BAD: list[tuple[dict, str]] = [
    ({"router_logits": torch.zeros(3, 8)}, r"router_logits has shape \(3, 8\) and hidden_states \(2, 4\)"),
    ({"router_logits": torch.zeros(8)}, r"router_logits has shape \(8,\)"),
    ({"top_k": 0}, r"top_k is 0; it must be at least 1 and at most the columns of router_logits \(8\)"),
    ({"top_k": 9}, "top_k is 9"),
    ({"scoring_func": "tanh"}, "scoring_func is 'tanh'; it must be one of softmax, sigmoid"),
    ({"e_score_correction_bias": torch.zeros(7)}, r"e_score_correction_bias has shape \(7,\)"),
    ({"use_grouped_topk": True}, "use_grouped_topk needs num_expert_group and topk_group, which are None and None"),
    ({"use_grouped_topk": True, "num_expert_group": 3, "topk_group": 1}, "num_expert_group is 3; it must divide"),
    ({"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 5}, "topk_group is 5; it must be at least 1"),
    ({"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 1}, "top_k is 2; it must be at most"),
    ({"zero_expert_num": 8, "zero_expert_type": "identity"}, "zero_expert_num is 8"),
    ({"zero_expert_num": 1, "zero_expert_type": "zero"}, "zero_expert_type is 'zero'; it must be one of identity"),
    ({"zero_expert_num": 1}, "zero_expert_type is None"),
    ({"global_num_experts": 7}, r"global_num_experts is 7; it must be at least the routed experts .* \(8\)"),
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
    with pytest.raises(ValueError, match=message):
        select_experts(**{**arguments, **changes})


def test_router_weight_on_input_needs_one_expert() -> None:
    check_router_weight_on_input(1)
    with pytest.raises(ValueError, match="apply_router_weight_on_input needs top_k 1 and top_k is 2"):
        check_router_weight_on_input(2)

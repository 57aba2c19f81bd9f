"""Reduce strategies against plain loops; rows that belong to nobody hold NaN."""

from typing import Any

import pytest
import torch

from moe_ep.modular_kernel.weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOP,
    undelegated,
)
from tests.wrong_tensors import FORMS, check_refused

T, TOPK, K, EL = 5, 3, 4, 2
IDS = torch.tensor([[0, 3, -1], [2, 1, 0], [-1, -1, -1], [3, 2, 1], [1, -1, 2]])
WEIGHTS = torch.rand(T, TOPK)


@pytest.mark.parametrize("on_input", [False, True])
def test_contiguous(on_input):
    rows = torch.randn(T, TOPK, K)
    rows[IDS < 0] = float("nan")
    expected = torch.zeros(T, K)
    for t in range(T):
        for slot in range(TOPK):
            if IDS[t, slot] >= 0:
                expected[t] += rows[t, slot] * (1.0 if on_input else WEIGHTS[t, slot])
    output = torch.full((T, K), float("nan"))
    got = TopKWeightAndReduceContiguous().apply(output, rows, WEIGHTS, IDS, on_input)
    assert got is output and torch.equal(got, expected)
    flat = TopKWeightAndReduceContiguous().apply(None, rows.view(T * TOPK, K), WEIGHTS, IDS, on_input)
    assert torch.equal(flat, expected)


@pytest.mark.parametrize("shape", [(0, TOPK, K), (0, K)])
def test_contiguous_without_tokens(shape):
    none = TopKWeightAndReduceContiguous().apply(None, torch.empty(shape), WEIGHTS[:0], IDS[:0], False)
    assert none.shape == (0, K)


@pytest.mark.parametrize("rank", [0, 1])
def test_naive_batched(rank):
    rows = torch.full((EL, T, K), float("nan"))
    expected = torch.zeros(T, K)
    for local in range(EL):
        filled = 0
        for t in range(T):
            for slot in range(TOPK):
                if IDS[t, slot] == rank * EL + local:
                    rows[local, filled] = torch.randn(K)
                    expected[t] += rows[local, filled] * WEIGHTS[t, slot]
                    filled += 1
    got = TopKWeightAndReduceNaiveBatched(rank).apply(None, rows, WEIGHTS, IDS, False)
    assert torch.equal(got, expected)


def test_noop_copies_only_where_it_must():
    done = torch.randn(T, K)
    assert TopKWeightAndReduceNoOP().apply(None, done, WEIGHTS, IDS, False) is done
    other = torch.empty(T, K)
    assert TopKWeightAndReduceNoOP().apply(other, done, WEIGHTS, IDS, False) is other
    assert torch.equal(other, done)
    with pytest.raises(ValueError, match="^output is torch.float32 .6, 4."):
        TopKWeightAndReduceNoOP().apply(torch.empty(T + 1, K), done, WEIGHTS, IDS, False)


STRATEGIES = {
    "contiguous": (TopKWeightAndReduceContiguous(), torch.zeros(T, TOPK, K)),
    "batched": (TopKWeightAndReduceNaiveBatched(0), torch.zeros(EL, T, K)),
}
SHAPES = ("no dimension", "one dimension more", "longer", "shorter", "one more")
NUMBERS = ("nothing", "list", "complex", "bool", "elsewhere")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("output", form) for form in (*NUMBERS[1:], *SHAPES)),
        *(("fused_expert_output", form) for form in (*NUMBERS[:-1], *SHAPES[:2])),
        *(("topk_weights", form) for form in (*NUMBERS, *SHAPES)),
        *(("topk_ids", form) for form in (*NUMBERS, "f64", *SHAPES[:2])),
    ],
)
def test_wrong_tensors(strategy, name, form):
    reduce_impl, rows = STRATEGIES[strategy]
    given = {"output": torch.zeros(T, K), "fused_expert_output": rows, "topk_weights": WEIGHTS, "topk_ids": IDS}
    wrong = given | {name: FORMS[form](given[name]), "apply_router_weight_on_input": False}
    check_refused(reduce_impl.apply, wrong, name)


def test_rows_of_other_slots():
    with pytest.raises(ValueError, match=r"^fused_expert_output has shape .* it must be \(\d+, \d+, K\) or"):
        TopKWeightAndReduceContiguous().apply(None, torch.zeros(T, K), WEIGHTS, IDS, False)
    with pytest.raises(ValueError, match=r"^fused_expert_output has shape .* it must be \(\d+, \d+, K\) or"):
        TopKWeightAndReduceContiguous().apply(None, torch.zeros(T, K, TOPK), WEIGHTS, IDS, False)


def test_delegate_cannot_be_applied():
    with pytest.raises(RuntimeError, match="prepare/finalize"):
        TopKWeightAndReduceDelegate().apply(None, torch.zeros(T, K), WEIGHTS, IDS, False)


@pytest.mark.parametrize("strategy", [None, TopKWeightAndReduceContiguous])
def test_backends_take_only_strategies(strategy: Any) -> None:
    with pytest.raises(ValueError, match="^weight_and_reduce_impl is"):
        undelegated(strategy)


def test_backends_reduce_what_experts_delegate() -> None:
    assert undelegated(TopKWeightAndReduceDelegate()) == TopKWeightAndReduceContiguous()
    assert undelegated(TopKWeightAndReduceNoOP()) == TopKWeightAndReduceNoOP()


def test_ranks_are_whole_numbers_from_0_on():
    for rank, error in ((-1, ValueError), (0.5, TypeError)):
        with pytest.raises(error, match=f"rank is {rank}"):
            TopKWeightAndReduceNaiveBatched(rank)


def test_equality_is_by_kind_and_rank():
    assert TopKWeightAndReduceNoOP() == TopKWeightAndReduceNoOP()
    assert TopKWeightAndReduceNoOP() != TopKWeightAndReduceDelegate()
    assert TopKWeightAndReduceNaiveBatched(1) == TopKWeightAndReduceNaiveBatched(1)
    assert TopKWeightAndReduceNaiveBatched(1) != TopKWeightAndReduceNaiveBatched(0)
    assert len({TopKWeightAndReduceNoOP(), TopKWeightAndReduceNoOP(), TopKWeightAndReduceContiguous()}) == 2

"""The weighted sum over slots: plain, in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from moe_ep.kernels.mul_sum import moe_fused_mul_sum
from tests.kernels.mul_sum_cases import CASES, DTYPES, Case, assert_is_the_sum, check_triton, make_inputs
from tests.wrong_tensors import FORMS, check_refused


def test_worked_example() -> None:
    inputs = torch.tensor([[[2.0, 4.0], [1.0, float("nan")]]])
    weights = torch.tensor([[0.5, 2.0]])
    assert moe_fused_mul_sum(inputs, weights, topk_ids=torch.tensor([[3, -1]])).tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_a_loop(case: Case) -> None:
    arguments = make_inputs(case, "cpu")
    output = moe_fused_mul_sum(**arguments)
    assert output.dtype == case.dtype
    assert_is_the_sum(output, arguments)
    given = torch.full_like(output, float("nan"))
    assert moe_fused_mul_sum(**arguments, outputs=given) is given
    assert torch.equal(given, output)


def test_slots_are_added_in_order_in_f32() -> None:
    """2**24 + 1 - 2**24 is 0 in that order in f32 and 1 in any other."""
    inputs = torch.tensor([2.0**24, 1.0, -(2.0**24)]).view(1, 3, 1)
    assert moe_fused_mul_sum(inputs, torch.ones(1, 3)).item() == 0.0
    assert moe_fused_mul_sum(inputs[:, [0, 2, 1]], torch.ones(1, 3)).item() == 1.0


def test_no_slot_counts_gives_zero() -> None:
    inputs = torch.full((2, 3, 4), float("nan"))
    ids = torch.full((2, 3), -1)
    assert torch.equal(moe_fused_mul_sum(inputs, torch.ones(2, 3), topk_ids=ids), torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_tokens(dtype: torch.dtype) -> None:
    output = moe_fused_mul_sum(torch.empty(0, 2, 8, dtype=dtype), torch.empty(0, 2))
    assert output.shape == (0, 8) and output.dtype == dtype


GIVEN = {
    "inputs": torch.zeros(4, 2, 8),
    "topk_weights": torch.ones(4, 2),
    "outputs": torch.zeros(4, 8),
    "topk_ids": torch.zeros(4, 2, dtype=torch.int32),
    "expert_map": torch.zeros(3, dtype=torch.int32),
}
SHAPES = ("no dimension", "one dimension more", "longer", "shorter", "one more")
KINDS = ("list", "complex", "bool", "elsewhere")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("inputs", form) for form in ("nothing", "f64", "list", "complex", "bool", *SHAPES[:2])),
        *(("topk_weights", form) for form in ("nothing", *KINDS, *SHAPES)),
        *(("outputs", form) for form in ("f64", *KINDS, *SHAPES)),
        *(("topk_ids", form) for form in ("f64", *KINDS, *SHAPES)),
        *(("expert_map", form) for form in ("f64", *KINDS, *SHAPES[:2])),
    ],
)
def test_wrong_tensors(name: str, form: str) -> None:
    check_refused(moe_fused_mul_sum, GIVEN | {name: FORMS[form](GIVEN[name])}, name)


def test_a_map_asks_for_ids() -> None:
    check_refused(moe_fused_mul_sum, GIVEN | {"topk_ids": None}, "expert_map")


def test_ids_are_those_of_the_map() -> None:
    ids = torch.full_like(GIVEN["topk_ids"], len(GIVEN["expert_map"]))
    with pytest.raises(ValueError, match=r"topk_ids goes up to (\d+) and expert_map has \1 experts"):
        moe_fused_mul_sum(**GIVEN | {"topk_ids": ids})


def test_blocks_follow_shape_and_element_size() -> None:
    pytest.importorskip("triton")
    from moe_ep.kernels.mul_sum import choose_blocks

    assert choose_blocks(4096, 7168, 2) == (1024, 4)
    assert choose_blocks(4096, 7168, 4) == (512, 4)
    assert choose_blocks(1, 7168, 2) == (256, 1)
    assert choose_blocks(4096, 64, 2) == (256, 1)


GPU_CASES = [
    *CASES,
    *(
        Case(num_tokens=num_tokens, topk=8, hidden_size=7168, dtype=dtype, ids=ids)
        for num_tokens in (1, 128)
        for dtype in DTYPES
        for ids in ("none", "mapped")
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_triton_on_a_gpu(case: Case) -> None:
    check_triton("cuda", [case])


@pytest.mark.gpu
def test_strided_inputs_on_a_gpu() -> None:
    case = Case(num_tokens=6, topk=4, hidden_size=512, dtype=torch.bfloat16, ids="ids")
    arguments = make_inputs(case, "cuda")
    expected = moe_fused_mul_sum(**arguments)
    arguments["inputs"] = arguments["inputs"].transpose(0, 1).contiguous().transpose(0, 1)
    arguments["topk_ids"] = arguments["topk_ids"].t().contiguous().t()
    assert torch.equal(moe_fused_mul_sum(**arguments), expected)

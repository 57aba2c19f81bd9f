"""Rows rounded to int8 and e4m3 beside every number type of the weights, on the CPU: values, errors, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.config import FusedMoEQuantConfig
from moe_ep.kernels.marlin import BatchedMarlinExperts, MarlinExperts, batched_fused_marlin_moe, fused_marlin_moe
from moe_ep.kernels.marlin.types import WEIGHT_TYPES, WeightType, check_input_dtype
from moe_ep.kernels.quantize import quantize_rows, round_rows, row_values, split_rows
from moe_ep.layer.methods import relative_error
from moe_ep.modular_kernel import ExpertTokensMetadata
from moe_ep.quantization.input_rows import INPUT_DTYPES
from moe_ep.scalar_type import scalar_types
from tests.kernels.marlin_cases import E, Made, arguments, make, moe_config

SILU = MoEActivation.SILU
T = 24
ERRORS = {torch.int8: 0.022, torch.float8_e4m3fn: 0.05}
PAIRS = [
    (dtype, WEIGHT_TYPES[scalar_type.id], group)
    for dtype, scalar_types_ in INPUT_DTYPES.items()
    for scalar_type in scalar_types_
    for group in WEIGHT_TYPES[scalar_type.id].group_sizes
    if group != 16  # nvfp4
]
IMPOSSIBLE = [
    (dtype, kind, kind.group_sizes[-1])
    for dtype, fitting in INPUT_DTYPES.items()
    for kind in WEIGHT_TYPES.values()
    if kind.scalar_type not in fitting
] + [(dtype, WEIGHT_TYPES[scalar_types.float4_e2m1f.id], 16) for dtype in INPUT_DTYPES]


def ids(value: Any) -> str:
    return str(getattr(value, "scalar_type", value))


def experts(
    kind: WeightType, group: int, K: int, N: int, activation: MoEActivation = SILU, **more: Any
) -> tuple[Made, Made, dict[str, Any]]:
    gated = activation.is_gated
    first = make(kind, group, 2 * N if gated else N, K, gated, 1, **more)
    second = make(kind, group, K, N, False, 2, **more)
    return first, second, arguments(first, second, kind, activation)


def tokens(K: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    return {
        "hidden_states": torch.randn(T, K, generator=rng).to(dtype),
        "topk_weights": torch.rand(T, 2, generator=rng),
        "topk_ids": torch.stack([torch.randperm(E, generator=rng)[:2] for _ in range(T)]),
    }


@pytest.mark.parametrize(("dtype", "kind", "group"), PAIRS, ids=ids)
def test_errors_are_those_of_the_number_type(dtype: torch.dtype, kind: WeightType, group: int) -> None:
    _, _, more = experts(kind, group, 512, 256)
    given = tokens(512)
    exact = fused_marlin_moe(**given, **more)
    rounded = fused_marlin_moe(**given, **more, input_dtype=dtype)
    assert 0.001 < relative_error(rounded, exact) < ERRORS[dtype]
    rows = given["hidden_states"].expand(E, T, 512).contiguous()
    counts = torch.full((E,), T, dtype=torch.int32)
    batched = batched_fused_marlin_moe(rows, counts, **more, input_dtype=dtype)
    summed = (batched[given["topk_ids"], torch.arange(T)[:, None]].float() * given["topk_weights"][..., None]).sum(1)
    assert relative_error(summed, rounded) < 0.005


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
@pytest.mark.parametrize(("K", "N"), [(64, 64), (160, 96), (320, 192), (2880, 64)])
@pytest.mark.parametrize("activation", [SILU, MoEActivation.SWIGLUOAI, MoEActivation.RELU2_NO_MUL])
def test_the_last_scale_covers_the_columns_that_remain(
    dtype: torch.dtype, K: int, N: int, activation: MoEActivation
) -> None:
    """A loop over groups of 128 columns (all of them for w13) in f64, from the values that were packed."""
    kind = WEIGHT_TYPES[scalar_types.uint4b8.id]
    first, second, more = experts(kind, 32, K, N, activation, dtype=torch.float16)
    rows = torch.randn(E, 4, K, generator=torch.Generator().manual_seed(5)).half()
    got = batched_fused_marlin_moe(rows, torch.full((E,), 4, dtype=torch.int32), **more, input_dtype=dtype)

    def product(x: torch.Tensor, values: torch.Tensor, group: int) -> torch.Tensor:
        total = torch.zeros(len(x), len(values), dtype=torch.float64)
        for start in range(0, x.size(1), group):
            part, w = x[:, start : start + group].float(), values[:, start : start + group].double()
            scale = part.abs().amax(1, keepdim=True) / (127 if dtype is torch.int8 else 448)
            codes = torch.round(part / scale) if dtype is torch.int8 else (part / scale).to(dtype).float()
            total += (codes.double() @ w.T) * scale.double()
        return total

    for expert in range(E):
        hidden = apply_activation(activation, product(rows[expert], first.values[expert], K).float())
        expected = product(hidden, second.values[expert], 128)
        assert relative_error(got[expert].double(), expected) < 1e-3


@pytest.mark.parametrize(("dtype", "kind"), [(torch.int8, "uint4b8"), (torch.float8_e4m3fn, "float8_e4m3fn")], ids=str)
def test_rows_that_come_quantized_are_computed_as_they_came(dtype: torch.dtype, kind: str) -> None:
    """By both classes: the product of w13 is that of the codes and scales, and the hidden rows are rounded."""
    K, N, weight_type = 320, 192, WEIGHT_TYPES[getattr(scalar_types, kind).id]
    first, second, more = experts(weight_type, -1, K, N)
    given = tokens(K)
    quant = FusedMoEQuantConfig(
        quant_type_id=weight_type.scalar_type.id,
        w1_scale=more["w1_scale"],
        w2_scale=more["w2_scale"],
        input_dtype=dtype,
    )
    config = moe_config(hidden_dim=K, intermediate_size_per_partition=N, max_num_tokens=T)
    codes, scales = split_rows(quantize_rows(given["hidden_states"], dtype), K, dtype)
    values = row_values(codes, scales)
    expected = torch.zeros(T, K)
    every = torch.zeros(E, T, K)
    for expert in range(E):
        hidden = round_rows(apply_activation(SILU, values @ first.values[expert].T), dtype)
        every[expert] = hidden @ second.values[expert].T
        weight = torch.where(given["topk_ids"] == expert, given["topk_weights"], 0.0).sum(1, keepdim=True)
        expected += weight * every[expert]
    scratch, weights = [torch.empty(0, dtype=torch.bfloat16)] * 2, (given["topk_weights"], given["topk_ids"])
    output = torch.empty(T, K, dtype=torch.bfloat16)
    made = MarlinExperts(config, quant)
    assert (
        made.takes_quantized_rows() and not MarlinExperts(config, quant.with_input_dtype(None)).takes_quantized_rows()
    )
    made.apply(output, codes, more["w1"], more["w2"], *weights, SILU, E, None, scales, None, *scratch, None, False)
    assert relative_error(output, expected) < 0.005
    batched, meta = torch.empty(E, T, K, dtype=torch.bfloat16), ExpertTokensMetadata.make_from_list([T] * E, "cpu")
    rows = codes.expand(E, T, K), scales.expand(E, T, -1)
    BatchedMarlinExperts(config, quant, T, 1).apply(
        batched, rows[0], more["w1"], more["w2"], *weights, SILU, E, None, rows[1], None, *scratch, meta, False
    )
    assert relative_error(batched, every) < 0.005
    for wrong in (scales[:, :2], scales[1:], scales.double()):
        with pytest.raises(ValueError, match=r"a1q_scale is .* beside rows of .*; it must be torch.float32 of"):
            made.apply(
                output, codes, more["w1"], more["w2"], *weights, SILU, E, None, wrong, None, *scratch, None, False
            )
    with pytest.raises(ValueError, match="a1q_scale .*torch.uint8"):
        wrong = codes.view(torch.uint8)
        made.apply(output, wrong, more["w1"], more["w2"], *weights, SILU, E, None, scales, None, *scratch, None, False)


@pytest.mark.parametrize(("dtype", "kind", "group"), IMPOSSIBLE, ids=ids)
@pytest.mark.parametrize("batched", [False, True])
def test_impossible_pairs_are_refused_by_both_names(
    dtype: torch.dtype, kind: WeightType, group: int, batched: bool
) -> None:
    _, _, more = experts(kind, group, 128, 128)
    with pytest.raises(ValueError, match=f"{dtype}.*{kind.scalar_type}"):
        if batched:
            rows = torch.zeros(E, 2, 128).bfloat16()
            batched_fused_marlin_moe(rows, torch.zeros(E, dtype=torch.int32), **more, input_dtype=dtype)
        else:
            fused_marlin_moe(**tokens(128), **more, input_dtype=dtype)


def test_gpus_that_do_not_multiply_e4m3_are_named() -> None:
    kind, bf16 = WEIGHT_TYPES[scalar_types.uint4b8.id], torch.bfloat16
    with pytest.raises(ValueError, match="torch.float8_e4m3fn .*uint4b8 .*8.0"):
        check_input_dtype(kind, bf16, bf16, torch.float8_e4m3fn, (8, 0))
    check_input_dtype(kind, bf16, bf16, torch.float8_e4m3fn, (9, 0))
    check_input_dtype(kind, bf16, bf16, torch.int8, (8, 0))
    with pytest.raises(ValueError, match=r"^input_dtype is \[\]; it must be None, torch.int8, torch.float8_e4m3fn, or"):
        check_input_dtype(kind, bf16, bf16, [])


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8, torch.float8_e5m2, "int8"])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    _, _, more = experts(WEIGHT_TYPES[scalar_types.uint4b8.id], 32, 128, 128)
    with pytest.raises(ValueError, match=f"input_dtype is {dtype}"):
        fused_marlin_moe(**tokens(128), **more, input_dtype=dtype)
    same = fused_marlin_moe(**tokens(128), **more, input_dtype=torch.bfloat16)
    assert torch.equal(same, fused_marlin_moe(**tokens(128), **more))


def test_rounding_is_to_nearest_even() -> None:
    row = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 0.0]])
    assert round_rows(row, torch.int8).tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0, -2.0, 126.0, 0.0]]
    zeros = torch.zeros(2, 200)
    for dtype in INPUT_DTYPES:
        assert torch.equal(round_rows(zeros, dtype), zeros)
        assert round_rows(torch.tensor([[float("nan"), 1.0]]), dtype).isnan().any()

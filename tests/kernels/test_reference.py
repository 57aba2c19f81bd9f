"""Reference experts: both formats, plain and quantized, against loops over single rows."""

import pytest
import torch

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.modular_kernel import ExpertTokensMetadata, make_experts
from moe_ep.scalar_type import scalar_types

EL, K, N, ROWS = 3, 32, 64, 6
COUNTS = [4, 0, 6]


def moe_config(dtype=torch.float32, activation="silu"):
    return FusedMoEConfig(
        num_experts=EL,
        experts_per_token=2,
        hidden_dim=K,
        intermediate_size_per_partition=N,
        num_local_experts=EL,
        moe_parallel_config=FusedMoEParallelConfig.make(),
        in_dtype=dtype,
        max_num_tokens=ROWS,
        activation=activation,
    )


def plain_weights(gated=True):
    return torch.randn(EL, (2 if gated else 1) * N, K) / K**0.5, torch.randn(EL, K, N) / N**0.5


def run_batched(experts, rows, w1, w2, meta, activation="silu"):
    output = torch.full((EL, ROWS, K), float("nan"), dtype=rows.dtype)
    nothing = torch.empty(0)
    experts.apply(
        output, rows, w1, w2, nothing, nothing, activation, EL, None, None, None, nothing, nothing, meta, False
    )  # fmt: skip
    return output


def one_row(x, w1, w2, activation="silu", b1=0.0, b2=0.0):
    return w2 @ apply_activation(activation, w1 @ x.float() + b1) + b2


@pytest.mark.parametrize("activation", list(MoEActivation))
def test_batched_computes_the_rows_below_the_counts_and_no_others(activation):
    w1, w2 = plain_weights(activation.is_gated)
    rows = torch.full((EL, ROWS, K), float("nan"))
    for expert, count in enumerate(COUNTS):
        rows[expert, :count] = torch.randn(count, K)
    got = run_batched(
        make_experts("batched_reference", moe_config(activation=activation)),
        rows,
        w1,
        w2,
        ExpertTokensMetadata.make_from_list(COUNTS, "cpu"),
        activation,
    )
    for expert, count in enumerate(COUNTS):
        for i in range(count):
            expected = one_row(rows[expert, i], w1[expert], w2[expert], activation)
            torch.testing.assert_close(got[expert, i], expected)
        assert got[expert, count:].isnan().all()


def test_batched_by_reference_equals_batched():
    w1, w2 = plain_weights()
    shared_rows = torch.randn(9, K)
    row_ids = torch.full((EL, ROWS), 1 << 30, dtype=torch.int32)
    rows = torch.full((EL, ROWS, K), float("nan"))
    for expert, count in enumerate(COUNTS):
        row_ids[expert, :count] = torch.randperm(9)[:count].int()
        rows[expert, :count] = shared_rows[row_ids[expert, :count].long()]
    counts = torch.tensor(COUNTS, dtype=torch.int32)
    experts = make_experts("batched_reference", moe_config())
    assert experts.supports_row_ids()
    by_reference = run_batched(experts, shared_rows, w1, w2, ExpertTokensMetadata(counts, None, row_ids))
    in_place = run_batched(experts, rows, w1, w2, ExpertTokensMetadata(counts))
    assert torch.equal(by_reference.nan_to_num(7.0), in_place.nan_to_num(7.0))


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(
    ("quant_type", "asymmetric"),
    [(scalar_types.uint4b8, False), (scalar_types.uint4, True), (scalar_types.uint8b128, False)],
)
def test_quantized_equals_dequantized(quant_type, asymmetric, act_order):
    group = 16
    values = 1 << quant_type.size_bits

    def quantized(out, into):
        codes = torch.randint(0, values, (EL, out, into), dtype=torch.uint8)
        scales = torch.rand(EL, out, into // group) / values
        zeros = torch.randint(0, values, scales.shape, dtype=torch.uint8) if asymmetric else None
        g_idx = (
            torch.stack([torch.randperm(into) // group for _ in range(EL)]).int()
            if act_order
            else (torch.arange(into) // group).int().expand(EL, -1)
        )
        plain = torch.empty(EL, out, into)
        for expert in range(EL):
            for column in range(into):
                g = g_idx[expert, column]
                zero = zeros[expert, :, g].float() if asymmetric else float(quant_type.bias)
                plain[expert, :, column] = (codes[expert, :, column].float() - zero) * scales[expert, :, g]
        return codes, scales, zeros, g_idx.contiguous() if act_order else None, plain

    w1, s1, z1, g1, plain1 = quantized(2 * N, K)
    w2, s2, z2, g2, plain2 = quantized(K, N)
    quant = FusedMoEQuantConfig(
        quant_type_id=quant_type.id,
        group_size=group,
        w1_scale=s1,
        w2_scale=s2,
        w1_zp=z1,
        w2_zp=z2,
        w1_bias=torch.randn(EL, 2 * N),
        w2_bias=torch.randn(EL, K),
        g1_alphas=torch.rand(EL, 2),
        g2_alphas=torch.rand(EL),
    )
    rows = torch.randn(EL, ROWS, K)
    experts = make_experts("batched_reference", moe_config(), quant, w13_g_idx=g1, w2_g_idx=g2)
    got = run_batched(experts, rows, w1, w2, ExpertTokensMetadata.make_from_list([ROWS] * EL, "cpu"))
    for expert in range(EL):
        up_and_gate = plain1[expert] * quant.g1_alphas[expert].repeat_interleave(N)[:, None]
        down = plain2[expert] * quant.g2_alphas[expert]
        for i in range(ROWS):
            expected = one_row(rows[expert, i], up_and_gate, down, b1=quant.w1_bias[expert], b2=quant.w2_bias[expert])
            torch.testing.assert_close(got[expert, i], expected)


def test_standard_skips_ids_that_are_not_local():
    w1, w2 = plain_weights()
    expert_map = torch.tensor([-1, 0, 2, -1, 1], dtype=torch.int32)
    ids = torch.tensor([[0, 1], [4, 2], [-1, -1], [3, 0]], dtype=torch.int32)
    x, weights = torch.randn(4, K), torch.rand(4, 2)
    x[2:] = float("nan")
    output = torch.full((4, K), float("nan"))
    nothing = torch.empty(0)
    make_experts("reference", moe_config()).apply(
        output, x, w1, w2, weights, ids, "silu", 5, expert_map, None, None, nothing, nothing, None, False
    )  # fmt: skip
    expected = torch.zeros(4, K)
    expected[0] = weights[0, 1] * one_row(x[0], w1[0], w2[0])
    expected[1] = weights[1, 0] * one_row(x[1], w1[1], w2[1]) + weights[1, 1] * one_row(x[1], w1[2], w2[2])
    torch.testing.assert_close(output, expected)


def test_missing_metadata_and_scales_are_named():
    w1, w2 = plain_weights()
    with pytest.raises(ValueError, match="expert_tokens_meta is None"):
        run_batched(make_experts("batched_reference", moe_config()), torch.zeros(EL, ROWS, K), w1, w2, None)
    quant = FusedMoEQuantConfig(quant_type_id=scalar_types.uint4b8.id, group_size=16)
    with pytest.raises(ValueError, match="lacks w1_scale"):
        run_batched(
            make_experts("batched_reference", moe_config(), quant),
            torch.zeros(EL, ROWS, K),
            w1.byte(),
            w2.byte(),
            ExpertTokensMetadata.make_from_list(COUNTS, "cpu"),
        )

"""Columns out of order, from the canonical form through packing to the experts, against the values they stand for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.kernels.marlin.experts import BatchedMarlinExperts
from moe_ep.kernels.marlin.functional import fused_marlin_moe
from moe_ep.kernels.marlin.repack import PackedWeights, in_order_of_w2, pack_marlin, unpack_marlin
from moe_ep.modular_kernel.contracts import ExpertTokensMetadata, ExpertWeights
from moe_ep.quantization.canonical_weights import CanonicalWeights, dequantize
from moe_ep.scalar_type import scalar_types
from tests.kernels.marlin_cases import E, K, moe_config

N, GROUP, ROWS = 96, 32, 5
ROUNDING = 2.0**-6  # two products and a sum of activations rounded to bf16


def canonical(rows: int, columns: int, g_idx: torch.Tensor | None, groups: int, seed: int) -> CanonicalWeights:
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (E, rows, columns), dtype=torch.uint8, generator=rng)
    scales = (torch.rand(E, rows, groups, generator=rng) * 0.03 + 0.003).bfloat16().float()
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, generator=rng)
    return CanonicalWeights(codes, scales, scalar_types.uint4.id, GROUP, zeros, g_idx)


def scattered(columns: int, groups: int, seed: int) -> torch.Tensor:
    """`[E, columns]`: of a whole of `groups` groups, a random part where that has more columns."""
    rng = torch.Generator().manual_seed(seed)
    whole = torch.stack([torch.randperm(groups * GROUP, generator=rng) // GROUP for _ in range(E)])
    return whole[:, :columns].to(torch.int32)


def straddling(columns: int) -> torch.Tensor:
    """In order, from the middle of a group on."""
    return ((torch.arange(columns) + GROUP // 2) // GROUP).to(torch.int32).expand(E, -1).contiguous()


# g_idx of w13 and of w2, and the groups that w2's scales have.
CASES = {
    "both": (scattered(K, 4, 1), scattered(N, 3, 2), 3),
    "w13": (scattered(K, 4, 1), None, 3),
    "w2": (None, scattered(N, 3, 2), 3),
    "a part of w2": (scattered(K, 4, 1), scattered(N, 7, 3), 7),
    "a part of w2 that straddles a group": (None, straddling(N), 5),
}


def configs(has_bias: bool) -> FusedMoEConfig:
    return moe_config(experts_per_token=1, intermediate_size_per_partition=N, max_num_tokens=ROWS, has_bias=has_bias)


def experts_of(
    moe: FusedMoEConfig, w13: ExpertWeights, w2: ExpertWeights, biases: tuple[torch.Tensor | None, torch.Tensor | None]
) -> BatchedMarlinExperts:
    quant = FusedMoEQuantConfig(
        quant_type_id=scalar_types.uint4.id,
        group_size=GROUP,
        w2_group_size=GROUP,
        w1_scale=w13.scales,
        w2_scale=w2.scales,
        w1_zp=w13.zero_points,
        w2_zp=w2.zero_points,
        w1_bias=biases[0],
        w2_bias=biases[1],
    )
    indices = {
        "w13_g_idx": w13.g_idx,
        "w2_g_idx": w2.g_idx,
        "w13_g_idx_sort_indices": w13.g_idx_sort_indices,
        "w2_g_idx_sort_indices": w2.g_idx_sort_indices,
    }
    return BatchedMarlinExperts(moe, quant, max_num_tokens=ROWS, num_dispatchers=1, **indices)


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("name", CASES)
def test_packed_experts_compute_the_values(name: str, has_bias: bool) -> None:
    g_idx13, g_idx2, groups = CASES[name]
    w13, w2 = canonical(2 * N, K, g_idx13, K // GROUP, 5), canonical(K, N, g_idx2, groups, 6)
    moe = configs(has_bias)
    assert BatchedMarlinExperts.refuses(moe, (w13, w2), torch.device("cuda")) == "torch sees no CUDA GPU"
    first, second = BatchedMarlinExperts.pack_weights(w13, w2, moe)
    rng = torch.Generator().manual_seed(7)
    biases = [torch.randn(E, size, generator=rng).bfloat16() if has_bias else None for size in (2 * N, K)]
    experts = experts_of(moe, first, second, (biases[0], biases[1]))
    rows, output = torch.randn(E, ROWS, K, generator=rng).bfloat16(), torch.empty(E, ROWS, K).bfloat16()
    counts = ExpertTokensMetadata(torch.full((E,), ROWS, dtype=torch.int32))
    none = torch.empty(0, dtype=torch.bfloat16)
    arguments = (MoEActivation.SILU, E, None, None, None, none, none, counts, False)
    experts.apply(output, rows, first.weight, second.weight, none, none, *arguments)
    for e in range(E):
        bias1, bias2 = (None if bias is None else bias[e].float() for bias in biases)
        hidden = apply_activation(MoEActivation.SILU, F.linear(rows[e].float(), dequantize(w13)[e], bias1))
        expected = F.linear(hidden, dequantize(w2)[e], bias2)
        assert (output[e].float() - expected).abs().max() < ROUNDING * expected.abs().max()


def test_only_what_is_looked_up_at_run_time_is_kept() -> None:
    kept = {}
    for name, (g_idx13, g_idx2, groups) in CASES.items():
        w13, w2 = canonical(2 * N, K, g_idx13, K // GROUP, 5), canonical(K, N, g_idx2, groups, 6)
        packed = BatchedMarlinExperts.pack_weights(w13, w2, configs(False))
        kept[name] = [[part.g_idx is not None, part.g_idx_sort_indices is not None] for part in packed]
    assert kept == {
        "both": [[False, True], [False, False]],
        "w13": [[False, True], [False, False]],
        "w2": [[False, False], [False, False]],
        "a part of w2": [[False, True], [True, False]],
        "a part of w2 that straddles a group": [[False, False], [True, False]],
    }


def test_the_order_of_w2_can_be_undone() -> None:
    w13, w2 = canonical(2 * N, K, None, K // GROUP, 5), canonical(K, N, scattered(N, 3, 2), 3, 6)
    assert w2.g_idx is not None
    first, second = in_order_of_w2(w13, w2)
    back = torch.argsort(torch.sort(w2.g_idx, dim=1, stable=True).indices, dim=1)
    for expert in range(E):
        assert torch.equal(second.codes[expert][:, back[expert]], w2.codes[expert])
        for half in range(2):
            rows = slice(half * N, (half + 1) * N)
            assert torch.equal(first.codes[expert, rows][back[expert]], w13.codes[expert, rows])
            assert torch.equal(first.scales[expert, rows][back[expert]], w13.scales[expert, rows])


@pytest.mark.parametrize("name", ["both", "a part of w2", "a part of w2 that straddles a group"])
def test_unpacking_undoes_packing(name: str) -> None:
    _, g_idx, groups = CASES[name]
    weights = canonical(K, N, g_idx, groups, 6)
    packed: PackedWeights = pack_marlin(*weights[:2], weights.quant_type_id, GROUP, weights.zero_points, g_idx=g_idx)
    got, given = (
        unpack_marlin(packed, weights.quant_type_id, GROUP),
        (weights.codes, weights.scales, weights.zero_points),
    )
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(got, given, strict=True))


def test_groups_of_unequal_size_are_left_to_the_reference() -> None:
    g_idx = scattered(K, 4, 1)
    g_idx[0, 0] = (g_idx[0, 0] + 1) % 4
    weights = (canonical(2 * N, K, g_idx, K // GROUP, 5), canonical(K, N, None, 3, 6))
    reason = BatchedMarlinExperts.refuses(configs(False), weights, torch.device("cuda"))
    assert reason == "g_idx does not give each group 32 columns"


def test_groups_of_unequal_size_need_is_k_full_to_be_false() -> None:
    g_idx = torch.tensor([0] * 80 + [1] * 16, dtype=torch.int32).expand(E, N).contiguous()
    w1, w2 = canonical(N, N, g_idx, 3, 6), canonical(N, N, None, 3, 7)
    first, second = (
        pack_marlin(*part[:2], part.quant_type_id, GROUP, part.zero_points, g_idx=part.g_idx) for part in (w1, w2)
    )
    rows = torch.randn(E, N, generator=torch.Generator().manual_seed(8)).bfloat16()

    def compute(is_k_full: bool) -> torch.Tensor:
        return fused_marlin_moe(
            rows, first.qweight, second.qweight, None, None, first.scales.bfloat16(), second.scales.bfloat16(),
            torch.ones(E, 1), torch.arange(E)[:, None], scalar_types.uint4.id, activation="silu_no_mul",
            w1_zeros=first.zeros.bfloat16(), w2_zeros=second.zeros.bfloat16(), g_idx1=first.g_idx,
            sort_indices1=first.sort_indices, is_k_full=is_k_full,
        )  # fmt: skip

    hidden = F.silu(torch.einsum("ek,enk->en", rows.float(), dequantize(w1)))
    torch.testing.assert_close(
        compute(False).float(), torch.einsum("en,ekn->ek", hidden, dequantize(w2)), rtol=ROUNDING, atol=ROUNDING
    )
    with pytest.raises(ValueError, match="^g_idx1 has groups .* is_k_full is True"):
        compute(True)

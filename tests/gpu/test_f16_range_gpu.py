"""f16 experts on a GPU whose results or activations exceed 65504 where the weighted sum does not."""

from __future__ import annotations

import pytest
import torch

from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.kernels.marlin import BatchedMarlinExperts, MarlinExperts, fused_marlin_moe
from moe_ep.kernels.marlin.compute import convert_rows, triton_convert_rows
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.layer.methods import relative_error
from moe_ep.modular_kernel import ExpertTokensMetadata, FusedMoEModularKernel, make_experts, make_prepare_finalize
from tests.gpu.captured import capture
from tests.gpu.marlin_cases import UINT4B8, Weights, arguments, compile_all, pair, reference
from tests.gpu.marlin_grid import KINDS
from tests.kernels.convert_cases import check_convert
from tests.kernels.grouped_cases import check_f16_range

pytestmark = pytest.mark.gpu
E, TOPK, F16 = 8, 2, torch.float16
SHAPE = (512, 256)
WEIGHT = 1e-4


@pytest.fixture(scope="module")
def compiled() -> None:
    compile_all([(kind, group, dtype) for kind, group in KINDS for dtype in (torch.bfloat16, F16)])


def config(T: int) -> FusedMoEConfig:
    return FusedMoEConfig(
        num_experts=E, experts_per_token=TOPK, hidden_dim=SHAPE[0], intermediate_size_per_partition=SHAPE[1],
        num_local_experts=E, moe_parallel_config=FusedMoEParallelConfig(), in_dtype=F16, max_num_tokens=T,
    )  # fmt: skip


def quant_config(kind: WeightType, first: Weights, second: Weights) -> FusedMoEQuantConfig:
    return FusedMoEQuantConfig(
        quant_type_id=kind.scalar_type.id, w1_scale=first.scales, w2_scale=second.scales, w1_zp=first.zeros,
        w2_zp=second.zeros, g1_alphas=first.alphas, g2_alphas=second.alphas,
    )  # fmt: skip


def inputs(T: int, first: Weights, second: Weights, kind: WeightType) -> tuple[torch.Tensor, ...]:
    """Rows of which every other one leaves f16's range in all experts, ids, weights, and the sums."""
    generator = torch.Generator().manual_seed(T)
    rows = torch.randn(T, SHAPE[0], generator=generator).cuda()
    exact = torch.stack([reference(rows, first, second, kind, expert) for expert in range(E)])
    rows[::2] *= (3e5 / exact[:, ::2].abs().amax(dim=(0, 2)).min()).sqrt()
    rows = rows.clamp(-60000, 60000).to(F16)
    ids = torch.stack([torch.randperm(E, generator=generator)[:TOPK] for _ in range(T)]).int().cuda()
    weights = torch.full((T, TOPK), WEIGHT, device="cuda")
    results = torch.stack([reference(rows.float(), first, second, kind, expert) for expert in range(E)])
    assert results[:, ::2].abs().amax() > 65504
    expected = WEIGHT * results[ids.long(), torch.arange(T, device="cuda")[:, None]].sum(1)
    assert expected.abs().max() < 65504
    return rows, ids, weights, expected, results


@pytest.mark.usefixtures("kernels", "compiled")
@pytest.mark.parametrize(("kind", "group"), KINDS, ids=lambda v: str(getattr(v, "scalar_type", v)))
@pytest.mark.parametrize("T", [4, 200])
def test_packed_experts(kind: WeightType, group: int, T: int) -> None:
    first, second = pair(kind, group, E, SHAPE, dtype=F16)
    rows, ids, weights, expected, results = inputs(T, first, second, kind)
    got = fused_marlin_moe(rows, topk_weights=weights, topk_ids=ids, **arguments(first, second, kind))
    assert got.isfinite().all() and relative_error(got, expected) < 0.01
    of_copy = rows.clone()
    fused_marlin_moe(of_copy, topk_weights=weights, topk_ids=ids, inplace=True, **arguments(first, second, kind))
    assert torch.equal(of_copy, got)
    kernel = FusedMoEModularKernel(
        make_prepare_finalize("no_ep", config(T)), MarlinExperts(config(T), quant_config(kind, first, second))
    )
    assert torch.equal(kernel(rows, first.qweight, second.qweight, weights, ids), got)
    experts = BatchedMarlinExperts(config(T), quant_config(kind, first, second), T, 1)
    counts = torch.tensor([T, 0, 1, T // 2, *[T] * (E - 4)], dtype=torch.int32, device="cuda")
    for row_ids in (None, torch.arange(T, dtype=torch.int32, device="cuda").repeat(E, 1)):
        meta = ExpertTokensMetadata(counts, None, row_ids)
        given = rows.expand(E, T, SHAPE[0]).contiguous() if row_ids is None else rows
        scratch13, scratch2, shape = experts.workspace_shapes(T, SHAPE[1], SHAPE[0], TOPK, E, E, meta, "silu")
        output = torch.full(shape, 7.0, device="cuda")
        buffers = [torch.empty(size, dtype=F16, device="cuda") for size in (scratch13, scratch2)]
        experts.apply(
            output,
            given,
            first.qweight,
            second.qweight,
            weights,
            ids,
            "silu",
            E,
            None,
            None,
            None,
            *buffers,
            meta,
            False,
        )
        computed = torch.arange(T, device="cuda") < counts[:, None]
        assert (output[~computed] == 7).all()
        assert relative_error(output[computed], results[computed]) < 0.01


@pytest.mark.usefixtures("kernels", "compiled")
def test_rows_in_range_keep_their_bits_beside_others() -> None:
    first, second = pair(UINT4B8, 128, E, SHAPE, dtype=F16)
    more = arguments(first, second, UINT4B8)
    rows, ids, weights, _, _ = inputs(64, first, second, UINT4B8)
    together = fused_marlin_moe(rows, topk_weights=weights, topk_ids=ids, **more)
    calm = rows.clone()
    calm[::2] = 0
    assert torch.equal(fused_marlin_moe(calm, topk_weights=weights, topk_ids=ids, **more)[1::2], together[1::2])
    weights.fill_(1.0)
    beyond = fused_marlin_moe(rows, topk_weights=weights, topk_ids=ids, **more)
    assert beyond[::2].isinf().any() and not beyond.isnan().any()


@pytest.mark.usefixtures("kernels", "compiled")
def test_captured() -> None:
    first, second = pair(UINT4B8, 128, E, SHAPE, dtype=F16)
    rows, ids, weights, expected, _ = inputs(16, first, second, UINT4B8)
    kernel = FusedMoEModularKernel(
        make_prepare_finalize("no_ep", config(16)), MarlinExperts(config(16), quant_config(UINT4B8, first, second))
    )
    given, output = torch.zeros_like(rows), torch.empty_like(rows)
    graph = capture(lambda: output.copy_(kernel(given, first.qweight, second.qweight, weights, ids)))
    for source in (rows, torch.zeros_like(rows), rows):
        given.copy_(source)
        graph.replay()
        assert relative_error(output, expected) < 0.01 if source is rows else not output.any()


@pytest.mark.parametrize("name", ["grouped", "reference"])
@pytest.mark.parametrize("T", [4, 300])
def test_plain_experts(name: str, T: int) -> None:
    K, N = SHAPE
    torch.manual_seed(0)
    w1, w2 = torch.randn(E, 2 * N, K, device="cuda").to(F16), torch.randn(E, K, N, device="cuda").to(F16)
    rows, ids = (torch.randn(T, K, device="cuda") * 20).to(F16), torch.randint(0, E, (T, TOPK), device="cuda")
    results = []
    for a, b in zip(w1, w2, strict=True):
        gate, up = (rows.double() @ a.double().T).split(N, dim=1)
        results.append((torch.nn.functional.silu(gate) * up) @ b.double().T)
    weights = torch.full((T, TOPK), 1e-5, device="cuda")
    expected = 1e-5 * torch.stack(results)[ids, torch.arange(T, device="cuda")[:, None]].sum(1)
    kernel = FusedMoEModularKernel(make_prepare_finalize("no_ep", config(T)), make_experts(name, config(T)))
    got = kernel(rows, w1, w2, weights, ids)
    assert got.isfinite().all() and relative_error(got, expected) < 2e-3


def test_kernels_of_the_range() -> None:
    from moe_ep.kernels.grouped.products import triton_multiply_into_order, triton_multiply_into_places

    check_f16_range("cuda", triton_multiply_into_order, triton_multiply_into_places)
    check_convert("cuda", triton_convert_rows, convert_rows.plain)

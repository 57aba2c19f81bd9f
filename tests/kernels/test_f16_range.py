"""f16 layers whose experts exceed 65504 where the weighted sum does not: every backend and every kind of experts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_ep.activation import MoEActivation
from moe_ep.config import FusedMoEQuantConfig
from moe_ep.kernels.marlin import BatchedMarlinExperts, MarlinExperts, fused_marlin_moe
from moe_ep.kernels.marlin.compute import convert_rows
from moe_ep.kernels.marlin.types import WEIGHT_TYPES
from moe_ep.layer import FusedMoE
from moe_ep.layer.methods import OnlineIntConfig, relative_error, tolerance
from moe_ep.modular_kernel import FusedMoEModularKernel, make_experts, make_prepare_finalize
from moe_ep.registry import ALL2ALL_BACKENDS
from moe_ep.scalar_type import scalar_types
from tests.kernels.convert_cases import check_convert
from tests.kernels.grouped_cases import check_f16_range
from tests.kernels.marlin_cases import ROWS, E, K, N, arguments, configs, moe_config, pair, reference
from tests.layer.moe_oracle import Weights, load, make_weights, run_expert
from tests.ranks import ranks

F16 = torch.float16
BACKENDS = [name for name in ALL2ALL_BACKENDS if not name.startswith("nvshmem")]
EXPERTS, HIDDEN, INTER, TOKENS = 4, 64, 64, 5
IDS = torch.tensor([[0, 3], [1, 2], [2, 0], [3, 1], [0, 1]])


def scale(weights: Weights, up: float, down: float) -> Weights:
    for expert in range(EXPERTS):
        weights.up[expert] *= up
        weights.down[expert] *= down
    return weights


def cancelling() -> Weights:
    """Experts 0 and 3, and 1 and 2, are opposites but for a hundredth."""
    weights = scale(make_weights(EXPERTS, HIDDEN, INTER), 1.0, 3e5)
    for expert, other in ((3, 0), (2, 1)):
        weights.gate[expert], weights.up[expert] = weights.gate[other].clone(), weights.up[other].clone()
        weights.down[expert] = -0.99 * weights.down[other]
    return weights


# Weights of the experts, weights of the router, and whether every result is in range.
CASES: dict[str, tuple[Callable[[], Weights], float, bool]] = {
    "outputs beyond the range": (lambda: scale(make_weights(EXPERTS, HIDDEN, INTER), 1.0, 4e5), 1e-2, True),
    "opposite outputs beyond the range": (cancelling, 0.5, True),
    "gate times up beyond the range": (lambda: scale(make_weights(EXPERTS, HIDDEN, INTER), 3e5, 0.1), 0.3, True),
    "the result itself beyond the range": (lambda: scale(make_weights(EXPERTS, HIDDEN, INTER), 1.0, 1e6), 1.0, False),
}


def run_layer(case: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's output, and the same in f32 from the f16 weights."""
    make, weight, _ = CASES[case]
    weights = make()
    for tensors in (weights.gate, weights.up, weights.down):
        tensors[:] = [tensor.clamp(-60000, 60000).to(F16).float() for tensor in tensors]
    ids = IDS[:4] if case == "opposite outputs beyond the range" else IDS
    if case == "opposite outputs beyond the range":
        ids = torch.tensor([[0, 3], [1, 2], [2, 1], [3, 0]])

    def route(
        hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full(ids.shape, weight), ids

    layer = load(
        FusedMoE(EXPERTS, 2, HIDDEN, INTER, params_dtype=F16, custom_routing_function=route, **options), weights
    )
    rows = torch.randn(len(ids), HIDDEN, generator=torch.Generator().manual_seed(4)).to(F16)
    expected = torch.stack(
        [
            sum(weight * run_expert(weights, expert, row.float()) for expert in chosen)
            for row, chosen in zip(rows, ids.tolist(), strict=True)
        ]
    )
    return layer(rows, torch.zeros(len(ids), EXPERTS)), expected


def check_layer(rank: int, world_size: int, case: str, options: dict[str, Any]) -> None:
    output, expected = run_layer(case, **options)
    in_range = CASES[case][2]
    assert output.dtype is F16
    assert bool(output.isfinite().all()) is in_range, case
    if in_range:
        assert relative_error(output, expected) < (0.2 if "quant_config" in options else tolerance(F16))
    else:
        assert torch.equal(output.isinf(), expected.to(F16).isinf())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_is_in_range_where_its_sum_is(backend: str, case: str) -> None:
    ranks(1 if backend == "no_ep" else 2).run(check_layer, case, {"all2all_backend": backend})


def test_a_layer_over_hosts_adds_them_up_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(4).run(over_two_hosts)


def over_two_hosts(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_EP_RANKS_PER_HOST", "2")
        check_layer(rank, world_size, "opposite outputs beyond the range", {"all2all_backend": "two_level"})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ep_size", [1, 2])
def test_tp_ranks_add_up_in_range(ep_size: int, case: str) -> None:
    """Whole experts, each on one of the ranks, and every expert's half on each."""
    ranks(2).run(check_layer, case, {"tp_size": 2, "ep_size": ep_size, "reduce_results": True})


@pytest.mark.parametrize("backend", ["all_to_all", "batched_all_to_all"])
def test_quantized_experts_too(backend: str) -> None:
    options = {"all2all_backend": backend, "quant_config": OnlineIntConfig()}
    ranks(2).run(check_layer, "gate times up beyond the range", options)


KIND = WEIGHT_TYPES[scalar_types.uint4b8.id]


def test_packed_experts_beyond_the_range() -> None:
    first, second = pair(KIND, 32, MoEActivation.SILU, dtype=F16)
    more = arguments(first, second, KIND, MoEActivation.SILU)
    rows = (torch.randn(ROWS, K, generator=torch.Generator().manual_seed(1)) * 200).to(F16)
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, -1], [1, 0], [2, 1]])
    results = torch.stack([reference(rows, first, second, expert, MoEActivation.SILU) for expert in range(E)])
    assert results.abs().max() > 65504
    weights = torch.full(ids.shape, 1e-3)
    expected = sum(
        torch.where(ids[:, slot, None] >= 0, 1e-3 * results[ids[:, slot].clamp(min=0), torch.arange(ROWS)], 0.0)
        for slot in range(2)
    )
    got = fused_marlin_moe(rows, topk_weights=weights, topk_ids=ids, **more)
    assert relative_error(got, expected) < 1e-3
    summed = fused_marlin_moe(
        rows, topk_weights=weights, topk_ids=ids, moe_sum=lambda slots, out: torch.sum(slots, dim=1, out=out), **more
    )
    assert relative_error(summed, expected) < 2e-3
    quant = configs(first, second, KIND)[1]
    config = moe_config(in_dtype=F16)
    for experts in (MarlinExperts(config, quant), BatchedMarlinExperts(config, quant)):
        name = "no_ep" if isinstance(experts, MarlinExperts) else "batched_all_to_all"
        if name == "no_ep":
            kernel = FusedMoEModularKernel(make_prepare_finalize(name, config), experts)
            output = kernel(rows, more["w1"], more["w2"], weights, ids)
            assert relative_error(output, expected) < 1e-3
        else:
            ranks(1).run(batched_packed, copy.deepcopy(quant), (rows, more["w1"], more["w2"], weights, ids), expected)


def batched_packed(
    rank: int, world_size: int, quant: FusedMoEQuantConfig, given: tuple[torch.Tensor, ...], expected: torch.Tensor
) -> None:
    config = moe_config(in_dtype=F16)
    backend = make_prepare_finalize("batched_all_to_all", config)
    output = FusedMoEModularKernel(backend, BatchedMarlinExperts(config, quant))(*given)
    assert relative_error(output, expected) < 1e-3


@pytest.mark.parametrize("name", ["grouped", "reference"])
def test_plain_experts_beyond_the_range(name: str) -> None:
    config = moe_config(in_dtype=F16)
    torch.manual_seed(0)
    w1, w2 = torch.randn(E, 2 * N, K).to(F16), torch.randn(E, K, N).to(F16)
    rows, ids = (torch.randn(ROWS, K) * 40).to(F16), torch.randint(0, E, (ROWS, 2))
    weights = torch.full((ROWS, 2), 1e-4)
    results = torch.stack(
        [
            (torch.nn.functional.silu((h := rows.float() @ a.float().T)[:, :N]) * h[:, N:]) @ b.float().T
            for a, b in zip(w1, w2, strict=True)
        ]
    )
    assert results.abs().max() > 65504
    expected = 1e-4 * results[ids, torch.arange(ROWS)[:, None]].sum(1)
    kernel = FusedMoEModularKernel(make_prepare_finalize("no_ep", config), make_experts(name, config))
    assert relative_error(kernel(rows, w1, w2, weights, ids), expected) < 1e-3


def test_converted_rows() -> None:
    check_convert("cpu", convert_rows.plain)


def test_products_keep_f32_rows_in_range() -> None:
    from moe_ep.kernels.grouped.products import multiply_into_order, multiply_into_places

    check_f16_range("cpu", multiply_into_order.plain, multiply_into_places.plain)

"""Plain experts in blocks of rows: both formats against the reference experts; the products and their tiles."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ep.activation import MoEActivation
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.kernels.grouped import experts as grouped
from moe_ep.kernels.grouped.products import fitting, rows_of_blocks
from moe_ep.kernels.grouped.rows import activate_rows, move_rows
from moe_ep.modular_kernel import ExpertTokensMetadata, make_experts
from moe_ep.registry import EXPERTS
from tests.kernels.grouped_cases import check_activations, check_moves, check_triton

EL, K, N, T, TOP_K = 4, 32, 24, 9, 3
CONFIG = FusedMoEConfig(
    num_experts=7,
    experts_per_token=TOP_K,
    hidden_dim=K,
    intermediate_size_per_partition=N,
    num_local_experts=EL,
    moe_parallel_config=FusedMoEParallelConfig.make(),
    in_dtype=torch.float32,
    max_num_tokens=T,
)
EXPERT_MAP = torch.tensor([-1, 2, 0, -1, 3, 1, -1], dtype=torch.int32)


def weights(activation: MoEActivation, has_bias: bool) -> tuple[torch.Tensor, torch.Tensor, FusedMoEQuantConfig]:
    torch.manual_seed(3)
    rows = 2 * N if activation.is_gated else N
    biases = {"w1_bias": torch.randn(EL, rows), "w2_bias": torch.randn(EL, K)} if has_bias else {}
    return torch.randn(EL, rows, K) / K**0.5, torch.randn(EL, K, N) / N**0.5, FusedMoEQuantConfig(**biases)


def run(name: str, quant: FusedMoEQuantConfig, output: torch.Tensor, arguments: tuple[Any, ...]) -> torch.Tensor:
    make_experts(name, CONFIG, quant).apply(output, *arguments)
    return output


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("weight_on_input", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", list(MoEActivation))
def test_standard_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch, activation: MoEActivation, has_bias: bool, weight_on_input: bool, by_torch: bool
) -> None:
    if by_torch:
        monkeypatch.setattr(grouped, "MANY_ROWS", 0)
        monkeypatch.setattr(grouped, "can_multiply", lambda rows, w2: True)
    w1, w2, quant = weights(activation, has_bias)
    topk = 1 if weight_on_input else TOP_K
    ids = torch.stack([torch.randperm(7)[:topk] for _ in range(T)]).int()
    ids[0], ids[4, -1] = -1, -1
    nothing = torch.empty(0)
    arguments = (torch.randn(T, K), w1, w2, torch.rand(T, topk), ids, activation, 7, EXPERT_MAP)
    arguments += (None, None, nothing, nothing, None, weight_on_input)
    expected = run("reference", quant, torch.full((T, K), float("nan")), arguments)
    got = run("grouped", quant, torch.full((T, K), float("nan")), arguments)
    torch.testing.assert_close(got, expected)
    assert not got[0].any()
    if not weight_on_input:
        with pytest.raises(ValueError, match="apply_router_weight_on_input needs top_k 1 and top_k is 3"):
            run("grouped", quant, got, (*arguments[:-1], True))


@pytest.mark.parametrize("counts", [[4, 0, 9, 1], [0, 0, 0, 0], [9, 9, 9, 0]])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("by_reference", [False, True])
def test_batched_equals_the_reference_below_the_counts(by_reference: bool, has_bias: bool, counts: list[int]) -> None:
    w1, w2, quant = weights(MoEActivation.SILU, has_bias)
    shared_rows = torch.randn(T, K)
    row_ids = torch.full((EL, T), 1 << 30, dtype=torch.int32)
    rows = torch.full((EL, T, K), float("nan"))
    for expert, count in enumerate(counts):
        row_ids[expert, :count] = torch.randperm(T)[:count].int()
        rows[expert, :count] = shared_rows[row_ids[expert, :count].long()]
    meta = ExpertTokensMetadata(torch.tensor(counts, dtype=torch.int32), None, row_ids if by_reference else None)
    ids, nothing = torch.zeros(T, TOP_K, dtype=torch.int32), torch.empty(0)
    arguments = (shared_rows if by_reference else rows, w1, w2, torch.rand(T, TOP_K), ids, "silu", 7, EXPERT_MAP)
    arguments += (None, None, nothing, nothing, meta, False)
    expected = run("batched_reference", quant, torch.full((EL, T, K), float("nan")), arguments)
    # Weights are the backend's, which has weighted the rows itself.
    unweighted = (*arguments[:3], None, *arguments[4:-1], True)
    got = run("batched_grouped", quant, torch.full((EL, T, K), float("nan")), unweighted)
    torch.testing.assert_close(got, expected, equal_nan=True)
    with pytest.raises(ValueError, match="expert_tokens_meta is None"):
        run("batched_grouped", quant, got, (*arguments[:-2], None, False))


def test_no_rows() -> None:
    w1, w2, quant = weights(MoEActivation.SILU, True)
    nothing = torch.empty(0)
    arguments = (torch.empty(0, K), w1, w2, torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32), "silu", 7)
    arguments += (EXPERT_MAP, None, None, nothing, nothing, None, False)
    assert run("grouped", quant, torch.empty(0, K), arguments).shape == (0, K)


@pytest.mark.parametrize(
    ("changes", "quantized", "device", "reason"),
    [
        ({}, True, "cuda:0", "take plain weights and these are quantized"),
        ({}, False, "cpu", "the weights are on cpu"),
        ({"in_dtype": torch.float32}, False, "cuda:0", "activations are torch.float32; they take torch.bfloat16 or"),
        ({"num_local_experts": 0}, False, "cuda:0", "this rank has no experts"),
    ],
)
def test_what_they_refuse(changes: dict[str, Any], quantized: bool, device: str, reason: str) -> None:
    config = replace(CONFIG, **{"in_dtype": torch.bfloat16, **changes})
    given: tuple = (object(), object()) if quantized else ()
    for name in ("grouped", "batched_grouped"):
        assert re.search(reason, EXPERTS.load(name).refuses(config, given, torch.device(device)))


def test_weights_of_another_dtype_than_the_rows() -> None:
    w1, w2, quant = weights(MoEActivation.SILU, False)
    nothing, ids = torch.empty(0), torch.zeros(2, TOP_K, dtype=torch.int32)
    arguments = (torch.randn(2, K), w1.half(), w2, torch.rand(2, TOP_K), ids, "silu", 7, EXPERT_MAP)
    for name, output in (("grouped", torch.empty(2, K)), ("batched_grouped", torch.empty(EL, 2, K))):
        with pytest.raises(ValueError, match="w1 and w2 are torch.float32, torch.float16, torch.float32"):
            run(name, quant, output, (*arguments, None, None, nothing, nothing, None, False))


def test_rows_are_moved_as_they_are() -> None:
    check_moves("cpu", move_rows)


def test_rows_are_activated() -> None:
    check_activations("cpu", activate_rows)


@pytest.mark.parametrize("kib", [99, 163, 227])
def test_tiles_fit_the_memory_of_a_block(kib: int) -> None:
    """Of GPUs of sm_86 to sm_120, sm_80 and sm_90."""
    for rows in (1.0, 10.0, 50.0, 1000.0):
        size = rows_of_blocks(rows)
        for gated in (False, True):
            tiles = fitting(size, gated, kib * 1024)
            assert tiles.rows == size and tiles.columns >= 32 and tiles.num_stages >= 2
            assert tiles.bytes_per_stage(gated) * tiles.num_stages < kib * 1024


@pytest.mark.gpu
def test_triton_on_a_gpu() -> None:
    check_triton("cuda")

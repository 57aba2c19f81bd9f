"""Experts of batch-invariant layers: a row has the same bits alone and in any batch, Standard and batched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep.activation import MoEActivation
from moe_ep.config import FusedMoEQuantConfig
from moe_ep.dispatch.nvshmem.kernels import kernel_source
from moe_ep.dispatch.nvshmem.low_latency import BatchLayout
from moe_ep.errors import ConfigError
from moe_ep.kernels import jit
from moe_ep.kernels.marlin import hopper
from moe_ep.kernels.marlin.types import WEIGHT_TYPES
from moe_ep.modular_kernel import (
    ExpertTokensMetadata,
    FusedMoEModularKernel,
    FusedMoEPermuteExpertsUnpermute,
    make_experts,
    make_prepare_finalize,
)
from moe_ep.modular_kernel.invariant_ops import invariant_ops
from moe_ep.scalar_type import scalar_types
from tests.kernels.marlin_cases import E, K, N, configs, moe_config, pair

T, TOP_K = 12, 2
KINDS = {
    "int4": (scalar_types.uint4b8, 32),
    "fp8": (scalar_types.float8_e4m3fn, -1),
    "mxfp4": (scalar_types.float4_e2m1f, 32),
    "plain": (None, None),
}


def made(name: str, input_dtype: torch.dtype | None = None) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """moe_config, quant_config, w1 and w2 of experts of that kind."""
    scalar_type, group = KINDS[name]
    if scalar_type is None:
        rng = torch.Generator().manual_seed(5)
        w1, w2 = (torch.randn(shape, generator=rng).bfloat16() / 8 for shape in ((E, 2 * N, K), (E, K, N)))
        moe, quant = moe_config(), FusedMoEQuantConfig.unquantized()
    else:
        kind = WEIGHT_TYPES[scalar_type.id]
        first, second = pair(kind, group, MoEActivation.SILU)
        moe, quant = configs(first, second, kind)
        w1, w2 = first.packed.qweight, second.packed.qweight
    moe = replace(moe, experts_per_token=TOP_K, batch_invariant=True)
    return moe, quant.with_input_dtype(input_dtype), w1, w2


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(E, generator=rng)[:TOP_K] for _ in range(T)]).int()
    ids[3, 1] = -1
    return torch.randn(T, K, generator=rng).bfloat16(), torch.rand(T, TOP_K, generator=rng), ids


CASES = [("plain", "grouped", None)] + [(kind, "marlin", None) for kind in ("int4", "fp8", "mxfp4")]
CASES += [("plain", "reference", None), ("int4", "marlin", torch.int8), ("fp8", "marlin", torch.float8_e4m3fn)]


@settings(max_examples=6)
@given(batch=st.lists(st.integers(0, T - 1), min_size=1, max_size=40))
@pytest.mark.parametrize(("kind", "experts", "input_dtype"), CASES)
def test_tokens(kind: str, experts: str, input_dtype: torch.dtype | None, batch: list[int]) -> None:
    moe, quant, w1, w2 = made(kind, input_dtype)
    kernel = FusedMoEModularKernel(make_prepare_finalize("no_ep", moe), make_experts(experts, moe, quant))
    rows, weights, ids = tokens()
    together = kernel(rows[batch], w1, w2, weights[batch], ids[batch])
    for place in {0, len(batch) - 1, len(batch) // 2}:
        one = slice(batch[place], batch[place] + 1)
        assert torch.equal(kernel(rows[one], w1, w2, weights[one], ids[one])[0], together[place])


@pytest.mark.parametrize(("kind", "experts", "input_dtype"), CASES)
def test_batched_rows_have_the_bits_of_tokens(kind: str, experts: str, input_dtype: torch.dtype | None) -> None:
    moe, quant, w1, w2 = made(kind, input_dtype)
    rows, weights, ids = tokens()
    kernel = FusedMoEModularKernel(make_prepare_finalize("no_ep", moe), make_experts(experts, moe, quant))
    batched = make_experts(f"batched_{experts}", moe, quant, max_num_tokens=T, num_dispatchers=1)
    slots = torch.full((T, TOP_K, K), float("nan"))
    for of_batch in (range(T), range(3), range(5, 6)):
        chosen = [[(t, j) for t in of_batch for j in range(TOP_K) if ids[t, j] == expert] for expert in range(E)]
        given_rows = torch.zeros(E, T, K, dtype=torch.bfloat16)
        for expert, pairs in enumerate(chosen):
            for place, (token, _) in enumerate(pairs):
                given_rows[expert, place] = rows[token]
        meta = ExpertTokensMetadata.make_from_list([len(pairs) for pairs in chosen], "cpu")
        output = torch.zeros(E, T, K, dtype=torch.bfloat16)
        sizes = batched.moe_problem_size(given_rows, w1, w2, ids)
        shapes = batched.workspace_shapes(sizes[1], sizes[2], K, TOP_K, E, E, meta, "silu")
        scratch = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes[:2]]
        with invariant_ops():
            batched.apply(output, given_rows, w1, w2, weights, ids, "silu", E, None, None, None, *scratch, meta, False)
        for expert, pairs in enumerate(chosen):
            for place, (token, slot) in enumerate(pairs):
                slots[token, slot] = output[expert, place].float()
        for token in of_batch:
            total = torch.zeros(K)
            for slot in range(TOP_K):
                if ids[token, slot] >= 0:
                    total += slots[token, slot] * weights[token, slot]
            one = slice(token, token + 1)
            assert torch.equal(kernel(rows[one], w1, w2, weights[one], ids[one])[0], total.bfloat16())


class Unknown(FusedMoEPermuteExpertsUnpermute):
    """Experts of a user, which say nothing of it."""


def test_what_cannot_keep_it_is_refused_by_name() -> None:
    moe, quant, _, _ = made("int4")
    with pytest.raises(ConfigError, match="nvshmem_high_throughput.*batch_invariant"):
        make_prepare_finalize("nvshmem_high_throughput", moe)
    marlin = type(make_experts("marlin", moe, quant))
    assert marlin.depends_on_batch(moe, torch.device("cpu")) is None
    assert Unknown.depends_on_batch(moe, torch.device("cpu")) is not None
    with pytest.raises(ConfigError, match="batch_invariant .* 2 tensor-parallel ranks"):
        parallel = replace(moe.moe_parallel_config, tp_size=2, ep_size=2)
        replace(moe, moe_parallel_config=parallel)


def test_the_builds_for_gpus_compile_without_spilling() -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    pytest.importorskip("cuda.bindings.nvrtc", reason="the bindings of NVRTC are not installed")
    int4 = WEIGHT_TYPES[scalar_types.uint4b8.id]
    experts = hopper.kernel_source(
        int4, torch.bfloat16, torch.bfloat16, 1, MoEActivation.SILU, True, batch_invariant=True
    )
    layout = BatchLayout(num_ranks=8, capacity=128, hidden_size=7168, topk=8, code_dtype=None, slot_results=True)
    combine = kernel_source("low_latency_combine", layout, torch.bfloat16)
    assert [jit.compile_only(source, "sm_90a").spill_store_bytes for source in (experts, combine)] == [0, 0]

"""The experts' kernel against weights dequantized to f32, its determinism, CUDA graphs and two streams."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe, fused_marlin_moe
from moe_ep.kernels.marlin.plain import dequantize_packed
from moe_ep.kernels.marlin.repack import pack_marlin
from moe_ep.kernels.marlin.types import WEIGHT_TYPES, WeightType
from moe_ep.kernels.marlin.weights import Weights
from moe_ep.scalar_type import scalar_types

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

RELATIVE_ERROR = 0.01  # mean |d| / mean |ref|, the tolerance of all quantized experts
FORMATS_AGREE = 1e-3
UINT4B8 = WEIGHT_TYPES[scalar_types.uint4b8.id]
KINDS = [(kind, group) for kind in WEIGHT_TYPES.values() for group in kind.group_sizes]


def make(
    kind: WeightType, group: int, num_experts: int, rows: int, columns: int, gated: bool, dtype: torch.dtype, bias: bool
) -> Weights:
    """Random packed weights on the GPU, with values small enough that f16 holds every result."""
    groups = 1 if group == -1 else columns // group
    codes = torch.randint(0, 1 << kind.bits, (num_experts, rows, columns), dtype=torch.uint8, device="cuda")
    steps = torch.rand(num_experts, rows, groups, device="cuda") * 0.018 + 0.002
    alphas = zeros = None
    if kind.scalar_type == scalar_types.float4_e2m1f and group == 16:
        scales, alphas = (steps * 64).to(torch.float8_e4m3fn), torch.rand(num_experts, device="cuda") * 0.01 + 0.01
    elif kind.scalar_type == scalar_types.float4_e2m1f:
        scales = torch.randint(118, 122, steps.shape, dtype=torch.uint8, device="cuda")
    else:
        scales = (steps * (0.1 if kind.bits == 8 else 1)).to(dtype)
    if kind.scalar_type == scalar_types.float8_e4m3fn:
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    if kind.has_zero_points:
        zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device="cuda")
    packed = pack_marlin(codes, scales, kind.scalar_type.id, group, zeros, gated)
    offsets = torch.randn(num_experts, rows, device="cuda").to(dtype) if bias else None
    return Weights(packed.qweight, packed.scales, packed.zeros, offsets, alphas, None, None, gated, rows, columns)


def arguments(first: Weights, second: Weights, kind: WeightType, activation: MoEActivation) -> dict:
    return {
        "w1": first.qweight,
        "w2": second.qweight,
        "bias1": first.bias,
        "bias2": second.bias,
        "w1_scale": first.scales,
        "w2_scale": second.scales,
        "quant_type_id": kind.scalar_type.id,
        "w1_zeros": first.zeros,
        "w2_zeros": second.zeros,
        "global_scale1": first.alphas,
        "global_scale2": second.alphas,
        "activation": activation,
    }


def reference(
    rows: torch.Tensor, first: Weights, second: Weights, kind: WeightType, expert: int, activation: MoEActivation
) -> torch.Tensor:
    bias1, bias2 = (None if w.bias is None else w.bias[expert].float() for w in (first, second))
    hidden = apply_activation(activation, F.linear(rows.float(), dequantize_packed(first, kind, expert), bias1))
    return F.linear(hidden.to(rows.dtype).float(), dequantize_packed(second, kind, expert), bias2)


def check_batched(
    kind: WeightType,
    group: int,
    counts: list[int],
    shape: tuple[int, int],
    activation: MoEActivation = MoEActivation.SILU,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    by_reference: bool = False,
) -> None:
    """Runs with everything that must not be read or written poisoned, and compares."""
    (K, N), num_experts, capacity = shape, len(counts), max(counts) + 3
    gated = activation.is_gated
    first = make(kind, group, num_experts, 2 * N if gated else N, K, gated, dtype, bias)
    second = make(kind, group, num_experts, K, N, False, dtype, bias)
    numbers = torch.tensor(counts, dtype=torch.int32, device="cuda")
    nan = {"fill_value": float("nan"), "device": "cuda", "dtype": dtype}
    more = {
        "output": torch.full((num_experts, capacity, K), **nan),
        "intermediate_cache2": torch.full((num_experts * capacity * N,), **nan),
        "intermediate_cache13": torch.full((40_000_000,), **nan),
    }
    if by_reference:
        rows = torch.randn(97, K, device="cuda").to(dtype)
        ids = torch.randint(0, 97, (num_experts, capacity), dtype=torch.int32, device="cuda")
        inputs = [rows[ids[expert, :count].long()] for expert, count in enumerate(counts)]
        for expert, count in enumerate(counts):
            ids[expert, count:] = 1 << 30
        more["expert_row_ids"] = ids
    else:
        rows = torch.randn(num_experts, capacity, K, device="cuda").to(dtype)
        inputs = [rows[expert, :count] for expert, count in enumerate(counts)]
        for expert, count in enumerate(counts):
            rows[expert, count:] = float("nan")
    output = batched_fused_marlin_moe(rows, numbers, **arguments(first, second, kind, activation), **more)
    again = batched_fused_marlin_moe(
        rows, numbers, **arguments(first, second, kind, activation), **(more | {"output": output.clone()})
    )
    assert torch.equal(output.view(torch.int16), again.view(torch.int16))
    error = scale = 0.0
    for expert, count in enumerate(counts):
        assert torch.isnan(output[expert, count:]).all()
        expected = reference(inputs[expert], first, second, kind, expert, activation)
        error += float((output[expert, :count].float() - expected).abs().sum())
        scale += float(expected.abs().sum())
    assert error < RELATIVE_ERROR * scale


@pytest.mark.parametrize(("kind", "group"), KINDS, ids=lambda v: str(getattr(v, "scalar_type", v)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_every_type_and_group_size(kind: WeightType, group: int, dtype: torch.dtype) -> None:
    check_batched(kind, group, [5, 0, 16, 29, 57, 133], (512, 256), dtype=dtype)


@pytest.mark.parametrize("activation", list(MoEActivation))
def test_every_activation_with_biases(activation: MoEActivation) -> None:
    check_batched(UINT4B8, 128, [3, 70], (256, 384), activation=activation, bias=True)


@pytest.mark.parametrize("rows", [1, 7, 16, 33, 64, 133, 256, 1000])
@pytest.mark.parametrize("shape", [(128, 128), (2048, 768), (4096, 1536), (7168, 256)], ids=str)
def test_rows_and_shapes(rows: int, shape: tuple[int, int]) -> None:
    check_batched(UINT4B8, 128, [rows, 0, rows // 2, 1, rows], shape, by_reference=rows % 2 == 1)


@pytest.mark.parametrize(("shape", "group"), [((2880, 2880), 32), ((2880, 2880), 64), ((96, 160), -1), ((32, 32), 32)])
def test_shapes_that_are_multiples_of_32_only(shape: tuple[int, int], group: int) -> None:
    check_batched(UINT4B8, group, [9, 130, 2], shape)


def test_one_expert_has_all_and_many_have_little() -> None:
    check_batched(UINT4B8, 128, [700, *([1] * 40), 0, 0, 65], (1024, 512))


def tokens_and_experts(num_tokens: int, topk: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(num_tokens, num_experts, device="cuda")
    weights, ids = scores.topk(topk, dim=1)
    return weights.contiguous(), ids


@pytest.mark.parametrize("num_tokens", [1, 33, 500])
@pytest.mark.parametrize("topk", [1, 6])
def test_tokens_with_their_experts(num_tokens: int, topk: int) -> None:
    K, N, local = 512, 256, 8
    first, second = (
        make(UINT4B8, 128, local, 2 * N, K, True, torch.bfloat16, False),
        make(UINT4B8, 128, local, K, N, False, torch.bfloat16, False),
    )
    weights, ids = tokens_and_experts(num_tokens, topk, 12)
    expert_map = torch.full((12,), -1, dtype=torch.int32, device="cuda")
    expert_map[torch.randperm(12, device="cuda")[:local]] = torch.arange(local, dtype=torch.int32, device="cuda")
    ids[0, 0] = -1
    rows = torch.randn(num_tokens, K, device="cuda").bfloat16()
    more = arguments(first, second, UINT4B8, MoEActivation.SILU)
    output = fused_marlin_moe(rows, topk_weights=weights, topk_ids=ids, expert_map=expert_map, **more)
    expected = torch.zeros(num_tokens, K, device="cuda")
    local_ids = torch.where(ids >= 0, expert_map.long()[ids.clamp(min=0)], -1)
    counts = [int((local_ids == expert).sum()) for expert in range(local)]
    batched = torch.zeros(local, max(counts), K, device="cuda", dtype=torch.bfloat16)
    for expert in range(local):
        token, slot = (local_ids == expert).nonzero(as_tuple=True)
        batched[expert, : len(token)] = rows[token]
        result = reference(rows[token], first, second, UINT4B8, expert, MoEActivation.SILU)
        expected.index_add_(0, token, weights[token, slot, None] * result)
    assert (output.float() - expected).abs().mean() <= RELATIVE_ERROR * expected.abs().mean()
    numbers = torch.tensor(counts, dtype=torch.int32, device="cuda")
    by_expert = batched_fused_marlin_moe(batched, numbers, **more)
    total = torch.zeros(num_tokens, K, device="cuda")
    for expert in range(local):
        token, slot = (local_ids == expert).nonzero(as_tuple=True)
        total.index_add_(0, token, weights[token, slot, None] * by_expert[expert, : len(token)].float())
    assert (output.float() - total).abs().mean() <= max(FORMATS_AGREE, 2.0**-9) * total.abs().mean()


def test_a_graph_replays_with_other_counts_and_inputs() -> None:
    K, N, num_experts, capacity = 1024, 512, 6, 80
    first = make(UINT4B8, 128, num_experts, 2 * N, K, True, torch.bfloat16, False)
    second = make(UINT4B8, 128, num_experts, K, N, False, torch.bfloat16, False)
    more = arguments(first, second, UINT4B8, MoEActivation.SILU)
    rows = torch.randn(num_experts, capacity, K, device="cuda").bfloat16()
    numbers = torch.full((num_experts,), 4, dtype=torch.int32, device="cuda")
    output = torch.zeros_like(rows)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        batched_fused_marlin_moe(rows, numbers, output=output, **more)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            batched_fused_marlin_moe(rows, numbers, output=output, **more)
    for counts in ([0, 0, 0, 0, 0, 0], [80, 1, 0, 33, 64, 7], [1, 1, 1, 1, 1, 1]):
        rows.copy_(torch.randn_like(rows))
        numbers.copy_(torch.tensor(counts, dtype=torch.int32))
        output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        eager = batched_fused_marlin_moe(rows, numbers, output=torch.full_like(rows, float("nan")), **more)
        assert torch.equal(output.view(torch.int16), eager.view(torch.int16))


def test_two_streams_at_once_give_what_one_gives() -> None:
    K, N, num_experts = 2048, 768, 8
    first = make(UINT4B8, 128, num_experts, 2 * N, K, True, torch.bfloat16, False)
    second = make(UINT4B8, 128, num_experts, K, N, False, torch.bfloat16, False)
    more = arguments(first, second, UINT4B8, MoEActivation.SILU)
    inputs = [torch.randn(num_experts, 40, K, device="cuda").bfloat16() for _ in range(2)]
    numbers = torch.randint(1, 41, (num_experts,), dtype=torch.int32, device="cuda")
    alone = [batched_fused_marlin_moe(rows, numbers, output=torch.zeros_like(rows), **more) for rows in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(30):
        for stream, rows, kept in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(batched_fused_marlin_moe(rows, numbers, output=torch.zeros_like(rows), **more))
    torch.cuda.synchronize()
    for expected, kept in zip(alone, results, strict=True):
        assert all(torch.equal(expected, got) for got in kept)


def test_a_thread_that_never_used_the_gpu_may_launch() -> None:
    K, N = 256, 128
    first = make(UINT4B8, 128, 2, 2 * N, K, True, torch.bfloat16, False)
    second = make(UINT4B8, 128, 2, K, N, False, torch.bfloat16, False)
    more = arguments(first, second, UINT4B8, MoEActivation.SILU)
    rows = torch.randn(2, 8, K, device="cuda").bfloat16()
    numbers = torch.full((2,), 8, dtype=torch.int32, device="cuda")
    outputs = [batched_fused_marlin_moe(rows, numbers, **more), torch.zeros_like(rows)]
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: batched_fused_marlin_moe(rows, numbers, output=outputs[1], **more))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(*outputs)


def test_packing_on_the_gpu_equals_packing_on_the_cpu() -> None:
    codes = torch.randint(0, 16, (2, 192, 256), dtype=torch.uint8)
    scales = torch.rand(2, 192, 2).bfloat16()
    on_cpu = pack_marlin(codes, scales, scalar_types.uint4b8.id, 128, gated=True)
    on_gpu = pack_marlin(codes.cuda(), scales.cuda(), scalar_types.uint4b8.id, 128, gated=True)
    assert torch.equal(on_cpu.qweight, on_gpu.qweight.cpu())
    assert torch.equal(on_cpu.scales, on_gpu.scales.cpu())


def test_kernel_sources_are_installed_beside_the_code() -> None:
    from moe_ep.kernels.marlin import gemm

    assert {"decode_sm90.cu", "prefill_sm90.cu", "ptx.cuh"} <= {
        path.name for path in Path(gemm.__file__).parent.glob("cuda/*")
    }

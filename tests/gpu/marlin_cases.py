"""What the tests of the packed experts' kernels share: made-up weights, the reference, and one thorough check."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.kernels.marlin import ampere, compute, hopper
from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe, fused_marlin_moe
from moe_ep.kernels.marlin.plain import dequantize_packed
from moe_ep.kernels.marlin.repack import pack_marlin
from moe_ep.kernels.marlin.types import WEIGHT_TYPES, WeightType
from moe_ep.kernels.marlin.weights import Weights
from moe_ep.scalar_type import scalar_types

RELATIVE_ERROR = 0.01  # mean |d| / mean |ref|, the tolerance of all quantized experts
# Of the root mean square: one element among millions is off by 0.25 where scales belong to rows and tokens are bf16,
# and one that was not computed, or twice, by about 1.
ANY_ELEMENT = 0.5
FORMATS_AGREE = 1e-3  # batched and Standard, whose sums are rounded once more
UINT4B8 = WEIGHT_TYPES[scalar_types.uint4b8.id]
SILU = MoEActivation.SILU


@contextmanager
def ampere_only() -> Iterator[None]:
    """On Hopper too, the kernels that serve every GPU from sm_80 on."""
    run_experts = compute.run_experts
    compute.run_experts = partial(run_experts, ampere_only=True)
    try:
        yield
    finally:
        compute.run_experts = run_experts


def on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def compile_all(types: list[tuple[WeightType, int, torch.dtype]]) -> None:
    """Fills the cache on disk with the kernels of these types, group sizes and activations' dtypes, on all cores."""
    sources = []
    for kind, group, dtype in types:
        scale_dtype = scale_dtype_of(kind, group, dtype)
        per_step = 1 if group == -1 else max(1, 128 // group)
        if on_hopper():
            sources += [hopper.kernel_source(kind, dtype, scale_dtype, per_step, SILU, few) for few in (True, False)]
        sources += [
            ampere.kernel_source(kind, dtype, scale_dtype, group, phase, SILU, tokens)
            for phase in (0, 1)
            for tokens in (16, 32, 64)
        ]
    random.Random(os.getpid()).shuffle(sources)  # processes that start together do not compile the same ones
    device = torch.device("cuda", torch.cuda.current_device())
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda source: source.compile_ahead(device), sources))


def scale_dtype_of(kind: WeightType, group: int, act_dtype: torch.dtype) -> torch.dtype:
    if kind.scalar_type != scalar_types.float4_e2m1f:
        return act_dtype
    return torch.float8_e4m3fn if group == 16 else torch.uint8


def make(
    kind: WeightType,
    group: int,
    num_experts: int,
    rows: int,
    columns: int,
    gated: bool,
    dtype: torch.dtype,
    bias: bool,
    g_idx: torch.Tensor | None = None,
    num_groups: int | None = None,
) -> Weights:
    """Random packed weights on the GPU, with values small enough that f16 holds every result.

    Args:
        g_idx: act-order; columns are a part of a whole where num_groups is more than their own.
    """
    groups = num_groups or (1 if group == -1 else columns // group)
    codes = torch.randint(0, 1 << kind.bits, (num_experts, rows, columns), dtype=torch.uint8, device="cuda")
    steps = torch.rand(num_experts, rows, groups, device="cuda") * 0.018 + 0.002
    scale_dtype = scale_dtype_of(kind, group, dtype)
    alphas = zeros = None
    if scale_dtype == torch.float8_e4m3fn:
        scales, alphas = (steps * 64).to(scale_dtype), torch.rand(num_experts, device="cuda") * 0.01 + 0.01
    elif scale_dtype == torch.uint8:
        scales = torch.randint(118, 122, steps.shape, dtype=torch.uint8, device="cuda")
    else:
        scales = (steps * (0.1 if kind.bits == 8 else 1)).to(dtype)
    if kind.scalar_type == scalar_types.float8_e4m3fn:
        codes[codes & 0x7F == 0x7F] = 0  # NaN
    if kind.has_zero_points:
        zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device="cuda")
    rows_dtype = torch.float8_e4m3fn if kind.for_eight_bit_rows else None
    packed = pack_marlin(codes, scales, kind.scalar_type.id, group, zeros, gated, g_idx, rows_dtype)
    offsets = torch.randn(num_experts, rows, device="cuda").to(dtype) if bias else None
    return Weights(
        packed.qweight, packed.scales, packed.zeros, offsets, alphas, packed.g_idx, packed.sort_indices, gated, rows,
        columns, g_idx is None or num_groups is None,
    )  # fmt: skip


def pair(
    kind: WeightType,
    group: int,
    num_experts: int,
    shape: tuple[int, int],
    activation: MoEActivation = SILU,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
) -> tuple[Weights, Weights]:
    """w13 and w2 of experts of (K, N)."""
    (K, N), gated = shape, activation.is_gated
    first = make(kind, group, num_experts, 2 * N if gated else N, K, gated, dtype, bias)
    return first, make(kind, group, num_experts, K, N, False, dtype, bias)


def arguments(first: Weights, second: Weights, kind: WeightType, activation: MoEActivation = SILU) -> dict:
    """What both functions take beside the rows."""
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
        "g_idx1": first.g_idx,
        "g_idx2": second.g_idx,
        "sort_indices1": first.sort_indices,
        "sort_indices2": second.sort_indices,
        "is_k_full": first.has_regular_groups and second.has_regular_groups,
        "activation": activation,
    }


def reference(
    rows: torch.Tensor,
    first: Weights,
    second: Weights,
    kind: WeightType,
    expert: int,
    activation: MoEActivation = SILU,
    clamp_limit: float | None = None,
) -> torch.Tensor:
    bias1, bias2 = (None if w.bias is None else w.bias[expert].float() for w in (first, second))
    hidden = F.linear(rows.float(), dequantize_packed(first, kind, expert), bias1)
    hidden = apply_activation(activation, hidden, clamp_limit=clamp_limit)
    return F.linear(hidden.to(rows.dtype).float(), dequantize_packed(second, kind, expert), bias2)


class Poison:
    """Makes scratch and outputs full of NaN."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._more = {"fill_value": float("nan"), "device": "cuda", "dtype": dtype}

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, **self._more)


def check_batched(
    kind: WeightType,
    group: int,
    counts: list[int],
    shape: tuple[int, int],
    activation: MoEActivation = SILU,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    by_reference: bool = False,
    weights: tuple[Weights, Weights] | None = None,
    expected_m: float | None = None,
    clamp_limit: float | None = None,
) -> None:
    """Runs three times, twice at once, with everything that must not be read or written poisoned, and compares bits and
    values."""
    (K, N), num_experts, capacity = shape, len(counts), max(counts) + 3
    first, second = weights or pair(kind, group, num_experts, shape, activation, dtype, bias)
    numbers, nan = torch.tensor(counts, dtype=torch.int32, device="cuda"), Poison(dtype)
    more = arguments(first, second, kind, activation) | {"intermediate_cache13": nan(40_000_000)}
    more |= {"expected_m": expected_m, "clamp_limit": clamp_limit}
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

    def run() -> torch.Tensor:
        scratch = {"output": nan(num_experts, capacity, K), "intermediate_cache2": nan(num_experts * capacity * N)}
        return batched_fused_marlin_moe(rows, numbers, **more, **scratch)

    output = run()
    assert all(torch.equal(output.view(torch.int16), again.view(torch.int16)) for again in twice_at_once(run))
    got, expected = [], []
    for expert, count in enumerate(counts):
        assert torch.isnan(output[expert, count:]).all()
        if count:
            got.append(output[expert, :count])
            expected.append(reference(inputs[expert], first, second, kind, expert, activation, clamp_limit))
    if got:
        check_values(torch.cat(got), torch.cat(expected))


def twice_at_once(run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """What it gives on two streams at once."""
    streams, results = [torch.cuda.Stream(), torch.cuda.Stream()], []
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            results.append(run())
    torch.cuda.synchronize()
    return results


def check_values(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Results against f32: on average, and each by itself."""
    error = (got.float() - expected).abs()
    assert error.mean() <= RELATIVE_ERROR * expected.abs().mean()
    assert error.max() <= ANY_ELEMENT * expected.square().mean().sqrt()


def check_tokens(
    kind: WeightType,
    first: Weights,
    second: Weights,
    num_tokens: int,
    topk: int,
    num_global: int,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Tokens with their experts, of which a random subset is local, against the reference and the batched form."""
    K, local = first.num_columns, first.qweight.size(0)
    weights, ids = torch.rand(num_tokens, num_global, device="cuda").topk(topk, dim=1)
    expert_map = torch.full((num_global,), -1, dtype=torch.int32, device="cuda")
    chosen = torch.randperm(num_global, device="cuda")[:local]
    expert_map[chosen] = torch.arange(local, dtype=torch.int32, device="cuda")
    ids[0, 0] = -1
    rows, nan = torch.randn(num_tokens, K, device="cuda").to(dtype), Poison(dtype)
    more = arguments(first, second, kind)

    def run() -> torch.Tensor:
        scratch = {"intermediate_cache13": nan(num_tokens * topk * K + 40_000_000)}
        return fused_marlin_moe(
            rows, topk_weights=weights.contiguous(), topk_ids=ids, expert_map=expert_map, output=nan(num_tokens, K),
            **more, **scratch,
        )  # fmt: skip

    output = run()
    assert all(torch.equal(output, again) for again in twice_at_once(run))
    local_ids = torch.where(ids >= 0, expert_map.long()[ids.clamp(min=0)], -1)
    counts = [int((local_ids == expert).sum()) for expert in range(local)]
    batched = nan(local, max(*counts, 1), K)
    for expert in range(local):
        batched[expert, : counts[expert]] = rows[(local_ids == expert).nonzero(as_tuple=True)[0]]
    by_expert = batched_fused_marlin_moe(batched, torch.tensor(counts, dtype=torch.int32, device="cuda"), **more)

    def summed(results: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(num_tokens, K, device="cuda")
        for expert in range(local):
            token, slot = (local_ids == expert).nonzero(as_tuple=True)
            if len(token):
                total.index_add_(0, token, weights[token, slot, None] * results(expert, token).float())
        return total

    check_values(output, summed(lambda expert, token: reference(rows[token], first, second, kind, expert)))
    total = summed(lambda expert, token: by_expert[expert, : len(token)]).to(dtype).float()
    assert (output.float() - total).abs().mean() <= FORMATS_AGREE * total.abs().mean()

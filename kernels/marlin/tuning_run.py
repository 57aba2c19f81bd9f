"""Times the decode and the prefill kernel at small M on random weights of a shape, for the tables of tuning.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from moe_ep.activation import MoEActivation
from moe_ep.bench.timing import time_calls, timing_of
from moe_ep.kernels.marlin import tuning
from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe
from moe_ep.kernels.marlin.repack import PackedWeights, pack_marlin
from moe_ep.kernels.marlin.tuning import CANDIDATES, MOST_SMALL_M, Problem
from moe_ep.kernels.marlin.types import WeightType

ROWS = (1, 4, 8, 12, 16, 20, 24, 28, 32)
# Rows there is room for, so that both kernels are launched, as they are while serving.
_CAPACITY = 128
# Weights below this are copied until they exceed it, so that they come from memory.
_CACHE_BYTES = 150e6
# Short bursts after rests: a GPU at its power limit lowers its clock after 50 ms.
_REST_S = 0.1
_REPEATS = 7


def measure(
    problem: Problem,
    kind: WeightType,
    activation: MoEActivation,
    device: torch.device,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Microseconds of both GEMMs at each number of rows an expert: {"rows", "decode_us", "prefill_us"}.

    Args:
        kind: the problem's number type.
        report: called after each measurement with the number done and the total.
    """
    first, second = (2 if activation.is_gated else 1) * problem.N, problem.K
    num_bytes = problem.experts * (first + problem.N) * problem.K * kind.bits / 8
    pairs = [
        (
            random_weights(problem, kind, first, problem.K, activation.is_gated, device),
            random_weights(problem, kind, second, problem.N, False, device),
        )
        for _ in range(max(1, -(-int(_CACHE_BYTES) // int(num_bytes))))
    ]
    rows = torch.randn(problem.experts, _CAPACITY, problem.K, device=device).to(torch.bfloat16)
    output = torch.empty_like(rows)
    num_tokens = torch.zeros(problem.experts, dtype=torch.int32, device=device)

    def call(i: int) -> object:
        w1, w2 = pairs[i % len(pairs)]
        return batched_fused_marlin_moe(
            rows, num_tokens, w1.qweight, w2.qweight, None, None, w1.scales, w2.scales, kind.scalar_type.id,
            activation=activation, w1_zeros=w1.zeros, w2_zeros=w2.zeros, output=output,
        )  # fmt: skip

    found: list[dict[str, Any]] = []
    for count in ROWS:
        num_tokens.fill_(count)
        times: dict[str, Any] = {"rows": count}
        for name, most in (("decode_us", MOST_SMALL_M), ("prefill_us", 0)):
            with tuning.forced(most):
                time.sleep(_REST_S)
                times[name] = timing_of(time_calls(call, device=device, repeats=_REPEATS)).median
            report(2 * len(found) + 1 + (name == "prefill_us"), 2 * len(ROWS))
        found.append(times)
    return found


def best(measured: list[dict[str, Any]]) -> int:
    """The candidate that loses least against the better kernel, on the mean over the rows; of equals the largest.

    Where some experts are small-M and some are not, the kernels themselves find whether one of them takes all.
    """

    def loss(max_small_m: int) -> float:
        taken = [row["decode_us"] if row["rows"] <= max_small_m else row["prefill_us"] for row in measured]
        excess = [us / min(row["decode_us"], row["prefill_us"]) - 1 for us, row in zip(taken, measured, strict=True)]
        return sum(excess) / len(excess)

    return min(reversed(CANDIDATES), key=loss)


def random_weights(
    problem: Problem, kind: WeightType, num_rows: int, num_columns: int, gated: bool, device: torch.device
) -> PackedWeights:
    """Packed codes and scales of one GEMM's shape, drawn at random."""
    groups = (problem.experts, num_rows, num_columns // problem.group_size)
    codes = torch.randint(0, 1 << kind.bits, (problem.experts, num_rows, num_columns), device=device, dtype=torch.uint8)
    scales = torch.rand(groups, device=device).mul_(0.01).to(torch.bfloat16)
    if kind.bits == 4 and kind.scalar_type.is_float:
        scales = torch.randint(118, 122, groups, device=device, dtype=torch.uint8)
    zeros = torch.randint(0, 1 << kind.bits, groups, device=device, dtype=torch.uint8) if kind.has_zero_points else None
    return pack_marlin(codes, scales, kind.scalar_type.id, problem.group_size, zeros, gated)

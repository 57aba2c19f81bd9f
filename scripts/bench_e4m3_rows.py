"""Experts of e4m3 weights with bf16 rows and with rows rounded to e4m3, on one GPU: times, and what rounding changes.

    python scripts/bench_e4m3_rows.py --json results.jsonl

The experts of one of eight ranks, rows by sorted ids in random order, both GEMMs with the activation; with rounded rows
the kernel that quantizes them too. "rested": bursts after rests, the median (gemm_timing.py). "sustained": the median
of the second half of 0.4 s of the same calls, at the clock that the power limit leaves. Weights exceed the L2 cache or
are copied until they do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_gemm import make_weights
from gemm_cases import SHAPES, Shape, with_weights
from gemm_timing import clock_mhz, num_copies, timed
from on_gpu import this_gpu

from moe_ep.activation import MoEActivation
from moe_ep.bench.results import append_line, facts, markdown_table
from moe_ep.bench.timing import time_calls
from moe_ep.kernels.marlin import e4m3
from moe_ep.kernels.marlin.compute import partials_numel, run_experts, sort_by_expert
from moe_ep.kernels.marlin.plain import TOLERANCE
from moe_ep.kernels.marlin.weights import WeightPair
from moe_ep.layer.methods import relative_error

SUSTAINED_US = 4e5
CHAIN = 3
COLUMNS = {
    "shape": "shape", "rows": "rows", "bf16_us": "bf16 rows", "us": "e4m3 rows", "ratio": "x", "tflops": "TFLOP/s",
    "rows_us": "quantizing", "sustained_bf16_us": "bf16, sustained", "sustained_us": "e4m3, sustained",
    "sustained_ratio": "x, sustained", "clock_mhz": "MHz", "error": "changed by", "taken": "taken",
}  # fmt: skip


def sustained(call: Callable[[int], object], device: torch.device, about_us: float) -> tuple[float, float]:
    """Microseconds of a call among many, and the clock then in MHz."""
    repeats = max(int(SUSTAINED_US / about_us / CHAIN), 4)
    times = time_calls(call, device=device, chain=CHAIN, repeats=repeats)
    return median(times[len(times) // 2 :]), clock_mhz()


def measure(name: str, shape: Shape, row_counts: list[int], device: torch.device) -> Iterator[dict[str, Any]]:
    weights = [
        (make_weights(shape, 2 * shape.N, shape.K, True), make_weights(shape, shape.K, shape.N, False))
        for _ in range(num_copies(shape.num_bytes))
    ]
    dtypes = (None, torch.float8_e4m3fn)
    plain, rounding = (
        [WeightPair(shape.type, MoEActivation.SILU, torch.bfloat16, *pair, None, dtype) for pair in weights]
        for dtype in dtypes
    )
    for count in row_counts:
        T = count * shape.experts
        ids = (torch.arange(T, device=device) % shape.experts)[torch.randperm(T, device=device)].view(-1, 1)
        tokens, rows = torch.randn(T, shape.K, device=device).bfloat16(), sort_by_expert(ids, shape.experts)
        outputs = [torch.empty_like(tokens) for _ in range(2)]
        hidden = torch.empty(T * shape.N, dtype=torch.bfloat16, device=device)
        partials = torch.empty(partials_numel(T, device), device=device)
        scratch = torch.empty(e4m3.scratch_bytes(rounding[0], T), dtype=torch.uint8, device=device)

        def with_bf16(i: int) -> None:
            run_experts(outputs[0], tokens, plain[i % len(plain)], rows, hidden, partials)  # noqa: B023

        def with_e4m3(i: int) -> None:
            e4m3.run(outputs[1], tokens, rounding[i % len(rounding)], rows, scratch)  # noqa: B023

        def quantize(i: int) -> None:
            e4m3.quantize(tokens, rounding[i % len(rounding)], rows, scratch)  # noqa: B023

        with_bf16(0)
        with_e4m3(0)
        error = relative_error(outputs[1], outputs[0])
        if not error < TOLERANCE:
            raise RuntimeError(f"{name} with {count} rows is wrong: relative error {error}")
        bf16, fp8, alone = (timed(call, device).median for call in (with_bf16, with_e4m3, quantize))
        (long_bf16, _), (long_fp8, clock) = (
            sustained(c, device, us) for c, us in ((with_bf16, bf16), (with_e4m3, fp8))
        )
        yield {
            "shape": name, "rows": count, "bf16_us": bf16, "us": fp8, "ratio": bf16 / fp8,
            "tflops": 6e-6 * T * shape.K * shape.N / fp8, "rows_us": alone, "sustained_bf16_us": long_bf16,
            "sustained_us": long_fp8, "sustained_ratio": long_bf16 / long_fp8, "clock_mhz": clock, "error": error,
            "taken": "yes" if e4m3.pays(rounding[0], count) else "no",
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["deepseek-v3", "qwen3-235b", "qwen3-30b"], choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[48, 64, 128, 256, 1024])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what to record where this is no git checkout")
    parser.add_argument("--json", type=Path, help="append one JSON line a row to this file")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    device, found = this_gpu(), []
    about = facts(seed=options.seed, commit=options.commit)
    for name in options.shapes:
        for row in measure(name, with_weights(SHAPES[name], "fp8"), options.rows, device):
            found.append(row)
            if options.json is not None:
                append_line(options.json, row | about)
    print(markdown_table(found, COLUMNS))


if __name__ == "__main__":
    main()

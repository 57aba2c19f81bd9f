"""Packed experts with bf16 rows and with rows of 8 bits, on one GPU: times, and what rounding changes.

    python scripts/bench_eight_bit_rows.py --json results.jsonl
    python scripts/bench_eight_bit_rows.py --peers deepgemm humming-int8 humming-fp8

The experts of one of eight ranks, rows by sorted ids in random order, both GEMMs with the activation; with rounded rows
the kernel that quantizes them too. "rested": bursts after rests, the median (gemm_timing.py). "sustained": the median
of the second half of 0.4 s of the same calls, at the clock that the power limit leaves. Weights exceed the L2 cache or
are copied until they do. Peers run in processes of their own (gemm_peers.py), without the activation; DeepGEMM
without quantizing too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from bench_gemm import make_weights, peer_times, takes
from gemm_cases import OF_PEERS, SHAPES, Shape, with_weights
from gemm_timing import clock_mhz, num_copies, timed
from harness import Bench, positive, this_gpu

from moe_ep.activation import MoEActivation
from moe_ep.bench.results import markdown_table
from moe_ep.bench.timing import time_calls
from moe_ep.kernels.marlin import eight_bit
from moe_ep.kernels.marlin.compute import partials_numel, run_experts, sort_by_expert
from moe_ep.kernels.marlin.plain import TOLERANCES
from moe_ep.kernels.marlin.weights import WeightPair
from moe_ep.kernels.quantize import quantize_rows, split_rows
from moe_ep.layer.methods import relative_error

INT8, FP8 = torch.int8, torch.float8_e4m3fn
# The pairs that are timed: weights as gemm_cases.py names them, and rows.
PAIRS = {
    "int4": ("int4", INT8), "uint4": ("uint4", INT8), "int8": ("int8", INT8), "fp8": ("fp8", FP8),
    "fp8-channel": ("fp8-channel", FP8), "mxfp4": ("mxfp4", FP8), "int4-e4m3": ("int4", FP8),
    "uint4-e4m3": ("uint4", FP8),
}  # fmt: skip
SUSTAINED_US = 4e5
CHAIN = 3
COLUMNS = {
    "shape": "shape", "weights": "weights", "input_dtype": "8-bit rows", "rows": "rows", "bf16_us": "bf16 rows",
    "us": "8-bit rows, us", "sent_us": "rows as sent, us", "ratio": "x", "tflops": "TFLOP/s",
    "rows_us": "quantizing", "sustained_bf16_us": "bf16, sustained", "sustained_us": "8-bit, sustained",
    "sustained_ratio": "x, sustained", "clock_mhz": "MHz", "error": "changed by", "taken": "taken",
    "humming_int8": "humming int8", "humming_fp8": "humming fp8", "deepgemm": "DeepGEMM",
}  # fmt: skip


def sustained(call: Callable[[int], object], device: torch.device, about_us: float) -> tuple[float, float]:
    """Microseconds of a call among many, and the clock then in MHz."""
    repeats = max(int(SUSTAINED_US / about_us / CHAIN), 4)
    times = time_calls(call, device=device, chain=CHAIN, repeats=repeats)
    return median(times[len(times) // 2 :]), clock_mhz()


def measure(
    name: str, scheme: str, input_dtype: torch.dtype, shape: Shape, row_counts: list[int], device: torch.device
) -> Iterator[dict[str, Any]]:
    kind = shape.type.packed_for(shape.group, input_dtype)
    weights = [
        (make_weights(shape, 2 * shape.N, shape.K, True, kind), make_weights(shape, shape.K, shape.N, False, kind))
        for _ in range(num_copies(shape.num_bytes))
    ]
    dtypes = (None, input_dtype)
    plain, rounding = (
        [WeightPair(kind, MoEActivation.SILU, torch.bfloat16, *pair, None, dtype) for pair in weights]
        for dtype in dtypes
    )
    for count in row_counts:
        T = count * shape.experts
        ids = (torch.arange(T, device=device) % shape.experts)[torch.randperm(T, device=device)].view(-1, 1)
        tokens, rows = torch.randn(T, shape.K, device=device).bfloat16(), sort_by_expert(ids, shape.experts)
        outputs = [torch.empty_like(tokens) for _ in range(2)]
        hidden = torch.empty(T * shape.N, dtype=torch.bfloat16, device=device)
        partials = torch.empty(partials_numel(T, device), device=device)
        scratch = torch.empty(eight_bit.scratch_bytes(rounding[0], T), dtype=torch.uint8, device=device)

        def with_bf16(i: int) -> None:
            run_experts(outputs[0], tokens, plain[i % len(plain)], rows, hidden, partials)  # noqa: B023

        def with_eight_bit(i: int) -> None:
            eight_bit.run(outputs[1], tokens, rounding[i % len(rounding)], rows, scratch)  # noqa: B023

        def quantize(i: int) -> None:
            eight_bit.quantize(tokens, rounding[i % len(rounding)], rows, scratch)  # noqa: B023

        sent = split_rows(quantize_rows(tokens, input_dtype, whole=True), shape.K, input_dtype, whole=True)

        def with_sent(i: int) -> None:
            each = rounding[i % len(rounding)]
            eight_bit.run(outputs[1], sent[0], each, rows, scratch, sent[1])  # noqa: B023

        with_bf16(0)
        with_sent(0)
        sent_error = relative_error(outputs[1], outputs[0])
        with_eight_bit(0)
        error = relative_error(outputs[1], outputs[0])
        if not max(error, sent_error) < 1.5 * TOLERANCES[input_dtype]:  # these weights are uniform, not normal
            raise RuntimeError(f"{name} with {count} rows is wrong: relative errors {error}, as sent {sent_error}")
        bf16, fp8, alone, as_sent = (
            timed(call, device).median for call in (with_bf16, with_eight_bit, quantize, with_sent)
        )
        (long_bf16, _), (long_fp8, clock) = (
            sustained(c, device, us) for c, us in ((with_bf16, bf16), (with_eight_bit, fp8))
        )
        yield {
            "shape": name, "weights": scheme, "input_dtype": str(input_dtype).removeprefix("torch."), "rows": count,
            "bf16_us": bf16, "us": fp8, "sent_us": as_sent, "ratio": bf16 / fp8,
            "tflops": 6e-6 * T * shape.K * shape.N / fp8, "rows_us": alone, "sustained_bf16_us": long_bf16,
            "sustained_us": long_fp8, "sustained_ratio": long_bf16 / long_fp8, "clock_mhz": clock, "error": error,
            "taken": "yes" if eight_bit.pays(rounding[0], count) else "no",
        }  # fmt: skip


def main() -> None:
    bench = Bench(__doc__)
    parser = bench.parser
    parser.add_argument("--shapes", nargs="+", default=["deepseek-v3", "qwen3-235b", "qwen3-30b"], choices=SHAPES)
    parser.add_argument("--weights", nargs="+", default=["int4", "fp8"], choices=PAIRS)
    parser.add_argument("--rows", type=positive, nargs="+", default=[48, 64, 128, 256, 1024])
    parser.add_argument("--peers", nargs="*", default=[], choices=[name for name in OF_PEERS if name != "vllm"])
    parser.add_argument("--peer-seconds", type=float, default=600, help="for one of them, compiling and timing")
    options = bench.parse()
    device = this_gpu()
    for name, pair in itertools.product(options.shapes, options.weights):
        scheme, input_dtype = PAIRS[pair]
        shape = with_weights(SHAPES[name], scheme)
        rows = list(measure(name, scheme, input_dtype, shape, options.rows, device))
        for peer in (each for each in options.peers if takes(each, shape)):
            for times in peer_times(peer, {name: shape}, options.rows, None, options.peer_seconds):
                for row in rows:
                    row |= times | {"rows": row["rows"]} if times["rows"] == str(row["rows"]) else {}
        for row in rows:
            bench.keep(row)
    print(markdown_table(bench.rows, COLUMNS))


if __name__ == "__main__":
    main()

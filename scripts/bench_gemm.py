"""Both GEMMs of the experts with the activation between them, on one GPU, beside their floor.

    python scripts/bench_gemm.py                      all shapes, 1 to 1024 rows an expert
    python scripts/bench_gemm.py --shapes deepseek-v3 --rows 8 64 --jsonl results.jsonl

floor = max(weight bytes / 4.3 TB/s, FLOPs / 790 TFLOP/s); what this GPU reaches in a copy and in a matrix product is
measured in the same run and printed above the table. Every case is compared with weights dequantized to f32 before it
is timed. Timing: ten calls in a CUDA graph (three for long ones), the median over replays; weights that fit the L2
cache are copied and taken in turn, so that they are read from memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe
from moe_ep.kernels.marlin.plain import dequantize_packed
from moe_ep.kernels.marlin.types import weight_type
from moe_ep.kernels.marlin.weights import Weights
from moe_ep.scalar_type import scalar_types

BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12
CACHE_BYTES = 150e6  # weights below this are copied until they exceed it
RELATIVE_ERROR = 0.01


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer on one rank: local experts, hidden and intermediate size, number type and group size."""

    experts: int
    K: int
    N: int
    kind: str = "uint4b8"
    group: int = 128
    activation: MoEActivation = MoEActivation.SILU
    bias: bool = False

    @property
    def num_bytes(self) -> float:
        """Bytes of all codes and scales."""
        bits = weight_type(getattr(scalar_types, self.kind).id).bits
        scale_bytes = 1 if self.kind == "float4_e2m1f" else 2
        return self.experts * 3 * self.K * self.N * (bits / 8 + scale_bytes / self.group)

    def floor_us(self, rows: int) -> float:
        """The time below which no version runs much faster, for `rows` rows an expert."""
        return 1e6 * max(self.num_bytes / BYTES_PER_S, 6 * self.experts * rows * self.K * self.N / FLOPS_PER_S)


SHAPES = {
    "qwen3-235b": Shape(experts=16, K=4096, N=1536),
    "deepseek-v3": Shape(experts=32, K=7168, N=2048),
    "mixtral": Shape(experts=1, K=4096, N=14336),
    "qwen3-30b": Shape(experts=16, K=2048, N=768),
    "kimi-k2": Shape(experts=48, K=7168, N=2048),
    "gpt-oss-120b": Shape(
        experts=16, K=2880, N=2880, kind="float4_e2m1f", group=32, activation=MoEActivation.SWIGLUOAI, bias=True
    ),
}


def make_weights(shape: Shape, rows: int, columns: int, gated: bool) -> Weights:
    """Random packed weights of one GEMM."""
    kind = weight_type(getattr(scalar_types, shape.kind).id)
    size = (shape.experts, columns // 16, rows * 16 // kind.pack)
    qweight = torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32, device="cuda")
    groups = (shape.experts, columns // shape.group, rows)
    if shape.kind == "float4_e2m1f":
        scales = torch.randint(118, 122, groups, dtype=torch.uint8, device="cuda")
    else:
        scales = (torch.rand(groups, device="cuda") * 0.01 + 0.001).bfloat16()
    bias = torch.randn(shape.experts, rows, device="cuda").bfloat16() if shape.bias else None
    return Weights(qweight, scales, None, bias, None, None, None, gated, rows, columns)


def time_us(call: Callable[[int], object], in_graph: int, replays: int = 15) -> tuple[float, float]:
    """(median, 99th percentile) of one call in microseconds, captured `in_graph` times in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(3):
            call(i)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(in_graph):
                call(i)
    times = []
    for _ in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / in_graph)
    times = sorted(times[3:])
    return statistics.median(times), times[min(len(times) - 1, round(0.99 * len(times)))]


def ceilings() -> dict[str, float]:
    """What this GPU reaches: a large copy (bytes read and written) and a bf16 matrix product of random numbers."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copy_us, _ = time_us(lambda _: target.copy_(source), 3)
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    product_us, _ = time_us(lambda _: a @ b, 3)
    return {
        "copy_tb_s": 2 * source.nbytes / copy_us * 1e-6,
        "bf16_tflop_s": 2 * 8192**3 / product_us * 1e-6,
    }


def relative_error(output: torch.Tensor, rows: torch.Tensor, first: Weights, second: Weights, shape: Shape) -> float:
    """mean |d| / mean |ref| of the first and the last expert."""
    kind = weight_type(getattr(scalar_types, shape.kind).id)
    error = scale = 0.0
    for expert in {0, shape.experts - 1}:
        biases = [None if w.bias is None else w.bias[expert].float() for w in (first, second)]
        gate_up = F.linear(rows[expert].float(), dequantize_packed(first, kind, expert), biases[0])
        hidden = apply_activation(shape.activation, gate_up).to(rows.dtype).float()
        expected = F.linear(hidden, dequantize_packed(second, kind, expert), biases[1])
        error += float((output[expert].float() - expected).abs().mean())
        scale += float(expected.abs().mean())
    return error / scale


def run_shape(name: str, shape: Shape, row_counts: list[int]) -> list[dict]:
    """Checks and times one shape at each number of rows an expert."""
    gated = shape.activation.is_gated
    copies = max(1, -(-int(CACHE_BYTES) // int(shape.num_bytes)))
    pairs = [
        (
            make_weights(shape, (2 if gated else 1) * shape.N, shape.K, gated),
            make_weights(shape, shape.K, shape.N, False),
        )
        for _ in range(copies)
    ]
    capacity = max(row_counts)
    rows = torch.randn(shape.experts, capacity, shape.K, device="cuda").bfloat16()
    output = torch.empty_like(rows)
    scratch = torch.empty(40_000_000, dtype=torch.bfloat16, device="cuda")
    hidden = torch.empty(shape.experts * capacity * shape.N, dtype=torch.bfloat16, device="cuda")
    results = []
    for count in row_counts:
        numbers = torch.full((shape.experts,), count, dtype=torch.int32, device="cuda")

        def call(i: int, numbers: torch.Tensor = numbers) -> torch.Tensor:
            first, second = pairs[i % copies]
            return batched_fused_marlin_moe(
                rows, numbers, first.qweight, second.qweight, first.bias, second.bias, first.scales, second.scales,
                getattr(scalar_types, shape.kind).id, activation=shape.activation, intermediate_cache13=scratch,
                intermediate_cache2=hidden, output=output,
            )  # fmt: skip

        output.fill_(float("nan"))
        error = relative_error(call(0)[:, :count], rows[:, :count], *pairs[0], shape)
        if not error < RELATIVE_ERROR:
            raise RuntimeError(f"{name} with {count} rows is wrong: relative error {error}")
        median, p99 = time_us(call, 10 if shape.floor_us(count) < 500 else 3)
        floor = shape.floor_us(count)
        row = {"shape": name, "rows": count, "us": median, "p99_us": p99, "floor_us": floor}
        results.append(row | {"floor_over_time": floor / median, "relative_error": error})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64, 128, 256, 1024])
    parser.add_argument("--jsonl", type=Path, help="append one JSON line a row to this file")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "command": " ".join(sys.argv),
        "commit": found.stdout.strip() or "unknown",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "seed": options.seed,
        **ceilings(),
    }
    print(json.dumps(about))
    print(f"{'shape':14} {'rows':>5} {'us':>9} {'p99':>9} {'floor':>8} {'floor/time':>10} {'error':>8}")
    for name in options.shapes:
        for row in run_shape(name, SHAPES[name], options.rows):
            print(
                f"{name:14} {row['rows']:5} {row['us']:9.1f} {row['p99_us']:9.1f} {row['floor_us']:8.1f} "
                f"{row['floor_over_time']:10.2f} {row['relative_error']:8.5f}",
                flush=True,
            )
            if options.jsonl:
                with options.jsonl.open("a") as file:
                    file.write(json.dumps(row | about) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

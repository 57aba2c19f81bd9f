"""Both GEMMs of the experts with the activation between them, on one GPU, beside their floor and other implementations.

    python scripts/bench_gemm.py --peers humming vllm --vllm-library FILE     everything
    python scripts/bench_gemm.py --shapes deepseek-v3 --rows 8 64 --jsonl results.jsonl

floor = max(weight bytes / 4.3 TB/s, FLOPs / 790 TFLOP/s); what this GPU reaches is measured in the same run and printed
above the table. Every case is compared with weights dequantized to f32 before it is timed. Timing: ten calls in a CUDA
graph (three for long ones), two bursts of seven replays after rests, the median (gemm_timing.py); weights that fit the
L2 cache are copied and taken in turn, so that they are read from memory. Buffers hold 128 rows an expert, or 1024
where more than 128 are used (peers: anywhere).

Beside uniform rows: rows that follow Zipf's law with exponent 0.5 over three quarters of the experts, the others empty,
against the same number of rows spread evenly over the same experts; and DeepSeek-V3's experts of one of eight ranks
when every rank has T tokens. Peers run in processes of their own (gemm_peers.py), without the activation; what they
compile they compile first, side by side. scripts/gemm_tables.py makes the tables of docs/benchmarks/gemm.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gemm_timing import timed

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.bench.ceilings import measure_ceilings
from moe_ep.bench.results import append_line, facts, table
from moe_ep.kernels.marlin import compute
from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe
from moe_ep.kernels.marlin.plain import dequantize_packed
from moe_ep.kernels.marlin.types import weight_type
from moe_ep.kernels.marlin.weights import Weights
from moe_ep.scalar_type import scalar_types

BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12
CACHE_BYTES = 150e6  # weights below this are copied until they exceed it
RELATIVE_ERROR = 0.01
PEERS = ("humming", "vllm", "vllm_best")
COLUMNS = {
    "shape": "shape", "rows": "rows", "us": "us", "p99_us": "p99", "floor_us": "floor", "floor_over_time": "floor/time",
    "clock_mhz": "MHz", "relative_error": "error", "humming": "humming", "vllm": "vLLM", "vllm_best": "vLLM best",
}  # fmt: skip


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

    def floor_us(self, counts: list[int]) -> float:
        """The time below which no version runs much faster, for these rows of the experts."""
        num_bytes = self.num_bytes * sum(count > 0 for count in counts) / self.experts
        return 1e6 * max(num_bytes / BYTES_PER_S, 6 * sum(counts) * self.K * self.N / FLOPS_PER_S)


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


def cases_of(name: str, shape: Shape, row_counts: list[int], skewed: bool) -> list[tuple[str, list[int]]]:
    """(label, rows of every expert) of all that is timed of a shape."""
    cases = [(str(count), [count] * shape.experts) for count in row_counts]
    if not skewed:
        return cases
    active = -(-shape.experts * 3 // 4)
    for mean in (8, 64) if shape.experts > 1 else ():
        weights = [(i + 1) ** -0.5 for i in range(active)]
        zipf = [max(1, round(mean * active * weight / sum(weights))) for weight in weights]
        even = [sum(zipf) * (i + 1) // active - sum(zipf) * i // active for i in range(active)]
        for label, counts in (("zipf", zipf), ("even", even)):
            cases.append((f"{label} {mean}", counts + [0] * (shape.experts - active)))
    for tokens in (1, 8, 32, 64, 128) if name == "deepseek-v3" else ():
        chosen = torch.rand(8 * tokens, 8 * shape.experts).topk(8).indices
        counts = torch.bincount(chosen.flatten(), minlength=8 * shape.experts)[: shape.experts].tolist()
        cases.append((f"T={tokens}", counts))
    return cases


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


def relative_error(
    output: torch.Tensor, rows: torch.Tensor, counts: list[int], pair: tuple[Weights, Weights], shape: Shape
) -> float:
    """mean |d| / mean |ref| of the experts with the most and the fewest rows."""
    kind = weight_type(getattr(scalar_types, shape.kind).id)
    used = [expert for expert, count in enumerate(counts) if count]
    error = scale = 0.0
    for expert in {max(used, key=counts.__getitem__), min(used, key=counts.__getitem__)}:
        biases = [None if w.bias is None else w.bias[expert].float() for w in pair]
        some = rows[expert, : counts[expert]]
        gate_up = F.linear(some.float(), dequantize_packed(pair[0], kind, expert), biases[0])
        hidden = apply_activation(shape.activation, gate_up).to(rows.dtype).float()
        expected = F.linear(hidden, dequantize_packed(pair[1], kind, expert), biases[1])
        error += float((output[expert, : counts[expert]].float() - expected).abs().mean())
        scale += float(expected.abs().mean())
    return error / scale


def run_shape(name: str, shape: Shape, cases: list[tuple[str, list[int]]]) -> list[dict[str, Any]]:
    """Checks and times one shape in each case."""
    gated = shape.activation.is_gated
    copies = max(1, -(-int(CACHE_BYTES) // int(shape.num_bytes)))
    pairs = [
        (
            make_weights(shape, (2 if gated else 1) * shape.N, shape.K, gated),
            make_weights(shape, shape.K, shape.N, False),
        )
        for _ in range(copies)
    ]
    scratch = torch.empty(40_000_000, dtype=torch.bfloat16, device="cuda")
    results = []
    for label, counts in cases:
        if not any(counts):
            continue
        capacity = capacity_of(max(counts))
        rows = torch.randn(shape.experts, capacity, shape.K, device="cuda").bfloat16()
        output = torch.full_like(rows, float("nan"))
        hidden = torch.empty(shape.experts * capacity * shape.N, dtype=torch.bfloat16, device="cuda")
        call = caller(shape, pairs, rows, torch.tensor(counts, dtype=torch.int32).cuda(), output, scratch, hidden)
        call(0)
        error = relative_error(output, rows, counts, pairs[0], shape)
        if not error < RELATIVE_ERROR:
            raise RuntimeError(f"{name} with rows {label} is wrong: relative error {error}")
        floor = shape.floor_us(counts)
        timing = timed(call, rows.device)
        row = {"shape": name, "rows": label, "us": timing.median, "p99_us": timing.p99, "floor_us": floor}
        row |= {"floor_over_time": floor / timing.median, "clock_mhz": timing.clock_mhz, "relative_error": error}
        results.append(row)
    return results


def capacity_of(rows: int) -> int:
    """Rows that buffers have for an expert."""
    return 128 if rows <= 128 else max(rows, 1024)


def caller(
    shape: Shape, pairs: list, rows: torch.Tensor, numbers: torch.Tensor, output: torch.Tensor, scratch: torch.Tensor,
    hidden: torch.Tensor,
) -> Callable[[int], object]:  # fmt: skip
    """call(i): the experts with the i-th copy of the weights."""

    def call(i: int) -> object:
        first, second = pairs[i % len(pairs)]
        return batched_fused_marlin_moe(
            rows, numbers, first.qweight, second.qweight, first.bias, second.bias, first.scales, second.scales,
            getattr(scalar_types, shape.kind).id, activation=shape.activation, intermediate_cache13=scratch,
            intermediate_cache2=hidden, output=output,
        )  # fmt: skip

    return call


def peer_command(peer: str, shapes: list[Shape], row_counts: list[int], library: Path | None) -> list[str]:
    command = [sys.executable, str(Path(__file__).with_name("gemm_peers.py")), peer, "--rows", *map(str, row_counts)]
    for shape in shapes:
        command += ["--shape", *map(str, (shape.experts, shape.K, shape.N))]
    return command + (["--library", str(library)] if peer == "vllm" else [])


def run_peer(command: list[str], seconds: float) -> str:
    """What a peer printed in that time; what went wrong is printed here."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
        printed, problem = done.stdout, done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired as expired:
        printed, problem = (expired.stdout or b"").decode(), [f"stopped after {seconds:.0f} s"]
    if problem:
        print(f"{command[2]}: {problem[0]}", file=sys.stderr)
    return printed


def compile_peers(
    peers: list[str], shapes: list[Shape], row_counts: list[int], library: Path | None, seconds: float
) -> None:
    """Lets the peers compile what they will need and do not have, side by side, before anything is timed."""
    jobs = [[shape] for shape in shapes]
    with ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) // 2)) as pool:
        for peer in peers:
            # vLLM's kernels are the same for all shapes.
            for job in jobs if peer == "humming" else jobs[:1]:
                command = [*peer_command(peer, job, row_counts, library), "--compile-only"]
                pool.submit(run_peer, command, seconds)


def peer_times(
    peer: str, shapes: dict[str, Shape], row_counts: list[int], library: Path | None, seconds: float
) -> list[dict[str, Any]]:
    """Rows of shape, rows and microseconds by name of a peer, as far as it got in that time."""
    names = {(shape.experts, shape.K, shape.N): name for name, shape in shapes.items()}
    printed = run_peer(peer_command(peer, list(shapes.values()), row_counts, library), seconds)
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{") and line.endswith("}")]
    return [{"shape": names[tuple(row["shape"])], "rows": str(row["rows"])} | row["us"] for row in rows]


def summary(results: list[dict[str, Any]]) -> str:
    """How much faster than each peer: geometric mean and least over all rows that it computed."""
    lines = []
    for peer in PEERS:
        ratios = [row[peer] / row["us"] for row in results if row.get(peer)]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            lines.append(f"{peer}: {mean:.2f} x in the geometric mean of {len(ratios)}, at least {min(ratios):.2f} x")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64, 128, 256, 1024])
    parser.add_argument("--no-skew", action="store_true", help="uniform rows only")
    parser.add_argument(
        "--ampere-only", action="store_true", help="on Hopper too, the kernels of all GPUs from sm_80 on"
    )
    parser.add_argument("--peers", nargs="*", choices=["humming", "vllm"], default=[])
    parser.add_argument(
        "--peer-rows", nargs="+", type=int, help="fewer row counts for them (their compilation is slow)"
    )
    parser.add_argument("--peer-seconds", type=float, default=600, help="for one of them, compiling and timing")
    parser.add_argument("--compiled", action="store_true", help="the peers have compiled what they need")
    parser.add_argument("--vllm-library", type=Path, help="vLLM's _moe_C_stable_libtorch.abi3.so, or that as .xz")
    parser.add_argument("--jsonl", type=Path, help="append one JSON line a row to this file")
    parser.add_argument("--commit", help="what to record where this is no git checkout")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if "vllm" in options.peers and options.vllm_library is None:
        parser.error("--peers vllm needs --vllm-library")
    if options.ampere_only:
        compute.run_experts = partial(compute.run_experts, ampere_only=True)
    torch.manual_seed(options.seed)
    device = torch.device("cuda", torch.cuda.current_device())
    ceilings = measure_ceilings(device, torch.bfloat16)
    about = facts(seed=options.seed, commit=options.commit) | {
        "memory_tb_s": ceilings.memory_bytes_per_s / 1e12,
        "bf16_tflop_s": ceilings.flops_per_s / 1e12,
        "ampere_only": options.ampere_only,
    }
    print(json.dumps(about))
    shapes = {name: SHAPES[name] for name in options.shapes}
    # The peers take neither fp4 nor biases in this form.
    common = {name: shape for name, shape in shapes.items() if shape.kind == "uint4b8"}
    asked = (options.peer_rows or options.rows, options.vllm_library, options.peer_seconds)
    if common and not options.compiled:
        compile_peers(options.peers, list(common.values()), *asked)
    everything = []
    for name, shape in shapes.items():
        rows = run_shape(name, shape, cases_of(name, shape, options.rows, not options.no_skew))
        everything += keep(rows, about, options.jsonl)
        torch.cuda.empty_cache()
    for peer in options.peers if common else ():
        times = keep(peer_times(peer, common, *asked), about, options.jsonl)
        for row in everything:
            row |= next((us for us in times if (us["shape"], us["rows"]) == (row["shape"], row["rows"])), {})
    for name in shapes:
        print(table([row for row in everything if row["shape"] == name], COLUMNS), flush=True)
    print(summary(everything))


def keep(rows: list[dict[str, Any]], about: dict[str, Any], path: Path | None) -> list[dict[str, Any]]:
    """Appends the rows to the file and gives them back."""
    for row in rows if path else ():
        append_line(path, row | about)
    return rows


if __name__ == "__main__":
    main()

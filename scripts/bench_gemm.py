"""Both GEMMs of the experts with the activation between them, on one GPU, beside their floor and other implementations.

    python scripts/bench_gemm.py --peers torch humming vllm --vllm-library FILE     everything
    python scripts/bench_gemm.py --shapes deepseek-v3 --rows 8 64 --json results.jsonl
    python scripts/bench_gemm.py --shapes deepseek-v3 --weights fp8 --no-skew --peers deepgemm humming-fp8

floor = max(weight bytes / 4.3 TB/s, FLOPs / 790 TFLOP/s); what this GPU reaches is measured in the same run and printed
above the table. Every case is compared with weights dequantized to f32 before it is timed. Timing: ten calls in a CUDA
graph (three for long ones), two bursts of seven replays after rests, the median (gemm_timing.py); weights that fit the
L2 cache are copied and taken in turn, so that they are read from memory. Buffers hold 128 rows an expert, or 1024
where more than 128 are used (peers: anywhere).

Beside uniform rows: rows that follow Zipf's law with exponent 0.5 over three quarters of the experts, the others empty,
against the same number of rows spread evenly over the same experts; and DeepSeek-V3's experts of one of eight ranks
when every rank has T tokens. Peers run in processes of their own (gemm_peers.py), without the activation. What they
and our kernels compile is compiled first, side by side. scripts/gemm_tables.py makes the tables of
docs/benchmarks/experts.md.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gemm_cases import OF_PEERS, SHAPES, WEIGHTS, Shape, cases_of, with_weights
from gemm_timing import capacity_of, num_copies, timed
from harness import Bench, positive, this_gpu

from moe_ep.activation import apply_activation
from moe_ep.bench.results import table
from moe_ep.bench.timing import measure_ceilings
from moe_ep.kernels import jit
from moe_ep.kernels.marlin import compute, hopper
from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe
from moe_ep.kernels.marlin.plain import dequantize_packed
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.kernels.marlin.weights import Weights

RELATIVE_ERROR = 0.01
ROWS_AT_ONCE = 3  # row counts that one process of a peer compiles for
COMPILING = ("humming", "humming-int8", "humming-fp8", "deepgemm")  # peers that compile for each shape
COLUMNS = {
    "shape": "shape", "rows": "rows", "us": "us", "p99_us": "p99", "floor_us": "floor", "floor_over_time": "floor/time",
    "clock_mhz": "MHz", "relative_error": "error", "torch_bmm": "torch.bmm", "humming": "humming",
    "humming_int8": "humming int8", "humming_fp8": "humming fp8", "deepgemm": "DeepGEMM", "vllm": "vLLM",
    "vllm_best": "vLLM best",
}  # fmt: skip


def make_weights(shape: Shape, rows: int, columns: int, gated: bool, kind: WeightType | None = None) -> Weights:
    """Random packed weights of one GEMM, of `kind`, if given: shape.type as packed for some rows."""
    size = (shape.experts, columns // 16, rows * 16 // shape.type.pack)
    qweight = torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32, device="cuda")
    if shape.kind == "float8_e4m3fn":
        qweight &= -0x08080809  # one bit of every byte's exponent, so that none is a NaN
    groups = (shape.experts, 1 if shape.group == -1 else columns // shape.group, rows)
    if shape.scale_dtype == torch.uint8:
        scales = torch.randint(118, 122, groups, dtype=torch.uint8, device="cuda")
    else:
        scales = (torch.rand(groups, device="cuda") * 0.01 + 0.002).to(shape.scale_dtype)
    if shape.kind == "float8_e4m3fn" and shape.group == 128:  # blocks of 128 x 128, of gate or up rows
        row = torch.arange(rows, device="cuda")
        scales = scales[:, :, row // 128 * 128 + row % 2].contiguous()
    has_zeros, is_nvfp4 = shape.type.has_zero_points, shape.scale_dtype == torch.float8_e4m3fn
    zeros = torch.randint(0, 16, groups, device="cuda").bfloat16() if has_zeros else None
    if kind is not None and kind.for_eight_bit_rows:
        zeros = scales.amax(1, keepdim=True)
    alphas = torch.ones(shape.experts, device="cuda") if is_nvfp4 else None
    bias = torch.randn(shape.experts, rows, device="cuda").bfloat16() if shape.bias else None
    qweight = qweight.view((kind or shape.type).packed_dtype)
    return Weights(qweight, scales, zeros, bias, alphas, None, None, gated, rows, columns)


def relative_error(
    output: torch.Tensor, rows: torch.Tensor, counts: list[int], pair: tuple[Weights, Weights], shape: Shape
) -> float:
    """mean |d| / mean |ref| of the experts with the most and the fewest rows."""
    used = [expert for expert, count in enumerate(counts) if count]
    error = scale = 0.0
    for expert in {max(used, key=counts.__getitem__), min(used, key=counts.__getitem__)}:
        biases = [None if w.bias is None else w.bias[expert].float() for w in pair]
        some = rows[expert, : counts[expert]]
        gate_up = F.linear(some.float(), dequantize_packed(pair[0], shape.type, expert), biases[0])
        hidden = apply_activation(shape.activation, gate_up).to(rows.dtype).float()
        expected = F.linear(hidden, dequantize_packed(pair[1], shape.type, expert), biases[1])
        error += float((output[expert, : counts[expert]].float() - expected).abs().mean())
        scale += float(expected.abs().mean())
    return error / scale


def run_shape(name: str, shape: Shape, cases: list[tuple[str, list[int]]]) -> Iterator[dict[str, Any]]:
    """Checks and times one shape in each case."""
    gated = shape.activation.is_gated
    pairs = [
        (
            make_weights(shape, (2 if gated else 1) * shape.N, shape.K, gated),
            make_weights(shape, shape.K, shape.N, False),
        )
        for _ in range(num_copies(shape.num_bytes))
    ]
    scratch = torch.empty(40_000_000, dtype=torch.bfloat16, device="cuda")
    for label, counts in cases:
        if not any(counts):
            continue
        capacity = capacity_of(max(counts))
        rows = torch.randn(shape.experts, capacity, shape.K, device="cuda").bfloat16()
        output = torch.full_like(rows, float("nan"))
        hidden = torch.empty(shape.experts * capacity * shape.N, dtype=torch.bfloat16, device="cuda")
        call = caller(shape, pairs, rows, counts, output, scratch, hidden)
        call(0)
        error = relative_error(output, rows, counts, pairs[0], shape)
        if not error < RELATIVE_ERROR:
            raise RuntimeError(f"{name} with rows {label} is wrong: relative error {error}")
        floor = shape.floor_us(counts)
        if label == cases[0][0]:
            timed(call, rows.device)  # the first timing of a process came out a tenth too slow
        timing = timed(call, rows.device)
        row = {"shape": name, "rows": label, "us": timing.median, "p99_us": timing.p99, "floor_us": floor}
        row |= {"floor_over_time": floor / timing.median, "clock_mhz": timing.clock_mhz, "relative_error": error}
        yield row


def caller(
    shape: Shape, pairs: list, rows: torch.Tensor, counts: list[int], output: torch.Tensor, scratch: torch.Tensor,
    hidden: torch.Tensor,
) -> Callable[[int], object]:  # fmt: skip
    """call(i): the experts with the i-th copy of the weights, with their expected rows, as a layer passes them."""
    numbers = torch.tensor(counts, dtype=torch.int32).cuda()

    def call(i: int) -> object:
        first, second = pairs[i % len(pairs)]
        return batched_fused_marlin_moe(
            rows, numbers, first.qweight, second.qweight, first.bias, second.bias, first.scales, second.scales,
            shape.type.scalar_type.id, w1_zeros=first.zeros, w2_zeros=second.zeros, global_scale1=first.alphas,
            global_scale2=second.alphas, activation=shape.activation, intermediate_cache13=scratch,
            intermediate_cache2=hidden, output=output, expected_m=sum(counts) / len(counts),
        )  # fmt: skip

    return call


def peer_command(peer: str, shapes: list[Shape], row_counts: list[int], library: Path | None) -> list[str]:
    """For shapes of one kind of weights."""
    command = [sys.executable, str(Path(__file__).with_name("gemm_peers.py")), peer, "--rows", *map(str, row_counts)]
    command += ["--weights", shapes[0].weights]
    for shape in shapes:
        command += ["--shape", *map(str, (shape.experts, shape.K, shape.N))]
    return command + (["--library", str(library)] if peer == "vllm" else [])


def peer_lines(command: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """What a peer prints in that time, line by line; what went wrong is printed here."""
    said = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        clock = threading.Timer(seconds, process.kill)
        clock.start()
        for line in process.stdout or ():
            if line.startswith("{") and line.endswith("}\n"):
                yield json.loads(line)
            elif line.startswith(f"{command[2]}: "):  # what it could not compute; it goes on
                print(line.strip(), file=sys.stderr)
                said = ""
            else:
                said = line.strip() or said
        process.wait()
        timed_out = clock.finished.is_set()
        clock.cancel()
    if process.returncode and (said or timed_out):
        print(f"{command[2]}: {f'stopped after {seconds:.0f} s' if timed_out else said}", file=sys.stderr)


def compile_all(
    peers: list[str], shapes: list[Shape], row_counts: list[int], library: Path | None, seconds: float
) -> None:
    """Compiles our kernels, and lets the peers compile theirs, side by side, before anything is timed."""
    device = torch.device("cuda", torch.cuda.current_device())
    ours = own_sources(shapes) if torch.cuda.get_device_capability() == (9, 0) else []
    # vLLM's kernels are the same for all shapes, torch has its own.
    parts = [row_counts[i : i + ROWS_AT_ONCE] for i in range(0, len(row_counts), ROWS_AT_ONCE)]
    of_vllm = [shape for shape in shapes if takes("vllm", shape)]
    theirs = [
        (peer, [shape], part)
        for peer in peers
        if peer in COMPILING
        for shape in shapes
        if takes(peer, shape)
        for part in parts
    ]
    theirs += [("vllm", of_vllm[:1], row_counts)] if "vllm" in peers and of_vllm else []

    def let_compile(peer: str, some: list[Shape], counts: list[int]) -> None:
        list(peer_lines([*peer_command(peer, some, counts, library), "--compile-only"], seconds))

    with ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) // 2)) as pool:
        jobs = [pool.submit(source.compile_ahead, device) for source in ours]
        jobs += [pool.submit(let_compile, *job) for job in theirs]
        for job in jobs:
            job.result()


def takes(peer: str, shape: Shape) -> bool:
    return shape.weights in OF_PEERS[peer]


def own_sources(shapes: list[Shape]) -> list[jit.KernelSource]:
    """What hopper.launch compiles for these shapes."""
    found = []
    for shape in shapes:
        w13_rows, numbers = (1 + shape.activation.is_gated) * shape.N, (shape.type, torch.bfloat16, shape.scale_dtype)
        per_step = hopper.groups_per_step(shape.K, shape.K // shape.group)
        tall = hopper.may_be_tall(shape.experts, (w13_rows, shape.K))
        found += [hopper.kernel_source(*numbers, per_step, shape.activation, decode, tall) for decode in (False, True)]
    return list(dict.fromkeys(found))


def peer_times(
    peer: str, shapes: dict[str, Shape], row_counts: list[int], library: Path | None, seconds: float
) -> Iterator[dict[str, Any]]:
    """Rows of shape, rows and microseconds by name of a peer, as far as it got in that time."""
    for weights in dict.fromkeys(shape.weights for shape in shapes.values() if takes(peer, shape)):
        some = {name: shape for name, shape in shapes.items() if shape.weights == weights}
        names = {(shape.experts, shape.K, shape.N): name for name, shape in some.items()}
        for row in peer_lines(peer_command(peer, list(some.values()), row_counts, library), seconds):
            yield {"shape": names[tuple(row["shape"])], "rows": str(row["rows"])} | row["us"]


def summary(results: list[dict[str, Any]]) -> str:
    """How much faster than each peer: geometric mean and least over all rows that it computed."""
    lines = []
    for peer in ("torch_bmm", "humming", "humming_int8", "humming_fp8", "deepgemm", "vllm", "vllm_best"):
        ratios = [row[peer] / row["us"] for row in results if row.get(peer)]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            lines.append(f"{peer}: {mean:.2f} x in the geometric mean of {len(ratios)}, at least {min(ratios):.2f} x")
    return "\n".join(lines)


def main() -> None:
    bench = Bench(__doc__)
    parser = bench.parser
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument(
        "--weights", nargs="+", choices=list(WEIGHTS), help="all shapes with each of these, instead of their own"
    )
    parser.add_argument("--rows", nargs="+", type=positive, default=[1, 4, 8, 16, 32, 64, 128, 256, 1024])
    parser.add_argument("--no-skew", action="store_true", help="uniform rows only")
    parser.add_argument(
        "--ampere-only", action="store_true", help="on Hopper too, the kernels of all GPUs from sm_80 on"
    )
    parser.add_argument("--peers", nargs="*", choices=list(OF_PEERS), default=[])
    parser.add_argument(
        "--peer-rows", nargs="+", type=positive, help="fewer row counts for them (their compilation is slow)"
    )
    parser.add_argument("--peer-seconds", type=float, default=600, help="for one of them, compiling and timing")
    parser.add_argument("--compiled", action="store_true", help="compile nothing ahead: all is there")
    parser.add_argument("--vllm-library", type=Path, help="vLLM's _moe_C_stable_libtorch.abi3.so, or that as .xz")
    options = bench.parse()
    if "vllm" in options.peers and options.vllm_library is None:
        parser.error("--peers vllm needs --vllm-library")
    for name, counts in (("--rows", options.rows), ("--peer-rows", options.peer_rows or [1])):
        if min(counts) < 1:
            parser.error(f"{name} has {min(counts)}; every number of rows must be at least 1")
    shapes = {name: SHAPES[name] for name in options.shapes}
    if options.weights:
        shapes = {f"{name} {w}": with_weights(s, w) for name, s in shapes.items() for w in options.weights}
    for peer in options.peers:
        if not any(takes(peer, shape) for shape in shapes.values()):
            taken = ", ".join(OF_PEERS[peer])
            parser.error(f"--peers has {peer}, which is timed with {taken}, and no shape has such weights; add one")
    if options.ampere_only:
        compute.run_experts = partial(compute.run_experts, ampere_only=True)
    device = this_gpu()
    ceilings = measure_ceilings(device, torch.bfloat16)
    bench.about |= {
        "memory_tb_s": ceilings.memory_bytes_per_s / 1e12,
        "bf16_tflop_s": ceilings.flops_per_s / 1e12,
        "ampere_only": options.ampere_only,
    }
    print(json.dumps(bench.about))
    asked = (options.peer_rows or options.rows, options.vllm_library, options.peer_seconds)
    if not options.compiled and not options.ampere_only:
        compile_all(options.peers, list(shapes.values()), *asked)
    everything = []
    for name, shape in shapes.items():
        for row in run_shape(name, shape, cases_of(name, shape, options.rows, not options.no_skew)):
            everything.append(bench.keep(row))
        torch.cuda.empty_cache()
    for peer in options.peers:
        for times in peer_times(peer, shapes, *asked):
            bench.keep(times)
            for row in everything:
                row |= times if (times["shape"], times["rows"]) == (row["shape"], row["rows"]) else {}
    for name in shapes:
        print(table([row for row in everything if row["shape"] == name], COLUMNS), flush=True)
    print(summary(everything))


if __name__ == "__main__":
    main()

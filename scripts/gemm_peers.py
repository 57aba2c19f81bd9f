"""Other implementations of the experts' two GEMMs, timed as bench_gemm.py times ours; it starts this in processes.

    python scripts/gemm_peers.py humming --shape 16 4096 1536 --rows 1 8 64 --capacity 128
    python scripts/gemm_peers.py vllm --library FILE --shape 16 4096 1536 --rows 1 8 64 --capacity 128

One JSON line for each number of rows an expert, `us` by name. Both peers compute the GEMMs alone, without the
activation between them. Humming is `humming-kernels` from PyPI with its default tuning; its first calls compile. vLLM's
batched Marlin is the file vllm/_moe_C_stable_libtorch.abi3.so of its wheel (or that file as .xz), loaded alone: "vllm"
has block size 64, as vLLM chooses it from the buffer's capacity, "vllm_best" the best of its sizes. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import lzma
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from moe_ep.bench.timing import time_calls, timing_of
from moe_ep.scalar_type import scalar_types

CACHE_BYTES = 150e6  # weights below this are copied until they exceed it
VLLM_BLOCKS = (64, 8, 16, 32, 48)


class Buffers:
    """Rows of every expert, `capacity` each, before, between and after the GEMMs."""

    def __init__(self, experts: int, K: int, N: int, capacity: int) -> None:
        def rows(columns: int) -> torch.Tensor:
            return torch.randn(experts * capacity, columns, device="cuda").bfloat16()

        self.input, self.gate_up, self.hidden, self.output = rows(K), rows(2 * N), rows(N), rows(K)
        self.counts = torch.zeros(experts, dtype=torch.int32, device="cuda")


def humming_calls(options: argparse.Namespace, buffers: Buffers) -> dict[str, Callable[[int, int], None]]:
    """Humming's grouped_masked form: call(i, rows)."""
    from humming.layer import HummingLayer

    experts, K, N = options.shape

    def layer(out: int, columns: int) -> torch.nn.Module:
        made = HummingLayer(
            shape_n=out,
            shape_k=columns,
            weight_config={"dtype": "uint4", "group_size": 128},
            num_experts=experts,
            torch_dtype=torch.bfloat16,
        ).cuda()
        made.load_from_unquantized(torch.randn(experts, out, columns, device="cuda").bfloat16())
        made.transform()
        return made

    pairs = [(layer(2 * N, K), layer(K, N)) for _ in range(num_copies(options))]
    config = {"gemm_type": "grouped_masked"}

    def call(i: int, rows: int) -> None:
        more = {"expert_layout": buffers.counts, "compute_config": config, "valid_shape_m": rows * experts}
        w13, w2 = pairs[i % len(pairs)]
        w13(buffers.input, outputs=buffers.gate_up, **more)
        w2(buffers.hidden, outputs=buffers.output, **more)

    return {"humming": call}


def vllm_calls(options: argparse.Namespace, buffers: Buffers) -> dict[str, Callable[[int, int], None]]:
    """vLLM's batched Marlin for each block size: call(i, rows), with the index lists made in every call."""
    torch.ops.load_library(unpacked(options.library))
    experts, K, N = options.shape

    def weights(out: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = (experts, columns // 16, out * 2)
        codes = torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32, device="cuda")
        return codes, torch.rand(experts, columns // 128, out, device="cuda").bfloat16()

    pairs = [(weights(2 * N, K), weights(K, N)) for _ in range(num_copies(options))]
    ops, total = torch.ops._moe_C, experts * options.capacity
    ones = torch.ones(total, device="cuda")
    workspace = torch.zeros(4 * torch.cuda.get_device_properties(0).multi_processor_count, dtype=torch.int32).cuda()

    def with_block(block: int) -> Callable[[int, int], None]:
        per_expert = -(-options.capacity // block)
        slots, owners, used = (
            torch.empty(size, dtype=torch.int32, device="cuda")
            for size in (experts * per_expert * block, experts * per_expert, 1)
        )

        def gemm(rows: torch.Tensor, packed: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
            codes, scales = packed
            ops.moe_wna16_marlin_gemm(
                rows, out, codes, None, scales, None, None, None, None, None, workspace, slots, owners, used, ones,
                block, 1, False, scalar_types.uint4b8.id, total, out.size(1), rows.size(1), True, False, True, False,
                -1, -1, -1,
            )  # fmt: skip

        def call(i: int, rows: int) -> None:
            ops.batched_moe_align_block_size(options.capacity, block, buffers.counts, slots, owners, used)
            w13, w2 = pairs[i % len(pairs)]
            gemm(buffers.input, w13, buffers.gate_up)
            gemm(buffers.hidden, w2, buffers.output)

        return call

    return {f"vllm_{block}": with_block(block) for block in VLLM_BLOCKS}


def num_copies(options: argparse.Namespace) -> int:
    experts, K, N = options.shape
    return max(1, -(-int(CACHE_BYTES) // int(experts * 3 * K * N * (0.5 + 2 / 128))))


def unpacked(library: Path) -> str:
    """A path of the library itself, in a folder for temporary files where it is compressed."""
    if library.suffix != ".xz":
        return str(library)
    target = Path(tempfile.gettempdir()) / library.stem
    if not target.exists():
        target.write_bytes(lzma.decompress(library.read_bytes()))
    return str(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=["humming", "vllm"])
    parser.add_argument("--library", type=Path, help="vLLM's library file")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("EXPERTS", "K", "N"), required=True)
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--capacity", type=int, required=True)
    parser.add_argument("--compile-only", action="store_true", help="make the first calls and time nothing")
    options = parser.parse_args()
    torch.manual_seed(0)
    buffers = Buffers(*options.shape, options.capacity)
    calls = (humming_calls if options.peer == "humming" else vllm_calls)(options, buffers)
    device = torch.device("cuda", torch.cuda.current_device())
    for rows in options.rows:
        buffers.counts.fill_(rows)
        times = {}
        for name, call in calls.items():
            if options.compile_only:
                call(0, rows)
                continue
            once = time_calls(lambda i, call=call, rows=rows: call(i, rows), device=device, repeats=7)
            times[name] = timing_of(once).median
        if options.peer == "vllm" and times:
            times = {"vllm": times["vllm_64"], "vllm_best": min(times.values())}
        print(json.dumps({"rows": rows, "us": times}), flush=True)


if __name__ == "__main__":
    main()

"""Experts of plain bf16 weights on one GPU: by grouped products, and by the reference that they stand in for.

    python scripts/bench_plain_experts.py --json results.jsonl

All experts of a layer on tokens with random routing, in one rank: index lists, both products, the activation and the
weighted sum. floor = max(weights of the experts that have rows / 4.3 TB/s, FLOPs / 790 TFLOP/s).
"""

from __future__ import annotations

from typing import Any

import torch
from gemm_cases import BYTES_PER_S, FLOPS_PER_S
from harness import Bench, positive, this_gpu

from moe_ep.bench.geometries import preset
from moe_ep.bench.results import markdown_table
from moe_ep.bench.timing import time_calls, timing_of
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig
from moe_ep.layer.methods import relative_error
from moe_ep.modular_kernel import FusedMoEModularKernel, make_experts, make_prepare_finalize

# Geometry, and how many of its experts there are: all of a small model, a rank's of eight of a larger one.
LAYERS = (("qwen3-30b", 128), ("mixtral-8x7b", 8), ("qwen3-235b", 16))


def main() -> None:
    bench = Bench(__doc__)
    parser = bench.parser
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1, 8, 64, 512, 4096])
    options = bench.parse()
    for geometry, num_experts in LAYERS:
        for row in measure(geometry, num_experts, options.tokens):
            bench.keep(row)
    columns = {"layer": "layer", "tokens": "tokens", "grouped_us": "us", "floor_us": "floor us"}
    columns |= {"of_floor": "floor/time", "eager_us": "eager us", "reference_us": "reference us", "error": "error"}
    print(markdown_table(bench.rows, columns))


def measure(geometry: str, num_experts: int, tokens: list[int]) -> list[dict[str, Any]]:
    """A row for each number of tokens; the reference, which waits for the host, is timed eagerly."""
    sizes, device = preset(geometry), this_gpu()
    K, N, top_k = sizes.hidden_size, sizes.intermediate_size, sizes.top_k
    config = FusedMoEConfig(
        num_experts=num_experts,
        experts_per_token=top_k,
        hidden_dim=K,
        intermediate_size_per_partition=N,
        num_local_experts=num_experts,
        moe_parallel_config=FusedMoEParallelConfig.make(),
        in_dtype=torch.bfloat16,
        max_num_tokens=max(tokens),
    )
    like = {"dtype": torch.bfloat16, "device": device}
    w13, w2 = torch.randn(num_experts, 2 * N, K, **like) * K**-0.5, torch.randn(num_experts, K, N, **like) * N**-0.5
    kernels = {
        name: FusedMoEModularKernel(make_prepare_finalize("no_ep", config), make_experts(name, config))
        for name in ("grouped", "reference")
    }
    rows = []
    for T in tokens:
        hidden_states, weights = torch.randn(T, K, **like), torch.rand(T, top_k, device=device)
        ids = torch.rand(T, num_experts, device=device).topk(top_k).indices.int()

        def run(name: str) -> torch.Tensor:
            return kernels[name](hidden_states, w13, w2, weights, ids)  # noqa: B023

        error = relative_error(run("grouped").clone(), run("reference"))
        times = {
            "grouped_us": time_calls(lambda i: run("grouped"), device=device),
            "eager_us": time_calls(lambda i: run("grouped"), device=device, graph=False),
            "reference_us": time_calls(lambda i: run("reference"), device=device, graph=False, chain=1, repeats=3),
        }
        row = {name: timing_of(measured).median for name, measured in times.items()}
        active, flops = int(ids.unique().numel()), T * top_k * 6 * K * N
        floor = max(active * 6 * K * N / BYTES_PER_S, flops / FLOPS_PER_S) * 1e6
        about = {"layer": f"{geometry}, {num_experts} experts", "tokens": T}
        rows.append(about | row | {"floor_us": floor, "of_floor": floor / row["grouped_us"], "error": error})
    return rows


if __name__ == "__main__":
    main()

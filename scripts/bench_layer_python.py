"""The Python time of an eager layer on one rank: CPU time of a call, with experts and a router that compute nothing.

python scripts/bench_layer_python.py [--calls 2000] [--repeats 15] [--profile]

Needs no GPU. Prints the least and the median over repeats of the process's CPU time per call, one JSON line at the end.
With --profile it prints where a profiler sees that time instead.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from typing import Any

import torch

from moe_ep import FusedMoE
from moe_ep.bench.results import facts
from moe_ep.kernels.reference import ReferenceExperts
from moe_ep.routing import router as routing

E, K, N, TOP_K = 8, 32, 32, 2


def write_nothing(*args: Any) -> None:
    """In place of the experts' computation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="in one repeat (2000)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    choice = torch.full((1, TOP_K), 1 / TOP_K), torch.arange(TOP_K, dtype=torch.int32)[None]
    routing.topk_reference = lambda *_, **__: choice  # type: ignore[assignment]
    ReferenceExperts.run = write_nothing  # type: ignore[method-assign]
    with torch.inference_mode():
        layer = FusedMoE(E, TOP_K, K, N, experts="reference")
        inputs = torch.randn(1, K), torch.randn(1, E)

        def repeat() -> float:
            started = time.process_time()
            for _ in range(args.calls):
                layer(*inputs)
            return (time.process_time() - started) / args.calls * 1e6

        repeat()
        if args.profile:
            with cProfile.Profile() as profile:
                repeat()
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
            return
        times = [repeat() for _ in range(args.repeats)]
    row = {"least_us": round(min(times), 1), "median_us": round(statistics.median(times), 1)}
    print(f"a call takes {row['least_us']} us of CPU time at least, {row['median_us']} us in the median")
    print(json.dumps({"benchmark": "layer_python", **row, **facts(seed=0)}))


if __name__ == "__main__":
    main()

"""The Python time of an eager layer on one rank: CPU time of a call, with experts and a router that compute nothing.

python scripts/bench_layer_python.py [--calls 2000] [--repeats 15] [--profile]

Needs no GPU. Prints the least and the median over repeats of the process's CPU time per call; --json keeps them.
With --profile it prints where a profiler sees that time instead.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from typing import Any

import torch
from harness import Bench, positive

from moe_ep import FusedMoE
from moe_ep.kernels.reference import ReferenceExperts
from moe_ep.routing import router as routing

E, K, N, TOP_K = 8, 32, 32, 2


def write_nothing(*args: Any) -> None:
    """In place of the experts' computation."""


def main() -> None:
    bench = Bench(__doc__)
    parser = bench.parser
    parser.add_argument("--calls", type=positive, default=2000, help="in one repeat (2000)")
    parser.add_argument("--repeats", type=positive, default=15)
    parser.add_argument("--profile", action="store_true")
    args = bench.parse()
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
    least, median = (round(value, 1) for value in (min(times), statistics.median(times)))
    print(f"a call takes {least} us of CPU time at least, {median} us in the median")
    bench.keep({"benchmark": "layer_python", "least_us": least, "median_us": median})


if __name__ == "__main__":
    main()

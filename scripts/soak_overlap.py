"""A soak of overlapped prefill: steps whose every row is compared with that of separate kernels.

    python scripts/soak_overlap.py --ranks 4 --steps 10000                          # ranks of one process share a GPU
    torchrun --nproc-per-node 2 scripts/soak_overlap.py --steps 10000               # a rank per GPU

Each step draws tokens of each rank, among them none and a full batch, and routing; ranks come late at random. Separate
kernels divide sums otherwise, so rows may differ by rounding (--row-tolerance, mean |d| / mean |row|). Prints one line;
ends with 1 where a row was wrong.
"""

from __future__ import annotations

import os
import random
import sys
import time

import torch
import torch.distributed as dist
from bench_overlap import ROUTINGS, SIZES, RankLayer, draw, layers_of_one_gpu, ranks_on_one_gpu, run_together
from harness import Bench, positive, this_gpu, use_gpu_of_rank

CYCLES = (0, 0, 20_000, 200_000)


def wrong_rows(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> torch.Tensor:
    """How many rows differ by more, int64 `[]` on the device; rows with NaN do."""
    apart = (got.float() - expected.float()).abs().mean(dim=1)
    return (~(apart <= tolerance * expected.float().abs().mean(dim=1) + 1e-6)).sum()


def soak(
    layers: list[RankLayer], ranks: range, num_ranks: int, capacity: int, steps: int, seconds: float, tolerance: float
) -> tuple[int, int, int]:
    """(steps, rows compared, wrong rows); ends before its time where `seconds` are over."""
    begin, wrong, rows = time.perf_counter(), torch.zeros((), dtype=torch.int64, device="cuda"), 0
    for step in range(steps):
        rng = random.Random(step)
        routing = rng.choice(ROUTINGS)
        tokens = [rng.choice((0, 1, capacity // 3, capacity, rng.randint(0, capacity))) for _ in range(num_ranks)]
        cycles = [rng.choice(CYCLES) for _ in range(num_ranks)]
        batches = [
            draw(layer.size, tokens[r], num_ranks, routing, step * num_ranks + r)
            for layer, r in zip(layers, ranks, strict=True)
        ]
        expected = run_together(layers, "separate", batches)
        got = run_together(layers, "overlapped", batches, [cycles[r] for r in ranks])
        for pair in zip(got, expected, strict=True):
            wrong += wrong_rows(*pair, tolerance)
            rows += len(pair[0])
        is_over = torch.tensor([float(time.perf_counter() - begin > seconds)])
        if dist.is_initialized():
            dist.all_reduce(is_over, dist.ReduceOp.MAX)
        if is_over:
            break
    return step + 1, rows, int(wrong)


def main() -> int:
    bench = Bench(__doc__)
    add = bench.parser.add_argument
    add("--ranks", type=positive, default=1, help="ranks of this process, without torchrun")
    add("--size", default="small", choices=SIZES)
    add("--capacity", type=positive, default=200, help="tokens of a rank (200)")
    add("--steps", type=positive, default=10_000)
    add("--seconds", type=float, default=float("inf"), help="end after about so long")
    add("--row-tolerance", type=float, default=0.05)
    options = bench.parse()
    size, rest = SIZES[options.size], (options.capacity, options.steps, options.seconds, options.row_tolerance)
    begin = time.perf_counter()
    if "LOCAL_RANK" in os.environ:
        use_gpu_of_rank()
        dist.init_process_group("cpu:gloo,cuda:nccl")
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        layers = [RankLayer(size, rank, num_ranks, options.capacity)]
        found = torch.tensor(soak(layers, range(rank, rank + 1), num_ranks, *rest))
        dist.all_reduce(found)
        steps, rows, wrong = int(found[0]) // num_ranks, int(found[1]), int(found[2])
    else:
        this_gpu()
        rank, num_ranks = 0, options.ranks
        with ranks_on_one_gpu(num_ranks):
            layers = layers_of_one_gpu(size, num_ranks, options.capacity)
            steps, rows, wrong = soak(layers, range(num_ranks), num_ranks, *rest)
    if rank == 0:
        row = {"benchmark": "soak_overlap", "size": options.size, "ranks": num_ranks, "steps": steps, "rows": rows}
        bench.keep(row | {"wrong_rows": wrong, "seconds": round(time.perf_counter() - begin, 1)})
        print(f"{steps} overlapped steps on {num_ranks} ranks: {rows} rows compared, {wrong} wrong rows")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

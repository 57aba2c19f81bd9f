"""A soak of decode steps whose experts combine their results: each combined row is compared bit for bit, on the device.

    torchrun --nproc-per-node 2 scripts/soak_decode.py --steps 1000000

A step is a layer of int4 experts from routed rows to combined ones: the dispatch of nvshmem_low_latency, then experts
that return their results themselves. 64 batches, in which each rank has none to --capacity tokens, are captured in CUDA
graphs, with ranks that come late by other times in each graph; graphs are replayed in random order. Expected rows are
those of separate kernels, without lateness. Prints one line; ends with 1 where a row was wrong.
"""

from __future__ import annotations

import random
import sys
import time

import torch
import torch.distributed as dist
from bench_overlap import BF16, SIZES, draw, random_weights
from harness import Bench, positive, use_gpu_of_rank

from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig
from moe_ep.dispatch.nvshmem.low_latency import MOST_COMBINING_ROWS, LowLatencyPrepareFinalize, Tuning
from moe_ep.expert_map import determine_expert_map
from moe_ep.kernels.marlin.experts import BatchedMarlinExperts
from moe_ep.modular_kernel import FusedMoEModularKernel

BATCHES, GRAPHS = 64, 16
CYCLES = (0, 0, 0, 2_000, 20_000, 100_000)  # of a rank that comes late
REPLAYS_BETWEEN_LOOKS = 64


class DecodeLayer:
    """One rank's part of a layer; with combining, its experts return their results themselves."""

    def __init__(self, name: str, rank: int, num_ranks: int, capacity: int, combining: bool) -> None:
        size = self.size = SIZES[name]
        local = size.experts // num_ranks
        config = FusedMoEConfig(
            num_experts=size.experts, experts_per_token=size.topk, hidden_dim=size.K,
            intermediate_size_per_partition=size.N, num_local_experts=local,
            moe_parallel_config=FusedMoEParallelConfig.make(ep_size=num_ranks, rank=rank), in_dtype=BF16,
            max_num_tokens=capacity,
        )  # fmt: skip
        self.w1, self.w2, quant = random_weights(size, local, rank)
        tuning = Tuning() if combining else Tuning(combining_rows=0)
        self.backend = LowLatencyPrepareFinalize(moe_config=config, quant_config=quant, tuning=tuning)
        self.kernel = FusedMoEModularKernel(self.backend, BatchedMarlinExperts(config, quant))
        expert_map = determine_expert_map(num_ranks, rank, size.experts)[1]
        self.expert_map = None if expert_map is None else expert_map.cuda()
        if combining and self.backend.peer_build() is None:
            raise SystemExit(f"experts of {num_ranks} ranks with {capacity} tokens do not combine batches")

    def run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.kernel(
            x, self.w1, self.w2, weights, ids, global_num_experts=self.size.experts, expert_map=self.expert_map
        )


def main() -> int:
    bench = Bench(__doc__)
    add = bench.parser.add_argument
    add("--size", default="qwen3-30b", choices=SIZES)
    add("--capacity", type=positive, default=8, help="tokens of a rank (8)")
    add("--steps", type=positive, default=1_000_000)
    add("--seconds", type=float, default=float("inf"), help="end after about so long")
    options = bench.parse()
    use_gpu_of_rank()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    most = MOST_COMBINING_ROWS // num_ranks
    if options.capacity > most:
        sys.exit(f"--capacity is {options.capacity}; experts of {num_ranks} ranks combine up to {most} tokens of each")
    separate, combining = (DecodeLayer(options.size, rank, num_ranks, options.capacity, each) for each in (False, True))
    chance = random.Random(0)  # the same on all ranks
    counts = [[chance.randint(0, options.capacity) for _ in range(num_ranks)] for _ in range(BATCHES)]
    batches = [draw(separate.size, n[rank], num_ranks, "zipf", 100 * b + rank) for b, n in enumerate(counts)]
    expected = [separate.run(*batch) for batch in batches]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def round_of(cycles: list[int]) -> None:
        for batch, rows, late in zip(batches, expected, cycles, strict=True):
            if late:
                torch.cuda._sleep(late)
            wrong.add_((combining.run(*batch) != rows).any(dim=1).sum())

    round_of([0] * BATCHES)
    torch.cuda.synchronize()
    dist.barrier()
    graphs = []
    for _ in range(GRAPHS):
        late = [[chance.choice(CYCLES) for _ in range(num_ranks)] for _ in range(BATCHES)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            round_of([each[rank] for each in late])
        graphs.append(graph)
    begin, steps, is_over = time.perf_counter(), 0, torch.zeros(1)
    while steps < options.steps and not is_over:
        for _ in range(min(REPLAYS_BETWEEN_LOOKS, -(-(options.steps - steps) // BATCHES))):
            chance.choice(graphs).replay()
            steps += BATCHES
        torch.cuda.synchronize()
        combining.backend.check()
        is_over[0] = time.perf_counter() - begin > options.seconds
        dist.all_reduce(is_over, dist.ReduceOp.MAX)
    rows = sum(n[rank] for n in counts) * (steps // BATCHES)
    found = torch.tensor([rows, int(wrong)])
    dist.all_reduce(found)
    rows, bad = found.tolist()
    if rank == 0:
        took = round(time.perf_counter() - begin, 1)
        row = {"benchmark": "soak_decode", "size": options.size, "ranks": num_ranks, "capacity": options.capacity}
        bench.keep(row | {"steps": steps, "rows": rows, "wrong_rows": bad, "seconds": took})
        print(f"{steps} decode steps on {num_ranks} ranks: {rows} rows compared, {bad} wrong rows")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())

"""A soak of nvshmem_low_latency: chained pairs of dispatch and combine whose every number is checked on the device.

    torchrun --nproc-per-node 8 scripts/soak_nvshmem.py --pairs 1000000

Tokens of each rank, routing, rows and weights change with every pair, and ranks are late at random. Rounds of 16 pairs,
captured in CUDA graphs, take turns between bf16 and fp8 rows and between both faces. Each row that an expert gets, each
count and list, and each combined row are compared bit for bit with what a hash of (pair, rank, token, column)
says they must be (scripts/soak_nvshmem.cu). Prints one line; ends with 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from harness import positive, use_gpu_of_rank
from tqdm import tqdm

from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.dispatch.nvshmem.arena import SymmetricArena
from moe_ep.dispatch.nvshmem.low_latency import LowLatencyPrepareFinalize
from moe_ep.expert_map import determine_expert_map
from moe_ep.kernels import jit
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceDelegate

STEPS = 16
TOKENS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 8, 11, 15, 16, 17, 29, 64)
ROUNDS_BETWEEN_LOOKS = 64
_POINTERS = (
    "round", "counts", "rows", "topk_ids", "weights", "output", "received", "expert_row_ids", "expert_num_tokens",
    "results",
)  # fmt: skip


class Params(ctypes.Structure):
    """`Params` of soak_nvshmem.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("step", "rank", "num_tokens", "max_delay_ns")),
    )


def mix(a: int, b: int) -> int:
    """As in soak_nvshmem.cu."""
    mask = (1 << 64) - 1
    x = (a * 0x9E3779B97F4A7C15 + b) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return (x ^ x >> 31) >> 32


class Soak:
    """One rank's graphs and counters."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rank, self.size, self.args = dist.get_rank(), dist.get_world_size(), args
        num_local, expert_map, _ = determine_expert_map(self.size, self.rank, args.experts)
        self.expert_map = None if expert_map is None else expert_map.cuda()
        self.config = FusedMoEConfig(
            num_experts=args.experts,
            experts_per_token=args.topk,
            hidden_dim=args.hidden,
            intermediate_size_per_partition=args.hidden,
            num_local_experts=num_local,
            moe_parallel_config=FusedMoEParallelConfig.make(ep_size=self.size, rank=self.rank),
            in_dtype=torch.bfloat16,
            max_num_tokens=max(TOKENS),
        )
        self.round = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.counts = torch.zeros(2, dtype=torch.int64, device="cuda")
        self.results = torch.empty(
            (num_local, self.size * max(TOKENS), args.hidden), dtype=torch.bfloat16, device="cuda"
        )
        self.pool = torch.cuda.graph_pool_handle()
        self.inputs: list[dict[str, torch.Tensor]] = []
        self.kernels = self._load()
        self.backends = [self._backend(fp8, face) for fp8, face in itertools.product((False, True), repeat=2)]
        self.graphs = {
            (index, tokens): self._capture(backend, tokens)
            for index, backend in enumerate(self.backends)
            for tokens in sorted(set(TOKENS))
        }

    def play(self, number: int) -> None:
        tokens = TOKENS[mix(self.args.seed + number, 1000 + self.rank) % len(TOKENS)]
        self.graphs[number % len(self.backends), tokens].replay()

    def check(self) -> None:
        for backend in self.backends:
            backend.check()

    def _load(self) -> dict[str, jit.Kernel]:
        args = self.args
        defines = {
            "HIDDEN": args.hidden, "TOPK": args.topk, "RANKS": self.size, "CAPACITY": max(TOKENS),
            "EXPERTS": args.experts, "STEPS": STEPS, "TOKENS": ",".join(map(str, TOKENS)),
        }  # fmt: skip
        path, pairs = Path(__file__).with_suffix(".cu"), tuple((name, str(value)) for name, value in defines.items())
        device = torch.device("cuda", torch.cuda.current_device())
        names = ("make", "experts", "check", "advance")
        return {name: jit.load(jit.KernelSource(path, f"soak_{name}", pairs), device) for name in names}

    def _backend(self, fp8: bool, by_reference: bool) -> LowLatencyPrepareFinalize:
        quant_config = FusedMoEQuantConfig(dispatch_dtype=torch.float8_e4m3fn if fp8 else None)
        backend = LowLatencyPrepareFinalize(moe_config=self.config, quant_config=quant_config)
        if by_reference:
            backend.hand_over_row_ids()
        return backend

    def _capture(self, backend: LowLatencyPrepareFinalize, num_tokens: int) -> torch.cuda.CUDAGraph:
        K, topk = self.args.hidden, self.args.topk
        rows, output = (torch.empty((num_tokens, K), dtype=torch.bfloat16, device="cuda") for _ in range(2))
        ids = torch.empty((num_tokens, topk), dtype=torch.int32, device="cuda")
        weights = torch.empty((num_tokens, topk), dtype=torch.float32, device="cuda")
        own = {"round": self.round, "counts": self.counts, "rows": rows, "topk_ids": ids, "weights": weights,
               "output": output, "results": self.results}  # fmt: skip
        self.inputs.append(own)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            for step in range(STEPS):
                params = Params(seed=self.args.seed, step=step, rank=self.rank, num_tokens=num_tokens,
                                max_delay_ns=int(1e3 * self.args.delay_us),
                                **{name: tensor.data_ptr() for name, tensor in own.items()})  # fmt: skip
                self._launch("make", params, max(num_tokens, 1))
                unquantized = FusedMoEQuantConfig.unquantized()
                received, _, meta, _, _ = backend.prepare(
                    rows, weights, ids, self.args.experts, self.expert_map, False, unquantized
                )
                params.received, params.expert_num_tokens = received.data_ptr(), meta.expert_num_tokens.data_ptr()
                params.expert_row_ids = None if meta.expert_row_ids is None else meta.expert_row_ids.data_ptr()
                self._launch("experts", params, len(self.results), 4)
                backend.finalize(output, self.results, weights, ids, False, TopKWeightAndReduceDelegate())
                self._launch("check", params, max(num_tokens, 1))
            self._launch("advance", params, 1)
        return graph

    def _launch(self, name: str, params: Params, blocks: int, shares: int = 1) -> None:
        self.kernels[name].launch(params, (blocks, shares, 1), 1 if name == "advance" else 256)


def run(soak: Soak, pairs: int, seconds: float) -> tuple[int, float]:
    """(rounds, how long they took); ends before its time where `seconds` are over."""
    begin, done = time.perf_counter(), 0
    rounds = -(-pairs // STEPS)
    with tqdm(total=pairs, unit=" pairs", disable=soak.rank != 0) as bar:
        while done < rounds:
            count = min(ROUNDS_BETWEEN_LOOKS, rounds - done)
            for number in range(done, done + count):
                soak.play(number)
            torch.cuda.synchronize()
            soak.check()
            done += count
            bar.update(min(count * STEPS, pairs - bar.n))
            is_over = torch.tensor([int(time.perf_counter() - begin > seconds or int(soak.counts[0]) > 0)])
            dist.all_reduce(is_over, op=dist.ReduceOp.MAX)
            if int(is_over):
                break
    return done, time.perf_counter() - begin


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=positive, default=1_000_000, help="pairs of dispatch and combine")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after about so long")
    parser.add_argument("--hidden", type=positive, default=7168, help="K")
    parser.add_argument("--experts", type=positive, default=256, help="E")
    parser.add_argument("--topk", type=positive, default=8, help="experts of a token")
    parser.add_argument("--delay-us", type=float, default=10.0, help="most that a rank is late, every fourth pair")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other batches")
    return parser.parse_args()


def main() -> int:
    args = parse()
    use_gpu_of_rank()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    soak = Soak(args)
    dist.barrier()
    rounds, seconds = run(soak, args.pairs, args.seconds)
    counts = soak.counts.cpu()
    dist.all_reduce(counts)
    wrong, rows = counts.tolist()
    if soak.rank == 0:
        print(
            f"{rounds * STEPS} pairs of nvshmem_low_latency on {soak.size} ranks, K {args.hidden}, top-{args.topk} of "
            f"{args.experts}, seed {args.seed}, in {seconds:.1f} s: {rows} rows compared, {wrong} wrong numbers"
        )
    soak.graphs.clear()
    soak.backends.clear()
    torch.cuda.synchronize()
    SymmetricArena.close()
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

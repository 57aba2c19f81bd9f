"""Dispatch and combine of every backend, beside raw all_to_all_single pairs of the same bytes in the same run.

    python scripts/bench_dispatch.py                              # one process a GPU of this machine
    torchrun --nproc-per-node 4 scripts/bench_dispatch.py         # the same, or across hosts
    python scripts/bench_dispatch.py --device cpu --ranks 2 --hidden 256 --graph-tokens 8 --eager-tokens 64

A time is prepare + finalize of one step, experts left out: their output is the rows they were given. Backends that can
be captured run as a CUDA graph of several chained pairs for --graph-tokens, eager for the rest; the raw pair beside it
runs in the same way, with each peer's bytes equal to the backend's. Every setting is checked first, bit for bit. Median
and p99 over repeats of the maximum over ranks. The floor is the most bytes that leave a rank for others over the
peer-to-peer bandwidth measured in the same run. One JSON line a setting, then a table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# NVLink multicast stays off, whatever the machine's default is.
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.contracts import FusedMoEActivationFormat, FusedMoEPrepareAndFinalize
from moe_ep.dispatch.payload import destinations, owner_of
from moe_ep.expert_map import determine_expert_map
from moe_ep.kernels.quantize import dequantize_rows, quantize_rows, quantized_row_bytes
from moe_ep.registry import ALL2ALL_BACKENDS
from moe_ep.topk_weight_and_reduce import TopKWeightAndReduceDelegate, TopKWeightAndReduceNoOP

BACKENDS = ("allgather_reducescatter", "all_to_all", "batched_all_to_all")
CAPTURABLE = ("allgather_reducescatter", "batched_all_to_all")
DTYPE = torch.bfloat16


class Setting(NamedTuple):
    backend: str
    fp8: bool
    num_tokens: int
    graph: bool


class Timing(NamedTuple):
    """Microseconds."""

    median: float
    p99: float


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, help="processes to start; every GPU of the machine, 4 on the CPU")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--graph-tokens", type=numbers, default=[1, 8, 32, 64, 128])
    parser.add_argument("--eager-tokens", type=numbers, default=[1024, 4096])
    parser.add_argument("--backends", type=lambda text: text.split(","), default=list(BACKENDS))
    parser.add_argument("--zipf", type=float, default=0.0, help="exponent of the experts' popularity; 0 is uniform")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--chain", type=int, default=8, help="pairs in one graph, or in one eager repeat")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what to record where the script is not run from a git checkout")
    parser.add_argument("--json", type=Path, help="file to append the JSON lines to; standard output otherwise")
    return parser.parse_args(argv)


class Bench:
    """One rank of the benchmark."""

    def __init__(self, args: argparse.Namespace, rank: int, size: int, device: torch.device) -> None:
        self.args, self.rank, self.size, self.device = args, rank, size, device
        self.num_local, expert_map, _ = determine_expert_map(size, rank, args.experts)
        self.expert_map = None if expert_map is None else expert_map.to(device)
        owned = [determine_expert_map(size, other, args.experts)[0] for other in range(size)]
        self.owners = torch.arange(size, dtype=torch.int32).repeat_interleave(torch.tensor(owned)).to(device)

    def make_backend(self, setting: Setting) -> FusedMoEPrepareAndFinalize:
        config = FusedMoEConfig(
            num_experts=self.args.experts,
            experts_per_token=self.args.topk,
            hidden_dim=self.args.hidden,
            intermediate_size_per_partition=self.args.hidden,
            num_local_experts=self.num_local,
            moe_parallel_config=FusedMoEParallelConfig.make(ep_size=self.size, rank=self.rank),
            in_dtype=DTYPE,
            max_num_tokens=setting.num_tokens,
        )
        quant_config = FusedMoEQuantConfig(dispatch_dtype=torch.float8_e4m3fn if setting.fp8 else None)
        return ALL2ALL_BACKENDS.load(setting.backend)(moe_config=config, quant_config=quant_config)

    def draw(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows, weights, ids); ids are top-k of Gumbel noise over log popularity, so none occurs twice in a row."""
        generator = torch.Generator().manual_seed(self.args.seed * 1000 + self.rank)
        rows = torch.randn(num_tokens, self.args.hidden, generator=generator).to(DTYPE)
        noise = -torch.log(-torch.log(torch.rand(num_tokens, self.args.experts, generator=generator)))
        popularity = -self.args.zipf * torch.log(torch.arange(1, self.args.experts + 1).float())
        ids = (noise + popularity).topk(self.args.topk, dim=1).indices.to(torch.int32)
        weights = torch.rand(num_tokens, self.args.topk, generator=generator)
        return rows.to(self.device), weights.to(self.device), ids.to(self.device)

    def step(self, setting: Setting) -> tuple[Callable[[], None], Callable[[], torch.Tensor]]:
        """(one prepare + finalize, what its output is and must be)."""
        backend = self.make_backend(setting)
        rows, weights, ids = self.draw(setting.num_tokens)
        output = torch.empty_like(rows)
        quant_config = FusedMoEQuantConfig.unquantized()
        batched = backend.activation_format() is FusedMoEActivationFormat.BatchedExperts
        reduce_impl = TopKWeightAndReduceDelegate() if batched else TopKWeightAndReduceNoOP()

        def run() -> None:
            arrived, _, _, their_ids, their_weights = backend.prepare(
                rows, weights, ids, self.args.experts, self.expert_map, False, quant_config
            )
            their_ids, their_weights = (ids, weights) if batched else (their_ids, their_weights)
            backend.finalize(output, arrived, their_weights, their_ids, False, reduce_impl)

        def check() -> torch.Tensor:
            run()
            expected = self.expected(rows, weights, ids, setting.fp8, batched)
            return torch.tensor(not torch.equal(output, expected), dtype=torch.int32, device=self.device)

        return run, check

    def expected(
        self, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, fp8: bool, batched: bool
    ) -> torch.Tensor:
        """The output where experts hand back their rows: weighted per slot when batched, once a rank when not."""
        if fp8:
            rows = dequantize_rows(quantize_rows(rows), rows.size(1), DTYPE)
        owners, has = owner_of(ids, self.owners), destinations(ids, self.owners, self.size)
        total = torch.zeros(rows.shape, device=self.device)
        for rank in range(self.size):
            part = torch.where(has[:, rank, None], rows, 0).float()
            if batched:
                part.zero_()
                for slot in range(ids.size(1)):
                    weighted = rows.float() * weights[:, slot, None]
                    part += torch.where(owners[:, slot, None] == rank, weighted, 0.0)
            total += part.to(DTYPE).float()
        return total.to(DTYPE)

    def bytes_per_peer(self, setting: Setting) -> tuple[list[int], list[int]]:
        """Bytes that this rank dispatches to, and combines back to, each rank."""
        hidden, topk, num_tokens = self.args.hidden, self.args.topk, setting.num_tokens
        row_bytes = quantized_row_bytes(hidden) if setting.fp8 else hidden * DTYPE.itemsize
        back = hidden * DTYPE.itemsize
        if setting.backend == "batched_all_to_all":
            from moe_ep.dispatch.messages import MessageLayout

            message = MessageLayout(self.args.experts, num_tokens, topk, row_bytes).message_bytes
            return [message] * self.size, [num_tokens * back] * self.size
        if setting.backend == "allgather_reducescatter":
            return [num_tokens * (row_bytes + 8 * topk)] * self.size, [num_tokens * back] * self.size
        counts = destinations(self.draw(num_tokens)[2], self.owners, self.size).sum(dim=0)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        return [n * (row_bytes + 8 * topk) for n in counts.tolist()], [n * back for n in received.tolist()]

    def raw_pair(self, there: list[int], back: list[int]) -> Callable[[], None]:
        """Two all_to_all_single of those bytes: what any backend on this transport pays."""
        sizes = torch.tensor([there, back], device=self.device)
        received = torch.empty_like(sizes)
        for index in range(2):
            dist.all_to_all_single(received[index], sizes[index])
        buffers = []
        for send, receive in zip((there, back), received.tolist(), strict=True):
            outgoing = torch.zeros(sum(send), dtype=torch.uint8, device=self.device)
            buffers.append((outgoing.new_empty(sum(receive)), outgoing, receive, send))
        even = len({*there, *received[0].tolist()}) == 1

        def run() -> None:
            for output, input_, output_sizes, input_sizes in buffers:
                if even:
                    dist.all_to_all_single(output, input_)
                else:
                    dist.all_to_all_single(output, input_, output_sizes, input_sizes)

        return run

    def time(self, run: Callable[[], None], graph: bool) -> Timing:
        """Median and p99 of one pair, from repeats of `chain` pairs, the maximum over ranks of each repeat."""
        chain = self.args.chain
        for _ in range(3):
            run()
        if self.device.type == "cpu":
            times = self._time_cpu(run, chain)
        else:
            times = self._time_cuda(run, chain, graph)
        everybody = torch.tensor(times, device=self.device)
        dist.all_reduce(everybody, op=dist.ReduceOp.MAX)
        ordered = everybody.sort().values
        return Timing(float(ordered[len(times) // 2]), float(ordered[math.ceil(0.99 * len(times)) - 1]))

    def _time_cpu(self, run: Callable[[], None], chain: int) -> list[float]:
        times = []
        for _ in range(self.args.repeats):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(chain):
                run()
            times.append((time.perf_counter() - start) / chain * 1e6)
        return times

    def _time_cuda(self, run: Callable[[], None], chain: int, graph: bool) -> list[float]:
        torch.cuda.synchronize()
        replay: Callable[[], Any]
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                for _ in range(chain):
                    run()
            replay = captured.replay
        else:

            def replay() -> None:
                for _ in range(chain):
                    run()

        dist.barrier()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(self.args.repeats + 3)]
        for event in events:
            event.record()
            replay()
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        torch.cuda.synchronize()
        events = [*events[2:], end]
        return [start.elapsed_time(stop) * 1e3 / chain for start, stop in itertools.pairwise(events)]

    def peer_bandwidth(self) -> float:
        """Bytes per second that leave one GPU: the better of a copy to a neighbour and a large all-to-all."""
        found = 0.0
        if self.size == 1:
            return found
        buffer = torch.zeros(self.size * (64 << 20 if self.device.type == "cuda" else 1 << 20), dtype=torch.uint8)
        buffer = buffer.to(self.device)
        output = torch.empty_like(buffer)
        timing = self.time(lambda: dist.all_to_all_single(output, buffer), graph=False)
        found = buffer.numel() * (self.size - 1) / self.size / (timing.median * 1e-6)
        if self.device.type == "cuda" and torch.cuda.device_count() > 1 and self.rank == 0:
            there = torch.empty_like(buffer, device="cuda:1")
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            there.copy_(buffer)
            events[0].record()
            for _ in range(10):
                there.copy_(buffer)
            events[1].record()
            torch.cuda.synchronize()
            found = max(found, 10 * buffer.numel() / (events[0].elapsed_time(events[1]) * 1e-3))
        best = torch.tensor(found, dtype=torch.float64, device=self.device)
        dist.all_reduce(best, op=dist.ReduceOp.MAX)
        return float(best)

    def measure(self, setting: Setting, bandwidth: float) -> dict[str, Any]:
        """The row of one setting.

        Raises:
            RuntimeError: the output is wrong on some rank.
        """
        run, check = self.step(setting)
        wrong = check()
        dist.all_reduce(wrong)
        if int(wrong):
            raise RuntimeError(f"{setting}: the output is wrong on {int(wrong)} of {self.size} ranks")
        timing = self.time(run, setting.graph)
        there, back = self.bytes_per_peer(setting)
        raw = self.time(self.raw_pair(there, back), setting.graph)
        leaving = torch.tensor(
            sum(there) - there[self.rank] + sum(back) - back[self.rank], dtype=torch.float64, device=self.device
        )
        dist.all_reduce(leaving, op=dist.ReduceOp.MAX)
        return {
            "backend": setting.backend,
            "wire": "fp8" if setting.fp8 else "bf16",
            "tokens_per_rank": setting.num_tokens,
            "mode": "graph" if setting.graph else "eager",
            "median_us": round(timing.median, 1),
            "p99_us": round(timing.p99, 1),
            "raw_median_us": round(raw.median, 1),
            "raw_p99_us": round(raw.p99, 1),
            "ratio": round(timing.median / raw.median, 2),
            "bytes_leaving": int(leaving),
            "floor_us": round(float(leaving) / bandwidth * 1e6, 1) if bandwidth else 0.0,
        }


def settings(args: argparse.Namespace) -> list[Setting]:
    made = []
    for backend in args.backends:
        for fp8 in (False, True):
            made += [
                Setting(backend, fp8, num_tokens, args.device == "cuda" and backend in CAPTURABLE)
                for num_tokens in args.graph_tokens
            ]
            made += [Setting(backend, fp8, num_tokens, False) for num_tokens in args.eager_tokens]
    return made


def facts(args: argparse.Namespace, size: int, bandwidth: float) -> dict[str, Any]:
    """What a row needs to be compared with another run's."""
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except OSError:
        commit = ""
    on_cuda = args.device == "cuda"
    triton = sys.modules.get("triton")
    return {
        "gpu": torch.cuda.get_device_name() if on_cuda else platform.processor() or platform.machine(),
        "ranks": size,
        "hidden": args.hidden,
        "experts": args.experts,
        "topk": args.topk,
        "routing": f"zipf({args.zipf:g})" if args.zipf else "uniform",
        "peer_bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_cuda else None,
        "triton": triton.__version__ if triton else None,
        "python": platform.python_version(),
        "commit": args.commit or commit or "unknown",
        "seed": args.seed,
        "command": shlex.join(["python", *sys.argv]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    columns = {
        "backend": "backend", "wire": "wire", "tokens_per_rank": "T", "mode": "mode", "median_us": "median us",
        "p99_us": "p99 us", "raw_median_us": "raw us", "ratio": "ratio", "floor_us": "floor us",
    }  # fmt: skip
    cells = [list(columns.values()), *[[str(row[name]) for name in columns] for row in rows]]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def run_rank(rank: int, size: int, args: argparse.Namespace, init_method: str, local_rank: int | None = None) -> None:
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", rank if local_rank is None else local_rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    options = {"device_id": device} if args.device == "cuda" else {}
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, **options)
    bench = Bench(args, rank, size, device)
    bandwidth = bench.peer_bandwidth()
    rows = []
    everything = settings(args)
    for index, setting in enumerate(everything):
        if rank == 0 and sys.stderr.isatty():
            print(f"\r{index}/{len(everything)} {setting.backend:30}", end="", file=sys.stderr, flush=True)
        rows.append({**bench.measure(setting, bandwidth), **facts(args, size, bandwidth)})
        if rank == 0:
            line = json.dumps(rows[-1])
            if args.json is None:
                print(line, flush=True)
            else:
                with args.json.open("a") as file:
                    print(line, file=file)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if rank == 0:
        print(table(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    args = parse()
    if "RANK" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        run_rank(rank, size, args, "env://", int(os.environ.get("LOCAL_RANK", rank)))
        return
    size = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 4)
    if args.device == "cuda" and size > torch.cuda.device_count():
        sys.exit(f"--ranks is {size} and this machine has {torch.cuda.device_count()} GPUs; pass at most as many")
    with tempfile.TemporaryDirectory(prefix="bench_dispatch_") as rendezvous:
        mp.spawn(run_rank, (size, args, f"file://{rendezvous}/store"), nprocs=size)


if __name__ == "__main__":
    main()

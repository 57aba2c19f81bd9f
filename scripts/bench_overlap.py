"""Prefill with dispatch, experts and combine overlapped, beside the same with separate kernels: values, then times.

    python scripts/bench_overlap.py                         # one rank with a GPU of its own: rows are copied in memory
    python scripts/bench_overlap.py --ranks 4               # ranks of one process share a GPU: values, rough times
    torchrun --nproc-per-node 2 scripts/bench_overlap.py    # a rank per GPU

Times are microseconds of the slowest rank for a layer without its router, in CUDA graphs; beside them dispatch and
combine alone. Ranks that share a GPU are launched eagerly, and their overlapped kernels leave SMs to each other.
--timeline adds when each kernel of one call ran, which scripts/draw_timeline.py draws. Ends with 1 where values differ
by more than rounding.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Bench, positive, positives, some_of, this_gpu, use_gpu_of_rank

from moe_ep.activation import MoEActivation
from moe_ep.bench.timing import slowest_rank, time_calls, timing_of
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.dispatch.nvshmem.high_throughput import HighThroughputPrepareFinalize
from moe_ep.expert_map import determine_expert_map
from moe_ep.kernels.arrival import Arrival, ArrivalParams, Limits
from moe_ep.kernels.marlin.experts import MarlinExperts
from moe_ep.modular_kernel import FusedMoEModularKernel
from moe_ep.modular_kernel.contracts import Dispatched, ExpertsCall, Routing
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceNoOP
from moe_ep.scalar_type import scalar_types

BF16 = torch.bfloat16
GROUP = 128
# mean |d| / mean |ref|: tiles are divided differently.
TOLERANCE = 0.01
MODES = {"separate": False, "overlapped": True}
# Experts alone: with the sum over slots, and those that wait for rows, without.
COLUMNS = (*MODES, "dispatch_and_combine", "separate_experts", "overlapped_experts")
ROUTINGS = ("uniform", "zipf", "one_rank", "one_expert")
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # rows, weights and ids of one rank


@dataclass(frozen=True, kw_only=True)
class Size:
    """A layer of int4 weights and bf16 rows, over all ranks."""

    experts: int
    K: int
    N: int
    topk: int = 8


SIZES = {
    "deepseek-v3": Size(experts=256, K=7168, N=2048),
    "half-deepseek-v3": Size(experts=128, K=7168, N=2048),  # what one of two ranks computes
    "qwen3-30b": Size(experts=128, K=2048, N=768),
    "small": Size(experts=32, K=512, N=256, topk=4),
}


def random_weights(size: Size, local: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, FusedMoEQuantConfig]:
    """Packed w13 and w2 of a rank's experts, and their scales."""
    rng = torch.Generator("cuda").manual_seed(1000 + rank)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(-(1 << 31), (1 << 31) - 1, shape, dtype=torch.int32, device="cuda", generator=rng)

    def scales(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float32, device="cuda", generator=rng).mul_(0.01).to(BF16)

    quant = FusedMoEQuantConfig(
        quant_type_id=scalar_types.uint4b8.id,
        group_size=GROUP,
        w1_scale=scales(local, size.K // GROUP, 2 * size.N),
        w2_scale=scales(local, size.N // GROUP, size.K),
    )
    return codes(local, size.K // 16, 4 * size.N), codes(local, size.N // 16, 2 * size.K), quant


class RankLayer:
    """One rank's part of a layer, with separate kernels and with overlapped ones.

    Args:
        sms: of the GPU, which the rank's overlapped kernels may fill at a time; None for all.
    """

    def __init__(self, size: Size, rank: int, num_ranks: int, capacity: int, sms: int | None = None) -> None:
        local = size.experts // num_ranks
        self.size = size
        self.config = FusedMoEConfig(
            num_experts=size.experts,
            experts_per_token=size.topk,
            hidden_dim=size.K,
            intermediate_size_per_partition=size.N,
            num_local_experts=local,
            moe_parallel_config=FusedMoEParallelConfig.make(ep_size=num_ranks, rank=rank),
            in_dtype=BF16,
            max_num_tokens=capacity,
        )
        self.w1, self.w2, self.quant = random_weights(size, local, rank)
        expert_map = determine_expert_map(num_ranks, rank, size.experts)[1]
        self.expert_map = None if expert_map is None else expert_map.to("cuda")
        moving = None if sms is None else max(sms // 8, 1)
        self.kernels, self.backends = {}, {}
        for mode, overlap in MODES.items():
            # Rows and results are moved by kernels of their own.
            computing = max(sms - 2 * moving, 1) if overlap and sms is not None and moving is not None else None
            backend = HighThroughputPrepareFinalize(
                moe_config=self.config, quant_config=self.quant, exact_rows=False, overlap=overlap, num_sms=moving,
                overlap_sms=computing,
            )  # fmt: skip
            self.backends[mode] = backend
            self.kernels[mode] = FusedMoEModularKernel(backend, MarlinExperts(self.config, self.quant))

    def run(self, mode: str, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        kernel = self.kernels[mode]
        return kernel(
            x, self.w1, self.w2, weights, ids, global_num_experts=self.size.experts, expert_map=self.expert_map
        )

    def compute(self, mode: str, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """The experts alone, of rows that are all here."""
        experts, size, arrival = self.kernels[mode].fused_experts, self.size, None
        if MODES[mode]:
            numbers = torch.zeros(2 + len(self.w1), dtype=torch.int64, device="cuda")
            first = numbers.data_ptr()
            params = ArrivalParams(epoch=first, finished=first + 16, limits=Limits(status=first + 8))
            # What sends the rows would wait for the kernel that sorts them; so does this.
            arrival = Arrival(params=params, start=numbers.zero_)
        sizes = (len(x), size.N, size.K, size.topk, size.experts, len(self.w1), None, MoEActivation.SILU)
        made = [torch.empty(shape, dtype=BF16, device="cuda") for shape in experts.workspace_shapes(*sizes)]
        call = ExpertsCall(
            made[2], x, self.w1, self.w2, weights, ids, self.expert_map, MoEActivation.SILU, (made[0], made[1]), None,
            None, size.experts, False, arrival,
        )  # fmt: skip
        experts.run(call)

    def check(self) -> None:
        for backend in self.backends.values():
            backend.check()

    def dispatch(self, mode: str, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Dispatched:
        routing = Routing(topk_weights=weights, topk_ids=ids, num_experts=self.size.experts, expert_map=self.expert_map)
        return self.backends[mode].dispatch(x, routing, self.quant)

    def dispatch_and_combine(self, *batch: torch.Tensor) -> None:
        """The two alone: rows return as they arrived."""
        arrived = self.dispatch("separate", *batch)
        output = torch.empty_like(batch[0])
        self.backends["separate"].combine(output, arrived.rows, arrived, TopKWeightAndReduceNoOP())


def draw(size: Size, tokens: int, num_ranks: int, routing: str, seed: int) -> Batch:
    rng = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn((tokens, size.K), device="cuda", generator=rng).to(BF16)
    scores = torch.rand((tokens, size.experts), device="cuda", generator=rng)
    if routing == "zipf":
        scores = scores ** torch.arange(1, size.experts + 1, device="cuda").sqrt()
    elif routing == "one_rank":
        scores[:, size.experts // num_ranks :] = -1.0
    ids = scores.topk(size.topk, dim=1).indices.to(torch.int32)
    if routing == "one_expert":
        ids = torch.full_like(ids, -1)
        ids[:, 0] = size.experts - 1
    return x, torch.rand((tokens, size.topk), device="cuda", generator=rng), ids


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """mean |d| / mean |ref|; NaN is passed on."""
    if not len(got):
        return 0.0
    return float((got.float() - expected.float()).abs().mean() / expected.float().abs().mean().clamp(min=1e-9))


@contextmanager
def ranks_on_one_gpu(num_ranks: int) -> Iterator[None]:
    """Backends find so many ranks in this process (tests/gpu/ranks_of_one_gpu.py)."""
    import pytest

    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from tests.gpu.ranks_of_one_gpu import on_one_gpu

    with pytest.MonkeyPatch.context() as patch:
        on_one_gpu(patch, num_ranks)
        yield


def layers_of_one_gpu(size: Size, num_ranks: int, capacity: int) -> list[RankLayer]:
    """Of several ranks each may fill a share of the SMs: all but one together a third of them, so that no rank keeps
    another from sending what it waits for; the kernel that sorts ids needs eight free SMs of one cluster. Kernels are
    loaded: while others wait for each other, loading waits, too."""
    sms = torch.cuda.get_device_properties(this_gpu()).multi_processor_count
    share = None if num_ranks == 1 else sms // 3 // (num_ranks - 1)
    layers = [RankLayer(size, rank, num_ranks, capacity, share) for rank in range(num_ranks)]
    for mode in MODES:
        layers[0].compute(mode, *draw(size, num_ranks * capacity, num_ranks, "uniform", 0))
    torch.cuda.synchronize()
    return layers


def run_together(
    layers: Sequence[RankLayer], mode: str, batches: Sequence[Batch], cycles: Sequence[int] = ()
) -> list[torch.Tensor]:
    """A call on every rank of this process, each on a stream of its own.

    Args:
        cycles: what each rank's stream sleeps before.
    """
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in layers] if len(layers) > 1 else [torch.cuda.current_stream()]
    outputs = []
    for number, (layer, stream, batch) in enumerate(zip(layers, streams, batches, strict=True)):
        with torch.cuda.stream(stream):
            if cycles:
                torch.cuda._sleep(cycles[number])
            outputs.append(layer.run(mode, *batch))
    torch.cuda.synchronize()
    for layer in layers:
        layer.check()
    return outputs


def check_values(layers: list[RankLayer], first_rank: int, num_ranks: int, most: int) -> list[dict[str, Any]]:
    """Both modes on every routing, with ranks of different sizes, some without tokens."""
    rows = []
    for number, routing in enumerate((*ROUTINGS, "uniform")):
        ranks = range(first_rank, first_rank + len(layers))
        sizes = [(most, 0, most // 3, 1)[(rank + number) % 4] if number else most for rank in ranks]
        batches = [
            draw(layer.size, tokens, num_ranks, routing, 17 * number + rank)
            for layer, tokens, rank in zip(layers, sizes, ranks, strict=True)
        ]
        separate, overlapped = (run_together(layers, mode, batches) for mode in MODES)
        found = [*map(difference, overlapped, separate)]
        is_right = all(each < TOLERANCE for each in found)
        rows.append({"routing": routing, "tokens": sizes, "difference": max(found), "is_right": is_right})
    return rows


def time_rank(layer: RankLayer, batch: Batch, together: Callable[[], object]) -> dict[str, float]:
    """Medians of the slowest rank, over rounds: what is measured first would find a cool GPU."""
    calls = {mode: functools.partial(layer.run, mode) for mode in MODES}
    calls["dispatch_and_combine"] = layer.dispatch_and_combine
    calls |= {f"{mode}_experts": functools.partial(layer.compute, mode) for mode in MODES}

    def median(call: Callable[..., object]) -> float:
        options = {"chain": 4, "repeats": 8, "limit_s": 1.0, "together": together}
        times = time_calls(lambda _: call(*batch), device=batch[0].device, **options)
        return timing_of(slowest_rank(times)).median

    rounds = [{name: median(call) for name, call in calls.items()} for _ in range(5)]
    layer.check()
    return {name: round(timing_of([each[name] for each in rounds[1:]]).median, 1) for name in calls}


def timeline(layer: RankLayer, batch: Batch, together: Callable[[], object]) -> dict[str, list[dict[str, Any]]]:
    """The kernels of one call of either mode in a CUDA graph: name, begin and end in microseconds from the first one's
    begin, and blocks."""
    found = {}
    for mode in MODES:
        for _ in range(3):
            layer.run(mode, *batch)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer.run(mode, *batch)
        together()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.replay()
            torch.cuda.synchronize()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            profile.export_chrome_trace(file.name)
            events = [e for e in json.loads(Path(file.name).read_text())["traceEvents"] if e.get("cat") == "kernel"]
        first = min(event["ts"] for event in events)
        found[mode] = [
            {
                "kernel": event["name"],
                "begin": round(event["ts"] - first, 1),
                "end": round(event["ts"] - first + event["dur"], 1),
                "blocks": event["args"]["grid"][0],
            }
            for event in sorted(events, key=lambda event: event["ts"])
        ]
    return found


def time_ranks_of_one_gpu(layers: list[RankLayer], batches: Sequence[Batch]) -> dict[str, float]:
    """Medians of all ranks of this process together, eager."""

    def span(mode: str) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run_together(layers, mode, batches)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3

    return {mode: round(timing_of([span(mode) for _ in range(8)]).median, 1) for mode in MODES}


def measure(
    bench: Bench,
    size: str,
    tokens: int,
    layers: list[RankLayer],
    ranks: Sequence[int],
    num_ranks: int,
    with_timeline: bool = False,
) -> bool:
    """Prints a row; whether all values are right."""
    checks = check_values(layers, ranks[0], num_ranks, tokens)
    wrong = [check for check in checks if not check["is_right"]]
    batches = [draw(SIZES[size], tokens, num_ranks, "uniform", rank) for rank in ranks]
    if len(layers) > 1:
        times = time_ranks_of_one_gpu(layers, batches)
    else:
        together = dist.barrier if dist.is_initialized() else lambda: None
        times = time_rank(layers[0], batches[0], together)
        if with_timeline:
            times["timeline"] = timeline(layers[0], batches[0], together)
    bench.keep({"layer": size, "tokens": tokens, "ranks": num_ranks, "checks": checks} | times)
    if ranks[0] == 0:
        worst = f"{max(check['difference'] for check in checks):.5f}" if not wrong else f"WRONG: {wrong}"
        cells = [size, tokens, *(times.get(name, "-") for name in COLUMNS)]
        ratio = times["overlapped"] / times["separate"]
        print(f"| {' | '.join(map(str, cells))} | {ratio:.3f} | {worst} |", flush=True)
    return not wrong


def main() -> int:
    bench = Bench(__doc__)
    bench.parser.add_argument("--ranks", type=positive, default=1, help="ranks of this process, without torchrun")
    bench.parser.add_argument("--sizes", type=some_of(SIZES), default=["small", "qwen3-30b", "deepseek-v3"])
    bench.parser.add_argument("--tokens", type=positives, default=(256, 1024, 4096), help="of each rank")
    bench.parser.add_argument("--timeline", action="store_true", help="keep one call's kernels, of a rank per GPU")
    options = bench.parse()
    cases = [(size, tokens) for size in options.sizes for tokens in options.tokens]
    is_gang = "LOCAL_RANK" in os.environ
    if not is_gang:
        this_gpu()
    else:
        use_gpu_of_rank()
        dist.init_process_group("cpu:gloo,cuda:nccl")
    if not is_gang or dist.get_rank() == 0:
        print(f"| layer | tokens per rank | {' | '.join(COLUMNS)} | ratio | largest difference |")
        print("|---" * (4 + len(COLUMNS)) + "|", flush=True)
    if is_gang:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        right = [
            measure(
                bench, size, tokens, [RankLayer(SIZES[size], rank, num_ranks, tokens)], [rank], num_ranks,
                options.timeline,
            )
            for size, tokens in cases
        ]  # fmt: skip
    else:
        with ranks_on_one_gpu(options.ranks):
            right = [
                measure(
                    bench, size, tokens, layers_of_one_gpu(SIZES[size], options.ranks, tokens), range(options.ranks),
                    options.ranks, options.timeline,
                )
                for size, tokens in cases
            ]  # fmt: skip
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())

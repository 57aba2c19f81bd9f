"""One row of the scaling benchmark: a MoE layer at one EP size, backend and batch, timed and accounted for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from moe_ep.bench.layers import Batch, BenchLayers
from moe_ep.bench.results import peak_memory
from moe_ep.bench.timing import Ceilings, Timing, capture, slowest_rank, time_calls, timing_of
from moe_ep.bench.workload import Routing
from moe_ep.distributed.passes import one_pass
from moe_ep.eplb.recorder import balancedness
from moe_ep.errors import MoeEpError
from moe_ep.layer.methods.base import tolerance
from moe_ep.observability import stages
from moe_ep.observability.stages import Listener, listening

if TYPE_CHECKING:
    from moe_ep.layer import FusedMoE

_STAGE_REPLAYS = 5


class Load(NamedTuple):
    """The work of one call, as the mean over calls.

    Attributes:
        rows_per_rank: expert assignments of every rank, f64 `[R]`.
        active_experts: experts with tokens on the rank that has most.
        rows_sent: rows that leave a rank for another when a token goes once to each rank; the most of any rank.
        assignments_sent: the same when it goes once to each expert.
    """

    rows_per_rank: torch.Tensor
    active_experts: float
    rows_sent: float
    assignments_sent: float


class WrongOutputError(MoeEpError, RuntimeError):
    """A benchmarked layer does not compute what its weights say."""


def measure_row(
    layers: BenchLayers,
    routing: Routing,
    num_tokens: int,
    ceilings: Ceilings,
    *,
    chain: int,
    repeats: int,
    limit_s: float | None = None,
    seed: int,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Checks, times and accounts for one layer; a collective step of all ranks of the world.

    The ranks agree on their tokens before, as for a pass of a model, and not in every call.

    Args:
        num_tokens: T of every rank.
        chain: calls in one repeat, each with other tokens and choices.
        limit_s: that the repeats may take, as `time_calls` has it.
        group: the EP ranks of these layers; several such groups of the world run side by side.

    Raises:
        WrongOutputError: the output differs from the reference by more than its dtype allows.
    """
    with one_pass(layers.layers, num_tokens):
        batches = layers.batches(routing, num_tokens, chain, seed)
        if layers.eplb:
            layers.balance(layers.batches(routing, num_tokens, chain, seed + 1, popularity_seed=seed))
        _check(layers, batches[0])
        if layers.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(layers.device)
        graph = layers.device.type == "cuda" and layers.layers[0].prepare_finalize.supports_cuda_graph()
        call: Callable[[int], object] = lambda i: layers.call(i, batches[i])  # noqa: E731
        times = time_calls(
            call, device=layers.device, chain=chain, repeats=repeats, limit_s=limit_s, graph=graph, together=_barrier
        )
        timing = timing_of(slowest_rank(times))
        stage_us = stage_times(layers, call, chain, graph)
        load = _load(layers, batches, group)
    return {
        **_rates(layers, timing, num_tokens),
        "mode": "graph" if graph else "eager",
        "repeats": len(times),
        "stages_us": {name: round(us, 2) for name, us in stage_us.items()},
        **_traffic(layers, stage_us, load, ceilings),
        **_floors(layers, timing, load, ceilings),
        "rows_per_rank": [round(rows, 1) for rows in load.rows_per_rank.tolist()],
        "balancedness": round(balancedness(load.rows_per_rank[None]), 4),
        "active_experts_max": round(load.active_experts, 1),
        "memory_gib": round(peak_memory(layers.device) / 2**30, 3),
    }


def _check(layers: BenchLayers, batch: Batch) -> None:
    error = slowest_rank([layers.error(batch)])[0]
    layer = layers.layers[0]
    allowed = tolerance(layers.dtype, layer.dispatch_dtype, layer.rounds_rows_to)
    if not error <= allowed:
        raise WrongOutputError(
            f"{layers.geometry.name} at EP {layers.ep_size} differs from the reference by {error:.2e} (mean relative "
            f"error) and {layers.dtype} allows {allowed:.0e}; a benchmark of wrong results says nothing"
        )


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def stage_times(layers: BenchLayers, call: Callable[[int], object], chain: int, graph: bool) -> dict[str, float]:
    """Microseconds of each stage of one call: the median over replays, the slowest rank's; `chain` calls a replay."""
    run: Callable[[], object] = lambda: [call(i) for i in range(chain)]  # noqa: E731
    with stages.record(layers.device) as recorder:
        replay = capture(call, chain) if graph else run
        found = []
        for _ in range(1 + _STAGE_REPLAYS):
            if not graph:
                recorder.clear()
            _barrier()
            replay()
            found.append(recorder.durations_ms())
    names = list(found[0])
    medians = [timing_of([sum(spans[name]) for spans in found[1:]]).median * 1e3 / chain for name in names]
    return dict(zip(names, slowest_rank(medians), strict=True))


class _Choices(Listener):
    """Keeps the physical ids of every pass."""

    def __init__(self) -> None:
        self.ids: list[torch.Tensor] = []

    def routed(self, layer: FusedMoE, topk_ids: torch.Tensor) -> None:
        self.ids.append(topk_ids)


def _load(layers: BenchLayers, batches: list[Batch], group: dist.ProcessGroup | None) -> Load:
    """From the choices of all ranks of the EP group, one more call of every batch."""
    num_ranks, device = layers.ep_size, layers.device
    owners = layers.owners.long().to(device)
    per_rank, active, sent = torch.zeros(num_ranks, dtype=torch.float64, device=device), 0.0, 0.0
    assigned = 0.0
    for index, batch in enumerate(batches):
        choices = _Choices()
        with listening(choices):
            layers.call(index, batch)
        ids = torch.cat(choices.ids).long()
        counts = torch.bincount(ids.flatten(), minlength=owners.numel())
        to = torch.zeros(ids.size(0), num_ranks, dtype=torch.bool, device=device).scatter_(1, owners[ids], True)
        sent += float(to.sum() - to[:, layers.ep_rank].sum())
        assigned += float((owners[ids] != layers.ep_rank).sum())
        if group is not None:
            dist.all_reduce(counts, group=group)
        per_rank.index_add_(0, owners, counts.double())
        hit = torch.zeros(num_ranks, device=device).index_add_(0, owners, (counts > 0).float())
        active += float(hit.max())
    calls = len(batches)
    most_sent, most_assigned = slowest_rank([sent / calls, assigned / calls])
    return Load(per_rank.cpu() / calls, active / calls, most_sent, most_assigned)


def _rates(layers: BenchLayers, timing: Timing, num_tokens: int) -> dict[str, Any]:
    total = num_tokens * layers.ep_size
    return {
        "tokens_per_rank": num_tokens,
        "us": round(timing.median, 2),
        "p99_us": round(timing.p99, 2),
        "max_us": round(timing.maximum, 2),
        "tokens_per_s": round(total / timing.median * 1e6, 1),
        "tokens_per_s_per_gpu": round(num_tokens / timing.median * 1e6, 1),
    }


def _traffic(layers: BenchLayers, stage_us: dict[str, float], load: Load, ceilings: Ceilings) -> dict[str, Any]:
    """Bytes that must leave the busiest sender, there and back, over the time of dispatch and combine.

    wire: a token once to each rank; logical: once to each expert of other ranks.
    """
    wire_us = stage_us.get("dispatch", 0.0) + stage_us.get("combine", 0.0)
    sent, logical = (_bytes_both_ways(layers, rows) for rows in (load.rows_sent, load.assignments_sent))
    rate = sent / wire_us * 1e6 if wire_us and sent else 0.0
    link = ceilings.link_bytes_per_s
    return {
        "exposed_communication": round(wire_us / sum(stage_us.values()), 4) if any(stage_us.values()) else 0.0,
        "bytes_sent": round(sent),
        "wire_gb_per_s": round(rate / 1e9, 2),
        "logical_gb_per_s": round(rate * logical / sent / 1e9, 2) if sent else 0.0,
        "link_share": None if not link else round(rate / link, 4),
    }


def _bytes_both_ways(layers: BenchLayers, rows: float) -> float:
    K, size = layers.geometry.hidden_size, layers.dtype.itemsize
    there = K * size
    if layers.layers[0].dispatch_dtype is not None:
        there = K + 4 * -(-K // 128)
    return rows * (there + K * size)


def _floors(layers: BenchLayers, timing: Timing, load: Load, ceilings: Ceilings) -> dict[str, Any]:
    """The least time of experts and of communication by this machine's own ceilings, one after the other."""
    geometry = layers.geometry
    experts_us = ceilings.experts_us(
        load.active_experts * geometry.bytes_per_expert, float(load.rows_per_rank.max()) * geometry.flops_per_row
    )
    link_us = ceilings.link_us(_bytes_both_ways(layers, load.rows_sent))
    return {
        "experts_floor_us": round(experts_us, 2),
        "link_floor_us": round(link_us, 2),
        "floor_over_time": round((experts_us + link_us) / timing.median, 4),
    }

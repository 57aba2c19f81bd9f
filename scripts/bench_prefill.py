"""Prefill layers over ranks: separate and overlapped kernels, and batches that are balanced by their own counts.

    python scripts/bench_prefill.py --launcher local --ep-size 2 --parts overlap,balance
    torchrun --nproc-per-node 2 scripts/bench_prefill.py --layers deepseek-v3:int4:int8 --json results.jsonl

A layer is GEOMETRY[:WEIGHTS[:ROWS]], such as deepseek-v3:fp8:fp8: experts of that number format that round rows so,
which are then sent so. Times are microseconds of a layer with its router on the slowest rank, beside those of its
experts alone. overlap: medians, in CUDA graphs. balance: means, as `auto` may balance one batch of 16, and eagerly, as
balancing is not captured, with choices in place of the router's; "one rank" sends 70 % of all rows to rank 0, a ninth
of all rows to each of two of its experts. Ends with 1 where values differ by more than rounding.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import GangBenchConfig, measure_on_gang

from moe_ep.bench.geometries import FP8, INT4, MXFP4, PRESETS, preset
from moe_ep.bench.layers import Batch, BenchLayers, SyntheticConfig, make_weights
from moe_ep.bench.scaling import stage_times
from moe_ep.bench.timing import slowest_rank, time_in_turns
from moe_ep.bench.workload import Routing
from moe_ep.distributed.passes import one_pass
from moe_ep.env import one_of
from moe_ep.errors import ConfigError
from moe_ep.launch.cli.options import option, whole_numbers
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.layer.methods.base import relative_error
from moe_ep.observability import stages
from moe_ep.observability.stages import Listener

CHAIN, REPEATS, LIMIT_S = 4, 48, 8.0
# mean |d| / mean |ref| of values that are rounded alike, and of rows that one way rounds to 8 bits once more.
_EXACT, _ROUNDED = 0.01, 0.08
_HOT = 2  # experts of rank 0 that nearly every token takes
_HOT_SHARE, _FIRST_SHARE = 0.9, 0.7


class LayerName(NamedTuple):
    """What --layers names."""

    geometry: str
    weights: str | None
    rows: str | None


def layer_name(raw: str) -> LayerName:
    """ValueError with the rule for anything else."""
    geometry, weights, rows, *more = [*raw.split(":"), None, None][: max(3, raw.count(":") + 1)]
    wrong = more or geometry not in PRESETS or weights not in (None, "int4", "fp8", "mxfp4")
    if wrong or rows not in (None, "int8", "fp8"):
        raise ValueError("it must be GEOMETRY[:int4|fp8|mxfp4[:int8|fp8]] with a preset such as deepseek-v3")
    return LayerName(str(geometry), weights, rows)


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(GangBenchConfig):
    """The settings of one measurement."""

    layers: tuple[LayerName, ...] = option(
        (LayerName("small", None, None),),
        lambda raw: tuple(map(layer_name, raw.split(","))),
        "GEOMETRY[:WEIGHTS[:ROWS]], ... (small)",
    )
    tokens: tuple[int, ...] = option((1024, 4096), whole_numbers, "tokens of each rank (1024,4096)")
    parts: tuple[str, ...] = option(
        ("overlap",), lambda raw: tuple(map(one_of("overlap", "balance"), raw.split(","))), "overlap, balance (overlap)"
    )


def measure(rank_env: RankEnv, config: PrefillConfig) -> list[dict[str, Any]]:
    """One worker's part: all rows, the same on every rank."""
    rows, made = [], {"overlap": overlap_row, "balance": balance_row}
    with torch.inference_mode():
        for name in config.layers:
            ranks = Ranks(rank_env, name)
            weights = make_weights(ranks.geometry, rank_env.world_size, ranks.device, 0)
            for part in config.parts:
                for tokens in config.tokens:
                    about = {"layer": ":".join(filter(None, name)), "tokens": tokens, "ranks": rank_env.world_size}
                    row = {"part": part} | about | made[part](ranks, weights, tokens)
                    rows.append(config.keep(row, rank_env.rank))
                    if rank_env.rank == 0:
                        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
                    gc.collect()
            del weights
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


class Ranks:
    """Makes layers of one name on this rank."""

    def __init__(self, rank_env: RankEnv, name: LayerName) -> None:
        self.geometry = preset(name.geometry)
        if name.weights is not None:
            self.geometry = replace(self.geometry, weights={"int4": INT4, "fp8": FP8, "mxfp4": MXFP4}[name.weights])
        self.rows = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, None: None}[name.rows]
        self.device, self.rank, self.size = torch.device(rank_env.device), rank_env.rank, rank_env.world_size
        self.group = dist.group.WORLD if self.size > 1 else None
        on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.backend = "nvshmem_high_throughput" if on_gpu else "all_to_all"

    def layers(
        self, weights: list[SyntheticConfig], tokens: int, overlap: bool = False, balance: Any = "off"
    ) -> BenchLayers:
        """Raises ConfigError where these experts do not run beside a dispatch."""
        os.environ["MOE_EP_OVERLAP"] = str(int(overlap))
        return BenchLayers(
            self.geometry, ep_size=self.size, ep_rank=self.rank, group=self.group, backend=self.backend,
            capacity=tokens, dtype=self.dtype, device=self.device, weights=weights, dispatch_dtype=self.rows,
            input_dtype=self.rows or "none", batch_balance=balance,
        )  # fmt: skip


def overlap_row(ranks: Ranks, weights: list[SyntheticConfig], tokens: int) -> dict[str, Any]:
    """Separate and overlapped kernels in turns."""
    graph = ranks.device.type == "cuda"
    row: dict[str, Any] = {}
    modes = {"separate": ranks.layers(weights, tokens)}
    batches = modes["separate"].batches(Routing(), tokens, CHAIN, seed=0)
    with one_pass(modes["separate"].layers, tokens):
        row["error"] = round(modes["separate"].error(batches[0]), 5)
        expected = modes["separate"].call(0, batches[0])
    try:
        overlapped = ranks.layers(weights, tokens, overlap=True)
        with one_pass(overlapped.layers, tokens):
            row |= _difference(overlapped.call(0, batches[0]), expected) if graph else {}
        modes |= {"overlapped": overlapped} if graph else {}
    except (ConfigError, ValueError) as error:
        row["refused"] = repr(str(error))
    calls = {mode: _call_of(layers, batches) for mode, layers in modes.items()}
    with one_pass([layer for each in modes.values() for layer in each.layers], tokens):
        row |= _times_in_turns(ranks, calls, graph)
        stages = stage_times(modes["separate"], calls["separate"], CHAIN, graph)
    if "overlapped" in modes:
        row["ratio"] = round(row["overlapped"] / row["separate"], 3)
        row["overlapped_over_experts"] = round(row["overlapped"] / stages["experts"], 3)
    row["separate_over_experts"] = round(row["separate"] / stages["experts"], 3)
    return row | {f"separate_{stage}": round(us, 1) for stage, us in stages.items()}


def balance_row(ranks: Ranks, weights: list[SyntheticConfig], tokens: int) -> dict[str, Any]:
    """Uniform and skewed choices, as placed and as `auto` balances them, in turns."""
    off = ranks.layers(weights, tokens)
    batches = {
        "uniform": off.batches(Routing(), tokens, CHAIN, seed=0),
        "one_rank": [_one_rank(ranks, tokens, seed) for seed in range(CHAIN)],
    }
    # Layers of their own for each routing: what `auto` does with a batch follows from those before it.
    auto = {routing: ranks.layers(weights, tokens, balance="auto") for routing in batches}
    row: dict[str, Any] = {}
    with one_pass([layer for each in (off, *auto.values()) for layer in each.layers], tokens):
        calls = {}
        for routing, drawn in batches.items():
            calls |= {f"{routing}_off": _routed(off, drawn), f"{routing}_auto": _routed(auto[routing], drawn)}
            expected = calls[f"{routing}_off"](0)
            with stages.listening(copies := _Copies()):
                first = calls[f"{routing}_auto"](0)
            row |= {f"{routing}_{key}": value for key, value in _difference(first, expected).items()}
            row[f"{routing}_copies"] = sum(copies.found)
        row |= _times_in_turns(ranks, calls, graph=False)
    return row | {
        "uniform_ratio": round(row["uniform_auto"] / row["uniform_off"], 4),
        "one_rank_ratio": round(row["one_rank_auto"] / row["uniform_off"], 4),
    }


def _one_rank(ranks: Ranks, tokens: int, seed: int) -> Batch:
    """Choices that send most rows to rank 0; logits are not used."""
    geometry, device = ranks.geometry, ranks.device
    rng = torch.Generator(device).manual_seed(100 * seed + ranks.rank)
    scores = torch.rand((tokens, geometry.num_experts), device=device, generator=rng)
    width, top_k = geometry.num_experts // ranks.size, geometry.top_k
    is_hot = torch.rand((tokens, _HOT), device=device, generator=rng) < _HOT_SHARE
    scores[:, :_HOT] = torch.where(is_hot, 2.0, -1.0)
    first = scores[:, :width].topk(top_k, dim=1).indices
    others = width + scores[:, width:].topk(top_k, dim=1).indices if ranks.size > 1 else first
    of_first = _FIRST_SHARE * top_k
    few = int(of_first)
    number = few + (torch.rand((tokens, 1), device=device, generator=rng) < of_first - few).int()
    ids = torch.where(torch.arange(top_k, device=device) < number, first, others).to(torch.int32)
    rows = torch.randn((tokens, geometry.hidden_size), device=device, generator=rng).to(ranks.dtype)
    return Batch(rows, scores, torch.rand((tokens, top_k), device=device, generator=rng), ids)


def _call_of(layers: BenchLayers, batches: list[Batch]) -> Callable[[int], torch.Tensor]:
    return lambda i: layers.call(i, batches[i])


def _routed(layers: BenchLayers, batches: list[Batch]) -> Callable[[int], torch.Tensor]:
    def call(i: int) -> torch.Tensor:
        batch, layer = batches[i], layers.layers[i % len(layers.layers)]
        return layer(batch.hidden_states, topk_weights=batch.topk_weights, topk_ids=batch.topk_ids)

    return call


def _times_in_turns(ranks: Ranks, calls: Mapping[str, Callable[[int], object]], graph: bool) -> dict[str, float]:
    """Of the slowest rank: medians of replayed graphs, means of eager calls, which need not be alike."""
    together = dist.barrier if dist.is_initialized() else lambda: None
    times = time_in_turns(
        calls, device=ranks.device, chain=CHAIN, repeats=REPEATS, limit_s=LIMIT_S, graph=graph, together=together
    )
    summary = statistics.median if graph else statistics.fmean
    return {name: round(summary(slowest_rank(each)), 1) for name, each in times.items()}


def _difference(got: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    return {"difference": round(slowest_rank([relative_error(got, expected)])[0], 5)}


class _Copies(Listener):
    """Numbers of copies of the batches that were balanced."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def copied(self, layer: Any, num_copies: int, expert_bytes: int) -> None:
        self.found.append(num_copies)


def wrong(rows: list[dict[str, Any]]) -> Iterator[str]:
    """What differs by more than rounding does. Separate kernels round 8-bit rows once more than overlapped ones."""
    for row in rows:
        rounds = row["layer"].count(":") == 2
        for key, value in row.items():
            if key.endswith("difference") and not value < (_ROUNDED if rounds else _EXACT):
                yield f"{row['layer']} with {row['tokens']} tokens: {key} is {value}"


def main() -> int:
    _, results = measure_on_gang("bench_prefill.py", __doc__ or "", PrefillConfig, measure)
    found = list(wrong(results[0])) if results else []
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

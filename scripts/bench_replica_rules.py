"""Decode's experts by replica rule, with recorded routing: the experts of one rank at a time, on one GPU.

    python scripts/bench_replica_rules.py FILE.npz OTHER.npz --json results.jsonl
    python scripts/bench_replica_rules.py FILE.npz --device cpu --geometry small --ep-sizes 2 --tokens 4 --pairs 2

A file has an array of choices [layer, token, top_k] for each domain. Each domain is cut into steps and planned on the
first 40 % of them, incrementally and with one spare slot a rank, as `moe-ep eplb simulate` does. Of the other steps
some (layer, step) pairs are drawn, in which each rule that serves chooses the slots, and ranks compute their rows with
packed int4 experts, batched by reference as low-latency dispatch hands them over. A time is that of the slowest rank
in CUDA graphs, without dispatch and combine; the mean over pairs. Only the ranks that the cost model finds slowest are
timed. Both rules of a pair take turns. On a CPU the experts are computed in plain torch, which says nothing of a GPU.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gemm_timing import num_copies
from harness import Bench, positive, positives, this_gpu

from moe_ep.activation import MoEActivation
from moe_ep.bench.cost_model import Load, Machine, experts_floors_us
from moe_ep.bench.geometries import INT4, PRESETS, Geometry, preset
from moe_ep.bench.results import markdown_table
from moe_ep.bench.timing import time_in_turns, timing_of
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.eplb.policy.maps import Array
from moe_ep.eplb.simulate import RULES, Layout, Outcome, Scene, place
from moe_ep.eplb.trace import from_choices, plain_choices, read_arrays
from moe_ep.kernels.marlin.experts import BatchedMarlinExperts
from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe
from moe_ep.layer.expert_slots import ROWS_PER_SLOT
from moe_ep.layer.methods import relative_error
from moe_ep.modular_kernel.contracts import ExpertsCall, ExpertTokensMetadata

# Names of `moe_ep.eplb.config.REPLICA_RULES`, and the rules that simulate them.
SERVING = {"levelled": "levelled", "one": "one-replica"}
PLANNED_ON, TOLERANCE = 0.4, 0.01
COLUMNS = {
    "routing": "routing", "experts": "experts", "ep_size": "EP", "tokens": "tokens a rank",
    "levelled_us": "levelled, us", "one_us": "one, us", "ratio": "one / levelled", "ratio_error": "+-",
    "model_ratio": "by the cost model",
    "levelled_active": "active: levelled", "one_active": "one", "levelled_peak": "max / mean rows: levelled",
    "one_peak": "one", "rows_per_slot": "rows a slot", "auto": "auto takes", "error": "error",
}  # fmt: skip
Chosen = dict[str, Array]  # by rule: the slot of each choice of all ranks' tokens `[R * T, top_k]`


class RankExperts:
    """The packed experts of one of ep_size ranks, with a spare slot; copies of the weights exceed the L2 cache."""

    def __init__(self, geometry: Geometry, ep_size: int, tokens: int, device: torch.device) -> None:
        K, N, top_k = geometry.hidden_size, geometry.intermediate_size, geometry.top_k
        self.geometry, self.device, self.width = geometry, device, geometry.num_experts // ep_size + 1
        self.config = FusedMoEConfig(
            num_experts=ep_size * self.width, experts_per_token=top_k, hidden_dim=K, intermediate_size_per_partition=N,
            num_local_experts=self.width, moe_parallel_config=FusedMoEParallelConfig.make(ep_size=ep_size, rank=0),
            in_dtype=torch.bfloat16, max_num_tokens=tokens,
        )  # fmt: skip
        count = max(2, num_copies(geometry.bytes_per_expert * self.width)) if device.type == "cuda" else 1
        self.copies = [self._draw(K, N) for _ in range(count)]
        self.rows = torch.randn(ep_size * tokens, K, device=device).bfloat16()
        self.ids = torch.zeros(1, top_k, dtype=torch.int32, device=device)  # only top_k is read off it
        meta = self.batch(np.zeros((len(self.rows), 0), dtype=np.int64), 0)
        sizes = (len(self.rows), N, K, top_k, ep_size * self.width, self.width, meta, MoEActivation.SILU)
        shapes = self.copies[0][2].workspace_shapes(*sizes)
        *self.scratch, self.output = (torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes)

    def _draw(self, K: int, N: int) -> tuple[torch.Tensor, torch.Tensor, BatchedMarlinExperts]:
        """Random codes are packed weights too."""

        def codes(*shape: int) -> torch.Tensor:
            return torch.randint(-(1 << 31), (1 << 31) - 1, (self.width, *shape), dtype=torch.int32, device=self.device)

        def scales(*shape: int) -> torch.Tensor:
            return (torch.rand(self.width, *shape, device=self.device) * 0.01 + 0.002).bfloat16()

        group = INT4.group_size
        quant = FusedMoEQuantConfig(
            quant_type_id=INT4.quant_type_id, group_size=group,
            w1_scale=scales(K // group, 2 * N), w2_scale=scales(N // group, K),
        )  # fmt: skip
        return codes(K // 16, 4 * N), codes(N // 16, 2 * K), BatchedMarlinExperts(self.config, quant)

    def batch(self, chosen: Array, rank: int) -> ExpertTokensMetadata:
        """The rows of each of a rank's slots, in order of tokens."""
        token, place = np.nonzero(chosen // self.width == rank)
        slot = chosen[token, place] - rank * self.width
        counts, order = np.bincount(slot, minlength=self.width), np.argsort(slot, kind="stable")
        row_ids = np.zeros((self.width, len(chosen)), dtype=np.int32)
        row_ids[slot[order], np.arange(slot.size) - np.repeat(counts.cumsum() - counts, counts)] = token[order]
        of_slots = torch.from_numpy(counts.astype(np.int32)).to(self.device)
        return ExpertTokensMetadata(of_slots, expert_row_ids=torch.from_numpy(row_ids).to(self.device))

    def run(self, batch: ExpertTokensMetadata, index: int) -> torch.Tensor:
        """`[El, R * T, K]`, of which the rows that count are new."""
        w1, w2, experts = self.copies[index % len(self.copies)]
        scratch, silu = (self.scratch[0], self.scratch[1]), MoEActivation.SILU
        experts.run(ExpertsCall(self.output, self.rows, w1, w2, self.ids, self.ids, None, silu, scratch, batch))
        return self.output

    def error(self, batch: ExpertTokensMetadata) -> float:
        """mean |difference| / mean |reference| of the slot with most rows, against plain torch on the CPU."""
        slot, (w1, w2, experts) = int(batch.expert_num_tokens.argmax()), self.copies[0]
        count, quant, part = batch.expert_num_tokens[slot : slot + 1].cpu(), experts.quant_config, slice(slot, slot + 1)
        if quant.w1_scale is None or quant.w2_scale is None or batch.expert_row_ids is None:
            raise ValueError("the experts lack scales, or the batch row ids; they are made with both")
        rows = self.rows[batch.expert_row_ids[slot, : int(count)].long()]
        w1, w2, *scales = (each[part].cpu() for each in (w1, w2, quant.w1_scale, quant.w2_scale))
        expected = batched_fused_marlin_moe(
            rows[None].cpu(), count, w1, w2, None, None, scales[0], scales[1], INT4.quant_type_id or 0
        )
        return relative_error(self.run(batch, 0)[slot, : int(count)].cpu(), expected[0])


def choose(
    domains: dict[str, Array], num_experts: int, ep_size: int, tokens: int, pairs: int, seed: int
) -> Iterator[Chosen]:
    """The slots that each rule chooses in so many (layer, step) pairs, about as many of each domain."""
    rng, num_tokens = np.random.default_rng(seed), ep_size * tokens
    scene = Scene(ep_size=ep_size, num_redundant=ep_size, planned_on=PLANNED_ON)
    for (name, choices), share in zip(domains.items(), np.array_split(range(pairs), len(domains)), strict=True):
        trace = from_choices(choices, num_tokens, ep_size, num_experts=num_experts, model=name)
        slots, seen = place(trace, scene, "incremental"), scene.split(trace)
        later = trace.num_steps - seen
        for pair in rng.permutation(trace.num_layers * later)[: len(share)].tolist():
            layer, step = pair // later, seen + pair % later
            ids = choices[layer, step * num_tokens : (step + 1) * num_tokens].astype(np.int64)
            layout, ranks = Layout.of(slots[layer], num_experts, ep_size), np.arange(num_tokens) // tokens
            yield {rule: RULES[simulated]()(ids, ranks, layout) for rule, simulated in SERVING.items()}


def slot_counts(chosen: Array, ep_size: int, width: int) -> Array:
    """Rows of each rank's slots, `[R, slots]`."""
    return np.bincount(chosen[chosen >= 0], minlength=ep_size * width).reshape(ep_size, width)


def model_us(geometry: Geometry, counts: Array) -> list[float]:
    """Microseconds of each rank's experts by the cost model."""
    machine, found = Machine(), []
    for of_rank in counts:
        load = Load(rows=float(of_rank.sum()), active_experts=float(np.count_nonzero(of_rank)))
        memory_us, compute_us = experts_floors_us(geometry, load, machine)
        compute_us /= machine.compute_efficiency
        found.append(machine.experts_latency_us + memory_us / machine.memory_efficiency + compute_us)
    return found


def measure(domains: dict[str, Array], geometry: Geometry, ep_size: int, tokens: int, options: Any) -> dict[str, Any]:
    """A row: both rules at one EP size and number of tokens a rank.

    Raises:
        ValueError: the choices do not fit that size.
        RuntimeError: the experts compute something else than plain torch.
    """
    experts = RankExperts(geometry, ep_size, tokens, options.device)
    times: dict[str, list[float]] = {rule: [] for rule in SERVING}
    modelled: dict[str, list[float]] = {rule: [] for rule in SERVING}
    counts: dict[str, list[Array]] = {rule: [] for rule in SERVING}
    error: float | None = None
    for chosen in choose(domains, geometry.num_experts, ep_size, tokens, options.pairs, options.seed):
        calls: dict[str, Callable[[int], object]] = {}
        for rule, slots in chosen.items():
            counts[rule].append(slot_counts(slots, ep_size, experts.width))
            costs = model_us(geometry, counts[rule][-1])
            modelled[rule].append(max(costs))
            slowest = sorted(range(ep_size), key=costs.__getitem__, reverse=True)[: options.ranks]
            batches = {f"{rule} {rank}": experts.batch(slots, rank) for rank in slowest}
            if error is None and not (error := experts.error(batches[f"{rule} {slowest[0]}"])) < TOLERANCE:
                raise RuntimeError(f"the experts at EP {ep_size} with {tokens} tokens a rank are wrong by {error:.2e}")
            calls |= {name: partial(experts.run, batch) for name, batch in batches.items()}
        found = time_in_turns(calls, device=options.device, chain=2 * len(experts.copies), repeats=options.repeats)
        for rule in SERVING:
            times[rule].append(max(timing_of(us).median for name, us in found.items() if name.split()[0] == rule))
    row: dict[str, Any] = {"experts": geometry.num_experts, "ep_size": ep_size, "tokens": tokens}
    row |= {"geometry": geometry.name, "pairs": len(times["one"]), "timed_ranks": options.ranks, "error": error}
    for rule in SERVING:
        outcome = Outcome(counts=np.stack(counts[rule])[:, None], stays=np.nan, copies={})
        row |= {f"{rule}_us": float(np.mean(times[rule])), f"{rule}_model_us": float(np.mean(modelled[rule]))}
        row |= {f"{rule}_active": outcome.active_experts, f"{rule}_peak": outcome.peak}
    ratio, levelled, one = row["one_us"] / row["levelled_us"], np.array(times["levelled"]), np.array(times["one"])
    rows_per_slot = tokens * geometry.top_k / experts.width
    return row | {
        "ratio": ratio, "ratio_error": float(np.std(one - ratio * levelled) / len(one) ** 0.5 / levelled.mean()),
        "model_ratio": row["one_model_us"] / row["levelled_model_us"], "rows_per_slot": rows_per_slot,
        "auto": "one" if rows_per_slot <= ROWS_PER_SLOT else "levelled",
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Prints a table."""
    bench = Bench(__doc__)
    parser = bench.parser
    packed = [name for name, each in PRESETS.items() if each.weights == INT4]
    parser.add_argument("routing", type=Path, nargs="+", help="npz files of recorded choices")
    parser.add_argument("--geometry", choices=packed, default="qwen3-235b", help="whose expert's sizes (qwen3-235b)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ep-sizes", type=positives, default=(8, 16), help="(8,16)")
    parser.add_argument("--tokens", type=positives, default=(8, 32, 128), help="of each rank (8,32,128)")
    parser.add_argument("--pairs", type=positive, default=24, help="(layer, step) pairs of each row (24)")
    parser.add_argument("--ranks", type=positive, default=3, help="ranks of a pair that are timed (3)")
    parser.add_argument("--repeats", type=positive, default=9, help="of each graph (9)")
    options = bench.parse(argv)
    options.device = this_gpu() if options.device == "cuda" else torch.device(options.device)
    for path in options.routing:
        try:
            domains = {name: array for name, array in read_arrays(path).items() if array.ndim == 3}
            choices = plain_choices(domains, path)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        sizes = {"num_experts": int(choices.max()) + 1, "top_k": choices.shape[2]}
        geometry = replace(preset(options.geometry), **sizes)
        for ep_size, tokens in itertools.product(options.ep_sizes, options.tokens):
            with torch.inference_mode():
                row = measure(domains, geometry, ep_size, tokens, options)
            bench.keep({"routing": path.stem} | row)
    print(markdown_table(bench.rows, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())

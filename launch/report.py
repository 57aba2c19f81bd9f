"""What a run says: a table on the terminal, and JSON lines."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moe_ep
from moe_ep.launch.run_config import RunConfig

STAGES = ("route", "dispatch", "experts", "combine")


@dataclass
class RankReport:
    """One rank's account, of plain values.

    Attributes:
        experts: ids of the routed experts this rank holds, in every layer.
        stage_ms: for each step, layer and stage, milliseconds.
        step_ms: for each step, milliseconds from the barrier before it to the end of its last layer.
        loads: for each step and layer, the expert assignments that landed on each rank.
        balancedness: for each step and layer.
        overall_balancedness: of all steps and layers together.
        phases: of each step: "" without EPLB, else whether it came before, while or after experts moved.
        eplb: what balancing did, None without it.
        choices: (step, layer position, ids int32 `[T, top_k]`) of this rank's tokens, where they are recorded.
        errors: layer -> largest relative error over all ranks' tokens, for the layers this rank verified.
    """

    rank: int
    node: str
    device: str
    device_name: str
    experts: list[int]
    num_tokens: int
    backend: str
    experts_name: str
    load_s: float
    bytes_read: int
    versions: dict[str, str]
    model: dict[str, Any]
    dtype: str
    tolerance: float
    memory_bytes: int = 0
    stage_ms: list[list[dict[str, float]]] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    loads: list[list[list[int]]] = field(default_factory=list)
    balancedness: list[list[float]] = field(default_factory=list)
    overall_balancedness: float = 1.0
    phases: list[str] = field(default_factory=list)
    eplb: dict[str, Any] | None = None
    choices: list[tuple[int, int, Any]] = field(default_factory=list)
    errors: dict[int, float] = field(default_factory=dict)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


class RunReport:
    """The accounts of all ranks as one.

    A stage takes as long as its slowest rank: its time in one step and layer is the maximum over ranks, and the median
    and p99 are over steps and layers of that.
    """

    def __init__(self, config: RunConfig, command: str, ranks: Sequence[RankReport]) -> None:
        self.config, self.command, self.ranks = config, command, list(ranks)
        self.layers: list[int] = ranks[0].model["moe_layers"]
        self.loads = ranks[0].loads
        self.errors = {layer: error for rank in ranks for layer, error in rank.errors.items()}
        self.tolerance = ranks[0].tolerance

    @property
    def verified(self) -> bool:
        """Whether every layer was compared and none is further off than its dtype explains."""
        return set(self.errors) == set(self.layers) and all(e <= self.tolerance for e in self.errors.values())

    def stage_ms(self, stage: str, step: int, position: int) -> float:
        """Milliseconds of the slowest rank."""
        return max(rank.stage_ms[step][position].get(stage, 0.0) for rank in self.ranks)

    def step_ms(self, step: int) -> float:
        return max(rank.step_ms[step] for rank in self.ranks)

    def mean_loads(self) -> list[list[float]]:
        """Expert assignments that land on each rank in a step, `[L][R]`."""
        num_steps = len(self.loads)
        return [
            [sum(step[i][r] for step in self.loads) / num_steps for r in range(len(self.ranks))]
            for i in range(len(self.layers))
        ]

    def summary(self) -> dict[str, Any]:
        """The last JSON line."""
        first = self.ranks[0]
        steps = range(len(first.step_ms))
        num_tokens = sum(rank.num_tokens for rank in self.ranks)
        passes = {
            stage: [self.stage_ms(stage, step, i) for step in steps for i in range(len(self.layers))]
            for stage in STAGES
        }
        total_s = sum(self.step_ms(step) for step in steps) / 1e3
        worst = max(self.errors.values(), default=None)
        return {
            "kind": "summary",
            "model": first.model,
            "launcher": self.config.launcher,
            "ep_size": len(self.ranks),
            "backend": first.backend,
            "experts": first.experts_name,
            "dtype": first.dtype,
            "placement": [
                {"rank": rank.rank, "node": rank.node, "device": rank.device, "experts": rank.experts}
                for rank in self.ranks
            ],
            "num_tokens_per_rank": [rank.num_tokens for rank in self.ranks],
            "steps": len(steps),
            "ms": {
                stage: {"median": percentile(ms, 0.5), "p99": percentile(ms, 0.99), "max": max(ms)}
                for stage, ms in passes.items()
            },
            "step_ms": {
                "median": percentile([self.step_ms(step) for step in steps], 0.5),
                "p99": percentile([self.step_ms(step) for step in steps], 0.99),
            },
            "tokens_per_s": num_tokens * len(steps) / total_s,
            "balancedness": first.overall_balancedness,
            "eplb": None if first.eplb is None else first.eplb | {"phases": self._phases()},
            "memory_bytes_per_rank": [rank.memory_bytes for rank in self.ranks],
            "load_s": max(rank.load_s for rank in self.ranks),
            "bytes_read_per_rank": [rank.bytes_read for rank in self.ranks],
            "verify": None
            if worst is None
            else {
                "max_relative_error": worst if math.isfinite(worst) else None,
                "tolerance": self.tolerance,
                "passed": self.verified,
            },
            "seed": self.config.seed,
            "text": None if self.config.text is None else str(self.config.text),
            "routing": self.config.routing,
            "devices": sorted({rank.device_name for rank in self.ranks}),
            "versions": first.versions,
            "commit": commit(),
            "command": self.command,
        }

    def _phases(self) -> dict[str, dict[str, float]]:
        """Steps, tokens/s and balancedness before, while and after experts moved."""
        num_tokens, found = sum(rank.num_tokens for rank in self.ranks), {}
        phases = self.ranks[0].phases
        for phase in dict.fromkeys(phases):
            steps = [step for step, its in enumerate(phases) if its == phase]
            loads = [layer for step in steps for layer in self.loads[step]]
            busiest = sum(max(layer) for layer in loads)
            found[phase] = {
                "steps": len(steps),
                "tokens_per_s": num_tokens * len(steps) / sum(self.step_ms(step) for step in steps) * 1e3,
                "balancedness": sum(map(sum, loads)) / len(self.ranks) / busiest if busiest else 1.0,
            }
        return found

    def json_lines(self) -> Iterator[str]:
        """One line for each step and layer, then the summary."""
        for step, layers in enumerate(self.loads):
            for i, layer in enumerate(self.layers):
                line = {
                    "kind": "layer",
                    "step": step,
                    "layer": layer,
                    "phase": self.ranks[0].phases[step],
                    "tokens_per_rank": layers[i],
                    "balancedness": self.ranks[0].balancedness[step][i],
                    "ms": {stage: self.stage_ms(stage, step, i) for stage in STAGES},
                    "ms_per_rank": {
                        stage: [rank.stage_ms[step][i].get(stage, 0.0) for rank in self.ranks] for stage in STAGES
                    },
                }
                if step == 0 and layer in self.errors:
                    error = self.errors[layer]
                    line["max_relative_error"] = error if math.isfinite(error) else None
                yield json.dumps(line, allow_nan=False)
        yield json.dumps(self.summary(), allow_nan=False)

    def lines(self) -> Iterator[str]:
        """What goes to the terminal."""
        summary = self.summary()
        model = summary["model"]
        yield (
            f"model: {model['path']}, {model['family']}, {len(self.layers)} MoE layers, {model['num_experts']} "
            f"experts, top-{model['top_k']}, hidden {model['hidden_size']}, intermediate {model['intermediate_size']}, "
            f"quantization {model['quantization']}"
        )
        yield (
            f"gang: {len(self.ranks)} worker(s), launcher {self.config.launcher}, backend {summary['backend']}, "
            f"experts {summary['experts']}, {summary['dtype']}, on {', '.join(summary['devices'])}"
        )
        yield "placement:"
        for rank in self.ranks:
            yield (
                f"  rank {rank.rank}: {len(rank.experts)} experts of every layer ({_ranges(rank.experts)}), "
                f"{rank.num_tokens} tokens a step, node {rank.node}, {rank.device}"
            )
        yield from self._load_lines()
        yield f"ms per stage and layer, slowest rank, {summary['steps']} steps:"
        yield f"  {'':<9}{'median':>10}{'p99':>10}{'max':>10}"
        for stage, ms in summary["ms"].items():
            yield f"  {stage:<9}{ms['median']:>10.3f}{ms['p99']:>10.3f}{ms['max']:>10.3f}"
        yield f"  whole step: median {summary['step_ms']['median']:.3f}, p99 {summary['step_ms']['p99']:.3f}"
        yield f"tokens/s: {summary['tokens_per_s']:,.0f}"
        yield f"balancedness: {summary['balancedness']:.3f}"
        if summary["eplb"] is not None:
            yield from eplb_lines(summary["eplb"])
        held = ", ".join(f"{size / 2**20:,.0f}" for size in summary["memory_bytes_per_rank"])
        yield f"memory per rank (MiB): {held}; loaded in {summary['load_s']:.2f} s"
        yield self.verification_line()

    def _load_lines(self) -> Iterator[str]:
        yield "tokens per rank (expert assignments in a step, mean over steps):"
        width = max(7, *(len(f"{load:.0f}") + 1 for layer in self.mean_loads() for load in layer))
        yield f"  {'layer':<6}" + "".join(f"{f'r{rank.rank}':>{width}}" for rank in self.ranks) + f"{'mean/max':>10}"
        for layer, loads in zip(self.layers, self.mean_loads(), strict=True):
            yield (
                f"  {layer:<6}" + "".join(f"{load:>{width}.0f}" for load in loads) + f"{_mean_over_max(loads):>10.3f}"
            )

    def verification_line(self) -> str:
        if not self.errors:
            return "verification: off"
        layer, worst = max(self.errors.items(), key=lambda item: item[1])
        verdict = "verified" if self.verified else "NOT verified"
        return (
            f"{verdict}: maximum relative error {worst:.2e} (layer {layer}) against the plain reference without expert "
            f"parallelism, {self.ranks[0].dtype} allows {self.tolerance:.0e}"
        )


def eplb_lines(eplb: dict[str, Any]) -> Iterator[str]:
    """What balancing did, for the terminal."""
    how = "beside the steps" if eplb["asynchronous"] else "between two steps"
    yield (
        f"EPLB: policy {eplb['policy']}, {eplb['num_redundant_experts']} redundant experts, plans made "
        f"{eplb['plans_made']}, skipped {eplb['plans_skipped']}"
    )
    for phase, found in eplb["phases"].items():
        yield (
            f"  {phase:<7} balancedness {found['balancedness']:.3f}, {found['tokens_per_s']:,.0f} tokens/s, "
            f"{found['steps']} steps"
        )
    yield (
        f"  moved {eplb['experts_moved']} experts ({eplb['bytes_moved'] / 2**20:,.1f} MiB) to other ranks {how}, "
        f"{eplb['layers_changed']} layers changed; plan {eplb['plan_s']:.3f} s, transfer {eplb['transfer_s']:.3f} s, "
        f"commit {eplb['commit_s']:.3f} s"
    )


def commit() -> str | None:
    """The commit of the checkout this runs from, if it is one."""
    root = Path(moe_ep.__path__[0]).resolve().parent
    if not (root / ".git").exists():
        return None
    try:
        asked = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip()


def _mean_over_max(loads: Sequence[float]) -> float:
    return sum(loads) / len(loads) / max(loads) if any(loads) else 1.0


def _ranges(ids: Sequence[int]) -> str:
    """Ascending numbers, runs joined: 0-7, 9."""
    parts: list[list[int]] = []
    for number in ids:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in parts) or "none"

"""What a run found, of all ranks together, and as JSON lines; `report_lines` is its form on the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moe_ep.bench.checkout import checkout_commit
from moe_ep.launch.cli.run_config import RunConfig

if TYPE_CHECKING:
    from moe_ep.eplb.placement_file import PlacementFile

STAGES = ("route", "dispatch", "experts", "combine")


@dataclass
class RankReport:
    """One rank's account, of plain values.

    Attributes:
        experts: for each layer, ids of the routed experts that this rank holds at the end.
        stage_ms: for each step, layer and stage, milliseconds.
        step_ms: for each step, milliseconds from the barrier before it to the end of its last layer.
        loads: for each step and layer, the expert assignments that landed on each rank.
        balancedness: for each step and layer.
        overall_balancedness: of all steps and layers together.
        phases: of each step: "" without EPLB, else whether it came before, while or after experts moved.
        eplb: what balancing did, None without it.
        placement: where it left the experts, of rank 0 where it is to be saved.
        choices: (step, layer position, ids int32 `[T, top_k]`) of this rank's tokens, where they are recorded.
        errors: layer -> largest relative error over all ranks' tokens, for the layers this rank verified.
    """

    rank: int
    node: str
    device: str
    device_name: str
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
    experts: list[list[int]] = field(default_factory=list)
    stage_ms: list[list[dict[str, float]]] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    loads: list[list[list[int]]] = field(default_factory=list)
    balancedness: list[list[float]] = field(default_factory=list)
    overall_balancedness: float = 1.0
    phases: list[str] = field(default_factory=list)
    eplb: dict[str, Any] | None = None
    placement: PlacementFile | None = None
    choices: list[tuple[int, int, Any]] = field(default_factory=list)
    errors: dict[int, float] = field(default_factory=dict)

    @property
    def experts_of_all_layers(self) -> list[int] | None:
        """What it holds in every layer; None where layers differ, as EPLB has it."""
        first, *others = self.experts
        return first if all(layer == first for layer in others) else None


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
                {
                    "rank": rank.rank,
                    "node": rank.node,
                    "device": rank.device,
                    "experts": rank.experts_of_all_layers,
                    "experts_by_layer": rank.experts if rank.experts_of_all_layers is None else None,
                }
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
                "max": max(self.step_ms(step) for step in steps),
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
            "commit": checkout_commit(),
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

    def verification_line(self) -> str:
        if not self.errors:
            return "verification: off"
        layer, worst = max(self.errors.items(), key=lambda item: item[1])
        verdict = "verified" if self.verified else "NOT verified"
        return (
            f"{verdict}: maximum relative error {worst:.2e} (layer {layer}) against the reference without expert "
            f"parallelism ({self.ranks[0].dtype} allows {self.tolerance:.0e})"
        )

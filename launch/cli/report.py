"""The report of a run over all ranks: a text for the terminal, and JSON lines."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from moe_ep.bench.results import as_line, checkout_commit
from moe_ep.files import naming
from moe_ep.launch.cli.outputs import tell
from moe_ep.launch.cli.run_config import RunConfig
from moe_ep.launch.gangs.progress import workers

if TYPE_CHECKING:
    from moe_ep.eplb.placement_file import PlacementFile

STAGES = ("route", "dispatch", "experts", "combine")
# With more ranks than this, only minimum, mean and maximum are shown.
_MOST_COLUMNS = 16
# The mean rate is shown too if it differs from the median step's by more than this.
_NOTICEABLE = 0.03


@dataclass
class RankReport:
    """One rank's report, as plain values.

    Attributes:
        experts: for each layer, ids of the routed experts that this rank holds.
        rows: the row dtypes that experts compute with and why, each distinct answer of the layers once.
        graphs: whether the measured steps are replays of a CUDA graph; if not, why_eager gives the reason.
        eplb: totals of load balancing; None without it.
        placement: the final placement of the experts, on rank 0 if it is to be saved.
        choices: of each step ids int16 `[T, layers, top_k]` of this rank's tokens, and the router's weights f32 or
            None, if they are recorded. errors: layer -> largest relative error over all ranks' tokens, for the layers
            that this rank verified. errors_of_quantizing: the same against the weights on disk, if --quantize has
            changed them.
    """

    rank: int
    node: str
    device: str
    device_name: str
    num_tokens: int
    load_s: float
    bytes_read: int
    versions: dict[str, str]
    model: dict[str, Any]
    dtype: str
    backend: str = ""
    experts_name: str = ""
    tolerance: float = 0.0
    rows: list[str] = field(default_factory=list)
    memory_bytes: int = 0
    experts: list[list[int]] = field(default_factory=list)
    graphs: bool = False
    why_eager: str | None = None
    eplb: dict[str, Any] | None = None
    placement: PlacementFile | None = None
    choices: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    errors: dict[int, float] = field(default_factory=dict)
    errors_of_quantizing: dict[int, float] = field(default_factory=dict)

    @property
    def experts_of_all_layers(self) -> list[int] | None:
        """The experts that it holds in every layer; None if layers differ, as with EPLB."""
        first, *others = self.experts
        return first if all(layer == first for layer in others) else None


@dataclass(frozen=True)
class StepReport:
    """One measured step of all ranks.

    Attributes:
        phase: "" without EPLB, else "before", "moving" or "after".
        step_ms: of each rank, milliseconds from the barrier before the step to the end of its last layer.
        stage_ms: `[rank][layer]`, milliseconds of each stage.
        loads: `[layer][rank]`, expert assignments to the rank.
        num_tokens: of all ranks.
        ended_at: seconds since 1970, by the clock of the rank that reports it.
        tokens_hit: of each rank, those of its tokens that went without an expert that was being read again.
    """

    step: int
    phase: str
    step_ms: list[float]
    stage_ms: list[list[dict[str, float]]]
    loads: list[list[int]]
    balancedness: list[float]
    num_tokens: int
    ended_at: float = 0.0
    tokens_hit: list[list[int]] = field(default_factory=list)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


class Times:
    """Times of any number of steps in bounded memory: exact up to a limit, then in buckets of 0.1 %.

    Args:
        exact: number of times that are kept exactly.
    """

    _WIDTH = math.log(1.001)

    def __init__(self, exact: int = 4096) -> None:
        self.count, self.total, self.most = 0, 0.0, 0.0
        self._exact = exact
        self._values: list[float] = []
        self._classes: Counter[int] = Counter()

    def add(self, ms: float) -> None:
        self.count, self.total, self.most = self.count + 1, self.total + ms, max(self.most, ms)
        if self.count <= self._exact:
            self._values.append(ms)
            return
        for value in (*self._values, ms):
            self._classes[round(math.log(max(value, 1e-6)) / self._WIDTH)] += 1
        self._values.clear()

    def percentile(self, share: float) -> float:
        """As `percentile`, over all times."""
        if not self._classes:
            return percentile(self._values, share)
        left = math.ceil(share * self.count)
        for number, count in sorted(self._classes.items()):
            left -= count
            if left <= 0:
                return min(math.exp(number * self._WIDTH), self.most)
        return self.most

    def summary(self) -> dict[str, float]:
        return {"median": self.percentile(0.5), "p99": self.percentile(0.99), "max": self.most}


class _Load:
    """Accumulates the load and the times of many steps."""

    def __init__(self) -> None:
        self.steps, self.step_ms = 0, Times()
        # The number of tokens changes where ranks come and go.
        self._num_tokens, self._ms_per_token = 0, Times()
        self._mean, self._most = 0.0, 0.0

    def add(self, step: StepReport) -> None:
        self.steps += 1
        self.step_ms.add(max(step.step_ms))
        self._num_tokens += step.num_tokens
        if step.num_tokens:
            self._ms_per_token.add(max(step.step_ms) / step.num_tokens)
        for layer in step.loads:
            self._mean += sum(layer) / len(layer)
            self._most += max(layer)

    @property
    def balancedness(self) -> float:
        """Mean over maximum load of a rank, both summed over steps and layers."""
        return self._mean / self._most if self._most else 1.0

    def tokens_per_s(self) -> dict[str, float]:
        """Tokens/s of the median step, and of all steps together."""
        median, total = self._ms_per_token.percentile(0.5), self.step_ms.total
        return {
            "tokens_per_s": 1e3 / median if median else 0.0,
            "mean_tokens_per_s": 1e3 * self._num_tokens / total if total else 0.0,
        }


class RunReport:
    """The report over all ranks, of the steps measured so far.

    The time of a stage in one step and layer is the maximum over ranks; median and p99 are over steps and layers of
    that. Memory does not grow with the number of steps: the lines for --json are kept in a temporary file, because the
    errors of the first step's layers are known only at the end.
    """

    def __init__(self, config: RunConfig, command: str) -> None:
        self.config, self.command = config, command
        self.ranks: list[RankReport] = []
        self.is_complete = False
        self.recoveries: list[dict[str, Any]] = []
        self._last_step = -1
        # By step: of each rank, the tokens that went without an expert.
        self._tokens_hit: dict[int, list[list[int]]] = {}
        self._load, self._phases = _Load(), dict[str, _Load]()
        self._stage_ms = {stage: Times() for stage in STAGES}
        # Assignments to each rank by layer: sums over the last `num_loads` steps, those of the present ranks.
        self.layer_loads: list[list[int]] = []
        self.num_loads = 0
        self._lines: IO[str] | None = None

    @property
    def num_steps(self) -> int:
        return self._load.steps

    @property
    def layers(self) -> list[int]:
        return self.ranks[0].model["moe_layers"]

    @property
    def errors(self) -> dict[int, float]:
        return {layer: error for rank in self.ranks for layer, error in rank.errors.items()}

    @property
    def error_of_quantizing(self) -> float | None:
        """The largest error against the weights before --quantize; None if there is none."""
        return max((error for rank in self.ranks for error in rank.errors_of_quantizing.values()), default=None)

    @property
    def verified(self) -> bool:
        """Whether every layer was compared and is within the tolerance of its dtype."""
        errors, tolerance = self.errors, self.ranks[0].tolerance
        return set(errors) == set(self.layers) and all(error <= tolerance for error in errors.values())

    def take(self, item: list[dict[str, Any]] | StepReport) -> None:
        """Takes the reports of all ranks, which come before the first step, or a step. If several ranks hand over the
        same step, as in an elastic gang, the first counts."""
        if not isinstance(item, StepReport):
            self.ranks = [RankReport(**rank) for rank in item]
        elif item.step > self._last_step:
            self._last_step = item.step
            self._add(item)

    def complete(self, ranks: Sequence[RankReport]) -> None:
        """Takes the final reports of the ranks."""
        self.ranks, self.is_complete = list(ranks), True
        if self.layer_loads and len(self.layer_loads[0]) != len(self.ranks):  # lost after the last step
            self.layer_loads, self.num_loads = [[0] * len(self.ranks) for _ in self.layer_loads], 1

    def _add(self, step: StepReport) -> None:
        self._load.add(step)
        if any(step.tokens_hit):
            self._tokens_hit[step.step] = step.tokens_hit
        self._phases.setdefault(step.phase, _Load()).add(step)
        if not self.layer_loads or len(self.layer_loads[0]) != len(step.loads[0]):  # other ranks
            self.layer_loads, self.num_loads = [[0] * len(layer) for layer in step.loads], 0
        self.num_loads += 1
        for sums, layer in zip(self.layer_loads, step.loads, strict=True):
            sums[:] = [a + b for a, b in zip(sums, layer, strict=True)]
        for position, layer_ms in enumerate(zip(*step.stage_ms, strict=True)):
            per_rank = {stage: [rank.get(stage, 0.0) for rank in layer_ms] for stage in STAGES}
            for stage, times in per_rank.items():
                self._stage_ms[stage].add(max(times))
            if self.config.json is not None:
                line = {
                    "kind": "layer",
                    "step": step.step,
                    "ended_at": step.ended_at,
                    "step_ms": max(step.step_ms),
                    "layer": self.layers[position],
                    "phase": step.phase,
                    "tokens_per_rank": step.loads[position],
                    "balancedness": step.balancedness[position],
                    "ms": {stage: max(times) for stage, times in per_rank.items()},
                    "ms_per_rank": per_rank,
                }
                if self._lines is None:
                    # It stays open as long as the report lives.
                    self._lines = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
                with naming("the folder for temporary files"):
                    self._lines.write(as_line(line))

    def summary(self) -> dict[str, Any]:
        """The last JSON line."""
        first = self.ranks[0]
        worst, quantizing = max(self.errors.values(), default=None), self.error_of_quantizing
        return {
            "kind": "summary",
            "model": first.model,
            "launcher": self.config.launcher,
            "ep_size": len(self.ranks),
            "backend": first.backend,
            "experts": first.experts_name,
            "dtype": first.dtype,
            "rows": first.rows,
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
            "steps": self.num_steps,
            "complete": self.is_complete,
            "graphs": first.graphs,
            "why_eager": first.why_eager,
            "ms": {stage: times.summary() for stage, times in self._stage_ms.items()},
            "step_ms": self._load.step_ms.summary(),
            **self._load.tokens_per_s(),
            "balancedness": self._load.balancedness,
            "eplb": None
            if first.eplb is None
            else first.eplb
            | {
                "phases": {
                    phase: {"steps": load.steps, **load.tokens_per_s(), "balancedness": load.balancedness}
                    for phase, load in self._phases.items()
                }
            },
            "memory_bytes_per_rank": [rank.memory_bytes for rank in self.ranks],
            "load_s": max(rank.load_s for rank in self.ranks),
            "bytes_read_per_rank": [rank.bytes_read for rank in self.ranks],
            "verify": None
            if worst is None
            else {"max_relative_error": worst, "tolerance": first.tolerance, "passed": self.verified}
            | ({} if quantizing is None else {"error_of_quantizing": quantizing}),
            "seed": self.config.seed,
            "text": None if self.config.text is None else str(self.config.text),
            "routing": self.config.routing,
            "devices": sorted({rank.device_name for rank in self.ranks}),
            "versions": first.versions,
            "commit": checkout_commit(),
            "command": self.command,
            "recoveries": self.recoveries,
            "tokens_hit": [{"step": step, "by_rank": by_rank} for step, by_rank in self._tokens_hit.items()],
        }

    def json_lines(self) -> Iterator[str]:
        """One line for each step and layer, then the summary; each ends with a newline."""
        if self._lines is not None:
            errors = self.errors
            self._lines.seek(0)
            for position, line in enumerate(self._lines):
                if position < len(self.layers) and self.layers[position] in errors:
                    line = as_line(json.loads(line) | {"max_relative_error": errors[self.layers[position]]})
                yield line
        yield as_line(self.summary())

    def tell(self) -> None:
        """Prints the report and appends it to --json."""
        tell("\n".join(terminal_lines(self)), self.config.json, self.json_lines)

    def verification_line(self) -> str:
        if not self.errors:
            return "verification: off" if self.is_complete else "verification: not reached"
        layer, worst = max(self.errors.items(), key=lambda item: item[1])
        verdict = "verified" if self.verified else "NOT verified"
        quantizing = self.error_of_quantizing
        beside = "" if quantizing is None else f"; {quantizing:.2e} against the weights before --quantize"
        return (
            f"{verdict}: maximum relative error {worst:.2e} (layer {layer}) against the reference without expert "
            f"parallelism ({self.ranks[0].dtype} allows {self.ranks[0].tolerance:.0e}){beside}"
        )


def terminal_lines(report: RunReport) -> Iterator[str]:
    """The report for the terminal: model and gang, placement, load, times, balancing, verification."""
    summary = report.summary()
    yield from _head(report, summary)
    yield ""
    yield from _ranks(report, summary)
    yield ""
    yield from _loads(report, summary)
    yield ""
    yield from _times(summary)
    if summary["eplb"] is not None:
        yield ""
        yield from _eplb(summary["eplb"])
    yield ""
    yield report.verification_line()


def _head(report: RunReport, summary: dict[str, Any]) -> Iterator[str]:
    model = summary["model"]
    yield (
        f"model   {model['family']}, {len(report.layers)} MoE layers of {model['num_experts']} experts, "
        f"top-{model['top_k']}, hidden {model['hidden_size']}, intermediate {model['intermediate_size']}, "
        f"weights {'plain' if model['quantization'] == 'none' else model['quantization']}"
    )
    yield f"        {model['path']}"
    yield (
        f"gang    {workers(len(report.ranks))}, launcher {report.config.launcher}, on {', '.join(summary['devices'])}"
    )
    yield f"layers  backend {summary['backend']}, experts {summary['experts']}, {summary['dtype']}"
    for rows in summary["rows"]:
        yield f"        {rows}"
    why = "" if summary["why_eager"] is None else f" ({summary['why_eager']})"
    yield f"steps   {'replays of a CUDA graph' if summary['graphs'] else f'eager{why}'}"


def _ranks(report: RunReport, summary: dict[str, Any]) -> Iterator[str]:
    when = "in every layer" if summary["eplb"] is None else "at the end"
    rows = [("rank", f"placement: experts {when}", "tokens/step", "memory", "where")]
    rows += [
        (
            str(rank.rank),
            _held(rank),
            str(rank.num_tokens),
            f"{rank.memory_bytes / 2**20:,.0f} MiB",
            f"{rank.node}, {rank.device}",
        )
        for rank in report.ranks
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for number, experts, tokens, memory, where in rows:
        yield f"{number:>{widths[0]}}  {experts:<{widths[1]}}  {tokens:>{widths[2]}}  {memory:>{widths[3]}}  {where}"
    yield f"loaded in {summary['load_s']:.2f} s"


def _held(rank: RankReport) -> str:
    experts = rank.experts_of_all_layers
    if experts is not None:
        return f"{ranges(experts)} ({len(experts)})"
    least, *_, most = sorted(map(len, rank.experts))
    return f"{least if least == most else f'{least} to {most}'}, others in each layer"


def _loads(report: RunReport, summary: dict[str, Any]) -> Iterator[str]:
    means = [[load / report.num_loads for load in layer] for layer in report.layer_loads]
    if len(report.ranks) <= _MOST_COLUMNS:
        names, rows = [f"r{rank.rank}" for rank in report.ranks], means
    else:
        names, rows = ["least", "mean", "most"], [[min(row), sum(row) / len(row), max(row)] for row in means]
    width = max(7, *(len(f"{load:.0f}") + 1 for row in rows for load in row))
    yield "tokens per rank: what its experts get in a step, a token once for each expert; mean over steps"
    yield f"{'layer':<6}" + "".join(f"{name:>{width}}" for name in names) + f"{'mean/max':>10}"
    for layer, loads, row in zip(report.layers, means, rows, strict=True):
        even = sum(loads) / len(loads) / max(loads) if any(loads) else 1.0
        yield f"{layer:<6}" + "".join(f"{load:>{width}.0f}" for load in row) + f"{even:>10.3f}"
    yield f"balancedness {summary['balancedness']:.3f} (1 = the same load on every rank)"


def _times(summary: dict[str, Any]) -> Iterator[str]:
    yield f"{'ms, slowest rank':<24}{'median':>10}{'p99':>10}{'max':>10}"
    of_stages = {f"{stage}, per layer": ms for stage, ms in summary["ms"].items()}
    for name, ms in (of_stages | {"whole step": summary["step_ms"]}).items():
        yield f"{name:<24}{ms['median']:>10.3f}{ms['p99']:>10.3f}{ms['max']:>10.3f}"
    steps = f"{summary['steps']} step{'s' if summary['steps'] > 1 else ''}"
    rate, mean = summary["tokens_per_s"], summary["mean_tokens_per_s"]
    beside = f" ({mean:,.0f} in the mean)" if abs(mean - rate) > _NOTICEABLE * rate else ""
    yield f"{rate:,.0f} tokens/s{beside} through the MoE layers, all ranks together, in the median of {steps}"


def _eplb(eplb: dict[str, Any]) -> Iterator[str]:
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


def ranges(ids: Sequence[int]) -> str:
    """Ascending numbers, runs joined: 0-7, 9."""
    parts: list[list[int]] = []
    for number in ids:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in parts) or "none"

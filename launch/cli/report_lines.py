"""A run's account as it stands on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from moe_ep.launch.cli.report import RankReport, RunReport
from moe_ep.launch.gangs.progress import workers

# More ranks than this are shown by their least, mean and most.
_MOST_COLUMNS = 16


def terminal_lines(report: RunReport) -> Iterator[str]:
    """What the user reads: what ran where, how the load fell, how long it took, and whether it is right."""
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
    means = report.mean_loads()
    if len(report.ranks) <= _MOST_COLUMNS:
        names, rows = [f"r{rank.rank}" for rank in report.ranks], means
    else:
        names, rows = ["least", "mean", "most"], [[min(row), sum(row) / len(row), max(row)] for row in means]
    width = max(7, *(len(f"{load:.0f}") + 1 for row in rows for load in row))
    yield "tokens per rank: what its experts get in a step, a token once for each expert; mean over steps"
    yield f"{'layer':<6}" + "".join(f"{name:>{width}}" for name in names) + f"{'mean/max':>10}"
    for layer, loads, row in zip(report.layers, means, rows, strict=True):
        yield f"{layer:<6}" + "".join(f"{load:>{width}.0f}" for load in row) + f"{_mean_over_max(loads):>10.3f}"
    yield f"balancedness {summary['balancedness']:.3f} (1 = the same load on every rank)"


def _times(summary: dict[str, Any]) -> Iterator[str]:
    yield f"{'ms, slowest rank':<24}{'median':>10}{'p99':>10}{'max':>10}"
    for stage, ms in summary["ms"].items():
        yield f"{stage + ', per layer':<24}{ms['median']:>10.3f}{ms['p99']:>10.3f}{ms['max']:>10.3f}"
    whole = summary["step_ms"]
    yield f"{'whole step':<24}{whole['median']:>10.3f}{whole['p99']:>10.3f}{whole['max']:>10.3f}"
    steps = f"{summary['steps']} step{'s' if summary['steps'] > 1 else ''}"
    yield f"{summary['tokens_per_s']:,.0f} tokens/s through the MoE layers, all ranks together, over {steps}"


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


def _mean_over_max(loads: Sequence[float]) -> float:
    return sum(loads) / len(loads) / max(loads) if any(loads) else 1.0


def ranges(ids: Sequence[int]) -> str:
    """Ascending numbers, runs joined: 0-7, 9."""
    parts: list[list[int]] = []
    for number in ids:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in parts) or "none"

"""bench_dispatch's rows for people: one wide table on the terminal, Markdown by backend for documents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from moe_ep.bench.results import table

Row = dict[str, Any]

_COLUMNS = {
    "backend": "backend", "wire": "wire", "tokens_per_rank": "T", "num_sms": "SMs", "mode": "mode",
    "median_us": "median us", "p99_us": "p99 us", "max_us": "max us", "dispatch_us": "dispatch us",
    "combine_us": "combine us", "raw_median_us": "raw us", "ratio": "ratio", "floor_us": "floor us",
}  # fmt: skip
_SHAPE = ("hidden", "topk", "routing")
_VERSIONS = ("torch", "nccl", "nvshmem4py", "triton", "python", "commit")


def text(rows: Sequence[Row]) -> str:
    """All rows in order, then what is wrong and what the kernels took, where that was measured."""
    varied = {key: key for key in _SHAPE if len({row[key] for row in rows}) > 1}
    lines = [table(rows, varied | {key: title for key, title in _COLUMNS.items() if any(key in row for row in rows)})]
    for row in rows:
        if "error" in row:
            lines.append(f"{_name(row)}: {row['error']}")
        elif row.get("kernels_us"):
            kernels = ", ".join(f"{name} {time_us}" for name, time_us in row["kernels_us"].items())
            lines.append(f"{_name(row)}: {kernels} us")
    return "\n".join(lines)


def markdown(rows: Sequence[Row]) -> str:
    """A part for each run: pairs in graphs, pairs eager, and halves, with columns for what the run varied."""
    parts = []
    for (ranks, gpu, command), group in groupby(rows, key=lambda row: (row["ranks"], row["gpu"], row["command"])):
        run = list(group)
        first = run[0]
        of = {key: ", ".join(str(value) for value in dict.fromkeys(row[key] for row in run)) for key in _SHAPE}
        versions = ", ".join(f"{key} {first[key]}" for key in _VERSIONS if first.get(key))
        parts += [
            f"### {ranks} x {gpu}, hidden {of['hidden']}, top-{of['topk']} of {first['experts']}, {of['routing']}",
            f"{versions}; copies and collectives between GPUs reach {first['peer_bandwidth_gb_s']} GB/s.",
            f"```\n{command}\n```",
        ]
        shape = [key for key in _SHAPE if len({row[key] for row in run}) > 1]
        for mode, title in (("graph", "in a CUDA graph"), ("eager", "eager")):
            of_mode = [row for row in run if row["mode"] == mode]
            if of_mode:
                parts.append(f"Pairs, {title}, median (p99) in us:\n\n{_pairs(of_mode, shape)}")
        halves = [row for row in run if row.get("dispatch_us")]
        if halves:
            parts.append(f"Each half by itself, begun together by all ranks, median:\n\n{_halves(halves, shape)}")
    return "\n\n".join(parts)


def _pairs(rows: Sequence[Row], shape: Sequence[str]) -> str:
    """Backends by wire and tokens: the median and p99; the raw pair of the bytes of a token once per rank last."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    keys = [*shape, "wire", "tokens_per_rank"]
    header = [*shape, "wire", "tokens per rank", *backends, "raw pair", "floor"]
    lines = [_line(header), _line(["---"] * len(header))]
    for size in sorted({tuple(row[key] for key in keys) for row in rows}):
        best: dict[str, Row] = {}
        for row in rows:
            if tuple(row[key] for key in keys) == size and row.get("median_us") is not None:
                known = best.get(row["backend"])
                best[row["backend"]] = row if known is None or row["median_us"] < known["median_us"] else known
        least = min(best.values(), key=lambda row: row["bytes_leaving"], default=None)
        ends = ["-", "-"] if least is None else [least["raw_median_us"], least["floor_us"]]
        cells = [f"{best[name]['median_us']} ({best[name]['p99_us']})" if name in best else "-" for name in backends]
        lines.append(_line([*size, *cells, *ends]))
    return "\n".join(lines)


def _halves(rows: Sequence[Row], shape: Sequence[str]) -> str:
    """Dispatch and combine by themselves."""
    header = [*shape, "tokens per rank", "backend", "SMs", "wire", "dispatch us", "combine us"]
    lines = [_line(header), _line(["---"] * len(header))]
    for row in sorted(rows, key=lambda row: row["tokens_per_rank"]):
        sms, halves = row["num_sms"] or "-", (row["dispatch_us"], row["combine_us"])
        lines.append(
            _line([*(row[key] for key in shape), row["tokens_per_rank"], row["backend"], sms, row["wire"], *halves])
        )
    return "\n".join(lines)


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _name(row: Row) -> str:
    sms = "" if row.get("num_sms") is None else f", {row['num_sms']} SMs"
    return f"{row['backend']}, {row['wire']}, {row['tokens_per_rank']} tokens{sms}"

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
# Times its median, from which a p99 is told.
FAR = 1.1


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
    """A part for each run: pairs in graphs, pairs eager, and halves, with columns for what the run varied.

    Eager pairs and halves are of more tokens than the graphs have; below that the host takes most of their time, and a
    line for each backend says how much.
    """
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
        in_graphs = [row for row in run if row["mode"] == "graph"]
        most = max((row["tokens_per_rank"] for row in in_graphs), default=0)
        eager = [row for row in run if row["mode"] == "eager"]
        large = [row for row in eager if row["tokens_per_rank"] > most]
        if in_graphs:
            parts.append(f"Pairs in a CUDA graph, us:\n\n{_pairs(in_graphs, shape)}")
        if small := [row for row in eager if row["tokens_per_rank"] <= most and row.get("median_us") is not None]:
            parts.append(_spans(small))
        if large:
            parts.append(f"Pairs, eager, us:\n\n{_pairs(large, shape)}")
        if halves := [row for row in large if row.get("dispatch_us")]:
            parts.append(
                f"Dispatch, combine by themselves, begun together by all ranks, us:\n\n{_halves(halves, shape)}"
            )
    return "\n\n".join(parts)


def _pairs(rows: Sequence[Row], shape: Sequence[str]) -> str:
    """Backends by wire and tokens; the raw pair of the bytes of a token once per rank last."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    if shape and len(backends) == 1:
        return _sizes(rows, shape)
    keys = [*shape, "wire", "tokens_per_rank"]
    header = [*shape, "wire", "tokens per rank", *backends, "raw pair", "floor"]
    lines = [_line(header), _line(["---"] * len(header))]
    for size in sorted({tuple(row[key] for key in keys) for row in rows}):
        best: dict[str, Row] = {}
        for row in rows:
            if tuple(row[key] for key in keys) == size and row.get("median_us") is not None:
                known = best.get(row["backend"])
                best[row["backend"]] = row if known is None or row["median_us"] < known["median_us"] else known
        ours = [row for row in best.values() if "bytes_leaving" in row]
        least = min(ours, key=lambda row: row["bytes_leaving"], default=None)
        ends = ["-", "-"] if least is None else [least["raw_median_us"], least["floor_us"]]
        lines.append(_line([*size, *(_time(best[name]) if name in best else "-" for name in backends), *ends]))
    return "\n".join(lines)


def _sizes(rows: Sequence[Row], shape: Sequence[str]) -> str:
    """One backend at several sizes: its pair, the raw pair and the floor, a column for each number of tokens."""
    columns = sorted({row["tokens_per_rank"] for row in rows})
    header = [*shape, "wire", *(f"{tokens} tokens: {rows[0]['backend']}, raw pair, floor" for tokens in columns)]
    lines = [_line(header), _line(["---"] * len(header))]
    keys = [*shape, "wire"]
    for size in sorted({tuple(row[key] for key in keys) for row in rows}):
        cells = {
            row["tokens_per_rank"]: f"{_time(row)}, {row['raw_median_us']}, {row['floor_us']}"
            for row in rows
            if tuple(row[key] for key in keys) == size and row.get("median_us") is not None
        }
        lines.append(_line([*size, *(cells.get(tokens, "-") for tokens in columns)]))
    return "\n".join(lines)


def _time(row: Row) -> str:
    """The median, with the p99 where it is far from it."""
    far = row["p99_us"] > FAR * row["median_us"]
    return f"{row['median_us']} ({row['p99_us']})" if far else str(row["median_us"])


def _spans(rows: Sequence[Row]) -> str:
    """What eager pairs of few tokens take, by backend."""
    said = []
    for name in dict.fromkeys(row["backend"] for row in rows):
        times = [row["median_us"] for row in rows if row["backend"] == name]
        said.append(f"{name} {min(times)} to {max(times)} us")
    return f"Eager pairs of these sizes, which wait for the host: {', '.join(said)}."


def _halves(rows: Sequence[Row], shape: Sequence[str]) -> str:
    """Dispatch, combine: a line for each backend and number of SMs, a column for each wire and number of tokens."""
    columns = sorted({(row["tokens_per_rank"], row["wire"]) for row in rows})
    header = [*shape, "backend", "SMs", *(f"{tokens} tokens, {wire}" for tokens, wire in columns)]
    lines = [_line(header), _line(["---"] * len(header))]
    keys = [*shape, "backend", "num_sms"]
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        times = {
            (row["tokens_per_rank"], row["wire"]): f"{row['dispatch_us']}, {row['combine_us']}"
            for row in rows
            if tuple(row[name] for name in keys) == key
        }
        cells = ["-" if cell is None else cell for cell in key]
        lines.append(_line([*cells, *(times.get(column, "-") for column in columns)]))
    return "\n".join(lines)


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _name(row: Row) -> str:
    sms = "" if row.get("num_sms") is None else f", {row['num_sms']} SMs"
    return f"{row['backend']}, {row['wire']}, {row['tokens_per_rank']} tokens{sms}"

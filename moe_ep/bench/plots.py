"""Pictures of scaling results, from their JSON lines; readable in grey."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_ep.errors import missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

STAGES = ("route", "dispatch", "experts", "combine")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-.", ":")
_GREYS = ("0.15", "0.45", "0.65", "0.85")
_HATCHES = ("", "///", "...", "xxx")


def plot_scaling(rows: list[Row], folder: Path) -> list[Path]:
    """Writes a PNG of each kind for each geometry, and returns their paths.

    scaling: tokens/s of all ranks against the EP size, with the ideal line. stages: microseconds of each stage, one bar
    a size. latency: microseconds against tokens per rank. load: expert assignments of each rank over their mean.

    Raises:
        ValueError: no rows of a scaling benchmark.
        ImportError: matplotlib is missing.
    """
    if not rows or any(key not in row for row in rows for key in ("geometry", "ep_size", "stages_us", "us")):
        raise ValueError(
            "it holds no rows of a scaling benchmark; give a file that `moe-ep bench scaling --json` wrote"
        )
    kinds: dict[str, Callable[[Axes, list[Row]], None]] = {
        "scaling": _scaling, "stages": _stages, "latency": _latency, "load": _load
    }  # fmt: skip
    written = []
    for geometry in sorted({row["geometry"] for row in rows}):
        mine = [row for row in rows if row["geometry"] == geometry]
        for kind, draw in kinds.items():
            path = folder / f"{geometry}-{kind}.png"
            _save(path, f"{geometry}: {mine[0].get('gpu', '')}", draw, mine)
            written.append(path)
    return written


def _save(path: Path, title: str, draw: Callable[[Axes, list[Row]], None], rows: list[Row]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "bench", "a plot") from None
    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    axes = figure.add_subplot()
    draw(axes, rows)
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=150)


def _scaling(axes: Axes, rows: list[Row]) -> None:
    keys = ("phase", "asked_tokens", "asked_backend", "wire", "routing", "eplb")
    for index, (name, series) in enumerate(_series(_with_one_rank(rows), "ep_size", keys)):
        sizes, rates = zip(*((row["ep_size"], row["tokens_per_s"]) for row in series), strict=True)
        axes.plot(sizes, rates, label=name, **_style(index))
        axes.plot(sizes, [rates[0] / sizes[0] * size for size in sizes], color="0.8", linewidth=0.8, zorder=0)
    axes.plot([], [], color="0.8", linewidth=0.8, label="ideal")
    _logarithmic(axes, "EP size", "tokens/s, all ranks")
    ticks = sorted({row["ep_size"] for row in rows})
    axes.set_xticks(ticks, labels=list(map(str, ticks)))


def _latency(axes: Axes, rows: list[Row]) -> None:
    keys = ("ep_size", "asked_backend", "wire", "routing", "eplb")
    for index, (name, series) in enumerate(_series(rows, "tokens_per_rank", keys)):
        tokens, times = zip(*((row["tokens_per_rank"], row["us"]) for row in series), strict=True)
        axes.plot(tokens, times, label=name, **_style(index))
    _logarithmic(axes, "tokens per rank", "microseconds, slowest rank")
    ticks = sorted({row["tokens_per_rank"] for row in rows})
    axes.set_xticks(ticks, labels=list(map(str, ticks)))


def _stages(axes: Axes, rows: list[Row]) -> None:
    """Bars of the largest decode batch, or of the smallest prefill where there is no decode."""
    decode = [row for row in rows if row["phase"] == "decode"] or rows
    tokens = (max if decode[0]["phase"] == "decode" else min)(row["asked_tokens"] for row in decode)
    shown = sorted((row for row in decode if row["asked_tokens"] == tokens), key=lambda row: row["ep_size"])
    start = [0.0] * len(shown)
    for stage, grey, hatch in zip(STAGES, _GREYS, _HATCHES, strict=True):
        widths = [row["stages_us"].get(stage, 0.0) for row in shown]
        axes.barh(range(len(shown)), widths, left=start, label=stage, color=grey, hatch=hatch, edgecolor="white")
        start = [left + width for left, width in zip(start, widths, strict=True)]
    differing = [key for key in ("backend", "wire", "routing", "eplb") if len({row[key] for row in shown}) > 1]
    labels = [", ".join(f"{_WORDS.get(key, '')}{row[key]}" for key in ("ep_size", *differing)) for row in shown]
    axes.set_yticks(range(len(shown)), labels=labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"microseconds of each stage, {tokens} tokens")
    axes.legend(fontsize=8)


def _load(axes: Axes, rows: list[Row]) -> None:
    """One line of the map a routing at the largest EP size, one column a rank."""
    largest = max(row["ep_size"] for row in rows)
    shown: dict[str, list[float]] = {}
    for row in rows:
        if row["ep_size"] == largest and sum(row["rows_per_rank"]):
            mean = sum(row["rows_per_rank"]) / largest
            name = f"{row['routing']}, {row['asked_tokens']} tokens, EPLB {row['eplb']}"
            shown[name] = [load / mean for load in row["rows_per_rank"]]
    # Even loads are mid grey; darker is more.
    most = max(2.0, *(load for loads in shown.values() for load in loads))
    image = axes.imshow(list(shown.values()), cmap="Greys", vmin=0.0, vmax=most, aspect="auto")
    axes.set_yticks(range(len(shown)), labels=list(shown), fontsize=6)
    axes.set_xticks(range(largest), labels=[f"r{rank}" for rank in range(largest)])
    axes.figure.colorbar(image, ax=axes, label="expert assignments over their mean")


def _with_one_rank(rows: list[Row]) -> list[Row]:
    """The rows, those of one rank once for every backend and wire dtype: nothing travels there."""
    keys = ("asked_backend", "wire", "eplb")
    kinds = {tuple(row[key] for key in keys) for row in rows if row["ep_size"] > 1}
    alone = [row for row in rows if row["ep_size"] == 1]
    repeated = [row | dict(zip(keys, kind, strict=True)) for row in alone for kind in sorted(kinds)]
    return [*(repeated or alone), *(row for row in rows if row["ep_size"] > 1)]


def _series(rows: list[Row], x: str, keys: tuple[str, ...]) -> Iterator[tuple[str, list[Row]]]:
    """Rows that differ in x alone, named by what tells them from the other series."""
    differing = [key for key in keys if len({row[key] for row in rows}) > 1]
    series: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        series.setdefault(tuple(row[key] for key in keys), []).append(row)
    for values, members in series.items():
        named = dict(zip(keys, values, strict=True))
        name = ", ".join(f"{_WORDS.get(key, '')}{named[key]}" for key in differing) or "all"
        yield name, sorted(members, key=lambda row: row[x])


_WORDS = {"asked_tokens": "T ", "ep_size": "EP ", "eplb": "EPLB "}


def _style(index: int) -> dict[str, Any]:
    return {
        "marker": _MARKS[index % len(_MARKS)],
        "linestyle": _LINES[index % len(_LINES)],
        "color": _GREYS[index // len(_LINES) % 3],
        "markersize": 4,
        "linewidth": 1.2,
    }


def _logarithmic(axes: Axes, x: str, y: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, which="major", color="0.92", linewidth=0.6)
    axes.figure.legend(fontsize=6, loc="outside right upper")

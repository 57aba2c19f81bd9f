"""Pictures of scaling results, from their JSON lines; readable in grey."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_ep.bench.scaling_tables import KIND, STAGES, kind_of, of_most_alike
from moe_ep.errors import missing_extra
from moe_ep.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]

_PHASES = ("decode", "prefill")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_LINES = ("-", "--", "-.", ":")
_SHADES = ("0.1", "0.45", "0.65")
_GREYS = ("0.15", "0.5", "0.75", "0.9")
_HATCHES = ("", "///", "...", "xxx")
_WORDS = {"tokens_per_rank": "T ", "ep_size": "EP ", "eplb": "EPLB ", "wire": "wire "}


def plot_scaling(rows: list[Row], folder: Path) -> list[Path]:
    """Writes a PNG of each kind for each geometry, and returns their paths.

    scaling (weak) and strong: tokens/s of all ranks against the EP size, with the ideal line. stages: microseconds of
    each stage, one bar a size and kind. latency: microseconds against tokens per rank. load: expert assignments of each
    rank over their mean. Decode and prefill have a panel each; scaling and latency show the kind of backend, wire
    dtype, routing and balancing that most rows have.

    Args:
        rows: as `read_scaling` has them.

    Raises:
        ImportError: matplotlib is missing.
    """
    written = []
    for geometry in sorted({row["geometry"] for row in rows}):
        mine = [row for row in rows if row["geometry"] == geometry]
        weak, strong = ([row for row in mine if row["scaling"] == scaling] for scaling in ("weak", "strong"))
        any_scaling = weak or strong
        pictures: dict[str, tuple[Callable[[Axes, list[Row]], None], list[Row]]] = {
            "scaling": (_scaling, of_most_alike(weak)),
            "strong": (_scaling, [row for row in of_most_alike(strong) if row["asked_tokens"] >= _largest(strong)]),
            "stages": (_stages, _at_one_size(any_scaling)),
            "latency": (_latency, of_most_alike(any_scaling)),
        }
        title = f"One MoE layer of {geometry}, {mine[0].get('gpu', '')}"
        for kind, (draw, shown) in pictures.items():
            if shown:
                written.append(_save(folder / f"{geometry}-{kind}.png", title, draw, shown))
        loads = [row for row in _at_one_size(any_scaling) if row["ep_size"] == _largest(any_scaling)]
        figure = _figure(f"{title}, EP {_largest(any_scaling)}")
        _load(figure.add_subplot(), loads)
        written.append(write_figure(figure, folder / f"{geometry}-load.png"))
    return written


def _save(path: Path, title: str, draw: Callable[[Axes, list[Row]], None], rows: list[Row]) -> Path:
    """One panel for each phase that there are rows of."""
    phases = [phase for phase in _PHASES if any(row["phase"] == phase for row in rows)]
    figure = _figure(title, len(phases))
    for index, phase in enumerate(phases, 1):
        axes = figure.add_subplot(1, len(phases), index)
        draw(axes, [row for row in rows if row["phase"] == phase])
        axes.set_title(phase, fontsize=9)
        axes.tick_params(labelsize=8)
    return write_figure(figure, path)


def _figure(title: str, panels: int = 1) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "bench", "a plot") from None
    figure = Figure(figsize=(5.0 + 4.2 * (panels - 1), 3.9), layout="constrained")
    figure.suptitle(title, fontsize=10)
    return figure


def write_figure(figure: Figure, path: Path) -> Path:
    """Writes a picture whole or not at all."""
    with replacing(path) as partial:
        figure.savefig(partial, format=path.suffix[1:], dpi=110)
    return path


def _scaling(axes: Axes, rows: list[Row]) -> None:
    sizes = sorted({row["ep_size"] for row in rows})
    for index, (name, series) in enumerate(_series(rows, "ep_size", ("asked_tokens",))):
        reached = [row["ep_size"] for row in series]
        rates = [row["tokens_per_s"] for row in series]
        axes.plot(reached, rates, label=name, **_style(index))
        ideal = [rates[0] / reached[0] * size for size in sizes]
        axes.plot(sizes, ideal, color="0.75", linewidth=0.8, zorder=0)
    axes.plot([], [], color="0.75", linewidth=0.8, label="ideal")
    whose = "of all ranks" if rows[0]["scaling"] == "strong" else "per rank"
    _logarithmic(axes, "EP size", "tokens/s, all ranks", sizes, f"tokens {whose}")


def _latency(axes: Axes, rows: list[Row]) -> None:
    for index, (name, series) in enumerate(_series(rows, "tokens_per_rank", ("ep_size",))):
        axes.plot(
            [row["tokens_per_rank"] for row in series], [row["us"] for row in series], label=name, **_style(index)
        )
    _logarithmic(
        axes, "tokens per rank", "microseconds, slowest rank", sorted({row["tokens_per_rank"] for row in rows})
    )


def _stages(axes: Axes, rows: list[Row]) -> None:
    start = [0.0] * len(rows)
    for stage, grey, hatch in zip(STAGES, _GREYS, _HATCHES, strict=True):
        widths = [row["stages_us"].get(stage, 0.0) for row in rows]
        axes.barh(range(len(rows)), widths, left=start, label=stage, color=grey, hatch=hatch, edgecolor="white", lw=0.4)
        start = [left + width for left, width in zip(start, widths, strict=True)]
    axes.barh(range(len(rows)), start, color="none", edgecolor="black", lw=0.6)
    _name_lines(axes, _labels(rows))
    axes.invert_yaxis()
    axes.set_xlabel(f"microseconds of each stage, {rows[0]['asked_tokens']} tokens", fontsize=8)
    if axes is axes.figure.axes[0]:
        axes.figure.legend(*axes.get_legend_handles_labels(), fontsize=7, loc="outside lower center", ncols=4)


def _load(axes: Axes, rows: list[Row]) -> None:
    """One line of the map a row, one column a rank; where rows differ in what changes no load, the first of them."""
    rows = list({(row["phase"], row["routing"], row["eplb"]): row for row in reversed(rows)}.values())[::-1]
    loads = [[load * len(row["rows_per_rank"]) / sum(row["rows_per_rank"]) for load in row["rows_per_rank"]]
             for row in rows]  # fmt: skip
    # Even loads are mid grey; darker is more.
    most = max(2.0, *(load for line in loads for load in line))
    image = axes.imshow(loads, cmap="Greys", vmin=0.0, vmax=most, aspect="auto")
    for line, shares in enumerate(loads):
        for rank, load in enumerate(shares):
            axes.text(rank, line, f"{load:.2f}", ha="center", va="center", fontsize=7,
                      color="white" if load > most / 1.6 else "black")  # fmt: skip
    names = [f"{row['phase']} {row['asked_tokens']}, {row['routing']}, EPLB {row['eplb']}" for row in rows]
    _name_lines(axes, names)
    axes.set_xticks(range(len(loads[0])), labels=[f"rank {rank}" for rank in range(len(loads[0]))], fontsize=8)
    bar = axes.figure.colorbar(image, ax=axes)
    bar.set_label("expert assignments over their mean", fontsize=8)


def _name_lines(axes: Axes, names: list[str]) -> None:
    """Names of a panel's lines, which all have room; those of a panel beside one with the same names stand there."""
    figure: Any = axes.figure
    panels = figure.axes
    shown = [tick.get_text() for tick in panels[0].get_yticklabels()] if axes is not panels[0] else []
    axes.set_yticks(range(len(names)), labels=[""] * len(names) if shown == names else names, fontsize=7)
    figure.set_figheight(max(figure.get_figheight(), 1.4 + 0.17 * len(names)))


def _at_one_size(rows: list[Row]) -> list[Row]:
    """Of each phase the rows with the number of tokens of which most kinds were measured, the largest of such."""
    chosen: list[Row] = []
    for phase in _PHASES:
        mine = [row for row in rows if row["phase"] == phase]
        kinds = {row["asked_tokens"]: set[tuple[Any, ...]]() for row in mine}
        for row in mine:
            kinds[row["asked_tokens"]].add((row["ep_size"], *kind_of(row)))
        if mine:
            tokens = max(kinds, key=lambda number: (len(kinds[number]), number))
            chosen += sorted((row for row in mine if row["asked_tokens"] == tokens), key=lambda row: row["ep_size"])
    return chosen


def _largest(rows: list[Row]) -> int:
    return max((row["ep_size"] for row in rows), default=0)


def _labels(rows: list[Row]) -> list[str]:
    """The keys that tell the rows apart; the backend among them if there are several at one size."""
    several = len({(row["ep_size"], row["asked_backend"]) for row in rows}) > len({row["ep_size"] for row in rows})
    keys = ("asked_backend" if several else "wire", *KIND[1:])
    differing = [key for key in dict.fromkeys(keys) if len({row[key] for row in rows}) > 1]
    return [", ".join(f"{_WORDS.get(key, '')}{row[key]}" for key in ("ep_size", *differing)) for row in rows]


def _series(rows: list[Row], x: str, keys: tuple[str, ...]) -> list[tuple[str, list[Row]]]:
    """Rows that differ in x alone, named by the keys."""
    series: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (*(row[key] for key in keys), row[x])):
        series.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [
        (", ".join(f"{_WORDS.get(key, '')}{value}" for key, value in zip(keys, values, strict=True)), members)
        for values, members in series.items()
    ]


def _style(index: int) -> dict[str, Any]:
    return {
        "marker": _MARKS[index % len(_MARKS)],
        "linestyle": _LINES[index % len(_LINES)],
        "color": _SHADES[index % len(_SHADES)],
        "markersize": 4.5,
        "linewidth": 1.2,
    }


def _logarithmic(axes: Axes, x: str, y: str, ticks: list[int], legend_title: str | None = None) -> None:
    from matplotlib.ticker import EngFormatter, LogLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, labels=list(map(str, ticks)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.minorticks_off()
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.grid(True, which="major", color="0.92", linewidth=0.6)
    axes.legend(
        title=legend_title, title_fontsize=7, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False
    )

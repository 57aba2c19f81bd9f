"""Draws when each kernel of one prefill layer ran, separate and overlapped, from a row of bench_overlap.py --timeline.

    python scripts/bench_overlap.py --sizes half-deepseek-v3 --tokens 4096 --timeline --json rows.jsonl
    python scripts/draw_timeline.py rows.jsonl docs/benchmarks/overlap_timeline.png

A bar is a kernel, by its part in the layer: it sends rows, computes experts, returns results, or only places them. The
number in it says how many blocks it has, at most one an SM.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_ep.bench.results import read_lines

# Parts by what kernels' names contain, from top to bottom.
PARTS = {
    "place": ("plan", "ids", "align"),
    "send": ("high_throughput_dispatch", "high_throughput_rows"),
    "compute": ("decode", "prefill", "eight_bit"),
    "sum and return": ("mul_sum", "high_throughput_combine"),
}
SHADES = ("0.75", "0.55", "0.25", "0.9")


def part_of(kernel: str) -> str | None:
    """Example: high_throughput_rows sends; a kernel of torch has no part."""
    return next((part for part, names in PARTS.items() if any(name in kernel for name in names)), None)


def draw(row: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    timeline: Mapping[str, Sequence[Mapping[str, Any]]] = row["timeline"]
    figure = Figure(figsize=(9, 4), layout="constrained")
    ranks = f"{row['ranks']} rank" + "s" * (row["ranks"] > 1)
    figure.suptitle(f"One layer of {row['layer']}, {row['tokens']} tokens a rank, {ranks}, {row.get('gpu', '')}")
    last = max(each["end"] for kernels in timeline.values() for each in kernels)
    names = list(PARTS)
    for axes, (mode, kernels) in zip(figure.subplots(len(timeline), 1, sharex=True), timeline.items(), strict=True):
        for each in kernels:
            part = part_of(each["kernel"])
            if part is None:
                continue
            place, width = names.index(part), each["end"] - each["begin"]
            axes.barh(
                place, width, left=each["begin"], height=0.7, color=SHADES[place], edgecolor="black", linewidth=0.5
            )
            if width > last / 20:
                color = "white" if part == "compute" else "black"
                axes.text(
                    each["begin"] + width / 2, place, each["blocks"], ha="center", va="center", fontsize=7, color=color
                )  # fmt: skip
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_title(mode, loc="left", fontsize=9)
    axes.set_xlabel("microseconds")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="JSON lines; the last one with a timeline is drawn")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    try:
        rows = [row for row in read_lines(options.rows) if "timeline" in row]
    except (OSError, ValueError) as error:
        parser.error(f"rows cannot be read: {error}")
    if not rows:
        parser.error(f"{options.rows} has no row with a timeline; bench_overlap.py --timeline writes them")
    draw(rows[-1], options.picture)


if __name__ == "__main__":
    main()

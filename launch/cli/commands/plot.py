"""moe-ep plot: draws the results of a scaling benchmark, and writes them as tables."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from moe_ep.launch.cli.options import Parser, add_command, from_args, input_file, new_folder, option, parsed, refusing
from moe_ep.launch.cli.outputs import show


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """The settings of `moe-ep plot`."""

    out: Path = option(Path(), new_folder, "folder for the files, made if it is missing", "DIR")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        subparsers, "plot", main, PlotConfig, "draw the results of `bench scaling`",
        "Draws scaling, stages, latency and load from the JSON lines of `moe-ep bench scaling`, and writes the rows as "
        "markdown tables.",
    )  # fmt: skip
    parser.add_argument("file", metavar="FILE", help="JSON lines that the benchmark wrote with --json")


def main(args: argparse.Namespace) -> int:
    config = from_args(PlotConfig, args)
    path = parsed("FILE", args.file, lambda raw: input_file(raw, "it must be a file that a benchmark wrote"))
    from moe_ep.bench.plots import plot_scaling
    from moe_ep.bench.scaling_tables import as_markdown, read_scaling
    from moe_ep.files import write_text

    with refusing(f"FILE is {args.file!r}; "):
        rows, told = read_scaling(path)
    if told:
        print(told, file=sys.stderr)
    config.out.mkdir(exist_ok=True)
    written = plot_scaling(rows, config.out)
    tables = config.out / "tables.md"
    write_text(tables, as_markdown(rows))
    show("\n".join(map(str, [*written, tables])))
    return 0

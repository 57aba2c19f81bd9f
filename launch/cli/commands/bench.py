"""moe-ep bench scaling: measures how a MoE layer scales over ranks on these machines, and what bounds it."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

from moe_ep.bench.results import append_line, read_lines
from moe_ep.bench.scaling_tables import as_text
from moe_ep.launch.cli.gang_options import start_gang
from moe_ep.launch.cli.options import Parser, add_command, from_args, refusing
from moe_ep.launch.cli.outputs import show
from moe_ep.launch.cli.scaling_config import ScalingConfig
from moe_ep.launch.gangs.gang import ignore, set_up_logging
from moe_ep.launch.gangs.rank_env import RankEnv


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("bench", help="benchmark expert parallelism on these GPUs")
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK", parser_class=Parser)
    add_command(
        benchmarks, "scaling", main, ScalingConfig, "measure how a MoE layer scales over ranks",
        "Times MoE layers of well-known models at several EP sizes, for decode and prefill, stage by stage, next to "
        "the least time that this machine's measured memory, compute and link rates allow.",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    started = time.time()
    config = from_args(ScalingConfig, args)
    set_up_logging()
    config.check()
    before: list[dict[str, Any]] = []
    if config.resume and config.json is not None and config.json.exists():
        with refusing("--resume cannot go on from --json: "):
            before = read_lines(config.json)
    config, gang = start_gang(config)
    config = replace(config, ep_sizes=config.sizes_for(gang.world_size))
    on_item = ignore if config.json is None else partial(append_line, config.json)
    try:
        with gang:
            results = gang.run(work, config, args.shown, started, before, on_item=on_item)
    except BaseException:
        if config.json is not None and gang.is_driver and config.json.is_file() and config.json.stat().st_size:
            print(f"{config.json} has the rows so far; --resume measures the rest", file=sys.stderr)
        raise
    if gang.is_driver:
        show(as_text(next(rows for rows in results if rows is not None)))
    return 0


def work(
    rank_env: RankEnv, config: ScalingConfig, command: str, started: float, before: list[dict[str, Any]]
) -> list[dict[str, Any]] | None:
    """The worker's part. It imports what it needs, so that the driver starts without torch."""
    from moe_ep.launch.workers.scaling_worker import run_scaling

    return run_scaling(rank_env, config, command, started, before)

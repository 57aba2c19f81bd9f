"""moe-ep run: shards the MoE layers of a checkpoint over a gang of workers, runs, measures and verifies them."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from moe_ep.launch.cli.gang_options import start_gang
from moe_ep.launch.cli.options import Parser, add_command, from_args
from moe_ep.launch.cli.report import RankReport, RunReport
from moe_ep.launch.cli.run_config import RunConfig
from moe_ep.launch.gangs.gang import set_up_logging
from moe_ep.launch.gangs.local_gang import preload
from moe_ep.launch.gangs.rank_env import RankEnv


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    add_command(
        subparsers, "run", main, RunConfig, "run, time and verify a checkpoint's MoE layers over workers",
        "Shards the experts of a checkpoint over a gang of workers, drives batches of tokens through every MoE layer, "
        "and prints placement, load, times and the error against a plain reference.",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    config = from_args(RunConfig, args)
    set_up_logging()
    config.check()
    preload("moe_ep.launch.workers.worker")
    config, gang = start_gang(config)
    report = RunReport(config, args.shown)
    try:
        with gang:
            results, report.recoveries = config.run_in(gang, work, on_item=report.take)
    except BaseException:
        if report.num_steps:
            report.tell()
            print(f"ended after {report.num_steps} measured steps; the report covers these", file=sys.stderr)
        raise
    if not gang.is_driver:
        return 0
    report.complete(results)
    with contextlib.ExitStack() as files:  # each is written even if another fails
        if config.save_placement is not None and results[0].placement is not None:
            files.callback(results[0].placement.save, config.save_placement)
        if config.record_routing is not None:
            from moe_ep.launch.workers.inputs import save_routing

            files.callback(save_routing, config.record_routing, results)
        report.tell()
    if config.verify and not report.verified:
        print(f"moe-ep run: {report.verification_line()}", file=sys.stderr)
        return 1
    return 0


def work(rank_env: RankEnv, config: RunConfig, membership: Any = None) -> RankReport:
    """The worker's part. It imports what it needs, so that the driver starts without torch."""
    from moe_ep.launch.workers.worker import run_worker

    return run_worker(rank_env, config, membership=membership)

"""moe-ep run: shards the MoE layers of a checkpoint over a gang of workers, runs, measures and verifies them."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from typing import Any

from moe_ep.errors import missing_extra
from moe_ep.launch.cli.gang_options import start_gang
from moe_ep.launch.cli.options import OptionError, Parser, add_command, check_apart, check_backends, from_args
from moe_ep.launch.cli.report import RankReport, RunReport
from moe_ep.launch.cli.run_config import RunConfig
from moe_ep.launch.gangs.gang import set_up_logging
from moe_ep.launch.gangs.local_gang import preload
from moe_ep.launch.gangs.rank_env import RankEnv

# A step on CPUs makes megabytes of trace, and several times as much memory while it is written.
_MOST_TRACED_STEPS = 128


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    add_command(
        subparsers, "run", main, RunConfig, "run, time and verify a checkpoint's MoE layers over workers",
        "Shards the experts of a checkpoint over a gang of workers, drives batches of tokens through every MoE layer, "
        "and prints placement, load, times and the error against a plain reference.",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    config = from_args(RunConfig, args)
    set_up_logging()
    _check_together(config)
    config.check_eplb()
    config.check_elastic()
    preload("moe_ep.launch.workers.worker")
    config, gang = start_gang(config, lambda world_size, device: _check_fits(config, world_size, device))
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


def _check_fits(config: RunConfig, world_size: int | None, device: str | None) -> None:
    """Raises OptionError for options that such a gang cannot serve."""
    if config.graphs and device == "cpu":
        raise OptionError("--graphs was given and the workers run on CPUs; CUDA graphs need GPUs, leave it out")
    check_backends([config.backend], world_size, device)
    if world_size is None:
        return
    if len(config.tokens_per_rank) not in (1, world_size):
        raise OptionError(
            f"--tokens-per-rank has {len(config.tokens_per_rank)} numbers; it must be one number, or one for each "
            f"of the {world_size} workers"
        )
    if config.metrics_port is not None and config.metrics_port + world_size > 65536:
        raise OptionError(
            f"--metrics-port is {config.metrics_port}; with a port for each of {world_size} workers it must be at "
            f"most {65536 - world_size}"
        )


def _check_together(config: RunConfig) -> None:
    """Raises OptionError for options that contradict each other."""
    if config.graphs and config.trace is not None:
        raise OptionError(
            "--trace shows what the host does between layers, and with --graphs it does nothing; leave one out"
        )
    if config.trace is not None and config.steps > _MOST_TRACED_STEPS:
        raise OptionError(
            f"--steps is {config.steps} with --trace, which keeps every operation of every step in memory; pass at "
            f"most {_MOST_TRACED_STEPS}, or leave --trace out"
        )
    if config.text is not None and config.model is not None and not (config.model / "tokenizer.json").is_file():
        raise OptionError(f"--text needs a tokenizer and {config.model} has no tokenizer.json; leave --text out")
    if config.metrics_port is None and config.metrics_host != RunConfig.metrics_host:
        raise OptionError(
            f"--metrics-host is {config.metrics_host!r} without --metrics-port, and no metrics are served; add "
            f"--metrics-port or leave it out"
        )
    if config.metrics_port is not None and importlib.util.find_spec("prometheus_client") is None:
        raise missing_extra("prometheus-client", "metrics", "a metrics endpoint")
    config.check_quantize()
    results = {"--json": config.json, "--record-routing": config.record_routing}
    recorded = (config.routing or "").removeprefix("recorded:")
    check_apart(results | {"--save-placement": config.save_placement}, {"--text": config.text, "--routing": recorded})
    check_apart(results, {"--load-placement": config.load_placement})  # --save-placement may replace it

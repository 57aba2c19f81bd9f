"""moe-ep bench scaling: measures how a MoE layer scales over ranks on these machines, and what bounds it."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from moe_ep.bench.results import append_line, read_lines
from moe_ep.bench.scaling_tables import as_text
from moe_ep.launch.cli.gang_options import start_gang
from moe_ep.launch.cli.options import (
    OptionError,
    Parser,
    add_command,
    check_apart,
    check_backends,
    flag,
    from_args,
    refusing,
)
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
    _check_together(config)
    before: list[dict[str, Any]] = []
    if config.resume and config.json is not None and config.json.exists():
        with refusing("--resume cannot go on from --json: "):
            before = read_lines(config.json)
    config, gang = start_gang(config, lambda world_size, device: _check_fits(config, world_size, device))
    config = replace(config, ep_sizes=_ep_sizes(config, gang.world_size))
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


_LISTS = (
    "geometry", "ep_sizes", "scaling", "decode_tokens", "prefill_tokens", "backend", "wire", "routing", "eplb",
    "variant_tokens",
)  # fmt: skip


def _check_together(config: ScalingConfig) -> None:
    """Raises OptionError for options that contradict each other."""
    if config.geometry and config.model is not None:
        raise OptionError(f"--model is {config.model} and --geometry {','.join(config.geometry)}; pass one of them")
    if not config.decode_tokens and not config.prefill_tokens:
        raise OptionError("--decode-tokens and --prefill-tokens are none; pass numbers for one of them")
    for recorded in config.routing:
        check_apart({"--json": config.json}, {"--routing": recorded})
    if config.resume and config.json is None:
        raise OptionError("--resume was given without --json; give the FILE that has the rows of the run before")
    unknown = set(config.variant_tokens) - {*config.decode_tokens, *config.prefill_tokens}
    if unknown:
        raise OptionError(
            f"--variant-tokens has {min(unknown)}, which is neither in --decode-tokens nor in --prefill-tokens; pass "
            f"tokens that are measured"
        )
    for name in _LISTS:
        # A row names a file without its folder.
        values = [Path(value).name if name == "routing" else str(value) for value in getattr(config, name)]
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise OptionError(f"{flag(name)} has {twice} twice; rows would not be told apart")


def _check_fits(config: ScalingConfig, world_size: int | None, device: str | None) -> None:
    """Raises OptionError for options that such a gang cannot serve."""
    sizes = (1,) if world_size is None else _ep_sizes(config, world_size)
    check_backends(config.backend, max(sizes), device)


def _ep_sizes(config: ScalingConfig, world_size: int) -> tuple[int, ...]:
    sizes = config.ep_sizes or divisors(world_size)
    if unfit := [size for size in sizes if world_size % size]:
        raise OptionError(
            f"--ep-sizes has {unfit[0]} and there are {world_size} workers; a size must divide them, so that groups of "
            f"it run side by side: pass such sizes, or other --ep-size workers"
        )
    if "strong" in config.scaling:
        for tokens, size in itertools.product((*config.decode_tokens, *config.prefill_tokens), sizes):
            if tokens % size and tokens >= size:
                raise OptionError(
                    f"--scaling is strong and {tokens} tokens do not divide over {size} ranks; pass multiples"
                )
    return tuple(sorted(sizes))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending; fast even for huge numbers, which are refused later."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))

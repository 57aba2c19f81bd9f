"""moe-ep bench scaling: how a MoE layer scales over ranks on these machines, and what bounds it."""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from typing import Any

from moe_ep.launch.gang import set_up_logging
from moe_ep.launch.gang_choice import start_gang
from moe_ep.launch.options import OptionError, Parser, add_flags, from_args
from moe_ep.launch.rank_env import RankEnv
from moe_ep.launch.scaling_config import ScalingConfig, unfinished


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("bench", help="benchmarks that run on a gang of workers")
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK", parser_class=Parser)
    scaling = benchmarks.add_parser(
        "scaling",
        help="how a MoE layer scales over ranks",
        description=(
            "Times MoE layers of known models at several EP sizes, in decode and prefill, by stage, beside the floors "
            "that this machine's own ceilings give, and says how each scales."
        ),
    )
    add_flags(scaling, ScalingConfig)
    scaling.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    config = from_args(ScalingConfig, args)
    set_up_logging()
    if config.geometry and config.model is not None:
        raise OptionError(f"--model is {config.model} and --geometry {','.join(config.geometry)}; pass one of them")
    if not config.decode_tokens and not config.prefill_tokens:
        raise OptionError("--decode-tokens and --prefill-tokens are none; pass numbers for one of them")
    config, gang = start_gang(config)
    try:
        config = replace(config, ep_sizes=_ep_sizes(config, gang.world_size))
        results = gang.run(_work, config, args.shown)
    except BaseException:
        if config.json is not None and unfinished(config.json).exists():
            print(f"the rows until then are in {unfinished(config.json)}", file=sys.stderr)
        raise
    finally:
        gang.close()
    if gang.is_driver:
        _tell(config, next(rows for rows in results if rows is not None))
    return 0


def _work(rank_env: RankEnv, config: ScalingConfig, command: str) -> list[dict[str, Any]] | None:
    """The worker's part; what it needs is imported there, so that the driver starts without torch."""
    from moe_ep.launch.scaling_worker import run_scaling

    return run_scaling(rank_env, config, command)


def _ep_sizes(config: ScalingConfig, world_size: int) -> tuple[int, ...]:
    sizes = config.ep_sizes or tuple(1 << i for i in range(world_size.bit_length()) if world_size % (1 << i) == 0)
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


def _tell(config: ScalingConfig, rows: list[dict[str, Any]]) -> None:
    from moe_ep.bench.results import append_line
    from moe_ep.bench.scaling_tables import as_text

    if config.json is not None:
        for row in rows:
            append_line(config.json, row)
        unfinished(config.json).unlink(missing_ok=True)
    print(as_text(rows))
    sys.stdout.flush()

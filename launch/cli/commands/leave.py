"""moe-ep leave: takes a worker out of an elastic gang."""

from __future__ import annotations

import argparse

from moe_ep.launch.cli.gang_options import ControlConfig
from moe_ep.launch.cli.options import Parser, add_command, at_least, from_args, parsed
from moe_ep.launch.gangs import control


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        subparsers, "leave", main, ControlConfig, "take a worker out of a gang that runs with --elastic",
        "Tells the gang at --address to go on without one worker. The other workers first read its experts, while they "
        "go on with their steps, and then continue its prompts. The command returns when the worker has left.",
    )  # fmt: skip
    parser.add_argument("rank", metavar="RANK", help="the worker's rank")


def main(args: argparse.Namespace) -> int:
    config = from_args(ControlConfig, args)
    rank = parsed("RANK", args.rank, at_least(0))
    print(control.ask(config.checked_address(), config.token, "leave", rank))
    return 0

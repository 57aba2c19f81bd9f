"""moe-ep join and moe-ep leave: add a worker to an elastic gang, and take one out."""

from __future__ import annotations

import argparse

from moe_ep.env import at_least
from moe_ep.launch.cli.gang_options import ControlConfig
from moe_ep.launch.cli.options import OptionError, Parser, add_command, from_args, parsed
from moe_ep.launch.gangs import control


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    add_command(
        subparsers, "join", main, ControlConfig, "add a worker to a gang that runs with --elastic",
        "Tells the gang at --address to start one more worker, up to its --max-ranks. The command returns when the "
        "worker takes part.",
    )  # fmt: skip
    leave = add_command(
        subparsers, "leave", main, ControlConfig, "take a worker out of a gang that runs with --elastic",
        "Tells the gang at --address to go on without one worker. The other workers first read its experts, while they "
        "go on with their steps, and then continue its prompts. The command returns when the worker has left.",
    )  # fmt: skip
    leave.add_argument("rank", metavar="RANK", help="the worker's rank")


def main(args: argparse.Namespace) -> int:
    config = from_args(ControlConfig, args)
    rank = parsed("RANK", args.rank, at_least(0)) if args.command == "leave" else -1
    if config.address is None:
        raise OptionError("--address is missing; give the HOST:PORT of the gang's line `control:`")
    print(control.ask(config.address, config.token, args.command, rank))
    return 0

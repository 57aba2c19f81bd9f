"""moe-ep join: a worker more for a gang that runs."""

from __future__ import annotations

import argparse

from moe_ep.launch.cli.gang_options import ControlConfig
from moe_ep.launch.cli.options import Parser, add_flags, from_args
from moe_ep.launch.gangs import control


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser(
        "join",
        help="add a worker to a gang that runs with --elastic",
        description=(
            "Has the gang at --address, whose line `control:` names it, start a worker more, up to its --max-ranks. "
            "Returns when the worker takes part."
        ),
    )
    add_flags(parser, ControlConfig)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    config = from_args(ControlConfig, args)
    print(control.ask(config.checked_address(), config.token, "join"))
    return 0

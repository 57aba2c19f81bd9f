"""moe-ep leave: a worker less for a gang that runs."""

from __future__ import annotations

import argparse

from moe_ep.launch.cli.gang_options import ControlConfig
from moe_ep.launch.cli.options import OptionError, Parser, add_flags, at_least, from_args
from moe_ep.launch.gangs import control


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser(
        "leave",
        help="take a worker out of a gang that runs with --elastic",
        description=(
            "Has the gang at --address, whose line `control:` names it, go on without a worker: the others read its "
            "experts first, beside the steps, and continue its prompts. Returns when it is out."
        ),
    )
    parser.add_argument("rank", metavar="RANK", help="the worker's rank")
    add_flags(parser, ControlConfig)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    config = from_args(ControlConfig, args)
    try:
        rank = at_least(0)(args.rank)
    except ValueError as error:
        raise OptionError(f"RANK is {args.rank!r}; {error}") from None
    print(control.ask(config.checked_address(), config.token, "leave", rank))
    return 0

"""moe-ep join: adds a worker to an elastic gang."""

from __future__ import annotations

import argparse

from moe_ep.launch.cli.gang_options import ControlConfig
from moe_ep.launch.cli.options import Parser, add_command, from_args
from moe_ep.launch.gangs import control


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    add_command(
        subparsers, "join", main, ControlConfig, "add a worker to a gang that runs with --elastic",
        "Tells the gang at --address to start one more worker, up to its --max-ranks. The command returns when the "
        "worker takes part.",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    config = from_args(ControlConfig, args)
    print(control.ask(config.checked_address(), config.token, "join"))
    return 0

"""The command line, `moe-ep COMMAND`.

Exit codes: 0 done, 1 failed (one message says why), 2 a wrong option or options that contradict each other, 130
ctrl-C, 141 the reader of the output has ended, 129 the terminal was closed, 143 SIGTERM.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import select
import shlex
import signal
import sys
from collections.abc import Sequence

from moe_ep import __version__, env
from moe_ep.errors import ConfigError, MoeEpError
from moe_ep.launch.cli.options import OptionError, Parser, refusing
from moe_ep.launch.cli.outputs import show
from moe_ep.launch.gangs import interrupts

# Modules of launch/cli/commands, in the order of --help.
_COMMANDS = (
    "run", "generate", "members", "convert", "bench", "plot", "plan", "eplb", "tune", "doctor", "completion",
)  # fmt: skip
_DESCRIPTION = "Expert parallelism for mixture-of-experts models: run, generate, measure and balance over many GPUs."


def make_parser() -> Parser:
    """All commands and their flags."""
    parser = Parser(prog="moe-ep", description=_DESCRIPTION, epilog="moe-ep COMMAND --help explains a command.")
    parser.add_argument("--version", action="version", version=f"moe-ep {__version__}")
    subparsers = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )
    for command in _COMMANDS:
        importlib.import_module(f"moe_ep.launch.cli.commands.{command}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    _prepare_outputs()
    parser = make_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(argv)
    args.parser = parser
    args.shown = shlex.join(["moe-ep", *(sys.argv[1:] if argv is None else argv)])
    with interrupts.raised_as_interrupt():
        try:
            _check_environment()
            code = args.main(args)
            show(end="")  # flush what is buffered
            return code
        except KeyboardInterrupt:
            number = interrupts.received() or signal.SIGINT
            error, code = "interrupted" if number == signal.SIGINT else "terminated", 128 + number
        except (OptionError, ConfigError) as refusal:
            error, code = str(refusal), 2
        except (MoeEpError, ImportError, OSError) as failure:
            if isinstance(failure, BrokenPipeError) and _has_lost_its_reader(sys.stdout.fileno()):
                # As with `| head`. What is still buffered must not fail again at exit.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 128 + signal.SIGPIPE
            error, code = str(failure), 1
        except MemoryError as failure:
            error, code = f"this machine's memory does not suffice, ask for less at a time: {failure}".rstrip(": "), 1
    with contextlib.suppress(OSError):  # of a terminal that is gone
        print(f"{args.prog}: {error}", file=sys.stderr)
    return code


def _prepare_outputs() -> None:
    """Opens /dev/null as stdout or stderr of a process that was started without them (`>&-`), and has characters that
    an output's encoding lacks written as escapes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _has_lost_its_reader(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))


def _check_environment() -> None:
    """Raises OptionError for a wrong environment variable, or if the current folder is gone."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise OptionError("the folder that it was started in is gone; start it in another") from None
    with refusing("environment: "):
        for variable in env.ALL:
            variable.get()

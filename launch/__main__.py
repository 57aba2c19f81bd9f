"""The program: moe-ep COMMAND, and the same as python -m moe_ep.launch COMMAND."""

import signal
import sys


def main() -> int:
    """Runs the command line; ctrl-C ends the process without a word until a command hears it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from moe_ep.launch.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(main())

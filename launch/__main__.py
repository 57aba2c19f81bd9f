"""The program: moe-ep COMMAND, and the same as python -m moe_ep COMMAND and python -m moe_ep.launch COMMAND."""

import atexit
import contextlib
import os
import signal
import sys


def main() -> int:
    """Runs the command line; ctrl-C ends the process silently until a command handles it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from moe_ep.launch.cli.main import main

    code = main()
    if code > 128:
        # Ended by a signal: taking an interpreter with torch in it down would take another second.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""python -m moe_ep.launch COMMAND, the same as moe-ep COMMAND."""

import sys

from moe_ep.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())

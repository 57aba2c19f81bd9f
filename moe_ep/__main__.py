"""python -m moe_ep COMMAND is moe-ep COMMAND."""

import runpy

if __name__ == "__main__":
    # Run by name, since the core does not import the launchers.
    runpy.run_module("moe_ep.launch", run_name="__main__", alter_sys=True)

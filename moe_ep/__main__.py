"""python -m moe_ep COMMAND is moe-ep COMMAND."""

import runpy

if __name__ == "__main__":
    # By name: the core does not import what is built on it.
    runpy.run_module("moe_ep.launch", run_name="__main__", alter_sys=True)

"""How a MoE layer scales over ranks: `moe-ep bench scaling` from a checkout, with the same options.

python scripts/bench_ep_scaling.py --geometry deepseek-v3 --json results.jsonl
torchrun --nproc-per-node 8 scripts/bench_ep_scaling.py --geometry deepseek-v3 --json results.jsonl
"""

from __future__ import annotations

import sys

from moe_ep.launch.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "scaling", *sys.argv[1:]]))

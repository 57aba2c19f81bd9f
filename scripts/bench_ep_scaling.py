"""How a MoE layer scales over ranks: `moe-ep bench scaling` from a checkout, with the same options and peers beside it.

python scripts/bench_ep_scaling.py --geometry deepseek-v3 --json results.jsonl
torchrun --nproc-per-node 8 scripts/bench_ep_scaling.py --geometry deepseek-v3 --json results.jsonl
python scripts/bench_ep_scaling.py --launcher local --geometry deepseek-v3 --peers megamoe

--peers megamoe: DeepGEMM's fused layer on all workers, at the same tokens and routing, in a gang of its own afterwards.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from moe_ep.launch.cli.gang_options import start_gang
from moe_ep.launch.cli.main import main
from moe_ep.launch.cli.options import Parser, add_flags, from_args
from moe_ep.launch.cli.scaling_config import ScalingConfig
from moe_ep.launch.gangs.rank_env import RankEnv


def run(argv: Sequence[str]) -> int:
    """Exit code of the benchmark; peers that cannot be timed are a sentence each."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--peers", choices=["megamoe"])
    options, rest = parser.parse_known_args(argv)
    code = main(["bench", "scaling", *rest])
    if options.peers is None or code:
        return code
    flags = Parser(prog="bench_ep_scaling.py")
    add_flags(flags, ScalingConfig)
    config, gang = start_gang(from_args(ScalingConfig, flags.parse_args(rest)))
    try:
        lines = gang.run(_measure_peer, config)
    finally:
        gang.close()
    if gang.is_driver:
        print("\n".join(lines[0]))
    return 0


def _measure_peer(rank_env: RankEnv, config: ScalingConfig) -> list[str]:
    from megamoe_peer import measure

    return measure(rank_env, config)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

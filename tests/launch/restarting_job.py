"""A job that torchrun restarts: rank 1 dies in its first attempt, and the second must not meet what that one left."""

from __future__ import annotations

import sys
from pathlib import Path

from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.launch.gangs.torchrun_gang import TorchrunGang


def work(rank_env: RankEnv, mark: str) -> int:
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    if rank_env.rank == 1 and not Path(mark).exists():
        Path(mark).touch()
        raise ValueError("the first attempt fails")
    dist.all_reduce(total)
    return int(total)


if __name__ == "__main__":
    gang = TorchrunGang()
    results = gang.run(work, sys.argv[1])
    if gang.is_driver:
        print(f"results {results}")

"""The steps of `moe-ep run` as replays of a CUDA graph: the same tokens go to the same experts as in eager ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_ep.checkpoint.demo import make_demo_checkpoint
from moe_ep.launch.cli.report import RankReport, StepReport
from moe_ep.launch.cli.run_config import RunConfig
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.launch.workers.worker import run_worker
from tests.ranks import ranks

WORLD_SIZES = [
    pytest.param(1, marks=pytest.mark.gpu),
    pytest.param(max(2, min(4, torch.cuda.device_count())), marks=pytest.mark.gpu2),
]
STEPS, TOKENS = 3, 16


def ran(rank: int, world_size: int, folder: str, graphs: bool | None) -> tuple[RankReport, list[StepReport]]:
    place = RankEnv(
        rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, device=f"cuda:{rank}"
    )
    # The name makes the report keep what tokens chose; the command would write it there.
    settings = RunConfig(
        model=Path(folder),
        tokens_per_rank=(TOKENS,),
        steps=STEPS,
        graphs=graphs,
        verify=False,
        record_routing=Path(folder) / "routing.npz",
    )
    steps: list[StepReport] = []
    return run_worker(place, settings, steps.append), steps


def choices(report: RankReport) -> torch.Tensor:
    """int16 `[steps, layers, T, top_k]`, each token's in order of their ids."""
    ids = torch.stack([torch.from_numpy(found) for found, _ in report.choices.values()])
    return ids.transpose(1, 2).sort(dim=-1).values


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_replayed_steps_are_eager_ones(world_size: int, tmp_path: Path) -> None:
    folder = str(make_demo_checkpoint(tmp_path / "demo", progress=False))
    pool = ranks(world_size, "nccl")
    eager, replayed = (pool.run(ran, folder, graphs) for graphs in (False, None))
    for (plain, _), (graphed, steps) in zip(eager, replayed, strict=True):
        assert (plain.graphs, graphed.graphs) == (False, True), graphed.why_eager
        expected, found = choices(plain), choices(graphed)
        # The first layer's tokens are the input itself; what later layers choose depends on what those before put out.
        assert torch.equal(found[:, 0], expected[:, 0]) and not torch.equal(found[0], found[1])
        assert (found != expected).float().mean() <= 0.02
        layers = [layer for step in steps for layer in step.stage_ms[graphed.rank]]
        assert all(layer[stage] > 0 for layer in layers for stage in ("dispatch", "experts", "combine")), layers

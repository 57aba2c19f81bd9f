"""A transformers model over ranks that die at chosen moments: while they load, in a pass, while others recover, and two
at once while EPLB moves experts."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

import moe_ep
from moe_ep.distributed.membership import Membership
from moe_ep.eplb.config import EplbConfig
from moe_ep.generation.engine import Completion, Generation, Request
from moe_ep.hf.parallelized import steps_of
from moe_ep.launch.gangs.local_gang import LocalGang, preload
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.layer.elastic import ElasticConfig
from tests.hf.hf_models import SIZES, make_model
from tests.launch.jobs import all_vanish, shared_files, workers_of

# Seven ranks would import it by themselves otherwise, for seconds each.
preload("transformers.models.qwen3_moe.modeling_qwen3_moe")
preload("moe_ep.hf.parallelize")
NUM_PASSES = 14
# Four slots for six experts.
ELASTIC = ElasticConfig(min_ranks=2, spare_slots=3)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def tokens_of(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randint(1, SIZES["vocab_size"], (1, 5), generator=generator)


def pass_until_killed(rank_env: RankEnv, folder: str, membership: Membership) -> dict[str, Any]:
    """Each rank's passes, and the end of all ranks but the last, each in a way of its own."""
    rank = membership.rank
    alone = make_model("Qwen3Moe", num_experts=6).eval()
    model = moe_ep.parallelize(
        folder,
        dtype=torch.float32,
        device="cpu",
        membership=membership,
        elastic=ELASTIC,
        eplb=EplbConfig(first_plan=2, interval=4, rebalance_below=1.0, planner="thread"),
        on_layer=lambda done, total: die() if rank == 5 and done == 1 else None,
    )
    steps = steps_of(model)
    num_passes = num_moving = 0

    def in_a_pass(*_: Any) -> None:
        if rank == 4 and num_passes == 2:
            die()

    steps.layers[1].register_forward_pre_hook(in_a_pass)
    membership.follow(lambda _: die() if rank == 3 and 4 in membership.epoch.removed else None)
    worst = 0.0

    def work() -> None:
        nonlocal num_passes, num_moving, worst
        with moe_ep.serving(model), torch.inference_mode():
            while num_passes < NUM_PASSES:
                membership.check()
                num_moving += num_passes > 4 and steps.eplb is not None and steps.eplb.busy
                if rank in (0, 2) and num_moving == 2:
                    die()
                tokens = tokens_of(rank, num_passes)
                found, expected = (one(tokens, use_cache=False).logits for one in (model, alone))
                worst = max(worst, float((found - expected).abs().max()))
                num_passes += 1

    membership.serve(work)
    return {"rank": rank, "worst": worst, "num_passes": num_passes, "ranks": list(membership.ranks)}


def test_ranks_die_at_chosen_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_EP_DISPATCH_TIMEOUT_S", "60")
    shared, others = shared_files(), workers_of(os.getpid())
    make_model("Qwen3Moe", num_experts=6).save_pretrained(tmp_path / "model")
    results, recoveries = LocalGang(7).run_elastic(pass_until_killed, str(tmp_path / "model"), config=ELASTIC)
    for found, rank in zip(results, (1, 6), strict=True):
        assert (found["rank"], found["ranks"], found["num_passes"]) == (rank, [1, 6], NUM_PASSES)
        assert found["worst"] < 1e-4
    lost = [loss["rank"] for loss in recoveries]
    assert sorted(lost) == [0, 2, 3, 4, 5] and lost[0] == 5 and lost.index(4) < lost.index(3)
    assert all(loss["serving_s"] >= loss["detected_s"] for loss in recoveries)
    assert all_vanish(shared_files() - shared)
    assert workers_of(os.getpid()) == others


def generated(model: Any, **options: Any) -> list[Completion]:
    requests = [Request(index, tokens_of(0, index)[0]) for index in range(4)]
    return Generation(model, requests, max_new_tokens=12, num_slots=2, stop_ids=[], **options).run()


def generate_twice(rank_env: RankEnv, folder: str, membership: Membership) -> dict[str, Any]:
    """Rank 0 ends between the generations, and rank 2, which joins in its place, in the second one."""
    rank, num_steps = membership.rank, 0

    def step(_: object) -> None:
        nonlocal num_steps
        num_steps += 1
        if rank == 2 and num_steps == 3:
            die()

    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "membership": membership}
    model = moe_ep.parallelize(folder, **options, elastic=ElasticConfig())
    if rank in membership.first_ranks:
        generated(model, membership=membership)
        if rank == 0:
            die()
        while membership.log.latest().ranks != (1, 2):
            time.sleep(0.02)
    done = generated(model, membership=membership, on_progress=step)
    return {"tokens": {each.index: each.token_ids for each in done}, "ranks": membership.ranks}


def test_a_second_generation_loses_a_rank_that_joined_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_EP_DISPATCH_TIMEOUT_S", "60")
    model = make_model("Qwen3Moe", num_experts=6)
    model.save_pretrained(tmp_path / "model")
    expected = {each.index: each.token_ids for each in generated(moe_ep.parallelize(model))}
    gang = LocalGang(2, source="torchrun")  # which replaces lost ranks
    results, recoveries = gang.run_elastic(generate_twice, str(tmp_path / "model"), config=ElasticConfig())
    found: dict[int, list[int]] = {}
    for result in results:
        found |= result["tokens"]
    assert found == expected
    assert [loss["rank"] for loss in recoveries] == [0, 2]

"""Prefill whose experts run while rows arrive: the values of separate kernels, for ranks of one GPU and of several."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from moe_ep.errors import DispatchTimeoutError
from tests.gpu.ranks_of_one_gpu import on_one_gpu
from tests.ranks import ranks

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import bench_overlap
from bench_overlap import SIZES, RankLayer, check_values, difference, draw, share_of_one_gpu

os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")


def layers_of_one_gpu(num_ranks: int, most: int) -> list[RankLayer]:
    sms = share_of_one_gpu(num_ranks)
    return [RankLayer(SIZES["small"], rank, num_ranks, most, sms) for rank in range(num_ranks)]


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("most", [1, 40, 3000])
def test_values_of_separate_kernels(monkeypatch: pytest.MonkeyPatch, num_ranks: int, most: int) -> None:
    on_one_gpu(monkeypatch, num_ranks)
    checks = check_values(layers_of_one_gpu(num_ranks, most), 0, num_ranks, most)
    assert all(check["is_right"] for check in checks), checks


@pytest.mark.gpu
def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_EP_NVSHMEM_TIMEOUT_S", "0.5")
    on_one_gpu(monkeypatch, 2)
    layers = layers_of_one_gpu(2, 64)
    layers[0].run("overlapped", *draw(SIZES["small"], 64, 2, "uniform", 0))
    torch.cuda.synchronize()
    with pytest.raises(DispatchTimeoutError) as raised:
        layers[0].check()
    assert raised.value.ranks == (1,)


@pytest.mark.gpu2
def test_values_over_two_gpus() -> None:
    assert ranks(2, "nccl").run(check_over_gpus, limit_s=120) == [[], []]


def check_over_gpus(rank: int, world_size: int) -> list[object]:
    layer = RankLayer(SIZES["small"], rank, world_size, 1024)
    return [check for check in check_values([layer], rank, world_size, 1024) if not check["is_right"]]


@pytest.mark.gpu2
def test_replays_of_a_graph_follow_their_inputs() -> None:
    assert all(worst < bench_overlap.TOLERANCE for worst in ranks(2, "nccl").run(check_replays, limit_s=120))


def check_replays(rank: int, world_size: int) -> float:
    size, worst = SIZES["small"], 0.0
    layer = RankLayer(size, rank, world_size, 512)
    batch = draw(size, 512, world_size, "uniform", rank)
    for _ in range(2):
        layer.run("overlapped", *batch)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer.run("overlapped", *batch)
    for number, routing in enumerate(bench_overlap.ROUTINGS):
        for tensor, drawn in zip(batch, draw(size, 512, world_size, routing, 100 + 10 * number + rank), strict=True):
            tensor.copy_(drawn)
        graph.replay()
        torch.cuda.synchronize()
        layer.check()
        worst = max(worst, difference(output, layer.run("separate", *batch)))
    return worst

"""Prefill whose experts run while rows arrive: the values of separate kernels, for ranks of one GPU and of several."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
import torch

from moe_ep.errors import DispatchTimeoutError
from tests.gpu.ranks_of_one_gpu import on_one_gpu
from tests.ranks import ranks

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import bench_overlap
from bench_overlap import (
    SIZES,
    TOLERANCE,
    RankLayer,
    check_values,
    difference,
    draw,
    layers_of_one_gpu,
    run_together,
)

os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("most", [1, 40, 3000])
def test_values_of_separate_kernels(monkeypatch: pytest.MonkeyPatch, num_ranks: int, most: int) -> None:
    on_one_gpu(monkeypatch, num_ranks)
    checks = check_values(layers_of_one_gpu(SIZES["small"], num_ranks, most), 0, num_ranks, most)
    assert all(check["is_right"] for check in checks), checks


@pytest.mark.gpu
def test_late_ranks_and_layers_that_share_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    on_one_gpu(monkeypatch, 4)
    size = SIZES["small"]
    pairs, rng = [layers_of_one_gpu(size, 4, 200) for _ in range(2)], random.Random(0)
    for step in range(20):
        layers = pairs[step % 2]
        batches = [draw(size, rng.randint(0, 200), 4, "uniform", 10 * step + rank) for rank in range(4)]
        cycles = [rng.choice([0, 0, 50_000, 500_000]) for _ in layers]
        expected = run_together(layers, "separate", batches)
        got = run_together(layers, "overlapped", batches, cycles)
        assert all(difference(*both) < TOLERANCE for both in zip(got, expected, strict=True)), step


@pytest.mark.gpu
@pytest.mark.parametrize("sends", ["nothing", "ids"])
def test_a_rank_that_stops_is_named_and_can_be_left_out(monkeypatch: pytest.MonkeyPatch, sends: str) -> None:
    monkeypatch.setenv("MOE_EP_NVSHMEM_TIMEOUT_S", "0.5")
    on_one_gpu(monkeypatch, 4)
    layers = layers_of_one_gpu(SIZES["small"], 4, 64)
    batches = [draw(SIZES["small"], 64, 4, "uniform", rank) for rank in range(4)]
    run_together(layers, "overlapped", batches)
    others, streams = [layers[0], *layers[2:]], [torch.cuda.Stream() for _ in layers]
    for rank, (layer, batch) in enumerate(zip(layers, batches, strict=True)):
        with torch.cuda.stream(streams[rank]):
            if layer in others:
                layer.run("overlapped", *batch)
            elif sends == "ids":
                layer.dispatch("overlapped", *batch)
    torch.cuda.synchronize()
    for layer in others:
        with pytest.raises(DispatchTimeoutError) as raised:
            layer.check()
        assert raised.value.ranks == (1,)
    for backend in (layer.backends[mode] for mode in bench_overlap.MODES for layer in others):
        backend.recover(dead=(1,))
    for _ in range(2):
        few = [batches[0], *batches[2:]]
        separate, overlapped = (run_together(others, mode, few) for mode in bench_overlap.MODES)
        assert all(difference(*both) < TOLERANCE for both in zip(overlapped, separate, strict=True))


@pytest.mark.gpu2
def test_values_over_two_gpus() -> None:
    assert ranks(2, "nccl").run(check_over_gpus, limit_s=120) == [[], []]


def check_over_gpus(rank: int, world_size: int) -> list[object]:
    layer = RankLayer(SIZES["small"], rank, world_size, 1024)
    return [check for check in check_values([layer], rank, world_size, 1024) if not check["is_right"]]


@pytest.mark.gpu2
def test_replays_of_a_graph_follow_their_inputs() -> None:
    assert all(worst < TOLERANCE for worst in ranks(2, "nccl").run(check_replays, limit_s=120))


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

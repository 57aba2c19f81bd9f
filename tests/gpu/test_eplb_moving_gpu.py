"""Experts that move between GPUs: by messages and by peer copies, packed weights too, under a captured graph."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_ep.distributed.process_groups import subgroup
from moe_ep.eplb import transfer
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.transfer import MessageTransport, rearrange_expert_weights
from moe_ep.launch.cli.main import main
from moe_ep.layer import FusedMoE
from moe_ep.registry import EXPERTS
from tests.eplb.models import E, K, inputs, load_layer, make_layer, random_placement, redundancy, set_placement
from tests.ranks import RankPool, needs_gpu_ranks, ranks

T = 8
SCHEMES = ("plain", "quantized on load", "GPTQ")
WORLD_SIZES = [
    pytest.param(2, marks=pytest.mark.gpu2),
    pytest.param(4, marks=[pytest.mark.gpu2, needs_gpu_ranks(4)]),
    pytest.param(8, marks=pytest.mark.gpu8),
]


def on_gpu(layer: FusedMoE, seed: int) -> FusedMoE:
    layer = load_layer(layer, seed).cuda()
    _ = layer.modular_kernel
    return layer


def options_of(scheme: str) -> dict[str, Any]:
    """Packed experts take bf16, whole numbers stay whole in f32."""
    return {"params_dtype": torch.float32 if scheme == "plain" else torch.bfloat16}


def make_model(world_size: int, schemes: tuple[str, ...] = SCHEMES, **options: Any) -> list[FusedMoE]:
    redundant, settings = redundancy(world_size, 3), {"all2all_backend": "batched_all_to_all"} | options
    return [
        on_gpu(make_layer(scheme, redundant, **(options_of(scheme) | settings)), seed)
        for seed, scheme in enumerate(schemes)
    ]


def check_weights(
    layers: list[FusedMoE], placement: np.ndarray, schemes: tuple[str, ...] = SCHEMES, **options: Any
) -> None:
    """Every tensor of every slot, against layers that were loaded into the placement."""
    for index, (layer, scheme) in enumerate(zip(layers, schemes, strict=True)):
        fresh = make_layer(scheme, layer.num_redundant_experts, **(options_of(scheme) | options))
        set_placement(fresh, placement[index])
        for got, wanted in zip(layer.expert_weights(), on_gpu(fresh, index).expert_weights(), strict=True):
            assert torch.equal(got, wanted)


def move(rank: int, world_size: int, transport: str, asynchronous: bool) -> str:
    layers = make_model(world_size)
    manager = EPLBManager(
        layers,
        EplbConfig(transport=transport, asynchronous=asynchronous, timeout_s=30, first_plan=10**6, planner="thread"),
    )
    for seed in range(3):
        manager.rearrange(random_placement(len(layers), E + layers[0].num_redundant_experts, seed))
        while manager.busy:
            manager.step()
            torch.cuda.synchronize()
        check_weights(layers, manager.placement.host)
    name = manager.transport
    manager.close()
    return name


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("transport", ["messages", "peer_copies"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_moved_weights_equal_a_fresh_load(world_size: int, transport: str, asynchronous: bool) -> None:
    names = ranks(world_size, "nccl").run(move, transport, asynchronous)
    assert set(names) == {transport}


def close_and_make(rank: int, world_size: int) -> list[int]:
    """Managers one after the other, whose messages go by NCCL; of the second, rank 1 gives up in the middle.

    Returns how many NCCL groups were made by the time that each manager was there.
    """
    layers = make_model(world_size, ("plain",))
    num_slots = E + layers[0].num_redundant_experts
    settings = EplbConfig(transport="messages", timeout_s=30, first_plan=10**6, planner="thread")
    groups, made, fetch = [], [], MessageTransport.fetch
    transfer.subgroup = lambda *args, **of: (made.append(args), subgroup(*args, **of))[1]  # type: ignore[assignment]
    for seed in range(4):
        manager = EPLBManager(layers, settings)
        groups.append(len(made))
        if seed == 1 and rank == 1:
            MessageTransport.fetch = lambda *args: 1 // 0  # type: ignore[assignment, method-assign]
        present = manager.placement.host
        manager.rearrange(random_placement(1, num_slots, seed))
        if seed == 1:
            time.sleep(1)
            assert np.array_equal(manager.placement.host, present)
        else:
            manager.finish()
        started = time.monotonic()
        manager.close()
        assert time.monotonic() - started < 15
        MessageTransport.fetch = fetch  # type: ignore[method-assign]
        check_weights(layers, manager.placement.host, ("plain",))
    return groups


@pytest.mark.gpu2
def test_connections_pass_to_the_next_manager_unless_messages_are_under_way() -> None:
    pool = RankPool(2, "nccl")
    try:
        assert pool.run(close_and_make) == [[1, 1, 2, 2]] * 2
    finally:
        pool.close()


def one_number_a_row(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Inputs on the GPU whose outputs are whole numbers up to 7 * N: exact in bf16, in whatever order they add up."""
    x, logits = inputs(T, seed)
    column = torch.nn.functional.one_hot((torch.arange(T) + seed) % K, K)
    return [(x.sign() * column).to(dtype).cuda(), logits.cuda()]


def serve_while_moving(
    rank: int, world_size: int, backend: str, transport: str, captured: bool
) -> tuple[list[int], int]:
    """A layer, or a graph captured before the first move; its output has the same bits in every step as on one rank."""
    dtype = torch.bfloat16 if backend.startswith("nvshmem") else torch.float32
    layer = make_model(world_size, ("plain",), all2all_backend=backend, params_dtype=dtype)[0]
    alone = on_gpu(make_layer(ep_size=1, enable_eplb=False, params_dtype=dtype), 0)
    manager = EPLBManager(
        [layer],
        EplbConfig(transport=transport, first_plan=5, interval=10, rebalance_below=1.0, timeout_s=30, planner="thread"),
    )
    static = one_number_a_row(rank, dtype)
    side = torch.cuda.Stream()
    versions = []
    with torch.cuda.stream(side):
        for _ in range(2):
            layer(*static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                output = layer(*static)
        manager.profile_step()
        for step in range(60):
            fresh = one_number_a_row(100 * step + rank, dtype)
            if step >= 30:
                fresh[1] = fresh[1].flip(1)
            for target, source in zip(static, fresh, strict=True):
                target.copy_(source)
            if captured:
                graph.replay()
            else:
                output = layer(*static)
            assert torch.equal(output, alone(*fresh))
            manager.step()
            versions.append(hash(manager.placement.host.tobytes()))
        manager.finish()
        check_weights([layer], manager.placement.host, ("plain",), params_dtype=dtype)
    moved = manager.totals.experts_moved
    manager.close()
    return [versions.index(version) for version in versions], moved


@pytest.mark.parametrize(
    ("backend", "transport", "captured"),
    [
        ("batched_all_to_all", "messages", True),
        ("batched_all_to_all", "peer_copies", True),
        ("nvshmem_low_latency", "peer_copies", True),
        ("nvshmem_high_throughput", "peer_copies", False),
    ],
)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_outputs_are_the_same_bits_while_experts_move(
    world_size: int, backend: str, transport: str, captured: bool
) -> None:
    results = ranks(world_size, "nccl").run(serve_while_moving, backend, transport, captured)
    assert all(result == results[0] for result in results)
    changes, moved = results[0]
    assert len(set(changes)) > 1 and moved > 0


def packed_outputs(rank: int, world_size: int) -> None:
    """Packed experts compute the same before and after, up to their tolerance."""
    from moe_ep.layer.methods import relative_error, tolerance

    layers = make_model(world_size, ("quantized on load",))
    usable = EXPERTS.load("batched_marlin").unusable_reason() is None
    name = type(layers[0].modular_kernel.fused_experts).__name__
    assert name == ("BatchedMarlinExperts" if usable else "BatchedReferenceExperts")
    manager = EPLBManager(layers, EplbConfig(asynchronous=False, first_plan=10**6))
    x, logits = (tensor.cuda() for tensor in inputs(T, seed=rank))
    before = layers[0](x.bfloat16(), logits)
    for seed in range(2):
        manager.rearrange(random_placement(1, E + layers[0].num_redundant_experts, seed))
        assert relative_error(layers[0](x.bfloat16(), logits), before) < tolerance(torch.bfloat16)
    manager.close()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_packed_experts_compute_the_same_after_a_move(world_size: int) -> None:
    ranks(world_size, "nccl").run(packed_outputs)


def rearrange(rank: int, world_size: int) -> None:
    layers = make_model(world_size)
    num_slots = E + layers[0].num_redundant_experts
    old = np.tile(np.arange(num_slots) % E, (len(layers), 1))
    for seed in range(2):
        new = random_placement(len(layers), num_slots, seed)
        rearrange_expert_weights([layer.expert_weights() for layer in layers], old, new)
        check_weights(layers, new)
        old = new


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_plain_function_over_nccl(world_size: int) -> None:
    ranks(world_size, "nccl").run(rearrange)


@pytest.mark.gpu2
def test_a_run_that_balances(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path))
    arguments = "--device cuda --launcher local --ep-size 2 --steps 6 --eplb --routing zipf:0.8"
    assert main(["run", *arguments.split(), "--json", str(tmp_path / "out.jsonl")]) == 0, capsys.readouterr().err
    summary = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[-1])
    phases = summary["eplb"]["phases"]
    assert summary["verify"]["passed"] is True and summary["eplb"]["experts_moved"] > 0
    assert phases["after"]["balancedness"] > phases["before"]["balancedness"]

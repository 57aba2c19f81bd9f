"""nvshmem_low_latency on GPUs of one host: plain loops as the oracle, open batches, graphs, ranks out of reach."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceDelegate
from tests.dispatch.backend_cases import Case, expected_output, make_setting, prepare_args, run_experts
from tests.gpu.captured import ROUTINGS, batched_results, check_replays, expert_ids
from tests.gpu.nvshmem_cases import (
    ACROSS_HOSTS,
    BF16,
    FACES,
    GRID,
    SHARED_CASES,
    WORLD_SIZES,
    across_hosts,
    check_cases,
    check_grid,
    expanded,
    make,
)
from tests.ranks import ranks


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_against_plain_loops(world_size: int) -> None:
    assert ranks(world_size, "nccl").run(check_cases, SHARED_CASES, limit_s=250) == [2 * len(SHARED_CASES)] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_ranks_out_of_reach(world_size: int) -> None:
    pool = ranks(world_size, "nccl")
    assert pool.run(across_hosts, check_cases, ACROSS_HOSTS, limit_s=250) == [2 * len(ACROSS_HOSTS)] * world_size
    for code_dtype in (None, torch.float8_e4m3fn, torch.int8):
        assert pool.run(across_hosts, check_captured, "by_reference", code_dtype) == [len(ROUTINGS)] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_grid(world_size: int) -> None:
    assert ranks(world_size, "nccl").run(check_grid, limit_s=250) == [2 * len(GRID)] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_two_batches_and_two_runtime_objects_in_flight(world_size: int) -> None:
    assert ranks(world_size, "nccl").run(check_interleaved) == [True] * world_size


def check_interleaved(rank: int, world_size: int) -> bool:
    cases = [
        Case(dtype=BF16, hidden_size=256, tokens=(5, 0, 8)),
        Case(dtype=BF16, hidden_size=256, tokens=(3,), seed=1),
    ]
    other = replace(cases[0], hidden_size=512, seed=7)
    settings = [make_setting(case, rank, world_size) for case in (*cases, other)]
    with torch.inference_mode():
        backends = [make(settings[0], "by_reference"), None, make(settings[2], "expanded")]
    backends[1] = backends[0]
    all_args = [prepare_args(setting, "cuda") for setting in settings]
    for _ in range(2):
        halves = [backend.prepare_async(*args) for backend, args in zip(backends, all_args, strict=True)]
        for hook, _ in reversed(halves):
            hook()
        outputs, receivers = [], []
        for index in (1, 0, 2):
            args = all_args[index]
            results, reduce_impl = run_experts(settings[index], expanded(halves[index][1]()), "batched")
            outputs.append(torch.full_like(args[0], float("nan")))
            call = (outputs[-1], results, args[1], args[2], False, reduce_impl)
            receivers.append(backends[index].finalize_async(*call))
        for hook, _ in receivers:
            hook()
        for output, index in zip(outputs, (1, 0, 2), strict=True):
            assert torch.equal(output.cpu(), expected_output(settings[index], world_size))
    with pytest.raises(RuntimeError, match="2 batches are between prepare and finalize"):
        for _ in range(3):
            backends[0].prepare(*all_args[0])
    backends[0].recover(dead=())
    return True


@pytest.mark.parametrize("code_dtype", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_captured_with_changing_routing(world_size: int, face: str, code_dtype: torch.dtype | None) -> None:
    assert ranks(world_size, "nccl").run(check_captured, face, code_dtype) == [len(ROUTINGS)] * world_size


def check_captured(rank: int, world_size: int, face: str, code_dtype: torch.dtype | None) -> int:
    def make_step(setting, args, output):
        backend, experts = make(setting, face), expert_ids(setting, output.device)

        def step() -> None:
            batch, _, meta, _, _ = backend.prepare(*args)
            counts, row_ids = meta.expert_num_tokens, meta.expert_row_ids
            if row_ids is not None:
                held = torch.arange(row_ids.size(1), device=output.device) < counts[:, None]
                batch = batch[torch.where(held, row_ids, 0).long()]
            results = batched_results(experts, batch, counts)
            backend.finalize(output, results, args[1], args[2], False, TopKWeightAndReduceDelegate())

        return step

    return check_replays(rank, world_size, make_step, code_dtype)

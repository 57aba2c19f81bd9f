"""Dispatch on GPUs: the Triton forms, every backend on NCCL against plain loops, and CUDA graphs."""

from __future__ import annotations

import os

import pytest
import torch

from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceDelegate
from tests.dispatch.backend_cases import (
    BACKENDS,
    CASES,
    Case,
    check_batched,
    check_cases,
    check_interleaved,
    expected_output,
    make_backend,
    make_setting,
    prepare_args,
    run_experts,
)
from tests.gpu.captured import ROUTINGS, batched_results, check_replays, expert_ids
from tests.ranks import needs_gpu_ranks, ranks

# NVLink multicast stays off, in the ranks too: they inherit this.
os.environ["NCCL_NVLS_ENABLE"] = "0"

LARGE_CASES = [
    Case(tokens=(128, 7, 0, 33), num_experts=64, topk=8, hidden_size=2048, dtype=torch.bfloat16, capacity=128),
    Case(
        tokens=(16,),
        num_experts=64,
        topk=8,
        hidden_size=7168,
        dtype=torch.bfloat16,
        capacity=16,
        code_dtype=torch.float8_e4m3fn,
    ),
]

WORLD_SIZES = [
    pytest.param(1, marks=pytest.mark.gpu),
    pytest.param(2, marks=pytest.mark.gpu2),
    pytest.param(4, marks=[pytest.mark.gpu2, needs_gpu_ranks(4)]),
    pytest.param(8, marks=pytest.mark.gpu8),
]


@pytest.mark.gpu
def test_triton_has_the_bits_of_the_plain_forms() -> None:
    from tests.dispatch.kernel_cases import GPU_CASES, check_all

    check_all("cuda", GPU_CASES)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_against_plain_loops(world_size: int) -> None:
    cases = [*CASES, *LARGE_CASES]
    checked = ranks(world_size, "nccl").run(check_cases, cases, BACKENDS, "cuda", limit_s=250)
    assert checked == [len(cases) * len(BACKENDS)] * world_size


@pytest.mark.gpu
def test_no_ep() -> None:
    case = Case(tokens=(9,), dtype=torch.bfloat16)
    setting = make_setting(case, 0, 1)
    backend = make_backend(setting, "no_ep")
    args = prepare_args(setting, "cuda")
    rows, _, _, ids, _ = backend.prepare(*args)
    assert rows is args[0] and torch.equal(ids, args[2])


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_batches_in_flight_do_not_mix(world_size: int, backend: str, mode: str) -> None:
    ranks(world_size, "nccl").run(check_interleaved, backend, mode, "cuda")


@pytest.mark.gpu
def test_memory_lives_as_long_as_another_stream_reads_it() -> None:
    ranks(1, "nccl").run(check_late_streams)


def check_late_streams(rank: int, world_size: int) -> None:
    case = Case(tokens=(64,), capacity=64, num_experts=4, hidden_size=256, dtype=torch.bfloat16)
    setting = make_setting(case, rank, world_size)
    backend, args = make_backend(setting, "batched_all_to_all"), prepare_args(setting, "cuda")
    other, side = torch.cuda.Stream(), None
    for _ in range(2):  # the first round loads the kernels
        # The side stream is late; meanwhile the caller's stream uses again what it takes to be free.
        if side is not None:
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000_000)
        hook, receive = backend.prepare_async(*(each.clone() for each in args[:3]), *args[3:])
        side = backend.side_stream
        with torch.cuda.stream(other):
            hook()
        used = [torch.full_like(args[0], float("nan")) for _ in range(8)]
        torch.cuda.synchronize()
        check_batched(setting, receive())

        result = backend.prepare(*args)
        expert_output, reduce_impl = run_experts(setting, result, "batched")
        output = torch.full_like(args[0], float("nan"))
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
        hook, _ = backend.finalize_async(output, expert_output, *args[1:3], False, reduce_impl)
        used += [torch.full((64, size), -1, dtype=torch.int32, device="cuda") for size in (1, case.topk) * 32]
        hook()
        assert torch.equal(output.cpu(), expected_output(setting, world_size))


@pytest.mark.parametrize("code_dtype", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_captured_with_changing_routing(world_size: int, code_dtype: torch.dtype | None) -> None:
    assert ranks(world_size, "nccl").run(check_captured, code_dtype) == [len(ROUTINGS)] * world_size


def check_captured(rank: int, world_size: int, code_dtype: torch.dtype | None) -> int:
    def make_step(setting, args, output):
        backend, experts = make_backend(setting, "batched_all_to_all"), expert_ids(setting, output.device)

        def step() -> None:
            batch, _, meta, _, _ = backend.prepare(*args)
            results = batched_results(experts, batch, meta.expert_num_tokens)
            backend.finalize(output, results, args[1], args[2], False, TopKWeightAndReduceDelegate())

        return step

    return check_replays(rank, world_size, make_step, code_dtype)

"""Dispatch on GPUs: the Triton forms, every backend on NCCL against plain loops, and CUDA graphs."""

from __future__ import annotations

import os

import pytest
import torch

from moe_ep.topk_weight_and_reduce import TopKWeightAndReduceDelegate
from tests.dispatch.backend_cases import (
    BACKENDS,
    CASES,
    Case,
    check_cases,
    check_interleaved,
    expected_output,
    make_backend,
    make_setting,
    prepare_args,
)
from tests.ranks import ranks

# NVLink multicast stays off, in the ranks too: they inherit this.
os.environ["NCCL_NVLS_ENABLE"] = "0"

LARGE_CASES = [
    Case(tokens=(128, 7, 0, 33), num_experts=64, topk=8, hidden_size=2048, dtype=torch.bfloat16, capacity=128),
    Case(tokens=(16,), num_experts=64, topk=8, hidden_size=7168, dtype=torch.bfloat16, capacity=16, fp8=True),
]

needs_four = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs of one host")
WORLD_SIZES = [
    pytest.param(1, marks=pytest.mark.gpu),
    pytest.param(2, marks=pytest.mark.gpu2),
    pytest.param(4, marks=[pytest.mark.gpu2, needs_four]),
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


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_captured_with_changing_routing(world_size: int, fp8: bool) -> None:
    replays = ranks(world_size, "nccl").run(check_captured, fp8)
    assert replays == [len(CAPTURED_ROUTINGS)] * world_size


CAPTURED_ROUTINGS = ("random", "one_rank", "masked", "none", "one_expert", "repeated")


def check_captured(rank: int, world_size: int, fp8: bool) -> int:
    """One graph of prepare, a stand-in for batched experts and finalize; replayed with other routing and rows.

    The stand-in reads the number of rows on the device and leaves NaN behind them, as a real one may.
    """
    device = f"cuda:{rank}"
    settings = [
        make_setting(
            Case(tokens=(8, 3, 5), routing=routing, dtype=torch.bfloat16, hidden_size=256, fp8=fp8, seed=seed),
            rank,
            world_size,
        )
        for seed, routing in enumerate(CAPTURED_ROUTINGS)
    ]
    backend = make_backend(settings[0], "batched_all_to_all")
    rows, weights, ids, num_ids, expert_map, on_input, quant_config = prepare_args(settings[0], device)
    output = torch.empty_like(rows)
    global_ids = torch.zeros(settings[0].config.num_local_experts, device=device)
    for expert_id, local in settings[0].local.items():
        global_ids[local] = expert_id

    def step() -> None:
        batch, _, meta, _, _ = backend.prepare(rows, weights, ids, num_ids, expert_map, on_input, quant_config)
        factor, term = (1.0 + global_ids / 8.0)[:, None, None], global_ids[:, None, None]
        belongs = torch.arange(batch.size(1), device=device) < meta.expert_num_tokens[:, None]
        results = (batch.float() * factor + term).to(batch.dtype)
        results = torch.where(belongs[:, :, None], results, float("nan"))
        backend.finalize(output, results, weights, ids, on_input, TopKWeightAndReduceDelegate())

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for setting in settings:
        new = setting.inputs[rank]
        rows.copy_(new.rows)
        ids.copy_(new.ids)
        weights.copy_(new.weights)
        found = []
        for _ in range(2):
            output.fill_(float("nan"))
            graph.replay()
            found.append(output.cpu())
        assert torch.equal(found[0], expected_output(setting, world_size)), setting.case
        assert torch.equal(found[0], found[1])
    torch.cuda.synchronize()
    return len(settings)

"""The NVSHMEM backends on GPUs of one host: plain loops as the oracle, poisoned buffers, graphs, faults."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
import torch

from moe_ep.errors import DispatchTimeoutError
from moe_ep.topk_weight_and_reduce import TopKWeightAndReduceDelegate
from tests.dispatch.backend_cases import (
    CASES,
    Case,
    check_batched,
    expected_output,
    make_backend,
    make_setting,
    prepare_args,
    run_experts,
)
from tests.ranks import RankPool, ranks

# NVLink multicast stays off, in the ranks too: they inherit this.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")

NAME = "nvshmem_low_latency"
BF16, F16 = torch.bfloat16, torch.float16
# Those of the other backends, in the dtypes and hidden sizes that this one takes.
SHARED_CASES = [
    replace(
        case, dtype=BF16 if case.dtype is torch.float32 else case.dtype, hidden_size=-(-case.hidden_size // 16) * 16
    )
    for case in CASES
]
GRID = [
    Case(tokens=tokens, hidden_size=K, topk=topk, num_experts=E, capacity=128, dtype=BF16, fp8=fp8, seed=seed)
    for seed, (tokens, K, topk, E, fp8) in enumerate(
        [
            ((0,), 128, 1, 8, False),
            ((1,), 2048, 2, 8, False),
            ((7, 0, 128, 1), 2880, 4, 64, False),
            ((32, 17, 1, 0), 7168, 8, 256, False),
            ((128,), 7168, 8, 256, False),
            ((128, 3, 16, 17), 2048, 16, 257, True),
            ((1,), 7168, 8, 256, True),
            ((33, 128, 0, 16), 2880, 8, 64, True),
        ]
    )
]
FACES = ("expanded", "by_reference")

needs_three = pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs 3 GPUs of one host")
needs_four = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 GPUs of one host")
WORLD_SIZES = [
    pytest.param(1, marks=pytest.mark.gpu),
    pytest.param(2, marks=pytest.mark.gpu2),
    pytest.param(3, marks=[pytest.mark.gpu2, needs_three]),
    pytest.param(4, marks=[pytest.mark.gpu2, needs_four]),
    pytest.param(8, marks=pytest.mark.gpu8),
]


def make(setting, face):
    backend = make_backend(setting, NAME)
    if face == "by_reference":
        backend.hand_over_row_ids()
    return backend


def poison(backend) -> None:
    """Fills what rows and results travel through with bytes that are NaN in every dtype."""
    channel, layout = backend._channel, backend._layout
    for batch, name in itertools.product(range(2), ("rows", "results")):
        start = batch * layout.batch_bytes + layout.offsets[name]
        channel.region.local[start : start + layout.sizes[name]] = 0xFF
    torch.cuda.synchronize()
    torch.distributed.barrier()


def expanded(result):
    """The result as BatchedExperts with rows of their own, where they were handed over by reference."""
    rows, scales, meta, ids, weights = result
    if meta.expert_row_ids is None:
        return result
    counts, row_ids = meta.expert_num_tokens, meta.expert_row_ids
    batch = torch.full((*row_ids.shape, rows.size(1)), float("nan"), dtype=rows.dtype, device=rows.device)
    for expert, count in enumerate(counts.tolist()):
        batch[expert, :count] = rows[row_ids[expert, :count].long()]
    return batch, scales, meta, ids, weights


def check_case(rank: int, world_size: int, case: Case, face: str, mode: str = "sync") -> None:
    setting = make_setting(case, rank, world_size)
    backend = make(setting, face)
    poison(backend)
    args = prepare_args(setting, f"cuda:{rank}")
    for _ in range(3):
        if mode == "sync":
            result = backend.prepare(*args)
        else:
            hook, receive = backend.prepare_async(*args)
            hook()
            result = receive()
        result = expanded(result)
        check_batched(setting, result)
        results, reduce_impl = run_experts(setting, result, "batched")
        output = torch.full_like(args[0], float("nan"))
        call = (output, results, args[1], args[2], case.on_input, reduce_impl)
        if mode == "sync":
            backend.finalize(*call)
        else:
            hook, receive = backend.finalize_async(*call)
            hook()
            receive()
        assert torch.equal(output.cpu(), expected_output(setting, world_size))
    backend.check()


def check_cases(rank: int, world_size: int, cases: list[Case]) -> int:
    checked = 0
    for index, (case, face) in enumerate(itertools.product(cases, FACES)):
        try:
            check_case(rank, world_size, case, face, ("sync", "async")[index // 2 % 2])
        except AssertionError as error:
            raise AssertionError(f"{face}, {case}, rank {rank} of {world_size}: {error}") from error
        checked += 1
    return checked


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_against_plain_loops(world_size: int) -> None:
    assert ranks(world_size, "nccl").run(check_cases, SHARED_CASES, limit_s=250) == [2 * len(SHARED_CASES)] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_grid(world_size: int) -> None:
    assert ranks(world_size, "nccl").run(check_grid, limit_s=250) == [2 * len(GRID)] * world_size


def check_grid(rank: int, world_size: int) -> int:
    """Large batches against batched_all_to_all on NCCL: the same rows, counts and combined bits."""
    checked = 0
    for case, face in itertools.product(GRID, FACES):
        setting = make_setting(case, rank, world_size)
        backend = make(setting, face)
        reference = make_backend(setting, "batched_all_to_all")
        poison(backend)
        args = prepare_args(setting, f"cuda:{rank}")
        outputs = []
        batches = [expanded(each.prepare(*args)) for each in (backend, reference)]
        counts = [batch[2].expert_num_tokens for batch in batches]
        assert torch.equal(*counts), (face, case)
        factor = 1 + torch.arange(len(counts[0]), device=f"cuda:{rank}")[:, None, None] / 8
        held = torch.arange(batches[0][0].size(1), device=f"cuda:{rank}") < counts[0][:, None]
        assert torch.equal(batches[0][0][held], batches[1][0][held]), (face, case)
        for each, batch in zip((backend, reference), batches, strict=True):
            results = torch.where(held[:, :, None], (batch[0].float() * factor).to(BF16), float("nan"))
            outputs.append(torch.full_like(args[0], float("nan")))
            each.finalize(outputs[-1], results, args[1], args[2], False, TopKWeightAndReduceDelegate())
        assert torch.equal(*outputs), (face, case)
        backend.check()
        checked += 1
    return checked


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
    backends = [make(settings[0], "by_reference"), None, make(settings[2], "expanded")]
    backends[1] = backends[0]
    all_args = [prepare_args(setting, f"cuda:{rank}") for setting in settings]
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


CAPTURED_ROUTINGS = ("random", "one_rank", "masked", "none", "one_expert", "repeated")


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_captured_with_changing_routing(world_size: int, face: str, fp8: bool) -> None:
    assert ranks(world_size, "nccl").run(check_captured, face, fp8) == [len(CAPTURED_ROUTINGS)] * world_size


def check_captured(rank: int, world_size: int, face: str, fp8: bool) -> int:
    device = f"cuda:{rank}"
    case = Case(tokens=(8, 3, 5), dtype=BF16, hidden_size=256, fp8=fp8)
    settings = [
        make_setting(replace(case, routing=routing, seed=seed), rank, world_size)
        for seed, routing in enumerate(CAPTURED_ROUTINGS)
    ]
    backend = make(settings[0], face)
    rows, weights, ids, num_ids, expert_map, on_input, quant_config = prepare_args(settings[0], device)
    output = torch.empty_like(rows)
    global_ids = torch.zeros(settings[0].config.num_local_experts, device=device)
    for expert_id, local in settings[0].local.items():
        global_ids[local] = expert_id

    def step() -> None:
        batch, _, meta, _, _ = backend.prepare(rows, weights, ids, num_ids, expert_map, on_input, quant_config)
        held = torch.arange(batch.size(-2) if batch.dim() == 3 else meta.expert_row_ids.size(1), device=device)
        held = held < meta.expert_num_tokens[:, None]
        if batch.dim() == 2:
            batch = batch[torch.where(held, meta.expert_row_ids, 0).long()]
        factor, term = (1.0 + global_ids / 8.0)[:, None, None], global_ids[:, None, None]
        results = torch.where(held[:, :, None], (batch.float() * factor + term).to(BF16), float("nan"))
        backend.finalize(output, results, weights, ids, on_input, TopKWeightAndReduceDelegate())

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for setting in settings:
        inputs = setting.inputs[rank]
        rows.copy_(inputs.rows)
        ids.copy_(inputs.ids)
        weights.copy_(inputs.weights)
        output.fill_(float("nan"))
        graph.replay()
        assert torch.equal(output.cpu(), expected_output(setting, world_size)), setting.case
    return len(settings)


@pytest.mark.gpu2
def test_differences_of_configuration_are_named() -> None:
    texts = ranks(2, "nccl").run(check_difference)
    assert len(set(texts)) == 1
    assert "hidden_dim is 128 on rank 0, 256 on rank 1" in texts[0]


def check_difference(rank: int, world_size: int) -> str:
    case = Case(dtype=BF16, hidden_size=128 * (1 + rank))
    with pytest.raises(ValueError) as raised:
        make(make_setting(case, rank, world_size), "expanded")
    return str(raised.value)


@pytest.mark.gpu2
def test_a_rank_that_does_not_come_is_named_and_can_be_left_out() -> None:
    pool = RankPool(2, "nccl")
    os.environ["MOE_EP_NVSHMEM_TIMEOUT_S"] = "0.5"
    try:
        assert pool.run(check_absent) == [True, True]
    finally:
        del os.environ["MOE_EP_NVSHMEM_TIMEOUT_S"]
        pool.close()


def check_absent(rank: int, world_size: int) -> bool:
    os.environ["MOE_EP_NVSHMEM_TIMEOUT_S"] = "0.5"
    case = Case(dtype=BF16, hidden_size=256, tokens=(6,))
    setting = make_setting(case, rank, world_size)
    backend = make(setting, "expanded")
    args = prepare_args(setting, f"cuda:{rank}")
    if rank == 1:
        with pytest.raises(ValueError, match="9 tokens and the capacity is 8"):
            backend.prepare(*(part.repeat(2, 1)[:9] for part in args[:3]), *args[3:])
        torch.distributed.barrier()
        torch.distributed.barrier()
        return True
    backend.prepare(*args)
    torch.cuda.synchronize()
    with pytest.raises(DispatchTimeoutError, match="rank 1 refused its batch: a1 has 9 tokens") as raised:
        backend.check()
    assert raised.value.ranks == (1,)
    torch.distributed.barrier()
    backend.recover(dead=(1,))
    results, reduce_impl = run_experts(setting, backend.prepare(*args), "batched")
    output = torch.full_like(args[0], float("nan"))
    backend.finalize(output, results, args[1], args[2], False, reduce_impl)
    assert bool(output.isfinite().all())
    lost = backend.tokens_hit(args[2]).cpu()
    owners = torch.tensor([[setting.owner[int(e)] for e in row] for row in args[2].cpu()])
    assert torch.equal(lost, (owners == 1).any(dim=1))
    backend.check()
    torch.distributed.barrier()
    return True

"""The NVSHMEM prefill backend on GPUs of one host: plain loops and all_to_all as the oracles, captured too."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from moe_ep.errors import DispatchTimeoutError
from moe_ep.kernels.quantize import row_values
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceNoOP
from tests.dispatch.backend_cases import (
    CASES,
    Case,
    Inputs,
    check_case,
    check_standard,
    expected_output,
    make_backend,
    make_setting,
    prepare_args,
    run_experts,
)
from tests.gpu.captured import ROUTINGS, check_replays
from tests.gpu.nvshmem_cases import across_hosts
from tests.ranks import RankPool, needs_gpu_ranks, ranks

# NVLink multicast stays off, in the ranks too: they inherit this.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")

NAME = "nvshmem_high_throughput"
BF16 = torch.bfloat16
SHARED_CASES = [
    replace(
        case, dtype=BF16 if case.dtype is torch.float32 else case.dtype, hidden_size=-(-case.hidden_size // 16) * 16
    )
    for case in CASES
]
# Decode's values of each dimension, with both wires.
GRID = [
    Case(
        tokens=tokens,
        hidden_size=K,
        topk=topk,
        num_experts=E,
        capacity=600,
        dtype=BF16,
        code_dtype=code_dtype,
        seed=seed,
    )
    for seed, (tokens, K, topk, E, code_dtype) in enumerate(
        [
            ((0,), 128, 1, 8, None),
            ((32, 1), 128, 2, 64, torch.float8_e4m3fn),
            ((7, 32, 128), 2048, 16, 257, None),
            ((31, 600, 0, 5), 2000, 32, 64, torch.int8),
            ((512, 77), 2880, 2, 8, None),
            ((128, 1, 7), 2880, 16, 257, torch.float8_e4m3fn),
            ((600, 0, 1, 33), 7168, 8, 256, None),
            ((600,), 7168, 8, 256, torch.int8),
        ]
    )
]
# What goes through NVSHMEM's device library in every run.
ACROSS_HOSTS = [
    Case(tokens=(31, 0, 100, 5), hidden_size=K, topk=4, num_experts=16, capacity=100, dtype=BF16, code_dtype=code_dtype)
    for K, code_dtype in ((16, torch.int8), (2864, torch.float8_e4m3fn))
]
WORLD_SIZES = [
    pytest.param(1, marks=pytest.mark.gpu),
    pytest.param(2, marks=pytest.mark.gpu2),
    pytest.param(4, marks=[pytest.mark.gpu2, needs_gpu_ranks(4)]),
    pytest.param(8, marks=pytest.mark.gpu8),
]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_against_plain_loops(world_size: int) -> None:
    expected = [len(SHARED_CASES)] * world_size
    assert ranks(world_size, "nccl").run(check_plain_loops, limit_s=100) == expected


def check_plain_loops(rank: int, world_size: int) -> int:
    for case in SHARED_CASES:
        try:
            check_case(rank, world_size, case, NAME, "cuda")
        except AssertionError as error:
            raise AssertionError(f"{case}, rank {rank} of {world_size}: {error}") from error
    return len(SHARED_CASES)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bits_of_all_to_all(world_size: int) -> None:
    assert ranks(world_size, "nccl").run(check_grid, GRID, limit_s=100) == [len(GRID)] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_bits_of_all_to_all_out_of_reach(world_size: int) -> None:
    found = ranks(world_size, "nccl").run(across_hosts, check_grid, ACROSS_HOSTS, limit_s=250)
    assert found == [len(ACROSS_HOSTS)] * world_size


def check_grid(rank: int, world_size: int, cases: list[Case]) -> int:
    for case in cases:
        setting = make_setting(case, rank, world_size)
        backends = [make_backend(setting, name) for name in (NAME, "all_to_all")]
        *args, quant_config = prepare_args(setting, "cuda")
        for reads_codes in (False, case.code_dtype is not None, True):
            asked = quant_config.with_input_dtype(case.code_dtype if reads_codes else None)
            batches = [backend.prepare(*args, asked) for backend in backends]
            assert batches[0][0].dtype == (asked.input_dtype or BF16)
            outputs = [torch.full_like(args[0], float("nan")) for _ in backends]
            given = []
            for backend, output, (rows, scales, _, ids, weights) in zip(backends, outputs, batches, strict=True):
                values = rows if scales is None else row_values(rows, scales).bfloat16()
                bits = rows.contiguous().view(torch.uint8)
                given.append((bits, ids, weights) if scales is None else (bits, scales, ids, weights))
                backend.finalize(output, values * 3, weights, ids, False, TopKWeightAndReduceNoOP())
            assert all(map(torch.equal, *given)) and torch.equal(*outputs), case
        backends[0].check()
    return len(cases)


@pytest.mark.parametrize("code_dtype", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("world_size", WORLD_SIZES[1:])
def test_soak_with_delays_and_poison(world_size: int, code_dtype: torch.dtype | None) -> None:
    assert ranks(world_size, "nccl").run(check_soak, code_dtype, limit_s=60) == [0] * world_size


def check_soak(rank: int, world_size: int, code_dtype: torch.dtype | None, num_batches: int = 300) -> int:
    """Batches that are wrong in any bit; what rows travel through is NaN before each of them."""
    case = Case(
        tokens=(256, 3, 100, 0),
        hidden_size=2048,
        topk=6,
        num_experts=64,
        capacity=256,
        dtype=BF16,
        code_dtype=code_dtype,
    )
    settings = [make_setting(replace(case, seed=seed), rank, world_size) for seed in range(4)]
    settings += [make_setting(replace(case, seed=9, routing="one_rank"), rank, world_size)]
    backend, reference = (make_backend(settings[0], name) for name in (NAME, "all_to_all"))
    all_args = [prepare_args(setting, "cuda") for setting in settings]

    def step(each, args) -> torch.Tensor:
        rows, _, _, ids, weights = each.prepare(*args)
        output = torch.full_like(args[0], float("nan"))
        each.finalize(output, rows * 3, weights, ids, False, TopKWeightAndReduceNoOP())
        return output

    expected = [step(reference, args) for args in all_args]
    same, own = (torch.Generator().manual_seed(seed) for seed in (0, 1 + rank))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(num_batches):
        index = int(torch.randint(len(settings), (), generator=same))
        for name in ("rows", "results"):
            backend.block.part(0, name).fill_(0xFF)
        torch.cuda._sleep(int(torch.randint(100_000, (), generator=own)))
        wrong += (step(backend, all_args[index]) != expected[index]).any()
    backend.check()
    return int(wrong)


@pytest.mark.parametrize("code_dtype", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_captured_with_changing_routing(world_size: int, code_dtype: torch.dtype | None) -> None:
    assert ranks(world_size, "nccl").run(check_captured, code_dtype, limit_s=60) == [len(ROUTINGS)] * world_size


def check_captured(rank: int, world_size: int, code_dtype: torch.dtype | None) -> int:
    def make_step(setting, args, output):
        backend = make_backend(setting, NAME)
        assert backend.supports_cuda_graph()

        def step() -> None:
            received, _, _, ids, weights = backend.prepare(*args)
            total = torch.zeros(received.shape, dtype=torch.float32, device=received.device)
            for slot in range(ids.size(1)):
                number = ids[:, slot, None]
                result = (received.float() * (1.0 + number / 8.0) + number).to(BF16).float() * weights[:, slot, None]
                total = torch.where(number >= 0, total + result, total)
            backend.finalize(output, total.to(BF16), weights, ids, False, TopKWeightAndReduceNoOP())
            if not torch.cuda.is_current_stream_capturing():
                backend.check()

        return step

    return check_replays(rank, world_size, make_step, code_dtype)


@pytest.mark.parametrize("code_dtype", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_two_batches_in_flight_on_a_stream_of_their_own(world_size: int, code_dtype: torch.dtype | None) -> None:
    assert ranks(world_size, "nccl").run(check_in_flight, code_dtype) == [True] * world_size


def check_in_flight(rank: int, world_size: int, code_dtype: torch.dtype | None) -> bool:
    cases = [
        Case(dtype=BF16, hidden_size=256, code_dtype=code_dtype, seed=seed, tokens=tokens)
        for seed, tokens in enumerate([(5, 0, 8), (3,)])
    ]
    settings = [make_setting(case, rank, world_size) for case in cases]
    backend = make_backend(settings[0], NAME, batches_in_flight=2)
    assert backend.supports_async()
    all_args = [prepare_args(setting, "cuda") for setting in settings]
    for _ in range(3):
        halves = [backend.prepare_async(*args) for args in all_args]
        for hook, _ in reversed(halves):
            hook()
        outputs, receivers = {}, []
        for index in (1, 0):
            result = halves[index][1]()
            check_standard(settings[index], result, padded=False)
            results, reduce_impl = run_experts(settings[index], result, ("noop", "contiguous")[index])
            outputs[index] = torch.full_like(all_args[index][0], float("nan"))
            receivers.append(backend.finalize_async(outputs[index], results, result[4], result[3], False, reduce_impl))
        for hook, receive in reversed(receivers):
            hook()
            assert receive() is None
        for index, output in outputs.items():
            assert torch.equal(output.cpu(), expected_output(settings[index], world_size))
    backend.check()
    return True


@pytest.mark.gpu2
def test_a_batch_that_was_given_up_cannot_be_finalized() -> None:
    assert ranks(2, "nccl").run(check_stale) == [True, True]


def check_stale(rank: int, world_size: int) -> bool:
    setting = make_setting(Case(dtype=BF16, hidden_size=256), rank, world_size)
    backend = make_backend(setting, NAME)
    args = prepare_args(setting, "cuda")
    rows, _, _, ids, weights = backend.prepare(*args)
    backend.prepare(*args)
    with pytest.raises(RuntimeError, match="another batch was dispatched before this one was finalized"):
        backend.finalize(torch.empty_like(args[0]), rows, weights, ids, False, TopKWeightAndReduceNoOP())
    return True


@pytest.mark.gpu2
def test_a_rank_that_does_not_come_is_named_and_can_be_left_out() -> None:
    pool = RankPool(2, "nccl")
    try:
        assert pool.run(check_absent) == [True, True]
    finally:
        pool.close()


def check_absent(rank: int, world_size: int) -> bool:
    os.environ["MOE_EP_NVSHMEM_TIMEOUT_S"] = "0.5"
    setting = make_setting(Case(dtype=BF16, hidden_size=256, tokens=(6,)), rank, world_size)
    backend = make_backend(setting, NAME)
    args = prepare_args(setting, "cuda")
    if rank == 1:
        with pytest.raises(ValueError, match="9 tokens and the capacity is 8"):
            backend.prepare(*(part.repeat(2, 1)[:9] for part in args[:3]), *args[3:])
        torch.distributed.barrier()
        torch.distributed.barrier()
        return True
    with pytest.raises(DispatchTimeoutError, match="rank 1 refused its batch: a1 has 9 tokens") as raised:
        backend.prepare(*args)
    assert raised.value.ranks == (1,)
    torch.distributed.barrier()
    backend.recover(dead=(1,))
    result = backend.prepare(*args)
    owners = torch.tensor([[setting.owner[int(expert)] for expert in row] for row in args[2].cpu()])
    kept = torch.where(owners == 0, args[2].cpu(), -1)
    assert torch.equal(result[3].cpu(), kept[(kept >= 0).any(dim=1)])
    results, reduce_impl = run_experts(setting, result, "noop")
    output = torch.full_like(args[0], float("nan"))
    backend.finalize(output, results, result[4], result[3], False, reduce_impl)
    inputs = [Inputs(args[0].cpu(), kept, args[1].cpu())]
    assert torch.equal(output.cpu(), expected_output(setting._replace(inputs=inputs), 1))
    assert torch.equal(backend.tokens_hit(args[2]).cpu(), (owners == 1).any(dim=1))
    backend.check()
    torch.distributed.barrier()
    return True

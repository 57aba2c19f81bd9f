"""What the GPU tests of nvshmem_low_latency share: cases, poisoned buffers, and the checks of one rank."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from moe_ep.config import FusedMoEQuantConfig
from moe_ep.dispatch.nvshmem.kernels import kernel_source
from moe_ep.dispatch.nvshmem.low_latency import KERNELS, BatchLayout
from moe_ep.kernels import jit
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceDelegate
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
from tests.ranks import needs_gpu_ranks

# NVLink multicast stays off, in the ranks too: they inherit this.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")

NAME = "nvshmem_low_latency"
_COMPILERS = 4
BF16, F16 = torch.bfloat16, torch.float16
# Those of the other backends, in the dtypes and hidden sizes that this one takes.
SHARED_CASES = [
    replace(
        case, dtype=BF16 if case.dtype is torch.float32 else case.dtype, hidden_size=-(-case.hidden_size // 16) * 16
    )
    for case in CASES
]
_HIDDEN, _TOPK, _EXPERTS = (128, 2048, 2880, 7168), (1, 2, 8, 16), (8, 64, 256, 257)
_TOKENS = ((0,), (7, 32, 1), (128,), (32, 0, 128, 1))
# Every K with every top-k, and of both with every number of experts, tokens and wire: sums in the field of four.
_PRODUCT = ((0, 0, 0, 0), (0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2))
GRID = [
    Case(
        tokens=_TOKENS[i ^ _PRODUCT[2][j]],
        hidden_size=_HIDDEN[i],
        topk=_TOPK[j],
        num_experts=max(_EXPERTS[i ^ j], _TOPK[j]),
        capacity=128,
        dtype=BF16,
        code_dtype=(None, torch.float8_e4m3fn, None, torch.int8)[i ^ _PRODUCT[3][j]],
        seed=4 * i + j,
    )
    for i, j in itertools.product(range(4), repeat=2)
]
FACES = ("expanded", "by_reference")
FORCE = "MOE_EP_NVSHMEM_FORCE_DEVICE_API"
# What goes through NVSHMEM's device library in every run: few kernels, since they take long to compile. Everything does
# with MOE_EP_NVSHMEM_FORCE_DEVICE_API=1.
ACROSS_HOSTS = [
    Case(dtype=BF16, hidden_size=256, code_dtype=code_dtype, **how)
    for code_dtype in (None, torch.float8_e4m3fn, torch.int8)
    for how in ({"placement": "round_robin"}, {"routing": "masked"}, {"routing": "one_rank"}, {"tokens": (0, 0, 7)})
]

WORLD_SIZES = [
    pytest.param(1, marks=pytest.mark.gpu),
    pytest.param(2, marks=pytest.mark.gpu2),
    pytest.param(3, marks=[pytest.mark.gpu2, needs_gpu_ranks(3)]),
    pytest.param(4, marks=[pytest.mark.gpu2, needs_gpu_ranks(4)]),
    pytest.param(8, marks=pytest.mark.gpu8),
]


def compile_together(rank: int, world_size: int, cases: list[Case]) -> None:
    """Kernels of all cases, each compiled by one rank, several at a time."""
    device_api = world_size > 1 and os.environ.get(FORCE) == "1"
    compile_several(sorted(sources_of(cases, rank, world_size, device_api), key=repr)[rank::world_size])
    torch.distributed.barrier()


def sources_of(cases: list[Case], rank: int, world_size: int, device_api: bool = False) -> set[jit.KernelSource]:
    """The kernels of these cases."""
    sources = set()
    for case in cases:
        quant_config = FusedMoEQuantConfig(dispatch_dtype=case.code_dtype)
        layout = BatchLayout.of(make_setting(case, rank, world_size).config, quant_config, device_api=device_api)
        sources |= {kernel_source(name, layout, case.dtype) for name in KERNELS}
    return sources


def compile_several(sources: Iterable[jit.KernelSource], at_once: int = _COMPILERS) -> None:
    """Into the cache on disk."""
    device = torch.device("cuda", torch.cuda.current_device())
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda source: source.compile_ahead(device), sources))


def across_hosts(rank: int, world_size: int, check: Callable, *args: object) -> object:
    """A check in which every other rank is out of reach."""
    before = os.environ.get(FORCE, "0")
    os.environ[FORCE] = "1"
    try:
        return check(rank, world_size, *args)
    finally:
        os.environ[FORCE] = before


def make(setting, face):
    backend = make_backend(setting, NAME)
    if face == "by_reference":
        backend.hand_over_row_ids()
    return backend


def poison(backend) -> None:
    """Before a step of all ranks, where each has a process."""
    fill_with_nan(backend)
    torch.cuda.synchronize()
    torch.distributed.barrier()


def fill_with_nan(backend) -> None:
    """Fills what rows and results travel through with bytes that are NaN in every dtype."""
    channel, layout = backend.channel, backend.layout
    for batch, name in itertools.product(range(2), ("rows", "results", "row_packets", "result_packets")):
        start = batch * layout.batch_bytes + layout.offsets[name]
        channel.region.local[start : start + layout.sizes[name]] = 0xFF


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
    args = prepare_args(setting, "cuda")
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
    compile_together(rank, world_size, cases)
    checked = 0
    for index, (case, face) in enumerate(itertools.product(cases, FACES)):
        try:
            check_case(rank, world_size, case, face, ("sync", "async")[index // 2 % 2])
        except AssertionError as error:
            raise AssertionError(f"{face}, {case}, rank {rank} of {world_size}: {error}") from error
        checked += 1
    return checked


def check_grid(rank: int, world_size: int) -> int:
    """Large batches against batched_all_to_all on NCCL: the same rows, counts and combined bits."""
    compile_together(rank, world_size, GRID)
    checked = 0
    for case, face in itertools.product(GRID, FACES):
        setting = make_setting(case, rank, world_size)
        backend = make(setting, face)
        reference = make_backend(setting, "batched_all_to_all")
        poison(backend)
        args = prepare_args(setting, "cuda")
        outputs = []
        batches = [expanded(each.prepare(*args)) for each in (backend, reference)]
        counts = [batch[2].expert_num_tokens for batch in batches]
        assert torch.equal(*counts), (face, case)
        factor = 1 + torch.arange(len(counts[0]), device="cuda")[:, None, None] / 8
        held = torch.arange(batches[0][0].size(1), device="cuda") < counts[0][:, None]
        assert torch.equal(batches[0][0][held], batches[1][0][held]), (face, case)
        for each, batch in zip((backend, reference), batches, strict=True):
            results = torch.where(held[:, :, None], (batch[0].float() * factor).to(BF16), float("nan"))
            outputs.append(torch.full_like(args[0], float("nan")))
            each.finalize(outputs[-1], results, args[1], args[2], False, TopKWeightAndReduceDelegate())
        assert torch.equal(*outputs), (face, case)
        backend.check()
        checked += 1
    return checked

"""two_level on GPUs of one host taken for two: rows between hosts go through NVSHMEM's device library, or NCCL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from moe_ep.dispatch.nvshmem.high_throughput import Layout
from moe_ep.kernels.quantize import row_values
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceNoOP
from tests.dispatch.backend_cases import Case, make_backend, make_setting, prepare_args
from tests.dispatch.two_level_cases import RANKS_PER_HOST, check_two_level
from tests.ranks import RankPool, needs_gpu_ranks

# NVLink multicast stays off, in the ranks too: they inherit this.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")

WITHIN = "nvshmem_high_throughput"
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
# Few kernels: those for ranks out of reach are linked with the device library, which takes long.
LAYOUTS = [
    *({"code_dtype": code_dtype, "device_api": True} for code_dtype in (None, E4M3, INT8)),
    {"code_dtype": None, "passed_dtype": INT8},
]
CASES = [
    Case(dtype=torch.bfloat16, hidden_size=256, code_dtype=code_dtype, whole=whole, **how)
    for code_dtype, whole in ((None, False), (E4M3, False), (E4M3, True), (INT8, True))
    for how in ({"placement": "round_robin"}, {"routing": "masked"}, {"routing": "one_rank"}, {"tokens": (0, 0, 7)})
]


def compile_together(rank: int, world_size: int) -> None:
    """This rank's share of the kernels of both levels."""
    layouts = [Layout(num_ranks=2, capacity=1, hidden_size=256, topk=3, **more) for more in LAYOUTS]
    sources = [source for layout in layouts for source in layout.sources(CASES[0].dtype).values()]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda source: source.compile_ahead(torch.device("cuda", rank)), sources[rank::world_size]))
    torch.distributed.barrier()


def check_bits(rank: int, world_size: int, levels: tuple[str, str], ranks_per_host: int = RANKS_PER_HOST) -> int:
    """Codes, scales and what the combine leaves, against two levels of all_to_all; how many dtypes there were."""
    with pytest.MonkeyPatch.context() as machine:
        machine.setenv("MOE_EP_RANKS_PER_HOST", str(ranks_per_host))
        for code_dtype in (E4M3, INT8):
            setting = make_setting(replace(CASES[0], code_dtype=code_dtype), rank, world_size)
            *args, quant_config = prepare_args(setting, "cuda")
            found = []
            for each in (levels, ("all_to_all", "all_to_all")):
                backend = make_backend(setting, "two_level", levels=each)
                rows, scales, _, ids, weights = backend.prepare(*args, quant_config.with_input_dtype(code_dtype))
                assert rows.dtype == code_dtype and scales is not None and scales.dtype == torch.float32
                output = torch.full_like(args[0], float("nan"))
                results = row_values(rows, scales).bfloat16() * 3
                backend.finalize(output, results, weights, ids, False, TopKWeightAndReduceNoOP())
                backend.check()
                found.append((rows.contiguous().view(torch.uint8), scales.contiguous(), ids, weights, output))
            assert all(map(torch.equal, *found)), code_dtype
    return 2


@contextmanager
def hosts(world_size: int, ranks_per_host: int = RANKS_PER_HOST) -> Iterator[RankPool]:
    """Ranks that are no others', since NVSHMEM learns of the hosts when it starts."""
    with pytest.MonkeyPatch.context() as machine:
        machine.setenv("MOE_EP_RANKS_PER_HOST", str(ranks_per_host))
        pool = RankPool(world_size, "nccl")
    try:
        yield pool
    finally:
        pool.close()


@pytest.mark.gpu2
@needs_gpu_ranks(4)
def test_two_hosts_of_two_gpus_against_plain_loops() -> None:
    with hosts(4) as pool:
        pool.run(compile_together)
        for across in (WITHIN, "all_to_all"):
            assert pool.run(check_two_level, CASES, "cuda", (across, WITHIN), limit_s=120) == [len(CASES)] * 4
            assert pool.run(check_bits, (across, WITHIN), limit_s=60) == [2] * 4


@pytest.mark.gpu2
@needs_gpu_ranks(2)
@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_codes_between_two_gpus(ranks_per_host: int) -> None:
    """Either level alone has another rank."""
    with hosts(2, ranks_per_host) as pool:
        for across in (WITHIN, "all_to_all"):
            assert pool.run(check_bits, (across, WITHIN), ranks_per_host, limit_s=150) == [2] * 2

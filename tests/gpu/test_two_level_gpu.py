"""two_level on 4 GPUs of one host taken for two: rows between hosts go through NVSHMEM's device library, or NCCL."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_ep.dispatch.nvshmem.high_throughput import KERNELS, Layout, kernel_source
from tests.dispatch.backend_cases import Case
from tests.dispatch.two_level_cases import check_two_level
from tests.ranks import RankPool, needs_gpu_ranks

# NVLink multicast stays off, in the ranks too: they inherit this.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")

WITHIN = "nvshmem_high_throughput"
# Few kernels: those for ranks out of reach are linked with the device library, which takes long.
CASES = [
    Case(dtype=torch.bfloat16, hidden_size=256, code_dtype=code_dtype, **how)
    for code_dtype in (None, torch.float8_e4m3fn)
    for how in ({"placement": "round_robin"}, {"routing": "masked"}, {"routing": "one_rank"}, {"tokens": (0, 0, 7)})
]


def compile_together(rank: int, world_size: int) -> None:
    """This rank's share of the kernels of both levels; plain rows within a host."""
    sources = [
        kernel_source(
            name,
            Layout(num_ranks=2, capacity=1, hidden_size=256, topk=3, code_dtype=code_dtype, device_api=api),
            CASES[0].dtype,
        )
        for name, (code_dtype, api) in itertools.product(
            KERNELS, ((None, True), (torch.float8_e4m3fn, True), (None, False))
        )
    ]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda source: source.compile_ahead(torch.device("cuda", rank)), sources[rank::world_size]))
    torch.distributed.barrier()


@pytest.mark.gpu2
@needs_gpu_ranks(4)
def test_two_hosts_of_two_gpus_against_plain_loops() -> None:
    # NVSHMEM learns of the hosts when it starts, so these ranks are no others'.
    os.environ["MOE_EP_RANKS_PER_HOST"] = "2"
    try:
        pool = RankPool(4, "nccl")
    finally:
        del os.environ["MOE_EP_RANKS_PER_HOST"]
    try:
        pool.run(compile_together)
        for across in (WITHIN, "all_to_all"):
            assert pool.run(check_two_level, CASES, "cuda", (across, WITHIN), limit_s=60) == [len(CASES)] * 4
    finally:
        pool.close()

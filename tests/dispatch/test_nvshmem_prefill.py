"""The NVSHMEM prefill backend without a GPU: its kernels compile, and its symmetric block has room for everything."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_ep.dispatch.nvshmem.high_throughput_block import KERNELS, Block, Layout, kernel_source
from moe_ep.kernels import jit


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("hidden_size", "topk", "num_ranks", "fp8", "dtype"),
    [(7168, 8, 8, False, torch.bfloat16), (2880, 32, 1, True, torch.float16)],
)
def test_kernels_compile_without_spills(
    arch: str, hidden_size: int, topk: int, num_ranks: int, fp8: bool, dtype: torch.dtype
) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    pytest.importorskip("cuda.bindings.nvrtc", reason="the bindings of NVRTC are not installed")
    layout = Layout(num_ranks=num_ranks, capacity=64, hidden_size=hidden_size, topk=topk, fp8=fp8)
    for name in KERNELS:
        resources = jit.compile_only(kernel_source(name, layout, dtype), arch)
        assert (resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0), name


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("topk", [1, 8, 32])
def test_parts_of_the_block_do_not_overlap_and_are_aligned(fp8: bool, topk: int) -> None:
    layout = Layout(num_ranks=4, capacity=5, hidden_size=2000, topk=topk, fp8=fp8, batches_in_flight=3)
    ends = [offset + layout.sizes[name] for name, offset in layout.offsets.items()]
    begins = list(layout.offsets.values())
    assert all(begin % 512 == 0 for begin in begins)
    assert all(end <= begin for end, begin in zip(ends, [*begins[1:], layout.batch_bytes], strict=True))
    fp8_row = {1: 2176, 8: 2176, 32: 2432}[topk]  # 2000 codes, 16 scales, ids and weights, up to a multiple of 128
    assert layout.sizes["rows"] == 4 * 5 * (fp8_row if fp8 else 4000)
    assert layout.sizes["results"] == 5 * min(4, topk) * 4000
    assert layout.symmetric_bytes == 3 * layout.batch_bytes
    assert layout.plain_bytes == 3 * (4 * 4 * 5 + (2 * 2000 * 4 * 5 if fp8 else 0))


def test_a_batch_takes_free_parts_and_then_those_of_the_oldest() -> None:
    parts = [SimpleNamespace(number=0, is_open=False) for _ in range(2)]
    block = SimpleNamespace(batches=parts)
    assert [parts.index(Block.take(block)) for _ in range(3)] == [0, 1, 0]
    assert [each.number for each in parts] == [3, 2]
    parts[1].is_open = False
    assert Block.take(block) is parts[1]
    parts[0].is_open = parts[1].is_open = False
    assert Block.take(block) is parts[0]

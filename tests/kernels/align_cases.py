"""Index lists of the kernels against plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_ep.kernels.align import align_reference, batched_moe_align_block_size


@dataclass(frozen=True, kw_only=True)
class Case:
    num_slots: int
    num_experts: int = 8
    block_size: int = 16
    map: str = ""
    skew: bool = False
    dtype: torch.dtype = torch.int32

    def __str__(self) -> str:
        return (
            f"n{self.num_slots}-E{self.num_experts}-b{self.block_size}{'-' * bool(self.map)}{self.map}"
            f"{'-skew' * self.skew}{'-int64' * (self.dtype == torch.int64)}"
        )


CASES = [
    Case(num_slots=0),
    Case(num_slots=1, num_experts=1, block_size=1),
    Case(num_slots=20, num_experts=300, block_size=8, map="names"),
    Case(num_slots=300, map="names", dtype=torch.int64),
    Case(num_slots=300, num_experts=40, block_size=5, map="keys"),
    Case(num_slots=1030, num_experts=7, block_size=64, skew=True),
    *(
        Case(num_slots=num_slots, num_experts=num_experts, block_size=block_size, map=map, skew=skew)
        for num_slots in (8, 128, 1024, 1025, 32768, 262144)
        for num_experts in (1, 64, 257, 2048)
        for block_size, map, skew in ((1, "", False), (64, "names", True), (128, "keys", False))
    ),
]


def check_lists(case: Case) -> None:
    """The CUDA kernel against plain torch, bitwise."""
    from moe_ep.kernels.align import cuda_align, cuda_sort

    generator = torch.Generator().manual_seed(case.num_slots + case.num_experts)
    ids = torch.randint(-1, case.num_experts + 1, (case.num_slots,), generator=generator)
    if case.skew:
        ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.9, case.num_experts // 2, ids)
    ids = ids.to(case.dtype)
    local = torch.randperm(case.num_experts, generator=generator).to(torch.int32)
    local = torch.where(local < (case.num_experts + 1) // 2, local, -1)
    maps = (local if case.map == "keys" else None, local if case.map == "names" else None)
    length = case.num_slots + case.num_experts * (case.block_size - 1)
    shape = (case.block_size, case.num_experts, length)
    expected = align_reference(ids, *shape, *maps)
    on_device = [None if mapped is None else mapped.cuda() for mapped in maps]
    got = cuda_align(ids.cuda(), *shape, *on_device)
    for ours, want in zip(got, expected, strict=True):
        assert ours.dtype == torch.int32
        assert torch.equal(ours.cpu(), want), str(case)
    if case.block_size == 1 and case.map != "names":
        for ours, want in zip(cuda_sort(ids.cuda(), case.num_experts, on_device[0]), expected[::2], strict=True):
            assert torch.equal(ours.cpu(), want), str(case)


def check_batched(device: str) -> None:
    """The Triton kernel against plain torch, bitwise."""
    from moe_ep.kernels.align import triton_batched_align

    generator = torch.Generator().manual_seed(0)
    for num_experts, most, block_size in ((1, 1, 1), (5, 8, 4), (3, 300, 64), (32, 40, 16)):
        counts = torch.randint(0, most + 1, (num_experts,), generator=generator, dtype=torch.int32)
        batched = triton_batched_align(most + 3, block_size, counts.to(device))
        for ours, want in zip(batched, batched_moe_align_block_size(most + 3, block_size, counts), strict=True):
            assert torch.equal(ours.cpu(), want)

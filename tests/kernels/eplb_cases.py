"""Maps and batches that the EPLB mapping is tested with, and the comparison of the kernel with the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_ep.eplb.mapping import map_reference


def make_maps(replica_counts: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(logical_to_physical_map, logical_replica_count, num_physical) with physical ids in shuffled order."""
    num_physical = sum(replica_counts)
    order = torch.randperm(num_physical, generator=torch.Generator().manual_seed(seed)).tolist()
    mapping = torch.full((len(replica_counts), max(replica_counts) + 1), -1)
    for expert, count in enumerate(replica_counts):
        mapping[expert, :count] = torch.tensor([order.pop() for _ in range(count)])
    return mapping, torch.tensor(replica_counts), num_physical


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of T tokens whose experts differ in popularity, and how many replicas there are beyond the first."""

    num_experts: int
    redundant: int
    ep_size: int
    num_tokens: int
    top_k: int = 8
    padded: bool = False
    dtype: torch.dtype = torch.int32

    def __str__(self) -> str:
        return f"E{self.num_experts}+{self.redundant}-R{self.ep_size}-T{self.num_tokens}-k{self.top_k}"

    def make(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int | torch.Tensor]:
        """(ids, map, count, num_physical, num_counted) on the device."""
        generator = torch.Generator().manual_seed(self.num_tokens)
        popularity = torch.rand(self.num_experts, generator=generator) ** 4 + 1e-2
        counts = torch.ones(self.num_experts, dtype=torch.int64)
        if self.redundant:
            extra = torch.multinomial(popularity, self.redundant, replacement=True, generator=generator)
            counts += torch.bincount(extra, minlength=self.num_experts)
        mapping, counts, num_physical = make_maps(counts.tolist())
        noise = -torch.rand(self.num_tokens, self.num_experts, generator=generator).log()
        ids = (noise / popularity).topk(self.top_k, largest=False).indices
        ids[torch.rand(ids.shape, generator=generator) < 0.05] = -1
        num_counted: int | torch.Tensor = self.num_tokens
        if self.padded:
            num_counted = torch.tensor(self.num_tokens * 2 // 3, device=device)
        kinds = (ids, mapping, counts)
        ids, mapping, counts = (tensor.to(device=device, dtype=self.dtype) for tensor in kinds)
        return ids, mapping, counts, num_physical, num_counted


CASES = [
    Case(num_experts=256, redundant=8, ep_size=8, num_tokens=1),
    Case(num_experts=256, redundant=32, ep_size=32, num_tokens=32),
    Case(num_experts=256, redundant=32, ep_size=32, num_tokens=128, padded=True),
    Case(num_experts=256, redundant=64, ep_size=320, num_tokens=129, dtype=torch.int64),
    Case(num_experts=256, redundant=0, ep_size=8, num_tokens=4096),
    Case(num_experts=256, redundant=8, ep_size=8, num_tokens=4096, padded=True),
    Case(num_experts=128, redundant=128, ep_size=16, num_tokens=1000, top_k=6, dtype=torch.int64),
    Case(num_experts=4, redundant=60, ep_size=4, num_tokens=700, top_k=1),
    Case(num_experts=16, redundant=1008, ep_size=32, num_tokens=64, top_k=4),
]


def check_mapping(case: Case, device: str) -> None:
    """The kernel against the reference on the same device: ids and counts, bit for bit, twice."""
    from moe_ep.kernels.eplb_map import map_and_record

    ids, mapping, counts, num_physical, num_counted = case.make(device)
    slots_per_rank = num_physical // case.ep_size
    for rank in (0, case.ep_size - 1):
        expected_load = torch.arange(num_physical, dtype=torch.int32, device=device)
        expected = map_reference(ids, expected_load, mapping, counts, num_counted, rank, slots_per_rank)
        for dtype in (torch.int32, torch.int64):
            load = torch.arange(num_physical, dtype=torch.int32, device=device)
            found = map_and_record(ids, load, mapping, counts, num_counted, rank, slots_per_rank, dtype)
            assert found.dtype == dtype
            assert torch.equal(found.long(), expected)
            assert torch.equal(load, expected_load)

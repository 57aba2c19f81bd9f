"""The stand-in for more ranks than GPUs places every row once, and knows the way home of each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from prefill_standin import Exchange


@pytest.mark.parametrize(("num_gpus", "num_ranks"), [(2, 2), (2, 8), (4, 4), (4, 8), (3, 8)])
def test_rows_lie_side_by_side_and_find_home(num_gpus: int, num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    goes = [torch.rand(20, num_ranks, generator=generator) < 0.5 for _ in range(num_gpus)]
    exchange = Exchange(goes)
    placements = [torch.tensor(exchange.placement(gpu)) for gpu in range(num_gpus)]
    arrived: list[dict[int, tuple[int, int]]] = [{} for _ in range(num_gpus)]
    for gpu in range(num_gpus):
        slots = exchange.slots(gpu)
        sent = sorted(slots[slots >= 0].tolist())
        assert sent == list(range(int(goes[gpu].sum())))
        for rank in range(num_ranks):
            there, _ = exchange.target(gpu, rank)
            assert (there == gpu) == (rank == gpu)
            for slot in slots[:, rank][slots[:, rank] >= 0].tolist():
                row = slot + int(placements[gpu][rank])
                assert row not in arrived[there]
                arrived[there][row] = (gpu, slot)
    for gpu, placement in enumerate(placements):
        _, begin, count, home = placement[:-1].view(4, num_ranks).tolist()
        assert sorted(arrived[gpu]) == list(range(int(placement[-1])))
        for source in range(num_ranks):
            for row in range(begin[source], begin[source] + count[source]):
                assert arrived[gpu][row] == (exchange.sender(gpu, source)[0], row + home[source])

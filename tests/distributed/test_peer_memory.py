"""Tensors that processes open in each other's memory; those on GPUs are in tests/gpu."""

from __future__ import annotations

import torch

from moe_ep.distributed.exchange import gather_values
from moe_ep.distributed.peer_memory import PeerMemory
from tests.ranks import ranks


def share_nothing(rank: int, world_size: int) -> list[list[int]]:
    peers = PeerMemory(gather_values, rank, [torch.empty(0, 64), torch.empty(2, 0)])
    peers.close()
    return peers.addresses


def test_tensors_without_elements_need_no_memory() -> None:
    assert ranks(2).run(share_nothing) == [[[0, 0], [0, 0]]] * 2

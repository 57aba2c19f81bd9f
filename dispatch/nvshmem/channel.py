"""The buffers and counters that low-latency batches go through; layers of one shape take turns in one channel.

The protocol, for each batch in flight (cuda/protocol.cuh and low_latency.cuh hold the device's part):

    epoch   the batch's number, in the upper half of the ticket counters of its buffers, on each rank's own device. The
            dispatch sets the combine's counters to its epoch and the combine the dispatch's to the next, so nothing
            on the host counts, and a captured graph may be replayed.
    flags   everything a peer writes carries the epoch: in each line or packet, or in a flag that is released behind a
            row. Epochs only grow, so what is left of earlier batches is never taken for new, and nothing needs to be
            cleared. They have 32 bits and begin again with 0; before, what was not written for long is written with
            an old one (cuda/low_latency.cuh).
    rows    are written for a next batch only after this rank's combine, which waited for a result for every row that it
            had sent; by then the peer had read them. Results are written only after the owner's header came, which it
            sent behind its own combine before.
    header  and meta lines are written to every peer, also to one that this rank had no rows for and so waited for
            nothing from. Even and odd epochs have their own: to write those of epoch e + 2 a rank must have had every
            header of e + 1, which is sent behind the last reading of e.

So there is no barrier, and one set of buffers would do for batches that follow each other; there are as many sets as
batches may be open at once. To ranks of other hosts rows, results and slots are put from an outbox, and the flag
behind them; what lies in an outbox is not written again before the other rank has answered, for the reasons above.
Which set a batch takes is the first that is free, so ranks that make the calls in the same order agree on it, also
where they replay graphs that were captured for different numbers of tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from moe_ep import env
from moe_ep.dispatch.nvshmem.arena import SymmetricArena
from moe_ep.dispatch.nvshmem.faults import FailureRecord
from moe_ep.dispatch.nvshmem.kernels import buffers_type, common_type
from moe_ep.dispatch.nvshmem.layout import BATCHES_IN_FLIGHT, BatchLayout
from moe_ep.dispatch.nvshmem.meeting import agree, collect_garbage, meet
from moe_ep.dispatch.rank_group import RankGroup
from moe_ep.errors import BackendUnavailableError

_EPOCH_SHIFT = 32
_NUM_EPOCHS = 1 << 32
_channels: WeakKeyDictionary[SymmetricArena, WeakValueDictionary[str, Channel]] = WeakKeyDictionary()


def latest(epochs: Sequence[int]) -> int:
    """The last of epochs that are close together, as a signed number of 32 bits; 0 comes behind 2**32 - 1.

    Example: [0xfffffffe, 1, 0] gives 1.
    """
    ahead = max((epoch - epochs[0] + _NUM_EPOCHS // 2) % _NUM_EPOCHS for epoch in epochs)
    return (epochs[0] + ahead) % _NUM_EPOCHS - _NUM_EPOCHS // 2


class Channel:
    """Symmetric buffers for BATCHES_IN_FLIGHT batches, and what this rank's kernels share.

    Attributes:
        record: failed waits, for the host.
        alive: the EP ranks that take part.
        order: of this process's kernels.
        recoveries: how often `recover` gave up all open batches.
    """

    @torch.inference_mode(False)
    def __init__(self, arena: SymmetricArena, layout: BatchLayout, ranks: RankGroup, members: Sequence[int]) -> None:
        self.layout, self.ranks, self.members, self.order = layout, ranks, members, arena.order
        self.region = arena.reserve(layout.symmetric_bytes, "low latency")
        pointers = self.region.peer_pointers.tolist()
        unreachable = [rank for rank, pointer in enumerate(pointers) if not pointer]
        if unreachable and not layout.device_api:
            raise BackendUnavailableError(
                f"EP rank {ranks.rank} cannot map the memory of {', '.join(map(str, unreachable))} on its own host; "
                f"use all2all_backend='batched_all_to_all'"
            )
        self.record = FailureRecord(ranks, env.NVSHMEM_TIMEOUT_S.get())
        self.alive = list(range(ranks.size))
        self.recoveries = 0
        self._counters = torch.empty((BATCHES_IN_FLIGHT, 2), dtype=torch.int64, device=arena.device)
        self._status = torch.zeros(2, dtype=torch.int32, device=arena.device)
        self._free = [True] * BATCHES_IN_FLIGHT
        self._start([1] * BATCHES_IN_FLIGHT)
        self._buffers = [self._buffers_of(pointers, batch) for batch in range(BATCHES_IN_FLIGHT)]
        self._rows = [self._bytes_of("rows", batch).view(-1, layout.row_bytes) for batch in range(BATCHES_IN_FLIGHT)]
        self._timeout_ns = int(self.record.timeout_s * 1e9)

    @classmethod
    def of(cls, arena: SymmetricArena, layout: BatchLayout, ranks: RankGroup, facts: dict[str, object]) -> Channel:
        """The channel of this shape, made where any rank has none; a collective step of the ranks.

        Args:
            facts: what must be the same on every rank.

        Raises:
            ValueError: it is not.
            DispatchTimeoutError: a rank did not come.
        """
        members = torch.distributed.get_process_group_ranks(ranks.group)
        agree("nvshmem_low_latency", members, facts)
        collect_garbage(members)
        known = _channels.setdefault(arena, WeakValueDictionary())
        found = known.get(repr(layout))
        everywhere = meet("channel", members, "lacks" if found is None else "has")
        if found is None or "lacks" in everywhere:
            found = known[repr(layout)] = cls(arena, layout, ranks, members)
        return found

    def take(self) -> int:
        """The first free set of buffers; RuntimeError where all are taken."""
        for batch, is_free in enumerate(self._free):
            if is_free:
                self._free[batch] = False
                return batch
        raise RuntimeError(
            f"{BATCHES_IN_FLIGHT} batches are between prepare and finalize and nvshmem_low_latency has buffers for no "
            f"more; finalize one first, or call recover() on every rank where they were given up"
        )

    def is_idle(self) -> bool:
        """Whether no batch is between prepare and finalize."""
        return all(self._free)

    def give_back(self, batch: int) -> None:
        self._free[batch] = True

    def rows(self, batch: int, dtype: torch.dtype) -> torch.Tensor:
        """A view: received rows `[R * C, K]`, where their senders put them; of 16-bit wire dtypes."""
        return self._rows[batch].view(dtype)

    def common(self, batch: int) -> Any:
        """The part of the kernels' parameters that does not depend on the tokens."""
        return common_type(self.ranks.size)(
            buffers=self._buffers[batch],
            counters=self._counters[batch].data_ptr(),
            status=self._status.data_ptr(),
            record=self.record.words.data_ptr(),
            timeout_ns=self._timeout_ns,
        )

    def recover(self, dead: Sequence[int]) -> None:
        """Goes on without the EP ranks in `dead`; collective over the others, which must give up open batches too."""
        alive = [rank for rank in range(self.ranks.size) if rank not in dead]
        members = [self.members[rank] for rank in alive]
        torch.cuda.synchronize(self._status.device)
        mine = [latest([counter >> _EPOCH_SHIFT for counter in both]) for both in self._counters.tolist()]
        told = meet("recovery", members, " ".join(map(str, mine)))
        self.alive = alive
        self.recoveries += 1
        self._free = [True] * BATCHES_IN_FLIGHT
        self._start([latest(epochs) + 1 for epochs in zip(*(map(int, text.split()) for text in told), strict=True)])
        self.record.clear()
        meet("recovered", members)

    def _bytes_of(self, name: str, batch: int) -> torch.Tensor:
        """A view: a buffer of a batch."""
        start = batch * self.layout.batch_bytes + self.layout.offsets[name]
        return self.region.local[start : start + self.layout.sizes[name]]

    def _start(self, epochs: Sequence[int]) -> None:
        """Each set of buffers goes on with the batch of its number."""
        upper = [latest([epoch]) << _EPOCH_SHIFT for epoch in epochs]
        self._counters.copy_(torch.tensor(upper, dtype=torch.int64)[:, None])
        self._status.copy_(torch.tensor([0, sum(1 << rank for rank in self.alive)], dtype=torch.int32))
        torch.cuda.synchronize(self._status.device)

    def _buffers_of(self, pointers: Sequence[int], batch: int) -> Any:
        start, size = batch * self.layout.batch_bytes, self.ranks.size
        return buffers_type(size)(
            peers=(ctypes.c_uint64 * size)(*(pointer + start if pointer else 0 for pointer in pointers)),
            pes=(ctypes.c_int * size)(*self.region.pes),
            reachable=sum(1 << rank for rank, pointer in enumerate(pointers) if pointer),
            **self.layout.offsets,
            rank=self.ranks.rank,
            capacity=self.layout.capacity,
            row_packet_tokens=self.layout.row_packet_tokens,
        )

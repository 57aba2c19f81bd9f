"""What ranks tell each other when a collective step cannot finish: short notes in the store of the process group.

A rank that refuses a batch leaves a note before it raises; a rank whose collective failed reads the notes, and where
there are none calls the roll (`moe_ep.distributed.failure_detection`).
"""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

import torch.distributed as dist

from moe_ep.distributed.job_store import ask_store, job_store, listen_to_store, name_in_store

logger = logging.getLogger(__name__)

_READ_S = 3.0
_watchers: WeakKeyDictionary[dist.ProcessGroup, _Watcher] = WeakKeyDictionary()
# Notes of this process that stand; any backend of a group that takes part again withdraws the group's.
_standing: set[str] = set()


class Notes:
    """The notes of one process group, by rank of the group.

    As a context: what is refused inside with a ValueError is told to the others; else this rank takes part again.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._prefix = f"moe_ep/dispatch/{name_in_store(group)}"
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.withdraw()
        elif isinstance(error, ValueError):
            self.leave(str(error))

    def leave(self, text: str) -> None:
        """Tells the others that this rank does not take part, and why."""
        key = self._key(self._rank)
        _standing.add(key)
        try:
            job_store().set(key, text)
        except RuntimeError as error:
            logger.error("rank %d could not tell the others that it refuses a batch: %s", self._rank, error)

    def withdraw(self) -> None:
        """This rank takes part again."""
        key = self._key(self._rank)
        if key in _standing:
            _standing.remove(key)
            job_store().set(key, "")

    def read(self) -> dict[int, str]:
        """The notes of the other ranks; RuntimeError where the store cannot be reached."""
        return ask_store(self.read_from, _READ_S)

    def read_from(self, store: dist.Store) -> dict[int, str]:
        """As `read`, from this connection."""
        keys = {rank: self._key(rank) for rank in range(self._size) if rank != self._rank}
        found = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
        return {rank: text for rank, text in found.items() if text}

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/refused/{rank}"


def watch(group: dist.ProcessGroup) -> None:
    """Logs an error when another rank of the group refuses a batch.

    For transports where a rank waits on the device and nothing on the host can tell what for.
    """
    if group not in _watchers:
        _watchers[group] = _Watcher(Notes(group))
        listen_to_store(_watchers[group])


class _Watcher:
    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._reported: dict[int, str] = {}

    def listen(self, store: dist.Store) -> None:
        found = self._notes.read_from(store)
        for rank, text in found.items():
            if self._reported.get(rank) != text:
                logger.error("EP rank %d refused its batch; this rank will wait for it in vain: %s", rank, text)
        self._reported = found

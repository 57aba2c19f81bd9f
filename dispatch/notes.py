"""What ranks tell each other when a collective step cannot finish: short notes in the store of the process group.

A rank that refuses a batch leaves a note before it raises; a rank whose collective failed reads the notes, and where
there are none calls the roll: ranks that do not answer are the ones at fault.
"""

from __future__ import annotations

import logging
import threading
import time
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from moe_ep.job_store import job_store, roll_call

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 1.0
_watchers: WeakKeyDictionary[dist.ProcessGroup, threading.Thread] = WeakKeyDictionary()
# Notes of this process that stand; any backend of a group that takes part again withdraws the group's.
_standing: set[str] = set()


class Notes:
    """The notes of one process group, by rank of the group.

    As a context: what is refused inside with a ValueError is told to the others; else this rank takes part again.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._prefix = f"moe_ep/dispatch/{group.group_name}"
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
        """The notes of the other ranks."""
        others = (rank for rank in range(self._size) if rank != self._rank)
        return {rank: text for rank in others if (text := self._get(self._key(rank)))}

    def roll_call(self) -> list[int]:
        """The ranks whose collective did not fail too: dead, stuck, or elsewhere."""
        return roll_call(self._prefix, self._rank, self._size)

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/refused/{rank}"

    @staticmethod
    def _get(key: str) -> str:
        store = job_store()
        return store.get(key).decode() if store.check([key]) else ""


def watch(group: dist.ProcessGroup) -> None:
    """Logs an error when another rank of the group refuses a batch; one thread a group, started once.

    For transports where a rank waits on the device and nothing on the host can tell what for.
    """
    if group not in _watchers:
        thread = threading.Thread(target=_watch, args=(ref(group), Notes(group)), name="moe_ep-notes", daemon=True)
        _watchers[group] = thread
        thread.start()


def _watch(group: ref[dist.ProcessGroup], notes: Notes) -> None:
    reported: dict[int, str] = {}
    while group() is not None and dist.is_initialized():
        try:
            found = notes.read()
        except RuntimeError:
            return  # The store is gone, and with it the job.
        for rank, text in found.items():
            if reported.get(rank) != text:
                logger.error("EP rank %d refused its batch; this rank will wait for it in vain: %s", rank, text)
        reported = found
        time.sleep(_WATCH_INTERVAL_S)

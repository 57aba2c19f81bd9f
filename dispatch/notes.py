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

logger = logging.getLogger(__name__)

_ROLL_CALL_S = 2.0
_WATCH_INTERVAL_S = 1.0
_watchers: WeakKeyDictionary[dist.ProcessGroup, threading.Thread] = WeakKeyDictionary()
# Notes of this process that stand; any backend of a group that takes part again withdraws the group's.
_standing: set[str] = set()


def _store() -> dist.Store:
    """The store that the default group met in; every rank of every group reaches it."""
    return dist.distributed_c10d._get_default_store()


class Notes:
    """The notes of one process group, by rank of the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._prefix = f"moe_ep/dispatch/{group.group_name}"
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def leave(self, text: str) -> None:
        """Tells the others that this rank does not take part, and why."""
        key = self._key("refused", self._rank)
        _standing.add(key)
        try:
            _store().set(key, text)
        except RuntimeError as error:
            logger.error("rank %d could not tell the others that it refuses a batch: %s", self._rank, error)

    def withdraw(self) -> None:
        """This rank takes part again."""
        key = self._key("refused", self._rank)
        if key in _standing:
            _standing.remove(key)
            _store().set(key, "")

    def read(self) -> dict[int, str]:
        """The notes of the other ranks."""
        return {rank: text for rank in self._others() if (text := self._get(self._key("refused", rank)))}

    def roll_call(self, limit_s: float = _ROLL_CALL_S) -> list[int]:
        """The ranks whose collective did not fail too within `limit_s`: dead, stuck, or elsewhere."""
        _store().set(self._key("stopped", self._rank), "1")
        deadline = time.monotonic() + limit_s
        absent = self._others()
        while absent and time.monotonic() < deadline:
            absent = [rank for rank in absent if not self._get(self._key("stopped", rank))]
            time.sleep(0.02)
        return absent

    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _key(self, kind: str, rank: int) -> str:
        return f"{self._prefix}/{kind}/{rank}"

    @staticmethod
    def _get(key: str) -> str:
        store = _store()
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

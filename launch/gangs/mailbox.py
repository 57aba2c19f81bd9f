"""Values that workers leave for each other or, in an elastic gang, for the driver in the gang's store.

A value survives even if the worker is killed right after `put`: the kernel delivers what was sent. Values are plain
data (`moe_ep.distributed.plain_data`), because any process that reaches the store can write to it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

    from moe_ep.distributed.membership import Membership

_PREFIX = "moe_ep/mailbox"


def result_key(rank: int) -> str:
    """The key of a rank's result."""
    return f"result/{rank}"


def put(store: dist.Store, key: str, value: Any) -> None:
    """Stores a value of any size; each key is used once."""
    from moe_ep.distributed.plain_data import encode
    from moe_ep.distributed.store import set_text

    set_text(store, f"{_PREFIX}/{key}", encode(value).decode())


def take(store: dist.Store, key: str) -> Any:
    """Waits for a value, removes it from the store and returns it."""
    from moe_ep.distributed.plain_data import decode
    from moe_ep.distributed.store import delete_text, get_text

    text = get_text(store, f"{_PREFIX}/{key}")
    delete_text(store, f"{_PREFIX}/{key}", len(text))
    return decode(text.encode())


class ItemSender:
    """Sends the items of one rank, in order; all of them again when the gang goes on in another store."""

    def __init__(self, membership: Membership) -> None:
        self._log, self._rank, self._may_move = membership.log, membership.rank, membership.may_move
        self._kept: list[Any] = []
        self._count = 0
        self._sending = threading.Lock()
        membership.on_move(self._send_again)

    def __call__(self, item: Any) -> None:
        from torch.distributed import DistError

        with self._sending:
            if self._may_move:
                self._kept.append(item)
            try:
                self._put(item)
            except DistError:
                if not self._may_move:
                    raise

    def _put(self, item: Any) -> None:
        put(self._log.store, f"item/{self._rank}/{self._count}", item)
        self._count += 1

    def _send_again(self) -> None:
        with self._sending:
            self._count = 0
            for item in self._kept:
                self._put(item)


class ItemReader:
    """Reads the items of all ranks."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._counts: dict[int, int] = {}

    def read(self, ranks: Iterable[int]) -> Iterator[Any]:
        """The new items of these ranks since the last call."""
        for rank in ranks:
            while self._store.check([f"{_PREFIX}/{(key := f'item/{rank}/{self._counts.get(rank, 0)}')}"]):
                self._counts[rank] = self._counts.get(rank, 0) + 1
                yield take(self._store, key)

"""Values that the workers of an elastic gang leave for the driver in the gang's store, which outlives them.

A value survives even if the worker is killed right after `put`: the kernel delivers what was sent. Values are plain
data (`moe_ep.distributed.plain_data`), because any process that reaches the store can write to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

_PREFIX = "moe_ep/mailbox"


def put(store: dist.Store, key: str, value: Any) -> None:
    """Stores a value of any size; each key is used once."""
    from moe_ep.distributed.plain_data import encode
    from moe_ep.distributed.store import set_text

    set_text(store, f"{_PREFIX}/{key}", encode(value).decode())


def is_there(store: dist.Store, key: str) -> bool:
    """Whether the key has a value."""
    return bool(store.check([f"{_PREFIX}/{key}"]))


def take(store: dist.Store, key: str) -> Any:
    """Waits for a value, removes it from the store and returns it."""
    from moe_ep.distributed.plain_data import decode
    from moe_ep.distributed.store import delete_text, get_text

    text = get_text(store, f"{_PREFIX}/{key}")
    delete_text(store, f"{_PREFIX}/{key}", len(text))
    return decode(text.encode())


class ItemSender:
    """Sends the items of one rank, in order."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank, self._count = store, rank, 0

    def __call__(self, item: Any) -> None:
        put(self._store, f"item/{self._rank}/{self._count}", item)
        self._count += 1


class ItemReader:
    """Reads the items of all ranks."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._counts: dict[int, int] = {}

    def read(self, ranks: Iterable[int]) -> Iterator[Any]:
        """The new items of these ranks since the last call."""
        for rank in ranks:
            while is_there(self._store, key := f"item/{rank}/{self._counts.get(rank, 0)}"):
                self._counts[rank] = self._counts.get(rank, 0) + 1
                yield take(self._store, key)

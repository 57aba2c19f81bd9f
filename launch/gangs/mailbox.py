"""What the workers of an elastic gang leave for its driver in the store of the gang, which outlives them.

A worker that is killed right after `put` has left its value: the kernel delivers what was sent. Values are plain data
(`moe_ep.distributed.plain_data`), since whoever reaches the store can write there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

# The store takes at most 8 MiB at once.
_PART_BYTES = 4 << 20
_PREFIX = "moe_ep/mailbox"


def put(store: dist.Store, key: str, value: Any) -> None:
    """Leaves a value of any size; a key is used once."""
    from moe_ep.distributed.plain_data import encode

    data = encode(value).decode()  # ASCII
    starts = range(0, len(data), _PART_BYTES)
    for number, start in enumerate(starts):
        store.set(f"{_PREFIX}/{key}/{number}", data[start : start + _PART_BYTES])
    store.set(f"{_PREFIX}/{key}", str(len(starts)))


def is_there(store: dist.Store, key: str) -> bool:
    """Whether a value was left."""
    return bool(store.check([f"{_PREFIX}/{key}"]))


def take(store: dist.Store, key: str) -> Any:
    """A value that was left, and waits for it; it is gone from the store afterwards."""
    from moe_ep.distributed.plain_data import decode

    parts = [f"{_PREFIX}/{key}/{number}" for number in range(int(store.get(f"{_PREFIX}/{key}")))]
    value = decode(b"".join(map(store.get, parts)))
    for name in (f"{_PREFIX}/{key}", *parts):
        store.delete_key(name)
    return value


class ItemSender:
    """The items of one rank, in their order."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store, self._rank, self._count = store, rank, 0

    def __call__(self, item: Any) -> None:
        put(self._store, f"item/{self._rank}/{self._count}", item)
        self._count += 1


class ItemReader:
    """The items of all ranks."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._counts: dict[int, int] = {}

    def read(self, ranks: Iterable[int]) -> Iterator[Any]:
        """Those of these ranks that came since the call before."""
        for rank in ranks:
            while is_there(self._store, key := f"item/{rank}/{self._counts.get(rank, 0)}"):
                self._counts[rank] = self._counts.get(rank, 0) + 1
                yield take(self._store, key)

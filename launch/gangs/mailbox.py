"""What the workers of an elastic gang leave for its driver in the store of the gang, which outlives them.

A worker that is killed right after `put` has left its value: the kernel delivers what was sent. Values are plain data
(`moe_ep.distributed.plain_data`), since whoever reaches the store can write there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

_PREFIX = "moe_ep/mailbox"


def put(store: dist.Store, key: str, value: Any) -> None:
    """Leaves a value of any size; a key is used once."""
    from moe_ep.distributed.plain_data import encode
    from moe_ep.distributed.store import set_text

    set_text(store, f"{_PREFIX}/{key}", encode(value).decode())


def is_there(store: dist.Store, key: str) -> bool:
    """Whether a value was left."""
    return bool(store.check([f"{_PREFIX}/{key}"]))


def take(store: dist.Store, key: str) -> Any:
    """A value that was left, and waits for it; it is gone from the store afterwards."""
    from moe_ep.distributed.plain_data import decode
    from moe_ep.distributed.store import delete_text, get_text

    text = get_text(store, f"{_PREFIX}/{key}")
    delete_text(store, f"{_PREFIX}/{key}", len(text))
    return decode(text.encode())


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

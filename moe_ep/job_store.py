"""What ranks can tell each other when a collective step has failed: words in the store that the job met in."""

from __future__ import annotations

import time

import torch.distributed as dist

_ROLL_CALL_S = 2.0


def job_store() -> dist.Store:
    """The store that the default group met in; every rank of every group reaches it.

    Raises:
        RuntimeError: there is no default group (any more).
    """
    try:
        return dist.distributed_c10d._get_default_store()
    except ValueError as error:
        raise RuntimeError(str(error)) from None


def roll_call(prefix: str, rank: int, size: int) -> list[int]:
    """Says that this rank's step has failed, and returns the ranks that do not say so too within two seconds: dead,
    stuck, or elsewhere.

    Args:
        prefix: of the words in the store, one for each group.
        rank, size: of this process in the group.

    Raises:
        RuntimeError: the store cannot be reached.
    """
    store = job_store()
    store.set(f"{prefix}/stopped/{rank}", "1")
    deadline = time.monotonic() + _ROLL_CALL_S
    absent = [other for other in range(size) if other != rank]
    while absent and time.monotonic() < deadline:
        absent = [other for other in absent if not store.check([f"{prefix}/stopped/{other}"])]
        time.sleep(0.02)
    return absent

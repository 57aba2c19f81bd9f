"""How ranks can still reach each other after a collective step has failed: keys in the store of the rendezvous."""

from __future__ import annotations

import time

import torch.distributed as dist

_ROLL_CALL_S = 2.0


def job_store() -> dist.Store:
    """The store of the default group's rendezvous, which every rank of every group can reach.

    Raises:
        RuntimeError: there is no default group, or no longer one.
    """
    try:
        return dist.distributed_c10d._get_default_store()
    except ValueError as error:
        raise RuntimeError(str(error)) from None


def roll_call(prefix: str, rank: int, size: int) -> list[int]:
    """Reports that this rank's step has failed, and returns the ranks that do not report the same within two seconds,
    because they are dead, stuck or elsewhere.

    Args:
        prefix: prefix of the keys in the store, one for each group.
        rank, size: this process's rank in the group, and the group's size.

    Raises:
        RuntimeError: the store cannot be reached.
    """
    answer_roll(prefix, rank)
    store = job_store()
    deadline = time.monotonic() + _ROLL_CALL_S
    absent = [other for other in range(size) if other != rank]
    while absent and time.monotonic() < deadline:
        absent = [other for other in absent if not store.check([f"{prefix}/stopped/{other}"])]
        time.sleep(0.02)
    return absent


def answer_roll(prefix: str, rank: int) -> None:
    """Reports that this rank is not at fault; as in `roll_call`."""
    job_store().set(f"{prefix}/stopped/{rank}", "1")

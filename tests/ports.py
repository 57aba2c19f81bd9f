"""Ports that tests and the commands they start may listen at."""

from __future__ import annotations

import contextlib
import random
import socket


def free_ports(count: int = 1) -> range:
    """Neighbouring ports of 127.0.0.1 that nobody holds.

    They lie between those of Ray's workers and those that the system gives to whoever asks for any, so that no gang
    and no connection of another test takes one before it is used, and among those that steps of Slurm have.
    """
    for first in random.SystemRandom().sample(range(20_000, 30_000 - count), 1000):
        found = range(first, first + count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in found:
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return found
    raise RuntimeError(f"no {count} neighbouring ports from 20000 to 30000 are free")

"""Processes that end are noticed, on this machine by their numbers and on others by connections."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from moe_ep.distributed.liveness import PeerConnection
from tests.ranks import forkserver

LISTEN = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(600)
"""


def comes_true(condition, seconds: float = 120.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def listener():
    process = subprocess.Popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()


def test_a_process_that_never_accepts_shows_that_it_lives(listener) -> None:
    process, port = listener
    connections = [PeerConnection(("127.0.0.1", port)) for _ in range(3)]
    os.kill(process.pid, signal.SIGSTOP)  # a process that is stopped lives
    time.sleep(0.3)
    assert not any(connection.has_ended() for connection in connections)
    process.kill()
    assert comes_true(lambda: all(connection.has_ended() for connection in connections))


def test_a_process_that_cannot_be_reached_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(OSError):
        PeerConnection(("127.0.0.1", port))


def rank_0_dies(rank: int, port: int, results) -> None:
    """Rank 0, whose process holds the store, is killed; the others wait for the dispatch."""
    import torch
    import torch.distributed as dist

    from moe_ep.layer import FusedMoE

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=3)
    layer = FusedMoE(6, 2, 32, 32, params_dtype=torch.float32, all2all_backend="batched_all_to_all")
    inputs = torch.randn(4, 32), torch.randn(4, 6)
    layer(*inputs)
    time.sleep(1)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        layer(*inputs)
    except Exception as error:
        results.put((rank, type(error).__name__, str(error), time.monotonic() - start))
        results.close()
        results.join_thread()
    os._exit(0)


def test_the_death_of_the_rank_that_holds_the_store_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = forkserver()
    results = context.Queue()
    processes = [context.Process(target=rank_0_dies, args=(rank, port, results)) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        found = [results.get(timeout=600) for _ in range(2)]
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank, kind, text, elapsed in found:
        assert rank != 0 and kind == "DispatchTimeoutError" and "rank 0 died" in text and elapsed < 120

"""The store of the rendezvous: what is said where there is none, or where it does not answer."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from moe_ep.distributed.exchange import gather_texts, largest_over_ranks
from moe_ep.distributed.failure_detection import FailureDetector, Verdict
from moe_ep.distributed.store import LOOK_S, ask_store, name_in_store, rendezvous_store
from tests.ports import free_ports
from tests.ranks import forkserver


def test_a_group_that_is_gone_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="has not been initialized"):
        rendezvous_store()


def test_a_group_that_is_made_again_does_not_read_what_the_first_left() -> None:
    """As under torchrun, whose store outlives a process group: the new one has the name of the first."""
    store, names = dist.HashStore(), []
    for _ in range(2):
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        try:
            group = dist.distributed_c10d._get_default_group()
            names.append((group.group_name, name_in_store(group)))
            # As the first rank of two, of which the second one fails.
            first, second = (FailureDetector(f"failures/{name_in_store(group)}", rank, 2) for rank in range(2))
            assert first.refusals() == {}
            second.report(ValueError("it lacks something"))
            assert list(first.refusals()) == [1]
        finally:
            dist.destroy_process_group()
    assert names[0][0] == names[1][0] and names[0][1] != names[1][1]


@contextmanager
def pair(rank: int, port: int) -> Iterator[None]:
    """A default group of two processes, whose store is at this port."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=15)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


@contextmanager
def processes(count: int) -> Iterator[list[ProcessPoolExecutor]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ProcessPoolExecutor(1, mp_context=forkserver())) for _ in range(count)]


def meet(rank: int, port: int) -> tuple[list[str], int]:
    with pair(rank, port):
        told = [gather_texts("names", f"{rank} in {os.getpid()}") for _ in range(2)]
        return told[1], largest_over_ranks(rank, dist.group.WORLD)


def test_a_fresh_process_may_replace_a_rank_when_the_group_is_made_again_over_a_new_store() -> None:
    """The new store is at the address of the first."""
    port = free_ports()[0]
    with processes(3) as (survivor, first, fresh):
        pids = {process: process.submit(os.getpid).result() for process in (survivor, first, fresh)}
        for members in ((survivor, first), (survivor, fresh)):
            found = [process.submit(meet, rank, port) for rank, process in enumerate(members)]
            texts = [f"{rank} in {pids[process]}" for rank, process in enumerate(members)]
            assert [meeting.result() for meeting in found] == [(texts, 1)] * 2


def test_a_store_that_does_not_answer_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store, never = dist.HashStore(), threading.Event()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    store.set("key", "value")
    assert ask_store(lambda found: found.get("key"), 60) == b"value"
    with pytest.raises(RuntimeError, match="did not answer for 0.1 s"):
        ask_store(lambda _: never.wait(), 0.1)
    never.set()


def test_a_dead_store_is_not_told_in_stack_traces(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    timeout = timedelta(seconds=0.5)
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.PrefixStore("group", dist.TCPStore("127.0.0.1", served.port, is_master=False, timeout=timeout))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    assert ask_store(lambda found: found.check(["key"]), 60) is False
    del served
    capfd.readouterr()
    with pytest.raises(RuntimeError, match="it "):
        ask_store(lambda found: found.check(["key"]), 0.1)
    time.sleep(1.5)  # TCPStore says it after its timeout, in the thread that asked
    assert capfd.readouterr().err == ""


def connections_to(port: int) -> set[int]:
    """Numbers of this process's sockets."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or not connected
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as connection:
                    if connection.getpeername()[1:2] == (port,):
                        found.add(int(number))
    return found


def lose_a_connection(rank: int, port: int) -> Verdict | None:
    """Rank 1 loses the connection by which it answers, and is in no step while rank 0 waits for it."""
    with pair(rank, port):
        before = connections_to(port)
        detector = FailureDetector("group", rank, 2)
        if rank == 1:
            while connections_to(port) == before:
                time.sleep(0.01)
            time.sleep(2 * LOOK_S)  # until it is in use, after an attempt
            (made,) = connections_to(port) - before
            with socket.socket(fileno=os.dup(made)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            time.sleep(2 * LOOK_S)  # until it is missed
        dist.barrier()
        if rank == 1:
            return None
        with pytest.raises(RuntimeError):
            detector.wait_until(0.2, lambda: False)
        return detector.verdict()


def test_a_rank_that_lost_a_connection_to_the_store_answers_again() -> None:
    port = free_ports()[0]
    with processes(2) as ranks:
        found = [process.submit(lose_a_connection, rank, port) for rank, process in enumerate(ranks)]
        assert [verdict.result() for verdict in found] == [Verdict(late=True, silent=[], elsewhere=[1]), None]


def test_a_rank_connects_once_the_store_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", served.port, is_master=False, timeout=timedelta(seconds=0.5))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    del served
    detectors = [FailureDetector("group", rank, 2) for rank in range(2)]
    time.sleep(4 * LOOK_S)  # until it could not be reached
    served = dist.TCPStore("127.0.0.1", store.port, is_master=True, wait_for_workers=False)
    assert served.port == store.port
    with pytest.raises(RuntimeError):
        detectors[0].wait_until(0.2, lambda: False)
    assert detectors[0].verdict() == Verdict(late=True, silent=[], elsewhere=[1])

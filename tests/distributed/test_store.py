"""The store of the rendezvous: what is said where there is none, or where it does not answer."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch.distributed as dist

from moe_ep.distributed.exchange import gather_texts, largest_over_ranks
from moe_ep.distributed.failure_detection import FailureDetector
from moe_ep.distributed.store import ask_store, name_in_store, rendezvous_store
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


def meet(rank: int, port: int) -> tuple[list[str], int]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=15)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    try:
        told = [gather_texts("names", f"{rank} in {os.getpid()}") for _ in range(2)]
        largest = largest_over_ranks(rank, dist.group.WORLD)
        dist.barrier()
        return told[1], largest
    finally:
        dist.destroy_process_group()


def test_a_fresh_process_may_replace_a_rank_when_the_group_is_made_again_over_a_new_store() -> None:
    """The new store is at the address of the first."""
    port = free_ports()[0]
    with ExitStack() as stack:
        survivor, first, fresh = (
            stack.enter_context(ProcessPoolExecutor(1, mp_context=forkserver())) for _ in range(3)
        )
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

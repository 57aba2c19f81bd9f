"""Ranks that refuse, die or sleep: the others end at the deadline, with the name of the one at fault."""

from __future__ import annotations

import logging
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moe_ep.dispatch.notes import Notes, watch
from moe_ep.distributed.job_store import job_store
from moe_ep.errors import DispatchTimeoutError
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceDelegate, TopKWeightAndReduceNoOP
from tests.dispatch.backend_cases import (
    BACKENDS,
    Case,
    check_batched,
    make_backend,
    make_setting,
    prepare_args,
)
from tests.ranks import RankPool, ranks

# Long enough for ranks of a busy machine to come to the same step, and far below what the tests give up after.
TIMEOUT_S = 4.0


def refuse(rank: int, world_size: int) -> tuple[str, float, tuple[int, ...]]:
    """Rank 1 hands over more than its capacity and goes away; what each rank got, and after how long."""
    backend = make_backend(make_setting(Case(), rank, world_size), "batched_all_to_all")
    tokens = (3, 9, 4) if rank == 1 else (3, 2, 4)
    args = prepare_args(make_setting(Case(tokens=tokens), rank, world_size), "cpu")
    dist.barrier()
    start = time.monotonic()
    try:
        backend.prepare(*args)
    except ValueError as error:
        return str(error), time.monotonic() - start, ()
    except DispatchTimeoutError as error:
        return str(error), time.monotonic() - start, error.ranks
    raise AssertionError("prepare returned")


def test_over_capacity_is_refused_and_the_peers_learn_who() -> None:
    pool = RankPool(3, timeout_s=TIMEOUT_S)
    try:
        results = pool.run(refuse)
    finally:
        pool.close()
    message, elapsed, _ = results[1]
    assert message.startswith("a1 has 9 tokens and the capacity is 8 per rank; send at most 8")
    assert "max_num_tokens=9" in message and elapsed < TIMEOUT_S
    for peer in (0, 2):
        text, elapsed, blamed = results[peer]
        assert blamed == (1,)
        assert (
            f"the dispatch did not finish on EP rank {peer} (deadline 4 s): rank 1 refused its batch: a1 has 9" in text
        )
        assert elapsed < 5 * TIMEOUT_S


def refuse_and_return(rank: int, world_size: int) -> bool:
    """Rank 1 is refused, and comes back with less before the deadline."""
    setting = make_setting(Case(tokens=(3, 2, 4)), rank, world_size)
    backend = make_backend(setting, "batched_all_to_all")
    if rank == 1:
        with pytest.raises(ValueError, match="capacity"):
            backend.prepare(*prepare_args(make_setting(Case(tokens=(3, 9, 4)), rank, world_size), "cpu"))
    check_batched(setting, backend.prepare(*prepare_args(setting, "cpu")))
    dist.barrier()
    return not backend.ranks.notes.read()


def test_a_rank_may_come_back_with_a_smaller_batch() -> None:
    assert ranks(3).run(refuse_and_return) == [True] * 3


def die(rank: int, world_size: int, name: str) -> None:
    """Rank 1 dies between dispatch and combine."""
    setting = make_setting(Case(), rank, world_size)
    backend = make_backend(setting, name)
    args = prepare_args(setting, "cpu")
    result = backend.prepare(*args)
    if rank == 1:
        os._exit(7)
    weights, ids = (args[1], args[2]) if result[3] is None else (result[4], result[3])
    batched = name == "batched_all_to_all"
    reduce_impl = TopKWeightAndReduceDelegate() if batched else TopKWeightAndReduceNoOP()
    backend.finalize(torch.empty_like(args[0]), result[0], weights, ids, False, reduce_impl)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_dead_rank_is_named(name: str) -> None:
    pool = RankPool(3, timeout_s=TIMEOUT_S)
    with pytest.raises(AssertionError) as failure:
        pool.run(die, name)
    text = str(failure.value)
    assert "rank 1: the process died" in text
    for peer in (0, 2):
        assert f"DispatchTimeoutError: the combine did not finish on EP rank {peer} (deadline 4 s): rank 1 did" in text


def miss_a_step(rank: int, world_size: int) -> tuple[str, tuple[int, ...]]:
    """Rank 1 of two hosts of two ranks stays away; ranks 2 and 3 are of the other host."""
    os.environ["MOE_EP_RANKS_PER_HOST"] = "2"
    setting = make_setting(Case(), rank, world_size)
    backend = make_backend(setting, "two_level", levels=("all_to_all", "all_to_all"))
    if rank == 1:
        job_store().wait([f"rank {other} has given up" for other in (0, 2, 3)], timedelta(seconds=60))
        return "", ()
    with pytest.raises(DispatchTimeoutError) as failure:
        backend.prepare(*prepare_args(setting, "cpu"))
    job_store().set(f"rank {rank} has given up", "")
    return str(failure.value), failure.value.ranks


def test_ranks_of_all_hosts_name_the_one_that_stays_away() -> None:
    pool = RankPool(4, timeout_s=TIMEOUT_S)
    try:
        results = pool.run(miss_a_step)
    finally:
        pool.close()
    for rank in (0, 2, 3):
        text, blamed = results[rank]
        assert text.startswith(f"the dispatch did not finish on EP rank {rank} (deadline 4 s): rank 1 did not")
        assert blamed == (1,)


def come_at_different_times(rank: int, world_size: int) -> None:
    """Rank 1 is stopped and rank 3 stays away; the deadlines of the others end one after the other."""
    setting = make_setting(Case(), rank, world_size)
    backend = make_backend(setting, "all_to_all")
    backend.ranks.must_agree({}, torch.device("cpu"))
    others = [f"rank {other} has given up" for other in (0, 2, 4)]
    if rank == 1:
        job_store().set("process of rank 1", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 3:
        stopped = int(job_store().get("process of rank 1"))
        try:
            job_store().wait(others, timedelta(seconds=60))
        finally:
            os.kill(stopped, signal.SIGKILL)
        return
    time.sleep(rank * TIMEOUT_S / 5)
    try:
        backend.prepare(*prepare_args(setting, "cpu"))
    finally:
        job_store().set(f"rank {rank} has given up", "")


def test_only_ranks_at_fault_are_named_whenever_deadlines_end() -> None:
    pool = RankPool(5, timeout_s=TIMEOUT_S)
    with pytest.raises(AssertionError) as failure:
        pool.run(come_at_different_times)
    text = str(failure.value)
    for rank in (0, 2, 4):
        assert (
            f"DispatchTimeoutError: the dispatch did not finish on EP rank {rank} (deadline 4 s): rank 1 did not "
            f"answer (dead, stuck or late) and rank 3 did not take part (alive, but late or elsewhere): "
        ) in text


def sleep(rank: int, world_size: int) -> tuple[int, ...]:
    """Rank 0 is busy elsewhere until rank 1 has given up, at a deadline shorter than the group's."""
    os.environ["MOE_EP_DISPATCH_TIMEOUT_S"] = "0.7"
    setting = make_setting(Case(), rank, world_size)
    backend = make_backend(setting, "all_to_all")
    if rank == 0:
        job_store().wait(["rank 1 has given up"], timedelta(seconds=30))
        return ()
    with pytest.raises(DispatchTimeoutError, match=r"deadline 0.7 s\): rank 0 did not take part") as failure:
        backend.prepare(*prepare_args(setting, "cpu"))
    job_store().set("rank 1 has given up", "")
    return failure.value.ranks


def test_a_late_rank_is_named_at_the_deadline_of_the_environment() -> None:
    pool = RankPool(2)
    try:
        assert pool.run(sleep) == [(), (0,)]
    finally:
        pool.close()


def see_a_note(rank: int, world_size: int) -> list[str]:
    """What the watcher of rank 0 logs when rank 1 leaves a note, which another object of rank 1's withdraws."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("moe_ep.dispatch.notes")
    logger.addHandler(handler)
    group = dist.distributed_c10d._get_default_group()
    dist.barrier()
    if rank == 1:
        Notes(group).leave("too much")
        dist.barrier()
        Notes(group).withdraw()
        dist.barrier()
        return []
    watch(group)
    watch(group)
    deadline = time.monotonic() + 30
    while not logged and time.monotonic() < deadline:
        time.sleep(0.05)
    dist.barrier()
    dist.barrier()
    assert Notes(group).read() == {}
    logger.removeHandler(handler)
    return logged


def test_the_watcher_names_the_rank() -> None:
    pool = RankPool(2)
    try:
        logged = pool.run(see_a_note)[0]
    finally:
        pool.close()
    assert logged == ["EP rank 1 refused its batch; this rank will wait for it in vain: too much"]

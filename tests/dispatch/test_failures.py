"""Ranks that refuse, die or sleep: the others end soon or at the deadline, with the name of the one that failed."""

from __future__ import annotations

import logging
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ep.distributed.failure_detection import FailureDetector
from moe_ep.distributed.store import rendezvous_store
from moe_ep.errors import DispatchTimeoutError
from moe_ep.kernels.reference import BatchedReferenceExperts, ReferenceExperts
from moe_ep.layer import FusedMoE
from moe_ep.modular_kernel import FusedMoEModularKernel
from moe_ep.modular_kernel.contracts import FusedMoEActivationFormat
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceDelegate, TopKWeightAndReduceNoOP
from tests.dispatch.backend_cases import (
    Case,
    check_batched,
    make_backend,
    make_setting,
    prepare_args,
)
from tests.ranks import RankPool, ranks

# Long enough for ranks of a busy machine to come to the same step, and far below what the tests give up after.
TIMEOUT_S = 8.0
# What ends sooner than at the deadline of a pool, which is this or longer.
LONG_S = 240.0
# A death is noticed and a refusal heard long before that: within 3 s where nothing else runs.
DEATH_S = REFUSAL_S = 100.0


def outcome(call: Any, *args: Any) -> tuple[str, float, tuple[int, ...]]:
    """What a rank raised, after how long, and the ranks that it blames."""
    start = time.monotonic()
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start, tuple(getattr(error, "ranks", ()))
    return "", time.monotonic() - start, ()


def wrong(kind: str, args: tuple) -> tuple:
    rows, weights, ids, *more = args
    if kind == "capacity":
        rows, weights, ids = (part.repeat(9, 1)[:9] for part in (rows, weights, ids))
    elif kind == "dtype":
        rows = rows.double()
    elif kind == "shape":
        rows = rows[:, :-1]
    elif kind == "device":
        ids = ids.to("meta")
    elif kind == "ids":
        ids = ids + 100
    return rows, weights, ids, *more


def refuse(rank: int, group: dist.ProcessGroup, name: str, kind: str) -> tuple[str, float, tuple[int, ...]]:
    """Rank 1 hands over what cannot be dispatched."""
    setting = make_setting(Case(tokens=(3, 2, 4)), rank, group.size())
    backend, args = make_backend(setting, name, process_group=group), prepare_args(setting, "cpu")
    dist.barrier()
    return outcome(backend.prepare, *(wrong(kind, args) if rank == 1 else args))


class Failing:
    """Experts whose call fails."""

    def run(self, call: Any) -> None:
        raise MemoryError("no room for the experts")


class FailingExperts(Failing, ReferenceExperts):
    pass


class FailingBatchedExperts(Failing, BatchedReferenceExperts):
    pass


def fail_in_experts(rank: int, group: dist.ProcessGroup, name: str) -> tuple[str, float, tuple[int, ...]]:
    setting = make_setting(Case(), rank, group.size())
    backend, config = make_backend(setting, name, process_group=group), setting.config
    batched = backend.activation_format() is FusedMoEActivationFormat.BatchedExperts
    kinds: Any = (FailingBatchedExperts, BatchedReferenceExperts) if batched else (FailingExperts, ReferenceExperts)
    kernel = FusedMoEModularKernel(backend, kinds[rank != 1](config))
    rows, ids, weights = setting.inputs[rank]
    El, K, N = config.num_local_experts, config.hidden_dim, config.intermediate_size_per_partition
    more = {"global_num_experts": config.num_experts, "expert_map": setting.expert_map}
    w1, w2 = torch.randn(El, 2 * N, K), torch.randn(El, K, N)
    dist.barrier()
    return outcome(lambda: kernel(rows, w1, w2, weights.nan_to_num(), ids, **more))


def fail_before_the_layer(
    rank: int, group: dist.ProcessGroup, backend: str, kind: str
) -> tuple[str, float, tuple[int, ...]]:
    options: Any = {"all2all_backend": backend, "max_num_tokens": 4, "process_group": group}
    layer = FusedMoE(6, 2, 32, 32, params_dtype=torch.float32, **options)
    x, logits = torch.randn(3 + rank, 32), torch.randn(3 + rank, 6)
    layer(x, logits)
    if rank == 1:
        x = {"dtype": x.half(), "shape": x[:, :8], "gradient": x.clone().requires_grad_(), "none": None}[kind]
    dist.barrier()
    return outcome(layer, x, logits)


def fail_beside_tensor_parallel_ranks(
    rank: int, group: dist.ProcessGroup, sizes: dict[str, Any]
) -> tuple[str, float, tuple[int, ...]]:
    layer = FusedMoE(6, 2, 32, 48, params_dtype=torch.float32, reduce_results=True, process_group=group, **sizes)
    x, logits = torch.ones(3, 32), torch.zeros(3, 6)
    layer(x, logits)
    dist.barrier()
    return outcome(layer, x[:, :8] if rank == 1 else x, logits)


FAILURES = [
    (refuse, ("batched_all_to_all", "capacity")),
    (refuse, ("all_to_all", "device")),
    (fail_in_experts, ("allgather_reducescatter",)),
    (fail_before_the_layer, ("batched_all_to_all", "shape")),
    (fail_before_the_layer, ("batched_all_to_all", "gradient")),
    (fail_before_the_layer, ("all_to_all", "none")),
    (fail_beside_tensor_parallel_ranks, ({"tp_size": 3},)),
    (fail_beside_tensor_parallel_ranks, ({"tp_size": 3, "batch_invariant": True},)),
    (fail_beside_tensor_parallel_ranks, ({"tp_size": 3, "ep_size": 3},)),
]


def fail_in_every_way(rank: int, world_size: int) -> list[tuple[str, float, tuple[int, ...]]]:
    return [case(rank, dist.new_group(), *args) for case, args in FAILURES]  # type: ignore[operator]


def test_what_a_rank_fails_with_is_told_to_its_peers() -> None:
    pool = RankPool(3, timeout_s=LONG_S)
    try:
        results = pool.run(fail_in_every_way)
    finally:
        pool.close()
    for case, first, failed, last in zip(FAILURES, *results, strict=True):
        assert failed[0].startswith(("ValueError", "MemoryError", "RuntimeError")) and not failed[2], case
        for text, elapsed, blamed in (first, last):
            assert text.startswith("DispatchTimeoutError") and blamed == (1,), case
            assert failed[0].partition(": ")[2] in text and elapsed < REFUSAL_S, case


def refuse_and_return(rank: int, world_size: int) -> bool:
    """Rank 1 is refused, and comes back with less at once."""
    setting = make_setting(Case(tokens=(3, 2, 4)), rank, world_size)
    backend: Any = make_backend(setting, "batched_all_to_all")
    if rank == 1:
        with pytest.raises(ValueError, match="capacity"):
            backend.prepare(*prepare_args(make_setting(Case(tokens=(3, 9, 4)), rank, world_size), "cpu"))
    check_batched(setting, backend.prepare(*prepare_args(setting, "cpu")))
    dist.barrier()
    return not backend.ranks.detector.refusals()


def test_a_rank_may_come_back_with_a_smaller_batch() -> None:
    assert ranks(3).run(refuse_and_return) == [True] * 3


# By then, peers have ended their waits for a rank that has refused a batch and stays away.
LATE_S = 5.0


def refuse_and_return_to_late_peers(rank: int, world_size: int) -> list[tuple[str, float, tuple[int, ...]]]:
    """Rank 1 is refused, in the dispatch and in the combine, and repeats them at once; rank 2 comes late."""
    layer = FusedMoE(6, 2, 32, 32, params_dtype=torch.float32, all2all_backend="all_to_all", batch_balance="off")
    x, logits = torch.randn(3, 32), torch.randn(3, 6)
    layer(x, logits)
    setting = make_setting(Case(), rank, world_size)
    backend, args = make_backend(setting, "all_to_all"), prepare_args(setting, "cpu")
    result, output = backend.prepare(*args), torch.empty_like(args[0])

    def finalize(output: torch.Tensor) -> None:
        backend.finalize(output, result[0], result[4], result[3], False, TopKWeightAndReduceNoOP())

    outcomes = []
    for call, good, bad in ((layer, (x, logits), (x[:, :8], logits)), (finalize, (output,), (output[:, :8],))):
        dist.barrier()
        if rank == 1:
            with pytest.raises(ValueError):
                call(*bad)
        if rank == 2:
            time.sleep(LATE_S)
        outcomes.append(outcome(call, *good))
    return outcomes


def test_a_rank_may_come_back_while_others_are_late() -> None:
    pool = RankPool(3, timeout_s=3 * TIMEOUT_S)
    try:
        results = pool.run(refuse_and_return_to_late_peers)
    finally:
        pool.close()
    assert [[text for text, *_ in outcomes] for outcomes in results] == [["", ""]] * 3


def return_too_late(rank: int, world_size: int) -> tuple[str, float, tuple[int, ...]]:
    """Rank 1 is refused and comes back, with rank 2, when rank 0 has given up."""
    layer = FusedMoE(6, 2, 32, 32, params_dtype=torch.float32, all2all_backend="all_to_all", batch_balance="off")
    x, logits = torch.randn(3, 32), torch.randn(3, 6)
    layer(x, logits)
    if rank == 1:
        with pytest.raises(ValueError):
            layer(x[:, :8], logits)
    if rank:
        rendezvous_store().wait(["rank 0 has given up"], timedelta(seconds=LONG_S))
        return outcome(layer, x, logits)
    result = outcome(layer, x, logits)
    rendezvous_store().set("rank 0 has given up", "")
    return result


def test_a_rank_that_gave_up_is_named() -> None:
    pool = RankPool(3, timeout_s=3 * TIMEOUT_S)
    try:
        results = pool.run(return_too_late)
    finally:
        pool.close()
    assert [blamed for *_, blamed in results] == [(1,), (0,), (0,)]
    for text, *_ in results:
        assert text.startswith("DispatchTimeoutError") and "hidden_states is (3, 8)" in text


def die(rank: int, world_size: int, name: str, step: str) -> tuple[str, float, tuple[int, ...]]:
    """Rank 1 is killed before it comes to a step."""
    levels = {"levels": ("all_to_all", "all_to_all")} if name == "two_level" else {}
    os.environ["MOE_EP_RANKS_PER_HOST"] = "2" if levels else "0"
    setting = make_setting(Case(), rank, world_size)
    backend = make_backend(setting, name, **levels)
    args, batched = prepare_args(setting, "cpu"), name == "batched_all_to_all"
    reduce_impl = TopKWeightAndReduceDelegate() if batched else TopKWeightAndReduceNoOP()

    def finalize() -> None:
        weights, ids = (args[1], args[2]) if result[3] is None else (result[4], result[3])
        backend.finalize(torch.empty_like(args[0]), result[0], weights, ids, False, reduce_impl)

    result = backend.prepare(*args)
    if step == "dispatch":
        finalize()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome(finalize) if step == "combine" else outcome(backend.prepare, *args)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("allgather_reducescatter", "combine"),
        ("all_to_all", "combine"),
        ("batched_all_to_all", "dispatch"),
        ("two_level", "combine"),
    ],
)
def test_a_dead_rank_is_named_soon(name: str, step: str) -> None:
    outcomes = survivors_of(RankPool(4, timeout_s=LONG_S), die, name, step)
    for peer in (0, 2, 3):
        text, elapsed, blamed = outcomes[peer]
        assert text.startswith(f"DispatchTimeoutError: the {step} did not finish on EP rank {peer}")
        assert "rank 1 died" in text and blamed == (1,) and elapsed < DEATH_S


def survivors_of(pool: RankPool, function: Any, *args: Any) -> dict[int, Any]:
    """What the ranks return of a function in which rank 1 dies."""
    with pytest.raises(AssertionError) as failure:
        pool.run(function, *args)
    assert "rank 1: the process died" in str(failure.value)
    return failure.value.results  # type: ignore[attr-defined]


def miss_a_step(rank: int, world_size: int) -> tuple[str, tuple[int, ...]]:
    """Rank 1 of two hosts of two ranks stays away; ranks 2 and 3 are of the other host."""
    os.environ["MOE_EP_RANKS_PER_HOST"] = "2"
    setting = make_setting(Case(), rank, world_size)
    backend = make_backend(setting, "two_level", levels=("all_to_all", "all_to_all"))
    if rank == 1:
        rendezvous_store().wait([f"rank {other} has given up" for other in (0, 2, 3)], timedelta(seconds=LONG_S))
        return "", ()
    with pytest.raises(DispatchTimeoutError) as failure:
        backend.prepare(*prepare_args(setting, "cpu"))
    rendezvous_store().set(f"rank {rank} has given up", "")
    return str(failure.value), failure.value.ranks


def test_ranks_of_all_hosts_name_the_one_that_stays_away() -> None:
    pool = RankPool(4, timeout_s=TIMEOUT_S)
    try:
        results = pool.run(miss_a_step)
    finally:
        pool.close()
    for rank in (0, 2, 3):
        text, blamed = results[rank]
        assert text.startswith(f"the dispatch did not finish on EP rank {rank} (deadline 8 s): rank 1 did not")
        assert blamed == (1,)


def come_at_different_times(rank: int, world_size: int) -> None:
    """Rank 1 is stopped and rank 3 stays away; the deadlines of the others end one after the other."""
    setting = make_setting(Case(), rank, world_size)
    backend: Any = make_backend(setting, "all_to_all")
    backend.ranks.must_agree({}, torch.device("cpu"))
    others = [f"rank {other} has given up" for other in (0, 2, 4)]
    if rank == 1:
        rendezvous_store().set("process of rank 1", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 3:
        stopped = int(rendezvous_store().get("process of rank 1"))
        try:
            rendezvous_store().wait(others, timedelta(seconds=LONG_S))
        finally:
            os.kill(stopped, signal.SIGKILL)
        return
    time.sleep(rank * TIMEOUT_S / 5)
    try:
        backend.prepare(*prepare_args(setting, "cpu"))
    finally:
        rendezvous_store().set(f"rank {rank} has given up", "")


def test_only_failed_ranks_are_named_whenever_deadlines_end() -> None:
    pool = RankPool(5, timeout_s=TIMEOUT_S)
    with pytest.raises(AssertionError) as failure:
        pool.run(come_at_different_times)
    text = str(failure.value)
    for rank in (0, 2, 4):
        assert (
            f"DispatchTimeoutError: the dispatch did not finish on EP rank {rank} (deadline 8 s): rank 1 did not "
            f"answer (dead, stuck or late) and rank 3 did not take part (alive, but late or elsewhere): "
        ) in text


def sleep(rank: int, world_size: int) -> tuple[int, ...]:
    """Rank 0 is busy elsewhere until rank 1 has given up, at a deadline shorter than the group's."""
    os.environ["MOE_EP_DISPATCH_TIMEOUT_S"] = "0.7"
    setting = make_setting(Case(), rank, world_size)
    backend = make_backend(setting, "all_to_all")
    if rank == 0:
        rendezvous_store().wait(["rank 1 has given up"], timedelta(seconds=LONG_S))
        return ()
    with pytest.raises(DispatchTimeoutError, match=r"deadline 0.7 s\): rank 0 did not take part") as failure:
        backend.prepare(*prepare_args(setting, "cpu"))
    rendezvous_store().set("rank 1 has given up", "")
    return failure.value.ranks


def test_a_late_rank_is_named_at_the_deadline_of_the_environment() -> None:
    pool = RankPool(2)
    try:
        assert pool.run(sleep) == [(), (0,)]
    finally:
        pool.close()


def hear_of_a_failure(rank: int, world_size: int) -> list[str]:
    """What rank 0 logs when rank 1 fails, which then takes part again."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("moe_ep.distributed.failure_detection")
    logger.addHandler(handler)
    detector = FailureDetector.of(dist.distributed_c10d._get_default_group())
    dist.barrier()
    if rank == 1:
        detector.report(ValueError("too much"))
        dist.barrier()
        detector.take_part()
        dist.barrier()
        return []
    detector.logs_refusals = True
    deadline = time.monotonic() + LONG_S
    while not logged and time.monotonic() < deadline:
        time.sleep(0.05)
    dist.barrier()
    dist.barrier()
    assert detector.refusals() == {}
    logger.removeHandler(handler)
    return logged


def test_a_rank_that_waits_on_the_device_logs_who_failed() -> None:
    pool = RankPool(2)
    try:
        (logged,) = pool.run(hear_of_a_failure)[0]
    finally:
        pool.close()
    assert "rank 1" in logged and "too much" in logged

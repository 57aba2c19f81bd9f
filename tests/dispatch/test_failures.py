"""Ranks that refuse, die or sleep: the others end at the deadline, with the name of the one at fault."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.contracts import ExpertTokensMetadata
from moe_ep.dispatch.batch import MAX_OPEN_BATCHES, OpenBatches, check_tensor, keep_for
from moe_ep.dispatch.notes import Notes, watch
from moe_ep.errors import DispatchTimeoutError
from moe_ep.modular_kernel import make_prepare_finalize
from moe_ep.registry import ALL2ALL_BACKENDS
from moe_ep.topk_weight_and_reduce import TopKWeightAndReduceDelegate, TopKWeightAndReduceNoOP
from tests.dispatch.backend_cases import (
    BACKENDS,
    Case,
    check_batched,
    check_case,
    make_backend,
    make_setting,
    prepare_args,
)
from tests.ranks import RankPool, ranks

TIMEOUT_S = 2.0


def refuse(rank: int, world_size: int) -> tuple[str, float, tuple[int, ...]]:
    """Rank 1 hands over more than its capacity and goes away; what each rank got, and after how long."""
    backend = make_backend(make_setting(Case(), rank, world_size), "batched_all_to_all")
    tokens = (3, 9, 4) if rank == 1 else (3, 2, 4)
    args = prepare_args(make_setting(Case(tokens=tokens), rank, world_size), "cpu")
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
    assert "max_num_tokens=9" in message and elapsed < 0.5
    for peer in (0, 2):
        text, elapsed, blamed = results[peer]
        assert blamed == (1,)
        assert (
            f"the dispatch did not finish on EP rank {peer} (deadline 2 s): rank 1 refused its batch: a1 has 9" in text
        )
        assert elapsed < 3 * TIMEOUT_S


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
        assert f"DispatchTimeoutError: the combine did not finish on EP rank {peer} (deadline 2 s): rank 1 did" in text


def sleep(rank: int, world_size: int) -> tuple[int, ...]:
    """Rank 0 is busy elsewhere; a deadline shorter than the group's."""
    os.environ["MOE_EP_DISPATCH_TIMEOUT_S"] = "0.7"
    setting = make_setting(Case(), rank, world_size)
    backend = make_backend(setting, "all_to_all")
    if rank == 0:
        time.sleep(5)
        return ()
    start = time.monotonic()
    with pytest.raises(DispatchTimeoutError, match=r"deadline 0.7 s\): rank 0 did not take part") as failure:
        backend.prepare(*prepare_args(setting, "cpu"))
    assert time.monotonic() - start < 4
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
    deadline = time.monotonic() + 10
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


def check_bad_arguments(rank: int, world_size: int) -> int:
    setting = make_setting(Case(tokens=(3,)), rank, world_size)
    rows, weights, ids, num_ids, expert_map, _, quant_config = prepare_args(setting, "cpu")
    wide = torch.zeros(3, 33, dtype=torch.int32)
    changes = [
        ({"rows": rows.double()}, r"a1 is \(3, 40\) of torch.float64; it must be \(T, K\) of f32, f16 or bf16"),
        ({"rows": rows[0]}, r"a1 is \(40,\)"),
        ({"rows": rows[:2]}, "a1 has 2 tokens and topk_ids 3"),
        ({"ids": ids.float()}, "topk_ids is .* of torch.float32; it must be"),
        ({"weights": weights.half()}, "topk_weights is .* of torch.float16; it must be f32"),
        ({"weights": weights[:, :1]}, r"topk_weights is \(3, 1\)"),
        ({"ids": wide, "weights": wide.float()}, r"have \(K, topk, dtype\) \(40, 33, .* was made for \(40, 3, torch.f"),
        ({"ids": wide[:, :0], "weights": wide[:, :0].float()}, "topk_ids has no columns; it must have at least 1"),
        ({"rows": rows[:, 1:]}, r"\(39, 3, torch.float32\) and the backend was made for \(40, 3, torch.float32\)"),
        ({"rows": rows.half()}, r"\(40, 3, torch.float16\) and the backend was made for \(40, 3, torch.float32\)"),
        ({"ids": ids + 10}, r"topk_ids goes from 1\d to 1\d; ids must be at least -1 and below num_experts \(10\)"),
        ({"ids": torch.full_like(ids, -2)}, "topk_ids goes from -2 to -2; ids must be at least -1"),
        ({"num_ids": 11}, r"num_experts is 11; the backend was made for 10 ids \(10 routed, 0 shared\)"),
        ({"on_input": True}, "apply_router_weight_on_input needs top_k 1 and topk_ids has 3 columns"),
    ]
    for name in BACKENDS:
        backend = make_backend(setting, name)
        for change, message in changes:
            given = {"rows": rows, "weights": weights, "ids": ids, "num_ids": num_ids, "on_input": False, **change}
            with pytest.raises(ValueError, match=message):
                backend.prepare(
                    given["rows"], given["weights"], given["ids"], given["num_ids"], expert_map, given["on_input"],
                    quant_config,
                )  # fmt: skip
        check_case(rank, world_size, Case(), name)
    return len(changes)


def test_bad_arguments() -> None:
    assert ranks(1).run(check_bad_arguments) == [14]


def check_construction(rank: int, world_size: int) -> None:
    config = make_setting(Case(), rank, world_size).config
    with pytest.raises(ValueError, match=r"num_local_experts is 9; with 10 routed and 0 shared experts EP rank"):
        make_prepare_finalize("all_to_all", replace(config, num_local_experts=9))
    of_four = make_setting(Case(), rank, 4).config
    with pytest.raises(ValueError, match="process_group has 2 ranks and ep_size is 4"):
        make_prepare_finalize("batched_all_to_all", of_four)
    backend = make_prepare_finalize("all_to_all", config)
    with pytest.raises(RuntimeError, match="one of the 0 batches between prepare and finalize"):
        backend.finalize(*[torch.zeros(2, 40)] * 3, torch.zeros(2, 3), False, TopKWeightAndReduceNoOP())
    backend = make_prepare_finalize("batched_all_to_all", config)
    args = prepare_args(make_setting(Case(), rank, world_size), "cpu")
    rows = backend.prepare(*args)[0]
    for wrong in (args[4].flip(0), torch.where(args[4] >= 0, 4 - args[4], -1)):
        story = f"expert_map has experts [049], .* on EP rank {rank} and rows of [05], .* are sent to it, in this order"
        with pytest.raises(ValueError, match=story):
            backend.prepare(*args[:4], wrong, *args[5:])
    output, delegate = torch.empty_like(args[0]), TopKWeightAndReduceDelegate()
    with pytest.raises(ValueError, match=r"weight_and_reduce_impl is TopKWeightAndReduceNoOP\(\)"):
        backend.finalize(output, rows, args[1], args[2], False, TopKWeightAndReduceNoOP())
    with pytest.raises(
        ValueError, match=r"output is \(\d, 39\) of torch.float32 on cpu; it must be \(\d, 40\) of torch"
    ):
        backend.finalize(output[:, 1:], rows, args[1], args[2], False, delegate)
    with pytest.raises(ValueError, match=r"fused_expert_output is \(5, 15, 40\) .* it must be \(5, 16, 40\) of torch"):
        backend.finalize(output, rows[:, 1:], args[1], args[2], False, delegate)
    # A batch whose results were refused stays open.
    backend.finalize(output, rows, args[1], args[2], False, delegate)
    # Where experts are is known without a map.
    check_batched(make_setting(Case(), rank, world_size), backend.prepare(*args[:4], None, *args[5:]))


def test_what_cannot_be_made() -> None:
    ranks(2).run(check_construction)


def test_a_group_is_needed() -> None:
    setting = make_setting(Case(), 0, 2)
    for name in BACKENDS:
        assert ALL2ALL_BACKENDS.load(name).unusable_reason() is None
        with pytest.raises(RuntimeError, match="torch.distributed is not initialised .* init_process_group first"):
            make_prepare_finalize(name, setting.config)


def test_a_tensor_of_another_kind_is_refused() -> None:
    host, f32 = torch.device("cpu"), torch.float32
    right = torch.zeros(2, 3)
    check_tensor("it", right, (2, 3), f32, host, contiguous=True)
    check_tensor("it", torch.zeros(3, 2).T, (2, 3), f32, host)
    for wrong in (torch.zeros(2, 2), right.half(), right.to("meta")):
        with pytest.raises(ValueError, match=r"it is \(2, .*; it must be \(2, 3\) of torch.float32 on cpu"):
            check_tensor("it", wrong, (2, 3), f32, host)
    with pytest.raises(ValueError, match=r"it has strides \(1, 2\); it must be contiguous"):
        check_tensor("it", torch.zeros(3, 2).T, (2, 3), f32, host, contiguous=True)


def test_open_batches() -> None:
    open_batches: OpenBatches[int] = OpenBatches()
    keys = [torch.zeros(1) for _ in range(MAX_OPEN_BATCHES + 2)]
    for index, key in enumerate(keys):
        open_batches.put(key, index)
    assert open_batches.take(keys[4]) == 4
    with pytest.raises(RuntimeError, match=f"one of the {MAX_OPEN_BATCHES - 1} batches"):
        open_batches.take(keys[1])
    for index in (9, 2, 3, 5, 6, 8):
        assert open_batches.take(keys[index]) == index
    with pytest.raises(ValueError), open_batches.taken(torch.zeros(1)) as taken:
        open_batches.put(keys[0], 0)
        assert taken == 7
        raise ValueError
    assert open_batches.take(keys[0]) == 0
    assert open_batches.take(torch.zeros(1)) == 7


class OnGpu(torch.Tensor):
    """Says that it is, and keeps the streams that it was handed to."""

    is_cuda = True  # type: ignore[assignment]

    def record_stream(self, stream: object) -> None:
        self.streams = [*getattr(self, "streams", []), stream]


class Pair(NamedTuple):
    first: object
    second: object


def test_memory_is_kept_for_a_stream_wherever_it_is_handed_over() -> None:
    tensors = [torch.zeros(1).as_subclass(OnGpu) for _ in range(4)]
    here: Any = "stream"
    keep_for(here, [Pair(tensors[0], None), (1, [tensors[1]]), ExpertTokensMetadata(*tensors[2:]), torch.zeros(1)])
    assert [tensor.streams for tensor in tensors] == [[here]] * 4


def test_no_ep_masks_what_is_elsewhere() -> None:
    config: FusedMoEConfig = make_setting(Case(), 0, 1).config
    backend = make_prepare_finalize("no_ep", config)
    assert backend.max_num_tokens_per_rank() is None and backend.num_dispatchers() == 1
    rows, weights = torch.randn(2, 40), torch.rand(2, 2)
    ids = torch.tensor([[0, 2], [-1, 1]])
    expert_map = torch.tensor([-1, 0, 1], dtype=torch.int32)
    quant_config = FusedMoEQuantConfig.unquantized()
    found = backend.prepare(rows, weights, ids, 3, expert_map, False, quant_config)
    assert found[0] is rows and found[3].tolist() == [[-1, 2], [-1, 1]] and found[4] is weights
    output = torch.empty_like(rows)
    per_slot = torch.full((2, 2, 40), float("nan"))
    per_slot[found[3] >= 0] = 1.0
    backend.finalize(output, per_slot, weights, found[3], False, TopKWeightAndReduceDelegate())
    assert torch.equal(output, weights[:, 1:].expand(2, 40))
    on_input = backend.prepare(rows, weights[:, :1], ids[:, :1], 3, expert_map, True, quant_config)[0]
    assert torch.equal(on_input, rows * weights[:, :1])
    with pytest.raises(
        ValueError, match=r"topk_weights is \(2, 1\) of torch.float32; it must be f32 of topk_ids' shape"
    ):
        backend.prepare(rows, weights[:, :1], ids, 3, expert_map, False, quant_config)
    with pytest.raises(ValueError, match=r"expert_map has shape \(3,\); .* each of num_experts \(4\)"):
        backend.prepare(rows, weights, ids, 4, expert_map, False, quant_config)

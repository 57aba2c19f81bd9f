"""nvshmem_low_latency when ranks differ, refuse or die: who is named, and how the others go on."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from moe_ep.errors import DispatchTimeoutError
from tests.dispatch.backend_cases import Case, make_setting, prepare_args, run_experts
from tests.gpu.nvshmem_cases import BF16, make
from tests.gpu.test_routed_gpu import CombiningRank
from tests.ranks import RankError, RankPool, ranks


@pytest.mark.gpu2
def test_differences_of_configuration_are_named() -> None:
    texts = ranks(2, "nccl").run(check_difference)
    assert len(set(texts)) == 1
    assert "hidden_dim is 128 on rank 0, 256 on rank 1" in texts[0]


def check_difference(rank: int, world_size: int) -> str:
    case = Case(dtype=BF16, hidden_size=128 * (1 + rank))
    with pytest.raises(ValueError) as raised:
        make(make_setting(case, rank, world_size), "expanded")
    return str(raised.value)


@pytest.mark.gpu2
def test_a_rank_that_does_not_come_is_named_and_can_be_left_out() -> None:
    pool = RankPool(2, "nccl")
    try:
        assert pool.run(check_absent) == [True, True]
        with pytest.raises(RankError) as raised:
            pool.run(check_killed)
        assert str(raised.value) == "rank 1: the process died"
    finally:
        pool.close()


def check_absent(rank: int, world_size: int) -> bool:
    os.environ["MOE_EP_NVSHMEM_TIMEOUT_S"] = "0.5"
    case = Case(dtype=BF16, hidden_size=256, tokens=(6,), seed=2)
    setting = make_setting(case, rank, world_size)
    backend = make(setting, "expanded")
    args = prepare_args(setting, "cuda")
    if rank == 1:
        with pytest.raises(ValueError, match="9 tokens and the capacity is 8"):
            backend.prepare(*(part.repeat(2, 1)[:9] for part in args[:3]), *args[3:])
        torch.distributed.barrier()
        torch.distributed.barrier()
        return True
    backend.prepare(*args)
    torch.cuda.synchronize()
    story = "the dispatch of batch 1 did not finish on EP rank 0.*rank 1 refused its batch: a1 has 9 tokens"
    with pytest.raises(DispatchTimeoutError, match=story) as raised:
        backend.check()
    assert raised.value.ranks == (1,)
    torch.distributed.barrier()
    go_on_without_rank_1(backend, setting, args)
    torch.distributed.barrier()
    return True


def check_killed(rank: int, world_size: int) -> bool:
    """Rank 1 dies between its dispatch and its combine."""
    setting = make_setting(Case(dtype=BF16, hidden_size=512, tokens=(6,)), rank, world_size)
    backend = make(setting, "expanded")
    assert backend.channel.record.timeout_s == 0.5
    args = prepare_args(setting, "cuda")
    combine(backend, setting, args)
    batch = backend.prepare(*args)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    combine(backend, setting, args, batch)
    torch.cuda.synchronize()
    story = "the combine of batch 2 did not finish on EP rank 0: rank 1 sent nothing for 0.5 s.*dead, stuck or late"
    with pytest.raises(DispatchTimeoutError, match=story) as raised:
        backend.check()
    assert raised.value.ranks == (1,)
    go_on_without_rank_1(backend, setting, args)
    return True


@pytest.mark.gpu2
def test_a_rank_dies_before_experts_combine() -> None:
    pool = RankPool(2, "nccl")
    try:
        with pytest.raises(RankError) as raised:
            pool.run(check_killed_before_experts)
        assert str(raised.value) == "rank 1: the process died"
    finally:
        pool.close()


@torch.inference_mode()
def check_killed_before_experts(rank: int, world_size: int) -> bool:
    def step(mine: CombiningRank, combines: bool) -> torch.Tensor:
        output = mine.run(mine.dispatch(combines))
        torch.cuda.synchronize()
        mine.backend.check()
        return output

    # Kernels are compiled by the first. Backends of one capacity share their memory, and its deadline.
    for capacity, timeout_s in ((8, "60"), (7, "0.5")):
        os.environ["MOE_EP_NVSHMEM_TIMEOUT_S"] = timeout_s
        mine = CombiningRank(rank, world_size, capacity, 2048, 768, 128, 8)
        for tokens in (1, capacity, 3):
            mine.draw(tokens, 128)
            torch.distributed.barrier()
            assert torch.equal(step(mine, True), step(mine, False))
    backend = mine.backend
    dispatched = mine.dispatch(True)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DispatchTimeoutError, match="rank 1 sent nothing for 0.5 s") as raised:
        mine.run(dispatched)
        torch.cuda.synchronize()
        backend.check()
    assert raised.value.ranks == (1,)
    backend.recover(dead=(1,))
    assert torch.equal(step(mine, True), step(mine, False))
    return True


def combine(backend, setting, args, batch=None) -> torch.Tensor:
    results, reduce_impl = run_experts(setting, batch or backend.prepare(*args), "batched")
    output = torch.full_like(args[0], float("nan"))
    backend.finalize(output, results, args[1], args[2], False, reduce_impl)
    return output


def go_on_without_rank_1(backend, setting, args) -> None:
    backend.recover(dead=(1,))
    for _ in range(3):
        assert bool(combine(backend, setting, args).isfinite().all())
    lost = backend.tokens_hit(args[2]).cpu()
    owners = torch.tensor([[setting.owner[int(e)] for e in row] for row in args[2].cpu()])
    assert torch.equal(lost, (owners == 1).any(dim=1)) and bool(lost.any()) and not bool(lost.all())
    backend.check()

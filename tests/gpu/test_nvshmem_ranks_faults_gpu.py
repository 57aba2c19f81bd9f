"""The NVSHMEM backends on one GPU when one of three ranks stops: who is named, and what the others go on with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moe_ep.errors import DispatchTimeoutError
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceDelegate, TopKWeightAndReduceNoOP
from tests.dispatch.backend_cases import (
    Case,
    Inputs,
    check_batched,
    check_standard,
    expected_output,
    owner_of,
    run_experts,
)
from tests.gpu.nvshmem_cases import BF16, expanded
from tests.gpu.ranks_of_one_gpu import LOW_LATENCY, Ranks, on_one_gpu

pytestmark = pytest.mark.gpu
GONE, OTHERS = 1, (0, 2)
CASE = Case(dtype=BF16, hidden_size=256, topk=8, num_experts=10, tokens=(5, 3, 8))


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("backend", [LOW_LATENCY, "nvshmem_high_throughput"])
def test_a_rank_that_stops_is_named_and_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch, backend: str, phase: str
) -> None:
    monkeypatch.setenv("MOE_EP_NVSHMEM_TIMEOUT_S", "0.3")
    on_one_gpu(monkeypatch, 3)
    ranks = Ranks(CASE, 3, backend)
    step(ranks, lambda: None)
    with pytest.raises(DispatchTimeoutError):
        if phase == "dispatch":
            stop(ranks)
        step(ranks, lambda: stop(ranks))
    torch.cuda.synchronize()
    for rank in OTHERS:
        story = f"the {phase} of batch 2 did not finish on EP rank {rank}: rank 1 sent nothing for 0.3 s"
        with pytest.raises(DispatchTimeoutError, match=story) as raised:
            ranks.backends[rank].check()
        assert raised.value.ranks == (GONE,)

    for rank in OTHERS:
        ranks.backends[rank].recover(dead=(GONE,))
        setting = ranks.settings[rank]
        owners = torch.tensor([[owner_of(setting, rank, int(e)) for e in row] for row in setting.inputs[rank].ids])
        lost = ranks.backends[rank].tokens_hit(ranks.args[rank][2])
        assert torch.equal(lost.cpu(), (owners == GONE).any(dim=1))
    for _ in range(2):
        check(ranks, *step(ranks, lambda: None))


def stop(ranks: Ranks) -> None:
    ranks.present = OTHERS


def step(ranks: Ranks, between: Callable[[], None]) -> tuple[list, list]:
    """What arrives, and what is combined."""
    received = ranks.prepare()
    between()
    results, given, reduce_impl = [None] * 3, [None] * 3, TopKWeightAndReduceDelegate()
    for rank in ranks.present:
        setting, result = ranks.settings[rank], received[rank]
        if result[2] is None:
            reduced = run_experts(setting, result, "noop")[0]
            results[rank] = reduced if len(result[0]) else torch.empty_like(result[0])
            given[rank], reduce_impl = (result[4], result[3]), TopKWeightAndReduceNoOP()
        else:
            results[rank] = run_experts(setting, expanded(result), "batched")[0]
            given[rank] = ranks.args[rank][1:3]
    return received, ranks.finalize(results, given, reduce_impl)


def check(ranks: Ranks, received: list, outputs: list) -> None:
    """The others have what there is without the rank that is gone: its tokens, and the slots of its experts."""
    for rank in OTHERS:
        setting = ranks.settings[rank]
        kept = []
        for source, (rows, ids, weights) in enumerate(setting.inputs):
            owners = torch.tensor([[owner_of(setting, source, int(e)) for e in row] for row in ids])
            few = 0 if source == GONE else len(rows)
            kept.append(Inputs(rows[:few], torch.where(owners == GONE, -1, ids)[:few], weights[:few]))
        setting = setting._replace(inputs=kept)
        if received[rank][2] is None:
            check_standard(setting, received[rank], padded=False)
        else:
            check_batched(setting, received[rank])
        assert torch.equal(outputs[rank].cpu(), expected_output(setting, 3))

"""Decode on one GPU where something comes later than all that the dispatch waits for: a whole rank behind the deadline,
and router weights behind everything else. Nobody gets a wrong result without an error."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

from moe_ep.dispatch.nvshmem import kernels
from moe_ep.errors import DispatchTimeoutError
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceDelegate
from tests.dispatch.backend_cases import Case
from tests.gpu.nvshmem_cases import BF16
from tests.gpu.ranks_of_one_gpu import LOW_LATENCY, Ranks, on_one_gpu

pytestmark = pytest.mark.gpu
CASE = Case(dtype=BF16, hidden_size=256, topk=8, num_experts=10, tokens=(5, 3))
QUARTER_SECOND = 450_000_000  # cycles

# In the kernel that sends, the loop over a batch's lines of experts and weights, and the same with rank 1's lines from
# LATE on behind a pause of 20 ms.
LOOP = "  for (int i = threadIdx.x; i < lines * RANKS; i += kThreads) {\n"
WITH_PAUSE = """  for (int pass = 0; pass < 2; ++pass)
  for (int i = threadIdx.x; i < lines * RANKS; i += kThreads) {
    if ((i % lines % kMetaLines >= LATE) != (pass == 1)) continue;
    for (int k = 0; k < 40 && pass == 1 && b.rank == 1; ++k) __nanosleep(500000);
"""


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What both ranks get, by kernels that are loaded from then on. Later ranks wait for half a second."""
    on_one_gpu(monkeypatch, 2)
    ranks = Ranks(CASE, 2, LOW_LATENCY)
    outputs = [call(ranks, rank) for rank in range(2)]
    torch.cuda.synchronize()
    for backend in ranks.backends:
        backend.check()
    monkeypatch.setenv("MOE_EP_NVSHMEM_TIMEOUT_S", "0.5")
    return outputs


def call(ranks: Ranks, rank: int, sleep: int = 0) -> torch.Tensor:
    """A rank's step, queued; each token's output is the sum of its weights."""
    args, backend = ranks.args[rank], ranks.backends[rank]
    with torch.cuda.stream(ranks.streams[rank]):
        received = backend.prepare(*args)
        torch.cuda._sleep(sleep)
        output = torch.full_like(args[0], float("nan"))
        ones = torch.ones_like(received[0])
        backend.finalize(output, ones, args[1], args[2], False, TopKWeightAndReduceDelegate())
    return output


@pytest.mark.parametrize("poison", [0, 2**24])
def test_a_rank_that_comes_too_late_is_told(right: list[torch.Tensor], poison: int) -> None:
    """Rank 0's dispatch gives up and writes no `positions`; rank 1 has come when rank 0's combine begins."""
    ranks = Ranks(CASE, 2, LOW_LATENCY)
    with torch.cuda.stream(ranks.streams[0]):  # what torch.empty gives to `positions`
        blocks = [torch.full((2 * 8 * 8,), poison, dtype=torch.int32, device="cuda") for _ in range(64)]
        torch.cuda.synchronize()
        del blocks
    call(ranks, 0, sleep=QUARTER_SECOND)
    time.sleep(0.6)
    output = call(ranks, 1)
    torch.cuda.synchronize()
    with pytest.raises(DispatchTimeoutError):
        ranks.backends[0].check()
    try:
        ranks.backends[1].check()
    except DispatchTimeoutError:
        return
    assert torch.equal(output, right[1]), "wrong, and nobody was told"


@pytest.mark.parametrize("late", ["kMetaLines - 1", "kLocalLines"], ids=["last", "all"])
def test_weights_that_come_late(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: list[torch.Tensor], late: str
) -> None:
    shutil.copytree(Path(kernels.__file__).parent / "cuda", tmp_path / "cuda")
    sends = tmp_path / "cuda" / "low_latency_dispatch.cu"
    text = sends.read_text()
    assert text.count(LOOP) == 1
    sends.write_text(text.replace(LOOP, WITH_PAUSE.replace("LATE", late)))
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    monkeypatch.setenv("MOE_EP_NVSHMEM_TIMEOUT_S", "10")  # the kernels are compiled meanwhile
    ranks = Ranks(CASE, 2, LOW_LATENCY)
    outputs = [call(ranks, rank) for rank in range(2)]
    torch.cuda.synchronize()
    for backend in ranks.backends:
        backend.check()
    for output, expected in zip(outputs, right, strict=True):
        assert torch.equal(output, expected)

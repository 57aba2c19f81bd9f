"""The NVSHMEM backends' grids for 3 and 8 ranks on one GPU: every hidden size, top-k, numbers of experts and tokens."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from moe_ep.dispatch.nvshmem.high_throughput import KERNELS, Layout, kernel_source
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceDelegate, TopKWeightAndReduceNoOP
from tests.dispatch.batch_oracle import BatchOracle
from tests.gpu.nvshmem_cases import BF16, GRID, compile_several, expanded, fill_with_nan, sources_of
from tests.gpu.ranks_of_one_gpu import LOW_LATENCY, Ranks, on_one_gpu
from tests.gpu.test_nvshmem_prefill_gpu import GRID as PREFILL_GRID

pytestmark = pytest.mark.gpu
HIGH_THROUGHPUT = "nvshmem_high_throughput"
MOST_TOKENS = 128
COMPILERS = os.cpu_count() or 1


@pytest.mark.parametrize("num_ranks", [3, 8])
def test_decode(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    on_one_gpu(monkeypatch, num_ranks)
    compile_several(sources_of(GRID, 0, num_ranks), COMPILERS)
    for index, case in enumerate(GRID):
        ranks = Ranks(case, num_ranks, LOW_LATENCY, by_reference=index % 2 == 1)
        check_decode_step(ranks)
        ranks.late = (0, num_ranks - 1)
        ranks.redraw(routing="any", seed=1)
        check_decode_step(ranks)


def check_decode_step(ranks: Ranks) -> None:
    for each in ranks.backends:
        fill_with_nan(each)
    oracles, results = [BatchOracle(setting, "cuda") for setting in ranks.settings], []
    for oracle, result in zip(oracles, ranks.prepare(), strict=True):
        batch, _, meta, _, _ = expanded(result)
        counts, rows, experts = oracle.batched()
        assert torch.equal(meta.expert_num_tokens.long(), counts), oracle.setting.case
        held = torch.arange(batch.size(1), device="cuda") < counts[:, None]
        assert torch.equal(batch[held], rows), oracle.setting.case
        left = torch.full_like(batch, float("nan"))
        of_row = experts[held.nonzero()[:, 0], None]
        left[held] = oracle.reduced(rows, of_row, torch.ones_like(of_row, dtype=torch.float32))
        results.append(left)
    outputs = ranks.finalize(results, [args[1:3] for args in ranks.args], TopKWeightAndReduceDelegate())
    for oracle, output in zip(oracles, outputs, strict=True):
        assert torch.equal(output, oracle.output()), oracle.setting.case


@pytest.mark.parametrize("num_ranks", [3, 8])
def test_prefill(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    on_one_gpu(monkeypatch, num_ranks)
    cases = [
        replace(case, tokens=tuple(min(tokens, MOST_TOKENS) for tokens in case.tokens), capacity=MOST_TOKENS)
        for case in PREFILL_GRID
    ]
    layouts = [
        Layout(
            num_ranks=num_ranks,
            capacity=MOST_TOKENS,
            hidden_size=case.hidden_size,
            topk=case.topk,
            code_dtype=case.code_dtype,
        )
        for case in cases
    ]
    compile_several({kernel_source(name, layout, BF16) for layout in layouts for name in KERNELS}, COMPILERS)
    for case in cases:
        ranks = Ranks(case, num_ranks, HIGH_THROUGHPUT)
        check_prefill_step(ranks)
        ranks.redraw(routing="any", seed=1)
        check_prefill_step(ranks)


def check_prefill_step(ranks: Ranks) -> None:
    for each in ranks.backends:
        for name in ("rows", "results"):
            each.block.part(0, name).fill_(0xFF)
    oracles, results, given = [BatchOracle(setting, "cuda") for setting in ranks.settings], [], []
    for oracle, result in zip(oracles, ranks.prepare(), strict=True):
        rows, ids, weights = oracle.standard()
        assert torch.equal(result[0], rows), oracle.setting.case
        assert torch.equal(result[3].long(), ids), oracle.setting.case
        assert torch.equal(torch.where(ids >= 0, result[4], 0.0), torch.where(ids >= 0, weights, 0.0))
        results.append(oracle.reduced(rows, ids, weights))
        given.append((result[4], result[3]))
    outputs = ranks.finalize(results, given, TopKWeightAndReduceNoOP())
    for oracle, output in zip(oracles, outputs, strict=True):
        assert torch.equal(output, oracle.output()), oracle.setting.case

"""The oracle for large batches says what the plain loops say."""

from __future__ import annotations

import pytest
import torch

from moe_ep.modular_kernel.contracts import ExpertTokensMetadata
from tests.dispatch.backend_cases import (
    CASES,
    Case,
    check_batched,
    check_standard,
    expected_output,
    make_setting,
    run_experts,
)
from tests.dispatch.batch_oracle import BatchOracle


@pytest.mark.parametrize("case", [*CASES, Case(routing="any", num_experts=4, tokens=(8, 0, 6))], ids=str)
def test_as_plain_loops(case: Case) -> None:
    for rank in range(3):
        setting = make_setting(case, rank, 3)
        oracle = BatchOracle(setting)
        rows, ids, weights = oracle.standard()
        check_standard(setting, (rows, None, None, ids, weights), padded=False)
        if len(rows):
            reduced = run_experts(setting, (rows, None, None, ids, weights), "noop")[0]
            assert torch.equal(oracle.reduced(rows, ids, weights), reduced)
        counts, found, _ = oracle.batched()
        batch = torch.full((len(counts), 3 * case.capacity, case.hidden_size), float("nan"), dtype=case.dtype)
        batch[torch.arange(batch.size(1)) < counts[:, None]] = found
        check_batched(setting, (batch, None, ExpertTokensMetadata(counts.int()), None, None))
        assert torch.equal(oracle.output(), expected_output(setting, 3))

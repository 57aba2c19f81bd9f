"""two_level against plain loops, with hosts of two ranks each made of one; what CPU and GPU tests share."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from moe_ep.dispatch.batch import wire_dtype
from moe_ep.kernels.quantize import row_values
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce
from tests.dispatch.backend_cases import (
    Case,
    Setting,
    make_backend,
    make_setting,
    owner_of,
    prepare_args,
    rank_sum,
    run_experts,
    sent_row,
)

RANKS_PER_HOST = 2
Handed = tuple[torch.Tensor, TopKWeightAndReduce]


def expected_output(setting: Setting, world_size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Ranks of a host are added up and rounded to `dtype` or the rows' own, then hosts."""
    rows = setting.inputs[setting.rank].rows
    output = torch.zeros_like(rows)
    for token in range(len(rows)):
        total = torch.zeros(rows.size(1))
        for first in range(0, world_size, RANKS_PER_HOST):
            parts = [rank_sum(setting, setting.rank, token, first + place, dtype) for place in range(RANKS_PER_HOST)]
            of_host = torch.zeros(rows.size(1))
            for part in parts:
                of_host = of_host if part is None else of_host + part.float()
            total = total + of_host.to(dtype or rows.dtype).float()
        output[token] = total.to(rows.dtype)
    return output


def check_arrived(setting: Setting, world_size: int, rows: torch.Tensor, ids: torch.Tensor) -> None:
    """Rows and ids, by (place, host, token)."""
    index = 0
    for place in range(RANKS_PER_HOST):
        for source in range(place, world_size, RANKS_PER_HOST):
            for token, its_ids in enumerate(setting.inputs[source].ids.tolist()):
                owners = [owner_of(setting, source, expert_id) for expert_id in its_ids]
                if setting.rank in owners:
                    here = [i if owner == setting.rank else -1 for i, owner in zip(its_ids, owners, strict=True)]
                    assert ids[index].tolist() == here
                    assert torch.equal(rows[index].cpu(), sent_row(setting, source, token))
                    index += 1
    assert len(rows) == len(ids) == index


def check_two_level(
    rank: int, world_size: int, cases: Sequence[Case], device: str, levels: tuple[str, str] | None
) -> int:
    """All cases, each twice with the same bits, `whole` rows as codes; how many there were."""
    os.environ["MOE_EP_RANKS_PER_HOST"] = str(RANKS_PER_HOST)
    try:
        for case in cases:
            setting = make_setting(case, rank, world_size)
            backend = make_backend(setting, "two_level", levels=levels)
            *args, quant_config = prepare_args(setting, device)
            args.append(quant_config.with_input_dtype(case.code_dtype if case.whole else None))
            for _ in range(2):
                result = backend.prepare(*args)
                assert (result[1] is not None) == case.whole
                if case.whole:
                    assert result[0].dtype == case.code_dtype and result[1].shape == (len(result[0]), 1)
                    result = (row_values(*result[:2]).to(case.dtype), None, *result[2:])
                check_arrived(setting, world_size, result[0], result[3])
                dtype = wire_dtype(case.dtype) if backend.accepts_f32_output() else case.dtype
                results, reduce_impl = run_experts(setting, result, "noop", dtype)
                output = torch.full_like(args[0], float("nan"))
                backend.finalize(output, results, result[4], result[3], case.on_input, reduce_impl)
                assert torch.equal(output.cpu(), expected_output(setting, world_size, dtype)), case
            backend.check()
    finally:
        del os.environ["MOE_EP_RANKS_PER_HOST"]
    return len(cases)

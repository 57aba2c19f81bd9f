"""Rows that are sent in 8 bits and computed as they arrive: codes and scales of every backend, values of a layer."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.kernels.quantize import quantize_rows, round_rows, split_rows
from moe_ep.layer import FusedMoE
from moe_ep.layer.methods import OnlineFp8Config, OnlineIntConfig, relative_error
from tests.dispatch.backend_cases import BACKENDS, Case, make_backend, make_setting, prepare_args
from tests.layer.moe_oracle import load, make_inputs, make_weights
from tests.ranks import ranks

INT8, E4M3 = torch.int8, torch.float8_e4m3fn
OTHERS = ["two_level", *(name for name in BACKENDS if name != "two_level")]
CASES = [
    Case(code_dtype=code_dtype, dtype=torch.bfloat16, hidden_size=hidden_size, **more)
    for code_dtype in (INT8, E4M3)
    for hidden_size, more in ((300, {"num_shared": 1}), (7, {"routing": "masked", "placement": "round_robin"}))
]


def check_codes(rank: int, world_size: int, cases: list[Case]) -> int:
    """What experts are given is what was sent, bit for bit; returns the rows that were compared."""
    compared = 0
    os.environ["MOE_EP_RANKS_PER_HOST"] = "2"
    for case in cases:
        setting = make_setting(case, rank, world_size)
        wires = [quantize_rows(given.rows, case.code_dtype, whole=True) for given in setting.inputs]
        sent = [split_rows(wire, case.hidden_size, case.code_dtype, whole=True) for wire in wires]
        for name in OTHERS:
            *args, quant_config = prepare_args(setting, "cpu")
            backend: Any = make_backend(setting, name)
            assert name != "two_level" or len(backend.by_host) == 2
            rows, scales, meta, ids, _ = backend.prepare(*args, quant_config.with_input_dtype(case.code_dtype))
            assert rows.dtype == case.code_dtype and scales is not None and scales.dtype == torch.float32
            if ids is None:
                counts = meta.expert_num_tokens.tolist()
                rows = torch.cat([rows[e, :count] for e, count in enumerate(counts)])
                scales = torch.cat([scales[e, :count] for e, count in enumerate(counts)])
            else:
                mine = (ids >= 0).any(dim=1)
                rows, scales = rows[mine], scales[mine]
            every_code = torch.cat([codes.view(torch.uint8) for codes, _ in sent])
            every_scale = torch.cat([each.contiguous().view(torch.int32) for _, each in sent])
            found = rows.contiguous().view(torch.uint8), scales.contiguous().view(torch.int32)
            for row, scale in zip(*found, strict=True):
                same = (every_code == row).all(1) & (every_scale == scale).all(1)
                assert same.any(), name
            compared += len(rows)
            plain, none, *_ = make_backend(setting, name).prepare(*args, quant_config)
            assert none is None and plain.dtype == case.dtype
    del os.environ["MOE_EP_RANKS_PER_HOST"]
    return compared


def test_experts_are_given_the_codes_and_scales_that_were_sent() -> None:
    assert all(count > 0 for count in ranks(4).run(check_codes, CASES))


K, N, E, TOP_K = 192, 160, 8, 2
SCHEMES: dict[str, tuple[Any, torch.dtype]] = {
    "int8 rows, int4 weights": (OnlineIntConfig(bits=4, group_size=32), INT8),
    "int8 rows, int8 weights": (OnlineIntConfig(bits=8, group_size=32), INT8),
    "e4m3 rows, fp8 weights": (OnlineFp8Config(), E4M3),
}


def check_layer(rank: int, world_size: int, backend: str, scheme: str) -> float:
    """The error of a layer that rounds rows once, for the wire, against loops that do so."""
    quant_config, dtype = SCHEMES[scheme]
    weights = make_weights(E, K, N)
    options = {"num_experts": E, "top_k": TOP_K, "hidden_size": K, "intermediate_size": N, "quant_config": quant_config}
    layer = load(FusedMoE(**options, dispatch_dtype=dtype, input_dtype=dtype, all2all_backend=backend), weights)
    assert layer.rounds_rows_to == dtype
    x, logits = make_inputs((3, 0, 5, 2)[rank], K, E, seed=rank)
    output, expected = layer(x, logits), torch.zeros_like(x)
    as_quantized = layer.quant_method.as_quantized
    rows = round_rows(x, dtype, K)
    for t, row in enumerate(rows):
        factors, chosen = logits[t].softmax(0).topk(TOP_K)
        for factor, index in zip(factors / factors.sum(), chosen.tolist(), strict=True):
            gate, up, down = (as_quantized(each[index]) for each in (weights.gate, weights.up, weights.down))
            hidden = apply_activation(MoEActivation.SILU, F.linear(row[None], torch.cat((gate, up))))
            expected[t] += factor * F.linear(round_rows(hidden, dtype), down)[0]
    return relative_error(output, expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("backend", OTHERS)
def test_a_layer_rounds_rows_once(backend: str, scheme: str) -> None:
    # Codes of the second product may differ where sums in another order round another way.
    assert max(ranks(4).run(check_layer, backend, scheme)) < 0.003


def check_refusal(rank: int, world_size: int) -> str:
    options = {"num_experts": E, "top_k": TOP_K, "hidden_size": K, "intermediate_size": N}
    layer = FusedMoE(**options, quant_config=OnlineIntConfig(group_size=32), dispatch_dtype=E4M3, input_dtype=INT8)
    with pytest.raises(ValueError, match="dispatch_dtype") as raised:
        load(layer, make_weights(E, K, N))
    return str(raised.value)


def test_rows_are_not_rounded_to_two_dtypes() -> None:
    assert all("torch.int8" in told and "torch.float8_e4m3fn" in told for told in ranks(2).run(check_refusal))

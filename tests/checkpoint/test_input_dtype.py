"""Rows of 8 bits in layers of checkpoints: what a checkpoint was made for, values on a CPU, refusals, the log."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep import FusedMoE
from moe_ep.checkpoint.formats import quantization_config
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.kernels.quantize import round_rows
from moe_ep.layer.methods import relative_error
from tests.checkpoint.format_cases import E, Expert, write_case

INT8, E4M3 = torch.int8, torch.float8_e4m3fn
EXACT = {INT8: 0.022, E4M3: 0.05}
PAIRS = [
    (INT8, "packed int4"),
    (INT8, "packed int4 zero points"),
    (INT8, "packed int4 act-order"),
    (INT8, "packed int8 rows"),
    (INT8, "int8 rows"),
    (E4M3, "fp8 blocks"),
    (E4M3, "fp8 of one number"),
    (E4M3, "mxfp4 per expert"),
    (E4M3, "packed int4"),
    (E4M3, "packed int4 zero points"),
]
IMPOSSIBLE = [
    (INT8, "fp8 rows", "float8_e4m3fn"),
    (INT8, "mxfp4 per expert", "float4_e2m1f"),
    (INT8, "packed int8 zero points", "uint8"),
    (E4M3, "int8 rows", "uint8b128"),
    (E4M3, "nvfp4 packed", "float4_e2m1f"),
    (INT8, "bf16", "plain"),
    (E4M3, "bf16", "plain"),
]
SIZES = (96, 160)  # K and N that are no multiples of 128
EXPERT = "model.layers.1.mlp.experts.2.up_proj"


def rounded(experts: list[Expert], rows: torch.Tensor, logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The layer as its tolerance is defined: one scale a row for w13, one for every 128 columns for w2."""
    output = torch.zeros(rows.shape)
    for t, row in enumerate(rows.float()):
        weights, chosen = logits[t].softmax(0).topk(2)
        for weight, index in zip(weights / weights.sum(), chosen.tolist(), strict=True):
            expert = experts[index]
            x = round_rows(row[None], dtype, row.numel())
            hidden = torch.nn.functional.silu(x @ expert.gate.T) * (x @ expert.up.T)
            output[t] += weight * (round_rows(hidden, dtype) @ expert.down.T)[0]
    return output


def inputs(K: int, num_tokens: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, K, generator=rng).bfloat16(), torch.randn(num_tokens, E, generator=rng)


@pytest.mark.parametrize(("dtype", "case"), PAIRS)
def test_a_dtype_that_is_named_rounds_rows_on_a_cpu(dtype: torch.dtype, case: str, tmp_path: Path) -> None:
    experts = write_case(case, tmp_path, SIZES)[0]
    rows, logits = inputs(SIZES[0])
    rows = rows.float()  # in f32 the layer holds the very scales of the checkpoint
    exact, layer = (
        FusedMoE.from_checkpoint(tmp_path, layer=0, dtype=torch.float32, input_dtype=each) for each in ("none", dtype)
    )
    assert exact.rounds_rows_to is None
    assert layer.rounds_rows_to == dtype
    output = layer(rows, logits)
    assert relative_error(output, rounded(experts, rows, logits, dtype)) < 0.003
    assert 0.005 < relative_error(output, exact(rows, logits)) < EXACT[dtype]


@pytest.mark.parametrize(("dtype", "case", "weights"), IMPOSSIBLE)
def test_pairs_that_cannot_be_are_refused_by_both_names(
    dtype: torch.dtype, case: str, weights: str, tmp_path: Path
) -> None:
    write_case(case, tmp_path, with_values=False)
    with pytest.raises(ValueError, match=f"{dtype} and weights are {weights}"):
        FusedMoE.from_checkpoint(tmp_path, layer=0, input_dtype=dtype)
    FusedMoE.from_checkpoint(tmp_path, layer=0, input_dtype="checkpoint")


@pytest.mark.parametrize("case", ["fp8 of one number", "int8 rows", "w4afp8"])
def test_what_a_checkpoint_was_made_for_changes_nothing_on_a_cpu(case: str, tmp_path: Path) -> None:
    write_case(case, tmp_path, with_values=False)
    layers = [
        FusedMoE.from_checkpoint(tmp_path, layer=0, dtype=torch.bfloat16, input_dtype=each)
        for each in (None, "checkpoint", "none", torch.bfloat16)
    ]
    rows, logits = inputs(layers[0].hidden_size)
    first, *others = (layer(rows, logits) for layer in layers)
    assert all(torch.equal(first, other) for other in others)
    assert [layer.input_dtype for layer in layers] == ["checkpoint", "checkpoint", "none", "none"]
    assert layers[0].input_rows.dtype is None
    assert "the checkpoint was made for" in layers[0].input_rows.why


def test_the_environment_names_the_rows_of_layers_that_are_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_case("packed int4", tmp_path, with_values=False)
    monkeypatch.setenv("MOE_EP_INPUT_DTYPE", "int8")
    assert FusedMoE.from_checkpoint(tmp_path, layer=0).rounds_rows_to == INT8
    assert FusedMoE.from_checkpoint(tmp_path, layer=0, input_dtype="checkpoint").rounds_rows_to is None
    monkeypatch.setenv("MOE_EP_INPUT_DTYPE", "none")
    assert FusedMoE.from_checkpoint(tmp_path, layer=0, input_dtype=E4M3).rounds_rows_to == E4M3
    assert FusedMoE.from_checkpoint(tmp_path, layer=0).rounds_rows_to is None


@pytest.mark.parametrize(("sent", "packed_for"), [(None, INT8), (INT8, INT8), (E4M3, None)], ids=str)
def test_weights_are_not_packed_for_rows_that_are_sent_otherwise(
    sent: torch.dtype | None, packed_for: torch.dtype | None, tmp_path: Path
) -> None:
    write_case("int8 rows", tmp_path, with_values=False)
    ranks = FusedMoEParallelConfig(ep_size=2)
    layer = FusedMoE.from_checkpoint(tmp_path, layer=0, parallel_config=ranks, dispatch_dtype=sent)
    assert layer.quant_method.asked_input_dtype(layer) == INT8
    assert layer.quant_method.packed_input_dtype(layer) == packed_for


@pytest.mark.parametrize("wrong", ["int8", torch.float16, torch.uint8, 8])
def test_anything_else_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"input_dtype is {wrong}"):
        FusedMoE(4, 2, 64, 64, torch.bfloat16, input_dtype=wrong)


def test_the_log_says_once_for_a_model_what_was_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_case("int8 rows", tmp_path, with_values=False)
    layers = [FusedMoE.from_checkpoint(tmp_path, layer=0, input_dtype=each) for each in ("checkpoint", INT8)]
    shared = layers[0].parallel_config
    layers.append(FusedMoE.from_checkpoint(tmp_path, layer=1, input_dtype="checkpoint", parallel_config=shared))
    with caplog.at_level(logging.INFO, "moe_ep.quantization"):
        for layer in layers:
            layer.modular_kernel  # noqa: B018  made with the first pass
    told = [record.getMessage() for record in caplog.records if record.name.startswith("moe_ep.quantization")]
    assert len(told) == 2
    assert "checkpoint" in told[0] and "int8" in told[0]
    assert told[1].startswith("input_dtype int8")


def ct(activations: Any, form: str = "float-quantized", kind: str = "float", bits: int = 8) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def quark(activations: Any) -> dict[str, Any]:
    weight = {"dtype": "fp8_e4m3", "qscheme": "per_channel"}
    return {"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": activations}}


AUTO_ROUND = {"quant_method": "auto-round", "bits": 8, "group_size": -1}


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, None),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, None),
        ({"quant_method": "mxfp4"}, None),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, E4M3),
        ({"quant_method": "fp8", "activation_scheme": "static"}, E4M3),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "expert_dtype": "fp4"}, E4M3),
        ({"quant_method": "fbgemm_fp8"}, E4M3),
        ({"quant_method": "mxfp8"}, E4M3),
        ({"quant_method": "w4afp8"}, E4M3),
        ({"quant_method": "w8a8_int8"}, INT8),
        ({"quant_method": "blockwise_int8", "weight_block_size": [128, 128]}, INT8),
        (ct({"num_bits": 8, "type": "float", "dynamic": True}), E4M3),
        (ct({"num_bits": 8, "type": "int", "dynamic": True}, "int-quantized", "int"), INT8),
        (ct({"num_bits": 8, "type": "float"}, "pack-quantized", "int", 4), E4M3),
        (ct({"num_bits": 4, "type": "float"}), None),
        (ct(None), None),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, E4M3),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, E4M3),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, E4M3),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, E4M3),  # as w4afp8
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None),
        ({"quant_method": "modelopt", "quant_algo": "W8A16"}, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, None),
        (quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}), E4M3),
        (quark({"dtype": "int8", "qscheme": "per_tensor"}), INT8),
        (quark({"dtype": "fp4", "qscheme": "per_group"}), None),
        (quark(None), None),
        (AUTO_ROUND, None),
        (AUTO_ROUND | {"act_bits": 8, "act_data_type": "int_sym"}, INT8),
        (AUTO_ROUND | {"data_type": "fp", "act_bits": 8}, E4M3),
        (AUTO_ROUND | {"data_type": "fp", "act_bits": 16}, None),
    ],
    ids=lambda value: value["quant_method"] if isinstance(value, dict) else None,
)
def test_what_a_checkpoint_was_made_for(settings: dict[str, Any], dtype: torch.dtype | None) -> None:
    found = quantization_config({"quantization_config": settings})
    assert found is not None
    scheme = found.of_module(EXPERT)
    assert scheme is not None
    assert scheme.input_dtype == dtype
    assert replace(scheme, input_dtype=None).input_dtype is None


def test_each_group_of_compressed_tensors_says_it_of_its_modules() -> None:
    groups = ct({"num_bits": 8, "type": "float"})["config_groups"]
    of_down = {"targets": ["re:.*down_proj"], "weights": groups["group_0"]["weights"], "input_activations": None}
    settings = ct(None) | {"config_groups": groups | {"group_1": of_down}}
    found = quantization_config({"quantization_config": settings})
    assert found is not None
    schemes = [found.of_module(name) for name in (EXPERT, EXPERT.replace("up_proj", "down_proj"))]
    assert [None if scheme is None else scheme.input_dtype for scheme in schemes] == [E4M3, None]

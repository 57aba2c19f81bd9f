"""Configurations of compressed-tensors: which scheme a module gets, and those that are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from moe_ep.checkpoint.formats import quantization_config
from moe_ep.errors import CheckpointError
from moe_ep.quantization.canonical_weights import dequantize

GATE_PROJ = "model.layers.3.mlp.experts.7.gate_proj"


def compressed(**settings: Any) -> Any:
    whole = {"quant_method": "compressed-tensors", "format": "pack-quantized", **settings}
    return quantization_config({"quantization_config": whole})


def of_weights(form: str, **weights: Any) -> Any:
    """The scheme of a module whose weights have these settings."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return compressed(format=form, config_groups=groups).of_module(GATE_PROJ)


@pytest.mark.parametrize(
    ("form", "weights", "message"),
    [
        ("pack-quantized", {"num_bits": 3}, "weights of 3 bits .int.; pack-quantized ones must be int of 4 or 8 bits"),
        ("pack-quantized", {"num_bits": 8, "type": "float"}, "weights of 8 bits .float.; pack-quantized ones must be"),
        ("int-quantized", {"num_bits": 6}, "num_bits of the weights is 6; this format is read where it is 8"),
        ("int-quantized", {"num_bits": 8, "symmetric": False}, "symmetric of the weights is False; .* it is True"),
        ("pack-quantized", {"num_bits": 4, "symmetric": "false"}, "symmetric: expected true or false, found 'false'"),
        ("float-quantized", {"num_bits": 8}, None),
        ("float-quantized", {"num_bits": 8, "type": "int"}, "type of the weights is 'int'; .* it is 'float'"),
        ("naive-quantized", {"num_bits": 8, "type": "float"}, None),
        ("naive-quantized", {"num_bits": 8, "type": "complex"}, "format is 'complex-quantized'; it must be one of"),
        ("nvfp4-pack-quantized", {"group_size": 16, "num_bits": 4}, None),
        ("nvfp4-pack-quantized", {"group_size": 32}, "group_size of the weights is 32; .* read where it is 16"),
        ("mxfp4-pack-quantized", {"num_bits": 8}, "num_bits of the weights is 8; this format is read where it is 4"),
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 1}, None),
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 0}, "group_size is 0; with strategy gr"),
        ("pack-quantized", {"num_bits": 4, "strategy": "row"}, "strategy is 'row'; it must be one of tensor, channel"),
        ("float-quantized", {"num_bits": 8, "strategy": "block", "block_structure": [1, 1]}, None),
        ("float-quantized", {"num_bits": 8, "strategy": "block"}, "block_structure is None; it must be two positive"),
        ("float-quantized", {"num_bits": 8, "strategy": "block", "block_structure": [0, 128]}, "it must be two posit"),
        ("float-quantized", {"num_bits": 8, "strategy": "block", "block_structure": [128]}, "it must be two positive"),
        ("float-quantized", {"num_bits": 8, "strategy": "block", "block_structure": "128"}, "'128'; it must be two po"),
        ("float-quantized", {"num_bits": 8, "strategy": "block", "block_structure": "1xx"}, "'1xx'; it must be two po"),
    ],
)
def test_schemes_that_are_read_and_refused(form: str, weights: dict[str, Any], message: str | None) -> None:
    if form == "float-quantized":
        weights = {"type": "float"} | weights
    if message is None:
        assert of_weights(form, **weights) is not None
        return
    with pytest.raises(CheckpointError, match=f"group_0: .*{message}"):
        of_weights(form, **weights)


@pytest.mark.parametrize(
    ("weights", "kind"),
    [({"group_size": 1}, "group"), ({"group_size": -1}, "channel"), ({"group_size": 0}, "tensor"), ({}, "tensor")],
)
def test_a_strategy_that_is_not_named_is_told_by_the_groups(weights: dict[str, Any], kind: str) -> None:
    assert of_weights("pack-quantized", num_bits=4, **weights).scale.kind.value == kind


def test_targets_of_compressed_tensors_as_the_library_orders_them() -> None:
    """Names before expressions, and these by the alphabet, whatever the order of the groups."""
    targets = {4: ["re:.*proj"], 8: [GATE_PROJ, "re:.*down_proj"]}
    groups = {
        f"group_{bits}": {"targets": names, "weights": {"num_bits": bits, "strategy": "channel"}}
        for bits, names in targets.items()
    }
    found = compressed(config_groups=groups)
    assert found.of_module(GATE_PROJ).bits == 8
    assert found.of_module("model.layers.3.mlp.experts.7.down_proj").bits == 8
    assert found.of_module("model.layers.3.mlp.experts.7.up_proj").bits == 4


def test_groups_of_scattered_columns_by_any_of_their_names() -> None:
    for actorder, scattered in {"group": True, "GROUP": True, "dynamic": True, True: True, "weight": False}.items():
        weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": actorder}
        found = compressed(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}})
        assert found.of_module(GATE_PROJ).scattered == scattered


@pytest.mark.parametrize(
    ("transforms", "message"),
    [
        (
            {"config_groups": {"R1": {"apply": [{"location": "weight_output"}, {"location": "input"}]}}},
            "found 'input'",
        ),
        ({"config_groups": {"R1": {}}}, "expected config_groups, each with apply, found"),
    ],
)
def test_rotated_activations_are_refused(transforms: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"transform_config: .*{message}"):
        compressed(transform_config=transforms)


def test_mxfp8_as_the_library_writes_it() -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.preset_name_to_scheme("MXFP8A16", ["Linear"])
    values, scales = torch.randn(48, 64), 2.0 ** torch.randint(-9, -5, (48, 2))
    written = compressors.MXFP8QuantizationCompressor.compress({"weight": values, "weight_scale": scales}, scheme)
    assert written["weight_scale"].dtype == torch.uint8
    settings = json.loads(scheme.weights.model_dump_json())
    found = compressed(
        format="mxfp8-quantized", config_groups={"group_0": {"targets": ["Linear"], "weights": settings}}
    )
    linear = found.of_module(GATE_PROJ)
    held = {name: layout.as_held(written[name]) for name, layout in linear.tensors(48, 64).items() if name in written}
    codes = (values / scales.repeat_interleave(32, 1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(dequantize(linear.unpack(held)), codes.float() * scales.repeat_interleave(32, 1))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("strategy", "shape"),
    [
        ({"strategy": "tensor"}, (1,)),
        ({"strategy": "channel"}, (48, 1)),
        ({"strategy": "group", "group_size": 32}, (48, 2)),
    ],
)
def test_zero_points_as_the_library_writes_them(bits: int, strategy: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Packed, but for one of all weights, which is a signed byte."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = {"num_bits": bits, "type": "int", "symmetric": False, **strategy}
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**weights))
    half = 2 ** (bits - 1)
    zero_points = torch.randint(-half, half, shape).to(torch.int8)
    state = {"weight": torch.randn(48, 64), "weight_scale": torch.rand(shape) / half, "weight_zero_point": zero_points}
    written = compressors.PackedQuantizationCompressor.compress(state, scheme)
    expected = compressors.PackedQuantizationCompressor.decompress(written, scheme)["weight"]
    linear = of_weights("pack-quantized", **weights)
    layouts = linear.tensors(48, 64)
    for name, tensor in written.items():
        assert tensor.dtype in layouts[name].dtypes and tuple(tensor.shape) == layouts[name].shape
    torch.testing.assert_close(dequantize(linear.unpack(written)), expected)


def test_codes_of_four_bits_a_byte_each() -> None:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    found = compressed(format="int-quantized", config_groups={"group_0": {"targets": ["Linear"], "weights": weights}})
    scheme, values = found.of_module(GATE_PROJ), torch.arange(-8, 8, dtype=torch.int8).repeat(2)[None]
    tensors = {"weight": values, "weight_scale": torch.tensor([[0.5]])}
    assert torch.equal(dequantize(scheme.unpack(tensors)), values * 0.5)


@pytest.mark.parametrize(("low", "high"), [(0, 2), (-1, 1)])
def test_scattered_columns_of_groups_that_are_not_there(low: int, high: int) -> None:
    scheme = of_weights("pack-quantized", num_bits=4, strategy="group", group_size=16, actorder="group")
    tensors = {
        "weight_packed": torch.zeros(8, 4, dtype=torch.int32),
        "weight_scale": torch.ones(8, 2),
        "weight_g_idx": torch.tensor([0, 1] * 15 + [low, high], dtype=torch.int32),
    }
    with pytest.raises(CheckpointError, match=f"weight_g_idx: expected groups 0 to 1, found {low} to {high}"):
        scheme.unpack(tensors)
    assert scheme.unpack(tensors | {"weight_g_idx": tensors["weight_g_idx"].clamp(0, 1)}).g_idx is not None


def test_schemes_as_older_versions_wrote_them() -> None:
    blocks = {"num_bits": 8, "type": "FLOAT", "strategy": "BLOCK", "block_structure": "64x128"}
    scale = of_weights("float-quantized", **blocks).scale
    assert (scale.kind.value, scale.rows, scale.columns) == ("block", 64, 128)


@pytest.mark.parametrize("weights", [None, {"num_bits": 4}])
def test_groups_that_are_about_activations_alone(weights: dict[str, Any] | None) -> None:
    """Attention whose queries and keys are quantized, beside weights that are or are not."""
    read = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    groups = {
        "group_0": {"targets": ["re:.*self_attn$"], "weights": None, "input_activations": read},
        "group_1": {"targets": ["Linear"], "weights": weights},
        "group_2": {"targets": ["re:.*up_proj"], "weights": None, "input_activations": read},
    }
    found = compressed(config_groups=groups)
    if weights is None:
        assert found is None
        return
    assert found.of_module(GATE_PROJ).bits == 4
    assert found.of_module(GATE_PROJ.replace("gate_proj", "up_proj")) is None
    with pytest.raises(CheckpointError, match="group_0: expected weights, found None"):
        compressed(config_groups={"group_0": {"targets": ["Linear"]}})


@pytest.mark.parametrize("groups", [{}, None])
def test_a_model_whose_cache_alone_is_quantized_is_plain(groups: Any) -> None:
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    assert compressed(format="dense", config_groups=groups, kv_cache_scheme=cache) is None
    with pytest.raises(CheckpointError, match="expected config_groups with a scheme in it"):
        compressed(format="dense", config_groups=groups, kv_cache_scheme=None)

"""Settings as AMD Quark writes them: the schemes that modules get by them, and those that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from moe_ep.checkpoint.formats import quantization_config
from moe_ep.checkpoint.formats.compressed_tensors import IntQuantizedConfig
from moe_ep.checkpoint.formats.fp4 import MXFP4Config
from moe_ep.checkpoint.formats.fp8 import Float8Config
from moe_ep.checkpoint.formats.layout import ScaleShape
from moe_ep.errors import CheckpointError
from moe_ep.layer.weight_loading import FusedMoeWeightScaleSupported as Kind

GATE_PROJ = "model.layers.3.mlp.experts.7.gate_proj"


def of_quark(name: str, **changes: Any) -> Any:
    mxfp4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    settings = {"quant_method": "quark", "global_quant_config": {"weight": mxfp4}}
    return quantization_config({"quantization_config": settings | changes}).of_module(name)


def test_quark_says_of_names_then_of_patterns_then_of_all() -> None:
    tensor = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "symmetric": True}}
    row = {"weight": {"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "symmetric": True}}
    blocks = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [128, 64]}}
    by_name = {"*.layers.[12].*": tensor, "model.layers.?.mlp.*": blocks, "model.layers.1.mlp.up": row, "*.q_proj": {}}
    changes = {"layer_quant_config": by_name, "exclude": ["lm_head", "*.mlp.gate", r"re:.*\.kv_\w+$"]}
    assert of_quark("model.layers.0.self_attn.o_proj", **changes) == MXFP4Config()
    assert of_quark("model.layers.0.self_attn.q_proj", **changes) is None
    assert of_quark("model.layers.1.mlp.down", **changes) == Float8Config(scale=ScaleShape(Kind.TENSOR))
    assert of_quark("model.layers.1.mlp.up", **changes) == IntQuantizedConfig(scale=ScaleShape(Kind.CHANNEL))
    in_blocks = Float8Config(scale=ScaleShape(Kind.BLOCK, rows=128, columns=64))
    assert of_quark("model.layers.3.mlp.down", **changes) == in_blocks
    assert of_quark("model.layers.12.mlp.down", **changes) == MXFP4Config()
    assert of_quark("model.layers.0.self_attn.kv_a", **changes) is None
    assert of_quark("model.layers.1.mlp.gate", **changes) is of_quark("lm_head", **changes) is None
    assert of_quark(GATE_PROJ, layer_type_quant_config={"Linear": row}) == of_quark("model.layers.1.mlp.up", **changes)
    assert of_quark(GATE_PROJ, layer_quant_config={"*": {"weight": {"dtype": "bfloat16"}}}) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_quant_config": None}, "global_quant_config: expected an object, found None"),
        ({"layer_quant_config": ["x"]}, r"layer_quant_config: expected an object, found \['x'\]"),
        ({"layer_quant_config": {"*": {"weight": 8}}}, r"layer_quant_config: weight: expected an object or"),
        (
            {"algo_config": [{"name": "awq"}, {"name": "rotation", "r1": True, "r4": True}]},
            "r4: .* rotated",
        ),
        (
            {"algo_config": {"name": "rotation", "online_r1_rotation": True}},
            "online_r1_rotation: expected",
        ),
        ({"exclude": [3]}, "expected names of modules, found 3"),
    ],
)
def test_settings_of_quark_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        of_quark(GATE_PROJ, **changes)


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        ({"dtype": "int4", "qscheme": "per_group", "group_size": 32, "symmetric": True}, "int4 per_group of 32"),
        ({"dtype": "uint4", "qscheme": "per_channel", "symmetric": False}, "uint4 per_channel with zero points"),
        (
            [{"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "int4", "qscheme": "per_channel"}],
            "fp8_e4m3 per_tensor then int4 per_channel",
        ),
    ],
)
def test_weights_of_quark_that_are_not_read(weight: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=f"global_quant_config: weight is '{said}'; it must be one of fp4"):
        of_quark(GATE_PROJ, global_quant_config={"weight": weight})

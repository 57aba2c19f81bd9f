"""Settings as GPTQModel, AutoRound, AutoAWQ and Model Optimizer write them: the schemes that modules get by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep.checkpoint import CheckpointReader, check_experts, model_spec
from moe_ep.checkpoint.formats import quantization_config
from moe_ep.checkpoint.formats.awq import AWQConfig
from moe_ep.checkpoint.formats.compressed_tensors import IntQuantizedConfig
from moe_ep.checkpoint.formats.fp4 import MODELOPT_NVFP4, PACKED_MXFP4, PACKED_NVFP4, MXFP4Config
from moe_ep.checkpoint.formats.fp8 import MXFP8, Float8Config
from moe_ep.checkpoint.formats.gptq import GPTQConfig
from moe_ep.checkpoint.formats.layout import ScaleShape
from moe_ep.checkpoint.formats.modelopt import W4AFP8Config
from moe_ep.checkpoint.plan import StoredTensor, check_tensor
from moe_ep.checkpoint.reader import TensorInfo
from moe_ep.errors import CheckpointError
from moe_ep.layer.weight_loading import FusedMoeWeightScaleSupported as Kind
from moe_ep.quantization.canonical_weights import dequantize
from tests.checkpoint.format_cases import write_case

E4M3 = torch.float8_e4m3fn
GATE_PROJ = "model.layers.3.mlp.experts.7.gate_proj"


def test_modules_that_gptqmodel_leaves_out_or_quantizes_otherwise() -> None:
    dynamic = {
        "-:.*shared_expert.*": {},
        r"+:.*\.3\..*down": {"bits": 8, "group_size": 64},
        ".*down": {"desc_act": True},
    }
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": dynamic}
    found = quantization_config({"quantization_config": settings})
    assert found.of_module("model.layers.3.mlp.shared_expert.down_proj") is None
    assert found.of_module(GATE_PROJ) == GPTQConfig(bits=4, group_size=32)
    assert found.of_module("model.layers.3.mlp.experts.0.down_proj") == GPTQConfig(bits=8, group_size=64)
    assert found.of_module("model.layers.4.mlp.experts.0.down_proj") == GPTQConfig(bits=4, group_size=32, desc_act=True)
    for wrong, message in {"8": ".*down: expected an object, found '8'", "bits": "bits is 3"}.items():
        changed = settings | {"dynamic": {".*down": {"bits": 3} if wrong == "bits" else wrong}}
        with pytest.raises(CheckpointError, match=message):
            quantization_config({"quantization_config": changed}).of_module("model.layers.4.mlp.experts.0.down_proj")


def test_modules_that_gptqmodel_leaves_out_of_awq() -> None:
    dynamic = {r"-:model\.layers\.3\.": {}, ".*down": {"group_size": 64}}
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "format": "gemm", "dynamic": dynamic}
    found = quantization_config({"quantization_config": settings | {"modules_to_not_convert": ["model.layers.4"]}})
    assert found.of_module(GATE_PROJ) is None
    assert found.of_module(GATE_PROJ.replace(".3.", ".4.")) is None
    assert found.of_module("model.layers.5.mlp.experts.0.up_proj") == AWQConfig(group_size=32)
    assert found.of_module("model.layers.5.mlp.experts.0.down_proj") == AWQConfig(group_size=64)
    with pytest.raises(CheckpointError, match="dynamic: .*down: expected an object, found 8"):
        quantization_config({"quantization_config": settings | {"dynamic": {".*down": 8}}})


def test_auto_round_has_the_tensors_of_gptq_or_awq() -> None:
    exceptions = {
        "model.layers.0": {"bits": 16, "data_type": "float"},
        r".*\.mlp\.gate": {"bits": 16},
        "model.layers.3.mlp.experts": {"bits": 8, "group_size": 64},
    }
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "extra_config": exceptions}

    def found(name: str, **changes: Any) -> Any:
        return quantization_config({"quantization_config": settings | changes}).of_module(name)

    assert found("model.layers.0.mlp.experts.1.up_proj") is None
    assert found("model.layers.10.mlp.experts.1.up_proj") == GPTQConfig(bits=4, group_size=128)
    assert found("model.layers.10.mlp.gate") is None
    assert found(GATE_PROJ) == GPTQConfig(bits=8, group_size=64)
    awq = {"packing_format": "auto_round:auto_awq", "extra_config": None}
    assert found(GATE_PROJ, **awq) == AWQConfig(group_size=128)
    for wrong, message in {
        "packing_format": "packing_format is 'x'; it must be one of auto_round:auto_gptq, auto_round:gptq",
        "extra_config": "extra_config: expected an object, found 'x'",
        "bits": "bits is 'x'; it must be one of 4, 8",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            found(GATE_PROJ, **{wrong: "x"})
    with pytest.raises(CheckpointError, match="extra_config: gate: expected an object, found 16"):
        found(GATE_PROJ, extra_config={"gate": 16})


@pytest.mark.parametrize(
    ("packing", "scheme"),
    [
        ("auto", GPTQConfig(bits=4, group_size=32, sym=False)),
        ("auto_round:gptq:exllamav2", GPTQConfig(bits=4, group_size=32, sym=False)),
        ("auto_gptq", GPTQConfig(bits=4, group_size=32, sym=False)),
        ("auto_round:awq:gemm", AWQConfig(group_size=32)),
        ("auto_round", GPTQConfig(bits=4, group_size=32, sym=False, checkpoint_format="gptq_v2")),
        ("auto_round:exllamav2", GPTQConfig(bits=4, group_size=32, sym=False, checkpoint_format="gptq_v2")),
        ("auto_round:tritonv2", GPTQConfig(bits=4, group_size=32, sym=False, checkpoint_format="gptq_v2")),
        ("auto_round:gptqmodel", GPTQConfig(bits=4, group_size=32, sym=False, checkpoint_format="gptq_v2")),
    ],
)
def test_packings_of_auto_round_by_all_their_names(packing: str, scheme: Any) -> None:
    """Some store zero points less one; the key and the method were called otherwise before."""
    settings = {"bits": 4, "group_size": 32, "sym": False}
    for key, method in (("packing_format", "auto-round"), ("backend", "auto-round"), ("backend", "intel/auto-round")):
        found = quantization_config({"quantization_config": settings | {"quant_method": method, key: packing}})
        assert found.of_module(GATE_PROJ) == scheme
    # What serves it later is named under the old key.
    both = settings | {"quant_method": "auto-round", "packing_format": packing, "backend": "ipex"}
    assert quantization_config({"quantization_config": both}).of_module(GATE_PROJ) == scheme


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        ({"data_type": "mx_fp", "bits": 4, "packing_format": "auto_round:llm_compressor"}, PACKED_MXFP4),
        ({"data_type": "mx_fp", "bits": 8, "packing_format": "auto_round:llm_compressor"}, MXFP8),
        ({"data_type": "nv_fp4_with_static_gs", "bits": 4, "group_size": 16}, PACKED_NVFP4),
        ({"data_type": "fp", "bits": 8, "group_size": 0, "fmt": "e4m3"}, Kind.TENSOR),
        ({"data_type": "fp", "bits": 8, "group_size": -1, "packing_format": "auto_round:fp8_static"}, Kind.CHANNEL),
        ({"data_type": "fp", "bits": 8, "group_size": [128, 64], "packing_format": "auto_round:fp8"}, Kind.BLOCK),
    ],
)
def test_floats_of_auto_round(settings: dict[str, Any], scheme: Any) -> None:
    plain = {"model.layers.3.mlp.gate": {"bits": 16, "data_type": "float"}}
    whole = {"quant_method": "auto-round", "group_size": 32, "sym": True, "extra_config": plain} | settings
    found = quantization_config({"quantization_config": whole})
    of_experts = found.of_module(GATE_PROJ)
    if isinstance(scheme, Kind):
        assert of_experts.quant_method == "fp8"
        assert (of_experts.scale.kind, of_experts.scale.rows) == (scheme, 128 if scheme is Kind.BLOCK else 1)
    else:
        assert of_experts == scheme
    assert found.of_module("model.layers.3.mlp.gate") is None


def test_auto_round_of_other_forms_is_refused() -> None:
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 32}
    for changes, message in (
        ({"data_type": "mx_int"}, "data_type is 'mx_int of 4 bits'; it must be one of int, fp of 8 bits, mx_fp of 4"),
        ({"data_type": "fp", "bits": 8}, "group_size is 32; with fp of 8 bits it must be 0, -1 or two numbers"),
        ({"data_type": "fp", "bits": 8, "group_size": 0, "fmt": "e5m2"}, "fmt is 'e5m2'; it must be one of e4m3"),
        ({"packing_format": "auto_round:fp8_static"}, "packing_format is 'auto_round:fp8_static'; it must be one of"),
        ({"backend": "ipex"}, "backend is 'ipex'; it must be one of auto_round:auto_gptq, "),
    ):
        with pytest.raises(CheckpointError, match=message):
            quantization_config({"quantization_config": settings | changes})


@pytest.mark.parametrize("method", ["gptq", "auto-round"])
@pytest.mark.parametrize("key", ["rotation", "rotation_config", "spinquant_config"])
def test_rotated_activations_are_refused(method: str, key: str) -> None:
    settings = {"quant_method": method, "bits": 4, "group_size": 32}
    assert quantization_config({"quantization_config": settings | {key: None}}) is not None
    with pytest.raises(CheckpointError, match=f"{key}: expected none, found 'hadamard'; rotated activations are not"):
        quantization_config({"quantization_config": settings | {key: "hadamard"}})


def test_modules_that_model_optimizer_lists() -> None:
    listed = {
        "model.layers.3.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.3.mlp.shared_expert.down_proj": {"quant_algo": "FP8"},
    }
    settings = {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}

    def found(name: str, **changes: Any) -> Any:
        return quantization_config({"quantization_config": settings | changes}).of_module(name)

    assert found(GATE_PROJ) is MODELOPT_NVFP4
    assert found("model.layers.3.mlp.shared_expert.down_proj").quant_method == "fp8"
    assert found(GATE_PROJ.replace(".3.", ".31.")) is found("model.layers.3.mlp.shared_expert.up_proj") is None
    assert found(GATE_PROJ, quant_method="modelopt_fp4", quant_algo="W4A16_NVFP4") is MODELOPT_NVFP4
    for changes, message in (
        (
            {"quant_algo": "W4A8"},
            "quant_algo is 'W4A8'; it must be one of NVFP4, W4A16_NVFP4, FP8, .*, MIXED_PRECISION",
        ),
        ({"quantized_layers": {}}, "quantized_layers: expected an object of modules, found {}"),
        ({"quantized_layers": {"a.b": 4}}, "quantized_layers: a.b: expected an object, found 4"),
        ({"quantized_layers": {"mlp": {"quant_algo": "MIXED_PRECISION"}}}, "mlp: quant_algo is 'MIXED_PRECISION'; it"),
    ):
        with pytest.raises(CheckpointError, match=message):
            found(GATE_PROJ, **changes)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "w4afp8", "modules_to_not_convert": ["self_attn.b_proj"]},
        {"quant_method": "w4afp8", "ignored_layers": ["self_attn.b_proj"], "group_size": 128},
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "exclude_modules": ["*b_proj"]},
    ],
)
def test_four_bits_of_experts_beside_eight_of_others(settings: dict[str, Any]) -> None:
    found = quantization_config({"quantization_config": settings})
    blocks = Float8Config.from_dict({"weight_block_size": [128, 128]})
    assert found.of_module(GATE_PROJ) == W4AFP8Config(group_size=128, input_dtype=E4M3)
    assert found.of_module("model.layers.3.mlp.shared_experts.gate_proj") == blocks
    assert found.of_module("model.layers.3.self_attn.o_proj") == blocks
    assert found.of_module("model.layers.3.self_attn.b_proj") is None
    for wrong in (0.5, -128, 31, "128"):
        with pytest.raises(CheckpointError, match=f"group_size is {wrong!r}; it must be even and positive"):
            quantization_config({"quantization_config": settings | {"group_size": wrong}})


@pytest.mark.parametrize(
    ("algorithm", "scheme"),
    [
        ("mxfp4", MXFP4Config()),
        ("W4A8_MXFP4_FP8", MXFP4Config(input_dtype=E4M3)),
        ("W8A16", IntQuantizedConfig(scale=ScaleShape(Kind.CHANNEL))),
    ],
)
def test_algorithms_of_model_optimizer_in_other_formats(algorithm: str, scheme: Any) -> None:
    settings = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": None, "ignore": ["lm_head"]}
    assert quantization_config({"quantization_config": settings}).of_module(GATE_PROJ) == scheme


def test_algorithms_of_model_optimizer_in_fp8() -> None:
    tensors = Float8Config(scale=ScaleShape(Kind.TENSOR), input_dtype=E4M3)
    for method, scheme in (("modelopt_fp8", tensors), ("modelopt_mxfp8", MXFP8)):
        settings = {"quant_method": method, "quant_algo": method.removeprefix("modelopt_").upper()}
        assert quantization_config({"quantization_config": settings}).of_module(GATE_PROJ) == scheme
    for algorithm, kind in (("FP8_PER_CHANNEL_PER_TOKEN", "channel"), ("FP8_PB_WO", "block"), ("fp8_pb_wo", "block")):
        settings = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 128, "ignore": ["lm_head"]}
        assert quantization_config({"quantization_config": settings}).of_module(GATE_PROJ).scale.kind.value == kind
    with pytest.raises(CheckpointError, match="group_size is 64"):
        quantization_config({"quantization_config": settings | {"group_size": 64}})


def test_scales_of_blocks_as_model_optimizer_shapes_them() -> None:
    """`[N / 128, 1, K / 128, 1]`."""
    settings = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    layout = quantization_config({"quantization_config": settings}).of_module(GATE_PROJ).tensors(256, 384)
    scales = torch.rand(2, 1, 3, 1)
    info = TensorInfo("weight_scale", Path("x"), scales.dtype, tuple(scales.shape), 0, 24)
    check_tensor(info, layout["weight_scale"])
    assert torch.equal(StoredTensor(info, layout["weight_scale"]).tensor(scales), scales.view(2, 3))


@pytest.mark.parametrize("key", ["kv_cache_quant_algo", "kv_cache_scheme"])
def test_a_cache_that_model_optimizer_alone_quantized(key: str) -> None:
    settings = {"quant_method": "modelopt", "quant_algo": None, key: "FP8", "exclude_modules": []}
    assert quantization_config({"quantization_config": settings}) is None
    del settings[key]
    with pytest.raises(CheckpointError, match="quant_algo is None"):
        quantization_config({"quantization_config": settings})


def unread(module: str) -> dict[str, dict[str, Any]]:
    """Settings of four tools in which one module has a scheme that is not read, and all others one that is."""
    weights = {"num_bits": 4, "type": "int", "strategy": "channel"}
    groups = {
        "group_0": {"targets": ["Linear"], "weights": weights},
        "group_1": {"targets": [f"re:.*{module}"], "format": "mxfp6-pack-quantized", "weights": weights},
    }
    listed = {"model": {"quant_algo": "NVFP4"}, module: {"quant_algo": "W4A8_AWQ"}}
    listed = dict(reversed(listed.items()))
    integers = {"bits": 4, "group_size": 32}
    return {
        "compressed-tensors": {"format": "pack-quantized", "config_groups": groups},
        "modelopt": {"quant_algo": "MIXED_PRECISION", "quantized_layers": listed},
        "gptq": {**integers, "dynamic": {f"+:.*{module}": {"bits": 3}}},
        "auto-round": {**integers, "extra_config": {module: {"bits": 2}}},
    }


@pytest.mark.parametrize("method", unread(""))
def test_a_scheme_that_is_not_read_only_matters_where_it_is_asked_for(method: str) -> None:
    """Attention and layers for drafts are quantized in other ways than experts, and nothing reads them."""
    found = quantization_config({"quantization_config": {"quant_method": method, **unread("self_attn")[method]}})
    assert found.of_module(GATE_PROJ) is not None
    with pytest.raises(CheckpointError, match="mxfp6-pack-quantized|W4A8_AWQ|bits is [23]"):
        found.of_module("model.layers.3.self_attn.q_proj")


@pytest.mark.parametrize("key", ["version", "format", "checkpoint_format"])
def test_awq_by_any_name_of_its_layout(key: str) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32}
    assert quantization_config({"quantization_config": settings | {key: "GEMM"}}).of_module(GATE_PROJ).group_size == 32
    for other in ({key: "gemv"}, {key: "gemm", "backend": "llm-awq"}):
        with pytest.raises(CheckpointError, match="version is '(gemv|llm-awq)'"):
            quantization_config({"quantization_config": settings | other})


def test_settings_that_name_every_matrix_are_read_once(tmp_path: Path) -> None:
    """They are long, and asked for by every layer."""
    write_case("nvfp4 modelopt", tmp_path, with_values=False)
    listed = {f"model.layers.{layer}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for layer in range(2)}
    settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": listed}
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    reader = CheckpointReader(tmp_path)
    check_experts(reader, model_spec(reader.config))
    assert reader.quantization is reader.quantization is not None


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"weight_scale_method": "block", "weight_block_size": [2, 4]}, (2, 2)),
        ({"weight_scale_method": "row", "weight_block_size": None}, (4, 1)),
        ({"weight_scale_method": "tensor"}, (1,)),
    ],
)
def test_fp8_scales_of_gptqmodel_divide(settings: dict[str, Any], shape: tuple[int, ...]) -> None:
    whole = {"quant_method": "fp8", "bits": 8, "format": "float8_e4m3fn", "weight_scale_semantics": "inverse"}
    whole |= settings | {"dynamic": {"-:.*gate$": {}}}
    found = quantization_config({"quantization_config": whole})
    scheme = found.of_module(GATE_PROJ)
    assert found.of_module("model.layers.3.mlp.gate") is None
    assert scheme.tensors(4, 8)["weight_scale_inv"].shape == shape
    weight, scales = torch.randn(4, 8).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    spread = scales.repeat_interleave(2, 0).repeat_interleave(4, 1) if shape == (2, 2) else scales
    values = dequantize(scheme.unpack({"weight": weight, "weight_scale_inv": scales}))
    assert torch.equal(values, weight.float() * (1 / spread))
    with pytest.raises(CheckpointError, match="weight_scale_inv: expected positive numbers, found 0"):
        scheme.unpack({"weight": weight, "weight_scale_inv": scales * 0})


@pytest.mark.parametrize("key", ["weight_scale_semantics", "weight_scale_method"])
def test_fp8_scales_of_other_kinds_are_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is 'x'; it must be one of"):
        quantization_config({"quantization_config": {"quant_method": "fp8", key: "x"}})


def test_fp8_of_fbgemm_has_a_scale_a_row() -> None:
    settings = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    found = quantization_config({"quantization_config": settings})
    assert found.of_module(GATE_PROJ) == Float8Config(scale=ScaleShape(Kind.CHANNEL), input_dtype=E4M3)
    assert found.of_module("lm_head") is None

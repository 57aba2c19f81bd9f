"""Which modules a configuration is about, and what becomes of a layer whose matrices differ."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep.checkpoint import (
    CheckpointReader,
    expert_tensors,
    load_moe_layer,
    model_spec,
    read_expert,
    read_linear,
)
from moe_ep.checkpoint.formats import ModuleSchemes, PerGemm, quantization_config
from moe_ep.checkpoint.formats.awq import AWQConfig
from moe_ep.checkpoint.formats.modules import ModulePatterns
from moe_ep.checkpoint.plan import layer_quantization
from moe_ep.checkpoint.reader import read_config
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.errors import CheckpointError
from moe_ep.quantization.canonical_weights import CanonicalWeights, dequantize
from tests.checkpoint.format_cases import QUARK_FP8, Expert, ct, mxfp4, quark, write_case
from tests.checkpoint.test_format_cases import make_layer

GATE, GATE_PROJ = "model.layers.3.mlp.gate", "model.layers.3.mlp.experts.7.gate_proj"


@pytest.mark.parametrize(
    ("patterns", "name", "found"),
    [
        (["mlp.gate"], GATE, True),
        (["gate"], GATE, True),
        (["gate", "mlp.gate", "experts.7.gate", "model.layers"], "model.layer.3.mlp.gate_proj", False),
        (["model.layers.3"], GATE_PROJ, True),
        (["model.layers.3"], GATE_PROJ.replace(".3.", ".31."), False),
        (["re:.*gate$"], GATE, True),
        (["re:.*gate$"], GATE_PROJ, False),
        (["re:gate"], GATE, False),
        (["*.gate"], GATE, True),
        (["*.gate"], GATE_PROJ, False),
        (["model.layers.*.mlp"], GATE_PROJ, True),
        (["*mlp.gate*"], GATE, True),
        (["model.layers.3."], GATE_PROJ, True),
        ([".gate."], GATE, True),
        (["."], GATE, False),
        ([], GATE, False),
    ],
)
def test_patterns(patterns: list[str], name: str, found: bool) -> None:
    assert (name in ModulePatterns(patterns)) == found


def test_named_modules_come_before_all_linear_ones() -> None:
    coarse, fine = AWQConfig(group_size=128), AWQConfig(group_size=32)
    schemes = ModuleSchemes("awq", [(["Linear"], coarse), ([r"re:.*down_proj"], fine)], ["lm_head"])
    assert schemes.of_module("a.experts.0.up_proj") is coarse
    assert schemes.of_module("a.experts.0.down_proj") is fine
    assert schemes.of_module("lm_head") is None
    assert ModuleSchemes("awq", [(["re:.*down_proj"], fine)]).of_module("a.up_proj") is None


@pytest.mark.parametrize("pattern", ["{}layers.3.", "{}layers.3*", "re:^{}layers[.]3[.].*experts"])
@pytest.mark.parametrize("base", ["model.", "model.language_model.", "language_model.model.", "backbone."])
def test_modules_of_language_models_by_any_name(base: str, pattern: str) -> None:
    """Configurations name modules as tools had them, which need not be how files have them."""
    coarse, fine = AWQConfig(group_size=128), AWQConfig(group_size=32)
    name = pattern.format(base)
    ignored, other = ModuleSchemes("awq", [(["Linear"], coarse)], [name]), ModuleSchemes("awq", [([name], fine)])
    for own in ("model.", "model.language_model.", "language_model.model.", "thinker.model.", "backbone.", ""):
        module = f"{own}layers.3.mlp.experts.7.gate_proj"
        assert ignored.of_module(module) is None and other.of_module(module) is fine
        assert ignored.of_module(module.replace(".3.", ".4.")) is coarse
    assert ignored.of_module("model.visual.layers.3.mlp.experts") is coarse


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "mxfp4"])
def test_modules_that_are_not_converted(method: str) -> None:
    settings = {"quant_method": method, "bits": 4, "group_size": 32, "modules_to_not_convert": ["model.layers.3"]}
    found = quantization_config({"quantization_config": settings})
    assert found is not None and found.of_module(GATE_PROJ) is None
    assert found.of_module(GATE_PROJ.replace(".3.", ".2.")) is not None


def test_a_quantization_that_stands_elsewhere(tmp_path: Path) -> None:
    """In the part of a language model, or under the name that it had first."""
    write_case("packed int4", tmp_path, with_values=False)
    config = json.loads((tmp_path / "config.json").read_text())
    assert quantization_config({"text_config": config}).of_module(GATE_PROJ).quant_method == "pack-quantized"
    config["compression_config"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert quantization_config(read_config(tmp_path)).of_module(GATE_PROJ).quant_method == "pack-quantized"


def test_experts_of_a_projection_side_by_side(tmp_path: Path) -> None:
    """Names in the other order, `experts.gate_proj.3`, as Model Optimizer writes for models of fused experts."""
    before = write_case("nvfp4 modelopt", tmp_path)
    with CheckpointReader(tmp_path) as reader:
        swapped = {name: re.sub(r"experts\.(\d+)\.(\w+)", r"experts.\2.\1", name) for name in reader.names()}
        tensors = {swapped[name]: reader.read(name) for name in reader.names()}
    write_checkpoint(tmp_path / "swapped", reader.config, tensors.items())
    with CheckpointReader(tmp_path / "swapped") as reader:
        spec = model_spec(reader.config)
        for layer in spec.moe_layers:
            found = expert_tensors(reader, spec, layer)
            for expert, values in enumerate(before[layer]):
                matrices = read_expert(reader, found, expert)
                for role in ("gate", "up", "down"):
                    assert torch.equal(getattr(matrices, role), getattr(values, role))
        load_moe_layer(reader, spec, 1, make_layer(reader, 1))
    fewer = {name: tensor for name, tensor in tensors.items() if "gate_proj.2." not in name}
    write_checkpoint(tmp_path / "fewer", reader.config, fewer.items())
    with pytest.raises(CheckpointError, match=r"experts\.gate_proj\.\*: expected 4 .* expert 2 is missing"):
        expert_tensors(CheckpointReader(tmp_path / "fewer"), spec, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        {"quant_method": "fp8", "ignored_layers": None},
        {"quant_method": "mxfp4"},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": None},
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "extra_config": None},
    ],
)
def test_lists_of_nothing_leave_nothing_out(settings: dict[str, Any]) -> None:
    """As writers put them into config.json: null, or an empty list."""
    for nothing in (None, []):
        whole = settings | {"modules_to_not_convert": nothing}
        assert quantization_config({"quantization_config": whole}).of_module(GATE_PROJ) is not None


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale", "output_scale", "output_zero_point"])
@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        quark(QUARK_FP8),
        ct("float-quantized", 8, "float", strategy="tensor", group_size=None),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ],
    ids=lambda settings: settings["quant_method"],
)
def test_scales_of_cached_keys_say_nothing_of_a_weight(tmp_path: Path, settings: dict[str, Any], name: str) -> None:
    stem = "model.layers.0.self_attn.k_proj"
    weight = torch.randn(8, 16).to(torch.float8_e4m3fn)
    tensors = {"weight": weight, "weight_scale": torch.tensor(0.5), name: torch.tensor(2.0)}
    config = {"quantization_config": settings}
    write_checkpoint(tmp_path, config, {f"{stem}.{name}": tensor for name, tensor in tensors.items()}.items())
    with CheckpointReader(tmp_path) as reader:
        assert torch.equal(read_linear(reader, stem, (8, 16)), weight.float() * 0.5)


def test_a_layer_has_a_scheme_for_each_gemm_and_an_ignored_one_none(tmp_path: Path) -> None:
    write_case("mixed int4 and fp8", tmp_path, with_values=False)
    reader = CheckpointReader(tmp_path)
    spec, quantization = model_spec(reader.config), quantization_config(reader.config)
    assert layer_quantization(quantization, spec, 0) is None
    found = layer_quantization(quantization, spec, 1)
    assert isinstance(found, PerGemm)
    assert (found.w13.quant_method, found.w2.quant_method) == ("pack-quantized", "fp8")


def test_a_linear_layer_beside_the_experts(tmp_path: Path) -> None:
    experts = write_case("mixed int4 and fp8", tmp_path)
    reader = CheckpointReader(tmp_path)
    stem = "model.layers.{}.mlp.experts.2.{}_proj"
    assert torch.equal(read_linear(reader, stem.format(1, "down"), (64, 32)), experts[1][2].down)
    assert torch.equal(read_linear(reader, stem.format(1, "up"), (32, 64)), experts[1][2].up)
    assert torch.equal(read_linear(reader, stem.format(0, "up"), (32, 64)), experts[0][2].up)
    router = reader.read("model.layers.0.mlp.gate.weight").float()
    assert torch.equal(read_linear(reader, "model.layers.0.mlp.gate", (4, 64)), router)


def held(layer: object, gemm: str, slot: int) -> torch.Tensor:
    """One slot's values, in the form of the reference experts."""
    method = layer.quant_method
    quant, kwargs = method.get_fused_moe_quant_config(layer), method.expert_kwargs(layer)
    first = gemm == "w13"
    tensors = {
        "codes": method.gemm_weights(layer)[0 if first else 1],
        "scales": quant.w1_scale if first else quant.w2_scale,
        "zero_points": quant.w1_zp if first else quant.w2_zp,
        "g_idx": kwargs[f"{gemm}_g_idx"],
        "global_scales": quant.g1_alphas if first else quant.g2_alphas,
    }
    one = {name: None if tensor is None else tensor[slot] for name, tensor in tensors.items()}
    type_id = quant.quant_type_id if first else quant.w2_quant_type_id
    group_size = quant.group_size if first else quant.w2_group_size
    return dequantize(CanonicalWeights(**one, quant_type_id=type_id, group_size=group_size))


def check_shards(directory: Path, experts: list[Expert], num_ranks: int) -> None:
    """Every rank of tensor parallelism holds its rows of gate and up, and its columns of down."""
    reader = CheckpointReader(directory)
    spec = model_spec(reader.config)
    size = spec.moe_intermediate_size // num_ranks
    for rank in range(num_ranks):
        parallel = FusedMoEParallelConfig.make(tp_size=num_ranks, ep_size=1, rank=rank)
        layer = make_layer(reader, 1, parallel_config=parallel)
        load_moe_layer(reader, spec, 1, layer)
        mine = slice(rank * size, (rank + 1) * size)
        for slot, expert in enumerate(experts):
            assert torch.equal(held(layer, "w13", slot), torch.cat([expert.gate[mine], expert.up[mine]]))
            assert torch.equal(held(layer, "w2", slot), expert.down[:, mine])


@pytest.mark.parametrize(
    ("name", "sizes", "num_ranks"),
    [
        ("awq", (64, 64), 2),
        ("packed int4 zero points", (64, 64), 2),
        ("packed int4 zero points", (64, 96), 4),  # groups of 32 columns straddle ranks of 24
        ("packed int4 act-order", (64, 64), 2),
        ("int8", (64, 32), 2),
        ("int8 blocks", (64, 256), 2),
        ("fp8 tensor", (64, 32), 2),
        ("fp8 blocks", (64, 256), 2),
        ("mxfp4 per expert", (64, 64), 2),
        ("mxfp4 gpt-oss", (64, 64), 2),
        ("nvfp4 packed", (64, 32), 2),
        ("mixed int4 and fp8", (64, 64), 2),
    ],
)
def test_shards_of_tensor_parallelism(tmp_path: Path, name: str, sizes: tuple[int, int], num_ranks: int) -> None:
    check_shards(tmp_path, write_case(name, tmp_path, sizes)[1], num_ranks)


@pytest.mark.parametrize("name", ["fp8 blocks", "int8 blocks"])
def test_a_block_of_rows_on_two_ranks_is_refused(tmp_path: Path, name: str) -> None:
    write_case(name, tmp_path, with_values=False)
    parallel = FusedMoEParallelConfig.make(tp_size=2, ep_size=1, rank=0)
    with pytest.raises(ValueError, match="intermediate size per rank is 48"):
        make_layer(CheckpointReader(tmp_path), 1, parallel_config=parallel)


def test_experts_of_one_number_type_move_whole(tmp_path: Path) -> None:
    """All that belongs to an expert is in the list that moves, global scales included."""
    write_case("nvfp4 packed", tmp_path, with_values=False)
    reader = CheckpointReader(tmp_path)
    layer = make_layer(reader, 1, enable_eplb=True)
    load_moe_layer(reader, model_spec(reader.config), 1, layer)
    tensors = layer.expert_weights()
    assert [tuple(tensor.shape[1:]) for tensor in tensors] == [(64, 64), (64, 4), (2,), (64, 32), (64, 2), ()]
    before = [held(layer, gemm, 3) for gemm in ("w13", "w2")]
    for tensor in tensors:
        tensor[0].copy_(tensor[3])
    assert all(torch.equal(held(layer, gemm, 0), values) for gemm, values in zip(("w13", "w2"), before, strict=True))


def test_zero_points_that_say_nothing_stay_where_experts_move(tmp_path: Path) -> None:
    """Another rank's experts may have ones that do, and all ranks move the same list of tensors."""
    write_case("gptq v1 8 bits", tmp_path, with_values=False)
    reader = CheckpointReader(tmp_path)
    layer = make_layer(reader, 1, enable_eplb=True)
    for name, parameter in layer.named_parameters():
        parameter.data.fill_(0x7F7F7F7F if "qzeros" in name else 0)  # written less one
    zeros = [tensor for tensor in layer.expert_weights() if tensor.dtype == torch.uint8 and bool((tensor == 128).all())]
    assert len(zeros) == 2


def test_worked_examples() -> None:
    """The examples of the formats' own texts."""
    from moe_ep.checkpoint.formats.fp4 import PACKED_MXFP4

    awq = AWQConfig(group_size=-1)
    words = {"qweight": 0x86427531 - 2**32, "qzeros": 0}
    tensors = {name: torch.tensor([[word]], dtype=torch.int32) for name, word in words.items()}
    assert awq.unpack(tensors | {"scales": torch.ones(1, 8)}).codes.flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    found, _ = mxfp4(1, 32)
    found["weight_packed"].fill_(0x2A)
    found["weight_scale"].fill_(127)
    assert dequantize(PACKED_MXFP4.unpack(found)).tolist() == [[-1.0, 1.0] * 16]

"""The loader: the right bytes in the right place, no others read, and every disagreement named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep.checkpoint import (
    CheckpointReader,
    check_beside_experts,
    check_experts,
    embed_rows,
    layer_options,
    load_moe_layer,
    load_norm,
    load_router,
    load_shared_experts,
    model_spec,
)
from moe_ep.checkpoint.formats import GPTQConfig, pack_gptq
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.errors import CheckpointError
from moe_ep.layer import FusedMoE
from moe_ep.layer.stack import MoEStack
from moe_ep.quantization.canonical_weights import dequantize, quantize_int
from tests.checkpoint.checkpoints import (
    GPTQ,
    LoadingLayer,
    gptq_shapes,
    make_checkpoint,
    model_tensors,
    plain_shapes,
    qwen3_config,
    unpacked,
)

MLP = "model.layers.1.mlp"
SHAPES = {None: plain_shapes, "gptq": gptq_shapes}
PLAIN_EXPERT_BYTES = 3 * 32 * 64 * 2


def config_of(quantized: str | None, **changes: Any) -> dict[str, Any]:
    return qwen3_config(**({"quantization_config": GPTQ} if quantized else {}), **changes)


def deepseek_config(num_shared: int, **changes: Any) -> dict[str, Any]:
    config = qwen3_config(
        model_type="deepseek_v3",
        n_routed_experts=4,
        n_shared_experts=num_shared,
        first_k_dense_replace=0,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.5,
        **changes,
    )
    del config["num_experts"]
    return config


def nbytes(tensors: dict[str, torch.Tensor], *prefixes: str) -> int:
    return sum(t.numel() * t.element_size() for name, t in tensors.items() if name.startswith(prefixes))


def check_slot(layer: LoadingLayer, slot: int, stem: str, tensors: dict[str, torch.Tensor]) -> None:
    """One slot holds the tensors of one expert, gate first and up behind it."""
    for name, param in layer.named_parameters():
        gemm, suffix = name.split("_", 1)
        if gemm == "w2":
            expected = tensors[f"{stem}.down_proj.{suffix}"]
        elif suffix == "g_idx":
            expected = tensors[f"{stem}.gate_proj.{suffix}"]
        else:
            halves = [tensors[f"{stem}.{projection}.{suffix}"] for projection in ("gate_proj", "up_proj")]
            expected = torch.cat(halves, dim=0 if suffix == "weight" else 1)
        assert torch.equal(param[slot], expected), (name, slot)


@pytest.mark.parametrize("quantized", [None, "gptq"])
@pytest.mark.parametrize("local", [[0, 1], [1, 3], [2], [0, 1, 2, 3], []])
def test_a_rank_reads_its_experts_and_not_a_byte_more(tmp_path: Path, quantized: str | None, local: list[int]) -> None:
    tensors = make_checkpoint(tmp_path, config_of(quantized))
    reader = CheckpointReader(tmp_path)
    layer = LoadingLayer(SHAPES[quantized](), local)
    load_moe_layer(reader, model_spec(reader.config), 1, layer)
    for slot, expert in enumerate(local):
        check_slot(layer, slot, f"{MLP}.experts.{expert}", tensors)
    assert layer.finished
    assert reader.bytes_read == nbytes(tensors, *(f"{MLP}.experts.{expert}." for expert in local))


def test_a_redundant_expert_is_the_one_it_copies_and_costs_no_second_read(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    layer = LoadingLayer(plain_shapes(), [0, 1, 4, 6], num_redundant_experts=4)
    load_moe_layer(reader, model_spec(reader.config), 1, layer)
    for slot, expert in enumerate([0, 1, 0, 2]):
        check_slot(layer, slot, f"{MLP}.experts.{expert}", tensors)
    assert reader.bytes_read == 3 * PLAIN_EXPERT_BYTES


@pytest.mark.parametrize("num_shared", [1, 2])
def test_fused_shared_experts_are_parts_of_one_mlp(tmp_path: Path, num_shared: int) -> None:
    tensors = make_checkpoint(tmp_path, deepseek_config(num_shared))
    reader = CheckpointReader(tmp_path)
    layer = LoadingLayer(plain_shapes(), [3], num_redundant_experts=2, num_fused_shared_experts=num_shared)
    load_moe_layer(reader, model_spec(reader.config), 1, layer)
    check_slot(layer, 0, f"{MLP}.experts.3", tensors)
    x = torch.randn(5, 64)
    whole = mlp(x, *(tensors[f"{MLP}.shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")))
    parts = [mlp(x, *layer.w13_weight[slot].chunk(2), layer.w2_weight[slot]) for slot in range(1, 1 + num_shared)]
    torch.testing.assert_close(sum(parts), whole)
    assert reader.bytes_read == nbytes(tensors, f"{MLP}.experts.3.", f"{MLP}.shared_experts.")


def mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ gate.float().T) * (x @ up.float().T)) @ down.float().T


def test_quantized_shared_expert_loads_as_an_expert(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path, deepseek_config(1, quantization_config=GPTQ))
    reader = CheckpointReader(tmp_path)
    layer = LoadingLayer(gptq_shapes(), [2], num_fused_shared_experts=1)
    load_moe_layer(reader, model_spec(reader.config), 1, layer)
    check_slot(layer, 1, f"{MLP}.shared_experts", tensors)


def test_shared_experts_that_cannot_be_fused_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "quantized", deepseek_config(2, quantization_config=GPTQ))
    make_checkpoint(tmp_path / "none")
    for name, shapes, message in (
        ("quantized", gptq_shapes, "quantized shared experts on disk are not divided"),
        ("none", plain_shapes, "has none to fuse"),
    ):
        reader = CheckpointReader(tmp_path / name)
        layer = LoadingLayer(shapes(), [2], num_fused_shared_experts=2)
        with pytest.raises(ValueError, match=f"n_shared_experts is 2.*{message}.*use load_shared_experts"):
            load_moe_layer(reader, model_spec(reader.config), 1, layer)


@pytest.mark.parametrize("quantized", [None, "gptq", "all but shared experts"])
def test_router_norm_embeddings_and_shared_experts(tmp_path: Path, quantized: str | None) -> None:
    config = deepseek_config(2, **({"quantization_config": GPTQ} if quantized else {}))
    shared_are_plain = quantized != "gptq"
    changes: dict[str, torch.Tensor | None] = {}
    if shared_are_plain:
        changes = dict.fromkeys(model_tensors(config)) | model_tensors(deepseek_config(2))
        changes = {name: tensor for name, tensor in changes.items() if "shared_experts" in name}
    tensors = make_checkpoint(tmp_path, config, tensors=changes)
    reader = CheckpointReader(tmp_path)
    spec = model_spec(reader.config)
    router = load_router(reader, spec, 1)
    assert torch.equal(router.weight, tensors[f"{MLP}.gate.weight"]) and router.bias is None
    assert torch.equal(router.correction_bias, tensors[f"{MLP}.gate.e_score_correction_bias"])
    norm = "model.layers.1.post_attention_layernorm.weight"
    assert torch.equal(load_norm(reader, spec, 1), tensors[norm])
    shared = load_shared_experts(reader, spec, 1)
    for projection in ("gate", "up", "down"):
        stem = f"{MLP}.shared_experts.{projection}_proj"
        if not shared_are_plain:
            parts = [tensors[f"{stem}.{suffix}"] for suffix in ("qweight", "qzeros", "scales", "g_idx")]
            expected = dequantize(unpacked(GPTQConfig.from_dict(GPTQ), *parts))
        else:
            expected = tensors[f"{stem}.weight"].float()
        assert torch.equal(getattr(shared, projection), expected)
    assert shared.expert_gate is None


def test_embed_rows_reads_only_the_rows_of_the_tokens(tmp_path: Path) -> None:
    tensors = make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    token_ids = torch.tensor([[5, 6, 90], [5, 0, 6]])
    rows = embed_rows(reader, model_spec(reader.config), token_ids)
    assert torch.equal(rows, tensors["model.embed_tokens.weight"][token_ids])
    assert reader.bytes_read == 4 * 64 * 2
    with pytest.raises(ValueError, match="below 96"):
        embed_rows(reader, model_spec(reader.config), torch.tensor([96]))
    with pytest.raises(ValueError, match="token_ids is None"):
        embed_rows(reader, model_spec(reader.config), None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reader is 'x'"):
        model_spec(reader.config, "x")  # type: ignore[arg-type]


GATE = f"{MLP}.experts.2.gate_proj."
WRONG = {
    "missing": (None, {GATE + "weight": None}, rf"index\.json: expected tensor {GATE}weight, found none"),
    "missing qzeros": ("gptq", {GATE + "qzeros": None}, rf"index\.json: expected tensor {GATE}qzeros, found none"),
    "shape": (
        None,
        {GATE + "weight": torch.ones(32, 63).bfloat16()},
        rf"model-0.*tensor {GATE}weight: expected shape \(32, 64\), found \(32, 63\)",
    ),
    "dtype": (
        None,
        {GATE + "weight": torch.ones(32, 64, dtype=torch.int8)},
        rf"model-0.*tensor {GATE}weight: expected torch.bfloat16 or .*found torch.int8",
    ),
    "qweight shape": (
        "gptq",
        {GATE + "qweight": torch.ones(16, 32, dtype=torch.int32)},
        rf"tensor {GATE}qweight: expected shape \(8, 32\), found \(16, 32\)",
    ),
    "unknown tensor": ("gptq", {GATE + "what": torch.ones(1)}, rf"tensor {GATE}what: expected only qweight, qzeros"),
    "bias": (
        None,
        {GATE + "bias": torch.ones(32)},
        rf"model-0.*tensor {GATE}bias: expected a parameter of the layer for it, found none",
    ),
    "too many experts": (
        None,
        {f"{MLP}.experts.4.gate_proj.weight": torch.ones(1)},
        r"index.json: .*mlp.experts.\*: expected 4 experts as config.json says, found 5; expert 4 is not in the config",
    ),
    "too few experts": (
        None,
        {f"{MLP}.experts.1.{name}_proj.weight": None for name in ("gate", "up", "down")},
        r"expected 4 experts as config.json says, found 3; expert 1 is missing",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_and_the_layer_not_finished(tmp_path: Path, case: str) -> None:
    quantized, changes, message = WRONG[case]
    make_checkpoint(tmp_path, config_of(quantized), tensors=changes)
    reader = CheckpointReader(tmp_path)
    layer = LoadingLayer(SHAPES[quantized](), [2, 3])
    with pytest.raises(CheckpointError, match=message):
        load_moe_layer(reader, model_spec(reader.config), 1, layer)
    assert not layer.finished


def test_bias_of_zeros_is_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, config_of("gptq"), tensors={GATE + "bias": torch.zeros(32).half()})
    reader = CheckpointReader(tmp_path)
    layer = LoadingLayer(gptq_shapes(), [2])
    load_moe_layer(reader, model_spec(reader.config), 1, layer)
    assert layer.finished


@pytest.mark.parametrize("key", ["num_experts", "moe_intermediate_size", "hidden_size"])
def test_sizes_are_compared_with_the_files_before_a_layer_is_made(tmp_path: Path, key: str) -> None:
    make_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: 1 << 20}))

    class Made(FusedMoE):
        def __init__(self, **options: object) -> None:
            pytest.fail("a layer was made")

    with pytest.raises(CheckpointError, match=str(1 << 20)):
        Made.from_checkpoint(tmp_path, 1)


@pytest.mark.parametrize("desc_act", [False, True])
def test_a_missing_g_idx_means_columns_in_order(tmp_path: Path, desc_act: bool) -> None:
    without = {f"{MLP}.experts.2.{name}_proj.g_idx": None for name in ("gate", "up", "down")}
    config = qwen3_config(quantization_config={**GPTQ, "desc_act": desc_act})
    make_checkpoint(tmp_path, config, tensors=without)
    reader = CheckpointReader(tmp_path)
    layer = LoadingLayer(gptq_shapes(), [2])
    load_moe_layer(reader, model_spec(reader.config), 1, layer)
    assert torch.equal(layer.w13_g_idx[0], torch.arange(64, dtype=torch.int32) // 32)


def test_a_layer_that_does_not_take_a_tensor_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    layer = LoadingLayer(plain_shapes(), [2])
    monkeypatch.setattr(layer, "weight_loader", lambda *args, **kwargs: False)
    with pytest.raises(CheckpointError, match=r"expected the layer to take it as w\d of w\d+_weight for .* expert 2"):
        load_moe_layer(reader, model_spec(reader.config), 1, layer)
    assert not layer.finished


def test_a_parameter_that_the_checkpoint_does_not_have_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match=rf"expected tensor {MLP}.experts.2.\w+_proj.\w+, found none"):
        load_moe_layer(reader, model_spec(reader.config), 1, LoadingLayer(gptq_shapes(), [2]))


def test_a_dense_layer_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, qwen3_config(mlp_only_layers=[0]))
    reader = CheckpointReader(tmp_path)
    with pytest.raises(ValueError, match=r"layer is 0"):
        load_moe_layer(reader, model_spec(reader.config), 0, LoadingLayer(plain_shapes(), [2]))


def test_router_that_is_quantized_as_any_linear_layer(tmp_path: Path) -> None:
    codes = quantize_int(torch.randn(8, 64).half(), 4, 32)
    tensors = pack_gptq(codes, GPTQConfig.from_dict(GPTQ))._asdict()
    config = qwen3_config(num_experts=8, quantization_config=GPTQ)
    write_checkpoint(tmp_path, config, [(f"{MLP}.gate.{suffix}", tensor) for suffix, tensor in tensors.items()])
    reader = CheckpointReader(tmp_path)
    assert torch.equal(load_router(reader, model_spec(reader.config), 1).weight, dequantize(codes))
    # A bias of the choice lies beside it in the module.
    named = {f"{MLP}.gate.{suffix}": tensor for suffix, tensor in tensors.items()}
    named[f"{MLP}.gate.e_score_correction_bias"] = torch.rand(8)
    config = deepseek_config(0, quantization_config=GPTQ) | {"n_routed_experts": 8}
    write_checkpoint(tmp_path / "biased", config, named.items())
    reader = CheckpointReader(tmp_path / "biased")
    router = load_router(reader, model_spec(reader.config), 1)
    assert torch.equal(router.weight, dequantize(codes))
    assert torch.equal(router.correction_bias, named[f"{MLP}.gate.e_score_correction_bias"])


def test_gates_that_are_quantized_as_any_linear_layer(tmp_path: Path) -> None:
    """By recipes that leave out lm_head alone: in fp8 they have the name of plain ones."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    config = qwen3_config(model_type="qwen2_moe", shared_expert_intermediate_size=16, quantization_config=settings)
    tensors, expected = {}, {}
    sizes = {"gate": (4, 64), "shared_expert_gate": (1, 64)}
    sizes |= {f"shared_expert.{name}_proj": (64, 16) if name == "down" else (16, 64) for name in ("gate", "down", "up")}
    for name, size in sizes.items():
        weight, scale = torch.randn(size).to(torch.float8_e4m3fn), torch.rand(size[0], 1).bfloat16()
        tensors |= {f"{MLP}.{name}.weight": weight, f"{MLP}.{name}.weight_scale": scale}
        expected[name] = weight.float() * scale.float()
    write_checkpoint(tmp_path, config, tensors.items())
    reader = CheckpointReader(tmp_path)
    spec = model_spec(reader.config)
    assert torch.equal(load_router(reader, spec, 1).weight, expected["gate"])
    shared = load_shared_experts(reader, spec, 1)
    assert shared is not None and shared.expert_gate is not None
    assert torch.equal(shared.expert_gate, expected["shared_expert_gate"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp.gate.weight": torch.ones(5, 64)}, r"mlp.gate.weight: expected shape \(4, 64\), found \(5, 64\)"),
        ({"mlp.gate.weight": None}, "expected tensor model.layers.1.mlp.gate.weight, found none"),
        ({"mlp.gate.e_score_correction_bias": None}, "expected tensor .*e_score_correction_bias, found none"),
        ({"post_attention_layernorm.weight": torch.ones(3)}, r"layernorm.weight: expected shape \(64,\), found \(3,\)"),
        (
            {"mlp.shared_experts.down_proj.weight": None},
            "expected tensor .*shared_experts.down_proj.weight, found none",
        ),
        (
            {"mlp.shared_experts.up_proj.weight": torch.ones(32, 64, dtype=torch.int8)},
            "up_proj.weight: expected .*int8",
        ),
    ],
)
def test_what_lies_beside_experts_is_found_before_any_data_is_read(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    config = deepseek_config(1)
    make_checkpoint(tmp_path / "whole", config)
    whole = CheckpointReader(tmp_path / "whole")
    check_beside_experts(whole, model_spec(config))
    make_checkpoint(tmp_path, config, tensors={f"model.layers.1.{name}": value for name, value in changes.items()})
    reader = CheckpointReader(tmp_path)
    parallel = FusedMoEParallelConfig.make(ep_size=1, rank=0)
    with pytest.raises(CheckpointError, match=message):
        MoEStack(reader, model_spec(config), parallel, dtype=torch.bfloat16)
    assert reader.bytes_read == whole.bytes_read == 0


def test_router_of_another_size_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tensors={f"{MLP}.gate.weight": torch.ones(5, 64)})
    reader = CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match=rf"tensor {MLP}.gate.weight: expected shape \(4, 64\), found \(5, 64\)"):
        load_router(reader, model_spec(reader.config), 1)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_one_call_makes_and_loads_a_layer(tmp_path: Path, dtype: torch.dtype | None) -> None:
    make_checkpoint(tmp_path, config_of("gptq" if dtype is None else None))
    by_path = FusedMoE.from_checkpoint(tmp_path, 1, dtype)
    with CheckpointReader(tmp_path) as reader:
        spec = model_spec(reader.config, reader)
        by_reader = FusedMoE.from_checkpoint(reader, 1, dtype, prefix="another")
        logits_of = load_router(reader, spec, 1).weight.float()
        with pytest.raises(ValueError, match="99"):
            FusedMoE.from_checkpoint(reader, 99)
    assert by_path.moe_config.in_dtype == (dtype or torch.bfloat16)
    x = torch.randn(5, spec.hidden_size).to(by_path.moe_config.in_dtype)
    logits = x.float() @ logits_of.T
    assert torch.equal(by_path(x, logits), by_reader(x, logits))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("reader", r"reader is None; it must be a CheckpointReader, as CheckpointReader\(folder\)"),
        ("spec", r"spec is None; it must be a MoEModelSpec, as model_spec\(reader.config, reader\)"),
        ("layer", r"layer is None; it must be a FusedMoE, as FusedMoE\(\*\*layer_options\(reader, spec, 1\)\)"),
    ],
)
def test_reader_spec_and_layer_are_of_their_types(tmp_path: Path, wrong: str, message: str) -> None:
    make_checkpoint(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        given: dict[str, Any] = {"reader": reader, "spec": model_spec(reader.config, reader), "layer_index": 1}
        given |= {"layer": LoadingLayer(plain_shapes(), [0]), wrong: None}
        with pytest.raises(TypeError, match=f"^{message}$"):
            load_moe_layer(**given)
        if wrong != "layer":
            with pytest.raises(TypeError, match=f"^{message}$"):
                layer_options(given["reader"], given["spec"], 1)
            with pytest.raises(TypeError, match=f"^{message}$"):
                check_experts(given["reader"], given["spec"])

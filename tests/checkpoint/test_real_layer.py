"""Checkpoints in the layer itself: every rank's shard, and whole MoE blocks against transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moe_ep.activation import apply_activation
from moe_ep.checkpoint import (
    CheckpointReader,
    MoEModelSpec,
    embed_rows,
    load_moe_layer,
    load_output_norm,
    load_router,
    load_shared_experts,
    model_spec,
)
from moe_ep.checkpoint.formats import quantization_config
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.errors import CheckpointError
from moe_ep.layer import FusedMoE
from moe_ep.quantization.canonical_weights import dequantize
from tests.checkpoint.checkpoints import GPTQ, make_checkpoint, qwen3_config
from tests.checkpoint.model_cases import MODELS, block_of, save_model


def make_layer(reader: CheckpointReader, spec: MoEModelSpec, dtype: torch.dtype, **arguments: Any) -> FusedMoE:
    routing = {name: value for name, value in vars(spec.routing).items() if name != "has_correction_bias"}
    return FusedMoE(
        spec.num_experts,
        spec.top_k,
        spec.hidden_size,
        spec.moe_intermediate_size,
        params_dtype=dtype,
        quant_config=quantization_config(reader.config),
        activation=spec.activation,
        has_bias=spec.has_bias,
        swiglu_limit=spec.swiglu_limit,
        **routing,
        **arguments,
    )


def rank_of(ep_size: int, rank: int) -> FusedMoEParallelConfig:
    return FusedMoEParallelConfig(dp_size=ep_size, dp_rank=rank, ep_size=ep_size, ep_rank=rank)


def plain_expert(reader: CheckpointReader, stem: str) -> torch.Tensor:
    """One projection as f32 `[out, in]`, dequantized on its own."""
    quantization = quantization_config(reader.config)
    parts = {name.removeprefix(stem): reader.read(name) for name in reader.names(stem)}
    return parts["weight"].float() if quantization is None else dequantize(quantization.unpack(parts))


def held(layer: FusedMoE, gemm: str, slot: int) -> torch.Tensor:
    """One slot of the layer as f32 `[out, in]`, whatever form it is held in."""
    if hasattr(layer, f"{gemm}_weight"):
        return getattr(layer, f"{gemm}_weight")[slot].float()
    quant = layer.quant_method.get_fused_moe_quant_config(layer)
    codes = getattr(layer, f"{gemm}_processed_weight")[slot].float()
    scales = (quant.w1_scale if gemm == "w13" else quant.w2_scale)[slot].float()
    return (codes - 8) * scales.repeat_interleave(codes.shape[-1] // scales.shape[-1], dim=-1)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("ep_size", "strategy"), [(2, "linear"), (3, "round_robin"), (4, "linear")])
def test_ranks_read_their_shards_and_together_everything(
    tmp_path: Path, quantized: bool, ep_size: int, strategy: str
) -> None:
    config = qwen3_config(num_experts=8, **({"quantization_config": GPTQ} if quantized else {}))
    tensors = make_checkpoint(tmp_path, config)
    prefix = "model.layers.1.mlp.experts."
    total = 0
    for rank in range(ep_size):
        reader = CheckpointReader(tmp_path)
        spec = model_spec(reader.config)
        parallel = FusedMoEParallelConfig(
            dp_size=ep_size, dp_rank=rank, ep_size=ep_size, ep_rank=rank, expert_placement_strategy=strategy
        )
        # f16 holds the scales of GPTQ as they are.
        layer = make_layer(reader, spec, torch.float16 if quantized else torch.bfloat16, parallel_config=parallel)
        load_moe_layer(reader, spec, 1, layer)
        mine = [expert for expert in range(8) if layer.expert_map[expert] >= 0]
        stems = tuple(f"{prefix}{expert}." for expert in mine)
        assert reader.bytes_read == sum(t.nbytes for name, t in tensors.items() if name.startswith(stems))
        total += reader.bytes_read
        for expert in mine:
            slot = int(layer.expert_map[expert])
            gate, up, down = (plain_expert(reader, f"{prefix}{expert}.{p}_proj.") for p in ("gate", "up", "down"))
            assert torch.equal(held(layer, "w13", slot), torch.cat([gate, up]))
            assert torch.equal(held(layer, "w2", slot), down)
    assert total == sum(t.nbytes for name, t in tensors.items() if name.startswith(prefix))


def test_redundant_experts_are_read_once(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    spec = model_spec(reader.config)
    layer = make_layer(
        reader, spec, torch.bfloat16, parallel_config=rank_of(1, 0), enable_eplb=True, num_redundant_experts=4
    )
    load_moe_layer(reader, spec, 0, layer)
    assert torch.equal(layer.w13_weight[:4], layer.w13_weight[4:])
    assert reader.bytes_read == 4 * 3 * 32 * 64 * 2


@pytest.mark.parametrize(
    ("family", "fused_shared_experts"),
    [*((family, False) for family in MODELS), ("deepseek_v2", True), ("deepseek_v3", True)],
)
def test_block_equals_transformers(tmp_path: Path, family: str, fused_shared_experts: bool) -> None:
    model = save_model(family, tmp_path)
    reader = CheckpointReader(tmp_path)
    spec = model_spec(reader.config)
    shared = spec.shared_experts
    index = spec.moe_layers[-1]
    router = load_router(reader, spec, index)
    correction_bias = None if router.correction_bias is None else router.correction_bias.float()
    layer = make_layer(
        reader,
        spec,
        torch.float32,
        e_score_correction_bias=correction_bias,
        n_shared_experts=shared.num_experts if shared and fused_shared_experts else None,
    )
    load_moe_layer(reader, spec, index, layer)
    x = torch.randn(24, spec.hidden_size)
    output = layer(x, F.linear(x, router.weight.float(), None if router.bias is None else router.bias.float()))
    # Granite's is beside the block.
    if shared is not None and not fused_shared_experts and shared.module.startswith(spec.moe_module):
        gate, up, down, expert_gate = load_shared_experts(reader, spec, index)
        gate_up = F.linear(x, (gate if up is None else torch.cat([gate, up])).float())
        hidden = apply_activation(spec.activation, gate_up, clamp_limit=shared.swiglu_limit)
        shared_output = hidden @ down.float().T
        output += shared_output if expert_gate is None else torch.sigmoid(x @ expert_gate.float().T) * shared_output
    block = block_of(model.model.layers[index]).float()
    # A.X K1's block ends with its norm.
    if hasattr(block, "post_mlp_layernorm"):
        weight = load_output_norm(reader, spec, index)
        output = F.rms_norm(output, weight.shape, weight.float(), spec.rms_norm_eps)
    with torch.no_grad():
        expected = block(x.unsqueeze(0))
    # GPT-OSS returns its router's scores as well.
    expected = (expected[0] if isinstance(expected, tuple) else expected).view_as(x)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_a_layer_of_another_size_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    spec = model_spec(reader.config)
    layer = FusedMoE(4, 2, spec.hidden_size, 2 * spec.moe_intermediate_size, params_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"experts\.0\..*expected shape \(64, 64\).*found \((32, 64|64, 32)\)"):
        load_moe_layer(reader, spec, 0, layer)


def test_a_layer_that_misses_a_tensor_does_not_run(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    make_checkpoint(tmp_path, tensors={name: None})
    reader = CheckpointReader(tmp_path)
    spec = model_spec(reader.config)
    layer = make_layer(reader, spec, torch.bfloat16)
    with pytest.raises(CheckpointError, match=f"expected tensor {name}, found none"):
        load_moe_layer(reader, spec, 0, layer)


def test_zero_points_that_were_lost_name_the_layer_and_do_not_run(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.gate_proj.qzeros"
    config = qwen3_config(quantization_config=GPTQ)
    make_checkpoint(tmp_path, config, tensors={name: torch.full((2, 4), -1, dtype=torch.int32)})
    reader = CheckpointReader(tmp_path)
    spec = model_spec(reader.config)
    layer = make_layer(reader, spec, torch.float16)
    with pytest.raises(CheckpointError, match=r"index.json: model.layers.1.mlp.experts: qzeros: expected .*found 15"):
        load_moe_layer(reader, spec, 1, layer)


def test_quantized_experts_load_again_only_where_there_is_room(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, qwen3_config(quantization_config=GPTQ))
    reader = CheckpointReader(tmp_path)
    spec = model_spec(reader.config)
    layer = make_layer(reader, spec, torch.float16)
    load_moe_layer(reader, spec, 1, layer)
    with pytest.raises(RuntimeError, match=r"model.layers.1.mlp.experts: the parameters .* call begin_reload to load"):
        load_moe_layer(reader, spec, 1, layer)
    layer.begin_reload()
    load_moe_layer(reader, spec, 1, layer)


@pytest.mark.parametrize(
    ("experts", "error", "named"),
    [
        ([9], ValueError, r"an id in experts is 9; .* below num_experts \(4\)"),
        ({0, -1}, ValueError, "an id in experts is -1"),
        (["1"], TypeError, "an id in experts is '1'"),
        (5, TypeError, "experts is 5; it must be a collection"),
        ([], RuntimeError, r"experts is \[\] and no weights of"),
        ([1], RuntimeError, r"experts is \[1\] and no weights of"),
    ],
)
def test_experts_to_load_exist_and_the_others_are_there(
    tmp_path: Path, experts: Any, error: type[Exception], named: str
) -> None:
    make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    spec = model_spec(reader.config)
    layer = make_layer(reader, spec, torch.bfloat16)
    layer.w13_weight.data.fill_(7)
    with pytest.raises(error, match=named):
        load_moe_layer(reader, spec, 0, layer, experts=experts)
    assert (layer.w13_weight == 7).all() and not layer.loader.has_begun
    load_moe_layer(reader, spec, 0, layer)
    layer.begin_reload()
    load_moe_layer(reader, spec, 0, layer, experts=dict.fromkeys([2, 0]).keys())


def text_moe() -> Path | None:
    """The trained model of MOE_EP_TEXT_MOE, or beside the project; None where neither is there."""
    candidates = [os.environ.get("MOE_EP_TEXT_MOE"), Path(__file__).parents[3] / "shared/models/text-moe"]
    return next((Path(path) for path in candidates if path and (Path(path) / "config.json").is_file()), None)


@pytest.mark.skipif(text_moe() is None, reason="text-moe is not here; MOE_EP_TEXT_MOE names its folder")
def test_trained_checkpoint_on_four_ranks_and_whole() -> None:
    reader = CheckpointReader(text_moe())
    spec = model_spec(reader.config)
    x = embed_rows(reader, spec, torch.arange(100, 132)).half()
    for index in spec.moe_layers:
        logits = x @ load_router(reader, spec, index).weight.half().T
        before = reader.bytes_read
        whole = make_layer(reader, spec, torch.float16)
        load_moe_layer(reader, spec, index, whole)
        bytes_of_all = reader.bytes_read - before
        assert whole(x, logits).isfinite().all()
        for rank in range(4):
            before = reader.bytes_read
            part = make_layer(reader, spec, torch.float16, parallel_config=rank_of(4, rank))
            load_moe_layer(reader, spec, index, part)
            assert reader.bytes_read - before == bytes_of_all // 4
            for gemm in ("w13", "w2"):
                mine = getattr(whole, f"{gemm}_processed_weight")[16 * rank : 16 * (rank + 1)]
                assert torch.equal(getattr(part, f"{gemm}_processed_weight"), mine)

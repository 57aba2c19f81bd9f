"""All experts in one e4m3 tensor with a scale for each row, as llm-compressor writes Granite's; and one a matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_ep.checkpoint import CheckpointReader, check_experts, expert_tensors, load_moe_layer, model_spec, read_expert
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.errors import CheckpointError
from tests.checkpoint.checkpoints import qwen3_config
from tests.checkpoint.format_cases import ct
from tests.checkpoint.test_format_cases import make_layer
from tests.checkpoint.test_modules import held

E, N, K = 4, 32, 64
BLOCK = "model.layers.0.block_sparse_moe"
FUSED = {"input_linear": (E, 2 * N, K), "output_linear": (E, K, N)}


def write(directory: Path, strategy: str) -> dict[str, torch.Tensor]:
    """A Granite model of one layer; its weights in f32 by the name of the linear layer."""
    config = qwen3_config(model_type="granitemoe", num_hidden_layers=1, num_experts=None, num_local_experts=E)
    settings = ct("float-quantized", 8, "float", strategy=strategy, group_size=None)
    config |= {"intermediate_size": N, "quantization_config": settings}
    tensors, weights = {}, {}
    for name, shape in FUSED.items():
        weight = torch.randn(shape).to(torch.float8_e4m3fn)
        scale = torch.rand(shape[0], shape[1] if strategy == "channel" else 1, 1).bfloat16()
        tensors |= {f"{BLOCK}.{name}.weight": weight, f"{BLOCK}.{name}.weight_scale": scale}
        weights[name] = weight.float() * scale.float()
    write_checkpoint(directory, config, tensors.items())
    return weights


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_scales_of_rows_and_of_matrices(tmp_path: Path, strategy: str) -> None:
    weights = write(tmp_path, strategy)
    reader = CheckpointReader(tmp_path)
    spec = model_spec(reader.config, reader)
    check_experts(reader, spec)
    found = expert_tensors(reader, spec, 0)
    for expert in range(E):
        gate, up = weights["input_linear"][expert].chunk(2)
        matrices = read_expert(reader, found, expert)
        assert matrices.up is not None
        assert torch.equal(matrices.gate, gate) and torch.equal(matrices.up, up)
        assert torch.equal(matrices.down, weights["output_linear"][expert])
    layer = make_layer(reader, 0)
    load_moe_layer(reader, spec, 0, layer)
    for slot in range(E):
        assert torch.equal(held(layer, "w13", slot), weights["input_linear"][slot])
        assert torch.equal(held(layer, "w2", slot), weights["output_linear"][slot])


def test_scales_that_are_missing_are_named(tmp_path: Path) -> None:
    write(tmp_path / "whole", "channel")
    whole = CheckpointReader(tmp_path / "whole")
    tensors = {name: whole.read(name) for name in whole.names() if "input_linear.weight_scale" not in name}
    write_checkpoint(tmp_path / "less", whole.config, tensors.items())
    less = CheckpointReader(tmp_path / "less")
    with pytest.raises(CheckpointError, match=r"expected tensor .*input_linear\.weight_scale, found none"):
        check_experts(less, model_spec(less.config))

"""The reference of --verify: as exact as f32 allows for every kind of layer, and independent of what it verifies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.checkpoint import CheckpointReader, model_spec
from moe_ep.checkpoint.spec import Gate
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.launch.workers import verify
from moe_ep.layer.stack import MoEStack
from tests.checkpoint.checkpoints import DEEPSEEK, make_checkpoint, qwen3_config

F32_ERROR = 3e-6


def stack_of(folder: Path, **options: Any) -> tuple[CheckpointReader, Any, MoEStack]:
    reader = CheckpointReader(folder)
    spec = model_spec(reader.config, reader)
    return reader, spec, MoEStack(reader, spec, FusedMoEParallelConfig(), dtype=torch.float32, **options)


def worst_error(reader: CheckpointReader, spec: Any, stack: MoEStack, online: bool = True) -> float:
    errors = []

    def observe(layer: int, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        block = next(block for block in stack.layers() if block.layer_index == layer)
        as_quantized = getattr(block.moe.quant_method, "as_quantized", None) if online else None
        reference = verify.reference_moe(reader, spec, layer, hidden_states, as_quantized)
        errors.append(verify.max_relative_error(output, reference))

    generator = torch.Generator().manual_seed(3)
    with torch.inference_mode():
        stack(torch.randn(16, spec.hidden_size, generator=generator), observe)
    return max(errors)


@pytest.mark.parametrize(
    "family",
    ["phimoe", "qwen2_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "granitemoeshared", "qwen3_next", "ernie4_5_moe"],
)
def test_an_f32_layer_differs_by_rounding_alone(family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.checkpoint.model_cases import save_model

    save_model(family, tmp_path)
    assert worst_error(*stack_of(tmp_path)) < F32_ERROR


def test_shared_experts_are_not_rounded_with_the_config(tmp_path: Path) -> None:
    """Weights that bf16, the config's dtype, cannot hold."""
    config = qwen3_config(**DEEPSEEK)
    tensors = make_checkpoint(tmp_path / "bf16", config)
    generator = torch.Generator().manual_seed(1)
    finer = {
        name: tensor.float() + 1e-3 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
        if "shared_experts" in name
    }
    make_checkpoint(tmp_path / "f32", config, tensors=finer)
    assert worst_error(*stack_of(tmp_path / "f32")) < F32_ERROR


@pytest.mark.parametrize("name", ["gate_proj", "down_proj"])
def test_a_wrong_shared_expert_is_noticed(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path, qwen3_config(**DEEPSEEK))
    reader, spec, stack = stack_of(tmp_path)
    for block in stack.layers():
        block.moe.shared_experts.get_parameter(f"{name}.weight").data.mul_(1.01)
    assert worst_error(reader, spec, stack) > verify.tolerance(torch.float32)


@pytest.mark.parametrize("quantize", ["int4", "fp8"])
def test_what_quantizing_changes_is_another_error(tmp_path: Path, quantize: str) -> None:
    make_checkpoint(tmp_path)
    made = stack_of(tmp_path, quantize=quantize)
    assert worst_error(*made) < F32_ERROR < 1e-3 < worst_error(*made, online=False)


@pytest.mark.parametrize("activation", MoEActivation)
@pytest.mark.parametrize("limit", [None, 0.5])
def test_activations_are_the_formulas_of_the_layer(activation: MoEActivation, limit: float | None) -> None:
    if limit is not None and (not activation.is_gated or activation is MoEActivation.SITU):
        pytest.skip("it takes no limit")
    values = torch.linspace(-12, 12, 49)
    gate, up = torch.cartesian_prod(values, values).unbind(1)
    both = torch.cat([gate, up]) if activation.is_gated else gate
    found = verify.activate(Gate(activation, limit), gate, up if activation.is_gated else None)
    torch.testing.assert_close(found, apply_activation(activation, both, clamp_limit=limit))

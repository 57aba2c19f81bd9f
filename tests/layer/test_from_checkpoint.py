"""`FusedMoE.from_checkpoint`: one layer of a checkpoint in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep import CheckpointReader, FusedMoE, MoEActivation
from moe_ep.errors import CheckpointError, ConfigError
from moe_ep.layer.methods import OnlineIntConfig, relative_error, tolerance
from tests.checkpoint.checkpoints import GPTQ, make_checkpoint, qwen3_config
from tests.ranks import ranks

LAYER = 1


def checkpoint(folder: Path, quantized: bool = False) -> dict[str, torch.Tensor]:
    return make_checkpoint(folder, qwen3_config(**({"quantization_config": GPTQ} if quantized else {})))


def inputs(layer: FusedMoE, num_tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_states = torch.randn(num_tokens, layer.moe_config.hidden_dim, generator=generator)
    logits = torch.randn(num_tokens, layer.num_router_columns, generator=generator)
    return hidden_states.to(layer.moe_config.in_dtype), logits


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16])
def test_a_layer_computes_what_the_files_hold(tmp_path: Path, dtype: torch.dtype | None) -> None:
    tensors = checkpoint(tmp_path)
    layer = FusedMoE.from_checkpoint(tmp_path, layer=LAYER, dtype=dtype)
    assert layer.moe_config.in_dtype == (dtype or torch.bfloat16)
    assert layer.activation is MoEActivation.SILU and layer.layer_name.startswith(f"model.layers.{LAYER}.mlp")
    hidden_states, logits = inputs(layer)
    weights, ids = logits.softmax(-1).topk(layer.moe_config.experts_per_token)
    weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.zeros(hidden_states.shape)
    for row, (values, experts) in enumerate(zip(weights, ids, strict=True)):
        for value, expert in zip(values, experts.tolist(), strict=True):
            gate, up, down = (
                tensors[f"model.layers.{LAYER}.mlp.experts.{expert}.{name}_proj.weight"].float()
                for name in ("gate", "up", "down")
            )
            x = hidden_states[row].float()
            expected[row] += value * (down @ (torch.nn.functional.silu(gate @ x) * (up @ x)))
    assert relative_error(layer(hidden_states, logits), expected) < tolerance(layer.moe_config.in_dtype)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_folder_and_a_reader_give_the_same(tmp_path: Path, quantized: bool) -> None:
    checkpoint(tmp_path, quantized)
    by_path = FusedMoE.from_checkpoint(str(tmp_path), LAYER, torch.float32)
    with CheckpointReader(tmp_path) as reader:
        by_reader = FusedMoE.from_checkpoint(reader, layer=LAYER, dtype=torch.float32, prefix="other", max_num_tokens=2)
    assert by_reader.layer_name == "other"
    assert torch.equal(by_path(*inputs(by_path)), by_reader(*inputs(by_path)))


def parts_of_ranks(rank: int, world_size: int, folder: Path, options: dict[str, Any]) -> int:
    alone = FusedMoE.from_checkpoint(folder, LAYER, torch.float32, tp_size=1, ep_size=1, dp_size=1)
    with CheckpointReader(folder) as reader:
        layer = FusedMoE.from_checkpoint(reader, LAYER, torch.float32, **options)
        num_bytes = reader.bytes_read
    given = inputs(layer, 3 + (rank if layer.parallel_config.use_all2all else 0))
    assert relative_error(layer(*given), alone(*given)) < tolerance(torch.float32)
    return num_bytes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"all2all_backend": "batched_all_to_all", "max_num_tokens": 2},
        {"tp_size": 2, "ep_size": 1, "reduce_results": True},
        {"enable_eplb": True, "num_redundant_experts": 2},
    ],
)
def test_each_rank_reads_its_own_experts(tmp_path: Path, options: dict[str, Any]) -> None:
    tensors = checkpoint(tmp_path)
    read = ranks(2).run(parts_of_ranks, tmp_path, options)
    held = sum(tensor.nbytes for name, tensor in tensors.items() if f"layers.{LAYER}.mlp.experts." in name)
    if "tp_size" not in options and "enable_eplb" not in options:
        assert all(num_bytes < 0.6 * held for num_bytes in read)


def test_plain_experts_may_be_quantized(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    plain = FusedMoE.from_checkpoint(tmp_path, LAYER, torch.float32)
    quantized = FusedMoE.from_checkpoint(tmp_path, LAYER, torch.float32, quant_config=OnlineIntConfig(bits=8))
    assert 0 < relative_error(quantized(*inputs(plain)), plain(*inputs(plain))) < 0.05


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"layer": 99}, ValueError, "99"),
        ({"layer": -1}, ValueError, "-1"),
        ({"layer": True}, TypeError, "layer"),
        ({"layer": "1"}, TypeError, "layer"),
        ({"layer": LAYER, "hidden": 3}, TypeError, "hidden"),
        ({"layer": LAYER, "num_experts": 8}, ConfigError, "num_experts is 8 and the checkpoint has 4"),
        ({"layer": LAYER, "num_experts": None}, ConfigError, "num_experts is None"),
        ({"layer": LAYER, "activation": "gelu"}, ValueError, "gelu"),
        ({"layer": LAYER, "dtype": torch.int8}, ValueError, "int8"),
        ({"path": "missing", "layer": LAYER}, CheckpointError, "missing"),
    ],
)
def test_refusals(tmp_path: Path, arguments: dict[str, Any], error: type[Exception], named: str) -> None:
    checkpoint(tmp_path)
    given = {"path": tmp_path} | arguments
    if given["path"] == "missing":
        given["path"] = tmp_path / "missing"
    with pytest.raises(error, match=named):
        FusedMoE.from_checkpoint(**given)


def test_num_experts_is_compared_before_anything_is_read(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    with CheckpointReader(tmp_path) as reader:
        with pytest.raises(ConfigError, match="num_experts"):
            FusedMoE.from_checkpoint(reader, LAYER, num_experts=8)
        assert reader.bytes_read == 0
        assert FusedMoE.from_checkpoint(reader, LAYER, num_experts=4).num_experts == 4

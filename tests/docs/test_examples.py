"""What the documents show is run here."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep.layer import FusedMoE
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS
from tests.checkpoint.checkpoints import GPTQ, make_checkpoint, qwen3_config
from tests.ranks import ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
E, K, T = 6, 32, 5


def make_layer(**options) -> FusedMoE:
    layer = FusedMoE(E, 2, K, 16, params_dtype=torch.float32, **options)
    mapping = layer.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", E)
    generator = torch.Generator().manual_seed(0)
    parameters = dict(layer.named_parameters())
    for _, name, expert, shard in mapping:
        weight = torch.randn((K, 16) if shard == "w2" else (16, K), generator=generator)
        parameter = parameters["w2_weight" if shard == "w2" else "w13_weight"]
        layer.weight_loader(parameter, weight, name, shard, expert)
    return layer


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randn(T, K, generator=generator), torch.randn(T, E, generator=generator)


# Other tests run in the same processes.
@mock.patch.dict(ALL2ALL_BACKENDS.entries)
@mock.patch.dict(EXPERTS.entries)
def run_examples(rank: int, world_size: int) -> list[torch.Tensor]:
    sys.path.insert(0, str(EXAMPLES))
    ALL2ALL_BACKENDS.register("broadcast", "broadcast_backend:BroadcastDispatcher", "the example of the docs")
    EXPERTS.register("squared_relu", "squared_relu_experts:SquaredReluExperts", "the example of the docs")
    own: tuple[dict[str, Any], ...] = ({"all2all_backend": "broadcast"}, {"experts": "squared_relu"})
    group = dist.new_group()
    gone = weakref.ref(group)
    with torch.inference_mode():
        layers = [make_layer(ep_size=world_size, process_group=group, **options) for options in own]
        outputs = [layer(*inputs(rank)) for layer in layers]
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert gone() is None  # though the layers are there
    return outputs


def squared_relu(hidden_states: torch.Tensor, router_logits: torch.Tensor, layer: FusedMoE) -> torch.Tensor:
    """The example's layer token by token."""
    rows = []
    for token, logits in zip(hidden_states, router_logits, strict=True):
        weights, ids = logits.softmax(0).topk(2)
        row = torch.zeros(K)
        for weight, expert in zip(weights / weights.sum(), ids, strict=True):
            gate, up = (layer.w13_weight[expert] @ token).chunk(2)
            row += weight * (layer.w2_weight[expert] @ (gate.relu() ** 2 * up))
        rows.append(row)
    return torch.stack(rows)


def test_the_examples_compute_what_they_say() -> None:
    with torch.inference_mode():
        alone = make_layer()
        for rank, (by_own_backend, by_own_experts) in enumerate(ranks(2).run(run_examples)):
            torch.testing.assert_close(by_own_backend, alone(*inputs(rank)), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(by_own_experts, squared_relu(*inputs(rank), alone), rtol=1e-4, atol=1e-4)


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_a_layer_of_one_s_own_sizes() -> None:
    _, block, *_ = blocks_of(ROOT / "README.md")
    names: dict[str, Any] = {"torch": torch, "FusedMoE": FusedMoE}
    exec(block.replace("num_experts=64", "num_experts=16"), names)  # smaller, for the time that it takes
    with torch.inference_mode():
        output = names["layer"](torch.randn(128, 1024, dtype=torch.bfloat16), torch.randn(128, 16))
    assert output.shape == (128, 1024) and output.isfinite().all()


@pytest.mark.parametrize("page", ["README.md", "docs/formats.md"])
@pytest.mark.parametrize("quantization", [None, GPTQ], ids=["plain", "gptq"])
def test_a_layer_from_a_checkpoint(page: str, quantization: dict[str, Any] | None, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, qwen3_config(**({"quantization_config": quantization} if quantization else {})))
    block, *_ = blocks_of(ROOT / page)
    names: dict[str, Any] = {}
    exec(block.replace("path/to/checkpoint", str(tmp_path)).replace("layer=3", "layer=0"), names)
    layer = names["layer"]
    assert layer(torch.ones(1, 64).bfloat16(), torch.ones(1, 4)).any()
    if "output" in names:
        assert names["output"].shape == (128, 64)

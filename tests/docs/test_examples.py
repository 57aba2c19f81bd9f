"""What the documents show is run here."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from moe_ep.layer import FusedMoE
from moe_ep.registry import ALL2ALL_BACKENDS
from tests.ranks import ranks

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
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


def run_example(rank: int, world_size: int) -> torch.Tensor:
    sys.path.insert(0, str(EXAMPLES))
    ALL2ALL_BACKENDS.register("broadcast", "broadcast_backend:BroadcastPrepareFinalize", "the example of the docs")
    with torch.inference_mode():
        return make_layer(ep_size=world_size, all2all_backend="broadcast")(*inputs(rank))


def test_the_example_backend_computes_what_the_layer_alone_does() -> None:
    with torch.inference_mode():
        alone = make_layer()
        for rank, output in enumerate(ranks(2).run(run_example)):
            torch.testing.assert_close(output, alone(*inputs(rank)), rtol=1e-5, atol=1e-5)

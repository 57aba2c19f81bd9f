"""Routing recorded in CUDA graphs, weights updated under them, and memory that a trainer shares; needs a GPU."""

from __future__ import annotations

import copy
import multiprocessing
from typing import Any

import pytest
import torch

import moe_ep
from moe_ep.generation.engine import Generation, Request
from moe_ep.rollouts.transports import open_weights, share_weights
from tests.hf.hf_models import SIZES, make_model
from tests.hf.test_choices import check_triton

pytestmark = pytest.mark.gpu


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(0)
    return [Request(i, torch.randint(1, SIZES["vocab_size"], (3 + i,), generator=generator)) for i in range(6)]


def generated(model: Any, *, graphs: bool) -> list[Any]:
    settings: dict[str, Any] = {"max_new_tokens": 12, "num_slots": 4, "stop_ids": [], "records": "weights"}
    generation = Generation(model, requests(), **settings, graphs=graphs, prefill_graphs="off")
    done = generation.run()
    assert bool(generation.times["replayed"]) == graphs
    return done


def test_kernels_record_as_the_plain_form() -> None:
    check_triton("cuda")


def test_routing_is_recorded_in_cuda_graphs() -> None:
    model = make_model("Qwen3Moe", torch.bfloat16)
    model = moe_ep.parallelize(model, device="cuda:0", backend="batched_all_to_all", max_num_tokens=64)
    eager, captured = (generated(model, graphs=graphs) for graphs in (False, True))
    for first, second in zip(eager, captured, strict=True):
        assert first.token_ids == second.token_ids
        assert torch.equal(first.routing.ids, second.routing.ids)
        torch.testing.assert_close(first.routing.weights, second.routing.weights, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("quantize", ["none", "int4", "fp8"])
def test_a_captured_layer_runs_with_updated_weights(quantize: str) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128}
    first = make_model("Qwen3Moe", torch.bfloat16, **sizes)
    second = copy.deepcopy(first)
    with torch.no_grad():
        for param in second.parameters():
            param.mul_(0.9)
    tensors = {name: value.cuda() for name, value in second.state_dict().items()}
    model = moe_ep.parallelize(first, device="cuda:0", quantize=quantize)
    expected = moe_ep.parallelize(second, device="cuda:0", quantize=quantize)
    layer, other = model.model.layers[0].mlp.experts, expected.model.layers[0].mlp.experts
    x = torch.randn(4, 256, dtype=torch.bfloat16, device="cuda")
    ids, weights = torch.arange(8, device="cuda").view(4, 2) % 7, torch.full((4, 2), 0.5, device="cuda")
    graph = torch.cuda.CUDAGraph()
    for _ in range(3):
        layer(x, ids, weights)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = layer.forward_routed(x, weights, ids)
    moe_ep.update_weights(model, tensors)
    graph.replay()
    assert torch.equal(output, other(x, ids, weights))


def _share(connection: Any) -> None:
    tensors = {"a": torch.arange(12, device="cuda").view(3, 4).t(), "b": torch.full((5,), 2.5, device="cuda")}
    connection.send(share_weights(tensors.items()))
    connection.recv()


def test_memory_that_another_process_shares() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_share, args=(theirs,))
    process.start()
    found = dict(open_weights(ours.recv()))
    assert torch.equal(found["a"].cpu(), torch.arange(12).view(3, 4).t())
    assert torch.equal(found["b"].cpu(), torch.full((5,), 2.5))
    del found
    ours.send("read")
    process.join(60)
    assert process.exitcode == 0

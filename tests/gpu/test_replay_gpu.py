"""Calls of a model's layer that are replays of a CUDA graph: as those that run eagerly, to the bit."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from moe_ep.hf.routed_experts import RoutedExperts
from moe_ep.layer.methods import OnlineIntConfig
from moe_ep.layer.replay import EAGER_CALLS
from moe_ep.observability import stages
from tests.layer.moe_oracle import load, make_weights

pytestmark = pytest.mark.gpu

E, K, N, TOP_K = 16, 256, 128, 4
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "4-bit": {"quant_config": OnlineIntConfig()},
    "identities": {"num_identities": 2},
}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[torch.cuda.CUDAGraph]:
    """Every graph that is replayed, once for each time."""
    found: list[torch.cuda.CUDAGraph] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        found.append(graph)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return found


def make_layer(most_tokens: int = 256, **options: Any) -> RoutedExperts:
    sizes: dict[str, Any] = {"num_experts": E, "top_k": TOP_K, "hidden_size": K, "intermediate_size": N, "ep_size": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_EP_REPLAY_MAX_TOKENS", str(most_tokens))
        layer = RoutedExperts(**sizes | {"params_dtype": torch.bfloat16} | options)
    with torch.inference_mode(False):
        return load(layer, make_weights(E, K, N)).cuda()


def make_inputs(T: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = torch.randn(T, K, generator=generator, device="cuda").to(dtype)
    ids = torch.rand(T, E + 2, generator=generator, device="cuda").argsort(-1)[:, :TOP_K]
    return rows, ids, torch.rand(T, TOP_K, generator=generator, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_as_eager_calls(case: str, dtype: torch.dtype, replays: list[torch.cuda.CUDAGraph]) -> None:
    layer, eager = make_layer(**CASES[case]), make_layer(0, **CASES[case])
    calls = [(T, make_inputs(T, seed, dtype)) for seed, T in enumerate((5, 17, 1, 256, 257) * (EAGER_CALLS + 3))]
    outputs = [layer(*inputs) for _, inputs in calls]
    assert len(replays) == 4 * 2 and len({id(graph) for graph in replays}) == 4
    # No output is written by a later call.
    for (_, inputs), output in zip(calls, outputs, strict=True):
        assert output.dtype == dtype
        assert torch.equal(output, eager(*inputs))
    assert len(replays) == 4 * 2


def warm(layer: RoutedExperts, T: int, calls: int = EAGER_CALLS + 2) -> None:
    for seed in range(calls):
        layer(*make_inputs(T, seed))


@torch.inference_mode(False)
def test_other_weights(replays: list[torch.cuda.CUDAGraph]) -> None:
    """Written to in place and replaced."""
    with torch.no_grad():
        layer, eager = make_layer(), make_layer(0)
        inputs = make_inputs(5, 9)
        warm(layer, 5)
        for each in (layer, eager):
            each.w2_weight.data.mul_(2)
        assert torch.equal(layer(*inputs), eager(*inputs))
        num_replays = len(replays)
        assert num_replays == 2
        for each in (layer, eager):
            each.w2_weight = nn.Parameter(each.w2_weight * 3, requires_grad=False)
        for _ in range(EAGER_CALLS + 2):
            assert torch.equal(layer(*inputs), eager(*inputs))
        assert len(replays) == num_replays + 1
        for each in (layer, eager):
            each.cpu().cuda()
        for _ in range(EAGER_CALLS + 2):
            assert torch.equal(layer(*inputs), eager(*inputs))
        for each in (layer, eager):
            load(each, make_weights(E, K, N, seed=5))
        for _ in range(EAGER_CALLS + 2):
            assert torch.equal(layer(*inputs), eager(*inputs))


def test_streams_and_layers(replays: list[torch.cuda.CUDAGraph]) -> None:
    """Chains of layers on streams that run at the same time."""
    layers, eager = ([make_layer(most, **CASES["4-bit"]) for _ in range(3)] for most in (256, 0))

    def chain(layers: list[RoutedExperts], inputs: Inputs) -> torch.Tensor:
        rows, ids, weights = inputs
        for layer in layers * 6:
            rows = rows + layer(rows, ids, weights)
            rows = rows / rows.float().square().mean().sqrt().to(rows.dtype)
        return rows

    streams = [torch.cuda.Stream() for _ in range(3)]
    cases = [make_inputs(8, seed) for seed in range(len(streams))]
    expected = [chain(eager, inputs) for inputs in cases]
    torch.cuda.synchronize()
    for _ in range(8):
        got = []
        for stream, inputs in zip(streams, cases, strict=True):
            with torch.cuda.stream(stream):
                got.append(chain(layers, inputs))
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    assert len({id(graph) for graph in replays}) == len(layers) * len(streams)


def test_threads() -> None:
    layer, eager = make_layer(), make_layer(0)
    cases = [make_inputs(8, seed) for seed in range(200)]
    expected = [eager(*inputs) for inputs in cases]
    torch.cuda.synchronize()

    @torch.inference_mode()
    def call(number: int) -> bool:
        return torch.equal(layer(*cases[number]), expected[number])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(len(cases))))


def test_wrong_inputs_are_refused_after_a_capture() -> None:
    layer = make_layer()
    warm(layer, 5)
    rows, ids, weights = make_inputs(5, 0)
    of_the_wrong_shape = [(rows[:, :1], ids, weights), (rows, ids[:, :1], weights), (rows, ids, weights[:1])]
    for wrong in [*of_the_wrong_shape, (rows, ids.cpu(), weights.cpu())]:
        with pytest.raises(ValueError):
            layer(*wrong)


def test_a_layer_that_must_not_run_is_not_replayed() -> None:
    layer, inputs = make_layer(), make_inputs(5, 0)
    warm(layer, 5)
    expected = layer(*inputs)
    with torch.inference_mode(False):
        layer.begin_reload()
        with pytest.raises(RuntimeError, match="are being loaded again"):
            layer(*inputs)
        load(layer, make_weights(E, K, N))
    for _ in range(EAGER_CALLS + 2):
        assert torch.equal(layer(*inputs), expected)
    layer.refuse("a rank has lost its weights")
    with pytest.raises(RuntimeError, match="a rank has lost its weights"):
        layer(*inputs)


def test_what_is_counted_or_masked_is_not_replayed(replays: list[torch.cuda.CUDAGraph]) -> None:
    layer, eager = make_layer(), make_layer(0)
    warm(layer, 5)
    inputs = make_inputs(5, 3)
    replays.clear()
    layer.counts_load = True
    layer(*inputs)
    assert layer.load.sum() == (inputs[1] < E).sum()
    layer.counts_load = False
    layer.precomputed.row_mask = eager.precomputed.row_mask = torch.tensor(
        [True, False, True, False, True], device="cuda"
    )
    assert torch.equal(layer(*inputs), eager(*inputs))
    layer.precomputed.row_mask = eager.precomputed.row_mask = None
    with stages.record("cuda") as recorder:
        layer(*inputs)
    assert set(recorder.durations_ms()) == set(stages.STAGES)
    assert replays == []
    assert torch.equal(layer(*inputs), eager(*inputs))
    assert len(replays) == 1


def test_under_capture(replays: list[torch.cuda.CUDAGraph]) -> None:
    """Of whoever captures the whole model: with graphs of the layer's own, and without."""
    layer, eager = make_layer(**CASES["4-bit"]), make_layer(0, **CASES["4-bit"])
    for calls in (1, EAGER_CALLS + 2):
        warm(layer, 5, calls)
        held, graph = make_inputs(5, 0), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = layer(*held)
        for seed in range(3):
            inputs = make_inputs(5, seed)
            for to, tensor in zip(held, inputs, strict=True):
                to.copy_(tensor)
            graph.replay()
            expected = eager(*inputs)
            assert torch.equal(output, expected)
            assert torch.equal(layer(*inputs), expected)


def test_layers_that_come_and_go(replays: list[torch.cuda.CUDAGraph]) -> None:
    """Graphs give their memory back, and others can be made when there are none."""
    eager, inputs = make_layer(0), make_inputs(200, 1)
    expected = eager(*inputs)
    held = []
    for _ in range(4):
        layer = make_layer()
        for _ in range(EAGER_CALLS + 2):
            assert torch.equal(layer(*inputs), expected)
        copied = copy.deepcopy(layer)
        del layer
        assert torch.equal(copied(*inputs), expected)
        del copied
        replays.clear()
        gc.collect()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] == held[1]

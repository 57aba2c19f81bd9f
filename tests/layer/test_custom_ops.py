"""The layer as one node of a graph."""

from __future__ import annotations

import copy
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_ep.hf.routed_experts import RoutedExperts
from moe_ep.kernels.reference import ReferenceExperts
from moe_ep.layer import FusedMoE
from moe_ep.layer.custom_ops import find_layer
from moe_ep.layer.stack import SharedExperts
from tests.layer.moe_oracle import load, make_inputs, make_weights
from tests.ranks import ranks

E, K, N, TOP_K = 4, 32, 32, 2


def make_layer(**options: object) -> FusedMoE:
    return load(
        FusedMoE(num_experts=E, top_k=TOP_K, hidden_size=K, intermediate_size=N, **options), make_weights(E, K, N)
    )


class GraphCounter:
    """A torch.compile backend that runs graphs as they are and keeps the names of their calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> object:
        self.calls.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward


@pytest.mark.parametrize("can_capture", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_compiled_layer_is_one_node(shared: bool, can_capture: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name torch.compile knows whether a CUDA graph may hold it."""
    monkeypatch.setattr(ReferenceExperts, "supports_cuda_graph", lambda self: can_capture)
    layer = make_layer(shared_experts=SharedExperts(K, N) if shared else None)
    counter = GraphCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    inputs = make_inputs(5, K, E)
    assert torch.equal(compiled(*inputs), layer(*inputs))
    assert len(counter.calls) == 1
    ours = [call for call in counter.calls[0] if "moe_ep" in call]
    expected = "moe_forward_shared" if shared else "moe_forward"
    assert ours == [f"moe_ep.{expected}" if can_capture else f"moe_ep.{expected}_uncaptured"]
    op = getattr(torch.ops.moe_ep, ours[0].removeprefix("moe_ep.")).default
    assert (torch.Tag.cudagraph_unsafe in op.tags) == (not can_capture)


@pytest.mark.parametrize("identities", [0, 2])
def test_choices_of_a_model_are_part_of_the_node(identities: int) -> None:
    layer = load(
        RoutedExperts(
            num_experts=E, top_k=TOP_K, hidden_size=K, intermediate_size=N, num_identities=identities, ep_size=1
        ),
        make_weights(E, K, N),
    )
    counter = GraphCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    hidden_states = make_inputs(5, K, E)[0]
    ids = torch.tensor([[0, 3], [-1, 5], [2, 1], [4, 0], [1, 1]])
    inputs = hidden_states, ids, torch.rand(ids.shape)
    assert torch.equal(compiled(*inputs), layer(*inputs))
    (calls,) = counter.calls
    assert [call for call in calls if "moe_ep" in call] == ["moe_ep.moe_forward_routed_uncaptured"]


def compiled_of_ranks(rank: int, world_size: int, backend: str) -> list[str]:
    layer = make_layer(all2all_backend=backend)
    for part in (layer.prepare_finalize, layer.modular_kernel.fused_experts):
        part.supports_cuda_graph = lambda: True  # type: ignore[method-assign]
    counter = GraphCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for tokens in (5 + rank, 5):
        inputs = make_inputs(tokens, K, E)
        torch.testing.assert_close(compiled(*inputs), make_layer(ep_size=1)(*inputs))
    return [call for calls in counter.calls for call in calls if "moe_ep" in call]


@pytest.mark.parametrize("backend", ["allgather_reducescatter", "batched_all_to_all"])
def test_layers_that_send_tokens_to_ranks_are_not_captured(backend: str) -> None:
    """A rank whose shapes come again would replay, and leave the question of another unanswered."""
    for calls in ranks(2).run(compiled_of_ranks, backend):
        assert set(calls) == {"moe_ep.moe_forward_uncaptured"}


def test_a_compiled_model_of_two_layers() -> None:
    first, second = make_layer(), make_layer()

    def model(hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        return second(first(hidden_states * 2, router_logits) + hidden_states, router_logits)

    inputs = make_inputs(5, K, E)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(*inputs), model(*inputs))
    assert torch.equal(compiled(*make_inputs(3, K, E)), model(*make_inputs(3, K, E)))


class StridedSharedExperts(SharedExperts):
    """Whose output has other strides than its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).t().contiguous().t()


@pytest.mark.parametrize("shared_experts", [None, SharedExperts, StridedSharedExperts])
def test_fake_tensors_agree_with_real_ones(shared_experts: type[SharedExperts] | None) -> None:
    layer = make_layer(shared_experts=shared_experts and shared_experts(K, N))
    op = torch.ops.moe_ep.moe_forward_shared if shared_experts else torch.ops.moe_ep.moe_forward
    for inputs in (make_inputs(5, K, E), [tensor.t().contiguous().t() for tensor in make_inputs(5, K, E)]):
        torch.library.opcheck(op, (*inputs, layer.layer_name), test_utils=("test_schema", "test_faketensor"))


def test_autocast_stops_at_the_layer() -> None:
    layer = make_layer(shared_experts=SharedExperts(K, N))
    inputs = make_inputs(5, K, E)
    expected = layer(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(*inputs), expected)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs), expected)


def test_rows_reach_experts_contiguous() -> None:
    layer = make_layer()
    hidden_states, router_logits = make_inputs(6, K, E)
    expected = layer(hidden_states, router_logits)
    seen, experts = [], layer.modular_kernel.fused_experts
    run = experts.run
    experts.run = lambda call: (seen.append(call.hidden_states), run(call))
    sliced = torch.stack([hidden_states, hidden_states], dim=1)[:, 1]
    for given in (hidden_states.t().contiguous().t(), sliced):
        output = layer(given, router_logits.t().contiguous().t())
        assert torch.equal(output, expected) and output.is_contiguous() and seen.pop().is_contiguous()


def test_layers_are_found_by_unique_names_while_they_live() -> None:
    first, second = make_layer(prefix="model.layers.0.mlp"), make_layer(prefix="model.layers.0.mlp")
    assert first.layer_name == "model.layers.0.mlp"
    assert second.layer_name.startswith("model.layers.0.mlp#")
    assert find_layer(second.layer_name) is second
    assert make_layer().layer_name != make_layer().layer_name
    with pytest.raises(TypeError, match="prefix is 3"):
        make_layer(prefix=3)
    together = threading.Barrier(4)

    def one_of_four(_: int) -> FusedMoE:
        together.wait()
        return make_layer(prefix="same")

    with ThreadPoolExecutor(4) as threads:
        for _ in range(8):
            layers = list(threads.map(one_of_four, range(4)))
            assert len({layer.layer_name for layer in layers}) == 4
    del first
    gc.collect()
    with pytest.raises(RuntimeError, match="there is no MoE layer named 'model.layers.0.mlp'"):
        find_layer("model.layers.0.mlp")


def test_a_copy_is_a_layer_of_its_own() -> None:
    layer = make_layer(prefix="copied")
    inputs = make_inputs(2, K, E)
    before = layer(*inputs)
    twin = copy.deepcopy(layer)
    twin.w2_weight.data.mul_(2)
    assert torch.equal(twin(*inputs), 2 * before)
    assert torch.equal(layer(*inputs), before)


def test_the_op_must_fit_the_layer() -> None:
    inputs = make_inputs(2, K, E)
    with pytest.raises(RuntimeError, match="has no shared experts"):
        torch.ops.moe_ep.moe_forward_shared(*inputs, make_layer_kept().layer_name)
    with pytest.raises(RuntimeError, match="has shared experts"):
        torch.ops.moe_ep.moe_forward(*inputs, make_layer_kept(shared_experts=SharedExperts(K, N)).layer_name)


_kept: list[FusedMoE] = []


def make_layer_kept(**options: object) -> FusedMoE:
    _kept.append(make_layer(**options))
    return _kept[-1]

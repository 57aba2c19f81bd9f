"""Routers as parts of a layer: the default one, choices of a model's own router, and a user-defined one."""

from __future__ import annotations

import copy

import pytest
import torch

from moe_ep.layer import FusedMoE
from moe_ep.layer.stack import SharedExperts
from moe_ep.observability.stages import Listener, listening
from moe_ep.routing import PrecomputedRouter, Routed, Router, select_experts
from tests.layer.moe_oracle import load, make_inputs, make_weights
from tests.layer.small_layer import TOP_K, E, K, N, T, make_layer
from tests.ranks import ranks


def choices(**routing: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(hidden_states, topk_weights, topk_ids) of what the default router chooses for `make_inputs`."""
    hidden_states, logits = make_inputs(T, K, E)
    weights, ids, _ = select_experts(hidden_states, logits, TOP_K, False, True, **routing)
    return hidden_states, weights, ids


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_shared_experts": 2},
        {"enable_eplb": True, "num_redundant_experts": 3},
        {"routed_scaling_factor": 2.5},
        {"scoring_func": "sigmoid"},
    ],
)
def test_choices_in_place_of_logits(options: dict, shared: bool) -> None:
    """A layer gives the same for logits and for what its router chooses of them."""
    layer = make_layer(**options, shared_experts=SharedExperts(K, N) if shared else None)
    load(layer, make_weights(E + options.get("n_shared_experts", 0), K, N))
    routing = {name: options[name] for name in ("routed_scaling_factor", "scoring_func") if name in options}
    hidden_states, weights, ids = choices(**routing)
    expected = layer(*make_inputs(T, K, E))
    assert torch.equal(layer(hidden_states, topk_weights=weights, topk_ids=ids), expected)
    if options.get("enable_eplb"):
        assert int(layer.eplb_state.expert_load_view.sum()) == 2 * T * TOP_K


@pytest.mark.parametrize("shared", [False, True])
def test_choices_in_a_compiled_graph(shared: bool) -> None:
    layer = load(make_layer(shared_experts=SharedExperts(K, N) if shared else None), make_weights(E, K, N))
    hidden_states, weights, ids = choices()
    expected = layer(hidden_states, topk_weights=weights, topk_ids=ids)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(hidden_states, topk_weights=weights, topk_ids=ids), expected)
    inputs = (hidden_states, weights, ids, layer.layer_name)
    op = getattr(torch.ops.moe_ep, "moe_forward_routed_shared" if shared else "moe_forward_routed")
    torch.library.opcheck(op, inputs, test_utils=("test_schema", "test_faketensor"))


def test_choices_of_other_dtypes_and_unknown_experts() -> None:
    layer = load(make_layer(), make_weights(E, K, N))
    hidden_states, weights, ids = choices()
    known = ids != 1
    expected = layer(hidden_states, topk_weights=weights * known, topk_ids=ids.where(known, 0))
    for none in (-1, -7, E, 1000):
        given = layer(hidden_states, topk_weights=weights.double(), topk_ids=ids.where(known, none).long())
        torch.testing.assert_close(given, expected)


def test_masked_rows_get_no_expert() -> None:
    layer = load(make_layer(router=PrecomputedRouter(E, TOP_K)), make_weights(E, K, N))
    hidden_states, weights, ids = choices()
    expected = layer(hidden_states, topk_weights=weights, topk_ids=ids)
    mask = torch.arange(T) % 3 > 0
    layer.router.row_mask = mask
    output = layer(hidden_states, topk_weights=weights, topk_ids=ids)
    torch.testing.assert_close(output[mask], expected[mask])
    assert not output[~mask].any()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda given: {**given, "topk_ids": given["topk_ids"][:, :1]}, "topk_ids"),
        (lambda given: {**given, "topk_weights": given["topk_weights"][:2]}, "topk_weights"),
        (lambda given: {**given, "topk_weights": given["topk_ids"]}, "topk_weights"),
        (lambda given: {**given, "topk_ids": given["topk_weights"]}, "topk_ids"),
        (lambda given: {"topk_ids": given["topk_ids"]}, "topk_weights"),
        (lambda given: {"topk_weights": given["topk_weights"]}, "topk_ids"),
        (lambda given: {**given, "router_logits": torch.zeros(T, E)}, "router_logits"),
        (lambda given: {}, "router_logits"),
    ],
)
def test_choices_that_do_not_fit_are_refused(change: object, named: str) -> None:
    layer = load(make_layer(), make_weights(E, K, N))
    hidden_states, weights, ids = choices()
    with pytest.raises(ValueError, match=named):
        layer(hidden_states, **change({"topk_weights": weights, "topk_ids": ids}))


class SecondBest(Router):
    """Sends a token to the experts of its second and third logit; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def check(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> None:
        if inputs[0].size(1) != E:
            raise ValueError(f"router_logits has {inputs[0].size(1)} columns; SecondBest takes {E}")

    def route(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> Routed:
        self.calls += 1
        weights, ids = inputs[0].softmax(-1).topk(3)
        return Routed(weights[:, 1:], ids[:, 1:])


def test_a_router_of_ones_own() -> None:
    layer = load(make_layer(router=SecondBest()), make_weights(E, K, N))
    hidden_states, logits = make_inputs(T, K, E)
    weights, ids = logits.softmax(-1).topk(3)
    expected = layer(hidden_states, topk_weights=weights[:, 1:], topk_ids=ids[:, 1:])
    assert torch.equal(layer(hidden_states, logits), expected)
    assert torch.equal(copy.deepcopy(layer)(hidden_states, logits), expected)
    assert layer.router.calls == 1
    with pytest.raises(ValueError, match="SecondBest takes"):
        layer(hidden_states, logits[:, :3])


@pytest.mark.parametrize(
    "options", [{"scoring_func": "sigmoid"}, {"renormalize": False}, {"e_score_correction_bias": torch.zeros(E)}]
)
def test_a_router_and_settings_of_another_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="router is a SecondBest"):
        make_layer(router=SecondBest(), **options)
    with pytest.raises(TypeError, match="router is"):
        make_layer(router="mine")


def test_a_model_that_routes_alone_passes_no_logits() -> None:
    layer = load(make_layer(router=PrecomputedRouter(E, TOP_K)), make_weights(E, K, N))
    with pytest.raises(ValueError, match="topk_weights"):
        layer(*make_inputs(T, K, E))


class Seen(Listener):
    def __init__(self) -> None:
        self.ids: list[torch.Tensor] = []

    def routed(self, layer: object, topk_ids: torch.Tensor) -> None:
        self.ids.append(topk_ids)


def choices_in_chunks(rank: int, world_size: int) -> None:
    layer = FusedMoE(E, TOP_K, K, N, all2all_backend="batched_all_to_all", max_num_tokens=2)
    alone = FusedMoE(E, TOP_K, K, N, ep_size=1, tp_size=1, dp_size=1)
    for each in (layer, alone):
        load(each, make_weights(E, K, N))
    hidden_states, weights, ids = (tensor[: 5 - 3 * rank] for tensor in choices())
    seen = Seen()
    with listening(seen):
        output = layer(hidden_states, topk_weights=weights, topk_ids=ids)
    assert [len(part) for part in seen.ids] == [[2, 2, 1], [2, 0, 0]][rank]
    torch.testing.assert_close(output, alone(hidden_states, topk_weights=weights, topk_ids=ids))


def test_choices_over_ranks_go_in_chunks() -> None:
    ranks(2).run(choices_in_chunks)


def whole_on_every_rank(rank: int, world_size: int) -> tuple[int, ...]:
    """A layer of one rank in a group of several, and what it holds."""
    outputs = []
    for sizes in ({"ep_size": 1, "tp_size": 1, "dp_size": 1}, {"tp_size": 1, "ep_size": 1}, {"tp_size": 1}):
        layer = load(FusedMoE(E, TOP_K, K, N, **sizes), make_weights(E, K, N))
        assert layer.groups.ep is None and layer.groups.tp is None
        # No rank waits for another: each makes another number of calls.
        for _ in range(rank + 1):
            outputs.append(layer(*make_inputs(T, K, E)))
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    return tuple(layer.w13_weight.shape)


def test_a_layer_that_every_rank_holds_whole() -> None:
    assert ranks(3).run(whole_on_every_rank) == [(E, 2 * N, K)] * 3

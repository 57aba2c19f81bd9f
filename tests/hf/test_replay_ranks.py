"""Which calls of layers are captured and replayed where ranks divide the experts, with real ranks; functions stand in
for graphs, so that a replay takes part in the step as a graph's kernels do. GPUs test the graphs themselves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import moe_ep
from moe_ep.dispatch.batched_all_to_all import BatchedAllToAllPrepareFinalize
from moe_ep.eplb.config import EplbConfig
from moe_ep.hf.parallelized import steps_of
from moe_ep.layer import FusedMoE, fused_moe, replay
from moe_ep.layer.replay import EAGER_CALLS
from moe_ep.routing.router import WrappingRouter
from tests.hf.hf_models import SIZES, make_model
from tests.layer.moe_oracle import load, make_inputs, make_weights
from tests.layer.test_replay import Place
from tests.ranks import ranks

CALLS = EAGER_CALLS + 3
BATCHED: dict[str, Any] = {"all2all_backend": "batched_all_to_all"}


def model_with_replays(patch: pytest.MonkeyPatch, most_tokens: int = 256, **options: Any) -> tuple[Any, Place]:
    """A parallelized model whose layers may replay calls through batched_all_to_all, 8 tokens of each rank at most; and
    what stands in for the GPU's stream."""
    patch.setenv("MOE_EP_REPLAY_MAX_TOKENS", str(most_tokens))
    place = stand_in(patch)
    torch.manual_seed(0)
    made = make_model("Qwen3Moe", torch.float32, num_experts=8)
    patch.setattr(BatchedAllToAllPrepareFinalize, "max_num_tokens_per_rank", lambda self: 8)
    return moe_ep.parallelize(made, backend="batched_all_to_all", **options), place


def stand_in(patch: pytest.MonkeyPatch) -> Place:
    """Lets layers replay calls through batched_all_to_all, with functions for graphs."""
    place = Place()
    patch.setattr(replay, "stream_graphs", lambda device: place)
    patch.setattr(fused_moe, "may_capture", lambda device: True)
    patch.setattr(BatchedAllToAllPrepareFinalize, "around_replay", around_replay)
    return place


def around_replay(self: BatchedAllToAllPrepareFinalize) -> AbstractContextManager[None]:
    return nullcontext()


def one_pass(model: Any, num_tokens: int, seed: int) -> torch.Tensor | None:
    steps = steps_of(model)
    if num_tokens == 0:
        with steps.planned(steps.begin(None)):
            steps.pass_without_tokens()
        return None
    tokens = torch.randint(1, SIZES["vocab_size"], (1, num_tokens), generator=torch.Generator().manual_seed(seed))
    logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits


def same_passes(rank: int, models: list[Any], tokens: tuple[int, ...], count: int) -> None:
    """`count` passes of each model, of which this rank brings so many tokens in turn, from its own place on."""
    for number in range(count):
        found = [one_pass(model, tokens[(number + rank) % len(tokens)], 7 * number + rank) for model in models]
        assert all(found[0] is None if one is None else torch.equal(one, found[0]) for one in found)


def assert_all_replayed(place: Place, rank: int, num_layers: int) -> None:
    """After 3 * CALLS passes of 1, 5 and no tokens in turn: the most tokens of two ranks are 5, 5 and 1, which are
    filled up to 6 and 1, and of each kind the first calls run eagerly. Rank 1 has two kinds of calls that are filled up
    to 6: without tokens, ids have another dtype."""
    kinds = 2 + rank
    assert place.done.count("capture") == kinds * num_layers
    assert place.done.count("replay") == num_layers * (3 * CALLS - kinds * (EAGER_CALLS + 1))


def with_and_without(rank: int, world_size: int) -> None:
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        eager, _ = model_with_replays(patch, 0)
        model, place = model_with_replays(patch)
        layers = steps_of(model).layers
        same_passes(rank, [eager, model], (1, 5, 0), 3 * CALLS)
        assert_all_replayed(place, rank, len(layers))

        # Where one rank has more than fits into a pass, all ranks make two; calls that somebody looks into run eagerly.
        place.done.clear()
        same_passes(rank, [eager, model], (1, 11), 2 * CALLS)
        for layer in layers:
            layer.precomputed.row_mask = torch.ones(5, dtype=torch.bool)
        same_passes(0, [eager, model], (5,), 2)
        for layer in layers:
            layer.precomputed.row_mask, layer.counts_load = None, True
        same_passes(rank, [eager, model], (1, 5), 2)
        assert place.done == []
        for layer in layers:
            layer.counts_load = False
        same_passes(rank, [eager, model], (1, 5), 2)
        assert place.done == ["replay"] * (2 * len(layers))

        layers[0].refuse("a rank has lost its weights")
        with pytest.raises(RuntimeError, match="a rank has lost its weights"):
            layers[0].serve()


def test_which_calls_are_replayed() -> None:
    ranks(2).run(with_and_without)


def compiled(rank: int, world_size: int) -> None:
    """The nodes of a compiled model replay calls of theirs."""
    nodes: list[torch.fx.Node] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        nodes.extend(node for node in graph.graph.nodes if "moe_forward_routed" in str(node.target))
        return graph

    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        eager, _ = model_with_replays(patch, 0)
        model, place = model_with_replays(patch)
        passes = torch.compile(model, backend=keep, dynamic=False)
        same_passes(rank, [eager, passes], (3,), CALLS)
        num_layers = len(steps_of(model).layers)
        assert len(nodes) == num_layers
        assert place.done == ["capture"] * num_layers + ["replay"] * (2 * num_layers)


def test_replays_of_a_compiled_model() -> None:
    ranks(2).run(compiled)


def balanced(rank: int, world_size: int) -> None:
    """Experts move, and graphs stay; replays count the load as other calls do."""
    options: dict[str, Any] = {"eplb": EplbConfig(first_plan=1000, asynchronous=False)}
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        eager, _ = model_with_replays(patch, 0, **options, num_redundant_experts=world_size)
        model, place = model_with_replays(patch, **options, num_redundant_experts=world_size)
        managers = [steps_of(one).eplb for one in (eager, model)]
        same_passes(rank, [eager, model], (1, 5, 0), 3 * CALLS)
        for manager in managers:
            manager.rearrange(manager.placement.host[:, ::-1].copy())
        # None that was counted came before the tables of EPLB, which graphs depend on and kernels do not.
        assert_all_replayed(place, rank, len(steps_of(model).layers))
        place.done.clear()
        same_passes(rank, [eager, model], (1, 5, 0), 3 * CALLS)
        assert place.done == ["replay"] * (3 * CALLS * len(steps_of(model).layers))
        loads = [manager.recorder.snapshot() for manager in managers]
        assert torch.equal(*loads) and loads[0].any()
        for manager in managers:
            manager.close()


def test_replays_of_balanced_layers() -> None:
    ranks(2).run(balanced)


def by_other_backends(rank: int, world_size: int) -> list[str]:
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        model, place = model_with_replays(patch)
        patch.undo()
        patch.setattr(replay, "stream_graphs", lambda device: place)
        patch.setattr(fused_moe, "may_capture", lambda device: True)
        same_passes(rank, [model], (1, 5), 2 * CALLS)
        return place.done


def layers_alone(rank: int, world_size: int) -> None:
    """Calls of a layer with logits: what is filled up adds nothing, not to loads either, whoever chooses experts."""
    cases: list[dict[str, Any]] = [{}, {"zero_expert_num": 2, "zero_expert_type": "identity"}, {"enable_eplb": True}]
    tokens = ((5, 3), (1, 0), (0, 7), (8, 8), (6, 2))
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        place = stand_in(patch)
        for case in cases:
            layer = load(FusedMoE(8, 2, 64, 32, max_num_tokens=8, **BATCHED, **case), make_weights(8, 64, 32))
            eager: list[torch.Tensor] = []
            place.done.clear()
            for number in range(len(tokens) * CALLS):
                which = number % len(tokens)
                num_tokens, columns = tokens[which][rank], layer.num_router_columns
                found = layer(*make_inputs(num_tokens, 64, columns, seed=which * world_size + rank))
                eager.append(found)
                assert torch.equal(found, eager[which])
            # 5, 7 and 8, and 6 tokens; each time the first calls are eager.
            assert set(place.done) == {"capture", "replay"} and place.done.count("capture") == 3
            if layer.eplb_state is not None:
                num_slots = 2 * CALLS * sum(both[rank] for both in tokens)
                assert int(layer.eplb_state.expert_load_view.sum()) == num_slots
            # A router of one's own, and one that records: as they are.
            layer.router_wrappers = (WrappingRouter,)
            place.done.clear()
            layer(*make_inputs(5, 64, layer.num_router_columns))
            assert not place.done


def test_layers_that_route() -> None:
    ranks(2).run(layers_alone)


def test_backends_without_replays() -> None:
    """Their graphs would not fit to what other ranks do."""
    assert ranks(2).run(by_other_backends) == [[], []]

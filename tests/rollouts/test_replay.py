"""Replayed routing: layers, models of transformers as they are and parallelized, and perplexity."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import moe_ep
from moe_ep.errors import ConfigError
from moe_ep.generation.engine import Generation, Request
from moe_ep.generation.perplexity import perplexity
from moe_ep.routing import PrecomputedRouter
from tests.hf.hf_models import SIZES, make_model
from tests.layer.moe_oracle import load, make_inputs, make_weights
from tests.layer.small_layer import TOP_K, E, K, N, T, make_layer
from tests.ranks import ranks


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(1, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(3))


def other_ids(number: int, layers: int, num_experts: int, top_k: int) -> torch.Tensor:
    """Experts that no router would choose so."""
    drawn = torch.rand(number, layers, num_experts, generator=torch.Generator().manual_seed(4))
    return drawn.argsort(dim=-1)[..., :top_k].to(torch.int16)


ROUTINGS: list[dict[str, Any]] = [
    {},
    {"renormalize": False, "routed_scaling_factor": 2.5},
    {"scoring_func": "sigmoid", "e_score_correction_bias": torch.linspace(-1, 1, E)},
    {"zero_expert_num": 3, "zero_expert_type": "identity"},
    {"enable_eplb": True, "num_redundant_experts": 3},
]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_layer_takes_recorded_experts(routing: dict[str, Any]) -> None:
    layer = load(make_layer(**routing), make_weights(E, K, N))
    hidden_states, logits = make_inputs(T, K, layer.num_router_columns)
    with moe_ep.recording(layer, weights=True) as log:
        expected = layer(hidden_states, logits)
    recorded = log.choices()
    for weights in (None, recorded.weights):
        with moe_ep.replaying(layer, recorded.ids, weights):
            assert torch.equal(layer(hidden_states, logits), expected)
    # Of another layer's choice: the weights are those of the router for these experts.
    ids = other_ids(T, 1, layer.num_router_columns, TOP_K)
    with moe_ep.recording(layer, weights=True) as log, moe_ep.replaying(layer, ids), moe_ep.recording(layer) as inner:
        output = layer(hidden_states, logits)
    assert torch.equal(log.choices().ids, ids) and torch.equal(inner.choices().ids, ids)
    scores = logits.sigmoid() if "scoring_func" in routing else logits.softmax(-1)
    weights = scores.gather(1, ids[:, 0].long())
    if routing.get("renormalize", True):
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * routing.get("routed_scaling_factor", 1.0)
    torch.testing.assert_close(log.choices().weights[:, 0], weights)
    with moe_ep.replaying(layer, ids, weights[:, None]):
        torch.testing.assert_close(layer(hidden_states, logits), output)
    assert torch.equal(layer(hidden_states, logits), expected)


def test_what_does_not_fit_is_refused() -> None:
    layer = load(make_layer(), make_weights(E, K, N))
    ids = other_ids(T, 1, E, TOP_K)
    with moe_ep.replaying(layer, ids[:-1]), pytest.raises(ValueError, match=f"ids has {T - 1} tokens"):
        layer(*make_inputs(T, K, E))
    for wrong, named in ((ids.float(), "ids"), (ids[:, 0], "ids"), (ids + E, f"which has {E}")):
        with pytest.raises(ValueError, match=named), moe_ep.replaying(layer, wrong):
            pass
    with pytest.raises(ValueError, match="ids has expert -2"), moe_ep.replaying(layer, torch.full_like(ids, -2)):
        pass
    with pytest.raises(ValueError, match="weights"), moe_ep.replaying(layer, ids, ids):
        pass
    for wrong, weights, named in ((None, None, "ids is None"), (ids.tolist(), None, "ids is a list")):
        with pytest.raises(ValueError, match=named), moe_ep.replaying(layer, wrong, weights):
            pass
    with pytest.raises(ValueError, match="weights is a list"), moe_ep.replaying(layer, ids, ids.tolist()):
        pass
    for top_k in (TOP_K - 1, TOP_K + 1):
        others = other_ids(T, 1, E, top_k)
        for weights in (None, torch.ones(others.shape)):
            with (
                pytest.raises(ValueError, match=f"ids has {top_k} experts .* layer 0 chooses {TOP_K};"),
                moe_ep.replaying(layer, others, weights),
            ):
                pass
    for model, named in (("x", "str"), ([None], "list"), (None, "NoneType")):
        with pytest.raises(ValueError, match=f"model is a {named}"), moe_ep.replaying(model, ids):
            pass
    with pytest.raises(ValueError, match="Linear"), moe_ep.replaying(torch.nn.Linear(2, 2), ids):
        pass
    routed = load(make_layer(router=PrecomputedRouter(E, TOP_K)), make_weights(E, K, N))
    hidden_states, logits = make_inputs(T, K, E)
    weights, own, _ = moe_ep.select_experts(hidden_states, logits, TOP_K, False, True)
    with moe_ep.replaying(routed, ids), pytest.raises(ValueError, match="PrecomputedRouter"):
        routed(hidden_states, topk_weights=weights, topk_ids=own)
    custom = load(make_layer(custom_routing_function=lambda **_: (weights, own)), make_weights(E, K, N))
    with moe_ep.replaying(custom, ids), pytest.raises(ValueError, match="custom_routing_function"):
        custom(hidden_states, logits)


@pytest.mark.parametrize("kind", ["layer", "model", "parallelized"])
def test_rows_that_no_pass_took_are_refused(kind: str) -> None:
    """As of texts whose recorded choices hold their last token too, which no pass reads."""
    if kind == "layer":
        model = load(make_layer(), make_weights(E, K, N))
        ids, calls = other_ids(8, 1, E, TOP_K), [lambda: model(*make_inputs(4, K, E))] * 2
    else:
        model = make_model("Qwen3Moe")
        if kind == "parallelized":
            model = moe_ep.parallelize(model)
        ids, calls = other_ids(8, 2, 7, 2), [lambda: model(input_ids=tokens(1, 4))] * 2
    with torch.no_grad():
        for weights in (None, torch.full(ids.shape, 0.5)):
            with moe_ep.replaying(model, ids, weights):
                for call in calls:
                    call()
            with pytest.raises(ValueError, match="ids has 8 tokens .* took 4"), moe_ep.replaying(model, ids, weights):
                calls[0]()
            with pytest.raises(KeyError), moe_ep.replaying(model, ids, weights):
                calls[0]()
                raise KeyError
            with moe_ep.replaying(model, ids, weights):
                pass


@pytest.mark.parametrize("parallelized", [False, True])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"])
def test_a_model_of_transformers_takes_recorded_experts(family: str, parallelized: bool) -> None:
    model, text = make_model(family), tokens(2, 5)
    reference = moe_ep.parallelize(make_model(family))
    with moe_ep.recording(reference, weights=True) as log:
        reference(input_ids=text)
    recorded = log.choices()
    if parallelized:
        model = reference
    with torch.no_grad():
        expected = model(input_ids=text).logits
        for weights in (None, recorded.weights):
            with moe_ep.replaying(model, recorded.ids.numpy(), weights):
                again = model(input_ids=text).logits
            # transformers' experts round differently, and so do the scores of the next layer.
            exact = parallelized or weights is None
            torch.testing.assert_close(again, expected, **{"rtol": 0, "atol": 0} if exact else {})
        layers, num_experts = recorded.ids.size(1), 6 if family in ("Mixtral", "GptOss") else 7
        ids = other_ids(10, layers, num_experts, recorded.ids.size(-1))
        with moe_ep.replaying(model, ids):
            changed = model(input_ids=text).logits
        # A row without a recording keeps the router's choice.
        ids[5:] = -1
        with moe_ep.replaying(model, ids):
            halved = model(input_ids=text).logits
    assert not torch.allclose(changed[0], expected[0], atol=1e-4)
    torch.testing.assert_close(halved[0], changed[0])
    torch.testing.assert_close(halved[1], expected[1])


@pytest.mark.parametrize("parallelized", [False, True])
def test_recorded_experts_of_groups_that_are_not_kept_have_their_scores(parallelized: bool) -> None:
    """DeepSeek-V2 takes the scores of these groups as 0."""
    model, ids = make_model("DeepseekV2"), torch.tensor([0, 7]).expand(12, 1, 2)
    gate, seen = model.model.layers[1].mlp.gate, []
    gate.register_forward_hook(lambda module, args, output: seen.extend(output))
    if parallelized:
        model = moe_ep.parallelize(model)
    with torch.no_grad(), moe_ep.replaying(model, ids):
        model(input_ids=tokens(1, 12))
    logits, weights, chosen = seen
    assert torch.equal(chosen, ids[:, 0])
    torch.testing.assert_close(weights, logits.softmax(dim=-1).gather(1, chosen) * gate.routed_scaling_factor)


def test_gradients_flow_through_the_scores_of_recorded_experts() -> None:
    model, text = make_model("Qwen3Moe"), tokens(1, 6)
    model.requires_grad_(True)
    ids = other_ids(6, 2, 7, 2)
    with moe_ep.replaying(model, ids):
        model(input_ids=text).logits.logsumexp(-1).sum().backward()
    used = [set(ids[:, layer].flatten().tolist()) for layer in range(2)]
    for layer, block in enumerate(model.model.layers):
        touched = block.mlp.experts.down_proj.grad.abs().sum(dim=(1, 2)).nonzero().flatten().tolist()
        assert set(touched) == used[layer]
        assert block.mlp.gate.weight.grad.abs().sum() > 0


def test_gradient_checkpointing_is_refused_where_it_would_choose_again() -> None:
    model, ids = make_model("Qwen3Moe"), other_ids(4, 2, 7, 2)
    model.gradient_checkpointing_enable()
    with moe_ep.replaying(model.eval(), ids):
        model(input_ids=tokens(1, 4))
    model.train()
    with torch.no_grad(), moe_ep.replaying(model, ids):
        model(input_ids=tokens(1, 4))
    for weights in (None, torch.ones(ids.shape)):
        with pytest.raises(ConfigError, match="gradient checkpointing"), moe_ep.replaying(model, ids, weights):
            pass


def test_a_router_that_chooses_in_another_way_is_refused() -> None:
    model = make_model("Qwen3Moe")
    gate = model.model.layers[1].mlp.gate

    def forward(hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = torch.nn.functional.linear(hidden_states.flatten(0, -2), gate.weight)
        weights, ids = logits.softmax(-1).sort(descending=True)
        return logits, weights[:, :2], ids[:, :2]

    gate.forward = forward
    ids = other_ids(4, 2, 7, 2)
    with torch.no_grad(), moe_ep.replaying(model, ids), pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts"):
        model(input_ids=tokens(1, 4))
    with torch.no_grad(), moe_ep.replaying(model, ids, torch.full(ids.shape, 0.5)):
        model(input_ids=tokens(1, 4))


@pytest.mark.parametrize("parallelized", [False, True])
def test_another_number_of_experts_than_a_model_chooses_is_refused(parallelized: bool) -> None:
    model = make_model("Qwen3Moe")
    if parallelized:
        model = moe_ep.parallelize(model)
    for top_k in (1, 3):
        ids = other_ids(4, 2, 7, top_k)
        for weights in (None, torch.ones(ids.shape)):
            with (
                pytest.raises(ValueError, match=f"ids has {top_k} experts .* layer 0 chooses 2;"),
                moe_ep.replaying(model, ids, weights),
            ):
                pass


class Wrapper(torch.nn.Module):
    """A model in another module, as of torch's DistributedDataParallel, without its config."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Any) -> Any:
        return self.module(**inputs)


def test_a_number_of_experts_that_no_config_tells_is_compared_in_the_pass() -> None:
    model, ids = Wrapper(make_model("Qwen3Moe")), other_ids(4, 2, 7, 3)
    for weights in (None, torch.ones(ids.shape)):
        with (
            torch.no_grad(),
            moe_ep.replaying(model, ids, weights),
            pytest.raises(ValueError, match=r"ids has 3 experts .* chooses 2;"),
        ):
            model(input_ids=tokens(1, 4))
    with torch.no_grad(), moe_ep.replaying(model, ids[..., :2]):
        model(input_ids=tokens(1, 4))


def perplexities(rank: int, world_size: int) -> tuple[dict[str, float], ...]:
    """With own and with recorded routing, after a generation that tells log-probabilities."""
    model = moe_ep.parallelize(make_model("Qwen3Moe"))
    requests = [Request(index, tokens(4 + index)) for index in range(3)]
    settings: dict[str, Any] = {"max_new_tokens": 5, "num_slots": 2, "stop_ids": [], "logprobs": 0}
    done = Generation(model, requests, **settings, records="weights").run()
    shared: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(shared, [(each.index, each.token_ids, each.routing) for each in done])
    by_index = {index: (ids, routing) for part in shared for index, ids, routing in part}
    texts = [torch.cat([request.token_ids, torch.tensor(by_index[request.index][0])]) for request in requests]
    routing = [by_index[request.index][1] for request in requests]
    found = [perplexity(model, {"all": texts}, given) for given in (None, [(ids, None) for ids, _ in routing], routing)]
    # Recorded of a text's last token too, as where a stop token ended it.
    whole = [(torch.cat([torch.as_tensor(ids), torch.as_tensor(ids[-1:])]), None) for ids, _ in routing]
    assert perplexity(model, {"all": texts}, whole) == found[1]
    with pytest.raises(ValueError, match="routing"):
        perplexity(model, {"all": texts}, routing[:-1])
    # The log-probabilities of a generation again, with its experts.
    own = done[0]
    text = texts[own.index]
    with moe_ep.serving(model), moe_ep.replaying(model, *routing[own.index]), torch.no_grad():
        logits = model(input_ids=text[None, :-1]).logits[0]
    again = logits.log_softmax(-1).gather(-1, text[1:, None])[own.num_prompt_tokens - 1 :, 0]
    torch.testing.assert_close(again, torch.tensor([each.chosen for each in own.logprobs]), rtol=1e-4, atol=1e-5)
    return tuple(found)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_perplexity_with_recorded_experts(num_ranks: int) -> None:
    for own, *replayed in ranks(num_ranks).run(perplexities):
        assert [found["all"] for found in replayed] == pytest.approx([own["all"]] * 2, rel=1e-5)

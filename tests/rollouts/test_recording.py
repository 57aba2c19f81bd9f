"""Recorded routing against the choices of the same model in one process of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import moe_ep
from moe_ep.eplb.trace import RoutingTrace
from moe_ep.errors import ConfigError
from moe_ep.generation.engine import Completion, Generation, Request
from moe_ep.rollouts.recording import layers_of
from moe_ep.rollouts.routing_file import RoutingFile
from tests.hf.hf_models import SIZES, make_model
from tests.layer.moe_oracle import load, make_inputs, make_weights
from tests.layer.small_layer import TOP_K, E, K, N, T, make_layer
from tests.ranks import ranks

STOP, NEW_TOKENS = 5, 6


def choices_alone(model: Any, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What every token of a text `[T]` chooses in a model of transformers: ids and weights `[T, layers, top_k]`."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    experts = [part for part in model.modules() if hasattr(part, "down_proj") and hasattr(part, "has_gate")]
    hooks = [part.register_forward_pre_hook(lambda _, args: seen.append(args[1:3])) for part in experts]
    with torch.no_grad():
        model(input_ids=token_ids[None])
    for hook in hooks:
        hook.remove()
    ids, weights = (torch.stack([pair[i].view(len(token_ids), -1) for pair in seen], dim=1) for i in range(2))
    return ids, weights


def in_order(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by ids, since forms of a router order them differently."""
    order = ids.long().argsort(dim=-1)
    return ids.long().gather(-1, order), weights.float().gather(-1, order)


def prompts(number: int) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    lengths = [3 + 4 * (index % 3) for index in range(number)]
    drawn = [torch.randint(1, SIZES["vocab_size"], (length,), generator=generator) for length in lengths]
    return [Request(index, ids) for index, ids in enumerate(drawn)]


def generated(rank: int, world_size: int, family: str, options: dict[str, Any]) -> list[Completion]:
    model = moe_ep.parallelize(make_model(family), **options)
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "num_slots": 2, "stop_ids": [STOP]}
    return Generation(model, prompts(6), **settings, records="weights").run()


@pytest.mark.parametrize(
    ("num_ranks", "family", "options"),
    [
        (1, "Qwen3Moe", {}),
        (2, "Qwen3Next", {}),  # pads prompts
        (2, "GptOss", {"eplb": moe_ep.EplbConfig(interval=2, window_size=2), "num_redundant_experts": 4}),
        (4, "DeepseekV3", {"backend": "batched_all_to_all", "max_num_tokens": 4}),  # several parts of a pass
    ],
)
def test_every_token_of_a_generation_is_recorded(num_ranks: int, family: str, options: dict[str, Any]) -> None:
    alone = make_model(family)
    done = [each for mine in ranks(num_ranks).run(generated, family, options) for each in mine]
    requests = {request.index: request for request in prompts(6)}
    assert sorted(each.index for each in done) == list(requests)
    for each in done:
        text = torch.cat([requests[each.index].token_ids, torch.tensor(each.token_ids, dtype=torch.int64)])
        num_fed = len(text) - (each.finish == "length")
        assert each.routing is not None and each.routing.ids.dtype == torch.int16
        assert each.routing.ids.size(0) == num_fed
        ids, weights = in_order(*each.routing)
        expected_ids, expected_weights = in_order(*choices_alone(alone, text[:num_fed]))
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-5)


def test_passes_of_a_parallelized_model_are_recorded_in_their_order() -> None:
    model, alone = moe_ep.parallelize(make_model("Mixtral")), make_model("Mixtral")
    tokens = torch.randint(1, SIZES["vocab_size"], (2, 5), generator=torch.Generator().manual_seed(0))
    with moe_ep.recording(model, max_tokens=30) as log:
        first = model(input_ids=tokens)
        generated = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3, do_sample=False)
    assert torch.equal(model(input_ids=tokens).logits, first.logits)  # not recorded any more
    ids, weights = log.choices()
    assert weights is None
    # A pass over 2 x 5 tokens, the same as the prompts of generate, and two over the tokens that follow but the last.
    assert ids.shape == (2 * 5 + 2 * 5 + 2 * 2, 2, SIZES["num_experts_per_tok"])
    assert torch.equal(ids[:10], ids[10:20])
    for sequence in range(2):
        expected = choices_alone(alone, generated[sequence, :7])[0]
        mine = torch.cat([ids[5 * sequence : 5 * sequence + 5], ids[20 + sequence :: 2]])
        assert torch.equal(mine.long(), expected)


@pytest.mark.parametrize("options", [{}, {"enable_eplb": True, "num_redundant_experts": 3}, {"n_shared_experts": 2}])
def test_a_layer_alone(options: dict[str, Any]) -> None:
    layer = load(make_layer(**options), make_weights(E + options.get("n_shared_experts", 0), K, N))
    hidden_states, logits = make_inputs(T, K, E)
    expected = moe_ep.select_experts(hidden_states, logits, TOP_K, False, True)
    with moe_ep.recording(layer, weights=True) as log:
        output = layer(hidden_states, logits)
    assert torch.equal(layer(hidden_states, logits), output)
    ids, weights = log.choices()
    assert torch.equal(ids[:, 0], expected[1].short()) and torch.equal(weights[:, 0], expected[0])


def test_identity_experts_keep_their_ids() -> None:
    layer = load(make_layer(zero_expert_num=3, zero_expert_type="identity"), make_weights(E, K, N))
    hidden_states, logits = make_inputs(T, K, E + 3)
    with moe_ep.recording(layer) as log:
        layer(hidden_states, logits)
    ids = log.choices().ids[:, 0]
    assert torch.equal(ids.long().sort(dim=-1).values, logits.topk(TOP_K).indices.sort(dim=-1).values)
    assert int(ids.max()) >= E


def test_what_cannot_be_recorded_is_refused() -> None:
    layer = load(make_layer(), make_weights(E, K, N))
    with moe_ep.recording(layer, max_tokens=T) as log:
        layer(*make_inputs(T, K, E))
        layer(*make_inputs(T, K, E))
    with pytest.raises(ConfigError, match=f"max_tokens is {T} and {2 * T}"):
        log.choices()
    with moe_ep.recording([layer, load(make_layer(), make_weights(E, K, N))]) as log:
        layer(*make_inputs(T, K, E))
    with pytest.raises(RuntimeError, match="layers"):
        log.choices()
    with pytest.raises(ValueError, match="Linear"):
        layers_of(torch.nn.Linear(2, 2))
    for wrong, named in (("x", "str"), ([None], "list"), ([layer, None], "NoneType"), (None, "NoneType")):
        with pytest.raises(ValueError, match=f"^model (is|holds) a {named}"):
            layers_of(wrong)
    with pytest.raises(TypeError, match="weights is 'false'"), moe_ep.recording(layer, weights="false"):
        pass


@pytest.mark.parametrize(("num_experts", "dtype"), [(255, "uint8"), (256, "int16")])
def test_a_file_gives_back_what_was_recorded(tmp_path: Path, num_experts: int, dtype: str) -> None:
    drawn = np.random.default_rng(0).integers(-1, num_experts, (9, 2, 3)).astype(np.int16)
    drawn[0, 0] = [num_experts - 1, -1, 0]
    ids, weights = {11: drawn, 2: drawn[:4]}, {11: np.float32(drawn) / 7, 2: np.float32(drawn[:4])}
    file = tmp_path / "routing.safetensors"
    RoutingFile(ids=ids, weights=weights, num_experts=num_experts, model="tiny").save(file)
    safetensors = pytest.importorskip("safetensors.numpy")
    assert str(safetensors.load_file(file)["2"].dtype) == dtype
    found = moe_ep.read_routed_experts(file)
    assert list(found) == [2, 11] and all(found[index].dtype == torch.int16 for index in ids)
    assert all(np.array_equal(found[index], ids[index]) for index in ids)
    for index, (own_ids, own_weights) in moe_ep.read_routed_experts(file, with_weights=True).items():
        assert np.array_equal(own_ids, ids[index]) and np.array_equal(own_weights, weights[index])
    RoutingFile(ids=ids, weights={}, num_experts=num_experts, model="tiny").save(file)
    with pytest.raises(ValueError, match="no weights of prompt 2"):
        moe_ep.read_routed_experts(file, with_weights=True)
    whole = file.read_bytes()
    for damaged in (whole[:-8], b"no file", whole.replace(b"routed experts 1", b"routed experts 9")):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"routing.safetensors is no file of recorded routing"):
            moe_ep.read_routed_experts(file)


@pytest.mark.parametrize(
    ("tensors", "metadata", "named"),
    [
        ({"0": np.uint8([[[0, 200]]])}, {}, "0 has ids from 0 to 200"),
        ({"0": np.int16([[[0, -7]]])}, {}, "0 has ids from -7 to 0"),
        ({"0": np.int16([[[0, 4]]])}, {}, "0 has ids from 0 to 4"),
        ({"0": np.int32([[[0, 1]]])}, {}, "0 is int32"),
        ({"0.weights": np.int32([[[0, 1]]])}, {}, r"0\.weights is int32"),
        ({"0.weights": np.float64([[[0, 1]]])}, {}, r"0\.weights is float64"),
        ({"-1": np.uint8([[[0, 1]]])}, {}, "'-1'"),
        ({"1_0": np.uint8([[[0, 1]]])}, {}, "'1_0'"),
        ({"00": np.uint8([[[0, 1]]])}, {}, "'00'"),
        ({" 1": np.uint8([[[0, 1]]])}, {}, "' 1'"),
        ({"00.weights": np.float32([[[0, 1]]])}, {}, "'00'"),
        ({}, {"num_experts": "-5"}, "num_experts is '-5'"),
        ({}, {"num_experts": "0"}, "num_experts is '0'"),
        ({}, {"num_experts": "99999999999"}, "num_experts is '99999999999'"),
        ({}, {"num_experts": "four"}, "num_experts is 'four'"),
        ({}, {"num_experts": None}, "no 'num_experts'"),
        ({}, {"num_identities": "99"}, "num_identities is '99'"),
        ({}, {"num_identities": "-1"}, "num_identities is '-1'"),
        ({}, {"num_ranks": "0"}, "num_ranks is '0'"),
        ({}, {"model": None}, "no 'model'"),
    ],
)
def test_a_file_of_damaged_content_is_refused(
    tmp_path: Path, tensors: dict[str, Any], metadata: dict[str, str | None], named: str
) -> None:
    from safetensors.numpy import save_file

    file = tmp_path / "routing.safetensors"
    whole = {"0": np.uint8([[[0, 255]]]), "10": np.int16([[[3, -1]]]), "0.weights": np.float32([[[0.5, 0]]])}
    given = {"format": "moe_ep routed experts 1", "num_experts": "4", "num_identities": "1", "model": "tiny"}
    save_file(whole, file, given)
    assert {index: ids.tolist() for index, ids in moe_ep.read_routed_experts(file).items()} == {
        0: [[[0, -1]]],
        10: [[[3, -1]]],
    }
    save_file(whole | tensors, file, {key: value for key, value in (given | metadata).items() if value is not None})
    with pytest.raises(ValueError, match=f"^.*routing.safetensors is no file of recorded routing: .*{named}"):
        moe_ep.read_routed_experts(file)


def test_weights_of_a_file_are_asked_for_by_true_or_false(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="with_weights is 'false'; it must be True or False"):
        moe_ep.read_routed_experts(tmp_path / "none", with_weights="false")  # type: ignore[call-overload]


def test_a_trace_is_not_read_as_recorded_routing(tmp_path: Path) -> None:
    row = np.zeros(1, np.int32)
    trace = RoutingTrace(ids=np.int32([[0, 1]]), layer=row, step=row, rank=row, num_experts=4, model="tiny")
    trace.save(tmp_path / "t.npz")
    with pytest.raises(
        ValueError,
        match=r"t.npz is a routing trace for moe-ep eplb, .* under another name, such as routing.safetensors",
    ):
        moe_ep.read_routed_experts(tmp_path / "t.npz")
    np.savez(tmp_path / "other.npz", other=row)
    with pytest.raises(ValueError, match=r"other.npz is no file of recorded routing"):
        moe_ep.read_routed_experts(tmp_path / "other.npz")

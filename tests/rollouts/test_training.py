"""The example of a training loop, and the log-probabilities that a trainer computes for it."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import moe_ep
from moe_ep.errors import ConfigError
from moe_ep.generation.engine import Generation, Request
from moe_ep.generation.sampling import Sampling
from tests.hf.hf_models import SIZES, make_model
from tests.ranks import ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo.py"
# f32, in another order of the sums.
CLOSE = 1e-5


def trained(rank: int, world_size: int, batch_invariant: bool) -> list[tuple[float, float]]:
    """Reward and difference of each step of the example."""
    example = runpy.run_path(str(EXAMPLE))
    settings = example["Settings"](steps=6, learning_rate=1e-2, batch_invariant=batch_invariant)
    return [(report.reward, report.difference) for report in example["train"](settings)]


@pytest.mark.parametrize(
    ("num_ranks", "batch_invariant"), [pytest.param(1, True, marks=pytest.mark.thorough), (2, True), (1, False)]
)
def test_the_reward_rises_and_the_trainer_agrees_with_the_engine(num_ranks: int, batch_invariant: bool) -> None:
    first, *others = ranks(num_ranks).run(trained, batch_invariant)
    assert all(other == first for other in others)
    rewards, differences = zip(*first, strict=True)
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.08
    assert max(differences) <= (0 if batch_invariant else CLOSE)
    assert len(EXAMPLE.read_text().splitlines()) < 200


@pytest.mark.parametrize("family", ["Mixtral", "Olmoe", "DeepseekV3"])
def test_log_probabilities_of_a_batch_invariant_generation_bit_for_bit(family: str) -> None:
    trainer = make_model(family)
    engine = moe_ep.parallelize(copy.deepcopy(trainer), batch_invariant=True)
    generator = torch.Generator().manual_seed(0)
    requests = [Request(i, torch.randint(1, SIZES["vocab_size"], (3 + i,), generator=generator)) for i in range(4)]
    settings: dict[str, Any] = {"max_new_tokens": 6, "num_slots": 3, "stop_ids": [], "logprobs": 0, "records": "ids"}
    done = Generation(engine, requests, **settings, sampling=Sampling(temperature=1.0)).run()
    texts = [torch.cat([requests[each.index].token_ids, torch.tensor(each.token_ids)]) for each in done]
    routing = [each.routing.ids for each in done]
    for each, found, close in zip(
        done,
        moe_ep.token_logprobs(trainer, texts, routing, batch_invariant=True),
        moe_ep.token_logprobs(trainer, texts, routing),
        strict=True,
    ):
        generated = torch.tensor([token.chosen for token in each.logprobs])
        assert torch.equal(found[-6:], generated)
        torch.testing.assert_close(close[-6:], generated, rtol=CLOSE, atol=CLOSE)


def test_texts_and_routing_that_do_not_fit_are_refused() -> None:
    model, text = make_model("Qwen3Moe"), torch.tensor([3, 4, 5])
    ids = torch.zeros(2, 2, 2, dtype=torch.int16)
    for texts, routing, named in (
        ([text[:1]], None, r"texts\[0\]"),
        ([text], [ids[:1]], "routing"),
        ([text], [], "routing"),
        ([], None, "texts is empty"),
        (None, None, "texts is a NoneType"),
        (3, None, "texts is a int"),
        ({0: text}, None, "texts is a dict"),
        ([text], {0: ids}, "routing is a dict"),
        ([text], 3, "routing is a int"),
        ([text, text], [None, None], r"routing\[0\] is a NoneType"),
        ([text], [ids[0, 0]], r"routing\[0\] is torch.int16 \(2,\)"),
        ([text], [ids.numpy()[0, 0]], r"routing\[0\] is int16 \(2,\)"),
        ([text], [ids.float()], r"routing\[0\] is torch.float32"),
        ([text], [ids.numpy().astype(object)], r"routing\[0\] is object"),
        ([text, text], [ids, ids[..., :1]], r"routing has texts of .* \(2, 1\) and \(2, 2\)"),
        ([text], [ids[..., :1]], "ids has 1 experts"),
    ):
        with pytest.raises(ValueError, match=named):
            moe_ep.token_logprobs(model, texts, routing)
    with pytest.raises(ConfigError, match="Qwen3Next"):
        moe_ep.token_logprobs(make_model("Qwen3Next"), [text], batch_invariant=True)
    with pytest.raises(TypeError, match="batch_invariant is 'false'"):
        moe_ep.token_logprobs(model, [text], batch_invariant="false")  # type: ignore[arg-type]
    for wrong, named in ((None, "model is a NoneType"), (torch.nn.Linear(2, 2), "model is a Linear")):
        with pytest.raises(TypeError, match=named):
            moe_ep.token_logprobs(wrong, [text])
        with pytest.raises(TypeError, match=named), moe_ep.batch_invariant_passes(wrong):
            pass


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_token_ids_may_be_of_any_integers(batch_invariant: bool) -> None:
    model, texts = make_model("Qwen3Moe"), [torch.tensor([3, 4, 5]), torch.tensor([7, 2, 9, 1])]
    with torch.no_grad():
        expected = moe_ep.token_logprobs(model, texts, batch_invariant=batch_invariant)
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
            given = (text.to(dtype) for text in texts)
            found = moe_ep.token_logprobs(model, given, batch_invariant=batch_invariant)  # type: ignore[arg-type]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

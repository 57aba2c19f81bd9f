"""The text of a prompt and its log-probabilities have the same bits alone and in any batch, at EP 1, 2 and 4."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

import moe_ep
from moe_ep.checkpoint.demo import make_demo_checkpoint
from moe_ep.errors import ConfigError
from moe_ep.generation.engine import Completion, Generation, Request
from moe_ep.generation.sampling import Sampling
from moe_ep.launch.cli.main import main
from tests.hf.hf_models import SIZES, make_model
from tests.ranks import ranks

FAMILIES = ("Qwen3Moe", "DeepseekV3", "GptOss")
NUM_PROMPTS, NEW_TOKENS = 6, 5
DRAWN = Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=3)


def prompts() -> list[torch.Tensor]:
    """Of 3 to 78 tokens, so that attention has one chunk of keys or two."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(1, SIZES["vocab_size"], (3 + 15 * number,), generator=generator) for number in range(NUM_PROMPTS)
    ]


@functools.cache
def model_of(family: str, **options: Any) -> Any:
    return moe_ep.parallelize(make_model(family), batch_invariant=True, **options)


def told(completion: Completion) -> tuple[list[int], list[Any]]:
    """Tokens and log-probabilities, which are compared bit for bit."""
    return completion.token_ids, completion.logprobs


def continued(model: Any, numbers: list[int], **options: Any) -> dict[int, tuple[list[int], list[Any]]]:
    """The continuations of these prompts, read and decoded together."""
    every = prompts()
    settings: dict[str, Any] = {"num_slots": 4, "sampling": DRAWN} | options
    requests = [Request(index, every[number]) for index, number in enumerate(numbers)]
    generation = Generation(model, requests, max_new_tokens=NEW_TOKENS, stop_ids=[], logprobs=2, **settings)
    return {numbers[completion.index]: told(completion) for completion in generation.run()}


@functools.cache
def alone(family: str) -> dict[int, tuple[list[int], list[Any]]]:
    model = model_of(family)
    return {number: continued(model, [number], num_slots=1)[number] for number in range(NUM_PROMPTS)}


@settings(max_examples=6)
@given(
    numbers=st.lists(st.integers(0, NUM_PROMPTS - 1), min_size=2, max_size=NUM_PROMPTS, unique=True),
    num_slots=st.integers(1, 5),
    prefill_tokens=st.integers(1, 120),
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_alone_and_in_any_batch(family: str, numbers: list[int], num_slots: int, prefill_tokens: int) -> None:
    together = continued(model_of(family), numbers, num_slots=num_slots, prefill_tokens=prefill_tokens)
    assert together == {number: alone(family)[number] for number in numbers}


def on_ranks(
    rank: int, world_size: int, family: str, options: dict[str, Any]
) -> dict[int, tuple[list[int], list[Any]]]:
    model = moe_ep.parallelize(make_model(family), batch_invariant=True, **options)
    return continued(model, list(range(NUM_PROMPTS)), num_slots=2, prefill_tokens=60)


@pytest.mark.gang
@pytest.mark.parametrize(
    ("family", "world_size", "options"),
    [
        ("Qwen3Moe", 2, {"eplb": True, "num_redundant_experts": 3}),
        ("Qwen3Moe", 4, {"backend": "batched_all_to_all", "max_num_tokens": 16}),
        ("DeepseekV3", 2, {"backend": "allgather_reducescatter"}),
        ("GptOss", 4, {}),
    ],
)
def test_ranks_continue_prompts_by_the_bits_of_one(family: str, world_size: int, options: dict[str, Any]) -> None:
    found: dict[int, Any] = {}
    for of_rank in ranks(world_size).run(on_ranks, family, options):
        found |= of_rank
    assert found == alone(family)


def test_a_trainer_has_the_log_probabilities_of_the_generator() -> None:
    """Of a parallelized model, and of a plain one with gradients, whose tokens go to two experts each."""
    trainer = make_model("Qwen3Moe").requires_grad_(True)
    for model in (model_of("Qwen3Moe"), trainer):
        for number in (1, 5):
            token_ids, logprobs = alone("Qwen3Moe")[number]
            prompt, continuation = prompts()[number], torch.tensor(token_ids)
            with moe_ep.batch_invariant_passes(model), torch.set_grad_enabled(model is trainer):
                logits = model(input_ids=torch.cat([prompt, continuation])[None, :-1], use_cache=False).logits
                values = logits[0, len(prompt) - 1 :].float().log_softmax(-1).gather(-1, continuation[:, None])
            assert values.flatten().tolist() == [found.chosen for found in logprobs]
    values.sum().backward()
    assert all(param.grad is not None and param.grad.isfinite().all() for param in trainer.model.layers.parameters())


def test_the_same_prompt_is_drawn_for_more_than_once() -> None:
    """Groups of one prompt have texts of their own, and the first has that of the prompt alone."""
    requests = [Request(index, prompts()[2]) for index in range(4)]
    generation = Generation(
        model_of("Qwen3Moe"), requests, max_new_tokens=NEW_TOKENS, num_slots=3, stop_ids=[], sampling=DRAWN, logprobs=2
    )
    texts = [told(completion) for completion in generation.run()]
    assert texts[0] == alone("Qwen3Moe")[2] and len({tuple(tokens) for tokens, _ in texts}) > 1


def test_models_that_cannot_keep_it_are_refused() -> None:
    model = moe_ep.parallelize(make_model("Qwen3Next"), batch_invariant=True)
    with pytest.raises(ConfigError, match="batch_invariant is set .* LinearAttention"):
        Generation(model, [Request(0, torch.tensor([1]))], max_new_tokens=1, num_slots=1, stop_ids=[])


@pytest.mark.gang
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path / "cache"))
    folder = make_demo_checkpoint(tmp_path / "model", progress=False)
    file = tmp_path / "prompts"
    file.write_text("def read(self, size):\nimport\nreturn None\n")
    flags = ["generate", "--model", str(folder), "--launcher", "local", "--device", "cpu", "--batch-invariant"]
    flags += ["--max-new-tokens", "6", "--logprobs", "2", "--temperature", "0.9"]
    lines = []
    for more in (["--ep-size", "1", "--prompt", "import"], ["--ep-size", "2", "--prompts", str(file)]):
        assert main([*flags, *more]) == 0
        lines.append([json.loads(line) for line in capsys.readouterr().out.splitlines()][:-1])
    (single,), many = lines
    same = next(line for line in many if line["prompt"] == "import")
    assert (same["text"], same["logprobs"]) == (single["text"], single["logprobs"])

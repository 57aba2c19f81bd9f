"""Text generation over ranks against transformers in one process."""

from __future__ import annotations

import copy
import json
import time
import tracemalloc
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import moe_ep
from moe_ep.distributed.membership import Membership, MembershipLog
from moe_ep.errors import ConfigError, DispatchTimeoutError, MoeEpError, RanksChangedError
from moe_ep.generation.decoder import SlotDecoder
from moe_ep.generation.engine import Completion, Generation, PromptQueue, Request
from moe_ep.generation.perplexity import perplexity
from moe_ep.generation.sampling import Sampling, next_tokens
from moe_ep.hf.loading import context_length
from moe_ep.hf.parallelized import steps_of
from moe_ep.launch.gangs.rendezvous import destroy_process_group
from tests.checkpoint.test_real_layer import text_moe
from tests.generation.alone import continue_alone, load_alone
from tests.hf.hf_models import SIZES, make_model
from tests.ranks import ranks

STOP = 5
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
NEW_TOKENS = 12
NUM_PROMPTS = 8
WITH_LOGPROBS: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "num_slots": 2, "stop_ids": [], "logprobs": 1}
TRAINED_TOKENS = 16
# Within 0.1% of what text-moe's README says.
PERPLEXITY = {"english": 7.06, "python": 7.24}


def requests_of(num_prompts: int) -> list[Request]:
    """Prompts of 3, 8, 13, 18 and 3 tokens, and so on."""
    generator = torch.Generator().manual_seed(0)
    return [
        Request(index, torch.randint(1, SIZES["vocab_size"], (3 + 5 * (index % 4),), generator=generator))
        for index in range(num_prompts)
    ]


def generated(
    rank: int, world_size: int, family: str, options: dict[str, Any]
) -> tuple[list[Completion], int, dict[str, int]]:
    """This rank's completions, the rows that it sent, and its steps by kind."""
    model = moe_ep.parallelize(make_model(family), **options)
    for layer in steps_of(model).layers:
        layer.counts_load = True
    settings = {"max_new_tokens": NEW_TOKENS, "num_slots": 2, "stop_ids": [STOP], "prefill_tokens": 40}
    generation = Generation(model, requests_of(NUM_PROMPTS), **settings)
    completions = generation.run()
    load = sum(int(layer.load.sum()) for layer in steps_of(model).layers)
    return completions, load, {kind: len(times) for kind, times in generation.times.items()}


@pytest.mark.parametrize("good", [0, 1, 3])
def test_tokens_of_a_step_that_waited_in_vain_are_not_taken(good: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels recorded is looked at behind every step, as replays of a CUDA graph do not look by themselves."""
    model = moe_ep.parallelize(make_model("Qwen3Moe"), decode_max_num_tokens=1)
    last, passes, taken = steps_of(model).layers[-1], [], []
    prefill, decode = SlotDecoder.prefill, SlotDecoder.decode

    def check() -> None:
        if len(passes) > good:
            raise DispatchTimeoutError("rank 1 sent nothing", [1])

    with steps_of(model).pretending(1):
        monkeypatch.setattr(last.prepare_finalize, "check", check)
    monkeypatch.setattr(SlotDecoder, "prefill", lambda *args: passes.append("prefill") or prefill(*args))
    monkeypatch.setattr(SlotDecoder, "decode", lambda *args: passes.append("decode") or decode(*args))
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "num_slots": 1, "stop_ids": []}
    settings["ends"] = lambda token_ids: taken.append(token_ids[-1])
    with pytest.raises(DispatchTimeoutError, match="rank 1 sent nothing"):
        Generation(model, requests_of(1), **settings).run()
    assert len(passes) == good + 1 and len(taken) == good


@pytest.mark.parametrize(
    ("family", "options"),
    [(family, {}) for family in ("Mixtral", "Qwen3Moe", "Qwen3Next", "DeepseekV3", "GptOss")]
    + [
        ("Qwen3Moe", {"backend": "all_to_all", "decode_max_num_tokens": 2}),
        ("Qwen3Moe", {"backend": "batched_all_to_all"}),
    ],
)
def test_slots_continue_as_transformers_alone(family: str, options: dict[str, Any]) -> None:
    alone = make_model(family)
    top_k, layers = SIZES["num_experts_per_tok"], len(list(alone.model.layers))
    requests = requests_of(NUM_PROMPTS)
    results = ranks(3).run(generated, family, options)
    assert sorted(done.index for completions, _, _ in results for done in completions) == list(range(NUM_PROMPTS))
    for completions, load, _ in results:
        assert [completion.index for completion in completions] == sorted(done.index for done in completions)
        mine = [requests[completion.index] for completion in completions]
        for request, completion in zip(mine, completions, strict=True):
            prompt = request.token_ids[None]
            output = alone.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=STOP,
            )
            expected = output[0, prompt.size(1) :].tolist()
            assert completion.finish == ("stop" if STOP in expected else "length")
            assert completion.token_ids == [token for token in expected if token != STOP]
            assert completion.num_prompt_tokens == prompt.size(1)
        # Padding and free slots go to no expert: the load is that of the prompts' tokens and of those decoded from.
        decoded = sum(len(c.token_ids) - (c.finish == "length") for c in completions)
        moe_layers = layers - getattr(alone.config, "first_k_dense_replace", 0)
        assert load == top_k * moe_layers * (sum(request.length for request in mine) + decoded)
    # All ranks made all steps, served in some, and read prompts together.
    steps = [counts for _, _, counts in results]
    assert len({sum(counts.values()) for counts in steps}) == 1 and any(counts["serve"] for counts in steps)
    assert sum(counts["prefill"] for counts in steps) < NUM_PROMPTS


def test_which_rank_reads_which_prompt() -> None:
    def taken(lengths: list[int], *free: list[int], num_slots: int = 4, max_tokens: int = 100) -> list[list[list[int]]]:
        requests = [Request(index, torch.ones(length)) for index, length in enumerate(lengths)]
        queue = PromptQueue(requests, num_slots, max_tokens, lambda lengths: len(lengths) * max(lengths))
        return [[[request.index for request in mine] for mine in queue.take(counts)] for counts in free]

    # In turns, and to the rank with the most free slots; none where there are none.
    assert taken([1] * 9, [4, 4]) == [[[0, 2, 4, 6], [1, 3, 5, 7]]]
    assert taken([1] * 9, [1, 3], [0, 0]) == [[[2], [0, 1, 3]], [[], []]]
    # Not before a quarter of all slots is free, or all that wait have one.
    assert taken([1] * 9, [0, 1], [1, 1], [2, 0]) == [[[], []], [[0], [1]], [[2, 3], []]]
    assert taken([1], [0, 1], [1, 1]) == [[[], [0]], [[], []]]
    assert taken([1] * 9, [1], num_slots=2) == [[[0]]]
    # Padding counts; the next prompt goes to a rank that has room, and is not overtaken.
    assert taken([5, 2, 9, 4], [1, 3], max_tokens=10) == [[[2], [0, 1]]]
    assert taken([5, 2, 11, 1], [3, 3], [1, 2], max_tokens=11) == [[[0], [1]], [[3], [2]]]
    assert taken([500, 1, 1], [4], [3], max_tokens=10) == [[[0]], [[1, 2]]]


def requests_that_differ(rank: int, world_size: int) -> None:
    model = moe_ep.parallelize(make_model("Qwen3Moe"))
    requests = requests_of(4)
    requests[rank] = Request(rank, requests[rank].token_ids + 1)
    with pytest.raises(ValueError, match=r"the ranks have \[4, 4\] requests and \[2, 2\] slots, which must be"):
        Generation(model, requests, max_new_tokens=2, num_slots=2, stop_ids=[]).run()


def test_ranks_with_different_requests_are_refused() -> None:
    ranks(2).run(requests_that_differ)


def drawn(rank: int, world_size: int, num_slots: int = 2) -> dict[int, list[int]]:
    """Tokens drawn for the prompts that this rank continues."""
    generation = Generation(
        moe_ep.parallelize(make_model("Qwen3Moe")),
        requests_of(5),
        max_new_tokens=NEW_TOKENS,
        num_slots=num_slots,
        stop_ids=[],
        sampling=Sampling(temperature=0.8, top_k=40, top_p=0.95, seed=3),
        max_length=20,
    )
    return {completion.index: completion.token_ids for completion in generation.run()}


def test_drawn_tokens_are_those_of_the_seed_on_any_ranks_and_end_with_the_context() -> None:
    alone = drawn(0, 1)
    first, second = ranks(2).run(drawn, 1)
    assert first and second and alone == dict(sorted((first | second).items())) == drawn(0, 1, num_slots=5)
    # Prompts of 3, 8, 13, 18 and 3 tokens.
    assert [len(ids) for ids in alone.values()] == [12, 12, 7, 2, 12]
    model = moe_ep.parallelize(make_model("Qwen3Moe"))
    with pytest.raises(ValueError, match="request 3 has 18 tokens"):
        Generation(model, requests_of(5), max_new_tokens=2, num_slots=1, stop_ids=[], max_length=18)


@pytest.mark.parametrize("name", ["max_new_tokens", "num_slots", "prefill_tokens"])
def test_numbers_below_one_are_refused(name: str) -> None:
    numbers = {"max_new_tokens": 1, "num_slots": 1, name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        Generation(None, requests_of(1), **numbers, stop_ids=[])


def test_arguments_of_other_kinds_are_refused_before_any_step() -> None:
    model, ids, most = moe_ep.parallelize(make_model("Qwen3Moe")), torch.tensor([1, 2]), SIZES["vocab_size"]
    one = [Request(0, ids)]
    known = f"it must be at least 0 and below the rows of the model's embedding .{most}."
    wrong: list[tuple[str, Any, type[Exception], str]] = [
        ("requests", None, TypeError, "requests is a NoneType; it must be a list of Request"),
        ("requests", [*one, None], TypeError, r"requests\[1\] is a NoneType; it must be a Request"),
        ("requests", [Request("a", ids)], TypeError, r"index of requests\[0\] is 'a'; it must be a whole number"),
        (
            "requests",
            [Request(7, ids, continued=(most,))],
            ValueError,
            rf"continued\[0\] of request 7 is {most}; {known}",
        ),
        ("requests", [Request(7, ids, continued=(3, -1))], ValueError, rf"continued\[1\] of request 7 is -1; {known}"),
        ("requests", [Request(7, ids, continued=None)], TypeError, "continued of request 7 is None; it must be a list"),
        ("requests", [Request(7, ids, stop_ids=("x",))], TypeError, r"stop_ids\[0\] of request 7 is 'x'; it must be a"),
        ("stop_ids", None, TypeError, "stop_ids is None; it must be a list of token ids, which may be empty"),
        ("stop_ids", 5, TypeError, "stop_ids is 5; it must be a list of token ids"),
        ("stop_ids", iter([5]), TypeError, "stop_ids is <list_iterator .*; it must be a list of token ids"),
        ("stop_ids", ["x"], TypeError, r"stop_ids\[0\] is 'x'; it must be a whole number"),
        ("stop_ids", [1, 1.5], TypeError, r"stop_ids\[1\] is 1.5; it must be a whole number"),
        ("stop_ids", [-1], ValueError, rf"stop_ids\[0\] is -1; {known}"),
        ("stop_ids", [most], ValueError, rf"stop_ids\[0\] is {most}; {known}"),
        ("sampling", "x", TypeError, "sampling is 'x'; it must be a Sampling, or None for the likeliest tokens"),
        ("max_length", "x", TypeError, "max_length is 'x'; it must be a whole number"),
    ]
    for name in ("ends", "on_progress", "on_completion", "on_ranks"):
        wrong.append((name, "x", TypeError, f"{name} is 'x'; it must be a function or None"))
    for name, value, error, message in wrong:
        arguments: dict[str, Any] = {"requests": one, "max_new_tokens": 2, "num_slots": 1, "stop_ids": [], name: value}
        with pytest.raises(error, match=message):
            Generation(model, **arguments)


def test_what_a_model_cannot_read_is_refused_before_any_step() -> None:
    model = moe_ep.parallelize(make_model("Qwen3Moe"))
    most = SIZES["vocab_size"]

    def generate(*given: Any, of: Any = model) -> None:
        requests = [Request(0, token_ids) for token_ids in given]
        Generation(of, requests, max_new_tokens=2, num_slots=1, stop_ids=[])

    for given, message in (
        ([1, 2], "is a list; it must be a tensor of token ids, .length."),
        (torch.ones(1, 2, dtype=torch.int64), r"is torch.int64 \(1, 2\); it must be token ids of one sequence"),
        (torch.ones(2), r"is torch.float32 \(2,\); it must be token ids of one sequence"),
        (torch.tensor([3, most]), f"has ids from 3 to {most}; they must be at least 0 and below the {most} rows"),
        (torch.tensor([-1]), "has ids from -1 to -1; they must be at least 0"),
    ):
        with pytest.raises(ValueError, match=f"token_ids of request 0 {message}"):
            generate(given)
        with pytest.raises(ValueError, match=f"text 1 of plain {message}"):
            perplexity(model, {"plain": [torch.tensor([1, 2, 3]), given]})
    with pytest.raises(ValueError, match="request 0 has 0 tokens"):
        generate(torch.tensor([]))
    with pytest.raises(ValueError, match="requests has 2 of number 0"):
        generate(torch.tensor([1]), torch.tensor([2]))
    for texts in ([], [torch.tensor([4])]):
        with pytest.raises(ValueError, match="texts has none of two tokens in short"):
            perplexity(model, {"long": [torch.tensor([1, 2])], "short": texts})
    with pytest.raises(TypeError, match="texts is a list"):
        perplexity(model, [torch.tensor([1, 2])])
    headless = moe_ep.parallelize(make_model("Qwen3Moe").model)
    with pytest.raises(ConfigError, match="model is a Qwen3MoeModel, which predicts no tokens"):
        generate(torch.tensor([1]), of=headless)
    with pytest.raises(TypeError, match="temperature is '1'; it must be a number"):
        Sampling(temperature="1")
    several: dict[str, Any] = {"plain": [torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([5])]}
    assert perplexity(model, several) == perplexity(model, {"plain": [torch.tensor([1, 2, 3])]})


@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen3Next", "DeepseekV3", "GptOss"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_prompt_whose_logits_are_not_finite_fails_and_no_other_does(family: str, temperature: float) -> None:
    model = make_model(family)
    model.get_input_embeddings().weight[77] = torch.nan
    model = moe_ep.parallelize(model)
    prompts = [[5, 6, 7], [8, 77, 9, 10, 11, 12, 13, 14], [15, 16], [77], [17, 18, 19]]

    def run(*indices: int) -> dict[int, Completion]:
        requests = [Request(index, torch.tensor(prompts[index])) for index in indices]
        settings = {"max_new_tokens": 6, "stop_ids": [77], "sampling": Sampling(temperature=temperature)}
        # One slot: what a failed sequence has left there does not reach the next one.
        return {done.index: done for done in Generation(model, requests, num_slots=1, **settings).run()}

    found = run(0, 1, 2, 3, 4)
    assert [found[index].finish for index in (1, 3)] == ["failed"] * 2
    assert all("not finite" in found[index].error and not found[index].token_ids for index in (1, 3))
    assert {index: found[index] for index in (0, 2, 4)} == run(0, 2, 4)


def test_log_probabilities_are_those_of_the_model() -> None:
    alone = make_model("Qwen3Moe")
    model = moe_ep.parallelize(copy.deepcopy(alone))
    requests = requests_of(3)
    settings: dict[str, Any] = {"max_new_tokens": 5, "num_slots": 2, "stop_ids": []}
    drawn = {"sampling": Sampling(temperature=0.7, top_k=20, seed=1)}
    for more in ({}, drawn):
        plain = Generation(model, requests, **settings, **more).run()
        found = Generation(model, requests, **settings, **more, logprobs=3).run()
        assert [done.token_ids for done in found] == [done.token_ids for done in plain]
        assert not any(done.logprobs for done in plain)
        for request, done in zip(requests, found, strict=True):
            ids = torch.cat([request.token_ids, torch.tensor(done.token_ids)])
            logits = alone(input_ids=ids[None]).logits[0, request.length - 1 : -1]
            expected = logits.float().log_softmax(-1)
            chosen = expected[torch.arange(5), done.token_ids]
            torch.testing.assert_close(torch.tensor([each.chosen for each in done.logprobs]), chosen, **CLOSE)
            values, tokens = expected.topk(3)
            assert [[index for index, _ in each.best] for each in done.logprobs] == tokens.tolist()
            told = torch.tensor([[value for _, value in each.best] for each in done.logprobs])
            torch.testing.assert_close(told, values, **CLOSE)
    (none, *_) = Generation(model, requests, **settings, logprobs=0).run()
    assert len(none.logprobs) == 5 and not none.logprobs[0].best
    with pytest.raises(ConfigError, match="logprobs"):
        Generation(model, requests, **settings, logprobs=SIZES["vocab_size"] + 1)


def test_sequences_of_a_rank_that_stays_go_on_with_their_log_probabilities() -> None:
    """A rank joins and is lost after the second token."""
    plain = Generation(moe_ep.parallelize(make_model("Qwen3Moe")), requests_of(2), **WITH_LOGPROBS)
    expected = plain.run()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    log, membership = MembershipLog(store, [0]), Membership(store, 0)
    steps = 0

    def change(_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            log.propose(admit=[1])
            log.propose(remove={1: "died"})
            with pytest.raises(RanksChangedError):
                while True:
                    membership.check()
                    time.sleep(0.01)

    try:
        model = moe_ep.parallelize(make_model("Qwen3Moe"), membership=membership)
        generation = Generation(model, requests_of(2), **WITH_LOGPROBS, membership=membership, on_progress=change)
        found = generation.run()
    finally:
        membership.close()
        destroy_process_group()
    assert [done.token_ids for done in found] == [done.token_ids for done in expected]
    assert [len(done.logprobs) for done in found] == [NEW_TOKENS, NEW_TOKENS]
    assert membership.epoch.number == 2
    assert [len(times) for times in generation.times.values()] == [len(times) for times in plain.times.values()]


def test_generations_of_one_gang_are_each_complete() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    MembershipLog(store, [0])
    membership = Membership(store, 0)
    try:
        model = moe_ep.parallelize(make_model("Qwen3Moe"), membership=membership)
        first, second = (Generation(model, requests_of(2), **WITH_LOGPROBS, membership=membership).run() for _ in "ab")
    finally:
        membership.close()
        destroy_process_group()
    assert len(first) == 2 and second == first


def test_logits_that_choose_no_token() -> None:
    """Masked tokens are -inf, and a model may have some; NaN, inf and nothing but -inf are of no use."""
    model = make_model("Qwen3Moe")
    requests = [Request(0, torch.tensor([5, 6]))]
    for value, finish in ((-torch.inf, "length"), (torch.inf, "failed"), (torch.nan, "failed")):
        for rows in (slice(3, 9), slice(None)):
            changed = copy.deepcopy(model)
            changed.lm_head.register_forward_hook(partial(_filled, rows, value))
            generation = Generation(moe_ep.parallelize(changed), requests, max_new_tokens=2, num_slots=1, stop_ids=[])
            (done,) = generation.run()
            assert done.finish == ("failed" if rows == slice(None) else finish)


def _filled(columns: slice, value: float, module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
    logits[..., columns] = value
    return logits


def test_a_perplexity_that_is_no_number_is_an_error() -> None:
    model = make_model("Qwen3Moe")
    model.get_input_embeddings().weight[77] = torch.nan
    model = moe_ep.parallelize(model)
    fine = torch.tensor([1, 2, 3])
    assert perplexity(model, {"plain": [fine]})["plain"] > 1
    with pytest.raises(MoeEpError, match="broken"):
        perplexity(model, {"plain": [fine], "broken": [fine, torch.tensor([77, 1])]})
    with pytest.raises(TypeError, match="texts of none is a NoneType"):
        perplexity(model, {"none": None})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="routing is a int"):
        perplexity(model, {"plain": [fine]}, routing=5)  # type: ignore[arg-type]


def test_next_tokens() -> None:
    logits = torch.tensor([0.3, 0.0, 0.5, 0.2]).log()[None]

    def drawn_at(*draws: float, **settings: Any) -> list[int]:
        rows = logits.expand(len(draws), -1)
        return next_tokens(rows, Sampling(**{"temperature": 1.0, **settings}), draws).tolist()

    assert drawn_at(0.0, 0.49, 0.51, 0.79, 0.81, 0.9999999) == [2, 2, 0, 0, 3, 3]
    assert drawn_at(0.0, 0.9999999, temperature=0.0) == [2, 2]
    assert drawn_at(0.62, 0.63, 0.9999999, top_p=0.6) == [2, 0, 0]
    assert drawn_at(0.9999999, top_p=1e-9) == drawn_at(0.9999999, top_k=1) == drawn_at(0.99, temperature=1e-3) == [2]
    assert drawn_at(0.9, 0.9, top_p=1e-300) == drawn_at(0.0, 0.9, temperature=1e-300) == [2, 2]
    assert drawn_at(0.62, 0.63, top_k=2) == [2, 0]
    # It rounds to 1, which the sum in f32 of these probabilities stays below; the other tokens have none.
    masked = torch.where(torch.arange(100) < 41, 0.0, float("-inf"))[None]
    assert next_tokens(masked, Sampling(temperature=1.0), [1 - 2**-53]).tolist() == [40]
    # As transformers has it: of k tokens those that come to p of the k.
    assert drawn_at(0.9999999, top_k=2, top_p=0.62) == [2]
    for setting, wrong in {"temperature": -1.0, "top_k": -1, "top_p": 0.0}.items():
        with pytest.raises(ValueError, match=f"{setting} is {wrong}; it must be"):
            Sampling(**{setting: wrong})


def test_the_length_of_a_context() -> None:
    def length(**settings: Any) -> int | None:
        return context_length(SimpleNamespace(**settings))

    assert length() is None
    assert length(max_position_embeddings=128) == length(max_position_embeddings=128, rope_parameters=None) == 128
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert length(max_position_embeddings=128, rope_parameters=yarn) == 512
    assert length(max_position_embeddings=128, rope_parameters={"full_attention": yarn, "sliding_attention": {}}) == 512
    assert length(max_position_embeddings=4096, rope_parameters=yarn) == 4096


def test_a_caller_says_where_texts_end() -> None:
    model = moe_ep.parallelize(make_model("Qwen3Moe"))
    settings = {"max_new_tokens": 9, "num_slots": 2, "stop_ids": []}
    done = Generation(model, requests_of(2), ends=lambda ids: len(ids) == 3, **settings).run()
    assert [(len(completion.token_ids), completion.finish) for completion in done] == [(3, "stop")] * 2


def test_a_model_with_a_cache_of_its_own_is_refused() -> None:
    model = moe_ep.parallelize(make_model("MiniMax", num_local_experts=6, layer_types=["full_attention"] * 2))
    with pytest.raises(ConfigError, match="a MiniMaxForCausalLM keeps its past in a cache of its own"):
        SlotDecoder(model, 1, 8, graphs=False)


needs_text_moe = pytest.mark.skipif(text_moe() is None, reason="text-moe is not here; MOE_EP_TEXT_MOE names its folder")


def of_text_moe(
    rank: int, world_size: int, folder: str, prompts: list[str]
) -> tuple[dict[str, float] | None, dict[int, str]]:
    """Perplexities of the held-out text where it is there, and the prompts that this rank continues."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = moe_ep.parallelize(folder, dtype=torch.float32)
    requests = [
        Request(index, tokenizer(prompt, return_tensors="pt")["input_ids"][0]) for index, prompt in enumerate(prompts)
    ]
    completions = Generation(model, requests, max_new_tokens=TRAINED_TOKENS, num_slots=1, stop_ids=[0]).run()
    texts = Path(folder).parents[1] / "data/heldout_text.json"
    measured = None
    if texts.is_file():
        tokens = {
            kind: [torch.tensor(tokenizer(text)["input_ids"][:1024]) for text in several]
            for kind, several in json.loads(texts.read_text()).items()
        }
        measured = perplexity(model, tokens)
    return measured, {completion.index: tokenizer.decode(completion.token_ids) for completion in completions}


@needs_text_moe
def test_a_trained_model() -> None:
    folder = text_moe()
    prompts = ["The Linux kernel is", "def main(", "#include <"]
    results = ranks(2).run(of_text_moe, str(folder), prompts)
    alone, tokenizer = load_alone(folder), transformers.AutoTokenizer.from_pretrained(folder)
    continued = results[0][1] | results[1][1]
    for index, prompt in enumerate(prompts):
        assert continued[index] == continue_alone(alone, tokenizer, prompt, TRAINED_TOKENS)
    for measured, _ in results:
        if measured is not None:
            assert measured == pytest.approx(PERPLEXITY, rel=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_that_wait_take_little_memory(temperature: float) -> None:
    model, count = moe_ep.parallelize(make_model("Qwen3Moe")), 2000
    requests = [Request(index, torch.tensor([1])) for index in range(count)]
    tracemalloc.start()
    try:
        drawn = Sampling(temperature=temperature)
        waiting = Generation(model, requests, max_new_tokens=1, num_slots=2, stop_ids=[], sampling=drawn)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / count < 1000
    assert waiting.completions == []

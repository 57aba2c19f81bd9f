"""Text generation over ranks against transformers in one process, and what the command says."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import moe_ep
from moe_ep.checkpoint.demo import make_demo_checkpoint
from moe_ep.errors import ConfigError
from moe_ep.integrations.decoder import SlotDecoder
from moe_ep.integrations.divided import steps_of
from moe_ep.integrations.generation import Completion, Generation
from moe_ep.integrations.hf_loading import context_length
from moe_ep.integrations.perplexity import perplexity
from moe_ep.integrations.prompt_queue import PromptQueue, Request
from moe_ep.integrations.sampling import Sampling, next_tokens
from moe_ep.launch.cli import main
from moe_ep.launch.generate_config import prompt_of, read_prompts
from moe_ep.launch.generate_worker import _has_come_to, _requests, _stop_ids, _token_ids, _tokenizer, _told
from tests.checkpoint.test_real_layer import text_moe
from tests.integrations.alone import continue_alone, load_alone
from tests.integrations.hf_models import SIZES, make_model
from tests.ranks import ranks

STOP = 5
NEW_TOKENS = 12
NUM_PROMPTS = 8
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
    return completions, load, {kind: len(times) for kind, times in asdict(generation.times).items()}


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
        queue = PromptQueue(requests, num_slots, max_tokens)
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
    with pytest.raises(ValueError, match="request 3 has 18 tokens; it must have at least 1 and below max_length .18."):
        Generation(model, requests_of(5), max_new_tokens=2, num_slots=1, stop_ids=[], max_length=18)


def test_next_tokens() -> None:
    logits = torch.tensor([0.3, 0.0, 0.5, 0.2]).log()[None]

    def drawn_at(*draws: float, **settings: Any) -> list[int]:
        rows = logits.expand(len(draws), -1)
        return next_tokens(rows, Sampling(**{"temperature": 1.0, **settings}), draws).tolist()

    assert drawn_at(0.0, 0.49, 0.51, 0.79, 0.81, 0.9999999) == [2, 2, 0, 0, 3, 3]
    assert drawn_at(0.0, 0.9999999, temperature=0.0) == [2, 2]
    assert drawn_at(0.62, 0.63, 0.9999999, top_p=0.6) == [2, 0, 0]
    assert drawn_at(0.9999999, top_p=1e-9) == drawn_at(0.9999999, top_k=1) == drawn_at(0.99, temperature=1e-3) == [2]
    assert drawn_at(0.62, 0.63, top_k=2) == [2, 0]
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


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo checkpoint, in a cache folder of the module's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_EP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield make_demo_checkpoint(tmp_path_factory.mktemp("demo") / "model", progress=False)


def add_code(folder: Path) -> Path:
    """Puts code into a checkpoint and asks for it in every way that transformers knows; the file that it would make."""
    trace = folder / "code-was-run"
    (folder / "own.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    for file, classes in (
        ("config.json", ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")),
        ("tokenizer_config.json", ("AutoTokenizer",)),
    ):
        settings = json.loads((folder / file).read_text())
        settings["auto_map"] = {name: [None, "own.Own"] if "Token" in name else "own.Own" for name in classes}
        (folder / file).write_text(json.dumps(settings))
    return trace


def test_the_command(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The fourth is half a surrogate pair, which no tokenizer reads.
    prompts = ["def read(self, size):", "The list of", "import", "# \ud800", "return None"]
    folder = shutil.copytree(demo, tmp_path / "model")
    trace = add_code(folder)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": prompt, "id": f"p{i}", "kind": "mine"}) + "\n"
            for i, prompt in enumerate(prompts[:-1])
        )
        + json.dumps({"messages": [{"role": "user", "content": prompts[-1]}], "id": "p4"})
    )
    flags = ["--launcher", "local", "--ep-size", "2", "--device", "cpu", "--batch-size", "2", "--max-new-tokens", "10"]
    assert main(["generate", "--model", str(folder), "--prompts", str(file), "--output", str(output), *flags]) == 1
    captured = capsys.readouterr()
    assert not captured.out and not trace.exists()
    *lines, summary = [json.loads(line) for line in output.read_text().splitlines()]
    alone, tokenizer = load_alone(demo), transformers.AutoTokenizer.from_pretrained(demo)
    for index, (line, prompt) in enumerate(zip(lines, prompts, strict=True)):
        assert (line["kind"], line["index"], line["id"]) == ("completion", index, f"p{index}")
        assert line["prompt"] == prompt if index < 4 else line["messages"][0]["content"] == prompt
        if index == 3:
            assert line["finish"] == "refused" and "the tokenizer does not read it" in line["error"]
        else:
            assert line["text"] == continue_alone(alone, tokenizer, prompt, 10)
    assert summary["kind"] == "summary"
    assert summary["tokens_per_rank"] == [
        sum(line.get("num_tokens", 0) for line in lines if line["rank"] == rank) for rank in range(2)
    ]
    assert (sorted(summary["prompts_per_rank"]), summary["prompts_refused"]) == ([2, 2], 1)
    assert summary["tokens_per_s"] == pytest.approx(sum(summary["tokens_per_s_per_rank"]))
    assert 0 < summary["balancedness"] <= 1
    assert "refused 1 of 5 prompts: prompt 3 is '# \\ud800' and the tokenizer" in captured.err
    assert " tokens/s (" in captured.err and re.search(r"^ +1 +2 +\d+ .* MiB  .*, cpu$", captured.err, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("prompts.txt", "\n\n", "prompts.txt: expected a prompt a line, found none"),
        (
            "prompts.jsonl",
            '"one"\n{"text": "two"}\n',
            'or "messages" (each with role and content), found \'{"text": "two"}\'',
        ),
    ],
)
def test_prompts_that_are_none(
    name: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert main(["generate", "--prompts", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_what_ends_a_line_elsewhere_may_stand_in_a_prompt(tmp_path: Path) -> None:
    text, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_bytes("\ufeffone\u2028 two\x0c\r\n\nthree".encode())
    objects.write_text('"one\u2028 two"\n\n{"prompt": "three", "id": 3}\n', encoding="utf-8")
    assert [prompt["prompt"] for prompt in read_prompts(text)] == ["one\u2028 two\x0c", "three"]
    assert read_prompts(objects) == [{"prompt": "one\u2028 two"}, {"prompt": "three", "id": 3}]
    objects.write_text('"one"\n\n{}\n')
    with pytest.raises(ValueError, match="line 3: expected a string"):
        read_prompts(objects)


def test_prompts_that_the_model_cannot_take(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(vocab_size=3, max_position_embeddings=4)

    def ids(*found: int) -> Any:
        return _token_ids(lambda prompt, **_: {"input_ids": list(found)}, config, 7, "x")

    assert ids(1, 2, 1).tolist() == [1, 2, 1]
    for found, message in {
        (): "prompt 7 is 'x' and has no tokens; give it some text",
        (1, 5): "prompt 7 has the token 5 and the model knows 3; the tokenizer is another",
        (1, 2, 1, 2): "prompt 7 has 4 tokens and the model reads 4, continuation included; shorten it",
    }.items():
        with pytest.raises(ConfigError, match=message):
            ids(*found)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda everybody, mine: everybody.append(mine))
    alone = SimpleNamespace(rank=0, world_size=1)
    one, two = {"input_ids": [1]}, {"input_ids": []}
    requests, refused = _requests(lambda prompt, **_: one if prompt else two, config, alone, ["", "x", ""])
    assert [request.index for request in requests] == [1] and [told["index"] for told in refused] == [0, 2]
    with pytest.raises(ConfigError, match="prompt 0 is '' and has no tokens"):
        _requests(lambda prompt, **_: two, config, alone, ["", ""])
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo)
    messages = prompt_of({"prompt": "x"}, chat=True)
    assert messages == [{"role": "user", "content": "x"}]
    with pytest.raises(ConfigError, match="prompt 7 is a conversation and the model's tokenizer has no chat template"):
        _token_ids(tokenizer, config, 7, messages)
    tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    with pytest.raises(ConfigError, match="prompt 7: the model's chat template does not take it: no users here"):
        _token_ids(tokenizer, config, 7, messages)


def test_what_ends_an_answer() -> None:
    tokenizer = SimpleNamespace(eos_token_id=9)
    for ids, expected in {None: [], 4: [4], (4, 5): [4, 5]}.items():
        ended = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=list(ids) if ids == (4, 5) else ids))
        assert _stop_ids(ended, tokenizer, chat=False) == expected
        assert _stop_ids(ended, tokenizer, chat=True) == [*expected, 9]


def test_a_text_that_ends_before_what_stops_it(demo: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo)
    ids = tokenizer("one, two;;\n three;;\n")["input_ids"]
    for stop in (";;\n", "two", "e"):
        first = next(end for end in range(1, len(ids)) if stop in tokenizer.decode(ids[:end]))
        assert [_has_come_to(tokenizer, stop, ids[:end]) for end in range(1, first + 1)] == [False] * (first - 1) + [
            True
        ]
        told = _told(tokenizer, Completion(0, 1, ids, "stop"), 0, stop)
        assert told["text"] == "one, two;;\n three;;\n".split(stop)[0]
    model = moe_ep.parallelize(make_model("Qwen3Moe"))
    settings = {"max_new_tokens": 9, "num_slots": 2, "stop_ids": []}
    done = Generation(model, requests_of(2), ends=lambda ids: len(ids) == 3, **settings).run()
    assert [(len(completion.token_ids), completion.finish) for completion in done] == [(3, "stop")] * 2


def test_a_tokenizer_of_no_model(demo: Path, tmp_path: Path) -> None:
    shutil.copy(demo / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="(expected a|cannot read its) tokenizer"):
        _tokenizer(tmp_path)


def test_a_model_with_a_cache_of_its_own_is_refused() -> None:
    model = moe_ep.parallelize(make_model("MiniMax", num_local_experts=6, layer_types=["full_attention"] * 2))
    with pytest.raises(ConfigError, match="a MiniMaxForCausalLM keeps its past in a cache of its own"):
        SlotDecoder(model, 1, 8, graphs=False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--prompts is missing"),
        (["--stop", ""], "--stop is ''; it must be some text"),
        (["--top-p", "1.5"], "--top-p is '1.5'; it must be above 0 and at most 1"),
        (["--temperature", "-1"], "--temperature is '-1'; it must be a number of at least 0"),
        (["--top-k", "5"], "--top-k is 5 and --temperature is 0, where nothing is drawn; raise it"),
    ],
)
def test_flags_that_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *flags]) == 2
    assert message in capsys.readouterr().err


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

"""What `moe-ep generate` reads, refuses and says."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from moe_ep.checkpoint.demo import make_demo_checkpoint
from moe_ep.errors import ConfigError
from moe_ep.generation.engine import Completion
from moe_ep.launch.cli.generate_config import prompt_of, read_prompts
from moe_ep.launch.cli.main import main
from moe_ep.launch.workers.generate_worker import (
    _has_come_to,
    _not_applied,
    _requests,
    _stop_ids,
    _token_ids,
    _tokenizer,
    _told,
)
from tests.generation.alone import continue_alone, load_alone


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
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"repetition_penalty": 1.5}))
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
    assert summary["not_applied"] == {"repetition_penalty": 1.5}
    assert "not applied, of generation_config.json: repetition_penalty (1.5)" in captured.err
    assert " tokens/s (" in captured.err and re.search(r"^ +1 +2 +\d+ .* MiB  .*, cpu$", captured.err, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("prompts.txt", "\n\n", "prompts.txt: expected a prompt a line, found none"),
        ("prompts.json", '[\n"one"\n]\n', "prompts.json: expected a prompt a line, found one JSON value; write each"),
        (
            "prompts.jsonl",
            '"one"\n{"text": "two"}\n',
            'or "messages" (each with role and content), and finite numbers, found \'{"text": "two"}\'',
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
    # What JSON has no word for could not be returned.
    for content in ('"one"\n\n{"prompt": "three", "score": NaN}\n', '"one"\n\n{"prompt": "three", "score": 1e999}\n'):
        objects.write_text(content)
        with pytest.raises(ValueError, match="line 3: .* and finite numbers, found"):
            read_prompts(objects)
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
    tokens = ["<unknown>", "<end>", "two"]
    tokenizer = SimpleNamespace(
        eos_token_id=9,
        convert_tokens_to_ids=lambda token: tokens.index(token) if token in tokens else 0,
        convert_ids_to_tokens=tokens.__getitem__,
        decode=lambda ids, skip_special_tokens: "".join(tokens[index] for index in ids if index == 2),
    )
    for ids, expected in {None: [], 4: [4], (4, 5): [4, 5]}.items():
        ended = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=list(ids) if ids == (4, 5) else ids))
        for stop, found in {None: [], "<end>": [1], "two": [], "no token": []}.items():
            assert _stop_ids(ended, tokenizer, False, stop) == expected + found
            assert _stop_ids(ended, tokenizer, True, stop) == [*expected, 9, *found]


def test_settings_that_are_not_applied_are_told() -> None:
    settings = transformers.GenerationConfig(
        repetition_penalty=1.05, num_beams=1, suppress_tokens=[], min_new_tokens=2, do_sample=True, top_k=20
    )
    assert _not_applied(settings) == {"repetition_penalty": 1.05, "min_new_tokens": 2}
    assert _not_applied(transformers.GenerationConfig()) == {}


def test_a_special_token_stops_a_text_that_is_shown_without_it(demo: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo)
    tokenizer.add_tokens(["<end>"], special_tokens=True)
    (stop_id,) = tokenizer("<end>")["input_ids"]
    assert "<end>" not in _told(tokenizer, Completion(0, 1, [5, stop_id, 6], "stop"), 0, "<end>")["text"]
    never = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    assert _stop_ids(never, tokenizer, False, "<end>") == [stop_id]


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


def test_a_tokenizer_of_no_model(demo: Path, tmp_path: Path) -> None:
    shutil.copy(demo / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="(expected a|cannot read its) tokenizer"):
        _tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--prompts is missing"),
        (["--stop", ""], "--stop is ''; it must be some text"),
        (["--stop", "\udcff"], "; it must be some text, in UTF-8"),
        (["--top-p", "1.5"], "--top-p is '1.5'; it must be above 0 and at most 1"),
        (["--temperature", "-1"], "--temperature is '-1'; it must be a number of at least 0"),
        (["--top-k", "5"], "--top-k is 5 and --temperature is 0, where nothing is drawn; raise it"),
    ],
)
def test_flags_that_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *flags]) == 2
    assert message in capsys.readouterr().err

"""What `moe-ep generate` reads, refuses and says."""

from __future__ import annotations

import io
import json
import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import transformers

import moe_ep
from moe_ep.checkpoint.demo import make_demo_checkpoint
from moe_ep.errors import ConfigError
from moe_ep.generation.conversation import Conversation
from moe_ep.generation.tokenizer import ModelTokenizer
from moe_ep.launch.cli.generate_config import GenerateConfig, PromptLine
from moe_ep.launch.cli.generate_report import RankGeneration
from moe_ep.launch.cli.main import main
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.launch.workers.generate_worker import run_generate
from moe_ep.rollouts.routing_file import RoutingFile
from tests.generation.alone import continue_alone, load_alone
from tests.ranks import ranks


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
    flags += ["--return-routed-experts", str(tmp_path / "routing"), "--return-routed-weights"]
    assert main(["generate", "--model", str(folder), "--prompts", str(file), "--output", str(output), *flags]) == 1
    captured = capsys.readouterr()
    assert not captured.out and not trace.exists()
    *lines, summary = [json.loads(line) for line in output.read_text().splitlines()]
    alone, tokenizer = load_alone(demo), transformers.AutoTokenizer.from_pretrained(demo)
    for index, (line, prompt) in enumerate(zip(lines, prompts, strict=True)):
        assert (line["kind"], line["index"], line["id"]) == ("completion", index, f"p{index}")
        assert line["prompt"] == prompt if index < 4 else line["messages"][0]["content"] == prompt
        if index == 3:
            assert line["finish"] == "refused" and "line 4" in line["error"]
        else:
            assert line["text"] == continue_alone(alone, tokenizer, prompt, 10)
    routing = moe_ep.read_routed_experts(tmp_path / "routing", with_weights=True)
    assert list(routing) == [0, 1, 2, 4]  # the model does not take prompt 3
    for index, (ids, weights) in routing.items():
        num_fed = lines[index]["num_prompt_tokens"] + lines[index]["num_tokens"] - (lines[index]["finish"] == "length")
        assert ids.shape == weights.shape and len(ids) == num_fed and ids.min() >= 0
    assert summary["kind"] == "summary"
    assert summary["tokens_per_rank"] == [
        sum(line.get("num_tokens", 0) for line in lines if line["rank"] == rank) for rank in range(2)
    ]
    assert (sorted(summary["prompts_per_rank"]), summary["prompts_refused"]) == ([2, 2], 1)
    assert summary["tokens_per_s"] == pytest.approx(sum(summary["tokens_per_s_per_rank"]))
    assert 0 < summary["balancedness"] <= 1
    assert "refused 1 of 5 prompts: line 4" in captured.err
    assert summary["not_applied"] == {"repetition_penalty": 1.5}
    assert "not applied, of generation_config.json: repetition_penalty (1.5)" in captured.err
    assert " tokens/s (" in captured.err and re.search(r"^ +1 +2 +\d+ .* MiB  .*, cpu$", captured.err, re.MULTILINE)


CHAT = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if think %}<think>{% endif %}"
)


def answer(rank: int, world_size: int, config: GenerateConfig, prompts: list[PromptLine]) -> RankGeneration:
    """What a worker of the command does."""
    place = {"rank": rank, "world_size": world_size, "local_rank": rank, "local_world_size": world_size}
    return run_generate(RankEnv(**place, source="local"), config, prompts)


def answers(folder: Path, num_ranks: int = 1, **settings: Any) -> list[dict[str, Any]]:
    """The lines of the prompts, in their order; prompts are a file, or one text."""
    config = GenerateConfig(**{"model": folder, "max_new_tokens": 6, **settings})
    results = ranks(num_ranks).run(answer, config, config.read_prompts()[0])
    told = [line for result in results for line in (*result.refused, *result.completions)]
    return sorted(told, key=lambda line: line["index"])


def with_template(demo: Path, folder: Path, template: str = CHAT) -> Path:
    shutil.copytree(demo, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_bad_lines_do_not_keep_the_others_from_being_answered(demo: Path, tmp_path: Path) -> None:
    folder = with_template(demo, tmp_path / "model")
    good = {"messages": [{"role": "user", "content": "def read("}], "id": "good"}
    bad = [
        b"{",
        b'"\xff"',
        b"3",
        b'{"id": "none"}',
        b'{"prompt": ""}',
        b'{"prompt": "x", "score": NaN}',
        b'{"prompt": "x", "score": 1e999}',
        b'{"messages": []}',
        b'{"messages": [{"role": "user"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 0.5}',
        b'{"prompt": "x", "tools": [{"type": "function"}]}',
        b'{"prompt": "x", "max_tokens": 7}',
        b'{"messages": [{"role": "user", "content": "x"}], "stop_token_ids": [5]}',
        b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"no_such": true}}',
    ]
    prompts = tmp_path / "prompts.jsonl"
    neutral = b'{"prompt": "import", "n": 1, "echo": false, "tool_choice": "none", "stop_token_ids": [], "user": "u"}'
    prompts.write_bytes(b"\n\n".join([json.dumps(good).encode(), *bad, neutral]))
    lines = answers(folder, num_ranks=2, prompts=prompts)
    assert [line["finish"] == "refused" for line in lines] == [False, *[True] * len(bad), False]
    assert all(f"line {2 * at + 1}:" in line["error"] for at, line in enumerate(lines) if "error" in line)
    fields = GenerateConfig(prompts=prompts).read_prompts()[1]
    assert (fields[0]["id"], fields[4]["id"]) == ("good", "none")


def test_log_probabilities_are_written(demo: Path) -> None:
    (line,) = answers(demo, prompt=("import",), logprobs=2)
    assert len(line["logprobs"]) == line["num_tokens"] == 6
    for told in line["logprobs"]:
        # The likeliest is taken.
        assert told["top"][0] == {name: told[name] for name in ("token_id", "token", "logprob")}
        assert len(told["top"]) == 2 and 0 >= told["top"][0]["logprob"] >= told["top"][1]["logprob"]
    assert "".join(told["token"] for told in line["logprobs"]) == line["text"]


def test_settings_of_a_line_reach_the_template(demo: Path, tmp_path: Path) -> None:
    folder = with_template(demo, tmp_path / "model")
    tokenizer = ModelTokenizer(folder).tokenizer
    ask = {"messages": [{"role": "user", "content": "def read("}]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    settings: list[dict[str, Any]] = [{}, {"tools": tools}, {"chat_template_kwargs": {"think": True}}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({**ask, **more}) + "\n" for more in settings))
    lines = answers(folder, prompts=prompts)
    expected = [
        tokenizer.apply_chat_template(
            ask["messages"],
            tools=more.get("tools"),
            add_generation_prompt=True,
            return_dict=False,
            **more.get("chat_template_kwargs", {}),
        )
        for more in settings
    ]
    assert [line["num_prompt_tokens"] for line in lines] == [len(ids) for ids in expected]
    assert len({len(ids) for ids in expected}) == 3


@pytest.mark.parametrize(
    "named_by", ["tokenizer_config.json", pytest.param("special_tokens_map.json", marks=pytest.mark.thorough)]
)
def test_a_conversation_ends_at_the_tokenizer_s_end_too(demo: Path, tmp_path: Path, named_by: str) -> None:
    folder = with_template(demo, tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    ask = [{"messages": [{"role": "user", "content": "import"}]}, {"prompt": "import"}]
    prompts.write_text("\n".join(map(json.dumps, ask)))
    free, _ = answers(folder, prompts=prompts, max_new_tokens=12)
    tokenizer = ModelTokenizer(demo)
    ids = tokenizer.tokenizer(free["text"])["input_ids"]
    # The first token of the continuation becomes the end token.
    end = tokenizer.tokenizer.convert_ids_to_tokens(ids[0])
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings.pop("eos_token", None)
    settings["added_tokens_decoder"] = {}
    if named_by == config.name:
        settings["eos_token"] = end
    else:
        (folder / named_by).write_text(json.dumps({"eos_token": {"content": end}}))
    config.write_text(json.dumps(settings))
    conversation, text = answers(folder, prompts=prompts, max_new_tokens=12)
    assert (conversation["finish"], conversation["num_tokens"]) == ("stop", 0)
    assert (text["finish"], text["num_tokens"]) == ("length", 12)
    lines = answers(folder, prompts=prompts, max_new_tokens=12, chat=True)
    assert [line["num_tokens"] for line in lines] == [0, 0]


def test_an_interrupted_run_is_resumed(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "import" + " os" * n, "id": n}) + "\n" for n in range(5)))
    drawn = answers(demo, prompts=prompts, temperature=0.8)
    command = ["generate", "--model", str(demo), "--prompts", str(prompts), "--output", str(out), "--resume"]
    command += ["--launcher", "local", "--ep-size", "1", "--device", "cpu", "--max-new-tokens", "6"]
    whole = [
        json.dumps({"prompt": "import" + " os" * n, "id": n, "kind": "completion"} | line).encode() + b"\n"
        for n, line in enumerate(drawn)
    ]
    # The third line was cut off.
    out.write_bytes(b"".join(whole[:2]) + whole[2][:20])
    assert main([*command, "--temperature", "0.8"]) == 0
    lines = out.read_bytes().splitlines(keepends=True)
    assert lines[:5] == whole and json.loads(lines[5])["prompts_per_rank"] == [3]
    capsys.readouterr()
    assert main(command) == 0 and "all 5" in capsys.readouterr().err
    assert out.read_bytes().splitlines(keepends=True) == lines
    prompts.write_text(prompts.read_text().replace(" os", " re"))
    assert main(command) == 2 and "line 2" in capsys.readouterr().err
    assert out.read_bytes().splitlines(keepends=True) == lines


def test_texts_are_written_where_there_is_no_room_for_the_routing(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    command = ["generate", "--model", str(demo), "--prompt", "import", "--max-new-tokens", "2"]
    command += ["--launcher", "local", "--ep-size", "1", "--device", "cpu"]
    assert main([*command, "--output", str(output), "--return-routed-experts", "/dev/full"]) == 1
    assert [json.loads(line)["kind"] for line in output.read_text().splitlines()] == ["completion", "summary"]
    said = capsys.readouterr().err
    assert " tokens/s (" in said and "'/dev/full'" in said


def test_prompts_from_stdin_and_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(data: bytes) -> list[str | Conversation | None]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        return [line.prompt for line in GenerateConfig(prompts=Path("-")).read_prompts()[0]]

    assert read(b"import\n\nos\n") == ["import", "os"]
    assert read(b'\n{"prompt": "import", "id": 1}\n"os"') == ["import", "os"]
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ValueError, match="closed"):
        GenerateConfig(prompts=Path("-")).read_prompts()
    lines, fields = GenerateConfig(prompt=("import", "a, b")).read_prompts()
    assert [(line.prompt, line.where) for line in lines] == [("import", "--prompt"), ("a, b", "--prompt")]
    assert fields == [{"prompt": "import"}, {"prompt": "a, b"}]


def test_a_model_without_a_chat_template(demo: Path) -> None:
    tokenizer, asked = ModelTokenizer(demo), {"messages": [{"role": "user", "content": "x"}]}
    for line, way_out in ((asked, "give it as text"), ({"prompt": "x"}, "leave --chat out")):
        prompt = GenerateConfig(chat=True).prompt_of(line)
        with pytest.raises(ConfigError, match=way_out):
            tokenizer.token_ids(prompt)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("prompts.txt", "\n\n", "found none"),
        ("prompts.json", '[\n"one"\n]\n', "write each on a line of a .jsonl"),
        ("prompts.jsonl", '3\n{"text": "two"}\n', "line 1: expected a string or an object"),
        ("prompts.txt", b"\xff\xfe\n", "line 1: it must be text in UTF-8"),
    ],
)
def test_prompts_that_are_none(
    name: str, content: str | bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["generate", "--prompts", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_what_ends_a_line_elsewhere_may_stand_in_a_prompt(tmp_path: Path) -> None:
    text, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_bytes("\ufeffone\u2028 two\x0c\r\n\nthree".encode())
    objects.write_text('"one\u2028 two"\n\n{"prompt": "three", "id": 3}\n', encoding="utf-8")
    assert [line.prompt for line in GenerateConfig(prompts=text).read_prompts()[0]] == ["one\u2028 two\x0c", "three"]
    lines, fields = GenerateConfig(prompts=objects).read_prompts()
    assert [(line.index, line.where, line.prompt) for line in lines] == [
        (0, "line 1", "one\u2028 two"),
        (1, "line 3", "three"),
    ]
    assert fields == [{"prompt": "one\u2028 two"}, {"prompt": "three", "id": 3}]


def test_prompts_that_the_model_cannot_take(demo: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(demo, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4}))
    tokenizer = ModelTokenizer(folder)
    assert len(tokenizer.token_ids("import")) < 4
    for text, message in {"import os, sys, re, json": "shorten it", "\ud800": "does not read"}.items():
        with pytest.raises(ConfigError, match=message):
            tokenizer.token_ids(text)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 3}))
    with pytest.raises(ConfigError, match="another model's"):
        ModelTokenizer(folder).token_ids("import")


def test_settings_that_are_not_applied_are_told(demo: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(demo, tmp_path / "model")
    file = folder / "generation_config.json"
    settings = {"repetition_penalty": 1.05, "num_beams": 1, "suppress_tokens": [], "min_new_tokens": 2}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings | {"do_sample": True, "top_k": 20}))
    config = GenerateConfig(model=folder, prompt=("import",), max_new_tokens=1)
    (result,) = ranks(1).run(answer, config, config.read_prompts()[0])
    assert result.about["not_applied"] == {"repetition_penalty": 1.05, "min_new_tokens": 2}


def test_end_tokens_that_the_model_never_produces_end_nothing(demo: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(demo, tmp_path / "model")
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"eos_token_id": [-1, 1 << 30]}))
    config = GenerateConfig(model=folder, prompt=("import",), max_new_tokens=3)
    (result,) = ranks(1).run(answer, config, config.read_prompts()[0])
    assert [line["num_tokens"] for line in result.completions] == [3]


def test_a_special_token_stops_a_text_that_is_shown_without_it(demo: Path) -> None:
    tokenizer = ModelTokenizer(demo)
    tokenizer.tokenizer.add_tokens(["<end>"], special_tokens=True)
    (stop_id,) = tokenizer.tokenizer("<end>")["input_ids"]
    assert "<end>" not in tokenizer.text([5, stop_id, 6], "<end>")
    assert tokenizer.special_token("<end>") == [stop_id]
    assert tokenizer.special_token("import") == tokenizer.special_token("no token at all") == []


def test_a_text_that_ends_before_what_stops_it(demo: Path) -> None:
    tokenizer = ModelTokenizer(demo)
    ids = tokenizer.tokenizer("one, two;;\n three;;\n")["input_ids"]
    for stop in (";;\n", "two", "e"):
        first = next(end for end in range(1, len(ids)) if stop in tokenizer.text(ids[:end]))
        assert [tokenizer.ends_with(stop, ids[:end]) for end in range(1, first + 1)] == [False] * (first - 1) + [True]
        assert tokenizer.text(ids, stop) == "one, two;;\n three;;\n".split(stop)[0]


def test_a_tokenizer_of_no_model(demo: Path, tmp_path: Path) -> None:
    shutil.copy(demo / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="(expected a|cannot read its) tokenizer"):
        ModelTokenizer(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--prompts is missing"),
        (["--prompt", "x", "--prompts", "-"], "--prompts and --prompt"),
        (["--prompt", "x", "--resume"], "--resume is given without --output"),
        (["--stop", ""], "--stop is ''"),
        (["--stop", "\udcff"], "--stop is"),
        (["--top-p", "1.5"], "--top-p is '1.5'"),
        (["--temperature", "-1"], "--temperature is '-1'"),
        (["--prompt", "x", "--top-k", "5"], "--top-k is 5 and --temperature is 0"),
    ],
)
def test_flags_that_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *flags]) == 2
    assert message in capsys.readouterr().err


def measured(rank: int, world_size: int, settings: dict[str, Any], texts: dict[str, Any]) -> dict[str, float] | str:
    """What a worker of scripts/perplexity.py does; what it refuses."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "perplexity.py"))
    place = {"rank": rank, "world_size": world_size, "local_rank": rank, "local_world_size": world_size}
    try:
        config = script["PerplexityConfig"](device="cpu", **settings)
        return script["measure"](RankEnv(**place, source="local"), config, texts)["perplexity"]
    except ConfigError as error:
        return str(error)


def test_perplexity_of_texts_with_recorded_experts(demo: Path, tmp_path: Path) -> None:
    config = json.loads((demo / "config.json").read_text())
    shape = (40, config["num_hidden_layers"], config["num_experts_per_tok"])
    ids = np.broadcast_to(np.arange(shape[2], dtype=np.int16), shape)
    file = RoutingFile(ids={0: ids, 1: ids[:3]}, weights={}, num_experts=config["num_experts"], model="demo")
    file.save(tmp_path / "routing")
    texts = {"a": ["def read(self"], "b": [[5, 9, 2, 7]]}
    own, replayed, refused = (
        ranks(1).run(measured, {"model": demo, **settings}, texts)[0]
        for settings in (
            {},
            {"routed_experts": tmp_path / "routing"},
            {"routed_experts": tmp_path / "routing", "routed_weights": "recorded"},
        )
    )
    assert all(own[kind] != replayed[kind] for kind in texts)
    assert "--routed-weights" in refused


def test_folders_of_tokenizers_are_paths(demo: Path) -> None:
    expected = ModelTokenizer(demo).token_ids("import").tolist()
    assert ModelTokenizer(str(demo)).token_ids("import").tolist() == expected
    with pytest.raises(TypeError, match="folder is None; it must be a path"):
        ModelTokenizer(None)

"""Options from a file, hints for mistyped words, completion in a shell, and the schemas of the JSON lines."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ep.launch.cli import main as cli
from moe_ep.launch.cli.generate_config import GenerateConfig
from moe_ep.launch.cli.main import main, make_parser
from moe_ep.launch.cli.options import OptionError, from_args
from moe_ep.launch.cli.run_config import RunConfig
from tests.checkpoint.checkpoints import make_checkpoint
from tests.launch import jobs

ALONE = ["--launcher", "local", "--device", "cpu", "--ep-size", "1"]


def configured(*arguments: str) -> RunConfig:
    return from_args(RunConfig, make_parser().parse_args(["run", *arguments]))


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_file_gives_options_and_the_command_line_overrides_them(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"run.{suffix}"
    if suffix == "toml":
        file.write_text('steps = 3\ntokens-per-rank = [4, 5]\nverify = false\nep_size = "2"\nlauncher = "local"\n')
    else:
        file.write_text(json.dumps({"steps": 3, "tokens-per-rank": [4, 5], "verify": False, "ep_size": 2,
                                    "launcher": "local"}))  # fmt: skip
    found = configured("--config", str(file))
    assert found == RunConfig(steps=3, tokens_per_rank=(4, 5), verify=False, ep_size=2, launcher="local")
    found = configured("--config", str(file), "--steps", "9", "--verify", "--tokens-per-rank", "7")
    assert found == RunConfig(steps=9, tokens_per_rank=(7,), verify=True, ep_size=2, launcher="local")
    assert configured() == RunConfig()


def test_an_option_that_may_be_repeated(tmp_path: Path) -> None:
    file = tmp_path / "generate.toml"
    for text, expected in (('prompt = ["a, b", "c"]', ("a, b", "c")), ('prompt = "a, b"', ("a, b",))):
        file.write_text(text)
        for given, found in (([], expected), (["--prompt", "d", "--prompt", "e"], ("d", "e"))):
            arguments = make_parser().parse_args(["generate", "--config", str(file), *given])
            assert from_args(GenerateConfig, arguments).prompt == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step = 3", ["'step'", "did you mean steps?"]),
        ("steps = 0", ["--steps in ", "at least 1"]),
        ("steps = true", ["--steps in ", "True"]),
        ("verify = 1", ["--verify in ", "true or false"]),
        ('eplb = "yes"', ["--eplb in ", "true or false"]),
        ("[run]\nsteps = 3", ["'run'"]),
        ("steps = {a = 1}", ["--steps in "]),
        ("steps 3", ["--config is "]),
    ],
)
def test_files_that_give_no_options(text: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(OptionError) as caught:
        configured("--config", str(file))
    assert all(word in str(caught.value) for word in (*words, str(file))) and "\n" not in str(caught.value)
    with pytest.raises(OptionError, match="none.toml"):
        configured("--config", str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["rnu"], "did you mean run?"),
        (["generat", "--prompts", "x"], "did you mean generate?"),
        (["eplb", "plann"], "did you mean plan?"),
        (["run", "--step", "1"], "did you mean --steps?"),
        (["run", "--tokens_per_rank=4"], "did you mean --tokens-per-rank?"),
        (["bench", "scaling", "--geometri", "small"], "did you mean --geometry?"),
        (["run", "--step", "1", "--tokn", "2", "--ep-sise", "2"], "did you mean --ep-size?"),
        (["run", "--xyzzy"], None),
        (["xyzzy"], None),
    ],
)
def test_mistyped_words(arguments: list[str], hint: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    error = capsys.readouterr().err
    assert (hint in error) if hint else ("did you mean" not in error)
    assert error.count("\n") == 1


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("moe-ep ru", {"run"}),
        ("moe-ep eplb ", {"simulate", "report", "plan"}),
        ("moe-ep bench scaling --geom", {"--geometry"}),
        ("moe-ep run --steps 3 --tokens", {"--tokens-per-rank"}),
        ("moe-ep run --model x --no-ver", {"--no-verify"}),
    ],
)
def test_completion_in_bash(line: str, expected: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    words = line.split(" ")
    ask = f"COMP_WORDS=({' '.join(words)!s}); [[ {len(words)} -gt ${{#COMP_WORDS[@]}} ]] && COMP_WORDS+=('')\n"
    ask += f'COMP_CWORD={len(words) - 1}; _moe_ep; printf "%s\\n" "${{COMPREPLY[@]}}"'
    script = f"{capsys.readouterr().out}\n{ask}"
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert found.stderr == "" and expected <= set(found.stdout.split())
    assert len(expected) > 1 or set(found.stdout.split()) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_of_other_shells(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "tokens-per-rank" in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True).returncode == 0


def test_python_m_moe_ep_is_the_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "moe_ep", "rnu"], cwd=jobs.ROOT, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr.startswith("moe-ep: ") and "did you mean run?" in ran.stderr


def validate(kind: str, lines: list[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(cli.__file__).parent / "schemas" / f"{kind}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert lines
    for line in lines:
        validator.validate(json.loads(line))
        broken = json.loads(line)
        broken.pop("command" if "command" in broken else "rank" if kind == "generate" else "ms")
        assert not validator.is_valid(broken)


@pytest.mark.parametrize("more", ["", "--eplb", "--no-verify"])
def test_lines_of_run_are_those_of_its_schema(more: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    file = tmp_path / "run.jsonl"
    shape = ["--model", str(tmp_path / "model"), *ALONE, "--steps", "2", "--tokens-per-rank", "4"]
    assert main(["run", *shape, "--json", str(file), *more.split()]) == 0
    validate("run", file.read_text().splitlines())


def test_lines_of_bench_are_those_of_its_schema(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    sizes = ["--decode-tokens", "2", "--prefill-tokens", "none", "--chain", "1", "--repeats", "3"]
    assert main(["bench", "scaling", *ALONE, *sizes, "--json", str(file)]) == 0
    validate("bench", file.read_text().splitlines())


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="no transformers here")
def test_lines_of_generate_are_those_of_its_schema(tmp_path: Path) -> None:
    prompts, file = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("Tokens\n" + "word " * 5000 + "\n")  # the second is longer than the model reads
    assert main(["generate", *ALONE, "--prompts", str(prompts), "--max-new-tokens", "2", "--output", str(file)]) == 1
    lines = file.read_text().splitlines()
    assert [json.loads(line).get("finish") for line in lines] == ["length", "refused", None]
    validate("generate", lines)

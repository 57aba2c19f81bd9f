"""The command line: every wrong option, what contradicts, help without waiting for torch, and the doctor."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from moe_ep import registry
from moe_ep.bench.geometries import PRESETS
from moe_ep.checkpoint.demo import make_demo_checkpoint
from moe_ep.launch.cli.commands import doctor
from moe_ep.launch.cli.commands.doctor import examine, why_unusable
from moe_ep.launch.cli.main import main
from moe_ep.launch.cli.options import GEOMETRY_NAMES, flag
from moe_ep.launch.cli.run_config import RunConfig
from tests.checkpoint.checkpoints import GPTQ, make_checkpoint, qwen3_config
from tests.launch import jobs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A plain checkpoint, a quantized one, and files that are not what an option wants."""
    make_checkpoint(tmp_path / "plain")
    make_checkpoint(tmp_path / "gptq", qwen3_config(quantization_config=GPTQ))
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "no_text.json").write_text("[1, {}]")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    for name, text in (("broken", "{"), ("empty", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--model {}/nowhere", "--model is '{}/nowhere'; it must be a folder with a Hugging Face checkpoint"),
        ("--model Qwen/Qwen3-30B-A3B", "and there is none; to download it: hf download NAME --local-dir FOLDER"),
        ("--model {}", "there is no config.json in it"),
        ("--model=", "--model is ''; it must be a folder with a Hugging Face checkpoint, and there is none"),
        ("--model {}/broken", "and its config.json cannot be read (Expecting property name"),
        ("--model {}/empty", "and its config.json holds no JSON object with values"),
        ("--launcher mpi", "--launcher is 'mpi'; it must be one of ray, torchrun, local"),
        ("--address nowhere", "--address is 'nowhere'; it must read HOST:PORT"),
        ("--address 10.0.0.1:99999", "it must read HOST:PORT"),
        ("--address ray://h:10001", "--address is 'ray://h:10001'; it must read HOST:PORT, as ray start printed it"),
        ("--address 10.0.0.1:6379 --launcher local", "--address is '10.0.0.1:6379' with --launcher local"),
        ("--address local --launcher local", "--address is 'local' with --launcher local; only ray takes it"),
        ("--nnodes 0", "--nnodes is '0'; it must be a whole number of at least 1"),
        ("--nnodes 2", "--nnodes is 2; more than one is for --launcher torchrun"),
        ("--nnodes 2 --launcher torchrun", "--nnodes is 2 without --rdzv-endpoint"),
        ("--rdzv-endpoint h:1 --launcher local", "--rdzv-endpoint is 'h:1' with --launcher local; only torchrun"),
        ("--rdzv-endpoint http://h:1", "--rdzv-endpoint is 'http://h:1'; it must read HOST:PORT"),
        ("--rdzv-endpoint node1..cluster:1", "--rdzv-endpoint is 'node1..cluster:1'; it must read HOST:PORT"),
        ("--address node1..cluster:1", "--address is 'node1..cluster:1'; it must read HOST:PORT"),
        ("--rdzv-endpoint here", "--rdzv-endpoint is 'here'; it must read HOST:PORT"),
        ("--nnodes 2 --launcher torchrun --rdzv-endpoint h:1 --ep-size 3", "--ep-size is 3; it must be a multiple of"),
        ("--ep-size 0", "--ep-size is '0'; it must be a whole number of at least 1"),
        ("--ep-size 999999 --device cpu", "the gang asks for 999999 CPUs (one a worker) and there are "),
        ("--ep-size two", "--ep-size is 'two'; it must be a whole number"),
        ("--device tpu", "--device is 'tpu'; it must be one of auto, cpu, cuda"),
        ("--backend carrier_pigeon", "--backend is 'carrier_pigeon'; it must be one of auto, no_ep, allgather"),
        (
            "--tokens-per-rank 0",
            "--tokens-per-rank is '0'; it must be a whole number of at least 1, or one number a rank",
        ),
        ("--tokens-per-rank 4,,5", "--tokens-per-rank is '4,,5'"),
        ("--tokens-per-rank 4,5 --launcher local --ep-size 3", "--tokens-per-rank has 2 numbers"),
        ("--steps 1.5", "--steps is '1.5'; it must be a whole number of at least 1"),
        ("--text {}/nowhere.txt", "there is no such file"),
        ("--text {}", "and this is no plain file"),
        ("--text {}/empty.txt", "--text is '{}/empty.txt'; it must be a file with text, and there is none in it"),
        ("--text {}/no_text.json", "there is none in it"),
        ("--text {}/latin.txt", "in UTF-8"),
        ("--text {}/plain/config.json --model {}/plain", "{}/plain has no tokenizer.json; leave --text out"),
        ("--dtype int8", "--dtype is 'int8'; it must be one of f32, f16, bf16"),
        ("--quantize int3", "--quantize is 'int3'; it must be one of none, int4"),
        ("--quantize int4", "the demo checkpoint is quantized already"),
        ("--quantize int4 --model {}/gptq", "and --model is quantized already"),
        ("--graphs --device cpu", "--graphs was given and the workers run on CPUs"),
        ("--backend no_ep", "--backend is 'no_ep', which moves nothing, and 4 workers share the experts"),
        ("--backend nvshmem_low_latency --device cpu", "and the workers run on CPUs; NVSHMEM needs GPUs"),
        ("--trace {}/nowhere/trace", "it must be a folder to write into, or a new one in a folder that exists"),
        ("--trace {}/empty.txt", "it must be a folder to write into, or a new one in a folder that exists"),
        (
            "--steps 129 --trace {}/trace",
            "--steps is 129 with --trace, which keeps every operation",
        ),
        ("--graphs --trace {}/trace", "--trace shows what the host does between layers"),
        ("--metrics-host=", "--metrics-host is ''; it must be an address of this machine"),
        ("--metrics-host node1..cluster", "--metrics-host is 'node1..cluster'; it must be an address of this machine"),
        ("--metrics-host 0.0.0.0", "--metrics-host is '0.0.0.0' without --metrics-port, and no metrics are served"),
        ("--metrics-port 65535 --device cpu --launcher local --ep-size 2", "it must be at most 65534"),
        ("--eplb-synchronous", "--eplb-synchronous is 'True' without --eplb; add --eplb or leave it out"),
        ("--verify maybe", "unrecognized arguments: maybe; see moe-ep run --help"),
        ("--seed -1", "--seed is '-1'; it must be a whole number of at least 0"),
        ("--json {}/nowhere/out.jsonl", "it must be a file to write, in a folder that exists"),
        ("--json {}", "it must be a file to write"),
        ("--speed high", "unrecognized arguments: --speed high"),
        ("--steps", "expected one argument"),
    ],
)
def test_a_wrong_option_is_one_sentence_and_exit_code_2(
    arguments: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["run", *arguments.replace("{}", str(folder)).split()])
    except SystemExit as exit:
        code = exit.code
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    assert output.err.startswith("moe-ep")
    assert sentence.replace("{}", str(folder)) in output.err
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "prog"),
    [(["fly"], "moe-ep"), (["--fast"], "moe-ep"), (["eplb", "report", "x", "y"], "moe-ep eplb report")],
)
def test_an_unknown_word_is_said_of_the_command_it_follows(
    arguments: list[str], prog: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{prog}: ") and error.endswith(f"; see {prog} --help\n")
    assert error.count("\n") == 1


def test_without_a_command_help_tells_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "generate" in output.err


def test_flags_are_not_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "--step", "1"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --step 1" in capsys.readouterr().err


def test_help_names_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert GEOMETRY_NAMES.split(", ") == list(PRESETS)
    assert main(["plan", "--geometry", "large"]) == 2
    assert capsys.readouterr().err == f"moe-ep plan: --geometry is 'large'; it must be one of {GEOMETRY_NAMES}\n"


def test_help_and_wrong_options_do_not_wait_for_torch_or_ray() -> None:
    code = (
        "import sys; from moe_ep.launch.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    )
    for arguments in (["--help"], ["run", "--help"], ["run", "--steps", "0"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=jobs.ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("option", "name"), [("--trace", "new"), ("--trace", "."), ("--json", "out.jsonl")])
def test_what_this_user_may_not_write_is_found_before_the_run(
    option: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The superuser may, whatever the folder's mode.
    monkeypatch.setattr("os.access", lambda path, mode: not (Path(path) == tmp_path and mode & os.W_OK))
    assert main(["run", option, str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"moe-ep run: {option} is ") and error.endswith("and this user may not\n")


def test_an_output_that_nobody_reads_any_more_ends_the_command_silently(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        monkeypatch.setattr("moe_ep.launch.cli.commands.plan.main", lambda args: print("a line"))
        assert main(["plan"]) == 141
    assert capsys.readouterr().err == ""


def test_a_process_without_an_output_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    monkeypatch.setattr("moe_ep.launch.cli.commands.plan.main", lambda args: print("a line", file=sys.stderr) or 0)
    assert main(["plan"]) == 0


def test_every_field_of_the_configuration_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for item in fields(RunConfig):
        assert flag(item.name) in text
    assert "--no-verify" in text
    assert "steps to measure (default: 8)" in text and "(default: yes)" in " ".join(text.split())
    titles = [line for line in text.splitlines() if line[:1].isalpha() and line.endswith(":")]
    assert sorted(titles) == sorted(
        ["options:", "model:", "workers:", "workers that come and go:", "routing and load balancing:"]
    )


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("MOE_EP_LOG_LEVEL", "loud", "MOE_EP_LOG_LEVEL is 'loud'; it must be"),
        ("MOE_EP_DISPATCH_TIMEOUT_S", "soon", "MOE_EP_DISPATCH_TIMEOUT_S is 'soon'; it must be a number of seconds"),
        ("MOE_EP_INPUT_DTYPE", "e4m3", "MOE_EP_INPUT_DTYPE is 'e4m3'; it must be"),
        ("MOE_EP_ALL2ALL_BACKEND", "pigeon", "MOE_EP_ALL2ALL_BACKEND is 'pigeon'; it must be one of auto, no_ep"),
    ],
)
def test_a_broken_environment_variable_is_one_sentence(
    name: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["run", "--launcher", "local"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"moe-ep run: environment: {sentence}")
    assert output.err.count("\n") == 1


def test_a_cache_folder_that_cannot_be_written_to_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path / "file"))
    assert main(["run", "--launcher", "local"]) == 2
    error = capsys.readouterr().err
    assert "cannot be made as" in error and "set MOE_EP_CACHE_DIR to a folder that can be written to" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("cache", ["file", "/proc"])
def test_an_elastic_gang_that_cannot_keep_its_token_starts_no_workers(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    model = make_demo_checkpoint(tmp_path / "model", progress=False)
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path / cache))
    assert main(["run", "--launcher", "local", "--device", "cpu", "--elastic", "--model", str(model)]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / cache / "gangs") in error and "set MOE_EP_CACHE_DIR to a folder" in error
    assert error.count("\n") == 1  # nothing says that workers start


def test_inconsistent_launcher_variables_are_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["run"]) == 2
    assert "RANK set without WORLD_SIZE" in capsys.readouterr().err


def test_a_folder_that_is_gone_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == "moe-ep doctor: the folder that it was started in is gone; start it in another\n"


def test_a_temporary_folder_with_too_long_a_path_for_sockets_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    command = [sys.executable, "-m", "moe_ep.launch", "run", "--launcher", "local", "--ep-size", "2"]
    ended = subprocess.run(
        command, cwd=jobs.ROOT, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert ended.stderr == (
        f"moe-ep run: no worker can be started with a socket in {folder} (AF_UNIX path too long); set TMPDIR to "
        f"another folder, with a short path\n"
    )


def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def write(args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "out.json")

    monkeypatch.setattr(doctor, "main", write)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == "moe-ep doctor: [Errno 28] No space left on device: 'out.json'\n"


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert set(findings["backends"]) == set(registry.ALL2ALL_BACKENDS)
    assert set(findings["experts"]) == set(registry.EXPERTS)
    assert findings["backends"]["no_ep"] is None
    assert findings["versions"]["torch"]
    assert len(findings["p2p"]) == len(findings["gpus"])
    assert findings["cache"]["unusable"] is None and findings["cpus"] > 0


def test_doctor_tells_a_cache_that_nothing_can_be_kept_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path / "a file" / "cache"))
    assert main(["doctor"]) == 0
    assert "(cannot be written to; set MOE_EP_CACHE_DIR to a folder that can)" in capsys.readouterr().out


def test_doctor_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in (*registry.ALL2ALL_BACKENDS, *registry.EXPERTS):
        assert any(line.split()[:1] == [name] and ("usable" in line) for line in lines)


class NeedsMoonlight:
    @classmethod
    def unusable_reason(cls) -> str | None:
        return "there is no moonlight;\nrun: wait for the night"


def test_doctor_says_why_and_what_fixes_it() -> None:
    backends = registry.Registry(
        "backend",
        {
            "moon": registry.Entry(f"{__name__}:NeedsMoonlight", ""),
            "gone": registry.Entry("no_such_module:Anything", ""),
        },
    )
    assert why_unusable(backends, "moon") == "there is no moonlight; run: wait for the night"
    gone = why_unusable(backends, "gone")
    assert gone is not None and "there is no module 'no_such_module'; every worker must be able to import it" in gone
    assert examine()["experts"]["reference"] is None

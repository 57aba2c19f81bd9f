"""moe-ep run for real, through each launcher: what it prints, what it writes, and that it verifies."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_ep.launch.cli.main import main
from moe_ep.registry import ALL2ALL_BACKENDS
from tests.checkpoint.checkpoints import make_checkpoint
from tests.checkpoint.test_real_layer import text_moe
from tests.launch import jobs
from tests.launch.hosts import missing
from tests.observability.test_metrics import scrape
from tests.ports import free_ports

STEPS = 2
ALONE = ("--device", "cpu", "--launcher", "local", "--ep-size", "1")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of the module's own, so that the demo checkpoint is made here."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_EP_CACHE_DIR", str(folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder


def run(capsys: pytest.CaptureFixture[str], file: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """The terminal's text and the JSON lines of a run that succeeds."""
    code = main(["run", "--steps", str(STEPS), "--json", str(file), *arguments])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out, [json.loads(line) for line in file.read_text().splitlines()]


def check_lines(lines: list[dict[str, Any]], world_size: int, num_tokens: int, top_k: int = 4) -> dict[str, Any]:
    """What every run's lines must hold; returns the summary."""
    *layers, summary = lines
    assert [line["kind"] for line in lines] == ["layer"] * len(layers) + ["summary"]
    expected = [(step, layer) for step in range(STEPS) for layer in summary["model"]["moe_layers"]]
    assert [(line["step"], line["layer"]) for line in layers] == expected
    for line in layers:
        assert len(line["tokens_per_rank"]) == world_size
        assert sum(line["tokens_per_rank"]) == num_tokens * top_k
        mean, most = sum(line["tokens_per_rank"]) / world_size, max(line["tokens_per_rank"])
        assert line["balancedness"] == pytest.approx(mean / most)
        for stage in ("route", "dispatch", "experts", "combine"):
            assert line["ms"][stage] == max(line["ms_per_rank"][stage]) > 0
    assert summary["ep_size"] == world_size == len(summary["memory_bytes_per_rank"])
    assert sum(summary["num_tokens_per_rank"]) == num_tokens
    placed = [expert for place in summary["placement"] for expert in place["experts"]]
    assert sorted(placed) == list(range(summary["model"]["num_experts"]))
    assert summary["tokens_per_s"] > 0
    assert summary["versions"]["torch"]
    return summary


# Under Ray: test_ray_job.py.
@pytest.mark.parametrize("launcher", ["local", "torchrun"])
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.thorough), 4])
def test_the_demo_checkpoint_is_verified(
    launcher: str, world_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"--device cpu --launcher {launcher} --ep-size {world_size} --tokens-per-rank 8".split()
    text, lines = run(capsys, tmp_path / "out.jsonl", *arguments)
    summary = check_lines(lines, world_size, 8 * world_size)
    assert summary["launcher"] == launcher
    assert summary["command"].startswith(f"moe-ep run --steps {STEPS}")
    assert summary["verify"]["passed"] is True
    assert summary["verify"]["max_relative_error"] <= summary["verify"]["tolerance"] == 1e-4
    assert summary["model"]["quantization"] == "gptq"
    per_rank = 32 // world_size
    for rank in range(world_size):
        first = per_rank * rank
        assert f"   {rank}  {first}-{first + per_rank - 1} ({per_rank})  " in text
    for word in ("tokens/s", "balancedness", "placement", "memory", "verified: maximum relative error", "dispatch"):
        assert word in text


@pytest.mark.parametrize("backend", [name for name in ALL2ALL_BACKENDS if name != "no_ep"])
def test_every_backend_is_verified_with_uneven_tokens(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if reason := ALL2ALL_BACKENDS.load(backend).unusable_reason():
        pytest.skip(reason)
    arguments = f"--device cpu --launcher local --ep-size 3 --backend {backend} --tokens-per-rank 7,0,3".split()
    _, lines = run(capsys, tmp_path / "out.jsonl", *arguments)
    summary = check_lines(lines, 3, 10)
    assert summary["backend"] == backend
    assert summary["verify"]["passed"] is True
    assert [len(place["experts"]) for place in summary["placement"]] == [11, 11, 10]


def test_text_becomes_tokens_and_short_text_goes_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.json"
    text.write_text(json.dumps({"english": ["Tokens travel to the experts."], "python": ["import os\n", "x = 1\n"]}))
    arguments = f"--device cpu --launcher local --ep-size 2 --tokens-per-rank 40 --text {text}".split()
    _, lines = run(capsys, tmp_path / "out.jsonl", *arguments)
    summary = check_lines(lines, 2, 80)
    assert summary["text"] == str(text)
    assert summary["verify"]["passed"] is True


def test_plain_weights_quantized_on_load_in_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "model")
    arguments = f"--model {tmp_path / 'model'} --quantize int4 --dtype bf16 --device cpu --launcher local".split()
    arguments += ["--ep-size", "2", "--tokens-per-rank", "9", "--input-dtype", "int8"]
    text, lines = run(capsys, tmp_path / "out.jsonl", *arguments)
    summary = check_lines(lines, 2, 18, top_k=2)
    assert summary["dtype"] == "bfloat16"
    assert len(summary["rows"]) == 1 and "int8" in summary["rows"][0]
    assert summary["rows"][0] in text
    assert summary["verify"]["passed"] is True
    # int4 changes results by more than bf16 does, which is told beside it.
    of_quantizing = summary["verify"]["error_of_quantizing"]
    assert of_quantizing > summary["verify"]["max_relative_error"]
    assert f"{of_quantizing:.2e} against the weights before --quantize" in text


def test_without_verification(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, lines = run(
        capsys, tmp_path / "out.jsonl", *["--device", "cpu", "--launcher", "local", "--ep-size", "1", "--no-verify"]
    )
    assert "verification: off" in text
    assert lines[-1]["verify"] is None


def test_a_checkpoint_that_lacks_a_tensor_ends_in_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    make_checkpoint(tmp_path / "model", tensors={name: None})
    arguments = f"run --model {tmp_path / 'model'} --device cpu --launcher local --ep-size 2".split()
    assert main(arguments) == 1
    error = jobs.without_waits(capsys.readouterr().err)
    # Every rank looks at all experts before it loads its own; the first to speak is heard.
    assert error.startswith(("moe-ep run: rank 0 on node ", "moe-ep run: rank 1 on node "))
    assert name in error
    assert error.count("\n") == 1


def test_more_gpus_than_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--launcher", "local", "--device", "cuda", "--ep-size", "99"]) == 2
    error = jobs.without_waits(capsys.readouterr().err)
    assert error.startswith("moe-ep run: the gang asks for 99 GPUs (one a worker) and there are ")
    assert error.count("\n") == 1


def at_work(leader: int, launcher: str) -> bool:
    """Whether the gang's processes are there; under Ray its actors, which start when the cluster has."""
    everybody = jobs.session_pids(leader)
    if launcher != "ray":
        return len(everybody) >= 5
    return sum(command_line(pid).startswith("ray::_Worker") for pid in everybody) == 2


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("launcher", "number", "code", "words"),
    [
        ("torchrun", signal.SIGINT, 130, "moe-ep run: interrupted\n"),
        ("ray", signal.SIGTERM, 143, "moe-ep run: terminated\n"),
    ],
)
def test_a_signal_ends_everything(launcher: str, number: signal.Signals, code: int, words: str) -> None:
    arguments = f"run --launcher {launcher} --device cpu --ep-size 2 --steps 1000000".split()
    process = jobs.start_moe_ep(*arguments)
    assert jobs.wait_until(lambda: process.poll() is not None or at_work(process.pid, launcher))
    assert process.poll() is None, process.communicate()
    time.sleep(1)  # it may be anywhere then
    everybody = jobs.session_pids(process.pid)
    assert len(everybody) >= 5
    # ctrl-C reaches the whole foreground group, a job manager's SIGTERM the driver.
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    output, errors = process.communicate(timeout=jobs.LIMIT_S)
    assert process.returncode == code, (output, errors)
    # The signal may come before the first measured step or after: then what was measured is shown.
    measured = jobs.without_waits(errors.removesuffix(words))
    if measured:
        assert re.fullmatch(r"ended after \d+ measured steps?; .*\n", measured), errors
        assert output.endswith("verification: not reached\n"), output
    else:
        assert output == "" and errors.endswith(words)
    assert jobs.all_end(everybody)


@pytest.mark.skipif(not missing(), reason="test_two_hosts.py runs them on two hosts")
def test_two_torchrun_agents(tmp_path: Path) -> None:
    where = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{free_ports()[0]} --rdzv-id=run --local-addr=127.0.0.1"
    job = f"-m moe_ep.launch run --device cpu --steps {STEPS} --tokens-per-rank 8 --json {tmp_path / 'out.jsonl'}"
    agents = [
        subprocess.Popen(
            [
                sys.executable,
                *["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"],
                *(where + " " + job).split(),
            ],
            cwd=jobs.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [agent.communicate(timeout=jobs.LIMIT_S) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert sum(output.count("verified: maximum relative error") for output, _ in outputs) == 1
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert check_lines(lines, 2, 16)["launcher"] == "torchrun"


@pytest.mark.skipif(text_moe() is None, reason="text-moe is not here; MOE_EP_TEXT_MOE names its folder")
def test_a_trained_model_and_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("The ship left the harbour before dawn, and nobody on the quay knew where to.")
    arguments = f"--model {text_moe()} --text {tmp_path}/text.txt --device cpu --launcher local --ep-size 2".split()
    _, lines = run(capsys, tmp_path / "out.jsonl", *arguments)
    assert lines[-1]["verify"]["passed"] is True


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(1, marks=pytest.mark.gpu),
        pytest.param(2, marks=pytest.mark.gpu2),
        pytest.param(8, marks=pytest.mark.gpu8),
    ],
)
@pytest.mark.parametrize("launcher", ["local", "torchrun", "ray"])
def test_on_gpus(launcher: str, world_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if launcher == "ray":
        pytest.importorskip("ray")
    arguments = f"--device cuda --launcher {launcher} --ep-size {world_size} --tokens-per-rank 32".split()
    _, lines = run(capsys, tmp_path / "out.jsonl", *arguments)
    summary = check_lines(lines, world_size, 32 * world_size)
    assert summary["dtype"] == "bfloat16"
    assert summary["verify"]["passed"] is True
    assert sorted(place["device"] for place in summary["placement"]) == [f"cuda:{i}" for i in range(world_size)]


@pytest.mark.parametrize("how", ["ctrl-C", pytest.param("a worker that is killed", marks=pytest.mark.thorough)])
def test_what_was_measured_before_the_end_is_shown_and_written(how: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    file = tmp_path / "out.jsonl"
    port = free_ports(2)[0]
    flags = ["--device", "cpu", "--launcher", "local", "--ep-size", "2", "--steps", "1000000", "--tokens-per-rank", "4"]
    flags += ["--json", str(file), "--metrics-port", str(port)]
    command = jobs.start_moe_ep("run", "--model", str(tmp_path / "model"), *flags)

    def measures() -> bool:
        """Whether more steps are over than a driver leaves unread."""
        assert command.poll() is None, command.communicate()
        with contextlib.suppress(OSError):  # nobody listens yet
            samples = [value for name, value in scrape(port).items() if "dispatch_seconds_count" in name]
            return sum(samples) >= 10
        return False

    assert jobs.wait_until(measures)
    everybody = jobs.session_pids(command.pid)
    assert len(everybody) >= 5
    if how == "ctrl-C":
        os.killpg(command.pid, signal.SIGINT)
    else:
        os.kill(jobs.workers_of(command.pid)[1], signal.SIGKILL)
    output, error = command.communicate(timeout=jobs.LIMIT_S)
    assert command.returncode == (130 if how == "ctrl-C" else 1)
    assert "balancedness" in output and "verification: not reached" in output, error
    assert error.splitlines()[-1].startswith("moe-ep run: " + ("interrupted" if how == "ctrl-C" else "rank 1 on node "))
    assert jobs.all_end(everybody)
    *layers, summary = [json.loads(line) for line in file.read_text().splitlines()]
    assert summary["complete"] is False and summary["steps"] > 0
    assert len(layers) == summary["steps"] * len(summary["model"]["moe_layers"])

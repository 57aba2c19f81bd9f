"""Every command that README and docs show is run: here, by another test, or on GPUs as a page of benchmarks records."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from moe_ep.eplb.simulate import zipf_trace
from moe_ep.launch.cli.main import main, make_parser
from moe_ep.rollouts.routing_file import RoutingFile
from tests.checkpoint.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[2]
HARNESS = (ROOT / "scripts" / "harness.py").read_text()  # options that scripts share
BENCHMARKS = ROOT / "docs" / "benchmarks"
SCALING = BENCHMARKS / "scaling"
MADE = {ROOT / "docs" / "api", ROOT / "docs" / "_build"}  # by `make docs`
PAGES = (
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if not MADE & set(page.parents)),
    *sorted((ROOT / "docs" / "deploy").iterdir()),
)
# What starts our own command line, whatever launches it.
OURS = re.compile(
    r"(?:^|[\s`])(?:moe-ep|(?:-m )moe_ep\.launch|examples/ray_job\.py \S+|scripts/bench_ep_scaling\.py)(?= [a-z-])"
)
SCRIPT = re.compile(r"(?:^|[\s`])scripts/(\w+\.py)([^`|]*)")


# Run here, in a folder that holds what they name.
HERE = {
    "completion bash",
    "convert IN OUT --quantize int4",
    "eplb report trace.safetensors --ep-size 16 --redundant 16 --out load.png",
    "eplb simulate --routing trace.safetensors --ep-size 16 --redundant 16 --policies linear,deepseek,incremental",
    "plan --geometry deepseek-v3 --measured results.jsonl",
    "plan --geometry deepseek-v3 --tokens 64,4096 --gpus 8,32,128,512 --wire fp8",
    "plan --measured scaling_4xh200.jsonl --tokens 128",
    "plot results.jsonl --out plots/",
}
# Run by tests of their own, with smaller sizes.
_JOIN_AND_LEAVE = "test_elastic_gang.py::test_actors_join_and_leave_and_are_killed_and_replaced"
ELSEWHERE = {
    "bench scaling --geometry qwen3-30b --routing uniform,zipf:0.5 --eplb off,on --json results.jsonl":
        "test_scaling.py::test_the_same_rows_from_every_launcher_and_their_pictures",
    "bench scaling --json /tmp/r.jsonl": "test_ray_job.py::test_jobs_of_a_bare_checkout",
    "eplb plan trace.safetensors --model DIR --ep-size 16 --redundant 16 --out placement.json":
        "test_run_eplb.py::test_experts_move_and_everything_is_verified",
    "eplb simulate --routing zipf:0.5 --ep-size 32 --redundant 32 --step-tokens 1024 --rules levelled,known-counts":
        "test_eplb_command.py::test_simulate_prints_a_row_for_each_policy_and_rule",
    "generate --model DIR --prompts FILE": "test_generate_command.py::test_the_command",
    "generate --model DIR --prompts FILE --batch-invariant": "test_invariant_generation.py::test_the_command",
    "generate --model DIR --prompts FILE --return-routed-experts routing.safetensors":
        "test_generate_command.py::test_the_command",
    'run "$@"': "test_torchrun_gang.py::test_ranks_that_srun_started",
    "run --address auto --ep-size 16 --model /models/checkpoint --tokens-per-rank 128 --steps 50":
        "test_ray_job.py::test_jobs_of_a_bare_checkout",
    "run --address auto --ep-size 16 --model DIR": "test_ray_job.py::test_a_driver_joins_a_running_cluster",
    "run --ep-size 4": "test_ray_job.py::test_jobs_of_a_bare_checkout",
    "generate --elastic --launcher local --ep-size 4 --prompts prompts.txt --output completions.jsonl":
        "test_elastic_gang.py::test_ranks_that_are_killed_and_stopped",
    "join --address 127.0.0.1:40123": _JOIN_AND_LEAVE,
    "leave 2 --address 127.0.0.1:40123": _JOIN_AND_LEAVE,
    "run --eplb --routing zipf:0.8": "test_run_eplb.py::test_experts_move_and_everything_is_verified",
    "run --eplb --routing zipf:0.8 --device cpu --launcher local --ep-size 2 --tokens-per-rank 64":
        "test_run_eplb.py::test_experts_move_and_everything_is_verified",
    "run --launcher local --ep-size 4": "test_run.py::test_the_demo_checkpoint_is_verified",
    "run --launcher torchrun --nnodes 2 --rdzv-endpoint HOST:29500 --ep-size 16":
        "test_torchrun_gang.py::test_two_agents_restart_after_a_failure",
    "run --model DIR": "test_run.py::test_two_torchrun_agents",
    "run --model DIR --ep-size 8 --text FILE --tokens-per-rank 128 --steps 50 --json out.jsonl":
        "test_run.py::test_text_becomes_tokens_and_short_text_goes_round",
    "run --model DIR --metrics-port 9100": "test_trace.py::test_a_run_writes_a_trace_and_serves_metrics",
    "run --model DIR --metrics-port 9100 --trace traces/":
        "test_trace.py::test_a_run_writes_a_trace_and_serves_metrics",
    "run --model DIR --record-routing routing.safetensors":
        "test_run_eplb.py::test_experts_move_and_everything_is_verified",
    "run --model DIR --steps 4 --trace traces/":
        "test_trace.py::test_a_run_writes_a_trace_and_serves_metrics",
}  # fmt: skip
# They need GPUs; what they gave is on these pages.
ON_GPUS = {
    "bench scaling --geometry deepseek-v3 --json results.jsonl": "scaling.md",
    "bench scaling --launcher ray --ep-size 4 --geometry deepseek-v3": "scaling.md",
    "tune --geometry deepseek-v3 --ep-size 8": "experts.md",
}


def lines(pages: Sequence[Path] = PAGES) -> Iterator[str]:
    """Lines of code blocks and pieces of inline code, those ending in a backslash joined with the next."""
    for page in pages:
        text = page.read_text().replace("\\\n", " ")
        if page.suffix != ".md":
            yield from text.splitlines()
            continue
        fences = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for block in fences:
            yield from block.splitlines()
        without = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without))


def our_commands(pages: Sequence[Path] = PAGES) -> list[str]:
    found = set()
    for line in lines(pages):
        if match := OURS.search(line):
            prefix = "bench scaling " if "bench_ep_scaling" in match.group() else ""
            found.add(prefix + re.split(r"\s#|\s{2,}[a-z]|[\[…]|\.\.\. |;", line[match.end() :])[0].strip())
    return sorted(found)


@pytest.mark.parametrize("command", our_commands())
def test_moe_ep_takes_it(command: str) -> None:
    words = [word for word in shlex.split(command) if word not in ("$@", "...", "--help")]
    if len(words) > 1:  # else a command is only named
        make_parser().parse_args(words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("commands")
    make_checkpoint(made / "IN")
    (made / "plots").mkdir()
    of_one_model = [row for row in (SCALING / "scaling_4xh200.jsonl").open() if '"deepseek-v3"' in row]
    (made / "results.jsonl").write_text("".join(of_one_model))
    shutil.copy(SCALING / "scaling_4xh200.jsonl", made)
    trace = zipf_trace(num_layers=1, num_experts=32, top_k=2, exponent=0.5, num_steps=32, num_tokens=64, seed=0)
    steps = dict(enumerate(trace.ids.reshape(32, 64, 1, 2)))
    file = RoutingFile(ids=steps, weights={}, num_experts=32, model=trace.model, num_ranks=1)
    file.save(made / "trace.safetensors")
    return made


@pytest.mark.parametrize("command", sorted(HERE))
def test_it_runs(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(shlex.split(command)) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_every_command_is_run_somewhere() -> None:
    measured = set(our_commands([page for page in PAGES if BENCHMARKS in page.parents]))
    shown = set(our_commands([page for page in PAGES if BENCHMARKS not in page.parents]))
    named = {command for command in shown if len(command.replace("bench scaling", "bench").split()) == 1}
    assert shown - named - {"run --help"} == HERE | set(ELSEWHERE) | set(ON_GPUS)
    for test in ELSEWHERE.values():
        file, name = test.split("::")
        (found,) = (ROOT / "tests").rglob(file)
        assert f"def {name}(" in found.read_text(), test
    for command, page in ON_GPUS.items():
        said = (BENCHMARKS / page).read_text()
        assert command.split(" --")[0] in said.replace("scripts/bench_ep_scaling.py", "bench scaling"), command
        assert re.search(r"commit[: ]+[0-9a-f]{7}", said, re.IGNORECASE)
    # Those of the benchmarks' pages are what was run there, and those pages say of which commit.
    assert measured


def test_every_command_is_shown() -> None:
    shown = {command.split()[0] for command in our_commands()}
    (commands,) = (action for action in make_parser()._actions if action.dest == "command")
    assert shown == set(commands.choices or ())


def test_scripts_take_their_flags() -> None:
    wrong = []
    for line in lines():
        for name, rest in SCRIPT.findall(line):
            script = ROOT / "scripts" / name
            source = script.read_text() + HARNESS if script.exists() else ""
            wrong += [name] if not source else []
            for flag in re.findall(r"--([a-z][a-z-]+)", rest) if name != "bench_ep_scaling.py" else ():
                if f"--{flag}" not in source and flag.replace("-", "_") not in source:
                    wrong.append(f"{name} --{flag}")
    assert not wrong

"""scripts/reproduce.py: when parts run and beside which, that none outlasts its time, and that none is missing."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from moe_ep.distributed.failure_detection import comes_within
from moe_ep.launch.cli.main import make_parser
from tests.launch.jobs import all_end

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
# Fails after some minutes where the other part does not run beside it.
MEET = "touch {0}/{1}; for i in $(seq 2400); do test -e {0}/{2} && exit 0; sleep 0.1; done; exit 1"

# Flags of every script that starts a gang, which are defined elsewhere.
GANG = ("launcher", "ep-size")


@dataclass(frozen=True)
class Piece:
    name: str
    seconds: float
    gpus: int = 1
    shares: bool = False


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture
def schedule() -> ModuleType:
    return importlib.import_module("reproduce_schedule")


@pytest.fixture
def reproduce() -> ModuleType:
    return importlib.import_module("reproduce")


def test_parts_of_one_gpu_fill_the_gpus_and_those_of_several_follow(schedule: ModuleType) -> None:
    parts = [Piece("d", 1, gpus=2), Piece("c", 1), Piece("a", 3), Piece("b", 2)]
    assert [(part.name, begin) for part, begin in schedule.begins(parts, 2)] == [("a", 0), ("b", 0), ("c", 2), ("d", 3)]
    assert [(part.name, begin) for part, begin in schedule.begins(parts, 3)] == [("a", 0), ("b", 0), ("c", 0), ("d", 2)]


def test_parts_that_time_nothing_share_a_gpu(schedule: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "SEATS", 2)
    parts = [Piece("c", 1, shares=True), Piece("a", 4, shares=True), Piece("b", 3, shares=True), Piece("timed", 2)]
    found = [[(part.name, at) for part, at in schedule.begins(parts, num_gpus)] for num_gpus in (1, 2)]
    # On two GPUs, the one that times takes one of them, and the others share the other.
    assert found == [[("a", 0), ("b", 0), ("c", 3), ("timed", 4)], [("timed", 0), ("a", 0), ("b", 0), ("c", 2)]]


def test_what_is_worth_more_takes_the_time_first(schedule: ModuleType) -> None:
    parts = [Piece("wide", 5, gpus=2), Piece("long", 6), Piece("short", 4), Piece("shorter", 1)]
    assert [part.name for part in schedule.fitting(parts, 2, 10)] == ["wide", "short", "shorter"]
    assert [part.name for part in schedule.fitting(parts, 2, 11)] == ["wide", "long", "short", "shorter"]
    assert schedule.fitting(parts, 2, 0.5) == []


def run(
    schedule: ModuleType, commands: dict[Piece, list[str]], folder: Path, seconds: float = 3600
) -> tuple[dict[str, tuple[int, bool]], list[str]]:
    """How each part ended (status, whether for its time), and what was said."""
    said: list[str] = []
    ended = schedule.run(
        list(commands), ["4", "7"], seconds, folder, lambda part, _: commands[part], os.environ, said.append
    )
    return {end.part: (end.rc, end.outlasted) for end in ended}, said


def test_side_by_side_on_gpus_of_their_own(schedule: ModuleType, tmp_path: Path) -> None:
    show = "echo sees $CUDA_VISIBLE_DEVICES"
    commands = {
        Piece("both", 600, gpus=2): [show],
        Piece("one", 600): [show, MEET.format(tmp_path, "one", "other")],
        Piece("other", 600): [show, MEET.format(tmp_path, "other", "one")],
    }
    ended, said = run(schedule, commands, tmp_path)
    assert list(ended)[-1] == "both" and set(ended.values()) == {(0, False)}
    logs = {part.name: (tmp_path / f"{part.name}.log").read_text() for part in commands}
    assert [re.findall("sees (.+)", logs[name])[-1] for name in ("one", "other", "both")] == ["4", "7", "4,7"]
    assert [line.split(" on ")[0] for line in said] == ["begins one", "begins other", "begins both"]


def test_two_beside_each_other_on_one_gpu(schedule: ModuleType, tmp_path: Path) -> None:
    commands = {
        Piece("alone", 600, gpus=2): [f"test -e {tmp_path}/one"],
        Piece("one", 600, gpus=2, shares=True): [MEET.format(tmp_path, "one", "other")],
        Piece("other", 600, gpus=2, shares=True): [MEET.format(tmp_path, "other", "one")],
    }
    ended, said = run(schedule, commands, tmp_path)
    assert set(ended.values()) == {(0, False)}
    assert [line.split()[1] for line in said] == ["one", "other", "alone"]


def test_a_failure_stops_neither_the_next_command_nor_the_next_part(schedule: ModuleType, tmp_path: Path) -> None:
    commands = {Piece("bad", 600): ["exit 3", "echo went on", "exit 4"], Piece("good", 600): ["true"]}
    ended, _ = run(schedule, commands, tmp_path)
    assert ended == {"bad": (3, False), "good": (0, False)}
    assert "went on" in (tmp_path / "bad.log").read_text()


def test_a_part_that_outlasts_its_time_ends_with_all_its_processes(
    schedule: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its group, one of a session of its own, and one that takes no notice of being told to end."""
    pids = tmp_path / "pids"

    def later() -> float:
        """The clock, which goes on by half an hour when the part has started them all."""
        has_begun = pids.exists() and len(pids.read_text().splitlines()) == 3
        return time.monotonic() + (1800 if has_begun else 0)

    monkeypatch.setattr(schedule, "GRACE_S", 0.2)
    monkeypatch.setattr(schedule, "time", SimpleNamespace(monotonic=later, sleep=time.sleep))
    command = (
        f"echo so far; trap '' TERM; sleep 1000 & echo $! >> {pids}; setsid sleep 1000 & echo $! >> {pids}; "
        f"echo $$ >> {pids}; wait; sleep 1000"
    )
    commands = {Piece("long", 600): [command, "echo never"], Piece("next", 600): ["true"]}
    ended, _ = run(schedule, commands, tmp_path, seconds=7200)
    assert ended["long"][1] and ended["long"][0] != 0 and ended["next"] == (0, False)
    log = (tmp_path / "long.log").read_text()
    assert "\nso far\n" in log and "(ended after " in log and "\nnever" not in log
    assert len(pids.read_text().split()) == 3
    assert all_end([int(pid) for pid in pids.read_text().split()])


def test_what_does_not_fit_the_rest_is_said_and_skipped(schedule: ModuleType, tmp_path: Path) -> None:
    ended, said = run(schedule, {Piece("huge", 1000): ["true"], Piece("small", 20): ["true"]}, tmp_path, seconds=30)
    assert ended == {"small": (0, False)}
    assert said[0] == "skipped huge: it takes about 1000 s, and 30 s are left"


def test_an_interrupt_ends_what_runs(schedule: ModuleType, tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def interrupt(text: str) -> None:
        if text.startswith("begins second"):
            assert comes_within(60, lambda: pid.exists() and pid.read_text().endswith("\n"))
            raise KeyboardInterrupt

    commands = {"first": [f"echo $$ > {pid}; sleep 1000"], "second": ["true"]}
    started = schedule.run(
        [Piece("first", 600), Piece("second", 600)], ["0", "1"], 3600, tmp_path,
        lambda part, _: commands[part.name], os.environ, interrupt,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        list(started)
    assert all_end([int(pid.read_text())])


def test_the_whole_script(
    reproduce: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A JSON line in a log becomes a row; a part without the time, and one without its GPUs, are said."""
    tiny = reproduce.Part(
        name="tiny", page="runtime.md", seconds=60, headline="root", gpus=2, widens=True,
        commands=("echo root $(test -d moe_ep && echo yes) {gpus} {commit}",
                  "echo '{{\"to\": \"'{rows}' x{recorded}\"}}'", "exit 3"),
    )  # fmt: skip
    large = reproduce.Part(name="large", page="runtime.md", seconds=3600, commands=("true",))
    eight = reproduce.Part(name="eight", page="runtime.md", seconds=1, commands=("true",), gpus=8)
    monkeypatch.setattr(reproduce, "PARTS", (large, eight, tiny))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,5")
    (tmp_path / "r.npz").touch()
    options = ["--seconds", "100", "--out", str(tmp_path), "--commit", "abc", "--routing", str(tmp_path / "r.npz")]
    assert reproduce.main(options) == 1
    shown = capsys.readouterr().out
    assert "left out: eight: it takes 8 GPUs of 3\n" in shown
    assert "left out: large: it does not fit the 100 s\n" in shown
    assert "tiny: root yes 3 --commit abc\n" in shown
    assert json.loads((tmp_path / "tiny.jsonl").read_text()) == {"to": "tiny.jsonl x,r.npz"}
    (summary,) = map(json.loads, (tmp_path / "summary.jsonl").read_text().splitlines())
    assert [summary[key] for key in ("part", "rc", "rows", "gpus", "outlasted")] == ["tiny", 3, 1, 3, False]

    # What failed runs again, and its rows are the new ones; what ended well does not.
    resume = ["--resume", "--seconds", "100", "--out", str(tmp_path)]
    monkeypatch.setattr(reproduce, "PARTS", (replace(tiny, commands=tiny.commands[:2]),))
    assert reproduce.main(resume) == 0
    assert len((tmp_path / "tiny.jsonl").read_text().splitlines()) == 1
    capsys.readouterr()
    assert reproduce.main(resume) == 0
    assert "left out: tiny: it has ended well" in capsys.readouterr().out


def test_tests_are_counted_and_lines_shown(reproduce: ModuleType, schedule: ModuleType, tmp_path: Path) -> None:
    args = reproduce.parse(["--out", str(tmp_path)])
    part = reproduce.Part(name="p", page="runtime.md", seconds=1, commands=(), headline="^result")
    log = "tests/a.py::test_b[4-fp8 rows] PASSED [ 1%]\ntests/a.py::test_c FAILED\nresult 7\n{not json\n"
    log += "[gw2] [ 12%] PASSED tests/a.py::test_d[x y] \ntests/a.py::test_d[x y] \n"
    (tmp_path / "p.log").write_text(log)
    row = reproduce.results(schedule.Ended("p", 1, 2.0, 3.0, False), part, args)
    assert (row["tests"], row["headlines"], row["rows"]) == ({"passed": 2, "failed": 1}, ["result 7"], 0)


def test_what_is_not_there_is_said(reproduce: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    args = reproduce.parse(["--texts", __file__])
    parts = {part.name: part for part in reproduce.PARTS}
    monkeypatch.setattr(reproduce, "is_installed", lambda module: module not in ("ray", "humming"))
    assert reproduce.lacks(parts["scaling-ray"], args, 2) == ["ray is not installed"]
    assert reproduce.lacks(parts["run"], args, 1) == ["it takes 2 GPUs of 1", "--model was not given"]
    assert reproduce.lacks(parts["gemm"], args, 1) == [] and reproduce.peers(args) == ["torch"]
    assert {part.name for part in reproduce.chosen("tests-2,gemm")} == {
        "tests-2-nvshmem", "tests-2-layer", "tests-2-dispatch", "tests-2-runs", "gemm"
    }  # fmt: skip
    with pytest.raises(SystemExit, match="--parts nothing: no part is named so"):
        reproduce.chosen("nothing")


def test_commands_are_taken_by_what_they_start(reproduce: ModuleType, tmp_path: Path) -> None:
    given = {name: tmp_path / name for name in ("model", "texts", "prompts", "routing", "vllm-library")}
    for path in given.values():
        path.touch()
    options = [word for name, path in given.items() for word in (f"--{name}", str(path))]
    args = reproduce.parse(["--out", str(tmp_path), "--commit", "abc", *options])
    for part in reproduce.PARTS:
        for command in reproduce.commands_of(args, part, 60):
            words = shlex.split(command)
            script = next((word for word in words if word.startswith("scripts/")), None)
            if "moe_ep.launch" in words:
                make_parser().parse_args(words[words.index("moe_ep.launch") + 1 :])
            elif script == "scripts/bench_ep_scaling.py":
                make_parser().parse_args(["bench", "scaling", *words[words.index(script) + 1 :]])
            elif script is not None:
                source = (ROOT / script).read_text() + (ROOT / "scripts/harness.py").read_text()
                flags = [word[2:] for word in words[words.index(script) :] if word.startswith("--")]
                known = (flag in GANG or flag in source or flag.replace("-", "_") in source for flag in flags)
                assert all(known), command


def test_every_test_that_needs_gpus_and_every_page_has_a_part(reproduce: ModuleType) -> None:
    named = " ".join(command for part in reproduce.PARTS for command in part.commands)
    files = set(re.findall(r"tests/\w+/test_\w+\.py", named))
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu|needs_gpu|pytestmark.*gpu", file.read_text()) and file != Path(__file__)
    }
    assert marked <= files
    assert all((ROOT / file).exists() for file in files)
    benchmarks = ROOT / "docs" / "benchmarks"
    assert {part.page for part in reproduce.PARTS} <= {
        str(page.relative_to(benchmarks)) for page in benchmarks.rglob("*.md")
    }
    measuring = {script.name for script in SCRIPTS.glob("bench_*.py")} | {
        "soak_nvshmem.py",
        "sanitize.sh",
        "perplexity.py",
    }
    assert measuring <= set(re.findall(r"scripts/(\w+\.\w+)", named))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds", "nan"], "--seconds is nan; it must be a number above 0"),
        (["--model", "/not/there"], "--model is '/not/there'; it must be there, and is not"),
        (["--parts", "repack", "--out", __file__], f"--out is '{__file__}'; no such folder can be made (File exists)"),
    ],
)
def test_options_that_are_refused(
    options: list[str],
    message: str,
    reproduce: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(reproduce, "is_installed", lambda module: True)
    with pytest.raises(SystemExit) as ended:
        reproduce.main(options)
    assert message in f"{ended.value.code} {capsys.readouterr().err}"

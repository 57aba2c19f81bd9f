"""What a command found reaches people and files, each also where the other cannot be written."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import pytest

from moe_ep.bench.results import append_line, read_lines
from moe_ep.launch.cli.generate_report import CompletionLines
from moe_ep.launch.cli.main import main
from moe_ep.launch.cli.outputs import tell
from tests.full_disk import files_of_at_most

PLAN = ["plan", "--gpus", "8", "--tokens", "1"]
SIMULATE = ["eplb", "simulate", "--experts", "16", "--top-k", "2", "--layers", "1", "--steps", "2",
            "--step-tokens", "32", "--policies", "linear", "--rules", "levelled"]  # fmt: skip


@pytest.mark.parametrize(("command", "shown"), [(PLAN, "deepseek-v3, bf16 rows"), (SIMULATE, "linear  levelled")])
def test_a_file_that_cannot_be_written_leaves_the_table(
    command: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--json", "/dev/full"]) == 1
    output = capsys.readouterr()
    assert shown in output.out
    assert output.err.endswith(": [Errno 28] No space left on device: '/dev/full'\n") and output.err.count("\n") == 1


@pytest.mark.parametrize("command", [PLAN, SIMULATE])
def test_the_file_is_written_where_nobody_reads_the_table(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        assert main([*command, "--json", str(tmp_path / "rows.jsonl")]) == 141
    assert capsys.readouterr().err == ""
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row


def test_without_a_file_no_lines_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    def lines() -> list[str]:
        raise AssertionError("asked for")

    tell("a table", None, lines)
    assert capsys.readouterr().out == "a table\n"


def test_a_full_disk_is_said_of_the_file_that_lines_are_added_to() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        append_line(Path("/dev/full"), {"a": 1})


def test_a_row_that_a_disk_has_no_room_for_is_left_out_whole(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    with files_of_at_most(100), pytest.raises(OSError, match=f"File too large: '{file}'"):
        for index in range(2):
            append_line(file, {"index": index, "text": "x" * 60})
    assert [row["index"] for row in read_lines(file)] == [0]


def test_a_last_line_without_its_end_is_not_joined_with_what_is_added(tmp_path: Path) -> None:
    cut, whole = tmp_path / "cut.jsonl", tmp_path / "whole.jsonl"
    cut.write_text('{"GPUs": 8, "T')
    whole.write_text('{"GPUs": 8}')
    append_line(cut, {"GPUs": 16})
    assert main([*PLAN, "--json", str(cut)]) == main([*PLAN, "--json", str(whole)]) == 0
    _, *added = cut.read_text().splitlines()
    assert [json.loads(line)["GPUs"] for line in added] == [16, 8]
    assert [row["GPUs"] for row in read_lines(whole)] == [8, 8]


def test_a_full_stdout_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("moe_ep.launch.cli.commands.doctor.main", lambda args: print("a line") or 0)
    for command in (["doctor"], PLAN):
        full = open("/dev/full", "w")  # noqa: SIM115
        monkeypatch.setattr("sys.stdout", full)
        assert main(command) == 1
        assert capsys.readouterr().err.endswith(": [Errno 28] No space left on device: 'stdout'\n")
        with contextlib.suppress(OSError):  # what is buffered fails once more
            full.close()


def test_an_output_without_some_letters_gets_escapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with an old locale; file names are shown, and a file whose name is not even text."""
    found = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", found)
    monkeypatch.setattr("moe_ep.launch.cli.commands.plan.main", lambda args: print("größer 模 \udcff") or 0)
    assert main(["plan"]) == 0
    found.seek(0)
    assert found.read() == r"gr\xf6\xdfer \u6a21 \udcff" + "\n"


@pytest.mark.parametrize(("encoding", "raw"), [("ascii", False), ("utf-8", True)])
def test_completions_stay_json_in_every_encoding(encoding: str, raw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", found)
    lines = CompletionLines([{"prompt": "größer"}], None)
    lines.take({"index": 0, "text": "😀 模 \ud83d"})
    lines.close()
    found.seek(0)
    written = found.read()
    assert json.loads(written) == {"prompt": "größer", "kind": "completion", "index": 0, "text": "😀 模 \ud83d"}
    assert ("模" in written) == raw

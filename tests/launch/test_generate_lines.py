"""The lines of a generation: in the order of the prompts, from all ranks, and none lost where it ends early."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from moe_ep.launch.cli.generate_report import CompletionLines, CompletionRelay
from moe_ep.launch.gangs import progress
from tests.full_disk import files_of_at_most
from tests.ranks import ranks


def test_lines_are_written_in_order_as_they_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("of another run\n")
    for to in (output, None):
        lines = CompletionLines([{"prompt": name} for name in "abc"], to)

        def written(to: Path | None = to) -> list[str]:
            text = capsys.readouterr().out if to is None else to.read_text()
            return [json.loads(line).get("prompt", "summary") for line in text.splitlines()]

        lines.take({"index": 2, "text": "z"})
        assert output.read_text() == "of another run\n" or to is None
        lines.take({"index": 0, "text": "x"})
        assert written() == ["a"]
        for index in (0, 1, 2):
            lines.take({"index": index, "text": "y"})
        assert written() == (["b", "c"] if to is None else ["a", "b", "c"])
        lines.end({"kind": "summary"})
        assert written()[-1] == "summary"
    assert [json.loads(line).get("text") for line in output.read_text().splitlines()] == ["x", "y", "z", None]
    full = CompletionLines([{"prompt": "a"}], Path("/dev/full"))
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        full.take({"index": 0})
    full.close()
    assert full.num_written == 0


def test_a_line_that_a_disk_has_no_room_for_is_left_out_whole(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    lines = CompletionLines([{"prompt": name} for name in "ab"], file)
    with files_of_at_most(100), pytest.raises(OSError, match=f"File too large: '{file}'"):
        for index in range(2):
            lines.take({"index": index, "text": "x" * 20})
    lines.close()
    assert json.loads(file.read_text())["prompt"] == "a" and lines.num_written == 1


def test_a_terminal_gets_its_lines_also_where_it_ends_early(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = CompletionLines([{"prompt": name} for name in "ab"], None)
    lines.take({"index": 0})
    assert capsys.readouterr().out == ""
    lines.close()
    lines.close()
    assert json.loads(capsys.readouterr().out)["prompt"] == "a"


def relayed(rank: int, world_size: int) -> list[int]:
    """What rank 0 hands over, as it collects it."""
    relay, seen = CompletionRelay(rank, 6), []
    progress.set_receiver(lambda completion: seen.append(completion["index"]))
    for step in range(3):
        if step < 2:
            relay.leave({"index": 10 * rank + step})
        torch.distributed.barrier()
        relay.collect([min(step + 1, 2)] * world_size)
        torch.distributed.barrier()
    progress.set_receiver(None)
    return seen


def test_completions_of_all_ranks_come_to_rank_0() -> None:
    assert ranks(3).run(relayed) == [[0, 10, 20, 1, 11, 21], [], []]

"""Writes the JSON lines of a generation in the order of the prompts, while it runs."""

from __future__ import annotations

import codecs
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from moe_ep.files import naming, parse_json, write_whole
from moe_ep.launch.cli.outputs import show
from moe_ep.launch.gangs import progress

# Fields of an output line that may replace those of its prompt.
_OUTPUT_FIELDS = frozenset(
    ("kind", "index", "text", "num_prompt_tokens", "num_tokens", "finish", "error", "rank", "logprobs", "tokens_hit")
)


@dataclass(frozen=True)
class Finished:
    """The lines that an output file already has, from an interrupted run.

    Attributes:
        lines: number of prompts, from the first one on.
        size: bytes of these lines.
        failures: lines without a completion.
    """

    lines: int = 0
    size: int = 0
    failures: int = 0

    @classmethod
    def read(cls, output: Path, prompts: Sequence[dict[str, Any]]) -> Finished:
        """Counts the complete lines of prompts in an output file, without its summary.

        Raises:
            ValueError: a line does not belong to its prompt.
        """
        lines = size = failures = 0
        for raw in output.read_bytes().splitlines(keepends=True) if output.is_file() else ():
            try:
                found = parse_json(raw)
            except ValueError:
                found = None
            if not raw.endswith(b"\n") or (isinstance(found, dict) and found.get("kind") == "summary"):
                break
            if not _is_line_of(found, lines, prompts):
                raise ValueError(f"its line {lines + 1} is not that of prompt {lines}; write to another file")
            failures += found.get("finish") in ("refused", "failed")
            lines, size = lines + 1, size + len(raw)
        return cls(lines, size, failures)


def _is_line_of(found: Any, index: int, prompts: Sequence[dict[str, Any]]) -> bool:
    if index >= len(prompts) or not isinstance(found, dict):
        return False
    wanted = {name: value for name, value in prompts[index].items() if name not in _OUTPUT_FIELDS}
    return (found.get("kind"), found.get("index")) == ("completion", index) and wanted.items() <= found.items()


class CompletionLines:
    """Writes a line for each prompt as soon as those before it are written, and a summary at the end.

    An interrupted run leaves complete lines. A terminal gets all lines at the end, when the progress bar is gone.

    Args:
        prompts: the fields of each prompt's line, which the output repeats.
        output: the file, or None for stdout.
        finished: lines of the file to keep; the others are replaced.
    """

    def __init__(self, prompts: Sequence[dict[str, Any]], output: Path | None, finished: Finished = Finished()) -> None:
        self.num_written = self._num_told = finished.lines
        self._prompts, self._output, self._finished = prompts, output, finished
        self._waiting: dict[int, dict[str, Any]] = {}
        self._file: FileIO | None = None
        # Escape letters that the encoding of stdout lacks.
        self._in_ascii = output is None and codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8"
        self._held: list[str] | None = [] if output is None and sys.stdout.isatty() else None

    def take(self, completion: dict[str, Any]) -> None:
        """Takes the result of a prompt, in any order; a second one for the same prompt is ignored."""
        if completion["index"] < self._num_told:
            return
        self._waiting[completion["index"]] = completion
        while (found := self._waiting.pop(self._num_told, None)) is not None:
            line = self._prompts[self._num_told] | {"kind": "completion"} | found
            self._num_told += 1
            # UTF-8 cannot encode a lone surrogate; it becomes a JSON escape again.
            text = json.dumps(line, ensure_ascii=self._in_ascii)
            self._write(text.encode(errors="backslashreplace").decode())

    def end(self, summary: dict[str, Any]) -> None:
        """Writes the summary as the last line, and closes."""
        self._write(json.dumps(summary, allow_nan=False))
        self.close()

    def close(self) -> None:
        """Closes the file, or shows the lines that were held back. A second call does nothing."""
        if self._held:
            show("\n".join(self._held))
            self._held.clear()
        if self._file is not None:
            # A failed write has already been reported.
            with contextlib.suppress(OSError):
                self._file.close()

    def _write(self, line: str) -> None:
        if self._held is not None:
            self._held.append(line)
        elif self._output is None:
            show(line)
        else:
            self._to_file(self._output, line)

    def _to_file(self, output: Path, line: str) -> None:
        if self._file is None:
            # Stays open to the end: the reader of a pipe takes a close for the end.
            self._file = output.open("r+b" if self._finished.lines else "wb", buffering=0)
            if self._finished.lines:
                self._file.truncate(self._finished.size)
                self._file.seek(self._finished.size)
        with naming(output):
            write_whole(self._file, f"{line}\n")
        self.num_written += 1


class CompletionRelay:
    """Sends the completions of all ranks to rank 0, which hands them to the driver.

    A rank puts a completion into the job's store before it counts it as finished in a step, so the store holds all that
    a step counts.

    Args:
        refused: lines of the prompts that the model refuses, of all ranks.
    """

    def __init__(self, rank: int, num_prompts: int, refused: Sequence[dict[str, Any]] = ()) -> None:
        from moe_ep.distributed.store import rendezvous_store

        self._rank, self._num_prompts = rank, num_prompts - len(refused)
        if rank == 0:
            for told in refused:
                progress.hand_over(told)
        self._store = rendezvous_store()
        self._num_left = 0
        self._collected: dict[int, int] = {}

    def leave(self, completion: dict[str, Any]) -> None:
        """Passes on a completion of this rank."""
        if self._rank == 0:
            progress.hand_over(completion)
        else:
            self._store.set(self._key(self._rank, self._num_left), json.dumps(completion))
            self._num_left += 1

    def collect(self, finished: Sequence[int]) -> None:
        """Passes on the completions of other ranks, given how many sequences each rank has finished."""
        if self._rank != 0:
            return
        for rank, count in enumerate(finished[1:], start=1):
            for number in range(self._collected.get(rank, 0), count):
                key = self._key(rank, number)
                progress.hand_over(json.loads(self._store.get(key)))
                self._store.delete_key(key)
            self._collected[rank] = count
        progress.report("sequences", sum(finished), self._num_prompts)

    @staticmethod
    def _key(rank: int, number: int) -> str:
        return f"moe_ep/completion/{rank}/{number}"


class DirectRelay:
    """Hands completions to the driver from every rank of an elastic gang.

    Args:
        refused: lines of the prompts that the model refuses.
    """

    def __init__(self, num_prompts: int, refused: Sequence[dict[str, Any]]) -> None:
        self._num_prompts = num_prompts - len(refused)
        for told in refused:
            progress.hand_over(told)

    def leave(self, completion: dict[str, Any]) -> None:
        """Passes on a completion of this rank."""
        progress.hand_over(completion)

    def collect(self, finished: Sequence[int]) -> None:
        """Shows progress, given how many sequences each rank has finished."""
        progress.report("sequences", sum(finished), self._num_prompts)

"""Elastic commands as real processes, and what they are to write."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import transformers

from tests.generation.alone import continue_alone, load_alone
from tests.launch.jobs import LIMIT_S, all_end, session_pids

PROMPTS = ["def read(self, size):", "The list of", "import", "return None", "class", "for value in"]
NUM_TOKENS = 24


def texts_alone(model: Path) -> list[str]:
    """What the model says without any other rank."""
    alone, tokenizer = load_alone(model), transformers.AutoTokenizer.from_pretrained(model)
    return [continue_alone(alone, tokenizer, prompt, NUM_TOKENS) for prompt in PROMPTS]


def generating(model: Path, folder: Path, *options: str) -> tuple[list[str], Path]:
    """The command that continues the prompts, and its output."""
    prompts, output = folder / "prompts.txt", folder / "out.jsonl"
    prompts.write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    command = ["generate", "--model", str(model), "--prompts", str(prompts), "--output", str(output)]
    return [*command, "--batch-size", "2", "--max-new-tokens", str(NUM_TOKENS), *options], output


class Job:
    """An elastic command that writes JSON lines, with what it says on stderr."""

    def __init__(self, process: subprocess.Popen[str], output: Path) -> None:
        self.process, self._output = process, output
        self.said: list[str] = []
        self.pids: dict[int, int] = {}

    def until(self, pattern: str) -> None:
        """Reads on until a line that begins so."""
        for line in self.lines():
            if re.match(pattern, line):
                return
        raise AssertionError(f"{pattern} was not said: {''.join(self.said)}")

    def lines(self) -> Iterator[str]:
        assert self.process.stderr is not None
        # A gang that hangs is ended, and its test fails.
        ends = threading.Timer(LIMIT_S, os.killpg, (self.process.pid, signal.SIGKILL))
        ends.daemon = True
        ends.start()
        try:
            yield from self._read(self.process.stderr)
        finally:
            ends.cancel()

    def _read(self, stderr: IO[str]) -> Iterator[str]:
        for line in stderr:
            self.said.append(line)
            if found := re.match(r"rank (\d+): pid (\d+) on ", line):
                self.pids[int(found[1])] = int(found[2])
            yield line

    def end(self) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
        """The exit code, the lines of the prompts and the summary; no process of the job is left."""
        list(self.lines())
        code = self.process.wait(LIMIT_S)
        assert all_end(session_pids(self.process.pid))
        *lines, summary = [json.loads(line) for line in self._output.read_text().splitlines()]
        return code, lines, summary

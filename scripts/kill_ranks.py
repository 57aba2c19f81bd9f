"""Kills a worker of `moe-ep generate --elastic` at random moments, and records what the others make of it.

    python scripts/kill_ranks.py --launcher local ray torchrun --times 20 --json kills.jsonl

Each time a random rank gets SIGKILL at a random moment between the start of its process and the end of an undisturbed
generation. Every prompt must be answered once with the text of the undisturbed generation, the exit code be 0, and no
process and no shared memory be left; the script ends with exit code 1 where one was not so.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Bench

PROMPTS = ("def read(self, size):", "The list of", "import", "return None", "class", "for value in", "if not", "self.")
_LIMIT_S, _LEAVING_S = 300.0, 10.0


class Generation:
    """One command, in a session of its own.

    Attributes:
        pids: of its workers, by rank, once all have started.
    """

    def __init__(self, options: Sequence[str], ep_size: int, folder: Path) -> None:
        self._shared = set(os.listdir("/dev/shm"))
        self._output, prompts = folder / "completions.jsonl", folder / "prompts.txt"
        prompts.write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
        self._output.unlink(missing_ok=True)
        self._said = (folder / "stderr").open("w+")
        command = ["generate", "--elastic", "--prompts", str(prompts), "--output", str(self._output), *options]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moe_ep.launch", *command, "--ep-size", str(ep_size), "--device", "cpu"],
            stdout=subprocess.DEVNULL, stderr=self._said, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.pids: dict[int, int] = {}
        until = time.monotonic() + _LIMIT_S
        while len(self.pids) < ep_size and self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
            self.pids = {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d+): pid (\d+) on", self.said)}

    @property
    def said(self) -> str:
        """What it has said on stderr."""
        self._said.flush()
        return Path(self._said.name).read_text()

    def end(self) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
        """The exit code, the lines of the prompts, and the summary, empty where there is none."""
        code = self._process.wait(_LIMIT_S)
        lines = [json.loads(line) for line in self._output.read_text().splitlines()] if self._output.exists() else []
        summary = lines.pop() if lines and lines[-1]["kind"] == "summary" else {}
        return code, lines, summary

    def left(self) -> list[str]:
        """Processes and files of shared memory that it leaves."""
        until, found = time.monotonic() + _LEAVING_S, ["?"]
        while found and time.monotonic() < until:
            found = [f"process {pid}" for pid in self._session()] + sorted(set(os.listdir("/dev/shm")) - self._shared)
            time.sleep(0.05)
        return found

    def _session(self) -> list[int]:
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                if os.getsid(int(name)) == self._process.pid and state != "Z":
                    found.append(int(name))
        return found


def main() -> int:
    bench = Bench(__doc__)
    bench.parser.add_argument("--launcher", nargs="+", default=["local", "ray", "torchrun"])
    bench.parser.add_argument("--times", type=int, default=20, help="kills of each launcher")
    bench.parser.add_argument("--model", type=Path, help="checkpoint folder (default: the model of make run)")
    bench.parser.add_argument("--ep-size", type=int, default=4)
    bench.parser.add_argument("--max-new-tokens", type=int, default=128)
    options = bench.parse()
    common = ["--max-new-tokens", str(options.max_new_tokens), "--batch-size", "2"]
    common += ["--model", str(options.model)] if options.model else []
    chance, bad = random.Random(options.seed), 0
    about = {"model": options.model.name if options.model else "demo", "ep_size": options.ep_size}
    texts: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        for launcher in options.launcher:
            arguments = [*common, "--launcher", launcher]
            first = Generation(arguments, options.ep_size, Path(name))
            began = time.monotonic()
            code, lines, _ = first.end()
            span = time.monotonic() - began
            if code != 0 or first.left():
                sys.exit(f"an undisturbed generation ended with exit code {code}:\n{first.said}")
            texts = texts or [line["text"] for line in lines]
            rows = []
            for number in range(options.times):
                rank, moment = chance.randrange(options.ep_size), chance.uniform(0.0, span)
                job = Generation(arguments, options.ep_size, Path(name))
                time.sleep(moment)
                was_serving = "serving: " in job.said
                with contextlib.suppress(ProcessLookupError):
                    os.kill(job.pids[rank], signal.SIGKILL)
                code, lines, summary = job.end()
                row = about | {
                    "launcher": launcher, "rank": rank, "moment_s": round(moment, 3), "span_s": round(span, 3),
                    "was_serving": was_serving,
                    "exit_code": code, "texts_are_equal": [line["text"] for line in lines] == texts, "left": job.left(),
                    "recoveries": summary.get("recoveries", []),
                }  # fmt: skip
                rows.append(bench.keep(row))
                if code != 0 or not row["texts_are_equal"] or row["left"]:
                    bad += 1
                    print(f"{row}\n{job.said}", file=sys.stderr)
                print(f"{launcher} {number + 1} of {options.times}: {len(row['recoveries'])} lost", flush=True)
            show(launcher, rows)
    print(f"{bad} of {len(bench.rows)} went wrong")
    return 1 if bad else 0


def show(launcher: str, rows: Sequence[dict[str, Any]]) -> None:
    """The times of a launcher's recoveries from kills while the ranks served: before, they load the model first."""
    losses = [loss for row in rows if row["was_serving"] for loss in row["recoveries"]]
    parts = [f"{launcher}: {len(rows)} kills, {len(losses)} recoveries of ranks that served"]
    for key in ("detected_s", "serving_s", "covered_s") if losses else ():
        values = [loss[key] for loss in losses]
        parts.append(f"{key} median {statistics.median(values):.2f} most {max(values):.2f}")
    print("; ".join(parts))


if __name__ == "__main__":
    sys.exit(main())

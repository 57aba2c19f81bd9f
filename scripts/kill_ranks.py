"""Kills, adds and drains workers of `moe-ep generate --elastic` while they serve, and records the recoveries.

    python scripts/kill_ranks.py --launcher local ray torchrun --times 20 --json kills.jsonl
    python scripts/kill_ranks.py --launcher local --events 100 --ep-size 2 --max-ranks 4 --prompts 4000

--times N: in one generation per launcher, N times a random rank gets SIGKILL, each at a random moment after the full
gang began to serve. Between kills the gang grows to its size again: its launcher replaces the rank, or one is asked to
join. --events N: in one generation N random events, in which a rank joins, leaves or is killed, also while others do.

Every prompt must be answered once with the text of a generation without --elastic, the exit code must be 0, and no
process and no shared memory may be left; otherwise the script ends with exit code 1. Give enough --prompts for the
generation to last until the last event; the rows have the events that there were.
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
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import Bench

from moe_ep.errors import MoeEpError
from moe_ep.launch.gangs import control

PROMPTS = ("def read(self, size):", "The list of", "import", "return None", "class", "for value in", "if not", "self.")
_LIMIT_S, _LEAVING_S, _POLL_S = 300.0, 10.0, 0.02
# The longest pause between two events of --events.
_PAUSE_S = 1.5


class Generation:
    """One command, in a session of its own."""

    def __init__(self, options: Sequence[str], num_prompts: int, folder: Path) -> None:
        self._shared = set(os.listdir("/dev/shm"))
        self._output, prompts = folder / "completions.jsonl", folder / "prompts.txt"
        prompts.write_text("".join(f"{PROMPTS[number % len(PROMPTS)]}\n" for number in range(num_prompts)))
        self._output.unlink(missing_ok=True)
        self._said = (folder / "stderr").open("w+")
        command = ["generate", "--prompts", str(prompts), "--output", str(self._output), "--device", "cpu", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moe_ep.launch", *command], stdout=subprocess.DEVNULL, stderr=self._said,
            start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    @property
    def said(self) -> str:
        """Its stderr so far."""
        self._said.flush()
        return Path(self._said.name).read_text()

    @property
    def serving(self) -> list[int]:
        """The numbers of ranks that began to serve, in order."""
        return [int(count) for count in re.findall(r"^serving: (\d+) ranks", self.said, re.MULTILINE)]

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank that was started."""
        return {int(rank): int(pid) for rank, pid in re.findall(r"^rank (\d+): pid (\d+) on", self.said, re.MULTILINE)}

    @property
    def out(self) -> set[int]:
        """The ranks that were removed."""
        return {int(rank) for rank in re.findall(r"rank (\d+) is out", self.said)}

    def wait_for(self, has_come: Callable[[], bool]) -> bool:
        """Waits for a condition; false if the generation ends before."""
        until = time.monotonic() + _LIMIT_S
        while self.process.poll() is None and time.monotonic() < until:
            if has_come():
                return True
            time.sleep(_POLL_S)
        return False

    def ask(self, kind: str, rank: int = -1) -> str:
        """Asks the gang to let a rank join or leave, and waits until it has."""
        found = re.search(r"^control: (\S+)", self.said, re.MULTILINE)
        if found is None:
            raise RuntimeError("the gang has not said where it listens")
        return control.ask(found[1], None, kind, rank)

    def kill(self, rank: int) -> None:
        """Kills a rank's process, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGKILL)

    def end(self) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
        """Waits for the end; the exit code, the prompts' lines, and the summary, empty if there is none."""
        try:
            code = self.process.wait(4 * _LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            code = self.process.wait()
        lines = [json.loads(line) for line in self._output.read_text().splitlines()] if self._output.exists() else []
        summary = lines.pop() if lines and lines[-1]["kind"] == "summary" else {}
        return code, lines, summary

    def left(self) -> list[str]:
        """Processes and shared-memory files that remain."""
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
                if os.getsid(int(name)) == self.process.pid and state != "Z":
                    found.append(int(name))
        return found


def kill_while_serving(job: Generation, chance: random.Random, options: Any, launcher: str) -> list[dict[str, Any]]:
    """Kills ranks of a full gang; each kill with its moment in seconds since the gang was full."""
    kills: list[dict[str, Any]] = []
    present = set(range(options.ep_size))
    while len(kills) < options.times:
        before = len(job.serving)
        if not kills and not job.wait_for(lambda: bool(job.serving)):
            break
        moment = chance.uniform(0.0, options.within)
        time.sleep(moment)
        rank = chance.choice(sorted(present))
        if job.process.poll() is not None:
            break
        job.kill(rank)
        kills.append({"rank": rank, "moment_s": round(moment, 3)})
        if not job.wait_for(lambda rank=rank: rank in job.out):  # type: ignore[misc]
            break
        # Ray and torchrun replace lost ranks by themselves, three for each initial rank.
        if launcher == "local" or len(kills) > 3 * options.ep_size:
            with contextlib.suppress(MoeEpError):
                job.ask("join")
        if not job.wait_for(lambda before=before: options.ep_size in job.serving[max(before, 1) :]):  # type: ignore[misc]
            break
        present = set(job.pids) - job.out
        print(f"{launcher}: {len(kills)} of {options.times} kills", flush=True)
    return kills


def come_and_go(job: Generation, chance: random.Random, options: Any) -> Counter[str]:
    """Lets ranks join up to --max-ranks, leave down to --ep-size, and then makes random events; counts them by kind."""
    done: Counter[str] = Counter()
    present = set(range(options.ep_size))
    joining: list[Future[str]] = []
    first = ["join"] * (options.max_ranks - options.ep_size) + ["leave"] * (options.max_ranks - options.ep_size)
    with ThreadPoolExecutor(options.max_ranks + 1) as threads:
        job.wait_for(lambda: bool(job.serving))
        while sum(done.values()) < options.events and job.process.poll() is None:
            kind = first.pop(0) if first else None
            if kind is None:
                time.sleep(chance.uniform(0.0, _PAUSE_S))
            for asked in [asked for asked in joining if asked.done() or kind == "leave"]:
                joining.remove(asked)
                with contextlib.suppress(MoeEpError):
                    present.add(int(asked.result().split()[1]))
            if kind is None:
                kinds = ["join"] if len(present) + len(joining) < options.max_ranks else []
                kind = chance.choice(kinds + ["leave", "kill"] * (len(present) > 1))
            if kind == "join":
                joining.append(threads.submit(job.ask, "join"))
            else:
                rank = chance.choice(sorted(present))
                present.remove(rank)
                if kind == "kill":
                    job.kill(rank)
                else:
                    try:
                        job.ask("leave", rank)
                    except MoeEpError as error:  # the rank was lost meanwhile, or the gang has ended
                        print(f"leave {rank}: {error}", flush=True)
                        kind = "leave refused"
                        if rank not in job.out:
                            present.add(rank)
            done[kind] += 1
            print(f"event {sum(done.values())}: {kind}, {len(present)} present, {len(joining)} joining", flush=True)
    return done


def main() -> int:
    bench = Bench(__doc__)
    bench.parser.add_argument("--launcher", nargs="+", default=["local", "ray", "torchrun"])
    bench.parser.add_argument("--times", type=int, default=20, help="kills in the generation of each launcher")
    bench.parser.add_argument("--within", type=float, default=2.0, help="seconds after the gang is whole, at most")
    bench.parser.add_argument("--events", type=int, default=0, help="joins, leaves and kills, in place of --times")
    bench.parser.add_argument("--model", type=Path, help="checkpoint folder (default: the model of make run)")
    bench.parser.add_argument("--ep-size", type=int, default=4)
    bench.parser.add_argument("--max-ranks", type=int, help="default: --ep-size")
    bench.parser.add_argument("--prompts", type=int, default=1000)
    bench.parser.add_argument("--max-new-tokens", type=int, default=128)
    options = bench.parse()
    options.max_ranks = options.max_ranks or options.ep_size
    common = ["--max-new-tokens", str(options.max_new_tokens), "--batch-size", "2"]
    common += ["--model", str(options.model)] if options.model else []
    chance, bad = random.Random(options.seed), 0
    about = {"model": options.model.name if options.model else "demo", "ep_size": options.ep_size}
    with tempfile.TemporaryDirectory() as name:
        alone = Generation([*common, "--launcher", "local", "--ep-size", "1"], len(PROMPTS), Path(name))
        code, lines, _ = alone.end()
        if code != 0:
            sys.exit(f"a generation without --elastic ended with exit code {code}:\n{alone.said}")
        texts = [lines[number % len(PROMPTS)]["text"] for number in range(options.prompts)]
        for launcher in options.launcher:
            arguments = [*common, "--elastic", "--launcher", launcher, "--ep-size", str(options.ep_size)]
            job = Generation([*arguments, "--max-ranks", str(options.max_ranks)], options.prompts, Path(name))
            if options.events:
                events = dict(come_and_go(job, chance, options))
                rows: list[dict[str, Any]] = [{"events": events, "num_events": sum(events.values())}]
            else:
                rows = kill_while_serving(job, chance, options, launcher)
            code, lines, summary = job.end()
            recoveries = summary.get("recoveries", [])
            found = {
                "launcher": launcher, "exit_code": code, "left": job.left(), "prompts": options.prompts,
                "texts_are_equal": [line["text"] for line in lines] == texts, "elapsed_s": summary.get("elapsed_s"),
            }  # fmt: skip
            if options.events:
                rows[0]["recoveries"] = recoveries
            else:
                known = {loss["rank"]: loss for loss in recoveries}
                rows = [row | {"recovery": known.get(row["rank"])} for row in rows]
            for row in rows:
                bench.keep(about | row | found)
            if code != 0 or not found["texts_are_equal"] or found["left"]:
                bad += 1
                print(f"{found}\n{job.said}", file=sys.stderr)
            show(launcher, rows, recoveries)
    print(f"{bad} of {len(options.launcher)} generations went wrong")
    return 1 if bad else 0


def show(launcher: str, rows: Sequence[dict[str, Any]], recoveries: Sequence[dict[str, Any]]) -> None:
    """Prints the times of a launcher's recoveries."""
    parts = [f"{launcher}: {rows[0].get('events', f'{len(rows)} kills')}, {len(recoveries)} recoveries" if rows else ""]
    for key in ("detected_s", "serving_s", "covered_s"):
        values = [loss[key] for loss in recoveries if loss.get(key) is not None]
        if values:
            parts.append(f"{key} median {statistics.median(values):.2f} most {max(values):.2f}")
    print("; ".join(parts), flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Kills, adds and drains workers of `moe-ep generate --elastic` while they serve, and records the recoveries.

    python scripts/kill_ranks.py --launcher local ray torchrun --times 20 --json kills.jsonl
    python scripts/kill_ranks.py --launcher local --events 100 --ep-size 2 --max-ranks 4 --prompts 4000
    python scripts/kill_ranks.py --device cuda --geometry qwen3-30b --layers 12 --times 3 --ep-size 2
    python scripts/kill_ranks.py --device cuda --geometry qwen3-30b --layers 12 --steps
    python scripts/kill_ranks.py --device cuda --geometry qwen3-30b --layers 2 --agents 8 --at-once 3 --times 3

--times N: in one generation per launcher, N times a random rank gets SIGKILL, each at a random moment after the full
gang began to serve. Between kills the gang grows to its size again: its launcher replaces the rank, or one is asked to
join. --at-once K kills as many together. --events N: in one generation N random events, in which a rank joins, leaves
or is killed, also while others do. --steps: the step times of `moe-ep run --elastic` of one rank, while a second one
joins and leaves again. --agents N: the ranks are those of N agents of `torchrun` on this machine, one for each, which
may share a GPU.

With --geometry the model has made weights in real sizes, and a row has the time of a plain read of the bytes that the
ranks read again. Texts are compared with those of a generation without --elastic where the arithmetic is the same, on
CPUs.

Every prompt must be answered once, the exit code must be 0, and no process and no shared memory may be left; otherwise
the script ends with exit code 1. What hangs is ended with the Python stacks of its processes. Give enough --prompts for
the generation to last until the last event; the rows have the events that there were.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import Bench, checked, device_name, positive
from loading_checkpoints import FORMATS, GEOMETRIES, make_checkpoint

from moe_ep.checkpoint import CheckpointReader
from moe_ep.checkpoint.demo import demo_checkpoint
from moe_ep.env import at_least
from moe_ep.errors import MoeEpError
from moe_ep.launch.cli.report import percentile
from moe_ep.launch.gangs import control

PROMPTS = ("def read(self, size):", "The list of", "import", "return None", "class", "for value in", "if not", "self.")
LAUNCHERS = ("local", "ray", "torchrun")
_LIMIT_S, _LEAVING_S, _POLL_S = 300.0, 10.0, 0.02
# In which processes that are aborted write their stacks (PYTHONFAULTHANDLER).
_STACKS_S = 1.0
# The longest pause between two events of --events.
_PAUSE_S = 1.5
_EXPERTS = 128
# Lines of the gang's stderr that are shown of one that failed.
_TAIL = 80
_jobs: list[Job] = []


class Job:
    """One command, or one of each agent, in a session of its own.

    Args:
        agents: as many torchrun agents of one rank each; 0 for one command.
    """

    def __init__(self, folder: Path, *command: str, agents: int = 0) -> None:
        self._shared = set(os.listdir("/dev/shm"))
        self._outputs = [folder / f"output.{number}" for number in range(max(agents, 1))]
        for output in self._outputs:
            output.unlink(missing_ok=True)
        self._said = (folder / "stderr").open("w+")
        more: list[str] = []
        if agents:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
            more = ["--launcher", "torchrun", "--nnodes", str(agents), "--rdzv-endpoint", endpoint]
        which = "--json" if command[0] == "run" else "--output"
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "moe_ep.launch", *command, *more, which, str(output)],
                stdout=subprocess.DEVNULL, stderr=self._said, start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
            )
            for output in self._outputs
        ]  # fmt: skip
        self.process = self._processes[0]
        _jobs.append(self)

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
        """Waits for a condition; false if the command ends before."""
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

    def kill(self, *ranks: int) -> float:
        """Kills the processes of ranks, if they have not ended; the time, seconds since 1970."""
        pids = self.pids
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGKILL)
        return time.time()

    def end(self, limit_s: float = 4 * _LIMIT_S) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
        """Waits for the end; the exit code, the lines of the output, and the summary, empty if there is none."""
        until = time.monotonic() + limit_s
        for process in self._processes:
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        code = max(abs(process.returncode) for process in self._processes)
        texts = [output.read_text() for output in self._outputs if output.exists()]
        lines = [json.loads(line) for line in max(texts, key=len, default="").splitlines()]
        summary = lines.pop() if lines and lines[-1]["kind"] == "summary" else {}
        return code, lines, summary

    def give_up(self) -> None:
        """Ends the processes, if the command has not ended, and shows the end of stderr and their Python stacks."""
        if any(process.poll() is None for process in self._processes):
            print(self.tail, file=sys.stderr)
            num_said = len(self.said)
            for number in (signal.SIGABRT, signal.SIGKILL):
                for pid in self._session():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(_STACKS_S)
            print(self.said[num_said:], file=sys.stderr)

    @property
    def tail(self) -> str:
        """The last lines of its stderr."""
        return "\n".join(self.said.splitlines()[-_TAIL:])

    def left(self) -> list[str]:
        """Processes and shared-memory files that remain."""
        until, found = time.monotonic() + _LEAVING_S, ["?"]
        while found and time.monotonic() < until:
            files = sorted(set(os.listdir("/dev/shm")) - self._shared)
            found = [f"process {pid}" for pid in self._session()] + [
                name for name in files if not self._is_of_others(name)
            ]
            time.sleep(0.05)
        return found

    def _is_of_others(self, name: str) -> bool:
        """Whether a shared-memory file is a semaphore of joblib that another job's process made, as its name says."""
        made_by = re.match(r"sem\.loky-(\d+)-", name)
        return made_by is not None and int(made_by[1]) not in self.pids.values()

    def _session(self) -> list[int]:
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                sessions = [process.pid for process in self._processes]
                if os.getsid(int(name)) in sessions and state != "Z":
                    found.append(int(name))
        return found


def kill_while_serving(job: Job, chance: random.Random, options: Any, launcher: str) -> list[dict[str, Any]]:
    """Kills ranks of a full gang; each kill with its moment in seconds since the gang was full."""
    kills: list[dict[str, Any]] = []
    present = set(range(options.ep_size))
    for number in range(options.times):
        before = len(job.serving)
        if not kills and not job.wait_for(lambda: bool(job.serving)):
            break
        moment = chance.uniform(options.after, options.within)
        time.sleep(moment)
        ranks = chance.sample(sorted(present), options.at_once)
        if job.process.poll() is not None:
            break
        job.kill(*ranks)
        kills += [{"rank": rank, "moment_s": round(moment, 3), "kill": number} for rank in ranks]
        if not job.wait_for(lambda ranks=ranks: job.out >= set(ranks)):  # type: ignore[misc]
            break
        # Ray and torchrun replace lost ranks by themselves, three for each initial rank.
        for _ in ranks if launcher == "local" or len(kills) > 3 * options.ep_size else ():
            try:
                job.ask("join")
            except MoeEpError as error:
                print(f"join: {error}", flush=True)
        if not job.wait_for(lambda before=before: options.ep_size in job.serving[max(before, 1) :]):  # type: ignore[misc]
            break
        present = set(job.pids) - job.out
        print(f"{time.strftime('%X')} {launcher}: {number + 1} of {options.times} kills", flush=True)
    return kills


def come_and_go(job: Job, chance: random.Random, options: Any) -> Counter[str]:
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
                kinds += ["leave", "kill"] * (len(present) > options.fewest)
                if not kinds:  # all others are still joining
                    continue
                kind = chance.choice(kinds)
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


def steps_of_one_rank(options: Any, common: Sequence[str], folder: Path) -> tuple[dict[str, Any], bool]:
    """Step times of a rank of `moe-ep run` alone, while another joins, with it, while it leaves, and alone again."""
    command = [
        "run", *common, "--elastic", *options.options.split(), "--launcher", "local", "--ep-size", "1",
        "--max-ranks", "2", "--no-verify", "--steps", "10000000", "--tokens-per-rank", str(options.batch_size),
    ]  # fmt: skip
    job = Job(folder, *command)
    moments = {}

    def pause(name: str) -> None:
        time.sleep(options.within)
        moments[name] = time.time()

    if job.wait_for(lambda: bool(job.serving)):
        moments["serves"] = time.time()
        pause("asked to join")
        job.ask("join")
        moments["joins"] = time.time()
        job.wait_for(lambda: job.serving[-1] == 2)
        moments["served by two"] = time.time()
        pause("asked to leave")
        job.ask("leave", 1)
        moments["left"] = time.time()
        job.wait_for(lambda: job.serving[-1] == 1)
        moments["served by one"] = time.time()
        pause("end")
        job.process.send_signal(signal.SIGINT)
    code, lines, _ = job.end(60.0)
    steps = {line["step"]: (line["ended_at"], line["step_ms"]) for line in lines}
    rows, names = {}, list(moments)
    for name, after in itertools.pairwise(names):
        times = [ms for at, ms in steps.values() if moments[name] <= at < moments[after]]
        rows[f"{name} .. {after}"] = {
            "seconds": round(moments[after] - moments[name], 3), "steps": len(times),
            "median_ms": percentile(times, 0.5), "p99_ms": percentile(times, 0.99), "most_ms": max(times, default=0.0),
        }  # fmt: skip
    for name, row in rows.items():
        print(f"{name:<34}", *(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
    left = job.left()
    is_bad = len(moments) < 7 or code not in (0, 130) or bool(left)
    if is_bad:
        print(f"exit code {code}, left {left}\n{job.tail}", file=sys.stderr)
    return {"steps": rows, "exit_code": code, "left": left}, not is_bad


def make_model(options: Any, folder: Path) -> Path:
    """A checkpoint in the sizes of --geometry with the demo checkpoint's tokenizer, unless the folder has one."""
    if (folder / "tokenizer.json").exists():
        return folder
    make_checkpoint(folder, options.format, options.geometry, options.layers, _EXPERTS, whole=True)
    for name in ("tokenizer_config.json", "generation_config.json", "tokenizer.json"):
        shutil.copy(demo_checkpoint() / name, folder / name)
    print(f"{time.strftime('%X')} made {options.geometry} {options.format}, {options.layers} layers", flush=True)
    return folder


def plain_read_s(folder: Path, num_bytes: int) -> float:
    """Seconds in which one thread reads that many bytes of experts from the files of a checkpoint, which are cached."""
    with CheckpointReader(folder) as reader:
        infos = [reader.info(name) for name in reader.names() if ".experts." in name]
    infos.sort(key=lambda info: (info.file, info.offset))
    left, into = num_bytes, memoryview(bytearray(max(info.nbytes for info in infos)))
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        files = {file: stack.enter_context(file.open("rb", buffering=0)) for file in {info.file for info in infos}}
        for info in infos:
            if left > 0:
                left -= os.preadv(files[info.file].fileno(), [into[: min(info.nbytes, left)]], info.offset)
    return time.perf_counter() - started


def main() -> int:
    bench = Bench(__doc__)
    add = bench.parser.add_argument
    add("--launcher", nargs="+", default=[*LAUNCHERS], choices=LAUNCHERS)
    add("--times", type=positive, default=20, help="kills in the generation of each launcher")
    add("--at-once", type=positive, default=1, help="ranks of each kill")
    add("--within", type=float, default=2.0, help="seconds after the gang is whole, at most")
    add("--after", type=float, default=0.0, help="and at least")
    add("--events", type=checked(at_least(0)), default=0, help="joins, leaves and kills, in place of --times")
    add("--fewest", type=positive, default=1, help="ranks that --events leaves at least")
    add("--steps", action="store_true", help="step times while a rank joins and leaves, in place of kills")
    add("--agents", type=checked(at_least(0)), default=0, help="agents of torchrun, of one rank each")
    add("--device", type=device_name, default="cpu")
    add("--model", type=Path, help="checkpoint folder (default: the model of make run)")
    add("--geometry", choices=GEOMETRIES, help="make a model of these sizes, in the folder --model if that is given")
    add("--format", choices=FORMATS, default="int4", help="of the experts that are made")
    add("--layers", type=positive, default=4)
    add("--ep-size", type=positive, default=4)
    add("--max-ranks", type=positive, help="default: --ep-size")
    add("--prompts", type=positive, default=1000)
    add("--max-new-tokens", type=positive, default=128)
    add("--batch-size", type=positive, default=2)
    add("--options", default="", help="more options of the elastic command, in one argument")
    options = bench.parse()
    options.ep_size = options.agents or options.ep_size
    options.max_ranks = options.max_ranks or options.ep_size
    options.launcher = ["torchrun"] if options.agents else options.launcher
    with tempfile.TemporaryDirectory() as name, showing_what_is_left():
        folder = Path(name)
        if options.geometry:
            options.model = make_model(options, options.model or folder / "model")
        common = ["--device", options.device]
        common += ["--model", str(options.model)] if options.model else []
        if options.steps:
            row, is_good = steps_of_one_rank(options, common, folder)
            bench.keep(about_model(options) | row)
            return 0 if is_good else 1
        bad = sum(not one_generation(bench, options, common, launcher, folder) for launcher in options.launcher)
    print(f"{bad} of {len(options.launcher)} generations went wrong")
    return 1 if bad else 0


def about_model(options: Any) -> dict[str, Any]:
    made = f"{options.geometry} {options.format}, {options.layers} layers" if options.geometry else None
    return {"model": made or (options.model.name if options.model else "demo"), "device": options.device}


def texts_alone(generate: Sequence[str], prompts: Path, folder: Path) -> list[str]:
    """The texts of PROMPTS of a generation without --elastic."""
    prompts.write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    job = Job(folder, *generate, "--launcher", "local", "--ep-size", "1")
    code, lines, summary = job.end()
    if code != 0:
        sys.exit(f"a generation without --elastic ended with exit code {code}:\n{job.tail}")
    print(f"{time.strftime('%X')} alone: {summary['step_ms']['decode']}", flush=True)
    return [line["text"] for line in lines]


def one_generation(bench: Bench, options: Any, common: Sequence[str], launcher: str, folder: Path) -> bool:
    """Kills ranks, or lets them come and go, in one generation; whether it went well."""
    chance = random.Random(options.seed)
    prompts = folder / "prompts.txt"
    generate = ["generate", *common, "--max-new-tokens", str(options.max_new_tokens)]
    generate += ["--batch-size", str(options.batch_size), "--prompts", str(prompts)]
    texts = texts_alone(generate, prompts, folder) if options.device == "cpu" else []
    prompts.write_text("".join(f"{PROMPTS[number % len(PROMPTS)]}\n" for number in range(options.prompts)))
    elastic = [
        "--elastic",
        *options.options.split(),
        "--ep-size",
        str(options.ep_size),
        "--max-ranks",
        str(options.max_ranks),
    ]
    elastic += [] if options.agents else ["--launcher", launcher]
    job = Job(folder, *generate, *elastic, agents=options.agents)
    if options.events:
        events = dict(come_and_go(job, chance, options))
        rows: list[dict[str, Any]] = [{"events": events, "num_events": sum(events.values())}]
    else:
        rows = kill_while_serving(job, chance, options, launcher)
    print(f"{time.strftime('%X')} the last event was made", flush=True)
    code, lines, summary = job.end()
    recoveries = summary.get("recoveries", [])
    equal = [line["text"] == texts[line["index"] % len(texts)] for line in lines if texts]
    found = {
        "ep_size": options.ep_size, "launcher": launcher, "agents": options.agents, "exit_code": code,
        "left": job.left(), "prompts": options.prompts, "answered": len(lines),
        "texts_equal": sum(equal) if texts else None,
        "elapsed_s": summary.get("elapsed_s"), "step_ms": summary.get("step_ms"), "backend": summary.get("backend"),
        "passes": summary.get("passes"),
    }  # fmt: skip
    if options.events:
        rows[0]["recoveries"] = recoveries
    else:
        known = {loss["rank"]: loss for loss in recoveries}
        rows = [row | {"recovery": known.get(row["rank"])} for row in rows]
        for row in rows if options.geometry else ():
            if row["recovery"] and row["recovery"]["bytes_read"]:
                row["plain_read_s"] = plain_read_s(options.model, row["recovery"]["bytes_read"])
    for row in rows:
        bench.keep(about_model(options) | row | found)
    is_good = code == 0 and len(lines) == options.prompts and all(equal) and not found["left"]
    if not is_good:
        print(f"{found}\n{job.tail}", file=sys.stderr)
    show(launcher, rows, recoveries)
    print(
        f"answered {len(lines)} of {options.prompts}, texts equal {found['texts_equal']}, exit code {code}; "
        f"{found['step_ms']}"
    )
    return is_good


def show(launcher: str, rows: Sequence[dict[str, Any]], recoveries: Sequence[dict[str, Any]]) -> None:
    """Prints the times of a launcher's recoveries."""
    parts = [f"{launcher}: {rows[0].get('events', f'{len(rows)} kills')}, {len(recoveries)} recoveries" if rows else ""]
    for key in ("detected_s", "serving_s", "covered_s"):
        values = [loss[key] for loss in recoveries if loss.get(key) is not None]
        if values:
            parts.append(f"{key} median {statistics.median(values):.2f} most {max(values):.2f}")
    print("; ".join(parts), flush=True)
    for row in rows:
        print({key: value for key, value in row.items() if key != "recoveries"}, flush=True)


@contextlib.contextmanager
def showing_what_is_left() -> Iterator[None]:
    """Gives up the commands that a block which fails has not waited for."""
    try:
        yield
    finally:
        for job in _jobs:
            job.give_up()


if __name__ == "__main__":
    sys.exit(main())

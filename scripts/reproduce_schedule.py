"""When parts run and on which GPUs, and that none runs past its time, for scripts/reproduce.py."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reproduce_parts import Part

from moe_ep.launch.gangs.processes import children, end_trees

ROOT = Path(__file__).resolve().parents[1]
# A part may take so many times what it is said to take.
SLACK = 1.5
# Parts that share one GPU at most.
SEATS = 3
# Seconds that a part has to end by itself once it was told to, before it is killed.
GRACE_S = 5.0


# The longest first, after or before those that share GPUs, or wherever they are.
_ORDERS: tuple[Callable[[Part], tuple[bool, float]], ...] = (
    lambda part: (not part.shares, -part.seconds),
    lambda part: (False, -part.seconds),
    lambda part: (part.shares, -part.seconds),
)


def in_turn(parts: Sequence[Part], num_gpus: int) -> list[Part]:
    """The order in which parts begin: those of few GPUs first, and of as many in the order that ends first."""
    widths = sorted({part.gpus for part in parts})
    orders = (
        [
            part
            for width, order in zip(widths, chosen, strict=True)
            for part in sorted((part for part in parts if part.gpus == width), key=order)
        ]
        for chosen in itertools.product(_ORDERS, repeat=len(widths))
    )
    return min(orders, key=lambda order: _end(_begins(order, num_gpus)))


def begins(parts: Sequence[Part], num_gpus: int) -> list[tuple[Part, float]]:
    """Each part, in its turn, and the second it begins at if all take the time that they are said to take.

    A part begins when as many GPUs are free as it takes, and never before the part whose turn came before.

        one GPU: a 3 s, b 2 s, c 1 s; two GPUs: d 1 s; 2 GPUs:  GPU 0 aaad, GPU 1 bbcd
    """
    return _begins(in_turn(parts, num_gpus), num_gpus)


def _begins(order: Sequence[Part], num_gpus: int) -> list[tuple[Part, float]]:
    free_at, begin, found = [[0.0] * SEATS for _ in range(num_gpus)], 0.0, []
    for part in order:
        seats = _seats(part)
        for gpu in free_at:
            gpu.sort()
        free_at.sort(key=lambda gpu: (gpu[seats - 1], sum(gpu)))
        begin = max(begin, free_at[part.gpus - 1][seats - 1])
        for gpu in free_at[: part.gpus]:
            gpu[:seats] = [begin + part.seconds] * seats
        found.append((part, begin))
    return found


def _end(found: Sequence[tuple[Part, float]]) -> float:
    return max((begin + part.seconds for part, begin in found), default=0.0)


def _seats(part: Part) -> int:
    """Of a GPU's, what the part takes of each of its GPUs."""
    return 1 if part.shares else SEATS


def fitting(parts: Sequence[Part], num_gpus: int, seconds: float) -> list[Part]:
    """The parts that end within `seconds`: each, in order of worth, that fits beside those before it."""
    chosen: list[Part] = []
    for part in parts:
        if _end(begins([*chosen, part], num_gpus)) <= seconds:
            chosen.append(part)
    return chosen


@dataclass(frozen=True)
class Ended:
    """How a part came to its end."""

    part: str
    rc: int
    seconds: float
    limit_s: float
    outlasted: bool


class Running:
    """A part at work: its shell commands one after the other, each a process group, all output in one file."""

    def __init__(
        self,
        part: Part,
        gpus: Sequence[str],
        commands: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        limit_s: float,
    ) -> None:
        self.part, self.gpus = part, gpus
        self._waiting, self._limit_s = list(commands), limit_s
        self._env = {**env, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        self._log = log.open("w", encoding="utf-8")
        self._began, self._rc = time.monotonic(), 0
        self._process = self._next()

    def _next(self) -> subprocess.Popen[bytes]:
        command = self._waiting.pop(0)
        print(f"$ {command}", file=self._log, flush=True)
        return subprocess.Popen(
            command,
            shell=True,
            cwd=ROOT,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def look(self) -> Ended | None:
        """Goes on with the next command where one has ended; how the part ended, once it has."""
        if self._process.poll() is None:
            return self.end() if time.monotonic() - self._began > self._limit_s else None
        self._rc = self._rc or self._process.returncode
        if self._waiting:
            self._process = self._next()
            return None
        return self._ended(outlasted=False)

    def end(self) -> Ended:
        """Ends the command that runs, with its process group and all that it started; the part is over."""
        roots = {process for process in children(os.getpid()) if process[0] == self._process.pid}
        with end_trees(roots, GRACE_S):
            self._signal(signal.SIGTERM)
        self._signal(signal.SIGKILL)
        self._rc = self._process.wait() or 1
        print(f"(ended after {time.monotonic() - self._began:.0f} s)", file=self._log)
        return self._ended(outlasted=True)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ended(self, outlasted: bool) -> Ended:
        self._log.close()
        return Ended(self.part.name, self._rc, time.monotonic() - self._began, self._limit_s, outlasted)


def run(
    parts: Sequence[Part],
    gpus: Sequence[str],
    seconds: float,
    folder: Path,
    commands: Callable[[Part, float], Sequence[str]],
    env: Mapping[str, str],
    say: Callable[[str], None],
) -> Iterator[Ended]:
    """Runs parts in their turn, side by side where GPUs are free, and yields each at its end.

    A part whose time is more than what is left is skipped, and one that outlasts `SLACK` times its time is ended.

    Args:
        gpus: as in CUDA_VISIBLE_DEVICES.
        seconds: for all of them.
        folder: of the logs, PART.log.
        commands: of a part and the seconds it may take; they run in the root of the checkout.
        env: the environment of all, but for CUDA_VISIBLE_DEVICES.
        say: is told what begins and what is skipped.
    """
    waiting, free, running = in_turn(parts, len(gpus)), dict.fromkeys(gpus, SEATS), list[Running]()
    end = time.monotonic() + seconds
    try:
        while waiting or running:
            left = end - time.monotonic()
            for late in [part for part in waiting if part.seconds > left]:
                waiting.remove(late)
                say(f"skipped {late.name}: it takes about {late.seconds:.0f} s, and {max(left, 0):.0f} s are left")
            while waiting and (taken := _free_for(waiting[0], free)):
                part = waiting.pop(0)
                limit_s = min(SLACK * part.seconds, left)
                log = folder / f"{part.name}.log"
                say(f"begins {part.name} on GPU {', '.join(taken)}, about {part.seconds:.0f} s")
                running.append(Running(part, taken, commands(part, limit_s), env, log, limit_s))
                for gpu in taken:
                    free[gpu] -= _seats(part)
            for work in list(running):
                if ended := work.look():
                    running.remove(work)
                    for gpu in work.gpus:
                        free[gpu] += _seats(work.part)
                    yield ended
            time.sleep(0.05)
    finally:
        for work in running:
            work.end()


def _free_for(part: Part, free: Mapping[str, int]) -> list[str]:
    """GPUs that the part can begin on, the emptiest first taken; none where there are too few."""
    able = sorted((gpu for gpu, seats in free.items() if seats >= _seats(part)), key=lambda gpu: -free[gpu])
    return sorted(able[: part.gpus], key=list(free).index) if len(able) >= part.gpus else []

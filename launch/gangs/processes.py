"""Child processes of this one, read from /proc; none are found on systems other than Linux."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# (pid, start time in clock ticks since boot). A pid alone may be reused by another process.
Process = tuple[int, int]


def children(pid: int) -> set[Process]:
    """The living processes that `pid` started."""
    return {process for process, parent in _parents().items() if parent == pid}


def process_of(pid: int) -> Process:
    """The process that has this pid now; ProcessLookupError if there is none."""
    _, fields = _stat(pid)
    if not fields:
        raise ProcessLookupError(f"no process has pid {pid}")
    return pid, int(fields[19])


def end_process(process: Process) -> None:
    """Kills a process, even a stopped one, if it exists."""
    if not has_ended(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process[0], signal.SIGKILL)


def named(processes: set[Process], *names: str) -> dict[Process, str]:
    """The processes whose program has one of the names, which Linux truncates to 15 letters."""
    found = {process: _stat(process[0])[0] for process in processes}
    return {process: name for process, name in found.items() if name in names}


def has_ended(process: Process) -> bool:
    """Whether a process has ended; a zombie has."""
    pid, started = process
    _, fields = _stat(pid)
    return not fields or fields[0] == "Z" or int(fields[19]) != started


@contextlib.contextmanager
def end_trees(roots: set[Process], limit_s: float = 2.0) -> Iterator[None]:
    """Kills, after the block, what is left of these process trees, as they were before it.

    Processes that the block leaves have `limit_s` to end by themselves.
    """
    doomed = _with_descendants(roots)
    try:
        yield
    finally:
        deadline = time.monotonic() + limit_s
        while (left := doomed & _parents().keys()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in left:
            end_process(process)


def start_guard(roots: set[Process]) -> subprocess.Popen[bytes]:
    """Starts a process that ends these trees as `end_trees` does once this process has died, even of SIGKILL. The
    caller kills it after they have ended in another way."""
    # It runs this file as a program, which imports nothing else of moe_ep.
    return subprocess.Popen(
        [sys.executable, "-IS", __file__, str(os.getpid()), *(f"{pid}/{started}" for pid, started in roots)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # ctrl-C is not for it
    )


def _guard(pid: int, roots: set[Process]) -> None:
    with end_trees(roots), contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])


def _with_descendants(roots: set[Process]) -> set[Process]:
    below: dict[int, list[Process]] = {}
    for process, parent in _parents().items():
        below.setdefault(parent, []).append(process)
    found, todo = set(roots), list(roots)
    while todo:
        new = below.get(todo.pop()[0], [])
        found.update(new)
        todo += new
    return found


def _parents() -> dict[Process, int]:
    """The parent of every living process of this machine."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        _, fields = _stat(pid)
        if fields and fields[0] != "Z":
            parents[pid, int(fields[19])] = int(fields[1])
    return parents


def _stat(pid: int) -> tuple[str, list[str]]:
    """The name of a process's program, and the fields of /proc/PID/stat after it, its state first; empty if it is
    gone."""
    try:
        # The name is in parentheses and may contain any character.
        start, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return "", []
    return start.partition("(")[2], rest.split()


if __name__ == "__main__":
    _guard(
        int(sys.argv[1]),
        {(int(pid), int(started)) for pid, _, started in (root.partition("/") for root in sys.argv[2:])},
    )

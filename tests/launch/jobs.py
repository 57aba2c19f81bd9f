"""Functions that gangs run in the tests, and what the tests look at processes with."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_ep.launch.gangs import progress
from moe_ep.launch.gangs.rank_env import RankEnv, resolve_rank_env
from moe_ep.launch.gangs.rendezvous import destroy_process_group, init_process_group

ROOT = Path(__file__).resolve().parents[2]
# What a test waits for happens within so long, also on a machine that is many times slower: only a failure takes it.
LIMIT_S = 600.0
# What comes soon is far from the deadline (of 300 s and more) at which it would come too, also there.
SOON_S = 150.0
# Longer than any test waits for the end of who sleeps so long.
_FOREVER_S = 3600


def describe(rank_env: RankEnv, start: int, num_rows: int = 0) -> dict[str, Any]:
    """Who this rank is, a sum over all of them, and rows of bytes."""
    import numpy as np
    import torch
    import torch.distributed as dist

    total = torch.tensor([start + rank_env.rank])
    dist.all_reduce(total)
    progress.hand_over({"rank": rank_env.rank, "sum": int(total)})
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "local_rank": rank_env.local_rank,
        "source": rank_env.source,
        "resolved": resolve_rank_env() == rank_env or rank_env.source,
        "sum": int(total),
        "threads": torch.get_num_threads(),
        "asked_threads": os.environ.get("OMP_NUM_THREADS"),
        "pid": os.getpid(),
        "rows": np.full(num_rows, rank_env.rank, np.uint8),
    }


def initialise_twice(rank_env: RankEnv) -> str:
    """A second initialisation, a wrong one, and teardown before the gang's own."""
    init_process_group(rank_env)
    try:
        init_process_group(RankEnv(rank=0, world_size=rank_env.world_size + 1))
    except RuntimeError as error:
        message = str(error)
    destroy_process_group()
    destroy_process_group()
    return message


def fail(rank_env: RankEnv, rank: int, how: str, pid_dir: str = "") -> None:
    """One rank fails while its peers wait for it in a collective; the file `failing` in the folder is as old."""
    import torch
    import torch.distributed as dist

    if pid_dir:
        (Path(pid_dir) / str(rank_env.rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank_env.rank == rank:
        if pid_dir:
            (Path(pid_dir) / "failing").touch()
        if how == "raise":
            raise ValueError("the tensor has a hole")
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(_FOREVER_S)
    dist.all_reduce(torch.ones(1))


def hang(rank_env: RankEnv, pid_dir: str) -> None:
    """Says who it is, and computes."""
    (Path(pid_dir) / str(rank_env.rank)).write_text(str(os.getpid()))
    time.sleep(_FOREVER_S)


def variable(rank_env: RankEnv, name: str) -> str | None:
    return os.environ.get(name)


def interfaces(rank_env: RankEnv) -> tuple[str | None, str | None]:
    """Where gloo and NCCL listen."""
    return os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")


def unpicklable(rank_env: RankEnv) -> Any:
    return (value for value in range(3))


def describe_aloud(rank_env: RankEnv, start: int) -> dict[str, Any]:
    """`describe`, after a sentence and longer than a driver takes to ask twice."""
    progress.say(f"rank {rank_env.rank} speaks")
    time.sleep(1.2)
    return describe(rank_env, start)


def report_progress(rank_env: RankEnv) -> None:
    for done in range(3):
        progress.report("work", done, 3)


def without_waits(stderr: str) -> str:
    """What was said, but for what a slow machine says while it waits."""
    return re.sub(r"^moe-ep: waiting for .*\n", "", stderr, flags=re.MULTILINE)


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether it holds, now or before the limit."""
    deadline = time.monotonic() + LIMIT_S
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds


def pids_in(directory: Path, count: int) -> list[int]:
    """The process ids that `count` ranks have written; waits for them."""
    found: list[int] = []

    def all_started() -> bool:
        found[:] = [int(text) for file in directory.iterdir() if file.name.isdecimal() and (text := file.read_text())]
        return len(found) == count

    assert wait_until(all_started), f"{count} ranks did not start within {LIMIT_S} s"
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def workers_of(driver: int) -> list[int]:
    """The local workers of a driver, in rank order: processes that the server below it forked."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if entry.name.isdecimal() and parent_of_parent(int(entry.name)) == driver:
                found.append(int(entry.name))
    return sorted(found)


def parent_of_parent(pid: int) -> int:
    """A local worker's driver: the server that forked the worker is its child."""
    return parent_of(parent_of(pid))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def listening_addresses(pids: list[int]) -> set[tuple[str, int]]:
    """(IPv4 address, port) of every TCP socket at which the processes listen; ("::", port) of those in IPv6."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            place, state, inode = (line.split()[i] for i in (1, 3, 9))
            address, _, port = place.partition(":")
            if state == "0A" and inode in inodes:
                v4 = ".".join(str(byte) for byte in reversed(bytes.fromhex(address[-8:])))
                found.add((v4 if table == "tcp" else "::", int(port, 16)))
    return found


def session_pids(leader: int) -> list[int]:
    """Processes of the session that `leader` leads: the driver, and the cluster it started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.getsid(int(entry.name)) == leader:
                found.append(int(entry.name))
        except ProcessLookupError:
            continue
    return found


def all_end(pids: list[int]) -> bool:
    """Whether none of the processes is alive, now or soon."""
    return wait_until(lambda: not any(map(alive, pids)))


def shared_files() -> set[str]:
    """What workers of this machine share memory through."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("moe_ep")}


def all_vanish(files: set[str]) -> bool:
    """Whether none of the files is left, now or soon: those of other jobs come and go."""
    return wait_until(lambda: not files & shared_files())


# Shells start background jobs deaf to ctrl-C, and what those start is deaf too. A SIGTERM comes (prctl's PDEATHSIG)
# when the tests' process ends before it, so that a test which fails or is killed leaves no gang at work.
_BEGIN = """import ctypes, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
"""


def start_python(code: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """A Python process in a group of its own, that can import moe_ep and the tests."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", _BEGIN + code, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start_moe_ep(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """The command line, as its own process."""
    return start_python(
        "import sys; from moe_ep.launch.__main__ import main; sys.exit(main())", *arguments, **variables
    )

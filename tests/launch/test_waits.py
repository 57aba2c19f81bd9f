"""Waits before a gang exists: each says what it waits for, ends at the deadline, and at ctrl-C within 2 s."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from moe_ep.errors import GangError
from moe_ep.launch.gangs import interrupts, waiting
from tests.launch import jobs
from tests.ports import free_ports

LIMIT_S = 8
Listener = Callable[[], contextlib.AbstractContextManager[int]]


@contextlib.contextmanager
def nobody() -> Iterator[int]:
    yield free_ports()[0]


@contextlib.contextmanager
def http_server() -> Iterator[int]:
    class Quiet(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def agent(port: int) -> list[str]:
    return f"--launcher torchrun --nnodes 2 --rdzv-endpoint 127.0.0.1:{port} --ep-size 2".split()


def torchrun_rank(port: int) -> dict[str, str]:
    return {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def slurm_rank(port: int, rank: int) -> dict[str, str]:
    return {
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "MASTER_PORT": str(port),
    }


def start(kind: str, port: int, limit_s: float = LIMIT_S) -> subprocess.Popen[str]:
    flags, variables = {
        "agent": (agent(port), {}),
        "torchrun": ([], torchrun_rank(port)),
        "slurm rank 0": ([], slurm_rank(port, 0)),
        "slurm rank 1": ([], slurm_rank(port, 1)),
        "ray": (["--address", f"127.0.0.1:{port}"], {}),
    }[kind]
    command = ["run", "--device", "cpu", *flags]
    # Where the number of a process has the byte of a line's end, an HTTP server answers TCPStore's greeting, which has
    # that number, and torch warns of each attempt.
    variables |= {"MOE_EP_DISPATCH_TIMEOUT_S": str(limit_s), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return jobs.start_moe_ep(*command, **variables)


CASES: list[tuple[str, Listener, str]] = [
    ("ray", silent_server, "answer"),  # first to be interrupted: Ray has a deadline of its own
    ("agent", nobody, "nodes to come"),
    ("agent", silent_server, "the node that listens"),
    ("torchrun", nobody, "rank 0 to listen"),
    ("torchrun", http_server, "rank 0 to listen"),
    ("slurm rank 0", nobody, "rank 1 of 2"),
    ("slurm rank 1", nobody, "rank 0 to listen"),
]


# What is waited for differs in each of these.
INTERRUPTED = list({what: (kind, listener, what) for kind, listener, what in CASES}.values())


def name_of(kind: str, listener: Listener) -> str:
    return f"{kind}-{listener.__name__}"


def words(cases: list[tuple[str, Listener, str]]) -> list[tuple[str, str]]:
    return [(name_of(kind, listener), what) for kind, listener, what in cases]


@dataclass
class Waiting:
    """A command that waits, from its start to its end."""

    started: float
    port: int
    command: subprocess.Popen[str]


def start_all(limit_s: float, cases: list[tuple[str, Listener, str]]) -> Iterator[dict[str, Waiting]]:
    """Every case at once: they wait at the same time, which takes no longer than one."""
    with contextlib.ExitStack() as listeners:
        waits = {}
        for kind, listener, _ in cases:
            name = name_of(kind, listener)
            port = listeners.enter_context(listener())
            waits[name] = Waiting(time.monotonic(), port, start(kind, port, limit_s))
        yield waits
        for wait in waits.values():
            wait.command.kill()
            wait.command.communicate()


@pytest.fixture(scope="module")
def short_waits() -> Iterator[dict[str, Waiting]]:
    yield from start_all(LIMIT_S, CASES)


@pytest.fixture(scope="module")
def long_waits() -> Iterator[dict[str, Waiting]]:
    yield from start_all(600, INTERRUPTED)


@pytest.mark.parametrize(("name", "what"), words(CASES))
def test_a_wait_says_what_it_is_for_and_ends_at_the_deadline(
    short_waits: dict[str, Waiting], name: str, what: str
) -> None:
    wait = short_waits[name]
    _, error = wait.command.communicate(timeout=jobs.LIMIT_S)
    assert wait.command.returncode == 1, error
    assert time.monotonic() - wait.started < LIMIT_S + jobs.SOON_S
    *said, last = error.splitlines()
    # On a busy machine a part of a wait may be said beside the whole.
    assert said and all(line.startswith("moe-ep: waiting for ") for line in said), error
    assert any(what in line for line in said)
    assert last.startswith("moe-ep run: ")
    assert str(wait.port) in last or "rank 1 of 2" in last


@pytest.mark.parametrize(("name", "what"), words(INTERRUPTED))
def test_a_wait_ends_at_ctrl_c(long_waits: dict[str, Waiting], name: str, what: str) -> None:
    command = long_waits[name].command
    assert command.stderr is not None and any(what in line for line in command.stderr)
    started = time.monotonic()
    os.killpg(command.pid, signal.SIGINT)
    command.communicate(timeout=jobs.LIMIT_S)
    assert time.monotonic() - started < jobs.SOON_S  # 2 s where nothing else runs
    assert command.returncode == 130


def test_a_server_of_something_else_at_the_endpoint_is_said_at_once() -> None:
    with http_server() as port:
        command = start("agent", port, limit_s=600)
        _, error = command.communicate(timeout=jobs.LIMIT_S)
    assert command.returncode == 1
    (line,) = jobs.without_waits(error).splitlines()
    assert f"127.0.0.1:{port}" in line


@pytest.mark.parametrize("limit_s", [0.1, 0.3])
def test_a_function_that_nothing_interrupts_is_left_behind(limit_s: float) -> None:
    never = threading.Event()
    started = time.monotonic()
    with pytest.raises(GangError, match="somebody"):
        waiting.call(never.wait, waiting.Wait("somebody", limit_s))
    assert limit_s <= time.monotonic() - started < limit_s + jobs.SOON_S
    with pytest.raises(KeyboardInterrupt), interrupts.raised_as_interrupt():
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        waiting.call(never.wait, waiting.Wait("somebody", 60))
    assert waiting.call(lambda: 3, waiting.Wait("somebody", 60)) == 3
    with pytest.raises(ZeroDivisionError):
        waiting.call(lambda: 1 // 0, waiting.Wait("somebody", 60))
    never.set()

"""Signals that end a command, and what is left of the processes below it."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_ep.launch.gangs import interrupts
from moe_ep.launch.gangs.processes import children, end_trees
from tests.launch.jobs import LIMIT_S, SOON_S, all_end

# Its child outlives it, unless somebody looks.
_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print(child.pid, flush=True)
child.wait()
"""

# With more files open than select can tell of, as a server has.
_MANY_FILES = """
import os, resource
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(min(1100, most - 100))]
"""

_END_WITH_PARENT = """
import os, time
from moe_ep.launch.gangs.local_gang import end_with
end_with(os.getppid())
print("ready", flush=True)
time.sleep(3600)
"""

# Waits inside the C library, which no signal ends, for a program that says it has begun and reads stdin to its end; or
# sleeps, which a signal does end, and takes longer to leave than a block with a limit may.
_STUCK = """
import contextlib, ctypes, sys, time
from moe_ep.launch.gangs import interrupts
way_out = {"limit": None, "advice": "wait longer"}.get(sys.argv[1], "")
limit = contextlib.nullcontext() if way_out == "" else interrupts.ending_after(2, "waiting", way_out)
with interrupts.raised_as_interrupt():
    try:
        with interrupts.ending_within(2), limit:
            if sys.argv[1] != "python":
                ctypes.CDLL(None).system(b"echo ready; exec cat > /dev/null 2> /dev/null")
            print("ready", flush=True)
            while True:  # a signal that comes just before a sleep begins is noticed when it ends
                time.sleep(0.1)
    except KeyboardInterrupt:
        time.sleep(3)
        sys.exit(7)
"""

# A module that is interrupted while it loads, and drops what is raised there, as torch's extensions do.
_INTERRUPTED_MODULE = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
except BaseException:
    pass
"""

# Interrupted in an import that takes long, with a child or without.
_SLOW_IMPORT = """
import os, signal, subprocess, sys, time
from moe_ep.launch.gangs import interrupts
if sys.argv[1] == "child":
    child = subprocess.Popen(["sleep", "3600"])
with interrupts.raised_as_interrupt():
    try:
        import moe_ep_test_slow
        interrupts.check()
    except KeyboardInterrupt:
        child.kill()
        sys.exit(7)
"""

# As at a terminal: shells start background jobs deaf to ctrl-C.
_AT_A_TERMINAL = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"

# Ctrl-C comes when the program has started and knows no command yet.
_EARLY = """
import os, sys
from moe_ep.launch.__main__ import main

class Finder:
    def find_spec(self, name, *rest):
        if name == "moe_ep.launch.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
main()
"""


@pytest.fixture(autouse=True)
def at_a_terminal() -> Iterator[None]:
    """However the tests were started."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_python_drops_is_raised_at_the_next_check(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with interrupts.raised_as_interrupt():
        interrupts.check()
        try:
            os.kill(os.getpid(), number)
            time.sleep(1)
        except KeyboardInterrupt:
            assert interrupts.received() == number
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
    assert signal.getsignal(number) is before


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interrupts.raised_as_interrupt():
        os.kill(os.getpid(), signal.SIGHUP)
        interrupts.check()
        assert interrupts.received() is None
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_what_comes_during_an_import_is_raised_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"moe_ep_test_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(_INTERRUPTED_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt), interrupts.raised_as_interrupt():
        importlib.import_module(name)
        time.sleep(3600)
    assert name in sys.modules


def test_a_signal_during_an_import_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"moe_ep_test_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(_INTERRUPTED_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    with interrupts.raised_as_interrupt():
        with pytest.raises(KeyboardInterrupt):
            importlib.import_module(name)
            interrupts.check()
        time.sleep(0.1)  # what cleans up is not interrupted once more


@pytest.mark.parametrize(("seconds", "child", "code"), [(3600, "none", 130), (2, "child", 7)])
def test_a_slow_import_is_not_waited_for_without_children(
    seconds: int, child: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "moe_ep_test_slow.py").write_text(
        f"import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\n"
        f"until = time.monotonic() + {seconds}\nwhile time.monotonic() < until: time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _SLOW_IMPORT, child]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert ("interrupted" in done.stderr) == (code == 130)


def test_ctrl_c_before_there_is_a_command_ends_the_process_without_a_word() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _AT_A_TERMINAL + _EARLY], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        ("library", 128 + signal.SIGTERM, "ended by SIGTERM while it was in"),
        ("limit", 1, "waiting has not ended within 2 s, and the process ends; it was here:"),
        ("advice", 1, "waiting has not ended within 2 s, and the process ends; wait longer"),
        ("python", 7, ""),
    ],
)
def test_a_process_ends_soon_after_a_signal_or_a_limit_inside_a_library_too(where: str, code: int, said: str) -> None:
    command = [sys.executable, "-c", _MANY_FILES + _STUCK, where]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        if where not in ("limit", "advice"):
            process.terminate()
        assert process.wait(timeout=LIMIT_S) == code
        first, *others = process.stderr.read().splitlines() or [""]
        assert first.endswith(said) and any("<string>" in line for line in others) == (where in ("library", "limit"))
    finally:
        process.kill()
        process.wait()
        process.stdin.close()


def test_a_limit_that_was_kept_is_over() -> None:
    before = set(threading.enumerate())
    with interrupts.ending_after(600, "nothing"):
        (limit,) = set(threading.enumerate()) - before
    limit.join(60)
    assert not limit.is_alive()


def test_a_worker_ends_with_its_driver() -> None:
    driver = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_MANY_FILES + _END_WITH_PARENT!r}])"
    process = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.wait()
    started = time.monotonic()
    assert process.stdout.read() == "" and time.monotonic() - started < SOON_S


def test_nothing_is_left_of_a_tree_whose_root_died_first() -> None:
    before = children(os.getpid())
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        orphan = int(parent.stdout.readline())
        started = children(os.getpid()) - before
        assert [pid for pid, _ in started] == [parent.pid]
        assert [pid for pid, _ in children(parent.pid)] == [orphan]
        with end_trees(started, limit_s=0.1):
            parent.kill()
            parent.wait()
            os.kill(orphan, 0)
        assert all_end([orphan])
    finally:
        parent.kill()

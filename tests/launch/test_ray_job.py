"""A real `ray start --head` on loopback: jobs submitted to it, and a driver that joins it from outside."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_ep.bench.results import read_lines
from tests.launch import jobs
from tests.ports import free_ports

pytest.importorskip("ray")
RUN = ["run", "--device", "cpu", "--steps", "1", "--tokens-per-rank", "4"]


class Head:
    """A head node of 2 CPUs with token authentication, on ports and in a folder of its own."""

    def __init__(self, folder: Path, cache: Path) -> None:
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        gcs, dashboard, *others = free_ports(7)
        self.address, self.dashboard = f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}"
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "MOE_EP_CACHE_DIR": str(cache),
        }
        names = ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
        flags = [f"--{name}-port={port}" for name, port in zip((*names, "ray-client-server"), others, strict=True)]
        flags += ["--node-ip-address=127.0.0.1", f"--port={gcs}", f"--temp-dir={folder / 'r'}", "--num-cpus=2"]
        flags += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--disable-usage-stats"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *flags],
            cwd=folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait(self) -> None:
        host, port = self.dashboard.removeprefix("http://").split(":")

        def is_there() -> bool:
            assert self.process.poll() is None, "ray start has ended"
            with contextlib.suppress(OSError):
                socket.create_connection((host, int(port)), timeout=10).close()
                return True
            return False

        assert jobs.wait_until(is_there), f"ray start did not serve {self.dashboard}"

    def call(self, *command: str, cwd: Path = jobs.ROOT) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=cwd, env=self.environment, capture_output=True, text=True, timeout=jobs.LIMIT_S, check=False
        )


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    # Ray's sockets lie below its folder, and their paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    started = Head(folder, tmp_path_factory.mktemp("cache"))
    try:
        started.wait()
        yield started
    finally:
        processes = jobs.session_pids(started.process.pid)
        started.process.send_signal(signal.SIGTERM)
        started.process.wait(jobs.LIMIT_S)
        assert jobs.all_end(processes)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What git would hold of the packages, links included, and nothing installed."""
    for name in ("moe_ep", "kernels", "dispatch", "launch"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(jobs.ROOT / name, tmp_path / "checkout" / name, symlinks=True, ignore=ignored)
    return tmp_path / "checkout"


@pytest.mark.parametrize("measures", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_jobs_of_a_bare_checkout(head: Head, checkout: Path, tmp_path: Path, measures: bool) -> None:
    """A run, or measuring how the layer scales."""
    rows = tmp_path / "rows.jsonl"
    small = "--device cpu --ep-size 2 --decode-tokens 2 --prefill-tokens none --chain 1 --repeats 3 --json"
    command = ["bench", "scaling", *small.split(), str(rows)] if measures else [*RUN, "--ep-size", "2"]
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", head.dashboard]
    job = ["python", "-m", "moe_ep.launch", *command]
    done = head.call(*submit, "--working-dir", ".", "--", *job, cwd=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    if measures:
        assert [(row["ep_size"], row["launcher"]) for row in read_lines(rows)] == [(1, "ray"), (2, "ray")]
    else:
        assert "gang    2 workers, launcher ray" in done.stdout
        assert "verified: maximum relative error" in done.stdout


def test_the_example_job_ends_with_the_job_s_exit_code(head: Head) -> None:
    script = str(jobs.ROOT / "examples" / "ray_job.py")
    done = head.call(sys.executable, script, head.dashboard, *RUN, "--ep-size", "99")
    assert done.returncode == 1
    assert "moe-ep run: the gang asks for 99 CPUs (one a worker) and there are 2 free of 2 in the Ray" in done.stdout


def test_a_driver_joins_a_running_cluster(head: Head) -> None:
    done = head.call(sys.executable, "-m", "moe_ep.launch", *RUN, "--address", head.address, "--ep-size", "1")
    assert done.returncode == 0, done.stderr
    assert "verified: maximum relative error" in done.stdout
    assert jobs.without_waits(done.stderr) == ""


@pytest.mark.parametrize("mode", [None, "", "disabled"])
def test_a_driver_without_the_token_is_told_at_once(head: Head, mode: str | None) -> None:
    environment = {name: value for name, value in head.environment.items() if name != "RAY_AUTH_MODE"}
    environment |= {} if mode is None else {"RAY_AUTH_MODE": mode}
    command = [sys.executable, "-m", "moe_ep.launch", *RUN, "--address", head.address, "--ep-size", "1"]
    started = time.monotonic()
    done = subprocess.run(command, cwd=jobs.ROOT, env=environment, capture_output=True, text=True, timeout=jobs.LIMIT_S)
    assert time.monotonic() - started < jobs.SOON_S
    assert done.returncode == 1
    (line,) = jobs.without_waits(done.stderr).splitlines()
    assert "RAY_AUTH_MODE=token" in line

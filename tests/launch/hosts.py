"""Two hosts on this machine: namespaces with a name, a network, processes, /tmp/ray and shared memory of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.launch import jobs

ADDRESSES = {"alpha": "10.213.0.1", "beta": "10.213.0.2"}
_SETTING_UP = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
for folder in /tmp/ray /dev/shm; do mount -t tmpfs tmpfs "$folder"; done
ip link set lo up
echo ready
exec cat > /dev/null
"""
# What tells whether there can be hosts here: each of the things that making them takes.
_TRIAL = """
set -e
hostname trial
mount --bind /dev/null /etc/resolv.conf
mount -t tmpfs tmpfs /dev/shm
ip link add wire type veth peer name other
ip addr add 10.213.0.1/24 dev wire
"""
_RAY = Path("/tmp/ray")
_NAMESPACES = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c"]


class Host:
    """One of the two; commands run in it end with it, and it with this process."""

    def __init__(self, name: str, names: Path) -> None:
        self.name, self.address = name, ADDRESSES[name]
        self._process = subprocess.Popen(
            [*_NAMESPACES, _SETTING_UP, "bash", name, str(names)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise PermissionError(self._process.communicate()[1].strip())
        self.pid = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().strip()

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts this Python there, from the root of the checkout."""
        return subprocess.Popen(
            [*self.inside("--pid", "--uts", "--mount"), f"--wd={jobs.ROOT}", sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": str(jobs.ROOT), "OMP_NUM_THREADS": "1", **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def inside(self, *namespaces: str) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", *namespaces]

    @contextlib.contextmanager
    def without(self, other: Host) -> Iterator[None]:
        """A block in which nothing that this host sends comes to the other: frames go to an address that nobody has."""
        neighbour = [*self.inside(), "ip", "neigh"]
        nobody = ["replace", other.address, "lladdr", "02:00:00:00:00:99", "dev", "wire", "nud", "permanent"]
        subprocess.run([*neighbour, *nobody], check=True)
        try:
            yield
        finally:
            subprocess.run([*neighbour, "del", other.address, "dev", "wire"], check=True)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def missing() -> str:
    """Why there can be no such hosts here, or nothing."""
    absent = [tool for tool in ("unshare", "nsenter", "ip", "mount", "hostname", "bash") if shutil.which(tool) is None]
    if absent:
        return f"no {', '.join(absent)} here"
    trial = subprocess.run([*_NAMESPACES, _TRIAL], capture_output=True, text=True)
    return f"no hosts can be made here: {trial.stderr.strip()}" if trial.returncode else ""


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """The hosts alpha and beta, with a wire between them."""
    names = folder / "hosts"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in ADDRESSES.items()))
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileExistsError):
            _RAY.mkdir()
            # Not where somebody else has begun to use it.
            stack.callback(_remove, _RAY)
        alpha, beta = hosts = [stack.enter_context(contextlib.closing(Host(name, names))) for name in ADDRESSES]
        wire = f"ip link add wire type veth peer name wire netns {beta.pid}"
        subprocess.run([*alpha.inside(), *wire.split()], check=True)
        for host in hosts:
            for change in (f"addr add {host.address}/24 dev wire", "link set wire up"):
                subprocess.run([*host.inside(), "ip", *change.split()], check=True)
        yield alpha, beta


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()

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
mkdir -p /tmp/ray
for folder in /tmp/ray /dev/shm; do mount -t tmpfs tmpfs "$folder"; done
ip link set lo up
echo ready
exec sleep 3600
"""


class Host:
    """One of the two; commands run in it end with it."""

    def __init__(self, name: str, names: Path) -> None:
        flags = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self.name, self.address = name, ADDRESSES[name]
        self._process = subprocess.Popen(
            ["unshare", *flags, "bash", "-c", _SETTING_UP, "bash", name, str(names)],
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
        )

    def inside(self, *namespaces: str) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--net", *namespaces]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def missing() -> str:
    """Why there can be no such hosts here, or nothing."""
    absent = [tool for tool in ("unshare", "nsenter", "ip", "mount", "hostname") if shutil.which(tool) is None]
    if absent:
        return f"no {', '.join(absent)} here"
    trial = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return "" if trial.returncode == 0 else "this user may not make namespaces"


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """The hosts alpha and beta, with a wire between them."""
    names = folder / "hosts"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in ADDRESSES.items()))
    with contextlib.ExitStack() as stack:
        alpha, beta = hosts = [stack.enter_context(contextlib.closing(Host(name, names))) for name in ADDRESSES]
        wire = f"ip link add wire type veth peer name wire netns {beta.pid}"
        subprocess.run([*alpha.inside(), *wire.split()], check=True)
        for host in hosts:
            for change in (f"addr add {host.address}/24 dev wire", "link set wire up"):
                subprocess.run([*host.inside(), "ip", *change.split()], check=True)
        yield alpha, beta

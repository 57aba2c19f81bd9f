"""Finds processes of the job that have ended, through the operating system.

On one machine a process is looked up by its number and start time. Across machines each rank holds an idle connection
to the others. The kernel resets it when the process ends, and if the machine is gone or out of reach, keepalive probes
fail within seconds.
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist

from moe_ep.distributed.store import listen_to_store, name_in_store, rendezvous_store

# Processes are looked up this often at most.
_LOOK_S = 0.2
_CONNECT_S = 1.0
# Seconds between keepalive probes, and how many fail before the kernel gives a peer up, with one of these errors.
_PROBE_S, _PROBES = 1, 2
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


@functools.cache
def machine() -> str:
    """An identifier of this machine: its name, which several may have, and the number of its last boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # not in every sandbox
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"


def _process_space() -> str:
    """Identifies the pid namespace: a machine, or a container with its own."""
    with suppress(OSError):
        return f"{machine()} {os.readlink('/proc/self/ns/pid')}"
    return machine()


def _start_of(pid: int) -> str | None:
    """When a process of this machine started, in the kernel's ticks; None if there is none, or only its remains."""
    try:
        # The name, in parentheses, may hold anything.
        state, *more = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else more[18]


class PeerConnection:
    """Shows that a process on another machine lives. TimeoutError or OSError if it cannot be reached.

    Attributes:
        is_unreachable: it was given up because nothing comes from there: the process may live.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self.is_unreachable = False
        self._socket = socket.create_connection(address, _CONNECT_S)
        self._socket.setblocking(False)
        probes = ((socket.TCP_KEEPIDLE, _PROBE_S), (socket.TCP_KEEPINTVL, _PROBE_S), (socket.TCP_KEEPCNT, _PROBES))
        for option, value in probes:
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def has_ended(self) -> bool:
        try:
            return self._socket.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError as error:
            self.is_unreachable |= error.errno in _UNREACHABLE
            return True


class _Peer:
    """Another rank's process, from what it has published."""

    def __init__(self, told: dict) -> None:
        self._pid, self._start = int(told["pid"]), str(told["start"])
        self._connection: PeerConnection | None = None
        self._is_here = told["space"] == _process_space()
        address = told["address"]
        if not self._is_here and address is not None and not ipaddress.ip_address(address[0]).is_loopback:
            # A peer that cannot be reached so is waited for until the deadline.
            with suppress(OSError):
                self._connection = PeerConnection((str(address[0]), int(address[1])))

    def has_ended(self) -> bool:
        if self._is_here:
            return _start_of(self._pid) != self._start
        return self._connection is not None and self._connection.has_ended()

    @property
    def is_unreachable(self) -> bool:
        return self._connection is not None and self._connection.is_unreachable


class Processes:
    """The processes of one default group, by its ranks. `of_job` gives the present one's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._prefix = f"moe_ep/process/{name_in_store(group)}"
        self._peers: dict[int, _Peer] = {}
        self._wanted: set[int] = set()
        self._ended: set[int] = set()
        self._looked, self._lock = 0.0, threading.Lock()
        self._rank = dist.get_rank(group)
        self._listening: socket.socket | None = None
        with suppress(RuntimeError):
            rendezvous_store().set(f"{self._prefix}/{self._rank}", json.dumps(self._identity()))
        listen_to_store(self)

    @staticmethod
    def of_job() -> Processes:
        """RuntimeError without a default group."""
        group = dist.distributed_c10d._get_default_group()
        if group not in _processes:
            _processes[group] = Processes(group)
        return _processes[group]

    def ended(self, ranks: Iterable[int]) -> set[int]:
        """The ranks of the default group whose processes have ended or are out of reach."""
        ranks = set(ranks) - {self._rank}
        self._wanted |= ranks
        with self._lock:
            if time.monotonic() - self._looked > _LOOK_S:
                self._ended |= {r for r, peer in self._peers.items() if r not in self._ended and peer.has_ended()}
                self._looked = time.monotonic()
            return self._ended & ranks

    def unreachable(self) -> set[int]:
        """Those ranks of `ended` that are out of reach, and may live."""
        with self._lock:
            return {rank for rank in self._ended if self._peers[rank].is_unreachable}

    def listen(self, store: dist.Store) -> None:
        """Learns of the processes of ranks that were asked for."""
        for rank in sorted(self._wanted - self._peers.keys()):
            if store.check([f"{self._prefix}/{rank}"]):
                peer = _Peer(json.loads(store.get(f"{self._prefix}/{rank}")))
                with self._lock:
                    self._peers[rank] = peer

    def _identity(self) -> dict[str, object]:
        pid = os.getpid()
        return {
            "pid": pid, "start": _start_of(pid), "space": _process_space(), "address": self._listen_for_peers()
        }  # fmt: skip

    def _listen_for_peers(self) -> tuple[str, int] | None:
        """An address to which other machines connect. The kernel does; nothing is accepted here, and nothing read.

        It is on the interface that leads to the rendezvous; where that is loopback, all ranks are on one machine.
        """
        store = rendezvous_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        host = getattr(store, "host", None)
        if host is None or dist.get_world_size() == 1:
            return None
        try:
            family, *_, address = socket.getaddrinfo(host, store.port, type=socket.SOCK_DGRAM)[0]  # type: ignore[attr-defined]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                own = probe.getsockname()[0]
            if ipaddress.ip_address(own).is_loopback:
                return None
            self._listening = socket.create_server((own, 0), family=family, backlog=dist.get_world_size())
            return own, self._listening.getsockname()[1]
        except OSError:
            return None


_processes: WeakKeyDictionary[dist.ProcessGroup, Processes] = WeakKeyDictionary()

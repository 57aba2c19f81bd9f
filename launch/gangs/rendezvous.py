"""Rendezvous: the store at which ranks meet, and the process group that they form."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from moe_ep import env
from moe_ep.errors import GangError, rank_list
from moe_ep.launch.gangs import waiting
from moe_ep.launch.gangs.rank_env import LOOPBACK, RankEnv
from moe_ep.launch.gangs.waiting import Wait

if TYPE_CHECKING:
    import torch.distributed as dist

_CONNECT_LIMIT_S = 5.0
_RETRY_S = 0.1
_POLL_S = 0.005
# Asks Linux for the IPv4 address of an interface (netdevice(7)).
_SIOCGIFADDR = 0x8915
# An address reserved for documentation (RFC 5737). Asking for its route sends nothing.
_ELSEWHERE = "192.0.2.1"


def listen_store(address: str) -> dist.TCPStore:
    """Serves a rendezvous store on a free port of this address only; `.port` is the port."""
    return _serve_store(socket.create_server((address, 0), family=_family(address)), address, _timeout())


def _serve_store(listener: socket.socket, address: str, timeout: timedelta) -> dist.TCPStore:
    import torch.distributed as dist

    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def init_process_group(rank_env: RankEnv, store: dist.Store | None = None) -> dist.Store:
    """Joins the default process group: gloo for CPU tensors, and NCCL too where the device is a GPU.

    A second call for the same rank does nothing. The ranks of each attempt meet under a new prefix of the store, so
    that they do not see what an attempt before a restart by torchrun has left there.

    Args:
        store: the rendezvous store, if this process serves it; None connects to the one of rank_env.

    Returns:
        The store of this attempt.

    Raises:
        RuntimeError: the process is already in a group of another size or rank.
        GangError: other ranks cannot be reached, or do not arrive within MOE_EP_DISPATCH_TIMEOUT_S.
    """
    import torch
    import torch.distributed as dist

    timeout = _timeout()
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank_env.rank, rank_env.world_size):
            raise RuntimeError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already and was asked to be rank "
                f"{rank_env.rank} of {rank_env.world_size}; call destroy_process_group first"
            )
        return dist.distributed_c10d._get_default_store()
    where = torch.device(rank_env.device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if rank_env.local_world_size == rank_env.world_size:
        _use_interface("lo")
    if rank_env.world_size > 1:
        if store is None:
            store = open_store(rank_env, timeout)
        else:
            _use_interface_of(rank_env.master_addr)
        name = agree_on_attempt(store, rank_env.rank, rank_env.world_size, timeout)
        store = dist.PrefixStore(name, store)
    else:
        store = dist.HashStore()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo",
        store=store,
        rank=rank_env.rank,
        world_size=rank_env.world_size,
        timeout=timeout,
        device_id=where if where.type == "cuda" else None,
    )
    return store


def use_interface_of(rank_env: RankEnv) -> None:
    """Makes gloo and NCCL use the network interface that leads to the store."""
    place = (rank_env.master_addr, rank_env.master_port)
    with socket.create_connection(place, timeout=_CONNECT_LIMIT_S) as connection:
        _use_interface_of(connection.getsockname()[0])


def open_clients_store(address: str, port: int) -> dist.TCPStore:
    """Connects to a store that another process serves."""
    import torch.distributed as dist

    return dist.TCPStore(address, port, is_master=False, timeout=_timeout(), wait_for_workers=False)


def destroy_process_group() -> None:
    """Leaves the default process group, if there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        # Freeing symmetric memory is a collective step, so it happens while the ranks can still meet.
        arena = sys.modules.get("moe_ep.dispatch.nvshmem.arena")
        if arena is not None:
            arena.SymmetricArena.close()
        dist.destroy_process_group()


def open_store(rank_env: RankEnv, timeout: timedelta) -> dist.Store:
    """Opens the store of rank_env. Under torchrun or srun, rank 0 serves it, unless torchrun's agent does.

    Raises:
        GangError: nothing listens there within the timeout, or something that is not a store.
    """
    import torch.distributed as dist

    host, port = rank_env.master_addr, rank_env.master_port
    is_ours = rank_env.source in ("torchrun", "slurm") and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if is_ours and rank_env.local_world_size == rank_env.world_size:
        host = LOOPBACK
    if is_ours and rank_env.rank == 0:
        try:
            listener = listen_at(host, port)
            _use_interface_of(listener.getsockname()[0])
            return _serve_store(listener, listener.getsockname()[0], timeout)
        except (OSError, dist.DistNetworkError) as error:
            errno = getattr(error, "errno", None)
            reason = os.strerror(errno) if errno and errno > 0 else str(error)
            raise GangError(
                f"rank 0 cannot listen at {host}:{port} ({reason}); set MASTER_ADDR to an address of "
                f"rank 0's machine and MASTER_PORT to a free port"
            ) from None
    wait = Wait(f"rank 0 to listen at {host}:{port}", timeout.total_seconds())
    address = _await_listener(host, port, wait)
    return waiting.call(
        lambda: dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False),
        wait,
        f"what listens at {host}:{port} does not answer as a rendezvous store within {timeout.total_seconds():g} s; "
        f"set MASTER_PORT to a port that nothing else has",
    )


def addresses_of(host: str) -> list[str]:
    """The IP addresses of a host; those that other machines can reach come first.

    Debian maps a machine's own name to a loopback address. The address by which it reaches others replaces that.
    """
    found = list(dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
    reachable = [address for address in found if not (address.startswith("127.") or address == "::1")]
    if reachable or host == "localhost" or host in found:
        return sorted(reachable or found, key=lambda address: ":" in address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE, 9))
        except OSError:
            return found
        return [probe.getsockname()[0]]


def listen_at(host: str, port: int) -> socket.socket:
    """Listens on the one interface of this machine that has the host's address; OSError if none has, or the port is
    taken."""
    address = addresses_of(host)[0]
    return socket.create_server((address, port), family=_family(address), backlog=socket.SOMAXCONN)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _use_interface_of(address: str) -> None:
    """Makes gloo and NCCL listen only on the interface with this address, by which this machine reaches the rendezvous,
    and not on the one of the machine's name."""
    found = [name for _, name in socket.if_nameindex() if address in _addresses_at(name)]
    if found:
        _use_interface(found[0])


def _use_interface(name: str) -> None:
    """Sets the interface of gloo and NCCL, unless the user has."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without =, NCCL takes it for a prefix


def _addresses_at(interface: str) -> list[str]:
    """The IPv6 addresses and the first IPv4 address of an interface."""
    found = []
    with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
        rows = [line.split() for line in file]
        found = [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[5] == interface]
    request = struct.pack("256s", interface[:15].encode())
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found.append(socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]))
    return found


def _await_listener(host: str, port: int, wait: Wait) -> str:
    """Waits until something listens there and returns its address. c10d could wait too, but logs pages meanwhile."""
    while True:
        try:
            address = addresses_of(host)[0]
            limit_s = min(_CONNECT_LIMIT_S, max(wait.left_s, _RETRY_S))
            with socket.create_connection((address, port), timeout=limit_s) as connection:
                _use_interface_of(connection.getsockname()[0])
            return address
        except OSError as error:
            why = (
                f"nothing listens at {host}:{port} ({error}), where rank 0 should; check that it runs there, and that "
                f"MASTER_ADDR and MASTER_PORT, if they are set, are right"
            )
        wait.pause(_RETRY_S, why)


def agree_on_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Agrees on a new name for this attempt, and returns it when all ranks are there.

    torchrun keeps one store over restarts, and its restart counts differ between the node where a worker died and the
    others. So each rank writes a hello with a random word, and rank 0 answers to that word with the attempt's name,
    until all ranks have acknowledged the name. An answer to a hello of an earlier attempt is read by no one.

    Raises:
        GangError: ranks did not arrive within the timeout; the message names them.
    """
    word, limit_s = secrets.token_hex(8), timeout.total_seconds()
    if rank != 0:
        store.set(f"hello/{rank}", word)
        answer = f"welcome/{rank}/{word}"
        # Rank 0 reports who is missing.
        wait = Wait(f"rank 0 of {world_size}", limit_s, quiet_s=float("inf"))
        while not store.check([answer]):
            wait.pause(_POLL_S, f"rank 0 of {world_size} did not answer within {limit_s:g} s")
        name = store.get(answer).decode()
        store.set(f"{name}/here/{rank}", "")
        return name
    name = f"attempt-{word}"
    missing = set(range(1, world_size))
    wait = Wait(lambda: f"{rank_list(sorted(missing))} of {world_size}", limit_s)
    while missing:
        for peer in sorted(missing):
            if store.check([f"{name}/here/{peer}"]):
                missing.discard(peer)
            elif store.check([f"hello/{peer}"]):
                store.set(f"welcome/{peer}/{store.get(f'hello/{peer}').decode()}", name)
        if missing:
            wait.pause(
                _POLL_S,
                f"{rank_list(sorted(missing))} of {world_size} did not arrive within {limit_s:g} s; see why on their "
                f"nodes, or allow more time with {env.DISPATCH_TIMEOUT_S.name}",
            )
    return name


def _timeout() -> timedelta:
    """Of start-up and of every collective."""
    return timedelta(seconds=env.DISPATCH_TIMEOUT_S.get())

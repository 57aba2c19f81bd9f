"""How ranks find each other: the store they meet at, and the process group they make of it."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from moe_ep import env
from moe_ep.errors import GangError, rank_list
from moe_ep.launch.gangs.rank_env import RankEnv

if TYPE_CHECKING:
    import torch.distributed as dist

_CONNECT_LIMIT_S = 5.0
_RETRY_S = 0.1


def listen_store(address: str, timeout_s: float | None = None) -> dist.TCPStore:
    """A rendezvous store on a free port of one address of this machine, and on no other; `.port` says which."""
    import torch.distributed as dist

    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_timeout(timeout_s),
        master_listen_fd=listener.detach(),
    )


def init_process_group(
    rank_env: RankEnv, device: str | None = None, timeout_s: float | None = None, store: dist.Store | None = None
) -> dist.Store:
    """Joins the default process group: gloo for CPU tensors, and NCCL too where the device is a GPU.

    A second call for the same rank does nothing. After a restart by torchrun the ranks meet under a fresh prefix of
    the store, so nothing of the attempt before is seen.

    Args:
        device: "cpu" or "cuda:<index>"; None takes rank_env.device.
        timeout_s: deadline of start-up and of every collective; None takes MOE_EP_DISPATCH_TIMEOUT_S.
        store: where the ranks meet, if somebody holds it already; None opens the one rank_env names.

    Returns:
        The store of this attempt.

    Raises:
        RuntimeError: the process is in a group of another size or rank already.
    """
    import torch
    import torch.distributed as dist

    timeout = _timeout(timeout_s)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank_env.rank, rank_env.world_size):
            raise RuntimeError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already and was asked to be rank "
                f"{rank_env.rank} of {rank_env.world_size}; call destroy_process_group first"
            )
        return dist.distributed_c10d._get_default_store()
    where = torch.device(device or rank_env.device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if store is None:
        store = open_store(rank_env, timeout)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo",
        store=store,
        rank=rank_env.rank,
        world_size=rank_env.world_size,
        timeout=timeout,
        device_id=where if where.type == "cuda" else None,
    )
    return store


def destroy_process_group() -> None:
    """Leaves the default process group; does nothing where there is none."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        # Symmetric memory, where a layer took some, is given back by all ranks together while they can still meet.
        arena = sys.modules.get("moe_ep.dispatch.nvshmem.arena")
        if arena is not None:
            arena.SymmetricArena.close()
        dist.destroy_process_group()


def open_store(rank_env: RankEnv, timeout: timedelta) -> dist.Store:
    """The store that rank_env names; under torchrun and srun, with a prefix that this attempt's ranks alone know.

    Raises:
        GangError: nobody listens there, or ranks do not come, within the timeout.
    """
    import torch.distributed as dist

    if rank_env.world_size == 1 and rank_env.source == "single":
        return dist.HashStore()
    started_together = rank_env.source in ("torchrun", "slurm")
    hosted_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = rank_env.rank == 0 and started_together and not hosted_by_agent
    listener = _listener(rank_env.master_port) if is_master else None
    _await_listener(rank_env.master_addr, rank_env.master_port, timeout.total_seconds())
    store = dist.TCPStore(
        rank_env.master_addr,
        rank_env.master_port,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    if not started_together:
        return store
    return dist.PrefixStore(agree_on_attempt(store, rank_env.rank, rank_env.world_size, timeout), store)


def _listener(port: int) -> socket.socket:
    """A socket that listens on this port of all addresses of this machine."""
    v6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if v6 else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=v6)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise GangError(f"rank 0 cannot listen at port {port} ({reason}); set MASTER_PORT to another") from None


def _await_listener(address: str, port: int, limit_s: float) -> None:
    """Returns when somebody listens there; c10d, which can wait too, would fill pages where nobody ever does."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_LIMIT_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise GangError(
                    f"nobody listens at {address}:{port} after {limit_s:g} s ({error}), where rank 0 should; see "
                    f"whether it runs there, and whether MASTER_ADDR and MASTER_PORT, where they are set, are right"
                ) from None
        time.sleep(_RETRY_S)


def agree_on_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name for this attempt that its ranks share and no attempt before had.

    torchrun keeps one store over restarts, and its restart counts differ between the node where a worker died and
    the others, so neither will do. Each rank says hello with a word of its own; rank 0 answers to that very word
    with the attempt's name and goes on until everybody has acknowledged that name, so a hello left over from
    an attempt before is answered in vain and does no harm.
    """
    import torch.distributed as dist

    word = secrets.token_hex(8)
    if rank != 0:
        store.set(f"hello/{rank}", word)
        answer = f"welcome/{rank}/{word}"
        try:
            store.wait([answer], timeout)
        except dist.DistError:
            raise GangError(f"rank 0 of {world_size} did not answer within {timeout.total_seconds():g} s") from None
        name = store.get(answer).decode()
        store.set(f"{name}/here/{rank}", "")
        return name
    name = f"attempt-{word}"
    missing = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for peer in sorted(missing):
            if store.check([f"{name}/here/{peer}"]):
                missing.discard(peer)
            elif store.check([f"hello/{peer}"]):
                store.set(f"welcome/{peer}/{store.get(f'hello/{peer}').decode()}", name)
        if missing and time.monotonic() > deadline:
            raise GangError(
                f"{rank_list(sorted(missing))} of {world_size} did not come within {timeout.total_seconds():g} s; see "
                f"why on their nodes, or give them more time by {env.DISPATCH_TIMEOUT_S.name}"
            )
        time.sleep(0.005)
    return name


def _timeout(timeout_s: float | None) -> timedelta:
    return timedelta(seconds=env.DISPATCH_TIMEOUT_S.get() if timeout_s is None else timeout_s)

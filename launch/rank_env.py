"""Which rank this process is, and how its ranks find each other.

`resolve_rank_env` looks at torchrun's variables, then Slurm's, then those a gang of ours sets for its workers, and
else takes the process to be alone. `init_process_group` joins the ranks.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING

from moe_ep import env
from moe_ep.errors import ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist

LOOPBACK = "127.0.0.1"
# A gang sets these for its own workers; they are not for users.
_GANG_PREFIX = "MOE_EP_GANG_"
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Only a step started by srun has this one; a batch script or an allocation has most of the others.
_SLURM_STEP = "SLURM_STEP_NODELIST"
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


@dataclass(frozen=True, kw_only=True)
class RankEnv:
    """One rank's place among all, and the address at which they meet.

    Attributes:
        node_rank: this rank's node, nodes being counted in the order of their first rank.
        master_addr, master_port: where the rendezvous store listens; the port is 0 where the process is alone.
        source: who set it: torchrun, slurm, ray, local or single.
        device: the torch device of this rank, "cpu" or "cuda:3".
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str = LOOPBACK
    master_port: int = 0
    source: str = "single"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for kind in ("", "local_"):
            rank, size = getattr(self, f"{kind}rank"), getattr(self, f"{kind}world_size")
            if not 0 <= rank < size:
                raise ConfigError(
                    f"{kind}rank is {rank} and {kind}world_size is {size} (from {self.source}); the rank must be at "
                    f"least 0 and below the size; mend the variables of {self.source} or unset them"
                )
        if self.local_world_size > self.world_size:
            raise ConfigError(
                f"local_world_size is {self.local_world_size} and world_size is {self.world_size} (from "
                f"{self.source}); a node cannot have more ranks than there are; mend the variables or unset them"
            )

    def export(self) -> None:
        """Makes this process's environment say the same, so that `resolve_rank_env` finds it again."""
        for name in (*_TORCHRUN, _SLURM_STEP):
            os.environ.pop(name, None)
        for field in fields(self):
            os.environ[_GANG_PREFIX + field.name.upper()] = str(getattr(self, field.name))


def resolve_rank_env(environ: Mapping[str, str] | None = None) -> RankEnv:
    """The place of this process.

    Raises:
        ConfigError: the variables of a launcher are incomplete, not numbers, or contradict each other.
    """
    variables = os.environ if environ is None else environ
    if "RANK" in variables or "WORLD_SIZE" in variables:
        return _from_torchrun(variables)
    if _SLURM_STEP in variables:
        return _from_slurm(variables)
    if _GANG_PREFIX + "RANK" in variables:
        return _from_gang(variables)
    return RankEnv()


def _from_torchrun(variables: Mapping[str, str]) -> RankEnv:
    _require(variables, _TORCHRUN, "torchrun")
    rank, world_size, local_rank, local_world_size = (_number(variables, name) for name in _TORCHRUN[:4])
    return RankEnv(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=_number(variables, "GROUP_RANK", rank // max(local_world_size, 1)),
        master_addr=variables["MASTER_ADDR"],
        master_port=_number(variables, "MASTER_PORT"),
        source="torchrun",
    )


def _from_slurm(variables: Mapping[str, str]) -> RankEnv:
    _require(variables, _SLURM, "srun")
    node_rank = _number(variables, "SLURM_NODEID", 0)
    world_size = _number(variables, "SLURM_NTASKS")
    # A port of its own for each step of each job, below the range the kernel hands out.
    port = 10000 + (_number(variables, "SLURM_JOB_ID", 0) * 31 + _number(variables, "SLURM_STEP_ID", 0)) % 20000
    return RankEnv(
        rank=_number(variables, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(variables, "SLURM_LOCALID"),
        local_world_size=_tasks_on_node(variables.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)), node_rank),
        node_rank=node_rank,
        master_addr=variables.get("MASTER_ADDR") or first_host(variables[_SLURM_STEP]),
        master_port=_number(variables, "MASTER_PORT", port),
        source="slurm",
    )


def _from_gang(variables: Mapping[str, str]) -> RankEnv:
    names = [_GANG_PREFIX + field.name.upper() for field in fields(RankEnv)]
    _require(variables, names, "a gang")
    values = dict(zip((field.name for field in fields(RankEnv)), names, strict=True))
    texts = ("master_addr", "source", "device")
    return RankEnv(
        **{key: variables[name] if key in texts else _number(variables, name) for key, name in values.items()}  # type: ignore[arg-type]
    )


def _require(variables: Mapping[str, str], names: tuple[str, ...] | list[str], launcher: str) -> None:
    missing = [name for name in names if not variables.get(name)]
    if missing:
        found = [name for name in names if variables.get(name)]
        raise ConfigError(
            f"{', '.join(found) or launcher} set without {', '.join(missing)}; {launcher} sets all of them: start "
            f"through {launcher}, or unset them to run alone"
        )


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    raw = variables.get(name, "")
    if not raw and default is not None:
        return default
    if not raw.isdecimal():
        raise ConfigError(f"{name} is {raw!r}; it must be a whole number; mend it or unset it")
    return int(raw)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: `gpu[03-05,9],x1` -> `gpu03`."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if match is None:
        raise ConfigError(f"{_SLURM_STEP} is {nodelist!r}; it must be a Slurm node list such as node[01-04]")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match.group())


def _tasks_on_node(tasks_per_node: str, node_rank: int) -> int:
    """Ranks of one node of Slurm's compressed list: `4(x2),3` is 4, 4, 3."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE is {tasks_per_node!r}; it must read like 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    if node_rank >= len(counts):
        raise ConfigError(
            f"SLURM_NODEID is {node_rank} and SLURM_STEP_TASKS_PER_NODE ({tasks_per_node}) lists {len(counts)} "
            f"node(s); start through srun, or unset the SLURM variables to run alone"
        )
    return counts[node_rank]


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
        dist.destroy_process_group()


def open_store(rank_env: RankEnv, timeout: timedelta) -> dist.Store:
    """The store that rank_env names; under torchrun, with a prefix that this attempt's ranks alone know."""
    import torch.distributed as dist

    if rank_env.world_size == 1 and rank_env.source == "single":
        return dist.HashStore()
    hosted_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        rank_env.master_addr,
        rank_env.master_port,
        is_master=rank_env.rank == 0 and rank_env.source in ("torchrun", "slurm") and not hosted_by_agent,
        timeout=timeout,
        wait_for_workers=False,
    )
    if rank_env.source != "torchrun":
        return store
    return dist.PrefixStore(agree_on_attempt(store, rank_env.rank, rank_env.world_size, timeout), store)


def agree_on_attempt(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name for this attempt that its ranks share and no attempt before had.

    torchrun keeps one store over restarts, and its restart counts differ between the node where a worker died and
    the others, so neither will do. Each rank says hello with a word of its own; rank 0 answers to that very word
    with the attempt's name and goes on until everybody has acknowledged that name, so a hello left over from
    an attempt before is answered in vain and does no harm.
    """
    word = secrets.token_hex(8)
    if rank != 0:
        store.set(f"hello/{rank}", word)
        answer = f"welcome/{rank}/{word}"
        store.wait([answer], timeout)
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
            raise TimeoutError(f"ranks {sorted(missing)} did not come within {timeout.total_seconds():g} s")
        time.sleep(0.005)
    return name


def _timeout(timeout_s: float | None) -> timedelta:
    return timedelta(seconds=env.DISPATCH_TIMEOUT_S.get() if timeout_s is None else timeout_s)

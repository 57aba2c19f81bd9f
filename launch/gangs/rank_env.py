"""Finds this process's rank from the variables of its launcher: torchrun's, then Slurm's, then those that a gang sets
for its workers. A process with none of them is alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from moe_ep.errors import ConfigError

LOOPBACK = "127.0.0.1"
# A gang sets it for its own workers: their `RankEnv` as JSON. It is not for users.
_GANG_RANK = "MOE_EP_GANG_RANK"
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Slurm sets variables of the job, which batch scripts and shells of an allocation see too, and of the step,
# SLURM_STEP_*. Only the latter describe the processes that were started together with this one.
_STEP_NODELIST, _STEP_NUM_TASKS = "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"
_STEP_TASKS_PER_NODE, _STEP_ID = "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_ID"
_SLURM_STEP = (_STEP_NODELIST, _STEP_NUM_TASKS, _STEP_TASKS_PER_NODE, _STEP_ID)
# Ids from here up are special steps, such as a batch script or an interactive shell (use_interactive_step of salloc).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# The number of processes that mpirun or mpiexec started.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True, kw_only=True)
class RankEnv:
    """One rank's place in its gang, and the address of the rendezvous store.

    Attributes:
        node_rank: this rank's node; nodes are counted in the order of their first rank.
        master_addr, master_port: where the rendezvous store listens; the port is 0 if the process is alone.
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
                    f"least 0 and below the size; correct the variables of {self.source} or unset them"
                )
        if self.local_world_size > self.world_size:
            raise ConfigError(
                f"local_world_size is {self.local_world_size} and world_size is {self.world_size} (from "
                f"{self.source}); a node cannot have more ranks than there are; correct them or unset them"
            )
        if not can_be_host(self.master_addr) or self.master_port >= 1 << 16:
            raise ConfigError(
                f"master_addr is {self.master_addr!r} and master_port is {self.master_port} (from {self.source}); they "
                f"must be a host's name or address and a port below 65536; correct MASTER_ADDR and MASTER_PORT or "
                f"unset them"
            )

    def export(self) -> None:
        """Writes it to this process's environment, in torchrun's variables if that is the source, so that
        `resolve_rank_env` returns it again."""
        for name in (*_TORCHRUN, "GROUP_RANK", *_SLURM_STEP):
            os.environ.pop(name, None)
        if self.source == "torchrun":
            values = {name: str(getattr(self, name.lower())) for name in _TORCHRUN}
            os.environ.update(values, GROUP_RANK=str(self.node_rank))
        else:
            os.environ[_GANG_RANK] = json.dumps(asdict(self))


def can_be_host(name: str) -> bool:
    """Whether it can be looked up as a host's name or address: Python raises UnicodeError for empty or long labels."""
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True


def resolve_rank_env(variables: Mapping[str, str] = os.environ) -> RankEnv:
    """Finds the place of this process.

    Raises:
        ConfigError: the variables of a launcher are incomplete, not numbers, or contradict each other.
    """
    if is_torchrun_rank(variables):
        return _from_torchrun(variables)
    found = slurm_rank_env(variables)
    if found is None or found.world_size == 1:
        if gang_rank := variables.get(_GANG_RANK):
            return RankEnv(**json.loads(gang_rank))
        found = RankEnv()  # one task, such as `srun --pty bash`, starts a gang as any shell does
    _check_mpi(variables, found.world_size)
    return found


def is_torchrun_rank(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process."""
    return "RANK" in variables or "WORLD_SIZE" in variables


def slurm_rank_env(variables: Mapping[str, str] = os.environ) -> RankEnv | None:
    """Finds this process's place among the tasks of srun's step, None outside of a step; ConfigError as
    `resolve_rank_env`."""
    in_step = _STEP_NODELIST in variables or _STEP_NUM_TASKS in variables
    # Not so for a batch script or the shell of an allocation.
    is_srun = in_step and _number(variables, _STEP_ID, 0) < _FIRST_SPECIAL_STEP
    return _from_slurm(variables) if is_srun else None


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
    if _number(variables, _STEP_NUM_TASKS, 0) == 1 and _number(variables, "SLURM_PROCID", 0) == 0:
        return RankEnv(source="slurm")
    per_node = variables.get(_STEP_TASKS_PER_NODE, "")
    # The job's SLURM_NTASKS is used only if the step has no number.
    size_name = _STEP_NUM_TASKS if variables.get(_STEP_NUM_TASKS) or per_node else "SLURM_NTASKS"
    nodelist = variables.get(_STEP_NODELIST, "")
    is_one_node = bool(nodelist) and first_host(nodelist) == nodelist
    size_names = () if per_node else (size_name,) if is_one_node else (size_name, _STEP_TASKS_PER_NODE)
    _require(variables, (_STEP_NODELIST, "SLURM_PROCID", "SLURM_LOCALID", *size_names), "srun")
    counts = _tasks_of_nodes(per_node) if per_node else []
    world_size = _number(variables, size_name, sum(counts) if counts else None)
    rank, node_rank = _number(variables, "SLURM_PROCID"), _number(variables, "SLURM_NODEID", 0)
    master = first_host(nodelist)
    # In a step over several components, ranks and nodes count all of them, and the other variables only one.
    if rank >= world_size or (node_rank > 0 and variables.get("SLURMD_NODENAME") == master):
        raise ConfigError(
            f"SLURM_PROCID is {rank} and SLURM_NODEID {node_rank} on {master}, in a step of {world_size} tasks: steps "
            f"over several components of a heterogeneous job are not supported; start one by srun --het-group, or "
            f"unset the SLURM variables to run alone"
        )
    if counts and node_rank >= len(counts):
        raise ConfigError(
            f"SLURM_NODEID is {node_rank} and {_STEP_TASKS_PER_NODE} ({per_node}) lists {len(counts)} node(s); start "
            f"through srun, or unset the SLURM variables to run alone"
        )
    local_world_size = counts[node_rank] if counts else world_size
    given = variables.get("MASTER_ADDR")
    # Each step of each job gets its own port, below the kernel's ephemeral range.
    port = 10000 + (_number(variables, "SLURM_JOB_ID", 0) * 31 + _number(variables, _STEP_ID, 0)) % 20000
    return RankEnv(
        rank=rank,
        world_size=world_size,
        local_rank=_number(variables, "SLURM_LOCALID"),
        local_world_size=local_world_size,
        node_rank=node_rank,
        master_addr=given or (LOOPBACK if is_one_node else master),
        master_port=_number(variables, "MASTER_PORT", port),
        source="slurm",
    )


def _check_mpi(variables: Mapping[str, str], world_size: int) -> None:
    """Raises ConfigError in a process of mpirun: each would be alone, and do the work of all."""
    for name in _MPI_SIZES:
        size = _number(variables, name, 1)
        if size not in (1, world_size):
            raise ConfigError(
                f"{name} is {size}: mpirun or mpiexec started this process, and ranks are taken from torchrun's and "
                f"srun's variables only; start it by one of them, or name a --launcher, such as local, that starts "
                f"its own workers"
            )


def _require(variables: Mapping[str, str], names: Sequence[str], launcher: str) -> None:
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
        raise ConfigError(f"{name} is {raw!r}; it must be a whole number; correct it or unset it")
    return int(raw)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: `gpu[03-05,9],x1` -> `gpu03`."""
    match = re.match(r"((?:[^,\[\]]|\[[^\[\]]+\])+)(,|$)", nodelist)
    if match is None:
        raise ConfigError(f"{_STEP_NODELIST} is {nodelist!r}; it must be a Slurm node list such as node[01-04]")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[1])


def _tasks_of_nodes(tasks_per_node: str) -> list[int]:
    """Ranks of each node in Slurm's compressed list: `4(x2),3` is 4, 4, 3."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(f"{_STEP_TASKS_PER_NODE} is {tasks_per_node!r}; it must read like 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts

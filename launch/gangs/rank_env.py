"""Which rank this process is: by torchrun's variables, then Slurm's, then those a gang of ours sets for its workers;
else the process is alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

from moe_ep.errors import ConfigError

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
                    f"least 0 and below the size; correct the variables of {self.source} or unset them"
                )
        if self.local_world_size > self.world_size:
            raise ConfigError(
                f"local_world_size is {self.local_world_size} and world_size is {self.world_size} (from "
                f"{self.source}); a node cannot have more ranks than there are; correct them or unset them"
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
        raise ConfigError(f"{name} is {raw!r}; it must be a whole number; correct it or unset it")
    return int(raw)


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: `gpu[03-05,9],x1` -> `gpu03`."""
    match = re.match(r"((?:[^,\[\]]|\[[^\[\]]+\])+)(,|$)", nodelist)
    if match is None:
        raise ConfigError(f"{_SLURM_STEP} is {nodelist!r}; it must be a Slurm node list such as node[01-04]")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", match[1])


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

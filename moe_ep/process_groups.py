"""The process groups of a layer, and the one number its ranks must agree on."""

from __future__ import annotations

import platform
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.config import FusedMoEParallelConfig

# Subgroups made here, by the group they divide and tp_size: a model of sixty layers makes them once.
_tp_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()
_hosts: WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[str, ...]]] = WeakKeyDictionary()


class LayerGroups(NamedTuple):
    """The EP group, in ep_rank order, and the TP group of this rank; None where such a group has one member."""

    ep: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None


def is_initialized() -> bool:
    """Whether this process is one of a group of ranks."""
    return dist.is_available() and dist.is_initialized()


def layer_groups(
    parallel_config: FusedMoEParallelConfig, process_group: dist.ProcessGroup | None = None
) -> LayerGroups:
    """The groups that a layer's ranks talk in; a collective step of the ranks of one TP group, on first use.

    Args:
        process_group: the dp_size * tp_size ranks of the layer, rank = dp_rank * tp_size + tp_rank; None for the
            default group. Without torch.distributed there are no groups.

    Raises:
        ValueError: EP or TP is asked for and the group has other than dp_size * tp_size ranks.
    """
    sizes = parallel_config
    group = (process_group or dist.group.WORLD) if is_initialized() else None
    if group is None or (sizes.ep_size == 1 and sizes.tp_size == 1):
        return LayerGroups(None, None)
    num_ranks = dist.get_world_size(group)
    if num_ranks != sizes.dp_size * sizes.tp_size:
        raise ValueError(
            f"process_group has {num_ranks} ranks and dp_size ({sizes.dp_size}) * tp_size ({sizes.tp_size}) is "
            f"{sizes.dp_size * sizes.tp_size}; pass the group of exactly the layer's ranks"
        )
    return LayerGroups(group if sizes.use_ep else None, _tp_group(sizes, group))


def largest_over_ranks(value: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """The largest `value` of the group's ranks; `value` itself without a group.

    The number travels as the layer's rows do, over NCCL where they are on GPUs; the host waits for it.
    """
    if group is None:
        return value
    number = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    return int(number)


def host_name() -> str:
    """This machine's name, with a number behind it where MOE_EP_RANKS_PER_HOST makes several hosts of one."""
    name, ranks_per_host = platform.node(), env.RANKS_PER_HOST.get()
    return f"{name}#{dist.get_rank() // ranks_per_host}" if ranks_per_host else name


def hosts_of(process_group: dist.ProcessGroup | None = None) -> tuple[str, ...]:
    """The host of each of the group's ranks; a collective step of them, on first use."""
    group = process_group or dist.group.WORLD
    if group is None:
        return (platform.node(),)
    known = _hosts.setdefault(group, {})
    ranks_per_host = env.RANKS_PER_HOST.get()
    if ranks_per_host not in known:
        names = [""] * dist.get_world_size(group)
        dist.all_gather_object(names, host_name(), group=group)
        known[ranks_per_host] = tuple(names)
    return known[ranks_per_host]


def num_hosts(process_group: dist.ProcessGroup | None = None) -> int:
    """Machines that the group's ranks are on, by their names; a collective step of them, on first use."""
    return len(set(hosts_of(process_group)))


def _tp_group(sizes: FusedMoEParallelConfig, group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    if sizes.tp_size == 1:
        return None
    if sizes.dp_size == 1:
        return group
    made = _tp_groups.setdefault(group, {})
    if sizes.tp_size not in made:
        members = dist.get_process_group_ranks(group)
        first = sizes.dp_rank * sizes.tp_size
        made[sizes.tp_size] = dist.new_group(
            members[first : first + sizes.tp_size], use_local_synchronization=True, group_desc="moe_ep_tp"
        )
    return made[sizes.tp_size]

"""The process groups of a layer, and what its ranks must agree on."""

from __future__ import annotations

import math
import platform
from collections.abc import Hashable
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.config import FusedMoEParallelConfig

# Subgroups made here, by the group they divide and tp_size: a model of sixty layers makes them once.
_tp_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()
# What the ranks of a group answered, by the question.
_answers: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, tuple[Any, ...]]] = WeakKeyDictionary()


class LayerGroups(NamedTuple):
    """The EP group, in ep_rank order, and the TP group of this rank; None where such a group has one member."""

    ep: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerGroups:
        """The same groups: a layer's copy talks to the same ranks."""
        return self


def is_initialized() -> bool:
    """Whether this process is one of a group of ranks."""
    return dist.is_available() and dist.is_initialized()


def this_rank(
    parallel_config: FusedMoEParallelConfig | None, process_group: dist.ProcessGroup | None = None, **settings: Any
) -> FusedMoEParallelConfig:
    """The configuration given, or the one that these settings make for this rank of the process group.

    Args:
        settings: of `FusedMoEParallelConfig.make`.

    Raises:
        ValueError: sizes that do not multiply up, or settings that contradict the configuration.
    """
    if parallel_config is None:
        ranks = (dist.get_rank(process_group), dist.get_world_size(process_group)) if is_initialized() else (0, None)
        return FusedMoEParallelConfig.make(rank=ranks[0], world_size=ranks[1], **settings)
    for name, value in settings.items():
        default, configured = getattr(FusedMoEParallelConfig, name), getattr(parallel_config, name)
        if value not in (None, default, configured):
            raise ValueError(f"{name} is {value!r} and parallel_config has {configured!r}; give it in one of the two")
    return parallel_config


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


def answers_of_ranks(question: Hashable, mine: Any, process_group: dist.ProcessGroup | None = None) -> tuple[Any, ...]:
    """What each of the group's ranks has to say, by rank; a collective step of them when it is first asked.

    Args:
        question: the same on every rank; a rank's answer to it never changes.
        mine: this rank's answer, anything that can be pickled.
    """
    group = process_group or dist.group.WORLD
    known = _answers.setdefault(group, {})  # type: ignore[arg-type]
    if question not in known:
        answers = [mine] * dist.get_world_size(group)
        dist.all_gather_object(answers, mine, group=group)
        known[question] = tuple(answers)
    return known[question]


def timeout_of(process_group: dist.ProcessGroup) -> timedelta | None:
    """The shortest deadline of the group's transports, which groups of some of its ranks should have too."""
    devices = [pair.partition(":")[0] for pair in dist.get_backend_config(process_group).split(",")]
    options = [getattr(process_group._get_backend(torch.device(device)), "options", None) for device in devices]
    return min((option._timeout for option in options if option is not None), default=None)


def deadline_of(process_group: dist.ProcessGroup) -> float:
    """Seconds that a step of the ranks may take: MOE_EP_DISPATCH_TIMEOUT_S, or the group's own where shorter."""
    of_group = timeout_of(process_group)
    return min(env.DISPATCH_TIMEOUT_S.get(), math.inf if of_group is None else of_group.total_seconds())


def host_name() -> str:
    """This machine's name, with a number behind it where MOE_EP_RANKS_PER_HOST makes several hosts of one."""
    name, ranks_per_host = platform.node(), env.RANKS_PER_HOST.get()
    return f"{name}#{dist.get_rank() // ranks_per_host}" if ranks_per_host else name


def hosts_of(process_group: dist.ProcessGroup | None = None) -> tuple[str, ...]:
    """The host of each of the group's ranks; a collective step of them, on first use."""
    if not is_initialized():
        return (platform.node(),)
    return answers_of_ranks(("host", env.RANKS_PER_HOST.get()), host_name(), process_group)


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
            members[first : first + sizes.tp_size],
            timeout=timeout_of(group),
            use_local_synchronization=True,
            group_desc="moe_ep_tp",
        )
    return made[sizes.tp_size]

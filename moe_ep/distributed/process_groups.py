"""The process groups of a layer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from moe_ep.config import FusedMoEParallelConfig
from moe_ep.distributed.exchange import gather_texts
from moe_ep.distributed.failure_detection import FailureDetector, timeout_of

# The subgroups created here, by the group that they divide and tp_size, so that all layers of a model share them.
_tp_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()
# The number that the latest group of these ranks of the default group was named by.
_named_by: dict[tuple[int, ...], int] = {}


class GroupReference:
    """A weak reference to a process group; calling it returns the group.

    So `destroy_process_group` ends a group and its threads although layers of it still exist. A thread of gloo's that
    releases a tensor after Python has ended aborts the process.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    def __call__(self) -> dist.ProcessGroup:
        """Raises RuntimeError once the group was destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the layer's process group was destroyed; make the layer anew after init_process_group, or call "
                "destroy_process_group later"
            )
        return group

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupReference:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a layer or backend over several ranks cannot be pickled, nor saved by torch.save or given to another "
            "process: a process group belongs to its process; save the layer's state_dict, and make the layer where "
            "its process group is"
        )


class LayerGroups:
    """The EP group, in ep_rank order, and this rank's TP group; None for a group of one rank.

    Copies have the same groups: a copy of a layer communicates with the same ranks.
    """

    def __init__(self, ep: dist.ProcessGroup | None, tp: dist.ProcessGroup | None) -> None:
        self._ep = None if ep is None else GroupReference(ep)
        self._tp = None if tp is None else GroupReference(tp)

    @property
    def ep(self) -> dist.ProcessGroup | None:
        return None if self._ep is None else self._ep()

    @property
    def tp(self) -> dist.ProcessGroup | None:
        return None if self._tp is None else self._tp()

    def __enter__(self) -> None:
        """A block of a pass, in which this rank tells the others what it fails with, so that their waits for it end."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            for group in (self._ep, self._tp):
                if group is not None:
                    FailureDetector.of(group()).report(error)

    @property
    def are_none(self) -> bool:
        """Whether this rank is alone, or torch.distributed was not initialised yet."""
        return self._ep is None and self._tp is None


def is_initialized() -> bool:
    """Whether torch.distributed has been initialised in this process."""
    return dist.is_available() and dist.is_initialized()


def check_member(process_group: object) -> None:
    """Raises unless it is None, or a group that this process is in.

    Raises:
        TypeError: no process group.
        ValueError: what dist.new_group gives to the processes that are not in the group.
    """
    if process_group is None or (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
        return
    if dist.is_available() and process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "process_group is of other processes; this one is not in it and has no part of what its ranks make"
        )
    raise TypeError(f"process_group is {process_group!r}; it must be a torch.distributed.ProcessGroup, or None")


def resolve_parallel_config(
    parallel_config: FusedMoEParallelConfig | None, process_group: dist.ProcessGroup | None = None, **settings: Any
) -> FusedMoEParallelConfig:
    """Returns the given configuration, or creates one from the settings and this process's rank in the group.

    Args:
        settings: arguments of `FusedMoEParallelConfig.make`.

    Raises:
        ValueError: sizes that do not match each other, settings that contradict the configuration, or a group of other
            processes.
        TypeError: no configuration, or no process group.
    """
    check_member(process_group)
    if not isinstance(parallel_config, FusedMoEParallelConfig | None):
        raise TypeError(f"parallel_config is {parallel_config!r}; it must be a FusedMoEParallelConfig")
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
    """The groups in which a layer's ranks communicate; on first use all ranks of a TP group must call it.

    Args:
        process_group: the dp_size * tp_size ranks of the layer, rank = dp_rank * tp_size + tp_rank; None for the
            default group. Without torch.distributed there are no groups.

    Raises:
        ValueError: EP or TP is asked for and the group does not have dp_size * tp_size ranks, or this process has
            another rank there.
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
    rank = dist.get_rank(group)
    own = {"tp": rank % sizes.tp_size}
    own |= {"dp": rank // sizes.tp_size} if sizes.tp_size > 1 else {}
    own |= {"ep": rank} if sizes.use_ep else {}
    for kind, expected in own.items():
        if (given := getattr(sizes, f"{kind}_rank")) != expected:
            raise ValueError(
                f"{kind}_rank is {given} and this process, rank {rank} of the layer's, has {expected}; pass the ranks "
                f"of this process, as FusedMoEParallelConfig.make(rank=...) derives them"
            )
    return LayerGroups(group if sizes.use_ep else None, _tp_group(sizes, group))


def subgroup(
    parent: dist.ProcessGroup,
    ranks: Sequence[int],
    description: str,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """A new group of some of the parent's ranks, in this order; they alone must call it.

    torch names a group that not all processes make by the number of groups that a process is in. Ranks that name it
    differently wait for each other in vain, and where groups were destroyed a name may come again. So a rank that is in
    too few groups counts some that are not there while it makes the group.

    Args:
        backend, timeout: as for `torch.distributed.new_group`; None for the default group's, and the parent's.

    Raises:
        DispatchTimeoutError: a rank did not call it before the deadline.
    """
    everybody = dist.get_process_group_ranks(parent)
    members = [everybody[rank] for rank in ranks]
    is_part = len(members) < dist.get_world_size()
    # Not in torch 2.11, where no group has another order.
    unsorted: dict[str, Any] = {} if members == sorted(members) else {"sort_ranks": False}
    if is_part:
        num_missing = _groups_missing(parent, ranks, members)
    else:
        gather_texts("making a group", "", parent)  # in C++, the death of a rank would not be noticed
        num_missing = 0
    names: dict[Any, Any] = dist.distributed_c10d._world.pg_names
    missing = {object(): f"moe_ep_missing_{number}" for number in range(num_missing)}
    names.update(missing)
    try:
        return dist.new_group(
            members,
            timeout=timeout or timeout_of(parent),
            backend=backend,
            use_local_synchronization=is_part,
            group_desc=description,
            **unsorted,
        )
    finally:
        for group in missing:
            del names[group]


def _groups_missing(parent: dist.ProcessGroup, ranks: Sequence[int], members: Sequence[int]) -> int:
    """How many groups this process is in too few, so that these ranks of the parent name their next one alike."""
    present = len(dist.distributed_c10d._world.pg_names)
    least = max(present, _named_by.get(tuple(members), 0) + 1)
    agreed = max(map(int, gather_texts("making a subgroup", str(least), parent, ranks=ranks)))
    _named_by[tuple(members)] = agreed
    return agreed - present


def _tp_group(sizes: FusedMoEParallelConfig, group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    if sizes.tp_size == 1:
        return None
    if sizes.dp_size == 1:
        return group
    made = _tp_groups.setdefault(group, {})
    if sizes.tp_size not in made:
        first = sizes.dp_rank * sizes.tp_size
        made[sizes.tp_size] = subgroup(group, range(first, first + sizes.tp_size), "moe_ep_tp")
    return made[sizes.tp_size]

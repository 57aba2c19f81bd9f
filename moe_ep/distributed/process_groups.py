"""The process groups of a layer, and questions that their ranks ask each other."""

from __future__ import annotations

import functools
import math
import platform
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.distributed.job_store import job_store, name_in_store
from moe_ep.errors import DispatchTimeoutError, rank_list

# The subgroups created here, by the group that they divide and tp_size, so that all layers of a model share them.
_tp_groups: WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = WeakKeyDictionary()
# The answers of a group's ranks, by question.
_answers: WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, tuple[Any, ...]]] = WeakKeyDictionary()
# Subgroups that were made, by what their ranks call their meeting in the store.
_num_made: Counter[str] = Counter()
# The number that the latest group of these ranks of the default group was named by.
_named_by: dict[tuple[int, ...], int] = {}


class GroupReference:
    """A process group that is not kept: calling this gives it.

    `destroy_process_group` then ends a group and its threads while layers of it are still there. A thread of gloo's
    that lets go of a tensor when Python has ended aborts the process.
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
            "its ranks have met"
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

    @property
    def are_none(self) -> bool:
        """Whether this rank is alone, or has not met the others yet."""
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
        ValueError: EP or TP is asked for and the group does not have dp_size * tp_size ranks.
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
    """The answers of the group's ranks to a question, by rank; when it is first asked, all ranks must call it.

    Args:
        question: the same on every rank. A rank's answer to it never changes.
        mine: this rank's answer, anything that can be pickled.
    """
    group = process_group or dist.group.WORLD
    known = _answers.setdefault(group, {})  # type: ignore[arg-type]
    if question not in known:
        answers = [mine] * dist.get_world_size(group)
        dist.all_gather_object(answers, mine, group=group)
        known[question] = tuple(answers)
    return known[question]


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
    too few groups is in some of its own meanwhile.

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
    num_missing = _groups_missing(parent, ranks, members) if is_part else 0
    alone = [
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True, group_desc="moe_ep_alone")
        for _ in range(num_missing)
    ]
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
        for group in alone:
            dist.destroy_process_group(group)


def _groups_missing(parent: dist.ProcessGroup, ranks: Sequence[int], members: Sequence[int]) -> int:
    """How many groups this process is in too few, so that these ranks of the parent name their next one alike."""
    store, seconds = job_store(), deadline_of(parent)
    present = len(dist.distributed_c10d._world.pg_names)
    least = max(present, _named_by.get(tuple(members), 0) + 1)
    meeting = f"moe_ep/subgroup/{name_in_store(parent)}/{'_'.join(map(str, ranks))}"
    prefix = f"{meeting}/{_num_made[meeting]}"
    _num_made[meeting] += 1
    store.set(f"{prefix}/{dist.get_rank(parent)}", str(least))
    keys = [f"{prefix}/{rank}" for rank in ranks]
    try:
        store.wait(keys, timedelta(seconds=seconds))
        agreed = max(int(store.get(key)) for key in keys)
    except RuntimeError as error:
        raise DispatchTimeoutError(
            f"{rank_list(ranks)} of the layer's ranks did not all come within {seconds:g} s to make their group; make "
            f"the layer on each of them: {error}"
        ) from None
    _named_by[tuple(members)] = agreed
    return agreed - present


def timeout_of(process_group: dist.ProcessGroup) -> timedelta | None:
    """The shortest timeout of the group's transports, which groups of some of its ranks should have too."""
    devices = [pair.partition(":")[0] for pair in dist.get_backend_config(process_group).split(",")]
    options = [getattr(process_group._get_backend(torch.device(device)), "options", None) for device in devices]
    return min((option._timeout for option in options if option is not None), default=None)


def deadline_of(process_group: dist.ProcessGroup) -> float:
    """Seconds that a step of the ranks may take: MOE_EP_DISPATCH_TIMEOUT_S, or the group's timeout if shorter."""
    of_group = timeout_of(process_group)
    return min(env.DISPATCH_TIMEOUT_S.get(), math.inf if of_group is None else of_group.total_seconds())


@functools.cache
def machine() -> str:
    """What tells this machine from all others: its name, which several may have, and the number of its last boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"


def this_host() -> str:
    """`machine`, followed by a number if MOE_EP_RANKS_PER_HOST makes one machine pass for several."""
    ranks_per_host = env.RANKS_PER_HOST.get()
    return f"{machine()}#{dist.get_rank() // ranks_per_host}" if ranks_per_host else machine()


def hosts_of(process_group: dist.ProcessGroup | None = None) -> tuple[str, ...]:
    """The host of each of the group's ranks; on first use all ranks must call it."""
    if not is_initialized():
        return (machine(),)
    return answers_of_ranks(("host", env.RANKS_PER_HOST.get()), this_host(), process_group)


def num_hosts(process_group: dist.ProcessGroup | None = None) -> int:
    """The number of machines that the group's ranks run on; on first use all ranks must call it."""
    return len(set(hosts_of(process_group)))


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

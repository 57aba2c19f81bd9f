"""Ranks tell each other a line of text, with a deadline: how things that must be the same everywhere are compared.

It goes through the store that the default group met in, so it needs no group of its own, reaches ranks of any group,
and a rank that does not come is named instead of being waited for forever.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from moe_ep import env
from moe_ep.errors import DispatchTimeoutError, rank_list

_SLEEP_S = 2e-3
_counts: dict[str, int] = {}


def meet(name: str, ranks: Sequence[int], text: str = "", timeout_s: float | None = None) -> list[str]:
    """The texts of `ranks` (of the default group, this one among them), in their order; a collective step of them.

    Args:
        name: what for; the n-th meeting of a name on one rank is the n-th on every other.
        timeout_s: how long to wait for the others; None for MOE_EP_DISPATCH_TIMEOUT_S.

    Raises:
        DispatchTimeoutError: somebody did not come; `ranks` holds the default group's ranks of those.
    """
    timeout_s = env.DISPATCH_TIMEOUT_S.get() if timeout_s is None else timeout_s
    store = dist.distributed_c10d._get_default_store()
    members = "-".join(map(str, ranks))
    _counts[f"{name}/{members}"] = number = _counts.get(f"{name}/{members}", 0) + 1
    keys = [f"moe_ep/nvshmem/{name}/{members}/{number}/{rank}" for rank in ranks]
    store.set(keys[list(ranks).index(dist.get_rank())], text)
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        if time.monotonic() > deadline:
            absent = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
            raise DispatchTimeoutError(
                f"{name}: {rank_list(absent)} of the default group did not come within {timeout_s:g} s; every rank "
                f"must make the same backends in the same order",
                absent,
            )
        time.sleep(_SLEEP_S)
    return [store.get(key).decode() for key in keys]


def agree(name: str, ranks: Sequence[int], facts: Mapping[str, object]) -> None:
    """Checks that all `ranks` hold the same facts; a collective step of them.

    Raises:
        ValueError: they do not; every rank gets the same sentence, which names what differs and where.
        DispatchTimeoutError: somebody did not come.
    """
    texts = meet(name, ranks, "\n".join(f"{key} = {value}" for key, value in facts.items()))
    told = [dict(line.split(" = ", 1) for line in text.splitlines()) for text in texts]
    differences = []
    for key in dict.fromkeys(key for facts_of in told for key in facts_of):
        values: dict[str, list[int]] = {}
        for rank, facts_of in enumerate(told):
            values.setdefault(facts_of.get(key, "nothing"), []).append(rank)
        if len(values) > 1:
            who = ", ".join(f"{value} on rank {' '.join(map(str, holders))}" for value, holders in values.items())
            differences.append(f"{key} is {who}")
    if differences:
        raise ValueError(f"{name}: the ranks are configured differently: {'; '.join(differences)}; make them the same")


def collect_garbage(ranks: Sequence[int]) -> None:
    """Ends layers that only the garbage collector would, where `ranks` are a part of the default group.

    Groups that divide it make symmetric memory together, so what each keeps for the next layer of a shape must not
    depend on when its processes happened to collect.
    """
    if dist.is_initialized() and len(ranks) < dist.get_world_size():
        gc.collect()

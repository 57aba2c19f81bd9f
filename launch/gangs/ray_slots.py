"""What room a Ray cluster has, and placement groups in it for the workers of a gang."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moe_ep.errors import GangError
from moe_ep.launch.gangs.gang import not_enough

# Ray frees what a gang before held a moment after its workers have ended.
_FREE_LIMIT_S = 5.0
_PLACE_LIMIT_S = 60.0


@dataclass(frozen=True)
class Slot:
    """Room for one worker: a bundle of a placement group, and the node it lies on."""

    node_ip: str
    placement_group: Any
    bundle: int


@dataclass(frozen=True)
class Room:
    """Free GPUs or CPUs of one node."""

    node_ip: str
    node_id: str
    count: int


def total_of(resource: str) -> int:
    """GPUs or CPUs of the cluster, free or not."""
    import ray

    return int(ray.cluster_resources().get(resource, 0))


def plan(resource: str, world_size: int) -> list[Room]:
    """How many workers go to which node, nodes in the order of their IPs.

    Raises:
        GangError: there is not enough room; says what is asked and what is there.
    """
    total = total_of(resource)
    deadline = time.monotonic() + (_FREE_LIMIT_S if total >= world_size else 0)
    while True:
        nodes = _room(resource)
        num_free = sum(node.count for node in nodes)
        if num_free >= world_size:
            break
        if time.monotonic() > deadline:
            where = ", ".join(f"{node.node_ip}: {node.count}" for node in nodes)
            raise not_enough(f"{resource}s", world_size, f"{num_free} free of {total} in the Ray cluster ({where})")
        time.sleep(0.1)
    chosen, left = [], world_size
    for node in nodes:
        if take := min(node.count, left):
            chosen.append(Room(node.node_ip, node.node_id, take))
            left -= take
    return chosen


def _room(resource: str) -> list[Room]:
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    nodes = [
        Room(node["NodeManagerAddress"], node["NodeID"], int(free.get(node["NodeID"], {}).get(resource, 0)))
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (ip_key(node.node_ip), node.node_id))


@contextlib.contextmanager
def slots(resource: str, world_size: int) -> Iterator[list[Slot]]:
    """Room for every worker: in the placement group this process runs in, else in one made for each node.

    Groups made here are removed at the end of the block.
    """
    import ray
    from ray.util import get_current_placement_group
    from ray.util.placement_group import placement_group, remove_placement_group

    inside = get_current_placement_group()
    if inside is not None:
        yield _slots_inside(inside, resource, world_size)
        return
    groups: list[Any] = []
    try:
        made = []
        for node in plan(resource, world_size):
            bundle = {resource: 1, f"node:{node.node_ip}": 0.001}
            groups.append(placement_group([bundle] * node.count, strategy="STRICT_PACK"))
            made += [Slot(node.node_ip, groups[-1], index) for index in range(node.count)]
        _, waiting = ray.wait([group.ready() for group in groups], num_returns=len(groups), timeout=_PLACE_LIMIT_S)
        if waiting:
            raise GangError(
                f"Ray did not place {len(waiting)} of {len(groups)} placement group(s) within {_PLACE_LIMIT_S:g} s; "
                f"somebody else took the room: try again or lower --ep-size"
            )
        yield made
    finally:
        if ray.is_initialized():  # no more where the cluster is gone
            for group in groups:
                remove_placement_group(group)


def _slots_inside(group: Any, resource: str, world_size: int) -> list[Slot]:
    import ray
    from ray.util import placement_group_table

    table = placement_group_table(group)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    found = [
        Slot(addresses[table["bundles_to_node_id"][index]], group, index)
        for index, bundle in table["bundles"].items()
        for _ in range(int(bundle.get(resource, 0)))
    ]
    if len(found) < world_size:
        raise not_enough(f"{resource}s", world_size, f"{len(found)} in the placement group this process runs in")
    return sorted(found, key=lambda slot: (ip_key(slot.node_ip), slot.bundle))[:world_size]


def ip_key(ip: str) -> tuple[int, tuple[int, ...], str]:
    """Sorts IPv4 addresses by their numbers, and anything else after them by its letters."""
    parts = ip.split(".")
    numeric = all(part.isdecimal() for part in parts)
    return (0, tuple(map(int, parts)), ip) if numeric else (1, (), ip)

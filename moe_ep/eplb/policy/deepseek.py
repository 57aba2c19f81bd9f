"""DeepSeek's balancer: replicas by the largest load per replica, placement longest first, the present ignored.

The algorithm is the one DeepSeek published with its Expert Parallelism Load Balancer (github.com/deepseek-ai/EPLB),
here written to work on all layers at once. Where groups of experts divide over hosts it is hierarchical: groups are
packed onto hosts, experts replicated within their host, replicas packed onto the host's ranks. Elsewhere it is global,
which is the same with one group and one host. It is the baseline that other policies are measured against.
"""

from __future__ import annotations

import numpy as np

from moe_ep.eplb.policy.maps import Array
from moe_ep.eplb.policy.problem import Problem


def pack_balanced(weight: Array, num_packs: int) -> tuple[Array, Array]:
    """Puts n items into packs of n / num_packs each, the heaviest first, each into the lightest pack with room.

    Args:
        weight: `[X, n]`.

    Returns:
        The pack of each item and its place within the pack, int64 `[X, n]` each.
    """
    num_rows, num_items = weight.shape
    capacity = num_items // num_packs
    if capacity == 1:
        pack = np.repeat(np.arange(num_items, dtype=np.int64)[None], num_rows, axis=0)
        return pack, np.zeros_like(pack)
    rows = np.arange(num_rows)
    order = np.argsort(-weight, axis=1, kind="stable")
    load = np.zeros((num_rows, num_packs))
    size = np.zeros((num_rows, num_packs), dtype=np.int64)
    pack = np.empty((num_rows, num_items), dtype=np.int64)
    place = np.empty_like(pack)
    for item in order.T:
        lightest = np.where(size < capacity, load, np.inf).argmin(axis=1)
        pack[rows, item] = lightest
        place[rows, item] = size[rows, lightest]
        load[rows, lightest] += weight[rows, item]
        size[rows, lightest] += 1
    return pack, place


def replicate_largest(weight: Array, num_replicas: int) -> tuple[Array, Array]:
    """Gives every expert a replica, then each further one to the expert with the largest load per replica.

    Args:
        weight: `[X, E]`.

    Returns:
        The expert of each replica, int64 `[X, num_replicas]`, and how many each expert has, int64 `[X, E]`.
    """
    num_rows, num_experts = weight.shape
    rows = np.arange(num_rows)
    expert = np.empty((num_rows, num_replicas), dtype=np.int64)
    expert[:, :num_experts] = np.arange(num_experts)
    counts = np.ones((num_rows, num_experts), dtype=np.int64)
    for replica in range(num_experts, num_replicas):
        largest = (weight / counts).argmax(axis=1)
        expert[:, replica] = largest
        counts[rows, largest] += 1
    return expert, counts


def _inverse(permutation: Array) -> Array:
    inverse = np.empty_like(permutation)
    np.put_along_axis(inverse, permutation, np.arange(permutation.shape[1], dtype=permutation.dtype)[None], axis=1)
    return inverse


def plan(problem: Problem) -> Array:
    """A placement by DeepSeek's algorithm, int64 `[L, P]`: hierarchical where hosts divide groups, else global."""
    weight, num_replicas, num_ranks = problem.weight, problem.num_replicas, problem.num_ranks
    num_groups, num_nodes = (problem.num_groups, problem.num_nodes) if problem.by_host else (1, 1)
    num_layers, num_experts = weight.shape
    if not num_layers:
        return np.empty((0, num_replicas), dtype=np.int64)
    group_size = num_experts // num_groups
    groups_per_node = num_groups // num_nodes

    # Groups onto hosts; from here on an expert's number is its place in host order.
    host, place = pack_balanced(weight.reshape(num_layers, num_groups, group_size).sum(axis=2), num_nodes)
    start = (host * groups_per_node + place) * group_size
    to_host_order = (start[:, :, None] + np.arange(group_size)).reshape(num_layers, num_experts)
    from_host_order = _inverse(to_host_order)

    # Replicas within each host, then onto its ranks.
    experts_per_node = num_experts // num_nodes
    host_weight = np.take_along_axis(weight, from_host_order, axis=1).reshape(-1, experts_per_node)
    expert, counts = replicate_largest(host_weight, num_replicas // num_nodes)
    unit = np.take_along_axis(host_weight / counts, expert, axis=1)
    rank, place = pack_balanced(unit, num_ranks // num_nodes)
    slots = _inverse(rank * (num_replicas // num_ranks) + place)

    in_host_order = np.take_along_axis(expert, slots, axis=1).reshape(num_layers, num_nodes, -1)
    in_host_order = in_host_order + np.arange(num_nodes)[:, None] * experts_per_node
    return np.take_along_axis(from_host_order, in_host_order.reshape(num_layers, num_replicas), axis=1)

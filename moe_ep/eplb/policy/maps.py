"""The three maps of a placement, the loads that follow from it, and what it takes to get from one to another.

A placement is `physical_to_logical` `[L, P]`: the logical expert in each of P slots, slots in rank order, P / R to a
rank. The other two follow from it. Everything here works on all layers at once in numpy.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def check_placement(physical_to_logical: Array, shape: tuple[int, int], num_experts: int, name: str) -> None:
    """Raises ValueError unless a placement `[L, P]` has this shape and a slot for every one of its experts."""
    if physical_to_logical.shape != shape:
        raise ValueError(f"{name} has shape {physical_to_logical.shape}; it must be (L, num_replicas) = {shape}")
    if not np.issubdtype(physical_to_logical.dtype, np.integer):
        raise ValueError(f"{name} has dtype {physical_to_logical.dtype}; it must hold integers")
    if physical_to_logical.size == 0:
        return
    low, high = physical_to_logical.min(), physical_to_logical.max()
    if low < 0 or high >= num_experts:
        raise ValueError(f"{name} holds expert {low if low < 0 else high}; experts are 0 to {num_experts - 1}")
    counts = replica_counts(physical_to_logical, num_experts)
    if counts.min() < 1:
        layer, expert = np.argwhere(counts == 0)[0]
        raise ValueError(f"{name} has no slot for expert {expert} in layer {layer}; every expert needs one")


def initial_placement(num_layers: int, num_experts: int, num_replicas: int) -> Array:
    """The placement before any plan, int64 `[L, P]`: expert i mod E in slot i."""
    row = np.arange(num_replicas, dtype=np.int64) % num_experts
    return np.repeat(row[None], num_layers, axis=0)


def replica_counts(physical_to_logical: Array, num_experts: int) -> Array:
    """How many slots hold each logical expert, int64 `[L, E]`, of a placement `[L, P]`."""
    num_layers = physical_to_logical.shape[0]
    flat = physical_to_logical + np.arange(num_layers)[:, None] * num_experts
    return np.bincount(flat.ravel(), minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def slots_by_expert(physical_to_logical: Array, num_experts: int) -> tuple[Array, Array, Array]:
    """The slots of a placement `[L, P]` sorted by the expert in them, those of an expert in rising order.

    Returns:
        The slots, `[L, P]`; where each expert's begin in them, int64 `[L, E]`; and how many it has, int64 `[L, E]`.
    """
    num_slots = physical_to_logical.shape[1]
    counts = replica_counts(physical_to_logical, num_experts)
    bits = max(num_slots - 1, 1).bit_length()
    # One sort of expert and slot packed in a word is several times faster than a stable argsort.
    dtype = np.dtype(np.int32 if bits + max(num_experts, 2).bit_length() < 31 else np.int64)
    key = physical_to_logical.astype(dtype) * dtype.type(1 << bits) + np.arange(num_slots, dtype=dtype)
    key.sort(axis=1)
    key &= dtype.type((1 << bits) - 1)
    return key, np.cumsum(counts, axis=1) - counts, counts


def logical_maps(physical_to_logical: Array, num_experts: int) -> tuple[Array, Array]:
    """The maps that follow from a placement `[L, P]`.

    Example: [[1, 0, 1]] with two experts gives [[[1, -1], [0, 2]]] and [[1, 2]].

    Returns:
        logical_to_physical int64 `[L, E, max_replicas]`, an expert's slots in rising order, -1 padded; and
        logical_replica_count int64 `[L, E]`. max_replicas is that of the most replicated expert of any layer.
    """
    slot, first, counts = slots_by_expert(physical_to_logical, num_experts)
    width = int(counts.max(initial=1))
    # An expert's row begins `width` entries after the one before, and its slots begin at `first`.
    start = np.arange(counts.size).reshape(counts.shape) * width - first
    table = np.full(counts.size * width, -1, dtype=np.int64)
    table[np.repeat(start.ravel(), counts.ravel()).reshape(slot.shape) + np.arange(slot.shape[1])] = slot
    return table.reshape(*counts.shape, width), counts


def slot_loads(weight: Array, physical_to_logical: Array) -> Array:
    """The load of each slot, `[L, P]`, when an expert's load `[L, E]` divides evenly over its replicas."""
    num_layers, num_experts = weight.shape
    unit = weight / np.maximum(replica_counts(physical_to_logical, num_experts), 1)
    return unit.ravel()[physical_to_logical + np.arange(num_layers)[:, None] * num_experts]


def rank_loads(weight: Array, physical_to_logical: Array, num_ranks: int) -> Array:
    """The load of each rank, `[L, R]`, under the same rule as `slot_loads`."""
    loads = slot_loads(weight, physical_to_logical)
    return loads.reshape(loads.shape[0], num_ranks, -1).sum(axis=2)


def experts_moved(old: Array, new: Array, num_ranks: int) -> Array:
    """How many experts must come to a rank that did not hold them, int64 `[L]`, from one placement to another.

    A copy between two slots of a rank is local and costs nothing here. An expert that arrives once and fills two slots
    of a rank counts once: it is sent once.
    """
    num_layers, num_slots = new.shape
    width = int(max(old.max(initial=0), new.max(initial=0))) + 1
    row = np.arange(num_layers)[:, None] * num_ranks + np.arange(num_slots) // (num_slots // num_ranks)
    held = np.zeros((2, num_layers * num_ranks * width), dtype=bool)
    held[0, row * width + old] = True
    held[1, row * width + new] = True
    return (held[1] & ~held[0]).reshape(num_layers, num_ranks * width).sum(axis=1)


def keep_slots(old: Array, new: Array, num_ranks: int) -> Array:
    """The placement `new` with the slots of each rank reordered so that experts which stay keep their slots.

    Placements `[L, P]`. Example with one rank: old [3, 1, 2], new [2, 5, 3] gives [3, 5, 2].
    """
    shape = new.shape
    before, after = old.reshape(shape[0] * num_ranks, -1), new.reshape(shape[0] * num_ranks, -1)
    differ = before != after
    changed = np.flatnonzero(differ.any(axis=1))
    # Most changed ranks have no expert that stays but lies elsewhere. Slots first: numpy is quick along long axes.
    had, has, differ = (np.ascontiguousarray(part[changed].T) for part in (before, after, differ))
    strays = np.logical_or.reduce((has[:, None] == had) & differ[:, None] & differ, axis=(0, 1))
    if not strays.any():
        return new
    changed, had, has = changed[strays], had[:, strays], has[:, strays]
    result, placed = np.full_like(has, -1), np.zeros(has.shape, dtype=bool)
    for slot, expert in enumerate(had):
        same = (has == expert) & ~placed
        rank = np.flatnonzero(np.logical_or.reduce(same, axis=0))
        result[slot, rank] = expert[rank]
        placed[same.argmax(axis=0)[rank], rank] = True
    result, has, placed = result.T.copy(), has.T, placed.T
    # Rank by rank as many slots are free as experts are left, and boolean indexing walks both in order of rank.
    result[result < 0] = has[~placed]
    full = after.copy()
    full[changed] = result
    return full.reshape(shape)


def ranks_with(slots: Array, num_experts: int, num_ranks: int) -> Array:
    """float32 `[L, R, E]`, 1 where a rank of a placement `[L, P]` holds an expert; -1 counts as the last expert."""
    held = np.zeros((len(slots), num_ranks, num_experts), dtype=np.float32)
    np.put_along_axis(held, slots.reshape(len(slots), num_ranks, -1) % num_experts, 1.0, axis=2)
    return held

"""Logical expert ids to physical ones, and the record of where the load falls.

Each rank levels what it sends. It knows its own choices, and with them how many of its tokens go to each rank; the
replicas of an expert are places where it may choose, so tokens pass from the fuller rank to the other. No rank is
asked: the total load is the sum of what the ranks send, and level parts make a level sum. Against a split by a hash
this halves the unevenness that chance leaves in a batch, and it follows experts that peak together in a batch.

The rule, for a tile of at most 1024 slots (rows of top_k), all in integers:

1. Candidates of an expert are up to 4 of its replicas in table order. The first one goes round with rank and tile, so
   that of the ranks that send it one token each replica gets its share; a replica on this rank changes places with it.
2. An expert's tokens are divided evenly, the first candidates getting the remainder.
3. In twelve turns, every third expert each time: half of what one candidate's rank has over another's passes between
   the two, as far as the expert's tokens there go; an odd one to the candidate that comes first. Which two these are
   goes round (`PAIRS`). All experts of a turn look at the same levels; that they take turns keeps two experts on the
   same ranks from answering each other forever.
4. The o-th token of an expert in the tile goes to the candidate into whose share o falls.

Tiles are independent, so a batch of any size takes as long as one tile on a GPU that holds them all. This is the rule
in plain torch; the kernel is `moe_ep.kernels.eplb_map`, equal bit for bit.
"""

from __future__ import annotations

import torch

from moe_ep.arguments import check_id_range, check_integers, check_same_device, check_tensors
from moe_ep.errors import check_at_least, one_of
from moe_ep.registry import choose_form

TILE_SLOTS = 1024
MAX_CANDIDATES = 4
NUM_TURNS, NUM_GROUPS = 12, 3
# By an expert's number of candidates: the two between which tokens pass in its first turn, its second, and so on.
PAIRS = {
    2: ((0, 1), (0, 1), (0, 1), (0, 1)),
    3: ((0, 1), (1, 2), (0, 2), (0, 1)),
    4: ((0, 1), (2, 3), (0, 2), (1, 3)),
}
EXPERT_STEP = 0x85EBCA6B
_WORD = (1 << 32) - 1
_INDICES_TYPES = (torch.int32, torch.int64)


def rows_per_tile(top_k: int) -> int:
    return max(TILE_SLOTS // max(top_k, 1), 1)


def map_reference(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    num_counted: int | torch.Tensor,
    ep_rank: int,
    slots_per_rank: int,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Physical ids `[T, top_k]`; arguments as in `eplb_map_to_physical_and_record`, rows from num_counted on are
    padding, slots_per_rank physical experts are on each rank. Ids of no expert are none (-1)."""
    if not topk_ids.numel():
        return topk_ids.to(dtype)
    num_tokens, top_k = topk_ids.shape
    ids = topk_ids.long()
    ids = torch.where(ids < len(logical_to_physical_map), ids, -1)
    num_rows = rows_per_tile(top_k)
    missing = -num_tokens % num_rows
    tiles = torch.nn.functional.pad(ids, (0, 0, 0, missing), value=-1).view(-1, num_rows * top_k)
    row = torch.arange(num_tokens + missing, device=ids.device).repeat_interleave(top_k).view_as(tiles)
    counted = (tiles >= 0) & (row < num_counted)

    tile = torch.arange(tiles.size(0), device=ids.device)
    physical, load = map_tiles(
        tiles,
        counted,
        logical_to_physical_map.long(),
        logical_replica_count.long(),
        torch.full_like(tile, ep_rank),
        tile,
        slots_per_rank,
        expert_load_view.numel(),
    )
    expert_load_view += load.to(expert_load_view.dtype)
    return physical.view(-1, top_k)[:num_tokens].to(dtype)


def map_tiles(
    tiles: torch.Tensor,
    counted: torch.Tensor,
    table: torch.Tensor,
    replicas: torch.Tensor,
    ranks: torch.Tensor,
    numbers: torch.Tensor,
    slots_per_rank: int,
    num_physical: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Physical ids `[tiles, slots]` and how often each physical expert is counted `[num_physical]`; all int64.

    Args:
        tiles: logical ids `[tiles, slots]`, -1 for none; tiles may be those of several ranks.
        counted: bool `[tiles, slots]`, False where the id is -1 or padding.
        table, replicas: `[E, max_replicas]` and `[E]`.
        ranks, numbers: `[tiles]`, the EP rank of each tile and its place among the tiles of its rank.
    """
    experts = tiles.clamp(min=0)
    tokens = torch.zeros(tiles.size(0), replicas.numel(), dtype=torch.int64, device=tiles.device)
    tokens.scatter_add_(1, experts, counted.long())
    candidates, valid = _candidates(table, replicas, ranks[:, None], numbers[:, None], slots_per_rank)
    at = torch.where(valid, candidates // slots_per_rank, 0)
    shares = _level_by_turns(tokens, at, valid, -(-num_physical // slots_per_rank))

    place = _place_in_expert(torch.where(counted, experts, replicas.numel()), tokens)
    ends = torch.take_along_dim(shares.cumsum(dim=2), experts[..., None], dim=1)
    chosen = torch.where(counted, (place[..., None] >= ends).sum(dim=2), 0)
    physical = torch.take_along_dim(candidates.flatten(1), experts * candidates.size(2) + chosen, dim=1)
    load = torch.zeros(num_physical, dtype=torch.int64, device=tiles.device)
    load.scatter_add_(0, candidates.clamp(min=0).flatten(), shares.flatten())
    return torch.where(tiles >= 0, physical, -1), load


def _candidates(
    table: torch.Tensor, replicas: torch.Tensor, rank: torch.Tensor, tile: torch.Tensor, slots_per_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Physical experts `[tiles, E, C]` to choose from, in order, and which of them exist."""
    expert = torch.arange(replicas.numel(), device=table.device)
    start = rank + tile + (((expert * EXPERT_STEP) & _WORD) * replicas >> 32)
    place = torch.arange(min(table.size(1), MAX_CANDIDATES), device=table.device)
    column = (start[..., None] + place) % replicas[:, None]
    candidates = torch.take_along_dim(table[None], column, dim=2)
    valid = (place < replicas[:, None]).expand_as(candidates)
    own = valid & (candidates // slots_per_rank == rank[..., None])
    # If no candidate is on this rank, the first one changes places with itself.
    source = own.int().argmax(dim=2, keepdim=True)
    order = torch.where(place == 0, source, torch.where(place == source, 0, place))
    return torch.take_along_dim(candidates, order, dim=2), valid


def _level_by_turns(tokens: torch.Tensor, ranks: torch.Tensor, valid: torch.Tensor, num_levels: int) -> torch.Tensor:
    """Tokens `[tiles, E]` divided over their candidates on these ranks, `[tiles, E, C]`."""
    place = torch.arange(valid.size(2), device=tokens.device)
    width = valid.sum(dim=2, keepdim=True)
    shares = torch.where(valid, tokens[..., None] // width + (place < tokens[..., None] % width), 0)
    # Experts with one candidate need no turns; to leave them out takes a look at the maps, which on a GPU would wait.
    several = torch.arange(tokens.size(1), device=tokens.device)
    if not tokens.is_cuda:
        several = several[(width > 1).any(dim=0).flatten()]
    part, at, width = shares[:, several], ranks[:, several], width[:, several, 0]
    beneath = _levels(ranks, shares, num_levels) - _levels(at, part, num_levels)
    for turn in range(NUM_TURNS):
        levels = beneath + _levels(at, part, num_levels)
        height = torch.take_along_dim(levels, at.flatten(1), dim=1).view_as(part)
        on_turn = (several + turn) % NUM_GROUPS == 0
        for count in range(2, part.size(2) + 1):
            one, other = PAIRS[count][turn // NUM_GROUPS]
            passed = (height[..., other] - height[..., one] + 1) >> 1
            passed = passed.clamp(min=-part[..., one], max=part[..., other])
            passed = torch.where(on_turn & (width == count), passed, 0)
            part[..., one] += passed
            part[..., other] -= passed
    shares[:, several] = part
    return shares


def _levels(ranks: torch.Tensor, shares: torch.Tensor, num_levels: int) -> torch.Tensor:
    """The tokens that go to each rank, `[tiles, num_levels]`."""
    levels = shares.new_zeros(shares.size(0), num_levels)
    return levels.scatter_add_(1, ranks.flatten(1), shares.flatten(1))


def _place_in_expert(experts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """How many slots of the same expert come before each slot of a tile; slots of expert E come last."""
    order = experts.argsort(dim=1, stable=True)
    first = torch.nn.functional.pad(tokens.cumsum(dim=1), (1, 0))
    position = torch.arange(experts.size(1), device=experts.device).expand_as(order)
    place = torch.empty_like(order).scatter_(1, order, position)
    return place - torch.take_along_dim(first, experts, dim=1)


def eplb_map_to_physical_and_record(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    indices_type: torch.dtype | None = None,
    num_unpadded_tokens: int | torch.Tensor | None = None,
    *,
    ep_rank: int = 0,
    ep_size: int | None = None,
) -> torch.Tensor:
    """Chooses a replica for every slot of this rank's tokens and counts it.

    The rule is that of `moe_ep.eplb.mapping`: tokens go where this rank's tokens leave room, whole batches at a time,
    without asking other ranks. On CUDA tensors it is one kernel. No host synchronisation.

    Example: ids [[0, -1], [1, 0]], map [[0, 2], [1, -1]], count [2, 1]: expert 0 has two tokens and two replicas and
    gives each one. Result [[0, -1], [1, 2]], and the load grows by [1, 1, 1].

    Args:
        topk_ids: integer `[T, top_k]`, logical, -1 for none. On a GPU, where to check them would wait for it, ids of E
            and more are none too.
        expert_load_view: int32 `[num_physical]`, this layer's counts, added to in place.
        logical_to_physical_map: integer `[E, max_replicas]`, -1 padded.
        logical_replica_count: integer `[E]`, at least 1 each.
        indices_type: dtype of the result, int32 or int64; None keeps that of topk_ids, which must have room for
            physical ids.
        num_unpadded_tokens: rows that are real, an int or a 0-dim integer tensor on the device; rows behind them are
            mapped and not counted. None means all.
        ep_rank: whose tokens these are; ranks begin with different replicas.
        ep_size: ranks that hold the physical experts, as many each; their loads are levelled. None levels those of the
            physical experts themselves.

    Returns:
        Physical ids `[T, top_k]`; -1 stays -1 and is not counted.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, an ep_size that does not divide the physical
            experts, or on the CPU an id of E or more, or maps that name replicas or physical experts that are not.
        TypeError: a rank or a number of tokens that is not a whole number.
    """
    _check(topk_ids, expert_load_view, logical_to_physical_map, logical_replica_count)
    num_physical = expert_load_view.numel()
    check_at_least(0, ep_rank=ep_rank)
    if ep_size is not None:
        check_at_least(1, ep_size=ep_size)
        if num_physical % ep_size or ep_rank >= ep_size:
            raise ValueError(
                f"ep_rank is {ep_rank} and ep_size {ep_size} with {num_physical} physical experts; ep_size must divide "
                f"them and ep_rank be below it"
            )
    if indices_type is not None and indices_type not in _INDICES_TYPES:
        raise ValueError(one_of("indices_type", str(indices_type), [str(dtype) for dtype in _INDICES_TYPES]))
    dtype = indices_type or topk_ids.dtype
    check_id_range(num_physical, dtype)
    slots_per_rank = 1 if ep_size is None else num_physical // ep_size
    num_counted = _num_counted(num_unpadded_tokens, topk_ids)
    maps = logical_to_physical_map, logical_replica_count
    form = choose_form(map_reference, "eplb_map:map_and_record", topk_ids, needs="nvrtc")
    physical: torch.Tensor = form(topk_ids, expert_load_view, *maps, num_counted, ep_rank, slots_per_rank, dtype)
    return physical


def _num_counted(num_unpadded_tokens: int | torch.Tensor | None, topk_ids: torch.Tensor) -> int | torch.Tensor:
    if num_unpadded_tokens is None:
        return topk_ids.size(0)
    if isinstance(num_unpadded_tokens, torch.Tensor):
        check_integers(num_unpadded_tokens=num_unpadded_tokens)
        check_same_device("topk_ids", topk_ids.device, num_unpadded_tokens=num_unpadded_tokens)
        if num_unpadded_tokens.dim():
            raise ValueError(f"num_unpadded_tokens has shape {tuple(num_unpadded_tokens.shape)}; it must be one number")
        return num_unpadded_tokens
    check_at_least(0, num_unpadded_tokens=num_unpadded_tokens)
    return int(num_unpadded_tokens)


def _check(
    topk_ids: torch.Tensor, expert_load_view: torch.Tensor, table: torch.Tensor, replica_count: torch.Tensor
) -> None:
    others = {"logical_to_physical_map": table, "logical_replica_count": replica_count}
    check_tensors(topk_ids=topk_ids, expert_load_view=expert_load_view, **others)
    if topk_ids.dim() != 2:
        raise ValueError(f"topk_ids has shape {tuple(topk_ids.shape)}; it must be (T, top_k)")
    if table.dim() != 2 or replica_count.shape != table.shape[:1]:
        raise ValueError(
            f"logical_to_physical_map has shape {tuple(table.shape)} and logical_replica_count "
            f"{tuple(replica_count.shape)}; they must be (E, max_replicas) and (E,), one layer's rows"
        )
    if expert_load_view.dim() != 1:
        raise ValueError(
            f"expert_load_view has shape {tuple(expert_load_view.shape)}; it must be (num_physical,), one layer's row"
        )
    # The kernel reads them by their addresses.
    if expert_load_view.dtype is not torch.int32:
        raise ValueError(f"expert_load_view is {expert_load_view.dtype}; it must be torch.int32")
    check_integers(topk_ids=topk_ids, **others)
    check_same_device("topk_ids", topk_ids.device, expert_load_view=expert_load_view, **others)
    # On a GPU this would wait for the device.
    if topk_ids.device.type != "cpu" or not topk_ids.numel():
        return
    if (largest := int(topk_ids.max())) >= len(table):
        raise ValueError(f"topk_ids holds expert {largest}; the maps are of experts 0 to {len(table) - 1}")
    _check_maps(table, replica_count, expert_load_view.numel())


def _check_maps(table: torch.Tensor, replica_count: torch.Tensor, num_physical: int) -> None:
    """ValueError unless every expert has replicas, and all of them are physical experts."""
    if not len(table):
        return
    least, most = (int(bound) for bound in replica_count.aminmax())
    if least < 1 or most > table.size(1):
        raise ValueError(
            f"logical_replica_count goes from {least} to {most}; every expert must have at least 1 and at most the "
            f"{table.size(1)} of logical_to_physical_map"
        )
    named = table[torch.arange(table.size(1), device=table.device) < replica_count[:, None]]
    least, most = (int(bound) for bound in named.aminmax())
    if least < 0 or most >= num_physical:
        raise ValueError(
            f"logical_to_physical_map names physical experts from {least} to {most}; they must be at least 0 and below "
            f"those of expert_load_view ({num_physical})"
        )

"""How a rank divides its tokens over the replicas of their experts: the rule, in plain torch.

Each rank levels what it sends. It knows its own choices, and with them how many of its tokens go to each rank; the
replicas of an expert are places where it may choose, so tokens pass from the fuller rank to the other. Nobody is asked:
the total load is the sum of what the ranks send, and level parts make a level sum. Against a split by a hash this
halves the unevenness that chance leaves in a batch, and it follows experts that peak together in a batch.

The rule, for a tile of at most 1024 slots (rows of top_k), all in integers:

1. Candidates of an expert are up to 4 of its replicas in table order, from a start that goes round with rank and tile,
   so that of the ranks that send it one token each replica gets its share; a replica on this rank changes places with
   the first.
2. An expert's tokens are divided evenly, the first candidates getting the remainder.
3. In twelve turns, every third expert each time: half of what one candidate's rank has over another's passes between
   the two, as far as the expert's tokens there go; an odd one to the candidate that comes first. Which two these are
   goes round (`PAIRS`). All experts of a turn look at the same levels; that they take turns keeps two experts on the
   same ranks from answering each other forever.
4. The o-th token of an expert in the tile goes to the candidate into whose share o falls.

Tiles are independent, so a batch of any size takes as long as one tile on a GPU that holds them all. The kernel is
`moe_ep.kernels.eplb_map`, equal bit for bit.
"""

from __future__ import annotations

import torch

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


def rows_per_tile(top_k: int) -> int:
    """Rows of a tile."""
    return max(TILE_SLOTS // max(top_k, 1), 1)


def map_reference(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    num_counted: int | torch.Tensor,
    ep_rank: int,
    slots_per_rank: int,
) -> torch.Tensor:
    """Physical ids int64 `[T, top_k]`; arguments as in `eplb_map_to_physical_and_record`, rows from num_counted on are
    padding, slots_per_rank physical experts are on each rank. Ids of no expert are none (-1)."""
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
    return physical.view(-1, top_k)[:num_tokens]


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

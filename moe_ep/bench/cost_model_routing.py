"""Where tokens go that choose alike among all experts: which ranks and hosts, and how uneven that leaves the ranks.

Routers that keep some groups of experts for a token send it to fewer ranks, and load them less evenly, than those that
choose among all. No formula is as short as doing it, so everything here is counted over tokens that were drawn.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from moe_ep.bench.geometries import Geometry

_TOKENS = 16384


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of one token, on average.

    Attributes:
        ranks, hosts: that have one of its experts.
        variance: of the number of its experts on one rank, whose mean is top_k / R.
    """

    ranks: float
    hosts: float
    variance: float


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a step asks of the busiest of R ranks with T tokens each.

    Attributes:
        rows: expert assignments.
        active_experts: experts with tokens.
    """

    rows: float
    active_experts: float


@functools.lru_cache(maxsize=256)
def spread(geometry: Geometry, ep_size: int, gpus_per_host: int) -> Spread:
    """Where tokens go whose experts lie in order on the ranks.

    Where ranks do not divide the experts, or are more, replicas fill them up, and a token takes any of an expert's.

    Example: 256 experts on 8 ranks, top-8: 5.29 ranks; 3.95 where a token keeps 4 of 8 groups.
    """
    places = (_drawn(geometry) * ep_size).astype(np.int64)
    on_rank = np.zeros((_TOKENS, ep_size), dtype=np.int32)
    np.add.at(on_rank, (np.arange(_TOKENS)[:, None], places), 1)
    hosts = np.zeros((_TOKENS, -(-ep_size // gpus_per_host)), dtype=bool)
    hosts[np.arange(_TOKENS)[:, None], places // gpus_per_host] = True
    mean = geometry.top_k / ep_size
    return Spread(
        ranks=float((on_rank > 0).sum(axis=1).mean()),
        hosts=float(hosts.sum(axis=1).mean()),
        variance=float(np.square(on_rank - mean).mean()),
    )


def busiest_rank(geometry: Geometry, ep_size: int, num_tokens: int) -> Load:
    """What `num_tokens` of every rank ask of the rank that has most.

    Sums over many tokens are normal, and the most of R such numbers lies near their quantile (R - 3/8) / (R + 1/4).
    Experts with tokens vary as when each had tokens or not by itself, and more where those of a token lie together.
    """
    per_rank, k, tokens = experts_per_rank(geometry, ep_size), geometry.top_k, ep_size * num_tokens
    mean = num_tokens * k
    variance = tokens * spread(geometry, ep_size, ep_size).variance
    idle = (1 - k / (per_rank * ep_size)) ** tokens
    of_active = max(per_rank * idle * (1 - idle) + idle * idle * (variance - mean), 0.0)
    most = NormalDist().inv_cdf((ep_size - 0.375) / (ep_size + 0.25))
    return Load(
        rows=mean + most * variance**0.5,
        active_experts=min(per_rank * (1 - idle) + most * of_active**0.5, float(per_rank)),
    )


def experts_per_rank(geometry: Geometry, ep_size: int) -> int:
    """Physical experts of a rank: the experts divided over the ranks, rounded up."""
    return -(-geometry.num_experts // ep_size)


def rows_sent(
    geometry: Geometry, ep_size: int, num_tokens: int, gpus_per_host: int, two_level: bool
) -> tuple[float, float]:
    """(rows over a GPU's links to its host, rows over the network), in one dispatch; a rank keeps what is its own."""
    reached = spread(geometry, ep_size, gpus_per_host)
    if ep_size <= gpus_per_host:
        return num_tokens * reached.ranks * (ep_size - 1) / ep_size, 0.0
    hosts = ep_size // gpus_per_host
    to_own_host = reached.ranks / hosts
    to_others = reached.ranks - to_own_host
    over_network = reached.hosts * (hosts - 1) / hosts if two_level else to_others
    own = to_own_host * (gpus_per_host - 1) / gpus_per_host
    # What arrives over the network is passed on to the ranks of the host that are not where it arrived.
    passed_on = to_others * (gpus_per_host - 1) / gpus_per_host if two_level else 0.0
    return num_tokens * (own + passed_on), num_tokens * over_network


@functools.lru_cache(maxsize=8)
def _drawn(geometry: Geometry) -> np.ndarray:
    """Where the experts that tokens chose lie, f64 `[tokens, top_k]` in [0, 1): anywhere within an expert's share."""
    generator, E, routing = np.random.default_rng(0), geometry.num_experts, geometry.routing
    scores = generator.random((_TOKENS, E), dtype=np.float32)
    if routing.use_grouped_topk and routing.num_expert_group and routing.topk_group:
        groups = np.sort(scores.reshape(_TOKENS, routing.num_expert_group, -1), axis=2)
        # With a bias a group counts as its two best experts together.
        value = groups[:, :, -2:].sum(axis=2) if routing.has_correction_bias else groups[:, :, -1]
        left_out = np.argsort(value, axis=1)[:, : routing.num_expert_group - routing.topk_group]
        scores.reshape(groups.shape)[np.arange(_TOKENS)[:, None], left_out] = -1.0
    ids = np.argpartition(scores, E - geometry.top_k, axis=1)[:, E - geometry.top_k :]
    return (ids + generator.random(ids.shape)) / E

"""Predicts the time of a MoE layer on more ranks than can be measured: bytes and operations over measured rates.

One step of one layer on the busiest of R ranks, T tokens each, uniform routing, stages one after the other:

    experts   a latency, active experts x bytes at the memory's rate, and rows x operations at that of the matrix units,
              each over the share of it that the experts reach; one after the other: dequantizing leaves little room to
              overlap
    dispatch  a latency, and the larger of the bytes over the links of a host and over the network, there
    combine   the same, back

A token goes once to every rank with one of its experts. Across hosts it goes once to every HOST that has one, to the
GPU of the sender's index there, which passes it on over the host's links, where `two_level` is set. Where the ranks do
not divide the experts, replicas fill them up and are counted as experts of their own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from moe_ep.bench.geometries import Geometry
from moe_ep.errors import check_at_least, check_number, check_whole

# No cluster comes near it. Far beyond it the quantile of the busiest rank rounds to 1.
MOST_RANKS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one GPU and its links; the defaults are those of H200s, the network's is 400 Gb/s.

    Attributes:
        gpus_per_host: ranks that reach each other over the host's links.
        memory_bytes_per_s, flops_per_s: what streams of weights, which are only read, and matrix products reach.
        link_bytes_per_s: out of one GPU to others of its host, all of them at once.
        network_bytes_per_s: out of one GPU to other hosts; a GPU has its own network card.
        link_latency_us, network_latency_us: of one dispatch or combine of hardly any bytes.
        experts_latency_us: of experts of hardly any bytes and rows.
        alone_us: more of them where there is one rank, which sorts tokens by expert and adds them up.
        memory_efficiency, compute_efficiency: shares of those rates that the experts reach.
        wire_efficiency: share of the links' rate that dispatch and combine reach.

    Raises:
        ValueError: a number that is not above 0, or not finite.
        TypeError: a value that is not a number, or gpus_per_host that is not whole.
    """

    gpus_per_host: int = 8
    memory_bytes_per_s: float = 4.54e12
    flops_per_s: float = 790e12
    link_bytes_per_s: float = 325e9
    network_bytes_per_s: float = 50e9
    link_latency_us: float = 8.0
    network_latency_us: float = 20.0
    experts_latency_us: float = 6.0
    alone_us: float = 12.0
    memory_efficiency: float = 1.0
    compute_efficiency: float = 0.82
    wire_efficiency: float = 0.9
    route_us: float = 6.0
    memory_bytes: float = 141e9

    def __post_init__(self) -> None:
        check_whole(gpus_per_host=self.gpus_per_host)
        for name, value in vars(self).items():
            check_number(**{name: value})
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; it must be above 0, and finite")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One layer's step on the busiest rank.

    Attributes:
        bottleneck: the largest of memory, compute, links, network and latency.
        link_bytes, network_bytes: that leave a GPU in the dispatch.
        weights_bytes: of all MoE layers of the model on one rank.
        tokens_per_s: of all ranks through all MoE layers of the model.
    """

    ep_size: int
    tokens_per_rank: int
    route_us: float
    dispatch_us: float
    experts_us: float
    combine_us: float
    bottleneck: str
    active_experts: float
    link_bytes: float
    network_bytes: float
    weights_bytes: float
    tokens_per_s: float

    @property
    def step_us(self) -> float:
        return self.route_us + self.dispatch_us + self.experts_us + self.combine_us


def predict(
    geometry: Geometry, ep_size: int, tokens_per_rank: int, machine: Machine, *, wire_bytes: int = 2,
    combine_bytes: int = 2, two_level: bool = True,
) -> Step:  # fmt: skip
    """The step at one EP size.

    Args:
        wire_bytes: of a number in the dispatch, 2 for bf16, 4 for f32 and 1 for fp8 (whose scales are counted).
        combine_bytes: of a number in the combine, 2 or 4.
        two_level: across hosts, a token is sent once to each host.

    Raises:
        ValueError: an EP size that is neither a part of a host nor whole hosts, or another number out of its range.
        TypeError: a size or a number of tokens that is not whole.
    """
    check_whole(ep_size=ep_size)
    check_at_least(0, tokens_per_rank=tokens_per_rank)
    if wire_bytes not in (1, 2, 4):
        raise ValueError(f"wire_bytes is {wire_bytes}; it must be 2 for bf16, 4 for f32, or 1 for fp8")
    if combine_bytes not in (2, 4):
        raise ValueError(f"combine_bytes is {combine_bytes}; it must be 2 for bf16, or 4 for f32")
    K = geometry.hidden_size
    if ep_size < 1 or (ep_size > machine.gpus_per_host and ep_size % machine.gpus_per_host):
        raise ValueError(
            f"ep_size is {ep_size}; it must be at least 1, and beyond a host a multiple of its "
            f"{machine.gpus_per_host} GPUs"
        )
    if ep_size > MOST_RANKS:
        raise ValueError(f"ep_size is {ep_size}; it must be at most {MOST_RANKS}")
    per_rank = experts_per_rank(geometry, ep_size)
    there, back = _row_bytes(K, wire_bytes), _row_bytes(K, combine_bytes)
    rows_link, rows_network = rows_sent(geometry, ep_size, tokens_per_rank, machine.gpus_per_host, two_level)
    load = busiest_rank(geometry, ep_size, tokens_per_rank)
    _, weights_us, products_us = experts = _experts_us(geometry, load, machine, ep_size)
    experts_us = sum(experts)
    dispatch_us, parts = _wire(rows_link * there, rows_network * there, ep_size, machine)
    combine_us, _ = _wire(rows_link * back, rows_network * back, ep_size, machine)
    shares = {"memory": weights_us, "compute": products_us, **{name: 2 * us for name, us in parts.items()}}
    step_us = machine.route_us + dispatch_us + experts_us + combine_us
    return Step(
        ep_size=ep_size,
        tokens_per_rank=tokens_per_rank,
        route_us=machine.route_us,
        dispatch_us=dispatch_us,
        experts_us=experts_us,
        combine_us=combine_us,
        bottleneck=max(shares, key=lambda name: shares[name]),
        active_experts=load.active_experts,
        link_bytes=rows_link * there,
        network_bytes=rows_network * there,
        weights_bytes=geometry.num_layers * per_rank * geometry.bytes_per_expert,
        tokens_per_s=tokens_per_rank * ep_size / (geometry.num_layers * step_us) * 1e6,
    )


def experts_floors_us(geometry: Geometry, load: Load, machine: Machine) -> tuple[float, float]:
    """(microseconds to read the active experts, microseconds of their rows' operations) at the machine's rates."""
    memory = load.active_experts * geometry.bytes_per_expert / machine.memory_bytes_per_s
    compute = load.rows * geometry.flops_per_row / machine.flops_per_s
    return memory * 1e6, compute * 1e6


def _experts_us(geometry: Geometry, load: Load, machine: Machine, ep_size: int) -> tuple[float, float, float]:
    """Microseconds of one rank's experts: fixed, to read weights, and of products."""
    weights_us, products_us = experts_floors_us(geometry, load, machine)
    fixed_us = machine.experts_latency_us + (machine.alone_us if ep_size == 1 else 0.0)
    return fixed_us, weights_us / machine.memory_efficiency, products_us / machine.compute_efficiency


def uneven_step_us(
    geometry: Geometry,
    tokens_per_rank: int,
    machine: Machine,
    rows: np.ndarray,
    active_experts: np.ndarray,
    copies: Sequence[tuple[int, int, int, int]] = (),
) -> float:
    """Microseconds of one layer's step in which the ranks have these rows and active experts, `[R]` each.

    Rows are sent as in `predict`. Copies of experts, (expert, from rank, to rank, slot), go over the same links before
    them; nothing of that is hidden behind anything.

    Raises:
        ValueError: as `predict`.
    """
    ep_size = len(rows)
    even = predict(geometry, ep_size, tokens_per_rank, machine)
    loads = [Load(rows=float(r), active_experts=float(a)) for r, a in zip(rows, active_experts, strict=True)]
    experts_us = max(sum(_experts_us(geometry, load, machine, ep_size)) for load in loads)
    host, busiest = machine.gpus_per_host, 0.0
    for rank in range(ep_size):
        for mine, other in ((1, 2), (2, 1)):
            peers = [copy[other] for copy in copies if copy[mine] == rank]
            near = sum(peer // host == rank // host for peer in peers) * geometry.bytes_per_expert
            far = len(peers) * geometry.bytes_per_expert - near
            busiest = max(busiest, near / machine.link_bytes_per_s, far / machine.network_bytes_per_s)
    return even.step_us - even.experts_us + experts_us + busiest / machine.wire_efficiency * 1e6


def _row_bytes(hidden_size: int, wire_bytes: int) -> int:
    """Bytes of a row in the dispatch; rows of 8-bit numbers have a scale for every 128."""
    return hidden_size * wire_bytes + (4 * -(-hidden_size // 128) if wire_bytes == 1 else 0)


def _wire(link_bytes: float, network_bytes: float, ep_size: int, machine: Machine) -> tuple[float, dict[str, float]]:
    """(microseconds of one direction, by what they are spent on)."""
    if ep_size == 1:
        return 0.0, {"links": 0.0}
    link = link_bytes / (machine.link_bytes_per_s * machine.wire_efficiency) * 1e6
    network = network_bytes / (machine.network_bytes_per_s * machine.wire_efficiency) * 1e6
    latency = machine.link_latency_us if ep_size <= machine.gpus_per_host else machine.network_latency_us
    parts = {"latency": latency, **({"network": network} if network > link else {"links": link})}
    return sum(parts.values()), parts


def calibrated(machine: Machine, geometry: Geometry, rows: Sequence[dict[str, Any]]) -> Machine:
    """The machine with rates, latencies and efficiencies as measured by the geometry's rows of `moe-ep bench scaling`.

    Ceilings are the rows' own. Latencies and efficiencies are those that leave the least squares of relative errors
    over rows of uniform routing: of the wire by the stage of dispatch, since that of combine holds the wait for the
    busiest rank, and of the experts by what is left of the step. A row's stages are scaled to add up to its step:
    events between them take time too.

    Raises:
        ValueError: no rows of uniform routing, or those of a single rank alone.
    """
    rows = uniform_rows(rows)
    several = [row for row in rows if row["ep_size"] > 1 and row.get("link_gb_per_s")]
    if not several:
        raise ValueError("there are no rows of uniform routing over more than one rank; measure at least EP size 2")
    machine = replace(
        machine,
        memory_bytes_per_s=several[0]["memory_tb_per_s"] * 1e12,
        flops_per_s=several[0]["tflop_per_s"] * 1e12,
        link_bytes_per_s=several[0]["link_gb_per_s"] * 1e9,
        route_us=sorted(_stage_us(row, "route") for row in rows)[len(rows) // 2],
    )
    links = [_dispatched_us(row, geometry, machine) for row in several]
    latency, per_link_us = _fit([(1.0, us) for us in links], [_stage_us(row, "dispatch") for row in several])
    machine = replace(
        machine,
        link_latency_us=latency,
        network_latency_us=max(machine.network_latency_us, latency),
        wire_efficiency=1 / per_link_us,
    )
    terms, times = [], []
    for row in rows:
        load, is_alone = busiest_rank(geometry, row["ep_size"], row["tokens_per_rank"]), row["ep_size"] == 1
        wire_us = 0.0 if is_alone else 2 * latency + per_link_us * _link_us(row, machine)
        terms.append((1.0, float(is_alone), *experts_floors_us(geometry, load, machine)))
        # Where times are uneven, as on CPUs, nothing may be left.
        times.append(max(row["us"] - machine.route_us - wire_us, _stage_us(row, "experts") / 2))
    fixed, alone, per_weights_us, per_products_us = _fit(terms, times)
    return replace(
        machine,
        # The rows' rate is that of reads and writes; experts, which hardly write, may reach more.
        memory_bytes_per_s=machine.memory_bytes_per_s * max(1.0, 1 / per_weights_us),
        experts_latency_us=fixed,
        alone_us=alone if len(several) < len(rows) else machine.alone_us,
        memory_efficiency=min(1.0, 1 / per_weights_us),
        compute_efficiency=1 / per_products_us,
    )


def uniform_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of uniform routing without balancing, each once: weak and strong scaling share measurements."""
    found = {}
    for row in rows:
        if row["routing"] == "uniform" and row.get("eplb") != "on":
            found[tuple(row.get(key) for key in _MEASUREMENT)] = row
    return list(found.values())


_MEASUREMENT = ("phase", "ep_size", "tokens_per_rank", "backend", "wire", "us")


def bytes_of(row: dict[str, Any]) -> tuple[int, int]:
    """(wire_bytes, combine_bytes) of a measured row, as `predict` takes them; activations are f32 on CPUs."""
    activations = 2 if row.get("cuda") else 4
    return (1 if row["wire"] in ("fp8", "int8") else activations), activations


def _link_us(row: dict[str, Any], machine: Machine) -> float:
    """Microseconds of the rows that leave a rank, there and back, at the link's rate."""
    return float(row["bytes_sent"]) / machine.link_bytes_per_s * 1e6


def _dispatched_us(row: dict[str, Any], geometry: Geometry, machine: Machine) -> float:
    """The same of the dispatch alone."""
    there, back = (_row_bytes(geometry.hidden_size, size) for size in bytes_of(row))
    return _link_us(row, machine) * there / (there + back)


def _stage_us(row: dict[str, Any], stage: str) -> float:
    stages: dict[str, float] = row["stages_us"]
    return stages.get(stage, 0.0) * float(row["us"]) / sum(stages.values())


def _fit(terms: Sequence[tuple[float, ...]], times: Sequence[float]) -> list[float]:
    """Factors above 0 of time = sum of factor x term, with the least squares of relative errors.

    A term whose factor would not be above 0 is taken together with the last one: they cannot be told from each other.
    """
    shares = np.array(terms) / np.array(times)[:, None]
    alike = list(range(shares.shape[1]))  # term -> the term that it is taken with
    while True:
        kept = sorted(set(alike))
        merged = np.stack([shares[:, [i for i, at in enumerate(alike) if at == term]].sum(axis=1) for term in kept], 1)
        factors, _, rank, _ = np.linalg.lstsq(merged, np.ones(len(times)), rcond=1e-6)
        wrong = [term for term, factor in zip(kept, factors, strict=True) if factor <= 0]
        if len(kept) == 1 or (not wrong and rank == len(kept)):
            return [float(factors[kept.index(at)]) for at in alike]
        first, last = (wrong or kept)[0], kept[-1]
        alike = [(last if first != last else kept[-2]) if at == first else at for at in alike]


# Where tokens go, and how uneven that leaves the ranks, is counted over tokens that are drawn: routers that keep some
# groups of experts for a token send it to fewer ranks, and load them less evenly, than those that choose among all, and
# no formula for that is as short.
_TOKENS = 16384


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Where the experts of one token lie, on average.

    Attributes:
        variance: of the number of its experts on one rank, whose mean is top_k / R.
    """

    ranks: float
    hosts: float
    variance: float


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work of the busiest of R ranks with T tokens each."""

    rows: float
    active_experts: float


@functools.lru_cache(maxsize=256)
def spread(geometry: Geometry, ep_size: int, gpus_per_host: int) -> Spread:
    """Where tokens go whose experts lie in order on the ranks.

    Where ranks do not divide the experts, or are more, replicas fill them up, and a token takes any of an expert's.

    Example: 256 experts on 8 ranks, top-8: 5.29 ranks; 3.95 where a token keeps 4 of 8 groups.
    """
    places = np.sort((_drawn(geometry) * ep_size).astype(np.int64), axis=1)
    # Summed over ranks, the squares of a token's numbers of experts are its pairs of experts on the same rank.
    pairs = int((places[:, :, None] == places[:, None, :]).sum())
    return Spread(
        ranks=_distinct(places),
        hosts=_distinct(places // gpus_per_host),
        variance=pairs / (_TOKENS * ep_size) - (geometry.top_k / ep_size) ** 2,
    )


def _distinct(places: np.ndarray) -> float:
    """How many different places a token has on average, of sorted ones."""
    return 1 + float((places[:, 1:] != places[:, :-1]).sum(axis=1).mean())


def busiest_rank(geometry: Geometry, ep_size: int, num_tokens: int) -> Load:
    """The load of the busiest rank when every rank has `num_tokens`.

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

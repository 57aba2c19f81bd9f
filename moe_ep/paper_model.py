"""What a MoE layer should take on more ranks than can be measured: bytes and operations over measured rates.

One step of one layer on the busiest of R ranks, T tokens each, uniform routing, stages one after the other:

    experts   active experts x bytes at the memory's rate, and rows x operations at that of the matrix units, each over
              the share of it that the experts reach; one after the other: dequantizing leaves little room to overlap
    dispatch  a latency, and the larger of the bytes over the links of a host and over the network, there
    combine   the same, back

A token goes once to every rank that has one of its experts. Across hosts it goes once to every HOST that has one, to
the GPU of the sender's index there, which passes it on over the host's links, where `two_level` is set. Where the ranks
do not divide the experts, replicas fill them up and are counted as experts of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_ep.bench.geometries import Geometry


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one GPU and its links; the defaults were measured on 8 H200s of one host, the network's is 400 Gb/s.

    Attributes:
        gpus_per_host: ranks that reach each other over the host's links.
        memory_bytes_per_s, flops_per_s: what streams of weights and matrix products reach.
        link_bytes_per_s: out of one GPU to others of its host, all of them at once.
        network_bytes_per_s: out of one GPU to other hosts; a GPU has its own network card.
        link_latency_us, network_latency_us: of one dispatch or combine of hardly any bytes.
        memory_efficiency, compute_efficiency: shares of those rates that the experts reach; that of memory may be above
            1, since its rate is that of reads and writes, and experts hardly write.
        wire_efficiency: share of the links' rate that dispatch and combine reach.
        route_us: of router and mapping.
        memory_bytes: of one GPU.
    """

    gpus_per_host: int = 8
    memory_bytes_per_s: float = 4.3e12
    flops_per_s: float = 790e12
    link_bytes_per_s: float = 325e9
    network_bytes_per_s: float = 50e9
    link_latency_us: float = 8.0
    network_latency_us: float = 20.0
    memory_efficiency: float = 1.15
    compute_efficiency: float = 0.82
    wire_efficiency: float = 0.9
    route_us: float = 6.0
    memory_bytes: float = 141e9

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")


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


def expected_groups(num_experts: int, group_size: int, top_k: int) -> float:
    """Groups of experts that a token's top_k distinct experts fall into, on average.

    A group of g of E experts is missed with probability C(E - g, k) / C(E, k).

    Example: 256 experts on 8 ranks of 32, top-8: 5.29.
    """
    return num_experts / group_size * (1 - math.comb(num_experts - group_size, top_k) / math.comb(num_experts, top_k))


def experts_per_rank(geometry: Geometry, ep_size: int) -> int:
    """Physical experts of a rank: the experts divided over the ranks, rounded up."""
    return -(-geometry.num_experts // ep_size)


def predict(
    geometry: Geometry, ep_size: int, tokens_per_rank: int, machine: Machine, *, wire_bytes: int = 2,
    two_level: bool = True,
) -> Step:  # fmt: skip
    """The step at one EP size.

    Args:
        wire_bytes: of a number in the dispatch, 2 for bf16 and 1 for fp8 (whose scales are counted); combines are bf16.
        two_level: across hosts, a token travels once to each host.

    Raises:
        ValueError: an EP size that is neither a part of a host nor whole hosts.
    """
    K = geometry.hidden_size
    if ep_size < 1 or (ep_size > machine.gpus_per_host and ep_size % machine.gpus_per_host):
        raise ValueError(
            f"ep_size is {ep_size}; it must be at least 1, and beyond a host a multiple of its "
            f"{machine.gpus_per_host} GPUs"
        )
    per_rank = experts_per_rank(geometry, ep_size)
    there = K * wire_bytes + (4 * -(-K // 128) if wire_bytes == 1 else 0)
    rows_link, rows_network = rows_sent(geometry, ep_size, tokens_per_rank, machine.gpus_per_host, two_level)
    active = _active_experts(geometry, ep_size, tokens_per_rank)
    weights_us, products_us = experts_floors_us(geometry, active, tokens_per_rank * geometry.top_k, machine)
    weights_us, products_us = weights_us / machine.memory_efficiency, products_us / machine.compute_efficiency
    experts_us = weights_us + products_us
    dispatch_us, parts = _wire(rows_link * there, rows_network * there, ep_size, machine)
    combine_us, _ = _wire(rows_link * K * 2, rows_network * K * 2, ep_size, machine)
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
        active_experts=active,
        link_bytes=rows_link * there,
        network_bytes=rows_network * there,
        weights_bytes=geometry.num_layers * per_rank * geometry.bytes_per_expert,
        tokens_per_s=tokens_per_rank * ep_size / (geometry.num_layers * step_us) * 1e6,
    )


def rows_sent(
    geometry: Geometry, ep_size: int, num_tokens: int, gpus_per_host: int, two_level: bool
) -> tuple[float, float]:
    """(rows over a GPU's links to its host, rows over the network), in one dispatch; a rank keeps what is its own."""
    per_rank, k = experts_per_rank(geometry, ep_size), geometry.top_k
    E = per_rank * ep_size
    ranks = expected_groups(E, per_rank, k)
    if ep_size <= gpus_per_host:
        return num_tokens * ranks * (ep_size - 1) / ep_size, 0.0
    hosts = ep_size // gpus_per_host
    to_own_host = ranks / hosts
    over_network = (ranks - to_own_host) if not two_level else expected_groups(E, E // hosts, k) * (hosts - 1) / hosts
    own = to_own_host * (gpus_per_host - 1) / gpus_per_host
    # What arrives over the network is passed on to the ranks of the host that are not where it arrived.
    passed_on = (ranks - to_own_host) * (gpus_per_host - 1) / gpus_per_host if two_level else 0.0
    return num_tokens * (own + passed_on), num_tokens * over_network


def _active_experts(geometry: Geometry, ep_size: int, num_tokens: int) -> float:
    """Experts of a rank that have tokens."""
    per_rank = experts_per_rank(geometry, ep_size)
    return per_rank * (1 - (1 - geometry.top_k / (per_rank * ep_size)) ** (ep_size * num_tokens))


def experts_floors_us(geometry: Geometry, active: float, rows: float, machine: Machine) -> tuple[float, float]:
    """(microseconds to read the active experts, microseconds of their rows' operations) at the machine's rates."""
    memory = active * geometry.bytes_per_expert / machine.memory_bytes_per_s
    compute = rows * geometry.flops_per_row / machine.flops_per_s
    return memory * 1e6, compute * 1e6


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
    """The machine with rates, latency and efficiencies as measured by the geometry's rows of `moe-ep bench scaling`.

    Ceilings are the rows' own. The two efficiencies of the experts, and latency and efficiency of the wire, are those
    that leave the least squares of relative errors. A row's stages are scaled to add up to its step: events between
    them take time too.

    Raises:
        ValueError: no rows, or rows of a single rank alone.
    """
    several = [row for row in rows if row["ep_size"] > 1 and row.get("link_gb_per_s")]
    if not several:
        raise ValueError("there are no rows of more than one rank; measure at least EP size 2")
    machine = replace(
        machine,
        memory_bytes_per_s=several[0]["memory_tb_per_s"] * 1e12,
        flops_per_s=several[0]["tflop_per_s"] * 1e12,
        link_bytes_per_s=several[0]["link_gb_per_s"] * 1e9,
        route_us=sorted(_stage_us(row, "route") for row in rows)[len(rows) // 2],
    )
    floors = [
        experts_floors_us(geometry, row["active_experts_max"], max(row["rows_per_rank"]), machine) for row in rows
    ]
    per_byte, per_operation = _fit(floors, [_stage_us(row, "experts") for row in rows])
    wire_us = [_stage_us(row, "dispatch") + _stage_us(row, "combine") for row in several]
    links = [(2.0, row["bytes_sent"] / machine.link_bytes_per_s * 1e6) for row in several]
    latency, per_link_byte = _fit(links, wire_us)
    return replace(
        machine,
        memory_efficiency=1 / per_byte,
        compute_efficiency=1 / per_operation,
        link_latency_us=latency,
        network_latency_us=max(machine.network_latency_us, latency),
        wire_efficiency=1 / per_link_byte,
    )


def _stage_us(row: dict[str, Any], stage: str) -> float:
    stages: dict[str, float] = row["stages_us"]
    return stages.get(stage, 0.0) * float(row["us"]) / sum(stages.values())


def _fit(terms: Sequence[tuple[float, float]], times: Sequence[float]) -> tuple[float, float]:
    """Factors (a, b), above 0, of time = a x + b y with the least squares of (a x + b y) / time - 1."""
    xs, ys = ([term[i] / time for term, time in zip(terms, times, strict=True)] for i in (0, 1))
    xx, yy, xy = (sum(p * q for p, q in zip(u, v, strict=True)) for u, v in ((xs, xs), (ys, ys), (xs, ys)))
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        a, b = (sum(xs) * yy - sum(ys) * xy) / determinant, (sum(ys) * xx - sum(xs) * xy) / determinant
        if a > 0 and b > 0:
            return a, b
    # One number cannot be told from the other: both alike.
    both = [x + y for x, y in zip(xs, ys, strict=True)]
    factor = sum(both) / sum(value * value for value in both)
    return factor, factor

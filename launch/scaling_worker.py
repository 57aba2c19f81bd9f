"""What every worker of `moe-ep bench scaling` does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_ep.bench.ceilings import Ceilings, measure_ceilings
from moe_ep.bench.geometries import Geometry, of_model, preset
from moe_ep.bench.layers import BenchLayers, make_weights
from moe_ep.bench.results import facts
from moe_ep.bench.scaling import measure_row, with_efficiency
from moe_ep.bench.synthetic import SyntheticConfig
from moe_ep.bench.workload import parse_routing
from moe_ep.launch import progress
from moe_ep.launch.rank_env import RankEnv
from moe_ep.launch.scaling_config import ScalingConfig
from moe_ep.registry import ALL2ALL_BACKENDS

_PREFILL_CHAIN = 4


class Setting(NamedTuple):
    """One row to measure; num_tokens is of each rank."""

    phase: str
    asked_tokens: int
    num_tokens: int
    backend: str
    wire: str
    routing: str
    eplb: str


def run_scaling(rank_env: RankEnv, config: ScalingConfig, command: str) -> list[dict[str, Any]] | None:
    """All rows, on rank 0; None elsewhere. Groups of each EP size run side by side, so that no rank waits for others.

    Raises:
        WrongOutputError: a layer computes something else than its weights say.
    """
    device = torch.device(rank_env.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    groups = {size: _group_of(rank_env.rank, rank_env.world_size, size) for size in config.ep_sizes}
    with torch.inference_mode():
        ceilings = measure_ceilings(device, dtype)
        about = _about(rank_env, config, command, ceilings)
        rows: list[dict[str, Any]] = []
        geometries = _geometries(config, device)
        total = len(geometries) * sum(len(list(_settings(config, size))) for size in config.ep_sizes)
        for geometry in geometries:
            for size in config.ep_sizes:
                weights = make_weights(geometry, size, device, config.seed)
                for setting in _settings(config, size):
                    progress.report("measuring", len(rows), total)
                    # Balancing moves experts: weights of its own then.
                    held = make_weights(geometry, size, device, config.seed) if setting.eplb == "on" else weights
                    rows.append(
                        _row(config, geometry, setting, size, rank_env.rank % size, groups[size], held, ceilings)
                    )
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
        progress.report("measuring", total, total)
    return [row | about for row in with_efficiency(rows)] if rank_env.rank == 0 else None


def _row(
    config: ScalingConfig,
    geometry: Geometry,
    setting: Setting,
    ep_size: int,
    ep_rank: int,
    group: dist.ProcessGroup | None,
    weights: list[SyntheticConfig],
    ceilings: Ceilings,
) -> dict[str, Any]:
    layers = BenchLayers(
        geometry,
        ep_size=ep_size,
        ep_rank=ep_rank,
        group=group,
        backend=setting.backend,
        capacity=setting.num_tokens,
        dtype=torch.bfloat16 if weights[0].device.type == "cuda" else torch.float32,
        device=weights[0].device,
        dispatch_dtype=torch.float8_e4m3fn if setting.wire == "fp8" else None,
        eplb=setting.eplb == "on",
        weights=weights,
    )
    prefill = setting.phase == "prefill"
    row = measure_row(
        layers,
        parse_routing(setting.routing),
        setting.num_tokens,
        ceilings,
        chain=min(config.chain, _PREFILL_CHAIN) if prefill else config.chain,
        repeats=max(3, config.repeats // 3) if prefill else config.repeats,
        seed=config.seed,
        group=group,
    )
    asked = setting._asdict() | {"asked_backend": setting.backend, "backend": _backend_of(layers)}
    about = {"geometry": geometry.name, "ep_size": ep_size, "scaling": config.scaling}
    return about | {key: value for key, value in asked.items() if key != "num_tokens"} | row


def _settings(config: ScalingConfig, ep_size: int) -> Iterator[Setting]:
    phases = (("decode", config.decode_tokens), ("prefill", config.prefill_tokens))
    for backend in config.backend if ep_size > 1 else ("auto",):
        for wire in config.wire if ep_size > 1 else ("activations",):
            for routing, eplb in itertools.product(config.routing, config.eplb if ep_size > 1 else ("off",)):
                for phase, counts in phases:
                    for tokens in counts:
                        each = tokens if config.scaling == "weak" else tokens // ep_size
                        if each:
                            yield Setting(phase, tokens, each, backend, wire, routing, eplb)


def _geometries(config: ScalingConfig, device: torch.device) -> list[Geometry]:
    if config.model is not None:
        from moe_ep.checkpoint import model_spec
        from moe_ep.checkpoint.directory import read_json

        return [of_model(model_spec(read_json(config.model / "config.json")), config.model.name)]
    names = config.geometry or (("deepseek-v3",) if device.type == "cuda" else ("small",))
    return [preset(name) for name in names]


def _group_of(rank: int, world_size: int, size: int) -> dist.ProcessGroup | None:
    """This rank's group of `size` ranks; every rank makes all groups, in the same order."""
    if size == 1:
        return None
    mine = None
    for first in range(0, world_size, size):
        made = dist.new_group(list(range(first, first + size)))
        if first <= rank < first + size:
            mine = made
    return mine


def _backend_of(layers: BenchLayers) -> str:
    backend = type(layers.layers[0].prepare_finalize)
    target = f"{backend.__module__}:{backend.__name__}"
    return next((name for name in ALL2ALL_BACKENDS if ALL2ALL_BACKENDS[name].target == target), target)


def _about(rank_env: RankEnv, config: ScalingConfig, command: str, ceilings: Ceilings) -> dict[str, Any]:
    link = ceilings.link_bytes_per_s
    return {
        "workers": rank_env.world_size,
        "hosts": rank_env.world_size // rank_env.local_world_size,
        "launcher": rank_env.source,
        "memory_tb_per_s": round(ceilings.memory_bytes_per_s / 1e12, 3),
        "tflop_per_s": round(ceilings.flops_per_s / 1e12, 2),
        "link_gb_per_s": None if link is None else round(link / 1e9, 1),
        **facts(seed=config.seed, commit=config.commit, command=command),
    }

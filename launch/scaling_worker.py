"""What every worker of `moe-ep bench scaling` does."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_ep.bench.ahead import compile_kernels
from moe_ep.bench.ceilings import Ceilings, measure_ceilings
from moe_ep.bench.geometries import Geometry, of_model, preset
from moe_ep.bench.layers import BenchLayers, make_weights
from moe_ep.bench.results import append_line, facts
from moe_ep.bench.scaling import measure_row, with_efficiency
from moe_ep.bench.synthetic import SyntheticConfig
from moe_ep.bench.timing import slowest_rank
from moe_ep.bench.workload import parse_routing, recorded_ids
from moe_ep.errors import ConfigError
from moe_ep.launch import progress
from moe_ep.launch.facts import backend_name
from moe_ep.launch.rank_env import RankEnv
from moe_ep.launch.scaling_config import ScalingConfig, unfinished

logger = logging.getLogger(__name__)

_PREFILL_CHAIN = 4


class Setting(NamedTuple):
    """What is measured; num_tokens is of each rank."""

    phase: str
    num_tokens: int
    backend: str
    wire: str
    routing: str
    eplb: str


class Asked(NamedTuple):
    """A row that was asked for; rows of weak and strong scaling may have their setting in common.

    Attributes:
        order: its place among all rows, which are not measured in that order.
    """

    order: int
    scaling: str
    tokens: int
    setting: Setting


def run_scaling(rank_env: RankEnv, config: ScalingConfig, command: str) -> list[dict[str, Any]] | None:
    """All rows, on rank 0; None elsewhere. Groups of each EP size run side by side, so that no rank waits for others.

    Raises:
        WrongOutputError: a layer computes something else than its weights say.
    """
    started, device = time.monotonic(), torch.device(rank_env.device)
    bench = _Bench(
        config=config,
        rank_env=rank_env,
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        groups={size: _group_of(rank_env.rank, rank_env.world_size, size) for size in config.ep_sizes},
    )
    geometries = _geometries(config, device)
    with torch.inference_mode():
        compile_kernels(
            geometries, config.ep_sizes, bench.dtype, [_dtype_of(wire) for wire in config.wire], device,
            share=(rank_env.local_rank, rank_env.local_world_size),
        )  # fmt: skip
        ceilings = measure_ceilings(device, bench.dtype)
        plan = _plan(config, geometries, tell=rank_env.rank == 0)
        rows = _Rows(
            config, rank_env, _about(rank_env, config, command, ceilings), sum(len(asked) for *_, asked in plan)
        )
        measured: dict[tuple[str, int, Setting], dict[str, Any]] = {}
        is_over = False
        for geometry, size, asked in plan:
            weights: list[SyntheticConfig] = []
            for row in asked:
                key = (geometry.name, size, row.setting)
                if key not in measured:
                    is_over = is_over or _is_over(config, started)
                    if is_over:
                        continue
                    weights = weights or make_weights(geometry, size, device, config.seed)
                    measured[key] = bench.measure(geometry, row.setting, size, weights, ceilings)
                about = {"geometry": geometry.name, "ep_size": size, "scaling": row.scaling}
                rows.add(row.order, about | {"asked_tokens": row.tokens} | measured[key])
            weights.clear()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows.finished()


def _is_over(config: ScalingConfig, started: float) -> bool:
    """Whether the time for rows is over, by the clock of the slowest rank."""
    return config.seconds is not None and slowest_rank([time.monotonic() - started])[0] > config.seconds


class _Rows:
    """The rows so far. On rank 0 they are in a file too, which is there until the driver has written them: a gang that
    fails has not measured in vain."""

    def __init__(self, config: ScalingConfig, rank_env: RankEnv, about: dict[str, Any], total: int) -> None:
        self._found: dict[int, dict[str, Any]] = {}
        self._about, self._total, self._speaks = about, total, rank_env.rank == 0
        self._path: Path | None = None
        if self._speaks and config.json is not None and config.json.parent.is_dir():
            self._path = unfinished(config.json)
            self._path.unlink(missing_ok=True)

    def add(self, order: int, row: dict[str, Any]) -> None:
        self._found[order] = row
        progress.report("measuring", len(self._found), self._total)
        if self._path is not None:
            append_line(self._path, row | self._about)

    def finished(self) -> list[dict[str, Any]] | None:
        """All rows, where this is rank 0."""
        if not self._speaks:
            return None
        if len(self._found) < self._total:
            logger.warning("--seconds are over: %d of %d rows were measured", len(self._found), self._total)
        return [row | self._about for row in with_efficiency([row for _, row in sorted(self._found.items())])]


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """What all rows have in common."""

    config: ScalingConfig
    rank_env: RankEnv
    device: torch.device
    dtype: torch.dtype
    groups: dict[int, dist.ProcessGroup | None] = field(default_factory=dict)

    def measure(
        self,
        geometry: Geometry,
        setting: Setting,
        ep_size: int,
        weights: list[SyntheticConfig],
        ceilings: Ceilings,
    ) -> dict[str, Any]:
        """One row; a collective step of all ranks."""
        config, group, started = self.config, self.groups[ep_size], time.monotonic()
        if setting.eplb == "on":
            # Balancing moves experts: weights of its own then.
            weights = make_weights(geometry, ep_size, self.device, config.seed)
        layers = BenchLayers(
            geometry,
            ep_size=ep_size,
            ep_rank=self.rank_env.rank % ep_size,
            group=group,
            backend=setting.backend,
            capacity=setting.num_tokens,
            dtype=self.dtype,
            device=self.device,
            dispatch_dtype=_dtype_of(setting.wire),
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
            repeats=max(5, config.repeats // 3) if prefill else config.repeats,
            limit_s=config.repeat_seconds,
            seed=config.seed,
            group=group,
        )
        chosen = backend_name(layers.layers[0].prepare_finalize)
        asked = setting._asdict() | {"asked_backend": setting.backend, "backend": chosen}
        asked["routing"] = Path(setting.routing).name
        took = {"took_s": round(time.monotonic() - started, 2)}
        return {key: value for key, value in asked.items() if key != "num_tokens"} | row | took


def _plan(
    config: ScalingConfig, geometries: Sequence[Geometry], *, tell: bool
) -> list[tuple[Geometry, int, list[Asked]]]:
    """(geometry, EP size, rows), those of the same weights together: of every geometry first what others are compared
    with, then variants and other scaling, which a limit of time may cut."""
    first, later, order = [], [], itertools.count()
    for geometry in geometries:
        routings = _routings(config, geometry, tell=tell)
        for size in config.ep_sizes:
            asked = list(_asked(config, routings, size, order))
            kind = asked[0].setting[2:] if asked else ()
            base = [row for row in asked if row.scaling == config.scaling[0] and row.setting[2:] == kind]
            first.append((geometry, size, base))
            later.append((geometry, size, [row for row in asked if row not in base]))
    return first + later


def _asked(config: ScalingConfig, routings: Sequence[str], ep_size: int, order: Iterator[int]) -> Iterator[Asked]:
    alone = ep_size == 1
    choices = (
        ("auto",) if alone else config.backend,
        ("activations",) if alone else config.wire,
        routings,
        ("off",) if alone else config.eplb,
    )
    phases = (("decode", config.decode_tokens), ("prefill", config.prefill_tokens))
    for scaling, values in itertools.product(config.scaling, itertools.product(*choices)):
        limited = config.variant_tokens and values != tuple(names[0] for names in choices if names)
        for phase, counts in phases:
            for tokens in counts:
                if limited and (tokens not in config.variant_tokens or scaling != config.scaling[0]):
                    continue
                each = tokens if scaling == "weak" else tokens // ep_size
                if each:
                    yield Asked(next(order), scaling, tokens, Setting(phase, each, *values))


def _routings(config: ScalingConfig, geometry: Geometry, *, tell: bool) -> list[str]:
    """Those that can be this geometry's; recorded choices are those of one model's experts."""
    fitting = []
    for name in config.routing:
        recorded = parse_routing(name).recorded
        try:
            if recorded is not None:
                recorded_ids(recorded, geometry.num_experts, geometry.top_k)
        except ValueError as error:
            if len(config.routing) == 1:
                raise ConfigError(f"--routing is {name}: {error}") from None
            if tell:
                logger.warning("%s is measured without --routing %s: %s", geometry.name, name, error)
        else:
            fitting.append(name)
    return fitting


def _dtype_of(wire: str) -> torch.dtype | None:
    return torch.float8_e4m3fn if wire == "fp8" else None


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

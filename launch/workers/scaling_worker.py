"""The worker of `moe-ep bench scaling`."""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.bench.geometries import Geometry, of_model, preset
from moe_ep.bench.layers import BenchLayers, SyntheticConfig, make_weights
from moe_ep.bench.results import facts
from moe_ep.bench.scaling import measure_row
from moe_ep.bench.scaling_tables import with_efficiency
from moe_ep.bench.timing import measure_ceilings, slowest_rank
from moe_ep.bench.workload import parse_routing, recorded_ids
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.distributed.exchange import gather_values
from moe_ep.errors import ConfigError
from moe_ep.launch.cli.gang_options import layer_input_dtype
from moe_ep.launch.cli.scaling_config import ScalingConfig
from moe_ep.launch.gangs import progress
from moe_ep.launch.gangs.interrupts import ending_after
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.modular_kernel.contracts import Compilation
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS

logger = logging.getLogger(__name__)

Row = dict[str, Any]

_CEILINGS = ("memory_tb_per_s", "tflop_per_s", "link_gb_per_s")
# A row has up to twice the tokens of the longest one before it.
_LONGER = 2.0
# A row that takes this and so many times as long as the longest before it is taken for one that never ends.
_GRACE_S, _MUCH_LONGER = 30.0, 5.0


class Setting(NamedTuple):
    """The setting of one measurement; num_tokens is of each rank."""

    phase: str
    num_tokens: int
    backend: str
    wire: str
    routing: str
    eplb: str


class Measurement(NamedTuple):
    """The key of a measurement that rows of weak and strong scaling may share; the routing is a file's name only."""

    geometry: str
    ep_size: int
    setting: Setting


class Rows:
    """The rows so far; each is handed to the driver as soon as it is there, with its efficiency.

    Args:
        about: what all rows of this run say: versions, machine, commit, seed, command, ceilings.
        before: of an earlier run, the same on every rank. Those that say the same of all but command and ceilings are
            taken for measured, where there is a commit to know their code by.

    Attributes:
        measured: the result of each measurement.
    """

    def __init__(self, about: Row, total: int, before: Sequence[Row], *, is_rank_0: bool) -> None:
        self._about, self._total, self._is_rank_0 = about, total, is_rank_0
        self._found: dict[int, Row] = {}
        same = [key for key in about if key not in (*_CEILINGS, "command")]
        alike = [row for row in before if all(row.get(key) == about[key] for key in same)]
        if alike and (about["commit"] == "unknown" or about["commit"].endswith("-dirty")):
            if is_rank_0:
                logger.warning(
                    "--resume measures everything anew: the commit is %s, which says nothing of the code that was "
                    "measured before; commit what was changed, or give --commit", about["commit"],
                )  # fmt: skip
            alike = []
        self.measured = {_measurement_of(row): row for row in alike}
        self._written = {(_measurement_of(row), row["scaling"], row["asked_tokens"]) for row in alike}

    def add(self, order: int, what: Measurement, scaling: str, asked_tokens: int) -> None:
        """Adds the row of a measurement that there is, at its place among all rows, which are measured in another
        order."""
        about = {"geometry": what.geometry, "ep_size": what.ep_size, "scaling": scaling, "asked_tokens": asked_tokens}
        row = about | {key: value for key, value in self.measured[what].items() if key not in about}
        row |= {key: value for key, value in self._about.items() if key not in row}
        # Smaller EP sizes come first, so what a row is compared with is there.
        self._found[order] = row = with_efficiency([*self._found.values(), row])[-1]
        if self._is_rank_0:
            progress.report("measuring", len(self._found), self._total)
            if (what, scaling, asked_tokens) not in self._written:
                progress.hand_over(row)

    def finished(self) -> list[Row] | None:
        """All rows in the order in which they were asked for, where this is rank 0."""
        if not self._is_rank_0:
            return None
        if len(self._found) < self._total:
            logger.warning(
                "--seconds are over: %d of %d rows were measured; with --json and --resume the same command measures "
                "the others", len(self._found), self._total,
            )  # fmt: skip
        return [row for _, row in sorted(self._found.items())]


class Clock:
    """Whether there is time for another row, the same on every rank: of the seconds that the command may take (None for
    any number) since it started, as `time.time` has it."""

    def __init__(self, seconds: float | None, started: float) -> None:
        self._seconds, self._started = seconds, started
        self._is_over = False
        self._longest: dict[str, float] = {}

    def is_over(self, phase: str) -> bool:
        """Whether the next row would end too late, by the slowest rank's clock; a collective step of all ranks.

        Where it would, so would all that come later.
        """
        if self._seconds is not None and not self._is_over:
            ends = time.time() - self._started + _LONGER * self._longest.get(phase, 0.0)
            self._is_over = slowest_rank([ends])[0] > self._seconds
        return self._is_over

    def limit_s(self) -> float:
        """After which a row that begins now is taken for one that never ends: where time counts, and kernels are
        compiled, sooner."""
        longest = max(self._longest.values(), default=0.0)
        patience_s = _GRACE_S if self._seconds is not None and longest else env.DISPATCH_TIMEOUT_S.get()
        return patience_s + _MUCH_LONGER * longest

    def note(self, phase: str, took_s: float) -> None:
        """Notes how long a row of this phase took."""
        self._longest[phase] = max(took_s, self._longest.get(phase, 0.0))


def _measurement_of(row: Row) -> Measurement:
    setting = Setting(
        row["phase"], row["tokens_per_rank"], row["asked_backend"], row["wire"], row["routing"], row["eplb"]
    )
    return Measurement(row["geometry"], row["ep_size"], setting)


_PREFILL_CHAIN = 4


class Asked(NamedTuple):
    """A row that was asked for, and its place among all rows, which are measured in another order. Rows of weak and
    strong scaling may have their setting in common."""

    order: int
    scaling: str
    tokens: int
    setting: Setting


def run_scaling(
    rank_env: RankEnv, config: ScalingConfig, command: str, started: float, before: Sequence[Row]
) -> list[Row] | None:
    """All rows, on rank 0; None elsewhere. Groups of each EP size run side by side, so that no rank waits for others.

    Args:
        started: when the command began, as `time.time` has it.
        before: rows of an earlier run, which are not measured again where they are of this code and machine; those that
            rank 0 has are taken.

    Raises:
        WrongOutputError: a layer computes something else than its weights say.
    """
    with torch.inference_mode():
        return ScalingBench(rank_env, config).run(command, started, before)


class ScalingBench:
    """What all rows share; every method is a collective step of all ranks."""

    def __init__(self, rank_env: RankEnv, config: ScalingConfig) -> None:
        self.rank_env, self.config = rank_env, config
        self.device = torch.device(rank_env.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.groups = {size: group_of(rank_env.rank, rank_env.world_size, size) for size in config.ep_sizes}
        self.geometries = _geometries(config, self.device)
        if self.device.type == "cuda":  # the ranks of a host compile together, into the cache that they share
            wires = [_dtype_of(wire) for wire in config.wire]
            kernels = compilations(self.geometries, config.ep_sizes, self.dtype, wires, self.device)
            for kernel in kernels[rank_env.local_rank :: rank_env.local_world_size]:
                kernel.compile_ahead(self.device)
        self.ceilings = measure_ceilings(self.device, self.dtype)

    def run(self, command: str, started: float, before: Sequence[Row]) -> list[Row] | None:
        """As `run_scaling`."""
        clock, is_rank_0 = Clock(self.config.seconds, started), self.rank_env.rank == 0
        plan = _plan(self.config, self.geometries, warns=is_rank_0)
        rows = Rows(
            self._about(command),
            sum(len(asked) for *_, asked in plan),
            # Each process that torchrun started has read a file of its own host; rank 0's counts.
            gather_values("rows of before", list(before))[0] if dist.is_initialized() else before,
            is_rank_0=is_rank_0,
        )
        gc.freeze()  # so that collecting what a row leaves is quick
        for geometry, size, asked in plan:
            self._measure_all(geometry, size, asked, rows, clock)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        gc.unfreeze()
        return rows.finished()

    def _measure_all(self, geometry: Geometry, ep_size: int, asked: Sequence[Asked], rows: Rows, clock: Clock) -> None:
        """The rows of one model at one EP size, which share their weights, as far as there is time."""
        weights: list[SyntheticConfig] = []
        for row in asked:
            setting = row.setting
            what = Measurement(geometry.name, ep_size, setting._replace(routing=Path(setting.routing).name))
            if what not in rows.measured:
                if clock.is_over(setting.phase):
                    continue
                began = time.monotonic()
                # Layers of the row before go now, and not on some ranks later: with them goes symmetric memory, which
                # all ranks of the world make together, though groups of them run side by side.
                gc.collect()
                tokens = f"{setting.num_tokens} tokens a rank in {setting.phase}"
                options = f"{' '.join(setting[2:5])}, EPLB {setting.eplb}"
                with ending_after(clock.limit_s(), f"{geometry.name} at EP {ep_size}, {tokens}, {options},"):
                    weights = weights or make_weights(geometry, ep_size, self.device, self.config.seed)
                    rows.measured[what] = self.measure(geometry, setting, ep_size, weights)
                clock.note(setting.phase, time.monotonic() - began)
            rows.add(row.order, what, row.scaling, row.tokens)

    def measure(self, geometry: Geometry, setting: Setting, ep_size: int, weights: list[SyntheticConfig]) -> Row:
        """One row."""
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
            input_dtype=layer_input_dtype(config.input_dtype),
            batch_balance=config.batch_balance,
        )
        prefill = setting.phase == "prefill"
        row = measure_row(
            layers,
            parse_routing(setting.routing),
            setting.num_tokens,
            self.ceilings,
            chain=min(config.chain, _PREFILL_CHAIN) if prefill else config.chain,
            repeats=min(config.repeats, max(5, config.repeats // 3)) if prefill else config.repeats,
            limit_s=config.repeat_seconds,
            seed=config.seed,
            group=group,
        )
        chosen = ALL2ALL_BACKENDS.name_of(layers.layers[0].prepare_finalize)
        asked = setting._asdict() | {"asked_backend": setting.backend, "backend": chosen}
        asked["routing"] = Path(setting.routing).name
        took = {"took_s": round(time.monotonic() - started, 2)}
        return {key: value for key, value in asked.items() if key != "num_tokens"} | row | took

    def _about(self, command: str) -> Row:
        """What all rows of this run say."""
        rank_env, config, link = self.rank_env, self.config, self.ceilings.link_bytes_per_s
        return {
            "workers": rank_env.world_size,
            "hosts": rank_env.world_size // rank_env.local_world_size,
            "launcher": rank_env.source,
            "input_dtype": config.input_dtype or env.INPUT_DTYPE.get(),
            "batch_balance": config.batch_balance,
            "memory_tb_per_s": round(self.ceilings.memory_bytes_per_s / 1e12, 3),
            "tflop_per_s": round(self.ceilings.flops_per_s / 1e12, 2),
            "link_gb_per_s": None if link is None else round(link / 1e9, 1),
            **facts(seed=config.seed, commit=config.commit, command=command),
        }


def _plan(
    config: ScalingConfig, geometries: Sequence[Geometry], *, warns: bool
) -> list[tuple[Geometry, int, list[Asked]]]:
    """(geometry, EP size, rows), those of the same weights together: of every geometry first what others are compared
    with, then variants and other scaling, which a limit of time may cut."""
    first, later, order = [], [], itertools.count()
    for geometry in geometries:
        routings = _routings(config, geometry, warns=warns)
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


def _routings(config: ScalingConfig, geometry: Geometry, *, warns: bool) -> list[str]:
    """The routings that fit this geometry; recorded choices are those of one model's experts."""
    fitting = []
    for name in config.routing:
        recorded = parse_routing(name).recorded
        try:
            if recorded is not None:
                recorded_ids(recorded, geometry.num_experts, geometry.top_k)
        except ValueError as error:
            if len(config.routing) == 1:
                raise ConfigError(f"--routing is {name}: {error}") from None
            if warns:
                logger.warning("%s is measured without --routing %s: %s", geometry.name, name, error)
        else:
            fitting.append(name)
    return fitting


def _dtype_of(wire: str) -> torch.dtype | None:
    return {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(wire)


def _geometries(config: ScalingConfig, device: torch.device) -> list[Geometry]:
    if config.model is not None:
        from moe_ep.checkpoint import model_spec
        from moe_ep.checkpoint.reader import read_json

        return [of_model(model_spec(read_json(config.model / "config.json")), config.model.name)]
    names = config.geometry or (("deepseek-v3",) if device.type == "cuda" else ("small",))
    return [preset(name) for name in names]


def group_of(rank: int, world_size: int, size: int) -> dist.ProcessGroup | None:
    """This rank's group of `size` ranks; every rank makes all groups, in the same order."""
    if size == 1:
        return None
    mine = None
    for first in range(0, world_size, size):
        made = dist.new_group(list(range(first, first + size)))
        if first <= rank < first + size:
            mine = made
    return mine


def compilations(
    geometries: Sequence[Geometry],
    ep_sizes: Iterable[int],
    dtype: torch.dtype,
    wires: Sequence[torch.dtype | None],
    device: torch.device,
) -> list[Compilation]:
    """The kernels of all experts and backends of these layers, each once, the slowest of each layer first."""
    named: list[Sequence[Compilation]] = []
    for geometry, ep_size in itertools.product(geometries, ep_sizes):
        config = FusedMoEConfig(
            num_experts=geometry.num_experts,
            experts_per_token=geometry.top_k,
            hidden_dim=geometry.hidden_size,
            intermediate_size_per_partition=geometry.intermediate_size,
            num_local_experts=geometry.num_experts // ep_size,
            moe_parallel_config=FusedMoEParallelConfig.make(ep_size=ep_size, rank=0, world_size=ep_size),
            in_dtype=dtype,
            max_num_tokens=1,
            activation=geometry.activation,
            swiglu_limit=geometry.swiglu_limit,
        )
        weights = geometry.weights
        scale_dtype = torch.float8_e8m0fnu if weights.scale_bits == 8 else dtype
        of_weights = FusedMoEQuantConfig(
            quant_type_id=weights.quant_type_id,
            group_size=weights.group_size,
            w1_scale=torch.empty(0, dtype=scale_dtype, device="cpu"),
        )
        named += [EXPERTS.load(name).compilations(config, of_weights, device) for name in EXPERTS]
        for name, wire in itertools.product(ALL2ALL_BACKENDS if ep_size > 1 else (), wires):
            backend = ALL2ALL_BACKENDS.load(name)
            named.append(backend.compilations(config, FusedMoEQuantConfig(dispatch_dtype=wire), device))
    by_cost = itertools.chain.from_iterable(itertools.zip_longest(*named))
    return list(dict.fromkeys(kernel for kernel in by_cost if kernel is not None))

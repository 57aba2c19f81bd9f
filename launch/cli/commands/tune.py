"""moe-ep tune: measures which kernel of the packed experts is faster for a shape, and records it for this GPU."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moe_ep.env import at_least, one_of
from moe_ep.errors import BackendUnavailableError
from moe_ep.launch.cli.options import (
    GEOMETRY_NAMES,
    OptionError,
    Parser,
    add_command,
    from_args,
    geometry_name,
    option,
    output_file,
    refusing,
    whole_numbers,
)
from moe_ep.launch.cli.outputs import show

if TYPE_CHECKING:
    from moe_ep.activation import MoEActivation
    from moe_ep.kernels.marlin.tuning import Problem

# Number types, and the default of --group-size.
_GROUP_SIZES = {"uint4": 128, "uint4b8": 128, "uint8b128": 128, "float8_e4m3fn": 128, "float4_e2m1f": 32}


def _shape(raw: str) -> tuple[int, ...]:
    shape = whole_numbers(raw)
    if len(shape) != 3 or any(size % 32 for size in shape[1:]):
        raise ValueError("it must be local experts, K and N, as in 32,7168,2048, K and N multiples of 32")
    return shape


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """The settings of `moe-ep tune`."""

    geometry: str | None = option(None, geometry_name, f"a preset's experts and weights: {GEOMETRY_NAMES}")
    ep_size: int = option(8, at_least(1), "ranks that share the preset's experts")
    shape: tuple[int, ...] | None = option(None, _shape, "local experts, K and N, instead of a preset", "E,K,N")
    weights: str = option("uint4b8", one_of(*_GROUP_SIZES), f"number type of --shape: {', '.join(_GROUP_SIZES)}")
    group_size: int | None = option(
        None, at_least(1), "columns that share a scale (default: 128, or 32 for float4_e2m1f)"
    )
    output: Path | None = option(None, output_file, "table to write, instead of the one in MOE_EP_CACHE_DIR", "FILE")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    add_command(
        subparsers, "tune", main, TuneConfig, "measure which expert kernel is faster, for a layer's shape",
        "Times the two kernels of the packed experts on this GPU, and records up to how many rows of an expert the "
        "decode kernel is faster. Layers of this shape read the record when they start.",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    config = from_args(TuneConfig, args)
    problem, activation = _problem(config)
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        found = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        raise BackendUnavailableError(
            f"needs a Hopper GPU (compute capability 9.0) and torch sees {found}: "
            f"only its kernels have something to choose"
        )
    from moe_ep.bench.results import table
    from moe_ep.kernels.marlin import tuning
    from moe_ep.kernels.marlin.tuning_run import best, measure
    from moe_ep.kernels.marlin.types import weight_type
    from moe_ep.launch.gangs.progress import ProgressDisplay
    from moe_ep.scalar_type import scalar_types

    path = config.output or tuning.user_table()
    if path.exists():
        with refusing(""):
            tuning.read_table(path)
    device = torch.device("cuda", torch.cuda.current_device())
    kind = weight_type(getattr(scalar_types, problem.weights).id)
    with contextlib.closing(ProgressDisplay()) as display:
        measured = measure(problem, kind, activation, device, lambda *steps: display((problem.key, *steps)))
    rows = best(measured)
    name = torch.cuda.get_device_name(device)
    before = tuning.max_small_m(name, problem)
    tuning.remember(path, name, problem, rows)
    show(table(measured, {"rows": "rows", "decode_us": "decode kernel us", "prefill_us": "prefill kernel us"}))
    show(f"{problem.key} on {name}: decode kernel up to {rows} rows (before: {before}); kept in {path}")
    return 0


def _problem(config: TuneConfig) -> tuple[Problem, MoEActivation]:
    """The problem and activation that the options describe."""
    from moe_ep.activation import MoEActivation
    from moe_ep.bench.geometries import preset
    from moe_ep.kernels.marlin.tuning import Problem

    activation = MoEActivation.SILU
    if config.shape is not None and config.geometry is None:
        experts, K, N = config.shape
        problem = Problem(experts, K, N, config.weights, config.group_size or _GROUP_SIZES[config.weights])
    elif config.geometry is None or config.shape is not None:
        raise OptionError("pass one of --geometry and --shape, the layer to tune for")
    else:
        geometry = preset(config.geometry)
        if geometry.weights.quant_type is None:
            raise OptionError(f"--geometry {config.geometry} has plain weights; there is nothing to tune for them")
        if geometry.num_experts % config.ep_size:
            raise OptionError(
                f"--ep-size is {config.ep_size} and {config.geometry} has {geometry.num_experts} experts; "
                f"pass a divisor of them"
            )
        problem = Problem(
            geometry.num_experts // config.ep_size,
            geometry.hidden_size,
            geometry.intermediate_size,
            geometry.weights.quant_type,
            config.group_size or geometry.weights.group_size,
        )
        activation = geometry.activation
    if problem.K % problem.group_size or problem.N % problem.group_size:
        raise OptionError(
            f"--group-size is {problem.group_size}; it must divide K ({problem.K}) and N ({problem.N}) of the layer"
        )
    return problem, activation

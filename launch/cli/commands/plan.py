"""moe-ep plan: predicts the time of a MoE layer on more GPUs than are here, from measured rates."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_ep.env import at_least, number, one_of
from moe_ep.launch.cli.options import (
    GEOMETRY_NAMES,
    OptionError,
    Parser,
    add_command,
    check_apart,
    from_args,
    geometry_name,
    input_file,
    option,
    output_file,
    refusing,
    whole_numbers,
)
from moe_ep.launch.cli.outputs import tell

if TYPE_CHECKING:
    from moe_ep.bench.cost_model import Machine
    from moe_ep.bench.geometries import Geometry


_rate = number("a number above 0", lambda rate: rate > 0)


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The settings of `moe-ep plan`."""

    geometry: str = option("deepseek-v3", geometry_name, f"a preset: {GEOMETRY_NAMES}")
    gpus: tuple[int, ...] = option(
        (8, 16, 32, 64, 128, 256, 512), whole_numbers, "EP sizes, one rank for each GPU", "N,N"
    )
    tokens: tuple[int, ...] = option((1, 64, 128, 4096), whole_numbers, "tokens of each rank in a step", "T,T")
    gpus_per_host: int = option(8, at_least(1), "GPUs of one host")
    network_gb_per_s: float = option(50.0, _rate, "GB/s from one GPU to other hosts; 50 is a 400 Gb/s card for each")
    wire: str = option("bf16", one_of("bf16", "fp8"), "dtype of dispatched rows: bf16 or fp8")
    two_level: bool = option(True, None, "send a token once to each host instead of each rank")
    measured: Path | None = option(
        None,
        lambda raw: input_file(raw, "it must be a file that `moe-ep bench scaling --json` wrote"),
        "fit the rates to these results of `bench scaling`, and compare with them",
        "FILE",
    )
    json: Path | None = option(None, output_file, "write a JSON line for each row", "FILE")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    add_command(
        subparsers, "plan", main, PlanConfig, "predict a model's MoE layers on more GPUs than you have",
        "Predicts memory, time by stage, tokens/s and the bottleneck of a model's MoE layers from bytes and operations "
        "over measured rates. Routing is uniform, and stages run one after the other.",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    config = from_args(PlanConfig, args)
    check_apart({"--json": config.json}, {"--measured": config.measured})
    host = config.gpus_per_host
    if parts := [size for size in config.gpus if size > host and size % host]:
        raise OptionError(
            f"--gpus has {parts[0]}; beyond a host it must be a multiple of its GPUs (--gpus-per-host {host})"
        )
    from moe_ep.bench.cost_model import MOST_RANKS, Machine
    from moe_ep.bench.geometries import preset
    from moe_ep.bench.results import as_line, table

    if max(config.gpus) > MOST_RANKS:
        raise OptionError(f"--gpus has {max(config.gpus)}; it must be at most {MOST_RANKS}")
    geometry = preset(config.geometry)
    machine = Machine(gpus_per_host=config.gpus_per_host, network_bytes_per_s=config.network_gb_per_s * 1e9)
    compared, device = "", "GPU"
    if config.measured is not None:
        machine, compared, device = _calibrated(config.measured, geometry, machine)
    rows = [_row(config, geometry, machine, size, tokens, device) for tokens in config.tokens for size in config.gpus]
    columns = _COLUMNS if device == "GPU" else {key: name for key, name in _COLUMNS.items() if key != "fits"}
    told = f"{compared}{_assumed(config, geometry, machine, device)}\n{table(rows, columns)}"
    tell(told, config.json, lambda: [as_line(row | {"machine": asdict(machine)}) for row in rows])
    return 0


# Key of a row -> its heading on the terminal.
_COLUMNS = {
    "GPUs": "GPUs",
    "T": "T",
    "us": "us a layer",
    "dispatch_us": "dispatch",
    "experts_us": "experts",
    "combine_us": "combine",
    "bottleneck": "bottleneck",
    "active_experts": "active experts",
    "GiB_of_weights": "GiB of experts",
    "fits": "fits",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_GPU": "per GPU",
}


def _assumed(config: PlanConfig, geometry: Geometry, machine: Machine, device: str) -> str:
    """Describes the assumptions of the prediction; --json has every number."""
    wire = "f32" if device == "CPU" and config.wire == "bf16" else config.wire
    memory = f"{machine.memory_bytes / 1e9:.0f} GB, " if device == "GPU" else ""
    return (
        f"{geometry.name}, {wire} rows, T tokens per rank, uniform routing; tokens/s through all "
        f"{geometry.num_layers} MoE layers, without attention\n"
        f"{device}      {memory}{machine.memory_bytes_per_s / 1e9:,.4g} GB/s and "
        f"{machine.flops_per_s / 1e12:,.3g} TFLOP/s, of which experts reach {machine.memory_efficiency:.2f} and "
        f"{machine.compute_efficiency:.2f}; their latency {machine.experts_latency_us:,.3g} us, routing "
        f"{machine.route_us:,.3g} us\n"
        f"links    {machine.link_bytes_per_s / 1e9:,.4g} GB/s a {device} in hosts of {machine.gpus_per_host}, of which "
        f"{machine.wire_efficiency:.2f} are reached; latency {machine.link_latency_us:,.4g} us\n"
        f"network  {machine.network_bytes_per_s / 1e9:,.4g} GB/s a {device}; latency "
        f"{machine.network_latency_us:,.4g} us\n"
    )


def _row(
    config: PlanConfig, geometry: Geometry, machine: Machine, ep_size: int, tokens: int, device: str
) -> dict[str, Any]:
    from moe_ep.bench.cost_model import predict

    activations = 2 if device == "GPU" else 4
    step = predict(
        geometry, ep_size, tokens, machine, wire_bytes=1 if config.wire == "fp8" else activations,
        combine_bytes=activations, two_level=config.two_level,
    )  # fmt: skip
    about = asdict(step) | {
        "GPUs": ep_size,
        "T": tokens,
        "us": step.step_us,
        "GiB_of_weights": step.weights_bytes / 2**30,
        "fits": step.weights_bytes < machine.memory_bytes if device == "GPU" else None,
        "tokens_per_s_per_GPU": step.tokens_per_s / ep_size,
    }
    return {key: about[key] for key in _COLUMNS}


def _calibrated(path: Path, geometry: Geometry, machine: Machine) -> tuple[Machine, str, str]:
    """Returns the machine fitted to the measured rows, a table of those beside their predictions, and "GPU" or "CPU".
    Rows of CPUs do not say how much memory there is."""
    from moe_ep.bench.cost_model import calibrated
    from moe_ep.bench.scaling_tables import read_scaling

    with refusing(f"--measured is {path}: "):
        rows, told = read_scaling(path)
    found = [row for row in rows if row["geometry"] == geometry.name]
    with refusing(f"--measured is {path}; of {geometry.name} "):
        machine = calibrated(machine, geometry, found)
    if told:
        print(told, file=sys.stderr)
    return machine, _compared(geometry, machine, found), "GPU" if any(row.get("cuda") for row in found) else "CPU"


def _compared(geometry: Geometry, machine: Machine, measured: list[dict[str, Any]]) -> str:
    """A table of prediction and measurement, for every measured row of uniform routing."""
    from moe_ep.bench.cost_model import bytes_of, predict, uniform_rows
    from moe_ep.bench.results import table

    rows: list[dict[str, Any]] = []
    for row in sorted(uniform_rows(measured), key=lambda row: (row["ep_size"], row["tokens_per_rank"])):
        sent, back = bytes_of(row)
        step = predict(geometry, row["ep_size"], row["tokens_per_rank"], machine, wire_bytes=sent, combine_bytes=back)
        about = {"EP": row["ep_size"], "T": row["tokens_per_rank"], "phase": row["phase"], "backend": row["backend"],
                 "wire": row["wire"]}  # fmt: skip
        parts = {"route": step.route_us, "dispatch": step.dispatch_us, "experts": step.experts_us,
                 "combine": step.combine_us}  # fmt: skip
        times = {f"{name}_us": f"{us:.1f} ({row['stages_us'].get(name, 0.0):.1f})" for name, us in parts.items()}
        rows.append(about | {"measured_us": row["us"], "predicted_us": step.step_us} | times
                    | {"error_%": 100 * (step.step_us / row["us"] - 1)})  # fmt: skip
    errors = sorted(abs(row["error_%"]) for row in rows)
    shown = table(rows, {name: name.replace("_", " ") for name in rows[0]})
    return (
        f"{shown}\nstages: predicted (measured, with the events between them); a predicted step is "
        f"{errors[len(errors) // 2]:.0f} % off in the median of {len(rows)} rows and {errors[-1]:.0f} % at most\n\n"
    )

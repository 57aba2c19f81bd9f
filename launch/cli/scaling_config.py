"""The options of `moe-ep bench scaling`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moe_ep.env import at_least, number, one_of, one_of_these
from moe_ep.launch.cli.gang_options import GangConfig, batch_balance_option, input_dtype_option
from moe_ep.launch.cli.options import (
    BACKEND_NAMES,
    GEOMETRY_NAMES,
    Parse,
    checkpoint_folder,
    geometry_name,
    option,
    output_file,
    whole_numbers,
)
from moe_ep.launch.cli.outputs import ADDS_LINES
from moe_ep.registry import ALL2ALL_BACKENDS


def _numbers_or_none(raw: str) -> tuple[int, ...]:
    return () if raw == "none" else whole_numbers(raw)


def _list_of(parse: Parse) -> Parse:
    return lambda raw: tuple(parse(part) for part in raw.split(","))


_seconds = number("a number of seconds above 0", lambda seconds: seconds > 0)


def _routing(raw: str) -> str:
    from moe_ep.bench.workload import parse_routing

    # Workers may have another working directory.
    recorded = parse_routing(raw).recorded
    return raw if recorded is None else str(recorded)


@dataclass(frozen=True, kw_only=True)
class ScalingConfig(GangConfig):
    """The settings of one scaling benchmark; the flags of `moe-ep bench scaling` are these fields."""

    geometry: tuple[str, ...] = option(
        (),
        _list_of(geometry_name),
        f"presets to measure: {GEOMETRY_NAMES} (default: deepseek-v3 on GPUs, small on CPUs)",
    )
    model: Path | None = option(
        None, checkpoint_folder, "take the geometry from this checkpoint's config.json instead", "DIR"
    )
    ep_sizes: tuple[int, ...] = option(
        (), whole_numbers, "EP sizes to measure (default: all that divide the number of workers)"
    )
    scaling: tuple[str, ...] = option(
        ("weak",),
        _list_of(one_of("weak", "strong")),
        "weak: the tokens below are each rank's; strong: they are the sum over all ranks",
    )
    decode_tokens: tuple[int, ...] = option(
        (1, 8, 32, 64, 128, 256), _numbers_or_none, "tokens of decode steps, or none"
    )
    prefill_tokens: tuple[int, ...] = option((1024, 4096, 8192), _numbers_or_none, "tokens of prefill steps, or none")
    backend: tuple[str, ...] = option(
        ("auto",), _list_of(one_of_these(lambda: ("auto", *ALL2ALL_BACKENDS))), f"dispatch backends: {BACKEND_NAMES}"
    )
    wire: tuple[str, ...] = option(
        ("activations",),
        _list_of(one_of("activations", "fp8", "int8")),
        "dtype of dispatched rows: activations, fp8, int8",
    )
    input_dtype: str | None = input_dtype_option()
    batch_balance: str = batch_balance_option()
    routing: tuple[str, ...] = option(
        ("uniform",), _list_of(_routing), "uniform, zipf:S or an .npz file of recorded choices"
    )
    eplb: tuple[str, ...] = option(
        ("off",),
        _list_of(one_of("off", "on")),
        "off, or on: one spare slot on each rank, and experts placed by their load",
    )
    variant_tokens: tuple[int, ...] = option(
        (),
        whole_numbers,
        "measure all values of --backend, --wire, --routing and --eplb at these tokens only, and the first value of "
        "each at the others (default: measure everything at all tokens)",
    )
    chain: int = option(8, at_least(1), "steps in one repeat, each with other tokens")
    repeats: int = option(30, at_least(1), "maximum repeats of a row")
    repeat_seconds: float = option(
        0.25, _seconds, "stop repeating a row after this many seconds, but not before 5 repeats"
    )
    seconds: float | None = option(
        None, _seconds, "time limit of the whole command: no row starts that may end after it; variants come last"
    )
    seed: int = option(0, at_least(0), "seed of weights, tokens and choices")
    commit: str | None = option(None, str, "commit to record, if this is not a git checkout", "HASH")
    json: Path | None = option(
        None, output_file, f"write a JSON line for each row, as soon as it is measured{ADDS_LINES}", "FILE"
    )
    resume: bool = option(
        False, None, "skip rows that --json FILE already has of this commit, these versions and machines"
    )

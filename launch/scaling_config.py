"""What `moe-ep bench scaling` can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moe_ep.launch.gang_choice import GangConfig
from moe_ep.launch.option_values import (
    BACKEND_NAMES,
    GEOMETRY_NAMES,
    checkpoint_folder,
    geometry_name,
    output_file,
    whole_numbers,
)
from moe_ep.launch.options import Parse, at_least, number, one_of, one_of_these, option
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

    geometry: tuple[str, ...] = field(
        default=(),
        metadata=option(
            _list_of(geometry_name),
            f"presets, with commas between: {GEOMETRY_NAMES}; small on CPUs and deepseek-v3 on GPUs without it",
        ),
    )
    model: Path | None = field(
        default=None,
        metadata=option(checkpoint_folder, "take the geometry from a checkpoint's config.json instead", "DIR"),
    )
    ep_sizes: tuple[int, ...] = field(
        default=(), metadata=option(whole_numbers, "EP sizes; powers of two up to the number of workers")
    )
    scaling: tuple[str, ...] = field(
        default=("weak",),
        metadata=option(
            _list_of(one_of("weak", "strong")),
            "weak: the tokens below are of each rank (the default), strong: of all together; or both",
        ),
    )
    decode_tokens: tuple[int, ...] = field(
        default=(1, 8, 32, 64, 128, 256),
        metadata=option(_numbers_or_none, "tokens of decode steps, or none (1,8,32,64,128,256)"),
    )
    prefill_tokens: tuple[int, ...] = field(
        default=(1024, 4096, 8192),
        metadata=option(_numbers_or_none, "tokens of prefill steps, or none (1024,4096,8192)"),
    )
    backend: tuple[str, ...] = field(
        default=("auto",),
        metadata=option(
            _list_of(one_of_these(lambda: ("auto", *ALL2ALL_BACKENDS))),
            f"dispatch backends, with commas between: {BACKEND_NAMES}",
        ),
    )
    wire: tuple[str, ...] = field(
        default=("activations",),
        metadata=option(
            _list_of(one_of("activations", "fp8")), "dtype of dispatched rows: activations (the default), fp8"
        ),
    )
    routing: tuple[str, ...] = field(
        default=("uniform",), metadata=option(_list_of(_routing), "uniform, zipf:S or an .npz file of choices")
    )
    eplb: tuple[str, ...] = field(
        default=("off",),
        metadata=option(
            _list_of(one_of("off", "on")), "off (the default), on: one spare slot a rank, experts placed by their load"
        ),
    )
    variant_tokens: tuple[int, ...] = field(
        default=(),
        metadata=option(
            whole_numbers,
            "tokens at which every --backend, --wire, --routing and --eplb is measured, in the first --scaling, and at "
            "others the first of each; without it all at all",
        ),
    )
    chain: int = field(default=8, metadata=option(at_least(1), "steps in one repeat, each with other tokens (8)"))
    repeats: int = field(default=30, metadata=option(at_least(1), "repeats of the chain (30)"))
    repeat_seconds: float = field(
        default=0.25, metadata=option(_seconds, "that the repeats of a row may take; 5 are made in any case (0.25)")
    )
    seconds: float | None = field(
        default=None,
        metadata=option(_seconds, "begin no row that may end later than so many after the start; variants come last"),
    )
    seed: int = field(default=0, metadata=option(at_least(0), "of weights, tokens and choices (0)"))
    commit: str | None = field(
        default=None, metadata=option(str, "what to record where this does not run from a git checkout", "HASH")
    )
    json: Path | None = field(
        default=None, metadata=option(output_file, "append one JSON line a row, as soon as it is measured", "FILE")
    )
    resume: bool = field(
        default=False,
        metadata=option(None, "leave out what --json FILE has of this commit, these versions and machines"),
    )

"""The options of `moe-ep bench scaling`."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

from moe_ep.env import at_least, number, one_of, one_of_these
from moe_ep.launch.cli.gang_options import GangConfig, batch_balance_option, input_dtype_option
from moe_ep.launch.cli.options import (
    BACKEND_NAMES,
    GEOMETRY_NAMES,
    OptionError,
    Parse,
    check_apart,
    check_backends,
    checkpoint_folder,
    flag,
    geometry_name,
    option,
    output_file,
    refusing,
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


_LISTS = (
    "geometry", "ep_sizes", "scaling", "decode_tokens", "prefill_tokens", "backend", "wire", "routing", "eplb",
    "variant_tokens",
)  # fmt: skip


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

    def check(self) -> None:
        """Raises OptionError for options that contradict each other."""
        if self.geometry and self.model is not None:
            raise OptionError(f"--model is {self.model} and --geometry {','.join(self.geometry)}; pass one of them")
        if not self.decode_tokens and not self.prefill_tokens:
            raise OptionError("--decode-tokens and --prefill-tokens are none; pass numbers for one of them")
        for recorded in self.routing:
            check_apart({"--json": self.json}, {"--routing": recorded})
        if self.resume and self.json is None:
            raise OptionError("--resume was given without --json; give the FILE that has the rows of the run before")
        unknown = set(self.variant_tokens) - {*self.decode_tokens, *self.prefill_tokens}
        if unknown:
            raise OptionError(
                f"--variant-tokens has {min(unknown)}, which is neither in --decode-tokens nor in --prefill-tokens; "
                f"pass tokens that are measured"
            )
        for name in _LISTS:
            # A row names a file without its folder.
            values = [Path(value).name if name == "routing" else str(value) for value in getattr(self, name)]
            if twice := next((value for value in values if values.count(value) > 1), None):
                raise OptionError(f"{flag(name)} has {twice} twice; rows would not be told apart")
        if len(self.routing) == 1 and self.routing[0].endswith(".npz"):
            from moe_ep.bench.geometries import preset
            from moe_ep.bench.workload import recorded_ids

            for geometry in map(preset, self.geometry):
                with refusing(f"--routing has nothing for {geometry.name}: "):
                    recorded_ids(Path(self.routing[0]), geometry.num_experts, geometry.top_k)

    def check_fits(self, world_size: int | None, device: str | None) -> None:
        sizes = (1,) if world_size is None else self.sizes_for(world_size)
        check_backends(self.backend, max(sizes), device)

    def sizes_for(self, world_size: int) -> tuple[int, ...]:
        """The EP sizes to measure with so many workers; OptionError for one that does not fit."""
        sizes = self.ep_sizes or divisors(world_size)
        if unfit := [size for size in sizes if world_size % size]:
            raise OptionError(
                f"--ep-sizes has {unfit[0]} and there are {world_size} workers; a size must divide them, so that "
                f"groups of it run side by side: pass such sizes, or other --ep-size workers"
            )
        if "strong" in self.scaling:
            asked = (*self.decode_tokens, *self.prefill_tokens)
            if max(sizes) > max(asked):
                raise OptionError(
                    f"--scaling is strong and {max(sizes)} ranks share at most {max(asked)} tokens; pass at least as "
                    f"many tokens as ranks in --decode-tokens or --prefill-tokens, or smaller --ep-sizes"
                )
            for tokens, size in itertools.product(asked, sizes):
                if tokens % size and tokens >= size:
                    raise OptionError(
                        f"--scaling is strong and {tokens} tokens do not divide over {size} ranks; pass multiples"
                    )
        return tuple(sorted(sizes))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending; fast even for huge numbers, which are refused later."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return tuple(sorted({*small, *(number // size for size in small)}))

"""moe-ep eplb: simulates and plans load balancing on routing traces, without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moe_ep.env import at_least, number, one_of
from moe_ep.files import user_path
from moe_ep.launch.cli.options import (
    GEOMETRY_NAMES,
    OptionError,
    Parser,
    add_command,
    check_apart,
    checkpoint_folder,
    from_args,
    geometry_name,
    input_file,
    option,
    output_file,
    parsed,
    refusing,
)
from moe_ep.launch.cli.outputs import show, tell
from moe_ep.launch.gangs.progress import ProgressDisplay

if TYPE_CHECKING:
    from moe_ep.eplb.simulate import Outcome, Scene
    from moe_ep.eplb.trace import RoutingTrace


_share = number("a number above 0 and below 1, such as 0.5", lambda share: 0 < share < 1)


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """The ranks that a plan is for, and its objective."""

    ep_size: int = option(8, at_least(1), "ranks")
    redundant: int = option(0, at_least(0), "redundant experts, over all ranks")
    groups: int = option(1, at_least(1), "groups that the experts are divided into")
    nodes: int = option(1, at_least(1), "hosts")
    objective: str = option(
        "tokens", one_of("tokens", "active_experts", "auto"), "what a plan levels: tokens, active_experts or auto"
    )

    def scene(self) -> Scene:
        """The simulation's scene; ValueError for numbers that do not fit together."""
        from moe_ep.eplb.simulate import Scene

        return Scene(
            ep_size=self.ep_size,
            num_redundant=self.redundant,
            num_groups=self.groups,
            num_nodes=self.nodes,
            objective=self.objective,
        )


@dataclass(frozen=True, kw_only=True)
class SceneConfig(MachineConfig):
    """A machine, the part of a trace that is planned on, and how files of plain choices are read."""

    planned_on: float = option(0.5, _share, "share of the steps to plan on; the others are measured")
    step_tokens: int = option(1024, at_least(1), "tokens of all ranks in a step, for choices without steps")
    array: str = option("", str, "array of a file of plain choices (default: all, one after the other)")

    def scene(self) -> Scene:
        return replace(super().scene(), planned_on=self.planned_on)


def trace_file(raw: str) -> Path:
    """The file of TRACE; OptionError if there is none."""
    rule = "it must be an .npz file of recorded choices, or a file of recorded routing"
    return parsed("TRACE", raw, lambda raw: input_file(raw, rule))


def read_trace(raw: str, config: SceneConfig) -> RoutingTrace:
    """Reads a recorded trace, or a file of plain choices, which is split into steps; ValueError if it is neither, and
    OptionError if the options do not fit it."""
    from moe_ep.eplb.trace import RoutingTrace, from_choices, is_trace, plain_choices, read_arrays

    path = trace_file(raw)
    arrays = read_arrays(path)
    if is_trace(path):
        if config.array:
            raise OptionError(f"--array is {config.array!r}; {path.name} is a recorded trace, leave the option out")
        return RoutingTrace.load(path)
    if config.array:
        if config.array not in arrays:
            raise OptionError(f"--array is {config.array!r}; {path.name} has {', '.join(arrays) or 'no arrays'}")
        arrays = {config.array: arrays[config.array]}
    choices = plain_choices(arrays, path)
    if config.step_tokens > choices.shape[1]:
        raise OptionError(
            f"--step-tokens is {config.step_tokens}; it must be at most the {choices.shape[1]} tokens of {path.name}"
        )
    name = path.stem + (f"/{config.array}" if config.array else "")
    return from_choices(choices, config.step_tokens, 1, num_experts=int(choices.max()) + 1, model=name)


def describe(trace: RoutingTrace, config: MachineConfig) -> str:
    return (
        f"{trace.model}: {trace.num_layers} layers, {trace.num_experts} experts, {trace.num_steps} steps; "
        f"EP{config.ep_size}, {config.redundant} redundant"
    )


def describe_parts(trace: RoutingTrace, config: SceneConfig) -> str:
    seen = config.scene().split(trace)
    return f"planned on the first {seen} steps, measured on the other {trace.num_steps - seen}"


def _names(raw: str) -> tuple[str, ...]:
    if not raw or not all(raw.split(",")):
        raise ValueError("it must be names with commas between them")
    return tuple(raw.split(","))


_PICTURES = (".png", ".pdf", ".svg")
# Formats of the table's columns that are not whole numbers.
_FORMS = {
    "balancedness": ".3f",
    "max / mean tokens": ".2f",
    "active experts": ".1f",
    "stays on its rank %": ".1f",
    "GB moved": ".2f",
    "copies": ".2f",
    "MB copied": ".1f",
    "us": ".0f",
}


def _routing(raw: str) -> str:
    path = raw.removeprefix("recorded:")
    if re.fullmatch(r"zipf:\d+(\.\d+)?", raw) or user_path(path).is_file():
        return path
    absent = "" if raw.startswith("zipf") else ", and there is no such file"
    raise ValueError(
        f"it must be zipf:S with a number such as zipf:0.5, a file of recorded routing or an .npz file of recorded "
        f"choices{absent}"
    )


def _picture(raw: str) -> Path:
    path = output_file(raw)
    if path.suffix.lower() not in _PICTURES:
        raise ValueError(f"its name must end in one of {', '.join(_PICTURES)}")
    return path


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(SceneConfig):
    """The settings of `moe-ep eplb simulate`."""

    routing: str = option(
        "zipf:0.5",
        _routing,
        "zipf:S, a file of recorded routing, or an .npz file of choices [layer, token, top_k]",
        "HOW",
    )
    policies: tuple[str, ...] = option(("linear", "deepseek", "incremental"), _names, "policies to compare")
    rules: tuple[str, ...] = option(
        ("levelled", "known-counts", "per-batch"),
        _names,
        "replica rules to compare; per-batch copies experts for each batch",
    )
    spare_slots: int = option(2, at_least(0), "scratch slots of a rank that per-batch may fill")
    copy_cost_rows: float = option(
        0.0,
        number("a number of at least 0", lambda rows: rows >= 0),
        "rows by which a copy must lower the maximum load",
    )
    layers: int = option(4, at_least(1), "layers of random choices")
    experts: int | None = option(None, at_least(1), "experts of random choices (default: those of --geometry, or 256)")
    top_k: int | None = option(
        None, at_least(1), "experts of each token, for random choices (default: those of --geometry, or 8)"
    )
    steps: int = option(32, at_least(2), "steps of random choices")
    geometry: str = option("", geometry_name, f"model whose layer is timed by the cost model: {GEOMETRY_NAMES}")
    expert_bytes: int | None = option(
        None, at_least(1), "bytes of an expert, to report bytes moved (default: those of --geometry)"
    )
    seed: int = option(0, at_least(0), "seed of random choices")
    json: Path | None = option(None, output_file, "write a JSON line for each row", "FILE")
    picture: Path | None = option(
        None, _picture, "draw how even the load of the steps is, as .png, .pdf or .svg", "FILE"
    )


@dataclass(frozen=True, kw_only=True)
class ReportConfig(SceneConfig):
    """The settings of `moe-ep eplb report`."""

    policy: str = option("incremental", str, "policy to plan with")
    rule: str = option("levelled", str, "replica rule")
    out: Path = option(Path("eplb-load.png"), _picture, ".png, .pdf or .svg file to write", "FILE")


@dataclass(frozen=True, kw_only=True)
class PlanConfig(MachineConfig):
    """The settings of `moe-ep eplb plan`."""

    model: Path | None = option(None, checkpoint_folder, "checkpoint that the trace was recorded with", "DIR")
    policy: str = option("incremental", str, "policy to plan with")
    out: Path = option(Path("placement.json"), output_file, "file to write", "FILE")


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("eplb", help="try and plan load balancing on a routing trace")
    commands = parser.add_subparsers(dest="eplb", required=True, metavar="WHAT", parser_class=Parser)
    add_command(
        commands, "simulate", main_simulate, SimulateConfig, "compare policies and replica rules",
        "Plans on the first steps of a trace and measures on the rest, for each policy and replica rule.",
    )  # fmt: skip
    report = add_command(
        commands, "report", main_report, ReportConfig, "draw the load before and after a plan",
        "Plans on the first steps of a trace, draws the load of the others before and after it, and prints a table.",
    )  # fmt: skip
    report.add_argument("trace", metavar="TRACE", help="a file of recorded routing, or an .npz file of choices")
    plan = add_command(
        commands, "plan", main_plan, PlanConfig, "write a placement to start a run with",
        "Plans on all steps of a trace and writes the placement for `moe-ep run --eplb --load-placement`.",
    )  # fmt: skip
    plan.add_argument("trace", metavar="TRACE", help="a trace of `moe-ep run --record-routing`")


def main_simulate(args: argparse.Namespace) -> int:
    config = from_args(SimulateConfig, args)
    from moe_ep.bench.results import as_line, facts, table
    from moe_ep.eplb.pictures import draw_evenness
    from moe_ep.eplb.simulate import LINEAR, PER_BATCH, RULES, compare, zipf_trace
    from moe_ep.registry import EPLB_POLICIES

    check_apart({"--json": config.json, "--picture": config.picture}, {"--routing": config.routing})
    _check_names("--policies", config.policies, (LINEAR, *EPLB_POLICIES))
    _check_names("--rules", config.rules, (*RULES, PER_BATCH))
    with refusing(""):
        if config.routing.startswith("zipf:"):
            if config.array:
                raise OptionError(
                    f"--array is {config.array!r}; --routing {config.routing} reads no file, leave it out"
                )
            experts, top_k = _random_sizes(config)
            config.scene().num_slots(experts)  # raises before the choices are drawn
            if top_k > experts:
                raise OptionError(f"--top-k is {top_k}; it must be at most the {experts} of --experts")
            trace = zipf_trace(
                num_layers=config.layers,
                num_experts=experts,
                top_k=top_k,
                exponent=float(config.routing.removeprefix("zipf:")),
                num_steps=config.steps,
                num_tokens=config.step_tokens,
                seed=config.seed,
            )
        else:
            trace = read_trace(config.routing, config)
        scene = replace(config.scene(), spare_slots=config.spare_slots, copy_cost_rows=config.copy_cost_rows)
        expert_bytes, layer_us = _costs(config, trace)
        rows, peaks = [], {}
        total = len(config.policies) * len(config.rules)
        with contextlib.closing(ProgressDisplay()) as display:
            display(("simulating", 0, total))
            found = compare(trace, scene, list(config.policies), list(config.rules), expert_bytes, layer_us)
            for row, outcome in found:
                rows.append(row)
                peaks[f"{row['policy']}, {row['rule']}"] = outcome.peaks
                display(("simulating", len(rows), total))
    shown = [row | {name: f"{row[name]:{form}}" for name, form in _FORMS.items() if name in row} for row in rows]
    told = (describe(trace, config), describe_parts(trace, config), table(shown, {name: name for name in rows[0]}))
    about = facts(seed=config.seed, command=args.shown) | {"trace": trace.model, "ep_size": config.ep_size}
    if config.picture is not None:
        draw_evenness(peaks, describe(trace, config), config.picture)
    tell("\n".join(told), config.json, lambda: [as_line(about | row) for row in rows])
    return 0


def _random_sizes(config: SimulateConfig) -> tuple[int, int]:
    """(experts, top_k) of random choices."""
    from moe_ep.bench.geometries import preset

    experts, top_k = 256, 8
    if config.geometry:
        experts, top_k = preset(config.geometry).num_experts, preset(config.geometry).top_k
    return config.experts or experts, config.top_k or top_k


def _costs(config: SimulateConfig, trace: RoutingTrace) -> tuple[float | None, Callable[[Outcome], float] | None]:
    """(bytes of an expert, mean time of a layer by the cost model); None for what is unknown."""
    if not config.geometry:
        return config.expert_bytes, None
    from statistics import fmean

    import numpy as np

    from moe_ep.bench.cost_model import Machine, uneven_step_us
    from moe_ep.bench.geometries import preset

    # The model's layer with as many experts, and of a token, as the trace has.
    geometry = replace(preset(config.geometry), num_experts=trace.num_experts, top_k=trace.ids.shape[1])
    machine = Machine()
    tokens_per_rank = -(-trace.ids.shape[0] // (trace.num_steps * trace.num_layers * config.ep_size))

    def layer_us(outcome: Outcome) -> float:
        return fmean(
            uneven_step_us(
                geometry,
                tokens_per_rank,
                machine,
                outcome.loads[at],
                outcome.active[at],
                outcome.copies.get((at[0], at[1]), ()),
            )
            for at in np.ndindex(outcome.loads.shape[:2])
        )

    return config.expert_bytes or geometry.bytes_per_expert, layer_us


def main_report(args: argparse.Namespace) -> int:
    config = from_args(ReportConfig, args)
    from moe_ep.bench.results import table
    from moe_ep.eplb.pictures import draw_load
    from moe_ep.eplb.policy.maps import experts_moved
    from moe_ep.eplb.simulate import LINEAR, RULES, measure, place
    from moe_ep.registry import EPLB_POLICIES

    _check_names("--policy", (config.policy,), tuple(EPLB_POLICIES))
    _check_names("--rule", (config.rule,), tuple(RULES))
    with refusing(""):
        trace, scene = read_trace(args.trace, config), config.scene()
        present, planned = place(trace, scene, LINEAR), place(trace, scene, config.policy)
        before, after = (measure(trace, scene, slots, config.rule) for slots in (present, planned))
    title = describe(trace, config)
    draw_load(
        {"before": before.slot_loads, f"after ({config.policy})": after.slot_loads}, config.ep_size, title, config.out
    )
    moved = experts_moved(present, planned, config.ep_size)
    rows = [
        {"layer": layer, "balancedness before": f"{old:.3f}", "after": f"{new:.3f}", "experts moved": int(count)}
        for layer, old, new, count in (
            *zip(range(len(moved)), before.layer_balancedness, after.layer_balancedness, moved, strict=True),
            ("all", before.balancedness, after.balancedness, moved.sum()),
        )
    ]
    show(title)
    show(f"{describe_parts(trace, config)}; policy {config.policy}, rule {config.rule}")
    show(table(rows, {name: name for name in rows[0]}))
    show(f"heat maps in {config.out}")
    return 0


def main_plan(args: argparse.Namespace) -> int:
    config = from_args(PlanConfig, args)
    if config.model is None:
        raise OptionError("--model is missing; a placement is for one model, give its checkpoint")
    check_apart({"--out": config.out}, {"TRACE": args.trace})
    import torch

    from moe_ep.checkpoint import CheckpointReader, model_spec
    from moe_ep.eplb.placement_file import PlacementFile, model_checksum
    from moe_ep.eplb.policy.maps import rank_loads
    from moe_ep.eplb.recorder import balancedness
    from moe_ep.eplb.simulate import LINEAR, place
    from moe_ep.eplb.trace import RoutingTrace, model_name
    from moe_ep.registry import EPLB_POLICIES

    _check_names("--policy", (config.policy,), tuple(EPLB_POLICIES))
    reader = CheckpointReader(config.model)
    spec, checksum = model_spec(reader.config, reader), model_checksum(reader)
    with refusing(""):
        trace = RoutingTrace.load(trace_file(args.trace))
        trace.check_model(model_name(spec.family, checksum), spec.num_experts, len(spec.router_layers))
        scene = config.scene()
        present, planned = (place(trace, scene, policy, trace.num_steps) for policy in (LINEAR, config.policy))
    PlacementFile(
        model=checksum, ep_size=config.ep_size, num_experts=trace.num_experts, physical_to_logical=planned
    ).save(config.out)
    weight = trace.counts().sum(axis=0)
    before, after = (
        balancedness(torch.from_numpy(rank_loads(weight, slots, config.ep_size))) for slots in (present, planned)
    )
    show(describe(trace, config))
    show(f"balancedness over all steps together {before:.3f} as placed without a plan, {after:.3f} as planned")
    start = ["moe-ep", "run", "--model", str(config.model), "--ep-size", str(config.ep_size), "--eplb"]
    show(f"{config.out}: begin with {shlex.join([*start, '--load-placement', str(config.out)])}")
    return 0


def _check_names(flag: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise OptionError(f"{flag} has {name!r}; it must be one of {', '.join(known)}")

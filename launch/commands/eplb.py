"""moe-ep eplb: what balancing would do, tried on routing traces without a GPU."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_ep.files import write_text
from moe_ep.launch.option_values import output_file
from moe_ep.launch.options import OptionError, Parser, add_flags, at_least, from_args, number, one_of, option

if TYPE_CHECKING:
    from moe_ep.eplb.trace import RoutingTrace


def _names(raw: str) -> tuple[str, ...]:
    if not raw or not all(raw.split(",")):
        raise ValueError("it must be names with commas between them")
    return tuple(raw.split(","))


# How the table shows what is not a whole number.
_FORMS = {
    "balancedness": ".3f",
    "max / mean tokens": ".2f",
    "active experts": ".1f",
    "stays on its rank %": ".1f",
    "GB moved": ".2f",
}

_share = number("a number above 0 and below 1, such as 0.5", lambda share: 0 < share < 1)


def _routing(raw: str) -> str:
    path = raw.removeprefix("recorded:")
    if re.fullmatch(r"zipf:\d+(\.\d+)?", raw) or Path(path).expanduser().is_file():
        return path
    raise ValueError("it must be zipf:S with a number such as zipf:0.5, or an .npz file of recorded choices")


@dataclass(frozen=True, kw_only=True)
class SceneConfig:
    """What both commands need: the machine that a trace is tried on, and how files of plain choices are read."""

    ep_size: int = field(default=8, metadata=option(at_least(1), "ranks (8)"))
    redundant: int = field(default=0, metadata=option(at_least(0), "redundant experts, of all ranks together (0)"))
    groups: int = field(default=1, metadata=option(at_least(1), "groups that the experts divide into (1)"))
    nodes: int = field(default=1, metadata=option(at_least(1), "hosts (1)"))
    objective: str = field(
        default="tokens",
        metadata=option(
            one_of("tokens", "active_experts", "auto"),
            "what a plan evens out: tokens (the default), active_experts or auto",
        ),
    )
    planned_on: float = field(
        default=0.5, metadata=option(_share, "share of the steps that plans are made from; the rest is measured (0.5)")
    )
    step_tokens: int = field(
        default=1024,
        metadata=option(at_least(1), "tokens of all ranks in a step, for choices drawn or without steps (1024)"),
    )
    array: str = field(default="", metadata=option(str, "array of a file of plain choices; all, one after the other"))


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(SceneConfig):
    """The settings of `moe-ep eplb simulate`."""

    routing: str = field(
        default="zipf:0.5",
        metadata=option(
            _routing,
            "zipf:S, a trace of moe-ep run --record-routing, or .npz choices [layer, token, top_k] (zipf:0.5)",
            "HOW",
        ),
    )
    policies: tuple[str, ...] = field(
        default=("linear", "deepseek", "incremental"),
        metadata=option(_names, "policies to compare (linear,deepseek,incremental)"),
    )
    rules: tuple[str, ...] = field(
        default=("levelled", "hash-rank", "known-counts"),
        metadata=option(_names, "replica rules to compare (levelled,hash-rank,known-counts)"),
    )
    layers: int = field(default=4, metadata=option(at_least(1), "layers, where choices are drawn (4)"))
    experts: int = field(default=256, metadata=option(at_least(1), "experts, where choices are drawn (256)"))
    top_k: int = field(default=8, metadata=option(at_least(1), "choices of a token, where they are drawn (8)"))
    steps: int = field(default=32, metadata=option(at_least(2), "steps, where choices are drawn (32)"))
    expert_bytes: int | None = field(
        default=None, metadata=option(at_least(1), "bytes of an expert, to say how many are moved; not said without it")
    )
    seed: int = field(default=0, metadata=option(at_least(0), "of choices that are drawn (0)"))
    json: Path | None = field(default=None, metadata=option(output_file, "write a JSON line for each row", "FILE"))


@dataclass(frozen=True, kw_only=True)
class ReportConfig(SceneConfig):
    """The settings of `moe-ep eplb report`."""

    policy: str = field(default="incremental", metadata=option(str, "the policy to plan with (incremental)"))
    rule: str = field(default="levelled", metadata=option(str, "the replica rule (levelled)"))
    out: Path = field(
        default=Path("eplb-load.png"), metadata=option(output_file, "the PNG file (eplb-load.png)", "FILE")
    )


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser("eplb", help="what balancing would do with a routing trace")
    commands = parser.add_subparsers(dest="eplb", required=True, metavar="WHAT", parser_class=Parser)
    simulate = commands.add_parser(
        "simulate",
        help="compare policies and replica rules",
        description="Plans on the first steps of a trace and measures on the rest, for each policy and replica rule.",
    )
    add_flags(simulate, SimulateConfig)
    simulate.set_defaults(main=main_simulate)
    report = commands.add_parser(
        "report",
        help="heat maps of expert load before and after a plan",
        description="Plans on the first steps of a trace, draws the load of the rest before and after, prints a table.",
    )
    report.add_argument("trace", metavar="TRACE", help="a trace of moe-ep run --record-routing, or .npz choices")
    add_flags(report, ReportConfig)
    report.set_defaults(main=main_report)


def main_simulate(args: argparse.Namespace) -> int:
    config = from_args(SimulateConfig, args)
    from moe_ep.bench.results import as_line, facts, table
    from moe_ep.eplb.rules import RULES
    from moe_ep.eplb.simulate import LINEAR, compare, zipf_trace
    from moe_ep.registry import EPLB_POLICIES

    _check_names("--policies", config.policies, (LINEAR, *EPLB_POLICIES))
    _check_names("--rules", config.rules, tuple(RULES))
    try:
        if config.routing.startswith("zipf:"):
            _scene(config).num_slots(config.experts)  # refuses before the choices are drawn
            if config.top_k > config.experts:
                raise OptionError(f"--top-k is {config.top_k}; it must be at most the {config.experts} of --experts")
            trace = zipf_trace(
                num_layers=config.layers,
                num_experts=config.experts,
                top_k=config.top_k,
                exponent=float(config.routing.removeprefix("zipf:")),
                num_steps=config.steps,
                num_tokens=config.step_tokens,
                seed=config.seed,
            )
        else:
            trace = _read(config.routing, config)
        rows = list(compare(trace, _scene(config), list(config.policies), list(config.rules), config.expert_bytes))
    except ValueError as error:
        raise _shown(error) from None
    print(_describe(trace, config))
    print(_parts(trace, config))
    shown = [row | {name: f"{row[name]:{form}}" for name, form in _FORMS.items() if name in row} for row in rows]
    print(table(shown, {name: name for name in rows[0]}))
    if config.json is not None:
        about = facts(seed=config.seed, command=args.shown) | {"trace": trace.model, "ep_size": config.ep_size}
        write_text(config.json, "".join(as_line(about | row) for row in rows))
    return 0


def main_report(args: argparse.Namespace) -> int:
    config = from_args(ReportConfig, args)
    from moe_ep.bench.results import table
    from moe_ep.eplb.pictures import draw_load
    from moe_ep.eplb.policy.maps import experts_moved
    from moe_ep.eplb.rules import RULES
    from moe_ep.eplb.simulate import LINEAR, measure, place
    from moe_ep.registry import EPLB_POLICIES

    _check_names("--policy", (config.policy,), tuple(EPLB_POLICIES))
    _check_names("--rule", (config.rule,), tuple(RULES))
    try:
        trace, scene = _read(args.trace, config), _scene(config)
        present, planned = place(trace, scene, LINEAR), place(trace, scene, config.policy)
        before, after = (measure(trace, scene, slots, config.rule) for slots in (present, planned))
    except ValueError as error:
        raise _shown(error) from None
    title = _describe(trace, config)
    draw_load(
        {"before": before.slot_loads, f"after ({config.policy})": after.slot_loads}, config.ep_size, title, config.out
    )
    moved = experts_moved(present, planned, config.ep_size)
    layers = zip(before.layer_balancedness, after.layer_balancedness, moved, strict=True)
    rows = [(str(layer), *found) for layer, found in enumerate(layers)]
    rows.append(("all", before.balancedness, after.balancedness, moved.sum()))
    columns = ("layer", "balancedness before", "after", "experts moved")
    cells = [
        dict(zip(columns, (layer, f"{old:.3f}", f"{new:.3f}", int(count)), strict=True))
        for layer, old, new, count in rows
    ]
    print(title)
    print(f"{_parts(trace, config)}; policy {config.policy}, rule {config.rule}")
    print(table(cells, {name: name for name in columns}))
    print(f"heat maps in {config.out}")
    return 0


def _scene(config: SceneConfig) -> Any:
    from moe_ep.eplb.simulate import Scene

    return Scene(
        ep_size=config.ep_size,
        num_redundant=config.redundant,
        num_groups=config.groups,
        num_nodes=config.nodes,
        objective=config.objective,
        planned_on=config.planned_on,
    )


def _read(raw: str, config: SceneConfig) -> RoutingTrace:
    """A recorded trace, or a file of plain choices cut into steps."""
    from moe_ep.eplb.trace import RoutingTrace, from_choices, read_arrays

    path = Path(raw).expanduser()
    if not path.is_file():
        raise OptionError(f"TRACE is {raw!r}; it must be an .npz file of recorded choices, and there is none")
    arrays = read_arrays(path)
    if "ids" in arrays:
        return RoutingTrace.load(path)
    found = {name: array for name, array in arrays.items() if array.ndim == 3}
    if config.array:
        if config.array not in found:
            raise OptionError(f"--array is {config.array!r}; {path.name} has {', '.join(found) or 'no such array'}")
        found = {config.array: found[config.array]}
    if not found:
        raise ValueError(f"{path} is neither a routing trace nor arrays of choices [layer, token, top_k]")
    import numpy as np

    choices = np.concatenate(list(found.values()), axis=1)
    if config.step_tokens > choices.shape[1]:
        raise OptionError(
            f"--step-tokens is {config.step_tokens}; it must be at most the {choices.shape[1]} tokens of {path.name}"
        )
    name = path.stem + (f"/{config.array}" if config.array else "")
    return from_choices(choices, config.step_tokens, 1, num_experts=int(choices.max()) + 1, model=name)


def _describe(trace: RoutingTrace, config: SceneConfig) -> str:
    return (
        f"{trace.model}: {trace.num_layers} layers, {trace.num_experts} experts, {trace.num_steps} steps; "
        f"EP{config.ep_size}, {config.redundant} redundant"
    )


def _parts(trace: RoutingTrace, config: SceneConfig) -> str:
    seen = _scene(config).split(trace)
    return f"planned on the first {seen} steps, measured on the other {trace.num_steps - seen}"


def _check_names(flag: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise OptionError(f"{flag} has {name!r}; it must be one of {', '.join(known)}")


def _shown(error: ValueError) -> OptionError:
    return error if isinstance(error, OptionError) else OptionError(str(error))

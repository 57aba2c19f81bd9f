"""The machine that a routing trace is tried on, and the trace itself: what the commands of `moe-ep eplb` share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moe_ep.launch.cli.option_values import input_file
from moe_ep.launch.cli.options import OptionError, at_least, number, one_of, option, parsed

if TYPE_CHECKING:
    from moe_ep.eplb.simulate import Scene
    from moe_ep.eplb.trace import RoutingTrace

_share = number("a number above 0 and below 1, such as 0.5", lambda share: 0 < share < 1)


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """The ranks that a plan is for, and what it evens out."""

    ep_size: int = field(default=8, metadata=option(at_least(1), "ranks"))
    redundant: int = field(default=0, metadata=option(at_least(0), "redundant experts, over all ranks"))
    groups: int = field(default=1, metadata=option(at_least(1), "groups that the experts are divided into"))
    nodes: int = field(default=1, metadata=option(at_least(1), "hosts"))
    objective: str = field(
        default="tokens",
        metadata=option(
            one_of("tokens", "active_experts", "auto"),
            "what a plan levels: tokens, active_experts or auto",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class SceneConfig(MachineConfig):
    """A machine, which part of a trace is planned on, and how files of plain choices are read."""

    planned_on: float = field(
        default=0.5, metadata=option(_share, "share of the steps to plan on; the others are measured")
    )
    step_tokens: int = field(
        default=1024,
        metadata=option(at_least(1), "tokens of all ranks in a step, for choices that are drawn or have no steps"),
    )
    array: str = field(
        default="", metadata=option(str, "array of a file of plain choices (default: all, one after the other)")
    )


def scene_of(config: SceneConfig) -> Scene:
    """Raises ValueError for numbers that do not go together."""
    from moe_ep.eplb.simulate import Scene

    return Scene(
        ep_size=config.ep_size,
        num_redundant=config.redundant,
        num_groups=config.groups,
        num_nodes=config.nodes,
        objective=config.objective,
        planned_on=config.planned_on,
    )


def trace_file(raw: str) -> Path:
    """The file that TRACE names; OptionError where there is none."""
    return parsed("TRACE", raw, lambda raw: input_file(raw, "it must be an .npz file of recorded choices"))


def read_trace(raw: str, config: SceneConfig) -> RoutingTrace:
    """A recorded trace, or a file of plain choices cut into steps.

    Raises:
        OptionError: no such file, or choices that the options do not fit.
        ValueError: it is neither.
    """
    from moe_ep.eplb.trace import RoutingTrace, from_choices, plain_choices, read_arrays

    path = trace_file(raw)
    arrays = read_arrays(path)
    if "ids" in arrays:
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
    seen = scene_of(config).split(trace)
    return f"planned on the first {seen} steps, measured on the other {trace.num_steps - seen}"

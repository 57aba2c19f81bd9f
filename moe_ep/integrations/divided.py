"""What a model of transformers does in another way when its experts are divided: its passes are steps of all ranks, and
it is not saved."""

from __future__ import annotations

from typing import Any

import torch

from moe_ep.errors import ConfigError
from moe_ep.integrations.steps import StepCoordinator

# torch.compile would trace the ranks' exchange. The compiler that this imports is there with transformers' models.
_eager = torch.compiler.disable(reason="before each pass the ranks of moe_ep agree on the host; leave fullgraph out")


def make_divided(model: Any, steps: StepCoordinator) -> None:
    """Every pass of the model from here on is a step of all ranks."""
    begun = False

    @_eager
    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal begun
        if steps.current is None:
            steps.begin(_num_tokens(args, kwargs))
            begun = True

    @_eager
    def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
        nonlocal begun
        if begun:
            begun = False
            if output is None:  # The pass failed.
                steps.current = None
            else:
                steps.end()

    model._moe_ep_steps = steps
    model.save_pretrained = _refuse_saving
    model.base_model.register_forward_pre_hook(before, with_kwargs=True)
    model.base_model.register_forward_hook(after, always_call=True)


def steps_of(model: Any) -> StepCoordinator:
    """The model's steps; ValueError for a model that `parallelize` did not make."""
    steps = getattr(model, "_moe_ep_steps", None)
    if steps is None:
        raise ValueError(f"model is a {type(model).__name__} whose experts are not divided; pass moe_ep.parallelize's")
    return steps


def _num_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Rows of the pass, padding included."""
    for tokens in (*args[:1], kwargs.get("input_ids")):
        if tokens is not None:
            return tokens.numel()
    return kwargs["inputs_embeds"].shape[:2].numel()


def _refuse_saving(*args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        "save_pretrained: a rank of a divided model holds its own experts alone, in moe_ep's layout, which no other "
        "program reads; save the model before parallelize, and quantize a checkpoint with moe-ep convert"
    )

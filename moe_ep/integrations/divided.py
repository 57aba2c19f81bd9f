"""What a model of transformers does in another way when its experts are divided: its passes are steps of all ranks, and
it is not saved."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch

from moe_ep.errors import ConfigError
from moe_ep.integrations.steps import StepCoordinator

# torch.compile would trace the ranks' exchange. The compiler that this imports is there with transformers' models.
_eager = torch.compiler.disable(reason="before each pass the ranks of moe_ep agree on the host; leave fullgraph out")


class _Passes:
    """The hooks of a model: its passes begin and end the ranks' steps, and those of several threads take turns."""

    def __init__(self, steps: StepCoordinator) -> None:
        self._steps = steps
        # The thread whose pass has begun the step under way.
        self._begun_by: int | None = None

    @_eager
    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        num_tokens = _num_tokens(args, kwargs)
        # Without an input there is nothing to agree on: the model says what it lacks.
        if num_tokens is None:
            return
        self._steps.turn.acquire()
        begun = False
        try:
            if self._steps.current is None:
                self._steps.begin(num_tokens)
                begun, self._begun_by = True, threading.get_ident()
        finally:
            if not begun:  # It failed, or the step is one that this thread has begun already.
                self._steps.turn.release()

    @_eager
    def after(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        if self._begun_by != threading.get_ident():
            return
        self._begun_by = None
        try:
            if output is None:  # The pass failed.
                self._steps.current = None
            else:
                self._steps.end()
        finally:
            self._steps.turn.release()

    def __reduce__(self) -> Any:
        raise ConfigError(
            "a model with divided experts cannot be pickled, nor saved by torch.save: a rank holds its own experts "
            "alone; save the model before parallelize"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _Passes:
        steps = copy.deepcopy(self._steps, memo)
        for layer in self._steps.layers:
            steps.add(copy.deepcopy(layer, memo))
        return _Passes(steps)


def make_divided(model: Any, steps: StepCoordinator) -> None:
    """Every pass of the model from here on is a step of all ranks."""
    passes = _Passes(steps)
    model._moe_ep_steps = model.base_model._moe_ep_steps = steps
    for part in model.modules():
        if hasattr(part, "save_pretrained"):
            part.save_pretrained = part.push_to_hub = _refuse_saving
    model.base_model.register_forward_pre_hook(passes.before, with_kwargs=True)
    model.base_model.register_forward_hook(passes.after, always_call=True)


def steps_of(model: Any) -> StepCoordinator:
    """The model's steps; ValueError for a model that `parallelize` did not make."""
    steps = getattr(model, "_moe_ep_steps", None)
    if steps is None:
        raise ValueError(f"model is a {type(model).__name__} whose experts are not divided; pass moe_ep.parallelize's")
    return steps


def _num_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Rows of the pass, padding included; None for one that has no input."""
    for tokens in (*args[:1], kwargs.get("input_ids")):
        if tokens is not None:
            return tokens.numel()
    embedded = kwargs.get("inputs_embeds")
    return None if embedded is None else embedded.shape[:2].numel()


def _refuse_saving(*args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        "save_pretrained and push_to_hub: a rank of a divided model holds its own experts alone, in moe_ep's layout, "
        "which no other program reads; save the model before parallelize, and quantize a checkpoint with moe-ep convert"
    )

"""Turns a transformers model into a parallelized one: its passes become steps of all ranks, and it cannot be saved."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from moe_ep.errors import ConfigError
from moe_ep.hf.steps import StepCoordinator

# torch.compile would trace the ranks' exchange. The compiler that this imports is there with transformers' models.
_eager = torch.compiler.disable(reason="before each pass the ranks of moe_ep agree on the host; leave fullgraph out")


class _SteppedForward:
    """Replaces the forward of the module that runs the layers: each pass is a step of all ranks, one thread at a time.

    Module hooks would not do: they are not called if a pass is interrupted.
    """

    def __init__(self, steps: StepCoordinator, decoder: Any, forward: Callable[..., Any] | None) -> None:
        self._steps = steps
        # A weak reference, since the module keeps this: dropping a model frees its memory.
        self._decoder = weakref.ref(decoder)
        self._own_forward = forward
        self.__signature__ = inspect.signature(decoder.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._begin(args, kwargs):
            return self._forward(*args, **kwargs)
        try:
            output = self._forward(*args, **kwargs)
        except BaseException as error:
            self._end(error)
            raise
        self._end()
        return output

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._own_forward is not None:
            return self._own_forward(*args, **kwargs)
        decoder: Any = self._decoder()
        return type(decoder).forward(decoder, *args, **kwargs)

    @_eager
    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Begins the step of this pass; returns whether it is one of its own."""
        num_tokens = _num_tokens(args, dict(zip(self.__signature__.parameters, args, strict=False)) | kwargs)
        # Without an input there is nothing to agree on: the model says what it lacks.
        if num_tokens is None:
            return False
        self._steps.scheduler.lock.acquire()
        begun = False
        try:
            if self._steps.current is None:
                self._steps.begin_pass(num_tokens)
                begun = True
        finally:
            if not begun:  # It failed, or this thread has begun the step already.
                self._steps.scheduler.lock.release()
        return begun

    @_eager
    def _end(self, error: BaseException | None = None) -> None:
        try:
            if error is None:
                self._steps.end_pass()
            else:
                self._steps.fail_pass(error)
        finally:
            self._steps.scheduler.lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> _SteppedForward:
        steps = copy.deepcopy(self._steps, memo)
        for layer in self._steps.layers:
            steps.add(copy.deepcopy(layer, memo))
        return _SteppedForward(steps, copy.deepcopy(self._decoder(), memo), copy.deepcopy(self._own_forward, memo))


def make_parallelized(model: Any, steps: StepCoordinator) -> Any:
    """Makes every later pass of the model a step of all ranks. Returns the module whose forward makes the steps."""
    for part in model.modules():
        if hasattr(part, "save_pretrained"):
            part.save_pretrained = part.push_to_hub = _refuse_saving
    *around, decoder = _path_to_decoder(model, steps)
    for part in (*around, model.base_model, decoder):
        part._moe_ep_steps = steps
    decoder.forward = _SteppedForward(steps, decoder, vars(decoder).get("forward"))
    return decoder


def _path_to_decoder(model: Any, steps: StepCoordinator) -> list[Any]:
    """The modules that contain all layers, from the model to the one that holds the list of layers.

    Every pass calls the last one, also in wrappers such as peft's, whose own forward `generate` does not call.
    """
    paths = []
    for name, part in model.named_modules():
        if part in steps.layers:
            above = [model]
            for attribute in name.split("."):
                if isinstance(below := getattr(above[-1], attribute), torch.nn.ModuleList):
                    break
                above.append(below)
            paths.append(above)
    if paths[0][-1] in steps.layers or any(path != paths[0] for path in paths):
        return [model, model.base_model]
    return paths[0]


def steps_of(model: Any) -> StepCoordinator:
    """The model's steps; ValueError for a model that `parallelize` did not make."""
    steps = getattr(model, "_moe_ep_steps", None)
    if steps is None:
        raise ValueError(
            f"model is a {type(model).__name__} that is not parallelized; pass what moe_ep.parallelize returns"
        )
    return steps


def _num_tokens(args: tuple[Any, ...], given: dict[str, Any]) -> int | None:
    """Rows of the pass, padding included; None for one that has no input."""
    tokens = given.get("input_ids", args[0] if args else None)
    if tokens is not None:
        return tokens.numel()
    embedded = given.get("inputs_embeds")
    return None if embedded is None else embedded.shape[:2].numel()


def _refuse_saving(*args: Any, **kwargs: Any) -> None:
    raise ConfigError(
        "save_pretrained and push_to_hub: a rank of a parallelized model holds its own experts alone, in a layout that "
        "no other program reads; save the model before parallelize, and quantize a checkpoint with moe-ep convert"
    )

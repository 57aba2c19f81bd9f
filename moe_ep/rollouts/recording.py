"""Records which experts the tokens of a model's passes choose, on the device and without waiting for it.

    with moe_ep.recording(model) as log:
        model(input_ids)
    ids = log.choices().ids                   # int16 [tokens, layers, top_k]

Ids are logical, also where experts have replicas: they are taken between the router and the mapping to physical
experts. A row is written by one kernel per layer, to a place that the device computes, so CUDA graphs can hold it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from moe_ep.errors import ConfigError, check_at_least, check_flags
from moe_ep.layer.fused_moe import FusedMoE
from moe_ep.routing.router import ChoiceLog, PrecomputedRouter, Routed, Router, WrappingRouter, known_choices

# Rows that a log has room for unless it is told otherwise.
MAX_TOKENS = 65536


class Choices(NamedTuple):
    """The experts that tokens chose, on the CPU.

    Attributes:
        ids: int16 `[tokens, layers, top_k]`, -1 for none; identity experts have ids from E on.
        weights: f32, the router's for each of them; None where they are not recorded.
    """

    ids: torch.Tensor
    weights: torch.Tensor | None


def layers_of(model: Any) -> list[FusedMoE]:
    """The MoE layers of a model, a stack, a layer or a list of layers, in order; ValueError where there are none."""
    parts = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, Iterable) else []
    modules = [part for part in parts if isinstance(part, nn.Module)]
    found = [layer for part in modules for layer in part.modules() if isinstance(layer, FusedMoE)]
    if found and (others := [type(part).__name__ for part in parts if not isinstance(part, nn.Module)]):
        raise ValueError(f"model holds a {others[0]} beside layers; pass layers alone")
    if not found:
        raise ValueError(
            f"model is a {type(model).__name__} without layers of moe_ep; pass a FusedMoE, a MoEStack or what "
            f"moe_ep.parallelize returns"
        )
    return found


def num_columns(layer: FusedMoE) -> int:
    """The ids that the layer's router can choose, identity experts included."""
    return max(layer.num_router_columns, layer.precomputed.num_columns)


class RoutingLog:
    """Rows of choices in buffers on the device.

    A pass writes behind the passes before it, or, inside `at`, where the caller says.

    Args:
        layers: with one top_k.
        max_tokens: rows that there is room for, `2 * layers * top_k` bytes each.
        weights: record the router's weights too, which takes 4 bytes more for each choice.

    Raises:
        ValueError: layers of different top_k or on several devices, or of more experts than int16 can count.
    """

    @torch.inference_mode(False)  # passes write in any mode
    def __init__(self, layers: Sequence[FusedMoE], max_tokens: int = MAX_TOKENS, *, weights: bool = False) -> None:
        check_at_least(1, max_tokens=max_tokens)
        check_flags(weights=weights)
        forms = {(layer.top_k, layer.expert_weights()[0].device) for layer in layers}
        self.num_columns = [num_columns(layer) for layer in layers]
        if len(forms) > 1 or max(self.num_columns) > torch.iinfo(torch.int16).max:
            raise ValueError(
                f"layers have {max(self.num_columns)} experts and (top_k, device) {sorted(map(str, forms))}; routing "
                f"is recorded of layers with one top_k on one device, of up to 32767 experts; record them apart"
            )
        ((top_k, self._device),) = forms
        # The last row takes what is not to be kept.
        shape = (len(layers), max_tokens + 1, top_k)
        self._ids = torch.full(shape, -1, dtype=torch.int16, device=self._device)
        self._weights = torch.zeros(shape, dtype=torch.float32, device=self._device) if weights else None
        self._ends = torch.zeros(len(layers), dtype=torch.int64, device=self._device)
        self._rows: torch.Tensor | None = None
        self._num_taken = [0] * len(layers)
        self.max_tokens = max_tokens

    @contextlib.contextmanager
    def recording(self, layers: Sequence[FusedMoE]) -> Iterator[None]:
        """A block in which passes of these layers are recorded."""
        wrappers = [partial(RecordingRouter, log=self, layer=number) for number in range(len(layers))]
        with wrapped_routers(layers, wrappers):
            yield

    @contextlib.contextmanager
    def at(self, rows: torch.Tensor) -> Iterator[None]:
        """A block of one pass whose tokens have these rows, int64 `[T]`; `max_tokens` for a row that is not kept."""
        self._rows, self._num_taken = rows, [0] * len(self._num_taken)
        try:
            yield
        finally:
            self._rows = None

    def next_rows(self, layer: int, num_tokens: int) -> ChoiceLog:
        """Where the choices of one layer's next tokens go; queued on the device."""
        if self._rows is None:
            end = self._ends[layer]
            rows = (end + torch.arange(num_tokens, device=self._device)).clamp(max=self.max_tokens)
            end += num_tokens
        else:
            # A backend of fixed capacity takes a pass in several parts.
            first = self._num_taken[layer]
            rows = self._rows[first : first + num_tokens]
            self._num_taken[layer] = first + num_tokens
        return ChoiceLog(rows, self._ids[layer], None if self._weights is None else self._weights[layer])

    def read(self, rows: slice) -> Choices:
        """Some rows; waits for the device."""
        return Choices(_copied(self._ids, rows), None if self._weights is None else _copied(self._weights, rows))

    def choices(self) -> Choices:
        """All rows that passes have written, in their order; a pass of B sequences has those of the first one first.

        Raises:
            ConfigError: more than there was room for.
            RuntimeError: passes that did not call each layer with the same tokens.
        """
        ends = self._ends.tolist()
        if max(ends) > self.max_tokens:
            raise ConfigError(
                f"max_tokens is {self.max_tokens} and {max(ends)} tokens were routed; record with as much room"
            )
        if min(ends) < max(ends):
            raise RuntimeError(f"the layers were given {ends} tokens; record passes that run each layer")
        return self.read(slice(0, ends[0]))

    def __deepcopy__(self, memo: dict[int, Any]) -> RoutingLog:
        raise ConfigError("a model cannot be copied while its routing is recorded; copy it before")


def _copied(log: torch.Tensor, rows: slice) -> torch.Tensor:
    """Some rows as `[rows, layers, top_k]` on the CPU."""
    part = log[:, rows].transpose(0, 1)
    return torch.empty(part.shape, dtype=part.dtype, device="cpu").copy_(part)


class RecordingRouter(WrappingRouter):
    """Writes what another router chooses to a log."""

    def __init__(self, router: Router, log: RoutingLog, layer: int) -> None:
        super().__init__(router)
        self._log, self._layer = log, layer

    def route(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> Routed:
        if not isinstance(self.router, PrecomputedRouter):
            return super().route(hidden_states, *inputs)
        # The kernel that cleans a model's choices records them too.
        weights, ids = self.router.choose(hidden_states, *inputs)
        log = self._log.next_rows(self._layer, hidden_states.size(0))
        return self.router.complete(hidden_states, weights, ids, log)

    def choose(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = self.router.choose(hidden_states, *inputs)
        log = self._log.next_rows(self._layer, hidden_states.size(0))
        return known_choices(weights, ids, self._log.num_columns[self._layer], log=log)


@contextlib.contextmanager
def wrapped_routers(layers: Sequence[FusedMoE], wrappers: Sequence[Any]) -> Iterator[None]:
    """A block in which each layer's router is inside of what its wrapper makes of it; recorded is what all others have
    chosen."""
    for layer, wrapper in zip(layers, wrappers, strict=True):
        layer.router_wrappers = tuple(sorted((*layer.router_wrappers, wrapper), key=_records))
    try:
        yield
    finally:
        for layer, wrapper in zip(layers, wrappers, strict=True):
            layer.router_wrappers = tuple(each for each in layer.router_wrappers if each is not wrapper)


def _records(wrapper: Any) -> bool:
    return isinstance(wrapper, partial) and wrapper.func is RecordingRouter


@contextlib.contextmanager
def recording(model: Any, max_tokens: int = MAX_TOKENS, *, weights: bool = False) -> Iterator[RoutingLog]:
    """A block in which the routing of every pass is recorded.

    Args:
        model: a layer, several in order, a `MoEStack`, or a model that `parallelize` made.
        max_tokens: rows that there is room for on the device.
        weights: record the router's weights too.

    Yields:
        The log; `choices` gives its rows, also after the block.

    Raises:
        ValueError: nothing that has layers, or layers that cannot be recorded together.
        TypeError: weights is neither True nor False.
    """
    layers = layers_of(model)
    log = RoutingLog(layers, max_tokens, weights=weights)
    with log.recording(layers):
        yield log

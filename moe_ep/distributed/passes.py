"""The ranks' agreement on the largest number of tokens, made once for all layers of a model's pass.

A fixed-capacity backend splits more tokens into several steps, equally many on every rank. So the ranks must know the
most tokens that any of them has, and a layer that is called outside `one_pass` has to ask for it every time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from moe_ep.distributed.exchange import largest_over_ranks
from moe_ep.distributed.process_groups import LayerGroups
from moe_ep.errors import check_at_least

# The most tokens of any rank, by EP group.
_agreed: ContextVar[Mapping[dist.ProcessGroup, int] | None] = ContextVar("moe_ep_agreed_tokens", default=None)


class LayerOfRanks(Protocol):
    """The part of a MoE layer that a pass needs."""

    @property
    def groups(self) -> LayerGroups:
        """The process groups of the layer's ranks."""

    @property
    def asks_for_tokens(self) -> bool:
        """Whether the ranks must know each other's number of tokens before a pass."""


Layer = TypeVar("Layer", bound=LayerOfRanks)


@contextmanager
def one_pass(layers: Iterable[LayerOfRanks], num_tokens: int) -> Iterator[None]:
    """A block in which these layers get at most num_tokens tokens at a time, and need not ask the other ranks.

    All ranks of the layers must enter it, each with its own number of tokens, either for every pass of a model or once
    for many passes of one size. Under CUDA-graph capture it does nothing, since layers do not ask there.

    Example:
        with moe_ep.one_pass(layers, hidden_states.size(0)):
            for layer in layers:
                hidden_states = hidden_states + layer(hidden_states, router(hidden_states))

    Raises:
        TypeError: layers that are none.
    """
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        yield
        return
    check_at_least(0, num_tokens=num_tokens)
    agreed = dict(_agreed.get() or {})
    groups = dict.fromkeys(layer.groups.ep for layer in moe_layers(layers) if layer.asks_for_tokens)
    agreed.update((group, largest_over_ranks(num_tokens, group)) for group in groups if group is not None)
    token = _agreed.set(agreed)
    try:
        yield
    finally:
        _agreed.reset(token)


def moe_layers(layers: Iterable[Layer]) -> list[Layer]:
    """The layers as a list, those inside what torch.compile made of one; TypeError where they are something else."""
    wanted = "it must be a model's MoE layers, as [layer]"
    if not isinstance(layers, Iterable):
        raise TypeError(f"layers is a {type(layers).__name__}; {wanted}")
    found = [getattr(layer, "_orig_mod", layer) for layer in layers]
    for layer in found:
        if not hasattr(type(layer), "asks_for_tokens"):
            raise TypeError(f"layers has a {type(layer).__name__}; {wanted}")
    return found


def most_tokens(num_tokens: int, group: dist.ProcessGroup | None) -> int:
    """The most tokens that any rank of the group has: as agreed for the pass, or otherwise by asking all ranks.

    Raises:
        ValueError: this rank has more tokens than it said for the pass.
    """
    if group is None:
        return num_tokens
    agreed = (_agreed.get() or {}).get(group)
    if agreed is None:
        return largest_over_ranks(num_tokens, group)
    if num_tokens > agreed:
        raise ValueError(
            f"hidden_states has {num_tokens} tokens and the ranks agreed on at most {agreed} for this pass; give "
            f"one_pass the most that any of its layers gets"
        )
    return agreed

"""How many tokens the ranks bring to a layer, which they agree on once for all layers of a pass.

A backend of fixed capacity takes more tokens in several steps, as many on every rank. So the ranks must know the most
that any of them has, and a layer that is called by itself has to ask for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from moe_ep.agreement import largest_over_ranks

if TYPE_CHECKING:
    from moe_ep.layer import FusedMoE

# The most tokens of any rank, by EP group.
_agreed: ContextVar[Mapping[dist.ProcessGroup, int] | None] = ContextVar("moe_ep_agreed_tokens", default=None)


@contextmanager
def one_pass(layers: Iterable[FusedMoE], num_tokens: int) -> Iterator[None]:
    """A block in which these layers get at most num_tokens tokens at a time, and ask no other rank how many it has.

    Entering it is a collective step of the layers' ranks, each with tokens of its own. It may be entered anew for every
    pass of a model, or once for passes of one size. Under CUDA-graph capture it does nothing: layers ask nobody there.

    Example:
        with moe_ep.one_pass(layers, hidden_states.size(0)):
            for layer in layers:
                hidden_states = hidden_states + layer(hidden_states, router(hidden_states))
    """
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        yield
        return
    agreed = dict(_agreed.get() or {})
    groups = dict.fromkeys(layer.groups.ep for layer in layers if layer.asks_for_tokens)
    agreed.update((group, largest_over_ranks(num_tokens, group)) for group in groups if group is not None)
    token = _agreed.set(agreed)
    try:
        yield
    finally:
        _agreed.reset(token)


def most_tokens(num_tokens: int, group: dist.ProcessGroup | None) -> int:
    """The most tokens of any rank of the group: as agreed for the pass, or else by asking, a collective step.

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

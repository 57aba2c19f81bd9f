"""Attention of several sequences by torch's flash attention, which reads of each sequence what is there.

torch's masked attention takes a mask, keys and values of all heads (copied where heads share them), and the whole room
of every slot; transformers' own for models with attention sinks keeps all scores in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_ep.checkpoint.families.models import FAMILIES

_NAME = "moe_ep_slots"
_MAX_HEAD_DIM = 256
_FLASH_FROM = (8, 0)
_flash: Any = torch.ops.aten._flash_attention_forward
_windows: ContextVar[Sequence[int | None]] = ContextVar("_windows")


class SequenceTable:
    """Where sequences begin and how long they are, in the place of a mask: int32 `[3, num_sequences + 1, 1, 1]`.

    Its rows say where each sequence's queries begin among all, where its keys do, and how many of these there are.
    Models hand a mask of four dimensions on to their attention as it is.
    """

    def __init__(self, query_starts: torch.Tensor, key_starts: torch.Tensor) -> None:
        self._table = torch.stack([query_starts, key_starts, torch.zeros_like(key_starts)]).int()[..., None, None]

    @classmethod
    def of_slots(cls, num_slots: int, max_length: int, device: torch.device) -> SequenceTable:
        """Of one query for each slot, and keys with room for `max_length`."""
        starts = torch.arange(num_slots + 1, device=device)
        return cls(starts, starts * max_length)

    @classmethod
    def of_prompts(cls, lengths: torch.Tensor) -> SequenceTable:
        """Of prompts of int64 `[num_prompts]` tokens, one behind the other."""
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return cls(starts, starts)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The table where each sequence's last token is at int64 `[num_sequences]`; always the same memory."""
        torch.add(positions, 1, out=self._table[2, :-1, 0, 0])
        return self._table


def can_attend(model: Any) -> bool:
    """Whether this attention can take the place of the model's."""
    config = model.config.get_text_config()
    # Layers with heads of their own, such as Gemma's, which are wider than this attention takes.
    if getattr(config, "is_heterogeneous", False):
        return False
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        _runs(model.device, model.dtype)
        and model._supports_flash_attn
        # Others may hand their attention what this one does not take, such as a cap of scores.
        and model.config.model_type in FAMILIES
        # Latent attention, whose keys and values may have widths of their own.
        and all(getattr(config, width, None) in (None, head_dim) for width in ("qk_head_dim", "v_head_dim"))
        and head_dim <= _MAX_HEAD_DIM
        and head_dim % 8 == 0
    )


def _runs(device: torch.device, dtype: torch.dtype) -> bool:
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and torch.cuda.get_device_capability(device) >= _FLASH_FROM
    )


@contextmanager
def slot_attention(model: Any, windows: Sequence[int | None]) -> Iterator[None]:
    """A block in which the model's passes take tables of sequences as their masks.

    Args:
        windows: keys that a query of each layer sees at most, None for all. Masks have them, and some models do not
            tell them to their attention.
    """
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = _NAME
    token = _windows.set(windows)
    try:
        yield
    finally:
        _windows.reset(token)
        config._attn_implementation = before


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: a query sees the keys of its sequence up to its own.

    Args:
        query: `[B, heads, queries, head_dim]`.
        key, value: `[B, key_value_heads, keys, head_dim]`; sequences lie one behind the other in B and keys.
        attention_mask: as `SequenceTable` has it.
        s_aux: `[heads]`, scores of a key that every query sees and that has no value.

    Returns:
        `[B, queries, heads, head_dim]`.
    """
    query_starts, key_starts, lengths = attention_mask.flatten(1)
    window = _windows.get()[module.layer_idx]
    rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    output, logsumexp, *_ = _flash(
        *rows,
        query_starts,
        key_starts,
        query.size(2),
        key.size(2),
        0.0,  # dropout
        True,  # causal
        return_debug_mask=False,
        scale=scaling,
        seqused_k=lengths[:-1],
        window_size_left=None if window is None else window - 1,
    )
    if s_aux is not None:
        output = (output * torch.sigmoid(logsumexp.t() - s_aux)[..., None]).to(query.dtype)
    return output.unflatten(0, (query.size(0), -1)), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)

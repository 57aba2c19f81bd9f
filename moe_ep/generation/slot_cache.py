"""A key-value cache of fixed size for sequences that come and go, and attention that reads of each what is there.

Each slot of the cache holds one sequence, at a position of its own. torch's masked attention takes a mask, keys and
values of all heads (copied where heads share them), and the whole room of every slot; transformers' own for models with
attention sinks keeps all scores in memory. torch's flash attention reads sequences by their lengths.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moe_ep.checkpoint.families.models import FAMILIES
from moe_ep.errors import ConfigError
from moe_ep.modular_kernel.invariant_ops import invariant_products
from moe_ep.registry import choose_form

_NAME, _INVARIANT_NAME = "moe_ep_slots", "moe_ep_invariant_slots"
# Keys that scores are computed for and values are added up for at a time, in batch-invariant attention.
_CHUNK = 64
_MAX_HEAD_DIM = 256
_FLASH_FROM = (8, 0)
flash_attention: Any = torch.ops.aten._flash_attention_forward
_windows: ContextVar[Sequence[int | None]] = ContextVar("_windows")


class SequenceTable:
    """Offsets and lengths of sequences, passed in place of an attention mask: int32 `[3, num_sequences + 1, 1, 1]`.

    Its rows are the first query of each sequence, its first key, and its number of keys. It has four dimensions because
    models pass such masks to their attention unchanged.
    """

    def __init__(self, query_starts: torch.Tensor, key_starts: torch.Tensor) -> None:
        self._table = torch.stack([query_starts, key_starts, torch.zeros_like(key_starts)]).int()[..., None, None]

    @classmethod
    def of_slots(cls, num_slots: int, max_length: int, device: torch.device) -> SequenceTable:
        """For one query a slot, and room for `max_length` keys."""
        starts = torch.arange(num_slots + 1, device=device)
        return cls(starts, starts * max_length)

    @classmethod
    def of_prompts(cls, lengths: torch.Tensor) -> SequenceTable:
        """For concatenated prompts of int64 `[num_prompts]` tokens."""
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return cls(starts, starts)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The table for sequences whose last token is at int64 `[num_sequences]`; always the same memory."""
        torch.add(positions, 1, out=self._table[2, :-1, 0, 0])
        return self._table


def can_attend(model: Any) -> bool:
    """Whether `slot_attention` can replace the model's attention."""
    config = model.config.get_text_config()
    # Some layers, such as Gemma's, have heads that are wider than this attention takes.
    if getattr(config, "is_heterogeneous", False):
        return False
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (
        runs_flash_attention(model.device, model.dtype)
        and model._supports_flash_attn
        # Other attention functions may be passed arguments that this one does not take, such as a cap of scores.
        and model.config.model_type in FAMILIES
        # Latent attention, whose keys and values may have widths of their own.
        and all(getattr(config, width, None) in (None, head_dim) for width in ("qk_head_dim", "v_head_dim"))
        and head_dim <= _MAX_HEAD_DIM
        and head_dim % 8 == 0
    )


def runs_flash_attention(device: torch.device, dtype: torch.dtype) -> bool:
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and torch.cuda.get_device_capability(device) >= _FLASH_FROM
    )


def refuses_invariance(model: Any, layers: Sequence[Any]) -> str | None:
    """Why the model's own parts cannot keep a token's bits the same in every batch; None if they can."""
    config = model.config.get_text_config()
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"its layers keep a {type(layer).__name__}, whose passes are not batch-invariant"
    if getattr(config, "is_heterogeneous", False) or model.config.model_type not in FAMILIES:
        return f"the attention of a {model.config.model_type} may need what the batch-invariant one does not have"
    if not (model._supports_flash_attn or model._supports_sdpa):
        return "its attention cannot be replaced"
    return None


@contextmanager
def slot_attention(model: Any, windows: Sequence[int | None], *, batch_invariant: bool = False) -> Iterator[None]:
    """A block in which the model's passes take a `SequenceTable` as their attention mask.

    Args:
        windows: keys that a query of each layer sees at most, None for all. Masks have them, and some models do not
            tell them to their attention.
        batch_invariant: a query's result has the same bits whatever queries are beside it and however much room the
            keys have.
    """
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = _INVARIANT_NAME if batch_invariant else _NAME
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
    output, logsumexp, *_ = flash_attention(
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


def _attend_invariantly(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`_attend` with the same bits for a query alone and in any batch; values may be narrower than keys."""
    if attention_mask is not None and attention_mask.dim() != 4:
        raise ConfigError(
            f"attention_mask is {tuple(attention_mask.shape)}; batch-invariant passes take sequences of one length "
            f"without a mask, and padded ones one by one"
        )
    if softcap is not None:
        raise ConfigError(f"the attention caps its scores (softcap {softcap}), which batch_invariant does not support")
    window = _windows.get()[module.layer_idx]
    table = attention_mask.flatten(1) if attention_mask is not None else _table_of_rows(query, key)
    form = choose_form(attention_in_chunks, "invariant:triton_slot_attention", query, key)
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    queries, keys, values = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    output = form(queries, keys, values, table, scale, window, s_aux)
    return output.unflatten(0, (query.size(0), -1)), None


def _table_of_rows(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """As `SequenceTable` has it, without its two last dimensions: every row of the batch is a sequence."""
    starts = torch.arange(query.size(0) + 1, dtype=torch.int32, device=query.device)
    return torch.stack([starts * query.size(2), starts * key.size(2), torch.full_like(starts, key.size(2))])


def attention_in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention in f32 whose sums have an order that follows from the keys' positions alone.

    Keys are taken in chunks of `_CHUNK` from a sequence's first one on, the last chunk padded with zeros. What a query
    does not see adds zeros at the end of its sums, so neither padding nor later keys change it.

    Args:
        query: `[num_queries, heads, head_dim]`, sequences one behind the other.
        key, value: `[num_keys, key_value_heads, head_dim]`; value may have a width of its own.
        table: int32 `[3, num_sequences + 1]`, as `SequenceTable` has it.
        window: keys that a query sees at most; None for all.
        sinks: `[heads]`, scores of a key without a value; None without.
    """
    query_starts, key_starts, lengths = table.tolist()
    outputs = []
    for number, length in enumerate(lengths[:-1]):
        rows = query[query_starts[number] : query_starts[number + 1]].float() * scale
        held = slice(key_starts[number], key_starts[number] + length)
        keys, values = (_in_chunks(tensor[held]) for tensor in (key, value))
        outputs.append(_attend_to_one(rows, keys, values, length, window, sinks))
    return torch.cat(outputs).to(query.dtype)


def _in_chunks(rows: torch.Tensor) -> list[torch.Tensor]:
    """f32 `[key_value_heads, _CHUNK, head_dim]` of rows `[length, key_value_heads, head_dim]`, padded with zeros."""
    padded = torch.nn.functional.pad(rows.float(), (0, 0, 0, 0, 0, -rows.size(0) % _CHUNK))
    return list(padded.transpose(0, 1).split(_CHUNK, dim=1))


def _attend_to_one(
    rows: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    length: int,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The queries `[n, heads, head_dim]` of one sequence, which are its last tokens; f32 `[n, heads, value_dim]`."""
    num_queries, num_heads, _ = rows.shape
    groups = num_heads // keys[0].size(0)
    # The heads that share keys lie side by side: [key_value_heads, groups * n, head_dim].
    rows = rows.transpose(0, 1).reshape(keys[0].size(0), groups * num_queries, -1)
    scores = torch.cat([invariant_products(rows, chunk) for chunk in keys], dim=-1)
    position = torch.arange(length - num_queries, length, device=rows.device).repeat(groups)[:, None]
    column = torch.arange(scores.size(-1), device=rows.device)
    seen = column <= position
    if window is not None:
        seen &= column > position - window
    scores = scores.masked_fill(~seen, float("-inf"))
    largest = scores.detach().amax(dim=-1, keepdim=True)
    sink = None
    if sinks is not None:
        sink = sinks.float().view(-1, groups, 1).expand(-1, -1, num_queries).reshape(*largest.shape)
        largest = torch.maximum(largest, sink.detach())
    weights = torch.exp(scores - largest).split(_CHUNK, dim=-1)
    total = torch.zeros_like(largest) if sink is None else torch.exp(sink - largest)
    output = torch.zeros(*largest.shape[:-1], values[0].size(-1), device=rows.device)
    for weight, chunk in zip(weights, values, strict=True):
        total = total + weight.sum(dim=-1, keepdim=True)
        output = output + invariant_products(weight, chunk.transpose(1, 2))
    return (output / total).view(num_heads, num_queries, -1).transpose(0, 1)


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
ALL_ATTENTION_FUNCTIONS.register(_INVARIANT_NAME, _attend_invariantly)


# The class of layers that keep no state, in versions that have one.
_DummyLayer: Any = getattr(cache_utils, "DummyLayer", Cache)


class SlotCache(Cache):
    """The caches of `num_slots` sequences of one model, which decode together, one token each in a step.

    Keys and values `[num_slots, heads, max_length, head_dim]` stay where they are, so a CUDA graph can hold a step. A
    slot's token is written at `positions[slot]`; `attention_mask` hides what is behind it, and what was left there by
    sequences before. States of linear attention are `[num_slots, ...]`.

    Args:
        prefilled: the cache of any sequences, for shapes and dtypes.
        layer_types: what the model calls the kinds of its layers, one each; None where it has no names for them.
        positions: int64 `[num_slots]`, where each slot's next token goes; the caller advances it.
        by_table: whether the model's attention takes tables of sequences, as `slot_attention` has them, for masks.

    Raises:
        ConfigError: layers that keep something else than keys and values, or states of linear attention.
    """

    def __init__(
        self,
        prefilled: Cache,
        layer_types: Sequence[str] | None,
        num_slots: int,
        max_length: int,
        positions: torch.Tensor,
        *,
        by_table: bool = False,
    ) -> None:
        # As Qwen4-Exp in older versions of transformers.
        if hasattr(prefilled, "position_ids"):
            raise _no_slots_like(f"{type(prefilled).__name__} with positions")
        self.positions = positions
        super().__init__(layers=[_slots_like(layer, num_slots, max_length, positions) for layer in prefilled.layers])
        self._columns = torch.arange(max_length, device=positions.device)
        self._table = SequenceTable.of_slots(num_slots, max_length, positions.device) if by_table else None
        kinds = layer_types or [type(layer).__name__ for layer in prefilled.layers]
        # Whether a kind has masks, and the tokens that it sees at most; not its layers, which hold the prefilled past.
        self._kinds: dict[str, tuple[bool, int | None]] = {}
        for kind, layer in zip(kinds, prefilled.layers, strict=False):
            masked = not isinstance(layer, LinearAttentionLayer | _DummyLayer)
            # A layer without a cache of its own may read the cache of another layer of its kind.
            if masked or kind not in self._kinds:
                self._kinds[kind] = masked, getattr(layer, "sliding_window", None)

    def put(self, slots: torch.Tensor, prefilled: Cache, positions: torch.Tensor) -> None:
        """Gives slots to the sequences of `prefilled`, which are packed in one row or have a row each.

        Args:
            slots: int64 `[rows, columns]`, of each token that was read.
            positions: int64 `[rows, columns]`, of the tokens in their sequences; negative for padding, which stands on
                the left. It goes to the end of a slot, where nothing sees it before it is overwritten.
        """
        layers: list[Any] = self.layers
        columns = positions % self._columns.numel()
        for ours, theirs in zip(layers, prefilled.layers, strict=True):
            ours.put(slots, theirs, columns)

    def clear(self, slot: int) -> None:
        """Sets to 0 what a slot holds."""
        layers: list[Any] = self.layers
        for layer in layers:
            layer.clear(slot)

    def attention_mask(self, dtype: torch.dtype) -> Any:
        """Attention masks of each slot's next token, added to scores: `[num_slots, 1, 1, max_length]`, by kind of layer
        if there are several kinds."""
        if self._table is not None:
            table = self._table.at(self.positions)
            return as_models_take({kind: table if has else None for kind, (has, _) in self._kinds.items()})
        return as_models_take(
            {kind: self._mask(window, dtype) if has else None for kind, (has, window) in self._kinds.items()}
        )

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        last = self.positions[:, None]
        seen = self._columns <= last
        if window is not None:
            seen &= self._columns > last - window
        hidden = torch.finfo(dtype).min
        return torch.where(seen, 0.0, hidden).to(dtype)[:, None, None, :]


def as_models_take(masks: dict[str, torch.Tensor | None]) -> Any:
    """Masks by kind of layer, in the form in which models take prepared masks."""
    return masks if len(masks) > 1 else next(iter(masks.values()))


class _AttentionSlots(DynamicLayer):
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, prefilled: Any, num_slots: int, max_length: int, positions: torch.Tensor) -> None:
        super().__init__()
        # In memory the heads of a token lie side by side. Some layers have an indexer and read another layer's keys.
        self._has_keys = prefilled.keys is not None
        if self._has_keys:
            self.keys, self.values = (
                tensor.new_zeros(num_slots, max_length, tensor.size(1), tensor.size(3)).transpose(1, 2)
                for tensor in (prefilled.keys, prefilled.values)
            )
        self.is_initialized = True
        self._positions = positions
        self._rows = torch.arange(num_slots, device=positions.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one token of each slot, `[num_slots, heads, 1, head_dim]`; returns all that is held."""
        self.keys[self._rows, :, self._positions] = key_states.squeeze(2)
        self.values[self._rows, :, self._positions] = value_states.squeeze(2)
        return self.keys, self.values

    def put(self, slots: torch.Tensor, prefilled: Any, columns: torch.Tensor) -> None:
        if not self._has_keys:
            return
        # A sliding window keeps its last columns alone.
        kept = slice(-prefilled.keys.size(2), None)
        self.keys[slots[:, kept], :, columns[:, kept]] = prefilled.keys.transpose(1, 2)
        self.values[slots[:, kept], :, columns[:, kept]] = prefilled.values.transpose(1, 2)

    def clear(self, slot: int) -> None:
        if self._has_keys:
            self.keys[slot] = 0
            self.values[slot] = 0


class _IndexedSlots(_AttentionSlots):
    indexer_keys: torch.Tensor

    def __init__(self, prefilled: Any, num_slots: int, max_length: int, positions: torch.Tensor) -> None:
        super().__init__(prefilled, num_slots, max_length, positions)
        keys = prefilled.indexer_keys
        self.indexer_keys = keys.new_zeros(num_slots, max_length, keys.size(2))

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Writes one token of each slot, `[num_slots, 1, index_head_dim]`; returns all that is held."""
        self.indexer_keys[self._rows, self._positions] = indexer_key_states.squeeze(1)
        return self.indexer_keys

    def put(self, slots: torch.Tensor, prefilled: Any, columns: torch.Tensor) -> None:
        super().put(slots, prefilled, columns)
        self.indexer_keys[slots, columns] = prefilled.indexer_keys

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self.indexer_keys[slot] = 0


class _LinearAttentionSlots(LinearAttentionLayer):
    _STATES = ("conv_states", "recurrent_states")

    @classmethod
    def like(cls, prefilled: LinearAttentionLayer, num_slots: int) -> _LinearAttentionSlots:
        """The same settings and flags, with states for every slot."""
        layer = copy.copy(prefilled)
        layer.__class__ = cls
        for name in cls._STATES:
            states = {
                index: None if state is None else state.new_zeros(num_slots, *state.shape[1:])
                for index, state in getattr(prefilled, name).items()
            }
            setattr(layer, name, states)
        return layer  # type: ignore[return-value]

    def put(self, slots: torch.Tensor, prefilled: LinearAttentionLayer, columns: torch.Tensor) -> None:
        for name in self._STATES:
            for index, state in getattr(prefilled, name).items():
                if state is not None:
                    getattr(self, name)[index][slots[:, 0]] = state

    def clear(self, slot: int) -> None:
        for name in self._STATES:
            for state in getattr(self, name).values():
                if state is not None:
                    state[slot] = 0


class _NoSlots(_DummyLayer):
    def put(self, slots: torch.Tensor, prefilled: Any, columns: torch.Tensor) -> None:
        return

    def clear(self, slot: int) -> None:
        return


def _slots_like(layer: Any, num_slots: int, max_length: int, positions: torch.Tensor) -> Any:
    if type(layer) is LinearAttentionLayer:
        return _LinearAttentionSlots.like(layer, num_slots)
    if type(layer) is _DummyLayer:
        return _NoSlots()
    if type(layer) is DynamicIndexedLayer and getattr(layer, "indexer_position_ids", None) is None:
        kind = _AttentionSlots if layer.indexer_keys is None else _IndexedSlots
    elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        kind = _AttentionSlots
    else:
        raise _no_slots_like(type(layer).__name__)
    return kind(layer, num_slots, max_length, positions)


def _no_slots_like(what: str) -> ConfigError:
    return ConfigError(
        f"the model keeps its past in a {what}; sequences can share a batch only where layers keep keys and values, or "
        f"states of linear attention, of every token alike; run it with transformers' generate"
    )

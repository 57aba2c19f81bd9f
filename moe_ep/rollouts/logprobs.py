"""Log-probabilities of texts for a trainer, computed as the engine computes them while it generates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from moe_ep.errors import check_flags
from moe_ep.generation.decoder import batch_invariant_passes, check_language_model
from moe_ep.generation.engine import check_token_ids
from moe_ep.generation.prompts import packed_prompts
from moe_ep.generation.slot_cache import as_models_take
from moe_ep.rollouts.replay import check_routing_of_texts, replaying


def token_logprobs(
    model: Any, texts: Sequence[torch.Tensor], routing: Sequence[Any] | None = None, *, batch_invariant: bool = False
) -> list[torch.Tensor]:
    """The log-probability of each token but a text's first, in one pass; gradients flow where torch records them.

    With batch_invariant the pass has the operations of a batch-invariant `Generation`: norms, attention and products
    whose bits do not depend on the batch. A trainer's model with the engine's weights and the recorded routing then
    gives the engine's log-probabilities bit for bit, in f32 on CPUs and with top_k up to 2 (transformers adds the
    results of experts in the order of their ids, the engine in the router's); GPT-OSS, whose experts add their biases
    in another way, stays within rounding. On GPUs that pass has no gradients.

    Args:
        model: a causal language model of transformers 5, as it is or parallelized; a parallelized one makes a step of
            all ranks.
        texts: token ids `[length]` of each text, of two tokens at least.
        routing: of each text the experts that its tokens take, `[tokens, layers, top_k]`, of all its tokens or all but
            the last; None for the routers' choice.
        batch_invariant: see above.

    Returns:
        f32 `[length - 1]` of each text.

    Raises:
        ValueError: texts that are none, or routing of other texts.
        ConfigError: a model that cannot keep batch_invariant.
        TypeError: no model of transformers, or batch_invariant is neither True nor False.
    """
    check_language_model(model)
    check_flags(batch_invariant=batch_invariant)
    texts = _listed("texts", texts)
    if not texts:
        raise ValueError("texts is empty; it must have at least one text")
    vocabulary = model.get_input_embeddings().weight.size(0)
    for number, text in enumerate(texts):
        check_token_ids(f"texts[{number}]", text, vocabulary)
        if text.numel() < 2:
            raise ValueError(f"texts[{number}] has {text.numel()} tokens; it must have at least 2")
    # An embedding takes no ids of 8 or 16 bits.
    texts = [text.long() for text in texts]
    ids = None
    if routing is not None:
        routing = _listed("routing", routing)
        check_routing_of_texts(routing, [text.numel() for text in texts])
        ids = [torch.as_tensor(each)[: text.numel() - 1] for each, text in zip(routing, texts, strict=True)]
    forward = _invariant_logits if batch_invariant else _padded_logits
    found = []
    for text, logits in zip(texts, forward(model, [text[:-1] for text in texts], ids), strict=True):
        # Each row alone, as the engine does: torch's sums of several rows may have another order.
        parts = logits.float().split(1 if batch_invariant else len(logits))
        values = torch.cat([part.log_softmax(dim=-1) for part in parts])
        found.append(values.gather(-1, text[1:, None].to(values.device)).squeeze(-1))
    return found


def _listed(name: str, values: Any) -> list[Any]:
    """ValueError for what cannot be one value for each text."""
    if not isinstance(values, Iterable) or isinstance(values, Mapping) or getattr(values, "ndim", 1) == 0:
        raise ValueError(f"{name} is a {type(values).__name__}; it must be a list of tensors, one for each text")
    return list(values)


def _padded_logits(
    model: Any, inputs: Sequence[torch.Tensor], routing: Sequence[torch.Tensor] | None
) -> Sequence[torch.Tensor]:
    """The logits of each text in a batch that is padded on the right; padding keeps the routers' choice."""
    longest, device = max(map(len, inputs)), model.device
    tokens = torch.stack([pad(text, (0, longest - len(text))) for text in inputs]).to(device)
    seen = torch.stack([torch.arange(longest) < len(text) for text in inputs]).to(device)
    replayed: Any = contextlib.nullcontext()
    if routing is not None:
        ids = [pad(each, (0, 0, 0, 0, 0, longest - len(each)), value=-1) for each in routing]
        replayed = replaying(model, torch.stack(ids))
    with replayed:
        logits = model(input_ids=tokens, attention_mask=seen.long(), use_cache=False).logits
    return [row[: len(text)] for row, text in zip(logits, inputs, strict=True)]


def _invariant_logits(
    model: Any, inputs: Sequence[torch.Tensor], routing: Sequence[torch.Tensor] | None
) -> Sequence[torch.Tensor]:
    """The logits of each text, one behind the other in one row."""
    batch = packed_prompts(inputs, model.device)
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    replayed = contextlib.nullcontext() if routing is None else replaying(model, torch.cat(list(routing)))
    with batch_invariant_passes(model), replayed:
        logits = model(
            input_ids=batch.tokens,
            attention_mask=as_models_take(dict.fromkeys(kinds or [""], batch.mask())),
            position_ids=batch.positions,
            use_cache=False,
        ).logits
    return logits[0].split(list(map(len, inputs)))

"""Measures the perplexity of texts over ranks: each rank reads its share of them, and serves the others' passes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from moe_ep.distributed.process_groups import is_initialized
from moe_ep.errors import MoeEpError
from moe_ep.generation.decoder import batch_invariant_passes
from moe_ep.generation.engine import check_token_ids, vocabulary_of
from moe_ep.hf.parallelize import serving
from moe_ep.hf.parallelized import steps_of
from moe_ep.rollouts.replay import check_routing_of_texts, replaying


@torch.inference_mode()
def perplexity(
    model: Any, texts: Mapping[str, Sequence[torch.Tensor]], routing: Sequence[Any] | None = None
) -> dict[str, float]:
    """exp of the mean negative log-likelihood of each token but a text's first, by kind of text.

    A collective step of all ranks, which are given the same texts and return the same.

    Args:
        model: as `parallelize` returns it.
        texts: token ids `[length]` of each text, by kind.
        routing: of each text, in their order over all kinds, the experts that its tokens take in place of the router's:
            ids `[tokens, layers, top_k]`, or (ids, weights or None), as `moe_ep.replaying` takes them, of all tokens or
            all but the last. None for the routers' own.

    Raises:
        ValueError: a text that the model cannot read, routing of other texts, a kind without a text of two tokens, or a
            model that `parallelize` did not make. On every rank, before the first text is read.
        TypeError: texts that are not by kind, or texts or routing that are no list.
        MoeEpError: a kind whose perplexity is no number, as with NaN in the model's weights. On every rank.
    """
    steps_of(model)
    _check(texts, vocabulary_of(model))
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if is_initialized() else (0, 1)
    sums = torch.zeros(len(texts), 2, dtype=torch.float64, device="cpu")
    tasks = [(kind, ids) for kind, several in enumerate(texts.values()) for ids in several]
    if routing is not None:
        _check_list("routing", routing)
        routing = [each if isinstance(each, tuple) else (each, None) for each in routing]
        check_routing_of_texts([ids for ids, _ in routing], [ids.numel() for _, ids in tasks])
    is_invariant = any(layer.batch_invariant for layer in steps_of(model).layers)
    with serving(model), batch_invariant_passes(model) if is_invariant else contextlib.nullcontext():
        for number in range(rank, len(tasks), num_ranks):
            kind, ids = tasks[number]
            if ids.numel() < 2:
                continue
            tokens = ids.to(model.device, torch.int64)
            # Nothing is predicted from the last token, whose routing may be recorded or not.
            rows = slice(tokens.numel() - 1)
            recorded = None if routing is None else [None if part is None else part[rows] for part in routing[number]]
            with contextlib.nullcontext() if recorded is None else replaying(model, *recorded):
                logits = model(input_ids=tokens[None, :-1]).logits[0].float()
            sums[kind, 0] += float(cross_entropy(logits, tokens[1:], reduction="sum"))
            sums[kind, 1] += tokens.numel() - 1
    if num_ranks > 1:
        dist.all_reduce(sums)
    return {name: _exp(name, total / count) for name, (total, count) in zip(texts, sums.tolist(), strict=True)}


def _exp(kind: str, mean: float) -> float:
    if math.isfinite(mean):
        with contextlib.suppress(OverflowError):
            return math.exp(mean)
    raise MoeEpError(
        f"the negative log-likelihood of the texts of {kind} is {mean} a token, whose perplexity is no number; the "
        f"model's weights, or its activations in this dtype, have NaN or infinity"
    )


def _check_list(name: str, values: Any) -> None:
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} is a {type(values).__name__}; it must be a list with a tensor for each text")


def _check(texts: Mapping[str, Sequence[torch.Tensor]], vocabulary: int) -> None:
    if not isinstance(texts, Mapping):
        raise TypeError(f"texts is a {type(texts).__name__}; it must be a dict of each kind's texts")
    for kind, several in texts.items():
        _check_list(f"texts of {kind}", several)
        for number, ids in enumerate(several):
            check_token_ids(f"text {number} of {kind}", ids, vocabulary)
        if all(ids.numel() < 2 for ids in several):
            raise ValueError(f"texts has none of two tokens in {kind}; a text's first token is not predicted")

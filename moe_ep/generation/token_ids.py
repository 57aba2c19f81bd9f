"""Whether a model can read token ids, asked before any rank begins a step with them."""

from __future__ import annotations

from typing import Any

import torch

from moe_ep.arguments import INTEGER_NAMES, INTEGERS
from moe_ep.errors import ConfigError


def vocabulary_of(model: Any) -> int:
    """Rows of the model's embedding; ConfigError for a model without a head, which predicts no tokens."""
    if not model.can_generate():
        raise ConfigError(
            f"model is a {type(model).__name__}, which predicts no tokens; give parallelize the model with its "
            f"head, as AutoModelForCausalLM or a path make it"
        )
    return int(model.get_input_embeddings().weight.size(0))


def check_token_ids(name: str, token_ids: Any, vocabulary: int) -> None:
    """Raises ValueError unless they are one sequence of ids that the embedding has."""
    if not isinstance(token_ids, torch.Tensor):
        raise ValueError(f"{name} is a {type(token_ids).__name__}; it must be a tensor of token ids, [length]")
    # Tokenizers give none as a float tensor.
    if token_ids.dim() != 1 or (token_ids.numel() and token_ids.dtype not in INTEGERS):
        raise ValueError(
            f"{name} is {token_ids.dtype} {tuple(token_ids.shape)}; it must be token ids of one sequence, [length] of "
            f"{INTEGER_NAMES}"
        )
    if not token_ids.numel():
        return
    least, most = (int(bound) for bound in token_ids.aminmax())
    if least < 0 or most >= vocabulary:
        raise ValueError(
            f"{name} has ids from {least} to {most}; they must be at least 0 and below the {vocabulary} rows of the "
            f"model's embedding"
        )

"""What the installed transformers has: tests of anything else are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING


def is_known(name: str) -> bool:
    """Whether transformers has a class of that name."""
    return hasattr(transformers, name)


def known(name: str) -> Any:
    """The class of transformers of that name; skips the test where there is none."""
    if not is_known(name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)


def random_model(name: str, config: Any) -> Any:
    """A model of the class of that name, always the same."""
    torch.manual_seed(0)
    return draw_experts(known(name)(config))


def draw_experts(model: Any) -> Any:
    """The model, for inference; transformers itself leaves experts and routers next to nothing to say."""
    for name, param in model.named_parameters():
        if "experts." in name or name.endswith(("gate.weight", "router.weight")) or "softmax_scaling" in name:
            torch.nn.init.normal_(param.requires_grad_(False), std=0.3)
    return model.eval().requires_grad_(False)


def language_model(config: Any, dtype: torch.dtype) -> Any:
    """A random model of a configuration; transformers lists some beside models that see."""
    listed = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM if listed else transformers.AutoModelForImageTextToText
    return auto.from_config(config, dtype=dtype)

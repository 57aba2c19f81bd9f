"""Each setting of experts that a family's code in transformers respects is respected here, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep.checkpoint import CheckpointReader, model_spec
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.errors import CheckpointError
from moe_ep.layer.methods import relative_error, tolerance
from moe_ep.layer.stack import MoEStack
from tests.checkpoint.model_cases import MODELS, block_of, config_of, save_model

# What keys of settings that concern experts have in their names.
WORDS = ("moe", "expert", "rout", "topk", "scal", "limit", "norm_min", "score", "bias")


def changes(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The other value of each switch, and another one of each number that is no size."""
    for key, value in config.items():
        if any(word in key for word in WORDS):
            if isinstance(value, bool):
                yield {key: not value}
            elif isinstance(value, float):
                yield {key: value / 2 + 0.25}


def theirs(layer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """What transformers' layer adds to its sequence `[1, T, K]` for its experts' input."""
    output = block_of(layer)(hidden_states)
    output = output[0] if isinstance(output, tuple) else output
    beside_block = getattr(layer, "shared_mlp", None)  # Granite's
    return output if beside_block is None else output + beside_block(hidden_states)


def is_respected(family: str, directory: Path, change: dict[str, Any]) -> bool:
    """Whether the last layer of such a model computes what transformers' does."""
    try:
        model = save_model(family, directory, **change).float()
    except (ValueError, TypeError, RuntimeError, AttributeError, AssertionError):
        return True  # transformers has no such model
    with CheckpointReader(directory) as reader:
        try:
            spec = model_spec(reader.config, reader)
        except CheckpointError as refused:
            return next(iter(change)) in str(refused)
        block = MoEStack(reader, spec, FusedMoEParallelConfig.make(), dtype=torch.float32).layers()[-1]
    hidden_states = torch.randn(1, 9, 64)
    with torch.inference_mode():
        got = block.moe(hidden_states[0], block.router_logits(hidden_states[0]))
        if family == "axk1":  # whose norm behind the experts is in the block
            got = block.rms_norm(got, block.output_norm_weight)
        expected = theirs(model.model.layers[block.layer_index], hidden_states)[0]
    return relative_error(got, expected) < 2 * tolerance(torch.float32)


@pytest.mark.parametrize("family", MODELS)
def test_settings_are_respected_or_refused(family: str, tmp_path: Path) -> None:
    for number, change in enumerate(({}, *changes(config_of(family)))):
        assert is_respected(family, tmp_path / str(number), change), change


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        (
            "deepseek_v2",
            {"norm_topk_prob": True},
            "norm_topk_prob: expected False, found True; no other is comp",
        ),
        (
            "deepseek_v4",
            {"norm_topk_prob": False},
            "norm_topk_prob: expected True, found False; no other is comp",
        ),
        ("deepseek_v4", {"n_shared_experts": 0}, "n_shared_experts: expected 1, found 0; no other is computed here"),
        ("ernie4_5_moe", {"moe_norm_min": 0.3}, "moe_norm_min: expected at most 0.25, which no sum .*, found 0.3"),
    ],
)
def test_settings_that_transformers_does_not_respect(family: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=f"^config.json: {words}"):
        model_spec(config_of(family, **change))


def test_settings_of_older_families_say_nothing_about_qwen3_5() -> None:
    config = config_of("qwen3_next") | {"model_type": "qwen3_5_moe_text"}
    older = {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [0]}
    assert model_spec(config | older) == model_spec(config)

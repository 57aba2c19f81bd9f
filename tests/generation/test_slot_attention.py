"""Attention over slots by their lengths against transformers' own over masks, with flash attention in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")


import moe_ep
from moe_ep.generation import slot_cache
from moe_ep.generation.decoder import SlotDecoder
from moe_ep.hf.steps import Step
from moe_ep.layer.methods import relative_error, tolerance
from tests.hf.hf_models import FAMILIES, SIZES, make_model
from tests.hf.test_families import OTHERS, OWN_PAST

SLOTS = 3
# Keys of another width than values, an indexer, or attention that no other function may take the place of.
MASKED = {"DeepseekV2", "DeepseekV3", "DeepseekV32", "GlmMoeDsa", "Glm4MoeLite", "KimiK25", "MiMoV2Flash", "KimiLinear"}
MASKED |= {"BailingHybrid", "AXK1", "AXK2", "Dots3NoteText", "Gemma4Text", "HYV4", "LongcatFlash"}

# Models that have windows in their masks and do not tell their attention.
UNTOLD: dict[str, dict[str, Any]] = {
    "Phimoe": {"num_local_experts": 6},
    "Qwen2Moe": {"use_sliding_window": True, "max_window_layers": 1},
}
LINEAR = {"Qwen3Next", "NemotronH", "Jamba", "Lfm2Moe", "GraniteMoeHybrid"}


def plain_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    max_queries: int,
    max_keys: int,
    dropout: float,
    is_causal: bool,
    *,
    return_debug_mask: bool,
    scale: float,
    seqused_k: torch.Tensor,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output `[rows, heads, head_dim]`, logsumexp `[heads, rows]`), one sequence after the other."""
    outputs, sums = [], []
    for index, used in enumerate(seqused_k.tolist()):
        q = query[query_starts[index] : query_starts[index + 1]].transpose(0, 1)
        first = int(key_starts[index])
        assert used <= max_keys and q.size(1) <= max_queries
        k, v = (
            x[first : first + used].transpose(0, 1).repeat_interleave(query.size(1) // key.size(1), 0)
            for x in (key, value)
        )
        # How far a key lies before its query, which is one of the last.
        distance = torch.arange(used - q.size(1), used)[:, None] - torch.arange(used)
        seen = distance >= 0 if is_causal or window_size_right == 0 else torch.ones_like(distance, dtype=torch.bool)
        if window_size_left is not None:
            seen &= distance <= window_size_left
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outputs), torch.cat(sums, dim=1)


def decoded(model: Any, **options: Any) -> tuple[list[torch.Tensor], SlotDecoder]:
    """Logits of prompts in two of three slots, of ten steps, and of a third prompt that takes a slot over."""
    decoder = SlotDecoder(model, SLOTS, 32, graphs=False, **options)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, SIZES["vocab_size"], (length,), generator=generator) for length in (4, 13, 6)]
    tokens = torch.randint(1, SIZES["vocab_size"], (10, SLOTS), generator=generator)
    logits = []
    with torch.inference_mode():
        with decoder.steps.planned(Step((decoder.num_rows([4, 13]),))):
            logits.append(decoder.prefill([2, 0], prompts[:2]))
        for number, row in enumerate(tokens):
            if number == 5:
                decoder.free(2)
                with decoder.steps.planned(Step((decoder.num_rows([6]),))):
                    logits.append(decoder.prefill([1], prompts[2:]))
            decoder.append(slice(None), row.to(model.device))
            with decoder.steps.planned(Step((SLOTS,))):
                logits.append(decoder.decode()[[0, 2] if number < 5 else [0, 1]])
    return logits, decoder


@pytest.mark.parametrize("family", [*FAMILIES, *(family for family in OTHERS if family not in OWN_PAST)])
def test_lengths_are_as_good_as_masks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(family, **OTHERS.get(family, {}))
    if not model._supports_default_dynamic_cache():
        pytest.skip(f"{family} is not decoded in slots")
    model = moe_ep.parallelize(model)
    expected, decoder = decoded(model)
    assert not decoder.by_table and decoder.num_rows([4, 13]) == 26
    monkeypatch.setattr(slot_cache, "flash_attention", plain_flash)
    monkeypatch.setattr(slot_cache, "runs_flash_attention", lambda device, dtype: True)
    got, decoder = decoded(model)
    assert decoder.by_table == (family not in MASKED)
    assert decoder.num_rows([4, 13]) == (26 if family in MASKED | LINEAR else 17)
    for mine, theirs in zip(got, expected, strict=True):
        assert relative_error(mine, theirs) < 2 * tolerance(torch.float32)


@pytest.mark.parametrize("family", UNTOLD)
def test_windows_that_only_masks_tell(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = moe_ep.parallelize(make_model(family, **UNTOLD[family], sliding_window=3))
    expected, _ = decoded(model)
    monkeypatch.setattr(slot_cache, "flash_attention", plain_flash)
    monkeypatch.setattr(slot_cache, "runs_flash_attention", lambda device, dtype: True)
    got, decoder = decoded(model)
    assert decoder.num_rows([4, 13]) == 17
    for mine, theirs in zip(got, expected, strict=True):
        assert relative_error(mine, theirs) < 2 * tolerance(torch.float32)


def test_keys_wider_than_values_take_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers calls the rotary part of a key head_dim in these models, and values may be as wide as that."""
    model = make_model("DeepseekV3", qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=8)
    monkeypatch.setattr(slot_cache, "runs_flash_attention", lambda device, dtype: True)
    assert model.config.head_dim == model.config.v_head_dim
    assert not slot_cache.can_attend(model)

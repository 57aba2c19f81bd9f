"""What users do with a divided model beside making passes: they drop it, and export it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

pytest.importorskip("transformers")

import moe_ep
from moe_ep.integrations.divided import steps_of
from tests.integrations.hf_models import make_model

TOKENS = torch.ones(2, 3, dtype=torch.int64)


@pytest.mark.parametrize("eplb", [False, True])
def test_a_model_that_is_dropped_gives_its_memory_back_at_once(eplb: bool) -> None:
    """As an undivided one does: the next model of a notebook has to fit beside what is left of this one."""
    model = moe_ep.parallelize(make_model("Qwen3Moe"), eplb=eplb)
    with torch.inference_mode():
        model(TOKENS)
    weights = [weakref.ref(layer.w13_weight) for layer in steps_of(model).layers]
    assert len(weights) == 2
    gc.disable()
    try:
        del model
        assert [weight() for weight in weights] == [None, None]
    finally:
        gc.enable()


def test_a_model_of_one_process_can_be_exported() -> None:
    model = moe_ep.parallelize(make_model("Qwen3Moe"))
    sizes = {"input_ids": dict.fromkeys(range(2), torch.export.Dim.AUTO), "use_cache": None}
    with torch.no_grad():
        exported = torch.export.export(model, (TOKENS,), {"use_cache": False}, dynamic_shapes=sizes, strict=False)
        others = torch.randint(1, 96, (3, 5))
        found, expected = (made(others, use_cache=False).logits for made in (exported.module(), model))
    assert torch.equal(found, expected)

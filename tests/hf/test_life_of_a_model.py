"""What users do with a parallelized model beside making passes: they drop it, copy it, and export it."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

pytest.importorskip("transformers")

import moe_ep
from moe_ep.hf.parallelized import steps_of
from moe_ep.hf.routed_experts import RoutedExperts
from tests.hf.hf_models import make_model

TOKENS = torch.ones(2, 3, dtype=torch.int64)


@pytest.mark.parametrize("eplb", [False, True])
def test_a_model_that_is_dropped_gives_its_memory_back_at_once(eplb: bool) -> None:
    """As any other does: the next model of a notebook has to fit beside what is left of this one."""
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


def test_a_copy_of_a_model_of_one_process_has_steps_and_layers_of_its_own() -> None:
    model = moe_ep.parallelize(make_model("Qwen3Moe"), eplb=True, num_redundant_experts=1)
    copied = copy.deepcopy(model)
    of_model, of_copy = (
        [part for part in each.modules() if isinstance(part, RoutedExperts)] for each in (model, copied)
    )
    steps, own = steps_of(model), steps_of(copied)
    assert own is not steps and own is steps_of(copied.model) and own.layers == of_copy and steps.layers == of_model
    assert all(layer.dispatcher.coordinator is own for layer in of_copy) and own.eplb is None
    seen = []
    of_copy[0].register_forward_pre_hook(lambda layer, args: seen.append((own.current, steps.current)))
    tokens = torch.ones(1, 3, dtype=torch.int64)
    with torch.inference_mode():
        expected = model(tokens).logits
        assert torch.equal(copied(tokens).logits, expected)
    assert [(mine.num_tokens, other) for mine, other in seen] == [((3,), None)]
    del model, of_model
    gc.collect()
    with torch.inference_mode():
        assert torch.equal(copied(tokens).logits, expected) and len(own.layers) == 2


def test_a_model_of_one_process_can_be_exported() -> None:
    model = moe_ep.parallelize(make_model("Qwen3Moe"))
    sizes = {"input_ids": dict.fromkeys(range(2), torch.export.Dim.AUTO), "use_cache": None}
    with torch.no_grad():
        exported = torch.export.export(model, (TOKENS,), {"use_cache": False}, dynamic_shapes=sizes, strict=False)
        others = torch.randint(1, 96, (3, 5))
        found, expected = (made(others, use_cache=False).logits for made in (exported.module(), model))
    assert torch.equal(found, expected)

"""Weights that are loaded into a layer again, and what is derived from weights, where experts have moved."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.manager import EPLBManager
from moe_ep.layer import FusedMoE
from tests.eplb.models import (
    CONFIG,
    SCHEMES,
    E,
    fresh_weights,
    inputs,
    load_layer,
    make_layer,
    make_model,
    random_placement,
    redundancy,
)
from tests.ranks import ranks


def reload(rank: int, world_size: int) -> None:
    """Layers of one model, each quantized in its own way, move; then other weights of some experts are loaded, of all
    but expert 0 in the end, and go where the experts are now, in place."""
    redundant = redundancy(world_size, 2)
    layers = [load_layer(make_layer(scheme, redundant), seed) for seed, scheme in enumerate(SCHEMES)]
    manager = EPLBManager(layers, EplbConfig(**{**vars(CONFIG), "asynchronous": False}))
    manager.rearrange(random_placement(len(layers), E + redundant, seed=3))
    for index, (scheme, layer) in enumerate(zip(SCHEMES, layers, strict=True)):
        row = manager.placement.host[index]
        old, new = (fresh_weights(scheme, redundant, seed, row) for seed in (index, 50 + index))
        in_use = layer.expert_weights()
        for loaded in (range(0), range(1, E, 2), range(1, E)):
            layer.begin_reload()
            load_layer(layer, 50 + index, loaded)
            for tensor, before, after in zip(in_use, old, new, strict=True):
                for slot, expert in enumerate(np.split(row, world_size)[rank]):
                    assert torch.equal(tensor[slot], after[slot] if expert in loaded else before[slot])
    manager.close()


def reload_while_moving(rank: int, world_size: int) -> str:
    """Loading must wait for `finish`; then it goes where the experts are."""
    redundant = redundancy(world_size, 2)
    layer = load_layer(make_layer("GPTQ", redundant), 0)
    manager = EPLBManager([layer], CONFIG)
    target = random_placement(1, E + redundant, seed=3)
    manager.rearrange(target)
    with pytest.raises(RuntimeError) as error:
        layer.begin_reload()
    assert not copy.deepcopy(layer.eplb_state).is_moving()
    manager.finish()
    layer.begin_reload()
    with pytest.raises(RuntimeError, match="are being loaded again"):
        manager.rearrange(random_placement(1, E + redundant, seed=4))
    load_layer(layer, 50)
    for tensor, wanted in zip(layer.expert_weights(), fresh_weights("GPTQ", redundant, 50, target[0]), strict=True):
        assert torch.equal(tensor, wanted)
    manager.rearrange(random_placement(1, E + redundant, seed=4))
    manager.close()
    layer.begin_reload()
    load_layer(layer, 51)
    return str(error.value)


def test_weights_are_not_loaded_while_experts_move() -> None:
    for message in ranks(2).run(reload_while_moving):
        assert message.startswith("experts are still moving, and the weights of ")
        assert message.endswith("; call finish of the EPLBManager on every rank first")


def test_weights_loaded_after_a_move_go_to_the_present_owners() -> None:
    ranks(3).run(reload)


def test_a_layer_that_is_loaded_again_does_not_run_half_loaded() -> None:
    layer = load_layer(make_layer("GPTQ", ep_size=1), 0)
    x, logits = inputs(4, seed=1)
    layer.begin_reload()
    with pytest.raises(RuntimeError, match="are being loaded again"):
        layer(x, logits)
    part = torch.zeros_like(layer.get_parameter("w2_qweight")[0])
    layer.weight_loader(layer.get_parameter("w2_qweight"), part, "experts.3.w2.qweight", "w2", 3)
    with pytest.raises(RuntimeError, match="not complete: w13_qweight of local expert 3"):
        layer.process_weights_after_loading()
    changed: list[int] = []
    layer.quant_method.rebuild_derived_state = lambda layer, slots: changed.extend(slots)  # type: ignore[method-assign]
    load_layer(layer, 1, [3])
    assert changed == [3]
    assert layer(x, logits).isfinite().all()


def derived(rank: int, world_size: int) -> None:
    """A method that keeps something beside the tensors that move hears which slots changed."""
    layer = make_model(world_size)[0]
    method, weight = layer.quant_method, layer.get_parameter("w13_weight")
    sums = weight.sum(dim=(1, 2))

    def rebuild(changed: FusedMoE, slots: list[int]) -> None:
        assert changed is layer
        sums[slots] = weight[slots].sum(dim=(1, 2))

    method.rebuild_derived_state = rebuild  # type: ignore[method-assign]
    manager = EPLBManager([layer], EplbConfig(**{**vars(CONFIG), "asynchronous": False}))
    manager.rearrange(random_placement(1, E + layer.num_redundant_experts, seed=4))
    assert torch.equal(sums, weight.sum(dim=(1, 2)))
    manager.close()


def test_derived_state_is_rebuilt() -> None:
    ranks(3).run(derived)

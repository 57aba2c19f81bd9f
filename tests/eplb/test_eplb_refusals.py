"""What an EPLB manager refuses: layers, placements and settings that do not fit, each in one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import moe_ep
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.manager import EPLBManager
from moe_ep.errors import ConfigError
from moe_ep.layer.methods.base import UnquantizedFusedMoEMethod
from tests.eplb.models import CONFIG, E, load_layer, make_layer, make_model


def test_layers_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers is empty"):
        EPLBManager([])
    plain = load_layer(make_layer(ep_size=1, enable_eplb=False), 0)
    with pytest.raises(ConfigError, match="was made without EPLB"):
        EPLBManager([plain])
    layers = [load_layer(make_layer("plain", redundant, ep_size=1), 0) for redundant in (1, 2)]
    with pytest.raises(ConfigError, match=r"has \(experts, redundant, ep_size\) \(10, 1, 1\) and .* \(10, 2, 1\)"):
        EPLBManager(layers)
    with pytest.raises(ConfigError, match=f"{layers[1].layer_name} twice"):
        EPLBManager([layers[1], torch.compile(layers[1])])
    dealt = load_layer(make_layer("plain", ep_size=1, expert_placement_strategy="round_robin"), 0)
    with pytest.raises(ConfigError, match="is 'round_robin'; EPLB needs 'linear'"):
        EPLBManager([dealt])


def test_arguments_of_other_kinds_are_refused() -> None:
    layer = load_layer(make_layer(ep_size=1), 0)
    wanted = r"it must be a model's MoE layers, as \[layer\]"
    for layers, held in ((layer, "is a FusedMoE"), (torch.nn.ModuleList([layer, torch.nn.ReLU()]), "has a ReLU")):
        with pytest.raises(TypeError, match=f"layers {held}; {wanted}"):
            EPLBManager(layers)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"layers {held}; {wanted}"), moe_ep.one_pass(layers, 3):
            pass
    with pytest.raises(TypeError, match="config is {'interval': 8}"):
        EPLBManager([layer], {"interval": 8})  # type: ignore[arg-type]


def test_a_compiled_layer_is_the_layer_in_it() -> None:
    layer = load_layer(make_layer(ep_size=1), 0)
    with moe_ep.one_pass([torch.compile(layer)], 3):
        manager = EPLBManager([torch.compile(layer)], EplbConfig(asynchronous=False))
    assert layer.eplb_state is not None and not layer.eplb_state.expert_load_view.any()
    manager.close()


def test_placements_that_do_not_fit_are_refused() -> None:
    manager = EPLBManager([load_layer(make_layer("plain", 2, ep_size=1), 0)], EplbConfig(asynchronous=False))
    with pytest.raises(ValueError, match=r"physical_to_logical has shape \(3, 3\)"):
        manager.rearrange(np.zeros((3, 3), dtype=np.int64))
    with pytest.raises(ValueError, match="physical_to_logical has no slot for expert 1 in layer 0"):
        manager.rearrange(np.zeros((1, manager.placement.num_slots), dtype=np.int64))
    for placement, message in (
        (manager.placement.host + 0.5, "has dtype float64; it must hold integers"),
        (None, "has dtype object; it must hold integers"),
        ([[0, 1], [2]], "has layers of different lengths"),
    ):
        with pytest.raises(ValueError, match=f"physical_to_logical {message}"):
            manager.rearrange(placement)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"interval": 0}, "interval is 0; it must be at least 1"),
        ({"rebalance_below": -0.5}, "rebalance_below is -0.5; it must be at least 0"),
        ({"timeout_s": 0}, "timeout_s is 0; it must be a positive number up to 1e.09, or None"),
        ({"timeout_s": float("inf")}, "timeout_s is inf; it must be a positive number up to 1e.09, or None"),
        ({"max_transfer_gb_s": "all"}, "max_transfer_gb_s is 'all'; it must be a number"),
        ({"first_plan": float("nan")}, "first_plan is nan; it must be a whole number"),
        ({"window_size": 1.5}, "window_size is 1.5; it must be a whole number"),
        ({"min_gain": "much"}, "min_gain is 'much'; it must be a number"),
        ({"policy": "best"}, "policy"),
        ({"asynchronous": "no"}, "asynchronous is 'no'; it must be True or False"),
        ({"refine": None}, "refine is None; it must be True or False"),
        ({"objective": "speed"}, "objective is 'speed'; it must be one of tokens, active_experts, auto"),
    ],
)
def test_settings_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        EplbConfig(**changes)


def test_a_method_that_cannot_move_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "supports_eplb", False)
    message = "enable_eplb is set and UnquantizedFusedMoEMethod cannot move experts; unset it"
    with pytest.raises(ConfigError, match=message):
        make_layer("plain", 2, ep_size=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_nodes": 2}, r"num_nodes is 2; it must divide the EP ranks \(1\)"),
        ({"num_groups": 3}, rf"num_groups is 3; it must divide the experts of a layer \({E}\)"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_before_it_serves(
    settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EPLBManager(make_model(1, ep_size=1), EplbConfig(**{**vars(CONFIG), **settings}))

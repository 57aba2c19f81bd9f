"""A small layer in one process, and its outputs against plain loops."""

from __future__ import annotations

import torch

from moe_ep.layer import FusedMoE
from moe_ep.layer.methods import relative_error, tolerance
from tests.layer.moe_oracle import Weights, make_inputs, run_moe

E, K, N, TOP_K, T = 6, 32, 48, 2, 9
F32 = tolerance(torch.float32)


def make_layer(**options: object) -> FusedMoE:
    settings: dict = {"num_experts": E, "top_k": TOP_K, "hidden_size": K, "intermediate_size": N} | options
    return FusedMoE(**settings)


def check(layer: FusedMoE, weights: Weights, **oracle: object) -> None:
    hidden_states, router_logits = make_inputs(T, K, layer.num_router_columns)
    expected = run_moe(weights, hidden_states, router_logits, layer.moe_config.experts_per_token, **oracle)
    assert relative_error(layer(hidden_states, router_logits), expected) < F32

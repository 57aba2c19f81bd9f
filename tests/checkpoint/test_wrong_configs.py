"""Configurations with a wrong value anywhere: read as they are, or refused in one sentence; never another error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ep.checkpoint import model_spec
from moe_ep.checkpoint.formats import quantization_config
from moe_ep.errors import CheckpointError
from tests.checkpoint.format_cases import CASES
from tests.checkpoint.model_cases import MODELS, config_of

WRONG: tuple[Any, ...] = (None, "x", -1, 0, 0.5, float("nan"), [], {}, [1], [[]], {"a": 1}, True, 10**30)


def wrong_everywhere(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The configuration with one value replaced, for each place in it and each wrong value."""
    for path in places(config):
        for value in WRONG:
            changed = copy.deepcopy(config)
            part: Any = changed
            for key in path[:-1]:
                part = part[key]
            part[path[-1]] = value
            yield f"{'.'.join(map(str, path))} = {value!r}", changed


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (key,)
            yield from ((key, *rest) for rest in places(value[key]))


def is_read_or_refused(read: Any, config: dict[str, Any]) -> bool:
    try:
        read(config)
    except CheckpointError as error:
        return "\n" not in str(error)
    return True


@pytest.mark.parametrize("family", MODELS)
def test_of_families(family: str) -> None:
    config = config_of(family)
    model_spec(config)
    for what, changed in wrong_everywhere(config):
        assert is_read_or_refused(model_spec, changed), what


def test_a_config_of_transformers_is_asked_for_as_a_dict() -> None:
    with pytest.raises(TypeError, match="config is a SimpleNamespace"):
        model_spec(SimpleNamespace(model_type="mixtral"))  # type: ignore[arg-type]


def test_layers_of_nemotron_by_letters_and_what_does_not_load() -> None:
    config = config_of("nemotron_h")
    del config["layers_block_type"]
    assert model_spec(config | {"hybrid_override_pattern": "MEM*E"}).moe_layers == (1, 4)
    for changes, message in (
        ({"moe_latent_size": 0, "layers_block_type": ["moe"]}, "moe_latent_size: expected a whole number of at"),
        ({"mlp_bias": True}, "mlp_bias: expected False, found True"),
    ):
        with pytest.raises(CheckpointError, match=message):
            model_spec(config | changes)


def test_phi_has_two_experts_for_a_token() -> None:
    with pytest.raises(CheckpointError, match="num_experts_per_tok: expected 2 for a PhiMoE model, found 3"):
        model_spec(config_of("phimoe") | {"num_experts_per_tok": 3})


def test_an_epsilon_below_zero() -> None:
    config = config_of("qwen3_moe")
    assert model_spec(config | {"rms_norm_eps": 0}).rms_norm_eps == 0
    with pytest.raises(CheckpointError, match="rms_norm_eps: expected a number of at least 0, found -1"):
        model_spec(config | {"rms_norm_eps": -1})


@pytest.mark.parametrize("name", CASES)
def test_of_formats(name: str) -> None:
    def read(config: dict[str, Any]) -> None:
        quantization = quantization_config(config)
        if quantization is not None:
            quantization.of_module("model.layers.0.mlp.experts.0.gate_proj")

    config = {"quantization_config": CASES[name].quantization, "text_config": {"quantization_config": {}}}
    read(config)
    for what, changed in wrong_everywhere(config):
        assert is_read_or_refused(read, changed), what

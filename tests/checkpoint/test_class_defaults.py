"""Configs that leave out what transformers' configuration class means by default read like the full ones."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from moe_ep.checkpoint import model_spec
from moe_ep.checkpoint.families.models import FAMILIES
from moe_ep.errors import CheckpointError
from tests.checkpoint.checkpoints import qwen3_config
from tests.checkpoint.model_cases import MODELS, transformers_config


def differing(full: dict[str, Any]) -> dict[str, Any]:
    """What differs from the defaults of the class, and the type."""
    defaults = CONFIG_MAPPING[full["model_type"]]().to_dict()
    kept = {key: value for key, value in full.items() if key == "model_type" or value != defaults.get(key)}
    return {
        key: differing(value) if isinstance(value, dict) and value.get("model_type") in CONFIG_MAPPING else value
        for key, value in kept.items()
    }


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("changed", [True, False])
def test_only_what_differs_reads_like_the_whole(family: str, changed: bool) -> None:
    config = transformers_config(family) if changed else type(transformers_config(family))()
    full = json.loads(config.to_json_string(use_diff=False))
    if full.get("num_experts_per_tok", 0) is None:
        pytest.skip("a model of the class's defaults has no experts")
    expected = model_spec(full)
    assert str(model_spec(json.loads(config.to_json_string(use_diff=True)))) == str(expected)
    sparse = differing(full)
    assert len(sparse) < len(full)
    assert str(model_spec(sparse)) == str(expected)


def keys_of(config: dict[str, Any], *outer: str) -> Iterator[tuple[str, ...]]:
    """The paths of all keys, but for the types."""
    for key, value in config.items():
        if key != "model_type":
            yield (*outer, key)
        if isinstance(value, dict) and value.get("model_type") in CONFIG_MAPPING:
            yield from keys_of(value, *outer, key)


def at(config: Any, path: tuple[str, ...]) -> Any:
    return at(config[path[0]], path[1:]) if path else config


def read(config: dict[str, Any]) -> str:
    try:
        return str(model_spec(config))
    except CheckpointError as error:
        return type(error).__name__


@pytest.mark.parametrize("family", [family for family in FAMILIES if family in CONFIG_MAPPING])
def test_a_key_left_out_has_the_default_of_the_class(family: str) -> None:
    mapped = CONFIG_MAPPING[family]
    configs = [mapped()] + ([transformers_config(family)] if family in MODELS else [])
    default = json.loads(configs[0].to_json_string(use_diff=False))
    for config in configs:
        full = json.loads(config.to_json_string(use_diff=False))
        whole = read(full)
        if whole == "CheckpointError":
            continue  # the class's defaults are of a model without experts
        for path in keys_of(full):
            left = copy.deepcopy(full)
            del at(left, path[:-1])[path[-1]]
            expected = whole
            if full != default:
                try:
                    expected = read(json.loads(mapped.from_dict(copy.deepcopy(left)).to_json_string(use_diff=False)))
                except Exception:  # a class raises whatever it likes
                    continue
            assert read(left) == expected, path


@pytest.mark.parametrize("key", ["rms_norm_eps", "hidden_act", "routed_scaling_factor", "n_group"])
def test_a_part_of_a_model_of_an_unknown_type(key: str) -> None:
    config = json.loads(transformers_config("deepseek_v2").to_json_string(use_diff=False))
    config = config | {key: CONFIG_MAPPING["deepseek_v2"]().to_dict()[key]}
    part = {name: value for name, value in config.items() if name != key}
    outer = {"model_type": "deepseek_vl_v2", "torch_dtype": "bfloat16"}
    found, expected = (model_spec({**outer, "language_config": each}) for each in (part, config))
    assert str(found) == str(expected)


def test_what_no_class_knows_is_still_missing() -> None:
    config = qwen3_config(model_type="bailing_moe")
    del config["hidden_size"]
    with pytest.raises(CheckpointError, match="hidden_size"):
        model_spec(config)

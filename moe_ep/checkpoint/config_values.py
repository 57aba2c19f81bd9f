"""Reads values of a config.json, with checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from moe_ep.errors import CheckpointError, one_of

Config = dict[str, Any]
V = TypeVar("V")

# Keys of the language model's part in configs of multimodal models.
LANGUAGE_PARTS = ("text_config", "llm_config", "language_config")
# The beginning of errors about quantization settings.
QUANT_CONFIG = "config.json: quantization_config: "
# Above any size or count of a model: memory for a damaged number would be allocated before files are compared with it.
_MOST, _MOST_LAYERS = 1 << 20, 1 << 12


class MissingKey(CheckpointError):
    """A required key is missing from config.json."""


def unexpected(key: str, expected: object, found: object, way_out: str = "") -> CheckpointError:
    """The error for an invalid value of a key of config.json."""
    return CheckpointError(f"config.json: {key}: expected {expected}, found {found!r:.200}{way_out}")


def refuse_rotation(settings: Mapping[str, Any], *keys: str, where: str = "") -> None:
    """CheckpointError if one of these keys of quantization_config, or of the object `where` in it, has a value."""
    for key in keys:
        if settings.get(key):
            way_out = "; rotated activations are not computed, so quantize without it"
            raise unexpected(f"quantization_config: {where}{key}", "none", settings[key], way_out)


def as_object(value: Any, key: str) -> Mapping[str, Any]:
    """The value of a key of quantization_config; CheckpointError unless it is an object."""
    if not isinstance(value, Mapping):
        raise unexpected(f"quantization_config: {key}", "an object", value)
    return value


def required(config: Config, *keys: str) -> Any:
    """The first of these keys that has a value; CheckpointError where none has."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise MissingKey(f"config.json: expected {' or '.join(keys)}, found no such key")


def positive(config: Config, *keys: str) -> int:
    """The same as a whole number of at least 1; CheckpointError for any other value."""
    return _checked_whole(required(config, *keys), " or ".join(keys), 1)


def whole(config: Config, key: str, default: int, least: int = 0) -> int:
    """A whole number from `least` on; the default where the key is missing or null."""
    value = config.get(key)
    return default if value is None else _checked_whole(value, key, least)


def number(config: Config, key: str, default: float | None = None) -> float:
    """A finite number; the default, where there is one, if the key is missing or null."""
    value = required(config, key) if default is None else config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise unexpected(key, "a finite number", value)
    return float(value)


def not_negative(config: Config, key: str) -> float:
    """A finite number of at least 0; CheckpointError for any other value."""
    value = number(config, key)
    if value < 0:
        raise unexpected(key, "a number of at least 0", value)
    return value


def flag(config: Mapping[str, Any], key: str, default: bool, where: str = "config.json: ") -> bool:
    """True or false, or the default where the key is missing; null is false, as transformers reads it. CheckpointError
    for any other value, which begins with `where`."""
    value = config.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{where}{key}: expected true or false, found {value!r:.200}")
    return bool(value)


def one_known(key: str, value: object, known: Mapping[str, V]) -> V:
    """The entry of `known` that the value names; CheckpointError with the known names for any other value."""
    if not isinstance(value, str) or value not in known:
        raise CheckpointError(f"config.json: {one_of(key, value, list(known))}")
    return known[value]


def _checked_whole(value: Any, name: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise unexpected(name, f"a whole number of at least {least}", value)
    most = _MOST_LAYERS if name == "num_hidden_layers" else _MOST
    if value > most:
        raise CheckpointError(f"config.json: {name}: expected at most {most}, found {value}")
    return value

"""Values of a config.json, checked as they are taken out."""

from __future__ import annotations

from typing import Any

from moe_ep.errors import CheckpointError

Config = dict[str, Any]


def required(config: Config, *keys: str) -> Any:
    """The first of these keys that has a value; CheckpointError where none has."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise CheckpointError(f"config.json: expected {' or '.join(keys)}, found no such key")


def positive(config: Config, *keys: str) -> int:
    """The same, where it is a whole number of at least 1; CheckpointError for any other."""
    value = required(config, *keys)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"config.json: {' or '.join(keys)}: expected a whole number of at least 1, found {value!r}"
        )
    return value

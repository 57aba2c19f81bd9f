"""Values between processes as JSON: what arrives is data, and nothing in it can run code, as a pickle can.

Numbers, texts, None, lists, tuples, dictionaries, tensors, numpy arrays of numbers, and dataclasses and named tuples of
them. The last two are named by their class, which the receiver must have imported already; other subclasses of numbers
and texts, as torch.__version__ is one, arrive as plain numbers and texts.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from enum import Enum
from typing import Any

import numpy as np
import torch

_KIND = "__kind__"


def encode(value: Any) -> bytes:
    """Raises TypeError for a value that is not plain."""
    return json.dumps(_plain(value)).encode()


def decode(data: bytes) -> Any:
    """Raises ValueError for what `encode` did not write."""
    try:
        return _value(json.loads(data))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"what arrived is no plain data: {error!r}") from None


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain) and not isinstance(value, (np.generic, Enum)):
            return plain(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {_KIND: _name(value), "fields": dict(zip(value._fields, map(_plain, value), strict=True))}
    if type(value) is tuple:
        return {_KIND: "tuple", "items": [_plain(item) for item in value]}
    if isinstance(value, dict):
        return {_KIND: "dict", "items": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {_KIND: "tensor", "dtype": str(value.dtype), "shape": list(value.shape), "bytes": _text(raw)}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        return {_KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape), "bytes": _text(value.tobytes())}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {_KIND: _name(value), "fields": fields}
    raise TypeError(
        f"a {type(value).__name__} cannot be sent between ranks; send numbers, texts, lists, dictionaries, tensors, or "
        f"dataclasses of them"
    )


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    kind = plain[_KIND]
    if kind == "tuple":
        return tuple(_value(item) for item in plain["items"])
    if kind == "dict":
        return {_value(key): _value(item) for key, item in plain["items"]}
    if kind == "tensor":
        dtype = getattr(torch, plain["dtype"].removeprefix("torch."))
        raw = torch.frombuffer(bytearray(_bytes(plain)), dtype=torch.uint8) if plain["bytes"] else torch.empty(0)
        return raw.to(torch.uint8).view(dtype).reshape(plain["shape"])
    if kind == "array":
        made = np.frombuffer(_bytes(plain), dtype=np.dtype(plain["dtype"])).reshape(plain["shape"]).copy()
        return made if plain["shape"] else made[()]
    module, _, name = kind.partition(":")
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    if isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields"):
        return found(**{field: _value(item) for field, item in plain["fields"].items()})
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ValueError(f"{kind} is no dataclass")
    instance: Any = object.__new__(found)
    known = {field.name for field in dataclasses.fields(found)}
    for field, item in plain["fields"].items():
        if field not in known:
            raise ValueError(f"{kind} has no field {field!r}")
        object.__setattr__(instance, field, _value(item))
    return instance


def _name(value: object) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _bytes(plain: dict[str, Any]) -> bytes:
    return base64.b64decode(plain["bytes"], validate=True)

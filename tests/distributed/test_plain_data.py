"""Values that travel between ranks without pickles."""

from __future__ import annotations

import ast
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_ep.distributed.plain_data import decode, encode

ROOT = Path(__file__).parents[2]
# Calls that unpickle what other processes send.
PICKLED = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass
class Outer:
    inner: Inner
    by_layer: dict[int, float] = field(default_factory=dict)


@pytest.mark.parametrize(
    "value",
    [
        None,
        -3,
        2.5,
        "ü",
        [1, [True, None]],
        (1, ("a", [])),
        {"a": 1, 2: (3,), (4, 5): None},
        Outer(Inner("x", (1, 2)), {0: 0.5}),
        [Outer(Inner("y"))],
        np.int64(7),
    ],
    ids=repr,
)
def test_values_arrive_as_they_are(value: Any) -> None:
    arrived = decode(encode(value))
    assert arrived == value and type(arrived) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_arrive_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 9).to(dtype)
    arrived, array = decode(encode((tensor, tensor.float().numpy())))
    assert arrived.dtype == dtype and torch.equal(arrived, tensor)
    assert np.array_equal(array, tensor.float().numpy())


def test_what_is_not_plain_is_refused() -> None:
    for value in (object(), {1, 2}, lambda: None, Outer, [Path("x")]):
        with pytest.raises(TypeError, match="cannot be sent between ranks"):
            encode(value)
    for data in (
        b'{"__kind__": "os:system", "fields": {}}',
        b'{"__kind__": "subprocess:Popen", "fields": {"args": "x"}}',
        b'{"__kind__": "not.imported:Thing", "fields": {}}',
        b'{"items": []}',
        encode(Inner("a")).replace(b'"name"', b'"other"'),
        pickle.dumps(1),
    ):
        with pytest.raises(ValueError):
            decode(data)


def test_no_path_of_ours_unpickles_what_other_ranks_send() -> None:
    found = []
    for folder in ("moe_ep", "kernels", "dispatch", "launch", "scripts", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
                if name in PICKLED:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {name}")  # type: ignore[attr-defined]
    assert not found

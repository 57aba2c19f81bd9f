"""Headers of safetensors files: every way in which one can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ep.checkpoint.reader import CheckpointReader
from moe_ep.errors import CheckpointError
from tests.checkpoint.checkpoints import entry, write_raw

HEADERS = {
    "not JSON": (b"\xff\xfe{{{", b"", r"header: expected JSON"),
    "not an object": ([1, 2], b"", r"header: expected a JSON object, found a list"),
    "entry is no object": ({"x": 3}, b"", r"tensor x: expected a header entry .*found 3"),
    "dtype is a list": (
        {"x": {**entry("F32", [1], 0, 4), "dtype": []}},
        bytes(4),
        r"expected a dtype among .*found \[\]",
    ),
    "a number too long to read": (b'{"x": ' + b"1" * 5000 + b"}", b"", r"header: expected JSON"),
    "negative size": ({"x": entry("F32", [-1], 0, 4)}, bytes(4), r"tensor x: expected a header entry"),
    "unknown dtype": ({"x": entry("F3", [1], 0, 4)}, bytes(4), r"tensor x: expected a dtype among BF16.*found 'F3'"),
    "shape and range": ({"x": entry("F32", [2], 0, 4)}, bytes(4), r"tensor x: expected 8 bytes .*\(4 bytes\)"),
    "sizes that torch cannot have, of nothing": (
        {"x": entry("F32", [2**62, 2, 0], 0, 0)},
        b"",
        r"tensor x: expected a shape that 64 bits hold",
    ),
    "overlap": (
        {"x": entry("F32", [2], 0, 8), "y": entry("F32", [2], 4, 12)},
        bytes(12),
        r"tensor y: expected its data at byte \d+, found byte \d+, an overlap",
    ),
    "hole": ({"x": entry("F32", [1], 4, 8)}, bytes(8), r"tensor x: expected its data at byte \d+, .*a hole"),
    "out of range": (
        {"x": entry("F32", [4], 0, 16)},
        bytes(12),
        r"tensor x: expected data up to byte \d+, found a file",
    ),
    "trailing bytes": ({"x": entry("F32", [1], 0, 4)}, bytes(9), r"expected \d+ bytes as its header says, found \d+"),
    "name twice": (
        b'{"x":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        bytes(1),
        r"header: expected every name once, found 'x' twice",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_wrong_headers_are_refused(tmp_path: Path, case: str) -> None:
    header, data, message = HEADERS[case]
    (tmp_path / "config.json").write_text("{}")
    write_raw(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*" + message):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("content", [b"", b"1234567", (10**6).to_bytes(8, "little") + b"{}", b"\xff" * 64])
def test_files_shorter_than_their_header_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"the header should have \d+ bytes and the file has \d+"):
        CheckpointReader(tmp_path)

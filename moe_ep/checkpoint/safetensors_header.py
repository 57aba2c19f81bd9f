"""The header of a safetensors file, read and checked by hand, because a rank needs the byte range of every tensor.

A file is 8 bytes of header length (little-endian), that many bytes of JSON, then the data. The JSON maps a tensor's
name to its dtype, shape and `[begin, end)` in the data; tensors fill the data without overlap or hole
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_ep.errors import CheckpointError
from moe_ep.files import parse_json

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        file: the shard that holds it.
        offset: first byte, counted from the start of the file.
        nbytes: its size; the bytes are row-major and little-endian.
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the leading dimension."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else 0

    def row(self, index: int) -> TensorInfo:
        """One index of the leading dimension as a tensor of its own."""
        name, offset = f"{self.name}[{index}]", self.offset + index * self.row_bytes
        return TensorInfo(name, self.file, self.dtype, self.shape[1:], offset, self.row_bytes)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file by name.

    Raises:
        CheckpointError: the file is missing, truncated or longer than its header says, or the header is not JSON of
            this form, repeats a name, has an unknown dtype, or ranges that overlap, leave a hole or do not fit a shape.
    """
    try:
        with file.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            prefix = stream.read(_LENGTH_BYTES)
            header_bytes = int.from_bytes(prefix, "little")
            if len(prefix) < _LENGTH_BYTES or header_bytes > min(file_bytes - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{file}: the header should have {header_bytes} bytes and the file has {file_bytes}; "
                    f"it is truncated or no safetensors file; fetch it again"
                )
            raw = stream.read(header_bytes)
    except FileNotFoundError:
        raise CheckpointError(f"{file}: expected a safetensors file, found none; fetch it again") from None
    except OSError as error:
        raise CheckpointError(f"{file}: expected a readable safetensors file, found {error.strerror}") from error
    entries = parse_json_object(raw, f"{file}: header")
    entries.pop("__metadata__", None)
    data_start = _LENGTH_BYTES + header_bytes
    tensors = [_tensor_info(file, name, entry, data_start) for name, entry in entries.items()]
    _check_ranges(file, tensors, data_start, file_bytes)
    return {info.name: info for info in tensors}


def parse_json_object(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object; CheckpointError, which starts with `what`, for anything else and for a key given twice."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{what}: expected every name once, found {twice!r} twice")
        return result

    try:
        value = parse_json(raw, object_pairs_hook=without_duplicates)
    except ValueError as error:
        raise CheckpointError(f"{what}: expected JSON, found bytes that do not parse: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: expected a JSON object, found a {type(value).__name__}")
    return value


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor_info(file: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if (
        not isinstance(shape, list)
        or not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(map(_is_size, shape + offsets))
    ):
        raise CheckpointError(
            f"{file}: tensor {name}: expected a header entry with dtype, shape and data_offsets, found {entry!r}"
        )
    if entry.get("dtype") not in tuple(DTYPES):
        raise CheckpointError(
            f"{file}: tensor {name}: expected a dtype among {', '.join(DTYPES)}, found {entry.get('dtype')!r}"
        )
    dtype = DTYPES[entry["dtype"]]
    begin, end = offsets
    # Without a size of zero, which would hide that torch cannot have such sizes.
    if math.prod(size or 1 for size in shape) * dtype.itemsize >= 2**63:
        raise CheckpointError(f"{file}: tensor {name}: expected a shape that 64 bits hold, found {shape}")
    expected = math.prod(shape) * dtype.itemsize
    if end - begin != expected:
        raise CheckpointError(
            f"{file}: tensor {name}: expected {expected} bytes for {entry['dtype']} {shape}, "
            f"found data_offsets {offsets} ({end - begin} bytes)"
        )
    return TensorInfo(name, file, dtype, tuple(shape), data_start + begin, expected)


def _check_ranges(file: Path, tensors: list[TensorInfo], data_start: int, file_bytes: int) -> None:
    """Tensors must follow one another without overlap or hole, from the end of the header to the end of the file."""
    position = data_start
    for info in sorted(tensors, key=lambda info: (info.offset, info.nbytes)):
        if info.offset != position:
            kind = "an overlap with the tensor before it" if info.offset < position else "a hole before it"
            raise CheckpointError(
                f"{file}: tensor {info.name}: expected its data at byte {position}, found byte {info.offset}, {kind}"
            )
        position += info.nbytes
        if position > file_bytes:
            raise CheckpointError(
                f"{file}: tensor {info.name}: expected data up to byte {position}, found a file of {file_bytes} bytes; "
                f"it is truncated; fetch it again"
            )
    if position != file_bytes:
        raise CheckpointError(f"{file}: expected {position} bytes as its header says, found {file_bytes}")

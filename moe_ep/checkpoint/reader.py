"""Reads tensors of a Hugging Face checkpoint directory by their byte ranges, and no byte more.

The files are data: JSON and safetensors. Nothing is unpickled, and nothing is mapped: ranges are read with preadv
into large buffers by a few threads that run ahead of the consumer.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from moe_ep.arguments import check_integers, check_tensors
from moe_ep.checkpoint.finite import check_finite, read_checked
from moe_ep.checkpoint.formats import ModelQuantization, quantization_config, with_settings_beside
from moe_ep.errors import CheckpointError, check_flags, check_whole
from moe_ep.files import MAX_CONFIG_BYTES, parse_json, read_bounded

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
        return replace(self.rows(index, index + 1), name=f"{self.name}[{index}]", shape=self.shape[1:])

    def rows(self, start: int, stop: int) -> TensorInfo:
        """A range of the leading dimension, under the name of the whole."""
        count = max(stop - start, 0)
        return replace(
            self,
            shape=(count, *self.shape[1:]),
            offset=self.offset + start * self.row_bytes,
            nbytes=count * self.row_bytes,
        )


class OpenFile:
    """A safetensors file that is opened once, for its header and its data alike, and again after `close`.

    Attributes:
        tensors: what the header says, by name.

    Raises:
        CheckpointError: the file is missing, truncated or longer than its header says, or the header is not JSON of
            this form, repeats a name, has an unknown dtype, or ranges that overlap, leave a hole or do not fit a shape.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            stat = os.fstat(self._fd)
            self._identity, self.tensors = _identity(stat), _read_header(path, self._fd, stat.st_size)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: expected a safetensors file, found none; fetch it again") from None
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise CheckpointError(f"{path}: expected a readable safetensors file, found {error.strerror}") from error

    def fd(self) -> int:
        """CheckpointError if the file has to be opened again and has changed."""
        if self._fd is None:
            self.check_unchanged()
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self.check_unchanged()
        return self._fd

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def check_unchanged(self) -> None:
        """CheckpointError if the file was written to, replaced or removed since its header was read."""
        try:
            now = [os.stat(self.path)] + ([] if self._fd is None else [os.fstat(self._fd)])
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: expected the file whose header was read, found {error.strerror}; fetch it again"
            ) from None
        if any(_identity(stat) != self._identity for stat in now):
            raise CheckpointError(
                f"{self.path}: expected the file whose header was read, found one of another inode, size or mtime; it "
                f"was written or replaced meanwhile, load it again when it is complete"
            )


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _read_header(file: Path, fd: int, file_bytes: int) -> dict[str, TensorInfo]:
    prefix = os.pread(fd, _LENGTH_BYTES, 0)
    header_bytes = int.from_bytes(prefix, "little")
    if len(prefix) < _LENGTH_BYTES or header_bytes > min(file_bytes - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{file}: the header should have {header_bytes} bytes and the file has {file_bytes}; "
            f"it is truncated or no safetensors file; fetch it again"
        )
    raw = os.pread(fd, header_bytes, _LENGTH_BYTES)
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


INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_INDEX_BYTES = 256 << 20


def read_json(file: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON object; CheckpointError where the file is missing, too large, cannot be read or holds something else."""
    if not os.path.isfile(file):
        raise CheckpointError(f"{file}: expected the checkpoint's {file.name}, found {_instead_of(file)}")
    try:
        return parse_json_object(read_bounded(file, max_bytes), str(file))
    except OSError as error:
        raise CheckpointError(f"{file}: expected a readable file, found {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}; fetch it again") from None


def _instead_of(file: Path) -> str:
    """What there is where a plain file was expected."""
    if os.path.exists(file):
        return "no plain file"
    return "a link that leads nowhere" if os.path.islink(file) else "no such file"


def read_config(directory: Path) -> dict[str, Any]:
    """config.json, with settings of quantization from other places under `quantization_config`.

    Raises:
        CheckpointError: a file that is missing, too large or holds no JSON object.
    """
    return with_settings_beside(read_json(directory / "config.json"), directory, read_json)


def find_tensors(directory: Path) -> tuple[dict[Path, OpenFile], dict[str, TensorInfo]]:
    """The safetensors files of a checkpoint directory, opened, and every tensor by name.

    Files are chosen as in transformers: model.safetensors comes before an index, whose shards it may have replaced;
    any other .safetensors file that the index does not name is left alone. Of a tensor that several shards hold, the
    index says which copy counts, and without its word the last shard in the order of names.

    Raises:
        CheckpointError: no safetensors, or an index that names files or tensors that are not there.
    """
    index, single = directory / INDEX_NAME, directory / SINGLE_NAME
    files: dict[Path, OpenFile] = {}
    try:
        if single.is_file():
            files[single] = OpenFile(single)
            tensors = files[single].tensors
            # An index that counts the single file among its shards is about this file and those beside it.
            if index.is_file() and SINGLE_NAME in (weight_map := _weight_map(index)).values():
                tensors = _tensors_of_index(index, weight_map, files) | tensors
            return files, tensors
        if index.is_file():
            return files, _tensors_of_index(index, _weight_map(index), files)
    except BaseException:
        _close_all(files)
        raise
    for file in (single, index):
        if os.path.lexists(file):
            raise CheckpointError(f"{file}: expected a file, found {_instead_of(file)}; fetch it again")
    ways_out = {
        "*.safetensors": f"; one file must be called {single.name}, and several need the index",
        **dict.fromkeys(("*.bin", "*.pt", "*.pth"), "; pickled weights are never loaded, convert them to safetensors"),
        "*.gguf": "; GGUF is not read, take the model in safetensors",
    }
    found = next(
        ((file.name, way_out) for kind, way_out in ways_out.items() for file in sorted(directory.glob(kind))),
        ("neither", ""),
    )
    raise CheckpointError(f"{directory}: expected {single.name} or {index.name}, found {''.join(found)}")


def _weight_map(index: Path) -> dict[str, Any]:
    weight_map = read_json(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: expected a weight_map of tensor names to file names, found {weight_map!r}")
    return weight_map


def names_in_index(directory: Path) -> set[str]:
    """The tensors that an index names, which a single file beside it may lack; empty without an index."""
    index = directory / INDEX_NAME
    return set(_weight_map(index)) if index.is_file() else set()


def _tensors_of_index(index: Path, weight_map: dict[str, Any], files: dict[Path, OpenFile]) -> dict[str, TensorInfo]:
    """Every tensor of the shards that the index names; opens those that are not in `files` yet."""
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: tensor {tensor}: expected the name of a file beside it, found {name!r}")
        file = index.parent / name
        if file in files:
            continue
        if not os.path.isfile(file):
            raise CheckpointError(
                f"{index}: tensor {tensor}: expected in {name}, found {_instead_of(file)}; fetch it again"
            )
        files[file] = OpenFile(file)
    tensors = {name: info for file in sorted(files) for name, info in files[file].tensors.items()}
    for name, file_name in weight_map.items():
        named = files[index.parent / file_name].tensors
        if name not in named:
            found = f"in {tensors[name].file.name}" if name in tensors else "in no shard"
            raise CheckpointError(
                f"{index.parent / file_name}: tensor {name}: expected here by the index, found {found}"
            )
        tensors[name] = named[name]
    return tensors


BATCH_BYTES = 8 << 20
READ_THREADS = 4
# So much is read by the caller: starting threads would take longer.
FEW_BYTES = 1 << 20
_ALIGNMENT = 64


class CheckpointReader:
    """A checkpoint directory: `config.json` and `model.safetensors`, or shards with `model.safetensors.index.json`.

    Everything that can be checked without the data is checked when the reader is made, so a reader that exists has
    every tensor its index names, whole. Each file is opened once, and a read fails if the file has changed since.

    Args:
        allow_nonfinite: whether tensors may hold NaN or infinity. They are refused as they are read otherwise.

    Example:
        >>> reader = CheckpointReader("Qwen3-30B-A3B")
        >>> reader.info("model.norm.weight").shape
        (2048,)
        >>> reader.read("model.embed_tokens.weight", rows=slice(0, 4)).shape
        torch.Size([4, 2048])

    Raises:
        CheckpointError: no such directory, no safetensors in it, JSON or header that does not parse, a shard that is
            missing or truncated, a tensor that is in another shard than the index says.
        TypeError: directory is no path, or allow_nonfinite neither True nor False.
    """

    # Whether tensors are read without threads that compete with those that copy them.
    in_memory = False

    def __init__(self, directory: str | os.PathLike[str], allow_nonfinite: bool = False) -> None:
        check_flags(allow_nonfinite=allow_nonfinite)
        if not isinstance(directory, (str, os.PathLike)):
            raise TypeError(f"directory is {directory!r}; it must be the path of a checkpoint's folder")
        self.directory = Path(directory)
        self.allow_nonfinite = allow_nonfinite
        if not self.directory.is_dir():
            raise CheckpointError(
                f"{self.directory}: expected a checkpoint directory, found none; nothing is fetched from a hub, so "
                f"download the checkpoint and give its folder"
            )
        self.config: dict[str, Any] = read_config(self.directory)
        self._files, self._tensors = find_tensors(self.directory)
        self._names = sorted(self._tensors)
        self._lock = threading.Lock()
        self._bytes_read = 0
        self._buffers = SpareBuffers()
        self._closer = weakref.finalize(self, _close_all, self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files and frees the buffers; a later read opens them again."""
        self._buffers.clear()
        with self._lock:
            _close_all(self._files)

    @cached_property
    def quantization(self) -> ModelQuantization | None:
        """How the model is quantized, None where it is plain; CheckpointError for a way that is not known.

        Some configurations name every matrix of every expert, and each layer asks.
        """
        return quantization_config(self.config)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data read so far."""
        return self._bytes_read

    @property
    def index_file(self) -> Path:
        """The file that says what the checkpoint holds: the only safetensors file, or the index."""
        single = self.directory / SINGLE_NAME
        return single if single.is_file() else self.directory / INDEX_NAME

    def names(self, prefix: str = "") -> Sequence[str]:
        """The names of all tensors that start with `prefix`, sorted; TypeError for a prefix that is no text."""
        if not isinstance(prefix, str):
            raise TypeError(f"prefix is {prefix!r}; it must be the beginning of a tensor's name, or empty for all")
        if not prefix:
            return self._names
        start = bisect_left(self._names, prefix)
        return self._names[start : bisect_left(self._names, prefix + chr(0x10FFFF), start)]

    def info(self, name: str) -> TensorInfo:
        """Where a tensor lies; CheckpointError if there is none of that name, TypeError for a name that is no text."""
        if not isinstance(name, str):
            raise TypeError(f"name is {name!r}; it must be a tensor's name, one of names()")
        info = self._tensors.get(name)
        if info is None:
            raise self.missing(name)
        return info

    def missing(self, name: str) -> CheckpointError:
        """The error for a tensor that is not there."""
        return CheckpointError(f"{self.index_file}: expected tensor {name}, found none of that name")

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """One tensor, or a range of its leading dimension: only those bytes are read.

        Args:
            rows: a slice of step 1, with Python's meaning of negative and missing ends; None for the whole tensor.

        Raises:
            ValueError: a step other than 1, or rows of a tensor without dimensions.
            TypeError: a name that is no text, or rows that are no slice of whole numbers.
            CheckpointError: no such tensor, or the file became shorter.
        """
        info = self.info(name)
        if rows is not None:
            if not isinstance(rows, slice):
                raise TypeError(f"rows is {rows!r}; it must be a slice, as slice(0, 4), or None for the whole tensor")
            ends = {"start": rows.start, "stop": rows.stop, "step": rows.step}
            check_whole(**{f"rows.{end}": value for end, value in ends.items() if value is not None})
            if not info.shape or rows.step not in (None, 1):
                raise ValueError(
                    f"rows is {rows} for {name} of shape {info.shape}; it must be a slice of step 1 of dimension 0"
                )
            info = info.rows(*rows.indices(info.shape[0])[:2])
        ((_, tensor),) = self.read_many([info])
        return tensor

    def read_rows(self, name: str, row_ids: torch.Tensor) -> torch.Tensor:
        """Rows of a tensor by index: `[R]` indices give `[R, ...]`; each distinct row is read once.

        Raises:
            ValueError: indices that are no integer tensor, or outside the leading dimension, or a tensor without one.
            TypeError: a name that is no text.
        """
        info = self.info(name)
        check_tensors(row_ids=row_ids)
        check_integers(row_ids=row_ids)
        if not info.shape:
            raise ValueError(f"{name} has no dimensions and thus no rows; use read({name!r})")
        distinct, positions = torch.unique(row_ids.cpu(), return_inverse=True)
        if distinct.numel() and (distinct[0] < 0 or distinct[-1] >= info.shape[0]):
            raise ValueError(
                f"row_ids of {name} range from {distinct[0]} to {distinct[-1]}; they must be at least 0 and below "
                f"{info.shape[0]}"
            )
        if not distinct.numel():
            return torch.empty((0, *info.shape[1:]), dtype=info.dtype, device="cpu")
        rows = self.read_many(info.rows(row, row + 1) for row in distinct.tolist())
        return torch.cat([tensor for _, tensor in rows])[positions]

    def read_many(
        self, names: Iterable[str | TensorInfo], reuse_buffers: bool = False, unchecked: Container[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields `(name, tensor)` in file order, read in large pieces by a few threads that run ahead.

        Tensors that lie side by side are read at once. The tensors of a batch are views of one buffer of about
        `BATCH_BYTES`, larger for a larger tensor, which lives as long as any of them: copy what should stay for long.

        Args:
            names: of whole tensors; or what `info(name).row(i)` or `rows(start, stop)` gives for a part of one.
            reuse_buffers: a tensor is only valid until the next one is asked for, and no time goes into fresh memory.
            unchecked: the names of those in which the caller looks for NaN and infinity.

        Raises:
            CheckpointError: no such tensor, or a file became shorter.
            TypeError: names is no collection of those.
        """
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise TypeError(f"names is {names!r}; it must be a list of tensors' names, or of what info(name) returns")
        names = list(names)
        for name in names:
            if not isinstance(name, (str, TensorInfo)):
                raise TypeError(f"names has {name!r}; each must be a tensor's name, or what info(name) returns")
        infos = [self.info(name) if isinstance(name, str) else name for name in dict.fromkeys(names)]
        batches = _make_batches(infos, unchecked)
        if not batches:
            return
        few = sum(batch.nbytes for batch in batches) <= FEW_BYTES
        pool = None if few else ThreadPoolExecutor(READ_THREADS, thread_name_prefix="moe_ep-read")
        pending: deque[tuple[_Batch, torch.Tensor, list[Future[None]]]] = deque()
        rest = iter(batches)
        bytes_ahead = 0
        try:
            while True:
                while bytes_ahead < READ_THREADS * BATCH_BYTES and (batch := next(rest, None)) is not None:
                    buffer = self._buffers.take(batch.nbytes) if reuse_buffers else _uninitialized(batch.nbytes)
                    pending.append((batch, buffer, self._submit(pool, batch, buffer)))
                    bytes_ahead += batch.nbytes
                if not pending:
                    return
                batch, buffer, pieces = pending.popleft()
                for piece in pieces:
                    piece.result()
                self._files[batch.file].check_unchanged()
                bytes_ahead -= batch.nbytes
                for info, position in batch.tensors:
                    tensor = _view(buffer, position, info)
                    if batch.is_suspect and info.name not in unchecked:
                        check_finite(info.file, info.name, tensor)
                    yield info.name, tensor
                if reuse_buffers:
                    self._buffers.append(buffer)
                # Otherwise the buffer would stay alive during the next wait.
                del buffer, pieces, tensor
        finally:
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor | None, batch: _Batch, buffer: torch.Tensor) -> list[Future[None]]:
        """Fills the buffer in pieces, so that several threads read one large tensor; at once without a pool."""
        view = _as_bytes(buffer)
        pieces = [
            (offset + start, position + start, min(BATCH_BYTES, nbytes - start))
            for offset, position, nbytes in batch.runs
            for start in range(0, nbytes, BATCH_BYTES)
        ]
        if pool is not None:
            return [pool.submit(self._read_piece, batch, view, *piece) for piece in pieces]
        for piece in pieces:
            self._read_piece(batch, view, *piece)
        return []

    def _read_piece(self, batch: _Batch, view: memoryview, offset: int, position: int, nbytes: int) -> None:
        """Reads a piece of a batch, and looks for NaN and infinity in it.

        A piece holds whole tensors, or a part of one that is read in several: then it starts at the tensor's start or
        a multiple of `BATCH_BYTES` behind it, so that no element is divided.
        """
        stop = position + nbytes
        first = max(bisect_right(batch.spans, position, key=lambda span: span.start) - 1, 0)
        last = bisect_left(batch.spans, stop, lo=first, key=lambda span: span.start)
        spans = [
            (max(span.start - position, 0), min(span.stop, stop) - position, span.dtype)
            for span in batch.spans[first:last]
            if span.stop > position
        ]
        try:
            with self._lock:
                fd = self._files[batch.file].fd()
            done, found = read_checked(fd, view[position:stop], offset, () if self.allow_nonfinite else spans)
        except OSError as error:
            raise CheckpointError(
                f"{batch.file}: expected {nbytes} bytes at byte {offset}, found {error.strerror}; see to its disk or "
                f"network, and try again"
            ) from None
        if done < nbytes:
            raise CheckpointError(
                f"{batch.file}: expected {nbytes} bytes at byte {offset}, found {done}; the file became shorter while "
                f"it was read"
            )
        with self._lock:
            self._bytes_read += done
        if found:
            batch.is_suspect = True

    def check_unchanged(self) -> None:
        """CheckpointError if a file of the checkpoint was written, replaced or removed since the reader was made."""
        for file in self._files.values():
            file.check_unchanged()


class SpareBuffers(list[torch.Tensor]):
    """Buffers that nothing uses any more, for the next reads."""

    def take(self, nbytes: int) -> torch.Tensor:
        """The smallest buffer that is large enough, or a new one in the place of one that is too small."""
        self.sort(key=torch.Tensor.numel)
        for index, spare in enumerate(self):
            if spare.numel() >= nbytes:
                return self.pop(index)
        if self:
            self.pop()
        return _uninitialized(max(nbytes, BATCH_BYTES))


def _uninitialized(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


@dataclass
class _Span:
    dtype: torch.dtype
    start: int
    stop: int


@dataclass
class _Batch:
    """What is read into one buffer.

    Attributes:
        runs: `(offset in the file, position in the buffer, bytes)` of ranges without a gap.
        spans: ranges of the buffer whose tensors are checked and have one dtype, in order.
        is_suspect: whether one of the tensors holds NaN or infinity.
    """

    file: Path
    nbytes: int = 0
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    tensors: list[tuple[TensorInfo, int]] = field(default_factory=list)
    spans: list[_Span] = field(default_factory=list)
    is_suspect: bool = False

    def add(self, info: TensorInfo, is_checked: bool) -> None:
        if self.runs and self.runs[-1][0] + self.runs[-1][2] == info.offset:
            offset, position, nbytes = self.runs[-1]
            self.runs[-1] = (offset, position, nbytes + info.nbytes)
            position += nbytes
        else:
            # A run keeps its offset modulo 64, so what is aligned in the file is aligned in the buffer.
            position = self.nbytes + (info.offset - self.nbytes) % _ALIGNMENT
            self.runs.append((info.offset, position, info.nbytes))
        self.tensors.append((info, position))
        self.nbytes = position + info.nbytes
        if not is_checked:
            return
        if self.spans and self.spans[-1].dtype == info.dtype and self.spans[-1].stop == position:
            self.spans[-1].stop = self.nbytes
        else:
            self.spans.append(_Span(info.dtype, position, self.nbytes))


def _make_batches(infos: list[TensorInfo], unchecked: Container[str]) -> list[_Batch]:
    batches: list[_Batch] = []
    for info in sorted(infos, key=lambda info: (info.file, info.offset)):
        full = not batches or batches[-1].nbytes + info.nbytes > BATCH_BYTES
        if full or batches[-1].file != info.file:
            batches.append(_Batch(info.file))
        batches[-1].add(info, is_checked=info.name not in unchecked)
    return batches


def _view(buffer: torch.Tensor, position: int, info: TensorInfo) -> torch.Tensor:
    flat = buffer[position : position + info.nbytes]
    if position % info.dtype.itemsize:
        flat = flat.clone()
    return flat.view(info.dtype).view(info.shape)


def _as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.flatten().view(torch.uint8).numpy().data


def _close_all(files: dict[Path, OpenFile]) -> None:
    for file in files.values():
        file.close()

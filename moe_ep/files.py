"""Paths and JSON as people write them, and files written so that they are complete or absent, never partial."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# No config.json of a model is larger, also where it names every matrix of every expert.
MAX_CONFIG_BYTES = 64 << 20
# Code that copies or writes a value calls itself for each level, and Python allows about a thousand calls.
_MOST_NESTED = 200


def user_path(raw: str) -> Path:
    """The path, with the home folder that a leading ~ or ~NAME stands for; ValueError where there is none."""
    try:
        return Path(raw).expanduser()
    except RuntimeError:
        raise ValueError("its ~ stands for a home folder, and there is none; write the path out") from None


def read_bounded(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The whole file; ValueError, before anything is read, where it is larger than `max_bytes`."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > max_bytes else file.read(max_bytes + 1)
        if max(size, len(content)) > max_bytes:
            raise ValueError(f"it has {max(size, len(content))} bytes and at most {max_bytes} are read")
        return content


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """`json.loads`, with ValueError as its only error, also for lists and objects that are nested too deep."""
    too_deep = ValueError("it nests too many lists or objects")
    try:
        value = json.loads(text, **hooks)
    except RecursionError:
        raise too_deep from None
    nested = [value]
    for _ in range(_MOST_NESTED):
        inside = (each.values() if isinstance(each, dict) else each for each in nested if isinstance(each, dict | list))
        if not (nested := [each for values in inside for each in values if isinstance(each, dict | list)]):
            return value
    raise too_deep


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary path next to `path` to write to; it replaces `path` when the block ends, and is removed if the
    block fails. An OSError about the temporary path, or about no path, is said of `path`.

    What is no plain file, such as a link, a pipe or /dev/stdout, stays what it is: the block gets `path` itself.

    Raises:
        OSError: the folder cannot be written to.
    """
    target = Path(path)
    if target.is_symlink() or (target.exists() and not target.is_file()):
        with naming(target):
            yield target
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with naming(target, instead_of=partial):
            yield partial
            partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def building(target: Path, wait: bool = False) -> Iterator[Path]:
    """Gives a folder beside `target` to fill; it becomes `target` when the block ends, and is removed if it fails.

    The folder is locked, and called `.NAME-building`: one that a killed process left is emptied and used again.

    Args:
        target: a folder that does not exist yet, or is empty.
        wait: whether to wait for another process that builds the same target.

    Raises:
        BlockingIOError: another process builds it, and `wait` is not set.
        OSError: the folder cannot be written to, or `target` holds something by the end; said of `target`.
    """
    folder = target.with_name(f".{target.name}-building")
    with naming(target, instead_of=folder):
        lock = _locked_folder(folder, wait)
    try:
        with naming(target, instead_of=folder):
            for left in folder.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            yield folder
            folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _locked_folder(folder: Path, wait: bool) -> int:
    while True:
        folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # The process that had the lock may have renamed or removed what was opened here.
            if folder.exists() and os.path.samestat(os.fstat(lock), folder.stat()):
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str], instead_of: Path | None = None) -> Iterator[None]:
    """An OSError in the block that names no file, as of a full disk, or names `instead_of` or a file in it, is said of
    `path`."""
    try:
        yield
    except OSError as error:
        named = error.filename
        inside = isinstance(named, str | bytes) and instead_of and Path(os.fsdecode(named)).is_relative_to(instead_of)
        if named is None or inside:
            error.filename = str(path)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes the text in UTF-8, replacing what was there."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def adding_lines(path: Path) -> Iterator[io.FileIO]:
    """Opens a file for lines to be added by `write_whole`; an OSError names the file. A last line that was cut off, or
    written by hand without its end, is ended first."""
    with naming(path), path.open("ab", buffering=0) as file:
        if path.is_file() and _is_cut_off(path):
            write_whole(file, "\n")
        yield file


def _is_cut_off(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:  # empty, or not to be read
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
    return False


def write_whole(file: io.FileIO, text: str) -> None:
    """Writes the text at the end of a file that is open without a buffer: in UTF-8, and whole or nothing of it, also
    where the disk has room for a part."""
    data, done = memoryview(text.encode()), 0
    try:
        while done < len(data):
            done += file.write(data[done:])
    except OSError:
        with contextlib.suppress(OSError):  # of a pipe, which keeps what it got
            file.truncate(file.seek(-done, os.SEEK_END))
        raise

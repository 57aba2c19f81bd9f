"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from moe_ep.files import parse_json, replacing, write_text


def test_a_file_changes_as_a_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    write_text(file, "first")
    with pytest.raises(RuntimeError, match="on the way"), replacing(file) as partial:
        partial.write_text("half of the sec")
        assert file.read_text() == "first"
        raise RuntimeError("on the way")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out.jsonl", "first")]
    write_text(file, "zweites, größer")
    assert file.read_text(encoding="utf-8") == "zweites, größer"


def test_json_of_any_kind_is_json_or_a_value_error() -> None:
    assert parse_json(b'{"a": [1]}') == {"a": [1]}
    for text in ("[" * 100_000, '{"a":' * 100_000, b"\xff\xfe\x00", "1" * 5000):
        with pytest.raises(ValueError):
            parse_json(text)


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    def full(partial: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def missing(partial: Path) -> None:
        partial.with_name("input").read_text()

    file = tmp_path / "out.jsonl"
    for write, named in ((full, file), (Path.read_text, file), (missing, tmp_path / "input")):
        with pytest.raises(OSError) as caught, replacing(file) as partial:
            write(partial)
        assert caught.value.filename == str(named)


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    """As /dev/stdout and /dev/null must, whoever runs the command."""
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "file")
    os.mkfifo(pipe)
    write_text(link, "through the link")
    assert link.is_symlink() and (tmp_path / "file").read_text() == "through the link"
    writer = threading.Thread(target=write_text, args=(pipe, "into the pipe"))
    writer.start()
    assert pipe.read_text() == "into the pipe" and pipe.is_fifo()
    writer.join()

"""The folder of the demo checkpoint, where something else lies in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ep.launch.cli.main import main


def test_what_lies_in_its_place_is_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "demo-qwen3-moe-v1"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    assert main(["run", "--launcher", "local", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert f"cannot be made as {folder}, which holds something else; delete it, set MOE_EP_CACHE_DIR to" in error
    assert error.count("\n") == 1 and (folder / "notes.txt").read_text() == "mine"

"""What `scripts/perplexity.py` says of files that it cannot use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "perplexity.py"


@pytest.mark.parametrize(
    ("texts", "named"),
    [(None, "no such file"), ("{", "no JSON"), ("[]", "object"), ('{"a": []}', "object"), ('{"a": [3]}', "'a'")],
)
def test_texts_that_are_none(tmp_path: Path, texts: str | None, named: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    file = tmp_path / "texts.json"
    if texts is not None:
        file.write_text(texts)
    command = [sys.executable, str(SCRIPT), "--model", str(tmp_path), "--texts", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2 and not done.stdout
    assert named in done.stderr and "--texts" in done.stderr and done.stderr.count("\n") == 1

"""The commit of this code, if it runs from a git checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path


def checkout_commit() -> str | None:
    """The checkout's commit, with "-dirty" if tracked files differ from it; None outside a checkout."""
    # The package lies in the checkout's root, and launch/ and kernels/ are reached through links in it.
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        asked = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip()

"""Records of benchmarks: JSON lines that say what was run where, and tables for people.

Without torch but for what describes this process: a driver writes rows and needs none.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import resource
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import moe_ep
from moe_ep.files import adding_lines, parse_json, write_whole

if TYPE_CHECKING:
    import torch


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


def versions() -> dict[str, str]:
    """Versions of the packages that decide how fast a process runs and what it computes."""
    import torch

    found = {"moe_ep": moe_ep.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda or "", "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's architecture."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def facts(*, seed: int, commit: str | None = None, command: str | None = None) -> dict[str, Any]:
    """The facts by which results are compared: versions, device, commit, seed and command.

    Args:
        commit: what to record where the code does not run from a git checkout; None asks git.
        command: as shown to people; None takes this process's own.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "cuda": None,
        "nccl": None,
        **versions(),
        "triton": _installed("triton"),
        "nvshmem4py": _installed("nvshmem4py-cu13"),
        "ray": _installed("ray"),
        "commit": commit or checkout_commit() or "unknown",
        "seed": seed,
        "command": command or shlex.join(["python", *sys.argv]),
    }


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU the most that was allocated since its count was reset, else the most the process ever held."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def as_line(row: dict[str, Any]) -> str:
    """One JSON line; NaN and infinity become null, as JSON has neither."""
    return json.dumps(_finite(row)) + "\n"


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Adds one JSON line to a file, whole or nothing of it; an OSError names the file."""
    with adding_lines(path) as file:
        write_whole(file, as_line(row))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines.

    Raises:
        ValueError: no text, or a line that is no JSON object; names file and line.
    """
    rows = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text of JSON lines; give a file that a benchmark wrote") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}, line {number}, is not a JSON object; give a file that a benchmark wrote, or delete that "
                f"line if it was cut off"
            )
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    """Rows as text, words to the left and numbers to the right; `columns` gives the heading of each key, "-" stands for
    what a row lacks."""
    columns_of_cells = []
    for key, heading in columns.items():
        cells = [heading, *[_cell(row.get(key)) for row in rows]]
        width = max(map(len, cells))
        words = all(cell[:1].isalpha() for cell in cells[1:])
        columns_of_cells.append([cell.ljust(width) if words else cell.rjust(width) for cell in cells])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns_of_cells, strict=True))


def markdown_table(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> str:
    """The same as a markdown table."""
    lines = [
        list(columns.values()),
        ["---"] * len(columns),
        *[[_cell(row.get(key)) for key in columns] for row in rows],
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 10_000 else f"{value:,.0f}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

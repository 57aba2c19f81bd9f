"""Up to how many rows of an expert the decode kernel computes it on Hopper, for each shape: measured, or one default.

The package has a table of measurements. `moe-ep tune` adds to a table of the user's under MOE_EP_CACHE_DIR, which comes
first. Both are JSON, {GPU: {problem: {"max_small_m": rows}}}, with names as `torch.cuda.get_device_name` and
`Problem.key` give them. They are read once a process: a captured graph keeps its choices.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from moe_ep import env
from moe_ep.files import parse_json, write_text
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.kernels.marlin.weights import Weights

logger = logging.getLogger(__name__)

# kDecodeTileTokens of cuda/params.cuh, and the default for a shape without a measurement.
MOST_SMALL_M = 32
# The sizes of the decode kernel's tiles, or none.
CANDIDATES = (0, 8, 16, 24, 32)
PACKAGE_TABLE = Path(__file__).with_name("tuned.json")

Table = dict[str, dict[str, dict[str, int]]]


class Problem(NamedTuple):
    """Experts of one rank: how many, K, N, the weights' number type and the columns that share a scale."""

    experts: int
    K: int
    N: int
    weights: str
    group_size: int

    @property
    def key(self) -> str:
        """Its name in the tables. Example: "E32 K7168 N2048 uint4b8 g128"."""
        return f"E{self.experts} K{self.K} N{self.N} {self.weights} g{self.group_size}"


def problem_of(w13: Weights, w2: Weights, kind: WeightType) -> Problem:
    """The problem of these weights."""
    group_size = w13.num_columns // w13.scales.size(1)
    return Problem(w13.qweight.size(0), w13.num_columns, w2.num_columns, str(kind.scalar_type), group_size)


_forced: int | None = None


def max_small_m(device_name: str, problem: Problem) -> int:
    """The most rows of an expert that the decode kernel computes (small-M), at most MOST_SMALL_M."""
    return choice_of_tables(device_name, problem) if _forced is None else _forced


def is_forced() -> bool:
    """Whether `forced` chooses: then an expert's own rows decide alone."""
    return _forced is not None


@contextmanager
def forced(rows: int) -> Iterator[None]:
    """Launches meanwhile take experts of up to so many rows as small-M, whatever the tables say."""
    global _forced
    _forced = rows
    try:
        yield
    finally:
        _forced = None


@functools.cache
def choice_of_tables(device_name: str, problem: Problem) -> int:
    """The same by the user's table, the package's, or the default."""
    for path in (user_table(), PACKAGE_TABLE):
        entry = _read(path).get(device_name, {}).get(problem.key)
        if entry is not None:
            return entry["max_small_m"]
    return MOST_SMALL_M


def user_table() -> Path:
    """Where `moe-ep tune` writes."""
    return env.CACHE_DIR.get() / "tuned.json"


def remember(path: Path, device_name: str, problem: Problem, rows: int) -> None:
    """Adds a choice to a table, or replaces it; readers see the old table or the new one.

    Raises:
        ValueError: the file there is no table.
    """
    known = read_table(path) if path.exists() else {}
    known.setdefault(device_name, {})[problem.key] = {"max_small_m": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(known, indent=1, sort_keys=True) + "\n")


def read_table(path: Path) -> Table:
    """The table in a file.

    Raises:
        ValueError: it is none; says what is wrong and what to do.
    """
    try:
        known = parse_json(path.read_text())
        entries = [entry for problems in known.values() for entry in problems.values()]
        wrong = next((entry for entry in entries if entry["max_small_m"] not in CANDIDATES), None)
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no table of tuned choices ({error}); delete it") from None
    if wrong is not None:
        raise ValueError(
            f"{path} has max_small_m {wrong['max_small_m']}; it must be one of {CANDIDATES}, delete the file"
        )
    return known


@functools.cache
def _read(path: Path) -> Table:
    """The table, empty where there is none; a broken one is named once and not used."""
    if not path.exists():
        return {}
    try:
        return read_table(path)
    except ValueError as error:
        logger.warning("%s", error)
        return {}

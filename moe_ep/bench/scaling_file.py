"""Results of the scaling benchmark as they were written: read back, checked, and each measurement once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moe_ep.bench.results import read_lines
from moe_ep.bench.scaling import with_efficiency
from moe_ep.bench.scaling_tables import KIND

Row = dict[str, Any]

# No measurement comes near it, and sums and products of smaller ones stay finite.
_LARGEST = 1e100

# What tells rows of one run apart.
_ROW = ("geometry", "ep_size", "scaling", "phase", "asked_tokens", *KIND)
_RUN = ("commit", "gpu", "workers", "hosts")
# What tables, pictures and predictions are made from: texts, numbers, numbers that one rank alone lacks, and numbers
# above 0.
_TEXTS = ("geometry", "scaling", "phase", "backend", "mode", *KIND)
_NUMBERS = (
    "bytes_sent", "floor_over_time", "balancedness", "memory_tb_per_s", "tflop_per_s", "exposed_communication",
    "experts_floor_us", "link_floor_us", "active_experts_max",
)  # fmt: skip
_OF_LINKS = ("link_gb_per_s", "link_share")
_POSITIVE = ("ep_size", "asked_tokens", "tokens_per_rank", "us", "p99_us", "tokens_per_s", "tokens_per_s_per_gpu")


def read_scaling(path: Path) -> tuple[list[Row], list[str]]:
    """(rows with their `efficiency`, the runs that they are of).

    A file may hold several runs, one behind the other: a row that was measured again is the last one's.

    Raises:
        ValueError: no rows of a scaling benchmark, or a row that lacks something.
    """
    found = {}
    for number, row in enumerate(read_lines(path), 1):
        if lacking := _lacking(row):
            raise ValueError(
                f"it holds other rows than those of a scaling benchmark: row {number} has no {lacking}; give a "
                f"file that `moe-ep bench scaling --json` of this version wrote"
            )
        found[tuple(row[key] for key in _ROW)] = row
    if not found:
        raise ValueError("it holds no rows; give a file that `moe-ep bench scaling --json` wrote")
    runs = {tuple(str(row.get(key)) for key in _RUN): None for row in found.values()}
    told = [f"commit {commit}, {workers} x {gpu}, {hosts} host(s)" for commit, gpu, workers, hosts in runs]
    return with_efficiency(list(found.values())), told


def _lacking(row: Row) -> str | None:
    """What a row does not have, if anything."""
    wrong = [key for key in _TEXTS if not isinstance(row.get(key), str)]
    wrong += [key for key in _NUMBERS if not _is_number(row.get(key))]
    is_alone = row.get("ep_size") == 1
    wrong += [key for key in _OF_LINKS if not (_is_number(row.get(key)) or (is_alone and row.get(key) is None))]
    wrong += [key for key in _POSITIVE if not _is_positive(row.get(key))]
    stages, loads = row.get("stages_us"), row.get("rows_per_rank")
    if not isinstance(stages, dict) or not _is_positive_sum(stages.values()):
        wrong.append("stages_us")
    if not isinstance(loads, list) or len(loads) != row.get("ep_size") or not _is_positive_sum(loads):
        wrong.append("rows_per_rank")
    return wrong[0] if wrong else None


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < _LARGEST


def _is_positive_sum(values: Iterable[Any]) -> bool:
    values = list(values)
    return all(map(_is_number, values)) and sum(values) > 0


def about_runs(runs: list[str]) -> str | None:
    """What people are told where rows of several runs are shown together."""
    if len(runs) == 1:
        return None
    return f"rows of {len(runs)} runs are shown together: {'; '.join(runs)}; those measured twice as the later has them"

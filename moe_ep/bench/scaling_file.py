"""Results of the scaling benchmark as they were written: read back, checked, and each measurement once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_ep.bench.results import read_lines
from moe_ep.bench.scaling import with_efficiency
from moe_ep.bench.scaling_tables import KIND

Row = dict[str, Any]

# What tells rows of one run apart.
_ROW = ("geometry", "ep_size", "scaling", "phase", "asked_tokens", *KIND)
_RUN = ("commit", "gpu", "workers", "hosts")
# What tables, pictures and predictions are made from.
_NUMBERS = (
    "tokens_per_rank", "us", "p99_us", "tokens_per_s", "tokens_per_s_per_gpu", "stages_us", "bytes_sent",
    "floor_over_time", "rows_per_rank", "balancedness", "memory_tb_per_s", "tflop_per_s",
)  # fmt: skip


def read_scaling(path: Path) -> tuple[list[Row], list[str]]:
    """(rows with their `efficiency`, the runs that they are of).

    A file may hold several runs, one behind the other: a row that was measured again is the last one's.

    Raises:
        ValueError: no rows of a scaling benchmark, or a row that lacks something.
    """
    found = {}
    for number, row in enumerate(read_lines(path), 1):
        lacking = [key for key in (*_ROW, "backend", *_NUMBERS) if row.get(key) is None]
        if lacking:
            raise ValueError(
                f"it holds other rows than those of a scaling benchmark: row {number} has no {lacking[0]}; give a file "
                f"that `moe-ep bench scaling --json` of this version wrote"
            )
        found[tuple(row[key] for key in _ROW)] = row
    if not found:
        raise ValueError("it holds no rows; give a file that `moe-ep bench scaling --json` wrote")
    runs = {tuple(row.get(key) for key in _RUN): None for row in found.values()}
    told = [f"commit {commit}, {workers} x {gpu}, {hosts} host(s)" for commit, gpu, workers, hosts in runs]
    return with_efficiency(list(found.values())), told


def about_runs(runs: list[str]) -> str | None:
    """What people are told where rows of several runs are shown together."""
    if len(runs) == 1:
        return None
    return f"rows of {len(runs)} runs are shown together: {'; '.join(runs)}; those measured twice as the later has them"

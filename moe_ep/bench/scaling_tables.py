"""Tables of scaling results: for a terminal, and as markdown for documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_ep.bench.results import markdown_table, table

Row = dict[str, Any]

_KIND = {"scaling": "scaling", "wire": "wire", "routing": "routing", "eplb": "EPLB"}
_COLUMNS = {
    "geometry": "geometry", "ep_size": "EP", "phase": "phase", "tokens_per_rank": "T", "backend": "backend", **_KIND,
    "us": "us", "p99_us": "p99", "route_us": "route", "dispatch_us": "dispatch", "experts_us": "experts",
    "combine_us": "combine", "floor_over_time": "floor/time", "tokens_per_s_per_gpu": "tok/s/rank",
    "efficiency": "efficiency", "balancedness": "balance",
}  # fmt: skip


def as_text(rows: Sequence[Row]) -> str:
    """All rows in one table."""
    return table(_shown(rows), _COLUMNS)


def as_markdown(rows: Sequence[Row]) -> str:
    """A section with a table for each geometry, without the columns in which no rows differ."""
    shown, sections = _shown(rows), []
    columns = {
        key: title
        for key, title in _COLUMNS.items()
        if key != "geometry" and (key not in _KIND or len({row[key] for row in rows}) > 1)
    }
    for geometry in dict.fromkeys(row["geometry"] for row in rows):
        mine = [row for row in shown if row["geometry"] == geometry]
        sections.append(f"## {geometry}\n\n{markdown_table(mine, columns)}\n")
    return "\n".join(sections)


def _shown(rows: Sequence[Row]) -> list[Row]:
    return [row | {f"{name}_us": us for name, us in row["stages_us"].items()} for row in rows]

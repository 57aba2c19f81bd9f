"""Tables of all rows of the scaling benchmark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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
_RATIOS = ("floor_over_time", "efficiency", "balancedness")

KIND = ("asked_backend", "wire", "routing", "eplb")


def kind_of(row: Row) -> tuple[Any, ...]:
    """What was chosen for the row beside its size."""
    return tuple(row[key] for key in KIND)


def of_most_alike(rows: Sequence[Row]) -> list[Row]:
    """Those of the kind that most rows over several ranks have, and of one rank those with that routing."""
    several = [row for row in rows if row["ep_size"] > 1] or rows
    if not several:
        return []
    kind = dict(zip(KIND, Counter(map(kind_of, several)).most_common(1)[0][0], strict=True))
    return [
        row for row in rows
        if all(row[key] == kind[key] for key in (("routing",) if row["ep_size"] == 1 else KIND))
    ]  # fmt: skip


def as_text(rows: Sequence[Row]) -> str:
    """All rows in one table, below a line that says once what is the same in all of them."""
    same, columns = _same(rows, ("geometry", "backend", *_KIND))
    about = [*(f"{title} {value}" for title, value in same), "T tokens a rank", "microseconds of the slowest rank"]
    return f"{', '.join(about)}\n{table(_shown(rows), columns)}"


def every_row(rows: Sequence[Row]) -> str:
    """One geometry's rows as a markdown table, without the columns in which none differ."""
    _, columns = _same(rows, _KIND)
    del columns["geometry"]
    return markdown_table(_shown(rows), columns)


def _same(rows: Sequence[Row], keys: Iterable[str]) -> tuple[list[tuple[str, Any]], dict[str, str]]:
    """(heading and value of those columns in which all rows are the same, the other columns of the table)."""
    same = {key for key in keys if len({row[key] for row in rows}) == 1}
    columns = {key: title for key, title in _COLUMNS.items() if key not in same}
    return [(_COLUMNS[key], rows[0][key]) for key in _COLUMNS if key in same], columns


def _shown(rows: Sequence[Row]) -> list[Row]:
    """The rows with numbers of one kind written alike."""
    return [
        row
        | {key: f"{row[key]:,.1f}" for key in ("us", "p99_us")}
        | {f"{name}_us": f"{us:,.1f}" for name, us in row["stages_us"].items()}
        | {key: f"{row[key]:.3f}" for key in _RATIOS}
        for row in rows
    ]

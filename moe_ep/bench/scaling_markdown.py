"""What rows of the scaling benchmark say, as markdown tables for documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moe_ep.bench.results import markdown_table
from moe_ep.bench.scaling_tables import every_row, of_most_alike

Row = dict[str, Any]
# A cell of a table by the heading of its column.
Line = dict[str, Any]

STAGES = ("route", "dispatch", "experts", "combine")


def as_markdown(rows: Sequence[Row]) -> str:
    """A table for each question that the rows answer, then one for each geometry with every row."""
    made = [(title, make(rows)) for title, make in _TABLES.items()]
    made += [(name, every_row([row for row in rows if row["geometry"] == name])) for name in _values(rows, "geometry")]
    return "\n".join(f"## {title}\n\n{text}\n" for title, text in made if text)


def weak(rows: Sequence[Row]) -> str:
    """Tokens per rank to the right: the time at each EP size, and what became of the largest."""
    chosen = of_most_alike([row for row in rows if row["scaling"] == "weak"])
    sizes = sorted(_values(chosen, "ep_size"))
    lines = []
    for name in _values(chosen, "geometry"):
        mine = sorted((row for row in chosen if row["geometry"] == name), key=_place)
        of_size = {size: {_title(row): row for row in mine if row["ep_size"] == size} for size in sizes}
        for size in sizes:
            lines.append(_line(name, f"EP {size}, us", {place: _us(row["us"]) for place, row in of_size[size].items()}))
        for title, key in (("efficiency", "efficiency"), ("floor/time", "floor_over_time")) if len(sizes) > 1 else ():
            shares = {place: f"{row[key]:.2f}" for place, row in of_size[sizes[-1]].items()}
            lines.append(_line(name, title, shares))
    return _table(lines)


def stages(rows: Sequence[Row]) -> str:
    """Stages at the largest EP size, what is left without the experts, and the time over the sum of its floors."""
    chosen = of_most_alike([row for row in rows if row["scaling"] == "weak"])
    largest = max(_values(chosen, "ep_size"), default=1)
    return _table(
        [
            {"model": row["geometry"], "phase": row["phase"], "T": row["asked_tokens"], "us": _us(row["us"])}
            | {stage: _us(row["stages_us"][stage]) for stage in STAGES}
            | {
                "exposed": f"{row['exposed_communication']:.2f}",
                "of the link": f"{row['link_share']:.2f}",
                "experts' floor": _us(row["experts_floor_us"]),
                "link's floor": _us(row["link_floor_us"]),
                "us / floors": f"{row['us'] / (row['experts_floor_us'] + row['link_floor_us']):.2f}",
            }
            for row in chosen
            if row["ep_size"] == largest > 1
        ]
    )


def balancing(rows: Sequence[Row]) -> str:
    """Each routing without and with EPLB, where both were measured, at the largest EP size; the backend and the rows on
    the wire where there are several."""
    largest = max(_values(rows, "ep_size"), default=1)
    places: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["ep_size"] == largest > 1 and row["scaling"] == "weak":
            keys = ("geometry", "routing", "phase", "asked_tokens", "asked_backend", "wire")
            places.setdefault(tuple(row[key] for key in keys), {})[row["eplb"]] = row
    twice = [found["off"] for found in places.values() if found.keys() == {"off", "on"}]
    told = [key for key in ("asked_backend", "wire") if len(_values(twice, key)) > 1]
    lines = []
    for (name, routing, phase, tokens, *_), found in places.items():
        if found.keys() == {"off", "on"}:
            both = (found["off"], found["on"])
            lines.append(
                {"model": name, "phase": phase, "T": tokens, "routing": routing}
                | {key.removeprefix("asked_"): found["off"][key] for key in told}
                | _off_on("us", [_us(row["us"]) for row in both])
                | _off_on("experts", [_us(row["stages_us"]["experts"]) for row in both])
                | _off_on("combine", [_us(row["stages_us"]["combine"]) for row in both])
                | _off_on("balance", [f"{row['balancedness']:.2f}" for row in both])
                | _off_on("active experts", [f"{row['active_experts_max']:.0f}" for row in both])
            )
    return _table(lines)


def strong(rows: Sequence[Row]) -> str:
    """Tokens of all ranks to the right, where each EP size has as many; rows of weak scaling count too."""
    chosen = of_most_alike(rows) if any(row["scaling"] == "strong" for row in rows) else []
    sizes = sorted(_values(chosen, "ep_size"))
    lines = []
    for name in _values(chosen, "geometry"):
        times: dict[tuple[str, int], dict[int, float]] = {}
        for row in chosen:
            if row["geometry"] == name:
                place = (row["phase"], row["tokens_per_rank"] * row["ep_size"])
                times.setdefault(place, {})[row["ep_size"]] = row["us"]
        whole = {
            f"{phase} {tokens}": found for (phase, tokens), found in sorted(times.items()) if len(found) == len(sizes)
        }
        for size in sizes:
            lines.append(_line(name, f"EP {size}, us", {place: _us(found[size]) for place, found in whole.items()}))
        speedup = {place: f"{found[sizes[0]] / found[sizes[-1]]:.2f}" for place, found in whole.items()}
        lines.append(_line(name, f"EP {sizes[0]} / EP {sizes[-1]}", speedup))
    return _table(lines)


def backends(rows: Sequence[Row]) -> str:
    """The time of each backend that was asked for by name, dispatch and combine behind it; of the first routing."""
    named = [row for row in rows if row["asked_backend"] != "auto" and row["scaling"] == "weak"]
    chosen = [row for row in named if (row["routing"], row["eplb"]) == (named[0]["routing"], named[0]["eplb"])]
    lines: dict[tuple[Any, ...], Line] = {}
    for row in chosen:
        key = (row["geometry"], row["ep_size"], row["backend"], row["mode"])
        line = lines.setdefault(key, dict(zip(("model", "EP", "backend", "mode"), key, strict=True)))
        took = row["stages_us"]
        wire = "bf16" if row["wire"] == "activations" else row["wire"]
        place = f"{row['phase']}, {row['asked_tokens']}, {wire}"
        line[place] = f"{_us(row['us'])}: {_us(took['dispatch'])} + {_us(took['combine'])}"
    return _table(list(lines.values()))


_TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "Weak scaling": weak,
    "Stages at the largest EP size": stages,
    "Routing and balancing": balancing,
    "Strong scaling": strong,
    "Backends": backends,
}


def _values(rows: Sequence[Row], key: str) -> list[Any]:
    """The values of a column, each once, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def _place(row: Row) -> tuple[str, int]:
    return row["phase"], row["asked_tokens"]


def _title(row: Row) -> str:
    return f"{row['phase']} {row['asked_tokens']}"


def _line(model: str, what: str, cells: Line) -> Line:
    return {"model": model, "": what} | cells


def _off_on(title: str, values: Sequence[str]) -> Line:
    return {f"{title}, off": values[0], f"{title}, on": values[1]}


def _us(microseconds: float) -> str:
    return f"{microseconds:,.1f}" if microseconds < 10_000 else f"{microseconds:,.0f}"


def _table(lines: Sequence[Line]) -> str:
    """Nothing where there are no lines."""
    columns = {title: title for line in lines for title in line}
    return markdown_table(lines, columns) if lines else ""

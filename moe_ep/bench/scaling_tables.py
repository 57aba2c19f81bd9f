"""Rows of the scaling benchmark: read from a file and checked, as tables for the terminal and for documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from moe_ep.bench.results import markdown_table, read_lines, table

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
_OWN_KIND = ("asked_backend", "wire", "eplb")
_ALIKE = ("geometry", "scaling", "phase", "asked_tokens", "routing")


# ==== Files ====

# No measurement comes near it, and sums and products of smaller ones stay finite.
_LARGEST = 1e100

# The keys that tell rows of one run apart.
_ROW = ("geometry", "ep_size", "scaling", "phase", "asked_tokens", *KIND)
_RUN = ("commit", "workers", "gpu", "hosts")
# Settings of a run that change its rows, but are not told apart in the tables; older files lack them.
_SETTINGS = ("input_dtype", "batch_balance")
# Keys that tables, plots and predictions need: texts, numbers, numbers that a single rank lacks, and numbers above 0.
_TEXTS = ("geometry", "scaling", "phase", "backend", "mode", *KIND)
_NUMBERS = (
    "bytes_sent", "floor_over_time", "balancedness", "memory_tb_per_s", "tflop_per_s", "exposed_communication",
    "experts_floor_us", "link_floor_us", "active_experts_max",
)  # fmt: skip
_OF_LINKS = ("link_gb_per_s", "link_share")
_POSITIVE = ("ep_size", "asked_tokens", "tokens_per_rank", "us", "p99_us", "tokens_per_s", "tokens_per_s_per_gpu")


def read_scaling(path: Path) -> tuple[list[Row], str]:
    """(rows with their `efficiency`, a note where they are of several runs).

    Of a row that was measured more than once the last counts.

    Raises:
        ValueError: no rows of a scaling benchmark, or a row that lacks something.
    """
    found: dict[tuple[Any, ...], Row] = {}
    runs: dict[str, None] = {}
    for number, row in enumerate(read_lines(path), 1):
        if lacking := _lacking(row):
            raise ValueError(
                f"it holds other rows than those of a scaling benchmark: row {number} has no {lacking}; give a "
                f"file that `moe-ep bench scaling --json` of this version wrote"
            )
        found[tuple(row[key] for key in _ROW)] = row
        runs[_run_of(row)] = None
    if not found:
        raise ValueError("it holds no rows; give a file that `moe-ep bench scaling --json` wrote")
    told = f"rows of {len(runs)} runs are shown together: {'; '.join(runs)}; those measured twice as the later has them"
    return with_efficiency(list(found.values())), told if len(runs) > 1 else ""


def _run_of(row: Row) -> str:
    settings = [f"{key} {row[key]}" for key in _SETTINGS if row.get(key) is not None]
    return ", ".join(["commit {}, {} x {}, {} host(s)".format(*map(row.get, _RUN)), *settings])


def _lacking(row: Row) -> str | None:
    """The first key that a row lacks or has a wrong value of; None for a good row."""
    wrong = [key for key in _TEXTS if not isinstance(row.get(key), str)]
    wrong += [key for key in _NUMBERS if not _is_number(row.get(key))]
    is_alone = row.get("ep_size") == 1
    wrong += [key for key in _OF_LINKS if not (_is_number(row.get(key)) or (is_alone and row.get(key) is None))]
    wrong += [key for key in _POSITIVE if not (_is_number(row.get(key)) and row[key] > 0)]
    stages, loads = row.get("stages_us"), row.get("rows_per_rank")
    if not isinstance(stages, dict) or not _is_positive_sum(stages.values()):
        wrong.append("stages_us")
    if not isinstance(loads, list) or len(loads) != row.get("ep_size") or not _is_positive_sum(loads):
        wrong.append("rows_per_rank")
    return wrong[0] if wrong else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < _LARGEST


def _is_positive_sum(values: Iterable[Any]) -> bool:
    values = list(values)
    return all(map(_is_number, values)) and sum(values) > 0


def with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `efficiency`: tokens/s of one GPU over that of the smallest EP size measured alike.

    With weak scaling alike means the same tokens per rank, with strong scaling the same tokens in total. Where the
    smallest size was measured with several backends or wire dtypes, a row is compared with its own kind.
    """
    families: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        families.setdefault(tuple(row[key] for key in _ALIKE), []).append(row)
    result = []
    for row in rows:
        family = families[tuple(row[key] for key in _ALIKE)]
        smallest = min(other["ep_size"] for other in family)
        bases = [other for other in family if other["ep_size"] == smallest]
        base = next((base for base in bases if all(base[key] == row[key] for key in _OWN_KIND)), bases[0])
        result.append(row | {"efficiency": round(row["tokens_per_s_per_gpu"] / base["tokens_per_s_per_gpu"], 4)})
    return result


# ==== All rows in one table ====


def kind_of(row: Row) -> tuple[Any, ...]:
    """The settings of a row other than its size."""
    return tuple(row[key] for key in KIND)


def of_most_alike(rows: Sequence[Row]) -> list[Row]:
    """The rows of the kind that most rows over several ranks have, and rows of one rank with that routing."""
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


# ==== A table for each question ====

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
    lines = []
    for name, alike in _alike_by_model([row for row in rows if row["scaling"] == "weak"]).items():
        mine = sorted(alike, key=lambda row: (row["phase"], row["asked_tokens"]))
        sizes = sorted(_values(mine, "ep_size"))
        of_size = {
            size: {f"{row['phase']} {row['asked_tokens']}": row for row in mine if row["ep_size"] == size}
            for size in sizes
        }
        for size in sizes:
            lines.append(_line(name, f"EP {size}, us", {place: _us(row["us"]) for place, row in of_size[size].items()}))
        for title, key in (("efficiency", "efficiency"), ("floor/time", "floor_over_time")) if len(sizes) > 1 else ():
            shares = {place: f"{row[key]:.2f}" for place, row in of_size[sizes[-1]].items()}
            lines.append(_line(name, title, shares))
    return _table(lines)


def stages(rows: Sequence[Row]) -> str:
    """Stages at the largest EP size, what is left without the experts, and the time over the sum of its floors."""
    chosen = _alike_by_model([row for row in rows if row["scaling"] == "weak"])
    largest = {name: max(_values(mine, "ep_size")) for name, mine in chosen.items()}
    same_size = len(set(largest.values())) == 1
    return _table(
        [
            {
                "model": name if same_size else f"{name}, EP {largest[name]}",
                "phase": row["phase"],
                "T": row["asked_tokens"],
                "us": _us(row["us"]),
            }
            | {stage: _us(row["stages_us"][stage]) for stage in STAGES}
            | {
                "exposed": f"{row['exposed_communication']:.2f}",
                "of the link": f"{row['link_share']:.2f}",
                "experts' floor": _us(row["experts_floor_us"]),
                "link's floor": _us(row["link_floor_us"]),
                "us / floors": f"{row['us'] / floors_us:.2f}" if floors_us else None,
            }
            for name, mine in chosen.items()
            for row in mine
            if row["ep_size"] == largest[name] > 1
            # Floors of tiny layers are recorded as 0.00.
            for floors_us in (row["experts_floor_us"] + row["link_floor_us"],)
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
    twice = {place: found for place, found in places.items() if found.keys() == {"off", "on"}}
    without = [found["off"] for found in twice.values()]
    told = [key for key in ("asked_backend", "wire") if len(_values(without, key)) > 1]
    cells: dict[str, Callable[[Row], str]] = {
        "us": lambda row: _us(row["us"]),
        "experts": lambda row: _us(row["stages_us"]["experts"]),
        "combine": lambda row: _us(row["stages_us"]["combine"]),
        "balance": lambda row: f"{row['balancedness']:.2f}",
        "active experts": lambda row: f"{row['active_experts_max']:.0f}",
    }
    return _table(
        [
            {"model": name, "phase": phase, "T": tokens, "routing": routing}
            | {key.removeprefix("asked_"): found["off"][key] for key in told}
            | {f"{title}, {eplb}": cell(found[eplb]) for title, cell in cells.items() for eplb in ("off", "on")}
            for (name, routing, phase, tokens, *_), found in twice.items()
        ]
    )


def strong(rows: Sequence[Row]) -> str:
    """Tokens of all ranks to the right, where each EP size has as many; rows of weak scaling count too."""
    chosen = _alike_by_model(rows) if any(row["scaling"] == "strong" for row in rows) else {}
    lines = []
    for name, mine in chosen.items():
        sizes = sorted(_values(mine, "ep_size"))
        times: dict[tuple[str, int], dict[int, float]] = {}
        for row in mine:
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


def _alike_by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Each geometry's rows of the kind that most of them have, by its name and the settings in which geometries differ.

    Example: "small" and "mixtral-8x7b", or "small, wire fp8" and "mixtral-8x7b, wire int8".
    """
    chosen = {
        name: of_most_alike([row for row in rows if row["geometry"] == name]) for name in _values(rows, "geometry")
    }
    # At one rank there is neither a backend nor a wire.
    kinds = {name: max(mine, key=lambda row: row["ep_size"]) for name, mine in chosen.items()}
    titles = {"asked_backend": "backend", **_KIND}
    differing = [key for key in KIND if len({row[key] for row in kinds.values()}) > 1]
    return {
        ", ".join([name, *(f"{titles[key]} {kinds[name][key]}" for key in differing)]): mine
        for name, mine in chosen.items()
    }


def _values(rows: Sequence[Row], key: str) -> list[Any]:
    """The values of a column, each once, in the order of the rows."""
    return list(dict.fromkeys(row[key] for row in rows))


def _line(model: str, what: str, cells: Line) -> Line:
    return {"model": model, "": what} | cells


def _us(microseconds: float) -> str:
    return f"{microseconds:,.1f}" if microseconds < 10_000 else f"{microseconds:,.0f}"


def _table(lines: Sequence[Line]) -> str:
    """Nothing where there are no lines."""
    columns = {title: title for line in lines for title in line}
    return markdown_table(lines, columns) if lines else ""

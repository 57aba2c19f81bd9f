"""Times, tables and JSON lines."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from moe_ep.bench.results import append_line, facts, markdown_table, read_lines, table
from moe_ep.bench.scaling_tables import with_efficiency
from moe_ep.bench.timing import time_calls, timing_of


def test_percentiles() -> None:
    assert timing_of([5.0]) == (5.0, 5.0, 5.0)
    assert timing_of(list(range(200, 0, -1))) == (100.5, 198, 200)


def test_every_call_of_a_chain_is_made() -> None:
    calls: list[int] = []
    begun = []
    times = time_calls(
        calls.append, device=torch.device("cpu"), chain=2, repeats=3, together=lambda: begun.append(len(calls))
    )
    assert len(times) == 3 and min(times) > 0
    assert calls == [0, 1, 0] + [0, 1] * 3
    assert begun == [3, 5, 7]


def test_lines_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_line(path, {"us": 1.5, "link": math.inf, "rows": [math.nan, 2.0]})
    append_line(path, {"us": 2.5})
    assert read_lines(path) == [{"us": 1.5, "link": None, "rows": [None, 2.0]}, {"us": 2.5}]
    with path.open("a") as file:
        file.write("[1]\n")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 3, is not a JSON object"):
        read_lines(path)


def test_table() -> None:
    rows = [{"name": "a", "us": 12.345}, {"name": "long", "us": 1234567.0, "more": 1}]
    lines = table(rows, {"name": "name", "us": "us", "more": "more"}).splitlines()
    assert lines == ["name         us  more", "a          12.3     -", "long  1,234,567     1"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (True, "yes"), (False, "no"), (1234, "1234"), ("a", "a"), (9.994, "9.99"), (10.0, "10.0"),
     (-1234.56, "-1,234.6"), (12345.6, "12,346")],
)  # fmt: skip
def test_cells(value: object, shown: str) -> None:
    assert markdown_table([{"key": value}], {"key": "heading"}) == f"| heading |\n| --- |\n| {shown} |"


def test_facts_name_what_is_needed_to_compare() -> None:
    made = facts(seed=3, commit="abc", command="moe-ep bench")
    assert made["torch"] == torch.__version__
    assert (made["seed"], made["commit"], made["command"]) == (3, "abc", "moe-ep bench")


def test_efficiency_is_against_the_smallest_size_of_its_kind() -> None:
    common = {"geometry": "g", "scaling": "weak", "phase": "decode", "asked_tokens": 8, "routing": "u", "eplb": "off"}

    def row(ep_size: int, backend: str, rate: float, **other) -> dict:
        kind = {"ep_size": ep_size, "asked_backend": backend, "wire": "activations", "tokens_per_s_per_gpu": rate}
        return common | kind | other

    rows = [row(2, "x", 50.0), row(1, "auto", 100.0), row(2, "y", 80.0)]
    assert [made["efficiency"] for made in with_efficiency(rows)] == [0.5, 1.0, 0.8]
    rows = [row(2, "x", 50.0), row(2, "y", 80.0), row(4, "y", 60.0), row(4, "y", 9.0, asked_tokens=1)]
    assert [made["efficiency"] for made in with_efficiency(rows)] == [1.0, 1.0, 0.75, 1.0]


def test_what_is_no_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"rows.jsonl is no text of JSON lines"):
        read_lines(tmp_path / "rows.jsonl")

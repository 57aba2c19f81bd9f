"""The tables of the README are those of the rows recorded in docs/benchmarks, and of the code."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from moe_ep import env

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
README = (ROOT / "README.md").read_text().replace("*", "").splitlines()
Rows = list[dict[str, Any]]


def recorded(file: str) -> Rows:
    return [json.loads(line) for line in (BENCHMARKS / file).read_text().splitlines()]


def check(name: str, measured: list[float]) -> None:
    """The cells behind the name, in the README's one row of it, are these, rounded to as many digits as they have."""
    (shown,) = (line.strip("| ").split(" | ")[1:] for line in README if line.startswith(f"| {name} |"))
    digits = [len(cell.partition(".")[2]) for cell in shown]
    # From a half on upwards, as people do it.
    rounded = [math.floor(value * 10**count + 0.5) / 10**count for value, count in zip(measured, digits, strict=True)]
    assert shown == [f"{value:.{count}f}" for value, count in zip(rounded, digits, strict=True)], name


def test_experts() -> None:
    times: dict[str, dict[str, float]] = {}
    for row in recorded("gemm_h200.jsonl"):
        if row["shape"] == "deepseek-v3":
            times.setdefault(row["rows"], {}).update(row)
    of_each = {
        "moe_ep": "us",
        "Humming 0.1.19": "humming",
        "vLLM 0.25.1, batched Marlin with the block size it chooses": "vllm",
        "the floor: reading the weights, or the FLOPs": "floor_us",
    }
    for name, key in of_each.items():
        check(name, [times[rows][key] for rows in ("1", "8", "32", "128", "1024")])


def test_dispatch() -> None:
    """128 tokens by reference in a graph, and the raw pair beside it, as the README's sentence has them."""
    wanted = {
        "backend": "nvshmem_low_latency:by_reference", "commit": "fbffb5e", "tokens_per_rank": 128, "wire": "bf16",
        "routing": "uniform", "hidden": 7168, "topk": 8, "experts": 256, "ranks": 4, "mode": "graph",
    }  # fmt: skip
    rows = recorded("dispatch_4xh200.jsonl")
    (row,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    text = " ".join(README)
    assert re.search(rf"take {row['median_us']:.1f} us, where two raw .* take {row['raw_median_us']:.1f} ", text)


@pytest.mark.parametrize(("weights", "peer"), [("int4", "humming_int8"), ("fp8", "deepgemm")])
def test_rows_of_eight_bits(weights: str, peer: str) -> None:
    """One run's times, and in brackets its peer's."""
    rows = [row for row in recorded("eight_bit_rows_h200.jsonl") if row["commit"] == "9f7fcfb7"]
    of_run = {row["rows"]: row for row in rows if row["weights"] == weights}
    (shown,) = (line for line in README if line.startswith(f"| {weights}, "))
    cells = [cell.strip() for cell in shown.strip("|").split("|")][1:]
    assert cells == [f"{of_run[n]['us']:.0f} ({float(of_run[n][peer]):.0f})" for n in (64, 128, 256, 1024)]


def test_the_table_of_variables_is_that_of_the_code() -> None:
    shown = {}
    for line in (ROOT / "README.md").read_text().splitlines():
        if match := re.match(r"\| `(MOE_EP_\w+)` \| `([^`]*)` \|", line):
            shown[match[1]] = match[2]
    known = {variable.name: variable.default for variable in env.ALL}
    assert shown.keys() == known.keys()
    assert {name: shown[name] for name in known if name != env.CACHE_DIR.name} == {
        name: default for name, default in known.items() if name != env.CACHE_DIR.name
    }

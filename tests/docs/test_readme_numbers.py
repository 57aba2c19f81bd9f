"""The tables of the README are those of the rows recorded in docs/benchmarks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from moe_ep.bench.scaling_file import read_scaling

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
    """One run; up to 1024 tokens by reference, then with as many SMs as the backend takes by itself."""
    rows = [row for row in recorded("dispatch_4xh200.jsonl") if row["routing"] == "uniform" and row["hidden"] == 7168]

    def pair(tokens: int, wire: str) -> dict[str, Any]:
        few = tokens <= 1024
        wanted = {
            "backend": "nvshmem_low_latency:by_reference" if few else "nvshmem_high_throughput",
            "commit": "fbffb5e",
            "num_sms": None if few else {"bf16": 24, "fp8": 48}[wire],
            "tokens_per_rank": tokens, "wire": wire, "topk": 8, "experts": 256, "ranks": 4,
            "mode": "graph" if tokens <= 128 else "eager",
        }  # fmt: skip
        (found,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
        return found

    sizes = (1, 8, 32, 128, 1024, 4096)
    raw = "two raw `all_to_all_single` of NCCL, as many bytes as with bf16 rows"
    for name, wire, key in (
        ("bf16 rows", "bf16", "median_us"),
        ("fp8 rows, results in bf16", "fp8", "median_us"),
        (raw, "bf16", "raw_median_us"),
    ):
        check(name, [pair(tokens, wire)[key] for tokens in sizes])


def test_scaling() -> None:
    names = {"DeepSeek-V3": "deepseek-v3", "DeepSeek-V4-Flash": "deepseek-v4-flash", "Kimi-K2": "kimi-k2",
             "Qwen3-235B": "qwen3-235b", "GPT-OSS-120B": "gpt-oss-120b", "Mixtral-8x7B": "mixtral-8x7b",
             "Qwen3-30B": "qwen3-30b"}  # fmt: skip
    rows, _ = read_scaling(BENCHMARKS / "scaling" / "scaling_4xh200.jsonl")
    plain = {"scaling": "weak", "routing": "uniform", "eplb": "off", "wire": "activations", "asked_backend": "auto"}
    found = {
        (row["geometry"], row["tokens_per_rank"], row["ep_size"]): row
        for row in rows
        if all(row[key] == value for key, value in plain.items())
    }
    for name, geometry in names.items():
        measured = []
        for tokens in (128, 4096):
            measured += [found[geometry, tokens, size]["us"] for size in (1, 2, 4)]
            measured.append(found[geometry, tokens, 4]["efficiency"])
        check(name, measured)

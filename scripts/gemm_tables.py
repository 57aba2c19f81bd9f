"""The tables of docs/benchmarks/experts.md from the JSON lines of one run of bench_gemm.py.

    python scripts/gemm_tables.py gemm.jsonl

Rows beside their targets and the times of other libraries, uneven rows against even ones, and how much faster than each
library over all rows: the geometric mean, the least, and which rows are below the target. Of a run with --weights, a
table of all number types for each model.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from moe_ep.bench.results import markdown_table, read_lines

TITLES = {
    "qwen3-235b": "Qwen3-235B at EP8 (El 16, K 4096, N 1536)",
    "deepseek-v3": "DeepSeek-V3 at EP8 (El 32, K 7168, N 2048)",
    "mixtral": "Mixtral at EP8 (El 1, K 4096, N 14336)",
    "qwen3-30b": "Qwen3-30B at EP8 (El 16, K 2048, N 768)",
    "kimi-k2": "Kimi-K2 at EP8 (El 48, K 7168, N 2048)",
    "gpt-oss-120b": "GPT-OSS-120B at EP8 (El 16, K 2880, N 2880, mxfp4, biases, swigluoai)",
}
# Targets for floor / time, up to 16, 64, 256 and 1024 rows an expert.
WANTED = {
    "qwen3-235b": (0.80, 0.62, 0.76, 0.82),
    "deepseek-v3": (0.86, 0.68, 0.80, 0.87),
    "mixtral": (0.65, 0.55, 0.70, 0.90),
    "qwen3-30b": (0.50, 0.42, 0.62, 0.72),
}
PEERS = {"humming": "Humming", "vllm": "vLLM", "vllm_best": "vLLM, best block", "torch_bmm": "torch.bmm, bf16"}
# Targets against each: the least at any row, and the geometric mean.
WANTED_OF_PEERS = {"humming": (1.0, 1.2), "vllm": (1.85, 2.7)}
COLUMNS = {
    "rows": "rows/expert", "us": "us", "p99_us": "p99 us", "floor_us": "floor us", "share": "floor/time",
    "wanted": "target", "mhz": "MHz", "error": "error",
}  # fmt: skip


def merged(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each shape and number of rows: ours, with what the peers took."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for line in lines:
        rows.setdefault((line["shape"], line["rows"]), {}).update(line)
    return [row for row in rows.values() if "us" in row]


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row with every number as it stands in the tables."""
    times = {key: f"{row[key]:.1f}" for key in ("us", "p99_us", "floor_us", *PEERS) if row.get(key)}
    wanted = wanted_share(row)
    return {
        "shape": row["shape"],
        "rows": row["rows"],
        **times,
        "share": f"{row['floor_over_time']:.2f}",
        "wanted": None if wanted is None else f"{wanted:.2f}",
        "mhz": f"{row['clock_mhz']:.0f}" if "clock_mhz" in row else None,
        "error": f"{row['relative_error']:.4f}",
    }


def wanted_share(row: dict[str, Any]) -> float | None:
    """The target for a row's floor / time, None where it has none."""
    if row["shape"] not in WANTED or not row["rows"].isdecimal():
        return None
    return WANTED[row["shape"]][sum(int(row["rows"]) > most for most in (16, 64, 256))]


def shape_table(rows: list[dict[str, Any]]) -> str:
    some = [shown(row) for row in rows if row["rows"].isdecimal()]
    peers = {key: name for key, name in PEERS.items() if any(key in row for row in some)}
    columns = {key: name for key, name in COLUMNS.items() if some[0][key] is not None}
    return markdown_table(some, columns | peers)


def types_table(rows: list[dict[str, Any]]) -> str:
    """Microseconds and floor/time of one model's sizes with each number type, and Humming's where it was timed."""
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault(row["rows"], {"rows": row["rows"]})
        numbers = [f"{row['us']:.1f}", f"{row['floor_over_time']:.2f}"]
        numbers += [f"{row['humming']:.1f}"] if row.get("humming") else []
        line[row["shape"].split()[1]] = ", ".join(numbers)
    types = dict.fromkeys(row["shape"].split()[1] for row in rows)
    return markdown_table(list(lines.values()), {"rows": "rows/expert"} | {name: name for name in types})


def uneven_table(rows: list[dict[str, Any]]) -> str:
    """Zipf's rows against the same number spread evenly, and the rows of T tokens a rank."""
    even = {(row["shape"], row["rows"].split()[-1]): row["us"] for row in rows if row["rows"].startswith("even")}
    lines = []
    for row in rows:
        line = shown(row)
        if row["rows"].startswith("zipf"):
            line["against"] = f"{row['us'] / even[row['shape'], row['rows'].split()[-1]]:.2f}"
        if not row["rows"].isdecimal():
            lines.append(line)
    columns = {"shape": "shape", "rows": "rows", "us": "us", "floor_us": "floor us", "share": "floor/time"}
    return markdown_table(lines, columns | {"against": "x even"})


def against(rows: list[dict[str, Any]], wanted_of_peers: dict[str, tuple[float, float]]) -> str:
    """How many times as fast as each of the others, over the rows that it computed too, beside targets if any."""
    lines = []
    for peer, name in PEERS.items():
        ratios = {f"{row['shape']} {row['rows']}": row[peer] / row["us"] for row in rows if row.get(peer)}
        if ratios:
            mean, worst = (
                math.exp(sum(map(math.log, ratios.values())) / len(ratios)),
                min(ratios, key=ratios.__getitem__),
            )
            least, wanted = (f"{target} x" if target else None for target in wanted_of_peers.get(peer, (None, None)))
            line = {"name": name, "rows": len(ratios), "mean": f"{mean:.2f} x", "wanted": wanted}
            lines.append(line | {"worst": f"{ratios[worst]:.2f} x, {worst}", "least": least})
    titles = {"name": "beside", "rows": "rows", "mean": "geometric mean", "wanted": "target", "worst": "least, with"}
    titles |= {"least": "target of the least"}
    return markdown_table(
        lines, {key: title for key, title in titles.items() if wanted_of_peers or key not in ("wanted", "least")}
    )


def missed(rows: list[dict[str, Any]]) -> str:
    """How many rows reach their target, and which do not, by shape."""
    wanted = [(row, wanted_share(row)) for row in rows if wanted_share(row) is not None]
    short: dict[str, list[str]] = {}
    for row, share in wanted:
        if share is not None and row["floor_over_time"] < share:
            short.setdefault(row["shape"], []).append(f"{row['rows']} ({row['floor_over_time']:.3f} of {share:.2f})")
    num_reached = len(wanted) - sum(map(len, short.values()))
    named = "; ".join(f"{shape} at {', '.join(some)} rows" for shape, some in short.items())
    return f"{num_reached} of {len(wanted)} rows reach their target for floor/time." + (
        f" Below it: {named}." if named else ""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    try:
        rows = merged(read_lines(parser.parse_args().results))
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"results holds no rows of bench_gemm.py: {error}")
    if not rows:
        parser.error("results holds no rows of bench_gemm.py")
    facts = rows[0]
    print(
        f"{facts.get('gpu', 'GPU')}, commit {facts.get('commit')}; measured in the run: memory "
        f"{facts['memory_tb_s']:.2f} TB/s, bf16 matrix product {facts['bf16_tflop_s']:.0f} TFLOP/s.\n"
    )
    for name, title in TITLES.items():
        some = [row for row in rows if row["shape"] == name]
        if some:
            print(f"## {title}\n\n{shape_table(some)}\n")
        typed = [row for row in rows if row["shape"].startswith(name + " ")]
        if typed:
            print(f"## {title.split(' (')[0]}, number types\n\n{types_table(typed)}\n")
    typed = [row for row in rows if row["shape"] not in TITLES and any(row.get(peer) for peer in PEERS)]
    if typed:
        print(f"## Number types against the others\n\n{against(typed, {})}\n")
    plain = [row for row in rows if row["shape"] in TITLES]
    if plain:
        print(f"## Uneven rows\n\n{uneven_table(plain)}\n\n## Against the others\n")
        print(f"{against(plain, WANTED_OF_PEERS)}\n\n{missed(plain)}")


if __name__ == "__main__":
    main()

"""`moe-ep bench scaling` and `moe-ep plot` as a user calls them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ep.bench.results import read_lines
from moe_ep.launch.cli import main

ROOT = Path(__file__).parents[2]
SMALL = ["--decode-tokens", "16", "--prefill-tokens", "none", "--chain", "2", "--repeats", "3", "--device", "cpu"]
COMMAND = [sys.executable, "-m", "moe_ep.launch", "bench", "scaling"]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_same_rows_from_every_launcher_and_their_pictures(tmp_path: Path) -> None:
    path = tmp_path / "local.jsonl"
    done = run(
        *COMMAND, "--launcher", "local", "--ep-size", "2", "--routing", "uniform,zipf:2", "--eplb", "off,on",
        "--backend", "all_to_all,batched_all_to_all", *SMALL, "--json", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = read_lines(path)
    routings = ("uniform", "zipf:2")
    assert [(row["ep_size"], row["backend"], row["routing"], row["eplb"]) for row in rows] == [
        *((1, "no_ep", routing, "off") for routing in routings),
        *itertools.product([2], ["all_to_all", "batched_all_to_all"], routings, ["off", "on"]),
    ]
    for off, on in zip(rows[2::2], rows[3::2], strict=True):
        assert off["routing"] == "uniform" or on["balancedness"] > off["balancedness"]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(16 * row["ep_size"] / row["us"] * 1e6, rel=1e-2)
        assert sum(row["rows_per_rank"]) == pytest.approx(16 * row["ep_size"] * 4)
        assert (row["bytes_sent"] > 0) == (row["ep_size"] > 1)
        assert (row["workers"], row["launcher"]) == (2, "local")
    assert len(done.stdout.splitlines()) == 1 + len(rows)

    under_torchrun = tmp_path / "torchrun.jsonl"
    done = run(
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "scripts/bench_ep_scaling.py",
        *SMALL, "--json", str(under_torchrun),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    others = read_lines(under_torchrun)
    assert [(row["ep_size"], row["launcher"]) for row in others] == [(1, "torchrun"), (2, "torchrun")]
    assert all(other.keys() == rows[0].keys() for other in others)

    done = run(sys.executable, "-m", "moe_ep.launch", "plot", str(path), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    pictures = [tmp_path / f"small-{kind}.png" for kind in ("scaling", "stages", "latency", "load")]
    tables = tmp_path / "tables.md"
    assert done.stdout.split() == list(map(str, [*pictures, tables]))
    headings, _, *lines = tables.read_text().splitlines()[2:]
    assert headings.startswith("| EP | phase | T | backend | ") and "wire" not in headings
    assert [line.split(" | ")[0] for line in lines] == [f"| {row['ep_size']}" for row in rows]
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--geometry", "gpt-5"], "--geometry is 'gpt-5'; 'gpt-5' is not one of deepseek-v3"),
        (["--ep-sizes", "3", "--ep-size", "4", "--launcher", "local"], "--ep-sizes has 3 and there are 4 workers"),
        (["--decode-tokens", "none", "--prefill-tokens", "none"], "are none; pass numbers"),
        (["--decode-tokens", "0"], "--decode-tokens is '0'; it must be whole numbers of at least 1"),
        (["--routing", "zipf"], "--routing is 'zipf'; it must be uniform, zipf:S"),
        (["--scaling", "strong", "--decode-tokens", "6", "--launcher", "local"], "6 tokens do not divide over 4 ranks"),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scaling", "--device", "cpu", *options]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1


def test_a_file_without_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps({"us": 1}) + "\n")
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 2
    assert "it holds no rows of a scaling benchmark" in capsys.readouterr().err

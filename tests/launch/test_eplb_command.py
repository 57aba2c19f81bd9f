"""moe-ep eplb: its tables, pictures, and what it says of wrong options."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moe_ep.eplb.simulate import zipf_trace
from moe_ep.launch.cli.main import main

DRAWN = ["--layers", "1", "--experts", "16", "--top-k", "2", "--steps", "4", "--step-tokens", "64", "--ep-size", "4"]


def test_simulate_prints_a_row_for_each_policy_and_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_path = tmp_path / "rows.jsonl"
    options = [
        *DRAWN,
        "--redundant",
        "4",
        "--routing",
        "zipf:0.8",
        "--rules",
        "levelled,hash-rank",
        "--json",
        str(json_path),
    ]
    assert main(["eplb", "simulate", *options]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "zipf:0.8: 1 layers, 16 experts, 4 steps; EP4, 4 redundant"
    assert shown[1] == "planned on the first 2 steps, measured on the other 2"
    assert len(shown) == 3 + 3 * 2
    rows = [json.loads(line) for line in json_path.read_text().splitlines()]
    assert [(row["policy"], row["rule"]) for row in rows[:2]] == [("linear", "levelled"), ("linear", "hash-rank")]
    assert all(0 < row["balancedness"] <= 1 and row["seed"] == 0 for row in rows)


def test_simulate_copies_experts_for_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    json_path, picture = tmp_path / "rows.jsonl", tmp_path / "steps.png"
    options = [*DRAWN, "--routing", "zipf:0.8", "--policies", "linear", "--rules", "levelled,per-batch"]
    more = ["--geometry", "qwen3-235b", "--json", str(json_path), "--picture", str(picture)]
    assert main(["eplb", "simulate", *options, *more]) == 0
    assert "MB copied" in capsys.readouterr().out
    plain, batch = (json.loads(line) for line in json_path.read_text().splitlines())
    assert plain["copies"] == plain["MB copied"] == 0 < batch["copies"] < batch["MB copied"]
    assert plain["balancedness"] < batch["balancedness"] and plain["us"] > 0 < batch["us"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["eplb", "simulate", *options, "--spare-slots", "0", "--json", str(json_path)]) == 0
    assert json.loads(json_path.read_text().splitlines()[-1])["copies"] == 0


def test_random_choices_have_the_sizes_of_the_geometry(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--layers", "1", "--steps", "2", "--step-tokens", "64", "--policies", "linear", "--rules", "levelled"]
    for more, experts in (([], 256), (["--geometry", "small"], 16), (["--geometry", "small", "--experts", "32"], 32)):
        assert main(["eplb", "simulate", *options, *more]) == 0
        assert f"1 layers, {experts} experts" in capsys.readouterr().out
    assert main(["eplb", "simulate", *options, "--geometry", "small", "--experts", "3", "--ep-size", "1"]) == 2
    assert "--top-k is 4; it must be at most the 3 of --experts" in capsys.readouterr().err


def test_report_says_nothing_of_random_choices_which_it_does_not_take(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eplb", "report", "--help"])
    assert "random" not in capsys.readouterr().out


def test_report_draws_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    trace = zipf_trace(num_layers=3, num_experts=16, top_k=2, exponent=0.8, num_steps=4, num_tokens=64, seed=0)
    trace.save(tmp_path / "trace.npz")
    picture = tmp_path / "load.png"
    assert main(["eplb", "report", str(tmp_path / "trace.npz"), "--ep-size", "4", "--out", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "planned on the first 2 steps, measured on the other 2; policy incremental, rule levelled"
    assert [line.split()[0] for line in lines[3:7]] == ["0", "1", "2", "all"]
    before, after, moved = map(float, lines[6].split()[1:])
    assert before < after <= 1
    assert moved == sum(int(line.split()[3]) for line in lines[3:6]) > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["eplb", "report", str(tmp_path / "trace.npz"), "--array", "english"]) == 2
    assert "--array is 'english'; trace.npz is a recorded trace, leave the option out" in capsys.readouterr().err


def test_plain_choices_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 16, (2, 200, 2)).astype(np.uint8) for name in ("english", "python")}
    np.savez(tmp_path / "plain.npz", **arrays)
    options = [*DRAWN, "--routing", str(tmp_path / "plain.npz"), "--policies", "linear", "--rules", "hash-rank"]
    assert main(["eplb", "simulate", *options]) == 0
    assert capsys.readouterr().out.startswith("plain: 2 layers, 16 experts, 6 steps")
    assert main(["eplb", "simulate", *options, "--array", "python"]) == 0
    assert capsys.readouterr().out.startswith("plain/python: 2 layers, 16 experts, 3 steps")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["simulate", "--routing", "zipf"], "--routing is 'zipf'; it must be zipf:S"),
        (["simulate", "--rules", "nearby"], "--rules has 'nearby'; it must be one of levelled"),
        (["simulate", "--policies", "linear,best"], "--policies has 'best'; it must be one of linear"),
        (["simulate", "--array", "english"], "--array is 'english'; --routing zipf:0.5 reads no file, leave it out"),
        (["simulate", *DRAWN, "--top-k", "17"], "--top-k is 17; it must be at most the 16"),
        (["simulate", *DRAWN, "--redundant", "3"], r"must be a multiple of ep_size (4); pass 4 redundant experts"),
        (["simulate", *DRAWN, "--redundant", "4000"], "there are 4000 redundant experts; with "),
        (["simulate", "--planned-on", "1"], "--planned-on is '1'; it must be a number above 0 and below 1"),
        (["report", "none.npz"], "TRACE is 'none.npz'; it must be an .npz file"),
        (["report", "none.npz", "--policy", "best"], "--policy has 'best'"),
        (["report", "none.npz", "--out", "load.txt"], "--out is 'load.txt'; its name must end in one of .png, "),
        (["simulate", "--routing", "none.npz"], "an .npz file of recorded choices, and there is no such file"),
    ],
)
def test_wrong_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eplb", *options]) == 2
    assert message in capsys.readouterr().err


def test_more_than_fits_in_memory_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eplb", "simulate", "--steps", "2147483647"]) == 1
    assert "this machine's memory does not suffice, ask for less at a time: Unable to" in capsys.readouterr().err

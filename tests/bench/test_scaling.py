"""`moe-ep bench scaling` and `moe-ep plot` as a user calls them."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from moe_ep.bench import scaling_tables
from moe_ep.bench.geometries import Geometry, of_model
from moe_ep.bench.results import append_line, read_lines
from moe_ep.bench.timing import Ceilings
from moe_ep.checkpoint import model_spec
from moe_ep.errors import ConfigError
from moe_ep.launch.cli import gang_options, scaling_config
from moe_ep.launch.cli.main import main
from moe_ep.launch.cli.scaling_config import ScalingConfig
from moe_ep.launch.gangs import progress
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.launch.workers import scaling_worker
from moe_ep.launch.workers.scaling_worker import Clock, Row, Setting

ROOT = Path(__file__).parents[2]
SMALL = ["--decode-tokens", "16", "--prefill-tokens", "none", "--chain", "2", "--repeats", "3", "--device", "cpu"]


def test_the_same_rows_from_every_launcher_and_their_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "local.jsonl"
    options = "--launcher local --ep-size 2 --routing uniform,zipf:2 --eplb off,on --backend"
    command = ["bench", "scaling", *options.split(), "all_to_all,batched_all_to_all", *SMALL, "--json", str(path)]
    assert main(command) == 0, capsys.readouterr().err
    rows = read_lines(path)
    routings = ("uniform", "zipf:2")
    found = {(row["ep_size"], row["backend"], row["routing"], row["eplb"]): row for row in rows}
    # As they come: what variants are compared with first.
    assert list(found)[:2] == [(1, "no_ep", "uniform", "off"), (2, "all_to_all", "uniform", "off")]
    assert len(found) == len(rows) and sorted(found) == sorted(
        [
            *((1, "no_ep", routing, "off") for routing in routings),
            *itertools.product([2], ["all_to_all", "batched_all_to_all"], routings, ["off", "on"]),
        ]
    )
    for (size, backend, routing, eplb), row in found.items():
        if (routing, eplb) == ("zipf:2", "on"):
            assert row["balancedness"] > found[size, backend, routing, "off"]["balancedness"]
    assert {row["efficiency"] for row in rows if row["ep_size"] == 1} == {1.0}
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(16 * row["ep_size"] / row["us"] * 1e6, rel=1e-2)
        assert sum(row["rows_per_rank"]) == pytest.approx(16 * row["ep_size"] * 4)
        assert (row["bytes_sent"] > 0) == (row["ep_size"] > 1)
        assert row["logical_gb_per_s"] >= row["wire_gb_per_s"]
        assert (row["workers"], row["launcher"]) == (2, "local")
    about, headings, *lines = capsys.readouterr().out.splitlines()
    assert about.startswith("geometry small, scaling weak, wire activations, T tokens a rank, ")
    assert headings.split()[:4] == ["EP", "phase", "T", "backend"] and len(lines) == len(rows)

    under_torchrun = tmp_path / "torchrun.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "scripts/bench_ep_scaling.py"]
    command += [*SMALL, "--scaling", "weak,strong", "--json", str(under_torchrun)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    others = read_lines(under_torchrun)
    assert [(row["ep_size"], row["scaling"], row["tokens_per_rank"]) for row in others] == [
        (1, "weak", 16), (2, "weak", 16), (1, "strong", 16), (2, "strong", 8)
    ]  # fmt: skip
    assert all(row["launcher"] == "torchrun" for row in others) and others[0]["us"] == others[2]["us"]
    assert all(other.keys() == rows[0].keys() for other in others)

    plots = tmp_path / "plots"
    assert main(["plot", str(path), "--out", str(plots)]) == 0
    pictures = [plots / f"small-{kind}.png" for kind in ("scaling", "stages", "latency", "load")]
    tables = plots / "tables.md"
    assert capsys.readouterr().out.split() == list(map(str, [*pictures, tables]))
    titles = re.findall("^## (.*)$", tables.read_text(), re.MULTILINE)
    *summaries, own = re.split("^## .*\n", tables.read_text(), flags=re.MULTILINE)[1:]
    assert titles == ["Weak scaling", "Stages at the largest EP size", "Routing and balancing", "Backends", "small"]
    weak, stages, balancing, backends = ([row.split(" | ") for row in text.split("\n")[3:-2]] for text in summaries)
    assert [line[1] for line in weak] == ["EP 1, us", "EP 2, us", "efficiency", "floor/time"]
    assert [line[:3] for line in stages] == [["| small", "decode", "16"]]
    assert sorted(line[3] for line in balancing) == ["uniform", "uniform", "zipf:2", "zipf:2"]
    assert [line[2] for line in backends] == ["all_to_all", "batched_all_to_all"]
    headings, _, *lines = own.strip().splitlines()
    assert headings.startswith("| EP | phase | T | backend | ") and "wire" not in headings
    assert [line.split(" | ")[0] for line in lines] == [f"| {row['ep_size']}" for row in rows]
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_prefill_takes_no_more_repeats_than_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    options = "--launcher local --ep-size 1 --decode-tokens none --prefill-tokens 16 --chain 1 --repeats 2 --device cpu"
    assert main(["bench", "scaling", *options.split(), "--json", str(path)]) == 0, capsys.readouterr().err
    assert [row["repeats"] for row in read_lines(path)] == [2]


class Measured:
    """In place of a row's measuring: says what was asked."""

    def __init__(self) -> None:
        self.settings: list[Setting] = []

    def __call__(self, geometry: Geometry, setting: Setting, ep_size: int, *others: object) -> dict[str, object]:
        self.settings.append(setting)
        rates = {"tokens_per_s_per_gpu": 1.0, "us": 1.0, "stages_us": {}, "tokens_per_rank": setting.num_tokens}
        named = setting._asdict() | {"routing": Path(setting.routing).name, "asked_backend": setting.backend}
        return named | {"balancedness": 1.0} | rates


def run_here(
    monkeypatch: pytest.MonkeyPatch, measured: Measured, before: Sequence[Row] = (), **options: object
) -> tuple[list[Row], list[Row]]:
    """The rows that were handed over as they came, and those at the end."""
    ceilings = Ceilings(memory_bytes_per_s=1e9, flops_per_s=1e9, link_bytes_per_s=None)
    monkeypatch.setattr(scaling_worker, "measure_ceilings", lambda *_: ceilings)
    monkeypatch.setattr(scaling_worker.ScalingBench, "measure", staticmethod(measured))
    given = {"ep_sizes": (1, 2), "decode_tokens": (1, 8), "prefill_tokens": (64,), **options}
    rank_env = RankEnv(rank=0, world_size=1, local_rank=0, local_world_size=1, source="none", device="cpu")
    monkeypatch.setattr(scaling_worker, "group_of", lambda *_: None)
    came: list[Row] = []
    progress.set_receiver(came.append)
    try:
        rows = scaling_worker.run_scaling(rank_env, ScalingConfig(**given), "here", time.time(), before)  # type: ignore[arg-type]
    finally:
        progress.set_receiver(None)
    assert rows is not None
    return came, rows


def test_variants_are_measured_where_asked_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured()
    came, rows = run_here(
        monkeypatch, measured, scaling=("weak", "strong"), routing=("uniform", "zipf:1"), eplb=("off", "on"),
        variant_tokens=(8,),
    )  # fmt: skip
    # What variants are compared with comes first, at every EP size.
    assert len(measured.settings) == (3 + 3) + 1 + (3 + 2)
    assert {(s.routing, s.eplb) for s in measured.settings[:6]} == {("uniform", "off")}
    assert sorted(map(str, came)) == sorted(map(str, rows))
    of_two = [row for row in rows if row["ep_size"] == 2]
    assert [(r["scaling"], r["asked_tokens"], r["num_tokens"]) for r in of_two if r["scaling"] == "strong"] == [
        ("strong", 8, 4), ("strong", 64, 32)
    ]  # fmt: skip
    variants = [(r["routing"], r["eplb"]) for r in of_two if r["asked_tokens"] == 8 and r["scaling"] == "weak"]
    assert sorted(variants) == sorted(itertools.product(("uniform", "zipf:1"), ("off", "on")))
    assert {r["asked_tokens"] for r in rows if r["routing"] != "uniform"} == {8}


class LeavesACycle(Measured):
    """A row whose layers only the garbage collector ends, as a layer that is part of a cycle."""

    alive: ClassVar[list[weakref.ref[LeavesACycle]]] = []

    def __call__(self, *asked: Any) -> dict[str, object]:
        assert not any(layers() for layers in self.alive)
        layers = LeavesACycle()
        layers.itself = layers  # type: ignore[attr-defined]
        self.alive.append(weakref.ref(layers))
        return super().__call__(*asked)


def test_nothing_of_a_row_is_left_when_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows = run_here(monkeypatch, LeavesACycle())
    assert len(LeavesACycle.alive) == len(rows) == 6


def test_a_run_goes_on_where_another_ended(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"scaling": ("weak", "strong"), "routing": ("uniform", "zipf:1"), "commit": "abc"}
    _, wanted = run_here(monkeypatch, whole := Measured(), **options)
    before, rest = wanted[:7], Measured()
    others = [before[0] | {"commit": "another"}, before[1] | {"gpu": "another"}]
    came, rows = run_here(monkeypatch, rest, [*others, *before[2:]], **options)
    assert rows == wanted
    # What strong scaling has in common with weak was measured before.
    assert len(rest.settings) == len(whole.settings) - 5
    assert len(came) == len(wanted) - 5 and all(row not in before[2:] for row in came)
    for commit in ("abc-dirty", "unknown"):  # may be of other code
        before = [row | {"commit": commit} for row in wanted]
        came, _ = run_here(monkeypatch, Measured(), before, **options | {"commit": commit})
        assert len(came) == len(wanted) and f"anew: the commit is {commit}" in caplog.text


def test_time_may_be_short(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert run_here(monkeypatch, Measured(), seconds=1e-9) == ([], [])
    assert "0 of 6 rows were measured" in caplog.text
    clock = Clock(1000, started=time.time() - 400)
    for took_s, is_over in ((290, False), (310, True)):  # the next may take twice as long
        clock.note("decode", took_s)
        assert clock.is_over("decode") == is_over
    assert clock.is_over("prefill") and clock.limit_s() == 30 + 5 * 310
    assert Clock(10, started=time.time()).limit_s() == Clock(None, started=time.time()).limit_s() == 300


def test_routing_of_another_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "seen.npz"
    np.savez(path, english=np.array([[[0, 1, 2, 3], [4, 5, 6, 15]]], dtype=np.uint8))
    options = {"geometry": ("small", "mixtral-8x7b"), "ep_sizes": (1,), "decode_tokens": (1,), "prefill_tokens": ()}
    _, rows = run_here(monkeypatch, Measured(), routing=("uniform", str(path)), **options)
    assert [(r["geometry"], r["routing"]) for r in rows] == [
        ("small", "uniform"), ("small", "seen.npz"), ("mixtral-8x7b", "uniform")
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="the layer takes top-2 of 8"):
        run_here(monkeypatch, Measured(), routing=(str(path),), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--geometry", "gpt-5"], "--geometry is 'gpt-5'; it must be one of deepseek-v3"),
        (["--ep-sizes", "3", "--ep-size", "4", "--launcher", "local"], "--ep-sizes has 3 and there are 4 workers"),
        (["--decode-tokens", "none", "--prefill-tokens", "none"], "are none; pass numbers"),
        (["--decode-tokens", "0"], "--decode-tokens is '0'; it must be whole numbers of at least 1"),
        (["--seconds", "soon"], "--seconds is 'soon'; it must be a number of seconds above 0"),
        (["--routing", "zipf:1,uniform,zipf:1"], "--routing has zipf:1 twice"),
        (["--ep-sizes", "1,2,2"], "--ep-sizes has 2 twice"),
        (["--variant-tokens", "7"], "--variant-tokens has 7, which is neither in --decode-tokens nor"),
        (["--resume"], "--resume was given without --json"),
        (["--backend", "auto,nvshmem_low_latency"], "--backend is 'nvshmem_low_latency' and the workers run on CPUs"),
        (["--backend", "no_ep"], "--backend is 'no_ep', which moves nothing, and 4 workers share the experts"),
        (["--routing", "zipf"], "--routing is 'zipf'; it must be uniform, zipf:S"),
        (["--scaling", "strong", "--decode-tokens", "6", "--launcher", "local"], "6 tokens do not divide over 4 ranks"),
        (
            ["--scaling", "strong", "--decode-tokens", "2", "--prefill-tokens", "none", "--launcher", "local"],
            "--scaling is strong and 4 ranks share at most 2 tokens; pass at least",
        ),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang_options, "make_gang", None)
    assert main(["bench", "scaling", "--device", "cpu", *options]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(("sizes", "group_size"), [((7168, 2048), 128), ((2880, 2880), 64), ((96, 32), 32)])
def test_weights_of_a_checkpoint_have_the_largest_groups_that_fit(sizes: tuple[int, int], group_size: int) -> None:
    config = {
        "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2,
        "norm_topk_prob": True, "rms_norm_eps": 1e-6, "vocab_size": 100, "hidden_act": "silu",
    }  # fmt: skip
    shape = dict(zip(("hidden_size", "moe_intermediate_size"), sizes, strict=True))
    assert of_model(model_spec(config | shape), "m").weights.group_size == group_size
    with pytest.raises(ConfigError, match="hidden size 96 and intermediate size 80"):
        of_model(model_spec(config | {"hidden_size": 96, "moe_intermediate_size": 80}), "m")


@pytest.mark.parametrize(
    "key, value",
    [
        ("stages_us", {"route": "slow"}),
        ("rows_per_rank", ["many"]),
        ("geometry", ["deepseek-v3"]),
        ("phase", 1),
        ("us", float("inf")),
        ("experts_floor_us", None),
        ("link_gb_per_s", "300"),
    ],
)
def test_a_row_of_other_types(tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: object) -> None:
    results = Path(__file__).parents[2] / "docs/benchmarks/scaling/scaling_2xh200.jsonl"
    row = json.loads(results.read_text().splitlines()[0])
    assert row["ep_size"] == 1
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row | {key: value}) + "\n")
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 2
    assert f"row 1 has no {key}; give a file" in capsys.readouterr().err


def test_floors_too_small_to_be_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Path(__file__).parents[2] / "docs/benchmarks/scaling/scaling_2xh200.jsonl"
    row = next(row for row in read_lines(results) if row["ep_size"] == 2 and row["scaling"] == "weak")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row | {"experts_floor_us": 0.0, "link_floor_us": 0.0}) + "\n")
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    _, _, text = (tmp_path / "tables.md").read_text().partition("## Stages at the largest EP size\n\n")
    headings, _, cells = ([cell.strip() for cell in line.split("|")] for line in text.splitlines()[:3])
    assert dict(zip(headings, cells, strict=True))["us / floors"] == "-"


def test_rows_of_other_settings_are_told(tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "docs/benchmarks/scaling/scaling_2xh200.jsonl"
    row, path = next(iter(read_lines(results))), tmp_path / "rows.jsonl"
    for settings in ({"input_dtype": "int8"}, {"input_dtype": "none"}, {"input_dtype": "none"}):
        append_line(path, row | settings)
    rows, told = scaling_tables.read_scaling(path)
    assert [row["input_dtype"] for row in rows] == ["none"]
    assert "2 runs" in told and "input_dtype int8" in told


def test_tables_show_geometries_that_were_measured_otherwise(tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "docs/benchmarks/scaling/scaling_2xh200.jsonl"
    measured, _ = scaling_tables.read_scaling(results)
    kind = {"scaling": "weak", "routing": "uniform", "eplb": "off", "wire": "activations"}
    rows = [row for row in measured if kind.items() <= {key: row[key] for key in kind}.items()]
    name = rows[0]["geometry"]
    # Fewer rows of another model, at a larger EP size and with other rows on the wire.
    others = [
        row | {"geometry": "other", "ep_size": 4, "wire": "int8"}
        for row in rows if row["ep_size"] == 2 and row["geometry"] == name
    ][:1]  # fmt: skip
    for make, models in (
        (scaling_tables.weak, {f"{name}, wire activations", "other, wire int8"}),
        (scaling_tables.stages, {f"{name}, wire activations, EP 2", "other, wire int8, EP 4"}),
    ):
        shown = {line.split("|")[1].strip() for line in make(rows + others).splitlines()[2:]}
        assert models <= shown
        assert f"| {name} |" in make(rows)


def test_a_file_without_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps({"us": 1}) + "\n")
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 2
    assert "other rows than those of a scaling benchmark: row 1 has no geometry" in capsys.readouterr().err
    path.write_text("")
    assert main(["plot", str(path), "--out", str(tmp_path)]) == 2
    assert "it holds no rows; give a file" in capsys.readouterr().err


P = 2**31 - 1  # a prime


@pytest.mark.parametrize(("number", "sizes"), [(1, (1,)), (12, (1, 2, 3, 4, 6, 12)), (49, (1, 7, 49)), (P, (1, P))])
def test_every_ep_size_that_divides_the_workers(number: int, sizes: tuple[int, ...]) -> None:
    assert scaling_config.divisors(number) == sizes

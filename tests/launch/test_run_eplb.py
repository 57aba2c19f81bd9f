"""moe-ep run --eplb for real: experts move, the load evens out, and every layer is verified afterwards."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moe_ep
from moe_ep.eplb.placement_file import PlacementFile, content_checksum
from moe_ep.eplb.trace import RoutingTrace
from moe_ep.errors import EplbError
from moe_ep.launch.cli.main import main
from moe_ep.observability.trace import PREFIX
from tests.checkpoint.checkpoints import make_checkpoint, qwen3_config
from tests.launch.jobs import without_waits
from tests.observability.test_trace import read_trace

E, L, STEPS, T = 8, 2, 6, 48
LOCAL = f"--device cpu --launcher local --ep-size 2 --steps {STEPS} --tokens-per-rank {T}".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, qwen3_config(num_experts=E, num_hidden_layers=L))
    return folder


def run(capsys: pytest.CaptureFixture[str], model: Path, file: Path, *more: str) -> tuple[str, list[dict[str, Any]]]:
    code = main(["run", "--model", str(model), "--json", str(file), *LOCAL, *more])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out, [json.loads(line) for line in file.read_text().splitlines()]


def test_experts_move_and_everything_is_verified(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace_file, placement_file = tmp_path / "trace.safetensors", tmp_path / "placement.json"
    outputs = ["--record-routing", str(trace_file), "--record-routed-weights", "--save-placement", str(placement_file)]
    outputs += ["--trace", str(tmp_path / "ranges")]
    text, lines = run(capsys, model, tmp_path / "a.jsonl", "--eplb", "--routing", "zipf:1.5", *outputs)
    *steps, summary = lines
    assert summary["verify"]["passed"] is True
    eplb, phases = summary["eplb"], summary["eplb"]["phases"]
    assert eplb["num_redundant_experts"] == 2 and eplb["plans_made"] == 1
    assert eplb["experts_moved"] > 0 and eplb["bytes_moved"] > 0
    assert 1 <= eplb["layers_committed"] <= L  # a layer that gains nothing is left alone
    assert phases["before"]["steps"] == phases["after"]["steps"] == STEPS
    assert phases["after"]["balancedness"] > phases["before"]["balancedness"] + 0.05
    assert [line["phase"] for line in steps[:: len({line["layer"] for line in steps})]] == [
        phase for phase, found in phases.items() for _ in range(found["steps"])
    ]
    said = ("placement: experts at the end", "others in each layer", "EPLB: policy incremental, 2 redundant experts")
    for word in (*said, "before  balancedness", "after   balancedness"):
        assert word in text

    for rank in range(2):
        ranges = Counter(event["name"] for event in read_trace(tmp_path / "ranges" / f"rank-{rank:03}.json.gz"))
        assert ranges[PREFIX + "eplb_plan"] == 1
        assert ranges[PREFIX + "eplb_transfer"] == ranges[PREFIX + "eplb_commit"] == eplb["layers_committed"]

    trace = RoutingTrace.load(trace_file)
    num_steps = sum(found["steps"] for found in phases.values())
    weighted = moe_ep.read_routed_experts(trace_file, with_weights=True)
    routing = {prompt: ids for prompt, (ids, _) in weighted.items()}
    assert all(weights.shape == ids.shape for ids, weights in weighted.values())
    assert all(torch.allclose(weights.sum(dim=-1), torch.ones(())) for _, weights in weighted.values())
    assert {ids.shape for ids in routing.values()} == {(T, L, 2)} and list(routing) == list(range(2 * num_steps))
    of_one = (trace.step == 3) & (trace.rank == 1)
    for layer in range(L):
        assert np.array_equal(routing[2 * 3 + 1][:, layer], trace.ids[of_one & (trace.layer == layer)])
    assert trace.ids.shape == (num_steps * L * 2 * T, 2) and trace.num_experts == E
    counts = trace.counts()
    assert counts.shape == (num_steps, L, E)
    tokens_per_rank = np.array([line["tokens_per_rank"] for line in steps]).reshape(num_steps, L, 2)
    assert (counts.sum(axis=2) == tokens_per_rank.sum(axis=2)).all()

    # The same choices again, from a placement that was planned for them without a gang.
    planned = tmp_path / "planned.json"
    sizes = ["--ep-size", "2", "--redundant", "4"]
    assert main(["eplb", "plan", str(trace_file), "--model", str(model), *sizes, "--out", str(planned)]) == 0
    start = f"moe-ep run --model {model} --ep-size 2 --eplb --load-placement {planned}"
    assert f"{planned}: begin with {start}\n" in capsys.readouterr().out
    _, lines = run(
        capsys, model, tmp_path / "b.jsonl",
        *["--eplb", "--routing", f"recorded:{trace_file}", "--load-placement", str(planned)],
        "--eplb-synchronous",
    )  # fmt: skip
    again = lines[-1]
    assert again["verify"]["passed"] is True
    assert again["eplb"]["num_redundant_experts"] == 4
    assert again["eplb"]["phases"]["before"]["balancedness"] > phases["before"]["balancedness"] + 0.05
    recorded = [line["tokens_per_rank"] for line in lines[:-1] if line["step"] == 0]
    assert [sum(loads) for loads in recorded] == [2 * T * 2] * L

    # What brought the layers there is not said to be of the run, which moves nothing where it is not told to.
    text, lines = run(
        capsys, model, tmp_path / "c.jsonl",
        *["--eplb", "--load-placement", str(planned), "--eplb-threshold", "0", "--steps", "2"],
    )  # fmt: skip
    kept = lines[-1]["eplb"]
    assert (kept["plans_made"], kept["plans_skipped"], kept["experts_moved"], kept["layers_changed"]) == (0, 1, 0, 0)
    assert "plans made 0, skipped 1" in text and "moved 0 experts (0.0 MiB)" in text

    saved = PlacementFile.load(placement_file)
    for rank, place in enumerate(summary["placement"]):
        slots = np.array(saved.physical_to_logical).reshape(L, 2, -1)[:, rank]
        by_layer = [sorted(set(layer)) for layer in slots.tolist()]
        same = by_layer[0] if all(layer == by_layer[0] for layer in by_layer) else None
        assert place["experts"] == same
        assert place["experts_by_layer"] == (None if same else by_layer)
    with pytest.raises(EplbError, match=r"is for 2 ranks, 2 layers and 10 slots, and there are 4 ranks"):
        saved.check(placement_file, model=saved.model, ep_size=4, shape=(L, 12))
    with pytest.raises(EplbError, match="is of another model"):
        saved.check(placement_file, model="0" * 64, ep_size=2, shape=(L, 10))


def test_a_trace_of_another_model_ends_in_one_message(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = np.zeros((4, 2), dtype=np.int32)
    zeros = np.zeros(4, dtype=np.int32)
    trace = RoutingTrace(ids=ids, layer=zeros, step=zeros, rank=zeros, num_experts=E, model="another")
    trace.save(tmp_path / "trace.npz")
    assert main(["run", "--model", str(model), *LOCAL, "--routing", f"recorded:{tmp_path / 'trace.npz'}"]) == 2
    error = without_waits(capsys.readouterr().err)
    assert "the routing trace is of 'another' with 8 experts and the model is 'qwen3_moe " in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--routing zipf",
            "--routing is 'zipf'; it must be uniform, zipf:S with a number such as zipf:0.8, or rec",
        ),
        ("--routing recorded:/none", "--routing is 'recorded:/none'; it must name a file, and there is no such file"),
        ("--num-redundant-experts 4", "--num-redundant-experts is '4' without --eplb; add --eplb or leave it out"),
        (
            "--eplb --num-redundant-experts -1",
            "--num-redundant-experts is '-1'; it must be a whole number of at least",
        ),
        ("--eplb --eplb-threshold 2", "--eplb-threshold is '2'; it must be a number from 0 to 1"),
        ("--eplb --eplb-policy best", "--eplb-policy is 'best'; it must be one of incremental, deepseek"),
        (
            "--eplb --load-placement /none",
            "--load-placement is '/none'; it must name a file, and there is no such file",
        ),
        ("--elastic --record-routing taken", "--record-routing is given with --elastic, "),
    ],
)
def test_options_that_cannot_be(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments.split()]) == 2
    assert capsys.readouterr().err.startswith(f"moe-ep run: {message}")


@pytest.mark.parametrize(
    ("is_one", "message"), [(True, "is of another model (checksum m, "), (False, "cannot be read: ")]
)
def test_placements_that_this_model_cannot_begin_with(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_one: bool, message: str
) -> None:
    file = tmp_path / "placement.json"
    file.write_text("")
    if is_one:
        PlacementFile(model="m", ep_size=2, num_experts=E, physical_to_logical=np.arange(E)[None]).save(file)
    assert main(["run", "--model", str(model), *LOCAL, "--eplb", "--load-placement", str(file)]) == 2
    error = without_waits(capsys.readouterr().err)
    assert error.startswith(f"moe-ep run: the placement {file} {message}") and error.count("\n") == 1


def test_redundancy_that_does_not_divide(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--model", str(model), *LOCAL, "--eplb", "--num-redundant-experts", "3"]) == 2
    error = without_waits(capsys.readouterr().err)
    assert "num_experts (8) + redundant (3) must be a multiple of ep_size (2); pass num_redundant_experts=4" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-30], "cannot be read"),
        (lambda text: text.replace('"ep_size": 2', '"ep_size": 4'), "was changed or cut off after it was written"),
        (lambda text: "[]", "is not a placement of version 1"),
        (lambda text: "[" * 100_000, "cannot be read: it nests too many lists or objects"),
    ],
)
def test_placement_files_that_are_not_what_was_written(tmp_path: Path, change: Any, message: str) -> None:
    placement = PlacementFile(model="m", ep_size=2, num_experts=3, physical_to_logical=np.array([[0, 1, 2, 0]]))
    placement.save(tmp_path / "a.json")
    loaded = PlacementFile.load(tmp_path / "a.json")
    assert loaded.physical_to_logical.tolist() == [[0, 1, 2, 0]]
    (tmp_path / "a.json").write_text(change((tmp_path / "a.json").read_text()))
    with pytest.raises(EplbError, match=message):
        PlacementFile.load(tmp_path / "a.json")


def test_what_is_no_placement_is_not_written(tmp_path: Path) -> None:
    slots = np.array([[0, 1, 2, 0]])
    for change, message in (
        ({"model": None}, "model is None; it must be a checksum"),
        ({"num_experts": 5}, "num_experts is 5; it must be from 1 to the 4 slots of a layer"),
        ({"ep_size": 3}, "ep_size is 3; it must divide the 4 slots of a layer"),
        ({"ep_size": 0}, "ep_size is 0; it must be at least 1"),
        ({"ep_size": 2.0}, "ep_size is 2.0; it must be a whole number"),
        ({"physical_to_logical": [[0, 1, 1, 0]]}, "physical_to_logical has no slot for expert 2 in layer 0"),
        ({"physical_to_logical": [[0, 1, 2], [0]]}, "physical_to_logical must be a list of whole numbers for each"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            PlacementFile(**{"model": "m", "ep_size": 2, "num_experts": 3, "physical_to_logical": slots, **change})
    given = {"ep_size": np.int64(2), "num_experts": np.int32(3), "physical_to_logical": torch.tensor(slots)}
    PlacementFile(model="m", **given).save(tmp_path / "a.json")
    assert np.array_equal(PlacementFile.load(tmp_path / "a.json").physical_to_logical, slots)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", None, "model is None; it must be of type str"),
        ("ep_size", "2", "ep_size is '2'; it must be of type int"),
        ("num_experts", 10**30, f"num_experts is {10**30}; it must be from 1 to the 4 slots"),
        ("physical_to_logical", 3, "physical_to_logical must be a list of whole numbers for each layer"),
        ("physical_to_logical", [[0.5, 1, 2, 0]], "physical_to_logical must be a list of whole numbers"),
        ("physical_to_logical", [[0, 1, 1, 0]], "has no slot for expert 2 in layer 0"),
    ],
)
def test_placement_files_that_somebody_else_wrote(tmp_path: Path, name: str, value: Any, message: str) -> None:
    file = tmp_path / "a.json"
    placement = PlacementFile(model="m", ep_size=2, num_experts=3, physical_to_logical=np.array([[0, 1, 2, 0]]))
    placement.save(file)
    content = json.loads(file.read_text()) | {name: value}
    del content["checksum"]
    file.write_text(json.dumps(content | {"checksum": content_checksum(content)}))
    with pytest.raises(EplbError, match=f"does not hold one: .*{message}"):
        PlacementFile.load(file)

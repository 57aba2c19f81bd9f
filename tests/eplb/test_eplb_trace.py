"""Routing traces in files, replica rules, and simulations on traces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_ep.eplb import eplb_map_to_physical_and_record
from moe_ep.eplb.simulate import LINEAR, PER_BATCH, RULES, Layout, Scene, compare, measure, place, zipf_trace
from moe_ep.eplb.trace import RoutingTrace, from_choices

ROWS = ("ids", "layer", "step", "rank")


def small_trace(**changes) -> RoutingTrace:
    values = {
        "ids": np.array([[0, 1], [2, -1], [1, 0], [1, 2]]),
        "layer": np.array([0, 0, 1, 1]),
        "step": np.array([0, 1, 0, 1]),
        "rank": np.array([0, 1, 0, 1]),
        "num_experts": 3,
        "model": "tiny",
    }
    return RoutingTrace(**(values | changes))


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    trace = small_trace()
    trace.save(tmp_path / "trace.npz")
    again = RoutingTrace.load(tmp_path / "trace.npz")
    for name in ROWS:
        assert np.array_equal(getattr(again, name), getattr(trace, name))
    assert (again.num_experts, again.model, again.num_layers, again.num_steps) == (3, "tiny", 2, 2)


def test_counts_by_step_and_layer() -> None:
    assert small_trace().counts().tolist() == [[[1, 1, 0], [1, 1, 0]], [[0, 0, 1], [0, 1, 1]]]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.uint64])
def test_arrays_of_unsigned_numbers(dtype: type) -> None:
    trace = zipf_trace(num_layers=2, num_experts=8, top_k=2, exponent=1, num_steps=4, num_tokens=16, seed=0)
    values = {name: getattr(trace, name).astype(dtype) for name in ROWS}
    unsigned = RoutingTrace(**values, num_experts=8, model=trace.model)
    assert np.array_equal(unsigned.counts(), trace.counts())
    rows, wanted = (
        [row for row, _ in compare(one, Scene(ep_size=4), ["incremental"], ["levelled", PER_BATCH])]
        for one in (unsigned, trace)
    )
    assert rows == wanted


def test_a_trace_of_another_model_is_refused() -> None:
    trace = small_trace()
    trace.check_model("tiny", 3, trace.num_layers)
    for model, num_experts in (("large", 3), ("tiny", 4)):
        with pytest.raises(ValueError, match=f"trace is of 'tiny' with 3 experts and the model is '{model}'"):
            trace.check_model(model, num_experts, trace.num_layers)
    with pytest.raises(ValueError, match=f"trace has {trace.num_layers} layers and the model 9; record a trace of it"):
        trace.check_model("tiny", 3, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.array([0, 1])}, r"ids has shape \(2,\); ids must be \(N, top_k\)"),
        ({"layer": np.zeros(3, int)}, r"layer has shape \(3,\)"),
        ({"step": np.zeros(4)}, "step has dtype float64; it must hold integers"),
        ({"ids": np.full((4, 2), 3)}, r"ids holds 3 to 3; its numbers must be at least -1 and below num_experts \(3\)"),
        ({"rank": np.full(4, -1)}, "rank holds -1 to -1; its numbers must be at least 0"),
        ({"layer": [0] * 4}, "layer is a list; it must be an array of numpy"),
        ({"num_experts": 3.0}, "num_experts is 3.0; it must be a whole number"),
    ],
)
def test_arrays_that_do_not_fit(change: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        small_trace(**change)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    np.savez(tmp_path / "plain.npz", english=np.zeros((1, 2, 3), np.uint8))
    with pytest.raises(ValueError, match=r"plain.npz is not a routing trace: it lacks ids, layer, step"):
        RoutingTrace.load(tmp_path / "plain.npz")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(ValueError, match=r"text.npz cannot be read as an .npz file"):
        RoutingTrace.load(tmp_path / "text.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez_compressed(tmp_path / "damaged.npz", ids=np.arange(9999))
    damaged = bytearray((tmp_path / "damaged.npz").read_bytes())
    damaged[100:140] = b"\xff" * 40
    (tmp_path / "damaged.npz").write_bytes(damaged)
    for name in ("array.npy", "damaged.npz"):
        with pytest.raises(ValueError, match=f"{name} cannot be read as an .npz file"):
            RoutingTrace.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        RoutingTrace.load(tmp_path / "none.npz")


def test_plain_choices_are_cut_into_steps() -> None:
    choices = np.arange(2 * 5 * 2).reshape(2, 5, 2) % 4
    trace = from_choices(choices, 2, 2, num_experts=4, model="plain")
    assert trace.step.tolist() == [0, 0, 1, 1] * 2
    assert trace.rank.tolist() == [0, 1] * 4
    assert np.array_equal(trace.ids, choices[:, :4].reshape(8, 2))
    unsigned = from_choices(choices.astype(np.uint64), 2, 2, num_experts=4, model="plain")
    assert np.array_equal(unsigned.counts(), trace.counts())
    with pytest.raises(ValueError, match="tokens_per_step is 3"):
        from_choices(choices, 3, 2, num_experts=4, model="plain")
    for wrong, step, num_ranks, message in (
        (choices, 0, 2, "tokens_per_step is 0; it must be at least 1"),
        (choices, 2, 0, "num_ranks is 0; it must be at least 1"),
        (choices[0], 2, 2, r"choices is a ndarray \[5, 2\]; it must be an array \[layer, token, top_k\]"),
        (choices + 2**32, 2, 2, r"ids holds 4294967296 to 4294967299; its numbers must be .* below num_experts \(4\)"),
        (choices + 0.7, 2, 2, "ids has dtype float64; it must hold integers"),
    ):
        with pytest.raises(ValueError, match=message):
            from_choices(wrong, step, num_ranks, num_experts=4, model="plain")


@pytest.mark.parametrize("name", list(RULES))
def test_rules_choose_replicas_of_their_expert(name: str) -> None:
    rng = np.random.default_rng(0)
    slots = np.concatenate([np.arange(8), rng.integers(0, 8, 4)])
    layout = Layout.of(slots, 8, 4)
    ids = rng.integers(-1, 8, (40, 3))
    rank = np.repeat(np.arange(4), 10)
    chosen = RULES[name]()(ids, rank, layout)
    assert np.array_equal(np.where(chosen >= 0, slots[chosen], -1), ids)


def test_tokens_keep_to_their_rank_while_its_share_lasts() -> None:
    layout = Layout.of(np.array([1, 0, 2, 0]), 3, 2)
    rank = np.repeat([0, 1], 4)
    ids = np.array([0, 0, 0, 1, 0, 0, 0, 2])[:, None]
    assert RULES["known-counts"]()(ids, rank, layout)[:, 0].tolist() == [1, 1, 1, 0, 3, 3, 3, 2]


def test_the_rule_that_serves_is_the_one_that_is_simulated() -> None:
    rng = np.random.default_rng(1)
    slots = np.concatenate([np.arange(8), rng.integers(0, 8, 8)])
    layout = Layout.of(slots, 8, 4)
    rank = np.repeat(np.arange(4), [3, 400, 0, 7])
    ids = rng.integers(-1, 8, (rank.size, 3))
    chosen = RULES["levelled"]()(ids, rank, layout)
    for r in range(4):
        load = torch.zeros(16, dtype=torch.int32)
        served = eplb_map_to_physical_and_record(
            torch.from_numpy(ids[rank == r]),
            load,
            torch.from_numpy(layout.table),
            torch.from_numpy(layout.counts),
            ep_rank=r,
            ep_size=4,
        )
        assert np.array_equal(served.numpy(), chosen[rank == r])


def test_simulation_of_skewed_routing() -> None:
    trace = zipf_trace(num_layers=2, num_experts=32, top_k=4, exponent=0.8, num_steps=6, num_tokens=256, seed=0)
    assert (np.diff(np.sort(trace.ids, axis=1), axis=1) > 0).all()
    scene = Scene(ep_size=8, num_redundant=8)
    rows = [row for row, _ in compare(trace, scene, [LINEAR, "incremental"], ["levelled", "hash-rank"], 1_000_000_000)]
    by_name = {(row["policy"], row["rule"]): row for row in rows}
    linear, planned = by_name[LINEAR, "levelled"], by_name["incremental", "levelled"]
    assert linear["experts moved"] == 0 < planned["experts moved"] == planned["GB moved"]
    assert planned["balancedness"] > 0.85 > linear["balancedness"]
    assert planned["balancedness"] > by_name["incremental", "hash-rank"]["balancedness"]
    outcome = measure(trace, scene, place(trace, scene, LINEAR), "levelled")
    assert outcome.loads.shape == (3, 2, 8)
    assert (outcome.loads.sum(axis=2) == 256 * 4).all()


def test_what_is_measured_by_hand() -> None:
    # Two ranks of two experts; the first half of a step's four tokens is rank 0's. The second step is measured.
    choices = np.array([[0], [0], [0], [0], [0], [2], [3], [3]])
    trace = from_choices(choices[None], 4, 2, num_experts=4, model="by hand")
    scene = Scene(ep_size=2)
    outcome = measure(trace, scene, place(trace, scene, LINEAR), "levelled")
    assert outcome.loads.tolist() == [[[1, 3]]] and outcome.slot_loads.tolist() == [[1, 0, 1, 2]]
    assert outcome.active.tolist() == [[[1, 2]]] and outcome.stays == 3 / 4
    assert (outcome.balancedness, outcome.peak, outcome.active_experts) == (2 / 3, 1.5, 2.0)


def test_batches_that_are_balanced_by_their_own_counts() -> None:
    trace = zipf_trace(num_layers=2, num_experts=32, top_k=4, exponent=0.8, num_steps=6, num_tokens=256, seed=0)
    found = {}
    for scene in (Scene(ep_size=8, spare_slots=0), Scene(ep_size=8), Scene(ep_size=8, copy_cost_rows=1e6)):
        slots = place(trace, scene, LINEAR)
        found[scene] = outcome = measure(trace, scene, slots, PER_BATCH)
        assert (outcome.loads.sum(axis=2) == 256 * 4).all() and len(outcome.copies) == 3 * 2
        assert outcome.slot_loads.sum() == outcome.loads.sum()
        assert outcome.slot_loads.shape == (2, 8 * (4 + scene.spare_slots))
    none, two, expensive = found.values()
    plain = measure(trace, Scene(ep_size=8), place(trace, Scene(ep_size=8), LINEAR), "levelled")
    assert np.array_equal(none.loads, plain.loads) and none.active.tolist() == plain.active.tolist()
    assert none.copies_per_layer == expensive.copies_per_layer == 0 < two.copies_per_layer <= 16
    assert two.balancedness > 0.95 > none.balancedness and two.stays >= none.stays


def test_one_replica_of_each_expert_keeps_the_fewest_busy() -> None:
    trace = zipf_trace(num_layers=1, num_experts=64, top_k=4, exponent=0.5, num_steps=8, num_tokens=32, seed=0)
    scene = Scene(ep_size=8, num_redundant=8)
    slots = place(trace, scene, "incremental")
    levelled, one, known = (
        measure(trace, scene, slots, rule).active_experts for rule in ("levelled", "one-replica", "known-active")
    )
    assert known <= one <= 0.95 * levelled


def test_scenes_that_do_not_fit() -> None:
    trace = zipf_trace(num_layers=1, num_experts=8, top_k=2, exponent=0, num_steps=2, num_tokens=4, seed=0)
    with pytest.raises(ValueError, match=r"num_experts \(8\) \+ redundant \(1\) must be a multiple of ep_size \(4\)"):
        place(trace, Scene(ep_size=4, num_redundant=1), LINEAR)
    with pytest.raises(ValueError, match="the trace has 2 steps"):
        place(trace, Scene(ep_size=4, planned_on=0.1), "incremental")
    with pytest.raises(ValueError, match="num_redundant is -1"):
        Scene(ep_size=4, num_redundant=-1)
    with pytest.raises(TypeError, match="planned_on is 'half'"):
        Scene(ep_size=4, planned_on="half")  # type: ignore[arg-type]
    for policies, rules, name in (([LINEAR], ["best"], "rules"), (["best"], ["levelled"], "polic")):
        with pytest.raises(ValueError, match=f"{name}.* 'best'; it must be one of"):
            next(compare(trace, Scene(ep_size=4), policies, rules))

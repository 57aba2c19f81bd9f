"""The model on paper: expectations against drawn choices, and what must hold of any machine."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep.bench.cost_model import Machine, busiest_rank, calibrated, predict, rows_sent, spread
from moe_ep.bench.geometries import preset
from moe_ep.bench.results import append_line, read_lines
from moe_ep.bench.workload import Routing, draw_logits
from moe_ep.checkpoint.spec import RoutingSpec
from moe_ep.launch.cli.main import main
from moe_ep.routing import select_experts

DEEPSEEK = preset("deepseek-v3")


def test_destinations_as_counted_elsewhere() -> None:
    ungrouped = replace(DEEPSEEK, routing=RoutingSpec(renormalize=True))
    assert spread(ungrouped, 8, 8).ranks == pytest.approx(5.29, abs=0.02)
    assert spread(ungrouped, 8, 8).variance == pytest.approx(8 / 8 * 7 / 8 * 248 / 255, rel=0.02)
    assert spread(DEEPSEEK, 8, 4).hosts == pytest.approx(1.97, abs=0.01)
    assert spread(DEEPSEEK, 1, 8).ranks == spread(DEEPSEEK, 1, 8).hosts == 1
    assert spread(preset("mixtral-8x7b"), 8, 8).ranks == 2


def drawn_ids(num_tokens: int) -> torch.Tensor:
    """Choices of DeepSeek-V3's router among random logits, int64 `[T, 8]`."""
    logits = draw_logits(Routing(), num_tokens, 256, 8, seed=0)
    _, ids, _ = select_experts(
        torch.empty(num_tokens, 1), logits, 8, True, True, topk_group=4, num_expert_group=8, scoring_func="sigmoid",
        e_score_correction_bias=torch.zeros(256),
    )  # fmt: skip
    return ids.long()


@pytest.mark.parametrize("tokens", [1, 16])
def test_the_busiest_rank_against_drawn_choices(tokens: int) -> None:
    ids = drawn_ids(200 * 8 * tokens).view(200, -1)
    rows = torch.zeros(200, 8).scatter_add_(1, ids // 32, torch.ones(ids.shape)).amax(dim=1).mean()
    active = torch.zeros(200, 256).scatter_(1, ids, 1.0).view(200, 8, 32).sum(dim=2).amax(dim=1).mean()
    load = busiest_rank(DEEPSEEK, 8, tokens)
    assert load.rows == pytest.approx(float(rows), rel=0.07)
    assert load.active_experts == pytest.approx(float(active), rel=0.04)


@pytest.mark.parametrize(("ep_size", "per_host", "two_level"), [(8, 8, True), (16, 4, True), (16, 4, False)])
def test_rows_sent_against_drawn_choices(ep_size: int, per_host: int, two_level: bool) -> None:
    """Rank 0's tokens: rows over its host's links and over the network, counted token by token."""
    T = 4000
    ids = drawn_ids(T)
    ranks = torch.zeros(T, ep_size, dtype=torch.bool).scatter_(1, ids // (256 // ep_size), True)
    hosts = ranks.view(T, -1, per_host).any(dim=2)
    own_host = ranks[:, 1:per_host].sum()
    abroad = ranks[:, per_host:]
    if two_level:
        # By symmetry this GPU passes on as many rows of its peers abroad as they pass on of its own.
        passed_on = abroad.view(T, -1, per_host)[:, :, 1:].sum() if ep_size > per_host else 0
        expected = float(own_host + passed_on), float(hosts[:, 1:].sum())
    else:
        expected = float(own_host), float(abroad.sum())
    link, network = rows_sent(DEEPSEEK, ep_size, T, per_host, two_level)
    assert link == pytest.approx(expected[0], rel=0.03)
    assert network == pytest.approx(expected[1], rel=0.02)


def test_more_ranks_hold_less_and_faster_links_never_hurt() -> None:
    machine = Machine()
    steps = [predict(DEEPSEEK, size, 128, machine) for size in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    held = [step.weights_bytes for step in steps]
    assert held == sorted(held, reverse=True) and held[0] == 58 * 256 * DEEPSEEK.bytes_per_expert
    assert steps[0].dispatch_us == 0 and steps[3].network_bytes == 0 < steps[4].network_bytes
    for size in (8, 64):
        slow = predict(DEEPSEEK, size, 4096, machine)
        fast = predict(DEEPSEEK, size, 4096, replace(machine, link_bytes_per_s=1e15, network_bytes_per_s=1e15))
        assert fast.step_us < slow.step_us
    assert predict(DEEPSEEK, 64, 4096, machine).bottleneck == "network"
    assert predict(DEEPSEEK, 8, 1, machine).bottleneck == "memory"


def test_a_full_host_needs_no_network_and_tokens_of_all_ranks_count() -> None:
    machine = Machine()
    alone, patient = (predict(DEEPSEEK, 8, 64, replace(machine, network_latency_us=us)) for us in (1.0, 1e6))
    assert alone == patient
    assert alone.tokens_per_s == pytest.approx(8 * 64 / (58 * alone.step_us) * 1e6)


def test_two_levels_send_less_over_the_network_and_fp8_fewer_bytes() -> None:
    machine = Machine()
    flat, levels = (predict(DEEPSEEK, 32, 128, machine, two_level=two_level) for two_level in (False, True))
    assert levels.network_bytes < flat.network_bytes
    fp8 = predict(DEEPSEEK, 32, 128, machine, wire_bytes=1)
    assert fp8.network_bytes / levels.network_bytes == pytest.approx((7168 + 4 * 56) / (2 * 7168))
    assert fp8.combine_us == levels.combine_us


def test_numbers_that_cannot_be_are_refused() -> None:
    for name, value, message in (
        ("ep_size", 1.5, "ep_size is 1.5; it must be a whole number"),
        ("ep_size", 12, "ep_size is 12; it must be at least 1, and beyond a host a multiple of its 8 GPUs"),
        ("ep_size", 2**60, f"ep_size is {2**60}; it must be at most 1000000"),
        ("tokens_per_rank", -1, "tokens_per_rank is -1; it must be at least 0"),
        ("tokens_per_rank", float("nan"), "tokens_per_rank is nan; it must be a whole number"),
        ("wire_bytes", 3, "wire_bytes is 3; it must be 2 for bf16, 4 for f32, or 1 for fp8"),
        ("combine_bytes", 1, "combine_bytes is 1; it must be 2 for bf16, or 4 for f32"),
    ):
        given: dict[str, Any] = {"ep_size": 8, "tokens_per_rank": 1, "machine": Machine(), name: value}
        with pytest.raises((ValueError, TypeError), match=message):
            predict(DEEPSEEK, **given)
    for name, value, message in (
        ("flops_per_s", float("inf"), "flops_per_s is inf; it must be above 0, and finite"),
        ("flops_per_s", "many", "flops_per_s is 'many'; it must be a number"),
        ("gpus_per_host", 1.5, "gpus_per_host is 1.5; it must be a whole number"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            Machine(**{name: value})


def test_replicas_fill_ranks_that_do_not_divide_the_experts() -> None:
    step = predict(DEEPSEEK, 320, 128, Machine())
    assert step.weights_bytes == 58 * DEEPSEEK.bytes_per_expert
    with pytest.raises(ValueError, match="ep_size is 12"):
        predict(DEEPSEEK, 12, 128, Machine())
    with pytest.raises(ValueError, match="link_bytes_per_s is 0"):
        Machine(link_bytes_per_s=0)


def test_many_ranks_take_little_memory() -> None:
    tracemalloc.start()
    try:
        found = spread(DEEPSEEK, 100_000, 8)
        assert tracemalloc.get_traced_memory()[1] < 2**30
    finally:
        tracemalloc.stop()
    # A token's experts are on different ranks, replicas of which are that many.
    assert found.ranks == 8 and found.variance == pytest.approx(8 / 100_000, rel=1e-3)


def rows_of(machine: Machine, wire: str = "activations", cuda: str | None = "13.0") -> list[dict[str, Any]]:
    """Rows as a machine would give them that does just what the model says."""
    return [
        row_of(machine, size, tokens, "activations" if size == 1 else wire, cuda)
        for size in (1, 2, 4)
        for tokens in (1, 8, 128, 4096)
    ]


def row_of(
    machine: Machine, ep_size: int, tokens: int, wire: str = "activations", cuda: str | None = "13.0"
) -> dict[str, Any]:
    given = 2 if cuda else 4  # bytes of activations
    sent = given if wire == "activations" else 1
    step = predict(DEEPSEEK, ep_size, tokens, machine, wire_bytes=sent, combine_bytes=given)
    back = predict(DEEPSEEK, ep_size, tokens, machine, wire_bytes=given)
    stages = {name: getattr(step, f"{name}_us") for name in ("route", "dispatch", "experts", "combine")}
    return {
        "geometry": "deepseek-v3", "ep_size": ep_size, "tokens_per_rank": tokens, "routing": "uniform",
        "scaling": "weak", "phase": "prefill" if tokens > 256 else "decode", "asked_tokens": tokens,
        "asked_backend": "x", "mode": "graph", "tokens_per_s": 1.0, "tokens_per_s_per_gpu": 1.0, "p99_us": step.step_us,
        "floor_over_time": 1.0, "rows_per_rank": [1.0] * ep_size, "balancedness": 1.0,
        "wire": wire, "cuda": cuda, "backend": "x", "eplb": "off", "us": step.step_us, "memory_tb_per_s": 4.0,
        "exposed_communication": 0.5, "experts_floor_us": 1.0, "link_floor_us": 1.0, "link_share": 0.5,
        "active_experts_max": 1.0, "tflop_per_s": 800.0,
        "link_gb_per_s": 300.0 if ep_size > 1 else None, "bytes_sent": step.link_bytes + back.link_bytes,
        # Events between the stages take time of their own.
        "stages_us": {name: 1.1 * us for name, us in stages.items()},
    }  # fmt: skip


MEASURED = Machine(
    memory_bytes_per_s=4e12, flops_per_s=8e14, link_bytes_per_s=3e11, link_latency_us=14.0, network_latency_us=20.0,
    memory_efficiency=0.9, compute_efficiency=0.6, wire_efficiency=0.5, route_us=7.0, experts_latency_us=9.0,
    alone_us=15.0,
)  # fmt: skip


@pytest.mark.parametrize("wire", ["fp8", "int8"])
def test_rows_of_8_bits_are_known_by_their_wire(wire: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, results = rows_of(MEASURED, wire), tmp_path / "measured.jsonl"
    assert vars(calibrated(Machine(), DEEPSEEK, rows)) == pytest.approx(vars(MEASURED))
    for row in rows:
        append_line(results, row)
    assert main(["plan", "--measured", str(results)]) == 0
    assert "0 % off in the median of 12 rows and 0 % at most" in capsys.readouterr().out


@pytest.mark.parametrize("wire", ["activations", "fp8"])
def test_rows_of_cpus_have_f32_activations(wire: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, results = rows_of(MEASURED, wire, cuda=None), tmp_path / "measured.jsonl"
    assert vars(calibrated(Machine(), DEEPSEEK, rows)) == pytest.approx(vars(MEASURED))
    for row in rows:
        append_line(results, row)
    planned, option = tmp_path / "plan.jsonl", "bf16" if wire == "activations" else wire
    options = ["--gpus", "4", "--tokens", "128", "--wire", option, "--json", str(planned)]
    assert main(["plan", "--measured", str(results), *options]) == 0
    said = capsys.readouterr().out
    assert "0 % off in the median of 12 rows and 0 % at most" in said
    assert ("f32 rows" if wire == "activations" else "fp8 rows") in said
    assert read_lines(planned)[0]["us"] == pytest.approx(row_of(MEASURED, 4, 128, wire, cuda=None)["us"])


def test_rates_come_from_measurements() -> None:
    rows = rows_of(MEASURED)
    found = calibrated(Machine(), DEEPSEEK, rows)
    assert vars(found) == pytest.approx(vars(MEASURED))
    alone = [row for row in rows if row["ep_size"] == 1]
    with pytest.raises(ValueError, match="no rows of uniform routing over more than one rank"):
        calibrated(Machine(), DEEPSEEK, alone)
    # A single number of tokens cannot tell bytes from operations.
    few = calibrated(Machine(), DEEPSEEK, [row_of(MEASURED, 4, 8)])
    assert few.memory_efficiency == few.compute_efficiency
    assert predict(DEEPSEEK, 4, 8, few).step_us == pytest.approx(rows[9]["us"])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, planned = tmp_path / "measured.jsonl", tmp_path / "plan.jsonl"
    for row in rows_of(MEASURED):
        append_line(results, row)
    options = ["--gpus", "8,64", "--tokens", "128", "--measured", str(results), "--json", str(planned)]
    assert main(["plan", *options]) == 0
    said = capsys.readouterr().out
    assert "bottleneck" in said
    assert "a predicted step is 0 % off in the median of 12 rows and 0 % at most" in said
    rows = read_lines(planned)
    assert [row["GPUs"] for row in rows] == [8, 64]
    machine = calibrated(Machine(), DEEPSEEK, read_lines(results))
    assert rows[0]["us"] == predict(DEEPSEEK, 8, 128, machine).step_us
    assert main(["plan", "--gpus", "12"]) == 2
    said = "--gpus has 12; beyond a host it must be a multiple of its GPUs (--gpus-per-host 8)"
    assert capsys.readouterr().err == f"moe-ep plan: {said}\n"
    assert main(["plan", "--gpus", "8000000"]) == 2
    assert "--gpus has 8000000; it must be at most 1000000" in capsys.readouterr().err
    assert main(["plan", "--measured", str(tmp_path / "none")]) == 2
    assert "there is no such file" in capsys.readouterr().err
    (tmp_path / "text").write_text("# not rows\n")
    assert main(["plan", "--measured", str(tmp_path / "text")]) == 2
    assert "text, line 1, is not a JSON object" in capsys.readouterr().err
    for row in rows_of(MEASURED):
        append_line(results, row | {"commit": "later", "us": 2 * row["us"]})
    append_line(results, rows_of(MEASURED)[0])
    assert main(["plan", "--measured", str(results), "--gpus", "8"]) == 0
    assert "rows of 2 runs are shown together: commit None" in capsys.readouterr().err

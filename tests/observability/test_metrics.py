"""Metrics as a scraper sees them."""

from __future__ import annotations

import importlib.util
import re
import urllib.request
from typing import Any

import pytest
import torch

from moe_ep.config import FusedMoEParallelConfig
from moe_ep.eplb.events import CommitReport, LoadReport, PlanReport
from moe_ep.launch.cli.main import main
from moe_ep.layer import FusedMoE
from moe_ep.observability import metrics, stages
from moe_ep.observability.metrics import MetricsSink, PrometheusSink, Sinks
from moe_ep.observability.monitor import LayerMonitor
from tests.ranks import ranks

K, T = 32, 6


class Kept(MetricsSink):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[tuple[str, float, dict[str, str]]] = []

    def put(self, metric: metrics.Metric, value: float, **labels: str) -> None:
        assert set(labels) == set(metric.labels)
        self.values.append((metric.name, value, labels))

    def of(self, metric: metrics.Metric, **labels: str) -> list[float]:
        return [v for name, v, given in self.values if name == metric.name and labels.items() <= given.items()]


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def make_layer(**options: Any) -> FusedMoE:
    torch.manual_seed(0)
    layer = FusedMoE(8, 2, K, 16, params_dtype=torch.float32, **options)
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer


def test_a_scraper_reads_what_the_layers_did() -> None:
    sink = PrometheusSink(0)
    layer = make_layer()
    with LayerMonitor(sink, rank=0, sample_every=2) as monitor, torch.inference_mode():
        for _ in range(4):
            # Layers know of the monitor in the steps that it looks at, and in no others.
            assert stages.are_listened_to() == monitor.sampled
            inputs = torch.randn(T, K), torch.randn(T, 8)
            with torch.device("meta"):  # whatever device tensors are made on
                layer(*inputs)
                monitor.end_step()
        seen = scrape(sink.port)
        monitor.end_step()
        with monitor.watching():
            assert stages.are_listened_to() and not monitor.sampled
        assert not stages.are_listened_to()
    for stage in ("dispatch", "experts", "combine"):
        assert seen[f'moe_ep_{stage}_seconds_count{{rank="0"}}'] == 2
        assert seen[f'moe_ep_{stage}_seconds_bucket{{le="+Inf",rank="0"}}'] == 2
    assert seen['moe_ep_rank_tokens{expert_rank="0",rank="0"}'] == T * 2
    assert seen['moe_ep_balancedness{rank="0"}'] == 1.0
    assert seen['moe_ep_a2a_bytes_total{direction="sent",rank="0"}'] == 0
    with pytest.raises(OSError):
        scrape(sink.port)
    with torch.inference_mode():
        layer(torch.randn(T, K), torch.randn(T, 8))
    assert not stages.are_listened_to()


def observe_on_a_rank(rank: int, world_size: int) -> list[tuple[str, float, dict[str, str]]]:
    layer = make_layer(
        parallel_config=FusedMoEParallelConfig.make(ep_size=world_size, rank=rank, all2all_backend="all_to_all")
    )
    sink = Kept()
    logits = torch.full((T, 8), -9.0)
    # Every token takes experts 0 and 7, but the first, which takes two of rank 0.
    logits[:, 0], logits[1:, 7], logits[0, 1] = 9.0, 8.0, 8.0
    with LayerMonitor(sink, rank=rank, sample_every=3) as monitor, torch.inference_mode():
        for _ in range(4):
            layer(torch.randn(T, K), logits)
            monitor.end_step()
    return sink.values


def test_loads_and_bytes_between_two_ranks() -> None:
    sinks = []
    for values in ranks(2).run(observe_on_a_rank):
        sinks.append(Kept())
        sinks[-1].values = values
    for rank, sink in enumerate(sinks):
        assert sink.of(metrics.RANK_TOKENS, expert_rank="0") == [T + 1] * 2
        assert sink.of(metrics.RANK_TOKENS, expert_rank="1") == [T - 1] * 2
        assert sink.of(metrics.BALANCEDNESS) == [T / (T + 1)] * 2
        # Rank 0 sends T - 1 rows to rank 1, and rank 1 all of its rows to rank 0; one pass stands for three.
        rows = T if rank else T - 1
        for direction in ("sent", "received"):
            assert sink.of(metrics.A2A_BYTES, direction=direction) == [3 * rows * K * 4] * 2


def observe_ranks_with_the_same_tokens(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    layer, sink = make_layer(tp_size=world_size, ep_size=world_size, reduce_results=True), Kept()
    with LayerMonitor(sink, rank=rank) as monitor, torch.inference_mode():
        layer(torch.ones(T, K), torch.arange(8.0).expand(T, -1))
        monitor.end_step()
    return sink.of(metrics.RANK_TOKENS), sink.of(metrics.A2A_BYTES)


def test_no_rows_travel_between_ranks_with_the_same_tokens() -> None:
    """Their outputs are summed in place of it."""
    assert ranks(2).run(observe_ranks_with_the_same_tokens) == [([0.0, 2.0 * T], [0.0, 0.0])] * 2


def test_balancing_is_told() -> None:
    kept = Kept()
    monitor = LayerMonitor(Sinks(kept, kept), rank=3)
    monitor.on_eplb_event(
        LoadReport(
            step=8,
            num_steps=8,
            balancedness=0.5,
            layer_balancedness=(0.5,),
            max_tokens=4,
            mean_tokens=2,
            active_experts=3,
        )
    )
    monitor.on_eplb_event(PlanReport(step=8, made=True, seconds=0.25))
    monitor.on_eplb_event(PlanReport(step=8, made=False, reason="another rank plans"))
    monitor.on_eplb_event(
        CommitReport(step=12, layer=0, experts_moved=5, bytes_moved=40, transfer_s=0.1, commit_s=0.01)
    )
    told = {"moe_ep_balancedness": 0.5, "moe_ep_eplb_plan_seconds": 0.25, "moe_ep_eplb_moves_total": 5}
    expected = [(name, value, {"rank": "3"}) for name, value in told.items()]
    assert kept.values == [entry for entry in expected for _ in range(2)]


def test_names_are_those_that_are_documented() -> None:
    sink = PrometheusSink(0)
    try:
        for metric in metrics.ALL:
            sink.put(metric, 1.0, **dict.fromkeys(metric.labels, "0"))
        names = {re.match(r"[a-z0-9_]+", line)[0] for line in scrape(sink.port)}  # type: ignore[index]
    finally:
        sink.close()
    for metric in metrics.ALL:
        assert (f"{metric.name}_count" if metric.kind == "histogram" else metric.name) in names
        assert re.fullmatch(r"moe_ep_[a-z0-9_]+", metric.name)


def test_a_taken_port_is_said() -> None:
    sink = PrometheusSink(0)
    try:
        with pytest.raises(OSError, match=f"in use: '127.0.0.1:{sink.port}'"):
            PrometheusSink(sink.port)
        for port, message in (
            (65536, "port is 65536; it must be at least 0 and below"),
            ("9100", "port is '9100'; it"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                PrometheusSink(port)  # type: ignore[arg-type]
    finally:
        sink.close()


def test_without_the_extra_a_run_says_so_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["run", "--metrics-port", "9100"]) == 1
    assert capsys.readouterr().err == (
        "moe-ep run: a metrics endpoint needs prometheus-client, which is not installed; run: pip install "
        "'moe_ep[metrics]'\n"
    )


def test_ranks_that_come_and_go() -> None:
    sink = Kept()
    with LayerMonitor(sink, rank=2) as monitor:
        monitor.on_ranks(range(4), 0, 3.5)
        monitor.on_ranks([0, 1, 3], 1, 0.25)
    assert sink.of(metrics.RANKS, rank="2") == [4, 3]
    assert sum(sink.of(metrics.RECOVERIES)) == 1
    assert sink.of(metrics.RECOVERY_SECONDS) == [0.25]

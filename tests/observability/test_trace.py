"""Traces of real passes, opened and checked."""

from __future__ import annotations

import gzip
import itertools
import json
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep.distributed.failure_detection import comes_within
from moe_ep.errors import MoeEpError
from moe_ep.launch.cli.commands import run
from moe_ep.launch.cli.main import main
from moe_ep.launch.cli.report import RankReport
from moe_ep.launch.cli.run_config import RunConfig
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.launch.workers import worker
from moe_ep.observability import trace
from moe_ep.observability.stages import STAGES
from moe_ep.observability.trace import PREFIX, trace_to
from tests.checkpoint.checkpoints import make_checkpoint, qwen3_config
from tests.observability.test_metrics import K, T, make_layer, scrape
from tests.ports import free_ports
from tests.ranks import ranks


def record_on_a_rank(rank: int, world_size: int, folder: Path) -> None:
    layer = make_layer(ep_size=world_size, all2all_backend="all_to_all")
    with torch.inference_mode(), trace_to(str(folder), rank=rank):
        for _ in range(2):
            dist.barrier()
            layer(torch.randn(T, K), torch.randn(T, 8))


def read_trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def test_ranges_of_all_ranks_are_there_in_order_and_on_one_clock(tmp_path: Path) -> None:
    ranks(2).run(record_on_a_rank, tmp_path / "trace")
    spans: list[list[dict[str, Any]]] = []
    processes: list[set[int]] = []
    for rank in range(2):
        events = read_trace(tmp_path / "trace" / f"rank-{rank:03}.json.gz")
        processes.append({event["pid"] for event in events if "pid" in event})
        names = [event["args"]["name"] for event in events if event.get("name") == "process_name"]
        assert names and all(name.startswith(f"rank {rank}: ") for name in names)
        found = [e for e in events if e.get("ph") == "X" and e["name"].startswith(PREFIX)]
        found.sort(key=lambda event: event["ts"])
        assert [event["name"] for event in found] == [PREFIX + stage for stage in STAGES] * 2
        for before, after in itertools.pairwise(found):
            assert before["ts"] + before["dur"] <= after["ts"]
        spans.append(found)
    assert not processes[0] & processes[1]
    # A pass ends in an exchange: the second begins nowhere before the first began everywhere.
    firsts, seconds = ([found[index]["ts"] for found in spans] for index in (0, len(STAGES)))
    assert max(firsts) < min(seconds)


def with_a_clock_ahead(rank: int, world_size: int, folder: Path) -> float:
    """Where an event of the first microsecond ends up in the trace of a rank whose host is `rank` minutes ahead."""
    ahead_us = 60e6 * rank
    with pytest.MonkeyPatch.context() as host:
        host.setattr(trace, "machine", lambda: f"host-{rank}")
        host.setattr(trace.time, "time_ns", lambda: time.perf_counter_ns() + int(1e3 * ahead_us))
        shift_us = trace.clock_difference_us()
    recorded, aligned = folder / f"recorded-{rank}.json", folder / f"aligned-{rank}.gz"
    recorded.write_text(json.dumps({"traceEvents": [{"ts": ahead_us + 1, "pid": 7, "name": "event"}]}))
    trace.align(recorded, aligned, rank, shift_us)
    event, process = read_trace(aligned)
    assert process["pid"] == event["pid"] and process["args"] == {"name": f"rank {rank}: 7"}
    return event["ts"]


def test_clocks_of_other_hosts_are_set_by_the_first(tmp_path: Path) -> None:
    first, second = ranks(2).run(with_a_clock_ahead, tmp_path)
    assert first == 1 and abs(second) < 30e6


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(MoeEpError, match=r"to .*/file/new \(Not a directory\)"),
        trace_to(tmp_path / "file" / "new", rank=0),
    ):
        pytest.fail("it was found too late")

    def export(profile: object, path: str) -> None:
        Path(path + ".tmp").write_text("as far as there was room")

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    with pytest.raises(MoeEpError, match="the disk may be full"), trace_to(tmp_path / "full", rank=0):
        pass
    assert list((tmp_path / "full").iterdir()) == []


class Scraper(threading.Thread):
    """Reads the metrics of a port until a file says that all steps are done, and once more; says so in another."""

    def __init__(self, port: int, folder: Path) -> None:
        super().__init__(daemon=True)
        self.port, self.folder, self.seen = port, folder, dict[str, float]()

    def run(self) -> None:
        assert comes_within(200, (self.folder / "done").exists)
        self.seen = scrape(self.port)
        (self.folder / "scraped").touch()


def run_until_scraped(rank_env: RankEnv, config: RunConfig) -> RankReport:
    """A run whose ranks serve their metrics until somebody has read them after the last step."""
    assert config.trace is not None
    folder, drive = config.trace.parent, worker.Run.drive

    def drive_and_wait(run: worker.Run) -> None:
        drive(run)
        if rank_env.rank == 0:
            (folder / "done").touch()
        assert comes_within(60, (folder / "scraped").exists)

    with mock.patch.object(worker.Run, "drive", drive_and_wait):
        return worker.run_worker(rank_env, config)


def test_a_run_writes_a_trace_and_serves_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "model")
    options = ["--model", str(tmp_path / "model"), "--launcher", "local", "--device", "cpu", "--no-verify"]
    options += ["--ep-size", "2", "--tokens-per-rank", "3"]
    port, _ = free_ports(2)
    scraper = Scraper(port, tmp_path)
    scraper.start()
    more = ["--steps", "4", "--metrics-port", str(port), "--trace", str(tmp_path / "trace")]
    with mock.patch.object(run, "work", run_until_scraped):
        assert main(["run", *options, *more]) == 0, capsys.readouterr().err
    scraper.join()
    for stage in ("dispatch", "experts", "combine"):
        # One step is sampled, and the warm-up before it is none.
        assert 1 <= scraper.seen[f'moe_ep_{stage}_seconds_count{{rank="0"}}'] <= qwen3_config()["num_hidden_layers"]
    for rank in range(2):
        events = read_trace(tmp_path / "trace" / f"rank-{rank:03}.json.gz")
        seen = Counter(event["name"] for event in events if event["name"].startswith(PREFIX) and event["ph"] == "X")
        assert seen[PREFIX + "route"] == seen[PREFIX + "dispatch"] == seen[PREFIX + "experts"] > 0
        assert seen[PREFIX + "combine"] == seen[PREFIX + "experts"]

    with socket.create_server(("127.0.0.1", port)):
        assert main(["run", *options, "--metrics-port", str(port)]) != 0
    assert f"127.0.0.1:{port}, which it cannot listen at" in capsys.readouterr().err

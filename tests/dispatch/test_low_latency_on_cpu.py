"""Decode's kernels on a CPU, their threads in random order: no sum is wrong without an error, whatever comes late."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ep.dispatch.nvshmem.backend import FailureRecord
from moe_ep.distributed.failure_detection import FailureDetector
from moe_ep.errors import RanksChangedError
from tests.dispatch.emulated_decode import Decode, compile_decode
from tests.dispatch.emulated_gpu import COMPILER

TIMEOUT_NS = 100_000
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_decode(tmp_path_factory.mktemp("emulated"), 2)


@pytest.mark.parametrize("by_reference", [True, False], ids=["by_reference", "expanded"])
def test_steps_with_random_pauses(library: ctypes.CDLL, by_reference: bool) -> None:
    for seed in range(12):
        session = Decode(library, 2, seed)
        for _ in range(4):
            session.queue_step(session.draw_case(), by_reference)
        assert session.run(), f"seed {seed} does not end"
        assert all(batch.is_right for batch in session.batches), f"seed {seed}"
        assert not session.record.any()


def test_rows_of_8_bits(tmp_path: Path) -> None:
    library = compile_decode(tmp_path, 2, torch.int8)
    for seed in range(2):
        for by_reference in (True, False):
            session = Decode(library, 2, seed, code_dtype=torch.int8)
            for _ in range(3):
                session.queue_step(session.draw_case(), by_reference)
            assert session.run(), f"seed {seed} does not end"
            assert all(batch.is_right for batch in session.batches), f"seed {seed}"
            assert not session.record.any()


def test_results_of_slots_are_added_in_their_order(tmp_path: Path) -> None:
    """As batch-invariant layers combine, of experts that the dispatch chose."""
    library = compile_decode(tmp_path, 3, slot_results=True, routed=True)
    for seed in range(12):
        session = Decode(library, 3, seed, slot_results=True, routed=True)
        for _ in range(4):
            session.queue_step(session.draw_case(), by_reference=seed % 2 == 0)
        assert session.run(), f"seed {seed} does not end"
        assert all(batch.is_right for batch in session.batches), f"seed {seed}"
        assert not session.record.any()


@pytest.mark.parametrize("slot_results", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["sums", "slots"])
def test_f16_results_beyond_the_range(tmp_path: Path, slot_results: bool) -> None:
    library = compile_decode(tmp_path, 2, slot_results=slot_results, dtype=torch.float16)
    for seed in range(4):
        session = Decode(library, 2, seed, slot_results=slot_results, dtype=torch.float16)
        for by_reference in (True, False):
            session.queue_step(session.draw_case(), by_reference)
        assert session.run(), f"seed {seed} does not end"
        assert any((batch.results.abs() > 65504).any() for batch in session.batches)
        assert all(batch.is_right for batch in session.batches), f"seed {seed}"


@pytest.mark.parametrize("by_reference", [True, False], ids=["by_reference", "expanded"])
def test_a_rank_that_comes_too_late_is_told(library: ctypes.CDLL, by_reference: bool) -> None:
    """Rank 0's dispatch gives up; rank 1 comes then, and has received everything when rank 0's combine begins."""
    for seed in range(10):
        session = Decode(library, 2, seed, timeout_ns=TIMEOUT_NS)
        arrived = [False, False]

        def experts_wait(rank: int, arrived: list[bool] = arrived) -> bool:
            arrived[rank] = True
            return all(arrived)

        session.queue_host(1, lambda session=session: session.has_failed(0), every_ns=session.random.randrange(50_000))
        session.queue_step(session.draw_case(), by_reference, experts_wait)
        assert session.run(), f"seed {seed} does not end"
        assert session.has_failed(0)
        for batch in session.batches:
            assert batch.is_right or session.has_failed(batch.setting.rank), f"seed {seed}, rank {batch.setting.rank}"


@pytest.mark.parametrize("by_reference", [True, False], ids=["by_reference", "expanded"])
def test_weights_that_come_late(library: ctypes.CDLL, by_reference: bool) -> None:
    """Rank 1 sends its router weights to rank 0 behind everything else."""
    for seed in range(10):
        session = Decode(library, 2, seed, blocks=3)
        session.slow_weights(source=1, rank=0, pause_ns=session.random.choice([50_000, 200_000]))
        for _ in range(2):
            session.queue_step(session.draw_case(), by_reference)
        assert session.run(), f"seed {seed} does not end"
        assert all(batch.is_right for batch in session.batches), f"seed {seed}"
        assert not session.record.any()


@pytest.mark.parametrize("by_reference", [True, False], ids=["by_reference", "expanded"])
def test_waits_end_where_the_ranks_change(library: ctypes.CDLL, by_reference: bool) -> None:
    """Rank 1 does not come while rank 0 waits without a deadline; then it comes, and waits for what was not sent."""
    for seed in range(4):
        session = Decode(library, 2, seed)
        detectors = [FailureDetector(str(rank), rank, 1) for rank in range(2)]
        records = []
        for rank, detector in enumerate(detectors):
            ranks: Any = SimpleNamespace(rank=rank, size=2, ep_ranks=range(2), detector=detector)
            records.append(FailureRecord(ranks, 0.0, session.record[rank]))
            detector.ends_also(records[rank])

        def ends(detectors: list[FailureDetector] = detectors) -> Iterator[None]:
            for detector in detectors:
                for _ in range(300):
                    yield
                detector.end_waits("other ranks now")

        session.add_host(ends())
        session.queue_host(1, lambda detectors=detectors: detectors[0].has_ended, every_ns=50_000)
        session.queue_step(session.draw_case(), by_reference)
        assert session.run(), f"seed {seed} does not end"
        for record in records:
            with pytest.raises(RanksChangedError, match="other ranks now"):
                record.check()

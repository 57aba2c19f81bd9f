"""Prefill's kernels on a CPU, their threads in random order: rows and sums are right, or the rank is told."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_ep.dispatch.nvshmem.high_throughput import KERNELS, OVERLAPPED_KERNELS
from tests.dispatch.emulated_gpu import COMPILER
from tests.dispatch.emulated_prefill import Prefill, compile_prefill

TIMEOUT_NS = 200_000
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module", params=[None, torch.float8_e4m3fn, torch.int8], ids=str)
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ctypes.CDLL, torch.dtype | None]:
    """Those of two ranks, and the dtype of rows on the wire, None for their own."""
    return compile_prefill(tmp_path_factory.mktemp("emulated"), 2, request.param), request.param


def check_three_steps(session: Prefill, seed: int) -> None:
    """Three steps of two ranks end, with the right results."""
    cases = [session.draw_case() for _ in range(3)]
    for rank in range(2):
        session.begin(rank, cases)
    assert session.run(), f"seed {seed} does not end"
    for rank in range(2):
        assert [step.is_right for step in session.steps[rank]] == [True] * 3, f"seed {seed}, rank {rank}"
        assert not session.has_failed(rank), f"seed {seed}, rank {rank}"


def test_steps_with_random_pauses(kernels: tuple[ctypes.CDLL, torch.dtype | None]) -> None:
    library, code_dtype = kernels
    for seed in range(6):
        session = Prefill(library, 2, seed, code_dtype)
        check_three_steps(session, seed)


def test_results_of_f16_rows_are_added_up_in_f32(tmp_path: Path) -> None:
    library = compile_prefill(tmp_path, 2, None, torch.float16)
    for seed in range(3):
        session = Prefill(library, 2, seed, None, dtype=torch.float16)
        cases = [session.draw_case() for _ in range(2)]
        for rank in range(2):
            session.begin(rank, cases)
        assert session.run(), f"seed {seed} does not end"
        assert all(step.is_right for steps in session.steps for step in steps), f"seed {seed}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_rank_that_comes_too_late_is_told(kernels: tuple[ctypes.CDLL, torch.dtype | None], kernel: str) -> None:
    """Rank 0 gives up; rank 1 goes on with that kernel then, and both have another batch behind it."""
    library, code_dtype = kernels
    for seed in range(2):
        session = Prefill(library, 2, seed, code_dtype, timeout_ns=TIMEOUT_NS)
        cases = [replace(session.draw_case(), tokens=(5, 3), routing="random"), session.draw_case()]
        session.stalls[1, kernel] = lambda session=session: session.has_failed(0)
        for rank in range(2):
            session.begin(rank, cases)
        assert session.run(), f"seed {seed} does not end"
        assert session.has_failed(0) and session.missing(0) == [1], f"seed {seed}"
        assert all(session.is_told(rank) for rank in range(2)), f"seed {seed}"


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels of two ranks that send rows and results beside experts, which a kernel stands for."""
    return compile_prefill(tmp_path_factory.mktemp("overlapped"), 2, None, overlaps=True)


@pytest.mark.parametrize("most_blocks", [0, 3])
def test_rows_arrive_and_results_leave_while_experts_run(overlapped: ctypes.CDLL, most_blocks: int) -> None:
    """Also where a GPU has room for three blocks, so that experts and combine wait for those before them to end."""
    for seed in range(6):
        session = Prefill(overlapped, 2, seed, None, overlaps=True)
        overlapped.limit_blocks(most_blocks)
        check_three_steps(session, seed)


@pytest.mark.parametrize("kernel", OVERLAPPED_KERNELS)
def test_a_rank_that_comes_too_late_is_told_beside_experts(overlapped: ctypes.CDLL, kernel: str) -> None:
    for seed in range(2):
        session = Prefill(overlapped, 2, seed, None, timeout_ns=TIMEOUT_NS, overlaps=True)
        cases = [replace(session.draw_case(), tokens=(5, 3), routing="random"), session.draw_case()]
        session.stalls[1, kernel] = lambda session=session: session.has_failed(0)
        for rank in range(2):
            session.begin(rank, cases)
        assert session.run(), f"seed {seed} does not end"
        assert session.has_failed(0) and session.missing(0) == [1], f"seed {seed}"
        assert all(session.is_told(rank) for rank in range(2)), f"seed {seed}"

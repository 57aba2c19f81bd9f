"""Prefill's kernels on a CPU, their threads in random order: rows and sums are right, or the rank is told."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_ep.dispatch.nvshmem.high_throughput import KERNELS, OVERLAPPED_KERNELS, Layout
from moe_ep.modular_kernel.contracts import Dispatched, Routing
from tests.dispatch.emulated_gpu import COMPILER
from tests.dispatch.emulated_prefill import NUM_EXPERTS, TOPK, Prefill, compile_prefill, layout_of

TIMEOUT_NS = 200_000
OVERLAPPED = layout_of(overlaps=True)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


Kernels = tuple[ctypes.CDLL, Layout]
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
# Of rows in 16 bits, in 8 bits, and of a level within a host, which passes codes on; the last with the least columns.
LAYOUTS = {
    "plain": layout_of(),
    "e4m3": layout_of(E4M3),
    "int8": layout_of(INT8),
    "passes_int8": layout_of(passed_dtype=INT8),
    "passes_e4m3_of_16_columns": layout_of(passed_dtype=E4M3, hidden_size=16),
    "plain_across_hosts": layout_of(device_api=True),
    "e4m3_across_hosts": layout_of(E4M3, device_api=True),
    "int8_across_hosts_of_16_columns": layout_of(INT8, device_api=True, hidden_size=16),
    "passes_e4m3_across_hosts": layout_of(passed_dtype=E4M3, device_api=True),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    layout = LAYOUTS[request.param]
    return compile_prefill(tmp_path_factory.mktemp("emulated"), layout), layout


def check_three_steps(session: Prefill, seed: int) -> None:
    """Three steps of two ranks end, with the right results."""
    cases = [session.draw_case() for _ in range(3)]
    for rank in range(2):
        session.begin(rank, cases)
    assert session.run(), f"seed {seed} does not end"
    for rank in range(2):
        assert [step.is_right for step in session.steps[rank]] == [True] * 3, f"seed {seed}, rank {rank}"
        assert not session.has_failed(rank), f"seed {seed}, rank {rank}"


def test_steps_with_random_pauses(kernels: Kernels) -> None:
    library, layout = kernels
    for seed in range(6):
        session = Prefill(library, layout, seed)
        check_three_steps(session, seed)


def test_codes_of_another_dtype_are_not_passed_on(kernels: Kernels) -> None:
    library, layout = kernels
    backend = Prefill(library, layout, 0).backends[0]
    ids, weights = torch.zeros((1, TOPK), dtype=torch.int32), torch.ones((1, TOPK))
    routing = Routing(topk_weights=weights, topk_ids=ids, num_experts=NUM_EXPERTS, expert_map=None)
    for dtype in {E4M3, INT8} - {layout.passed_dtype}:
        assert not backend.passes_codes(dtype)
        codes = Dispatched(rows=torch.zeros((1, layout.hidden_size)).to(dtype), row_scales=torch.ones((1, 1)))
        with pytest.raises(ValueError, match=f"passed_dtype.*{dtype}.*{layout.passed_dtype}"):
            backend.pass_on(codes, routing)


def test_results_of_f16_rows_are_added_up_in_f32(tmp_path: Path) -> None:
    layout = layout_of(dtype=torch.float16)
    library = compile_prefill(tmp_path, layout, torch.float16)
    for seed in range(3):
        session = Prefill(library, layout, seed, dtype=torch.float16)
        cases = [session.draw_case() for _ in range(2)]
        for rank in range(2):
            session.begin(rank, cases)
        assert session.run(), f"seed {seed} does not end"
        assert all(step.is_right for steps in session.steps for step in steps), f"seed {seed}"


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_rank_that_comes_too_late_is_told(kernels: Kernels, kernel: str) -> None:
    """Rank 0 gives up; rank 1 goes on with that kernel then, and both have another batch behind it."""
    library, layout = kernels
    for seed in range(2):
        session = Prefill(library, layout, seed, timeout_ns=TIMEOUT_NS)
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
    return compile_prefill(tmp_path_factory.mktemp("overlapped"), OVERLAPPED)


@pytest.mark.parametrize("most_blocks", [0, 3])
def test_rows_arrive_and_results_leave_while_experts_run(overlapped: ctypes.CDLL, most_blocks: int) -> None:
    """Also where a GPU has room for three blocks, so that experts and combine wait for those before them to end."""
    for seed in range(6):
        session = Prefill(overlapped, OVERLAPPED, seed)
        overlapped.limit_blocks(most_blocks)
        check_three_steps(session, seed)


@pytest.mark.parametrize("kernel", OVERLAPPED_KERNELS)
def test_a_rank_that_comes_too_late_is_told_beside_experts(overlapped: ctypes.CDLL, kernel: str) -> None:
    for seed in range(2):
        session = Prefill(overlapped, OVERLAPPED, seed, timeout_ns=TIMEOUT_NS)
        cases = [replace(session.draw_case(), tokens=(5, 3), routing="random"), session.draw_case()]
        session.stalls[1, kernel] = lambda session=session: session.has_failed(0)
        for rank in range(2):
            session.begin(rank, cases)
        assert session.run(), f"seed {seed} does not end"
        assert session.has_failed(0) and session.missing(0) == [1], f"seed {seed}"
        assert all(session.is_told(rank) for rank in range(2)), f"seed {seed}"

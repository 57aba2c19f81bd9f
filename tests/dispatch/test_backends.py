"""Every backend on gloo processes, and on threads with drawn settings, against the oracle of backend_cases."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dispatch.backend_cases import (
    BACKENDS,
    CASES,
    Case,
    check_case,
    check_cases,
    check_interleaved,
    expected_output,
    finalize_ids,
    kinds,
    make_backend,
    make_setting,
    prepare_args,
    run_experts,
)
from tests.dispatch.ranks_of_threads import run_on_threads
from tests.ranks import ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_against_plain_loops(world_size: int) -> None:
    checked = ranks(world_size).run(check_cases, CASES, BACKENDS)
    assert checked == [len(CASES) * len(BACKENDS)] * world_size


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_in_flight_do_not_mix(backend: str, mode: str) -> None:
    ranks(3).run(check_interleaved, backend, mode)


def rows_of_any_strides(rank: int, world_size: int) -> None:
    """No tokens on rank 0, or no more than one column: torch calls both contiguous, whatever their strides are."""
    for name, on_input, hidden_size in itertools.product(BACKENDS, (False, True), (40, 1)):
        case = Case(tokens=(0, 3), topk=1, dtype=torch.bfloat16, on_input=on_input, hidden_size=hidden_size)
        setting = make_setting(case, rank, world_size)
        backend = make_backend(setting, name)
        args = prepare_args(setting, "cpu")
        args = (args[0].repeat_interleave(2, dim=1)[:, ::2], *args[1:])
        result = backend.prepare(*args)
        expert_output, reduce_impl = run_experts(setting, result, kinds(backend)[0])
        output = torch.empty_like(args[0])
        backend.finalize(output, expert_output, *finalize_ids(args, result), on_input, reduce_impl)
        assert torch.equal(output, expected_output(setting, world_size))


def test_rows_of_any_strides() -> None:
    ranks(2).run(rows_of_any_strides)


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, Case]:
    """A number of ranks, and one step of them: ids of -1, the same expert twice, ranks without tokens or experts."""
    num_ranks = draw(st.sampled_from([1, 2, 3, 5, 6, 7]))
    capacity = draw(st.sampled_from([1, 2, 5]))
    num_experts = draw(st.sampled_from([1, 2, 7, 257]))
    topk = draw(st.sampled_from([topk for topk in (1, 2, 3, 8) if topk <= num_experts]))
    num_shared = draw(st.integers(0, 2))
    on_input = topk == 1 and not num_shared and draw(st.booleans())
    case = Case(
        tokens=tuple(draw(st.lists(st.integers(0, capacity), min_size=num_ranks, max_size=num_ranks))),
        num_experts=num_experts,
        topk=topk,
        hidden_size=draw(st.sampled_from([1, 16, 48, 129])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        # Weights of slots without an expert are NaN, and rows that they were applied to, too.
        routing="random" if on_input else "any",
        placement=draw(st.sampled_from(["linear", "round_robin"])),
        num_shared=num_shared,
        code_dtype=draw(st.sampled_from([None, torch.float8_e4m3fn, torch.int8])),
        on_input=on_input,
        capacity=capacity,
        seed=draw(st.integers(0, 1000)),
    )
    return num_ranks, case


@settings(max_examples=10, deadline=None)
@given(steps())
def test_drawn_settings(step: tuple[int, Case]) -> None:
    num_ranks, case = step
    for name in BACKENDS:
        run_on_threads(num_ranks, check_case, case, name)

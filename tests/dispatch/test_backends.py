"""Every backend on real gloo processes, against the oracle of backend_cases."""

from __future__ import annotations

import pytest

from tests.dispatch.backend_cases import BACKENDS, CASES, check_cases, check_interleaved
from tests.ranks import ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_against_plain_loops(world_size: int) -> None:
    checked = ranks(world_size).run(check_cases, CASES, BACKENDS)
    assert checked == [len(CASES) * len(BACKENDS)] * world_size


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_in_flight_do_not_mix(backend: str, mode: str) -> None:
    ranks(3).run(check_interleaved, backend, mode)

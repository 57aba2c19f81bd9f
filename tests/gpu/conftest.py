"""Fixtures of the GPU tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.marlin_cases import ampere_only, on_hopper


@pytest.fixture(params=["hopper", "ampere"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """The packed experts' kernels: Hopper's own, and on any GPU those that all GPUs from sm_80 on have."""
    if request.param == "ampere":
        with ampere_only():
            yield request.param
    elif not on_hopper():
        pytest.skip("needs a Hopper GPU")
    else:
        yield request.param

"""Settings of all tests; skips GPU tests where the GPUs are not there, and says why."""

from __future__ import annotations

import hypothesis
import pytest
import torch

# How long an example takes is the machine's matter, not the test's.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Files whose tests start gangs or clusters.
_GANGS = ("test_local_gang", "test_ray_gang", "test_ray_job", "test_run", "test_run_eplb", "test_torchrun_gang")
_GPUS_NEEDED = {"gpu": 1, "gpu2": 2, "gpu8": 8}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count()
    for item in items:
        if item.path.stem in _GANGS or "ray" in item.name:
            item.add_marker(pytest.mark.gang)
        for marker, needed in _GPUS_NEEDED.items():
            if item.get_closest_marker(marker) and num_gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), this machine has {num_gpus}"))

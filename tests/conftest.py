"""Settings of all tests; skips GPU tests where the GPUs are not there, and says why."""

from __future__ import annotations

import gc
import itertools
import random
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.ranks import num_gpu_ranks

# How long an example takes is the machine's matter, not the test's, and every run draws the same examples; another
# seed draws others: pytest --hypothesis-profile=searching --hypothesis-seed=1.
_UNTIMED = hypothesis.settings(deadline=None, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("searching", _UNTIMED)
hypothesis.settings.register_profile("repeatable", _UNTIMED, derandomize=True)
hypothesis.settings.load_profile("repeatable")

# Files whose tests start gangs or clusters, which mostly wait, and others that take long: these begin, in turns, so
# that no worker ends with one.
_GANGS = (
    "test_two_hosts",
    "test_ray_gang",
    "test_run",
    "test_elastic_gang",
    "test_ray_job",
    "test_torchrun_gang",
    "test_run_eplb",
    "test_elastic_deaths",
    "test_local_gang",
)
_LONG = (
    "test_jit",
    "test_waits",
    "test_families_in_formats",
    "test_low_latency_on_cpu",
    "test_examples_run",
    "test_transformers",
    "test_eplb_moving",
    "test_format_cases",
    "test_high_throughput_on_cpu",
    "test_untrusted",
    "test_failures",
    "test_nvshmem_prefill",
    "test_eight_bit_on_cpu",
    "test_update",
    "test_eplb_policies",
    "test_settings",
    "test_backends",
    "test_interpreter",
    "test_generate_command",
    "test_layer_ep",
    "test_eplb_manager",
    "test_invariant_generation",
    "test_batch_exchange_on_cpu",
    "test_tables",
    "test_replay_ranks",
    "test_writer_and_demo",
    "test_exchange",
    "test_eplb_close",
    "test_generate",
    "test_marlin_eight_bit",
    "test_scaling",
    "test_package",
)
_FIRST = [name for pair in itertools.zip_longest(_GANGS, _LONG) for name in pair if name]
_GPUS_NEEDED = {"gpu": 1, "gpu2": 2, "gpu8": 8}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run the tests marked thorough too")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that `-m gang` or `-m "not gang"` leaves out whole need not be imported."""
    wanted = {"gang": True, "not gang": False}.get(config.option.markexpr)
    is_test = collection_path.match("test_*.py")
    return True if is_test and wanted is not None and wanted != (collection_path.stem in _GANGS) else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Numbers that a test draws are its own, whatever ran before it on this worker."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test that leaves a process group behind fails itself, not whichever test runs after it."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail(f"{item.nodeid} left its default process group behind; call destroy_process_group at its end")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders and marks the tests. Of a file's tests that this machine lacks GPUs for, one is left to be skipped."""
    places = {name: place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    num_gpus, is_thorough = num_gpu_ranks(), config.getoption("thorough")
    left_out: list[pytest.Item] = []
    skipped: set[tuple[Path, int]] = set()
    for item in items:
        if item.path.stem in _GANGS:
            item.add_marker(pytest.mark.gang)
        if item.get_closest_marker("thorough") and not is_thorough:
            left_out.append(item)
            continue
        most = max((needed for marker, needed in _GPUS_NEEDED.items() if item.get_closest_marker(marker)), default=0)
        if num_gpus < most:
            reason = f"needs {most} GPU(s), as other tests of the file do, and this machine has {num_gpus}"
            item.add_marker(pytest.mark.skip(reason=reason))
            if (item.path, most) in skipped:
                left_out.append(item)
            skipped.add((item.path, most))
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    config.hook.pytest_deselected(items=left_out)


def pytest_collectstart() -> None:
    """Imports make millions of objects that stay: the garbage collector need not look at them, then or later."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()

"""A process group ends with destroy_process_group while its layers exist; what must be closed before Python ends is."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ep.distributed.passes import one_pass
from moe_ep.layer import FusedMoE
from moe_ep.registry import ALL2ALL_BACKENDS
from tests.ranks import ranks

ROOT = Path(__file__).parents[2]
BACKENDS = [name for name in ALL2ALL_BACKENDS if name != "no_ep" and not name.startswith("nvshmem")]


def destroyed(rank: int, world_size: int) -> dict[str, str]:
    """By backend, what a layer says whose group was destroyed; the group is gone though the layer is there."""
    said = {}
    for backend in BACKENDS:
        group = dist.new_group()
        # Ranks of two hosts, for the backend that divides the group.
        with mock.patch.dict(os.environ, MOE_EP_RANKS_PER_HOST="1" if backend == "two_level" else "0"):
            layer = FusedMoE(6, 2, 32, 32, params_dtype=torch.float32, all2all_backend=backend, process_group=group)
            inputs = torch.randn(3 + rank, 32), torch.randn(3 + rank, 6)
            with one_pass([layer], 4):
                layer(*inputs)
            layer(*inputs)
        gone = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert gone() is None, backend
        if backend != "two_level":  # the groups that it made of this one are there
            with pytest.raises(RuntimeError) as error:
                layer(*inputs)
            said[backend] = str(error.value)
    return said


def test_a_group_that_is_destroyed_ends_though_its_layers_are_there() -> None:
    sentence = (
        "the layer's process group was destroyed; make the layer anew after init_process_group, or call "
        "destroy_process_group later"
    )
    assert ranks(2).run(destroyed) == [{backend: sentence for backend in BACKENDS if backend != "two_level"}] * 2


PROGRAM = """
from moe_ep.distributed.store import close_at_exit

class Thing:
    def __init__(self, name):
        self.name = name

    def close(self):
        print(self.name)
        raise RuntimeError("cannot")

gone = Thing("gone")
things = [Thing("first"), Thing("second")]
for thing in (gone, *things):
    close_at_exit(thing)
gone = thing = None
"""


def test_what_is_still_there_is_closed_when_python_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0
    assert sorted(ended.stdout.split()) == ["first", "second"]
    assert ended.stderr.count("Thing could not be closed") == 2

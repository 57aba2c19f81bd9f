"""The store of the job: what is said where there is none, or where it does not answer."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from moe_ep.dispatch.notes import Notes
from moe_ep.distributed import job_store
from moe_ep.eplb.handshake import SideChannel, _next_prefix


def test_a_group_that_is_gone_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="has not been initialized"):
        job_store.job_store()
    # A thread that listens while the program leaves its group is told, and does not die of another error.
    channel = SideChannel(None, 1.0)
    channel.size, channel._prefix = 2, "group"
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "is_initialized", lambda: False)
    assert "cannot be reached any more" in str(channel.heard())


def test_what_was_said_in_a_group_is_not_heard_by_one_that_is_made_again_over_its_store() -> None:
    """As under torchrun, whose store outlives a process group: the new one has the name of the first."""
    store, names = dist.HashStore(), []
    for _ in range(2):
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        try:
            group = dist.group.WORLD
            assert group is not None
            names.append(group.group_name)
            key = Notes(group)._key(0)
            assert not job_store.job_store().check([key])
            Notes(group).leave("a rank refuses its batch")
            assert job_store.job_store().check([key])
            assert job_store.name_in_store(group) in _next_prefix(group)
        finally:
            dist.destroy_process_group()
    assert names[0] == names[1]


def test_a_store_that_does_not_answer_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store, never = dist.HashStore(), threading.Event()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    store.set("key", "value")
    assert job_store.ask_store(lambda found: found.get("key"), 60) == b"value"
    with pytest.raises(RuntimeError, match=r"did not answer for 0.1 s: the process that holds it, often rank 0, is"):
        job_store.ask_store(lambda _: never.wait(), 0.1)
    never.set()

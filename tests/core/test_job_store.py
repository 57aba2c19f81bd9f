"""The store of the job: what is said where there is none, or where it does not answer."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from moe_ep import job_store
from moe_ep.eplb.handshake import SideChannel


def test_a_group_that_is_gone_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="has not been initialized"):
        job_store.job_store()
    # A thread that listens while the program leaves its group is told, and does not die of another error.
    channel = SideChannel(None, 1.0)
    channel.size, channel._prefix = 2, "group"
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "is_initialized", lambda: False)
    assert "cannot be reached any more" in str(channel.heard())


def test_a_store_that_does_not_answer_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store, never = dist.HashStore(), threading.Event()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    store.set("key", "value")
    assert job_store.ask_store(lambda found: found.get("key"), 60) == b"value"
    with pytest.raises(RuntimeError, match=r"did not answer for 0.1 s: the process that holds it, often rank 0, is"):
        job_store.ask_store(lambda _: never.wait(), 0.1)
    never.set()

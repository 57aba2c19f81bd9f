"""The store of the job: who answers, and what is said where there is none."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from moe_ep import job_store
from moe_ep.eplb.handshake import SideChannel


def test_ranks_that_did_not_stop_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(job_store, "_ROLL_CALL_S", 0.1)
    store.set("group/stopped/2", "1")
    assert job_store.roll_call("group", 0, 4) == [1, 3]
    assert store.check(["group/stopped/0"])
    assert job_store.roll_call("group", 1, 3) == []


def test_a_group_that_is_gone_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="has not been initialized"):
        job_store.job_store()
    # A thread that listens while the program leaves its group is told, and does not die of another error.
    channel = SideChannel(None, 1.0)
    channel.size, channel._prefix = 2, "group"
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "is_initialized", lambda: False)
    assert "cannot be reached any more" in str(channel.heard())

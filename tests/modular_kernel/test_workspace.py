"""Shared scratch: one buffer, its high-water mark, and what is refused under capture."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_ep.modular_kernel import workspace
from moe_ep.modular_kernel.workspace import WorkspaceManager

CPU = torch.device("cpu")


def test_views_lie_side_by_side_in_one_buffer():
    manager = WorkspaceManager()
    a, b, empty = manager.get(CPU, ((3, 5), torch.float32), ((7,), torch.bfloat16), ((0, 4), torch.float32))
    a.fill_(1.0)
    b.fill_(2.0)
    assert a.shape == (3, 5) and b.shape == (7,) and empty.shape == (0, 4)
    assert torch.equal(a, torch.ones(3, 5)) and torch.equal(b, torch.full((7,), 2.0, dtype=torch.bfloat16))
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert a.data_ptr() % 64 == 0 and (b.data_ptr() - a.data_ptr()) % 256 == 0


def test_smaller_requests_reuse_and_larger_ones_grow():
    manager = WorkspaceManager()
    (first,) = manager.get(CPU, ((1024,), torch.float32))
    held = manager.num_bytes(CPU)
    (second,) = manager.get(CPU, ((16,), torch.float16))
    (third,) = manager.get(CPU, ((1024,), torch.float32))
    assert first.data_ptr() == second.data_ptr() == third.data_ptr() and manager.num_bytes() == held
    manager.get(CPU, ((2048,), torch.float32))
    assert manager.num_bytes() == 2 * held


def test_a_buffer_that_is_too_small_is_given_back_before_a_larger_one_is_taken(monkeypatch: pytest.MonkeyPatch):
    manager, empty, held = WorkspaceManager(), torch.empty, []
    manager.get(CPU, ((1024,), torch.float32))
    monkeypatch.setattr(torch, "empty", lambda *size, **of: held.append(manager.num_bytes()) or empty(*size, **of))
    manager.get(CPU, ((2048,), torch.float32))
    assert held == [0]


def test_the_same_request_gets_the_same_views():
    manager, request = WorkspaceManager(), ((16, 4), torch.float32)
    with torch.inference_mode():
        (first,) = manager.get(CPU, request)
    (again,) = manager.get(CPU, request)
    assert again is first and not first.is_inference()
    for rows in range(1, 16):
        assert manager.get(CPU, ((rows, 4), torch.float32))[0].shape == (rows, 4)
    assert manager.get(CPU, request)[0] is first
    (roomy,) = manager.get(CPU, request, least_bytes=10_000)
    assert roomy.shape == (16, 4) and manager.num_bytes() == 10_000
    for rows in range(1, 600):  # more than are kept
        manager.get(CPU, ((rows, 4), torch.float32))
    assert manager.get(CPU, request)[0] is not roomy


def test_threads_have_scratch_of_their_own():
    manager = WorkspaceManager()
    (mine,) = manager.get(CPU, ((64,), torch.float32))
    with ThreadPoolExecutor(1) as thread:
        (theirs,) = thread.submit(manager.get, CPU, ((64,), torch.float32)).result()
    assert theirs.data_ptr() != mine.data_ptr()
    assert manager.get(CPU, ((64,), torch.float32))[0].data_ptr() == mine.data_ptr()


def test_a_stream_that_borrowed_under_capture_has_its_own_scratch_when_it_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager, device, request = WorkspaceManager(), torch.device("cuda", 0), ((64,), torch.float32)
    monkeypatch.setattr(workspace, "outside_of_pools", lambda make, device: torch.empty(4096, dtype=torch.uint8))

    def pointer(stream: int, capturing: bool) -> int:
        monkeypatch.setattr(workspace, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        return manager.get(device, request)[0].data_ptr()

    warm = pointer(1, capturing=False)
    assert pointer(2, capturing=True) == warm
    own = pointer(2, capturing=False)
    assert own != warm and pointer(1, capturing=False) == warm
    assert pointer(2, capturing=True) == own


@pytest.mark.gpu
def test_capture_borrows_the_warm_buffer_keeps_it_and_never_allocates():
    device = torch.device("cuda", torch.cuda.current_device())
    manager = WorkspaceManager()
    (warm,) = manager.get(device, ((256,), torch.float32))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (captured,) = manager.get(device, ((256,), torch.float32))
        captured.fill_(3.0)
        with pytest.raises(RuntimeError, match="run one pass of the same size, in the same thread, before capturing"):
            manager.get(device, ((4096,), torch.float32))
    assert captured.data_ptr() == warm.data_ptr()
    manager.get(device, ((4096,), torch.float32))
    graph.replay()
    assert warm.eq(3.0).all()

"""Flags of a stream: made once, and never under capture where a pass ran before."""

import pytest
import torch

from moe_ep.kernels.marlin import params

CPU = torch.device("cpu")


class _Gpu:
    """Which stream is current, whether it is being captured, and what was allocated meanwhile."""

    def __init__(self) -> None:
        self.stream, self.capturing, self.made_under_capture = 1, False, 0

    def zeros(self, *args: object, **kwargs: object) -> torch.Tensor:
        self.made_under_capture += self.capturing
        return torch.ones(*args, **kwargs).zero_()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    gpu = _Gpu()
    monkeypatch.setattr(params, "current_stream", lambda device: gpu.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    monkeypatch.setattr(torch, "zeros", gpu.zeros)
    return gpu


def test_a_stream_keeps_its_flags_until_they_are_too_small(gpu: _Gpu) -> None:
    first = params.stream_flags(CPU, "decode", 100)
    assert first.dtype == torch.int32 and not first.any() and first.numel() >= 100
    assert params.stream_flags(CPU, "decode", 50) is first
    assert params.stream_flags(CPU, "prefill", 50) is not first
    larger = params.stream_flags(CPU, "decode", 10_000)
    assert larger.numel() >= 10_000 and params.stream_flags(CPU, "decode", 100) is larger


def test_streams_first_used_under_capture_get_flags_that_were_cleared_before(gpu: _Gpu) -> None:
    sizes = (100, 20_000)
    warm = [params.stream_flags(CPU, "combine", size) for size in sizes]
    for gpu.stream in (2, 3):
        gpu.capturing = True
        captured = [params.stream_flags(CPU, "combine", size) for size in sizes]
        again = params.stream_flags(CPU, "combine", 100)
        gpu.capturing = False
        assert captured[0] is captured[1] is again and all(captured[0] is not other for other in warm)
        gpu.stream = 1
        assert params.stream_flags(CPU, "combine", 100) is warm[1]
    assert gpu.made_under_capture == 0

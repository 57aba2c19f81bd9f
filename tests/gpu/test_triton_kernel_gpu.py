"""Triton kernels launched without Triton compute what Triton's own launches do, whatever it compiled them for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from moe_ep.kernels.triton_kernel import TritonKernel

pytestmark = pytest.mark.gpu
_COUNT = 100


@TritonKernel
@triton.jit
def _scaled_sum_kernel(
    left_ptr, right_ptr, out_ptr, count, stride, factor, HAS_RIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    """out[i] = factor * left[i * stride] + right[i].

    Example: factor 2, left [1, ?, 3], stride 2, right [4, 5]: [6, 11].
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = factor * tl.load(left_ptr + index * stride, mask=index < count, other=0.0).to(tl.float32)
    if HAS_RIGHT:
        total += tl.load(right_ptr + index, mask=index < count, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=index < count)


def _launch(
    left: torch.Tensor,
    right: torch.Tensor | None,
    out: torch.Tensor,
    count: int,
    stride: int,
    factor: float,
    num_warps: int,
) -> None:
    _scaled_sum_kernel[(-(-count // 64),)](
        left, right, out, count, stride, factor, HAS_RIGHT=right is not None, BLOCK=64, num_warps=num_warps
    )


def _cases() -> Iterator[tuple[torch.Tensor, torch.Tensor | None, int, int, float, int]]:
    """Every kind of argument that Triton compiles differently for, and numbers of one kind."""
    for dtype, start, with_right in itertools.product((torch.float32, torch.bfloat16), (0, 1, 8), (False, True)):
        values = torch.randn(40 * _COUNT, device="cuda").to(dtype)[start:]
        right = torch.randn(_COUNT + 1, device="cuda")[start % 2 :] if with_right else None
        for stride, count, factor, warps in (
            (1, _COUNT, 1.0, 1), (2, _COUNT, 0.5, 1), (16, _COUNT, 0.5, 4), (32, 96, 3.0, 4), (17, 48, 16.0, 1),
            (1, 1, 2.0, 1), (2**31 + 16, 1, 2.0, 1),
        ):  # fmt: skip
            yield values, right, count, stride, factor, warps


def _check(left: torch.Tensor, right: torch.Tensor | None, count: int, stride: int, factor: float, warps: int) -> None:
    out = torch.full((_COUNT,), 7.0, device="cuda", dtype=left.dtype)
    _launch(left, right, out, count, stride, factor, warps)
    expected = factor * left[::stride][:count].float() + (0 if right is None else right[:count])
    torch.testing.assert_close(out[:count], expected.to(left.dtype))
    assert (out[count:] == 7).all()


def test_whatever_it_was_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = list(_cases())
    for case in cases:
        _check(*case)
    assert 0 < len(_scaled_sum_kernel.compiled) <= len(cases)
    monkeypatch.setattr(_scaled_sum_kernel, "function", None)  # Triton is not asked again
    for case in reversed(cases):
        _check(*case)


def test_without_programs_there_is_no_launch() -> None:
    values = torch.zeros(0, device="cuda")
    _launch(values, None, values, 0, 1, 1.0, 1)


def test_captured_and_on_another_stream() -> None:
    left, out = torch.randn(_COUNT, device="cuda"), torch.zeros(_COUNT, device="cuda")
    _launch(left, None, out, _COUNT, 1, 3.0, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _launch(left, None, out, _COUNT, 1, 3.0, 4)
        _launch(out, left, out, _COUNT, 1, 2.0, 4)
    for _ in range(3):
        left.normal_()
        graph.replay()
        torch.testing.assert_close(out, 7 * left)


def test_in_several_threads() -> None:
    case = next(_cases())
    _check(*case)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(50):
                _check(*case)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.gpu2
def test_on_the_device_of_its_tensors() -> None:
    for index in (1, 0, 1):
        left = torch.randn(_COUNT, device=f"cuda:{index}")
        out = torch.zeros_like(left)
        _launch(left, None, out, _COUNT, 1, 3.0, 4)
        torch.cuda.synchronize(index)
        torch.testing.assert_close(out, 3 * left)
    assert torch.cuda.current_device() == 0

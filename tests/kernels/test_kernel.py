"""What a launch tells the driver, without a GPU: a stand-in reads the structures where the driver would."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
import torch

from moe_ep.kernels import jit

STREAM, FUNCTION, CONTEXT = 7, 1234, 99
OK, INVALID_VALUE, INVALID_CONTEXT = 0, 1, 201


class Params(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int), ("factor", ctypes.c_float), ("pointer", ctypes.c_void_p))


class Driver:
    """Remembers launches as (grid, block, shared bytes, stream, attributes, parameters).

    Attributes:
        kinds: of the parameters, as in the module struct.
        results: of the launches to come.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.kinds = ["ifP"]
        self.results: list[int] = []
        self.context = 0

    def cuCtxGetCurrent(self, where: int) -> int:
        ctypes.c_void_p.from_address(where).value = CONTEXT
        return OK

    def cuCtxSetCurrent(self, context: int) -> int:
        self.context = context
        return OK

    def cuGetErrorName(self, status: int, where: int) -> int:
        ctypes.c_char_p.from_address(where).value = b"CUDA_ERROR_INVALID_VALUE"
        return OK

    def cuLaunchKernelEx(self, config: bytes, function: int, pointers: bytes, extra: None) -> int:
        *sizes, shared, stream, attributes, count = struct.unpack("@7IPPI4x", config)
        found = [ctypes.string_at(attributes + 72 * index, 72) for index in range(count)]
        addresses = struct.unpack(f"@{len(self.kinds)}P", pointers)
        params = [
            struct.unpack(f"@{kind}", ctypes.string_at(address, struct.calcsize(f"@{kind}")))
            for kind, address in zip(self.kinds, addresses, strict=True)
        ]
        assert function == FUNCTION and extra is None
        self.launches.append((tuple(sizes[:3]), tuple(sizes[3:]), shared, stream, found, params))
        return self.results.pop(0) if self.results else OK


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(jit, "driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(jit, "current_stream", lambda device: STREAM)
    return driver


def made(**more: Any) -> jit.Kernel:
    return jit.Kernel("scale", FUNCTION, torch.device("cuda", 0), None, **more)


def test_one_struct_by_value(driver: Driver) -> None:
    made().launch(Params(3, 0.5, 1 << 40), (5, 2), 128, 4096)
    made().launch(Params(4, 2.0, None), (6,), 32)
    assert driver.launches == [
        ((5, 2, 1), (128, 1, 1), 4096, STREAM, [], [(3, 0.5, 1 << 40)]),
        ((6, 1, 1), (32, 1, 1), 0, STREAM, [], [(4, 2.0, 0)]),
    ]


def test_parameters_one_by_one(driver: Driver) -> None:
    driver.kinds = ["i", "f", "P"]
    made(offsets=(0, 4, 8)).launch(Params(3, 0.5, 1 << 40), (1, 1, 1), 32)
    assert driver.launches[0][-1] == [(3,), (0.5,), (1 << 40,)]


def test_only_hopper_lets_kernels_come_early(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    # Programmatic stream serialization, allowed.
    made().launch(Params(), (1,), 32, early=True)
    assert driver.launches[0][4] == [struct.pack("@i4xi60x", 6, 1)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    made().launch(Params(), (1,), 32, early=True)
    assert driver.launches[1][4] == []


def test_threads_without_a_context_get_the_one_of_the_kernel(driver: Driver) -> None:
    driver.results = [INVALID_CONTEXT]
    made().launch(Params(), (1,), 32)
    assert driver.context == CONTEXT and len(driver.launches) == 2


def test_failures_name_the_kernel_and_the_error(driver: Driver) -> None:
    driver.results = [INVALID_VALUE]
    with pytest.raises(RuntimeError, match="for kernel scale failed with CUDA_ERROR_INVALID_VALUE"):
        made().launch(Params(), (1,), 32)

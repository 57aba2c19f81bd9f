"""Which launches of a Triton kernel go through Triton, and what the others hand over; without a GPU."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moe_ep.kernels import triton_kernel
from moe_ep.kernels.triton_kernel import TritonKernel

_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}


def type_of(value: Any) -> str:
    """What Triton makes of an argument."""
    if isinstance(value, torch.Tensor):
        return f"*{value.dtype}"
    if isinstance(value, float):
        return "fp32"
    return "constexpr" if value is None or value == 1 else "i64" if value >= 1 << 31 else "i32"


def places_of(types: list[str]) -> list[tuple[int, int]]:
    """(offset, bytes) of a kernel's parameters and of two pointers behind them, each aligned to its size."""
    places, end = [], 0
    for kind in (*types, "*scratch", "*profile"):
        size = 4 if kind in ("i32", "fp32") else 8
        places.append((-(-end // size) * size, size))
        end = sum(places[-1])
    return places


class Function:
    """Stands for a `triton.jit` function.

    Attributes:
        calls: numbers of launches that went through Triton.
        scratch_bytes: what its kernels ask for.
        places: where the driver says that the last one's parameters are.
    """

    arg_names = ("source_ptr", "map_ptr", "out_ptr", "size", "stride", "factor", "HAS_MAP")

    def __init__(self) -> None:
        self.calls = 0
        self.scratch_bytes = 0
        self.places: list[tuple[int, int]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, **constants: Any) -> Any:
            self.calls += 1
            types = [*map(type_of, args), *("constexpr" for _ in constants)]
            self.places = places_of([kind for kind in types if kind != "constexpr"])
            sizes = {"global_scratch_size": self.scratch_bytes, "profile_scratch_size": 0}
            return SimpleNamespace(
                name="scale",
                function=self.calls,
                src=SimpleNamespace(signature=dict(zip(self.arg_names, types, strict=True))),
                metadata=SimpleNamespace(num_warps=num_warps, shared=64, launch_pdl=True, **sizes),
            )

        return launch


class Kernel:
    """Stands for `moe_ep.kernels.jit.Kernel`, which needs a driver."""

    launches: list[tuple[Any, ...]]

    def __init__(self, entry: str, function: int, device: torch.device, made: Any, offsets: list[int]) -> None:
        self.function, self.made, self.offsets = function, made, offsets

    def launch(self, params: Any, grid: tuple[int, ...], block: int, shared_bytes: int, early: bool) -> None:
        read = [
            struct.unpack_from(kind, bytes(params), at)[0] for kind, at in zip(self.kinds, self.offsets, strict=True)
        ]
        self.launches.append((self.function, read, grid, block, shared_bytes, early))

    @property
    def kinds(self) -> str:
        """How each parameter is laid out."""
        types = [kind for kind in self.made.src.signature.values() if kind != "constexpr"]
        return "".join(_FORMATS.get(kind, "P") for kind in types) + "PP"


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Function:
    function = Function()
    monkeypatch.setattr(triton_kernel, "Kernel", Kernel)
    monkeypatch.setattr(triton_kernel, "param_places", lambda _: function.places)
    monkeypatch.setattr(Kernel, "launches", [], raising=False)
    return function


class Elsewhere(torch.Tensor):
    """A tensor of another device."""

    def get_device(self) -> int:
        return 1


ROWS = torch.zeros(64)
BASE = {"source": ROWS, "map": None, "out": ROWS[16:], "size": 32, "stride": 16, "factor": 2.0, "warps": 1}
# Triton compiles anew for these, or refuses tensors of several devices...
OTHERS = [
    {"source": ROWS.int()},
    {"source": ROWS[1:]},
    {"out": ROWS[2:]},
    {"source": ROWS.as_subclass(Elsewhere)},
    {"out": ROWS[16:].as_subclass(Elsewhere)},
    {"map": ROWS},
    {"size": 33},
    {"size": 1},
    {"size": 1 << 31},
    {"stride": 1},
    {"warps": 4},
]
# ... and takes what it has for these.
SAME = [{"source": ROWS[4:]}, {"size": 48}, {"size": 64, "stride": 160}, {"factor": 0.5}]


def call(kernel: TritonKernel, case: dict[str, Any], grid: tuple[int, ...] = (3, 2)) -> None:
    given = BASE | case
    args = (given["source"], given["map"], given["out"], given["size"], given["stride"], given["factor"])
    kernel[grid](*args, HAS_MAP=given["map"] is not None, num_warps=given["warps"])


def test_triton_is_asked_once_for_each_kind_of_arguments(function: Function) -> None:
    kernel = TritonKernel(function)
    for number, case in enumerate([{}, *OTHERS], start=1):
        call(kernel, case)
        assert function.calls == number, case
    for case in ({}, *OTHERS, *SAME):
        call(kernel, case)
    assert function.calls == 1 + len(OTHERS)
    assert [launch[0] for launch in Kernel.launches] == [*range(1, 2 + len(OTHERS)), 1, 1, 1, 1]


def test_parameters_are_those_that_were_not_compiled_in(function: Function) -> None:
    kernel = TritonKernel(function)
    source, out = ROWS.data_ptr(), ROWS[16:].data_ptr()
    for case, expected in (
        ({}, [source, out, 32, 16, 2.0, 0, 0]),
        ({"stride": 1, "factor": 0.5}, [source, out, 32, 0.5, 0, 0]),
        ({"map": ROWS[4:], "size": 1 << 40}, [source, ROWS[4:].data_ptr(), out, 1 << 40, 16, 2.0, 0, 0]),
    ):
        call(kernel, case)
        call(kernel, case)
        assert Kernel.launches.pop()[1:] == (expected, (3, 2), 32, 64, True)


def test_kernels_that_are_laid_out_otherwise_stay_with_triton(
    function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = TritonKernel(function)
    function.scratch_bytes = 16
    call(kernel, {})
    call(kernel, {})
    function.scratch_bytes = 0
    monkeypatch.setattr(triton_kernel, "param_places", lambda _: [*function.places, (64, 8)])
    kernel = TritonKernel(function)
    call(kernel, {})
    call(kernel, {})
    assert function.calls == 4
    assert not Kernel.launches


def test_without_programs_nothing_is_launched(function: Function) -> None:
    call(TritonKernel(function), {}, grid=(0, 2))
    assert function.calls == 0

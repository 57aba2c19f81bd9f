"""Triton kernels: compiled when they are first launched, and launched again without Triton.

Triton is optional and takes long to import, so modules with Triton kernels must import without it. They take `tl` from
here and mark their functions with `TritonKernel` and `triton_jit`. Triton is imported with the first launch; the names
in those modules then stand for what it needs to find there. Its own launch takes tens of microseconds of Python, so
later launches of the same kind go to the driver directly.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import operator
from collections.abc import Callable
from struct import Struct, calcsize
from types import FunctionType
from typing import Any

import torch

from moe_ep.kernels import jit
from moe_ep.kernels.jit import Kernel, param_places

_MOST_INT32 = (1 << 31) - 1
# How a parameter of each of Triton's types lies in memory, as in the module struct; pointers begin with "*".
_FORMATS = {"i32": "i", "i64": "q", "u64": "Q", "fp32": "f"}
# Triton adds two pointers to scratch behind a function's own parameters; our kernels use none.
_SCRATCH = "PP"


def cdiv(number: int, divisor: int) -> int:
    """The quotient, rounded up. Triton's own function of this name takes microseconds on the host."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below a number from 1 up; as `cdiv`."""
    return 1 << (number - 1).bit_length()


class Late:
    """Stands in a module for what Triton makes of it there, until a kernel of that module is launched.

    Args:
        make: returns what kernels find under the name.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    @functools.cached_property
    def made(self) -> Any:
        return self._make()


class _LateFunction(Late):
    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__(lambda: _triton().jit(function, **options))
        self._scope = function.__globals__

    @functools.cached_property
    def made(self) -> Any:
        made = self.__dict__["made"] = self._make()
        for name, value in [*self._scope.items()]:
            if isinstance(value, Late):
                self._scope[name] = value.made
        return made


def triton_jit(function: Any) -> Any:
    """A function that kernels call, in place of `triton.jit`."""
    return _LateFunction(function)


def constant(value: Any) -> Any:
    """A number of a module that kernels read, or a function that returns it once Triton is there."""
    return Late(lambda: _triton().language.constexpr(value() if callable(value) else value))


def _triton() -> Any:
    return importlib.import_module("triton")


tl: Any = Late(lambda: importlib.import_module("triton.language"))
libdevice: Any = Late(lambda: importlib.import_module("triton.language.extra.libdevice"))
gdc_wait: Any = Late(lambda: importlib.import_module("triton.language.extra.cuda").gdc_wait)
gdc_launch_dependents: Any = Late(lambda: importlib.import_module("triton.language.extra.cuda").gdc_launch_dependents)


@triton_jit
def take_over(EARLY: tl.constexpr):
    """Waits for the kernels before, and lets the next one start; precedes everything that a kernel reads or writes.

    Waiting for the previous kernel keeps the order of all: none ends before those before it have ended.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def is_interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter (TRITON_INTERPRET=1)."""
    return bool(_triton().knobs.runtime.interpret)


def comes_early(device: torch.device) -> bool:
    """Whether a kernel there can be launched with `launch_pdl` (programmatic dependent launch): from Hopper on."""
    return not is_interpreted() and jit.capability(device.index) >= (9, 0)


class TritonKernel:
    """A kernel in Triton's language, called as a `triton.jit` function is: `kernel[grid](*args, **constants)`.

    Triton compiles a function for what it knows of the arguments: dtypes, addresses and numbers that 16 divides,
    numbers that are 1 or need 64 bits, pointers that are None, and all constants. What it compiled is kept by just
    that and the tensors' devices, and launched directly where all of it is the same again. The first call of a kind
    goes through Triton, and every call in its interpreter.

    The function's parameters are pointers, named ..._ptr, then numbers, then constants, which are passed by name. The
    first pointer is never None, and the kernel runs on its device.

    Args:
        function: a plain function, or what `triton.jit` made of one.
        options: of `triton.jit`.
    """

    def __init__(self, function: Any, **options: Any) -> None:
        self._late = _LateFunction(function, **options) if isinstance(function, FunctionType) else None
        self._given = function
        names = (
            function.arg_names if self._late is None else function.__code__.co_varnames[: function.__code__.co_argcount]
        )
        self._num_pointers = sum(name.endswith("_ptr") for name in names)
        self.compiled: dict[tuple[object, ...], _Compiled] = {}

    @functools.cached_property
    def function(self) -> Any:
        """The function that Triton compiles."""
        return self._given if self._late is None else self._late.made

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._run, grid)

    def _run(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if 0 in grid:
            return
        tensors, numbers = args[: self._num_pointers], args[self._num_pointers :]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        key = (
            *[None if tensor is None else tensor.dtype for tensor in tensors],
            # Triton refuses memory that the GPU cannot reach, which the driver does not.
            *[None if tensor is None else tensor.get_device() for tensor in tensors],
            *[address % 16 for address in addresses],
            *[number == 1 or (number % 16 == 0, number > _MOST_INT32) for number in numbers],
            *constants,
            *constants.values(),
        )
        compiled = self.compiled.get(key)
        if compiled is not None and compiled.is_known:
            compiled.launch(grid, (*addresses, *numbers))
            return
        with torch.cuda.device_of(tensors[0]):
            made = self.function[grid](*args, **constants)
            if made is not None and compiled is None:
                self.compiled[key] = _Compiled(made, tensors[0].device)


class _Compiled:
    """What Triton made of a function for one kind of arguments.

    Attributes:
        is_known: its parameters lie as they are laid out here.
    """

    def __init__(self, made: Any, device: torch.device) -> None:
        types, metadata = list(made.src.signature.values()), made.metadata
        given = [index for index, type in enumerate(types) if type != "constexpr"]
        formats = "".join("P" if types[index].startswith("*") else _FORMATS[types[index]] for index in given) + _SCRATCH
        places = [(calcsize(f"@{formats[:end]}0{kind}"), calcsize(kind)) for end, kind in enumerate(formats)]
        self._layout = Struct(f"@{formats}")
        self._params = ctypes.c_char * self._layout.size
        self._given = operator.itemgetter(*given)
        self._block, self._shared_bytes, self._early = 32 * metadata.num_warps, metadata.shared, metadata.launch_pdl
        self._kernel = Kernel(made.name, made.function, device, made, [offset for offset, _ in places])
        scratch = metadata.global_scratch_size + metadata.profile_scratch_size
        self.is_known = not scratch and param_places(made.function) == places

    def launch(self, grid: tuple[int, ...], args: tuple[float, ...]) -> None:
        params = self._params.from_buffer_copy(self._layout.pack(*self._given(args), 0, 0))
        self._kernel.launch(params, grid, self._block, self._shared_bytes, self._early)

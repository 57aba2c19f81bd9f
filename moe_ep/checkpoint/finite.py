"""Finds NaN and infinity in weights, from their bits and fast enough to run on every tensor that is read."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_ep import env
from moe_ep.errors import CheckpointError
from moe_ep.files import replacing

logger = logging.getLogger(__name__)

# By dtype: its width in bits, and the smallest positive bit pattern of infinity or NaN. A pattern stands for either if
# all bits of this one are set in it.
MAY_BE_NONFINITE = {
    torch.bfloat16: (16, 0x7F80),
    torch.float16: (16, 0x7C00),
    torch.float32: (32, 0x7F800000),
    torch.float64: (64, 0x7FF0000000000000),
    torch.float8_e4m3fn: (8, 0x7F),
    torch.float8_e5m2: (8, 0x7C),
}
_BLOCK_BYTES = 1 << 19  # stays in the L2 cache of a core
# Shorter reads are not worth compiling for.
_COMPILE_FROM_BYTES = 1 << 20
_COMPILE_LIMIT_S = 60.0
_STORE_ALIGNMENT = 16
_compile_lock = threading.Lock()


class _Span(ctypes.Structure):
    """`struct span` of finite.c."""

    _fields_ = (
        ("start", ctypes.c_int64),
        ("stop", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("mask", ctypes.c_uint64),
    )


def read_checked(
    fd: int, buffer: memoryview, offset: int, spans: Sequence[tuple[int, int, torch.dtype]]
) -> tuple[int, bool]:
    """Reads `len(buffer)` bytes of a file at `offset`, and looks for NaN and infinity in spans of them.

    Where a C compiler is there, a compiled loop looks at each 128 KiB right after they were read. Otherwise numpy
    looks at all that was read, which takes about as long as reading.

    Args:
        spans: (start, stop, dtype) of ranges of the buffer that hold whole elements, in order.

    Returns:
        The bytes read, fewer at the end of the file, and whether a span holds NaN or infinity.

    Raises:
        OSError: the file cannot be read.
    """
    spans = [span for span in spans if span[2] in MAY_BE_NONFINITE]
    library = _compiled() if spans and _is_worth_it(len(buffer)) else None
    if library is not None:
        bits_of = [(start, stop, *MAY_BE_NONFINITE[dtype]) for start, stop, dtype in spans]
        rows = (_Span * len(spans))(*(_Span(start, stop, bits // 8, mask) for start, stop, bits, mask in bits_of))
        found, into = ctypes.c_int32(0), np.frombuffer(buffer, dtype=np.uint8)
        done = library.moe_ep_read_checked(
            fd, into.ctypes.data, len(buffer), offset, rows, len(spans), ctypes.byref(found)
        )
        if done < 0:
            raise OSError(-done, os.strerror(-done))
        return done, bool(found.value)
    done = 0
    while done < len(buffer) and (count := os.preadv(fd, [buffer[done:]], offset + done)):
        done += count
    return done, any(has_nonfinite(buffer[start : min(stop, done)], dtype) for start, stop, dtype in spans)


class CheckedCopy:
    """Copies tensors of one dtype to host memory, and looks for NaN and infinity while each vector is in a register.

    Args:
        nbytes: about how much will be copied.

    Attributes:
        looks: whether to look at what is copied next.
        found: whether what was looked at holds NaN or infinity.
    """

    def __init__(self, nbytes: int) -> None:
        self.looks, self.found = False, False
        self._library = _compiled() if _is_worth_it(nbytes) else None

    @property
    def is_fast(self) -> bool:
        """Whether there is a compiled loop, so that looking costs nothing."""
        return self._library is not None

    def __call__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        fits = target.is_cpu and source.is_cpu and target.dtype == source.dtype and target.shape == source.shape
        contiguous = target.is_contiguous() and source.is_contiguous() and target.data_ptr() % _STORE_ALIGNMENT == 0
        if self._library is None or not (fits and contiguous):
            target.copy_(source)
            self.found |= self.looks and count_nonfinite(source) > 0
            return
        bits, mask = MAY_BE_NONFINITE.get(source.dtype, (64, 0)) if self.looks else (64, 0)
        addresses = target.data_ptr(), source.data_ptr()
        self.found |= bool(self._library.moe_ep_copy_checked(*addresses, source.nbytes, bits // 8, mask))


def _is_worth_it(nbytes: int) -> bool:
    return nbytes >= _COMPILE_FROM_BYTES or _compile.cache_info().currsize > 0


def _compiled() -> Any:
    with _compile_lock:
        return _compile()


@functools.cache
def _compile() -> Any:
    """The functions of finite.c, compiled into MOE_EP_CACHE_DIR; None without a C compiler."""
    source = Path(__file__).with_suffix(".c")
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    name = hashlib.sha256(source.read_bytes() + platform.machine().encode()).hexdigest()[:16]
    library = env.CACHE_DIR.get() / "host" / f"finite-{name}.so"
    try:
        if not library.exists():
            if compiler is None:
                return None
            library.parent.mkdir(parents=True, exist_ok=True)
            with replacing(library) as partial:
                subprocess.run(
                    [compiler, "-O3", "-funroll-loops", "-shared", "-fPIC", "-o", str(partial), str(source)],
                    check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=_COMPILE_LIMIT_S,
                )  # fmt: skip
        functions = ctypes.CDLL(str(library))
        address, size = ctypes.c_void_p, ctypes.c_int64
        functions.moe_ep_read_checked.argtypes = [ctypes.c_int, address, size, size, address, size, address]
        functions.moe_ep_read_checked.restype = size
        functions.moe_ep_copy_checked.argtypes = [address, address, size, size, ctypes.c_uint64]
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        logger.info("weights are checked for NaN and infinity by numpy: %s was not compiled: %s", source.name, error)
        return None
    return functions


def has_nonfinite(data: memoryview | np.ndarray, dtype: torch.dtype) -> bool:
    """Whether contiguous bytes of that dtype hold NaN or infinity.

    Finite patterns are below a bound both among the positive and among the negative ones, so the largest value as
    signed integers and the largest as unsigned ones tell. Both are found block by block, so that memory is read once.
    """
    if dtype not in MAY_BE_NONFINITE or not len(data):
        return False
    bits, bound = MAY_BE_NONFINITE[dtype]
    signed = np.frombuffer(data, dtype=f"i{bits // 8}", count=len(data) // (bits // 8))
    unsigned, negative_bound = signed.view(f"u{bits // 8}"), bound + (1 << (bits - 1))
    block = _BLOCK_BYTES * 8 // bits
    for start in range(0, len(signed), block):
        part = slice(start, start + block)
        if signed[part].max() >= bound or unsigned[part].max() >= negative_bound:
            return True
    return False


def count_nonfinite(tensor: torch.Tensor) -> int:
    """How many elements are NaN or infinity; 0 for dtypes that have none."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0
    if tensor.dtype == torch.float8_e8m0fnu:
        return int((tensor.view(torch.uint8) == 0xFF).sum())
    if tensor.is_cpu and not has_nonfinite(
        tensor.detach().contiguous().flatten().view(torch.uint8).numpy(), tensor.dtype
    ):
        return 0
    values = tensor.float() if tensor.element_size() == 1 else tensor
    return int((~values.isfinite()).sum())


def check_finite(where: Path | str, name: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError, with the count, if a tensor that was read from `where` holds NaN or infinity."""
    if count := count_nonfinite(tensor):
        raise CheckpointError(
            f"{where}: tensor {name}: expected finite numbers, found NaN or infinity in {count} of {tensor.numel()}; "
            f"fetch it again, or load it all the same with allow_nonfinite (--allow-nonfinite)"
        )

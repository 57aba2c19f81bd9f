"""NVSHMEM's device code for kernels that reach ranks whose memory is not mapped here: where it is, and its start.

cuda/device_api.cuh has what kernels call. Such a kernel is compiled with DEVICE_API=1 and linked with
`libnvshmem_device.a`, which takes some seconds once; without unmapped ranks kernels need none of it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from moe_ep.errors import missing_extra
from moe_ep.kernels import jit

_HEADERS = ("cccl", "cudart")
# Loaded code that NVSHMEM knows; it must hear of it again where it is started anew.
_started: list[Any] = []


@functools.cache
def device_archive() -> jit.Archive:
    """What kernels with DEVICE_API=1 are linked with.

    Raises:
        ImportError: a wheel is missing.
    """
    import importlib.util

    import cuda.pathfinder

    found = importlib.util.find_spec("nvidia.nvshmem")
    home = None if found is None else Path(next(iter(found.submodule_search_locations or ())))
    if home is None or not (home / "lib" / "libnvshmem_device.a").exists():
        raise missing_extra("nvidia-nvshmem-cu13", "cuda", "NVSHMEM's device code")
    include_paths = [home / "include"]
    for name in _HEADERS:
        directory = cuda.pathfinder.find_nvidia_header_directory(name)
        if directory is None:
            raise missing_extra(f"the headers of nvidia-cuda-{name}", "cuda", "NVSHMEM's device code")
        include_paths.append(Path(directory))
    return jit.Archive(home / "lib" / "libnvshmem_device.a", tuple(include_paths), _start)


def _start(code: Any) -> None:
    _tell(code)
    _started.append(code)


def start_again() -> None:
    """Tells NVSHMEM of all code that an earlier start of it knew."""
    for code in _started:
        _tell(code)


def stop() -> None:
    """Before NVSHMEM ends."""
    import nvshmem.core

    for code in _started:
        nvshmem.core.library_finalize(nvshmem.core.NvshmemKernelObject.from_obj(code))


def _tell(code: Any) -> None:
    import nvshmem.core

    nvshmem.core.library_init(nvshmem.core.NvshmemKernelObject.from_obj(code))

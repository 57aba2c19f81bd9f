"""NVSHMEM's device library, with which kernels for ranks out of reach are linked, also where there is no GPU."""

from __future__ import annotations

import pytest

from moe_ep.dispatch.nvshmem.kernels import device_archive


def skip_without_device_library() -> None:
    """Skips a test where a wheel of the extra `test` is missing that compiles or links with it."""
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    pytest.importorskip("cuda.bindings.nvrtc", reason="the bindings of NVRTC are not installed")
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        device_archive()
        load_nvidia_dynamic_lib("nvJitLink")
    except (ImportError, DynamicLibNotFoundError) as error:
        pytest.skip(str(error))

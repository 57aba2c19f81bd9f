"""Sources of the NVSHMEM kernels, the layout of their symmetric memory, and NVSHMEM's device library.

Kernels that reach ranks whose memory is not mapped here are compiled with DEVICE_API=1 and linked with
`libnvshmem_device.a`, which takes some seconds once (cuda/device_api.cuh). Without unmapped ranks kernels need none of
it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch

from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.dispatch.batch import wire_dtype
from moe_ep.errors import missing_extra
from moe_ep.kernels import jit

CUDA = Path(__file__).parent / "cuda"
_ALIGNMENT = 512
_HEADERS = ("cccl", "cudart")
# Modules that are registered with NVSHMEM, and again whenever it is initialised again.
_registered: list[Any] = []


def align(num_bytes: int, alignment: int = _ALIGNMENT) -> int:
    """The next multiple."""
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True, kw_only=True)
class BufferLayout(ABC):
    """The buffers of one shape's batches in symmetric memory, the same on every rank.

    Attributes:
        num_ranks, capacity, hidden_size, topk: R, tokens per rank, K, slots of a token.
        code_dtype: rows are sent as int8 or e4m3 codes with scales; None for rows of 16 bits.
        passed_dtype: rows may also come as int8 or e4m3 codes, and are sent as they are (`pass_on`); None: they do not.
        f32_results: results are sent in f32, as beside f16 rows, and not in 16 bits.
        device_api: some ranks are out of each other's reach or not joined by NVLink, and NVSHMEM's device library is
            used.
        batches_in_flight: how many batches between prepare and finalize have buffers of their own.
        slot_results: a result is that of one slot, as batch-invariant layers need it, and not a rank's sum.
        overlaps: rows and results are sent while the experts run.
    """

    num_ranks: int
    capacity: int
    hidden_size: int
    topk: int
    code_dtype: torch.dtype | None
    passed_dtype: torch.dtype | None = None
    f32_results: bool = False
    device_api: bool = False
    batches_in_flight: int = 1
    slot_results: bool = False
    overlaps: bool = False

    @classmethod
    def of(cls, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig | None, **more: Any) -> Self:
        """The buffers of such a layer's batches; `more` are the other attributes."""
        return cls(
            num_ranks=moe_config.ep_size,
            capacity=max(moe_config.max_num_tokens, 1),
            hidden_size=moe_config.hidden_dim,
            topk=moe_config.experts_per_token + moe_config.num_fused_shared_experts,
            code_dtype=None if quant_config is None else quant_config.dispatch_dtype,
            f32_results=wire_dtype(moe_config.in_dtype) is torch.float32,
            **more,
        )

    @property
    def is_quantized(self) -> bool:
        return self.code_dtype is not None

    @property
    def result_bytes(self) -> int:
        return (4 if self.f32_results else 2) * self.hidden_size

    @property
    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Bytes of each buffer of a batch, in the order in which they lie."""

    @abstractmethod
    def sources(self, dtype: torch.dtype) -> dict[str, jit.KernelSource]:
        """The backend's kernels by name, for batches of that dtype."""

    def sources_of_changes(self, dtype: torch.dtype, most_ranks: int) -> list[jit.KernelSource]:
        """The kernels for one rank less and one more, where there may be as many."""
        changed = [replace(self, num_ranks=self.num_ranks + more) for more in (-1, 1)]
        return [
            source
            for layout in changed
            if 0 < layout.num_ranks <= most_ranks
            for source in layout.sources(dtype).values()
        ]

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each buffer begins."""
        begins = itertools.accumulate(map(align, self.sizes.values()), initial=0)
        return dict(zip(self.sizes, begins, strict=False))  # the last one is the end

    @cached_property
    def batch_bytes(self) -> int:
        return sum(align(size) for size in self.sizes.values())

    @property
    def symmetric_bytes(self) -> int:
        """Bytes of all batches in flight."""
        return self.batches_in_flight * self.batch_bytes


def structure(*fields: tuple[str, Any], anonymous: tuple[str, ...] = ()) -> Any:
    """A C struct with these members."""
    return type("Structure", (ctypes.Structure,), {"_anonymous_": anonymous, "_fields_": fields})


@functools.cache
def params_type(common: Any, num_pointers: int, num_ints: int) -> Any:
    """`Params` of kernels: what they share, then their pointers and numbers in order."""
    pointers, numbers = ctypes.c_void_p * num_pointers, ctypes.c_int * num_ints
    return structure(("common", common), ("pointers", pointers), ("numbers", numbers))


def kernel_source(name: str, layout: BufferLayout, dtype: torch.dtype, **more: int) -> jit.KernelSource:
    """The kernel of cuda/{name}.cu for batches of that layout and dtype, built with `more` defines."""
    defines = {
        "HIDDEN": layout.hidden_size,
        "TOPK": layout.topk,
        "RANKS": layout.num_ranks,
        "EIGHT_BIT": int(layout.is_quantized),
        "INT8": int(layout.code_dtype == torch.int8),
        "ACT_BF16": int(dtype == torch.bfloat16),
        "DEVICE_API": int(layout.device_api),
    }
    if layout.slot_results:
        defines["SLOT_RESULTS"] = 1
    if layout.overlaps:
        defines["OVERLAP"] = 1
    defines |= more
    path = CUDA / f"{name}.cu"
    archive = device_archive() if layout.device_api else None
    return jit.KernelSource(path, name, tuple((key, str(value)) for key, value in defines.items()), archive)


@functools.cache
def device_archive() -> jit.Archive:
    """NVSHMEM's device library, which kernels with DEVICE_API=1 are linked with.

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
    _register(code)
    _registered.append(code)


def restart_device_library() -> None:
    """Registers with NVSHMEM again all modules that it knew before."""
    for code in _registered:
        _register(code)


def stop_device_library() -> None:
    """Unregisters all modules; to be called before NVSHMEM is finalized."""
    import nvshmem.core

    for code in _registered:
        nvshmem.core.library_finalize(nvshmem.core.NvshmemKernelObject.from_obj(code))


def _register(code: Any) -> None:
    import nvshmem.core

    nvshmem.core.library_init(nvshmem.core.NvshmemKernelObject.from_obj(code))

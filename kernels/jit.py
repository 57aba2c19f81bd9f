"""CUDA C++ kernels compiled at run time with NVRTC through cuda.core: nvcc is not needed, and the wheel is pure Python.

A `KernelSource` names a .cu file, its `extern "C"` entry and the `-D` constants that it is compiled with.
`compile_only` needs neither a GPU nor a driver. `load` returns a launchable kernel for a device; cubins are cached
under MOE_EP_CACHE_DIR, keyed by source, our headers, options and the versions of the toolchain. Any number of processes
may start at once: cache files are put in place atomically, and a race costs a compilation, never an error.

Modules cannot be loaded under CUDA-graph capture, so a kernel must be loaded before, by a first call outside the graph
or by `load`. If calls choose between several kernels, `load_all` loads all of them in the first call, so that none is
missing later.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import hashlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from moe_ep import env
from moe_ep.errors import BackendUnavailableError, missing_extra
from moe_ep.modular_kernel.workspace import current_stream

# ==== Launches ====
#
# A kernel on one GPU, launched by the driver's own function.
#
# The driver's Python bindings build a launch's structures anew in every call; here they are packed as bytes, in the
# layout of CUlaunchConfig and CUlaunchAttribute in cuda.h.

_INVALID_CONTEXT = 201
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
# Grid, block, dynamic shared memory, stream, attributes and their number.
_CONFIG = struct.Struct("@3I3IIPPI4x")
# One attribute: its id, and a value of 64 bytes.
_EARLY = ctypes.create_string_buffer(struct.pack("@i4xi60x", _PROGRAMMATIC_STREAM_SERIALIZATION, 1), 72)


class Kernel:
    """A kernel on one device. Its parameters lie in one block of memory; those of CUDA sources are one struct.

    Args:
        function: the driver's handle, of the context that is current.
        owner: keeps the code loaded.
    """

    def __init__(
        self, entry: str, function: int, device: torch.device, owner: object, offsets: Sequence[int] = (0,)
    ) -> None:
        self.entry = entry
        self.function, self._device, self._owner = function, device, owner
        self._can_come_early = torch.cuda.get_device_capability(device) >= (9, 0)
        self._driver = driver()
        self._offsets, self._pointers = offsets, struct.Struct(f"@{len(offsets)}P")
        context = ctypes.c_void_p()
        self._check(self._driver.cuCtxGetCurrent(ctypes.addressof(context)))
        self._context = context.value
        self._shared_bytes = 0

    def allow_shared(self, num_bytes: int) -> None:
        """Raises the limit of dynamic shared memory per launch; must be called before capture."""
        if num_bytes > max(self._shared_bytes, 48 * 1024):
            self._check(self._driver.cuFuncSetAttribute(self.function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, num_bytes))
            self._shared_bytes = num_bytes

    def launch(
        self,
        params: ctypes.Structure | ctypes.Array[Any],
        grid: tuple[int, ...],
        block: int,
        shared_bytes: int = 0,
        early: bool = False,
    ) -> None:
        """Launches on the current stream of the device; `params` is copied before this returns.

        Args:
            grid: up to three sizes, in blocks.
            early: allow it to start before the previous kernel has ended (programmatic dependent launch, from Hopper
                on); the kernel itself must wait for that one with griddepcontrol.wait.
        """
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self.launch(params, grid, block, shared_bytes, early)
        early = early and self._can_come_early
        config = _config(grid, block, shared_bytes, current_stream(self._device), early)
        start = ctypes.addressof(params)
        pointers = self._pointers.pack(*[start + offset for offset in self._offsets])
        status = self._driver.cuLaunchKernelEx(config, self.function, pointers, None)
        if status == _INVALID_CONTEXT:
            # A thread that has not used the GPU yet has no current context.
            self._check(self._driver.cuCtxSetCurrent(self._context))
            status = self._driver.cuLaunchKernelEx(config, self.function, pointers, None)
        if status:
            self._check(status)
        return None

    def _check(self, status: int) -> None:
        """RuntimeError with the error's name if a driver call failed."""
        if status:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorName(status, ctypes.addressof(name))
            cause = (name.value or b"an unknown error").decode()
            raise RuntimeError(f"CUDA driver call for kernel {self.entry} failed with {cause}")


def param_places(function: int) -> list[tuple[int, int]]:
    """(offset, bytes) of a function's parameters; none from a driver before 12.4, which does not tell."""
    found: list[tuple[int, int]] = []
    info = getattr(driver(), "cuFuncGetParamInfo", None)
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    where = ctypes.byref(offset), ctypes.byref(size)
    while info is not None and not info(ctypes.c_void_p(function), ctypes.c_size_t(len(found)), *where):
        found.append((offset.value, size.value))
    return found


@functools.lru_cache(maxsize=4096)
def _config(grid: tuple[int, ...], block: int, shared_bytes: int, stream: int, early: bool) -> bytes:
    sizes = (*(*grid, 1, 1)[:3], block, 1, 1, shared_bytes)
    return _CONFIG.pack(*sizes, stream, ctypes.addressof(_EARLY) if early else 0, int(early))


@functools.cache
def driver() -> Any:
    """NVIDIA's driver, its functions taking addresses and handles as integers, and structures as bytes."""
    library = ctypes.CDLL("libcuda.so.1")
    pointer, bytes_ = ctypes.c_void_p, ctypes.c_char_p
    library.cuLaunchKernelEx.argtypes = (bytes_, pointer, bytes_, pointer)
    library.cuFuncSetAttribute.argtypes = (pointer, ctypes.c_int, ctypes.c_int)
    library.cuCtxGetCurrent.argtypes = library.cuCtxSetCurrent.argtypes = (pointer,)
    library.cuGetErrorName.argtypes = (ctypes.c_int, pointer)
    return library


Name = TypeVar("Name")

_MIN_CAPABILITY = (8, 0)
_lock = threading.Lock()
_loaded: dict[tuple[KernelSource, int], Kernel] = {}


@dataclass(frozen=True)
class Archive:
    """Device code that a kernel is linked with.

    Attributes:
        path: the .a file.
        include_paths: the folders of its headers and of those that they include.
        start: initialises loaded code; called once for each kernel, with its cuda.core.ObjectCode.
    """

    path: Path
    include_paths: tuple[Path, ...]
    start: Callable[[Any], object]


@dataclass(frozen=True)
class KernelSource:
    """A kernel to compile.

    Attributes:
        path: the .cu file; our headers are the .cuh files next to it and in kernels/cuda.
        entry: name of the `extern "C" __global__` function.
        defines: (name, value) pairs, passed as -D.
        archive: device code that it is linked with, or None.
        folders: more folders of our headers.
    """

    path: Path
    entry: str
    defines: tuple[tuple[str, str], ...] = ()
    archive: Archive | None = None
    folders: tuple[Path, ...] = ()

    def compile_ahead(self, device: torch.device) -> None:
        """Compiles it into the disk cache, unless it is there, without loading it; processes may share the work."""
        cubin(self, _arch_of(device))


class Resources(NamedTuple):
    """The resources that ptxas reports for the entry."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    log: str


def compile_only(source: KernelSource, arch: str) -> Resources:
    """Compiles for `arch` ("sm_80", "sm_90a") and reports the resources used; touches no GPU, driver or cache.

    Raises:
        ImportError: cuda-core or NVRTC is missing.
        RuntimeError: the source does not compile; the message holds the compiler's log.
    """
    log = io.StringIO()
    _compile(source, arch, log)
    text = log.getvalue()
    registers = re.search(r"Used (\d+) registers", text)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if registers is None or spills is None:
        raise RuntimeError(f"ptxas reported no resources for {source.entry} of {source.path.name}: {text}")
    return Resources(int(registers[1]), int(spills[1]), int(spills[2]), text)


def compile_elsewhere(sources: Iterable[KernelSource], device: torch.device) -> None:
    """Has another process compile kernels without an archive into the disk cache, each once; nobody waits for it.

    Compiling holds up all threads of a process for seconds.
    """
    arch = _arch_of(device)
    asked = [source for source in sources if source.archive is None and (source, arch) not in _elsewhere]
    if asked:
        _elsewhere.update((source, arch) for source in asked)
        threading.Thread(target=run_compiler, args=(asked, arch), name="moe_ep-compile", daemon=True).start()


def run_compiler(sources: Sequence[KernelSource], arch: str) -> int:
    """Compiles kernels without an archive in a process that this thread waits for; its exit code."""
    named = [
        {"path": str(each.path), "entry": each.entry, "defines": each.defines, "folders": [*map(str, each.folders)]}
        for each in sources
    ]
    command = [sys.executable, "-c", f"from {__name__} import compile_given; compile_given()"]
    return subprocess.run(command, input=json.dumps([arch, named]), text=True, capture_output=True).returncode


def compile_given() -> None:
    """The process of `run_compiler`."""
    os.nice(10)
    arch, named = json.load(sys.stdin)
    for each in named:
        defines, folders = tuple(map(tuple, each["defines"])), tuple(map(Path, each["folders"]))
        cubin(KernelSource(Path(each["path"]), each["entry"], defines, folders=folders), arch)


_elsewhere: set[tuple[KernelSource, str]] = set()


@functools.cache
def capability(device_index: int) -> tuple[int, int]:
    """The compute capability of a GPU; (9, 0) is Hopper."""
    return torch.cuda.get_device_capability(device_index)


def load(source: KernelSource, device: torch.device) -> Kernel:
    """The kernel on `device`; see load_all."""
    return load_all({source.entry: source}, device)[source.entry]


def load_all(sources: Mapping[Name, KernelSource], device: torch.device) -> dict[Name, Kernel]:
    """The kernels on `device` by the names of their sources; the first call compiles them side by side, or takes them
    from the cache.

    Raises:
        ImportError: cuda-core or NVRTC is missing.
        BackendUnavailableError: no driver, or a GPU older than sm_80.
        RuntimeError: the first call came under CUDA-graph capture.
    """
    if not torch.cuda.is_available():
        entry = next(iter(sources.values())).entry
        raise BackendUnavailableError(f"kernel {entry} needs a CUDA GPU and torch sees none")
    index = torch.cuda.current_device() if device.index is None else device.index
    if any((source, index) not in _loaded for source in sources.values()):
        with _lock:
            _load([source for source in sources.values() if (source, index) not in _loaded], index)
    return {name: _loaded[source, index] for name, source in sources.items()}


def _load(sources: list[KernelSource], index: int) -> None:
    """Loads what another thread has not loaded meanwhile."""
    if not sources:
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"kernel {sources[0].entry} is not loaded and the stream is capturing a CUDA graph; "
            f"run one pass of the same kind before capturing"
        )
    device = torch.device("cuda", index)
    with ThreadPoolExecutor(max_workers=len(sources)) as pool:
        codes = list(pool.map(lambda source: cubin(source, _arch_of(device)), sources))
    with torch.cuda.device(index):
        torch.cuda.current_stream().synchronize()  # makes the primary context current
        for source, compiled in zip(sources, codes, strict=True):
            code = cuda_core().ObjectCode.from_cubin(compiled, name=source.entry)
            if source.archive is not None:
                source.archive.start(code)
            function = checked(driver_bindings().cuKernelGetFunction(code.get_kernel(source.entry).handle))
            _loaded[source, index] = Kernel(source.entry, int(function), device, code)


def unusable_reason() -> str | None:
    """Why kernels cannot be compiled and run on this machine, and how to fix that, in one line; None if they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}; 8.0 (A100) or newer is needed"
    try:
        cuda_core()
    except ImportError as error:
        return str(error)
    return None


def _arch_of(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        raise BackendUnavailableError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; the "
            f"kernels need 8.0 (A100) or newer, choose experts='reference' on this GPU"
        )
    # sm_90a has instructions that only Hopper has; later architectures run the code for sm_80.
    return "sm_90a" if capability == (9, 0) else f"sm_{capability[0]}{capability[1]}"


def cubin(source: KernelSource, arch: str) -> bytes:
    """The machine code, from the disk cache; compiled into it if missing."""
    from cuda.core.utils import FileStreamProgramCache, make_program_cache_key

    code, options = source.path.read_text(), _options(source, arch)
    key = make_program_cache_key(
        code=code, code_type="c++", options=options, target_type="cubin", extra_digest=_surroundings(source)
    )
    with FileStreamProgramCache(env.CACHE_DIR.get() / "kernels") as cache:
        found = cache.get(key)
        if found is None:
            found = bytes(_compile(source, arch).code)
            cache[key] = found
        return bytes(found)


def object_code(source: KernelSource, arch: str, log: io.StringIO | None = None) -> Any:
    """Compiles a kernel, without linking it with its archive; the output of ptxas goes into the log."""
    program = cuda_core().Program(source.path.read_text(), "c++", _options(source, arch, report=log is not None))
    return program.compile("cubin", logs=log)


def _compile(source: KernelSource, arch: str, log: io.StringIO | None = None) -> Any:
    """Compiles a cubin, and links it if the kernel has an archive."""
    code = object_code(source, arch, log)
    if source.archive is None:
        return code
    core = cuda_core()
    archived = core.ObjectCode.from_library(str(source.archive.path))
    return core.Linker(code, archived, options=core.LinkerOptions(arch=arch)).link("cubin")


def _options(source: KernelSource, arch: str, report: bool = False) -> Any:
    archive = source.archive
    linked = {} if archive is None else {"relocatable_device_code": True, "device_as_default_execution_space": True}
    return cuda_core().ProgramOptions(
        name=source.path.name,
        arch=arch,
        std="c++17",
        include_path=[str(path) for path in (*_header_folders(source), *(archive.include_paths if archive else ()))],
        define_macro=list(source.defines),
        ptxas_options=["-v"] if report else None,
        **linked,
    )


def _header_folders(source: KernelSource) -> tuple[Path, ...]:
    """The source's own and those it names, and that of the headers that all kernels share."""
    return source.path.parent, *source.folders, Path(__file__).parent / "cuda"


def _surroundings(source: KernelSource) -> bytes:
    """A digest of our headers, the archive, and the version of cuda.core; the key itself covers NVRTC's version."""
    digest = hashlib.sha256(cuda_core().__version__.encode())
    for folder in _header_folders(source):
        for header in sorted(folder.glob("*.cuh")):
            digest.update(header.name.encode() + b"\0" + header.read_bytes())
    if source.archive is not None:
        path, status = source.archive.path, source.archive.path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.digest()


@functools.cache
def cuda_core() -> Any:
    """The package cuda.core; ImportError with the pip line where it or NVRTC is missing."""
    try:
        import cuda.core
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise missing_extra("cuda-core with NVRTC", "cuda", "compiling a GPU kernel") from error
    return cuda.core


@functools.cache
def driver_bindings() -> Any:
    """The driver's bindings. Checks for a driver first, since loading them without one can hang instead of failing."""
    cuda_core()
    if ctypes.util.find_library("cuda") is None and not torch.cuda.is_available():
        raise BackendUnavailableError("libcuda.so.1 is not there; GPU kernels need NVIDIA's driver")
    from cuda.bindings import driver

    return driver


def pointer(tensor: torch.Tensor | None) -> int | None:
    """A tensor's address for a launch structure; None, a null pointer, without a tensor."""
    return None if tensor is None else tensor.data_ptr()


def checked(result: tuple[Any, ...]) -> Any:
    """The value of a driver call; RuntimeError with the error's name if it failed."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver call failed with {status.name}")
    return values[0] if values else None

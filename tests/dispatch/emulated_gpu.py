"""The NVSHMEM backends' kernels on a CPU: their sources, compiled against tests/dispatch/emulated/, and several ranks.

Threads of the GPU take turns at random, so one seed is one order of everything (emulated/gpu.h says what is emulated).
Parameters, layout and what must come out are the project's own; emulated_decode.py and emulated_prefill.py have them.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from moe_ep.dispatch.nvshmem import kernels
from moe_ep.kernels import batch_plan, jit

COMPILER = shutil.which("c++") or shutil.which("g++")
SOURCES = Path(__file__).parent / "emulated"
FLAGS = ("-std=c++17", "-O1", "-w", "-Wno-psabi", "-ffp-contract=off", "-fPIC", "-U_FORTIFY_SOURCE")
COMPILE = (str(COMPILER), *FLAGS, f"-I{SOURCES}")
MOST_TURNS = 10_000_000
# Bodies of the functions that are a GPU's instructions; compiling fails where one that is called is missing.
BODIES = {
    "protocol.cuh": {
        "Vec load_volatile(const void* at)": "return emulated::load(static_cast<const Vec*>(at));",
        "void store_volatile(void* at, Vec v)": "emulated::store(static_cast<Vec*>(at), v);",
        "void store_volatile(u64* at, u64 value)": "emulated::store(at, value);",
        "Vec load_packets(const void* at)": "return emulated::load_whole(static_cast<const Vec*>(at));",
        "void store_packets(void* at, Vec v)": "emulated::store_whole(static_cast<Vec*>(at), v);",
        "static void sync()": "emulated::barrier(kBarrier, kSize);",
    },
    "numbers.cuh": {
        "u32 pack_halves(float low, float high)": "return emulated::half(low) | emulated::half(high) << 16;",
        "float low_half(u32 pair)": "return emulated::of_half(pair & 0xffff);",
        "float high_half(u32 pair)": "return emulated::of_half(pair >> 16);",
        "u32 larger(u32 a, u32 b)": "return emulated::larger(a, b);",
    },
    "device_api.cuh": {
        "void put_with_flag(void* there, const void* from, u64 bytes, u64* flag, u64 value, int pe)": (
            "if (emulated::lane() == 0) emulated::put(there, from, bytes, (uint64_t*)flag, value, pe);"
        ),
        "void put_flag(u64* flag, u64 value, int pe)": (
            "emulated::put(nullptr, nullptr, 0, (uint64_t*)flag, value, pe);"
        ),
        "void wait_for_puts()": "__builtin_trap();",
        "void settle(u64* flag, u64 value)": "",
    },
    "router.cuh": {"float divide(float a, float b)": "return a / b;"},
    "high_throughput.cuh": {
        "bool failed() const": "return emulated::load_of_warp(&limits.status->failed);",
    },
}
# Of ptx.cuh these are all that the kernels call.
INSTRUCTIONS = {
    "void store_release_sys(u32* at, u32 value)": "__threadfence_system(); emulated::store(at, value);",
    "u64 load_acquire_sys(const u64* at)": "return emulated::load(at);",
    "u64 global_timer_ns()": "return emulated::now_ns();",
    "int load_acquire_gpu(const int* p)": "return emulated::load(p);",
    "void add_release_gpu(int* p, int value)": "__threadfence(); atomicAdd(p, value);",
    "int add_acquire_release_gpu(int* p, int value)": "__threadfence(); return atomicAdd(p, value);",
    "void wait_at_least(const int* p, int value)": "while (emulated::load(p) < value);",
    "void grid_dependency_wait()": "emulated::wait_for_kernel_before();",
    "void grid_dependency_launch()": "emulated::running->block->lets_next_come_up = true;",
}
REPLACED = {
    "low_latency.cuh": ("constexpr int kThreads = 256;", "constexpr int kThreads = THREADS;"),
    "high_throughput.cuh": ("constexpr int kThreads = 1024;", "constexpr int kThreads = THREADS;"),
    "numbers.cuh": ('asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(most) : "f"(y));', "most = 1.0f / y;"),
}


def with_body(text: str, function: str, body: str) -> str:
    """The source with the function's body, up to the brace that ends it, replaced."""
    assert text.count(function) == 1, function
    begin = text.index(function) + len(function)
    start = text.rindex("\n", 0, begin) + 1
    indent = " " * (len(text[start:]) - len(text[start:].lstrip(" ")))
    line_end = text.index("\n", begin)
    end = line_end if text[line_end - 1] == "}" else text.index(f"\n{indent}}}\n", begin) + 2 + len(indent)
    return f"{text[:begin]} {{ {body} }}{text[end:]}"


# What device_api.cuh includes of NVSHMEM.
LIBRARY = re.compile(r"// The library was compiled.*?#undef int64_t\n", re.DOTALL)


def for_cpu(name: str, text: str) -> str:
    """A source with what only a GPU has replaced."""
    for function, body in BODIES.get(name, {}).items():
        text = with_body(text, function, body)
    if name in REPLACED:
        assert text.count(REPLACED[name][0]) == 1, name
        text = text.replace(*REPLACED[name])
    text = LIBRARY.sub("", text)
    shared = r"__shared__ ([^;]+?) (\w+)(\[\w+\])?;"
    return re.sub(shared, r"auto& \2 = emulated::shared<\1\3, __COUNTER__>();", text)


def instructions_for_cpu() -> str:
    """What stands for ptx.cuh: its names of types, and INSTRUCTIONS."""
    text = (Path(jit.__file__).parent / "cuda" / "ptx.cuh").read_text()
    functions = []
    for signature, body in INSTRUCTIONS.items():
        assert text.count(signature) == 1, signature
        functions.append(f"DEVICE {signature} {{ {body} }}\n")
    types = re.findall("^typedef .*\n", text, re.MULTILINE)
    return "#pragma once\n#define DEVICE inline\n" + "".join([*types, *functions])


@functools.cache
def scheduler() -> list[str]:
    """Objects of what runs kernels, whichever they are; compiled once for all tests of a process."""
    folder = Path(tempfile.mkdtemp(prefix="moe_ep_emulated_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    objects = [str(folder / f"{name}.o") for name in ("gpu", "memory")]
    for made in objects:
        source = SOURCES / Path(made).with_suffix(".cpp").name
        subprocess.run([*COMPILE, "-DACT_BF16=1", "-c", str(source), "-o", made], check=True)
    return objects


def compile_kernels(folder: Path, threads: Mapping[str, int], **defines: int) -> ctypes.CDLL:
    """Kernels, each with so many threads, and what runs them, in bf16 unless said otherwise."""
    of_kernels = [
        path for name in ("deadline.cuh", "arrival.cuh", "batch_*", "router.cuh") for path in batch_plan.CUDA.glob(name)
    ]
    for path in (*kernels.CUDA.glob("*.cu*"), *SOURCES.glob("*.cu"), *of_kernels):
        (folder / path.name).write_text(for_cpu(path.name, path.read_text()))
    (folder / "ptx.cuh").write_text(instructions_for_cpu())
    command = [*COMPILE, f"-I{folder}", *(f"-D{name}={value}" for name, value in {"ACT_BF16": 1, **defines}.items())]
    runs = []
    for name, number in threads.items():
        text = f'#include "gpu.h"\nnamespace {{\n#include "{name}.cu"\n}}\nKERNEL({name})\n'
        (folder / f"{name}.cpp").write_text(text)
        runs.append([*command, f"-DTHREADS={number}", "-fsanitize=thread", "-c", f"{name}.cpp", "-o", f"{name}.o"])
    for run in (*runs, [*command, "-shared", "-o", "emulated.so", *scheduler(), *(f"{name}.o" for name in threads)]):
        subprocess.run(run, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "emulated.so"))
    library.run.restype = ctypes.c_bool
    return library


class Session:
    """Ranks with memory of their own, whose work is queued and then run.

    Args:
        blocks: of a kernel that run at a time; None draws them.
    """

    def __init__(self, library: ctypes.CDLL, num_ranks: int, seed: int, blocks: int | None = None) -> None:
        self.library, self.num_ranks = library, num_ranks
        self.random = random.Random(seed)
        self._callbacks: list[object] = []
        self._errors: list[Exception] = []
        pauses, longest = self.random.choice([0, 2, 20]), self.random.choice([2000, 20000, 100000])
        landing = self.random.choice([1000, 100, 10])
        resident = blocks or self.random.choice([1, 2, 3])
        library.begin(num_ranks, seed, resident, pauses, ctypes.c_long(longest), landing)

    def add_memory(self, rank: int, memory: torch.Tensor) -> None:
        """What all ranks may write, of that rank; uint8."""
        self.library.add_memory(rank, ctypes.c_void_p(memory.data_ptr()), ctypes.c_long(memory.numel()))

    def run(self) -> bool:
        """Runs what is queued; True when all of it has ended. What hosts raise comes from here."""
        has_ended = self.library.run(ctypes.c_long(MOST_TURNS))
        if self._errors:
            raise self._errors[0]
        return has_ended

    def add_host(self, program: Iterator[None]) -> None:
        """A program that queues work; where it yields, others run before it goes on."""
        self.library.add_host(self._callback(lambda: next(program, self) is self))

    def queue_host(self, rank: int, is_done: Callable[[], bool], every_ns: int = 0) -> None:
        """What follows on the rank waits until `is_done`, which is asked every so often."""
        self.library.queue_host(rank, self._callback(is_done), ctypes.c_long(every_ns))

    def queue_kernel(
        self, rank: int, name: str, params: ctypes.Structure, blocks: int, *, groups: int = 1, early: bool = False
    ) -> None:
        """A launch; blocks have so many groups of the threads that the kernel was compiled for.

        Args:
            early: it may come up while the kernel before it runs.
        """
        assert self.library[f"bytes_of_{name}"]() == ctypes.sizeof(params), name
        threads = groups * self.library[f"threads_of_{name}"]()
        body, size = self.library[f"run_{name}"], ctypes.sizeof(params)
        self.library.queue_kernel(rank, body, ctypes.byref(params), size, blocks, threads, early)

    def _callback(self, function: Callable[[], bool]) -> Any:
        def guarded() -> bool:
            try:
                return function()
            except Exception as error:
                self._errors.append(error)
                return True

        found = ctypes.CFUNCTYPE(ctypes.c_bool)(guarded)
        self._callbacks.append(found)
        return found

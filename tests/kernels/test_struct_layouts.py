"""Every ctypes mirror of a kernel's parameters has the compiler's layout: sizes, and the offset of each field."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep.activation import MoEActivation
from moe_ep.dispatch.nvshmem import high_throughput, kernels, low_latency
from moe_ep.dispatch.nvshmem.low_latency import BatchLayout
from moe_ep.kernels import align, eplb_map, jit
from moe_ep.kernels.arrival import PeerBuild
from moe_ep.kernels.marlin import ampere, eight_bit, hopper
from moe_ep.kernels.marlin.types import WEIGHT_TYPES
from moe_ep.scalar_type import scalar_types
from tests.dispatch.emulated_decode import NUM_ROUTED, TOPK, choice_of

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import sanitize_planted
import soak_nvshmem
import step_clock

# Kernels become functions that nobody calls, since compiling them would take most of the time.
WITHOUT_KERNELS = """
extern "C" __global__ void nothing() {{}}
#undef __global__
#undef __grid_constant__
#undef __launch_bounds__
#undef __cluster_dims__
#define __global__ __device__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#include "{path}"
"""
BF16, SILU = torch.bfloat16, MoEActivation.SILU
UINT4B8 = WEIGHT_TYPES[scalar_types.uint4b8.id]
RANKS = 3
SHAPE: dict[str, Any] = {
    "num_ranks": RANKS,
    "capacity": 7,
    "hidden_size": 2880,
    "topk": 5,
    "code_dtype": torch.float8_e4m3fn,
}
# Pointers and ints of the prefill kernels' parameters, in the order in which high_throughput.py passes them.
PREFILL = {
    "plan": (("topk_ids", "owners", "slots", "arriving"), ("num_ids", "num_tokens", "batch")),
    "dispatch": (
        ("rows", "topk_ids", "weights", "owners", "slots", "out"),
        ("num_ids", "num_tokens", "max_rows", "sending", "senders"),
    ),
    "combine": (("results", "slots", "output"), ("num_tokens",)),
    "combine_slots": (("results", "slots", "output", "expert_map"), ("num_ids", "num_tokens")),
}
# Of those that overlap experts.
OVERLAPPED = {
    "ids": (("topk_ids", "weights", "owners", "slots"), ("num_ids", "num_tokens", "max_rows")),
    "rows": (
        ("rows", "topk_ids", "owners", "slots", "source_flags", "expert_map", "order", "ordered"),
        ("num_ids", "num_tokens"),
    ),
    "combine": (
        ("results", "slots", "output", "expert_map", "finished", "order", "ordered", "sources"),
        ("num_ids", "num_tokens"),
    ),
}


def mirrors() -> Iterator[tuple[str, jit.KernelSource, Any, str]]:
    """Name of the test, source, mirror, the struct's name."""
    for small_m, mirror, name in (
        (True, hopper.ExpertsParams, "ExpertsParams"),
        (False, hopper.PrefillParams, "PrefillParams"),
    ):
        yield name, hopper.kernel_source(UINT4B8, BF16, BF16, 1, SILU, small_m), mirror, name
    routed = (*choice_of(torch.empty(1, NUM_ROUTED)).defines, ("ROUTED", "1"))
    source = hopper.kernel_source(UINT4B8, BF16, BF16, 1, SILU, True)
    yield "RoutedExperts", replace(source, defines=(*source.defines, *routed)), hopper.RoutedExperts, "ExpertsParams"
    yield "PeerExperts", combining_source(), hopper.peer_experts(low_latency.batch_type(RANKS)), "ExpertsParams"
    sources = eight_bit.kernel_sources(UINT4B8, torch.int8, BF16, 1, SILU)
    yield "RowsParams", sources["rows"], eight_bit.RowsParams, "RowsParams"
    yield "EightBitParams", sources["experts"], eight_bit.EightBitParams, "EightBitParams"
    gemm = ampere.kernel_source(UINT4B8, BF16, BF16, 128, 0, SILU, 32)
    yield "AmpereParams", gemm, ampere.AmpereParams, "AmpereParams"
    yield "GatherParams", ampere.gather_source(0), ampere.GatherParams, "GatherParams"
    yield "AlignParams", align.kernel_source(torch.int64, 1), align.AlignParams, "AlignParams"
    yield "eplb", eplb_map.kernel_source(torch.int32, torch.int64, torch.int64), eplb_map.MapParams, "Params"
    small, large = BatchLayout(**SHAPE), high_throughput.Layout(**SHAPE)
    for mirror, name in ((low_latency.dispatch_type(RANKS), "dispatch"), (low_latency.combine_type(RANKS), "combine")):
        yield name, kernels.kernel_source(f"low_latency_{name}", small, BF16), mirror, "Params"
    source = kernels.kernel_source("low_latency_dispatch", BatchLayout(**{**SHAPE, "topk": TOPK}), BF16)
    source = replace(source, defines=(*source.defines, *routed))
    yield "routed_dispatch", source, low_latency.dispatch_type(RANKS, True), "Params"
    common = high_throughput.common_type(RANKS)
    for name, (pointers, numbers) in PREFILL.items():
        mirror = named(kernels.params_type(common, len(pointers), len(numbers)), pointers, numbers)
        yield f"high_throughput_{name}", high_throughput.kernel_source(name, large, BF16), mirror, "Params"
    large = high_throughput.Layout(**{**SHAPE, "code_dtype": None}, overlaps=True)
    for name, (pointers, numbers) in OVERLAPPED.items():
        mirror = named(kernels.params_type(common, len(pointers), len(numbers)), pointers, numbers)
        yield f"overlapped_{name}", high_throughput.kernel_source(name, large, BF16), mirror, "Params"
    arriving = hopper.kernel_source(UINT4B8, BF16, BF16, 1, SILU, False, arrivals=True)
    yield "ArrivingParams", arriving, hopper.ArrivingParams, "PrefillParams"
    for module, name in ((sanitize_planted, "Params"), (soak_nvshmem, "Params"), (step_clock, "StampParams")):
        defines = {
            "THREADS": 64,
            "HIDDEN": 128,
            "TOPK": 2,
            "RANKS": 2,
            "CAPACITY": 4,
            "EXPERTS": 8,
            "STEPS": 4,
            "TOKENS": 1,
        }
        pairs = tuple((key, str(value)) for key, value in defines.items())
        source = jit.KernelSource(Path(module.__file__).with_suffix(".cu"), "nothing", pairs)
        yield module.__name__, source, getattr(module, name), name


def combining_source(num_ranks: int = RANKS) -> jit.KernelSource:
    """The decode kernel that combines batches of so many ranks."""
    source = hopper.kernel_source(UINT4B8, BF16, BF16, 1, SILU, True)
    of_ranks = BatchLayout(**{**SHAPE, "num_ranks": num_ranks, "code_dtype": None})
    of_batch = kernels.kernel_source("low_latency_combine", of_ranks, BF16).defines
    build = PeerBuild(defines=of_batch, folder=kernels.CUDA, topk=of_ranks.topk)
    defines = (*source.defines, *hopper.combining_defines(build, 16))
    return replace(source, defines=defines, folders=(build.folder,))


def named(mirror: Any, pointers: tuple[str, ...], numbers: tuple[str, ...]) -> Any:
    """The same structure with names instead of arrays of pointers and numbers."""

    class Named(ctypes.Structure):
        _fields_ = (
            mirror._fields_[0],
            *((name, ctypes.c_void_p) for name in pointers),
            *((name, ctypes.c_int) for name in numbers),
        )

    assert ctypes.sizeof(Named) == ctypes.sizeof(mirror)
    assert getattr(Named, pointers[0]).offset == mirror.pointers.offset
    assert getattr(Named, numbers[0]).offset == mirror.numbers.offset
    return Named


def checks(mirror: Any, struct: str, path: str = "", start: int = 0) -> Iterator[str]:
    """What must hold, of nested structures too; padding that only the mirror names is left out."""
    fields = [field for base in reversed(mirror.__mro__) for field in vars(base).get("_fields_", ())]
    for name, kind, *_ in fields:
        if name == "unused":
            continue
        member, offset = f"{path}{name}", start + getattr(mirror, name).offset
        yield f"__builtin_offsetof({struct}, {member}) == {offset}"
        yield f"sizeof((({struct}*)0)->{member}) == {ctypes.sizeof(kind)}"
        if issubclass(kind, ctypes.Array) and issubclass(kind._type_, ctypes.Structure):
            yield from checks(kind._type_, struct, f"{member}[0].", offset)
        elif issubclass(kind, ctypes.Structure):
            yield from checks(kind, struct, f"{member}.", offset)


@pytest.mark.parametrize(("source", "mirror", "struct"), [pytest.param(*case[1:], id=case[0]) for case in mirrors()])
def test_a_mirror_has_the_layout_of_the_struct(
    tmp_path: Path, source: jit.KernelSource, mirror: Any, struct: str
) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    pytest.importorskip("cuda.bindings.nvrtc", reason="the bindings of NVRTC are not installed")
    told = [f"sizeof({struct}) == {ctypes.sizeof(mirror)}", *checks(mirror, struct)]
    asserts = "".join(f'static_assert({check}, "{check}");\n' for check in told)
    asserts = f"#if __has_builtin(__builtin_offsetof)  // in newer compilers\n{asserts}#endif\n"
    path = tmp_path / "layouts.cu"
    path.write_text(WITHOUT_KERNELS.format(path=source.path) + asserts)
    arch = "sm_80" if source.path.name.startswith("ampere") else "sm_90a"
    jit.compile_only(jit.KernelSource(path, "nothing", source.defines, folders=source.folders), arch)

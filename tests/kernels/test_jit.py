"""Every kernel compiles without a GPU, for A100 and for Hopper, and keeps its numbers in registers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep.activation import MoEActivation
from moe_ep.dispatch.nvshmem.kernels import CUDA as NVSHMEM_CUDA
from moe_ep.dispatch.nvshmem.kernels import kernel_source
from moe_ep.dispatch.nvshmem.low_latency import BatchLayout
from moe_ep.errors import BackendUnavailableError
from moe_ep.kernels import eplb_map, jit
from moe_ep.kernels.arrival import PeerBuild
from moe_ep.kernels.marlin import ampere, hopper
from moe_ep.kernels.marlin.types import WEIGHT_TYPES
from moe_ep.scalar_type import scalar_types

pytest.importorskip("cuda.core", reason="cuda-core is not installed")
pytest.importorskip("cuda.bindings.nvrtc", reason="the bindings of NVRTC are not installed")

SCALE = 'struct P { int* out; int value; };\nextern "C" __global__ void scale(const __grid_constant__ P p)'
SILU, SWIGLUOAI, SWIGLUSTEP = MoEActivation.SILU, MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUSTEP
RELU2 = MoEActivation.RELU2_NO_MUL
BF16, F16 = torch.bfloat16, torch.float16
# Number type, activations, scales' dtype, groups in 128 columns, activation: each type, each dtype, each spacing once.
EXPERTS = [
    (scalar_types.uint4b8, BF16, BF16, 1, SILU),
    (scalar_types.uint4, F16, F16, 4, SILU),
    (scalar_types.uint4, BF16, BF16, 1, SILU),
    (scalar_types.uint8b128, BF16, BF16, 1, SILU),
    (scalar_types.uint8b128, BF16, BF16, 2, RELU2),
    (scalar_types.float8_e4m3fn, BF16, BF16, 1, SILU),
    (scalar_types.float8_e4m3fn, F16, F16, 4, SILU),
    (scalar_types.float4_e2m1f, F16, torch.float8_e4m3fn, 8, SILU),
    (scalar_types.float4_e2m1f, BF16, torch.uint8, 4, SWIGLUOAI),
]
TWICE = [(scalar_types.uint4, BF16), (scalar_types.float8_e4m3fn, F16)]
# Bytes that are stored and loaded again at most, by number type and groups in 128 columns, where older GPUs' kernel for
# 16 tokens has any; docs/kernels.md says what they buy. Those of uint8b128 are of the compiler of CUDA 13.0 alone.
TILES_OF_16_SPILL = {
    (scalar_types.uint4, 1): (32, 48),
    (scalar_types.uint8b128, 1): (12, 16),
    (scalar_types.uint8b128, 2): (16, 24),
}


def _name(value: object) -> str:
    """What stands for a case, or for one of its arguments, in a test's name."""
    return (f"{value[0]}-{value[1]}" if isinstance(value, tuple) else str(value)).replace("torch.", "")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> jit.KernelSource:
    """A small kernel in a folder of its own, and an empty cache."""
    monkeypatch.setenv("MOE_EP_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "scale.cu"
    path.write_text(f'#include "factor.cuh"\n{SCALE} {{ p.out[0] = p.value * FACTOR * OWN; }}')
    (tmp_path / "factor.cuh").write_text("#define OWN 2")
    return jit.KernelSource(path, "scale", (("FACTOR", "3"),))


def _entries() -> set[Path]:
    return {path for path in Path(os.environ["MOE_EP_CACHE_DIR"]).rglob("*") if path.is_file()}


# The large-M kernel takes 5 to 20 s to compile: each number type, each dtype, and the tall tile. Without --thorough
# the usual ones are, float4 and the tall tile in the test of a limit.
LARGE_M = [case for case in EXPERTS if case[-1] is not RELU2 and case[:2] not in TWICE]
IN_OTHERS = pytest.mark.thorough
HOPPER = [
    *(pytest.param(case, True, False, marks=[IN_OTHERS] if case[:2] in TWICE else []) for case in EXPERTS),
    *((case, False, False) for case in LARGE_M if case[1:3] == (BF16, BF16)),
    *(pytest.param(case, False, False, marks=IN_OTHERS) for case in LARGE_M if case[1] is F16),
    pytest.param(EXPERTS[-1], False, True, marks=IN_OTHERS),
    # Whose scales leave no room for output rows.
    pytest.param((scalar_types.uint4b8, BF16, BF16, 4, SILU), False, True, marks=IN_OTHERS),
    ((*EXPERTS[-1][:-1], MoEActivation.SITU), True, False),
    pytest.param((*EXPERTS[-1][:-1], MoEActivation.SITU), False, False, marks=IN_OTHERS),
]


@pytest.mark.parametrize(("case", "decode", "tall"), HOPPER, ids=_name)
def test_experts_kernels_compile_for_hopper_without_spills(case: tuple, decode: bool, tall: bool) -> None:
    kind = WEIGHT_TYPES[case[0].id]
    resources = jit.compile_only(hopper.kernel_source(kind, *case[1:], decode=decode, tall=tall), "sm_90a")
    assert (resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0)
    assert "serialized" not in resources.log  # products must run while the next weights are dequantized


@pytest.mark.parametrize("topk", [8, pytest.param(5, marks=IN_OTHERS)])
def test_experts_that_combine_compile_without_spills(topk: int) -> None:
    layout = BatchLayout(num_ranks=2, capacity=16, hidden_size=7168, topk=topk, code_dtype=None)
    of_batch = kernel_source("low_latency_combine", layout, BF16).defines
    source = hopper.kernel_source(WEIGHT_TYPES[scalar_types.uint4b8.id], BF16, BF16, 1, SILU, decode=True)
    build = PeerBuild(defines=of_batch, folder=NVSHMEM_CUDA, topk=topk)
    defines = (*source.defines, *hopper.combining_defines(build, 128))
    resources = jit.compile_only(replace(source, defines=defines, folders=(build.folder,)), "sm_90a")
    assert resources[1:3] == (0, 0)


@pytest.mark.parametrize(
    ("decode", "activation"), [pytest.param(True, SILU, marks=IN_OTHERS), (True, SWIGLUSTEP), (False, SWIGLUSTEP)]
)
def test_a_limit_of_gate_and_up_compiles_without_spills(decode: bool, activation: MoEActivation) -> None:
    """The prefill kernel in its build that waits for rows."""
    mxfp4 = WEIGHT_TYPES[scalar_types.float4_e2m1f.id].packed_for(32, torch.float8_e4m3fn if decode else None)
    limited = {"clamp_limit": 10.0}
    waits = {"tall": not decode, "arrivals": not decode}
    source = hopper.kernel_source(mxfp4, BF16, torch.uint8, 4, activation, decode, **waits, **limited)
    older = [ampere.kernel_source(mxfp4, BF16, torch.uint8, 32, phase, activation, 32, **limited) for phase in (0, 1)]
    defines = [dict(source.defines).get("CLAMP_LIMIT") for source in (source, *older)]
    assert defines == ["10.0f", "10.0f", None]  # the second GEMM is the same with and without
    resources = jit.compile_only(source, "sm_90a")
    assert resources[1:3] == (0, 0)
    assert "serialized" not in resources.log
    assert jit.compile_only(older[0], "sm_80")[1:3] == (0, 0)


# w13 of every number type; w2 once; groups that are looked up, once; and once what Hopper runs of it.
OLDER = [
    *((case, False, 0, "sm_80") for case in EXPERTS),
    (EXPERTS[0], False, 1, "sm_80"),
    (EXPERTS[1], True, 1, "sm_80"),
]


# The tile of 16 tokens is the one that spills; the others are compiled for some.
TILES: list[Any] = [(*case, 16) for case in OLDER] + [(*OLDER[0], tile) for tile in (32, 64)]
TILES += [pytest.param(*case, tile, marks=IN_OTHERS) for case in OLDER[3::3] for tile in (32, 64)]
TILES += [pytest.param(EXPERTS[1], True, 1, "sm_90a", tile, marks=IN_OTHERS) for tile in (16, 32, 64)]


@pytest.mark.parametrize(("case", "looked_up", "phase", "arch", "tile_tokens"), TILES, ids=_name)
def test_experts_kernels_for_older_gpus_compile_without_spills(
    case: tuple, looked_up: bool, phase: int, arch: str, tile_tokens: int
) -> None:
    name, act_dtype, scale_dtype, per_step, activation = case
    columns, kind = 0 if looked_up else 128 // per_step, WEIGHT_TYPES[name.id]
    source = ampere.kernel_source(kind, act_dtype, scale_dtype, columns, phase, activation, tile_tokens)
    resources = jit.compile_only(source, arch)
    stored, loaded = TILES_OF_16_SPILL.get((name, per_step), (0, 0)) if tile_tokens == 16 else (0, 0)
    assert resources.spill_store_bytes <= stored
    assert resources.spill_load_bytes <= loaded


@pytest.mark.parametrize("arch", ["sm_89", "sm_100", "sm_120"])
def test_kernels_compile_for_gpus_that_none_of_them_was_written_for(arch: str) -> None:
    kind, act_dtype, scale_dtype, _, activation = EXPERTS[-1]
    sources = [
        *(
            ampere.kernel_source(WEIGHT_TYPES[kind.id], act_dtype, scale_dtype, 32, phase, activation, 32)
            for phase in (0, 1)
        ),
        eplb_map.kernel_source(torch.int32, torch.int32, torch.int32),
    ]
    for source in sources:
        assert jit.compile_only(source, arch).spill_load_bytes == 0, source.entry


@pytest.mark.parametrize("phase", [0, 1])
def test_putting_columns_in_order_compiles_without_spills(phase: int) -> None:
    assert jit.compile_only(ampere.gather_source(phase), "sm_80")[1:3] == (0, 0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("dtype", "slots"), [(torch.int32, 1), (torch.int64, 2)])
def test_eplb_map_compiles_without_spills(arch: str, dtype: torch.dtype, slots: int) -> None:
    resources = jit.compile_only(eplb_map.kernel_source(dtype, dtype, dtype, slots), arch)
    assert (resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0)


def test_kernels_for_other_numbers_of_ranks_are_named() -> None:
    layout = BatchLayout(num_ranks=2, capacity=4, hidden_size=128, topk=2, code_dtype=None)
    for most, expected in ((16, ["1", "1", "3", "3"]), (2, ["1", "1"])):
        assert [dict(each.defines)["RANKS"] for each in layout.sources_of_changes(BF16, most)] == expected


def test_another_process_fills_the_cache(source: jit.KernelSource) -> None:
    assert jit.run_compiler([source, replace(source, defines=(("FACTOR", "4"),))], "sm_80") == 0
    kept = _entries()
    jit.cubin(source, "sm_80")
    assert len(kept) == 2 and _entries() == kept


def test_cubins_are_kept_and_follow_source_headers_defines_and_architecture(source: jit.KernelSource) -> None:
    first = jit.cubin(source, "sm_80")
    kept = _entries()
    assert kept
    assert jit.cubin(source, "sm_80") == first
    assert _entries() == kept
    other = jit.KernelSource(source.path, source.entry, (("FACTOR", "4"),))
    assert jit.cubin(other, "sm_80") != first
    assert jit.cubin(source, "sm_90a") != first
    (source.path.parent / "factor.cuh").write_text("#define OWN 5")
    assert jit.cubin(source, "sm_80") != first
    assert len(_entries()) == len(kept) + 3


def test_several_processes_may_fill_the_cache_at_once(source: jit.KernelSource) -> None:
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = 0 if jit.cubin(source, "sm_80") == jit.cubin(source, "sm_80") else 1
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert len(_entries()) == 1


def test_a_mistake_in_the_source_shows_the_compilers_words(source: jit.KernelSource) -> None:
    source.path.write_text(f"{SCALE} {{ p.out[0] = nonsense; }}")
    with pytest.raises(Exception, match="nonsense"):
        jit.compile_only(source, "sm_80")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_loading_says_so(source: jit.KernelSource) -> None:
    assert jit.unusable_reason() == "torch sees no CUDA GPU"
    with pytest.raises(BackendUnavailableError, match="needs a CUDA GPU"):
        jit.load(source, torch.device("cuda", 0))


def test_without_cuda_core_the_pip_line_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.core", None)
    jit.cuda_core.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'moe_ep\[cuda\]'"):
        jit.cuda_core()
    jit.cuda_core.cache_clear()

"""cuda/router.cuh, compiled for the CPU, chooses the experts of topk_reference."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_ep.kernels import jit
from moe_ep.kernels.routing import DeferredTopK
from moe_ep.routing.topk import topk_reference
from tests.kernels.routing_cases import WEIGHT_ATOL, WEIGHT_RTOL, Case, make_inputs

COMPILER = shutil.which("c++") or shutil.which("g++")
HOST, CUDA = Path(__file__).parent / "host", Path(jit.__file__).parent / "cuda"
DEEPSEEK = Case(
    num_tokens=9, num_experts=256, num_expert_group=8, topk_group=4, scoring_func="sigmoid", bias=True, logits="ties"
)
CASES = [
    Case(num_tokens=9, num_experts=128),
    Case(num_tokens=9, num_experts=60, top_k=4, logits="ties", renormalize=False, dtype=torch.bfloat16),
    Case(num_tokens=9, num_experts=5, top_k=5, logits="broken"),
    DEEPSEEK,
    replace(DEEPSEEK, logits="broken"),
    replace(DEEPSEEK, bias=False, logits="random"),
    Case(num_tokens=9, num_experts=6, top_k=3, num_expert_group=6, topk_group=4, scoring_func="sigmoid", bias=True),
    Case(num_tokens=9, num_experts=160, top_k=6, num_expert_group=8, topk_group=3, logits="ties"),
    Case(num_tokens=9, num_experts=384, scoring_func="sqrtsoftplus", bias=True),
]
# What is assembly there.
REPLACED = {
    'asm("div.full.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));': "out = a / b;",
    'asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(static_cast<const u16*>(p.logits)[at]));': "abort();",
}
FUNCTIONS = """
template <typename T>
T __shfl_xor_sync(u32, T value, int mask) { return warp::meet(value)[threadIdx.x % 32 ^ mask]; }
inline int __reduce_min_sync(u32, int value) {
  for (int other : warp::meet(value)) value = min(value, other);
  return value;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline float __uint_as_float(u32 bits) { float f; memcpy(&f, &bits, 4); return f; }
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline int __float_as_int(float f) { int bits; memcpy(&bits, &f, 4); return bits; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline void __syncwarp() {}
"""
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """`choose_N(params)` for every case."""
    folder = tmp_path_factory.mktemp("router")
    types = re.findall("^typedef .*\n", (CUDA / "ptx.cuh").read_text(), re.MULTILINE)
    (folder / "ptx.cuh").write_text("#pragma once\n" + "".join(types))
    router = (CUDA / "router.cuh").read_text().replace("#pragma once\n", "")
    for assembly, instead in REPLACED.items():
        assert router.count(assembly) == 1
        router = router.replace(assembly, instead)
    (folder / "router.cuh").write_text(router)
    parts = ['#include "warp.h"\n', FUNCTIONS]
    for number, case in enumerate(CASES):
        parts += [f"#undef {name}\n#define {name} {value}\n" for name, value in deferred(case).defines]
        parts.append(
            f'namespace n{number} {{\n#include "router.cuh"\n}}\n'
            f'extern "C" void choose_{number}(const n{number}::RouterParams* p) {{\n'
            f"  for (int token = 0; token < p->num_tokens; token++) warp::run([=](int lane) {{\n"
            f"    n{number}::Choice choice = n{number}::choose_experts(*p, token);\n"
            f"    if (lane >= TOP_K) return;\n"
            f"    p->ids[token * TOP_K + lane] = choice.id, p->weights[token * TOP_K + lane] = choice.weight;\n"
            f"  }});\n}}\n"
        )
    (folder / "router.cpp").write_text("".join(parts))
    flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fPIC", "-shared", f"-I{HOST}", f"-I{folder}"]
    subprocess.run([str(COMPILER), *flags, "router.cpp", "-o", "router.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "router.so"))


def deferred(case: Case) -> DeferredTopK:
    return DeferredTopK(**make_inputs(case, "cpu"))


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_choice_is_that_of_the_reference(library: ctypes.CDLL, number: int) -> None:
    choice = deferred(CASES[number])
    library[f"choose_{number}"](ctypes.byref(choice.take()))
    weights, ids = topk_reference(**make_inputs(CASES[number], "cpu"))
    assert torch.equal(choice.topk_ids, ids)
    torch.testing.assert_close(choice.topk_weights, weights, rtol=WEIGHT_RTOL, atol=WEIGHT_ATOL, equal_nan=True)

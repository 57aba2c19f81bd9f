"""The kernels with 8-bit rows on a CPU: their sources, compiled against host/experts.h and tests/dispatch/emulated.

A whole launch is run, with all its warps and blocks, whose threads take turns at random; parameters and scratch are
those of moe_ep.kernels.marlin.eight_bit.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import torch

from moe_ep.kernels.marlin import eight_bit
from moe_ep.kernels.marlin.hopper import groups_per_step
from moe_ep.kernels.marlin.params import CUDA, Rows
from moe_ep.kernels.marlin.weights import WeightPair
from tests.dispatch.emulated_gpu import COMPILE, COMPILER, Session, scheduler, with_body

HOST = Path(__file__).parent / "host"
# Functions that are a GPU's instructions, by source.
BODIES = {
    "params.cuh": {"int quotient(int a, int b)": "return a / b;"},
    "epilogue.cuh": {
        "float sigmoid(float x)": "return 1.0f / (1.0f + std::exp2(-1.44269504f * x));",
    },
    "dequant.cuh": {
        "void load_words_at(u32 from, u32* w)": (
            "if constexpr (kBits == 4) memcpy(w, emulated::at<u8>(from + kOffset), 8);"
            " else load_matrices(w, from + kOffset);"
        ),
    },
    "eight_bit_layout.cuh": {
        "float max_or_nan(float a, float b)": "return a != a || b != b ? NAN : std::fmax(a, b);",
        "u32 code_pair(float low, float high)": (
            "return ROWS_INT8 ? emulated::to_int8(low) | emulated::to_int8(high) << 8"
            " : emulated::to_e4m3(low) | emulated::to_e4m3(high) << 8;"
        ),
    },
    "eight_bit_widen.cuh": {
        "u32 flip_and_mask(u32 word, u32 flips, u32 mask)": "return (word ^ flips) & mask;",
        "u32 add_relu(u32 a, u32 b)": "return emulated::add_relu(a, b);",
    },
}
_STANDS_FOR = ("ptx.cuh", "number.cuh", "mma.cuh", "wgmma.cuh")
_WGMMA = """constexpr bool kIsE5m2 = emulated::is_e5m2(WGMMA_TYPES);
template <int kColumns>
DEVICE void wgmma_eight_bit(Sum* d, const u32* a, u64 b, int adds) {
  emulated_wgmma<kColumns, kIsE5m2>(d, emulated::rows_of_lane(a), b, adds);
}
template <int kColumns>
DEVICE void wgmma_eight_bit(Sum* d, u64 a, u64 b, int adds) {
  emulated_wgmma<kColumns, kIsE5m2>(d, rows_at(a), b, adds);
}
"""


def for_cpu(name: str, text: str) -> str:
    """A source with what only a GPU has replaced."""
    for function, body in BODIES.get(name, {}).items():
        text = with_body(text, function, body)
    if name == "eight_bit_wgmma.cuh":
        text = text[: text.index("template <int kColumns>")] + _WGMMA
    if name == "eight_bit_sm90.cu":
        text = re.sub(r"  asm volatile\(\"fence.mbarrier_init[^;]*;\"\);\n", "", text)
    if name == "eight_bit_sm80.cu":
        begin, end = text.index("DEVICE void mma_int8("), text.index("// ==== Copies ====")
        text = text[:begin] + text[end:]
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?(\w+) memory\[\];",
        r"\1* memory = reinterpret_cast<\1*>(emulated::dynamic());",
        text,
    )
    text = text.replace('extern "C" __global__', "__global__")
    return re.sub(
        r"__shared__ ([^;]+?) (\w+)((?:\[\w+\])+);", r"auto& \2 = emulated::shared<\1\3, __COUNTER__>();", text
    )


def write_sources(folder: Path) -> None:
    for path in CUDA.glob("*.cu*"):
        if path.name.startswith("eight_bit") or path.name in {*BODIES, "tile_queue.cuh"}:
            (folder / path.name).write_text(for_cpu(path.name, path.read_text()))
    for name in _STANDS_FOR:
        (folder / name).write_text('#pragma once\n#include "experts.h"\n')


def command_for(folder: Path, defines: dict[str, str]) -> list[str]:
    return [*COMPILE, f"-I{HOST}", f"-I{folder}", *(f"-D{name}={value}" for name, value in defines.items())]


class Emulated:
    """The kernels for some weights and rows, compiled for a CPU.

    Args:
        sent, older: as in eight_bit.kernel_sources.
    """

    def __init__(self, folder: Path, pair: WeightPair, sent: bool = False, older: bool = False) -> None:
        write_sources(folder)
        spacings = [groups_per_step(w.num_columns, w.scales.size(1)) for w in (pair.w13, pair.w2)]
        groups = 0 if all(w.scales.size(1) == 1 for w in (pair.w13, pair.w2)) else max(spacings)
        sources = eight_bit.kernel_sources(
            pair.kind, pair.input_dtype, pair.act_dtype, groups, pair.activation, pair.clamp_limit, sent, older
        )
        runs, objects = [], list(scheduler())
        for name, source in sources.items():
            params, threads = ("RowsParams", "32") if name == "rows" else ("EightBitParams", "kThreads")
            (folder / f"{name}.cpp").write_text(
                f'#include "experts.h"\nnamespace {{\n#include "{source.path.name}"\n}}\n'
                f'extern "C" void run_{name}(const void* p) {{ {source.entry}(*static_cast<const {params}*>(p)); }}\n'
                f'extern "C" int bytes_of_{name}() {{ return sizeof({params}); }}\n'
                f'extern "C" int threads_of_{name}() {{ return {threads}; }}\n'
            )
            objects.append(f"{name}.o")
            runs.append([*command_for(folder, dict(source.defines)), "-c", f"{name}.cpp", "-o", objects[-1]])
        runs.append([str(COMPILER), "-shared", "-o", "emulated.so", *objects])
        for run in runs:
            subprocess.run(run, cwd=folder, check=True)
        self.library, self.pair, self.sent, self.older = ctypes.CDLL(str(folder / "emulated.so")), pair, sent, older
        self.library.run.restype = ctypes.c_bool

    def run(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        rows: Rows,
        row_scales: torch.Tensor | None = None,
        seed: int = 0,
        blocks: int = 2,
    ) -> torch.Tensor:
        """As eight_bit.run, with scratch full of NaN, which is returned."""
        pair = self.pair
        scratch = torch.full((eight_bit.scratch_bytes(pair, rows.max_rows) + 16,), 0xFF, dtype=torch.uint8)
        scratch = scratch[-scratch.data_ptr() % 16 :]
        quantizing, multiplying, where = eight_bit.make_params(output, hidden_states, pair, rows, scratch, row_scales)
        session = Session(self.library, 1, seed, blocks=blocks)
        groups = eight_bit.rows_threads(pair.w13.num_columns) // 32
        flags = torch.zeros(2 + pair.num_experts, dtype=torch.int32)
        session.queue_kernel(0, "rows", quantizing, blocks, groups=groups)
        if self.older:
            for phase in (0, 1):
                session.queue_kernel(0, f"gemm{phase}", multiplying, blocks)
        else:
            multiplying.experts.sync = flags.data_ptr()
            for phase, weights in enumerate((pair.w13, pair.w2)):
                given = multiplying.experts.gemm[phase].input, where.capacity, weights.num_columns
                ctypes.memmove(multiplying.tokens[phase], (ctypes.c_int64 * 3)(*given), 24)
                codes = weights.qweight.data_ptr(), pair.num_experts * weights.num_rows, weights.num_columns
                ctypes.memmove(multiplying.weights[phase], (ctypes.c_int64 * 3)(*codes), 24)
            session.queue_kernel(0, "experts", multiplying, blocks)
        assert session.run(), "the kernels hang"
        assert not flags.any()
        return scratch


def compile_widening(folder: Path, builds: list[tuple[int, int]]) -> ctypes.CDLL:
    """Of every build, a WEIGHT_TYPE and ROWS_INT8, `widen_T_R(words, count, zeros_low, zeros_high, low, high)` for four
    bits, or of pairs of words for eight, and `unit_T_R()`, kCodeUnit. In place of zeros mxfp4 takes exponents of the
    rows' scales, 16 bits each, and of their largest ones, 8 bits each."""
    parts = ['#define ROWS_INT8 0\n#include "experts.h"\n#undef ROWS_INT8\n']
    for number, is_int8 in builds:
        name = f"{number}_{is_int8}"
        parts.append(f"#undef WEIGHT_TYPE\n#define WEIGHT_TYPE {number}\n#define ROWS_INT8 {is_int8}\n")
        parts.append(f"namespace n{name} {{\n")
        for header in ("dequant.cuh", "eight_bit_widen.cuh"):
            text = for_cpu(header, (CUDA / header).read_text())
            parts.append(re.sub(r"#(pragma once|include .*)", "", text))
        parts.append(
            "void widen(const u32* words, int count, u32 z0, u32 z1, u32* low, u32* high) {\n"
            "  for (int i = 0; i < count; i++) {\n"
            "    u32 exponents = operand_exponents(z0, exponent_offsets(z1));\n"
            "    Operands of_low(exponents & 0xffff), of_high(exponents >> 16);\n"
            "    if constexpr (kFoldsScales) widen_e2m1(words[i], of_low, of_high, low[i], high[i]);\n"
            "    else if constexpr (kBits == 4) widen_four_bits(words[i], z0, z1, low[i], high[i]);\n"
            "    else low[i] = high[i] = widen_eight_bits(words[i]);\n"
            f'  }}\n}}\n}}\n#undef ROWS_INT8\nextern "C" float unit_{name}() {{ return n{name}::kCodeUnit; }}\n'
            f'extern "C" void widen_{name}(const u32* w, int n, u32 z0, u32 z1, u32* l, u32* h) '
            f"{{ n{name}::widen(w, n, z0, z1, l, h); }}\n"
        )
    (folder / "widen.cpp").write_text("".join(parts))
    command = [*command_for(folder, {"ACT_BF16": "1"}), "-shared", "widen.cpp", "-o", "widen.so"]
    subprocess.run([*command, "-Wl,--unresolved-symbols=ignore-all"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "widen.so"), mode=1)

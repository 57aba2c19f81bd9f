"""Other implementations of the experts' two GEMMs, timed as bench_gemm.py times ours; it starts this in processes.

    python scripts/gemm_peers.py humming --shape 16 4096 1536 --rows 1 8 64 --weights mxfp4
    python scripts/gemm_peers.py vllm --library FILE --shape 16 4096 1536 --shape 1 4096 14336 --rows 1 8 64

One JSON line for each shape and number of rows an expert, `us` by name. Buffers hold 128 rows an expert, or 1024 where
more are used. All compute the GEMMs alone, without the activation between them; weights are random.

Humming is `humming-kernels` from PyPI with its default tuning, asked for these row counts alone: its choices for all
row counts up to 65536 take it 7 s a GEMM in Python, and are the same. Its first calls compile, 8 s a kernel and two to
a row count; it keeps what it compiled in HUMMING_CACHE_DIR, by the paths and times of its files.
humming-int8 and humming-fp8 are the same with rows that it rounds to int8 or e4m3, one scale a row, in the timed call.
DeepGEMM is `deep_gemm` alone (sgl-deep-gemm from PyPI; 0.1.4 with apache-tvm-ffi 0.1.11 loads beside torch 2.11) or as
vLLM's wheel carries it, vllm/third_party/deep_gemm: e4m3 weights with scales of 128 x 128, e4m3 rows with one for every
128 columns, the masked form, the two products alone: rows are quantized and scales laid out beforehand. It compiles by
nvcc at the first call.
vLLM's batched Marlin is the file vllm/_moe_C_stable_libtorch.abi3.so of its wheel (or that file as .xz), loaded alone:
"vllm" has block size 64, as vLLM chooses it from the buffer's capacity, "vllm_best" the best of that and the two
smallest sizes that hold an expert's rows. The file has these kernels as code of sm_80 and as PTX, which the driver
compiles at the first call, 40 s on a Hopper GPU's host; it keeps them in CUDA_CACHE_PATH.
torch is `torch.bmm` on bf16 weights: what experts take that are not quantized.
--compile-only makes the first calls and times nothing: shapes may be compiled side by side.
What a peer cannot compute is said in one line (package, version, weights, shape, rows, and where it failed), the other
shapes and rows are measured, and the exit code is 1. The recorded tables are from humming-kernels 0.1.19.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import lzma
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from gemm_cases import OF_PEERS, Shape, with_weights
from gemm_timing import capacity_of, num_copies, timed

from moe_ep.kernels.quantize import GROUP_SIZE, quantize_rows, split_rows
from moe_ep.scalar_type import scalar_types

# As modules: alone, and in vLLM's wheel.
DEEP_GEMM = ("deep_gemm", "vllm.third_party.deep_gemm")
VLLM_BLOCKS, VLLM_USUAL_BLOCK = (8, 16, 32, 48, 64), 64

Call = Callable[[int], None]


class Buffers:
    """Rows of every expert, `capacity` each, before, between and after the GEMMs."""

    def __init__(self, shape: Shape, capacity: int) -> None:
        def rows(columns: int) -> torch.Tensor:
            return torch.randn(shape.experts * capacity, columns, device="cuda").bfloat16()

        self.capacity = capacity
        self.input, self.gate_up, self.hidden, self.output = map(rows, (shape.K, 2 * shape.N, shape.N, shape.K))
        self.counts = torch.zeros(shape.experts, dtype=torch.int32, device="cuda")


class Humming:
    """Its grouped_masked form, with rows in bf16."""

    NAME, ROWS = "humming", None
    GEMM_TYPE = "grouped_masked"
    CONFIGS: ClassVar[dict[str, dict[str, str | int]]] = {
        "int4": {"dtype": "uint4", "group_size": 128},
        "int4-g32": {"dtype": "uint4", "group_size": 32},
        "int8": {"dtype": "uint8", "group_size": 128},
        "fp8": {"dtype": "float8e4m3", "group_size": 128},
        "mxfp8": {"dtype": "float8e4m3", "group_size": 32, "scale_dtype": "float8e8m0"},
        "mxfp4": {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
    }

    def __init__(self, shape: Shape, options: argparse.Namespace) -> None:
        self._config = self.CONFIGS[options.weights]
        self._pairs = [
            (self._layer(shape.experts, 2 * shape.N, shape.K), self._layer(shape.experts, shape.K, shape.N))
            for _ in range(num_copies(shape.num_bytes))
        ]
        totals = [rows * shape.experts for rows in sorted(options.rows)]
        self._choices = [self._choices_of(layer, totals) for layer in self._pairs[0]]

    def _layer(self, experts: int, out: int, columns: int) -> torch.nn.Module:
        from humming.layer import HummingLayer

        made = HummingLayer(
            shape_n=out,
            shape_k=columns,
            weight_config=dict(self._config),
            input_config=None if self.ROWS is None else {"dtype": self.ROWS, "group_size": 0},
            num_experts=experts,
            torch_dtype=torch.bfloat16,
        ).cuda()
        made.load_from_unquantized(torch.randn(experts, out, columns, device="cuda").bfloat16())
        made.transform()
        return made

    def _choices_of(self, layer: torch.nn.Module, totals: list[int]) -> str:
        """Its kernel for each number of rows of all experts, as its tuning_config: (more than, up to, choice)."""
        from humming.tune import get_heuristics_config

        config = layer.humming_config
        choices = [get_heuristics_config(config, shape_m=total, gemm_type=self.GEMM_TYPE) for total in totals]
        return json.dumps(list(zip([0, *totals[:-1]], totals, choices, strict=True)))

    def calls(self, buffers: Buffers, rows: int) -> dict[str, Call]:
        more = {
            "expert_layout": buffers.counts,
            "compute_config": {"gemm_type": self.GEMM_TYPE},
            "valid_shape_m": rows * buffers.counts.numel(),
        }
        first, second = self._choices

        def call(i: int) -> None:
            w13, w2 = self._pairs[i % len(self._pairs)]
            w13(buffers.input, outputs=buffers.gate_up, tuning_config=first, **more)
            w2(buffers.hidden, outputs=buffers.output, tuning_config=second, **more)

        return {self.NAME: call}

    def named(self, times: dict[str, float]) -> dict[str, float]:
        return times


class HummingInt8(Humming):
    """It rounds rows to int8, which is timed too."""

    NAME, ROWS = "humming_int8", "int8"


class HummingFp8(Humming):
    """It rounds rows to e4m3, which is timed too."""

    NAME, ROWS = "humming_fp8", "float8e4m3"


class DeepGemm:
    """Its masked form on e4m3 weights and rows, without quantizing."""

    def __init__(self, shape: Shape, options: argparse.Namespace) -> None:
        self._library = deep_gemm()
        self._pairs = [
            (self._weights(shape.experts, 2 * shape.N, shape.K), self._weights(shape.experts, shape.K, shape.N))
            for _ in range(num_copies(shape.num_bytes))
        ]

    def _weights(self, experts: int, out: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randn(experts, out, columns, dtype=torch.bfloat16, device="cuda").to(torch.float8_e4m3fn)
        return codes, torch.rand(experts, -(-out // GROUP_SIZE), -(-columns // GROUP_SIZE), device="cuda")

    def _rows(self, buffer: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[experts, capacity, columns]` as codes, and scales as its kernels read them."""
        codes, scales = split_rows(quantize_rows(buffer), buffer.size(1), torch.float8_e4m3fn)
        lay_out = self._library.get_mn_major_tma_aligned_tensor
        return codes.contiguous().unflatten(0, (experts, -1)), lay_out(scales.contiguous().unflatten(0, (experts, -1)))

    def calls(self, buffers: Buffers, rows: int) -> dict[str, Call]:
        experts = buffers.counts.numel()
        taken, hidden = self._rows(buffers.input, experts), self._rows(buffers.hidden, experts)
        gate_up, output = (each.unflatten(0, (experts, -1)) for each in (buffers.gate_up, buffers.output))
        product = self._library.fp8_m_grouped_gemm_nt_masked

        def call(i: int) -> None:
            w13, w2 = self._pairs[i % len(self._pairs)]
            product(taken, w13, gate_up, buffers.counts, rows)
            product(hidden, w2, output, buffers.counts, rows)

        return {"deepgemm": call}

    def named(self, times: dict[str, float]) -> dict[str, float]:
        return times


def deep_gemm() -> Any:
    """The package, alone or as vLLM carries it.

    Raises:
        ImportError: neither can be imported.
    """
    said = []
    for name in DEEP_GEMM:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            said.append(f"{name}: {error}")
    raise ImportError(f"install sgl-deep-gemm or vllm ({'; '.join(said)})")


class Vllm:
    """Its batched Marlin for each block size, with the index lists made in every call."""

    def __init__(self, shape: Shape, options: argparse.Namespace) -> None:
        if options.library is None:
            raise SystemExit("vllm needs --library, its _moe_C_stable_libtorch.abi3.so or that as .xz")
        torch.ops.load_library(unpacked(options.library))
        self._ops = torch.ops._moe_C
        self._pairs = [
            (self._weights(shape.experts, 2 * shape.N, shape.K), self._weights(shape.experts, shape.K, shape.N))
            for _ in range(num_copies(shape.num_bytes))
        ]
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        self._workspace = torch.zeros(4 * multiprocessors, dtype=torch.int32, device="cuda")

    def _weights(self, experts: int, out: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = (experts, columns // 16, out * 2)
        codes = torch.randint(-(2**31), 2**31 - 1, size, dtype=torch.int32, device="cuda")
        return codes, torch.rand(experts, columns // 128, out, device="cuda").bfloat16()

    def calls(self, buffers: Buffers, rows: int) -> dict[str, Call]:
        """With the usual block, and the two smallest that hold all rows."""
        blocks = {VLLM_USUAL_BLOCK, *[block for block in VLLM_BLOCKS if block >= rows][:2]}
        return {str(block): self._call(buffers, block) for block in sorted(blocks)}

    def _call(self, buffers: Buffers, block: int) -> Call:
        experts, capacity = buffers.counts.numel(), buffers.capacity
        per_expert, total = -(-capacity // block), experts * capacity
        slots, owners, used = (
            torch.empty(size, dtype=torch.int32, device="cuda")
            for size in (experts * per_expert * block, experts * per_expert, 1)
        )
        ones = torch.ones(total, device="cuda")

        def gemm(rows: torch.Tensor, packed: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
            codes, scales = packed
            self._ops.moe_wna16_marlin_gemm(
                rows, out, codes, None, scales, None, None, None, None, None, self._workspace, slots, owners, used,
                ones, block, 1, False, scalar_types.uint4b8.id, total, out.size(1), rows.size(1), True, False, True,
                False, -1, -1, -1,
            )  # fmt: skip

        def call(i: int) -> None:
            self._ops.batched_moe_align_block_size(capacity, block, buffers.counts, slots, owners, used)
            w13, w2 = self._pairs[i % len(self._pairs)]
            gemm(buffers.input, w13, buffers.gate_up)
            gemm(buffers.hidden, w2, buffers.output)

        return call

    def named(self, times: dict[str, float]) -> dict[str, float]:
        return {"vllm": times[str(VLLM_USUAL_BLOCK)], "vllm_best": min(times.values())} if times else {}


class Torch:
    """torch.bmm on bf16 weights and the rows in use."""

    def __init__(self, shape: Shape, options: argparse.Namespace) -> None:
        self._shape = shape
        self._pairs = [
            (self._weights(shape.K, 2 * shape.N), self._weights(shape.N, shape.K))
            for _ in range(num_copies(2 * 3 * shape.experts * shape.K * shape.N))
        ]

    def _weights(self, columns: int, out: int) -> torch.Tensor:
        return torch.randn(self._shape.experts, columns, out, dtype=torch.bfloat16, device="cuda")

    def calls(self, buffers: Buffers, rows: int) -> dict[str, Call]:
        def used(buffer: torch.Tensor) -> torch.Tensor:
            return buffer.view(self._shape.experts, buffers.capacity, -1)[:, :rows]

        taken, gate_up, hidden, output = map(used, (buffers.input, buffers.gate_up, buffers.hidden, buffers.output))

        def call(i: int) -> None:
            w13, w2 = self._pairs[i % len(self._pairs)]
            torch.bmm(taken, w13, out=gate_up)
            torch.bmm(hidden, w2, out=output)

        return {"torch_bmm": call}

    def named(self, times: dict[str, float]) -> dict[str, float]:
        return times


PEERS: dict[str, type[Humming | DeepGemm | Vllm | Torch]] = {
    "humming": Humming,
    "humming-int8": HummingInt8,
    "humming-fp8": HummingFp8,
    "deepgemm": DeepGemm,
    "vllm": Vllm,
    "torch": Torch,
}
# Packages that a peer may be in, by the beginning of its name.
PACKAGES = {
    "humming": ("humming-kernels",),
    "deepgemm": ("sgl-deep-gemm", "deep-gemm", "vllm"),
    "vllm": ("vllm",),
    "torch": ("torch",),
}


def unpacked(library: Path) -> str:
    """A path of the library itself, in a folder for temporary files where it is compressed."""
    if library.suffix != ".xz":
        return str(library)
    target = Path(tempfile.gettempdir()) / library.stem
    if not target.exists():
        target.write_bytes(lzma.decompress(library.read_bytes()))
    return str(target)


def run_shape(options: argparse.Namespace, shape: Shape) -> bool:
    """Prints a line for each number of rows; whether all could be computed."""
    try:
        peer = PEERS[options.peer](shape, options)
    except Exception as error:
        print(failure(options, shape, options.rows, error), flush=True)
        return False
    device, all_computed = torch.device("cuda", torch.cuda.current_device()), True
    buffers = Buffers(shape, capacity_of(min(options.rows)))
    for rows in sorted(options.rows):
        if capacity_of(rows) > buffers.capacity:
            buffers = Buffers(shape, capacity_of(rows))
        buffers.counts.fill_(rows)
        times = {}
        try:
            for name, call in peer.calls(buffers, rows).items():
                if options.compile_only:
                    call(0)
                    continue
                times[name] = timed(call, device).median
        except Exception as error:
            print(failure(options, shape, [rows], error), flush=True)
            all_computed = False
            continue
        size = (shape.experts, shape.K, shape.N)
        print(json.dumps({"shape": size, "rows": rows, "us": peer.named(times)}), flush=True)
    return all_computed


def failure(options: argparse.Namespace, shape: Shape, row_counts: list[int], error: Exception) -> str:
    """What a peer could not compute and where in its code it failed, in one line."""
    packages = PACKAGES[options.peer.split("-")[0]]
    package = f"{packages[0]} (no package)"
    for name in reversed(packages):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            package = f"{name} {importlib.metadata.version(name)}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = "/".join(Path(frame.filename).parts[-3:])
    said = f": {error}" if str(error) else ""
    return (
        f"{options.peer}: {package} fails with {options.weights} weights, E {shape.experts}, "
        f"K {shape.K}, N {shape.N}, rows {', '.join(map(str, row_counts))}: {type(error).__name__}{said} at "
        f"{place}:{frame.lineno}, `{frame.line}`"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("--library", type=Path, help="vLLM's library file")
    parser.add_argument(
        "--shape", type=int, nargs=3, metavar=("EXPERTS", "K", "N"), action="append", required=True, help="may repeat"
    )
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--weights", choices=sorted(set().union(*OF_PEERS.values())), default="int4")
    parser.add_argument("--compile-only", action="store_true", help="make the first calls and time nothing")
    options = parser.parse_args()
    torch.manual_seed(0)
    all_computed = True
    for experts, K, N in options.shape:
        all_computed &= run_shape(options, with_weights(Shape(experts=experts, K=K, N=N), options.weights))
        torch.cuda.empty_cache()
    if not all_computed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

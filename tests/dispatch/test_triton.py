"""The Triton forms compile for the GPUs they are meant for; kernels/test_interpreter.py compares their bits."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from moe_ep.kernels.dispatch_messages import open_messages_kernel, pack_messages_kernel, send_plan_kernel
from moe_ep.kernels.dispatch_rows import pack_rows_kernel, row_blocks, weighted_rows_kernel
from moe_ep.kernels.quantize import dequantize_kernel, quantize_kernel
from tests.kernels.test_triton_compiles import ARCHITECTURES, compiled_ptx, hands_over_first


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("quantized", "int8"), [(False, False), (True, False), (True, True)])
def test_messages_compile(arch: int, quantized: bool, int8: bool) -> None:
    pack_types = {
        "rows_ptr": "*i32", "ids_ptr": "*i32", "weights_ptr": "*fp32", "owners_ptr": "*i32", "send_rows_ptr": "*i32",
        "send_meta_ptr": "*i32", "headers_ptr": "*i32", "slots_ptr": "*i32",
    }  # fmt: skip
    pack_constants = {
        "NUM_RANKS": 8, "TOPK": 8, "BLOCK_TOPK": 8, "BLOCK_TOKENS": 64, "BLOCK_EXPERTS": 32,
        "BLOCK": 512,
    }  # fmt: skip
    rows = ("rows_ptr", "num_words", "row_stride", "send_rows_ptr", "send_row_stride", "send_rank_stride")
    ptx = compiled_ptx(pack_messages_kernel.function, pack_types, pack_constants, rows, arch)
    assert "st.global.v4.b32" in ptx
    open_types = {
        "rows_ptr": "*u8" if quantized else "*i32", "batch_ptr": "*bf16" if quantized else "*i32",
        "scales_ptr": "*fp32", "meta_ptr": "*i32", "headers_ptr": "*i32", "map_ptr": "*i32", "slots_ptr": "*i32",
        "weights_ptr": "*fp32", "totals_ptr": "*i32",
    }  # fmt: skip
    open_constants = {
        "NUM_RANKS": 8, "TOPK": 8, "BLOCK_TOPK": 8, "QUANTIZED": quantized, "INT8": int8,
        "GROUP": 128, "BLOCK_EXPERTS": 128, "BLOCK": 1024 if quantized else 512,
    }  # fmt: skip
    rows = ("rows_ptr", "num_columns", "row_stride", "rank_stride", "batch_ptr")
    ptx = compiled_ptx(open_messages_kernel.function, open_types, open_constants, rows, arch)
    assert "st.global.v4.b32" in ptx


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_rows_compile(arch: int) -> None:
    types = {
        "rows_ptr": "*i32", "ids_ptr": "*i32", "weights_ptr": "*fp32", "owners_ptr": "*i32", "slots_ptr": "*i32",
        "send_rows_ptr": "*i32", "send_meta_ptr": "*i32",
    }  # fmt: skip
    constants = {"NUM_RANKS": 8, "TOPK": 8, "BLOCK_TOPK": 8, "BLOCK": 512}
    rows = ("rows_ptr", "num_columns", "row_stride", "send_rows_ptr", "send_stride")
    ptx = compiled_ptx(pack_rows_kernel.function, types, constants, rows, arch)
    assert ptx.count("st.global.v4.b32") >= 8
    types = {"source_ptr": "*bf16", "slots_ptr": "*i32", "weights_ptr": "*fp32", "target_ptr": "*bf16"}
    constants = {"TOPK": 8, "HAS_WEIGHTS": True, "ALWAYS": False, "BLOCK": 1024}
    rows = ("source_ptr", "num_columns", "source_stride", "target_stride", "target_ptr")
    ptx = compiled_ptx(weighted_rows_kernel.function, types, constants, rows, arch)
    assert ptx.count("ld.global.v4.b32") == 8
    assert "fma.rn.f32" not in ptx


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_plans_compile(arch: int) -> None:
    types = {"ids_ptr": "*i32", "owners_ptr": "*i32", "slots_ptr": "*i32", "counts_ptr": "*i32"}
    for exact in (True, False):
        compiled_ptx(
            send_plan_kernel.function, types, {"NUM_RANKS": 8, "TOPK": 8, "EXACT": exact, "BLOCK": 1024}, (), arch
        )


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("int8", [False, True])
def test_quantized_rows_compile(arch: int, int8: bool) -> None:
    types = {"rows_ptr": "*bf16", "codes_ptr": "*u8", "scales_ptr": "*fp32"}
    constants = {"GROUP": 128, "BLOCK_GROUPS": 8, "INT8": int8, "HAS_E4M3": arch >= 90}
    ptx = compiled_ptx(
        quantize_kernel.function,
        types,
        constants | {"TINY": 2.0**-126, "CORRECTIONS": 0 if int8 else 1},
        ("rows_ptr", "codes_ptr"),
        arch,
    )
    assert "div.rn.f32" in ptx and "div.full.f32" not in ptx
    constants["EARLY"] = arch >= 90
    ptx = compiled_ptx(dequantize_kernel.function, types, constants, ("rows_ptr", "codes_ptr"), arch)
    assert hands_over_first(ptx) == (arch >= 90)


def test_blocks_follow_the_rows() -> None:
    assert row_blocks(4096, 7168, 2) == (2048, 4)
    assert row_blocks(128, 7168, 2) == (1024, 4)
    assert row_blocks(1, 7168, 2) == (256, 1)
    assert row_blocks(4096, 16, 4) == (128, 1)

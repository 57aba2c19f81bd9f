"""The Triton kernels compile for the GPUs they are meant for, which needs no GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_ep.kernels.align import batched_kernel
from moe_ep.kernels.grouped.products import fitting, product_kernel
from moe_ep.kernels.mul_sum import mul_sum_kernel
from moe_ep.kernels.routing import topk_kernel
from moe_ep.routing.topk import SCORING_FUNCS

ARCHITECTURES = (80, 90)


def compiled(kernel, types: dict[str, str], constants: dict, divisible: tuple[str, ...], arch: int, **options: int):
    """One specialisation; arguments without a type are int32, `divisible` ones multiples of 16."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    options = {"num_warps": 4, "enable_fp_fusion": False} | options
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def compiled_ptx(kernel, types: dict[str, str], constants: dict, divisible: tuple[str, ...], arch: int) -> str:
    ptx: str = compiled(kernel, types, constants, divisible, arch).asm["ptx"]
    return ptx


def hands_over_first(ptx: str) -> bool:
    """Whether the kernel waits for those before it, then lets the next one come, before it touches global memory."""
    wait, come = ptx.find("griddepcontrol.wait"), ptx.find("griddepcontrol.launch_dependents")
    return 0 <= wait < come < min(ptx.index("ld.global"), ptx.index("st.global"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", [*SCORING_FUNCS, "scores"])
@pytest.mark.parametrize(("groups", "size", "kept", "top_k"), [(1, 384, 1, 8), (8, 32, 4, 8), (9, 8, 3, 6)])
def test_topk(arch: int, kind: str, groups: int, size: int, kept: int, top_k: int) -> None:
    types = {
        "router_ptr": "*bf16", "bias_ptr": "*fp32", "weights_ptr": "*fp32", "ids_ptr": "*i32",
        "routed_scaling_factor": "fp32",
    }  # fmt: skip
    constants = {
        "KIND": kind, "HAS_BIAS": True, "RENORMALIZE": True, "TOP_K": top_k, "NUM_GROUPS": groups, "GROUP_SIZE": size,
        "TOPK_GROUP": kept, "BLOCK_GROUPS": triton.next_power_of_2(groups),
        "BLOCK_MEMBERS": triton.next_power_of_2(size), "BLOCK_K": triton.next_power_of_2(top_k), "PRECISE": True,
        "column_stride": 1, "EARLY": arch >= 90,
    }  # fmt: skip
    ptx = compiled_ptx(topk_kernel.function, types, constants, (), arch)
    # Scores must round as torch's do: a true division, not a multiplication by an approximate reciprocal, a true root.
    assert ("div.rn.f32" in ptx) == (kind == "sigmoid")
    assert ("sqrt.rn.f32" in ptx) == (kind == "sqrtsoftplus")
    assert hands_over_first(ptx) == (arch >= 90)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_mul_sum_reads_16_bytes_at_a_time_and_does_not_fuse(arch: int) -> None:
    types = {
        "inputs_ptr": "*bf16", "weights_ptr": "*fp32", "ids_ptr": "*i32", "map_ptr": "*i32", "outputs_ptr": "*bf16"
    }  # fmt: skip
    constants = {
        "TOPK": 8, "HAS_IDS": True, "HAS_MAP": True, "FAR": False, "BLOCK": 1024, "input_column_stride": 1,
        "output_column_stride": 1, "weight_slot_stride": 1, "id_slot_stride": 1,
        "EARLY": arch >= 90,
    }  # fmt: skip
    divisible = (
        "inputs_ptr", "outputs_ptr", "hidden_size", "input_token_stride", "input_slot_stride", "output_token_stride"
    )  # fmt: skip
    ptx = compiled_ptx(mul_sum_kernel.function, types, constants, divisible, arch)
    assert ptx.count("ld.global.v4.b32") == 8
    assert ptx.count("st.global.v4.b32") == 1
    assert "fma.rn.f32" not in ptx
    assert hands_over_first(ptx) == (arch >= 90)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_batched_align(arch: int) -> None:
    types = {name: "*i32" for name in batched_kernel.function.arg_names if name.endswith("_ptr")}
    constants = {"BLOCK_SIZE": 64, "BINS": 64, "BLOCK": 128, "EARLY": arch >= 90}
    ptx = compiled_ptx(batched_kernel.function, types, constants, (), arch)
    assert ".local" not in ptx
    assert hands_over_first(ptx) == (arch >= 90)


# Bytes of shared memory that a program may have.
SHARED = {80: 163 << 10, 90: 227 << 10, 120: 99 << 10}


@pytest.mark.parametrize("arch", SHARED)
@pytest.mark.parametrize(("gated", "ranged"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_products_of_plain_experts(arch: int, gated: bool, ranged: bool, rows: int) -> None:
    tiles = fitting(rows, gated, SHARED[arch], ranged)
    floats, integers = ("rows", "weights", "bias", "output"), ("places", "row_ids", "experts", "used")
    types = {f"{name}_ptr": "*bf16" for name in floats} | {f"{name}_ptr": "*i32" for name in integers}
    if ranged:
        types |= {"rows_ptr": "*fp32", "weights_ptr": "*fp16", "output_ptr": "*fp32"}
    constants = {
        "RANGED": ranged, "ACTIVATION": "silu" if gated else None, "GATED": gated, "LIMIT": None, "HAS_BIAS": False,
        "HAS_ROW_IDS": False, "INTO_ORDER": gated, "EVEN": True, "BLOCK_ROWS": rows, "BLOCK_COLUMNS": tiles.columns,
        "BLOCK_INNER": tiles.inner, "GROUP": tiles.group, "EARLY": arch == 90,
    }  # fmt: skip
    divisible = ("rows_ptr", "weights_ptr", "output_ptr", "num_inner", "num_columns", "row_stride", "output_stride")
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    made = compiled(product_kernel.function, types, constants, divisible, arch, **options)
    # Several steps are on their way at once, 16 bytes a copy.
    assert "cp.async.cg.shared.global" in made.asm["ptx"]
    assert made.metadata.shared <= SHARED[arch]
    assert ".local" not in made.asm["ptx"]
    if arch == 90:
        assert hands_over_first(made.asm["ptx"])
        assert ("wgmma" in made.asm["ptx"]) == (rows >= 64)

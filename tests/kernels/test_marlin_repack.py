"""The packed layout against its drawing, and the exact way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ep.kernels.marlin.repack import (
    BitOrder,
    PackedWeights,
    pack_codes,
    pack_marlin,
    row_order,
    unpack_marlin,
)
from moe_ep.kernels.marlin.types import WEIGHT_TYPES, WeightType
from moe_ep.scalar_type import scalar_types

CASES = [
    (kind, group) for kind in WEIGHT_TYPES.values() for group in kind.group_sizes
]  # every type with every group size


def _weights(kind: WeightType, group: int, num_experts: int, rows: int, columns: int, seed: int = 0):
    """Random codes, scales and (where the type has them) zero points."""
    rng = torch.Generator().manual_seed(seed)
    groups = 1 if group == -1 else columns // group
    codes = torch.randint(0, 1 << kind.bits, (num_experts, rows, columns), dtype=torch.uint8, generator=rng)
    scales = torch.rand(num_experts, rows, groups, generator=rng).to(torch.bfloat16)
    if kind.scalar_type == scalar_types.float4_e2m1f and group == 32:
        scales = torch.randint(0, 256, scales.shape, dtype=torch.uint8, generator=rng)
    elif kind.scalar_type == scalar_types.float4_e2m1f:
        scales = scales.to(torch.float8_e4m3fn)
    zeros = None
    if kind.has_zero_points:
        zeros = torch.randint(0, 16, (num_experts, rows, groups), dtype=torch.uint8, generator=rng)
    return codes, scales, zeros


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.dtype.itemsize == 1:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    return torch.equal(a, b)


@pytest.mark.parametrize(("kind", "group"), CASES, ids=lambda v: str(getattr(v, "scalar_type", v)))
@pytest.mark.parametrize(("rows", "gated"), [(64, True), (96, False), (160, False), (192, True)])
def test_unpack_gives_back_what_was_packed(kind: WeightType, group: int, rows: int, gated: bool) -> None:
    codes, scales, zeros = _weights(kind, group, 3, rows, 256)
    for input_dtype in (None, torch.float8_e4m3fn):
        packed = pack_marlin(codes, scales, kind.scalar_type.id, group, zeros, gated, input_dtype=input_dtype)
        if input_dtype and kind.scalar_type == scalar_types.float4_e2m1f and group == 32:
            assert packed.qweight.shape == (3, 256 // 16, rows)
            assert packed.qweight.dtype == torch.int64
            assert _same(packed.zeros, packed.scales.view(torch.uint8).amax(1, keepdim=True))
        else:
            assert packed.qweight.shape == (3, 256 // 16, rows * 16 // kind.pack)
            assert packed.qweight.dtype == torch.int32
        assert packed.scales.shape == (3, scales.size(2), rows)
        assert packed.scales.dtype == scales.dtype
        got = unpack_marlin(packed, kind.scalar_type.id, group, gated)
        assert all(_same(a, b) for a, b in zip(got, (codes, scales, zeros), strict=True))


@pytest.mark.parametrize(("kind", "group"), CASES, ids=lambda v: str(getattr(v, "scalar_type", v)))
def test_there_may_be_no_experts(kind: WeightType, group: int) -> None:
    codes, scales, zeros = _weights(kind, group, 0, 96, 256)
    for input_dtype in (None, torch.float8_e4m3fn):
        packed = pack_marlin(codes, scales, kind.scalar_type.id, group, zeros, input_dtype=input_dtype)
        assert packed.qweight.shape[:2] == (0, 256 // 16)
        got = unpack_marlin(packed, kind.scalar_type.id, group)
        assert all(_same(a, b) for a, b in zip(got, (codes, scales, zeros), strict=True))


@pytest.mark.parametrize(("rows", "columns"), [(0, 64), (64, 0)])
def test_a_matrix_has_rows_and_columns(rows: int, columns: int) -> None:
    with pytest.raises(ValueError, match=f"^codes has {rows} rows and {columns} columns"):
        pack_marlin(
            torch.zeros(2, rows, columns, dtype=torch.uint8), torch.ones(2, rows, 1), scalar_types.uint4b8.id, -1
        )


@pytest.mark.parametrize("columns", [32, 96, 128])
def test_columns_may_be_any_multiple_of_32(columns: int) -> None:
    kind = WEIGHT_TYPES[scalar_types.uint4b8.id]
    codes, scales, _ = _weights(kind, 32, 2, 96, columns)
    packed = pack_marlin(codes, scales, kind.scalar_type.id, 32)
    assert torch.equal(unpack_marlin(packed, kind.scalar_type.id, 32)[0], codes)


def test_codes_may_begin_anywhere() -> None:
    kind = WEIGHT_TYPES[scalar_types.uint4b8.id]
    codes, scales, _ = _weights(kind, 32, 2, 64, 96)
    expected = pack_marlin(codes, scales, kind.scalar_type.id, 32)
    for first in (1, 4):
        places = torch.cat([codes.new_zeros(first), codes.flatten()])[first:].view(codes.shape)
        assert torch.equal(pack_marlin(places, scales, kind.scalar_type.id, 32).qweight, expected.qweight)
    alone = torch.cat([codes.flatten(1), codes.new_zeros(2, 3)], dim=1)[:, :-3].unflatten(1, (64, 96))[:1]
    assert alone.is_contiguous() and alone.stride(0) % 8
    assert torch.equal(pack_marlin(alone, scales[:1], kind.scalar_type.id, 32).qweight, expected.qweight[:1])


@pytest.mark.parametrize("seed", [0, 1])
def test_act_order_sorts_the_columns_and_the_way_back_undoes_it(seed: int) -> None:
    kind = WEIGHT_TYPES[scalar_types.uint4b8.id]
    codes, scales, _ = _weights(kind, 32, 2, 64, 128, seed)
    rng = torch.Generator().manual_seed(seed)
    g_idx = torch.stack([(torch.randperm(128, generator=rng) // 32).to(torch.int32) for _ in range(2)])
    packed = pack_marlin(codes, scales, kind.scalar_type.id, 32, g_idx=g_idx)
    assert packed.g_idx is not None
    assert packed.sort_indices is not None
    assert (packed.g_idx.diff(dim=1) >= 0).all()
    assert torch.equal(g_idx.gather(1, packed.sort_indices.long()), packed.g_idx)
    plain = PackedWeights(packed.qweight, packed.scales, None, None, None)
    sorted_codes = unpack_marlin(plain, kind.scalar_type.id, 32)[0]
    assert torch.equal(sorted_codes, codes.gather(2, packed.sort_indices.long().unsqueeze(1).expand(codes.shape)))
    assert torch.equal(unpack_marlin(packed, kind.scalar_type.id, 32)[0], codes)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "gated"), [(96, False), (128, True)])
def test_every_code_lies_where_the_drawing_says(bits: int, rows: int, gated: bool) -> None:
    columns = 64
    kind = WEIGHT_TYPES[(scalar_types.uint4b8 if bits == 4 else scalar_types.uint8b128).id]
    codes, scales, _ = _weights(kind, -1, 1, rows, columns)
    packed = pack_marlin(codes, scales, kind.scalar_type.id, -1, gated=gated)
    data = packed.qweight.flatten().view(torch.uint8).tolist()
    order = row_order(rows, gated).tolist()
    for position in range(rows):
        strip, in_strip = divmod(position, 64)
        height = min(64, rows - 64 * strip)
        piece, in_piece = divmod(in_strip, 16)
        h, g = divmod(in_piece, 8)
        for column in range(columns):
            block, rest = divmod(column, 32)
            kk, rest = divmod(rest, 16)
            k, rest = divmod(rest, 8)
            t, i = divmod(rest, 2)
            start = strip * 64 * columns + (block * (height // 16) + piece) * 512 + (4 * g + t) * 16  # in codes
            if bits == 4:
                nibble = 8 * kk + i * 4 + k * 2 + h
                byte = data[(start + nibble) // 2]
                value = byte >> 4 if nibble % 2 else byte & 15
            else:  # core matrices of 8 rows x 16 columns, the eight of two pieces in the order h, piece, kk
                pair = strip * 64 * columns + (block * (height // 16) + piece // 2 * 2) * 512
                value = data[pair + (4 * h + 2 * (piece % 2) + kk) * 128 + 16 * g + 4 * t + 2 * i + k]
            assert value == codes[0, order[position], column]


def test_bits_of_floats_lie_where_the_kernels_take_them_from() -> None:
    """As e2m1_bits of cuda/dequant.cuh does: sign, exponent and mantissa where a bf16 has them."""
    kind = WEIGHT_TYPES[scalar_types.float4_e2m1f.id]
    codes, scales, _ = _weights(kind, 32, 1, 96, 64)
    words = pack_marlin(codes, scales, kind.scalar_type.id, 32).qweight.flatten().tolist()
    by_row = pack_codes.plain(codes, 4, False, BitOrder.BY_ROW).flatten().tolist()
    plain = pack_codes.plain(codes, 4, False).flatten().tolist()
    for word, other, nibbles in zip(words, by_row, plain, strict=True):
        word &= 0xFFFFFFFF
        pairs = [*(turned(word, by) for by in (0, 10, 13)), (word & 0x001B001B) * (1 << 3 | 1 << 8 | 1 << 14)]
        check_pairs(pairs, nibbles)
        other &= 0xFFFFFFFF
        sources = [(other, other << 5)] * 2 + [(turned(other, 4), other << 1)] * 2
        check_pairs([bytes_of(*both, which) for both, which in zip(sources, BYTES, strict=True)], nibbles)


BYTES = (0x1504, 0x3726, 0x2514, 0x0736)


def turned(word: int, by: int) -> int:
    return (word << by | word >> (32 - by)) & 0xFFFFFFFF


def bytes_of(low: int, high: int, which: int) -> int:
    """As prmt does."""
    both = low | (high & 0xFFFFFFFF) << 32
    return sum((both >> 8 * (which >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))


def check_pairs(pairs: list[int], nibbles: int) -> None:
    """Pair j has codes j and j + 4 as bf16."""
    for j, pair in enumerate(pairs):
        for half in (0, 16):
            bits = pair & 0x81C081C0
            code = nibbles >> (4 * j + half) & 15
            assert bits >> half & 0xFFFF == (code >> 3) << 15 | (code & 7) << 6


def test_gated_rows_are_interleaved_by_eight_and_others_by_four() -> None:
    assert row_order(32, True).tolist()[:17] == [*range(8), *range(16, 24), 8]
    assert row_order(16, False).tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]


def test_scales_and_zero_points_follow_their_rows_in_pairs() -> None:
    kind = WEIGHT_TYPES[scalar_types.uint4.id]
    codes, scales, zeros = _weights(kind, 32, 1, 32, 64)
    packed = pack_marlin(codes, scales, kind.scalar_type.id, 32, zeros, gated=False)
    assert zeros is not None
    assert packed.zeros is not None
    order = row_order(32, False)
    for g in range(8):
        for h in range(2):
            assert torch.equal(packed.scales[0, :, 16 + 2 * g + h], scales[0, order[16 + 8 * h + g]])
            assert torch.equal(packed.zeros[0, :, 16 + 2 * g + h].byte(), zeros[0, order[16 + 8 * h + g]])


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"codes": torch.zeros(2, 64, 64, dtype=torch.int32)}, "codes"),
        ({"codes": torch.zeros(2, 64, 48, dtype=torch.uint8)}, "codes"),
        ({"codes": torch.zeros(2, 32, 64, dtype=torch.uint8), "gated": True}, "codes"),
        ({"scales": torch.ones(2, 64, 3)}, "scales"),
        ({"scales": torch.ones(2, 64, 2, dtype=torch.int32)}, "scales"),
        ({"codes": None}, "codes"),
        ({"scales": [1.0]}, "scales"),
        ({"zero_points": [0]}, "zero_points"),
        ({"g_idx": range(64)}, "g_idx"),
        ({"group_size": 48}, "group_size"),
        ({"group_size": 128}, "group_size"),
        ({"quant_type_id": 7}, "quant_type_id"),
        ({"input_dtype": "fp8"}, "input_dtype"),
        ({"input_dtype": torch.float32}, "input_dtype"),
        ({"quant_type_id": scalar_types.uint4.id}, "zero_points"),
        ({"zero_points": torch.zeros(2, 64, 2, dtype=torch.uint8)}, "zero_points"),
        ({"g_idx": torch.zeros(64, dtype=torch.int32)}, "g_idx"),
        ({"scales": torch.ones(2, 64, 2, device="meta")}, "scales"),
        ({"g_idx": torch.zeros(2, 64, dtype=torch.int32, device="meta")}, "g_idx"),
        (
            {
                "quant_type_id": scalar_types.uint4.id,
                "zero_points": torch.zeros(2, 64, 2, dtype=torch.uint8, device="meta"),
            },
            "zero_points",
        ),
        ({"g_idx": torch.full((2, 64), 2, dtype=torch.int32)}, "g_idx"),
        ({"g_idx": torch.full((2, 64), -1, dtype=torch.int32)}, "g_idx"),
        ({"codes": torch.full((2, 64, 64), 16, dtype=torch.uint8)}, "codes"),
        (
            {"codes": torch.full((2, 64, 64), 255, dtype=torch.uint8), "quant_type_id": scalar_types.float4_e2m1f.id},
            "codes",
        ),
        (
            {
                "quant_type_id": scalar_types.uint4.id,
                "zero_points": torch.full((2, 64, 2), 16, dtype=torch.uint8),
            },
            "zero_points",
        ),
    ],
)
def test_a_wrong_argument_is_named(change: dict, names: str) -> None:
    arguments = {
        "codes": torch.zeros(2, 64, 64, dtype=torch.uint8),
        "scales": torch.ones(2, 64, 2),
        "quant_type_id": scalar_types.uint4b8.id,
        "group_size": 32,
        **change,
    }
    with pytest.raises(ValueError, match=f"^{names} "):
        pack_marlin(**arguments)


FITTING = pack_marlin(torch.zeros(2, 64, 64, dtype=torch.uint8), torch.ones(2, 64, 2), scalar_types.uint4b8.id, 32)


def test_gated_is_true_or_false() -> None:
    codes, scales = torch.zeros(2, 64, 64, dtype=torch.uint8), torch.ones(2, 64, 2)
    with pytest.raises(TypeError, match="^gated is 'false'; it must be True or False"):
        pack_marlin(codes, scales, scalar_types.uint4b8.id, 32, gated="false")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^gated is 'false'; it must be True or False"):
        unpack_marlin(FITTING, scalar_types.uint4b8.id, 32, "false")  # type: ignore[arg-type]


ACT_ORDER = pack_marlin(
    torch.zeros(2, 64, 64, dtype=torch.uint8),
    torch.ones(2, 64, 2),
    scalar_types.uint4b8.id,
    32,
    g_idx=torch.arange(2, dtype=torch.int32).repeat(2, 32),
)


@pytest.mark.parametrize("name", ["g_idx", "sort_indices"])
@pytest.mark.parametrize(
    "change",
    [
        lambda part: None,
        lambda part: part.tolist(),
        lambda part: part.long(),
        lambda part: part[:1],
        lambda part: part[:, :32],
        lambda part: part[0],
        lambda part: part.to("meta"),
        lambda part: torch.full_like(part, 100),
        lambda part: torch.full_like(part, -1),
    ],
)
def test_the_columns_that_weights_were_sorted_by_are_as_packed(name: str, change: Any) -> None:
    wrong = ACT_ORDER._replace(**{name: change(getattr(ACT_ORDER, name))})
    with pytest.raises(ValueError, match=rf"^packed\.{name} (is|holds) "):
        unpack_marlin(wrong, scalar_types.uint4b8.id, 32)


def test_a_column_twice_is_refused() -> None:
    assert ACT_ORDER.sort_indices is not None
    twice = ACT_ORDER.sort_indices.clone()
    twice[1, 5] = twice[1, 6]
    with pytest.raises(ValueError, match=r"^packed\.sort_indices holds a row that is no permutation"):
        unpack_marlin(ACT_ORDER._replace(sort_indices=twice), scalar_types.uint4b8.id, 32)


@pytest.mark.parametrize(
    ("packed", "type_id", "group_size", "gated", "named"),
    [
        (FITTING._replace(qweight=FITTING.qweight.float()), scalar_types.uint4b8.id, 32, False, "packed.qweight"),
        (FITTING._replace(scales=FITTING.scales[:, :1]), scalar_types.uint4b8.id, 32, False, "packed.scales"),
        (FITTING._replace(scales=FITTING.scales[:1]), scalar_types.uint4b8.id, 32, False, "packed.scales"),
        (FITTING._replace(scales=FITTING.scales.to("meta")), scalar_types.uint4b8.id, 32, False, "packed.scales"),
        (FITTING._replace(qweight=None), scalar_types.float4_e2m1f.id, 32, False, "packed.qweight"),
        (FITTING, scalar_types.uint4b8.id, -1, False, "packed.scales"),
        (FITTING, scalar_types.uint8b128.id, 32, True, "packed.qweight"),
        (FITTING, scalar_types.uint4.id, 32, False, "packed.zeros"),
        (FITTING._replace(zeros=FITTING.scales), scalar_types.uint4b8.id, 32, False, "packed.zeros"),
    ],
)
def test_packed_weights_of_another_kind_are_refused(
    packed: PackedWeights, type_id: int, group_size: int, gated: bool, named: str
) -> None:
    with pytest.raises(ValueError, match=f"^{named} "):
        unpack_marlin(packed, type_id, group_size, gated)


@pytest.mark.parametrize("packed", [None, torch.zeros(2, 4, 4)])
def test_what_was_not_packed_is_not_unpacked(packed: Any) -> None:
    with pytest.raises(ValueError, match="^packed is a (NoneType|Tensor)"):
        unpack_marlin(packed, scalar_types.uint4b8.id, 32)


def check_triton(device: str) -> None:
    from moe_ep.kernels.marlin import repack as fused

    for bits, order in ((4, BitOrder.PLAIN), (4, BitOrder.SPREAD), (4, BitOrder.BY_ROW), (8, BitOrder.PLAIN)):
        for rows, columns, gated in ((64, 32, True), (192, 96, True), (32, 64, False), (160, 224, False)):
            codes = torch.randint(0, 1 << bits, (2, rows, columns), dtype=torch.uint8)
            packed = fused.triton_pack_codes(codes.to(device), bits, gated, order)
            assert torch.equal(packed.cpu(), pack_codes.plain(codes, bits, gated, order))


@pytest.mark.gpu
def test_triton_on_the_last_gpu() -> None:
    """With several, that is not the current one."""
    check_triton(f"cuda:{torch.cuda.device_count() - 1}")

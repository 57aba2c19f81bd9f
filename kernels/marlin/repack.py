"""Converts plain codes to the layout that the grouped GEMM reads, and back.

The GEMM multiplies 16 weight rows x 16 input columns at a time, with the weights as operand A of the tensor cores:
lane `4 * g + t` of a warp holds rows g and g + 8, columns 2t, 2t + 1, 2t + 8, 2t + 9. The packed form stores together
what a lane needs for 32 columns, so that a warp reads whole cache lines and nothing has to be shuffled.

    weights of one expert        rows (packed order) x columns
      strip     64 rows, all columns; the last one may have 32           one after the other
      block     a strip's 64 rows x 32 columns                           along the columns
      fragment  a block's 16 rows, one warp's                            4 to a block (2 in a strip of 32)
      lane      16 codes of 4 bits: 8 bytes                              32 to a fragment

    a lane's codes; kk = which 16 of the 32 columns, h = row g or g + 8, c = column 2t (+ 1, + 8, + 9)
      4 bits    int32 number kk:        bits 0     4     8     12    16    20    24    28
                                        h    0     1     0     1     0     1     0     1
                                        c    2t    2t    2t+8  2t+8  2t+1  2t+1  2t+9  2t+9
      4-bit floats, the same int32 with its bits moved (SPREAD), so that few instructions make bf16s of them; code and
                bit of it at each bit, of the other half's codes where marked ':
                15   14   13   12   11   10   9    8    7    6    5    4    3    2    1    0
                0.3  1.2' 1.1' 1.0' 2.2' 2.1' 2.0' 0.2  0.1  0.0  1.3  3.1  3.0  2.3  3.3  3.2
      the same for rows of 8 bits, where a nibble selects a byte of a table (BY_ROW, of int64 that are both int32):
                bits 0     4     8     12    16    20    24    28
                h    0     0     0     0     1     1     1     1
                c    2t    2t+8  2t+1  2t+9  2t    2t+8  2t+1  2t+9
                of each nibble bits 0, 1 and 2 are 2, 0 and 1 of its code; bit 3 is the sign of the code in the nibble
                before, for the first one in the last
    8 bits: a lane's int32 has the columns 2t, 2t + 8, 2t + 1, 2t + 9 of one row. Those of 8 rows are 128 bytes, a "core
    matrix" of wgmma, which takes these weights from shared memory as they are; ldmatrix gives each lane its int32 of
    four of them. The eight core matrices of two fragments f, in order: h, then f, then kk (1024 bytes).

Row order, for every 16 packed rows, position 8 h + j:
    gated     h = 0 gate row 8 b + j, h = 1 up row 8 b + j: a lane holds both and applies the activation itself
    other     row 16 b + 4 (j // 2) + 2 h + j % 2: a lane's four outputs are neighbours and leave in one store
Scales and zero points lie `[E, groups, rows]`, each 16 rows in the order 2 g + h, so a lane finds its two together.

Example: 4 bits, not gated, row 0: positions 0 and 1 hold rows 0 and 1, positions 8 and 9 rows 2 and 3; lane 0's first
int32 holds row 0, columns 0, 8, 1, 9 in its even nibbles and row 2, the same columns, in its odd ones.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch

from moe_ep.arguments import check_same_device, check_tensors
from moe_ep.errors import check_flags
from moe_ep.kernels.marlin.types import (
    ACTIVATION_DTYPES,
    WEIGHT_TYPES,
    WeightType,
    check_group_size,
    check_packed_zeros,
    check_sizes,
    check_zero_points,
    packed_sizes,
    weight_type,
)
from moe_ep.kernels.marlin.weights import E8M0, group_size_of
from moe_ep.kernels.triton_kernel import TritonKernel, cdiv, tl
from moe_ep.modular_kernel.contracts import ExpertWeights
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.quantization.input_rows import INPUT_DTYPES
from moe_ep.registry import operator
from moe_ep.scalar_type import ScalarType, scalar_types

STRIP = 64
BLOCK_COLUMNS = 32

# For 4-bit floats: bits of an int32 with codes side by side, and by how many places they move to the left.
SPREAD = (
    (0x00070007, 6),
    (0x00080008, 12),
    (0x00000070, 24),
    (0x00700000, -8),
    (0x00800080, -2),
    (0x00000700, 17),
    (0x07000000, -15),
    (0x38003800, -9),
    (0xC000C000, -14),
)


def _moves_by_row() -> tuple[tuple[int, int], ...]:
    """Nibble i of codes side by side has row i % 2; the four of a row go to one half of the word."""
    moves: dict[int, int] = {}
    for i in range(8):
        first = 4 * (i % 2 * 4 + i // 2)
        for bit, to in enumerate((first + 1, first + 2, first, (first + 7) % 32)):
            by = to - (4 * i + bit)
            moves[by] = moves.get(by, 0) | 1 << 4 * i + bit
    return tuple((mask, by) for by, mask in moves.items())


# The same for rows of 8 bits.
BY_ROW = _moves_by_row()


class BitOrder(IntEnum):
    """Where the bits of codes lie in an int32: side by side, as SPREAD says, or as BY_ROW says."""

    PLAIN = 0
    SPREAD = 1
    BY_ROW = 2

    @property
    def moves(self) -> tuple[tuple[int, int], ...] | None:
        """Bits of an int32 with codes side by side, and by how many places they move to the left."""
        return (None, SPREAD, BY_ROW)[self]


def bit_order(kind: WeightType) -> BitOrder:
    """The order in which weights of this type are packed."""
    if kind.scalar_type != scalar_types.float4_e2m1f:
        return BitOrder.PLAIN
    return BitOrder.BY_ROW if kind.for_eight_bit_rows else BitOrder.SPREAD


class PackedWeights(NamedTuple):
    """Weights in the kernels' layout.

    Attributes:
        qweight: int32 `[E, in / 16, out * 16 / pack]`, codes as drawn above; int64 `[E, in / 16, out]` for 8-bit rows.
        scales: `[E, groups, out]`, dtype as given.
        zeros: `[E, groups, out]` zero points as numbers of the scales' dtype, or None. Of 4-bit floats for 8-bit rows
            `[E, 1, out]`, the largest scale of every row.
        g_idx: int32 `[E, in]`, sorted, with act-order; else None.
        sort_indices: int32 `[E, in]` with act-order: packed column i is the checkpoint's column sort_indices[i]; else
            None.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    g_idx: torch.Tensor | None
    sort_indices: torch.Tensor | None


def pack_marlin(
    codes: torch.Tensor,
    scales: torch.Tensor,
    quant_type_id: int,
    group_size: int,
    zero_points: torch.Tensor | None = None,
    gated: bool = False,
    g_idx: torch.Tensor | None = None,
    input_dtype: torch.dtype | None = None,
) -> PackedWeights:
    """Packs the experts' weights, on their device.

    Args:
        codes: uint8 `[E, out, in]`, one stored code per byte; out and in are multiples of 32. w13: gate rows, then up.
        scales: `[E, out, groups]`; with g_idx there may be more groups than in / group_size (a shard of the columns).
        group_size: input columns that share a scale, -1 for all.
        zero_points: uint8 `[E, out, groups]`, for types that have them.
        gated: rows are gate rows, then up rows, to be interleaved (out a multiple of 64).
        g_idx: int32 `[E, in]`, the group of every column in the checkpoint's order (act-order).
        input_dtype: of the rows, as of fused_marlin_moe. torch.float8_e4m3fn packs mxfp4 for the kernels with such
            rows, which read no other layout of it; other types have one layout for all rows.

    Raises:
        ValueError: a wrong dtype, shape, type id or group size; zero points missing or not wanted; codes or zero points
            above the type's maximum, groups that scales does not have, or tensors on several devices.
        TypeError: gated is neither True nor False.
    """
    check_flags(gated=gated)
    if input_dtype not in (None, *INPUT_DTYPES, *ACTIVATION_DTYPES):
        raise ValueError(
            f"input_dtype is {input_dtype!r}; it must be None, torch.int8, torch.float8_e4m3fn or the rows' own dtype"
        )
    has_e8m0 = isinstance(scales, torch.Tensor) and scales.dtype in E8M0
    kind = weight_type(quant_type_id).packed_for(group_size, input_dtype if has_e8m0 else None)
    _check(kind, codes, scales, group_size, zero_points, gated, g_idx)
    sort_indices = None
    if g_idx is not None:
        g_idx, order = torch.sort(g_idx, dim=1, stable=True)
        codes = codes.gather(2, order.unsqueeze(1).expand(codes.shape))
        sort_indices = order.to(torch.int32)
    codes = codes.contiguous()
    # Both forms read codes several at a time. What torch calls contiguous may begin anywhere, and so may one expert.
    if any(place % 8 for place in (codes.storage_offset(), codes.stride(0))):
        codes = codes.clone(memory_format=torch.contiguous_format)
    per_lane = row_order(codes.size(1), gated, codes.device)[_scale_order(codes.size(1), codes.device)]
    words = pack_codes(codes, kind.bits, gated, bit_order(kind))
    packed_scales = _reorder(scales.transpose(1, 2), per_lane)
    zeros = None if zero_points is None else _reorder(zero_points.transpose(1, 2), per_lane).to(scales.dtype)
    if kind.for_eight_bit_rows:
        zeros = packed_scales.view(torch.uint8).amax(1, keepdim=True).view(scales.dtype)
    return PackedWeights(
        words.view(kind.packed_dtype).unflatten(1, (codes.size(2) // 16, -1)),
        packed_scales,
        zeros,
        g_idx,
        sort_indices,
    )


def unpack_marlin(
    packed: PackedWeights, quant_type_id: int, group_size: int, gated: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The exact inverse of pack_marlin: returns the (codes, scales, zero_points) that were packed.

    Raises:
        ValueError: an unknown type id, a group size that the type does not take, or weights that were not packed so.
        TypeError: gated is neither True nor False.
    """
    check_flags(gated=gated)
    kind = weight_type(quant_type_id)
    if not isinstance(packed, PackedWeights):
        raise ValueError(f"packed is a {type(packed).__name__}; it must be what pack_marlin returned")
    _check_packed(packed, kind, group_size, gated)
    return unpack_experts(packed, kind, gated)


def unpack_experts(
    packed: PackedWeights, kind: WeightType, gated: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """unpack_marlin without checks, and so without waiting for the device; g_idx is not read."""
    kind, device = kind.packed_as(packed.qweight), packed.qweight.device
    num_rows, num_columns = packed_sizes("packed.qweight", packed.qweight, kind)
    rows = row_order(num_rows, gated, device)
    back = torch.argsort(rows)
    words, moves = packed.qweight.contiguous().view(torch.int32), bit_order(kind).moves
    if moves is not None:
        words = _move_bits(words, tuple((mask << by if by > 0 else mask >> -by, -by) for mask, by in moves))
    codes = _unpack_codes(words, num_rows, num_columns, kind.bits)[:, back]
    if packed.sort_indices is not None:
        columns = torch.argsort(packed.sort_indices.long(), dim=1)
        codes = codes.gather(2, columns.unsqueeze(1).expand(codes.shape))
    per_lane = torch.argsort(rows[_scale_order(num_rows, device)])
    scales = _reorder(packed.scales, per_lane).transpose(1, 2).contiguous()
    if packed.zeros is None or kind.for_eight_bit_rows:
        return codes, scales, None
    return codes, scales, _reorder(packed.zeros, per_lane).transpose(1, 2).to(torch.uint8).contiguous()


def row_order(num_rows: int, gated: bool, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 `[num_rows]`: the row at each packed position."""
    block = torch.arange(num_rows // 16, device=device).view(-1, 1, 1)
    half = torch.arange(2, device=device).view(1, 2, 1)
    j = torch.arange(8, device=device).view(1, 1, 8)
    if gated:
        return (half * (num_rows // 2) + 8 * block + j).flatten()
    return (16 * block + 4 * (j // 2) + 2 * half + j % 2).flatten()


def _scale_order(num_rows: int, device: torch.device) -> torch.Tensor:
    """int64 `[num_rows]`: the packed position of each scale; place 2 g + h has that of position 8 h + g."""
    return torch.arange(num_rows, device=device).view(-1, 2, 8).transpose(1, 2).flatten()


def _reorder(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """values[..., order], contiguous; also for one-byte float types, not all of which torch can index."""
    if values.dtype.itemsize == 1:
        return values.view(torch.uint8)[..., order].contiguous().view(values.dtype)
    return values[..., order].contiguous()


def _strips(num_rows: int) -> list[tuple[int, int]]:
    """(first row, rows) of all whole strips together, and of the last strip if it has 32 rows."""
    whole = num_rows // STRIP * STRIP
    return [(0, whole)] * (whole > 0) + [(whole, num_rows - whole)] * (num_rows > whole)


def _move_bits(words: torch.Tensor, moves: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """int32 with the bits of each mask so many places to the left."""
    out = torch.zeros_like(words)
    for mask, by in moves:
        moved = mask << by if by > 0 else mask >> -by
        moved -= moved >> 31 << 32  # as an int32
        out |= (words << by if by > 0 else words >> -by) & moved
    return out


@operator("codes")
def pack_codes(codes: torch.Tensor, bits: int, gated: bool, order: BitOrder = BitOrder.PLAIN) -> torch.Tensor:
    """uint8 `[E, out, in]`, contiguous, in natural row order -> int32 `[E, out * in * bits / 32]`."""
    num_experts, _, num_columns = codes.shape
    rows = row_order(codes.size(1), gated, codes.device)
    # Eight codes at a time, which the columns are a multiple of.
    codes = codes.view(torch.int64)[:, rows].view(torch.uint8)
    parts = []
    for first, count in _strips(codes.size(1)):
        height = min(count, STRIP)
        # e, strip, fragment, h, g, block, kk, k, t, i
        v = codes[:, first : first + count].reshape(
            num_experts, count // height, height // 16, 2, 8, num_columns // BLOCK_COLUMNS, 2, 2, 4, 2
        )
        if bits == 4:  # e, strip, block, fragment, g, t, kk, i, k; the two rows h share a byte
            low, high = (v[:, :, :, h].permute(0, 1, 4, 2, 3, 7, 5, 8, 6) for h in range(2))
            lanes = low | (high << 4)
        else:  # e, strip, block, pair of fragments, h, fragment, kk, g, t, i, k
            lanes = v.unflatten(2, (-1, 2)).permute(0, 1, 6, 2, 4, 3, 7, 5, 9, 10, 8)
        parts.append(lanes.flatten(1).view(torch.int32))
    words = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    return words if order.moves is None else _move_bits(words, order.moves)


def _unpack_codes(qweight: torch.Tensor, num_rows: int, num_columns: int, bits: int) -> torch.Tensor:
    """int32 `[E, ...]` -> uint8 `[E, out, in]` in packed row order."""
    num_experts, blocks = qweight.size(0), num_columns // BLOCK_COLUMNS
    flat = qweight.flatten(1).view(torch.uint8)
    parts = []
    for first, count in _strips(num_rows):
        height = min(count, STRIP)
        strips, fragments = count // height, height // 16
        part = flat[:, first * num_columns * bits // 8 : (first + count) * num_columns * bits // 8]
        if bits == 4:
            v = part.reshape(num_experts, strips, blocks, fragments, 8, 4, 2, 2, 2)
            both = torch.stack([v & 15, v >> 4], dim=-1)  # e, strip, block, fragment, g, t, kk, i, k, h
            v = both.permute(0, 1, 3, 9, 4, 2, 6, 8, 5, 7)
        else:
            v = part.reshape(num_experts, strips, blocks, fragments // 2, 2, 2, 2, 8, 4, 2, 2)  # ..., kk, g, t, i, k
            v = v.permute(0, 1, 3, 5, 4, 7, 2, 6, 10, 8, 9)  # e, strip, pair, fragment, h, g, block, kk, k, t, i
        parts.append(v.reshape(num_experts, count, num_columns))
    return torch.cat(parts, dim=1)


def _check(
    kind: WeightType,
    codes: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    zero_points: torch.Tensor | None,
    gated: bool,
    g_idx: torch.Tensor | None,
) -> None:
    given = {"zero_points": zero_points, "g_idx": g_idx}
    check_tensors(codes=codes, scales=scales, **{name: each for name, each in given.items() if each is not None})
    check_same_device("codes", codes.device, scales=scales, **given)
    if codes.dtype != torch.uint8 or codes.dim() != 3:
        raise ValueError(f"codes is {codes.dtype} {tuple(codes.shape)}; it must be uint8 [E, out, in]")
    num_experts, num_rows, num_columns = codes.shape
    check_sizes("codes", num_rows, num_columns, gated)
    # With g_idx the groups may be those of more columns than there are here.
    groups = check_group_size(kind, group_size, None if g_idx is not None else num_columns)
    if scales.dim() != 3 or scales.shape[:2] != codes.shape[:2] or groups not in (None, scales.size(2)):
        wanted = (num_experts, num_rows, "groups" if groups is None else groups)
        raise ValueError(f"scales has shape {tuple(scales.shape)}; codes and group_size ask for {wanted}")
    if not (scales.is_floating_point() or scales.dtype == torch.uint8):
        raise ValueError(f"scales is {scales.dtype}; it must be a float type, or uint8 for the bits of e8m0 numbers")
    check_zero_points("zero_points", zero_points, kind)
    if zero_points is not None and (zero_points.dtype != torch.uint8 or zero_points.shape != scales.shape):
        raise ValueError(
            f"zero_points is {zero_points.dtype} {tuple(zero_points.shape)}; it must be uint8 {tuple(scales.shape)}"
        )
    most = (1 << kind.bits) - 1
    for name, values in (("codes", codes), ("zero_points", zero_points)):
        if most < 255 and values is not None and values.numel() and (largest := int(values.max())) > most:
            raise ValueError(f"{name} holds {largest}; {kind.scalar_type} has {kind.bits} bits, that is, 0 to {most}")
    if g_idx is not None and (g_idx.dtype != torch.int32 or g_idx.shape != (num_experts, num_columns)):
        raise ValueError(f"g_idx is {g_idx.dtype} {tuple(g_idx.shape)}; it must be int32 {(num_experts, num_columns)}")
    if g_idx is not None and g_idx.numel():
        least, most = (int(bound) for bound in g_idx.aminmax())
        if least < 0 or most >= scales.size(2):
            raise ValueError(f"g_idx holds {least} to {most}; scales has groups 0 to {scales.size(2) - 1}")


def _check_packed(packed: PackedWeights, kind: WeightType, group_size: int, gated: bool) -> None:
    """Raises ValueError for parts that pack_marlin does not return together."""
    given = {f"packed.{name}": part for name, part in packed._asdict().items()}
    required = ("packed.qweight", "packed.scales")
    check_tensors(**{name: part for name, part in given.items() if part is not None or name in required})
    qweight, scales, zeros, g_idx, sort_indices = packed
    check_same_device("packed.qweight", qweight.device, **given)
    kind = kind.packed_as(qweight)
    num_rows, num_columns = packed_sizes("packed.qweight", qweight, kind)
    way_out = f" ({kind.scalar_type}); pass the quant_type_id and gated that it was packed with"
    check_sizes("packed.qweight", num_rows, num_columns, gated, way_out)
    groups = check_group_size(kind, group_size, None if g_idx is not None else num_columns)
    wanted = (qweight.size(0), "groups" if groups is None else groups, num_rows)
    if scales.dim() != 3 or scales.shape != (wanted[0], groups or scales.size(1), num_rows):
        raise ValueError(f"packed.scales has shape {tuple(scales.shape)}; qweight and group_size ask for {wanted}")
    check_packed_zeros("packed.zeros", zeros, kind, scales)
    if (g_idx is None) != (sort_indices is None):
        missing, other = ("g_idx", "sort_indices") if g_idx is None else ("sort_indices", "g_idx")
        raise ValueError(f"packed.{missing} is None beside packed.{other}; pass both as pack_marlin returned them")
    if g_idx is None or sort_indices is None:
        return
    shape = (qweight.size(0), num_columns)
    for name, part in (("g_idx", g_idx), ("sort_indices", sort_indices)):
        if part.dtype != torch.int32 or part.shape != shape:
            raise ValueError(f"packed.{name} is {part.dtype} {tuple(part.shape)}; it must be int32 {shape}")
    if not g_idx.numel():
        return
    least, most = (int(bound) for bound in g_idx.aminmax())
    if least < 0 or most >= scales.size(1):
        raise ValueError(f"packed.g_idx holds {least} to {most}; packed.scales has groups 0 to {scales.size(1) - 1}")
    columns = torch.arange(num_columns, dtype=torch.int32, device=qweight.device)
    if not bool((sort_indices.sort(dim=1).values == columns).all()):
        raise ValueError(
            f"packed.sort_indices holds a row that is no permutation of the columns (0 to {num_columns - 1}); pass "
            f"what pack_marlin returned"
        )


_BLOCK = 1024


@TritonKernel
def _pack_codes_kernel(
    pairs_ptr, words_ptr,
    num_rows, num_columns, words_per_expert,
    BITS: tl.constexpr, GATED: tl.constexpr, ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gathers each packed word from two rows of the plain form; program (b, e) makes words b * BLOCK ... of expert e.

    Before: codes uint8 `[E, out, in]` in natural row order, read as pairs of columns, int16 `[E, out, in / 2]`.
    After: int32 `[E, words_per_expert]`, laid out as the module says.

    Example: 4 bits, not gated: word 0 holds row 0, columns 0, 8, 1, 9 in its even nibbles and row 2, the same columns,
    in its odd ones.
    """
    FRAGMENT_WORDS: tl.constexpr = 16 * BITS
    expert = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words_per_expert
    strip_words = 2 * num_columns * BITS
    strip, in_strip = word // strip_words, word % strip_words
    fragments = tl.where(num_rows - 64 * strip == 32, 2, 4)
    fragment_of_strip, in_fragment = in_strip // FRAGMENT_WORDS, in_strip % FRAGMENT_WORDS
    block, fragment = fragment_of_strip // fragments, fragment_of_strip % fragments
    if BITS == 4:
        lane, sixteen_columns = in_fragment // 2, in_fragment % 2
    else:  # of two fragments together: h, fragment, sixteen columns, lane
        in_pair = fragment % 2 * FRAGMENT_WORDS + in_fragment
        second_row = in_pair // FRAGMENT_WORDS
        fragment += in_pair // 64 % 2 - fragment % 2
        lane, sixteen_columns = in_pair % 32, in_pair // 32 % 2
    g, t = lane // 4, lane % 4
    sixteen = 4 * strip + fragment
    if GATED:
        row, other_row = 8 * sixteen + g, num_rows // 2 + 8 * sixteen + g
    else:
        row = 16 * sixteen + 4 * (g // 2) + g % 2
        other_row = row + 2
    if BITS == 8:
        row = tl.where(second_row == 1, other_row, row)
    pair = 16 * block + 8 * sixteen_columns + t
    source = pairs_ptr + expert * num_rows * (num_columns // 2)
    pitch = num_columns // 2
    # The two columns of a pair go to the two halves of the word.
    first = tl.load(source + row * pitch + pair, mask=inside, other=0).to(tl.int32) & 0xFFFF
    far = tl.load(source + row * pitch + pair + 4, mask=inside, other=0).to(tl.int32) & 0xFFFF
    first, far = (first | (first << 8)) & 0xFF00FF, (far | (far << 8)) & 0xFF00FF
    packed = first | (far << 8)
    if BITS == 4:
        second = tl.load(source + other_row * pitch + pair, mask=inside, other=0).to(tl.int32) & 0xFFFF
        far_second = tl.load(source + other_row * pitch + pair + 4, mask=inside, other=0).to(tl.int32) & 0xFFFF
        second, far_second = (second | (second << 8)) & 0xFF00FF, (far_second | (far_second << 8)) & 0xFF00FF
        packed |= (second << 4) | (far_second << 12)
        if ORDER == 1:
            # As repack.SPREAD says.
            codes = packed.to(tl.uint32, bitcast=True)
            spread = ((codes & 0x00070007) << 6) | ((codes & 0x00080008) << 12) | ((codes & 0x00800080) >> 2)
            spread |= ((codes & 0x00000070) << 24) | ((codes & 0x00700000) >> 8)
            spread |= ((codes & 0x00000700) << 17) | ((codes & 0x07000000) >> 15)
            spread |= ((codes & 0x38003800) >> 9) | ((codes & 0xC000C000) >> 14)
            packed = spread.to(tl.int32, bitcast=True)
        elif ORDER == 2:
            # As repack.BY_ROW says: the nibbles of either row together, then their bits.
            codes = packed.to(tl.uint32, bitcast=True)
            first, second = codes & 0x0F0F0F0F, (codes >> 4) & 0x0F0F0F0F
            first, second = (first | (first >> 4)) & 0x00FF00FF, (second | (second >> 4)) & 0x00FF00FF
            codes = ((first | (first >> 8)) & 0xFFFF) | ((second | (second >> 8)) << 16)
            signs = codes & 0x88888888
            codes = ((codes & 0x33333333) << 1) | ((codes & 0x44444444) >> 2) | (signs << 4) | (signs >> 28)
            packed = codes.to(tl.int32, bitcast=True)
    tl.store(words_ptr + expert * words_per_expert + word, packed, mask=inside)


@pack_codes.on_gpu
def triton_pack_codes(codes, bits, gated, order=BitOrder.PLAIN):
    num_experts, num_rows, num_columns = codes.shape
    words_per_expert = num_rows * num_columns * bits // 32
    words = torch.empty((num_experts, words_per_expert), dtype=torch.int32, device=codes.device)
    grid = (cdiv(words_per_expert, _BLOCK), num_experts)
    pairs = codes.view(torch.int16)
    _pack_codes_kernel[grid](
        pairs, words, num_rows, num_columns, words_per_expert, BITS=bits, GATED=gated, ORDER=int(order), BLOCK=_BLOCK
    )
    return words


def not_packed_reason(weights: CanonicalWeights, row_multiple: int) -> str | None:
    """Why these weights have no packed form; None if they have one."""
    kind = WEIGHT_TYPES.get(weights.quant_type_id)
    _, num_rows, num_columns = weights.codes.shape
    if kind is None:
        return f"there is no packed form of {ScalarType.from_id(weights.quant_type_id)}"
    if num_rows % row_multiple or num_columns % 32:
        return f"a matrix is {num_rows} x {num_columns}; they take multiples of {row_multiple} and 32"
    num_groups = weights.scales.size(2)
    whole = weights.g_idx is None or has_all_groups(weights.group_size, num_groups, num_columns)
    size = group_size_of(kind, num_columns, num_groups) if whole else weights.group_size
    if size not in kind.group_sizes:
        return f"{num_groups} groups of {num_columns} columns; {kind.scalar_type} takes {kind.group_sizes}"
    # Sorted by group, the columns must give groups of equal size.
    if weights.g_idx is not None and whole:
        in_order = torch.arange(num_columns, device=weights.g_idx.device) // (num_columns // num_groups)
        if not (torch.sort(weights.g_idx, dim=1).values == in_order).all():
            return f"g_idx does not give each group {num_columns // num_groups} columns"
    return None


# Half of the mean relative error that a f16 layer may have.
_MOST_SCALE_ERROR = 0.005


def inexact_scales_reason(weights: CanonicalWeights, act_dtype: torch.dtype, gated: bool) -> str | None:
    """Why scales cannot be packed in the activations' dtype; None if they can.

    f16 keeps 11 bits of a scale from 6.1e-5 to 65504, fewer below that, and none below 3e-8. As for outputs, the limit
    is on an expert's mean error over its mean scale: a few small scales beside others do not exceed it. It holds for
    gate and up separately, because their outputs are multiplied.

    Args:
        gated: rows are gate rows, then up rows.
    """
    if act_dtype is not torch.float16 or _has_own_scale_types(weights):
        return None
    scales = weights.scales.float().unflatten(1, (2 if gated else 1, -1)).flatten(2)
    changes = (scales.to(act_dtype).float() - scales).abs().sum(-1)
    if not bool((changes > _MOST_SCALE_ERROR * scales.abs().sum(-1)).any()):
        return None
    limits = torch.finfo(act_dtype)
    return (
        f"rounding to {act_dtype} ({limits.tiny:.1e} to {limits.max:.0f}) changes an expert's scales by more than "
        f"{100 * _MOST_SCALE_ERROR:g} %; load the layer in torch.bfloat16"
    )


def _has_own_scale_types(weights: CanonicalWeights) -> bool:
    """Whether scales keep their dtype when packed, those of 4-bit floats; all others get the activations'."""
    return weights.quant_type_id == scalar_types.float4_e2m1f.id


def pack_experts(
    w13: CanonicalWeights,
    w2: CanonicalWeights,
    act_dtype: torch.dtype,
    gated: bool,
    has_bias: bool,
    input_dtype: torch.dtype | None = None,
) -> tuple[ExpertWeights, ExpertWeights]:
    """Packs both matrices, keeping only the part of act-order that has to be handled at run time.

    w2 multiplies the activation's output, whose order is free: w13's rows can be in any order as long as gate and up
    have the same. In the order that sorts w2's columns by group, w2 no longer needs act-order. w13's own columns
    multiply tokens that other experts read too, so their order stays.

    Raises:
        ValueError: scales that `inexact_scales_reason` refuses, and what `pack_marlin` refuses.
    """
    if has_bias:
        return _packed(w13, act_dtype, gated, input_dtype), _packed(w2, act_dtype, False, input_dtype)
    w13, w2 = in_order_of_w2(w13, w2)
    first, second = _packed(w13, act_dtype, gated, input_dtype), _packed(w2, act_dtype, False, input_dtype)
    return first, second._replace(g_idx_sort_indices=None)


def in_order_of_w2(w13: CanonicalWeights, w2: CanonicalWeights) -> tuple[CanonicalWeights, CanonicalWeights]:
    """The same experts with w2's columns sorted by group, separately for each expert, and w13's rows in that order.

    w13 is one matrix, or several (gate, up) with the same number of rows. It must not have biases, which would have to
    be reordered too.
    """
    if w2.g_idx is None:
        return w13, w2
    g_idx, order = torch.sort(w2.g_idx, dim=1, stable=True)
    size = order.size(1)
    rows = torch.cat([order + first for first in range(0, w13.codes.size(1), size)], dim=1)
    w13 = w13._replace(
        codes=_take(w13.codes, rows, 1),
        scales=_take(w13.scales, rows, 1),
        zero_points=None if w13.zero_points is None else _take(w13.zero_points, rows, 1),
    )
    return w13, w2._replace(codes=_take(w2.codes, order, 2), g_idx=g_idx)


def has_all_groups(group_size: int | None, num_groups: int, num_columns: int) -> bool:
    """Whether the groups are those of these columns alone, rather than of a larger matrix of which they are a part."""
    return num_groups == 1 or group_size is None or num_groups * group_size == num_columns


def _packed(
    weights: CanonicalWeights, act_dtype: torch.dtype, gated: bool, input_dtype: torch.dtype | None
) -> ExpertWeights:
    packed = pack_marlin(
        weights.codes,
        weights.scales if _has_own_scale_types(weights) else weights.scales.to(act_dtype),
        weights.quant_type_id,
        weights.group_size,
        weights.zero_points,
        gated,
        weights.g_idx,
        input_dtype,
    )
    # Weights loaded again come here without a choice of experts before.
    if (reason := inexact_scales_reason(weights, act_dtype, gated)) is not None:
        raise ValueError(reason)
    if has_all_groups(weights.group_size, packed.scales.size(1), weights.codes.size(2)):
        packed = packed._replace(g_idx=None)  # the groups are in order, so it is redundant
    return ExpertWeights(*packed, global_scales=weights.global_scales)


def _take(values: torch.Tensor, index: torch.Tensor, dim: int) -> torch.Tensor:
    """Reorders the rows (dim 1) or columns (dim 2) of `[E, out, in]` for each expert; works for one-byte floats too."""
    plain = values.view(torch.uint8) if values.dtype.itemsize == 1 else values
    return plain.gather(dim, index.unsqueeze(3 - dim).expand(values.shape)).view(values.dtype)

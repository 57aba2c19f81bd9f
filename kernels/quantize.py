"""Rows in e4m3 or int8: one byte per column, and one f32 scale for every 128 columns of a row, or for all.

A quantized row is a sequence of bytes: K codes, padding to a multiple of 4, then ceil(K / 128) scales; or one scale and
padding to a multiple of 16. The last group may be partial. value = code * scale with scale = max |x| of the group / 448
(e4m3) or / 127 (int8), so the largest column of a group is exact up to the rounding of the scale. Rows have one scale
for experts that multiply codes: their sums need none before the last column.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_ep.arguments import check_same_device, check_tensors
from moe_ep.errors import check_at_least, check_flags
from moe_ep.kernels.dispatch_rows import row_blocks
from moe_ep.kernels.triton_kernel import (
    TritonKernel,
    cdiv,
    comes_early,
    is_interpreted,
    next_power_of_2,
    take_over,
    tl,
    triton_jit,
)
from moe_ep.registry import choose_form

GROUP_SIZE = 128
ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CODE_DTYPES = (torch.float8_e4m3fn, torch.int8)
E4M3_MAX = 448.0
INT8_MAX = 127.0
# The smallest normal f32. A group of zeros has this scale, to avoid a division by zero.
TINY_SCALE = torch.finfo(torch.float32).tiny
# The least scale of rows that experts multiply as codes, of which products with weights' scales stay normal numbers.
LEAST_SCALE = 2.0**-60


def scale_offset(hidden_size: int) -> int:
    """Bytes of a quantized row before its first scale."""
    return -(-hidden_size // 4) * 4


def quantized_row_bytes(hidden_size: int, whole: bool = False) -> int:
    """Bytes of a quantized row of K columns, a multiple of 4.

    Args:
        whole: one scale a row.

    Example: K=7168: 7168 codes and 56 scales, 7392 bytes; whole, 7184.
    """
    start = scale_offset(hidden_size)
    return start // 16 * 16 + 16 if whole else start + 4 * -(-hidden_size // GROUP_SIZE)


def quantize_rows(
    rows: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, whole: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Quantizes `[T, K]` f32, f16 or bf16 to uint8 `[T, quantized_row_bytes(K, whole)]`.

    Codes are rounded to nearest, ties to even. e4m3 codes have the signs of their columns; NaN stays NaN, and infinity
    becomes NaN. An int8 group with either is NaN as a whole. Both forms, Triton on CUDA and plain torch, give the same
    bits.

    Args:
        dtype: of the codes, torch.float8_e4m3fn or torch.int8.
        whole: one scale a row; values are those of `round_rows`.
        out: where they are written, if rows are longer: by a multiple of 4 bytes, as rows are apart.

    Raises:
        ValueError: rows or an out of another dtype, shape or device, or another dtype of codes.
        TypeError: whole is neither True nor False.
    """
    check_code_dtype(dtype)
    check_flags(whole=whole)
    _check_rows(rows)
    num_bytes = quantized_row_bytes(rows.size(1), whole)
    if out is None:
        out = rows.new_empty((rows.size(0), num_bytes), dtype=torch.uint8)
    else:
        _check_out(out, rows, num_bytes)
    return choose_form(quantize_rows_reference, triton_quantize_rows, rows)(rows, out, dtype, whole)


def dequantize_rows(
    quantized: torch.Tensor, hidden_size: int, dtype: torch.dtype, code_dtype: torch.dtype = torch.float8_e4m3fn
) -> torch.Tensor:
    """Converts the result of quantize_rows back to `[T, K]` of `dtype`; `quantized` may have any strides.

    Raises:
        ValueError: a code_dtype that is neither e4m3 nor int8, a dtype that rows do not have, rows of another size than
            quantize_rows gives for hidden_size with a scale for every 128 columns.
        TypeError: a hidden_size that is no whole number.
    """
    check_code_dtype(code_dtype)
    check_at_least(1, hidden_size=hidden_size)
    check_tensors(quantized=quantized)
    num_bytes = quantized_row_bytes(hidden_size)
    if quantized.dtype is not torch.uint8 or quantized.dim() != 2 or quantized.size(1) != num_bytes:
        raise ValueError(
            f"quantized is {quantized.dtype} {tuple(quantized.shape)}; with hidden_size {hidden_size} it must be "
            f"torch.uint8 [T, {num_bytes}], as quantize_rows returns it without whole"
        )
    _check_row_dtype(dtype)
    rows = quantized.new_empty((quantized.size(0), hidden_size), dtype=dtype)
    return choose_form(dequantize_rows_reference, triton_dequantize_rows, rows)(quantized, rows, code_dtype)


def dequantize_codes(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts codes `[T, K]` in int8 or e4m3 with f32 scales `[T, ceil(K / 128)]` or `[T, 1]` to `[T, K]` of `dtype`.

    Columns must be adjacent; rows may lie anywhere that is a multiple of 4 bytes (`split_rows`).

    Raises:
        ValueError: codes or scales of another dtype, shape or device, or a dtype that rows do not have.
    """
    check_tensors(codes=codes, scales=scales)
    if codes.dim() != 2 or codes.dtype not in CODE_DTYPES:
        raise ValueError(
            f"codes is {codes.dtype} {tuple(codes.shape)}; it must be torch.float8_e4m3fn or torch.int8 [T, K]"
        )
    check_row_scales(codes, scales, "scales")
    check_same_device("codes", codes.device, scales=scales)
    _check_row_dtype(dtype)
    rows = codes.new_empty(codes.shape, dtype=dtype)
    return choose_form(dequantize_codes_reference, triton_dequantize_codes, rows)(codes, scales, rows)


def check_code_dtype(dtype: torch.dtype) -> None:
    """Raises ValueError for a dtype that rows are not quantized to."""
    if dtype not in CODE_DTYPES:
        raise ValueError(f"dtype is {dtype}; rows are quantized to torch.float8_e4m3fn or torch.int8")


def _check_rows(rows: torch.Tensor) -> None:
    check_tensors(rows=rows)
    if rows.dim() != 2 or rows.dtype not in ROW_DTYPES or not rows.size(1):
        raise ValueError(
            f"rows is {rows.dtype} {tuple(rows.shape)}; it must be f32, f16 or bf16 [T, K] with K of at least 1"
        )


def _check_row_dtype(dtype: torch.dtype) -> None:
    if dtype not in ROW_DTYPES:
        raise ValueError(f"dtype is {dtype}; rows are torch.float32, torch.float16 or torch.bfloat16")


def _check_out(out: torch.Tensor, rows: torch.Tensor, num_bytes: int) -> None:
    check_tensors(out=out)
    shape, strides = out.shape, out.stride()
    fits = out.dtype is torch.uint8 and len(shape) == 2 and shape[0] == rows.size(0) and shape[1] >= num_bytes
    if not fits or shape[1] % 4 or strides[0] % 4 or strides[1] != 1:
        raise ValueError(
            f"out is {out.dtype} {tuple(shape)} with strides {strides}; with these rows it must be torch.uint8 "
            f"[{rows.size(0)}, {num_bytes} or more], a multiple of 4 bytes a row, with adjacent columns"
        )
    check_same_device("rows", rows.device, out=out)


def split_rows(
    quantized: torch.Tensor, hidden_size: int, dtype: torch.dtype, whole: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[..., K]` of `dtype` and f32 scales of quantized rows, `[..., ceil(K / 128)]` or, whole, `[..., 1]`; both
    are views."""
    start = scale_offset(hidden_size)
    scales = quantized[..., start : start + 4 if whole else None]
    return quantized[..., :hidden_size].view(dtype), scales.view(torch.float32)


def join_rows(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Quantized rows of what `split_rows` returns of them, with one scale a row; `out` as of `quantize_rows`."""
    num_tokens, hidden_size = codes.shape
    if out is None:
        out = codes.new_zeros((num_tokens, quantized_row_bytes(hidden_size, True)), dtype=torch.uint8)
    for part, given in zip(split_rows(out, hidden_size, codes.dtype, True), (codes, scales), strict=True):
        part.copy_(given)
    return out


def check_row_scales(codes: torch.Tensor, scales: torch.Tensor, name: str = "a1q_scale") -> None:
    """Raises ValueError for scales that do not belong to codes `[..., K]`."""
    *rows, hidden_size = codes.shape
    fit = [(*rows, number) for number in (1, -(-hidden_size // GROUP_SIZE))]
    if tuple(scales.shape) not in fit or scales.dtype != torch.float32:
        raise ValueError(
            f"{name} is {tuple(scales.shape)} of {scales.dtype} beside rows of {tuple(codes.shape)}; it must be "
            f"torch.float32 of {fit[0]} (one scale a row) or {fit[1]} (one for every {GROUP_SIZE} columns)"
        )


def row_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The f32 values of codes `[..., K]` and scales as of `split_rows`; ValueError as `check_row_scales`."""
    check_row_scales(codes, scales)
    if scales.size(-1) > 1:
        scales = scales.repeat_interleave(GROUP_SIZE, dim=-1)[..., : codes.size(-1)]
    return codes.float() * scales


def round_rows(rows: torch.Tensor, dtype: torch.dtype, group_columns: int = GROUP_SIZE) -> torch.Tensor:
    """Rows `[n, K]` as experts read them where they round them to int8 or e4m3 (`input_dtype`): f32.

    value = code * scale, with scale = max|x| / 127 (int8) or / 448 (e4m3), at least 2^-60, of group_columns columns;
    the last group has those that remain. Codes are rounded to nearest, ties to even.

    Example: int8, row [1, -0.5, 0.25]: scale 1 / 127, codes 127, -64, 32.

    Raises:
        ValueError: rows of another dtype or shape, another dtype of codes, or group_columns below 1.
        TypeError: group_columns that are no whole number.
    """
    check_code_dtype(dtype)
    check_at_least(1, group_columns=group_columns)
    _check_rows(rows)
    rows = rows.float()
    num_rows, num_columns = rows.shape
    num_groups = -(-num_columns // group_columns)
    groups = F.pad(rows, (0, -num_columns % group_columns)).view(num_rows, num_groups, group_columns)
    largest = groups.abs().amax(dim=2, keepdim=True)
    # A tensor as the divisor: torch on CUDA multiplies by the reciprocal of a number.
    most = torch.full_like(largest, INT8_MAX if dtype == torch.int8 else E4M3_MAX)
    scales = (largest / most).clamp(min=LEAST_SCALE)
    codes = groups / scales
    codes = codes.round() if dtype == torch.int8 else codes.to(dtype).float()
    return (codes * scales).view(num_rows, num_groups * group_columns)[:, :num_columns]


def quantize_rows_reference(
    rows: torch.Tensor, quantized: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, whole: bool = False
) -> torch.Tensor:
    """quantize_rows in plain torch, on any device; writes `quantized` and returns it."""
    num_tokens, hidden_size = rows.shape
    group_size = hidden_size if whole else GROUP_SIZE
    num_groups = -(-hidden_size // group_size)
    padded = torch.zeros((num_tokens, num_groups * group_size), dtype=torch.float32, device=rows.device)
    padded[:, :hidden_size] = rows
    groups = padded.view(num_tokens, num_groups, group_size)
    magnitudes = groups.abs()
    is_int8 = dtype == torch.int8
    largest = magnitudes.amax(dim=2) if is_int8 else torch.where(magnitudes.isnan(), 0.0, magnitudes).amax(dim=2)
    # The divisor is a tensor, since torch on CUDA multiplies by the reciprocal of a scalar, which rounds differently.
    scales = largest / torch.full_like(largest, INT8_MAX if is_int8 else E4M3_MAX)
    scales = scales.clamp(min=LEAST_SCALE if whole else TINY_SCALE)
    quotients = groups / scales[:, :, None]
    if is_int8:
        scales = torch.where(scales.isnan(), float("nan"), scales)  # the same bits of NaN on every machine
        codes = quotients.nan_to_num(0.0).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8).view(torch.uint8)
    else:
        codes = quotients.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        # Machines differ in the sign of infinity divided by infinity.
        codes = (codes & 0x7F) | (groups.signbit().to(torch.uint8) << 7)
    quantized[:, :hidden_size] = codes.flatten(1)[:, :hidden_size]
    start = scale_offset(hidden_size)
    quantized[:, hidden_size:start] = 0
    # A copy, as where there is one column torch calls any strides contiguous.
    quantized[:, start : start + 4 * num_groups] = scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return quantized


def dequantize_rows_reference(
    quantized: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> torch.Tensor:
    """dequantize_rows in plain torch, on any device; writes `rows` and returns it."""
    packed = quantized.clone(memory_format=torch.contiguous_format)  # scales are read as f32, wherever rows begin
    return dequantize_codes_reference(*split_rows(packed, rows.size(1), dtype), rows)


def dequantize_codes_reference(codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """dequantize_codes in plain torch, on any device; writes `rows` and returns it."""
    return rows.copy_(row_values(codes, scales))


# As measured: 16 columns per thread, and blocks that extend little beyond the end of a row.
_MOST_COLUMNS, _WARP_COLUMNS, _MOST_WARPS = 1024, 512, 16


@triton_jit
def _encode_e4m3(values):
    """Converts f32 in [-448, 448] or NaN to the bits of e4m3, int32, to nearest with ties to even.

    Normal numbers: round the 23 bits of mantissa to 3 by adding half a unit (less one bit where the last kept bit is
    even), and move the exponent's bias from 127 to 7. Below 2**-6, codes are multiples of 2**-9: adding 2**14 leaves
    them in the last bits of the sum.

    Example: 1.0 -> 0x38, -0.4375 -> 0xae, 2**-9 -> 0x01, NaN -> 0x7f.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small_sum = magnitude.to(tl.float32, bitcast=True) + 16384.0
    small = small_sum.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return code | ((bits >> 24) & 0x80)


@triton_jit
def _convert_e4m3(values, signs):
    """f32 to the bits of e4m3, uint8, by the GPU's conversion: as _encode_e4m3, beyond 448 to 448; signs from `signs`.

    The conversion takes two at a time and drops the sign of NaN. Four signs are gathered into a word by byte permutes.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 codes, first, second;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 codes, {low, high};
        prmt.b32 first, $5, $6, 0x0073;
        prmt.b32 second, $7, $8, 0x0073;
        prmt.b32 first, first, second, 0x5410;
        lop3.b32 $0, codes, first, 0x80808080, 0xF8;
        }""",
        "=r,r,r,r,r,r,r,r,r",
        [values, signs],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton_jit
def decode_e4m3(codes):
    """Converts e4m3 bits, as any integer, to f32, exactly.

    The 7 bits below the sign are moved to the place of exponent and mantissa in f32; a factor of 2**120 corrects the
    bias, for subnormals too. 0x7f is NaN.

    Example: 0x38 -> 1.0, 0x01 -> 2**-9, 0x80 -> -0.0.
    """
    bits = codes.to(tl.int32)
    magnitude = (((bits & 0x7F) << 20).to(tl.float32, bitcast=True)) * 1.329227995784916e36
    signed = (magnitude.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), signed)


@triton_jit
def _divide(values, divisor, CORRECTIONS: tl.constexpr):
    """values / divisor, for a divisor per row that is at least 2**-126; the sign of zeros may be lost.

    A reciprocal per row, and corrections of the quotient by its exact remainder (Markstein's division): a sixth of the
    instructions of a division. Small rows are made larger first, so that remainders are no subnormals; a divisor of
    infinity leaves 0, or NaN where the value is infinite too. Quotients of 2**-11 or more are rounded correctly with
    two corrections. None means a plain division: the interpreter has no fused multiply-add.

    One is enough for e4m3 codes of 16-bit values over a 448th of one. What it rounds is off by at most 1.5 * 2**-24
    units in the last place, so it rounds another way only where the middle of two neighbouring f32 is that close, and
    another code comes of that only if one of them is the middle b of two codes, a number of 5 bits. With X, S and b as
    integers of 24, 24 and 5 bits, X * 2**k - (b * 2**20 +- 1) * S is then t = +-1 or +-2. Modulo 2**20 this gives
    S = c * 2**20 -+ t with c from 8 to 16, and X * 2**k = b * c * 2**40 +- (c - t * b) * 2**20; 2**37 divides the left
    side, so c = t * b, b = c = 16 and S = 2**24 - 1: no 448th of a number of 11 bits.
    """
    if CORRECTIONS == 0:
        return tl.div_rn(values, tl.broadcast_to(divisor, values.shape))
    factor = tl.where(divisor < 8.673617379884035e-19, 1.2676506002282294e30, 1.0)
    infinite = divisor == float("inf")
    divisor = tl.where(infinite, 0.0, divisor * factor)
    reciprocal = tl.where(infinite, 0.0, tl.div_rn(1.0, divisor))
    negative = tl.broadcast_to(-divisor, values.shape)
    reciprocal = tl.broadcast_to(reciprocal, values.shape)
    values = values * factor
    quotient = values * reciprocal
    for _ in tl.static_range(CORRECTIONS):
        quotient = tl.fma(tl.fma(quotient, negative, values), reciprocal, quotient)
    return quotient


@TritonKernel
def quantize_kernel(
    rows_ptr, codes_ptr, scales_ptr,
    hidden_size, num_groups, row_stride, code_stride, scale_stride,
    TINY: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    INT8: tl.constexpr, HAS_E4M3: tl.constexpr, CORRECTIONS: tl.constexpr,
):  # fmt: skip
    """Quantizes BLOCK_GROUPS groups of one row, to e4m3 or INT8.

    Before: rows `[T, K]`. After: codes uint8 `[T, K]` and scales f32 `[T, ceil(K / GROUP)]`, both inside wire rows.
    Program (t, b) holds a tile `[BLOCK_GROUPS, GROUP]`: its maximum along the columns gives the scales.

    Example: GROUP=2, row [1, -448, 3.5, 0]: scales [1, 3.5 / 448], codes [0x38, 0xfe, 0x7e, 0x00].
    INT8, row [1, -127, 2, 0]: scales [1, 2 / 127], codes [1, -127, 127, 0].
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    in_row = column < hidden_size
    values = tl.load(rows_ptr + row * row_stride + column, mask=in_row, other=0.0).to(tl.float32)
    magnitude = tl.abs(values)
    if CORRECTIONS == 0:
        # A GPU's maximum leaves NaN out; the interpreter's does not.
        magnitude = tl.where(values != values, 0.0, magnitude)
    scale = tl.maximum(tl.div_rn(tl.max(magnitude, axis=1), 127.0 if INT8 else 448.0), TINY)
    if INT8:
        has_nan = tl.max(tl.where(values != values, 1, 0), axis=1) > 0
        scale = tl.where(has_nan, float("nan"), scale)
    scaled = _divide(values, scale[:, None], CORRECTIONS)
    if INT8:
        scaled = tl.where(scaled == scaled, scaled, 0.0)
        # The sum has a whole number in its last bits, rounded to nearest with ties to even.
        codes = ((scaled + 12582912.0) - 12582912.0).to(tl.int32).to(tl.int8).to(tl.uint8, bitcast=True)
    elif HAS_E4M3:
        codes = _convert_e4m3(scaled, values)
    else:
        clamped = tl.where(scaled > 448.0, 448.0, tl.where(scaled < -448.0, -448.0, scaled))
        sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
        codes = ((_encode_e4m3(clamped) & 0x7F) | sign).to(tl.uint8)
    tl.store(codes_ptr + row * code_stride + column, codes, mask=in_row)
    tl.store(scales_ptr + row * scale_stride + group, scale, mask=group < num_groups)


@TritonKernel
def dequantize_kernel(
    codes_ptr, scales_ptr, rows_ptr,
    hidden_size, code_stride, scale_stride, group_stride, row_stride,
    GROUP: tl.constexpr, BLOCK_GROUPS: tl.constexpr, INT8: tl.constexpr, HAS_E4M3: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """rows[t, c] = decode(codes[t, c]) * scales[t, c / GROUP], for BLOCK_GROUPS groups of one row.

    Before: wire rows, as codes uint8 and scales f32, group_stride apart: 0 for one a row. After: rows `[T, K]`.

    Example: GROUP=2, codes [0x38, 0xfe, 0x7e, 0x00], scales [1, 2]: [1, -448, 896, 0]. INT8, codes [1, -127], scale 2:
    [2, -254].
    """
    take_over(EARLY)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    in_row = column < hidden_size
    codes = tl.load(codes_ptr + row * code_stride + column, mask=in_row, other=0)
    scale = tl.load(scales_ptr + row * scale_stride + group * group_stride, mask=group * GROUP < hidden_size, other=0.0)
    if INT8:
        values = codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif HAS_E4M3:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        values = decode_e4m3(codes)
    target = rows_ptr + row * row_stride + column
    tl.store(target, (values * scale[:, None]).to(rows_ptr.dtype.element_ty), mask=in_row)


def triton_quantize_rows(
    rows: torch.Tensor, quantized: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, whole: bool = False
) -> torch.Tensor:
    """Writes `quantized` and returns it; arguments as in `quantize_rows`, not checked."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_tokens, hidden_size = rows.shape
    # Views of one buffer: codes from its first byte, scales behind them.
    start = scale_offset(hidden_size)
    if start > hidden_size:
        quantized[:, hidden_size:start].zero_()
    group_size = next_power_of_2(hidden_size) if whole else GROUP_SIZE
    block = max(group_size, min(_MOST_COLUMNS, row_blocks(num_tokens, hidden_size, rows.element_size())[0]))
    block_groups = 1 if whole else block // group_size
    num_groups = cdiv(hidden_size, group_size)
    is_int8 = dtype == torch.int8
    corrections = 0 if is_interpreted() or is_int8 else 1 if rows.element_size() == 2 else 2
    quantize_kernel[(num_tokens, cdiv(num_groups, block_groups))](
        rows, quantized, quantized[:, start:].view(torch.float32),
        hidden_size, num_groups, rows.stride(0), quantized.stride(0), quantized.stride(0) // 4,
        TINY=LEAST_SCALE if whole else TINY_SCALE, GROUP=group_size, BLOCK_GROUPS=block_groups, INT8=is_int8,
        HAS_E4M3=_has_e4m3(rows.device), CORRECTIONS=corrections,
        num_warps=min(max(1, block // _WARP_COLUMNS), _MOST_WARPS),
    )  # fmt: skip
    return quantized


def triton_dequantize_rows(
    quantized: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> torch.Tensor:
    """Writes `rows` and returns it; arguments as in `dequantize_rows`, not checked."""
    # Scales are read as f32, in place if their places allow it.
    if quantized.stride(1) != 1 or quantized.stride(0) % 4 or quantized.storage_offset() % 4:
        quantized = quantized.clone(memory_format=torch.contiguous_format)
    return triton_dequantize_codes(*split_rows(quantized, rows.size(1), dtype), rows)


def triton_dequantize_codes(codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Writes `rows` and returns it; arguments as in `dequantize_codes`, not checked."""
    num_tokens, hidden_size = rows.shape
    block, num_warps = row_blocks(num_tokens, hidden_size, rows.element_size())
    block_groups = max(1, block // GROUP_SIZE)
    early = comes_early(rows.device)
    dequantize_kernel[(num_tokens, cdiv(hidden_size, block_groups * GROUP_SIZE))](
        codes.view(torch.uint8), scales, rows,
        hidden_size, codes.stride(0), scales.stride(0), int(scales.size(1) > 1), rows.stride(0),
        GROUP=GROUP_SIZE, BLOCK_GROUPS=block_groups, INT8=codes.dtype == torch.int8, HAS_E4M3=_has_e4m3(rows.device),
        EARLY=early,
        num_warps=num_warps, launch_pdl=early,
    )  # fmt: skip
    return rows


def _has_e4m3(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)

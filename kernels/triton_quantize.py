"""e4m3 rows as Triton kernels; `moe_ep.kernels.quantize` is how they are called.

Codes are made and read by integer arithmetic where the GPU has no e4m3 type (sm_80), and to send they are made by its
conversion where it has one; the bits are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ep.kernels.quantize import GROUP_SIZE, TINY_SCALE, scale_offset
from moe_ep.kernels.triton_dispatch_rows import row_blocks

_INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def encode_e4m3(values):
    """f32 in [-448, 448] or NaN to e4m3 bits, int32: nearest, ties to even.

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


@triton.jit
def decode_e4m3(codes):
    """e4m3 bits, as any integer, to f32; exact.

    The 7 bits under the sign are moved to where f32 has exponent and mantissa; 2**120 mends the bias, for subnormals
    too. 0x7f is NaN.

    Example: 0x38 -> 1.0, 0x01 -> 2**-9, 0x80 -> -0.0.
    """
    bits = codes.to(tl.int32)
    magnitude = (((bits & 0x7F) << 20).to(tl.float32, bitcast=True)) * 1.329227995784916e36
    signed = (magnitude.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), signed)


@triton.jit
def _divide(values, divisor, FUSED: tl.constexpr):
    """values / divisor, rounded correctly where that is 2**-11 or more, for a divisor per row that is at least 2**-126.

    A reciprocal per row, and two corrections of the quotient by its exact remainder (Markstein's division): a sixth of
    the instructions of a division. Small rows are made larger first, so that remainders are no subnormals; a divisor
    of infinity leaves 0, or NaN where the value is infinite too. The interpreter has no fused multiply-add.
    """
    if not FUSED:
        return tl.div_rn(values, tl.broadcast_to(divisor, values.shape))
    factor = tl.where(divisor < 8.673617379884035e-19, 1.2676506002282294e30, 1.0)
    infinite = divisor == float("inf")
    divisor = tl.where(infinite, 0.0, divisor * factor)
    reciprocal = tl.where(infinite, 0.0, tl.div_rn(1.0, divisor))
    negative = tl.broadcast_to(-divisor, values.shape)
    reciprocal = tl.broadcast_to(reciprocal, values.shape)
    values = values * factor
    first = values * reciprocal
    better = tl.fma(tl.fma(first, negative, values), reciprocal, first)
    best = tl.fma(tl.fma(better, negative, values), reciprocal, better)
    return tl.where(first == 0.0, first, best)  # zeros keep their sign


@triton.jit
def _quantize_kernel(
    rows_ptr,
    codes_ptr,
    scales_ptr,
    hidden_size,
    num_groups,
    row_stride,
    code_stride,
    scale_stride,
    TINY: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    FUSED: tl.constexpr,
):
    """Quantizes BLOCK_GROUPS groups of one row.

    Before: rows `[T, K]`. After: codes uint8 `[T, K]` and scales f32 `[T, ceil(K / GROUP)]`, both inside wire rows.
    Program (t, b) holds a tile `[BLOCK_GROUPS, GROUP]`: its maximum along the columns gives the scales.

    Example: GROUP=2, row [1, -448, 3.5, 0]: scales [1, 3.5 / 448], codes [0x38, 0xfe, 0x7e, 0x00].
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    in_row = column < hidden_size
    values = tl.load(rows_ptr + row * row_stride + column, mask=in_row, other=0.0).to(tl.float32)
    magnitude = tl.abs(values)
    largest = tl.max(tl.where(values != values, 0.0, magnitude), axis=1)
    scale = tl.maximum(tl.div_rn(largest, 448.0), TINY)
    scaled = _divide(values, scale[:, None], FUSED)
    clamped = tl.where(scaled > 448.0, 448.0, tl.where(scaled < -448.0, -448.0, scaled))
    if HAS_E4M3:
        codes = clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        # The conversion drops the sign of NaN.
        sign = ((clamped.to(tl.int32, bitcast=True) >> 24) & 0x80).to(tl.uint8)
        codes = tl.where(clamped != clamped, sign | 0x7F, codes)
    else:
        codes = encode_e4m3(clamped).to(tl.uint8)
    tl.store(codes_ptr + row * code_stride + column, codes, mask=in_row)
    tl.store(scales_ptr + row * scale_stride + group, scale, mask=group < num_groups)


@triton.jit
def _dequantize_kernel(
    codes_ptr,
    scales_ptr,
    rows_ptr,
    hidden_size,
    code_stride,
    scale_stride,
    row_stride,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """rows[t, c] = decode(codes[t, c]) * scales[t, c / GROUP], for BLOCK columns of one row.

    Before: wire rows, as codes uint8 and scales f32. After: rows `[T, K]`.

    Example: GROUP=2, codes [0x38, 0xfe, 0x7e, 0x00], scales [1, 2]: [1, -448, 896, 0].
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < hidden_size
    codes = tl.load(codes_ptr + row * code_stride + column, mask=in_row, other=0)
    scale = tl.load(scales_ptr + row * scale_stride + column // GROUP, mask=in_row, other=0.0)
    values = decode_e4m3(codes) * scale
    tl.store(rows_ptr + row * row_stride + column, values.to(rows_ptr.dtype.element_ty), mask=in_row)


def triton_quantize_rows(rows: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    """Writes `quantized` and returns it; arguments as in `quantize_rows`, not checked."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_tokens, hidden_size = rows.shape
    num_groups = triton.cdiv(hidden_size, GROUP_SIZE)
    # Views of one buffer: codes from its first byte, scales behind them.
    start = scale_offset(hidden_size)
    quantized[:, hidden_size:start].zero_()
    block, num_warps = row_blocks(num_tokens, hidden_size, rows.element_size())
    block_groups = max(1, block // GROUP_SIZE)
    with torch.cuda.device_of(rows):
        _quantize_kernel[(num_tokens, triton.cdiv(num_groups, block_groups))](
            rows,
            quantized,
            quantized[:, start:].view(torch.float32),
            hidden_size,
            num_groups,
            rows.stride(0),
            quantized.stride(0),
            quantized.stride(0) // 4,
            TINY=TINY_SCALE,
            GROUP=GROUP_SIZE,
            BLOCK_GROUPS=block_groups,
            FUSED=not _INTERPRETED,
            HAS_E4M3=rows.is_cuda and torch.cuda.get_device_capability(rows.device) >= (8, 9),
            num_warps=num_warps,
        )
    return quantized


def triton_dequantize_rows(quantized: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Writes `rows` and returns it; arguments as in `dequantize_rows`, not checked."""
    num_tokens, hidden_size = rows.shape
    block, num_warps = row_blocks(num_tokens, hidden_size, rows.element_size())
    with torch.cuda.device_of(rows):
        _dequantize_kernel[(num_tokens, triton.cdiv(hidden_size, block))](
            quantized,
            quantized[:, scale_offset(hidden_size) :].view(torch.float32),
            rows,
            hidden_size,
            quantized.stride(0),
            quantized.stride(0) // 4,
            rows.stride(0),
            GROUP=GROUP_SIZE,
            BLOCK=block,
            num_warps=num_warps,
        )
    return rows

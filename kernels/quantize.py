"""Rows in e4m3 for the wire: one byte per column, and one f32 scale for every 128 columns of a row.

A quantized row is a sequence of bytes: K codes, padding to a multiple of 4, then ceil(K / 128) scales. The last group
may be partial. value = code * scale with scale = max |x| of the group / 448, so the largest column of a group is exact
up to the rounding of the scale.
"""

from __future__ import annotations

import torch

from moe_ep.kernels.forms import form_for

GROUP_SIZE = 128
E4M3_MAX = 448.0
# The smallest normal f32. A group of zeros has this scale, to avoid a division by zero.
TINY_SCALE = torch.finfo(torch.float32).tiny


def scale_offset(hidden_size: int) -> int:
    """Bytes of a quantized row before its first scale."""
    return -(-hidden_size // 4) * 4


def quantized_row_bytes(hidden_size: int) -> int:
    """Bytes of a quantized row of K columns, a multiple of 4.

    Example: K=7168: 7168 codes and 56 scales, 7392 bytes.
    """
    return scale_offset(hidden_size) + 4 * -(-hidden_size // GROUP_SIZE)


def quantize_rows(rows: torch.Tensor) -> torch.Tensor:
    """Quantizes `[T, K]` f32, f16 or bf16 to uint8 `[T, quantized_row_bytes(K)]`.

    Codes are rounded to nearest, ties to even, and have the signs of their columns; NaN stays NaN, and infinity becomes
    NaN. Both forms, Triton on CUDA and plain torch, give the same bits.
    """
    quantized = rows.new_empty((rows.size(0), quantized_row_bytes(rows.size(1))), dtype=torch.uint8)
    return form_for(quantize_rows_reference, "triton_quantize.triton_quantize_rows", rows)(rows, quantized)


def dequantize_rows(quantized: torch.Tensor, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Converts the result of quantize_rows back to `[T, K]` of `dtype`; `quantized` may have any strides."""
    rows = quantized.new_empty((quantized.size(0), hidden_size), dtype=dtype)
    return form_for(dequantize_rows_reference, "triton_quantize.triton_dequantize_rows", rows)(quantized, rows)


def quantize_rows_reference(rows: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    """quantize_rows in plain torch, on any device; writes `quantized` and returns it."""
    num_tokens, hidden_size = rows.shape
    num_groups = -(-hidden_size // GROUP_SIZE)
    padded = torch.zeros((num_tokens, num_groups * GROUP_SIZE), dtype=torch.float32, device=rows.device)
    padded[:, :hidden_size] = rows
    groups = padded.view(num_tokens, num_groups, GROUP_SIZE)
    magnitudes = groups.abs()
    largest = torch.where(magnitudes.isnan(), 0.0, magnitudes).amax(dim=2)
    # The divisor is a tensor, since torch on CUDA multiplies by the reciprocal of a scalar, which rounds differently.
    scales = (largest / torch.full_like(largest, E4M3_MAX)).clamp(min=TINY_SCALE)
    codes = (groups / scales[:, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    # Machines differ in the sign of infinity divided by infinity.
    codes = (codes & 0x7F) | (groups.signbit().to(torch.uint8) << 7)
    quantized[:, :hidden_size] = codes.flatten(1)[:, :hidden_size]
    start = scale_offset(hidden_size)
    quantized[:, hidden_size:start] = 0
    quantized[:, start:] = scales.view(torch.uint8)
    return quantized


def dequantize_rows_reference(quantized: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """dequantize_rows in plain torch, on any device; writes `rows` and returns it."""
    hidden_size = rows.size(1)
    codes = quantized[:, :hidden_size].contiguous().view(torch.float8_e4m3fn).float()
    scales = quantized[:, scale_offset(hidden_size) :].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return rows.copy_(codes * scales.repeat_interleave(GROUP_SIZE, dim=1)[:, :hidden_size])

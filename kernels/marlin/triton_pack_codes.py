"""Codes of one byte into the layout that repack.py draws, in one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ep.kernels.triton_kernel import TritonKernel, cdiv

_BLOCK = 1024


@TritonKernel
@triton.jit
def _pack_codes_kernel(
    pairs_ptr,
    words_ptr,
    num_rows,
    num_columns,
    words_per_expert,
    BITS: tl.constexpr,
    GATED: tl.constexpr,
    SPREAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gathers each packed word from two rows of the plain form; program (b, e) makes words b * BLOCK ... of expert e.

    Before: codes uint8 `[E, out, in]` in natural row order, read as pairs of columns, int16 `[E, out, in / 2]`.
    After: int32 `[E, words_per_expert]` in the order of strips, blocks, pieces, lanes, words of a lane.

    Example: 4 bits, not gated: word 0 holds row 0, columns 0, 8, 1, 9 in its even nibbles and row 2, the same columns,
    in its odd ones.
    """
    LANE_WORDS: tl.constexpr = BITS // 2
    PIECE_WORDS: tl.constexpr = 32 * LANE_WORDS
    expert = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < words_per_expert
    strip_words = 2 * num_columns * BITS
    strip, in_strip = word // strip_words, word % strip_words
    pieces = tl.where(num_rows - 64 * strip == 32, 2, 4)
    piece_of_strip, in_piece = in_strip // PIECE_WORDS, in_strip % PIECE_WORDS
    block, piece = piece_of_strip // pieces, piece_of_strip % pieces
    lane, lane_word = in_piece // LANE_WORDS, in_piece % LANE_WORDS
    g, t = lane // 4, lane % 4
    sixteen = 4 * strip + piece
    if GATED:
        row, other_row = 8 * sixteen + g, num_rows // 2 + 8 * sixteen + g
    else:
        row = 16 * sixteen + 4 * (g // 2) + g % 2
        other_row = row + 2
    if BITS == 4:
        pair = 16 * block + 8 * lane_word + t
    else:
        pair = 16 * block + 4 * lane_word + t
    source = pairs_ptr + expert * num_rows * (num_columns // 2)
    pitch = num_columns // 2
    first = tl.load(source + row * pitch + pair, mask=inside, other=0).to(tl.int32) & 0xFFFF
    second = tl.load(source + other_row * pitch + pair, mask=inside, other=0).to(tl.int32) & 0xFFFF
    if BITS == 4:
        far = tl.load(source + row * pitch + pair + 4, mask=inside, other=0).to(tl.int32) & 0xFFFF
        far_second = tl.load(source + other_row * pitch + pair + 4, mask=inside, other=0).to(tl.int32) & 0xFFFF
        # The two columns of a pair go to the two halves of the word.
        first, second = (first | (first << 8)) & 0xFF00FF, (second | (second << 8)) & 0xFF00FF
        far, far_second = (far | (far << 8)) & 0xFF00FF, (far_second | (far_second << 8)) & 0xFF00FF
        packed = first | (second << 4) | (far << 8) | (far_second << 12)
        if SPREAD:
            # As repack.SPREAD says.
            codes = packed.to(tl.uint32, bitcast=True)
            spread = ((codes & 0x00070007) << 6) | ((codes & 0x00080008) << 12) | ((codes & 0x00800080) >> 2)
            spread |= ((codes & 0x00000070) << 24) | ((codes & 0x00700000) >> 8)
            spread |= ((codes & 0x00000700) << 17) | ((codes & 0x07000000) >> 15)
            spread |= ((codes & 0x38003800) >> 9) | ((codes & 0xC000C000) >> 14)
            packed = spread.to(tl.int32, bitcast=True)
    else:
        packed = first | (second << 16)
    tl.store(words_ptr + expert * words_per_expert + word, packed, mask=inside)


def triton_pack_codes(codes: torch.Tensor, bits: int, gated: bool, spread: bool = False) -> torch.Tensor:
    """uint8 `[E, out, in]`, contiguous, in natural row order -> int32 `[E, out * in * bits / 32]`.

    Args:
        spread: the codes are 4-bit floats.
    """
    num_experts, num_rows, num_columns = codes.shape
    words_per_expert = num_rows * num_columns * bits // 32
    words = torch.empty((num_experts, words_per_expert), dtype=torch.int32, device=codes.device)
    grid = (cdiv(words_per_expert, _BLOCK), num_experts)
    pairs = codes.view(torch.int16)
    _pack_codes_kernel[grid](
        pairs, words, num_rows, num_columns, words_per_expert, BITS=bits, GATED=gated, SPREAD=spread, BLOCK=_BLOCK
    )
    return words

"""Rotary positions of queries and keys in one Triton kernel, bit for bit as torch's operations make them."""

from __future__ import annotations

import torch

from moe_ep.kernels.triton_kernel import TritonKernel, cdiv, next_power_of_2, tl, triton_jit

_BLOCK_HEADS = 8


@triton_jit
def _product(x, y):
    """Rounded to the type of the factors."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype).to(tl.float32)


@triton_jit
def _rotate(
    source_ptr, target_ptr, cos_ptr, sin_ptr,
    first_head,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Turns heads first_head ... of one token, `[NUM_HEADS, 2 * HALF]`."""
    head = first_head + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    place = head * 2 * HALF + column
    inside = (head < NUM_HEADS) & (column < HALF)
    first = tl.load(source_ptr + place, mask=inside, other=0.0)
    second = tl.load(source_ptr + place + HALF, mask=inside, other=0.0)
    cos = tl.load(cos_ptr + column, mask=column < HALF, other=0.0)
    sin = tl.load(sin_ptr + column, mask=column < HALF, other=0.0)
    tl.store(target_ptr + place, (_product(first, cos) - _product(second, sin)).to(first.dtype), mask=inside)
    if WIDE:
        cos = tl.load(cos_ptr + HALF + column, mask=column < HALF, other=0.0)
        sin = tl.load(sin_ptr + HALF + column, mask=column < HALF, other=0.0)
    tl.store(target_ptr + place + HALF, (_product(second, cos) + _product(first, sin)).to(first.dtype), mask=inside)


@TritonKernel
def _rotary_kernel(
    query_ptr, key_ptr, cos_ptr, sin_ptr, query_target_ptr, key_target_ptr,
    num_angles,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Program (token, group) turns BLOCK_HEADS heads of one token: those of queries, then those of keys.

    Row r of cos and sin is that of tokens r, r + num_angles, ...; WIDE where it has a column for each of a head.

    Example: first half 1, second half 2, cos 0, sin 1: -2 and 1.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    angles = token % num_angles * (2 * HALF if WIDE else HALF)
    query_groups = (QUERY_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    if group < query_groups:
        of_query = token * QUERY_HEADS * 2 * HALF
        _rotate(query_ptr + of_query, query_target_ptr + of_query, cos_ptr + angles, sin_ptr + angles,
                group * BLOCK_HEADS, QUERY_HEADS, HALF, WIDE, BLOCK_HEADS, BLOCK_HALF)  # fmt: skip
    else:
        of_key = token * KEY_HEADS * 2 * HALF
        _rotate(key_ptr + of_key, key_target_ptr + of_key, cos_ptr + angles, sin_ptr + angles,
                (group - query_groups) * BLOCK_HEADS, KEY_HEADS, HALF, WIDE, BLOCK_HEADS, BLOCK_HALF)  # fmt: skip


def triton_rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys with their halves turned: x cos + (-second half, first half) sin.

    Args:
        query, key: `[B, T, heads, head_dim]`, contiguous, each with heads of its own.
        cos, sin: contiguous, of the same dtype, `[B or 1, T, head_dim]`, or head_dim / 2 columns for both halves.
    """
    batch, num_tokens, query_heads, head_dim = query.shape
    key_heads = key.size(2)
    targets = torch.empty_like(query), torch.empty_like(key)
    _rotary_kernel[(batch * num_tokens, cdiv(query_heads, _BLOCK_HEADS) + cdiv(key_heads, _BLOCK_HEADS))](
        query, key, cos, sin, *targets,
        cos.size(0) * num_tokens,
        QUERY_HEADS=query_heads, KEY_HEADS=key_heads, HALF=head_dim // 2, WIDE=cos.size(-1) == head_dim,
        BLOCK_HEADS=_BLOCK_HEADS, BLOCK_HALF=next_power_of_2(head_dim // 2),
        enable_fp_fusion=False,
    )  # fmt: skip
    return targets

"""Rotary positions, shared by tests on GPUs and in Triton's interpreter."""

from __future__ import annotations

import torch

# (B, T, heads of queries, heads of keys, head_dim, columns of cos, whether sequences share cos)
CASES = [
    (1, 1, 1, 1, 2, 2, False),
    (3, 1, 32, 4, 128, 128, False),
    (1, 5, 12, 9, 80, 80, True),
    (2, 3, 8, 2, 64, 32, False),
    (2, 4, 3, 3, 96, 96, True),
]


def plain_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Of `[B, T, heads, head_dim]`, with an operation of torch for each step."""
    first, second = x.chunk(2, dim=-1)
    if cos.size(-1) < x.size(-1):
        cos, sin = (torch.cat([angles, angles], dim=-1) for angles in (cos, sin))
    return x * cos[:, :, None] + torch.cat([-second, first], dim=-1) * sin[:, :, None]


def check_rotary(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """The Triton kernel with the bits of torch's operations; the CPU needs TRITON_INTERPRET=1."""
    from moe_ep.kernels.rotary import triton_rotary

    generator = torch.Generator().manual_seed(1)
    for dtype in dtypes:
        for batch, tokens, query_heads, key_heads, head_dim, width, shared in CASES:
            angles = (1 if shared else batch, tokens, width)
            sizes = (batch, tokens, query_heads, head_dim), (batch, tokens, key_heads, head_dim), angles, angles
            query, key, cos, sin = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
            got = triton_rotary(query, key, cos, sin)
            for mine, x in zip(got, (query, key), strict=True):
                assert torch.equal(mine, plain_rotary(x, cos, sin)), (dtype, sizes)

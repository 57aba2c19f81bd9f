"""Codes of 4 and 8 bits as they lie in words: low bits first, in order of the last dimension."""

from __future__ import annotations

import torch


def unpack_words(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 `[..., R]` -> uint8 `[..., R * 32 / bits]`; the bytes of an int32 are low first already."""
    octets = packed.flatten().view(torch.uint8).view(*packed.shape[:-1], 4 * packed.shape[-1])
    return octets if bits == 8 else unpack_nibbles(octets)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse: uint8 `[..., R]` -> int32 `[..., R * bits / 32]`, R a multiple of 32 / bits."""
    octets = codes if bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)
    return octets.flatten().view(torch.int32).view(*octets.shape[:-1], octets.shape[-1] // 4)


def unpack_nibbles(octets: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., R]` -> uint8 `[..., 2 R]`, the low half of a byte first."""
    return torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(-2)

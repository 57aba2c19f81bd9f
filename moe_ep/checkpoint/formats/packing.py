"""Packs codes of 4 and 8 bits into words along the last dimension, low bits first."""

from __future__ import annotations

import torch


def unpack_words(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 `[..., R]` -> uint8 `[..., R * 32 / bits]`; the bytes of an int32 are low first already."""
    octets = _in_a_row(packed).view(torch.uint8).view(*packed.shape[:-1], 4 * packed.shape[-1])
    return octets if bits == 8 else unpack_nibbles(octets)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse: uint8 `[..., R]` -> int32 `[..., R * bits / 32]`, R a multiple of 32 / bits."""
    octets = codes if bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)
    return _in_a_row(octets).view(torch.int32).view(*octets.shape[:-1], octets.shape[-1] // 4)


def unpack_nibbles(octets: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., R]` -> uint8 `[..., 2 R]`, the low half of a byte first.

    Example: 0xA5 is 5, 10: as a word of 16 bits 0x00A5, with itself four bits higher 0x0AF5, masked 0x0A05.
    """
    words = octets.contiguous().to(torch.int16)
    return ((words << 4) | words).bitwise_and_(0x0F0F).view(torch.uint8)


def _in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous flat copy or view; `flatten` alone may return a strided tensor."""
    return tensor.flatten().contiguous()

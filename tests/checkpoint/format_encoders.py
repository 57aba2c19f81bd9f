"""Linear layers in the tensors of each format, with the values that they stand for.

The values come from plain loops over Python numbers, one weight at a time, written from the formats' definitions and
from nothing in the package.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch

Tensors = dict[str, torch.Tensor]
# What row and column of a linear layer stand for.
Value = Callable[[int, int], float]
# The tensors of a linear layer [n, k] by suffix, and its values.
Encode = Callable[[int, int], tuple[Tensors, Value]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def f32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def bits_of(word: int, index: int, bits: int) -> int:
    return ((word & 0xFFFFFFFF) >> (bits * index)) & (2**bits - 1)


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if code & 128 else value


def e2m1(code: int) -> float:
    value = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]
    return -value if code & 8 else value


def values(n: int, k: int, value: Value) -> torch.Tensor:
    return torch.tensor([[value(row, column) for column in range(k)] for row in range(n)], dtype=torch.float32)


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


def scales(*shape: int, size: float = 0.01) -> torch.Tensor:
    return (torch.rand(shape) + 0.5) * size


def e4m3_codes(*shape: int) -> torch.Tensor:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    return torch.where(codes & 127 == 127, 0, codes).to(torch.uint8)


def gptq(bits: int, group: int, act_order: bool, version: int = 2) -> Encode:
    """Asymmetric; version 1 stores zero points less one, and cannot store a zero."""

    def encode(n: int, k: int) -> tuple[Tensors, Value]:
        pack, groups = 32 // bits, k // group
        g_idx = torch.arange(k) // group
        if act_order:
            g_idx = g_idx[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        stored = words(groups, n // pack)
        if version == 1:
            # The highest bit of each is off, so none of them is the largest.
            stored &= {4: 0x77777777, 8: 0x7F7F7F7F}[bits]
        tensors = {
            "qweight": words(k // pack, n),
            "qzeros": stored,
            "scales": scales(groups, n, size=0.16 / 2**bits).half(),
            "g_idx": g_idx.to(torch.int32),
        }
        q, z, s, g = (tensor.tolist() for tensor in tensors.values())

        def value(row: int, col: int) -> float:
            zero = bits_of(z[g[col]][row // pack], row % pack, bits) + (version == 1)
            return (bits_of(q[col // pack][row], col % pack, bits) - zero) * s[g[col]][row]

        return tensors, value

    return encode


def awq(group: int) -> Encode:
    def encode(n: int, k: int) -> tuple[Tensors, Value]:
        tensors = {
            "qweight": words(k, n // 8),
            "qzeros": words(k // group, n // 8),
            "scales": scales(k // group, n).half(),
        }
        q, z, s = (tensor.tolist() for tensor in tensors.values())

        def value(row: int, col: int) -> float:
            nibble, at = AWQ_ORDER.index(row % 8), col // group
            return (bits_of(q[col][row // 8], nibble, 4) - bits_of(z[at][row // 8], nibble, 4)) * s[at][row]

        return tensors, value

    return encode


def packed(bits: int, group: int | None, symmetric: bool = True, scattered: bool = False) -> Encode:
    """compressed-tensors pack-quantized; group None means a scale a row."""

    def encode(n: int, k: int) -> tuple[Tensors, Value]:
        pack, columns = 32 // bits, group or k
        g = (torch.arange(k) // columns).to(torch.int32)
        tensors = {
            "weight_packed": words(n, k // pack),
            "weight_scale": scales(n, k // columns, size=0.16 / 2**bits).bfloat16(),
            "weight_shape": torch.tensor([n, k]),
        }
        if scattered:
            # Gate and up of an expert share it.
            g = g[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
            tensors["weight_g_idx"] = g
        if not symmetric:
            tensors["weight_zero_point"] = words(n // pack, k // columns)
        q, s, index, middle = (
            tensors["weight_packed"].tolist(),
            tensors["weight_scale"].tolist(),
            g.tolist(),
            2 ** (bits - 1),
        )
        z = None if symmetric else tensors["weight_zero_point"].tolist()

        def value(row: int, col: int) -> float:
            at = index[col]
            zero = 0 if z is None else bits_of(z[row // pack][at], row % pack, bits) - middle
            return (bits_of(q[row][col // pack], col % pack, bits) - middle - zero) * s[row][at]

        return tensors, value

    return encode


def packed_of_one(bits: int) -> Encode:
    """compressed-tensors pack-quantized, with one scale and one zero point of a matrix, which is not packed."""

    def encode(n: int, k: int) -> tuple[Tensors, Value]:
        tensors, _ = packed(bits, None)(n, k)
        pack, middle = 32 // bits, 2 ** (bits - 1)
        tensors["weight_scale"] = tensors["weight_scale"][0]
        tensors["weight_zero_point"] = torch.randint(-middle, middle, (1,)).to(torch.int8)
        q, scale, zero = (
            tensors["weight_packed"].tolist(),
            float(tensors["weight_scale"]),
            int(tensors["weight_zero_point"]),
        )

        def value(row: int, col: int) -> float:
            return (bits_of(q[row][col // pack], col % pack, bits) - middle - zero) * scale

        return tensors, value

    return encode


def without_shape(encode: Encode) -> Encode:
    """All experts in one have none."""

    def shapeless(n: int, k: int) -> tuple[Tensors, Value]:
        tensors, value = encode(n, k)
        return {name: tensor for name, tensor in tensors.items() if name != "weight_shape"}, value

    return shapeless


def int_quantized(n: int, k: int) -> tuple[Tensors, Value]:
    tensors = {
        "weight": torch.randint(-128, 128, (n, k)).to(torch.int8),
        "weight_scale": scales(n, 1, size=1e-3),
    }
    q, s = (tensor.tolist() for tensor in tensors.values())
    return tensors, lambda row, col: q[row][col] * s[row][0]


def int8_blocks(n: int, k: int) -> tuple[Tensors, Value]:
    """With a scale for 128 rows and columns."""
    tensors = {
        "weight": torch.randint(-128, 128, (n, k)).to(torch.int8),
        "weight_scale_inv": scales(-(-n // 128), -(-k // 128), size=1e-3),
    }
    q, s = (tensor.tolist() for tensor in tensors.values())
    return tensors, lambda row, col: q[row][col] * s[row // 128][col // 128]


def int4_bytes(group: int) -> Encode:
    """Two's complement halves."""

    def encode(n: int, k: int) -> tuple[Tensors, Value]:
        tensors = {
            "weight": torch.randint(-128, 128, (n, k // 2)).to(torch.int8),
            "weight_scale_inv": scales(n, k // group).bfloat16(),
            "input_scale": torch.ones(1),
        }
        q, s = (tensors[name].tolist() for name in ("weight", "weight_scale_inv"))

        def value(row: int, col: int) -> float:
            half = (q[row][col // 2] & 255) >> 4 * (col % 2) & 15
            return (half - 16 * (half > 7)) * s[row][col // group]

        return tensors, value

    return encode


def fp8(
    name: str, block: tuple[int, int] | None, dtype: torch.dtype, per_row: bool = False, number: float | None = None
) -> Encode:
    """e4m3 with a scale a block, a row, or (neither) one with an input_scale beside it, this one where it is given."""

    def encode(n: int, k: int) -> tuple[Tensors, Value]:
        rows, columns = block or ((1, k) if per_row else (n, k))
        shape = (-(-n // rows), -(-k // columns)) if block or per_row else (1,)
        scale = scales(*shape, size=1e-3) if number is None else torch.full(shape, number)
        if dtype == torch.float8_e8m0fnu:
            scale = torch.randint(115, 120, shape, dtype=torch.uint8).view(dtype)
        codes = e4m3_codes(n, k)
        tensors = {"weight": codes.view(torch.float8_e4m3fn), name: scale.to(dtype)}
        if len(shape) == 1:
            tensors["input_scale"] = torch.ones(1)
        q, s = codes.tolist(), tensors[name].float().reshape(-(-n // rows), -1).tolist()
        return tensors, lambda row, col: e4m3(q[row][col]) * s[row // rows][col // columns]

    return encode


def mxfp8(name: str, dtype: torch.dtype = torch.uint8) -> Encode:
    """e4m3 in groups of 32 columns with powers of two, kept as their bits or as what they are."""

    def encode(n: int, k: int) -> tuple[Tensors, Value]:
        codes = e4m3_codes(n, k)
        exponents = torch.randint(112, 122, (n, k // 32), dtype=torch.uint8)
        q, s = codes.tolist(), exponents.tolist()
        tensors = {"weight": codes.view(torch.float8_e4m3fn), name: exponents.view(dtype)}
        return tensors, lambda row, col: e4m3(q[row][col]) * 2.0 ** (s[row][col // 32] - 127)

    return encode


def mxfp4(n: int, k: int) -> tuple[Tensors, Value]:
    tensors = {
        "weight_packed": torch.randint(0, 256, (n, k // 2), dtype=torch.uint8),
        "weight_scale": torch.randint(118, 124, (n, k // 32), dtype=torch.uint8),
    }
    q, s = (tensor.tolist() for tensor in tensors.values())

    def value(row: int, col: int) -> float:
        return e2m1(q[row][col // 2] >> 4 * (col % 2) & 15) * 2.0 ** (s[row][col // 32] - 127)

    return tensors, value


def mxfp4_beside_fp8(n: int, k: int) -> tuple[Tensors, Value]:
    """As DeepSeek-V4 names it, its codes signed bytes."""
    tensors, value = mxfp4(n, k)
    codes, exponents = tensors["weight_packed"], tensors["weight_scale"]
    return {"weight": codes.view(torch.int8), "scale": exponents.view(torch.float8_e8m0fnu)}, value


def as_quark(encode: Encode) -> Encode:
    """Codes under `weight`, and scales of a row or a tensor without dimensions of 1."""

    def renamed(n: int, k: int) -> tuple[Tensors, Value]:
        tensors, value = encode(n, k)
        scale = tensors["weight_scale"].squeeze()
        return {"weight": tensors.get("weight_packed", tensors.get("weight")), "weight_scale": scale}, value

    return renamed


def nvfp4(weight: str, number: str, divides: bool, factor: float | None = None) -> Encode:
    """With this number for all matrices, or one for each."""
    of_all = factor

    def encode(n: int, k: int) -> tuple[Tensors, Value]:
        # A few numbers are enough for gate and up to differ.
        factor = torch.tensor(of_all or float(torch.randint(1, 9, ())) * (10.0 if divides else 0.011))
        codes, scale = (
            torch.randint(0, 256, (n, k // 2), dtype=torch.uint8),
            torch.randint(24, 56, (n, k // 16), dtype=torch.uint8),
        )
        tensors = {
            weight: codes,
            "weight_scale": scale.view(torch.float8_e4m3fn),
            number: factor.reshape(1) if divides else factor,
            "input_global_scale" if divides else "input_scale": torch.ones(1),
        }
        q, s, f = codes.tolist(), scale.tolist(), f32(1 / float(factor)) if divides else float(factor)
        return tensors, lambda row, col: e2m1(q[row][col // 2] >> 4 * (col % 2) & 15) * e4m3(s[row][col // 16]) * f

    return encode


def plain(n: int, k: int) -> tuple[Tensors, Value]:
    weight = (torch.randn(n, k) * k**-0.5).bfloat16()
    as_list = weight.tolist()
    return {"weight": weight}, lambda row, col: as_list[row][col]

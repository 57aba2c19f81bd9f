"""The kernels with 8-bit rows, run whole on an emulated GPU: every pair of rows and weights, tails, rows as sent."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from moe_ep.activation import MoEActivation
from moe_ep.kernels.marlin.checks import PARTS, check_weight_pair
from moe_ep.kernels.marlin.compute import sort_by_expert
from moe_ep.kernels.marlin.plain import compute_expert
from moe_ep.kernels.marlin.repack import BY_ROW
from moe_ep.kernels.marlin.types import WEIGHT_TYPES
from moe_ep.kernels.marlin.weights import WeightPair
from moe_ep.kernels.quantize import quantize_rows, split_rows
from moe_ep.layer.methods import relative_error
from moe_ep.scalar_type import scalar_types
from tests.dispatch.emulated_gpu import COMPILER
from tests.kernels import tensor_core
from tests.kernels.emulated_experts import Emulated, compile_widening
from tests.kernels.marlin_cases import E2M1, E, arguments, make

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")

FP8, INT8 = torch.float8_e4m3fn, torch.int8
# Rows, weights, group size, (K, N), rows came in 8 bits, the kernel for older GPUs.
Case = tuple[torch.dtype, str, int, tuple[int, int], bool, bool]
CASES = [
    (FP8, "float4_e2m1f", 32, (192, 64), False, False),
    (FP8, "uint4", 64, (320, 192), True, False),
    pytest.param((FP8, "uint4b8", -1, (256, 128), False, False), marks=pytest.mark.thorough),
    (FP8, "float8_e4m3fn", -1, (192, 64), False, False),
    (FP8, "float8_e4m3fn", 128, (384, 128), True, False),
    (INT8, "uint4b8", 64, (320, 192), True, False),
    pytest.param((INT8, "uint4", 32, (192, 64), False, True), marks=pytest.mark.thorough),
    (INT8, "uint8b128", -1, (320, 192), True, True),
]


def pair_of(rows: torch.dtype, name: str, group: int, shape: tuple[int, int]) -> WeightPair:
    (K, N), kind = shape, WEIGHT_TYPES[getattr(scalar_types, name).id].packed_for(group, rows)
    first, second = make(kind, group, 2 * N, K, True, 1), make(kind, group, K, N, False, 2)
    given = arguments(first, second, kind, MoEActivation.SILU)
    parts = [[given[name] for name in names] for names in _names()]
    return check_weight_pair(kind, MoEActivation.SILU, torch.bfloat16, True, *map(tuple, parts), input_dtype=rows)


def _names() -> list[list[str]]:
    return [[part.format(which) for part in PARTS] for which in (1, 2)]


# Factors of products, as exponents of 2, and the sum that a tensor core makes.
SUMS = [
    ([(0, 0)] + [(-7, -7)] * 31, 1.0),  # 2^-14 is cut
    ([(0, 0)] + [(-7, -6)] * 31, 1 + 31 * 2.0**-13),
    ([(0, 0)] * 8 + [(-7, -6)] * 23 + [(-7, -7)], 8 + 2 * 2.0**-10),  # 8 + 23 * 2^-13 is cut to a multiple of 2^-10
    ([(-6, -7)] * 32 + [(0, 0)] + [(-7, -7)] * 31, 1 + 32 * 2.0**-13),  # the accumulator is a term of the next 32
]


@pytest.mark.parametrize(("powers", "total"), SUMS)
def test_sums_of_the_tensor_cores(powers: list[tuple[int, int]], total: float) -> None:
    a, b = (torch.tensor([[2.0 ** pair[i] for pair in powers]]) for i in (0, 1))
    for sign in (1, -1):
        assert tensor_core.tensor_core_sums((sign * a).to(FP8), b.to(FP8)).item() == sign * total


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_launch_computes_what_plain_torch_does(case: Case, tmp_path: Path) -> None:
    """Experts of one row, none and more than a tile; rows in random order; results within 0.003 of the torch form, and
    with e4m3 rows those of the tensor cores' sums, rounded."""
    rows_dtype, name, group, shape, sent, older = case
    pair, K = pair_of(rows_dtype, name, group, shape), shape[0]
    counts = [1, 0, 70 if older else 133]
    rng = torch.Generator().manual_seed(4)
    ids = torch.tensor([expert for expert, count in enumerate(counts) for _ in range(count)] + [-1] * 2)
    ids = ids[torch.randperm(len(ids), generator=rng)].view(-1, 1)
    tokens = (torch.randn(len(ids), K, generator=rng) * torch.rand(len(ids), 1, generator=rng)).bfloat16()
    given, scales = tokens, None
    if sent:
        given, scales = split_rows(quantize_rows(tokens, rows_dtype, whole=True), K, rows_dtype, whole=True)
    output = torch.full((len(ids), K), float("nan"), dtype=torch.bfloat16)
    emulated = Emulated(tmp_path, pair, sent, older)
    emulated.run(output, given, sort_by_expert(ids, E), scales)
    assert output[ids[:, 0] < 0].isnan().all()
    for expert, count in enumerate(counts):
        chosen = ids[:, 0] == expert
        if count:
            own = None if scales is None else scales[chosen]
            expected = compute_expert(given[chosen], pair, expert, scales=own)
            assert relative_error(output[chosen], expected) < 0.003, expert
            if rows_dtype == FP8:
                rounded = tensor_core.compute_expert(given[chosen], pair, expert, own).bfloat16()
                assert (output[chosen] != rounded).float().mean() < 0.001, expert


def test_scales_of_e4m3_weights_are_the_same_in_blocks(tmp_path: Path) -> None:
    """Blocks of 128 rows and fewer beside rows with scales of their own, in one tile of many tokens."""
    pair, K = pair_of(FP8, "float8_e4m3fn", 64, (320, 192)), 320
    for weights in (pair.w13, pair.w2):
        rows = torch.arange(weights.num_rows)
        weights.scales[:2] = weights.scales[:2, :, rows // 128 * 128 + rows % 2]
    pair.w2.scales[1, 1, 200] *= 3.0
    ids = torch.arange(100 * E).view(-1, 1) % E
    tokens = torch.randn(len(ids), K, generator=torch.Generator().manual_seed(6)).bfloat16()
    output = torch.zeros(len(ids), K, dtype=torch.bfloat16)
    Emulated(tmp_path, pair).run(output, tokens, sort_by_expert(ids, E))
    for expert in range(E):
        chosen = ids[:, 0] == expert
        assert relative_error(output[chosen], compute_expert(tokens[chosen], pair, expert)) < 0.003


def test_scales_of_mxfp4_differ_by_many_binades(tmp_path: Path) -> None:
    """Groups of a row up to 14 apart, the least scale there is, and a NaN, which its row alone has; the last step of
    both products lacks groups."""
    (K, _), count, rng = (shape := (192, 64)), 40, torch.Generator().manual_seed(5)
    pair = pair_of(FP8, "float4_e2m1f", 32, shape)
    for weights, first in ((pair.w13, 110), (pair.w2, 113)):
        weights.scales.copy_(torch.randint(first, first + 15, weights.scales.shape, dtype=torch.uint8, generator=rng))
        weights.scales[:, :, 5] = 0
    pair.w2.scales[1, 1, 7] = 255
    for weights in (pair.w13, pair.w2):
        weights.zeros.copy_(weights.scales.amax(1, keepdim=True))
    ids = torch.arange(count).view(-1, 1) % E
    tokens, output = torch.randn(count, K, generator=rng).bfloat16(), torch.zeros(count, K, dtype=torch.bfloat16)
    Emulated(tmp_path, pair).run(output, tokens, sort_by_expert(ids, E))
    for expert in range(E):
        chosen = ids[:, 0] == expert
        expected = compute_expert(tokens[chosen], pair, expert)
        assert torch.equal(output[chosen].isfinite(), expected.isfinite())
        assert (~expected.isfinite()).any(0).sum() == (expert == 1)
        assert relative_error(output[chosen].nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0)) < 0.003


# Weights by WEIGHT_TYPE of dequant.cuh: bits, and the values of all codes less a zero point.
UINT4, UINT4B8, UINT8B128, FLOAT8, MXFP4 = 0, 1, 2, 3, 6
VALUES = {
    UINT4: torch.arange(16.0),
    UINT4B8: torch.arange(16.0) - 8,
    UINT8B128: torch.arange(256.0) - 128,
    FLOAT8: torch.arange(256, dtype=torch.uint8).view(FP8).float(),
}
BUILDS = [(UINT4, 1), (UINT4B8, 1), (UINT8B128, 1), (UINT4, 0), (UINT4B8, 0), (FLOAT8, 0)]


@pytest.fixture(scope="module")
def widening(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_widening(tmp_path_factory.mktemp("widening"), [*BUILDS, (MXFP4, 0)])


@pytest.mark.parametrize(("number", "is_int8"), BUILDS)
def test_widened_codes_are_the_weights(number: int, is_int8: int, widening: ctypes.CDLL) -> None:
    """All 65536 halves of a word, in both places, and all zero points: bytes times kCodeUnit are code - zero point."""
    values = VALUES[number]
    words, codes = words_and_codes(4 if len(values) == 16 else 8)
    unit = unit_of(widening, f"{number}_{is_int8}")
    for zero in range(16) if number == UINT4 else (0,):
        zeros = (zero, 15 - zero) if number == UINT4 else (0, 0)
        rows = widen(widening, f"{number}_{is_int8}", words, [z * 0x01010101 for z in zeros])
        for row, columns, own_zero in zip(rows, codes, zeros, strict=True):
            got = row.view(torch.int8 if is_int8 else FP8).view(-1, 4).float() * unit
            expected = values[columns] - own_zero
            assert torch.equal(got.nan_to_num(9999.0), expected.nan_to_num(9999.0))


def test_widened_codes_of_mxfp4_have_their_scale(widening: ctypes.CDLL) -> None:
    """All halves of a word and distances of a scale from the largest one, of either row: exact up to 26 binades, beyond
    off by less than 2^-24 of the largest. Zeros keep their sign."""
    words, codes = words_and_codes(4)
    moved = torch.zeros_like(words)
    for mask, by in BY_ROW:
        moved |= (words & mask) << by if by > 0 else (words & mask) >> -by
    unit = unit_of(widening, f"{MXFP4}_0")
    distances = [(low, high) for low in range(28) for high in (0, 27 - low)] + [(30, 33), (254, 40)]
    for chosen in distances:
        largest = torch.tensor([254, 254 - chosen[1] // 2])
        exponents = (largest - torch.tensor(chosen)).clamp(min=0)
        pairs = [int(low) | int(high) << by for (low, high), by in ((exponents.tolist(), 16), (largest.tolist(), 8))]
        rows = widen(widening, f"{MXFP4}_0", moved, pairs)
        for row, columns, distance in zip(rows, codes, (largest - exponents).tolist(), strict=True):
            got = row.view(torch.float8_e5m2).view(-1, 4).float() * unit
            exact = E2M1[columns] * 2.0**-distance
            assert torch.equal(got.signbit(), columns > 7)
            if distance <= 26:
                assert torch.equal(got, exact)
            assert ((exact - got).abs() < 6 * 2.0**-24).all()


def words_and_codes(bits: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """int64 words with each of 65536 halves in both places, and their codes of either row, or of one in 8 bits: columns
    2 t, 2 t + 8, 2 t + 1, 2 t + 9."""
    halves = torch.arange(1 << 16)
    others = torch.randint(0, 1 << 16, (1 << 16,), generator=torch.Generator().manual_seed(0))
    words = torch.cat([halves | others << 16, others | halves << 16])
    codes = words[:, None] >> torch.arange(0, 32, bits) & (1 << bits) - 1
    return words, [codes[:, ::2], codes[:, 1::2]] if bits == 4 else [codes, codes]


def widen(library: ctypes.CDLL, build: str, words: torch.Tensor, of_rows: list[int]) -> list[torch.Tensor]:
    """Operands of rows g and g + 8; of_rows: their zero points, or scales."""
    given, rows = words.to(torch.uint32), [torch.empty(len(words), dtype=torch.uint32) for _ in range(2)]
    places = [ctypes.c_void_p(row.data_ptr()) for row in rows]
    library[f"widen_{build}"](ctypes.c_void_p(given.data_ptr()), len(words), *map(ctypes.c_uint32, of_rows), *places)
    return rows


def unit_of(library: ctypes.CDLL, build: str) -> float:
    unit = library[f"unit_{build}"]
    unit.restype = ctypes.c_float
    return float(unit())

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
from moe_ep.kernels.marlin.repack import SPREAD
from moe_ep.kernels.marlin.types import WEIGHT_TYPES
from moe_ep.kernels.marlin.weights import WeightPair
from moe_ep.kernels.quantize import quantize_rows, split_rows
from moe_ep.layer.methods import relative_error
from moe_ep.scalar_type import scalar_types
from tests.dispatch.emulated_gpu import COMPILER
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
    (INT8, "uint4b8", 64, (320, 192), True, False),
    pytest.param((INT8, "uint4", 32, (192, 64), False, True), marks=pytest.mark.thorough),
    (INT8, "uint8b128", -1, (320, 192), True, True),
]


def pair_of(rows: torch.dtype, name: str, group: int, shape: tuple[int, int]) -> WeightPair:
    (K, N), kind = shape, WEIGHT_TYPES[getattr(scalar_types, name).id]
    first, second = make(kind, group, 2 * N, K, True, 1), make(kind, group, K, N, False, 2)
    given = arguments(first, second, kind, MoEActivation.SILU)
    parts = [[given[name] for name in names] for names in _names()]
    return check_weight_pair(kind, MoEActivation.SILU, torch.bfloat16, True, *map(tuple, parts), input_dtype=rows)


def _names() -> list[list[str]]:
    return [[part.format(which) for part in PARTS] for which in (1, 2)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_launch_computes_what_plain_torch_does(case: Case, tmp_path: Path) -> None:
    """Experts of one row, none and more than a tile; rows in random order; results within 0.003 of the torch form."""
    rows_dtype, name, group, shape, sent, older = case
    pair, K = pair_of(rows_dtype, name, group, shape), shape[0]
    counts = [1, 0, 70 if older else 133]
    rng = torch.Generator().manual_seed(4)
    ids = torch.tensor([expert for expert, count in enumerate(counts) for _ in range(count)] + [-1] * 2)
    ids = ids[torch.randperm(len(ids), generator=rng)].view(-1, 1)
    tokens = (torch.randn(len(ids), K, generator=rng) * torch.rand(len(ids), 1, generator=rng)).bfloat16()
    given, scales = (tokens, None) if not sent else split_rows(quantize_rows(tokens, rows_dtype), K, rows_dtype)
    output = torch.full((len(ids), K), float("nan"), dtype=torch.bfloat16)
    emulated = Emulated(tmp_path, pair, sent, older)
    emulated.run(output, given, sort_by_expert(ids, E), scales)
    assert output[ids[:, 0] < 0].isnan().all()
    for expert, count in enumerate(counts):
        chosen = ids[:, 0] == expert
        if count:
            expected = compute_expert(given[chosen], pair, expert, scales=None if scales is None else scales[chosen])
            assert relative_error(output[chosen], expected) < 0.003, expert


# Weights by WEIGHT_TYPE of dequant.cuh: bits, and the values of all codes less a zero point.
UINT4, UINT4B8, UINT8B128, FLOAT8, MXFP4 = 0, 1, 2, 3, 5
VALUES = {
    UINT4: torch.arange(16.0),
    UINT4B8: torch.arange(16.0) - 8,
    UINT8B128: torch.arange(256.0) - 128,
    FLOAT8: torch.arange(256, dtype=torch.uint8).view(FP8).float(),
    MXFP4: E2M1,
}
BUILDS = [(UINT4, 1), (UINT4B8, 1), (UINT8B128, 1), (UINT4, 0), (UINT4B8, 0), (FLOAT8, 0), (MXFP4, 0)]


@pytest.fixture(scope="module")
def widening(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_widening(tmp_path_factory.mktemp("widening"), BUILDS)


@pytest.mark.parametrize(("number", "is_int8"), BUILDS)
def test_widened_codes_are_the_weights(number: int, is_int8: int, widening: ctypes.CDLL) -> None:
    """All 65536 halves of a word, in both places, and all zero points: bytes times kCodeUnit are code - zero point."""
    values, rng = VALUES[number], torch.Generator().manual_seed(0)
    bits, halves = 4 if len(values) == 16 else 8, torch.arange(1 << 16)
    others = torch.randint(0, 1 << 16, (1 << 16,), generator=rng)
    words = torch.cat([halves | others << 16, others | halves << 16])
    codes = words[:, None] >> torch.arange(0, 32, bits) & (1 << bits) - 1
    stored = words
    if number == MXFP4:
        stored = torch.zeros_like(words)
        for mask, by in SPREAD:
            stored |= (words & mask) << by if by > 0 else (words & mask) >> -by
    # Columns 2 t, 2 t + 8, 2 t + 1, 2 t + 9 of either row, or of one in 8 bits.
    order = ([0, 2, 4, 6], [1, 3, 5, 7]) if bits == 4 else ([0, 1, 2, 3],) * 2
    given = stored.to(torch.int64).flatten().to(torch.uint32)
    unit = widening[f"unit_{number}_{is_int8}"]
    unit.restype = ctypes.c_float
    for zero in range(16) if number == UINT4 else (0,):
        zeros = (zero, 15 - zero) if number == UINT4 else (0, 0)
        rows = [torch.empty(len(words), dtype=torch.uint32) for _ in range(2)]
        widening[f"widen_{number}_{is_int8}"](
            ctypes.c_void_p(given.data_ptr()), len(words), *(z * 0x01010101 for z in zeros),
            *(ctypes.c_void_p(row.data_ptr()) for row in rows),
        )  # fmt: skip
        for row, columns, own_zero in zip(rows, order, zeros, strict=True):
            got = row.view(torch.int8 if is_int8 else FP8).view(-1, 4).float() * unit()
            expected = values[codes[:, columns]] - own_zero
            assert torch.equal(got.nan_to_num(9999.0), expected.nan_to_num(9999.0))

"""The grid of the packed experts' kernels: every pair of two dimensions' values in some case, chosen without chance."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from moe_ep.kernels.marlin.types import WEIGHT_TYPES, WeightType

KINDS = [(kind, group) for kind in WEIGHT_TYPES.values() for group in kind.group_sizes]
SIZES = (128, 256, 1024, 1536, 2048, 2880, 7168)
# What one case costs; a matrix of codes passes through memory several times on its way to the reference.
MOST_CODES, MOST_PRODUCTS = 1.2e8, 3e11
_CANDIDATES = 40


class Case(NamedTuple):
    """A number type with its group size, and a shape."""

    kind: tuple[WeightType, int]
    dtype: torch.dtype
    rows: int
    K: int
    N: int
    num_experts: int
    topk: int
    form: str

    def __str__(self) -> str:
        (kind, group), dtype = self.kind, str(self.dtype).removeprefix("torch.")
        shape = f"m{self.rows}-{self.K}x{self.N}-E{self.num_experts}"
        return f"{kind.scalar_type}-g{group}-{dtype}-{shape}-{self.form}-topk{self.topk}"


DIMENSIONS = Case(
    KINDS,  # type: ignore[arg-type]
    (torch.bfloat16, torch.float16),  # type: ignore[arg-type]
    (1, 7, 16, 33, 64, 133, 256, 1000),  # type: ignore[arg-type]
    SIZES,  # type: ignore[arg-type]
    SIZES,  # type: ignore[arg-type]
    (5, 8, 12, 64),  # type: ignore[arg-type]
    (1, 2, 3, 4, 5, 6, 7, 8),  # type: ignore[arg-type]
    ("batched", "reference", "standard"),  # type: ignore[arg-type]
)


def is_possible(case: Case) -> bool:
    """Whether groups divide the columns and the case is not too large."""
    group = case.kind[1]
    codes = 3 * case.num_experts * case.K * case.N
    products = codes * case.rows * (case.topk if case.form == "standard" else 1)
    return (case.K % group == case.N % group == 0) and codes <= MOST_CODES and products <= MOST_PRODUCTS


def case_of(places: Sequence[int]) -> Case:
    """The case whose values stand at these places of their dimensions."""
    return Case(*(values[place] for values, place in zip(DIMENSIONS, places, strict=True)))


def pairs_of(places: Sequence[int]) -> set[tuple[int, int, int, int]]:
    """Every two dimensions with the places of their values."""
    return {(i, j, places[i], places[j]) for i, j in itertools.combinations(range(len(places)), 2)}


def all_pairs() -> list[tuple[int, int, int, int]]:
    """Those of two dimensions that some possible case has: one whose other values are the smallest."""
    found = []
    for i, j in itertools.combinations(range(len(DIMENSIONS)), 2):
        for a, b in itertools.product(range(len(DIMENSIONS[i])), range(len(DIMENSIONS[j]))):
            places = [0] * len(DIMENSIONS)
            places[i], places[j] = a, b
            if is_possible(case_of(places)):
                found.append((i, j, a, b))
    return found


@functools.cache
def grid() -> tuple[tuple[int, ...], ...]:
    """Places of the cases that have every pair, each the best of some random ones."""
    rng, cases = random.Random(0), []
    missing = dict.fromkeys(all_pairs())
    while missing:
        i, j, a, b = next(iter(missing))
        best: tuple[set[tuple[int, int, int, int]], tuple[int, ...]] = (set(), ())
        for _ in range(_CANDIDATES):
            places = [rng.randrange(len(values)) for values in DIMENSIONS]
            places[i], places[j] = a, b
            found = missing.keys() & pairs_of(places)
            if len(found) > len(best[0]) and is_possible(case_of(places)):
                best = (found, tuple(places))
        if best[0]:
            cases.append(best[1])
            for pair in best[0]:
                del missing[pair]
    return tuple(cases)

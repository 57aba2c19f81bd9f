"""Blocks of rows by expert for the products of plain experts, and what is checked of them on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_ep.activation import MoEActivation, gate_limit
from moe_ep.kernels.align import moe_align_block_size
from moe_ep.kernels.grouped_products import (
    Activation,
    Blocks,
    multiply_into_order_reference,
    multiply_into_places_reference,
)
from moe_ep.methods import relative_error

# (tokens, K, N, rows of a block, activation, limit, biases, rows by reference)
CASES = [
    (9, 192, 64, 16, "silu", None, False, False),
    (9, 128, 64, 16, "silu", 0.5, True, True),
    (40, 136, 72, 32, "swigluoai", None, True, False),
    (70, 64, 128, 64, "gelu", None, False, True),
    (5, 40, 24, 16, "gelu_tanh", None, True, False),
    (150, 64, 136, 128, "silu_no_mul", None, False, False),
    (9, 64, 1, 16, "gelu_no_mul", None, True, False),
    (9, 64, 64, 16, "relu2_no_mul", None, False, True),
]
NUM_EXPERTS, TOP_K = 5, 3


def check_products(device: str, into_order: Callable[..., None], into_places: Callable[..., None]) -> None:
    """Both products against the plain form; rows without a place, and places of no expert, stay as they are."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    allowed = 1e-5 if device == "cpu" else 5e-3
    for T, K, N, size, name, limit, has_bias, by_reference in CASES:
        generator = torch.Generator().manual_seed(T + K)

        def draw(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        activation = Activation(MoEActivation(name), gate_limit(name, limit))
        lines = N * (1 + activation.name.is_gated)
        w1, w2 = draw(NUM_EXPERTS, lines, K) / K**0.5, draw(NUM_EXPERTS, K, N) / N**0.5
        b1, b2 = (draw(NUM_EXPERTS, lines), draw(NUM_EXPERTS, K)) if has_bias else (None, None)
        ids = torch.rand(T, NUM_EXPERTS, generator=generator).topk(TOP_K).indices.int()
        ids[0, 1] = ids[T - 1, 2] = -1
        ids[ids == 3] = -1
        places, experts, used = moe_align_block_size(ids.to(device), size, NUM_EXPERTS, pad_sorted_ids=True)
        blocks = Blocks(places, experts, used, size, ids.numel(), places.numel())
        row_ids, rows = None, draw(T, K)
        if by_reference:
            row_ids = torch.randint(0, T, (ids.numel(),), generator=generator).int().to(device)
        found = []
        for first, second in (
            (into_order, into_places),
            (multiply_into_order_reference, multiply_into_places_reference),
        ):
            hidden = torch.full((places.numel(), N), float("nan"), dtype=dtype, device=device)
            output = torch.full((ids.numel(), K), float("nan"), dtype=dtype, device=device)
            first(rows, row_ids, TOP_K, w1, b1, activation, blocks, hidden)
            second(hidden, w2, b2, blocks, output)
            found.append((hidden, output))
        for got, expected in zip(*found, strict=True):
            assert torch.equal(got.isnan(), expected.isnan())
            assert relative_error(got.nan_to_num(), expected.nan_to_num()) < allowed, (T, K, N, name)
        assert torch.equal(found[0][1].isnan().all(1).cpu(), ids.flatten() < 0)


def check_triton(device: str) -> None:
    """The Triton kernels; the CPU needs TRITON_INTERPRET=1."""
    from moe_ep.kernels.triton_grouped_products import triton_multiply_into_order, triton_multiply_into_places

    check_products(device, triton_multiply_into_order, triton_multiply_into_places)

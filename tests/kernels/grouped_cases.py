"""Rows and lists for the kernels of plain experts, and what is checked of them on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_ep.activation import MoEActivation, apply_activation, gate_limit
from moe_ep.kernels.align import moe_align_block_size
from moe_ep.kernels.grouped.products import (
    Activation,
    Blocks,
    multiply_into_order,
    multiply_into_places,
)
from moe_ep.layer.methods import relative_error

# (rows of the source, columns, entries of the list, how many count)
MOVES = [(5, 8, 7, 4), (3, 24, 3, 0), (9, 1024, 16, 16), (4, 7, 2, 1)]
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
    (9, 64, 48, 16, "swiglustep", 0.5, True, False),
    (20, 64, 48, 32, "situ", None, True, False),
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
            (multiply_into_order.plain, multiply_into_places.plain),
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


def check_f16_range(device: str, into_order: Callable[..., None], into_places: Callable[..., None]) -> None:
    """f16 weights and f32 rows between the products: activations of 1e-3 and of 1e7 beside each other in one batch."""
    T, K, N, size = 8, 128, 96, 16
    generator = torch.Generator().manual_seed(5)
    w1 = (torch.randn(2, 2 * N, K, generator=generator) / K**0.5).half().to(device)
    w2 = (torch.randn(2, K, N, generator=generator) / N**0.5).half().to(device)
    rows = torch.randn(T, K, generator=generator) * torch.logspace(-1.5, 3.5, T)[:, None]
    ids = (torch.arange(T)[:, None] % 2).int().to(device)
    places, experts, used = moe_align_block_size(ids, size, 2, pad_sorted_ids=True)
    blocks = Blocks(places, experts, used, size, T, places.numel())
    hidden = torch.zeros(places.numel(), N, device=device)
    output = torch.empty(T, K, device=device)
    into_order(rows.half().to(device), None, 1, w1, None, Activation(MoEActivation.SILU, None), blocks, hidden)
    into_places(hidden, w2, None, blocks, output)
    assert hidden.abs().max() > 1e6
    for token, expert in enumerate(ids[:, 0].tolist()):
        gate, up = (rows[token].half().double() @ w1[expert].cpu().double().T).split(N)
        expected = (torch.nn.functional.silu(gate) * up) @ w2[expert].cpu().double().T
        assert relative_error(output[token].cpu(), expected) < 1e-3, token


def check_moves(device: str, move: Callable[..., None]) -> None:
    """Rows in and out of an order, with the bits of indexing, and nothing written behind the count."""
    for num_rows, columns, length, used in MOVES:
        generator = torch.Generator().manual_seed(length)
        source = torch.randn(num_rows, columns, generator=generator).bfloat16().to(device)
        picked = torch.randint(0, num_rows, (length,), generator=generator)
        count = torch.tensor([used], dtype=torch.int32, device=device)
        # What is behind the count is no row number.
        sources = torch.where(torch.arange(length) < used, picked, 1 << 30).int().to(device)
        target = torch.full((length, columns), float("nan"), dtype=source.dtype, device=device)
        move(source, sources, target, None, count)
        assert torch.equal(target[:used].cpu(), source.cpu()[picked[:used]])
        assert target[used:].isnan().all()
        places = torch.randperm(length, generator=generator).int().to(device)
        back = torch.full_like(target, float("nan"))
        move(target, None, back, places, count)
        assert torch.equal(back[places[:used].long()], target[:used])
        assert back[places[used:].long()].isnan().all()


def check_activations(device: str, activate: Callable[..., None]) -> None:
    """Every activation in f32 and bf16, to the rounding of its exponentials; gates with a limit too; NaN stays NaN."""
    gated = [each for each in MoEActivation if each.is_gated and each is not MoEActivation.SITU]
    for activation, limit in [(activation, None) for activation in MoEActivation] + [(each, 2.5) for each in gated]:
        for dtype, allowed in ((torch.float32, 2e-6), (torch.bfloat16, 8e-3)):
            input = (torch.randn(5, 96, generator=torch.Generator().manual_seed(2)) * 4).to(device, dtype)
            input[1, 3] = input[2, 95] = float("nan")
            output = torch.full((5, 48 if activation.is_gated else 96), float("nan"), dtype=dtype, device=device)
            count = torch.tensor([3], dtype=torch.int32, device=device)
            activate(activation, input, output, count, gate_limit(activation, limit))
            expected = apply_activation(activation, input[:3].float(), clamp_limit=limit)
            torch.testing.assert_close(output[:3].float(), expected, rtol=allowed, atol=allowed, equal_nan=True)
            assert output[3:].isnan().all()


def check_triton(device: str) -> None:
    """The Triton kernels; the CPU needs TRITON_INTERPRET=1."""
    from moe_ep.kernels.grouped.products import triton_multiply_into_order, triton_multiply_into_places
    from moe_ep.kernels.grouped.rows import triton_activate_rows, triton_move_rows

    check_products(device, triton_multiply_into_order, triton_multiply_into_places)
    check_f16_range(device, triton_multiply_into_order, triton_multiply_into_places)
    check_moves(device, triton_move_rows)
    check_activations(device, triton_activate_rows)

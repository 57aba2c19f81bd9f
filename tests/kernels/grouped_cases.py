"""Rows and lists for the kernels around grouped products, and what is checked of them on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_ep.activation import MoEActivation, apply_activation, gate_limit

# (rows of the source, columns, entries of the list, how many count)
MOVES = [(5, 8, 7, 4), (3, 24, 3, 0), (9, 1024, 16, 16), (4, 7, 2, 1)]


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
    gated = [activation for activation in MoEActivation if activation.is_gated]
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
    from moe_ep.kernels.triton_grouped_rows import triton_activate_rows, triton_move_rows

    check_moves(device, triton_move_rows)
    check_activations(device, triton_activate_rows)

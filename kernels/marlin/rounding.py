"""What rows become that are rounded to e4m3, in plain torch: what the experts' plain form multiplies, and tests expect.

A code has four bits of exponent and three of mantissa, so a result of the experts is off by some 4 % of its size.
value = code * scale with scale = max |x| / 448, at least 2^-60, of a whole row of the input, and of 128 columns of the
activation's output.
"""

from __future__ import annotations

import torch

TOLERANCE = 0.08  # mean |d| / mean |ref| of results, beside those of rows that are not rounded
GROUP_COLUMNS = 128  # kGroupColumns of cuda/e4m3_layout.cuh
_LEAST_SCALE = 2.0**-60


def round_rows(rows: torch.Tensor) -> torch.Tensor:
    """`[n, K]` as its rows are in e4m3, one scale each: f32."""
    rows = rows.float()
    largest = rows.abs().amax(dim=1, keepdim=True)
    scales = (largest / torch.full_like(largest, torch.finfo(torch.float8_e4m3fn).max)).clamp(min=_LEAST_SCALE)
    return (rows / scales).to(torch.float8_e4m3fn).float() * scales


def round_hidden(hidden: torch.Tensor) -> torch.Tensor:
    """The activation's output `[n, N]` as it is in e4m3, with a scale for every 128 columns of a row: f32."""
    return round_rows(hidden.reshape(-1, GROUP_COLUMNS)).view(hidden.shape)

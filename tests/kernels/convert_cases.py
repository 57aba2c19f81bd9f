"""Rows of experts converted to another dtype; shared by CPU and GPU tests."""

from __future__ import annotations

from collections.abc import Callable

import torch


def check_convert(device: str, *forms: Callable[..., None]) -> None:
    """Rows below the counts alone are converted, and experts flagged that have one with inf or NaN among them."""
    dtypes = (torch.float16, torch.float32) if device == "cpu" else (torch.float16, torch.float32, torch.bfloat16)
    for K, form in ((k, form) for k in (1, 40, 1000) for form in forms):
        for dtype in dtypes[1:]:
            source = torch.randn(4, 5, K, generator=torch.Generator().manual_seed(K)).to(device, torch.float16)
            counts = torch.tensor([5, 0, 3, 2], dtype=torch.int32, device=device)
            source[0, 4, -1], source[1, 0, 0], source[2, 3, 0], source[3, 1, K // 2] = map(
                float, ("inf", "nan", "inf", "nan")
            )
            target = torch.full(source.shape, 7.0, dtype=dtype, device=device)
            flags = torch.zeros(4, dtype=torch.int32, device=device)
            form(source, counts, target, flags)
            assert flags.tolist() == [1, 0, 0, 1]
            for expert, count in enumerate(counts.tolist()):
                expected = source[expert, :count].to(dtype)
                torch.testing.assert_close(target[expert, :count], expected, rtol=0, atol=0, equal_nan=True)
                assert (target[expert, count:] == 7).all()
            form(source, counts, None, flags.zero_())
            assert flags.tolist() == [1, 0, 0, 1]
            form(source, counts * 0, target.fill_(1.0), None)
            assert (target == 1).all()

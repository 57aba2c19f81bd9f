"""Products and attention of batch-invariant models, shared by tests on GPUs and in Triton's interpreter."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

# (in, out, whether there is a bias)
PRODUCTS = [(32, 24, False), (70, 65, True), (128, 64, True)]
# (lengths of the sequences, heads, key heads, head_dim, value_dim, window, whether there are sinks)
SEQUENCES = [
    ((5, 70, 1), 4, 2, 16, 16, None, False),
    ((3, 20), 2, 2, 24, 16, None, True),
    ((90,), 2, 1, 16, 16, 8, True),
]


def check_linear(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Every row has the bits that it has alone, and about torch's value."""
    from moe_ep.kernels.invariant import triton_linear

    generator = torch.Generator().manual_seed(1)
    for dtype in dtypes:
        for size, num_columns, has_bias in PRODUCTS:
            shapes = (67, size), (num_columns, size), (num_columns,)
            rows, weight, bias = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
            given = bias if has_bias else None
            together = triton_linear(rows, weight, given)
            for first, end in ((0, 1), (66, 67), (3, 20)):
                assert torch.equal(triton_linear(rows[first:end], weight, given), together[first:end]), (dtype, size)
            expected = linear(rows.float(), weight.float(), None if given is None else given.float())
            torch.testing.assert_close(together.float(), expected, rtol=2e-2, atol=2e-2)


def check_attention(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """A sequence that is read at once, with others, and decoded token by token has the same bits for every query."""
    from moe_ep.generation.slot_cache import attention_in_chunks
    from moe_ep.kernels.invariant import triton_slot_attention

    generator = torch.Generator().manual_seed(2)
    for dtype in dtypes:
        for lengths, heads, key_heads, head_dim, value_dim, window, has_sinks in SEQUENCES:
            total = sum(lengths)
            shapes = (total, heads, head_dim), (total, key_heads, head_dim), (total, key_heads, value_dim), (heads,)
            drawn = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
            query, key, value, sinks = drawn
            settings = (head_dim**-0.5, window, sinks if has_sinks else None)
            starts = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
            table = torch.tensor([starts, starts, [*lengths, 0]], dtype=torch.int32, device=device)
            together = triton_slot_attention(query, key, value, table, *settings)
            plain = attention_in_chunks(query, key, value, table, *settings)
            torch.testing.assert_close(together.float(), plain.float(), rtol=2e-2, atol=2e-2)
            for number, length in enumerate(lengths):
                held = slice(starts[number], starts[number + 1])
                for at in {0, length // 2, length - 1}:
                    seen = torch.tensor([[0, 1], [0, 1], [at + 1, 0]], dtype=torch.int32, device=device)
                    place = starts[number] + at
                    one = triton_slot_attention(query[place : place + 1], key[held], value[held], seen, *settings)
                    assert torch.equal(one[0], together[place]), (dtype, lengths, at)

"""Products and attention on GPUs whose rows have the same bits however many rows there are.

The tile is fixed, and K or the keys are added up in one order by one program: nothing is split by the number of rows.
The plain forms, for CPUs, are in `moe_ep.modular_kernel.invariant_ops` and `moe_ep.generation.slot_cache`; their sums
have another order, so the two agree within rounding and not bit for bit.
"""

from __future__ import annotations

import torch

from moe_ep.kernels.triton_kernel import TritonKernel, cdiv, next_power_of_2, tl

# The tile of a product: rows and columns of the output, input columns of a step, and the fewer ones for f32.
_ROWS, _COLUMNS, _INNER, _INNER_F32 = 64, 64, 64, 32
# Queries of a head that one program computes, and keys in a step.
_QUERIES, _KEYS = 16, 64


@TritonKernel
def _linear_kernel(
    rows_ptr, weights_ptr, bias_ptr, output_ptr,
    num_rows, num_inner, num_columns, row_stride,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):  # fmt: skip
    """Program (i, j) computes BLOCK_ROWS rows by BLOCK_COLUMNS columns of `[num_rows, num_columns]`.

    Before: rows `[num_rows, num_inner]`, weights `[num_columns, num_inner]`. EVEN where BLOCK_INNER divides num_inner.

    Example: num_rows 1: program (0, j) computes 64 rows, 63 of them of zeros, and writes one.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inner = tl.arange(0, BLOCK_INNER)
    is_row = row < num_rows
    row_ptrs = rows_ptr + row.to(tl.int64)[:, None] * row_stride + inner[None, :]
    # Columns behind the last one are others again, and are not written.
    weight_ptrs = weights_ptr + (column % num_columns).to(tl.int64)[:, None] * num_inner + inner[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, num_inner, BLOCK_INNER):
        if EVEN:
            of_rows = tl.load(row_ptrs, mask=is_row[:, None], other=0.0)
            of_weights = tl.load(weight_ptrs)
        else:
            is_inner = start + inner[None, :] < num_inner
            of_rows = tl.load(row_ptrs, mask=is_row[:, None] & is_inner, other=0.0)
            of_weights = tl.load(weight_ptrs, mask=is_inner, other=0.0)
        total = tl.dot(of_rows, tl.trans(of_weights), total, input_precision="ieee")
        row_ptrs += BLOCK_INNER
        weight_ptrs += BLOCK_INNER
    if HAS_BIAS:
        total += tl.load(bias_ptr + column % num_columns)[None, :].to(tl.float32)
    output_ptrs = output_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    is_output = is_row[:, None] & (column < num_columns)[None, :]
    tl.store(output_ptrs, total.to(output_ptr.dtype.element_ty), mask=is_output)


def triton_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`[n, out]` of rows `[n, in]`, weights `[out, in]` and a bias `[out]`, all of one dtype: f32, f16 or bf16."""
    rows, weight = rows.contiguous(), weight.contiguous()
    (num_rows, num_inner), num_columns = rows.shape, weight.size(0)
    inner = _INNER_F32 if rows.dtype is torch.float32 else _INNER
    output = rows.new_empty(num_rows, num_columns)
    _linear_kernel[(cdiv(num_rows, _ROWS), cdiv(num_columns, _COLUMNS))](
        rows, weight, None if bias is None else bias.contiguous(), output,
        num_rows, num_inner, num_columns, rows.stride(0),
        HAS_BIAS=bias is not None, EVEN=num_inner % inner == 0, BLOCK_ROWS=_ROWS, BLOCK_COLUMNS=_COLUMNS,
        BLOCK_INNER=inner,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return output


@TritonKernel
def _attention_kernel(
    query_ptr, key_ptr, value_ptr, table_ptr, sinks_ptr, output_ptr,
    scale,
    table_stride, query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride,
    output_stride,
    GROUPS: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Program (s, b, h) computes queries b * BLOCK_QUERIES ... of sequence s for head h, its keys in order.

    Before: query `[num_queries, heads, HEAD_DIM]`, key and value `[num_keys, heads / GROUPS, ...]`, table int32
    `[3, num_sequences + 1]`: first query, first key and number of keys of each sequence. After: output `[num_queries,
    heads, VALUE_DIM]`. WINDOW: keys that a query sees, 0 for all.

    Blocks of keys begin at multiples of BLOCK_KEYS of the sequence, whatever the queries. A block of which a query sees
    nothing changes none of its sums: its largest score stays, it is scaled by 1, and zeros are added.

    Example: a sequence of 3 queries and 70 keys: program (s, 0, h) takes keys 0 to 63, then 64 to 69.
    """
    sequence, head = tl.program_id(0), tl.program_id(2)
    first_query = tl.load(table_ptr + sequence)
    num_queries = tl.load(table_ptr + sequence + 1) - first_query
    first = tl.program_id(1) * BLOCK_QUERIES
    if first < num_queries:
        first_key = tl.load(table_ptr + table_stride + sequence).to(tl.int64)
        length = tl.load(table_ptr + 2 * table_stride + sequence)
        row = first + tl.arange(0, BLOCK_QUERIES)
        is_row = row < num_queries
        position = length - num_queries + row
        dim, value_dim = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
        place = (first_query + row).to(tl.int64)
        query = tl.load(
            query_ptr + place[:, None] * query_stride + head * query_head_stride + dim[None, :],
            mask=is_row[:, None] & (dim < HEAD_DIM)[None, :], other=0.0,
        )  # fmt: skip
        keys_ptr = key_ptr + first_key * key_stride + head // GROUPS * key_head_stride
        values_ptr = value_ptr + first_key * value_stride + head // GROUPS * value_head_stride
        largest = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_QUERIES], tl.float32)
        if HAS_SINKS:
            largest = tl.zeros([BLOCK_QUERIES], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32)
            total += 1.0
        output = tl.zeros([BLOCK_QUERIES, BLOCK_VALUE], tl.float32)
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(length - num_queries + first - WINDOW + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
        end = tl.minimum(length, length - num_queries + first + BLOCK_QUERIES)
        for start in range(begin, end, BLOCK_KEYS):
            column = start + tl.arange(0, BLOCK_KEYS)
            is_key = column < length
            key = tl.load(
                keys_ptr + column.to(tl.int64)[:, None] * key_stride + dim[None, :],
                mask=is_key[:, None] & (dim < HEAD_DIM)[None, :], other=0.0,
            )  # fmt: skip
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            seen = (column[None, :] <= position[:, None]) & is_key[None, :]
            if WINDOW > 0:
                seen &= column[None, :] > position[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
            new = tl.maximum(largest, tl.max(scores, axis=1))
            safe = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp(scores - safe[:, None])
            shrink = tl.exp(largest - safe)
            total = total * shrink + tl.sum(weights, axis=1)
            value = tl.load(
                values_ptr + column.to(tl.int64)[:, None] * value_stride + value_dim[None, :],
                mask=is_key[:, None] & (value_dim < VALUE_DIM)[None, :], other=0.0,
            )  # fmt: skip
            output = tl.dot(weights.to(value.dtype), value, output * shrink[:, None], input_precision="ieee")
            largest = new
        output = output / total[:, None]
        tl.store(
            output_ptr + place[:, None] * output_stride + head * VALUE_DIM + value_dim[None, :],
            output.to(output_ptr.dtype.element_ty),
            mask=is_row[:, None] & (value_dim < VALUE_DIM)[None, :],
        )


def triton_slot_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Arguments as in `moe_ep.generation.slot_cache`; no host synchronisation."""
    query, key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value))
    num_queries, num_heads, head_dim = query.shape
    num_sequences, value_dim = table.size(1) - 1, value.size(2)
    output = query.new_empty(num_queries, num_heads, value_dim)
    # Every sequence has a query, so none has more than this.
    blocks = cdiv(num_queries - num_sequences + 1, _QUERIES)
    table = table.contiguous()
    _attention_kernel[(num_sequences, blocks, num_heads)](
        query, key, value, table, None if sinks is None else sinks.contiguous(), output,
        scale,
        table.stride(0), *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], output.stride(0),
        GROUPS=num_heads // key.size(1), WINDOW=window or 0, HAS_SINKS=sinks is not None, HEAD_DIM=head_dim,
        VALUE_DIM=value_dim, BLOCK_DIM=next_power_of_2(max(head_dim, 16)),
        BLOCK_VALUE=next_power_of_2(max(value_dim, 16)), BLOCK_QUERIES=_QUERIES, BLOCK_KEYS=_KEYS,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return output

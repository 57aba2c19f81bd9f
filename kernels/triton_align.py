"""Index lists of batched rows as a Triton kernel, called through `moe_ep.kernels.align`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_ep.kernels.triton_handover import comes_early, take_over
from moe_ep.kernels.triton_kernel import TritonKernel, cdiv, next_power_of_2

_BLOCK = 128
_NUM_WARPS = 4


@triton.jit
def _fill_rest(list_ptr, used, length, value, program, num_programs, BLOCK: tl.constexpr):
    """Program p writes `value` into every num_programs-th block of list[used:length], from block p on."""
    for start in range(used + program * BLOCK, length, num_programs * BLOCK):
        position = start + tl.arange(0, BLOCK)
        tl.store(list_ptr + position, value, mask=position < length)


@TritonKernel
@triton.jit
def _batched_kernel(
    counts_ptr,
    sorted_ptr,
    experts_ptr,
    used_ptr,
    num_experts,
    max_rows,
    length,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program e writes the list of expert e of batched rows, and a strip of the unused rest.

    Before: counts int `[El]`. After: sorted int32 `[length]`, experts int32 `[num_blocks]`, used int32 `[1]`.

    Example: counts [1, 3], max_rows 3, BLOCK_SIZE 2: sorted [0, 6, 3, 4, 5, 6, 6, 6], experts [0, 1, 1, -1], used 6.
    """
    take_over(EARLY)
    program = tl.program_id(0)
    expert = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + expert, mask=expert < num_experts, other=0).to(tl.int32)
    padded = (counts + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    used = tl.sum(padded)
    if program == 0:
        tl.store(used_ptr, used)
    first = tl.sum(tl.where(expert < program, padded, 0))
    count = tl.sum(tl.where(expert == program, counts, 0))
    list_length = tl.sum(tl.where(expert == program, padded, 0))
    sentinel = num_experts * max_rows
    for start in range(0, list_length, BLOCK):
        row = start + tl.arange(0, BLOCK)
        value = tl.where(row < count, program * max_rows + row, sentinel)
        tl.store(sorted_ptr + first + row, value, mask=row < list_length)
    for start in range(0, list_length // BLOCK_SIZE, BLOCK):
        block = start + tl.arange(0, BLOCK)
        tl.store(experts_ptr + first // BLOCK_SIZE + block, program, mask=block < list_length // BLOCK_SIZE)
    _fill_rest(sorted_ptr, used, length, sentinel, program, num_experts, BLOCK)
    _fill_rest(experts_ptr, used // BLOCK_SIZE, num_blocks, -1, program, num_experts, BLOCK)


def triton_batched_align(
    max_rows: int, block_size: int, expert_num_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The lists of `batched_moe_align_block_size` in one launch; arguments not checked."""
    num_experts = expert_num_tokens.numel()
    num_blocks = num_experts * cdiv(max_rows, block_size)
    sorted_token_ids = expert_num_tokens.new_empty(num_blocks * block_size, dtype=torch.int32)
    expert_ids = expert_num_tokens.new_empty(num_blocks, dtype=torch.int32)
    used = expert_num_tokens.new_empty(1, dtype=torch.int32)
    early = comes_early(expert_num_tokens.device)
    _batched_kernel[(num_experts,)](
        expert_num_tokens.contiguous(),
        sorted_token_ids,
        expert_ids,
        used,
        num_experts,
        max_rows,
        sorted_token_ids.numel(),
        num_blocks,
        BLOCK_SIZE=block_size,
        BINS=next_power_of_2(num_experts),
        BLOCK=_BLOCK,
        EARLY=early,
        launch_pdl=early,
        num_warps=_NUM_WARPS,
    )
    return sorted_token_ids, expert_ids, used

"""The weighted sum over a token's slots: expert outputs `[T, topk, K]` and router weights to `[T, K]`."""

from __future__ import annotations

import functools

import torch

from moe_ep.arguments import check_expert_map, check_integers, check_same_device, check_tensors
from moe_ep.kernels.triton_kernel import TritonKernel, comes_early, take_over, tl
from moe_ep.registry import operator

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def moe_fused_mul_sum(
    inputs: torch.Tensor,
    topk_weights: torch.Tensor,
    outputs: torch.Tensor | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """outputs[t] = sum over slots j of topk_weights[t, j] * inputs[t, j].

    The sum is in f32 in the order of j, so the same input gives the same bits. A slot counts if its id is at least 0
    and, with an expert_map, local; other slots may contain anything, even NaN. On CUDA tensors this is one Triton
    kernel, which reads the slots that count once and writes the result once, with the same bits.

    Example: weights [[.5, 2]], inputs [[[2, 4], [1, nan]]], topk_ids [[3, -1]]: [[1, 2]].

    Args:
        inputs: `[T, topk, K]`, f32, f16 or bf16.
        topk_weights: `[T, topk]`, any real dtype, converted to f32.
        outputs: `[T, K]`, f32, f16 or bf16, written in place; None creates one of the inputs' dtype.
        topk_ids: integer `[T, topk]`, -1 for no expert; None means that every slot counts.
        expert_map: integer `[E]`, global -> local, -1 if not local; ids are below E; on a GPU, where that
            is not checked, others do not count.

    Returns:
        `outputs`, rounded once from f32.

    Raises:
        ValueError: shapes or devices that do not fit together, another dtype, or a map without ids.
    """
    _check(inputs, topk_weights, outputs, topk_ids, expert_map)
    if outputs is None:
        outputs = inputs.new_empty(inputs.size(0), inputs.size(2))
    return mul_sum(inputs, topk_weights, outputs, topk_ids, expert_map)


@operator("outputs")
def mul_sum(
    inputs: torch.Tensor,
    topk_weights: torch.Tensor,
    outputs: torch.Tensor,
    topk_ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:
    """The sum, slot by slot; arguments as above, not checked."""
    total = torch.zeros(outputs.shape, dtype=torch.float32, device=inputs.device)
    counts = _counting_slots(topk_ids, expert_map)
    for slot in range(inputs.size(1)):
        row = inputs[:, slot].float() * topk_weights[:, slot, None].float()
        total += row if counts is None else torch.where(counts[:, slot, None], row, 0.0)
    return outputs.copy_(total)


def _counting_slots(topk_ids: torch.Tensor | None, expert_map: torch.Tensor | None) -> torch.Tensor | None:
    """Which slots count, bool `[T, topk]`; None if all do."""
    if topk_ids is None:
        return None
    counts = topk_ids >= 0
    if expert_map is not None:
        counts &= topk_ids < expert_map.numel()
        counts &= expert_map[torch.where(counts, topk_ids, 0).long()] >= 0
    return counts


def _check(
    inputs: torch.Tensor,
    topk_weights: torch.Tensor,
    outputs: torch.Tensor | None,
    topk_ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
) -> None:
    optional = {"outputs": outputs, "topk_ids": topk_ids}
    given = {"topk_weights": topk_weights, **{name: t for name, t in optional.items() if t is not None}}
    check_tensors(inputs=inputs, **given)
    if inputs.dim() != 3:
        raise ValueError(f"inputs has shape {tuple(inputs.shape)}; it must be (T, topk, K)")
    for name, tensor in (("inputs", inputs), ("outputs", outputs)):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be one of {', '.join(map(str, DTYPES))}")
    num_tokens, topk, hidden_size = inputs.shape
    for name, tensor in given.items():
        expected = (num_tokens, hidden_size if name == "outputs" else topk)
        if tensor.shape != expected:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; with inputs {tuple(inputs.shape)} it must be {expected}"
            )
    if topk_weights.is_complex() or topk_weights.dtype is torch.bool:
        raise ValueError(f"topk_weights is {topk_weights.dtype}; it must be of a real dtype")
    check_integers(topk_ids=topk_ids)
    check_same_device("inputs", inputs.device, **given)
    if expert_map is None:
        return
    check_expert_map(expert_map)
    check_same_device("inputs", inputs.device, expert_map=expert_map)
    if topk_ids is None:
        raise ValueError("expert_map is given without topk_ids; pass the ids it is to be applied to")
    if not topk_ids.is_cuda and topk_ids.numel() and int(topk_ids.max()) >= expert_map.numel():
        raise ValueError(
            f"topk_ids goes up to {int(topk_ids.max())} and expert_map has {expert_map.numel()} experts; ids must be "
            f"below that"
        )


# A thread loads 16 bytes at a time. Below this many programs the blocks are made smaller, to occupy a large GPU twice.
_VECTOR_BYTES = 16
_WARP = 32
ENOUGH_PROGRAMS = 264
_MOST_INT32 = (1 << 31) - 1


@functools.lru_cache(maxsize=1024)
def choose_blocks(num_tokens: int, hidden_size: int, element_size: int) -> tuple[int, int]:
    """Chooses (columns per program, warps) for `[T, topk, K]` inputs.

    A warp covers 32 vectors of 16 bytes. A program has four warps if there is enough work, fewer if a small batch would
    leave most of the GPU idle, and never more than K needs.

    Example: bf16, K=7168: T=4096 gives (1024, 4), T=1 gives (256, 1).
    """
    per_warp = _WARP * _VECTOR_BYTES // element_size
    num_warps = 4
    while num_warps > 1 and (
        per_warp * num_warps // 2 >= hidden_size
        or num_tokens * -(-hidden_size // (per_warp * num_warps)) < ENOUGH_PROGRAMS
    ):
        num_warps //= 2
    return per_warp * num_warps, num_warps


@TritonKernel
def mul_sum_kernel(
    inputs_ptr, weights_ptr, ids_ptr, map_ptr, outputs_ptr,
    hidden_size, map_size, input_token_stride, input_slot_stride, input_column_stride, weight_token_stride,
    weight_slot_stride, id_token_stride, id_slot_stride, output_token_stride, output_column_stride,
    TOPK: tl.constexpr, HAS_IDS: tl.constexpr, HAS_MAP: tl.constexpr, FAR: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Sums the weighted slots of one token in one pass over memory.

    Before: inputs `[T, TOPK, K]`, weights and ids `[T, TOPK]`, map `[E]`. After: outputs `[T, K]`.
    Program (t, b) computes columns b * BLOCK ... of token t: it adds the slots that count, in slot order, in f32
    registers. A slot that does not count is masked out of the load, so its memory is never read. FAR where offsets
    of slots need 64 bits.

    Example: t=0, TOPK=2, ids [3, -1], weights [.5, 2], inputs[0] = [[2, 4], [?, ?]]: .5 * [2, 4] = [1, 2].
    """
    take_over(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < hidden_size
    place = column.to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for slot in tl.static_range(TOPK):
        weight = tl.load(weights_ptr + token * weight_token_stride + slot * weight_slot_stride).to(tl.float32)
        slots = tl.full([], slot, tl.int64) if FAR else slot
        source = inputs_ptr + token * input_token_stride + slots * input_slot_stride + place * input_column_stride
        if HAS_IDS:
            expert = tl.load(ids_ptr + token * id_token_stride + slot * id_slot_stride)
            counts = expert >= 0
            if HAS_MAP:
                counts &= expert < map_size
                counts &= tl.load(map_ptr + expert, mask=counts, other=-1) >= 0
            num_columns = tl.where(counts, hidden_size, 0)
            row = tl.load(source, mask=column < num_columns, other=0.0).to(tl.float32)
            total += tl.where(counts, row * weight, 0.0)
        else:
            row = tl.load(source, mask=in_row, other=0.0).to(tl.float32)
            total += row * weight
    target = outputs_ptr + token * output_token_stride + place * output_column_stride
    tl.store(target, total.to(outputs_ptr.dtype.element_ty), mask=in_row)


@mul_sum.on_gpu
def triton_mul_sum(inputs, topk_weights, outputs, topk_ids, expert_map):
    """Products and sums are rounded one by one, not fused, so the bits are those of the plain form."""
    num_tokens, topk, hidden_size = inputs.shape
    block, num_warps = choose_blocks(num_tokens, hidden_size, inputs.element_size())
    early = comes_early(inputs.device)
    mul_sum_kernel[(num_tokens, -(-hidden_size // block))](
        inputs, topk_weights, topk_ids, None if expert_map is None else expert_map.contiguous(), outputs,
        hidden_size, 0 if expert_map is None else expert_map.numel(), *inputs.stride(), *topk_weights.stride(),
        *(topk_ids.stride() if topk_ids is not None else (0, 0)), *outputs.stride(),
        TOPK=topk, HAS_IDS=topk_ids is not None, HAS_MAP=expert_map is not None,
        FAR=topk * inputs.stride(1) > _MOST_INT32, BLOCK=block, EARLY=early,
        launch_pdl=early, num_warps=num_warps, enable_fp_fusion=False,
    )  # fmt: skip
    return outputs

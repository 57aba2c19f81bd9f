"""Triton forms against plain ones, on inputs shared by the interpreter (CPU) and GPUs. Everything is bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from moe_ep.dispatch import batched_all_to_all, payload
from moe_ep.dispatch.batched_all_to_all import MessageLayout
from moe_ep.expert_map import determine_expert_map, expert_owner_table
from moe_ep.kernels import dispatch_messages, dispatch_rows, quantize
from moe_ep.kernels.dispatch_messages import triton_open_messages, triton_pack_messages

# The interpreter truncates where it should round to bf16; only kernels that copy are run in bf16 there.
ROUNDING_DTYPES = {"cpu": (torch.float32, torch.float16), "cuda": (torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True, kw_only=True)
class Case:
    num_ranks: int
    num_experts: int
    topk: int
    num_tokens: int
    hidden_size: int
    capacity: int
    placement: str = "linear"


INTERPRETER_CASES = [
    Case(num_ranks=3, num_experts=7, topk=3, num_tokens=5, hidden_size=40, capacity=6, placement="round_robin"),
    Case(num_ranks=2, num_experts=40, topk=1, num_tokens=3, hidden_size=130, capacity=3),
    Case(num_ranks=4, num_experts=3, topk=2, num_tokens=0, hidden_size=33, capacity=2),
]
GPU_CASES = [
    *INTERPRETER_CASES,
    Case(num_ranks=8, num_experts=256, topk=8, num_tokens=128, hidden_size=7168, capacity=128),
    Case(num_ranks=8, num_experts=256, topk=8, num_tokens=1, hidden_size=7168, capacity=128, placement="round_robin"),
    Case(num_ranks=4, num_experts=130, topk=32, num_tokens=77, hidden_size=2880, capacity=200),
    Case(num_ranks=16, num_experts=64, topk=6, num_tokens=1500, hidden_size=1001, capacity=1500),
]


def inputs(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids int32 with some -1 and repeats, weights f32, owners)."""
    generator = torch.Generator().manual_seed(case.num_tokens + case.topk)
    shape = (case.num_tokens, case.topk)
    ids = torch.randint(-1, case.num_experts, shape, generator=generator, dtype=torch.int32)
    if case.num_tokens > 2:
        ids[1] = -1
        ids[2] = case.num_experts - 1
    weights = torch.rand(shape, generator=generator)
    owners = expert_owner_table(case.num_ranks, case.num_experts, case.placement)
    return ids.to(device), weights.to(device), owners.to(device)


def draw_rows(num_rows: int, hidden_size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, hidden_size, generator=generator).to(device, dtype)


def check_quantize(case: Case, device: str) -> None:
    for dtype, codes in itertools.product(ROUNDING_DTYPES[device], (torch.float8_e4m3fn, torch.int8)):
        rows = draw_rows(case.num_tokens, case.hidden_size, dtype, device)
        rows *= torch.logspace(-4, 3, case.hidden_size, device=device).to(dtype)
        if case.num_tokens > 2:
            rows[0, 0], rows[1], rows[2, -1] = float("nan"), 0.0, float("-inf")
            rows[1, ::2] = -0.0
            rows[-1] *= 1e-35  # scales of few bits and, in f32, subnormal columns
        if not case.num_tokens:
            continue
        check_whole_rows(rows, codes)
        empty = torch.zeros(
            (case.num_tokens, quantize.quantized_row_bytes(case.hidden_size)), dtype=torch.uint8, device=device
        )
        expected = quantize.quantize_rows_reference(rows, empty.clone(), codes)
        found = quantize.triton_quantize_rows(rows, empty.clone(), codes)
        assert torch.equal(found, expected)
        back = quantize.dequantize_rows_reference(expected, torch.empty_like(rows), codes)
        # Also from places where no f32 can be read, and one row alone, which torch calls contiguous.
        shifted = torch.cat([expected[:, :1], expected], dim=1)[:, 1:]
        for quantized in (expected, shifted, shifted[:1], expected.T.contiguous().T):
            for dequantize in (quantize.dequantize_rows_reference, quantize.triton_dequantize_rows):
                found_back = dequantize(quantized, torch.empty_like(rows[: len(quantized)]), codes)
                assert torch.equal(bits(found_back), bits(back[: len(quantized)]))


def check_whole_rows(rows: torch.Tensor, codes: torch.dtype) -> None:
    """One scale a row, in rows that are longer than they must be."""
    num_tokens, hidden_size = rows.shape
    empty = rows.new_zeros((num_tokens, quantize.quantized_row_bytes(hidden_size, True) + 32), dtype=torch.uint8)
    expected = quantize.quantize_rows_reference(rows, empty.clone(), codes, True)
    found = quantize.triton_quantize_rows(rows, empty.clone(), codes, True)
    assert torch.equal(found, expected)
    parts = quantize.split_rows(expected, hidden_size, codes, True)
    assert parts[1].shape == (num_tokens, 1)
    assert torch.equal(quantize.join_rows(*parts), expected[:, :-32])
    back = quantize.dequantize_codes_reference(*parts, torch.empty_like(rows))
    assert torch.equal(bits(quantize.triton_dequantize_codes(*parts, torch.empty_like(rows))), bits(back))


def bits(values: torch.Tensor) -> torch.Tensor:
    """Comparable bits: NaN is one value, zeros keep their sign."""
    canonical = torch.where(values.isnan(), torch.full_like(values, float("nan")), values)
    return canonical.view(torch.int16 if values.element_size() == 2 else torch.int32)


def check_plan(case: Case, device: str) -> None:
    ids, _, owners = inputs(case, device)
    if not case.num_tokens:
        return
    for capacity in (None, case.capacity):
        expected = payload.send_plan_reference(ids, owners, case.num_ranks, capacity)
        slots, counts = dispatch_messages.triton_send_plan(ids, owners, case.num_ranks, capacity)
        assert torch.equal(slots, expected.slots)
        assert torch.equal(counts, expected.counts)


def check_pack_rows(case: Case, device: str) -> None:
    ids, weights, owners = inputs(case, device)
    if not case.num_tokens:
        return
    slots, counts = payload.send_plan_reference(ids, owners, case.num_ranks)
    num_rows = int(counts.sum())
    odd = case.hidden_size // 2 * 2 - 1
    for dtype, num_columns in (
        (torch.float32, case.hidden_size),
        (torch.bfloat16, case.hidden_size),
        (torch.uint8, case.hidden_size),
        (torch.float8_e4m3fn, odd),
    ):
        rows = (draw_rows(case.num_tokens, num_columns, torch.float32, device) * 10).to(dtype)
        made = []
        for pack in (dispatch_rows.pack_rows.plain, dispatch_rows.triton_pack_rows):
            send_rows = torch.zeros((num_rows, num_columns), dtype=torch.float32, device=device).to(dtype)
            send_meta = ids.new_full((num_rows, 2 * case.topk), 7)
            pack(rows, ids, weights, owners, slots, send_rows, send_meta)
            made.append((send_rows, send_meta))
        assert torch.equal(made[0][0].view(torch.uint8), made[1][0].view(torch.uint8))
        assert torch.equal(made[0][1], made[1][1])


def check_weighted_and_sum(case: Case, device: str) -> None:
    ids, weights, owners = inputs(case, device)
    if not case.num_tokens:
        return
    slots = payload.send_plan_reference(ids, owners, case.num_ranks, case.capacity).slots
    for dtype in ROUNDING_DTYPES[device]:
        received = draw_rows(case.num_ranks * case.capacity, case.hidden_size, dtype, device)
        named = torch.zeros(len(received), dtype=torch.bool, device=device)
        named[slots[slots >= 0].long()] = True
        received[~named] = float("nan")
        made = []
        for add in (dispatch_rows.sum_rows.plain, dispatch_rows.triton_sum_rows):
            output = received.new_full((case.num_tokens, case.hidden_size), float("nan"))
            add(received, slots, output)
            made.append(output)
        assert not made[0].isnan().any()
        assert torch.equal(made[0], made[1])

        source = draw_rows(case.num_experts, case.hidden_size, dtype, device)
        for factors in (weights, None):
            targets = [received.new_zeros((case.num_tokens, case.hidden_size)) for _ in range(2)]
            dispatch_rows.weighted_rows.plain(source, ids, factors, targets[0])
            dispatch_rows.triton_weighted_rows(source, ids, factors, targets[1])
            assert torch.equal(targets[0], targets[1])


def check_messages(case: Case, device: str) -> None:
    ids, weights, owners = inputs(case, device)
    dtypes: list[tuple[torch.dtype, torch.dtype | None]] = [(dtype, None) for dtype in (torch.float32, torch.bfloat16)]
    dtypes += itertools.product(ROUNDING_DTYPES[device][1:], (torch.float8_e4m3fn, torch.int8))
    for dtype, code_dtype in dtypes:
        rows = draw_rows(case.num_tokens, case.hidden_size, dtype, device)
        if code_dtype is not None:
            rows = quantize.quantize_rows(rows, code_dtype)
        layout = MessageLayout(case.num_experts, case.capacity, case.topk, rows.size(1) * rows.element_size())
        expected, found = (layout.empty(case.num_ranks, ids.device).zero_() for _ in range(2))
        slots = batched_all_to_all.pack_messages.plain(rows, ids, weights, owners, layout, expected)
        views = layout.rows(found), layout.meta(found), layout.header(found)
        assert torch.equal(triton_pack_messages(rows, ids, weights, owners, *views), slots)
        assert torch.equal(found, expected)
        for receiver in range(case.num_ranks):
            _check_open(case, layout, expected, receiver, dtype, code_dtype)


def _check_open(
    case: Case,
    layout: MessageLayout,
    sent: torch.Tensor,
    receiver: int,
    dtype: torch.dtype,
    code_dtype: torch.dtype | None,
) -> None:
    """As if every rank had sent what this one did, each a token less than the one before."""
    received = sent[receiver].repeat(case.num_ranks, 1)
    for source in range(1, min(case.num_ranks, case.num_tokens)):
        gone = layout.meta(received)[source, source - 1 : source]
        chose = gone[0, 0][gone[0, 0] >= 0].unique().long()
        later = layout.meta(received)[source, source:]
        later[:, 1] -= (later[:, 0][:, :, None] == chose).any(dim=2).int()
        gone[0, 0] = -1
        layout.header(received)[source, chose] -= 1
    num_local, expert_map, _ = determine_expert_map(case.num_ranks, receiver, case.num_experts, case.placement)
    every = torch.arange(case.num_experts, dtype=torch.int32)
    expert_map = (every if expert_map is None else expert_map).to(sent.device)
    made = []
    for name in ("plain", "triton"):
        batch = torch.zeros(
            num_local, case.num_ranks * case.capacity, case.hidden_size, dtype=dtype, device=sent.device
        )
        if name == "plain":
            opened = tuple(batched_all_to_all.open_messages.plain(received, layout, expert_map, batch, code_dtype))
        else:
            views = layout.rows(received), layout.meta(received), layout.header(received)
            opened = triton_open_messages(*views, expert_map, batch, code_dtype)
        made.append((batch, *opened))
    for expected, found in zip(*made, strict=True):
        assert torch.equal(found, expected)


def check_all(device: str, cases: list[Case]) -> None:
    for case in cases:
        check_quantize(case, device)
        check_plan(case, device)
        check_pack_rows(case, device)
        check_weighted_and_sum(case, device)
        check_messages(case, device)

"""The index logic of dispatch and combine, without processes: worked examples, and properties against plain loops."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep.dispatch.batched_all_to_all import MessageLayout, open_messages, pack_messages
from moe_ep.dispatch.payload import expert_positions, ids_for_rank, make_batch_plan, make_send_plan
from moe_ep.expert_map import determine_expert_map, expert_owner_table
from moe_ep.kernels.dispatch_rows import pack_rows, sum_rows, weighted_rows
from moe_ep.kernels.quantize import dequantize_codes, dequantize_rows, quantize_rows, quantized_row_bytes, round_rows
from tests.wrong_tensors import check_refused

OWNERS = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
IDS = torch.tensor([[0, 1], [2, 0], [-1, 3]], dtype=torch.int32)


def test_worked_examples() -> None:
    exact = make_send_plan(IDS, OWNERS, 2)
    assert exact.slots.tolist() == [[0, -1], [1, 2], [-1, 3]]
    assert exact.counts.tolist() == [2, 2]
    fixed = make_send_plan(IDS, OWNERS, 2, capacity=4)
    assert fixed.slots.tolist() == [[0, -1], [1, 5], [-1, 6]]
    found = expert_positions(torch.tensor([[0, 2], [2, -1], [0, 2]], dtype=torch.int32), 3)
    assert found.positions.tolist() == [[0, 0], [1, 0], [1, 2]]
    assert found.counts.tolist() == [2, 0, 3]
    assert ids_for_rank(IDS, OWNERS, 1).tolist() == [[-1, -1], [2, -1], [-1, 3]]


def test_ids_that_do_not_exist_go_nowhere() -> None:
    """Of a router on a GPU, where nobody looks at them before."""
    astray = torch.tensor([[4, 0], [2**31 - 1, -(2**31)]], dtype=torch.int32)
    assert make_send_plan(astray, OWNERS, 2).slots.tolist() == [[0, -1], [-1, -1]]
    assert ids_for_rank(astray, OWNERS, 0).tolist() == [[-1, 0], [-1, -1]]
    found = expert_positions(torch.cat([astray, astray]), 4)
    assert found.positions.tolist() == [[0, 0], [0, 0], [0, 1], [0, 0]] and found.counts.tolist() == [2, 0, 0, 0]


def test_two_sources_share_an_expert() -> None:
    ids = torch.tensor([[[0], [0]], [[0], [-1]]], dtype=torch.int32)
    positions = torch.tensor([[[0], [1]], [[0], [0]]], dtype=torch.int32)
    plan = make_batch_plan(ids, positions, torch.tensor([[2], [1]], dtype=torch.int32), torch.tensor([0]), 1, 4)
    assert plan.slots.flatten().tolist() == [0, 1, 2, -1]
    assert plan.expert_num_tokens.tolist() == [3]


def test_a_message_of_the_documented_size() -> None:
    layout = MessageLayout(256, 128, 8, 2 * 7168)
    assert (layout.header_bytes, layout.row_stride, layout.message_bytes) == (1024, 14464, 1852416)
    assert (quantized_row_bytes(7168), quantized_row_bytes(7168, True)) == (7392, 7184)


def test_pack_rows_worked_example() -> None:
    rows = torch.tensor([[5.0, 6.0]])
    send_rows, send_meta = torch.empty(2, 2), torch.empty(2, 4, dtype=torch.int32)
    pack_rows(
        rows,
        torch.tensor([[0, 1]], dtype=torch.int32),
        torch.tensor([[0.5, 2.0]]),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([[0, 1]], dtype=torch.int32),
        send_rows,
        send_meta,
    )
    assert torch.equal(send_rows, rows.repeat(2, 1))
    assert send_meta[:, :2].tolist() == [[0, -1], [-1, 1]]
    assert send_meta[:, 2:].contiguous().view(torch.float32).tolist() == [[0.5, 0.0], [0.0, 2.0]]


def test_rows_that_nobody_names_are_not_read() -> None:
    received = torch.tensor([[1.0], [float("nan")], [4.0]])
    output = torch.empty(2, 1)
    sum_rows(received, torch.tensor([[0, 2], [-1, -1]], dtype=torch.int32), output)
    assert output.tolist() == [[5.0], [0.0]]
    weighted_rows(received, torch.tensor([[2, -1]], dtype=torch.int32), torch.tensor([[0.5, 9.0]]), output[:1])
    assert output[0].item() == 2.0


def test_columns_that_do_not_lie_side_by_side_are_left_to_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(
        "moe_ep.registry.choose_form", lambda plain, kernel, *rows: lambda *args: called.append(kernel.__name__)
    )
    received, slots = torch.randn(3, 4), torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
    sum_rows(received, slots, torch.empty(2, 4))
    weighted_rows(received, slots, None, torch.empty(2, 4))
    assert called == ["triton_sum_rows", "triton_weighted_rows"]
    output, transposed = torch.empty(4, 2).T, received.T.contiguous().T
    sum_rows(received, slots, output)
    assert torch.equal(output, torch.stack([received[0] + received[2], received[1]]))
    weighted_rows(transposed, slots, None, output)
    assert len(called) == 2
    assert torch.equal(output, torch.stack([received[0] + received[2], received[1]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [1, 127, 128, 129, 384])
def test_quantized_rows_come_back(dtype: torch.dtype, hidden_size: int) -> None:
    rows = torch.randn(4, hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[1] = 0.0
    rows[2, 0] = float("nan")
    back = dequantize_rows(quantize_rows(rows), hidden_size, dtype)
    assert back.dtype == dtype and not back[1].any() and back[2, 0].isnan()
    # e4m3 has 3 bits of mantissa: half a unit is 1/16, and below 2**-6 of 448 units of 2**-9 a scale are left.
    for group in range(0, hidden_size, 128):
        part, found = rows[[0, 3], group : group + 128].float(), back[[0, 3], group : group + 128].float()
        bound = part.abs() / 16 + part.abs().amax(dim=1, keepdim=True) / 448 * 2**-10
        assert ((found - part).abs() <= bound * 1.01).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [1, 127, 128, 129, 384])
def test_rows_come_back_from_int8(dtype: torch.dtype, hidden_size: int) -> None:
    rows = torch.randn(4, hidden_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows[1], rows[2, -1] = 0.0, float("inf")
    back = dequantize_rows(quantize_rows(rows, torch.int8), hidden_size, dtype, torch.int8)
    assert back.dtype == dtype and not back[1].any() and back[2, (hidden_size - 1) // 128 * 128 :].isnan().all()
    for group in range(0, hidden_size, 128):
        part, found = rows[[0, 3], group : group + 128].float(), back[[0, 3], group : group + 128].float()
        step = part.abs().amax(dim=1, keepdim=True) / 127
        assert ((found - part).abs() <= step * 0.51 + part.abs() * torch.finfo(dtype).eps).all()
    with pytest.raises(ValueError, match="float16"):
        quantize_rows(rows, torch.float16)


ROWS = torch.ones(3, 256)
CODES, SCALES = torch.ones(3, 256, dtype=torch.int8), torch.ones(3, 2)


def quantize_out(out: Any) -> Any:
    return quantize_rows(ROWS, out=out)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        *(
            (partial(function, rows, *arguments), "rows")
            for function, arguments in ((quantize_rows, ()), (round_rows, (torch.int8,)))
            for rows in (None, ROWS[0], ROWS[None], ROWS.int(), ROWS.double(), ROWS[:, :0], ROWS.tolist())
        ),
        *(
            (partial(quantize_out, out), "out")
            for out in (
                [],
                torch.zeros(3, 264),
                torch.zeros(264, dtype=torch.uint8),
                torch.zeros(3, 260, dtype=torch.uint8),
                torch.zeros(2, 264, dtype=torch.uint8),
                torch.zeros(3, 265, dtype=torch.uint8),
                torch.zeros(264, 3, dtype=torch.uint8).T,
                torch.zeros(3, 264, dtype=torch.uint8, device="meta"),
            )
        ),
        *(
            (partial(dequantize_rows, quantized, 256, torch.float32), "quantized")
            for quantized in (
                None,
                ROWS,
                torch.zeros(264, dtype=torch.uint8),
                torch.zeros(3, 260, dtype=torch.uint8),
                torch.zeros(3, 272, dtype=torch.uint8),
            )
        ),
        (partial(dequantize_rows, quantize_rows(ROWS), -256, torch.float32), "hidden_size"),
        (partial(dequantize_rows, quantize_rows(ROWS), 0, torch.float32), "hidden_size"),
        (partial(dequantize_rows, quantize_rows(ROWS), 128, torch.float32), "quantized"),
        (partial(dequantize_rows, quantize_rows(ROWS), 256, torch.int32), "dtype"),
        (partial(dequantize_rows, quantize_rows(ROWS), 256, None), "dtype"),
        (partial(dequantize_codes, CODES[0], SCALES, torch.float32), "codes"),
        (partial(dequantize_codes, CODES.int(), SCALES, torch.float32), "codes"),
        (partial(dequantize_codes, None, SCALES, torch.float32), "codes"),
        (partial(dequantize_codes, CODES, None, torch.float32), "scales"),
        (partial(dequantize_codes, CODES, SCALES[:2], torch.float32), "scales"),
        (partial(dequantize_codes, CODES, SCALES.half(), torch.float32), "scales"),
        (partial(dequantize_codes, CODES, SCALES.to("meta"), torch.float32), "scales"),
        (partial(dequantize_codes, CODES, SCALES, torch.int32), "dtype"),
        (partial(round_rows, ROWS, torch.int8, 0), "group_columns"),
        (partial(round_rows, ROWS, torch.int8, -1), "group_columns"),
        (partial(round_rows, ROWS, torch.int32), "dtype"),
    ],
)
def test_rows_that_cannot_be_converted_are_refused(call: Any, named: str) -> None:
    check_refused(call, {}, named)


def test_kinds_of_arguments_of_quantized_rows() -> None:
    with pytest.raises(TypeError, match="whole is 'false'"):
        quantize_rows(ROWS, whole="false")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="hidden_size is 256.0"):
        dequantize_rows(quantize_rows(ROWS), 256.0, torch.float32)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="group_columns is '128'"):
        round_rows(ROWS, torch.int8, "128")  # type: ignore[arg-type]


@st.composite
def routings(draw: st.DrawFn) -> dict:
    num_ranks = draw(st.integers(1, 5))
    num_experts = draw(st.integers(1, 9))
    topk = draw(st.integers(1, 4))
    capacity = draw(st.integers(1, 5))
    tokens = [draw(st.integers(0, capacity)) for _ in range(num_ranks)]
    ids = [
        torch.tensor(
            [[draw(st.integers(-1, num_experts - 1)) for _ in range(topk)] for _ in range(num_tokens)],
            dtype=torch.int32,
        ).view(num_tokens, topk)
        for num_tokens in tokens
    ]
    return {
        "num_ranks": num_ranks,
        "num_experts": num_experts,
        "capacity": capacity,
        "ids": ids,
        "placement": draw(st.sampled_from(["linear", "round_robin"])),
    }


@settings(max_examples=150)
@given(routings())
def test_send_plan_names_every_token_once_a_rank(routing: dict) -> None:
    num_ranks, capacity = routing["num_ranks"], routing["capacity"]
    owners = expert_owner_table(num_ranks, routing["num_experts"], routing["placement"])
    for ids in routing["ids"]:
        exact = make_send_plan(ids, owners, num_ranks)
        fixed = make_send_plan(ids, owners, num_ranks, capacity)
        row = 0
        for rank in range(num_ranks):
            first = row
            for token, experts in enumerate(ids.tolist()):
                goes = any(expert >= 0 and owners[expert] == rank for expert in experts)
                assert exact.slots[token, rank] == (row if goes else -1)
                assert fixed.slots[token, rank] == (rank * capacity + token if goes else -1)
                row += goes
            assert exact.counts[rank] == fixed.counts[rank] == row - first


@settings(max_examples=100)
@given(routings())
def test_messages_there_and_back(routing: dict) -> None:
    """All ranks in one process: pack, exchange, open, weight, exchange, sum; the identity as every expert."""
    num_ranks, num_experts, capacity = routing["num_ranks"], routing["num_experts"], routing["capacity"]
    topk, hidden_size = routing["ids"][0].size(1), 3
    layout = MessageLayout(num_experts, capacity, topk, hidden_size * 4)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(len(ids), hidden_size, generator=generator) for ids in routing["ids"]]
    weights = [torch.rand(ids.shape, generator=generator) for ids in routing["ids"]]
    sent, slots = [], []
    for rank in range(num_ranks):
        owners = expert_owner_table(num_ranks, num_experts, routing["placement"], ep_rank=rank)
        messages = layout.empty(num_ranks, torch.device("cpu")).fill_(0x5A)
        slots.append(pack_messages(rows[rank], routing["ids"][rank], weights[rank], owners, layout, messages))
        sent.append(messages)
    back = [torch.empty(num_ranks, capacity, hidden_size) for _ in range(num_ranks)]
    for rank in range(num_ranks):
        num_local, expert_map, _ = determine_expert_map(num_ranks, rank, num_experts, routing["placement"])
        batch = torch.full((num_local, num_ranks * capacity, hidden_size), float("nan"))
        received = torch.stack([messages[rank] for messages in sent])
        expert_map = torch.arange(num_experts) if expert_map is None else expert_map
        opened = open_messages(received, layout, expert_map, batch, None)
        for expert, local in enumerate(expert_map.tolist()):
            if local < 0:
                continue
            expected = [
                rows[source][token]
                for source, ids in enumerate(routing["ids"])
                for token in range(len(ids))
                if expert in ids[token]
            ]
            assert opened.expert_num_tokens[local] == len(expected)
            assert torch.equal(batch[local, : len(expected)], torch.stack(expected) if expected else batch[local, :0])
            assert batch[local, len(expected) :].isnan().all()
        outgoing = torch.empty(num_ranks * capacity, hidden_size)
        weighted_rows(batch.view(-1, hidden_size), opened.slots, opened.weights, outgoing)
        for source in range(num_ranks):
            back[source][rank] = outgoing.view(num_ranks, capacity, hidden_size)[source]
    for rank, ids in enumerate(routing["ids"]):
        output = torch.full_like(rows[rank], float("nan"))
        sum_rows(back[rank].flatten(0, 1), slots[rank], output)
        for token, experts in enumerate(ids.tolist()):
            total = sum(float(weights[rank][token, slot]) for slot, expert in enumerate(experts) if expert >= 0)
            torch.testing.assert_close(output[token], rows[rank][token] * total)

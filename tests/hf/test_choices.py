"""Choices of a model's router, cleaned and counted: plain forms against loops, Triton forms against plain ones."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from moe_ep.hf import routed_experts
from moe_ep.hf.routed_experts import count_choices
from moe_ep.routing.router import ChoiceLog, known_choices

E, TOP_K = 5, 3


def made(num_tokens: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids of experts, of none and beyond E; weights; and rows that count."""
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(-2, E + 2, (num_tokens, TOP_K), generator=generator)
    weights = torch.randn(num_tokens, TOP_K, generator=generator).to(dtype)
    return ids.to(device), weights.to(device), (torch.arange(num_tokens) % 3 != 1).to(device)


@pytest.mark.parametrize(
    ("position", "wrong", "words"),
    [
        (0, lambda x: [1.0], "hidden_states is a list; it must be a tensor"),
        (0, lambda x: x.int(), "hidden_states is torch.int32; it must be of a float dtype"),
        (0, lambda x: x[:, :8], r"hidden_states is \(7, 8\)"),
        (0, lambda x: x[0], r"hidden_states is \(32,\)"),
        (1, lambda ids: None, "topk_ids is None"),
        (1, lambda ids: ids.float(), "topk_ids is torch.float32"),
        (1, lambda ids: ids[:, :2], r"takes .*\(7, 3\) of both"),
        (2, lambda weights: weights[:2], r"takes .*\(7, 3\) of both"),
        (2, lambda weights: weights.int(), "topk_weights is torch.int32; it must be of a float dtype"),
    ],
)
def test_tensors_that_do_not_fit_are_named(position: int, wrong: Any, words: str) -> None:
    sizes = {"num_experts": E, "top_k": TOP_K, "hidden_size": 32, "intermediate_size": 32, "ep_size": 1}
    layer = routed_experts.RoutedExperts(**sizes)
    inputs: list[Any] = [torch.rand(7, 32), *made(7, "cpu", torch.float32)[:2]]
    inputs[position] = wrong(inputs[position])
    with pytest.raises(ValueError, match=words):
        layer(*inputs)


@pytest.mark.parametrize("num_tokens", [0, 7])
@pytest.mark.parametrize("masked", [False, True])
def test_by_hand(num_tokens: int, masked: bool) -> None:
    ids, weights, mask = made(num_tokens, "cpu", torch.bfloat16)
    log = ChoiceLog(torch.arange(num_tokens).flip(0) + 1, torch.full((9, TOP_K), 7).short(), torch.ones(9, TOP_K))
    found_weights, found_ids = known_choices(weights, ids, E, mask if masked else None, log)
    counts = torch.full((E,), 10)
    expected_ids, expected_bits, expected_counts = [], [], [10] * E
    for row, values, counted in zip(ids.tolist(), weights.tolist(), mask.tolist(), strict=True):
        known = [0 <= expert < E and (counted or not masked) for expert in row]
        expected_ids.append([expert if kept else -1 for expert, kept in zip(row, known, strict=True)])
        expected_bits.append(
            [
                struct.unpack("i", struct.pack("f", value if kept else 0.0))[0]
                for value, kept in zip(values, known, strict=True)
            ]
        )
        for expert in expected_ids[-1]:
            if expert >= 0:
                expected_counts[expert] += 1
    assert found_ids.dtype == torch.int32 and found_weights.dtype == torch.float32
    assert found_ids.shape == found_weights.shape == (num_tokens, TOP_K)
    assert found_ids.tolist() == expected_ids and found_weights.view(torch.int32).tolist() == expected_bits
    recorded = slice(1, num_tokens + 1)
    assert torch.equal(log.ids[recorded].flip(0).int(), found_ids) and log.ids[num_tokens + 1 :].eq(7).all()
    assert torch.equal(log.weights[recorded].flip(0), found_weights) and log.ids[0].eq(7).all()
    count_choices(found_ids, counts)
    assert counts.tolist() == expected_counts


def test_a_layer_made_in_inference_mode_counts_outside_of_it() -> None:
    with torch.inference_mode():
        layer = routed_experts.RoutedExperts(
            num_experts=E, top_k=TOP_K, hidden_size=4, intermediate_size=4, params_dtype=torch.float32
        )
        for param in layer.parameters():
            torch.nn.init.normal_(param)
    layer.counts_load = True
    layer(torch.randn(2, 4), torch.tensor([[0, 1, 2], [2, -1, 4]]), torch.ones(2, TOP_K))
    assert layer.load.tolist() == [1, 1, 2, 0, 1]


def test_identity_experts_add_nothing_to_tokens_that_chose_none() -> None:
    layer = routed_experts.RoutedExperts(
        num_experts=E, top_k=1, hidden_size=4, intermediate_size=4, params_dtype=torch.float32, num_identities=1
    )
    for param in layer.parameters():
        torch.nn.init.normal_(param)
    hidden_states = torch.tensor([[float("nan")] * 4, [float("inf")] * 4, [2.0] * 4])
    with torch.no_grad():
        output = layer(hidden_states, torch.tensor([[-1], [-1], [E]]), torch.full((3, 1), 0.5))
    assert output.tolist() == [[0.0] * 4, [0.0] * 4, [1.0] * 4]


def check_triton(device: str) -> None:
    from moe_ep.kernels import choices as fused

    for num_tokens, dtype in ((1, torch.float32), (100, torch.bfloat16)):
        ids, weights, mask = made(num_tokens, device, dtype)
        for row_mask in (None, mask, torch.stack([mask, ~mask], dim=1)[:, 0]):
            plain = [tensor.cpu() if tensor is not None else None for tensor in (ids, weights, row_mask)]
            # Strides as a router's slice has them.
            strided = torch.cat([weights, weights], dim=1)[:, :TOP_K]
            places = torch.randperm(num_tokens + 3)[:num_tokens]
            for with_weights in (None, False, True):
                logs = []
                for at in (device, "cpu") if with_weights is not None else ():
                    log = torch.full((num_tokens + 3, TOP_K), -2, dtype=torch.int16, device=at)
                    logs.append(ChoiceLog(places.to(at), log, log.float() if with_weights else None))
                own_log, plain_log = logs or (None, None)
                expected = known_choices(plain[1], plain[0], E, plain[2], plain_log)
                found = fused.triton_known_choices(strided, ids.int(), E, row_mask, own_log)
                for own, by_torch in zip((*found, *(own_log or ())), (*expected, *(plain_log or ())), strict=True):
                    assert own is by_torch or torch.equal(own.cpu(), by_torch)
            # Ids start where 16 bytes may be read at once.
            assert (found[1].data_ptr() - found[0].data_ptr()) % 16 == 0
            counts, expected_counts = (torch.zeros(E, dtype=torch.int64, device=at) for at in (device, "cpu"))
            fused.triton_count_choices(found[1], counts)
            count_choices(expected[1], expected_counts)
            assert torch.equal(counts.cpu(), expected_counts)


@pytest.mark.gpu
def test_triton_on_a_gpu() -> None:
    check_triton("cuda")

"""Batch-invariant layers, kernels and generation on GPUs: the same bits alone, in any batch, and over two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ep.layer import FusedMoE
from moe_ep.layer.methods import OnlineIntConfig
from tests.kernels.invariant_cases import check_attention, check_linear
from tests.layer.moe_oracle import load, make_inputs, make_weights
from tests.ranks import ranks

pytestmark = pytest.mark.gpu

E, K, N, TOP_K, T = 16, 256, 128, 4, 300
CASES: dict[str, dict[str, Any]] = {"plain": {}, "int4": {"quant_config": OnlineIntConfig()}}


def layer_of(name: str, **more: Any) -> FusedMoE:
    layer = FusedMoE(
        num_experts=E, top_k=TOP_K, hidden_size=K, intermediate_size=N, params_dtype=torch.bfloat16,
        batch_invariant=True, **CASES[name] | more,
    )  # fmt: skip
    return load(layer, make_weights(E, K, N)).cuda()


def inputs_of() -> tuple[torch.Tensor, torch.Tensor]:
    rows, logits = make_inputs(T, K, E)
    return rows.to("cuda", torch.bfloat16), logits.cuda()


@pytest.mark.parametrize("name", CASES)
def test_a_token_alone_and_in_any_batch(name: str) -> None:
    layer, (rows, logits) = layer_of(name, ep_size=1), inputs_of()
    together = layer(rows, logits)
    for first, end in ((0, 1), (17, 18), (5, 21), (40, 140)):
        assert torch.equal(layer(rows[first:end], logits[first:end]), together[first:end])


@pytest.mark.parametrize("name", CASES)
def test_a_captured_pass_has_the_bits_of_an_eager_one(name: str) -> None:
    layer, (rows, logits) = layer_of(name, ep_size=1), inputs_of()
    expected = layer(rows[:8], logits[:8])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer(rows[:8], logits[:8])
    graph.replay()
    assert torch.equal(output, expected)


def over_ranks(rank: int, world_size: int, name: str, backend: str) -> torch.Tensor:
    layer, (rows, logits) = layer_of(name, all2all_backend=backend, max_num_tokens=64), inputs_of()
    return layer(rows[rank::world_size], logits[rank::world_size]).cpu()


@pytest.mark.gpu2
@pytest.mark.parametrize("backend", ["all_to_all", "batched_all_to_all", "nvshmem_low_latency"])
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_bits_of_one(name: str, backend: str) -> None:
    expected = layer_of(name, ep_size=1)(*inputs_of()).cpu()
    for rank, output in enumerate(ranks(2, "nccl").run(over_ranks, name, backend)):
        assert torch.equal(output, expected[rank::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_and_attention(dtype: torch.dtype) -> None:
    check_linear("cuda", (dtype,))
    check_attention("cuda", (dtype,))


def test_a_prompt_has_the_same_text_alone_and_in_a_batch() -> None:
    pytest.importorskip("transformers")
    import moe_ep
    from moe_ep.generation.engine import Generation, Request
    from tests.hf.hf_models import SIZES, make_model

    model = moe_ep.parallelize(make_model("Qwen3Moe", torch.bfloat16), device="cuda", batch_invariant=True)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, SIZES["vocab_size"], (3 + 15 * number,), generator=generator) for number in range(5)]

    def texts(numbers: list[int], **options: Any) -> list[Any]:
        requests = [Request(number, prompts[number]) for number in numbers]
        generation = Generation(model, requests, max_new_tokens=12, stop_ids=[], logprobs=2, **options)
        return [(completion.token_ids, completion.logprobs) for completion in generation.run()]

    together = texts(list(range(5)), num_slots=4)
    assert together == [texts([number], num_slots=1)[0] for number in range(5)]

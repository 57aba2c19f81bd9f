"""Batches that are balanced by their own counts over two GPUs: plain and packed experts, by NCCL and over NVSHMEM."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ep.layer import BatchBalance, FusedMoE
from moe_ep.layer.methods import OnlineIntConfig, relative_error, tolerance
from moe_ep.observability import stages
from tests.layer.moe_oracle import load, make_weights
from tests.layer.test_batch_balance import Copies
from tests.ranks import ranks

pytestmark = [pytest.mark.gpu, pytest.mark.gpu2]

E, K, N, TOP_K, T = 16, 256, 128, 4, 600
CASES: dict[str, dict[str, Any]] = {"plain": {}, "int4": {"quant_config": OnlineIntConfig()}}


def over_gpus(rank: int, world_size: int, name: str, backend: str) -> int:
    def layer_with(choice: str | BatchBalance) -> FusedMoE:
        layer = FusedMoE(
            num_experts=E, top_k=TOP_K, hidden_size=K, intermediate_size=N, params_dtype=torch.bfloat16,
            all2all_backend=backend, max_num_tokens=256, batch_balance=choice, **CASES[name],
        )  # fmt: skip
        return load(layer, make_weights(E, K, N)).cuda()

    plain, balanced = layer_with("off"), layer_with(BatchBalance(min_rows=0, copy_cost_rows=0))
    torch.manual_seed(rank)
    rows, weights = torch.randn(T, K, device="cuda", dtype=torch.bfloat16), torch.rand(T, TOP_K, device="cuda")
    popularity = torch.arange(1, E + 1, device="cuda").float() ** -1.2
    for _ in range(2):  # the second batch finds copies of the first in the scratch slots
        ids = torch.multinomial(popularity.expand(T, E), TOP_K)
        expected = plain(rows, topk_weights=weights, topk_ids=ids)
        with stages.listening(copies := Copies()):
            output = balanced(rows, topk_weights=weights, topk_ids=ids)
        assert relative_error(output, expected) < tolerance(torch.bfloat16)
        popularity = popularity.flip(0)
    if backend == "nvshmem_high_throughput":
        # A layer whose eager batches were all balanced is captured without.
        few = rows[:256], weights[:256], ids[:256]
        expected = plain(few[0], topk_weights=few[1], topk_ids=few[2])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = balanced(few[0], topk_weights=few[1], topk_ids=few[2])
        graph.replay()
        assert relative_error(output, expected) < tolerance(torch.bfloat16)
    return sum(copies.found)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "backend", ["all_to_all", "batched_all_to_all", "allgather_reducescatter", "nvshmem_high_throughput"]
)
def test_balanced_batches_over_two_gpus(backend: str, name: str) -> None:
    first, second = ranks(2, "nccl").run(over_gpus, name, backend)
    assert first == second > 0

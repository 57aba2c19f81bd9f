"""A token's result has the same bits alone and in any batch, on any rank, by any backend, at EP 1, 2 and 4."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep.errors import ConfigError
from moe_ep.layer import FusedMoE
from moe_ep.layer.methods import OnlineIntConfig
from moe_ep.layer.stack import SharedExperts
from moe_ep.registry import ALL2ALL_BACKENDS
from tests.layer.moe_oracle import load, make_inputs, make_weights
from tests.ranks import ranks

BACKENDS = ("all_to_all", "batched_all_to_all", "allgather_reducescatter", "two_level")
T = 24
# Sizes with ends that no vector fills, and sums that a BLAS library splits by the number of rows.
E, K, N, TOP_K = 8, 160, 96, 3
CASES: dict[str, dict[str, Any]] = {
    "f32": {},
    "bf16": {"params_dtype": torch.bfloat16},
    "f16": {"params_dtype": torch.float16},
    "int4": {"quant_config": OnlineIntConfig()},
    "shared experts": {"shared_experts": True, "n_shared_experts": 1, "activation": "swigluoai"},
    "sigmoid": {"scoring_func": "sigmoid", "use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1},
    "int8 rows on the wire": {"dispatch_dtype": torch.int8},
    "fp8 rows on the wire": {"dispatch_dtype": torch.float8_e4m3fn, "params_dtype": torch.bfloat16},
}


def layer_of(name: str, **more: Any) -> FusedMoE:
    options = CASES[name] | {"batch_invariant": True, "max_num_tokens": 7} | more
    if options.pop("shared_experts", False):
        torch.manual_seed(3)
        options["shared_experts"] = SharedExperts(K, N)
    layer = FusedMoE(num_experts=E, top_k=TOP_K, hidden_size=K, intermediate_size=N, **options)
    return load(layer, make_weights(E + layer.num_fused_shared_experts, K, N))


def inputs_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows, logits = make_inputs(T, K, E)
    return rows.to(CASES[name].get("params_dtype", torch.float32)), logits


def alone(layer: FusedMoE, rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.cat([layer(rows[token : token + 1], logits[token : token + 1]) for token in range(T)])


@functools.cache
def layer_and_bits(name: str) -> tuple[FusedMoE, torch.Tensor]:
    """A layer of one rank, and what it makes of every token alone."""
    layer = layer_of(name, ep_size=1)
    return layer, alone(layer, *inputs_of(name))


batches = st.lists(st.integers(0, T - 1), min_size=1, max_size=70)


@settings(max_examples=25)
@given(batch=batches, num_threads=st.integers(1, 3), name=st.sampled_from(["f32", "bf16", "int4", "shared experts"]))
def test_any_batch_has_the_bits_of_its_tokens_alone(batch: list[int], num_threads: int, name: str) -> None:
    (layer, expected), (rows, logits) = layer_and_bits(name), inputs_of(name)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(layer(rows[batch], logits[batch]), expected[batch])
    finally:
        torch.set_num_threads(before)


def on_ranks(rank: int, world_size: int, name: str, backends: tuple[str, ...], seed: int) -> list[torch.Tensor]:
    """What this rank's layers, one of each backend, make of its share of the tokens."""
    os.environ["MOE_EP_RANKS_PER_HOST"] = "2"  # for two_level
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(world_size, (T,), generator=generator)
    rows, logits = inputs_of(name)
    mine = (owner == rank).nonzero().flatten()
    found = []
    for backend in backends:
        output = torch.full_like(rows, float("nan"))
        output[mine] = layer_of(name, all2all_backend=backend)(rows[mine], logits[mine])
        found.append(output)
    del os.environ["MOE_EP_RANKS_PER_HOST"]
    return found


@pytest.mark.gang
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_ranks_have_the_bits_of_one(name: str, world_size: int) -> None:
    _, expected = layer_and_bits(name)
    by_rank = ranks(world_size).run(on_ranks, name, BACKENDS, 7 * world_size)
    for backend, *parts in zip(BACKENDS, *by_rank, strict=True):
        merged = torch.stack(parts).float().nan_to_num().sum(dim=0).to(expected.dtype)
        assert torch.equal(merged, expected), backend


def test_every_backend_keeps_it_or_says_why_not() -> None:
    refusing = {name for name in ALL2ALL_BACKENDS if ALL2ALL_BACKENDS.load(name).depends_on_batch() is not None}
    assert refusing.isdisjoint({*BACKENDS, "no_ep"})
    for name in refusing:
        with pytest.raises(ConfigError, match=name):
            layer_of("f32", ep_size=2, all2all_backend=name)


def with_moved_replicas(rank: int, world_size: int, backend: str) -> torch.Tensor:
    """The hot expert 5 in five of twelve slots, the others moved."""
    placed = [[11], [10], [9], [8], [7], [0, 2, 4, 6, 3], [5], [1]]
    to_physical = torch.full((1, E, 5), -1, dtype=torch.int32)
    for logical, physical in enumerate(placed):
        to_physical[0, logical, : len(physical)] = torch.tensor(physical)
    counts = torch.tensor([[len(physical) for physical in placed]], dtype=torch.int32)
    load_view = torch.zeros(1, E + 4, dtype=torch.int32)
    layer = FusedMoE(
        num_experts=E, top_k=TOP_K, hidden_size=K, intermediate_size=N, all2all_backend=backend, batch_invariant=True,
        num_redundant_experts=4, enable_eplb=True, max_num_tokens=7,
    )  # fmt: skip
    layer.set_eplb_state(0, load_view, to_physical, counts)
    load(layer, make_weights(E, K, N))
    rows, logits = inputs_of("f32")
    return layer(rows[rank::world_size], logits[rank::world_size])


@pytest.mark.gang
@pytest.mark.parametrize("backend", BACKENDS)
def test_moved_and_replicated_experts_give_the_same_bits(backend: str) -> None:
    _, expected = layer_and_bits("f32")
    for rank, output in enumerate(ranks(4).run(with_moved_replicas, backend)):
        assert torch.equal(output, expected[rank::4])


def over_tp(rank: int, world_size: int, tokens: list[int]) -> torch.Tensor:
    layer = layer_of("f32", tp_size=2, ep_size=1, reduce_results=True)
    rows, logits = inputs_of("f32")
    return layer(rows[tokens], logits[tokens])


@pytest.mark.gang
def test_tensor_parallel_ranks_keep_the_bits_of_a_token() -> None:
    pool = ranks(2)
    together = pool.run(over_tp, list(range(T)))
    for token in (0, 7, T - 1):
        for alone_there, all_there in zip(pool.run(over_tp, [token]), together, strict=True):
            assert torch.equal(alone_there[0], all_there[token])


def test_the_variable_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_EP_BATCH_INVARIANT", "1")
    sizes: dict[str, Any] = {"num_experts": E, "top_k": TOP_K, "hidden_size": K, "intermediate_size": N}
    assert FusedMoE(**sizes).batch_invariant and not FusedMoE(**sizes, batch_invariant=False).batch_invariant

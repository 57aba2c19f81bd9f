"""The layer over ranks equals the layer without them: every backend and option, uneven tokens, TP, EP over TP."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_ep.config import FusedMoEParallelConfig
from moe_ep.distributed import process_groups
from moe_ep.distributed.passes import one_pass
from moe_ep.errors import ConfigError
from moe_ep.layer import FusedMoE, dispatcher
from moe_ep.layer.methods import OnlineIntConfig, relative_error, tolerance
from moe_ep.layer.stack import SharedExperts
from moe_ep.modular_kernel import make_prepare_finalize
from moe_ep.registry import ALL2ALL_BACKENDS
from tests.layer.moe_oracle import Weights, load, make_inputs, make_weights, run_moe
from tests.ranks import ranks

E, K, N, TOP_K = 8, 128, 32, 3
# NVSHMEM moves rows between GPUs only.
BACKENDS = [name for name in ALL2ALL_BACKENDS if name != "no_ep" and not name.startswith("nvshmem")]
UNEVEN = (5, 0, 9, 2)

# options of the layer, tokens by rank
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "uneven tokens": ({}, UNEVEN),
    "tokens on one rank": ({}, (0, 7, 0, 0)),
    "no tokens": ({}, (0, 0, 0, 0)),
    "more tokens than the capacity": ({"max_num_tokens": 4}, (11, 0, 3, 4)),
    "more tokens than the capacity, shared experts": ({"max_num_tokens": 4, "shared_experts": True}, (3, 9, 0, 4)),
    "biases": ({"has_bias": True}, UNEVEN),
    "bf16": ({"params_dtype": torch.bfloat16}, UNEVEN),
    "fp8 rows on the wire": ({"dispatch_dtype": torch.float8_e4m3fn, "params_dtype": torch.bfloat16}, UNEVEN),
    "int8 rows on the wire": ({"dispatch_dtype": torch.int8, "params_dtype": torch.bfloat16}, UNEVEN),
    "int8 rows from the wire to 4-bit experts": (
        {"dispatch_dtype": torch.int8, "input_dtype": torch.int8, "quant_config": OnlineIntConfig()},
        UNEVEN,
    ),
    "top-1 with the weight on the input": (
        {"top_k": 1, "apply_router_weight_on_input": True, "renormalize": False},
        UNEVEN,
    ),
    "round robin": ({"expert_placement_strategy": "round_robin"}, UNEVEN),
    "shared experts": ({"shared_experts": True}, UNEVEN),
    "fused shared experts": ({"n_shared_experts": 2}, UNEVEN),
    "fused shared experts, round robin": (
        {"n_shared_experts": 1, "expert_placement_strategy": "round_robin"},
        UNEVEN,
    ),
    "identity experts": ({"zero_expert_num": 3, "zero_expert_type": "identity"}, UNEVEN),
    "4-bit experts": ({"quant_config": OnlineIntConfig()}, UNEVEN),
    "fewer experts than ranks": ({"num_experts": 2, "top_k": 2}, UNEVEN),
}


def make_layer(options: dict[str, Any], **more: Any) -> tuple[FusedMoE, Weights]:
    """A layer and its weights, the same for the same options whatever the ranks."""
    settings: dict[str, Any] = {"num_experts": E, "top_k": TOP_K, "hidden_size": K, "intermediate_size": N}
    settings |= options | more
    if settings.pop("shared_experts", False):
        torch.manual_seed(3)
        settings["shared_experts"] = SharedExperts(K, N, params_dtype=settings.get("params_dtype"))
    num_experts = settings["num_experts"] + settings.get("n_shared_experts", 0)
    weights = make_weights(num_experts, K, settings["intermediate_size"], has_bias=settings.get("has_bias", False))
    return load(FusedMoE(**settings), weights), weights


def make_pair(options: dict[str, Any], **parallel: Any) -> tuple[FusedMoE, FusedMoE]:
    """The layer over the ranks, and the same layer without any."""
    alone = {key: value for key, value in options.items() if key not in ("dispatch_dtype", "reduce_results")}
    return make_layer(options, **parallel)[0], make_layer(alone, ep_size=1)[0]


def check(output: torch.Tensor, expected: torch.Tensor, options: dict[str, Any]) -> None:
    limit = tolerance(*map(options.get, ("params_dtype", "dispatch_dtype", "input_dtype"), (torch.float32, None, None)))
    assert output.shape == expected.shape
    assert relative_error(output, expected) < limit


def inputs_of(layer: FusedMoE, T: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_states, router_logits = make_inputs(T, K, layer.num_router_columns, seed)
    return hidden_states.to(layer.moe_config.in_dtype), router_logits


def over_ranks(rank: int, world_size: int, backend: str, options: dict[str, Any], tokens: tuple[int, ...]) -> None:
    layer, alone = make_pair(options, all2all_backend=backend)
    assert layer.parallel_config.ep_size == world_size
    assert layer.must_reduce_shared_expert_outputs()
    inputs = inputs_of(layer, tokens[rank], seed=rank)
    output = layer(*inputs)
    check(output, alone(*inputs), options)
    with one_pass([layer], tokens[rank]):
        assert torch.equal(layer(*inputs), output)
        if layer.asks_for_tokens and tokens[rank] == max(tokens):
            with pytest.raises(ValueError, match=rf"{tokens[rank] + 1} tokens and the ranks agreed on at most"):
                layer(*inputs_of(layer, tokens[rank] + 1, seed=rank))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_option_over_three_ranks(backend: str, case: str) -> None:
    ranks(3).run(over_ranks, backend, *CASES[case])


def sequence_parallel(rank: int, world_size: int, backend: str) -> None:
    sizes = {"tp_size": 2, "ep_size": 2, "is_sequence_parallel": True, "reduce_results": True}
    layer, alone = make_pair({"shared_experts": True}, all2all_backend=backend, **sizes)
    inputs = inputs_of(layer, (6, 3)[rank], seed=rank)
    check(layer(*inputs), alone(*inputs), {})


@pytest.mark.parametrize("backend", BACKENDS)
def test_tp_ranks_with_their_own_tokens(backend: str) -> None:
    ranks(2).run(sequence_parallel, backend)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_numbers_of_ranks(backend: str, world_size: int) -> None:
    if world_size == 1:
        layer, alone = make_pair({})
        check(layer(*inputs_of(layer, 5, 0)), alone(*inputs_of(layer, 5, 0)), {})
        return
    ranks(world_size).run(over_ranks, backend, *CASES["more tokens than the capacity"])


def against_plain_loops(rank: int, world_size: int, backend: str) -> None:
    layer, weights = make_layer({}, all2all_backend=backend)
    with one_pass([layer], UNEVEN[rank]):
        inputs = inputs_of(layer, UNEVEN[rank], seed=rank)
        check(layer(*inputs), run_moe(weights, *inputs, TOP_K), {})
    # What ranks agreed on is over with the block.
    inputs = inputs_of(layer, UNEVEN[rank] + 3, seed=rank)
    output = layer(*inputs)
    check(output, run_moe(weights, *inputs, TOP_K), {})
    with torch.device("meta"):  # whatever device tensors are made on
        assert torch.equal(layer.forward_impl_chunked(*inputs)[1], output)


@pytest.mark.parametrize("backend", BACKENDS)
def test_against_plain_loops(backend: str) -> None:
    ranks(3).run(against_plain_loops, backend)


def test_a_pass_of_less_than_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens is -1; it must be at least 0"), one_pass([], -1):
        pass


def with_too_many_experts(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"32 experts \(top_k\) and 1 fused shared ones"):
        make_layer({"num_experts": 40, "top_k": 32, "n_shared_experts": 1})


def test_more_experts_than_rows_between_ranks_can_name_are_refused_at_once() -> None:
    ranks(2).run(with_too_many_experts)


def with_the_ranks_of_another(rank: int, world_size: int) -> None:
    for sizes, kind in (
        ({"tp_size": 2}, "tp_rank"),
        ({"tp_size": 2, "tp_rank": rank, "ep_size": 2}, "ep_rank"),
        ({"dp_size": 2, "ep_size": 2}, "ep_rank"),
    ):
        refused = pytest.raises(ValueError, match=f"{kind} is 0 .* has 1") if rank else contextlib.nullcontext()
        with refused:
            FusedMoE(E, TOP_K, K, N, parallel_config=FusedMoEParallelConfig(**sizes))


def test_a_parallel_config_of_another_rank_is_refused() -> None:
    ranks(2).run(with_the_ranks_of_another)


def made_differently(rank: int, world_size: int, backend: str) -> None:
    different = (
        ({"top_k": 2 + rank}, "top_k is 2, 3"),
        (
            {"expert_placement_strategy": ("linear", "round_robin")[rank]},
            r"the placement of experts, as a checksum, is \d+, \d+",
        ),
        (
            {"params_dtype": (torch.float16, torch.bfloat16)[rank]},
            r"params_dtype, of f32, f16 and bf16 \(0 to 2\), is 1, 2",
        ),
        ({"activation": ("silu", "gelu")[rank]}, r"activation, of .*, is 0, 1"),
        (
            {"top_k": 1, "apply_router_weight_on_input": rank == 1, "renormalize": False},
            "apply_router_weight_on_input is 0, 1",
        ),
    )
    for options, story in different:
        layer, _ = make_layer(options, all2all_backend=backend)
        with pytest.raises(ConfigError, match=rf"{story} on EP ranks 0, 1; it must be the same on every rank"):
            layer(*inputs_of(layer, 2, seed=rank))
    layer, weights = make_layer({"max_num_tokens": 4 + rank}, all2all_backend=backend)
    inputs = inputs_of(layer, 2, seed=rank)
    if layer.prepare_finalize.max_num_tokens_per_rank() is None:
        check(layer(*inputs), run_moe(weights, *inputs, TOP_K), {})
    else:
        with pytest.raises(ConfigError, match="max_num_tokens is 4, 5 on EP ranks 0, 1"):
            layer(*inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_whose_layers_differ_are_told(backend: str) -> None:
    ranks(2).run(made_differently, backend)


def with_different_backends(rank: int, world_size: int) -> None:
    layer, _ = make_layer({}, all2all_backend=("all_to_all", "allgather_reducescatter")[rank])
    with pytest.raises(ConfigError, match="the kind of backend"):
        layer(*inputs_of(layer, 2, seed=rank))


def test_ranks_with_different_backends_are_told() -> None:
    ranks(2).run(with_different_backends)


def with_replicas(rank: int, world_size: int, backend: str) -> tuple[int, int]:
    options = {"num_redundant_experts": 4, "enable_eplb": True}
    layer, weights = make_layer(options, all2all_backend=backend)
    inputs = inputs_of(layer, UNEVEN[rank], seed=rank)
    expected = run_moe(weights, *inputs, TOP_K)
    check(layer(*inputs), expected, {})

    # Twelve slots: the hot expert 5 in five of them, the others moved.
    placed = [[11], [10], [9], [8], [7], [0, 2, 4, 6, 3], [5], [1]]
    to_physical = torch.full((1, E, 5), -1, dtype=torch.int32)
    for logical, physical in enumerate(placed):
        to_physical[0, logical, : len(physical)] = torch.tensor(physical)
    load_view = torch.zeros(1, E + 4, dtype=torch.int32)
    moved = FusedMoE(num_experts=E, top_k=TOP_K, hidden_size=K, intermediate_size=N, all2all_backend=backend, **options)
    moved.set_eplb_state(
        0, load_view, to_physical, torch.tensor([[len(physical) for physical in placed]], dtype=torch.int32)
    )
    load(moved, weights)
    check(moved(*inputs), expected, {})
    return int(load_view.sum()), len(inputs[0]) * TOP_K


@pytest.mark.parametrize("backend", BACKENDS)
def test_redundant_experts_with_an_eplb_map(backend: str) -> None:
    for recorded, expected in ranks(3).run(with_replicas, backend):
        assert recorded == expected


# How tp_size ranks that hold the same tokens divide a layer.
REPLICATED_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"has_bias": True},
    "shared experts": {"shared_experts": True},
    "fused shared experts": {"n_shared_experts": 2},
    "identity experts": {"zero_expert_num": 3, "zero_expert_type": "identity"},
    "4-bit experts": {"quant_config": OnlineIntConfig(group_size=32), "intermediate_size": 128},
}


def same_tokens(rank: int, world_size: int, sizes: dict[str, int], options: dict[str, Any]) -> torch.Tensor:
    layer, alone = make_pair(options, **sizes)
    assert not layer.must_reduce_shared_expert_outputs()
    hidden_states, router_logits = inputs_of(layer, 6, seed=layer.parallel_config.dp_rank)
    output = layer(hidden_states, router_logits)
    expected = alone(hidden_states, router_logits)
    if options.get("reduce_results"):
        check(output, expected, options)
    summed = layer.maybe_all_reduce_tensor_model_parallel(output.clone())
    check(summed, expected * world_size if options.get("reduce_results") else expected, options)
    return output


@pytest.mark.parametrize("case", REPLICATED_CASES)
@pytest.mark.parametrize("reduce_results", [True, False])
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"tp_size": 2, "ep_size": 2}], ids=["TP", "EP over TP"])
def test_ranks_with_the_same_tokens(sizes: dict[str, int], reduce_results: bool, case: str) -> None:
    options = REPLICATED_CASES[case] | {"reduce_results": reduce_results}
    first, second = ranks(2).run(same_tokens, sizes, options)
    assert torch.equal(first, second) == reduce_results


def other_numbers_of_tokens(rank: int, world_size: int, sizes: dict[str, int], options: dict[str, Any]) -> None:
    layer, alone = make_pair(options | {"reduce_results": True}, **sizes)
    for tokens in ((3, 5), (0, 1)):
        story = f"TP ranks 0, 1 have {tokens[0]}, {tokens[1]} tokens"
        with pytest.raises(ValueError, match=story):
            layer(*inputs_of(layer, tokens[rank], seed=0))
        with pytest.raises(ValueError, match=story):
            layer.maybe_all_reduce_tensor_model_parallel(torch.zeros(tokens[rank], K))
    inputs = inputs_of(layer, 6, seed=0)
    check(layer(*inputs), alone(*inputs), options)


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"tp_size": 2, "ep_size": 2}], ids=["TP", "EP over TP"])
def test_tensor_parallel_ranks_with_other_numbers_of_tokens_are_told(sizes: dict[str, int]) -> None:
    for options in ({}, {"batch_invariant": True}) if "ep_size" not in sizes else ({},):
        ranks(2).run(other_numbers_of_tokens, sizes, options)


def same_tokens_and_replicas(rank: int, world_size: int) -> None:
    options = {"num_redundant_experts": 4, "enable_eplb": True, "reduce_results": True}
    layer, weights = make_layer(options, tp_size=2, ep_size=2)
    inputs = inputs_of(layer, 40, seed=0)
    check(layer(*inputs), run_moe(weights, *inputs, TOP_K), options)


def test_ranks_with_the_same_tokens_choose_the_same_replicas() -> None:
    ranks(2).run(same_tokens_and_replicas)


def data_and_tensor_parallel(rank: int, world_size: int, ep_size: int) -> None:
    sizes = {"tp_size": 2, "dp_size": 2, "ep_size": ep_size}
    for _ in range(2):  # The second layer finds the first one's group.
        layer, alone = make_pair({"reduce_results": True, "shared_experts": True}, **sizes)
        hidden_states, router_logits = inputs_of(layer, (4, 7)[layer.parallel_config.dp_rank], seed=rank // 2)
        check(layer(hidden_states, router_logits), alone(hidden_states, router_logits), {})


@pytest.mark.parametrize("ep_size", [1, 4])
def test_two_by_two_ranks(ep_size: int) -> None:
    ranks(4).run(data_and_tensor_parallel, ep_size)


def made_before_the_ranks_met(rank: int, world_size: int, sizes: dict[str, int], tokens: tuple[int, ...]) -> None:
    parallel = FusedMoEParallelConfig.make(**sizes, rank=rank, all2all_backend="batched_all_to_all")
    options = {"reduce_results": True, "max_num_tokens": 2}
    with pytest.MonkeyPatch.context() as before:
        for module in (dispatcher, process_groups):
            before.setattr(module, "is_initialized", lambda: False)
        layer, alone = make_pair(options, parallel_config=parallel)
    inputs = inputs_of(layer, tokens[rank], seed=tokens[rank])
    check(layer(*inputs), alone(*inputs), {})


@pytest.mark.parametrize(("sizes", "tokens"), [({"ep_size": 2}, (7, 3)), ({"tp_size": 2}, (5, 5))])
def test_a_layer_made_before_the_ranks_met(sizes: dict[str, int], tokens: tuple[int, ...]) -> None:
    ranks(2).run(made_before_the_ranks_met, sizes, tokens)


def in_a_subgroup(rank: int, world_size: int) -> str:
    group = dist.new_group([1, 2])
    if rank == 0:
        config = FusedMoE(4, 2, 8, 16, parallel_config=FusedMoEParallelConfig.make()).moe_config
        with pytest.raises(ValueError, match="process_group is of other processes"):
            make_prepare_finalize("no_ep", config, process_group=group)
        with pytest.raises(ValueError) as refused:
            make_layer({}, process_group=group)
        return str(refused.value)
    layer, alone = make_pair({}, process_group=group)
    assert layer.parallel_config.ep_size == 2
    inputs = inputs_of(layer, UNEVEN[rank], seed=rank)
    output = layer(*inputs)
    check(output, alone(*inputs), {})
    copied = copy.deepcopy(layer)
    for part in (layer, layer.prepare_finalize):
        with pytest.raises(TypeError, match="over several ranks cannot be pickled, .* save the layer's state_dict"):
            pickle.dumps(part)
    for parameter in layer.parameters():
        parameter.data.zero_()
    assert torch.equal(copied(*inputs), output) and not layer(*inputs).any()
    with pytest.raises(ValueError) as error:
        make_layer({}, ep_size=1, tp_size=2)
    return str(error.value)


def test_a_layer_of_some_of_the_ranks() -> None:
    outside, first, second = ranks(3).run(in_a_subgroup)
    assert outside == (
        "process_group is of other processes; this one is not in it and has no part of what its ranks make"
    )
    assert first == (
        "process_group has 3 ranks and dp_size (1) * tp_size (2) is 2; pass the group of exactly the layer's ranks"
    )
    assert second == (
        "rank is 2; it must be at least 0 and below tp_size * dp_size (2); make the layer on its own ranks only, with "
        "their process_group"
    )


class Net(torch.nn.Module):
    def __init__(self, layer: FusedMoE) -> None:
        super().__init__()
        self.router, self.moe = torch.nn.Linear(8, 4, bias=False), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x, self.router(x))


@torch.no_grad()
def wrapped(rank: int, world_size: int) -> None:
    def make() -> Net:
        net = Net(FusedMoE(4, 2, 8, 16, params_dtype=torch.float32))
        torch.manual_seed(rank)
        for parameter in net.moe.parameters():
            parameter.normal_()
        torch.nn.init.ones_(net.router.weight)
        return net

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    expected = make()(x)
    sharded = make()
    assert torch.equal(fully_shard(sharded, ignored_params=set(sharded.moe.parameters()))(x), expected)
    with pytest.raises(ConfigError, match="w13_weight of a layer over several ranks would become a DTensor, .* leave "):
        fully_shard(make())
    left_out = make()
    tensors = [*left_out.named_parameters(), *left_out.named_buffers()]
    names = [name for name, _ in tensors if name.startswith("moe.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(left_out, names)
    assert torch.equal(DistributedDataParallel(left_out)(x), expected)
    overwritten = DistributedDataParallel(make())
    for _ in range(2):
        with pytest.raises(ConfigError, match="DistributedDataParallel has given every rank what rank 0 holds of moe_"):
            overwritten(x)


def test_wrappers_that_would_give_ranks_each_others_experts_are_refused() -> None:
    ranks(2).run(wrapped)

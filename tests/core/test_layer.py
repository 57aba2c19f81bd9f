"""The layer in one process: its options against plain loops, and what it refuses."""

from __future__ import annotations

import copy
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from moe_ep.config import FusedMoEParallelConfig
from moe_ep.layer import FusedMoE
from moe_ep.methods import OnlineIntConfig, relative_error, tolerance
from moe_ep.shared_experts import SharedExperts
from moe_ep.stages import STAGES, record
from tests.core.moe_oracle import Weights, load, make_inputs, make_weights, run_moe

E, K, N, TOP_K, T = 6, 32, 48, 2, 9
F32 = tolerance(torch.float32)


def make_layer(**options: object) -> FusedMoE:
    settings: dict = {"num_experts": E, "top_k": TOP_K, "hidden_size": K, "intermediate_size": N} | options
    return FusedMoE(**settings)


def check(layer: FusedMoE, weights: Weights, **oracle: object) -> None:
    hidden_states, router_logits = make_inputs(T, K, layer.num_router_columns)
    expected = run_moe(weights, hidden_states, router_logits, layer.moe_config.experts_per_token, **oracle)
    assert relative_error(layer(hidden_states, router_logits), expected) < F32


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_equals_plain_loops(renormalize: bool, has_bias: bool) -> None:
    weights = make_weights(E, K, N, has_bias=has_bias)
    check(load(make_layer(renormalize=renormalize, has_bias=has_bias), weights), weights, renormalize=renormalize)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    weights = make_weights(E, K, N)
    layer = load(make_layer(params_dtype=dtype), weights)
    hidden_states, router_logits = make_inputs(T, K, E)
    output = layer(hidden_states.to(dtype), router_logits)
    assert output.dtype == dtype
    assert relative_error(output, run_moe(weights, hidden_states, router_logits, TOP_K)) < tolerance(dtype)


def test_no_tokens() -> None:
    layer = load(make_layer(), make_weights(E, K, N))
    assert layer(torch.empty(0, K), torch.empty(0, E)).shape == (0, K)


def test_router_weight_on_input() -> None:
    weights = make_weights(E, K, N)
    layer = load(make_layer(top_k=1, renormalize=False, apply_router_weight_on_input=True), weights)
    check(layer, weights, renormalize=False, weight_on_input=True)


def test_identity_experts_return_the_token() -> None:
    weights = make_weights(E, K, N)
    layer = load(make_layer(top_k=4, zero_expert_num=3, zero_expert_type="identity"), weights)
    check(layer, weights, num_routed=E)


@pytest.mark.parametrize("redundant", [0, 2])
def test_fused_shared_experts(redundant: int) -> None:
    weights = make_weights(E + 2, K, N)
    check(load(make_layer(n_shared_experts=2, num_redundant_experts=redundant), weights), weights, num_routed=E)


@pytest.mark.parametrize("expert_gate", [False, True])
def test_shared_experts_are_added(expert_gate: bool) -> None:
    weights = make_weights(E, K, N)
    shared = SharedExperts(K, 64, expert_gate=expert_gate)
    layer = load(make_layer(shared_experts=shared), weights)
    hidden_states, router_logits = make_inputs(T, K, E)
    gate_up = shared.gate_proj(hidden_states), shared.up_proj(hidden_states)
    expected = shared.down_proj(nn.functional.silu(gate_up[0]) * gate_up[1])
    if shared.expert_gate is not None:
        expected = expected * torch.sigmoid(hidden_states @ shared.expert_gate.weight.T)
    expected = expected + run_moe(weights, hidden_states, router_logits, TOP_K)
    assert relative_error(layer(hidden_states, router_logits), expected) < F32
    assert [name for name in layer.state_dict() if "kernel" in name] == []


def test_ungated_shared_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="activation is silu_no_mul; shared experts have gate and up"):
        SharedExperts(K, N, "silu_no_mul")


def test_ungated_experts() -> None:
    weights = make_weights(E, K, N)
    layer = make_layer(activation="relu2_no_mul")
    for expert in range(E):
        layer.weight_loader(layer.w13_weight, weights.up[expert], "up", "w1", expert)
        layer.weight_loader(layer.w2_weight, weights.down[expert], "down", "w2", expert)
    hidden_states, router_logits = make_inputs(T, K, E)
    top = torch.softmax(router_logits, dim=1).topk(TOP_K, dim=1)
    expected = torch.zeros(T, K)
    for t in range(T):
        for weight, expert in zip(top.values[t] / top.values[t].sum(), top.indices[t].tolist(), strict=True):
            expected[t] += weight * (weights.down[expert] @ (weights.up[expert] @ hidden_states[t]).relu().square())
    assert relative_error(layer(hidden_states, router_logits), expected) < F32


def test_correction_bias_and_custom_routing_reach_the_router() -> None:
    weights = make_weights(E, K, N)
    hidden_states, router_logits = make_inputs(T, K, E)
    pushed = torch.tensor([0.0, 0, 0, 50, 40, 0])
    biased = load(make_layer(scoring_func="sigmoid", e_score_correction_bias=pushed), weights)

    def experts_three_and_four(hidden_states, gating_output, topk, renormalize):
        scores = gating_output.sigmoid()[:, 3:5]
        return scores / scores.sum(dim=1, keepdim=True), torch.tensor([3, 4]).expand(len(scores), topk)

    custom = load(make_layer(custom_routing_function=experts_three_and_four), weights)
    output = biased(hidden_states, router_logits)
    assert relative_error(custom(hidden_states, router_logits), output) < F32
    assert "e_score_correction_bias" not in biased.state_dict()


def test_redundant_experts_with_an_eplb_map_compute_the_same_and_record_the_load() -> None:
    weights = make_weights(E, K, N)
    layer = load(make_layer(num_redundant_experts=3, enable_eplb=True), weights)
    check(layer, weights)
    assert int(layer.eplb_state.expert_load_view.sum()) == T * TOP_K

    load_view = torch.zeros(2, E + 3, dtype=torch.int32)
    to_physical = torch.full((2, E, 4), -1, dtype=torch.int32)
    placed = [[0, 6, 7, 8], [1], [2], [3], [4], [5]]
    for logical, physical in enumerate(placed):
        to_physical[1, logical, : len(physical)] = torch.tensor(physical)
    count = torch.tensor([[1] * E, [len(physical) for physical in placed]], dtype=torch.int32)
    moved = make_layer(num_redundant_experts=3, enable_eplb=True)
    moved.set_eplb_state(1, load_view, to_physical, count)
    check(load(moved, weights), weights)
    assert int(load_view[0].sum()) == 0
    assert int(load_view[1].sum()) == T * TOP_K


def test_loading_after_eplb_goes_to_the_current_slots() -> None:
    layer = make_layer(enable_eplb=True)
    turned = [[(expert + 1) % E] for expert in range(E)]
    layer.set_eplb_state(
        0, torch.zeros(1, E, dtype=torch.int32), torch.tensor([turned]), torch.ones(1, E, dtype=torch.int32)
    )
    weights = make_weights(E, K, N)
    load(layer, weights)
    assert torch.equal(layer.w2_weight[1], weights.down[0])
    assert torch.equal(layer.w2_weight[0], weights.down[E - 1])
    check(layer, weights)


def test_expert_weights_are_views_of_the_routed_slots() -> None:
    layer = load(make_layer(n_shared_experts=1, has_bias=True), make_weights(E + 1, K, N, has_bias=True))
    tensors = layer.expert_weights()
    assert [tuple(tensor.shape) for tensor in tensors] == [(E, 2 * N, K), (E, K, N), (E, 2 * N), (E, K)]
    assert tensors[0].data_ptr() == layer.w13_weight.data_ptr()


def test_a_layer_whose_tensors_were_replaced_runs_the_new_ones() -> None:
    weights = make_weights(E, K, N)
    layer = load(make_layer(), weights)
    hidden_states, router_logits = make_inputs(T, K, E)
    before = layer(hidden_states, router_logits)
    layer._apply(lambda tensor: tensor.clone())
    layer.w2_weight.data.mul_(2)
    assert torch.equal(layer(hidden_states, router_logits), 2 * before)


def test_parameters_assigned_by_load_state_dict_are_the_ones_that_run() -> None:
    layer, other = (load(make_layer(has_bias=True), make_weights(E, K, N, has_bias=True, seed=s)) for s in range(2))
    inputs = make_inputs(T, K, E)
    expected = other(*inputs)
    assert not torch.equal(layer(*inputs), expected)
    layer.load_state_dict({name: tensor.clone() for name, tensor in other.state_dict().items()}, assign=True)
    assert torch.equal(layer(*inputs), expected)


def test_casting_a_model_leaves_the_layers_numbers_as_they_are() -> None:
    layer = make_layer(
        scoring_func="sigmoid",
        e_score_correction_bias=torch.linspace(0, 1e-3, E),
        enable_eplb=True,
        shared_experts=nn.Linear(K, K),
    )
    before = {name: tensor.clone() for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]}
    layer.to(torch.bfloat16)
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if name.startswith("shared_experts"):
            assert tensor.dtype == torch.bfloat16
        else:
            assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name])


def test_a_layer_made_on_the_meta_device() -> None:
    options = {"enable_eplb": True, "num_redundant_experts": 3, "n_shared_experts": 1, "has_bias": True}
    weights = make_weights(E + 1, K, N, has_bias=True)
    with torch.device("meta"):
        layer, bias = make_layer(**options), torch.zeros(E)
        far = make_layer(parallel_config=FusedMoEParallelConfig.make(ep_size=2, rank=1))
    expected = load(make_layer(**options), weights)(*make_inputs(T, K, E))
    assert torch.equal(load(layer.to_empty(device="cpu"), weights)(*make_inputs(T, K, E)), expected)
    assert far.to_empty(device="cpu").expert_map.tolist() == [-1, -1, -1, 0, 1, 2]
    biased = make_layer(e_score_correction_bias=bias).to_empty(device="cpu")
    with pytest.raises(
        RuntimeError, match="e_score_correction_bias of .* has no values, as it was made on the meta device"
    ):
        biased(*make_inputs(T, K, E))
    with pytest.raises(RuntimeError, match="w13_weight of .* is on the meta device, which keeps no values; call to_em"):
        load(far.to("meta"), weights)
    with pytest.raises(RuntimeError, match="the weights of .* are on the meta device and have no values"):
        make_layer().to("meta")(*make_inputs(T, K, E))


def test_a_correction_bias_stays_the_routers_parameter() -> None:
    weights, pushed = make_weights(E, K, N), torch.zeros(E).index_fill_(0, torch.tensor([4]), 2.0)
    router = nn.Linear(K, E, bias=False)
    router.correction = nn.Parameter(torch.zeros(E))
    layer = load(make_layer(scoring_func="sigmoid", e_score_correction_bias=router.correction), weights)
    model = nn.ModuleList([router, layer])
    assert [name for name in model.state_dict() if "corr" in name] == ["0.correction"]
    expected = load(make_layer(scoring_func="sigmoid", e_score_correction_bias=pushed), weights)(*make_inputs(T, K, E))
    assert not torch.equal(layer(*make_inputs(T, K, E)), expected)
    model._apply(lambda tensor: tensor.clone())  # as where it goes to a GPU
    router.load_state_dict({"correction": pushed}, strict=False)
    assert torch.equal(layer(*make_inputs(T, K, E)), expected)
    twin = copy.deepcopy(model)
    nn.init.zeros_(router.correction)
    assert torch.equal(twin[1](*make_inputs(T, K, E)), expected)
    assert not torch.equal(layer(*make_inputs(T, K, E)), expected)
    for bias in (pushed, nn.Parameter(pushed), None, pushed):
        layer.e_score_correction_bias = bias
        output = layer.to(torch.bfloat16)(*make_inputs(T, K, E))
        assert torch.equal(output, expected) == (bias is not None)


def test_a_correction_bias_read_from_the_router_may_be_replaced_there() -> None:
    weights, pushed = make_weights(E, K, N), torch.zeros(E).index_fill_(0, torch.tensor([4]), 2.0)
    expected = load(make_layer(scoring_func="sigmoid", e_score_correction_bias=pushed), weights)(*make_inputs(T, K, E))
    router = nn.Linear(K, E, bias=False)
    router.e_score_correction_bias = nn.Parameter(torch.zeros(E))
    model = nn.ModuleList([router, load(make_layer(scoring_func="sigmoid", e_score_correction_bias=router), weights)])
    assert [name for name in model.state_dict() if "corr" in name] == ["0.e_score_correction_bias"]
    twin = copy.deepcopy(model)
    model.load_state_dict(model.state_dict() | {"0.e_score_correction_bias": pushed}, assign=True)
    assert torch.equal(model[1](*make_inputs(T, K, E)), expected)
    assert not torch.equal(twin[1](*make_inputs(T, K, E)), expected)
    twin[0].e_score_correction_bias.data.copy_(pushed)
    assert torch.equal(twin[1](*make_inputs(T, K, E)), expected)
    with pytest.raises(TypeError, match="e_score_correction_bias is a Linear; it must be a tensor, a router that has"):
        make_layer(e_score_correction_bias=nn.Linear(K, E))


def test_threads_may_load_a_layer_together() -> None:
    weights, together = make_weights(E, K, N), threading.Barrier(3)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that a thread is interrupted in the middle of its first tensor

    def load_shard(layer: FusedMoE, name: str, shard: str, tensors: list[torch.Tensor]) -> None:
        together.wait()
        for expert, tensor in enumerate(tensors):
            layer.weight_loader(layer.get_parameter(name), tensor, shard, shard, expert)

    try:
        with ThreadPoolExecutor(3) as threads:
            for _ in range(80):
                layer = make_layer()
                jobs = [
                    threads.submit(load_shard, layer, "w13_weight", "w1", weights.gate),
                    threads.submit(load_shard, layer, "w13_weight", "w3", weights.up),
                    threads.submit(load_shard, layer, "w2_weight", "w2", weights.down),
                ]
                assert [job.result() for job in jobs] == [None] * 3
                assert layer.loader.missing() == []
    finally:
        sys.setswitchinterval(interval)
    check(layer, weights)


def test_threads_may_call_a_layer_at_once_from_the_first_pass_on() -> None:
    inputs, weights = make_inputs(T, K, E), make_weights(E, K, 64)
    expected = load(make_layer(intermediate_size=64, quant_config=OnlineIntConfig()), weights)(*inputs)
    layers = [make_layer(intermediate_size=64, quant_config=OnlineIntConfig()) for _ in range(8)]
    for layer in layers:
        load(layer, weights, process=False)
    with ThreadPoolExecutor(4) as threads:
        for layer in layers:
            outputs = list(threads.map(lambda _, layer=layer: layer(*inputs), range(4)))
            assert all(torch.equal(output, expected) for output in outputs)
        # One that waits sees none of the parameters that another is freeing.
        layer = load(make_layer(intermediate_size=64, quant_config=OnlineIntConfig()), weights, process=False)
        seen = layer.parameters

        def parameters(recurse: bool = True) -> Iterator[nn.Parameter]:
            for param in seen(recurse):
                time.sleep(0.01 * random.random())
                yield param

        layer.parameters = parameters
        assert list(threads.map(lambda _: layer.process_weights_after_loading(), range(4))) == [None] * 4


def test_stages_are_recorded() -> None:
    layer = load(make_layer(), make_weights(E, K, N))
    with record() as recorder:
        layer(*make_inputs(T, K, E))
    assert {name: len(times) for name, times in recorder.durations_ms().items()} == dict.fromkeys(STAGES, 1)


def test_repr_says_what_it_is() -> None:
    layer = make_layer()
    assert "num_experts=6, num_redundant_experts=0, num_local_experts=6, top_k=2" in repr(layer)
    assert "backend=NoEPPrepareFinalize" in repr(layer) and "experts=" not in repr(layer).replace("_experts=", "")
    layer(*make_inputs(T, K, E))
    assert "backend=NoEPPrepareFinalize, experts=ReferenceExperts" in repr(layer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input needs top_k 1 and top_k is 2"),
        ({"apply_router_weight_on_input": True, "top_k": 1, "n_shared_experts": 1}, "needs top_k 1 and top_k is 2"),
        ({"num_redundant_experts": -1}, "num_redundant_experts is -1; it must be at least 0"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"activation": "tanh"}, "activation is 'tanh'; it must be one of silu"),
        ({"scoring_func": "tanh"}, "scoring_func is 'tanh'; it must be one of softmax, sigmoid"),
        ({"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 1}, "num_expert_group is 4; it must divide"),
        ({"experts": "fast"}, "experts is 'fast'; it must be one of auto"),
        ({"all2all_backend": "pigeon", "ep_size": 1}, "all2all_backend is 'pigeon'; it must be one of auto, no_ep"),
        ({"expert_placement_strategy": "random"}, "expert_placement_strategy is 'random'"),
        ({"ep_size": 2, "tp_size": 3}, "ep_size is 2; it must be 1"),
        ({"parallel_config": FusedMoEParallelConfig(), "tp_size": 2}, "tp_size is 2 and parallel_config has 1; give"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
        ({"top_k": 2.0}, "top_k is 2.0; it must be a whole number"),
        ({"custom_routing_function": "even"}, "custom_routing_function is 'even'; it must be a function"),
    ],
)
def test_refuses_bad_arguments(options: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make_layer(**options)


@pytest.mark.parametrize(
    ("num_experts", "redundant", "enable_eplb", "way_out"),
    [(130, 0, True, 2), (130, 1, True, 2), (128, 3, True, 4), (128, 3, False, 4)],
)
def test_physical_experts_must_divide_evenly(num_experts: int, redundant: int, enable_eplb: bool, way_out: int) -> None:
    with pytest.raises(ValueError) as error:
        make_layer(
            num_experts=num_experts,
            num_redundant_experts=redundant,
            enable_eplb=enable_eplb,
            parallel_config=FusedMoEParallelConfig.make(ep_size=4),
        )
    assert str(error.value) == (
        f"num_experts ({num_experts}) + redundant ({redundant}) must be a multiple of ep_size (4); "
        f"pass num_redundant_experts={way_out}"
    )


def test_refuses_inputs_that_do_not_fit() -> None:
    layer = load(make_layer(), make_weights(E, K, N))
    with pytest.raises(ValueError, match=r"hidden_states is \(3, 16\) of torch.float32; .* takes \(T, 32\)"):
        layer(torch.zeros(3, 16), torch.zeros(3, E))
    with pytest.raises(ValueError, match=r"hidden_states is \(3, 32\) of torch.float16"):
        layer(torch.zeros(3, K, dtype=torch.float16), torch.zeros(3, E))
    with pytest.raises(ValueError, match=r"router_logits has shape \(2, 6\); .* takes \(3, 6\)"):
        layer(torch.zeros(3, K), torch.zeros(2, E))


def test_eplb_state_is_checked() -> None:
    with pytest.raises(ValueError, match="was made without EPLB; make it with enable_eplb=True"):
        make_layer().set_eplb_state(0, *[torch.zeros(1)] * 3)
    good = [torch.zeros(2, E), torch.zeros(2, E, 1), torch.zeros(2, E)]
    with pytest.raises(ValueError, match=r"moe_layer_idx \(2\) below L"):
        make_layer(enable_eplb=True).set_eplb_state(2, *good)
    with pytest.raises(ValueError, match=r"expert_load_view has shape \(2, 5\)"):
        make_layer(enable_eplb=True).set_eplb_state(0, torch.zeros(2, 5), *good[1:])


def test_a_layer_of_many_ranks_needs_their_process_group() -> None:
    layer = make_layer(parallel_config=FusedMoEParallelConfig.make(ep_size=2, rank=1))
    assert layer.w13_weight.shape == (3, 2 * N, K)
    with pytest.raises(RuntimeError, match="one of 2 ranks and torch.distributed is not initialised"):
        layer(*make_inputs(T, K, E))


def test_gradients_are_refused() -> None:
    layer = make_layer()
    x, logits = torch.randn(3, K, requires_grad=True), torch.randn(3, E)
    with pytest.raises(RuntimeError, match=r"are for inference and have no backward; .* torch.no_grad\(\)"):
        layer(x, logits)
    with torch.no_grad():
        layer(x, logits)


def test_a_mistake_in_experts_of_ones_own_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer()

    def broken(*_: object) -> None:
        raise AttributeError("no attribute 'wieghts'")

    monkeypatch.setattr(layer.quant_method, "select_gemm_impl", broken)
    with pytest.raises(RuntimeError, match="^the experts of .* cannot be made: no attribute 'wieghts'"):
        layer(torch.randn(3, K), torch.randn(3, E))

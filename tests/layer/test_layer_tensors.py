"""The tensors of a layer in one process: loaded, replaced, cast, made on the meta device, shared by threads."""

from __future__ import annotations

import copy
import random
import re
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
from moe_ep.layer.methods import OnlineIntConfig
from tests.layer.moe_oracle import load, make_inputs, make_weights
from tests.layer.small_layer import TOP_K, E, K, N, T, check, make_layer


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


@pytest.mark.parametrize("quant_config", [None, OnlineIntConfig(bits=8, group_size=32)], ids=["plain", "int8"])
def test_tensors_replaced_past_the_module_are_the_ones_that_run(quant_config: OnlineIntConfig | None) -> None:
    """By torch.func, and as wrappers that keep weights elsewhere between passes do."""
    inputs, options = make_inputs(T, K, E), {"has_bias": True, "intermediate_size": 64, "quant_config": quant_config}
    layer, other = (load(make_layer(**options), make_weights(E, K, 64, has_bias=True, seed=seed)) for seed in range(2))
    first, second = layer(*inputs), other(*inputs)
    assert not torch.equal(first, second)
    theirs = {name: tensor.detach().clone() for name, tensor in other.state_dict().items()}
    fresh = copy.deepcopy(layer)
    for module in (layer, fresh):
        assert torch.equal(torch.func.functional_call(module, theirs, inputs), second)
        assert torch.equal(module(*inputs), first)
    twin = copy.deepcopy(layer)
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        tensor.data = theirs.get(name, tensor)
    assert torch.equal(layer(*inputs), second)
    for tensors in (twin._parameters, twin._buffers):
        for name in tensors.keys() & theirs.keys():
            tensors[name] = nn.Parameter(theirs[name], False) if tensors is twin._parameters else theirs[name]
    assert torch.equal(twin(*inputs), second)
    for transform in (torch.func.grad, torch.vmap):
        with pytest.raises(RuntimeError, match="a transform of torch.func is over tensors of moe_layer.* pass plain"):
            transform(lambda bias: torch.func.functional_call(layer, {"w2_bias": bias}, inputs).sum())(layer.w2_bias)


def test_copies_have_names_of_their_own() -> None:
    layer = load(make_layer(prefix="model.experts"), make_weights(E, K, N))
    copies = [copy.copy(layer), copy.deepcopy(layer)]
    names = [part.layer_name for part in (layer, *copies)]
    assert names[0] == "model.experts" and len(set(names)) == 3
    for part, name in zip((layer, *copies), names, strict=True):
        with pytest.raises(ValueError, match=rf"parameters of {re.escape(name)}:"):
            part.weight_loader(nn.Parameter(torch.zeros(1)), torch.zeros(1), "bias", "w1", 0)
        assert part.dispatcher.layer_name == name
        check(part, make_weights(E, K, N))


def test_torch_export_asks_for_processed_weights() -> None:
    inputs, weights = make_inputs(T, K, E), make_weights(E, K, 64)
    layer = load(make_layer(intermediate_size=64, quant_config=OnlineIntConfig()), weights, process=False)
    with pytest.raises(RuntimeError, match="the weights of moe_layer.* are not processed yet, which torch.export"):
        torch.export.export(layer, inputs)
    layer.process_weights_after_loading()
    exported = torch.export.export(layer, inputs).module()
    assert torch.equal(exported(*inputs), layer(*inputs))


def test_casting_a_model_leaves_the_layers_numbers_as_they_are() -> None:
    layer = make_layer(
        scoring_func="sigmoid",
        e_score_correction_bias=torch.linspace(0, 1e-3, E),
        enable_eplb=True,
        shared_experts=nn.Linear(K, K),
    )
    for weights in (layer.w13_weight, layer.w2_weight):
        nn.init.normal_(weights)
    before = {name: tensor.clone() for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]}
    layer.to(torch.bfloat16)
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if name.startswith("shared_experts"):
            assert tensor.dtype == torch.bfloat16
        else:
            assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name])


def test_a_layer_made_in_inference_mode_runs_in_any() -> None:
    """It counts the load in its own tensors."""
    weights = make_weights(E, K, N)
    with torch.inference_mode():
        layer = load(make_layer(enable_eplb=True), weights)
    check(layer, weights)
    with torch.inference_mode():
        check(layer, weights)
    assert layer.eplb_state.expert_load_view.sum() == 2 * T * TOP_K


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
    with pytest.raises(RuntimeError, match="w13_weight of .* is on the meta device, which keeps no values"):
        load(far.to("meta"), weights)
    quantized = {"quant_config": OnlineIntConfig(group_size=32), "intermediate_size": 64}
    processed = load(make_layer(**quantized), make_weights(E, K, 64))
    processed.process_weights_after_loading()
    for layer in (make_layer(), make_layer(**quantized), processed):
        with pytest.raises(RuntimeError, match="the weights of .* are on the meta device and have no values"):
            layer.to("meta")(*make_inputs(T, K, E))


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
    with pytest.raises(TypeError, match="e_score_correction_bias is a Linear"):
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

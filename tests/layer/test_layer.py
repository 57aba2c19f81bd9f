"""The layer in one process: its options against plain loops, and what it refuses."""

from __future__ import annotations

from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moe_ep.config import FusedMoEParallelConfig
from moe_ep.errors import ConfigError
from moe_ep.hf.routed_experts import RoutedExperts
from moe_ep.hf.steps import StepCoordinator
from moe_ep.layer import FusedMoE
from moe_ep.layer.methods import relative_error, tolerance
from moe_ep.layer.stack import SharedExperts
from moe_ep.observability.stages import STAGES, Listener, listening, record
from tests.layer.moe_oracle import load, make_inputs, make_weights, run_moe
from tests.layer.small_layer import F32, TOP_K, E, K, N, T, check, make_layer


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


@pytest.mark.parametrize(("capacity", "parts"), [(None, [T]), (T, [T]), (4, [4, 4, 1]), (3, [3, 3, 3])])
@pytest.mark.parametrize("shared", [True, False])
def test_tokens_go_in_parts_of_the_capacity(
    monkeypatch: pytest.MonkeyPatch, shared: bool, capacity: int | None, parts: list[int]
) -> None:
    class Heard(Listener):
        def routed(self, layer: FusedMoE, topk_ids: torch.Tensor) -> None:
            seen.append((layer, len(topk_ids)))

    seen: list[tuple[FusedMoE, int]] = []
    layer = load(make_layer(shared_experts=SharedExperts(K, N) if shared else None), make_weights(E, K, N))
    inputs = make_inputs(T, K, E)
    whole = layer(*inputs)
    monkeypatch.setattr(layer.prepare_finalize, "max_num_tokens_per_rank", lambda: capacity)
    with listening(Heard()):
        assert relative_error(layer(*inputs), whole) < F32
    assert seen == [(layer, part) for part in parts]


def test_a_check_asks_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a layer with a second one for decoding, and before there is any."""
    steps = StepCoordinator(None)
    sizes: dict = {"num_experts": E, "top_k": TOP_K, "hidden_size": K, "intermediate_size": N, "ep_size": 1}
    layer = RoutedExperts(coordinator=steps, decode_max_num_tokens=2, **sizes)
    steps.add(layer)
    layer.check()
    backends = [layer.prepare_finalize]
    with steps.pretending(2):
        backends.append(layer.prepare_finalize)
    asked = []
    for number, backend in enumerate(backends):
        monkeypatch.setattr(backend, "check", lambda number=number: asked.append(number))
    layer.check()
    assert asked == [0, 1]
    # Before ranks agree on the next step.
    assert steps.begin(1) is not None
    assert asked == [0, 1] * 2


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
    layer = make_layer(n_shared_experts=2, num_redundant_experts=redundant, enable_eplb=redundant > 0)
    check(load(layer, weights), weights, num_routed=E)


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


def test_numbers_of_numpy_are_numbers() -> None:
    weights, factor = make_weights(E, K, N), np.float32(2.5)
    layers = [load(make_layer(routed_scaling_factor=number), weights) for number in (factor, float(factor))]
    assert torch.equal(*(layer(*make_inputs(T, K, E)) for layer in layers))


@pytest.mark.parametrize(
    ("returned", "held"),
    [
        (torch.zeros(T, K + 1), rf"\({T}, {K + 1}\)"),
        (torch.zeros(T), rf"\({T},\)"),
        ([1.0], "list"),
        (None, "NoneType"),
    ],
)
def test_shared_experts_that_return_something_else_are_named(returned: Any, held: str) -> None:
    layer = load(make_layer(shared_experts=lambda x: returned, prefix="sharing"), make_weights(E, K, N))
    with pytest.raises(ValueError, match=rf"shared_experts of sharing returned {held}; it must be a tensor of its"):
        layer(*make_inputs(T, K, E))


def test_ungated_shared_experts() -> None:
    shared = SharedExperts(K, N, "relu2_no_mul")
    x = torch.randn(T, K)
    assert [name for name, _ in shared.named_parameters()] == ["gate_proj.weight", "down_proj.weight"]
    assert relative_error(shared(x), shared.down_proj(shared.gate_proj(x).relu().square())) < F32


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


def test_gate_and_up_that_end_at_a_limit() -> None:
    weights = make_weights(E, K, N)
    layer = load(make_layer(swiglu_limit=0.5), weights)
    hidden_states, router_logits = make_inputs(T, K, E)
    unlimited = run_moe(weights, hidden_states, router_logits, TOP_K)
    weights.limit = 0.5
    expected = run_moe(weights, hidden_states, router_logits, TOP_K)
    assert relative_error(unlimited, expected) > 0.1
    assert relative_error(layer(hidden_states, router_logits), expected) < F32


def test_shared_experts_with_a_limit() -> None:
    shared = SharedExperts(K, N, clamp_limit=0.25)
    x = torch.randn(T, K)
    hidden = F.silu(shared.gate_proj(x).clamp(max=0.25)) * shared.up_proj(x).clamp(-0.25, 0.25)
    assert relative_error(shared(x), shared.down_proj(hidden)) < F32


def test_a_limit_without_a_gate_is_refused() -> None:
    with pytest.raises(ValueError, match="swiglu_limit.* is 7.0 and relu2_no_mul has no gate"):
        make_layer(activation="relu2_no_mul", swiglu_limit=7.0)


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
        ({"routed_scaling_factor": "x"}, "routed_scaling_factor is 'x'; it must be a finite number"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor is nan; it must be a finite number"),
        ({"scoring_func": "tanh"}, "scoring_func is 'tanh'; it must be one of softmax, sigmoid"),
        ({"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 1}, "num_expert_group is 4; it must divide"),
        ({"experts": "fast"}, "experts is 'fast'; it must be one of auto"),
        ({"all2all_backend": "pigeon", "ep_size": 1}, "all2all_backend is 'pigeon'; it must be one of auto, no_ep"),
        ({"all2all_backend": ["no_ep"]}, r"all2all_backend is \[.no_ep.\]; it must be one of auto, no_ep"),
        ({"expert_placement_strategy": "random"}, "expert_placement_strategy is 'random'"),
        ({"ep_size": 2, "tp_size": 3}, "ep_size is 2; it must be 1"),
        ({"parallel_config": FusedMoEParallelConfig(), "tp_size": 2}, "tp_size is 2 and parallel_config has 1; give"),
        ({"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
        ({"intermediate_size": 0}, "^intermediate_size is 0; it must be at least 1"),
        ({"top_k": 2.0}, "top_k is 2.0; it must be a whole number"),
        ({"n_shared_experts": True}, "n_shared_experts is True; it must be a whole number"),
        ({"zero_expert_num": 1.0}, "zero_expert_num is 1.0; it must be a whole number"),
        ({"shared_experts": "mlp"}, "shared_experts is 'mlp'; it must be a module"),
        ({"parallel_config": 1}, "parallel_config is 1; it must be a FusedMoEParallelConfig"),
        ({"custom_routing_function": "even"}, "custom_routing_function is 'even'; it must be a function"),
    ],
)
def test_refuses_bad_arguments(options: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make_layer(**options)


@pytest.mark.parametrize(
    ("num_experts", "redundant", "way_out"),
    [(130, 0, 2), (130, 1, 2), (128, 3, 4)],
)
def test_physical_experts_must_divide_evenly(num_experts: int, redundant: int, way_out: int) -> None:
    with pytest.raises(ConfigError, match=f"num_redundant_experts={way_out}$"):
        make_layer(
            num_experts=num_experts,
            num_redundant_experts=redundant,
            enable_eplb=True,
            parallel_config=FusedMoEParallelConfig.make(ep_size=4),
        )


@pytest.mark.parametrize(("redundant", "ep_size"), [(2, 1), (1, 1), (4, 4)])
def test_redundant_experts_without_eplb_are_refused(redundant: int, ep_size: int) -> None:
    with pytest.raises(ConfigError, match=f"num_redundant_experts is {redundant} and enable_eplb"):
        make_layer(
            num_experts=128,
            num_redundant_experts=redundant,
            parallel_config=FusedMoEParallelConfig.make(ep_size=ep_size),
        )


def test_more_redundant_experts_than_anybody_needs() -> None:
    with pytest.raises(ValueError, match="num_redundant_experts is 36"):
        make_layer(
            num_experts=8,
            num_redundant_experts=36,
            enable_eplb=True,
            parallel_config=FusedMoEParallelConfig.make(ep_size=4),
        )


def test_refuses_inputs_that_do_not_fit() -> None:
    layer = load(make_layer(), make_weights(E, K, N))
    with pytest.raises(ValueError, match=r"hidden_states is \(3, 16\) of torch.float32"):
        layer(torch.zeros(3, 16), torch.zeros(3, E))
    with pytest.raises(ValueError, match=r"hidden_states is \(3, 32\) of torch.float16"):
        layer(torch.zeros(3, K, dtype=torch.float16), torch.zeros(3, E))
    with pytest.raises(ValueError, match=r"router_logits has shape \(2, 6\)"):
        layer(torch.zeros(3, K), torch.zeros(2, E))
    # Left on the meta device, they would have made an output without values.
    with pytest.raises(ValueError, match="router_logits is on meta and hidden_states on cpu"):
        layer(torch.zeros(3, K), torch.zeros(3, E, device="meta"))


@pytest.mark.parametrize("name", ["forward_impl", "forward_impl_chunked", "forward_routed", "to_physical"])
@pytest.mark.parametrize("eplb", [False, True])
def test_parts_of_a_pass_refuse_what_is_no_tensor(name: str, eplb: bool) -> None:
    layer = load(make_layer(enable_eplb=eplb), make_weights(E, K, N))
    hidden_states, logits = make_inputs(T, K, E)
    weights, ids = logits.softmax(-1).topk(TOP_K)
    given = {"forward_routed": (hidden_states, weights, ids), "to_physical": (weights, ids)}.get(
        name, (hidden_states, logits)
    )
    call = getattr(layer, name)
    arguments = list(signature(call).parameters)
    expected = call(*given)
    for index, argument in enumerate(arguments):
        for wrong in (None, [[1.0]], given[index].numpy()):
            with pytest.raises(ValueError, match=f"^{argument} is .*; it must be a tensor"):
                call(*given[:index], wrong, *given[index + 1 :])
    if argument == "topk_ids":
        for dtype in (torch.float32, torch.bool):
            with pytest.raises(ValueError, match=f"topk_ids is {dtype}; it must be uint8"):
                call(*given[:-1], ids.to(dtype))
    else:
        with pytest.raises(ValueError, match="router_logits has shape"):
            call(hidden_states, logits[1:])
    torch.testing.assert_close(call(*given), expected)


def test_eplb_state_is_checked() -> None:
    with pytest.raises(ValueError, match="was made without EPLB"):
        make_layer().set_eplb_state(0, *[torch.zeros(1)] * 3)
    good = [torch.zeros(shape, dtype=torch.int32) for shape in ((2, E), (2, E, 1), (2, E))]
    for index in (-1, 2):
        with pytest.raises(ValueError, match=rf"moe_layer_idx \({index}\) below L"):
            make_layer(enable_eplb=True).set_eplb_state(index, *good)
    make_layer(enable_eplb=True).set_eplb_state(0, *good)
    with pytest.raises(ValueError, match=r"expert_load_view has shape \(2, 5\)"):
        make_layer(enable_eplb=True).set_eplb_state(0, torch.zeros(2, 5, dtype=torch.int32), *good[1:])
    for index, changed, message in (
        (0, torch.zeros(2, E), "expert_load_view is torch.float32; it must be torch.int32"),
        (1, None, "logical_to_physical_map is None; it must be a tensor"),
        (2, torch.ones(2, E), "logical_replica_count is torch.float32; it must be uint8"),
    ):
        with pytest.raises(ValueError, match=message):
            make_layer(enable_eplb=True).set_eplb_state(0, *good[:index], changed, *good[index + 1 :])
    with pytest.raises(TypeError, match="moe_layer_idx is '0'"):
        make_layer(enable_eplb=True).set_eplb_state("0", *good)


def test_a_layer_is_placed_before_it_is_loaded() -> None:
    backwards = list(range(E))[::-1]
    hidden_states, logits = make_inputs(T, K, E)
    placed, layer = make_layer(enable_eplb=True), make_layer(enable_eplb=True)
    placed.place(backwards)
    assert placed.slots.logical_of_physical() == backwards
    params = dict(layer.named_parameters())
    layer.weight_loader(params["w2_weight"], make_weights(E, K, N).down[0], "w2", "w2", 0)
    with pytest.raises(RuntimeError, match=f"{layer.layer_name} has weights"):
        layer.place(backwards)
    load(placed, make_weights(E, K, N))
    load(layer, make_weights(E, K, N))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{layer.layer_name} has weights"):
            layer.place(backwards)
        torch.testing.assert_close(layer(hidden_states, logits), placed(hidden_states, logits))
    layer.begin_reload()
    with pytest.raises(RuntimeError, match=f"{layer.layer_name} has weights"):
        layer.place(backwards)


@pytest.mark.parametrize("placement", [[0], [*range(E), 0], [E, *range(1, E)], [-2, *range(1, E)]])
def test_a_placement_that_does_not_fit(placement: list[int]) -> None:
    layer = make_layer(enable_eplb=True)
    with pytest.raises(ValueError, match="physical_to_logical is"):
        layer.place(placement)
    assert layer.slots.logical_of_physical() == list(range(E))


def test_a_layer_of_many_ranks_needs_their_process_group() -> None:
    layer = make_layer(parallel_config=FusedMoEParallelConfig.make(ep_size=2, rank=1))
    assert layer.w13_weight.shape == (3, 2 * N, K)
    with pytest.raises(RuntimeError, match="one of 2 ranks and torch.distributed is not initialised"):
        layer(*make_inputs(T, K, E))


def test_gradients_are_refused() -> None:
    layer = make_layer()
    x, logits = torch.randn(3, K, requires_grad=True), torch.randn(3, E)
    with pytest.raises(RuntimeError, match=r"are for inference and have no backward"):
        layer(x, logits)
    with torch.no_grad():
        layer(x, logits)
    # Else the derivative would be zero.
    with pytest.raises(RuntimeError, match=r"have no derivative, as torch\.func\.jvp asks"):
        torch.func.jvp(lambda rows: layer(rows, logits), (x.detach(),), (x.detach(),))
    torch.func.jvp(lambda rows: layer(rows.detach(), logits), (x.detach(),), (x.detach(),))


def test_a_mistake_in_experts_of_ones_own_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer()

    def broken(*_: object) -> None:
        raise AttributeError("no attribute 'wieghts'")

    monkeypatch.setattr(layer.quant_method, "select_gemm_impl", broken)
    with pytest.raises(RuntimeError, match="^the experts of .* cannot be made: no attribute 'wieghts'"):
        layer(torch.randn(3, K), torch.randn(3, E))

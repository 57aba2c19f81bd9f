"""Every kind of parameter from a checkpoint's tensor to its place: halves, TP parts, slots, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_ep.config import FusedMoEParallelConfig
from moe_ep.layer import FusedMoE
from moe_ep.layer.expert_slots import ExpertSlots, initial_physical_to_logical
from moe_ep.layer.weight_loading import (
    ExpertWeightLoader,
    ParamLayout,
    bias_layout,
    weight_layout,
)

E, K, N = 4, 16, 24


def make_loader(*, gated: bool = True, tp_rank: int = 0, tp_size: int = 1, **slots: object) -> ExpertWeightLoader:
    settings: dict = {"num_experts": E} | slots
    return ExpertWeightLoader(
        name="layer", slots=ExpertSlots(**settings), gated=gated, tp_rank=tp_rank, tp_size=tp_size
    )


def declare(loader: ExpertWeightLoader, name: str, shape: tuple[int, ...], layout: ParamLayout) -> nn.Parameter:
    param = nn.Parameter(torch.full(shape, -1.0), requires_grad=False)
    loader.declare(name, layout)
    return param


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def laid_out(gemm: str, out_dim: int | None = None, in_dim: int | None = None) -> ParamLayout:
    """A parameter with outputs along one dimension and inputs along another, of which w13 is divided by the outputs."""
    if gemm == "w13":
        return ParamLayout(gemm=gemm, halves_dim=out_dim, tp_dim=out_dim)
    return ParamLayout(gemm=gemm, tp_dim=in_dim)


# kind of parameter, its layout, one expert's slot on one rank of two, the tensor on disk, and (dim of halves, TP dim).
W13_CASES = {
    "weight": (weight_layout("w13"), (2 * N // 2, K), (N, K), 0, 0),
    "transposed": (laid_out("w13", 1, 0), (K, 2 * N // 2), (K, N), 1, 1),
    "bias": (bias_layout("w13"), (2 * N // 2,), (N,), 0, 0),
    "tensor scale": (ParamLayout(gemm="w13", halves_dim=0), (2,), (), 0, None),
    "channel scale": (laid_out("w13", 0), (2 * N // 2, 1), (N, 1), 0, 0),
    "group scale": (laid_out("w13", 0, 1), (2 * N // 2, K // 8), (N, K // 8), 0, 0),
    "transposed group scale": (laid_out("w13", 1, 0), (2, N), (2, N), 1, 1),
    "block scale": (laid_out("w13", 0, 1), (2 * 3, 2), (6, 2), 0, 0),
    "g_idx": (laid_out("w13", in_dim=0), (K,), (K,), None, None),
}
W2_CASES = {
    "weight": (weight_layout("w2"), (K, N // 2), (K, N), 1),
    "transposed": (laid_out("w2", 1, 0), (N // 2, K), (N, K), 0),
    "tensor scale": (laid_out("w2"), (), (1,), None),
    "channel scale": (laid_out("w2", 0), (K, 1), (K, 1), None),
    "group scale": (laid_out("w2", 0, 1), (K, 3), (K, 6), 1),
    "transposed group scale": (laid_out("w2", 1, 0), (3, K), (6, K), 0),
    "block scale": (laid_out("w2", 0, 1), (2, 3), (2, 6), 1),
    "g_idx": (laid_out("w2", in_dim=0), (N // 2,), (N,), 0),
}


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("case", W13_CASES)
def test_w13_takes_gate_and_up_as_halves_and_this_ranks_rows(case: str, tp_rank: int) -> None:
    layout, slot_shape, disk_shape, halves_dim, tp_dim = W13_CASES[case]
    loader = make_loader(tp_rank=tp_rank, tp_size=2)
    param = declare(loader, "w13", (E, *slot_shape), layout)
    gate = numbered(*disk_shape)
    up = gate if halves_dim is None else numbered(*disk_shape, start=1000)
    assert loader.load("w13", param, gate, "gate", "w1", 2)
    assert loader.load("w13", param, up, "up", "w3", 2)
    parts = [part if tp_dim is None else part.chunk(2, tp_dim)[tp_rank] for part in (gate, up)]
    expected = (
        parts[0] if halves_dim is None else torch.cat([part.reshape(part.shape or (1,)) for part in parts], halves_dim)
    )
    assert torch.equal(param[2], expected)
    assert bool((param[[0, 1, 3]] == -1).all())


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("case", W2_CASES)
def test_w2_takes_this_ranks_input_columns(case: str, tp_rank: int) -> None:
    layout, slot_shape, disk_shape, tp_dim = W2_CASES[case]
    loader = make_loader(tp_rank=tp_rank, tp_size=2)
    param = declare(loader, "w2", (E, *slot_shape), layout)
    down = numbered(*disk_shape)
    assert loader.load("w2", param, down, "down", "w2", 1)
    expected = down if tp_dim is None else down.chunk(2, tp_dim)[tp_rank]
    assert torch.equal(param[1], expected.reshape(slot_shape))


def test_w2_bias_is_on_one_tp_rank_only() -> None:
    for tp_rank, expected in ((0, numbered(K)), (1, torch.zeros(K))):
        loader = make_loader(tp_rank=tp_rank, tp_size=2)
        param = declare(loader, "w2_bias", (E, K), bias_layout("w2"))
        loader.load("w2_bias", param, numbered(K), "down.bias", "w2", 0)
        assert torch.equal(param[0], expected)


def test_all_experts_at_once() -> None:
    expert_map = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)
    loader = make_loader(expert_map=expert_map)
    param = declare(loader, "w13_weight", (2, 2 * N, K), weight_layout("w13"))
    gate, up = numbered(E, N, K), numbered(E, N, K, start=7)
    assert loader.load("w13_weight", param, gate, "gate", "w1", 99)
    assert loader.load("w13_weight", param, up, "up", "w3", 0)
    assert torch.equal(param, torch.cat([gate, up], dim=1)[[1, 3]])
    with pytest.raises(ValueError, match="expected all 4 experts .* found shape \\(3, 24, 16\\)"):
        loader.load("w13_weight", param, gate[:3], "gate", "w1", 0)


def test_all_experts_at_once_with_shared_ones_behind_them() -> None:
    loader = make_loader(num_fused_shared_experts=2, expert_map=torch.tensor([-1, 0, -1, 1], dtype=torch.int32))
    param = declare(loader, "w2_weight", (4, K, N), weight_layout("w2"))
    down = numbered(E + 2, K, N)
    assert loader.load("w2_weight", param, down, "down", "w2", 0)
    assert torch.equal(param, down[[1, 3, 4, 5]])


def test_floats_are_cast_and_codes_must_have_the_dtype() -> None:
    loader = make_loader()
    for dtype, other in ((torch.float32, torch.bfloat16), (torch.int32, torch.int32)):
        param = nn.Parameter(torch.zeros(E, K, N, dtype=dtype), requires_grad=False)
        loader.declare("w2_weight", weight_layout("w2"))
        assert loader.load("w2_weight", param, numbered(K, N).to(other), "down", "w2", 1)
        assert torch.equal(param[1], numbered(K, N).to(other).to(dtype))


def test_what_is_missing() -> None:
    """Nothing before loading begins; then each tensor that is not optional, of an ungated w13 in one shard."""
    loader = make_loader(gated=False, expert_map=torch.tensor([0, -1, 1, -1], dtype=torch.int32))
    param = declare(loader, "w13_weight", (2, N, K), weight_layout("w13"))
    loader.declare("w2_weight", weight_layout("w2"))
    loader.declare("w2_g_idx", ParamLayout(gemm="w2", optional=True))
    assert loader.missing() == [] and loader.slots_loaded_again is None
    loader.load("w13_weight", param, numbered(N, K), "up", "w1", 2)
    assert loader.missing() == [
        "w13_weight of local expert 0 (shard w1)",
        "w2_weight of local expert 0 (shard w2)",
        "w2_weight of local expert 1 (shard w2)",
    ]


def test_an_expert_elsewhere_is_not_touched() -> None:
    loader = make_loader(expert_map=torch.tensor([0, -1, 1, -1], dtype=torch.int32))
    param = declare(loader, "w2_weight", (2, K, N), weight_layout("w2"))
    assert loader.load("w2_weight", param, torch.empty(K, N, device="meta"), "down", "w2", 1) is False
    assert bool((param == -1).all())
    assert loader.load("w2_weight", param, numbered(K, N), "down", "w2", 2) is True
    assert torch.equal(param[1], numbered(K, N))


def test_ids_of_loading() -> None:
    assert initial_physical_to_logical(3, 4) == [0, 1, 2, 0, 1, 2, 0]
    slots = ExpertSlots(num_experts=3, num_redundant_experts=4, num_fused_shared_experts=2)
    assert [slots.of_id(expert_id) for expert_id in range(9)] == [[i] for i in range(9)]
    assert slots.of_checkpoint_expert(0) == [0, 3, 6]
    assert slots.of_checkpoint_expert(4) == [8]
    with pytest.raises(ValueError, match=r"expert_id is 9"):
        slots.of_id(9)

    # EPLB gave expert 2 five replicas: every one of them is filled by one of the two ids that copy it.
    moved = [[0], [1], [2, 3, 4, 5, 6]]
    slots = ExpertSlots(num_experts=3, num_redundant_experts=4, replicas=moved.__getitem__)
    assert [slots.of_id(expert_id) for expert_id in range(7)] == [[0], [1], [2, 4, 6], [], [], [3, 5], []]


def test_mapping_has_a_row_for_each_physical_expert_and_shard() -> None:
    mapping = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", 2, num_redundant_experts=1)
    assert mapping == [
        ("experts.w13_", "experts.0.gate_proj.", 0, "w1"),
        ("experts.w2_", "experts.0.down_proj.", 0, "w2"),
        ("experts.w13_", "experts.0.up_proj.", 0, "w3"),
        ("experts.w13_", "experts.1.gate_proj.", 1, "w1"),
        ("experts.w2_", "experts.1.down_proj.", 1, "w2"),
        ("experts.w13_", "experts.1.up_proj.", 1, "w3"),
        ("experts.w13_", "experts.0.gate_proj.", 2, "w1"),
        ("experts.w2_", "experts.0.down_proj.", 2, "w2"),
        ("experts.w13_", "experts.0.up_proj.", 2, "w3"),
    ]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("", "down", "up"), "ckpt_gate_proj_name is ''; it must be what the checkpoint calls that projection"),
        (("gate", None, "up"), "ckpt_down_proj_name is None; it must be what the checkpoint calls that projection"),
        (("gate", "down", None), "ckpt_up_proj_name is None; it must be a name, empty for experts without a gate"),
    ],
)
def test_a_mapping_needs_names(names: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedMoE.make_expert_params_mapping(*names, 2)


def make_layer(**options: object) -> FusedMoE:
    settings: dict = {"num_experts": E, "top_k": 2, "hidden_size": K, "intermediate_size": N} | options
    return FusedMoE(**settings)


def test_return_value_of_weight_loader() -> None:
    layer = make_layer(parallel_config=FusedMoEParallelConfig.make(ep_size=2, rank=1))
    down = numbered(K, N)
    assert layer.weight_loader(layer.w2_weight, down, "down", "w2", 3) is None
    assert layer.weight_loader(layer.w2_weight, down, "down", "w2", 3, return_success=True) is True
    assert layer.weight_loader(layer.w2_weight, down, "down", "w2", 0, return_success=True) is False
    assert [layer.is_local_expert(expert) for expert in range(E)] == [False, False, True, True]


def test_load_weights_by_names_of_the_checkpoint() -> None:
    mapping = FusedMoE.make_expert_params_mapping("w1", "w2", "w3", E)
    layer = make_layer(expert_mapping=mapping, prefix="loaded.by.name")
    names = [f"model.layers.0.mlp.experts.{e}.{shard}.weight" for e in range(E) for shard in ("w1", "w2", "w3")]
    shapes = {"w1": (N, K), "w3": (N, K), "w2": (K, N)}
    weights = [(name, numbered(*shapes[name.split(".")[-2]])) for name in names]
    assert layer.load_weights([*weights, ("model.norm.weight", numbered(K))]) == {"w13_weight", "w2_weight"}
    assert torch.equal(layer.w13_weight[3, :N], numbered(N, K))
    layer.check_loaded()
    with pytest.raises(ValueError, match=r"experts.0.w1.bias: the layer loaded.by.name has no parameter w13_bias"):
        layer.load_weights([("experts.0.w1.bias", numbered(N))])
    with pytest.raises(ValueError, match="load_weights needs expert_mapping"):
        make_layer().load_weights([])
    with pytest.raises(TypeError, match=r"weights is a dict"):
        layer.load_weights(dict(weights))
    for wrong, words in (
        ([(3, numbered(K))], "weights has the pair \\(3, Tensor\\); it must be pairs of a name and a tensor"),
        ([(names[0], 3)], f"weights has the pair \\('{names[0]}', int\\); it must be pairs"),
        ([names[0]], "weights has a str; it must be pairs"),
        (None, "weights is None; it must be pairs"),
    ):
        with pytest.raises(TypeError, match=f"^{words}"):
            layer.load_weights(wrong)


def test_half_loaded_layers_do_not_run() -> None:
    layer = make_layer(prefix="half.loaded")
    for expert in range(E):
        layer.weight_loader(layer.w2_weight, numbered(K, N), "down", "w2", expert)
        layer.weight_loader(layer.w13_weight, numbered(N, K), "gate", "w1", expert)
        if expert != 2:
            layer.weight_loader(layer.w13_weight, numbered(N, K), "up", "w3", expert)
    message = r"weights of half.loaded are not complete: w13_weight of local expert 2 \(shard w3\) were not loaded"
    with pytest.raises(RuntimeError, match=message):
        layer(torch.zeros(1, K), torch.zeros(1, E))
    with pytest.raises(RuntimeError, match=message):
        layer.process_weights_after_loading()
    layer.loader.declare("w3_weight", weight_layout("w2"))
    with pytest.raises(RuntimeError, match=r"local expert 2 \(shard w3\) and 4 more were not loaded"):
        layer.check_loaded()
    for expert in range(E):
        layer.loader.load("w3_weight", layer.w2_weight, numbered(K, N), "down", "w2", expert)
    layer.weight_loader(layer.w13_weight, numbered(N, K), "up", "w3", 2)
    assert layer(torch.zeros(1, K), torch.zeros(1, E)).shape == (1, K)


@pytest.mark.parametrize(
    ("tensor", "shard_id", "message"),
    [
        (
            torch.zeros(N, K + 1),
            "w1",
            r"x.weight: w13_weight expected shape \(24, 16\) of torch.float32, found \(24, 17\)",
        ),
        (torch.zeros(2 * N, K), "w3", r"expected shape \(24, 16\) .* found \(48, 16\)"),
        (torch.zeros(N, K, dtype=torch.int32), "w1", r"of torch.float32, found \(24, 16\) of torch.int32"),
        (torch.zeros(N, K, dtype=torch.float8_e4m3fn), "w1", "of torch.float32, found .* of torch.float8_e4m3fn"),
        (torch.zeros(N, K), "w2", "for w13_weight shard_id is 'w2'; it must be one of w1, w3"),
        (torch.zeros(N, K), "gate", "shard_id is 'gate'"),
        (torch.zeros(N, K, device="meta"), "w1", "x.weight: loaded_weight is on the meta device and has no values"),
        (torch.zeros(N, K).numpy(), "w1", "x.weight: loaded_weight is a ndarray; it must be a tensor"),
        (None, "w1", "x.weight: loaded_weight is None; it must be a tensor"),
    ],
)
def test_refuses_a_tensor_that_does_not_fit(tensor: torch.Tensor, shard_id: str, message: str) -> None:
    layer = make_layer()
    with pytest.raises(ValueError, match=message):
        layer.weight_loader(layer.w13_weight, tensor, "x.weight", shard_id, 0)


def test_refuses_what_is_not_an_expert_parameter() -> None:
    layer = make_layer(activation="silu_no_mul", prefix="ungated")
    with pytest.raises(
        ValueError, match="x: param is not one of the expert parameters of ungated: w13_weight, w2_weight"
    ):
        layer.weight_loader(make_layer().w2_weight, torch.zeros(K, N), "x", "w2", 0)
    with pytest.raises(ValueError, match="shard_id is 'w3'; it must be one of w1"):
        layer.weight_loader(layer.w13_weight, torch.zeros(N, K), "x", "w3", 0)


def test_gate_and_up_must_agree_on_what_they_share() -> None:
    loader = make_loader()
    param = declare(loader, "w13_g_idx", (E, K), laid_out("w13", in_dim=0))
    loader.load("w13_g_idx", param, numbered(K), "gate.g_idx", "w1", 0)
    with pytest.raises(ValueError, match="up.g_idx: expected what the other half of w13 has"):
        loader.load("w13_g_idx", param, numbered(K) + 1, "up.g_idx", "w3", 0)

"""The packed experts in plain torch against weights dequantized by hand, both formats, and the checks."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.errors import BackendUnavailableError
from moe_ep.kernels.marlin.compute import sort_by_expert
from moe_ep.kernels.marlin.experts import BatchedMarlinExperts, MarlinExperts
from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe, fused_marlin_moe
from moe_ep.kernels.marlin.gemm import run_experts
from moe_ep.kernels.marlin.pair import WeightPair
from moe_ep.kernels.marlin.params import Rows
from moe_ep.kernels.marlin.repack import PackedWeights, pack_marlin
from moe_ep.kernels.marlin.types import WEIGHT_TYPES, WeightType
from moe_ep.kernels.marlin.weights import Weights
from moe_ep.modular_kernel import ExpertTokensMetadata
from moe_ep.scalar_type import scalar_types

E, K, N, ROWS = 3, 128, 64, 6
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
RELATIVE_ERROR = 0.01  # mean |d| / mean |ref|, the tolerance of all quantized experts


class Made(NamedTuple):
    """Packed weights, the values they stand for, and the global scales."""

    packed: PackedWeights
    values: torch.Tensor
    alphas: torch.Tensor | None


def make(
    kind: WeightType,
    group: int,
    out: int,
    columns: int,
    gated: bool,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    act_order: bool = False,
) -> Made:
    """Random weights of one kind with values of order 0.1."""
    rng = torch.Generator().manual_seed(seed)
    groups = 1 if group == -1 else columns // group
    codes = torch.randint(0, 1 << kind.bits, (E, out, columns), dtype=torch.uint8, generator=rng)
    steps = torch.rand(E, out, groups, generator=rng) * 0.03 + 0.003
    alphas = zeros = g_idx = None
    if kind.scalar_type == scalar_types.float8_e4m3fn:
        codes[codes & 0x7F == 0x7F] = 0  # NaN
        values, scales = codes.view(torch.float8_e4m3fn).float(), (steps * 0.1).to(dtype)
    elif kind.scalar_type == scalar_types.float4_e2m1f:
        values = E2M1[codes.long()]
        if group == 16:
            scales, alphas = (steps * 64).to(torch.float8_e4m3fn), torch.rand(E, generator=rng) * 0.05 + 0.01
        else:
            scales = torch.randint(119, 124, steps.shape, dtype=torch.uint8, generator=rng)
    else:
        values, scales = codes.float() - kind.scalar_type.bias, (steps * (0.1 if kind.bits == 8 else 1)).to(dtype)
        if kind.has_zero_points:
            zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, generator=rng)
    column_group = (torch.arange(columns) // (columns // groups)).expand(E, columns)
    if act_order:
        g_idx = torch.stack([c[torch.randperm(columns, generator=rng)] for c in column_group]).to(torch.int32)
        column_group = g_idx.long()
    spread = column_group[:, None, :].expand(codes.shape)
    if zeros is not None:
        values = values - zeros.float().gather(2, spread)
    factor = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    values = values * factor.gather(2, spread)
    if alphas is not None:
        values = values * alphas[:, None, None]
    return Made(pack_marlin(codes, scales, kind.scalar_type.id, group, zeros, gated, g_idx), values, alphas)


def arguments(first: Made, second: Made, kind: WeightType, activation: MoEActivation) -> dict:
    """What both functions take beside the rows."""
    return {
        "w1": first.packed.qweight,
        "w2": second.packed.qweight,
        "bias1": None,
        "bias2": None,
        "w1_scale": first.packed.scales,
        "w2_scale": second.packed.scales,
        "quant_type_id": kind.scalar_type.id,
        "w1_zeros": first.packed.zeros,
        "w2_zeros": second.packed.zeros,
        "global_scale1": first.alphas,
        "global_scale2": second.alphas,
        "g_idx1": first.packed.g_idx,
        "g_idx2": second.packed.g_idx,
        "sort_indices1": first.packed.sort_indices,
        "sort_indices2": second.packed.sort_indices,
        "activation": activation,
    }


def reference(rows: torch.Tensor, first: Made, second: Made, expert: int, activation: MoEActivation) -> torch.Tensor:
    hidden = apply_activation(activation, F.linear(rows.float(), first.values[expert]))
    return F.linear(hidden, second.values[expert])


def pair(kind: WeightType, group: int, activation: MoEActivation, **more) -> tuple[Made, Made]:
    gated = activation.is_gated
    return (
        make(kind, group, 2 * N if gated else N, K, gated, 1, **more),
        make(kind, min(group, N), K, N, False, 2, **more),
    )


def is_close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got.float() - expected).abs().mean() < RELATIVE_ERROR * expected.abs().mean())


KINDS = [(kind, group) for kind in WEIGHT_TYPES.values() for group in kind.group_sizes if group != 128]


@pytest.mark.parametrize(("kind", "group"), KINDS, ids=lambda v: str(getattr(v, "scalar_type", v)))
@pytest.mark.parametrize("activation", list(MoEActivation))
def test_batched_experts_equal_the_dequantized_product(kind: WeightType, group: int, activation: MoEActivation) -> None:
    first, second = pair(kind, group, activation)
    rows = torch.randn(E, ROWS, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    counts = [ROWS, 0, 2]
    for expert, count in enumerate(counts):
        rows[expert, count:] = float("nan")
    output = torch.full((E, ROWS, K), 7.0, dtype=torch.bfloat16)
    numbers = torch.tensor(counts, dtype=torch.int32)
    batched_fused_marlin_moe(rows, numbers, output=output, **arguments(first, second, kind, activation))
    for expert, count in enumerate(counts):
        if count:
            expected = reference(rows[expert, :count], first, second, expert, activation)
            assert is_close(output[expert, :count], expected)
        assert (output[expert, count:] == 7.0).all()


def test_act_order_reads_the_columns_where_they_were() -> None:
    kind = WEIGHT_TYPES[scalar_types.uint4b8.id]
    first, second = pair(kind, 32, MoEActivation.SILU, act_order=True)
    rows = torch.randn(E, ROWS, K).bfloat16()
    numbers = torch.full((E,), ROWS, dtype=torch.int32)
    output = batched_fused_marlin_moe(rows, numbers, **arguments(first, second, kind, MoEActivation.SILU))
    for expert in range(E):
        assert is_close(output[expert], reference(rows[expert], first, second, expert, MoEActivation.SILU))


def test_biases_and_rows_by_reference() -> None:
    kind, activation = WEIGHT_TYPES[scalar_types.uint4b8.id], MoEActivation.SWIGLUOAI
    first, second = pair(kind, 32, activation)
    bias1, bias2 = torch.randn(E, 2 * N).bfloat16(), torch.randn(E, K).bfloat16()
    shared = torch.randn(9, K).bfloat16()
    ids = torch.randint(0, 9, (E, ROWS), dtype=torch.int32)
    ids[:, 4:] = -77  # behind the counts: not row numbers
    more = arguments(first, second, kind, activation) | {"bias1": bias1, "bias2": bias2}
    output = batched_fused_marlin_moe(shared, torch.tensor([4, 4, 4], dtype=torch.int32), expert_row_ids=ids, **more)
    for expert in range(E):
        hidden = F.linear(shared[ids[expert, :4].long()].float(), first.values[expert], bias1[expert].float())
        expected = F.linear(apply_activation(activation, hidden), second.values[expert], bias2[expert].float())
        assert is_close(output[expert, :4], expected)


def test_tokens_with_their_experts_equal_the_batched_form() -> None:
    kind, activation = WEIGHT_TYPES[scalar_types.uint4.id], MoEActivation.SILU
    first, second = pair(kind, 32, activation)
    rng = torch.Generator().manual_seed(3)
    tokens = torch.randn(7, K, generator=rng).bfloat16()
    ids = torch.stack([torch.randperm(5, generator=rng)[:2] for _ in range(7)])
    ids[3, 1] = -1
    weights = torch.rand(7, 2, generator=rng)
    expert_map = torch.tensor([2, -1, 0, 1, -1], dtype=torch.int32)
    more = arguments(first, second, kind, activation)
    output = fused_marlin_moe(tokens, topk_weights=weights, topk_ids=ids, expert_map=expert_map, **more)
    expected = torch.zeros(7, K)
    for token in range(7):
        for slot in range(2):
            local = int(expert_map[ids[token, slot]]) if ids[token, slot] >= 0 else -1
            if local >= 0:
                row = reference(tokens[token : token + 1], first, second, local, activation)[0]
                expected[token] += weights[token, slot] * row
    assert is_close(output, expected)


def test_weights_on_the_input_and_a_sum_of_the_callers() -> None:
    kind, activation = WEIGHT_TYPES[scalar_types.uint4b8.id], MoEActivation.SILU
    first, second = pair(kind, 32, activation)
    tokens, ids, weights = torch.randn(4, K).bfloat16(), torch.tensor([[0], [2], [-1], [1]]), torch.rand(4, 1)

    def twice(rows: torch.Tensor, output: torch.Tensor) -> None:
        output.copy_(2 * rows.sum(dim=1))

    more = arguments(first, second, kind, activation)
    output = fused_marlin_moe(
        tokens, topk_weights=weights, topk_ids=ids, apply_router_weight_on_input=True, moe_sum=twice, **more
    )
    weighted = (tokens.float() * weights).bfloat16()
    for token, expert in enumerate(ids.flatten().tolist()):
        expected = torch.zeros(K)
        if expert >= 0:
            expected = 2 * reference(weighted[token : token + 1], first, second, expert, activation)[0]
        assert torch.allclose(output[token].float(), expected, rtol=0.02, atol=0.02)


def test_a_compiled_graph_holds_one_node_for_each_function() -> None:
    kind, activation = WEIGHT_TYPES[scalar_types.uint4b8.id], MoEActivation.SILU
    more = arguments(*pair(kind, 32, activation), kind, activation)
    rows, numbers = torch.randn(E, ROWS, K).bfloat16(), torch.full((E,), ROWS, dtype=torch.int32)
    ids, weights = torch.randint(-1, E, (ROWS, 2)), torch.rand(ROWS, 2)
    nodes: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def both(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            batched_fused_marlin_moe(rows, numbers, **more),
            fused_marlin_moe(rows[0], topk_weights=weights, topk_ids=ids, **more),
        )

    compiled = torch.compile(both, backend=keep, fullgraph=True)(rows)
    assert all(torch.equal(got, expected) for got, expected in zip(compiled, both(rows), strict=True))
    assert sum("marlin_experts" in node for node in nodes) == 2


def test_slots_are_sorted_by_expert_and_then_by_slot() -> None:
    rows = sort_by_expert(torch.tensor([[1, -1], [0, 1]]), 2)
    assert rows.num_tokens.tolist() == [1, 2]
    assert rows.row_ids is not None
    assert rows.row_ids.tolist()[:3] == [2, 0, 3]
    assert (rows.ids_divisor, rows.is_sorted) == (2, True)


def _configs(first: Made, second: Made, kind: WeightType) -> tuple[FusedMoEConfig, FusedMoEQuantConfig]:
    moe = FusedMoEConfig(
        num_experts=E,
        experts_per_token=2,
        hidden_dim=K,
        intermediate_size_per_partition=N,
        num_local_experts=E,
        moe_parallel_config=FusedMoEParallelConfig(),
        in_dtype=torch.bfloat16,
        max_num_tokens=ROWS,
    )
    quant = FusedMoEQuantConfig(
        quant_type_id=kind.scalar_type.id,
        group_size=32,
        w1_scale=first.packed.scales,
        w2_scale=second.packed.scales,
    )
    return moe, quant


def test_the_expert_classes_run_the_functions_with_their_workspaces() -> None:
    kind, activation = WEIGHT_TYPES[scalar_types.uint4b8.id], MoEActivation.SILU
    first, second = pair(kind, 32, activation)
    moe, quant = _configs(first, second, kind)
    w1, w2 = first.packed.qweight, second.packed.qweight
    batched = BatchedMarlinExperts(moe, quant, max_num_tokens=ROWS, num_dispatchers=1)
    rows, counts = torch.randn(E, ROWS, K).bfloat16(), torch.tensor([6, 1, 0], dtype=torch.int32)
    ids, weights = torch.tensor([[0, 1]]).expand(ROWS, 2), torch.full((ROWS, 2), 0.5)
    assert batched.moe_problem_size(rows, w1, w2, ids) == (E, ROWS, N, K, 2)
    shapes = batched.workspace_shapes(ROWS, N, K, 2, E, E, None, activation)
    scratch13, scratch2, output = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    meta = ExpertTokensMetadata(counts)
    batched.apply(output, rows, w1, w2, weights, ids, activation, E, None, None, None, scratch13, scratch2, meta, False)
    assert is_close(output[0], reference(rows[0], first, second, 0, activation))

    standard = MarlinExperts(moe, quant)
    shapes = standard.workspace_shapes(ROWS, N, K, 2, E, E, None, activation)
    scratch13, scratch2, summed = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    standard.apply(
        summed, rows[0], w1, w2, weights, ids, activation, E, None, None, None, scratch13, scratch2, None, False
    )
    both = sum(reference(rows[0], first, second, expert, activation) for expert in range(2))
    assert isinstance(both, torch.Tensor)
    assert is_close(summed, 0.5 * both)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_states": torch.zeros(E, ROWS, K)}, "hidden_states"),
        ({"hidden_states": torch.zeros(E, ROWS, K + 32).bfloat16()}, "hidden_states"),
        ({"hidden_states": torch.zeros(E, K, ROWS).bfloat16().transpose(1, 2)}, "hidden_states"),
        ({"expert_num_tokens": torch.zeros(E)}, "expert_num_tokens"),
        ({"w1": torch.zeros(E, K, N)}, "w1"),
        ({"w2": torch.zeros(E, N // 16 + 1, K * 2, dtype=torch.int32)}, "w2"),
        ({"w1_scale": torch.zeros(E, 4, 2 * N)}, "w1_scale"),
        ({"w1_scale": torch.zeros(E, 3, 2 * N).bfloat16()}, "w1_scale"),
        ({"w2_zeros": torch.zeros(E, 2, K).bfloat16()}, "w2_zeros"),
        ({"quant_type_id": scalar_types.uint4.id}, "w1_zeros"),
        ({"quant_type_id": 5}, "quant_type_id"),
        ({"bias1": torch.zeros(E, N).bfloat16()}, "bias1"),
        ({"global_scale1": torch.zeros(E, 3)}, "global_scale1"),
        ({"g_idx1": torch.zeros(E, K)}, "g_idx1"),
        ({"sort_indices2": torch.zeros(E, K, dtype=torch.int32)}, "sort_indices2"),
        ({"w1": torch.zeros(E, 4 * N, K // 16, dtype=torch.int32).transpose(1, 2)}, "w1"),
        ({"w2_scale": torch.zeros(E, K, 2).bfloat16().transpose(1, 2)}, "w2_scale"),
        ({"bias2": torch.zeros(K, E).bfloat16().t()}, "bias2"),
        ({"bias2": torch.zeros(E, K)}, "bias2"),
        ({"w2_scale": torch.zeros(E, 2, K).bfloat16().to("meta")}, "w2_scale"),
        ({"bias1": torch.zeros(E, 2 * N).bfloat16().to("meta")}, "bias1"),
        ({"expert_num_tokens": torch.zeros(E, dtype=torch.int32, device="meta")}, "expert_num_tokens"),
        ({"expert_num_tokens": torch.zeros(E + 1, dtype=torch.int32)}, "expert_num_tokens"),
        ({"expert_row_ids": torch.zeros(E, ROWS)}, "hidden_states"),
        ({"expert_row_ids": torch.zeros(E, ROWS), "hidden_states": torch.zeros(ROWS, K).bfloat16()}, "expert_row_ids"),
        ({"activation": "tanh"}, "activation"),
        ({"output": torch.zeros(E, ROWS, N).bfloat16()}, "output"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input"),
    ],
)
def test_a_wrong_argument_is_named(change: dict, named: str) -> None:
    kind = WEIGHT_TYPES[scalar_types.uint4b8.id]
    first, second = pair(kind, 32, MoEActivation.SILU)
    whole = arguments(first, second, kind, MoEActivation.SILU) | {
        "hidden_states": torch.zeros(E, ROWS, K).bfloat16(),
        "expert_num_tokens": torch.zeros(E, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=f"^{named} "):
        batched_fused_marlin_moe(**(whole | change))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_states": torch.zeros(ROWS, K).half()}, "w1_scale"),
        ({"hidden_states": torch.zeros(K, ROWS).bfloat16().t()}, "hidden_states"),
        ({"topk_ids": torch.zeros(ROWS, 2)}, "topk_ids"),
        ({"topk_ids": torch.zeros(ROWS + 1, 2, dtype=torch.int64)}, "topk_ids"),
        ({"topk_ids": torch.zeros(ROWS, 2, dtype=torch.int64, device="meta")}, "topk_ids"),
        ({"topk_weights": torch.zeros(ROWS, 2).bfloat16()}, "topk_weights"),
        ({"topk_weights": torch.zeros(ROWS, 1)}, "topk_weights"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input"),
        ({"input_dtype": torch.float8_e4m3fn}, "input_dtype"),
        ({"output": torch.zeros(ROWS, 2 * K).bfloat16()[:, ::2]}, "output"),
    ],
)
def test_a_wrong_argument_beside_tokens_is_named(change: dict, named: str) -> None:
    kind = WEIGHT_TYPES[scalar_types.uint4b8.id]
    whole = arguments(*pair(kind, 32, MoEActivation.SILU), kind, MoEActivation.SILU) | {
        "hidden_states": torch.zeros(ROWS, K).bfloat16(),
        "topk_weights": torch.zeros(ROWS, 2),
        "topk_ids": torch.zeros(ROWS, 2, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=f"^{named} "):
        fused_marlin_moe(**(whole | change))


def test_a_gpu_older_than_sm_80_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = WEIGHT_TYPES[scalar_types.uint4b8.id]
    weights = [
        Weights(made.packed.qweight, made.packed.scales, None, None, None, None, None, gated, *made.values.shape[1:])
        for made, gated in zip(pair(kind, 32, MoEActivation.SILU), (True, False), strict=True)
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "an old GPU")
    rows, none = torch.zeros(E, ROWS, K).bfloat16(), torch.empty(0)
    numbers = Rows(torch.zeros(E, dtype=torch.int32), ROWS)
    with pytest.raises(BackendUnavailableError, match=r"an old GPU has compute capability 7.5; .* need 8.0"):
        run_experts(rows, rows, WeightPair(kind, MoEActivation.SILU, rows.dtype, *weights), numbers, none, none)


def test_nvfp4_asks_for_its_global_scale() -> None:
    kind = WEIGHT_TYPES[scalar_types.float4_e2m1f.id]
    first, second = pair(kind, 16, MoEActivation.SILU)
    whole = arguments(first, second, kind, MoEActivation.SILU) | {"global_scale1": None}
    with pytest.raises(ValueError, match="^global_scale1 is missing"):
        batched_fused_marlin_moe(torch.zeros(E, 1, K).bfloat16(), torch.zeros(E, dtype=torch.int32), **whole)

"""The packed experts in plain torch against weights dequantized by hand, both formats."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.kernels.marlin import experts
from moe_ep.kernels.marlin.compute import sort_by_expert
from moe_ep.kernels.marlin.experts import BatchedMarlinExperts, MarlinExperts
from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe, fused_marlin_moe
from moe_ep.kernels.marlin.types import WEIGHT_TYPES, WeightType
from moe_ep.modular_kernel import ExpertTokensMetadata, TopKWeightAndReduceContiguous
from moe_ep.scalar_type import scalar_types
from tests.kernels.marlin_cases import ROWS, E, K, N, arguments, configs, is_close, pair, reference

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


@pytest.mark.parametrize("activation", [MoEActivation.SILU, MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUSTEP])
def test_gate_and_up_end_at_a_limit(activation: MoEActivation) -> None:
    kind = WEIGHT_TYPES[scalar_types.uint4b8.id]
    first, second = pair(kind, 32, activation)
    rows = torch.randn(E, ROWS, K).bfloat16()
    numbers, more = torch.full((E,), ROWS, dtype=torch.int32), arguments(first, second, kind, activation)
    output = batched_fused_marlin_moe(rows, numbers, clamp_limit=0.5, **more)
    tokens, ids = rows.view(E * ROWS, K), torch.arange(E).repeat_interleave(ROWS)[:, None]
    of_tokens = fused_marlin_moe(tokens, topk_weights=torch.ones(E * ROWS, 1), topk_ids=ids, clamp_limit=0.5, **more)
    for expert in range(E):
        expected = reference(rows[expert], first, second, expert, activation, 0.5)
        assert not is_close(reference(rows[expert], first, second, expert, activation), expected)
        assert is_close(output[expert], expected)
        assert is_close(of_tokens.view(E, ROWS, K)[expert], expected)


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


@pytest.mark.parametrize(("buffer_rows", "most_rows"), [(ROWS, 2 * 3 * ROWS), (4 * ROWS, 2 * 4 * ROWS)])
def test_what_is_expected_of_batched_rows(buffer_rows: int, most_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, told = WEIGHT_TYPES[scalar_types.uint4b8.id], []
    first, second = pair(kind, 32, MoEActivation.SILU)
    batched = BatchedMarlinExperts(*configs(first, second, kind), max_num_tokens=ROWS, num_dispatchers=3)
    monkeypatch.setattr(experts, "compute_batch", lambda *given, **more: told.extend(given[-2:]))
    rows, meta = torch.randn(E, buffer_rows, K).bfloat16(), ExpertTokensMetadata(torch.zeros(E, dtype=torch.int32))
    ids, weights, none = torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2), torch.empty(0, dtype=torch.bfloat16)
    packed = (first.packed.qweight, second.packed.qweight)
    hidden, silu = torch.empty(E * buffer_rows * N, dtype=torch.bfloat16), MoEActivation.SILU
    output = torch.empty_like(rows)
    batched.apply(output, rows, *packed, weights, ids, silu, E, None, None, None, none, hidden, meta, False)
    assert told == [most_rows / E, most_rows]


def test_the_expert_classes_run_the_functions_with_their_workspaces() -> None:
    kind, activation = WEIGHT_TYPES[scalar_types.uint4b8.id], MoEActivation.SILU
    first, second = pair(kind, 32, activation)
    moe, quant = configs(first, second, kind)
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

    standard.leave_slots()
    assert standard.finalize_weight_and_reduce_impl() == TopKWeightAndReduceContiguous()
    shapes = standard.workspace_shapes(ROWS, N, K, 2, E, E, None, activation)
    scratch13, scratch2, slots = (torch.full(shape, 7.0, dtype=torch.bfloat16) for shape in shapes)
    own = torch.tensor([0, -1, -1])
    standard.apply(
        slots, rows[0], w1, w2, weights, ids, activation, E, own, None, None, scratch13, scratch2, None, False
    )
    assert is_close(slots[:, 0], reference(rows[0], first, second, 0, activation))
    assert (slots[:, 1] == 7.0).all()  # of another rank's expert


def test_the_expert_classes_follow_what_changes_between_passes() -> None:
    kind = WEIGHT_TYPES[scalar_types.uint4b8.id]
    first, second = pair(kind, 32, MoEActivation.SILU)
    experts = MarlinExperts(*configs(first, second, kind))
    rows, weights = torch.randn(ROWS, K).bfloat16(), torch.ones(ROWS, 1)
    ids, none = torch.zeros(ROWS, 1, dtype=torch.int32), torch.empty(0, dtype=torch.bfloat16)

    def run(w1: torch.Tensor, activation: str) -> torch.Tensor:
        output = torch.empty_like(rows)
        args = (output, rows, w1, second.packed.qweight, weights, ids, activation, E, None, None, None, none, none)
        experts.apply(*args, None, False)
        return output

    codes = first.packed.qweight
    rolled = codes.roll(1, dims=0)
    for w1, activation in ((codes, "silu"), (codes, "gelu"), (rolled, "gelu"), (codes, "silu")):
        more = arguments(first, second, kind, MoEActivation(activation)) | {"w1": w1}
        assert torch.equal(run(w1, activation), fused_marlin_moe(rows, topk_weights=weights, topk_ids=ids, **more))

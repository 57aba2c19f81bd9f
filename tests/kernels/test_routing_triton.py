"""The fused top-k against the reference: compiled, on a GPU; test_interpreter.py has the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_ep.routing import select_experts
from moe_ep.routing.topk import topk_reference
from tests.kernels.routing_cases import CASES, Case, check_fused, make_inputs


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case: Case) -> None:
    check_fused("cuda", [replace(case, num_tokens=num_tokens) for num_tokens in (0, 1, 257)])


@pytest.mark.gpu
@pytest.mark.parametrize("scoring_func", ["sigmoid", "sqrtsoftplus"])
def test_biased_choices_agree_over_a_million_tokens(scoring_func: str) -> None:
    """Scores rounded otherwise than torch's would turn a few near-ties here."""
    case = Case(
        num_tokens=1 << 20, num_experts=256, num_expert_group=8, topk_group=4, scoring_func=scoring_func, bias=True
    )
    check_fused("cuda", [case])


@pytest.mark.gpu
def test_more_experts_than_a_program_holds() -> None:
    check_fused("cuda", [Case(num_experts=5000)])


@pytest.mark.gpu
def test_select_experts_is_captured_in_a_graph() -> None:
    """Grouped routing with identity experts, replicas and a shared expert, replayed with other logits."""
    hidden_states = torch.randn(64, 32, device="cuda")
    logits = torch.zeros(64, 72, device="cuda")
    load = torch.zeros(68, dtype=torch.int32, device="cuda")
    mapping = torch.stack([torch.arange(64), torch.where(torch.arange(64) < 4, torch.arange(64) + 64, -1)], dim=1)
    state = {
        "logical_to_physical_map": mapping.cuda(),
        "logical_replica_count": (mapping >= 0).sum(dim=1).cuda(),
        "e_score_correction_bias": torch.linspace(-0.1, 0.1, 72, device="cuda"),
    }

    def route(hidden: torch.Tensor, router_logits: torch.Tensor, load_view: torch.Tensor, state: dict):
        return select_experts(
            hidden, router_logits, 6, True, True, 3, 9, scoring_func="sigmoid", zero_expert_num=8,
            zero_expert_type="identity", enable_eplb=True, expert_load_view=load_view, num_fused_shared_experts=1,
            **state,
        )  # fmt: skip

    route(hidden_states, logits, load, state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids, zero_result = route(hidden_states, logits, load, state)
    on_cpu = {name: tensor.cpu() for name, tensor in state.items()}
    for seed in range(3):
        # A coarse grid keeps the CPU's other rounding of the sigmoid from deciding anything.
        fresh = torch.randint(-8, 9, logits.shape, generator=torch.Generator().manual_seed(seed)) / 2
        logits.copy_(fresh)
        load.zero_()
        graph.replay()
        expected_load = torch.zeros(68, dtype=torch.int32)
        expected = route(hidden_states.cpu(), fresh, expected_load, on_cpu)
        assert torch.equal(ids.cpu(), expected[1])
        assert torch.equal(load.cpu(), expected_load)
        torch.testing.assert_close(weights.cpu(), expected[0])
        torch.testing.assert_close(zero_result.cpu(), expected[2])


@pytest.mark.gpu
def test_strided_logits_on_a_gpu() -> None:
    from moe_ep.kernels.routing import fused_topk

    arguments = make_inputs(Case(num_tokens=40, num_experts=60, scoring_func="sigmoid", bias=True), "cuda")
    arguments["router_logits"] = arguments["router_logits"].t().contiguous().t()
    assert torch.equal(fused_topk(**arguments)[1], topk_reference(**arguments)[1])

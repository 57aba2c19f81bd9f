"""The EPLB mapping on a GPU: bit for bit the reference's, and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from moe_ep.eplb import eplb_map_to_physical_and_record
from moe_ep.eplb.recorder import ExpertLoadRecorder
from tests.eplb.models import inputs, load_layer, make_layer
from tests.kernels.eplb_cases import CASES, Case, check_mapping

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference(case: Case) -> None:
    check_mapping(case, "cuda")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_of_no_expert_are_none(dtype: torch.dtype) -> None:
    num_experts = 64
    case = Case(num_experts=num_experts, redundant=8, ep_size=8, num_tokens=300)
    ids, mapping, counts, num_physical, _ = case.make("cuda")
    ids = ids.to(dtype)
    wrong = torch.rand(ids.shape, device="cuda") < 0.2
    beyond = [num_experts, num_experts + 1, 2**31 - 1] + ([2**32 + 3] if dtype == torch.int64 else [])
    others = torch.tensor(beyond, dtype=dtype, device="cuda")[torch.randint(len(beyond), ids.shape, device="cuda")]
    got_load, expected_load = (torch.zeros(num_physical, dtype=torch.int32, device="cuda") for _ in range(2))

    def mapped(ids: torch.Tensor, load: torch.Tensor) -> torch.Tensor:
        return eplb_map_to_physical_and_record(ids, load, mapping, counts, ep_rank=3, ep_size=8)

    got = mapped(torch.where(wrong, others, ids), got_load)
    expected = mapped(torch.where(wrong, -1, ids), expected_load)
    assert torch.equal(got, expected)
    assert torch.equal(got_load, expected_load)


def test_in_a_cuda_graph_with_a_changing_number_of_tokens() -> None:
    case = Case(num_experts=256, redundant=32, ep_size=32, num_tokens=64)
    ids, mapping, counts, num_physical, _ = case.make("cuda")
    recorder = ExpertLoadRecorder(num_layers=2, num_physical_experts=num_physical, window_size=3, device="cuda")
    num_real = torch.tensor(64, dtype=torch.int32, device="cuda")

    def step() -> torch.Tensor:
        return eplb_map_to_physical_and_record(
            ids, recorder.expert_load_pass[1], mapping, counts, None, num_real, ep_rank=3, ep_size=32
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        physical = step()
    recorder.discard_pass()
    for real in (64, 5, 0):
        num_real.fill_(real)
        graph.replay()
        recorder.end_step()
        expected_load = torch.zeros(num_physical, dtype=torch.int32)
        expected = eplb_map_to_physical_and_record(
            ids.cpu(), expected_load, mapping.cpu(), counts.cpu(), None, real, ep_rank=3, ep_size=32
        )
        assert torch.equal(physical.cpu(), expected)
        assert torch.equal(recorder.snapshot()[-1, 1].cpu(), expected_load)
    assert recorder.snapshot()[:, 0].sum() == 0


@pytest.mark.parametrize("scheme", ["quantized on load", "GPTQ, act-order and zero points"])
def test_packed_weights_are_loaded_again_in_place(scheme: str) -> None:
    layer, fresh = (
        load_layer(make_layer(scheme, ep_size=1, params_dtype=torch.bfloat16), seed).cuda() for seed in (1, 2)
    )
    x, logits = (tensor.cuda() for tensor in inputs(8, seed=0))
    x = x.bfloat16()
    expected = fresh(x, logits)
    assert not torch.equal(layer(x, logits), expected)
    addresses = [tensor.data_ptr() for tensor in layer.expert_weights()]
    layer.begin_reload()
    load_layer(layer, 2)
    for got, wanted in zip(layer.expert_weights(), fresh.expert_weights(), strict=True):
        assert torch.equal(got, wanted)
    assert [tensor.data_ptr() for tensor in layer.expert_weights()] == addresses
    assert torch.equal(layer(x, logits), expected)

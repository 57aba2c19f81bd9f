"""A few tokens routed, computed and summed or combined by one kernel: the bits of the separate kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ep.bench.geometries import MXFP4, Geometry
from moe_ep.bench.layers import BenchLayers, make_weights
from moe_ep.bench.workload import parse_routing
from moe_ep.checkpoint.spec import RoutingSpec
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.dispatch.nvshmem.low_latency import LowLatencyPrepareFinalize, Tuning
from moe_ep.errors import DispatchTimeoutError
from moe_ep.kernels.marlin import hopper
from moe_ep.kernels.marlin.experts import BatchedMarlinExperts
from moe_ep.kernels.routing import defer_topk, fused_topk
from moe_ep.modular_kernel.contracts import ExpertsCall, Routing
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceDelegate
from moe_ep.scalar_type import scalar_types
from tests.dispatch.backend_cases import Case
from tests.gpu.ranks_of_one_gpu import LOW_LATENCY, Ranks, on_one_gpu

pytestmark = pytest.mark.gpu
GROUPED = RoutingSpec(
    use_grouped_topk=True, num_expert_group=8, topk_group=4, routed_scaling_factor=2.5, scoring_func="sigmoid",
    renormalize=True, has_correction_bias=True,
)  # fmt: skip


def _geometry(name: str, hidden_size: int, intermediate_size: int, num_experts: int, **more: Any) -> Geometry:
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_experts": num_experts}
    return Geometry(name=name, num_layers=1, **sizes, **({"top_k": 8} | more))


OF_SOFTMAX: dict[str, Any] = {
    "scoring_func": "softmax", "renormalize": True, "num_expert_group": 1, "topk_group": 1,
    "e_score_correction_bias": None, "routed_scaling_factor": 1.0,
}  # fmt: skip
SQRT = RoutingSpec(renormalize=True, scoring_func="sqrtsoftplus", routed_scaling_factor=1.5)
GEOMETRIES = [
    _geometry("softmax", 2048, 768, 128),
    _geometry("grouped", 1536, 256, 256, routing=GROUPED),
    _geometry("few", 3072, 1024, 40, top_k=3, weights=MXFP4, routing=SQRT),
]


@pytest.fixture(scope="module", params=GEOMETRIES, ids=lambda geometry: geometry.name)
def layers(request: pytest.FixtureRequest) -> BenchLayers:
    geometry, device = request.param, torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with torch.inference_mode():
        weights = make_weights(geometry, 1, device, 0)[:1]
        return BenchLayers(geometry, capacity=32, dtype=torch.bfloat16, device=device, weights=weights)


@torch.inference_mode()
def test_bits_are_those_of_separate_kernels(layers: BenchLayers, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, done = layers.layers[0], []
    launch = hopper.launch_routed
    monkeypatch.setattr(hopper, "launch_routed", lambda *args: done.append(launch(*args)) or done[-1])
    for num_tokens in (1, 2, 5, 16, 17):
        for batch in layers.batches(parse_routing("uniform"), num_tokens, 3, seed=num_tokens):
            rows, logits = batch.hidden_states, batch.router_logits
            deferred = layer.router.defer(rows, logits)
            weights, ids = deferred.topk_weights, deferred.topk_ids
            output = layer.quant_method.apply(layer, rows, weights, ids, deferred=deferred)
            expected_weights, expected_ids = fused_topk(logits, **_options(layers))
            assert torch.equal(ids, expected_ids)
            torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=0)
            assert torch.equal(output, layer(rows, topk_weights=weights, topk_ids=ids))
    assert done == [True] * 12


@torch.inference_mode()
def test_replays_have_the_same_bits(layers: BenchLayers) -> None:
    layer, (batch, *_) = layers.layers[0], layers.batches(parse_routing("uniform"), 4, 1, seed=3)
    expected = layer(batch.hidden_states, batch.router_logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [layer(batch.hidden_states, batch.router_logits) for _ in range(4)]
    for _ in range(50):
        graph.replay()
    assert all(torch.equal(output, expected) for output in outputs)


def _options(layers: BenchLayers) -> dict[str, Any]:
    config = layers.layers[0].router.config
    num_groups, kept = config.groups
    return {
        "top_k": config.top_k, "scoring_func": config.scoring_func, "renormalize": config.renormalize,
        "num_expert_group": num_groups, "topk_group": kept, "routed_scaling_factor": config.routed_scaling_factor,
        "e_score_correction_bias": layers.layers[0].e_score_correction_bias,
    }  # fmt: skip


@pytest.mark.parametrize("code_dtype", [None, torch.float8_e4m3fn], ids=str)
@torch.inference_mode()
def test_dispatch_chooses_experts(monkeypatch: pytest.MonkeyPatch, code_dtype: torch.dtype | None) -> None:
    num_ranks, num_experts = 2, 64
    on_one_gpu(monkeypatch, num_ranks)
    for tokens in ((1,), (9, 32), (3, 33)):
        case = Case(
            dtype=torch.bfloat16, hidden_size=256, topk=8, num_experts=num_experts, tokens=tokens, capacity=40,
            code_dtype=code_dtype,
        )  # fmt: skip
        ranks = Ranks(case, num_ranks, LOW_LATENCY, by_reference=True)
        for each in ranks.backends:
            each.tuning = replace(each.tuning, routed_tokens=32)
        found = [_step(ranks, num_experts, settled) for settled in (False, True, False)]
        for mine, expected in zip([*found[0], *found[2]], found[1] * 2, strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def _step(ranks: Ranks, num_experts: int, settled: bool) -> list[torch.Tensor]:
    """Dispatch and combine of all ranks: ids, rows of each expert, and outputs."""
    choices = []
    for rank, args in enumerate(ranks.args):
        generator = torch.Generator("cuda").manual_seed(rank)
        logits = torch.randn(args[0].size(0), num_experts, device="cuda", generator=generator)
        choices.append(defer_topk(logits, 8, **OF_SOFTMAX))
        if settled:
            choices[-1].settle()

    def dispatch(rank: int) -> Any:
        choice, args = choices[rank], ranks.args[rank]
        routing = Routing(
            topk_weights=choice.topk_weights, topk_ids=choice.topk_ids, num_experts=num_experts,
            deferred=None if settled else choice,
        )  # fmt: skip
        return ranks.backends[rank].dispatch(args[0], routing, args[-1])

    def combine(rank: int) -> None:
        ranks.backends[rank].combine(outputs[rank], results[rank], dispatched[rank], TopKWeightAndReduceDelegate())

    dispatched = ranks.together(dispatch)
    metas = [each.expert_tokens_meta for each in dispatched]
    counts = [meta.expert_num_tokens for meta in metas]
    listed = [
        meta.expert_row_ids.masked_fill(torch.arange(meta.expert_row_ids.size(1), device="cuda") >= count[:, None], -1)
        for meta, count in zip(metas, counts, strict=True)
    ]
    outputs = [torch.full_like(args[0], float("nan")) for args in ranks.args]
    generator = torch.Generator("cuda").manual_seed(7)
    sizes = [(*meta.expert_row_ids.shape, 256) for meta in metas]
    results = [torch.randn(size, device="cuda", generator=generator).to(torch.bfloat16) for size in sizes]
    ranks.together(combine)
    for each in ranks.backends:
        each.check()
    return [*(choice.topk_ids for choice in choices), *counts, *listed, *outputs]


class CombiningRank:
    """One rank's backend and packed experts, with random weights."""

    def __init__(self, rank: int, num_ranks: int, capacity: int, K: int, N: int, num_experts: int, topk: int) -> None:
        local = num_experts // num_ranks
        self.num_experts, self.topk, self.K = num_experts, topk, K
        self.config = FusedMoEConfig(
            num_experts=num_experts, experts_per_token=topk, hidden_dim=K, intermediate_size_per_partition=N,
            num_local_experts=local, moe_parallel_config=FusedMoEParallelConfig.make(ep_size=num_ranks, rank=rank),
            in_dtype=torch.bfloat16, max_num_tokens=capacity,
        )  # fmt: skip
        self.generator = torch.Generator("cuda").manual_seed(rank)
        options: dict[str, Any] = {"device": "cuda", "generator": self.generator}

        def codes(*shape: int) -> torch.Tensor:
            return torch.randint(-(1 << 31), (1 << 31) - 1, shape, dtype=torch.int32, **options)

        def scales(*shape: int) -> torch.Tensor:
            return torch.rand(shape, **options).mul_(0.01).to(torch.bfloat16)

        self.weights = codes(local, K // 16, 4 * N), codes(local, N // 16, 2 * K)
        self.quant = FusedMoEQuantConfig(
            quant_type_id=scalar_types.uint4b8.id, group_size=128, w1_scale=scales(local, K // 128, 2 * N),
            w2_scale=scales(local, N // 128, K),
        )  # fmt: skip
        tuning = Tuning(combining_rows=32, blocks=32)
        self.backend = LowLatencyPrepareFinalize(moe_config=self.config, quant_config=self.quant, tuning=tuning)
        self.experts = BatchedMarlinExperts(self.config, self.quant)
        self.backend.hand_over_row_ids()
        assert self.experts.combines_batches(self.backend.peer_build())

    def draw(self, num_tokens: int, used: int) -> None:
        """Tokens whose experts are among the first `used`; one in eight slots has none."""
        options: dict[str, Any] = {"device": "cuda", "generator": self.generator}
        self.x = torch.randn(num_tokens, self.K, **options).to(torch.bfloat16)
        chosen = torch.rand(num_tokens, used, **options).argsort(dim=1)[:, : self.topk].to(torch.int32)
        self.ids = torch.where(torch.rand(chosen.shape, **options) < 0.125, -1, chosen).contiguous()
        self.topk_weights = torch.rand(num_tokens, self.topk, **options)

    def dispatch(self, combines: bool) -> Any:
        routing = Routing(
            topk_weights=self.topk_weights, topk_ids=self.ids, num_experts=self.num_experts, experts_combine=combines
        )
        return self.backend.dispatch(self.x, routing, self.quant)

    def run(self, dispatched: Any) -> torch.Tensor:
        """Experts and combine."""
        meta, output = dispatched.expert_tokens_meta, torch.full_like(self.x, float("nan"))
        sizes = self.experts.moe_problem_size(dispatched.rows, *self.weights, self.ids)
        E, M, N, K, topk = sizes
        shapes = self.experts.workspace_shapes(M, N, K, topk, self.num_experts, E, meta, "silu")
        made = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
        target = output if dispatched.peers is not None else made[2]
        self.experts.run(
            ExpertsCall(
                target, dispatched.rows, *self.weights, self.topk_weights, self.ids, None, "silu", (made[0], made[1]),
                meta, peers=dispatched.peers,
            )
        )  # fmt: skip
        self.backend.combine(output, target, dispatched, self.experts.finalize_weight_and_reduce_impl())
        return output


@pytest.mark.parametrize(
    ("capacity", "sizes"), [(8, (2048, 768, 128, 8)), (16, (7168, 256, 64, 8)), (5, (1536, 512, 40, 6))], ids=str
)
@torch.inference_mode()
def test_experts_combine(monkeypatch: pytest.MonkeyPatch, capacity: int, sizes: tuple[int, int, int, int]) -> None:
    """With the bits of separate kernels, also beside a rank that has them; and what others miss is told."""
    num_ranks = 2
    monkeypatch.setenv("MOE_EP_NVSHMEM_TIMEOUT_S", "2")
    on_one_gpu(monkeypatch, num_ranks)
    ranks = [CombiningRank(rank, num_ranks, capacity, *sizes) for rank in range(num_ranks)]
    streams = [torch.cuda.Stream() for _ in ranks]

    def together(call: Any, present: Sequence[int] = range(num_ranks)) -> list[Any]:
        torch.cuda.synchronize()
        found: list[Any] = [None] * num_ranks
        for rank in present:
            with torch.cuda.stream(streams[rank]):
                found[rank] = call(rank)
        torch.cuda.synchronize()
        return found

    def step(*combines: bool) -> list[torch.Tensor]:
        dispatched = together(lambda rank: ranks[rank].dispatch(combines[rank]))
        assert [each.peers is not None for each in dispatched] == list(combines)
        outputs = together(lambda rank: ranks[rank].run(dispatched[rank]))
        for rank in ranks:
            rank.backend.check()
        return outputs

    for tokens, used in (((1, 1), 128), ((0, 3), 128), ((capacity, 2), 10), ((0, 0), 128), ((capacity, capacity), 128)):
        for rank, num_tokens in zip(ranks, tokens, strict=True):
            rank.draw(num_tokens, min(used, sizes[2]))
        expected = step(False, False)
        for combines in ((True, True), (True, False), (False, True), (True, True)):
            for mine, other in zip(step(*combines), expected, strict=True):
                torch.testing.assert_close(mine, other, rtol=0, atol=0)
    for present, missing in ((0, 1), (1, 0)):
        # The other comes late: what was sent to it is there, and what it sends is left out.
        for rank in (present, missing):
            found = together(lambda rank: ranks[rank].dispatch(True), [rank])[rank]
            with pytest.raises(DispatchTimeoutError, match=f"rank {1 - rank}"):
                together(lambda rank, found=found: ranks[rank].run(found), [rank])
                ranks[rank].backend.check()
        for rank in ranks:
            rank.backend.recover(dead=())
        for mine, other in zip(step(True, True), expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)

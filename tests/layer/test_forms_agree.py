"""One problem through all forms of experts: whole, batched in place and by reference, plain and packed."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ep.activation import MoEActivation
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.kernels.marlin.experts import MarlinExperts
from moe_ep.kernels.reference import BatchedReferenceExperts, ReferenceExperts
from moe_ep.layer.methods import relative_error, tolerance
from moe_ep.modular_kernel import FusedMoEModularKernel, make_prepare_finalize
from moe_ep.modular_kernel.contracts import ExpertTokensMetadata
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceNaiveBatched
from moe_ep.quantization.canonical_weights import CanonicalWeights, dequantize, quantize_int

K, N, GROUP = 64, 32, 32
BF16 = torch.bfloat16


class Problem:
    """Quantized experts with their values, and tokens that choose among them, some of them nobody."""

    def __init__(self, num_experts: int, num_tokens: int, top_k: int, activation: MoEActivation, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = 2 * N if activation.is_gated else N
        shapes = ((num_experts, rows, K), (num_experts, K, N))
        self.weights: list[CanonicalWeights] = [
            quantize_int(torch.randn(shape, generator=generator) * shape[-1] ** -0.5, 4, GROUP) for shape in shapes
        ]
        # Scales that bf16 holds, so that packing rounds none.
        self.weights = [weights._replace(scales=weights.scales.to(BF16).float()) for weights in self.weights]
        self.values = [dequantize(weights) for weights in self.weights]
        self.hidden_states = torch.randn(num_tokens, K, generator=generator).to(BF16).float()
        choices = [torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)]
        self.ids = torch.stack(choices).int() if choices else torch.empty(0, top_k, dtype=torch.int32)
        self.ids[torch.rand(self.ids.shape, generator=generator) < 0.2] = -1
        self.topk_weights = torch.rand(num_tokens, top_k, generator=generator)
        self.activation, self.num_experts = activation, num_experts

    def config(self, dtype: torch.dtype = torch.float32) -> FusedMoEConfig:
        return FusedMoEConfig(
            num_experts=self.num_experts,
            experts_per_token=self.ids.size(1),
            hidden_dim=K,
            intermediate_size_per_partition=N,
            num_local_experts=self.num_experts,
            moe_parallel_config=FusedMoEParallelConfig(),
            in_dtype=dtype,
            max_num_tokens=max(len(self.ids), 1),
            activation=self.activation,
        )

    def run(self, experts: ReferenceExperts | MarlinExperts, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        """Standard experts in the modular kernel."""
        kernel = FusedMoEModularKernel(make_prepare_finalize("no_ep", experts.moe_config), experts)
        hidden_states = self.hidden_states.to(experts.moe_config.in_dtype)
        return kernel(hidden_states, w1, w2, self.topk_weights, self.ids, activation=self.activation)

    def run_batched(self, by_reference: bool) -> torch.Tensor:
        """Batched experts, their rows gathered and their results summed by hand."""
        tokens = [(self.ids == expert).any(dim=1).nonzero().flatten() for expert in range(self.num_experts)]
        max_rows = max(len(self.ids), 1)
        row_ids = torch.full((self.num_experts, max_rows), 1 << 20, dtype=torch.int32)
        for expert, rows in enumerate(tokens):
            row_ids[expert, : len(rows)] = rows
        counts = torch.tensor([len(rows) for rows in tokens], dtype=torch.int32)
        meta = ExpertTokensMetadata(counts, expert_row_ids=row_ids if by_reference else None)
        rows = self.hidden_states
        if not by_reference:
            rows = torch.full((self.num_experts, max_rows, K), float("nan"))
            for expert, chosen in enumerate(tokens):
                rows[expert, : len(chosen)] = self.hidden_states[chosen]
        output = torch.full((self.num_experts, max_rows, K), float("nan"))
        nothing = torch.empty(0)
        BatchedReferenceExperts(self.config()).apply(
            output, rows, *self.values, self.topk_weights, self.ids, self.activation, self.num_experts, None, None,
            None, nothing, nothing, meta, False,
        )  # fmt: skip
        return TopKWeightAndReduceNaiveBatched(0).apply(None, output, self.topk_weights, self.ids, False)

    def run_packed(self) -> torch.Tensor:
        """The packed experts' plain form, on weights in their own layout."""
        config = self.config(BF16)
        first, second = MarlinExperts.pack_weights(*self.weights, config)
        quant = FusedMoEQuantConfig(
            quant_type_id=self.weights[0].quant_type_id, group_size=GROUP, w1_scale=first.scales, w2_scale=second.scales
        )
        return self.run(MarlinExperts(config, quant), first.weight, second.weight)


@settings(max_examples=15)
@given(data=st.data())
def test_all_forms_compute_the_same(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 6), "experts")
    problem = Problem(
        num_experts,
        data.draw(st.integers(0, 9), "tokens"),
        data.draw(st.integers(1, num_experts), "top_k"),
        data.draw(st.sampled_from(list(MoEActivation)), "activation"),
        data.draw(st.integers(0, 1 << 16), "seed"),
    )
    expected = problem.run(ReferenceExperts(problem.config()), *problem.values)
    assert torch.isfinite(expected).all()
    for by_reference in (False, True):
        assert relative_error(problem.run_batched(by_reference), expected) < tolerance(torch.float32)
    assert relative_error(problem.run_packed(), expected) < tolerance(BF16)

"""Experts in fifty lines: plain weights, and an activation that moe_ep does not have, relu(gate)^2 * up.

EXPERTS.register("squared_relu", "squared_relu_experts:SquaredReluExperts", "the example of the docs")
layer = FusedMoE(..., experts="squared_relu")
"""

from __future__ import annotations

import torch

from moe_ep.modular_kernel.contracts import FusedMoEActivationFormat, FusedMoEPermuteExpertsUnpermute
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceNoOP


class SquaredReluExperts(FusedMoEPermuteExpertsUnpermute):
    # What the layer asks before it joins these experts with a backend.

    def activation_format(self):
        return FusedMoEActivationFormat.Standard  # rows [M, K], each with its ids and weights

    def supports_expert_map(self):
        return True  # rows may have ids of experts elsewhere, which are to be skipped

    def supports_chunking(self):
        return True  # rows are independent of each other, so the layer may bring them in parts

    def supports_cuda_graph(self):
        return False  # nonzero waits for the device

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()  # apply weights and sums by itself

    def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation):
        return (0,), (0,), (M, K)  # no scratch; the output

    # A step: w1 is w13 [El, 2N, K], gate rows then up rows; w2 is [El, K, N].

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
        a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
    ):  # fmt: skip
        local_ids = topk_ids
        if expert_map is not None:
            local_ids = torch.where(topk_ids >= 0, expert_map[topk_ids.clamp(min=0).long()], -1)
        sums = torch.zeros(output.shape, dtype=torch.float32, device=output.device)
        for expert in range(w1.size(0)):
            rows, slots = (local_ids == expert).nonzero(as_tuple=True)
            gate, up = (hidden_states[rows] @ w1[expert].T).chunk(2, dim=-1)
            result = (gate.relu().square() * up) @ w2[expert].T
            weights = 1.0 if apply_router_weight_on_input else topk_weights[rows, slots, None]
            sums.index_add_(0, rows, result.float() * weights)
        output.copy_(sums)

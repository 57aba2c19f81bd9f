"""Experts of one's own: plain weights, and an activation that moe_ep does not have, relu(gate)^2 * up.

    EXPERTS.register("squared_relu", "squared_relu_experts:SquaredReluExperts", "the example of the docs")
    layer = FusedMoE(..., experts="squared_relu")

A plain loop over the experts, for rows in the Standard format.
"""

from __future__ import annotations

import torch

from moe_ep.modular_kernel import Experts, FusedMoEActivationFormat, TopKWeightAndReduceNoOP


class SquaredReluExperts(Experts):
    # What the layer asks before it joins these experts with a backend.

    def activation_format(self):
        return FusedMoEActivationFormat.Standard  # rows [M, K], each with its ids and weights

    def supports_expert_map(self):
        return True  # rows may have ids of experts on other ranks, which are skipped

    def supports_chunking(self):
        return True  # rows are independent of each other, so the layer may pass them in chunks

    def supports_cuda_graph(self):
        return False  # nonzero waits for the device

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()  # run weights and sums by itself

    def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation):
        return (0,), (0,), (M, K)  # no scratch; the output

    # A step: call.w1 is w13 [El, 2N, K], gate rows then up rows; call.w2 is [El, K, N].

    def run(self, call):
        local_ids = call.topk_ids
        if call.expert_map is not None:
            local_ids = torch.where(local_ids >= 0, call.expert_map[local_ids.clamp(min=0).long()], -1)
        sums = torch.zeros(call.output.shape, dtype=torch.float32, device=call.output.device)
        for expert in range(call.w1.size(0)):
            rows, slots = (local_ids == expert).nonzero(as_tuple=True)
            gate, up = (call.hidden_states[rows] @ call.w1[expert].T).chunk(2, dim=-1)
            result = (gate.relu().square() * up) @ call.w2[expert].T
            sums.index_add_(0, rows, result.float() * call.topk_weights[rows, slots, None])
        call.output.copy_(sums)

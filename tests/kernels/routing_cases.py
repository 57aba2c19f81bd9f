"""The router's top-k on one grid, for Triton's interpreter and for GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moe_ep.routing.topk import topk_reference

# Two f32 softmaxes or sums of sigmoids that add in another order.
WEIGHT_RTOL, WEIGHT_ATOL = 2e-6, 1e-9


@dataclass(frozen=True, kw_only=True)
class Case:
    num_tokens: int = 33
    num_experts: int = 64
    top_k: int = 8
    num_expert_group: int = 1
    topk_group: int = 1
    scoring_func: str = "softmax"
    bias: bool = False
    renormalize: bool = True
    dtype: torch.dtype = torch.float32
    logits: str = "random"

    def __str__(self) -> str:
        flags = "-bias" * self.bias + "-renormalize" * self.renormalize
        groups = f"{self.topk_group}of{self.num_expert_group}"
        return (
            f"T{self.num_tokens}-E{self.num_experts}-k{self.top_k}-{groups}-{self.scoring_func}{flags}"
            f"-{str(self.dtype)[6:]}-{self.logits}"
        )


# (E, top_k, groups, kept): powers of two and not, E = top_k, one expert, groups of one, DeepSeek-V3, Kimi-K3.
_SHAPES = [
    (1, 1, 1, 1),
    (8, 2, 1, 1),
    (60, 4, 1, 1),
    (5, 5, 1, 1),
    (72, 6, 9, 3),
    (6, 3, 6, 4),
    (160, 6, 8, 3),
    (256, 8, 8, 4),
    (384, 8, 1, 1),
    (512, 32, 1, 1),
    (896, 16, 1, 1),
]
CASES = [
    Case(
        num_experts=num_experts, top_k=top_k, num_expert_group=groups, topk_group=kept,
        scoring_func=scoring_func, bias=bias, renormalize=bias, logits=logits,
    )
    for num_experts, top_k, groups, kept in _SHAPES
    for scoring_func in ("softmax", "sigmoid", "sqrtsoftplus")
    for bias in (False, True)
    for logits in ("random", "ties")
] + [
    Case(dtype=torch.bfloat16, logits="ties", renormalize=False),
    Case(dtype=torch.float16, scoring_func="sigmoid", bias=True),
    Case(dtype=torch.bfloat16, scoring_func="sqrtsoftplus", bias=True),
    Case(logits="broken"),
    Case(logits="broken", scoring_func="sigmoid", num_expert_group=8, topk_group=2),
    Case(logits="broken", scoring_func="sigmoid", bias=True, num_expert_group=8, topk_group=2),
    Case(logits="broken", scoring_func="sqrtsoftplus", bias=True, num_expert_group=8, topk_group=2),
]  # fmt: skip
# The interpreter is slow: few rows, few slots, and every pair of options instead of every three.
INTERPRETER_CASES = [
    replace(case, num_tokens=2, top_k=min(case.top_k, 6))
    for case in CASES
    if case.logits == "broken"
    or (case.dtype == torch.float32 and case.bias ^ (case.scoring_func == "softmax") ^ (case.logits == "random"))
]


def make_inputs(case: Case, device: str) -> dict:
    """Arguments of topk_reference and fused_topk."""
    generator = torch.Generator().manual_seed(case.num_experts)
    shape = (case.num_tokens, case.num_experts)
    logits = 3 * torch.randn(shape, generator=generator)
    if case.logits == "ties":
        logits = torch.randint(-2, 3, shape, generator=generator).float()
    if case.logits == "broken":
        for value in (float("nan"), float("inf"), float("-inf")):
            logits[torch.rand(shape, generator=generator) < 0.1] = value
        logits[:1] = float("nan")
        logits[1:2] = float("-inf")
    bias = torch.randint(-2, 3, (case.num_experts,), generator=generator) / 4
    return {
        "router_logits": logits.to(device, case.dtype),
        "top_k": case.top_k,
        "scoring_func": case.scoring_func,
        "renormalize": case.renormalize,
        "num_expert_group": case.num_expert_group,
        "topk_group": case.topk_group,
        "e_score_correction_bias": bias.to(device) if case.bias else None,
        "routed_scaling_factor": 2.5,
    }


def check_fused(device: str, cases: list[Case]) -> None:
    """Same ids as the reference, bit for bit; on the CPU this needs TRITON_INTERPRET=1."""
    from moe_ep.kernels.routing import fused_topk

    for case in cases:
        arguments = make_inputs(case, device)
        weights, ids = fused_topk(**arguments)
        expected_weights, expected_ids = topk_reference(**arguments)
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
        assert torch.equal(ids, expected_ids), case
        torch.testing.assert_close(
            weights,
            expected_weights,
            rtol=WEIGHT_RTOL,
            atol=WEIGHT_ATOL,
            equal_nan=True,
            msg=lambda m, c=case: f"{c}: {m}",
        )

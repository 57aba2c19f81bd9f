"""Plain experts on a GPU by grouped products: chosen, right, the same bits again, and captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ep.layer.methods import relative_error, tolerance
from moe_ep.modular_kernel import ExpertTokensMetadata, make_experts
from moe_ep.registry import EXPERTS
from tests.gpu.captured import capture
from tests.gpu.test_layer_gpu import inputs_of, make_layer

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def usable() -> None:
    reason = EXPERTS.load("grouped").unusable_reason()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("activation", "limit"),
    [("silu", None), ("silu", 0.05), ("swigluoai", None), ("swiglustep", 0.05), ("situ", None), ("gelu_no_mul", None)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_layer_takes_them(activation: str, limit: float | None, has_bias: bool, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"activation": activation, "has_bias": has_bias, "swiglu_limit": limit}
    options["params_dtype"] = dtype
    grouped, plain = (make_bare(options | {"experts": experts}) for experts in ("auto", "reference"))
    plain.load_state_dict(grouped.state_dict())
    for T in (1, 7, 40, 130, 700, 1000):
        inputs = inputs_of(grouped, T, seed=T)
        output = grouped(*inputs)
        assert relative_error(output, plain(*inputs)) < tolerance(output.dtype)
        assert torch.equal(grouped(*inputs), output)
    assert type(grouped.modular_kernel.fused_experts).__name__ == "GroupedExperts"


def make_bare(options: dict[str, Any]) -> torch.nn.Module:
    """A layer with random weights and biases."""
    from moe_ep.layer import FusedMoE

    layer = FusedMoE(num_experts=16, top_k=4, hidden_size=256, intermediate_size=128, **options).cuda()
    torch.manual_seed(5)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return layer


def test_a_captured_pass_follows_the_routing() -> None:
    layer = make_layer({})
    hidden_states, logits = inputs_of(layer, 40, seed=0)
    output = torch.empty_like(hidden_states)
    graph = capture(lambda: output.copy_(layer(hidden_states, logits)))
    for seed in range(3):
        for there, new in zip((hidden_states, logits), inputs_of(layer, 40, seed), strict=True):
            there.copy_(new)
        # All tokens to one set of experts, then to another: others have no rows.
        logits[:, 4 * seed : 4 * seed + 4] += 100.0 * (seed > 0)
        output.fill_(float("nan"))
        graph.replay()
        assert torch.equal(output, layer(hidden_states, logits))


@pytest.mark.parametrize("by_reference", [False, True])
def test_batched_computes_the_rows_below_the_counts_and_no_others(by_reference: bool) -> None:
    layer = make_layer({})
    El, K, rows = 16, 256, 24
    w1, w2 = layer.quant_method.gemm_weights(layer)
    counts = torch.tensor([0, 24, 1, 5] * 4, dtype=torch.int32, device="cuda")
    torch.manual_seed(1)
    shared_rows = torch.randn(96, K, device="cuda").bfloat16()
    row_ids = torch.randint(0, 96, (El, rows), dtype=torch.int32, device="cuda")
    is_row = torch.arange(rows, device="cuda") < counts[:, None]
    batch = torch.where(is_row[..., None], shared_rows[row_ids.long()], float("nan"))
    row_ids = torch.where(is_row, row_ids, 1 << 30)
    meta = ExpertTokensMetadata(counts, None, row_ids if by_reference else None)
    nothing, ids = torch.empty(0, device="cuda"), torch.zeros(96, 5, dtype=torch.int32, device="cuda")
    outputs = []
    for name in ("batched_grouped", "batched_reference"):
        output = torch.full((El, rows, K), float("nan"), device="cuda", dtype=torch.bfloat16)
        make_experts(name, layer.moe_config).apply(
            output, shared_rows if by_reference else batch, w1, w2, nothing, ids, "silu", El, None, None, None,
            nothing, nothing, meta, False,
        )  # fmt: skip
        assert output[~is_row].isnan().all()
        outputs.append(output[is_row])
    assert relative_error(*outputs) < tolerance(torch.bfloat16)

"""Which norms and routers of transformers models are computed otherwise, and that they come to the same."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from moe_ep.generation import fused_modules
from moe_ep.generation.fused_modules import FusedModules, FusedRotary
from tests.hf.hf_models import SIZES, make_model
from tests.kernels.rotary_cases import plain_rotary

# Norms of the two layers' inputs, of what comes after attention and of the last layer's output, and of queries and keys
# in some models or of latent ones; a router of each layer with experts. Norms with a gate stay as they are.
FUSED = {
    "Mixtral": (5, 2),
    "Qwen2Moe": (5, 2),
    "Qwen3Moe": (9, 2),
    "Qwen3Next": (7, 2),
    "Olmoe": (9, 2),
    "DeepseekV3": (9, 1),
    "Glm4Moe": (5, 1),
    "NemotronH": (5, 2),
    "GptOss": (5, 2),
}


@pytest.mark.parametrize("family", FUSED)
def test_a_model_computes_the_same(family: str) -> None:
    model = make_model(family)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("norm.weight", "e_score_correction_bias")):
            tensor.data.uniform_(-0.5, 0.5, generator=generator)
    used: list[type] = []
    fused = FusedModules(model)
    fused.forwards = [(module, counted(module, form, used)) for module, form in fused.forwards]
    tokens = torch.arange(1, SIZES["vocab_size"])[None]
    with torch.inference_mode(), fused.used():
        got = model(tokens).logits
    torch.testing.assert_close(got, model(tokens).logits)
    kinds = Counter("norms" if "Norm" in kind.__name__ else "routers" for kind in used)
    assert (kinds["norms"], kinds["routers"]) == FUSED[family]


def counted(module: Any, form: Any, used: list[type]) -> Any:
    def forward(*args: Any) -> Any:
        used.append(type(module))
        return form(*args)

    return forward


def test_another_default_dtype_finds_the_same() -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model("Qwen3Moe")
        torch.set_default_dtype(dtype)
        try:
            found.append(len(FusedModules(model).forwards))
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [sum(FUSED["Qwen3Moe"])] * 2


def test_a_norm_keeps_the_dtype_of_what_it_is_given() -> None:
    norm = make_model("GptOss", torch.bfloat16).model.norm.float()
    x = torch.randn(3, SIZES["hidden_size"], dtype=torch.bfloat16)
    expected = norm(x)
    with FusedModules(norm).used():
        assert "forward" in vars(norm)
        got = norm(x)
    assert "forward" not in vars(norm)
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("family", "dtype"), [("Qwen3Next", torch.bfloat16), ("Qwen3Moe", torch.float32)])
def test_a_norm_adds_and_multiplies_in_the_wider_dtype(family: str, dtype: torch.dtype) -> None:
    """One to weights of bf16 in f32; and what comes in f32 is not rounded to the weights' bf16."""
    norm = make_model(family, torch.bfloat16).model.norm
    norm.weight.uniform_(-0.004, 0.004)
    x = torch.randn(64, SIZES["hidden_size"], dtype=dtype)
    expected = norm(x)
    with FusedModules(norm).used():
        assert "forward" in vars(norm)
        got = norm(x)
    assert got.dtype == expected.dtype
    assert (got != expected).float().mean() < 0.02 if dtype is torch.bfloat16 else torch.allclose(got, expected)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_a_router_of_f32_is_not_computed_in_bf16(method: str) -> None:
    model = make_model("DeepseekV2", torch.bfloat16, topk_method=method, routed_scaling_factor=1.0)
    kinds = {type(module).__name__ for module, _ in FusedModules(model).forwards}
    assert kinds == {"DeepseekV2RMSNorm"}


def test_a_module_keeps_a_forward_of_its_own() -> None:
    model = make_model("Mixtral")
    norm = model.model.norm
    norm.forward = own = lambda x: x
    fused = FusedModules(model)
    assert fused.forwards
    with fused.used():
        assert norm.forward is own
    assert norm.forward is own


@pytest.mark.parametrize(("family", "widths"), [("Qwen3Moe", {1.0}), ("GptOss", {0.5}), ("Glm4Moe", {1.0})])
def test_rotary_positions(family: str, widths: set[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel's formula in plain torch; GPT-OSS has an angle for both halves, GLM turns half of a head."""
    calls = []

    def ours(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        calls.append(query.shape)
        return plain_rotary(query, cos, sin), plain_rotary(key, cos, sin)

    model = make_model(family)
    code = sys.modules[type(model).__module__]
    theirs = code.apply_rotary_pos_emb
    assert fused_modules.matching_widths(theirs, ours, torch.device("cpu")) == widths
    with FusedModules(model).used():
        assert code.apply_rotary_pos_emb is theirs  # there is no kernel for a CPU
    rotary = FusedRotary(model, ours)
    tokens = torch.arange(1, 21).view(2, 10)
    calls.clear()
    with torch.inference_mode(), rotary.used():
        assert code.apply_rotary_pos_emb is not theirs
        got = model(tokens).logits
    assert code.apply_rotary_pos_emb is theirs
    torch.testing.assert_close(got, model(tokens).logits)
    turned = 0.5 if family == "Glm4Moe" else 1.0
    assert len(calls) == (0 if turned < 1 else 2), calls


@pytest.mark.parametrize("gives", [ValueError, KeyError, None])
def test_rotary_positions_of_another_kind_stay(gives: type[Exception] | None) -> None:
    def theirs(*args: torch.Tensor) -> None:
        if gives is not None:
            raise gives("positions in three parts")

    def ours(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return query, key

    assert fused_modules.matching_widths(theirs, ours, torch.device("cpu")) == set()


@pytest.mark.parametrize(
    ("key", "angles", "fits"),
    [
        ((2, 1, 3, 8), (2, 3, 8), True),
        ((2, 1, 3, 8), (1, 3, 8), True),
        ((2, 1, 3, 8), (2, 1, 8), False),  # one angle for all tokens
        ((2, 1, 3, 8), (1, 1, 8), False),
        ((2, 1, 3, 4), (2, 3, 8), False),  # of which theirs would complain
        ((1, 1, 3, 8), (1, 3, 8), False),  # sequences that share keys
    ],
)
def test_rotary_positions_that_are_stretched_stay(key: tuple[int, ...], angles: tuple[int, ...], fits: bool) -> None:
    used = []

    def form(name: str) -> Any:
        return lambda *tensors: used.append(name) or tensors[:2]

    heads = [torch.randn(b, t, h, d).transpose(1, 2) for b, h, t, d in ((2, 4, 3, 8), key)]
    fused_modules.rotate(form("theirs"), form("ours"), {1.0}, *heads, *torch.randn(2, *angles))
    assert used == ["ours" if fits else "theirs"]


class OtherRMSNorm(torch.nn.Module):
    """Of numbers less their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x - x.mean(-1, keepdim=True), (8,), self.weight, self.eps)


class OtherRouter(torch.nn.Module):
    """Whose weights are the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.top_k = torch.nn.Parameter(torch.randn(4, 8)), 2

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = x @ self.weight.T
        return logits, *logits.topk(2)


class LogitsRouter(OtherRouter):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x @ self.weight.T


class MaskedRouter(OtherRouter):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x @ self.weight.T * mask


class SequenceRouter(OtherRouter):
    """Of sequences alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        _, _, size = x.shape
        return x.view(-1, size) @ self.weight.T


@pytest.mark.parametrize("kind", [OtherRMSNorm, OtherRouter, LogitsRouter, MaskedRouter, SequenceRouter])
def test_what_computes_something_else_stays_as_it_is(kind: type) -> None:
    assert len(fused_modules.fused_forms(kind())) == 2
    assert FusedModules(torch.nn.Sequential(kind())).forwards == []

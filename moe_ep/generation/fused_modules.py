"""Norms, routers and rotary positions of transformers models in one kernel each; the models' own code launches seven to
thirty."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm

from moe_ep.generation.fused_rotary import FusedRotary
from moe_ep.routing import select_experts

# Of numbers around 1 in f32, in whatever order they are added up.
_TOLERANCE = 1e-5
_EXAMPLES = 16
Forward = Callable[[torch.Tensor], Any]


class FusedModules:
    """What of a model is computed otherwise while `used` is on.

    It is found by trying: a norm, a router or a module's function for rotary positions is taken over where one of the
    known forms computes on an example what the model's own code does.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        known: dict[type, int | None] = {}
        self._forwards: list[tuple[Any, Forward]] = []
        module: Any
        for module in model.modules():
            forms = _forms(module)
            if not forms:
                continue
            kind = type(module)
            if kind not in known:
                known[kind] = _which(module)
            if (number := known[kind]) is not None:
                self._forwards.append((module, forms[number]))
        self._rotary = FusedRotary(model)

    @contextmanager
    def used(self) -> Iterator[None]:
        for module, forward in self._forwards:
            module.forward = forward
        try:
            with self._rotary.used():
                yield
        finally:
            for module, _ in self._forwards:
                del module.forward


def _forms(module: Any) -> list[Forward]:
    """What the module may compute, by its name and what it has; modules of one class have the same forms."""
    name = type(module).__name__
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.is_meta or "forward" in vars(module):
        return []
    if name.endswith("RMSNorm") and weight.dim() == 1:
        # Some store their weights less one, and add it in f32.
        return [partial(_norm, module, weight), partial(_norm, module, 1 + weight.detach().float())]
    if name.lower().endswith("router") and weight.dim() == 2 and isinstance(getattr(module, "top_k", None), int):
        forms: list[Forward] = [partial(_softmax_router, module, renormalize) for renormalize in (False, True)]
        return forms if getattr(module, "e_score_correction_bias", None) is None else [partial(_sigmoid_router, module)]
    return []


def _norm(module: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x over the root of its mean square, times weights."""
    epsilon = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return rms_norm(x.to(dtype), weight.shape, weight.to(dtype), epsilon).to(x.dtype)


def _softmax_router(module: Any, renormalize: bool, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(logits `[T, E]`, weights f32 `[T, top_k]`, ids int32 `[T, top_k]`) of tokens `[..., K]`."""
    x = x.reshape(-1, x.size(-1))
    logits = linear(x, module.weight, getattr(module, "bias", None))
    weights, ids, _ = select_experts(x, logits, module.top_k, use_grouped_topk=False, renormalize=renormalize)
    return logits, weights, ids


def _sigmoid_router(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same of scores between 0 and 1, whose experts are chosen in groups, with a bias."""
    x = x.reshape(-1, x.size(-1))
    logits = linear(x.float(), module.weight.float())
    weights, ids, _ = select_experts(
        x,
        logits,
        module.top_k,
        use_grouped_topk=True,
        renormalize=module.norm_topk_prob,
        num_expert_group=module.num_group,
        topk_group=module.topk_group,
        scoring_func="sigmoid",
        routed_scaling_factor=module.routed_scaling_factor,
        e_score_correction_bias=module.e_score_correction_bias,
    )
    return logits, weights, ids


def _which(module: Any) -> int | None:
    """The number of the form that computes what the module does, tried on numbers that stand out: all of it in f32, and
    in bf16 that a router's logits are rounded alike."""
    alone = copy.deepcopy(module).float()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*alone.parameters(), *alone.buffers()):
        drawn = torch.empty(tensor.shape, dtype=torch.float32, device="cpu").uniform_(0.5, 1.5, generator=generator)
        tensor.data = drawn.to(tensor.device)
    x = torch.randn(_EXAMPLES, alone.weight.size(-1), generator=generator, dtype=torch.float32, device="cpu")
    x = (x / x.size(-1) ** 0.5).to(alone.weight.device)
    for number, form in enumerate(_forms(alone)):
        try:
            if _same(form(x), alone(x)) and _rounds_alike(alone, number, x):
                return number
        except (TypeError, AttributeError, ValueError, RuntimeError):  # It takes or has something else.
            continue
    return None


def _rounds_alike(module: Any, number: int, x: torch.Tensor) -> bool:
    """Whether logits have the same bits in bf16, where a router's product is one of f32 or of bf16."""
    rounded = copy.deepcopy(module).bfloat16()
    got, expected = _forms(rounded)[number](x.bfloat16()), rounded(x.bfloat16())
    return not isinstance(got, tuple) or _same(got[0].float(), expected[0].float())


def _same(got: Any, expected: Any) -> bool:
    """Of tensors, or of routers' results; the experts of a token may come in any order."""
    if not isinstance(got, tuple):
        return got.shape == expected.shape and torch.allclose(got, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
    if not isinstance(expected, tuple) or len(got) != len(expected) or got[2].shape != expected[2].shape:
        return False
    orders = [result[2].argsort(dim=-1) for result in (got, expected)]
    ids = [result[2].gather(1, order) for result, order in zip((got, expected), orders, strict=True)]
    weights = [result[1].gather(1, order).float() for result, order in zip((got, expected), orders, strict=True)]
    return _same(got[0], expected[0]) and _same(*weights) and bool((ids[0] == ids[1]).all())

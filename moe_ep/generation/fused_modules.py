"""Replaces norms, routers and rotary embeddings of transformers models by one kernel each.

The models' own code launches seven to thirty.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm

from moe_ep.registry import choose_form
from moe_ep.routing import select_experts

# The error of f32 numbers around 1, in whatever order they are added up.
_TOLERANCE = 1e-5
_EXAMPLES = 16


class FusedModules:
    """The modules of a model that have a fused form, which runs inside a block of `used`.

    Fused forms are found by trying: a norm, a router or a rotary embedding is replaced if one of the known forms gives
    the result of the model's own code on an example.
    """

    def __init__(self, model: torch.nn.Module, *, routers: bool = True) -> None:
        known: dict[type, int | None] = {}
        self.forwards: list[tuple[Any, partial[Any]]] = []
        module: Any
        for module in model.modules():
            forms = fused_forms(module)
            if not forms or not (routers or _is_norm(module)):
                continue
            kind = type(module)
            if kind not in known:
                known[kind] = _which(module)
            if (number := known[kind]) is not None:
                self.forwards.append((module, forms[number]))
        self._rotary = FusedRotary(model)

    def refresh(self) -> None:
        """Computes anew, in place, what was computed from weights that have changed."""
        for module, form in self.forwards:
            if form.func is _norm and (weight := form.args[1]) is not module.weight:
                weight.copy_(1 + module.weight.detach().float())

    @contextmanager
    def used(self) -> Iterator[None]:
        for module, forward in self.forwards:
            module.forward = forward
        try:
            with self._rotary.used():
                yield
        finally:
            for module, _ in self.forwards:
                del module.forward


def fused_forms(module: Any) -> list[partial[Any]]:
    """Fused forms to try for a module, by its name and attributes; modules of one class have the same forms."""
    name = type(module).__name__
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.is_meta or "forward" in vars(module):
        return []
    if _is_norm(module) and weight.dim() == 1:
        # Some store their weights less one, and add it in f32.
        return [partial(_norm, module, weight), partial(_norm, module, 1 + weight.detach().float())]
    if name.lower().endswith("router") and weight.dim() == 2 and isinstance(getattr(module, "top_k", None), int):
        forms: list[partial[Any]] = [partial(_softmax_router, module, renormalize) for renormalize in (False, True)]
        return forms if getattr(module, "e_score_correction_bias", None) is None else [partial(_sigmoid_router, module)]
    return []


def _is_norm(module: Any) -> bool:
    return type(module).__name__.endswith("RMSNorm")


def _norm(module: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """RMS norm: x over the root of its mean square, times weights."""
    if weight is not module.weight and torch.is_grad_enabled():
        weight = 1 + module.weight.float()
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
    """The same for sigmoid scores and grouped top-k with a correction bias."""
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
    """The number of the form that computes what the module does, or None.

    Compared are all results in f32, and in bf16 a router's logits, bit for bit.
    """
    alone = copy.deepcopy(module).float()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*alone.parameters(), *alone.buffers()):
        drawn = torch.empty(tensor.shape, dtype=torch.float32, device="cpu").uniform_(0.5, 1.5, generator=generator)
        tensor.data = drawn.to(tensor.device)
    x = torch.randn(_EXAMPLES, alone.weight.size(-1), generator=generator, dtype=torch.float32, device="cpu")
    x = (x / x.size(-1) ** 0.5).to(alone.weight.device)
    for number, form in enumerate(fused_forms(alone)):
        try:
            if _same(form(x), alone(x)) and _rounds_alike(alone, number, x):
                return number
        except (TypeError, AttributeError, ValueError, RuntimeError):  # It takes or has something else.
            continue
    return None


def _rounds_alike(module: Any, number: int, x: torch.Tensor) -> bool:
    """Whether a router's logits agree in bf16: some multiply in f32, some in bf16."""
    rounded = copy.deepcopy(module).bfloat16()
    got, expected = fused_forms(rounded)[number](x.bfloat16()), rounded(x.bfloat16())
    return not isinstance(got, tuple) or _same(got[0].float(), expected[0].float())


def _same(got: Any, expected: Any, tolerance: float = _TOLERANCE) -> bool:
    """Whether tensors, or routers' results, agree; the experts of a token may be in any order."""
    if not isinstance(got, tuple):
        return got.shape == expected.shape and torch.allclose(got, expected, rtol=tolerance, atol=tolerance)
    if not isinstance(expected, tuple) or len(got) != len(expected) or got[2].shape != expected[2].shape:
        return False
    orders = [result[2].argsort(dim=-1) for result in (got, expected)]
    ids = [result[2].gather(1, order) for result, order in zip((got, expected), orders, strict=True)]
    weights = [result[1].gather(1, order).float() for result, order in zip((got, expected), orders, strict=True)]
    return _same(got[0], expected[0]) and _same(*weights) and bool((ids[0] == ids[1]).all())


# The name of the function that rotates queries and keys, in the Python module of a model's code.
_ROTARY = "apply_rotary_pos_emb"
_HEAD_DIM = 16
_ROTARY_TOLERANCE = 1e-6
Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class FusedRotary:
    """The rotary functions in the Python modules of a model's code that the fused kernel can replace.

    Args:
        kernel: (query, key, cos, sin) -> (query, key), in the layout of `kernels.rotary`; None takes the kernel for the
            model's device, if there is one.
    """

    def __init__(self, model: torch.nn.Module, kernel: Rotary | None = None) -> None:
        self._functions: list[tuple[Any, Rotary, Rotary]] = []
        device = next(model.parameters()).device
        ours = kernel or choose_form(_unsupported, "rotary:triton_rotary", next(model.parameters()))
        if ours is _unsupported:
            return
        for name in {type(part).__module__: None for part in model.modules()}:
            code = sys.modules.get(name)
            theirs = getattr(code, _ROTARY, None)
            if theirs is not None and (widths := matching_widths(theirs, ours, device)):
                self._functions.append((code, theirs, partial(rotate, theirs, ours, widths)))

    @contextmanager
    def used(self) -> Iterator[None]:
        """A block in which the fused kernel replaces them, for all models of that code."""
        for code, _, function in self._functions:
            setattr(code, _ROTARY, function)
        try:
            yield
        finally:
            for code, theirs, _ in self._functions:
                setattr(code, _ROTARY, theirs)


def _unsupported(*_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for a kernel that cannot run here; the model's own function stays in its place."""
    raise RuntimeError("there is no plain form of the rotary kernel; use the model's own function")


def rotate(theirs: Rotary, ours: Rotary, widths: set[float], *args: Any, **kwargs: Any) -> Any:
    """The fused kernel if it can read these tensors, the model's own function otherwise.

    Queries and keys are `[B, heads, T, head_dim]`, in memory `[B, T, heads, head_dim]`.
    """
    if len(args) == 4 and not kwargs and len({tensor.dtype for tensor in args}) == 1:
        query, key = (tensor.transpose(1, 2) for tensor in args[:2])
        # Some versions of a model's code make them transposed.
        cos, sin = (angles.contiguous() for angles in args[2:])
        if _fits(query, key, cos, sin, widths):
            query, key = ours(query, key, cos, sin)
            return query.transpose(1, 2), key.transpose(1, 2)
    return theirs(*args, **kwargs)


def _fits(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, widths: set[float]) -> bool:
    """Whether the kernel can read these tensors; it broadcasts cos and sin over sequences, and over nothing else."""
    if query.dim() != 4 or not (query.is_contiguous() and key.is_contiguous()):
        return False
    batch, num_tokens, _, head_dim = query.shape
    return (
        key.shape == (batch, num_tokens, key.size(2), head_dim)
        and cos.shape == sin.shape
        and cos.shape[:-1] in ((1, num_tokens), (batch, num_tokens))
        and cos.size(-1) / head_dim in widths
    )


def matching_widths(theirs: Rotary, ours: Rotary, device: torch.device) -> set[float]:
    """The widths of cos and sin, as fractions of head_dim, at which both give the same result."""
    generator = torch.Generator().manual_seed(0)
    found = set()
    for width in (1.0, 0.5):
        angles = (2, 3, int(_HEAD_DIM * width))
        sizes = (2, 3, 4, _HEAD_DIM), (2, 3, 1, _HEAD_DIM), angles, angles
        drawn = (torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") for size in sizes)
        query, key, cos, sin = (tensor.to(device) for tensor in drawn)
        got = [tensor.transpose(1, 2) for tensor in ours(query, key, cos, sin)]
        try:
            expected = theirs(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
            if all(_same(*pair, tolerance=_ROTARY_TOLERANCE) for pair in zip(got, expected, strict=True)):
                found.add(width)
        except Exception:  # It takes or gives something else, and says so in its own way.
            continue
    return found

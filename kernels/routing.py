"""The router's top-k as one Triton kernel, equal in ids to `moe_ep.routing.topk.topk_reference`, bit for bit."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from moe_ep.kernels import jit
from moe_ep.kernels.triton_kernel import (
    TritonKernel,
    comes_early,
    is_interpreted,
    libdevice,
    next_power_of_2,
    take_over,
    tl,
    triton_jit,
)
from moe_ep.routing.topk import topk_reference

# A row's experts stay in registers of one program.
MAX_EXPERTS = 4096

# The kind of rows that hold scores, not logits.
_SCORES = "scores"

_SCORING_NUMBERS = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2}
_LOGITS_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Experts whose keys the lanes of a warp keep in registers, and slots and groups, of which a lane has one.
_MOST_ROUTED, _WARP = 512, 32


@triton_jit
def _exp(x, PRECISE: tl.constexpr):
    """The exponential that torch uses on CUDA; the interpreter has no libdevice."""
    if PRECISE:
        return libdevice.exp(x)
    return tl.exp(x)


@triton_jit
def _log1p(x, PRECISE: tl.constexpr):
    """log(1 + x) as torch has it on CUDA; for the interpreter, with the error of 1 + x taken out."""
    if PRECISE:
        return libdevice.log1p(x)
    sum = 1.0 + x
    return tl.where(sum == 1.0, x, tl.log(sum) * (x / tl.where(sum == 1.0, 1.0, sum - 1.0)))


@triton_jit
def _keys(values):
    """int32 that compare as the f32 do, zeros of both signs alike: a warp finds their maximum in one instruction."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton_jit
def _first_best(keys, positions):
    """The lowest position that holds the largest key of a tile. Example: [3, 7, 7] at [4, 5, 6]: 5."""
    return tl.min(tl.where(keys == tl.max(keys), positions, 0x7FFFFFFF))


@TritonKernel
def topk_kernel(
    router_ptr, bias_ptr, weights_ptr, ids_ptr,
    row_stride, column_stride, routed_scaling_factor,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TOPK_GROUP: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr, BLOCK_K: tl.constexpr, PRECISE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Chooses the experts of one token.

    Before: logits, or for KIND scores those, `[T, E]`, bias `[E]`. After: weights f32 and ids `[T, TOP_K]`.
    Program t holds row t as a tile `[groups, members]`, both padded to powers of two; expert e is member e % GROUP_SIZE
    of group e // GROUP_SIZE, and positions in the tile rise with the ids. It keeps the TOPK_GROUP best groups, then
    takes the best expert TOP_K times, each time the lowest position among equals, and marks what it took as not there.
    Values to choose by are finite, so -inf means "not there".

    Example: sigmoid logits [0, 2, 1, 2], one group, TOP_K 2: the tile is [[0, 2, 1, 2]], taken are 1, then 3, weights
    .8808 and .8808, renormalized .5 and .5.
    """
    LOWEST: tl.constexpr = -3.4028234663852886e38
    HIGHEST: tl.constexpr = 3.4028234663852886e38
    NOT_THERE: tl.constexpr = -0x7F800001  # the key of -inf
    TINY: tl.constexpr = 1.1754943508222875e-38
    take_over(EARLY)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_GROUPS)
    member = tl.arange(0, BLOCK_MEMBERS)
    position = group[:, None] * BLOCK_MEMBERS + member[None, :]
    expert = group[:, None] * GROUP_SIZE + member[None, :]
    exists = (group < NUM_GROUPS)[:, None] & (member < GROUP_SIZE)[None, :]
    source = router_ptr + token * row_stride + expert * column_stride
    logits = tl.load(source, mask=exists, other=float("-inf")).to(tl.float32)

    if KIND == "softmax":
        powers = _exp(logits - tl.max(logits), PRECISE)
        scores = powers / tl.sum(powers)
    elif KIND == "sigmoid":
        scores = tl.div_rn(1.0, 1.0 + _exp(-logits, PRECISE))
    elif KIND == "sqrtsoftplus":
        scores = tl.sqrt_rn(tl.where(logits > 20.0, logits, _log1p(_exp(logits, PRECISE), PRECISE)))
    else:
        scores = logits
    choice = logits
    if HAS_BIAS:
        choice = scores + tl.load(bias_ptr + expert, mask=exists, other=0.0).to(tl.float32)
    choice = tl.where(choice == choice, choice, LOWEST)
    choice = tl.minimum(tl.maximum(choice, LOWEST), HIGHEST)
    choice = tl.where(exists, choice, float("-inf"))

    if TOPK_GROUP < NUM_GROUPS:
        group_scores = tl.max(choice, axis=1)
        if HAS_BIAS and GROUP_SIZE > 1:
            best = tl.min(tl.where(choice == group_scores[:, None], position, 0x7FFFFFFF), axis=1)
            group_scores += tl.max(tl.where(position == best[:, None], float("-inf"), choice), axis=1)
            group_scores = tl.minimum(tl.maximum(group_scores, LOWEST), HIGHEST)
            group_scores = tl.where(group < NUM_GROUPS, group_scores, float("-inf"))
        kept = tl.zeros([BLOCK_GROUPS], dtype=tl.int32)
        group_keys = _keys(group_scores)
        for _ in range(TOPK_GROUP):
            taken = _first_best(group_keys, group)
            kept = tl.where(group == taken, 1, kept)
            group_keys = tl.where(group == taken, NOT_THERE, group_keys)
        choice = tl.where((kept > 0)[:, None], choice, float("-inf"))

    slot = tl.arange(0, BLOCK_K)
    weights = tl.zeros([BLOCK_K], dtype=tl.float32)
    ids = tl.zeros([BLOCK_K], dtype=tl.int32)
    total = 0.0
    keys = _keys(choice)
    score_bits = scores.to(tl.int32, bitcast=True)
    for k in range(TOP_K):
        taken = _first_best(keys, position)
        weight = tl.max(tl.where(position == taken, score_bits, -0x80000000)).to(tl.float32, bitcast=True)
        keys = tl.where(position == taken, NOT_THERE, keys)
        weights = tl.where(slot == k, weight, weights)
        ids = tl.where(slot == k, taken // BLOCK_MEMBERS * GROUP_SIZE + taken % BLOCK_MEMBERS, ids)
        total += weight
    if RENORMALIZE:
        # torch's clamp lets NaN through, as a comparison with NaN does here.
        weights = weights / tl.where(total < TINY, TINY, total)
    target = token * TOP_K + slot
    tl.store(weights_ptr + target, weights * routed_scaling_factor, mask=slot < TOP_K)
    tl.store(ids_ptr + target, ids, mask=slot < TOP_K)


def fused_topk(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    scoring_func: str = "softmax",
    renormalize: bool = False,
    num_expert_group: int = 1,
    topk_group: int = 1,
    e_score_correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top-k in one launch; arguments and results as in `topk_reference`, on CUDA tensors, E up to 4096.

    Args:
        out: where weights and ids are written, f32 and int32; only where E is at most 4096.

    Softmax with a bias takes its scores from torch, a second launch: the choice then depends on the last bit of a sum
    over the row, and only the same sum gives the same bit. Larger E goes to the reference.
    """
    num_tokens, num_experts = router_logits.shape
    has_bias = e_score_correction_bias is not None
    if num_experts > MAX_EXPERTS:
        return topk_reference(
            router_logits, top_k, scoring_func=scoring_func, renormalize=renormalize,
            num_expert_group=num_expert_group, topk_group=topk_group, e_score_correction_bias=e_score_correction_bias,
            routed_scaling_factor=routed_scaling_factor,
        )  # fmt: skip
    kind, source = scoring_func, router_logits
    if kind == "softmax" and has_bias:
        kind, source = _SCORES, router_logits.float().softmax(dim=-1)
    new = router_logits.new_empty
    weights, ids = out or (new((num_tokens, top_k), dtype=torch.float32), new((num_tokens, top_k), dtype=torch.int32))
    if num_tokens == 0:
        return weights, ids
    group_size = num_experts // num_expert_group
    block_groups, block_members = next_power_of_2(num_expert_group), next_power_of_2(group_size)
    early = comes_early(router_logits.device)
    topk_kernel[(num_tokens,)](
        source, e_score_correction_bias.contiguous() if e_score_correction_bias is not None else None, weights, ids,
        *source.stride(), float(routed_scaling_factor),
        KIND=kind, HAS_BIAS=has_bias, RENORMALIZE=renormalize, TOP_K=top_k, NUM_GROUPS=num_expert_group,
        GROUP_SIZE=group_size, TOPK_GROUP=topk_group, BLOCK_GROUPS=block_groups, BLOCK_MEMBERS=block_members,
        BLOCK_K=next_power_of_2(top_k), PRECISE=not is_interpreted(), EARLY=early,
        launch_pdl=early, num_warps=1 if block_groups * block_members <= 512 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return weights, ids


class RouterParams(ctypes.Structure):
    """`RouterParams` of cuda/router.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "bias", "weights", "ids")),
        ("scaling_factor", ctypes.c_float),
        ("num_tokens", ctypes.c_int),
    )


class DeferredTopK:
    """The choice of some tokens' experts, still to be made: by `settle`, or by a kernel that contains cuda/router.cuh.

    Args:
        router_logits: `[T, E]`, contiguous; the others are those of `fused_topk`.

    Attributes:
        logits, top_k: the arguments.
        topk_weights, topk_ids: f32 and int32 `[T, top_k]`, without values before.
        defines: what such a kernel is compiled with.
        is_plain_softmax: there are no groups and no other scores, so that a warp chooses as fast as a kernel does.
    """

    def __init__(self, router_logits: torch.Tensor, top_k: int, **options: Any) -> None:
        num_tokens, self.num_experts = router_logits.shape
        self.logits, self.top_k, self._options, self._is_settled = router_logits, top_k, options, False
        self.topk_weights = router_logits.new_empty((num_tokens, top_k), dtype=torch.float32)
        self.topk_ids = router_logits.new_empty((num_tokens, top_k), dtype=torch.int32)
        self._bias: torch.Tensor | None = options["e_score_correction_bias"]
        self.is_plain_softmax = options["scoring_func"] == "softmax" and options["num_expert_group"] == 1
        self.defines = (
            ("SCORING", str(_SCORING_NUMBERS[options["scoring_func"]])),
            ("LOGITS", str(_LOGITS_NUMBERS[router_logits.dtype])),
            ("NUM_EXPERTS", str(self.num_experts)),
            ("TOP_K", str(top_k)),
            ("NUM_GROUPS", str(options["num_expert_group"])),
            ("TOPK_GROUP", str(options["topk_group"])),
            ("HAS_BIAS", str(int(self._bias is not None))),
            ("RENORMALIZE", str(int(options["renormalize"]))),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.logits.size(0)

    def settle(self) -> None:
        """Makes the choice, unless it is made."""
        if not self._is_settled:
            fused_topk(self.logits, self.top_k, **self._options, out=(self.topk_weights, self.topk_ids))
            self._is_settled = True

    def take(self) -> RouterParams:
        """What a kernel makes the choice from, which it must do."""
        self._is_settled = True
        return RouterParams(
            self.logits.data_ptr(),
            jit.pointer(self._bias),
            self.topk_weights.data_ptr(),
            self.topk_ids.data_ptr(),
            self._options["routed_scaling_factor"],
            self.num_tokens,
        )


def defer_topk(router_logits: torch.Tensor, top_k: int, **options: Any) -> DeferredTopK | None:
    """The choice that `fused_topk` makes of these arguments, to be made later; None where only that can make it."""
    bias: torch.Tensor | None = options["e_score_correction_bias"]
    fits = router_logits.size(1) <= _MOST_ROUTED and max(top_k, options["num_expert_group"]) <= _WARP
    if bias is not None:
        # With softmax the choice depends on the last bit of torch's sum.
        fits &= options["scoring_func"] != "softmax" and bias.dtype is torch.float32 and bias.is_contiguous()
    if not fits or router_logits.dtype not in _LOGITS_NUMBERS or not comes_early(router_logits.device):
        return None
    return DeferredTopK(router_logits, top_k, **options)

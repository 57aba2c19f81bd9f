"""Replays recorded routing: passes use the experts of a recording in place of those that their routers choose.

    with moe_ep.replaying(model, ids):        # int [tokens, layers, top_k], as read_routed_experts gives it
        logits = model(input_ids).logits

Weights are those that the model's own router gives to the recorded experts, by its logits of now, or, where they are
passed too, the recorded ones. The layers of moe_ep take a router around their own. A transformers model, parallelized
or not, chooses by `torch.topk` over the scores of all experts: that call returns the recorded experts and their scores,
so that whatever the model computes from these is its own, and gradients flow through it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from moe_ep.arguments import INTEGER_NAMES, INTEGERS, check_integers, check_tensors
from moe_ep.errors import ConfigError
from moe_ep.hf.experts import decoder_layer_of, find_experts
from moe_ep.hf.parallelize import configured_top_k
from moe_ep.hf.routed_experts import RoutedExperts
from moe_ep.layer.fused_moe import FusedMoE
from moe_ep.rollouts.recording import layers_of, num_columns, wrapped_routers
from moe_ep.routing.router import Router, WrappingRouter

# As both torch and numpy call them.
_INTEGERS = {str(dtype).removeprefix("torch.") for dtype in INTEGERS}


class RecordedChoices:
    """Rows of a recording, which each layer takes in order.

    Args:
        ids: integer `[..., layers, top_k]`, of tokens in the order of the passes; -1 for none.
        weights: float of the same shape, or None.
        columns: the ids that each layer's router can choose.
        top_ks: how many it chooses for a token; None where that is unknown.

    Raises:
        ValueError: what is no tensor, other shapes or dtypes, or ids that a layer does not have.
    """

    def __init__(
        self, ids: torch.Tensor, weights: torch.Tensor | None, columns: Sequence[int], top_ks: Sequence[int | None]
    ) -> None:
        check_tensors(ids=ids)
        if weights is not None:
            check_tensors(weights=weights)
        check_integers(ids=ids)
        if ids.dim() < 3 or ids.size(-2) != len(columns):
            raise ValueError(
                f"ids has shape {tuple(ids.shape)}; it must be (tokens, layers, top_k) with {len(columns)} layers"
            )
        for layer, top_k in enumerate(top_ks):
            if top_k is not None:
                check_top_k(ids.size(-1), f"the router of layer {layer}", top_k)
        if weights is not None and (weights.shape != ids.shape or not weights.is_floating_point()):
            raise ValueError(f"weights is {weights.dtype} {tuple(weights.shape)}; it must be floats {tuple(ids.shape)}")
        flat = ids.flatten(0, -3)
        for layer, most in enumerate(columns):
            if not flat.numel():
                break
            least, largest = (int(bound) for bound in flat[:, layer].aminmax())
            if not -1 <= least <= largest < most:
                wrong = largest if largest >= most else least
                raise ValueError(f"ids has expert {wrong} in layer {layer}, which has {most}; -1 is none")
        self._ids, self._weights = flat.long(), None if weights is None else weights.flatten(0, -3).float()
        self.num_taken = [0] * len(columns)

    @property
    def top_k(self) -> int:
        return self._ids.size(-1)

    def next(self, layer: int, num_tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(ids int64, weights f32 or None) `[num_tokens, top_k]` of a layer's next tokens; ValueError past the last."""
        first = self.num_taken[layer]
        if first + num_tokens > len(self._ids):
            raise ValueError(
                f"ids has {len(self._ids)} tokens and the passes have {first + num_tokens} at least; pass the choices "
                f"of all tokens, in the order of the passes"
            )
        self.num_taken[layer] += num_tokens
        rows = slice(first, first + num_tokens)
        weights = None if self._weights is None else self._weights[rows, layer].to(device)
        return self._ids[rows, layer].to(device), weights

    def check_all_taken(self) -> None:
        """Raises ValueError where a layer took some of the rows and left others; one that made no pass took none."""
        for layer, taken in enumerate(self.num_taken):
            if 0 < taken < len(self._ids):
                raise ValueError(
                    f"ids has {len(self._ids)} tokens and the passes of the block took {taken} in layer {layer}, so "
                    f"texts may have taken rows of others; pass the choices of exactly the tokens of the passes, "
                    f"without a text's last token where no pass reads it"
                )


def check_top_k(recorded: int, router: str, top_k: int) -> None:
    """Raises ValueError for recorded choices of another number than a router makes."""
    if recorded != top_k:
        raise ValueError(
            f"ids has {recorded} experts for a token and {router} chooses {top_k}; pass what was recorded of this model"
        )


class ReplayRouter(WrappingRouter):
    """Takes recorded experts in place of another router's, and their weights from the recording or from that router."""

    def __init__(self, router: Router, recorded: RecordedChoices, layer: int) -> None:
        super().__init__(router)
        self._recorded, self._layer = recorded, layer

    def choose(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = self._recorded.next(self._layer, hidden_states.size(0), hidden_states.device)
        if weights is None:
            weights = self.router.weigh(hidden_states, ids, *inputs)
        return weights, ids.to(torch.int32)


@contextlib.contextmanager
def replaying(model: Any, ids: Any, weights: Any = None) -> Iterator[None]:
    """A block in which passes take recorded experts in place of those that their routers choose.

    Args:
        model: a layer, several in order, a `MoEStack`, or a causal language model of transformers 5, as it is or
            parallelized.
        ids: integer `[tokens, layers, top_k]` (or `[batch, tokens, layers, top_k]`), a tensor or an array of numpy: the
            rows of all passes in the block, in their order. In a transformers model, a row with -1 keeps the choice of
            the router, as for padding.
        weights: the router's weights of them; None for those that the router gives to these experts now.

    Raises:
        ValueError: a model without layers, choices that do not fit them, from a pass, more tokens than recorded, or, at
            the end of a block with passes, fewer.
        ConfigError: gradient checkpointing, whose backward pass chooses again; from a pass: a router that does not
            choose by `torch.topk`; its weights must be passed.
    """
    ids, weights = (torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in (ids, weights))
    layers = _layers_of_moe_ep(model)
    if layers:
        columns, top_ks = [num_columns(layer) for layer in layers], [layer.top_k for layer in layers]
        recorded = RecordedChoices(ids, weights, columns, top_ks)
        with wrapped_routers(layers, [partial(ReplayRouter, recorded=recorded, layer=i) for i in range(len(layers))]):
            yield
        recorded.check_all_taken()
        return
    modules = _experts_of_transformers(model)
    _check_not_checkpointed(model)
    chosen = [part.top_k if isinstance(part, RoutedExperts) else configured_top_k(model) for _, part, _ in modules]
    recorded = RecordedChoices(ids, weights, [size for _, _, size in modules], chosen)
    with contextlib.ExitStack() as stack:
        topk = None if weights is not None else stack.enter_context(_ReplayedTopK(recorded))
        for layer, (name, module, size) in enumerate(modules):
            if topk is None:
                hook: Callable[..., Any] = partial(_replace_choice, recorded, layer)
            else:
                decoder_layer = model.get_submodule(decoder_layer_of(name))
                stack.callback(decoder_layer.register_forward_pre_hook(partial(topk.begin, layer, size)).remove)
                stack.callback(decoder_layer.register_forward_hook(topk.end, always_call=True).remove)
                hook = partial(topk.check_replayed, name)
            stack.callback(module.register_forward_pre_hook(hook).remove)
        yield
    recorded.check_all_taken()


def _check_not_checkpointed(model: nn.Module) -> None:
    if not torch.is_grad_enabled():
        return
    for name, part in model.named_modules():
        if part.training and getattr(part, "gradient_checkpointing", False):
            raise ConfigError(
                f"{name or type(model).__name__} has gradient checkpointing, which runs it again in the backward pass, "
                f"where nothing is replayed; switch it off, or replay without gradients"
            )


def check_routing_of_texts(routing: Sequence[Any], lengths: Sequence[int]) -> None:
    """ValueError unless there are recorded ids `[tokens, layers, top_k]` of each text, of all its tokens or all but the
    last."""
    for number, ids in enumerate(routing):
        is_array = isinstance(ids, (torch.Tensor, np.ndarray))
        if not is_array or ids.ndim != 3 or str(ids.dtype).removeprefix("torch.") not in _INTEGERS:
            what = f"{ids.dtype} {tuple(ids.shape)}" if is_array else f"a {type(ids).__name__}"
            raise ValueError(
                f"routing[{number}] is {what}; it must be ids [tokens, layers, top_k] of {INTEGER_NAMES}, a tensor or "
                f"an array of numpy"
            )
    if len(forms := {tuple(ids.shape[1:]) for ids in routing}) > 1:
        raise ValueError(
            f"routing has texts of (layers, top_k) {' and '.join(map(str, sorted(forms)))}; pass what was recorded of "
            f"one model"
        )
    rows = [len(ids) for ids in routing]
    if len(rows) != len(lengths) or any(size - row not in (0, 1) for row, size in zip(rows, lengths, strict=True)):
        raise ValueError(
            f"routing is of {len(rows)} texts with {rows} tokens and the texts have {list(lengths)}; give the recorded "
            f"choices of each text, of all its tokens or all but the last"
        )


def _layers_of_moe_ep(model: Any) -> list[FusedMoE]:
    """The layers that have a router of moe_ep; none where the model routes by itself."""
    if isinstance(model, nn.Module) and any(isinstance(part, RoutedExperts) for part in model.modules()):
        return []
    if isinstance(model, nn.Module) and not any(isinstance(part, FusedMoE) for part in model.modules()):
        return []
    return layers_of(model)


def _experts_of_transformers(model: nn.Module) -> list[tuple[str, nn.Module, int]]:
    """The experts of each layer, in order: name, module, and the ids that the router can choose."""
    sharded = [(name, part) for name, part in model.named_modules() if isinstance(part, RoutedExperts)]
    if sharded:
        return [(name, part, part.precomputed.num_columns) for name, part in sharded]
    found = [
        (name, part, part.down_proj.size(0) + getattr(part, "zero_expert_num", 0))  # type: ignore[operator, union-attr]
        for name, part in find_experts(model)
    ]
    if not found:
        raise ValueError(f"model is a {type(model).__name__} without experts whose routing could be replayed")
    return found


class _ReplayedTopK(TorchFunctionMode):
    """Has the `torch.topk` of a router return the recorded experts and their scores.

    It is the call inside of a decoder layer over the scores `[..., E]` for top_k of them.
    """

    def __init__(self, recorded: RecordedChoices) -> None:
        super().__init__()
        self._recorded = recorded
        # The layer under way and the ids that its router can choose, until that has chosen.
        self._due: tuple[int, int] | None = None
        # How many of these it has chosen, where that is another number than recorded.
        self._other_top_k: int | None = None
        # Scores before and after the layer has masked them. DeepSeek-V2 weighs by those after, which are 0 in groups
        # that it does not keep, where recorded experts may be.
        self._masked: tuple[Any, Any] = None, None

    def begin(self, layer: int, num_columns: int, *_: Any) -> None:
        self._due, self._other_top_k = (layer, num_columns), None

    def end(self, *_: Any) -> None:
        self._due, self._masked = None, (None, None)

    def check_replayed(self, name: str, module: nn.Module, args: Any) -> None:
        """Raises where a layer's experts are called, and its router took none of the recording: ValueError if it
        chooses another number of experts, and otherwise ConfigError."""
        if self._due is not None and args[0].numel():
            if self._other_top_k is not None:
                check_top_k(self._recorded.top_k, f"the router of {name}", self._other_top_k)
            raise ConfigError(
                f"the router of {name} does not choose by torch.topk over its experts, so what it would give to the "
                f"recorded ones is unknown; record its weights and pass them too"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if self._due is None:
            return found
        if func in (torch.masked_fill, torch.Tensor.masked_fill):
            self._masked = args[0] if args else kwargs["input"], found
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        scores, (layer, num_columns) = args[0] if args else kwargs["input"], self._due
        # Groups of experts are chosen among `[T, groups, E / groups]`.
        if scores.dim() > 2 or scores.size(-1) != num_columns:
            return found
        if found.indices.size(-1) != self._recorded.top_k:
            self._other_top_k = found.indices.size(-1)
            return found
        self._due = None
        ids, _ = self._recorded.next(layer, scores.numel() // num_columns, scores.device)
        ids = ids.view(found.indices.shape)
        ids = torch.where((ids < 0).any(dim=-1, keepdim=True), found.indices, ids)
        before, masked = self._masked
        if scores is masked:
            scores = before
        return torch.return_types.topk((scores.gather(-1, ids), ids))


def _replace_choice(recorded: RecordedChoices, layer: int, module: nn.Module, args: Any) -> Any:
    """The arguments of an experts module, with recorded experts and weights."""
    hidden_states, own_ids, own_weights, *rest = args
    check_top_k(recorded.top_k, f"the router of layer {layer}", own_ids.size(-1))
    ids, weights = recorded.next(layer, own_ids.numel() // own_ids.size(-1), own_ids.device)
    if weights is None:
        raise RuntimeError("a recording without weights replaces no weights")
    ids, weights = ids.view(own_ids.shape), weights.view(own_weights.shape).to(own_weights.dtype)
    own = (ids < 0).any(dim=-1, keepdim=True)
    ids, weights = torch.where(own, own_ids, ids.to(own_ids.dtype)), torch.where(own, own_weights, weights)
    return (hidden_states, ids, weights, *rest)

"""The router of a layer: chooses the experts of every token, or hands over what the model's own router chose.

Routing has three steps. A router finds weights and logical ids; the layer turns ids into those of physical experts
where experts have replicas (EPLB); fused shared experts get slots behind them. `moe_ep.routing.select_experts` is all
three in one function. None of them synchronizes with the host, so a CUDA graph can hold them.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from moe_ep.arguments import INTEGER_NAMES, INTEGERS, check_integers, check_same_device, check_tensors
from moe_ep.config import RoutingConfig
from moe_ep.fixed_tensors import FixedTensors
from moe_ep.registry import choose_form
from moe_ep.routing.topk import SCORING_FUNCS, topk_reference, weights_of

# Above every id of an int32.
_ANY_ID = (1 << 31) - 1


class Routed(NamedTuple):
    """The choices of a router.

    Attributes:
        topk_weights: f32 `[T, top_k]`, 0 where there is no expert.
        topk_ids: integer `[T, top_k]`, logical, -1 for no expert.
        zero_expert_result: `[T, K]`, what identity experts add to the layer's output; None without such experts.
    """

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    zero_expert_result: torch.Tensor | None = None


class ChoiceLog(NamedTuple):
    """Where the choices of one pass are recorded: at rows int64 `[T]`, one a token, of ids int16 `[rows, top_k]`,
    contiguous, and of weights f32 alike, None where they are not recorded."""

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor | None


class Router(ABC):
    """Chooses experts from hidden states and whatever the layer is called with beside them.

    Routers that are made around another one (`moe_ep.rollouts`) call `choose`, `weigh` and `complete` of it, the parts
    of `route`. A router needs them only where it has identity experts.
    """

    @abstractmethod
    def check(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> None:
        """Raises ValueError for inputs of a call that do not fit, before it is cut into chunks of tokens."""

    @abstractmethod
    def route(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> Routed:
        """Chooses the experts of tokens `[T, K]`; the inputs `[T, ...]` have been checked."""

    def defer(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> Any:
        """What `route` would choose, as a choice that is still to be made (`Routing.deferred`), so that a later kernel
        can make it; None where it must be made at once."""
        return None

    def of_rows(self, rows: slice) -> Router:
        """The router of a part of a pass's tokens, where the pass is cut into chunks."""
        return self

    def graph_key(self, device: torch.device) -> tuple[object, ...] | None:
        """What a CUDA graph of `route` reads beside the inputs of a call, by address; None where none may be made."""
        return None

    def masked(self, row_mask: torch.Tensor) -> Router:
        """This router for tokens of which only those in row_mask, bool `[T]`, go to experts."""
        return _MaskedRouter(self, row_mask)

    def choose(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The choice as (weights, ids) `[T, top_k]`; identity experts have ids from E on."""
        weights, ids, identities = self.route(hidden_states, *inputs)
        if identities is not None:
            raise RuntimeError(
                f"a {type(self).__name__} has identity experts and no choose and complete of its own; give it both"
            )
        return weights, ids

    def weigh(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """The weights f32 `[T, top_k]` that it gives to chosen experts, from this call's inputs; 0 for ids of -1.

        Raises:
            ValueError: it gives weights to nothing but its own choice.
        """
        raise ValueError(f"a {type(self).__name__} weighs nothing but its own choice; replay the recorded weights too")

    def complete(self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> Routed:
        """What follows from a choice."""
        return Routed(topk_weights, topk_ids)


class WrappingRouter(Router):
    """A router around another one, which does what it does not replace."""

    def __init__(self, router: Router) -> None:
        self.router = router

    def check(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> None:
        self.router.check(hidden_states, *inputs)

    def of_rows(self, rows: slice) -> Router:
        part = copy.copy(self)
        part.router = self.router.of_rows(rows)
        return part

    def route(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> Routed:
        return self.complete(hidden_states, *self.choose(hidden_states, *inputs))

    def choose(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.router.choose(hidden_states, *inputs)

    def weigh(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return self.router.weigh(hidden_states, topk_ids, *inputs)

    def complete(self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> Routed:
        return self.router.complete(hidden_states, topk_weights, topk_ids)


class _MaskedRouter(WrappingRouter):
    def __init__(self, router: Router, row_mask: torch.Tensor) -> None:
        super().__init__(router)
        self._row_mask = row_mask

    def choose(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return known_choices(*self.router.choose(hidden_states, *inputs), _ANY_ID, self._row_mask)


class TopKRouter(FixedTensors, Router):
    """Chooses the top_k experts of router logits `[T, E + zero_expert_num]`, as `moe_ep.routing.select_experts` does.

    Raises ValueError or TypeError for settings that do not fit each other, or that many experts.
    """

    _bias_owner: nn.Module | None
    _bias_parameter: nn.Parameter | None

    def __init__(self, config: RoutingConfig, num_experts: int, bias: torch.Tensor | nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.num_columns = num_experts + config.zero_expert_num
        self.e_score_correction_bias = bias
        config.check(self.num_columns, self.e_score_correction_bias)

    @property
    def e_score_correction_bias(self) -> torch.Tensor | None:
        """The bias of the scores, `[E + zero_expert_num]`, or None. It can be assigned: as a tensor, as a parameter of
        the model, whose values may be loaded later, or as the module that has an attribute of this name, which is read
        in every pass. It is not saved with the layer."""
        if self._bias_owner is not None:
            return cast(torch.Tensor, self._bias_owner.e_score_correction_bias)
        return self._buffers["_own_bias"] if self._bias_parameter is None else self._bias_parameter

    @e_score_correction_bias.setter
    def e_score_correction_bias(self, bias: torch.Tensor | nn.Module | None) -> None:
        if not (bias is None or isinstance(bias, torch.Tensor) or hasattr(bias, "e_score_correction_bias")):
            raise TypeError(
                f"e_score_correction_bias is a {type(bias).__name__}; it must be a tensor, a router that has an "
                f"attribute e_score_correction_bias, or None"
            )
        # Not registered: module and parameter belong to the model, and would be saved twice.
        self.__dict__["_bias_owner"] = bias if isinstance(bias, nn.Module) else None
        self.__dict__["_bias_parameter"] = bias if isinstance(bias, nn.Parameter) else None
        own = bias.detach() if isinstance(bias, torch.Tensor) and not isinstance(bias, nn.Parameter) else None
        self.register_buffer("_own_bias", own, persistent=False)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "e_score_correction_bias":  # nn.Module would register it
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def check(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> None:
        (router_logits,) = inputs
        expected = (hidden_states.size(0), self.num_columns)
        if router_logits.shape != expected:
            raise ValueError(
                f"router_logits has shape {tuple(router_logits.shape)}; with these hidden_states the router takes "
                f"{expected}"
            )
        if not router_logits.is_floating_point():
            raise ValueError(f"router_logits is {router_logits.dtype}; it must be f32, f16 or bf16")
        check_same_device("hidden_states", hidden_states.device, router_logits=router_logits)

    def route(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> Routed:
        return self.complete(hidden_states, *self.choose(hidden_states, *inputs))

    def defer(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> Any:
        config, (router_logits,) = self.config, inputs
        if type(self) is not TopKRouter or config.custom_routing_function is not None or config.zero_expert_num:
            return None
        # On a CPU no choice is deferred.
        topk = choose_form(lambda *_, **__: None, "routing:defer_topk", router_logits)
        return topk(router_logits.contiguous(), config.top_k, **topk_options(config, self._bias(hidden_states.device)))

    def graph_key(self, device: torch.device) -> tuple[object, ...] | None:
        bias = self.e_score_correction_bias
        if type(self) is not TopKRouter or self.config.custom_routing_function is not None:
            return None
        if bias is None:
            return ()
        return (bias.data_ptr(), bias.dtype) if bias.device == device else None

    def choose(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (router_logits,) = inputs
        bias = self._bias(hidden_states.device)
        return choose(self.config, hidden_states, router_logits.contiguous(), bias)

    def _bias(self, device: torch.device) -> torch.Tensor | None:
        bias = self.e_score_correction_bias
        if bias is not None:
            if bias.is_meta:
                raise RuntimeError(
                    "e_score_correction_bias of the router has no values, as it was made on the meta device; assign "
                    "one that has, layer.e_score_correction_bias = ..."
                )
            self.config.check_bias(self.num_columns, bias)
            bias = bias.to(device)
        return bias

    def weigh(self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        config = self.config
        if config.custom_routing_function is not None:
            raise ValueError(
                "a custom_routing_function weighs nothing but its own choice; replay the recorded weights too"
            )
        (router_logits,) = inputs
        own_weights, own_ids = self.choose(hidden_states, router_logits)
        scores = SCORING_FUNCS[config.scoring_func](router_logits.float())
        weights = weights_of(scores, topk_ids, config.renormalize, config.routed_scaling_factor)
        # Another kernel may round the scores differently: the router's own choice keeps its own weights, bit for bit.
        return torch.where((own_ids == topk_ids).all(dim=-1, keepdim=True), own_weights, weights)

    def complete(self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> Routed:
        if not self.config.zero_expert_num:
            return Routed(topk_weights, topk_ids)
        num_experts = self.num_columns - self.config.zero_expert_num
        return apply_identity_experts(hidden_states, topk_weights, topk_ids, num_experts)


class PrecomputedRouter(Router):
    """Hands over weights and ids that the model's own router chose.

    Its inputs are topk_weights `[T, top_k]`, of any float dtype, and topk_ids `[T, top_k]`, integer and logical. Ids
    outside of [0, num_columns) mean no expert: they become -1 with weight 0.

    Args:
        num_identities: experts that return what they read, whose ids follow the others'.

    Attributes:
        row_mask: bool `[T]`, tokens that count; the others get no expert. None where all do.
    """

    def __init__(self, num_experts: int, top_k: int, num_identities: int = 0) -> None:
        self.num_experts, self.top_k, self.num_columns = num_experts, top_k, num_experts + num_identities
        self.row_mask: torch.Tensor | None = None

    def check(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> None:
        if len(inputs) != 2:
            raise ValueError("router_logits are given to a layer whose model routes; pass topk_weights and topk_ids")
        topk_weights, topk_ids = inputs
        check_integers(topk_ids=topk_ids)
        if not topk_weights.is_floating_point():
            raise ValueError(f"topk_weights is {topk_weights.dtype}; it must be of a float dtype")
        expected = (hidden_states.size(0), self.top_k)
        if topk_ids.shape != expected or topk_weights.shape != expected:
            raise ValueError(
                f"topk_ids has shape {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)}; with these "
                f"hidden_states the router takes (T, top_k) = {expected} of both"
            )
        check_same_device("hidden_states", hidden_states.device, topk_weights=topk_weights, topk_ids=topk_ids)

    def route(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> Routed:
        return self.complete(hidden_states, *self.choose(hidden_states, *inputs))

    def of_rows(self, rows: slice) -> Router:
        return self if self.row_mask is None else self.masked(self.row_mask[rows])

    def graph_key(self, device: torch.device) -> tuple[object, ...] | None:
        return () if type(self) is PrecomputedRouter and self.row_mask is None else None

    def masked(self, row_mask: torch.Tensor) -> Router:
        part = copy.copy(self)
        part.row_mask = row_mask
        return part

    def choose(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        topk_weights, topk_ids = inputs
        return topk_weights, topk_ids

    def complete(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        log: ChoiceLog | None = None,
    ) -> Routed:
        known = known_choices(topk_weights, topk_ids, self.num_columns, self.row_mask, log)
        if self.num_columns == self.num_experts:
            return Routed(*known)
        return apply_identity_experts(hidden_states, *known, self.num_experts)


def choose(
    config: RoutingConfig, hidden_states: torch.Tensor, router_logits: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, ids) by `config` of logits `[T, E + zero_expert_num]`; those of identity experts follow the others'."""
    if config.custom_routing_function is not None:
        return _custom_topk(config, hidden_states, router_logits)
    topk = choose_form(topk_reference, "routing:fused_topk", router_logits)
    return topk(router_logits, config.top_k, **topk_options(config, bias))


def topk_options(config: RoutingConfig, bias: torch.Tensor | None) -> dict[str, Any]:
    num_groups, kept_groups = config.groups
    return {
        "scoring_func": config.scoring_func,
        "renormalize": config.renormalize,
        "num_expert_group": num_groups,
        "topk_group": kept_groups,
        "e_score_correction_bias": bias,
        "routed_scaling_factor": config.routed_scaling_factor,
    }


def _custom_topk(
    config: RoutingConfig, hidden_states: torch.Tensor, router_logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    found = config.custom_routing_function(  # type: ignore[misc]
        hidden_states=hidden_states, gating_output=router_logits, topk=config.top_k, renormalize=config.renormalize
    )
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise ValueError(f"custom_routing_function returned a {type(found).__name__}; it must be (weights, ids)")
    weights, ids = found
    check_tensors(**{"custom_routing_function's weights": weights, "custom_routing_function's ids": ids})
    expected = (hidden_states.size(0), config.top_k)
    if weights.shape != expected or ids.shape != expected:
        raise ValueError(
            f"custom_routing_function returned weights {tuple(weights.shape)} and ids {tuple(ids.shape)}; both must "
            f"have shape (T, top_k) = {expected}"
        )
    if ids.dtype not in INTEGERS:
        raise ValueError(f"custom_routing_function returned ids of {ids.dtype}; they must be {INTEGER_NAMES}")
    exists = (ids >= 0) & (ids < router_logits.size(1))
    return torch.where(exists, weights.float() * config.routed_scaling_factor, 0.0), torch.where(exists, ids.long(), -1)


def apply_identity_experts(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int
) -> Routed:
    """Clears the slots of identity experts and computes their part of the output.

    That is zero for a token that chose none of them, also where its row is not finite.
    """
    is_identity = topk_ids >= num_experts
    identity_weight = torch.where(is_identity, topk_weights, 0.0).sum(dim=-1, keepdim=True)
    has_identity = is_identity.any(dim=-1, keepdim=True)
    result = torch.where(has_identity, hidden_states.float() * identity_weight, 0.0).to(hidden_states.dtype)
    return Routed(topk_weights.masked_fill(is_identity, 0.0), topk_ids.masked_fill(is_identity, -1), result)


def known_choices(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    row_mask: torch.Tensor | None = None,
    log: ChoiceLog | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (weights f32, ids int32), both `[T, top_k]`, where only experts in [0, num_experts) are left; on CUDA
    tensors in one kernel.

    Example: weights [[.5, .25]], ids [[5, 2]], 4 experts: [[0, .25]] and [[-1, 2]].

    Args:
        row_mask: bool `[T]`, tokens that count; the others get no expert.
        log: where what is returned is recorded too.
    """
    form = choose_form(_known_choices_reference, "choices:triton_known_choices", topk_ids)
    return form(topk_weights, topk_ids, num_experts, row_mask, log)


def _known_choices_reference(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    row_mask: torch.Tensor | None,
    log: ChoiceLog | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    known = (topk_ids >= 0) & (topk_ids < num_experts)
    if row_mask is not None:
        known &= row_mask[:, None]
    weights, ids = torch.where(known, topk_weights.float(), 0.0), torch.where(known, topk_ids, -1).to(torch.int32)
    if log is not None:
        log.ids.index_copy_(0, log.rows, ids.to(torch.int16))
        if log.weights is not None:
            log.weights.index_copy_(0, log.rows, weights)
    return weights, ids


def append_shared_experts(
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, first_id: int, num_shared: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Appends num_shared slots of weight 1 to every token, with ids first_id, first_id + 1, ..."""
    num_tokens = topk_ids.size(0)
    shared_ids = torch.arange(first_id, first_id + num_shared, dtype=topk_ids.dtype, device=topk_ids.device)
    weights = torch.cat([topk_weights, topk_weights.new_ones(num_tokens, num_shared)], dim=1)
    return weights, torch.cat([topk_ids, shared_ids.expand(num_tokens, num_shared)], dim=1)

"""One rank's part of a MoE layer: the experts' parameters, how they are loaded, and what moves with an expert."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from moe_ep.activation import MoEActivation
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig
from moe_ep.errors import ConfigError, check_at_least
from moe_ep.expert_map import determine_expert_map
from moe_ep.layer.custom_ops import register_layer, without_autocast
from moe_ep.layer.expert_slots import ExpertSlots, LayerEplbState
from moe_ep.layer.fixed_tensors import FixedTensors, table_device
from moe_ep.layer.methods.base import make_method
from moe_ep.layer.weight_loading import ExpertMapping, ExpertWeightLoader, expert_params_mapping, matching_rows

# Held by the thread that prepares a layer for its first pass; the passes of other threads wait for it.
FIRST_USE = threading.RLock()


class ExpertShard(FixedTensors):
    """The experts of one rank, as parameters `[El, ...]`: routed slots first, then fused shared experts.

    Raises:
        ValueError: sizes that cannot be divided over the ranks, or that the quantization does not support.
    """

    expert_map: torch.Tensor | None
    # The implementation that computes them: a name from the experts registry, or "auto".
    experts: str = "auto"

    @torch.inference_mode(False)  # passes count in its tensors, in whatever mode they run
    def __init__(
        self,
        *,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype,
        parallel_config: FusedMoEParallelConfig,
        activation: MoEActivation | str,
        swiglu_limit: float | None,
        quant_config: Any,
        enable_eplb: bool,
        num_redundant_experts: int,
        num_fused_shared_experts: int,
        has_bias: bool,
        max_num_tokens: int,
        expert_mapping: ExpertMapping | None,
        prefix: str,
    ) -> None:
        super().__init__()
        # Checked here under the argument names of the layer; the configurations use other names for some.
        check_at_least(1, num_experts=num_experts, top_k=top_k, hidden_size=hidden_size, max_num_tokens=max_num_tokens)
        check_at_least(1, intermediate_size=intermediate_size)
        check_at_least(0, num_redundant_experts=num_redundant_experts, n_shared_experts=num_fused_shared_experts)
        self.layer_name = register_layer(self, prefix)
        self.num_experts = num_experts
        self.num_redundant_experts = num_redundant_experts
        self.num_fused_shared_experts = num_fused_shared_experts
        self.activation = MoEActivation.parse(activation)
        self.parallel_config = parallel_config
        self.expert_mapping = expert_mapping
        self._check_redundancy(enable_eplb)
        self.eplb_state = LayerEplbState(num_experts, num_redundant_experts) if enable_eplb else None
        self.slots = self._place_experts()
        self.moe_config = FusedMoEConfig(
            num_experts=num_experts + num_redundant_experts,
            experts_per_token=top_k,
            hidden_dim=hidden_size,
            intermediate_size_per_partition=self._divide_intermediate_size(intermediate_size),
            num_local_experts=self.slots.num_local,
            moe_parallel_config=parallel_config,
            in_dtype=params_dtype,
            max_num_tokens=max_num_tokens,
            activation=self.activation,
            swiglu_limit=swiglu_limit,
            has_bias=has_bias,
            num_fused_shared_experts=num_fused_shared_experts,
        )
        self.loader = ExpertWeightLoader(
            name=self.layer_name,
            slots=self.slots,
            gated=self.activation.is_gated,
            tp_rank=parallel_config.tp_rank if parallel_config.shards_experts else 0,
            tp_size=parallel_config.tp_size if parallel_config.shards_experts else 1,
        )
        self.quant_method = make_method(self.moe_config, quant_config)
        if enable_eplb and not self.quant_method.supports_eplb:
            raise ConfigError(
                f"enable_eplb is set and {type(self.quant_method).__name__} cannot move experts; unset it"
            )
        self.quant_method.create_weights(
            self,
            num_experts=self.slots.num_local,
            hidden_size=hidden_size,
            intermediate_size_per_partition=self.moe_config.intermediate_size_per_partition,
            params_dtype=params_dtype,
        )
        self._processed = self._reloading = False
        self._refused = ""

    def _check_redundancy(self, enable_eplb: bool) -> None:
        E, redundant, ep_size = self.num_experts, self.num_redundant_experts, self.parallel_config.ep_size
        if (enable_eplb or redundant) and (E + redundant) % ep_size:
            raise ConfigError(
                f"num_experts ({E}) + redundant ({redundant}) must be a multiple of ep_size ({ep_size}); "
                f"pass num_redundant_experts={redundant + -(E + redundant) % ep_size}"
            )
        if redundant > E * ep_size:
            raise ConfigError(
                f"num_redundant_experts is {redundant}; with {E} experts on {ep_size} ranks it may be {E * ep_size} at "
                f"most, which is more than every rank needs to hold all of them"
            )

    def _place_experts(self) -> ExpertSlots:
        parallel, num_shared = self.parallel_config, self.num_fused_shared_experts
        _, expert_map, _ = determine_expert_map(
            parallel.ep_size,
            parallel.ep_rank,
            self.num_experts + self.num_redundant_experts,
            parallel.expert_placement_strategy,
            num_shared,
            return_expert_mask=True,  # and with it the shared experts' part of the map
        )
        there = None if expert_map is None else expert_map.to(table_device())
        self.register_buffer("expert_map", there, persistent=False)
        return ExpertSlots(
            num_experts=self.num_experts,
            num_redundant_experts=self.num_redundant_experts,
            num_fused_shared_experts=num_shared,
            expert_map=expert_map,
            replicas=None if self.eplb_state is None else self.eplb_state.replicas,
        )

    def _divide_intermediate_size(self, intermediate_size: int) -> int:
        num_parts = self.parallel_config.tp_size if self.parallel_config.shards_experts else 1
        if intermediate_size % num_parts:
            raise ValueError(
                f"intermediate_size is {intermediate_size}; without expert parallelism it must be a multiple of "
                f"tp_size ({num_parts})"
            )
        return intermediate_size // num_parts

    @staticmethod
    def make_expert_params_mapping(
        ckpt_gate_proj_name: str,
        ckpt_down_proj_name: str,
        ckpt_up_proj_name: str,
        num_experts: int,
        num_redundant_experts: int = 0,
    ) -> ExpertMapping:
        """Returns (param_name, weight_name, expert_id, shard_id) for each physical expert and shard w1, w2 and w3.

        Replacing weight_name by param_name in a checkpoint's tensor name gives the parameter's name. Redundant expert p
        is loaded from expert p mod E. Ungated experts, whose up name is empty, have no w3.
        """
        return expert_params_mapping(
            ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name, num_experts, num_redundant_experts
        )

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Copies a checkpoint tensor into every local slot that currently holds its expert.

        Args:
            param: one of the layer's expert parameters.
            loaded_weight: the full tensor of one expert (this rank's TP part is cut out of it), or of all experts with
                a leading dimension E, in which case expert_id is ignored. It is not read if the expert is not local.
            weight_name: its name, for messages.
            shard_id: w1 (gate, or all of an ungated w13), w3 (up) or w2 (down).
            expert_id: physical expert; fused shared experts follow the redundant ones. After EPLB has moved experts,
                the tensor goes to the expert's current slots.

        Returns:
            Whether a local expert took it, if return_success is set; None otherwise.

        Raises:
            ValueError: an unknown parameter, id or shard, a tensor of another shape or dtype or without values, or what
                is none.
            RuntimeError: the parameters were already processed and freed, or experts are moving.
        """
        self._check_at_rest()
        # By identity and not by an attribute, so that another layer's parameter of the same name is refused.
        param_name = next((name for name, own in self._parameters.items() if own is param), "")
        taken = self.loader.load(param_name, param, loaded_weight, weight_name, shard_id, expert_id)
        return taken if return_success else None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads tensors by their checkpoint names; returns the names of the parameters that received data.

        Raises:
            ValueError: the layer was made without expert_mapping, or has no parameter for a name.
            TypeError: a dict in place of its items().
            RuntimeError: as `weight_loader`.
        """
        self._check_at_rest()
        if self.expert_mapping is None:
            raise ValueError(
                "load_weights needs expert_mapping; make the layer with make_expert_params_mapping's result"
            )
        params = dict(self.named_parameters())
        taken = set()
        for name, tensor, param_name, shard_id, expert_id in matching_rows(weights, self.expert_mapping):
            if param_name not in params:
                raise ValueError(f"{name}: the layer {self.layer_name} has no parameter {param_name} to load it into")
            if self.loader.load(param_name, params[param_name], tensor, name, shard_id, expert_id):
                taken.add(param_name)
        return taken

    def is_local_expert(self, physical_expert_id: int) -> bool:
        """Whether this physical expert is loaded into a local slot; ValueError for an id that does not exist."""
        return bool(self.slots.of_id(physical_expert_id))

    def process_weights_after_loading(self) -> None:
        """Converts loaded weights to the form that the experts read. The first pass does this if nobody did before.

        Raises:
            RuntimeError: loading has begun and tensors are missing, or they are on the meta device.
        """
        self._check_complete()
        with FIRST_USE:
            held = self.quant_method.expert_tensors(self) if self._processed else self.parameters(recurse=False)
            if any(tensor.is_meta for tensor in held):
                raise RuntimeError(
                    f"the weights of {self.layer_name} are on the meta device and have no values; call "
                    f"to_empty(device=...), and load them"
                )
            if not self._processed:
                # Ordinary tensors of the checkpoint's dtypes, whatever mode the first pass runs in.
                with torch.inference_mode(False), torch.no_grad(), without_autocast():
                    self.quant_method.process_weights_after_loading(self)
                self._processed, self._reloading = True, False

    def begin_reload(self) -> None:
        """Prepares for loading all or some of the experts again, with room for them beside the weights in use.

        Load as the first time, then call `process_weights_after_loading`. The weights are written in place into the
        experts' current slots, so CUDA graphs stay valid; experts that are not loaded keep theirs. Parameters that are
        not packed, such as plain weights and biases, change while they are loaded. No pass may run in between.

        Raises:
            RuntimeError: loading has begun and tensors are missing, or experts are moving: those that were fetched
                before would overwrite what is loaded now.
        """
        self._check_at_rest()
        self.process_weights_after_loading()
        self.quant_method.begin_reload(self)
        self.loader.reopen()
        self._processed, self._reloading = False, True

    def _check_at_rest(self) -> None:
        """RuntimeError where experts are moving."""
        if self.eplb_state is not None and self.eplb_state.is_moving():
            raise RuntimeError(
                f"experts are still moving, and the weights of {self.layer_name} cannot be loaded again meanwhile; "
                f"call finish of the EPLBManager on every rank first"
            )

    def check_open(self, what: str) -> None:
        """Raises RuntimeError, naming what was to be loaded, if the parameters were processed and freed already."""
        self.loader.check_open(what)

    def refuse(self, why: str) -> None:
        """Lets nothing run any more with weights that would give wrong results."""
        self._refused = why

    def check_loaded(self) -> None:
        """Raises RuntimeError, naming what is missing, if loading has begun and is not complete, or after `refuse`."""
        if self._refused:
            raise RuntimeError(f"{self.layer_name} cannot run: {self._refused}; make and load the model again")
        if self.eplb_state is not None and self.eplb_state.in_doubt:
            raise RuntimeError(
                f"{self.layer_name} cannot run: a rearrangement failed before all ranks had said that they moved its "
                f"experts; make an EPLBManager on every rank, which compares where they are"
            )
        self._check_complete()
        if self._reloading:
            raise RuntimeError(
                f"the weights of {self.layer_name} are being loaded again; call process_weights_after_loading first"
            )

    def _check_complete(self) -> None:
        missing = self.loader.missing()
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise RuntimeError(f"the weights of {self.layer_name} are not complete: {missing[0]}{more} were not loaded")

    def expert_weights(self) -> list[torch.Tensor]:
        """Views `[local routed slots, ...]` of everything that must move with a routed expert."""
        self.process_weights_after_loading()
        return [tensor[: self.slots.num_local_routed] for tensor in self.quant_method.expert_tensors(self)]

    @property
    def enable_eplb(self) -> bool:
        """Whether ids are mapped to replicas and loads are recorded."""
        return self.eplb_state is not None

    def set_eplb_state(
        self,
        moe_layer_idx: int,
        expert_load_view: torch.Tensor,
        logical_to_physical_map: torch.Tensor,
        logical_replica_count: torch.Tensor,
    ) -> None:
        """Replaces the layer's own EPLB tensors by views of row moe_layer_idx of the model's.

        Args:
            expert_load_view: int32 `[L, num_physical]`.
            logical_to_physical_map: int `[L, E, max_replicas]`, -1 padded.
            logical_replica_count: int `[L, E]`.

        Raises:
            ValueError: the layer was made without enable_eplb, or shapes that do not fit.
        """
        if self.eplb_state is None:
            raise ValueError(f"the layer {self.layer_name} was made without EPLB; make it with enable_eplb=True")
        self.eplb_state.set(moe_layer_idx, expert_load_view, logical_to_physical_map, logical_replica_count)

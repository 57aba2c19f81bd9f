"""The interface of a MoE layer for quantization methods, custom ops and batch balancing.

It is separate from `fused_moe.py`, which imports those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from moe_ep.activation import MoEActivation
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig
from moe_ep.distributed.process_groups import LayerGroups
from moe_ep.fixed_tensors import FixedTensors
from moe_ep.layer.expert_slots import ExpertSlots, LayerEplbState
from moe_ep.layer.weight_loading import ExpertWeightLoader
from moe_ep.modular_kernel import FusedMoEModularKernel


class MoELayer(FixedTensors, ABC):
    """The attributes and methods of `FusedMoE` that its parts use; its parameters are this rank's experts `[El, ...]`.

    Attributes:
        slots: which local slot holds which expert.
        loader: copies checkpoint tensors into the parameters.
        expert_map: int32 `[physical + shared]`, global -> local, -1 if not local; None if every expert is local.
        eplb_state: maps and loads of EPLB; None without EPLB.
        experts: the registry name of the implementation that computes the experts, or "auto".
        input_dtype: the requested dtype of rows: torch.int8, torch.float8_e4m3fn, "checkpoint" or "none".
    """

    layer_name: str
    num_experts: int
    activation: MoEActivation
    parallel_config: FusedMoEParallelConfig
    moe_config: FusedMoEConfig
    slots: ExpertSlots
    loader: ExpertWeightLoader
    expert_map: torch.Tensor | None
    eplb_state: LayerEplbState | None
    experts: str
    dispatch_dtype: torch.dtype | None
    input_dtype: torch.dtype | str
    apply_router_weight_on_input: bool

    @property
    @abstractmethod
    def groups(self) -> LayerGroups:
        """The process groups of the layer's ranks."""

    @property
    @abstractmethod
    def modular_kernel(self) -> FusedMoEModularKernel:
        """The backend joined with the experts."""

    @property
    def enable_eplb(self) -> bool:
        """Whether ids are mapped to replicas and loads are recorded."""
        return self.eplb_state is not None

    @abstractmethod
    def forward_node(
        self, hidden_states: torch.Tensor, *inputs: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The body of a graph node, whose inputs are tensors: router_logits, or topk_weights and topk_ids."""

    @abstractmethod
    def supports_cuda_graph(self) -> bool:
        """Whether a CUDA graph can capture a pass."""

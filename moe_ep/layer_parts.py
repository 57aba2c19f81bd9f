"""What runs a MoE layer: the backend that moves its rows and the experts, made when they are first needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
import torch.distributed as dist
from torch import nn

from moe_ep.custom_ops import register_layer, unique_name
from moe_ep.expert_shard import FIRST_USE, ExpertShard
from moe_ep.modular_kernel import FusedMoEModularKernel, FusedMoEPrepareAndFinalize
from moe_ep.process_groups import LayerGroups, is_initialized, layer_groups

if TYPE_CHECKING:
    from moe_ep.layer import FusedMoE


class LayerParts(ExpertShard):
    """The experts of one rank, joined with the ranks of its layer.

    Attributes:
        groups: the process groups of the layer.
        shared_experts: a module whose output is added, or None.
        e_score_correction_bias: of the router, `[E]`, or None; may be assigned.
        dispatch_dtype: of rows on the wire; None for the activations' own.
    """

    # Attributes that hold kernels.
    _kernels: ClassVar[tuple[str, ...]] = ("_modular_kernel",)

    groups: LayerGroups
    shared_experts: nn.Module | None
    e_score_correction_bias: torch.Tensor | None
    dispatch_dtype: torch.dtype | None

    def _join(self, process_group: dist.ProcessGroup | None) -> None:
        """Finds the ranks; makes the backend where they are there already."""
        self.groups = layer_groups(self.parallel_config, process_group)
        self._modular_kernel: FusedMoEModularKernel | None = None
        self._prepare_finalize: FusedMoEPrepareAndFinalize | None = None
        # Terms that every rank holds whole are added to a complete sum by all ranks, to partial sums by one of them.
        self._takes_complete_terms = True
        if is_initialized() or not self._spans_ranks():
            self._make_prepare_finalize()

    @property
    def asks_for_tokens(self) -> bool:
        """Whether its ranks must know how many tokens the others have."""
        return self.groups.ep is not None and self.prepare_finalize.max_num_tokens_per_rank() is not None

    @property
    def prepare_finalize(self) -> FusedMoEPrepareAndFinalize:
        """The backend that moves rows for this layer."""
        if self._prepare_finalize is not None:
            return self._prepare_finalize
        try:
            return self._make_prepare_finalize()
        except AttributeError as error:
            raise RuntimeError(f"the backend of {self.layer_name} cannot be made: {error}") from error

    def _make_prepare_finalize(self) -> FusedMoEPrepareAndFinalize:
        if self._spans_ranks() and not is_initialized():
            raise RuntimeError(
                f"the layer {self.layer_name} is one of {self.parallel_config.tp_size * self.parallel_config.dp_size} "
                f"ranks and torch.distributed is not initialised; call init_process_group before making the layer"
            )
        with torch.device("cpu"):  # Its tables have values where the layer is made on the meta device, too.
            self._prepare_finalize = self.quant_method.maybe_make_prepare_finalize(self.groups.ep, self.dispatch_dtype)
        self._takes_complete_terms = self.must_reduce_shared_expert_outputs() or self.parallel_config.tp_rank == 0
        return self._prepare_finalize

    def _spans_ranks(self) -> bool:
        return self.parallel_config.use_ep or self.parallel_config.tp_size > 1

    @property
    def modular_kernel(self) -> FusedMoEModularKernel:
        """The backend and the experts, joined when the weights are ready."""
        kernel = self._modular_kernel
        if kernel is None:
            with FIRST_USE:
                kernel = self._modular_kernel
                if kernel is None:
                    kernel = self._make_kernel()
                    # Not as a submodule: the shared experts are the layer's already, and would be saved twice.
                    self.__dict__["_modular_kernel"] = kernel
        return kernel

    def _make_kernel(self) -> FusedMoEModularKernel:
        try:
            self.process_weights_after_loading()
            experts = self.quant_method.select_gemm_impl(self.prepare_finalize, cast("FusedMoE", self))
            return FusedMoEModularKernel(self.prepare_finalize, experts, self.shared_experts)
        except AttributeError as error:
            # A module takes it for a missing property of its own.
            raise RuntimeError(f"the experts of {self.layer_name} cannot be made: {error}") from error

    def _forget_kernels(self) -> None:
        """Lets kernels be made anew: their experts hold on to scales and biases that are about to be others."""
        self.__dict__.update(dict.fromkeys(self._kernels))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self._forget_kernels()
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "e_score_correction_bias":
            self._hold_bias(value)
            return
        # As load_state_dict does with assign=True.
        if isinstance(value, torch.Tensor) and (name in self._parameters or name in self._buffers):
            self._forget_kernels()
        super().__setattr__(name, value)

    def _hold_bias(self, bias: torch.Tensor | None) -> None:
        """A router's parameter is held as it is, so that it stays the one that the router is loaded into; any other
        tensor moves with the layer. Neither is saved with the layer."""
        name = "e_score_correction_bias"
        self.__dict__.pop(name, None)
        if name in self._buffers:
            delattr(self, name)
        if isinstance(bias, nn.Parameter):
            self.__dict__[name] = bias
        else:
            self.register_buffer(name, None if bias is None else bias.detach(), persistent=False)

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes its kernels anew: the experts in them hold on to this layer's weights."""
        return {**self.__dict__, **dict.fromkeys(self._kernels)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is a layer of its own, so it runs under a name of its own."""
        super().__setstate__(state)
        self.layer_name = unique_name(self.layer_name)
        register_layer(cast("FusedMoE", self))

    def must_reduce_shared_expert_outputs(self) -> bool:
        """Whether the combine returns complete outputs, so that no all-reduce follows that would complete others."""
        return self.prepare_finalize.output_is_reduced()

    def maybe_all_reduce_tensor_model_parallel(self, x: torch.Tensor) -> torch.Tensor:
        """`x` summed over TP ranks, in place, where the layer's outputs are partial sums; `x` itself where not."""
        if not self.must_reduce_shared_expert_outputs() and self.groups.tp is not None:
            dist.all_reduce(x, group=self.groups.tp)
        return x

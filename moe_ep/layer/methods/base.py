"""The contract of quantization methods, the steps that they share, and the method of plain weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from moe_ep.activation import MoEActivation
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.errors import ConfigError
from moe_ep.layer.interface import MoELayer
from moe_ep.layer.weight_loading import ParamLayout, bias_layout, weight_layout
from moe_ep.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEPermuteExpertsUnpermute,
    FusedMoEPrepareAndFinalize,
    make_experts,
    make_prepare_finalize,
)
from moe_ep.modular_kernel.choice import REFERENCE, ExpertsNames, choose_experts
from moe_ep.quantization.input_rows import CHECKPOINT, NONE, InputRows, dtype_name, log_once
from moe_ep.registry import EXPERTS, QUANT_METHODS

# The largest mean |difference| / mean |reference| that rounding and the order of sums cause between correct results.
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_DISPATCH_TOLERANCES = {None: 0.0, torch.int8: 2e-2, torch.float8_e4m3fn: 5e-2}
_INPUT_TOLERANCES = {None: 0.0, torch.int8: 3e-2, torch.float8_e4m3fn: 8e-2}


def tolerance(
    dtype: torch.dtype, dispatch_dtype: torch.dtype | None = None, input_dtype: torch.dtype | None = None
) -> float:
    """The largest `relative_error` of two layers with the same weights, for these dtypes of activations, of rows on the
    wire, and of rounded rows in the experts."""
    return max(_TOLERANCES[dtype], _DISPATCH_TOLERANCES[dispatch_dtype] + _INPUT_TOLERANCES[input_dtype])


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """mean |output - reference| / mean |reference| in f32; 0 for tensors without elements."""
    if not reference.numel():
        return 0.0
    difference = (output.float() - reference.float()).abs().mean()
    return float(difference / reference.float().abs().mean().clamp(min=torch.finfo(torch.float32).tiny))


class FusedMoEMethodBase(ABC):
    """Creates the parameters of one kind of experts, and chooses the implementation that computes them.

    Args:
        moe_config: the layer's shapes on this rank.
        quant_config: how the checkpoint is quantized, or None.
    """

    def __init__(self, moe_config: FusedMoEConfig, quant_config: Any = None) -> None:
        self.moe_config = moe_config
        self.quant_config = quant_config

    @property
    def supports_eplb(self) -> bool:
        """Whether experts can be moved while serving; `expert_tensors` must then be everything that belongs to one."""
        return True

    def uses_weight_scale_2_pattern(self) -> bool:
        """Whether second scales are called `weight_scale_2`, as in modelopt's nvfp4."""
        return False

    @abstractmethod
    def create_weights(
        self,
        layer: MoELayer,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Adds the parameters `[num_experts, ...]` to the layer; ValueError for unsuitable sizes."""

    def process_weights_after_loading(self, layer: MoELayer) -> None:
        """Converts loaded parameters to the form that the experts read; does nothing for plain weights.

        The layer calls it once after loading. After each `begin_reload` it calls it again, to write the slots that were
        loaded (`layer.loader.slots_loaded_again`) in place into the tensors in use.
        """
        return

    def loads_in_place(self) -> bool:
        """Whether the experts read the same parameters that a checkpoint is loaded into, without a conversion."""
        own, base = type(self), FusedMoEMethodBase
        return (own.process_weights_after_loading, own.begin_reload) == (
            base.process_weights_after_loading,
            base.begin_reload,
        )

    def begin_reload(self, layer: MoELayer) -> None:
        """Prepares the layer for loading checkpoint tensors again; plain weights are always ready for that."""
        return

    def reload_bytes(self, layer: MoELayer) -> int:
        """The approximate memory that `begin_reload` needs in addition to the weights, in bytes."""
        return 0

    @abstractmethod
    def gemm_weights(self, layer: MoELayer) -> tuple[torch.Tensor, torch.Tensor]:
        """w1 and w2 in the experts' layout."""

    @abstractmethod
    def get_fused_moe_quant_config(self, layer: MoELayer) -> FusedMoEQuantConfig:
        """The configuration with the processed scales, zero points and biases."""

    def expert_kwargs(self, layer: MoELayer) -> dict[str, Any]:
        """The arguments of the experts' constructor beyond the two configurations."""
        return {}

    @abstractmethod
    def weight_tensors(self, layer: MoELayer) -> list[torch.Tensor]:
        """All processed tensors `[El, ...]` except biases."""

    def maybe_make_prepare_finalize(
        self, process_group: dist.ProcessGroup | None = None, dispatch_dtype: torch.dtype | None = None
    ) -> FusedMoEPrepareAndFinalize:
        """Creates the layer's backend: the named one if tokens must be sent between ranks, otherwise no_ep."""
        parallel = self.moe_config.moe_parallel_config
        backend = parallel.all2all_backend if parallel.use_all2all else "no_ep"
        quant_config = FusedMoEQuantConfig(dispatch_dtype=dispatch_dtype)
        return make_prepare_finalize(backend, self.moe_config, quant_config, process_group)

    def select_gemm_impl(
        self, prepare_finalize: FusedMoEPrepareAndFinalize, layer: MoELayer
    ) -> FusedMoEPermuteExpertsUnpermute:
        """Creates the experts for the backend's format: those that the layer names, or the default ones."""
        activation_format = prepare_finalize.activation_format()
        name = self.experts_names(layer)[activation_format]
        kwargs = self.expert_kwargs(layer)
        if activation_format is FusedMoEActivationFormat.BatchedExperts:
            kwargs |= {
                "max_num_tokens": prepare_finalize.max_num_tokens_per_rank(),
                "num_dispatchers": prepare_finalize.num_dispatchers(),
            }
        rows = self.input_rows(layer)
        log_once(rows, layer.input_dtype, layer.parallel_config)
        quant_config = replace(
            self.get_fused_moe_quant_config(layer),
            dispatch_dtype=layer.dispatch_dtype,
            input_dtype=rows.dtype,
            faster_rows_only=layer.input_dtype == CHECKPOINT,
        )
        return make_experts(name, self.moe_config, quant_config, **kwargs)

    def checkpoint_input_dtype(self) -> torch.dtype | None:
        """The dtype of activations that the checkpoint was made for, if it is int8 or e4m3."""
        return None

    def asked_input_dtype(self, layer: MoELayer) -> torch.dtype | None:
        """The 8-bit dtype of rows that the layer or its checkpoint asks for; its experts may refuse it."""
        asked = layer.input_dtype
        if isinstance(asked, str):
            return None if asked == NONE else self.checkpoint_input_dtype()
        return asked

    def packed_input_dtype(self, layer: MoELayer) -> torch.dtype | None:
        """The 8-bit dtype of rows that weights are packed for: the one asked for, unless the layer sends another."""
        asked = self.asked_input_dtype(layer)
        return None if _sends_others(layer, asked) else asked

    def input_rows(self, layer: MoELayer) -> InputRows:
        """The rows that the experts of a processed layer compute with.

        Raises:
            ConfigError: the requested dtype does not fit the weights, or has no kernel.
        """
        asked, dtype = layer.input_dtype, self.asked_input_dtype(layer)
        if asked == NONE:
            return InputRows(None, "asked for by name")
        if dtype is None:
            return InputRows(None, "the weights were not made for 8-bit rows")
        device = self.gemm_weights(layer)[0].device
        quant_config, name = self.get_fused_moe_quant_config(layer).with_input_dtype(dtype, asked == CHECKPOINT), ""
        refusal = quant_config.refuses_rows_of(dtype)
        if refusal is None:
            name, kwargs = self.experts_names(layer)[FusedMoEActivationFormat.Standard], self.expert_kwargs(layer)
            refusal = EXPERTS.load(name).refuses_input_dtype(self.moe_config, quant_config, device, **kwargs)
        if refusal is None and _sends_others(layer, dtype):
            refusal = f"dispatch_dtype is {layer.dispatch_dtype}, so that rows would be rounded twice"
        if asked != CHECKPOINT:
            if refusal is not None:
                raise ConfigError(
                    f"input_dtype of {layer.layer_name} is {dtype} and {refusal}; pass 'none' for rows as they are"
                )
            return InputRows(dtype, "asked for by name")
        made_for = f"the checkpoint was made for {dtype_name(dtype)} activations"
        if refusal is None and (device.type == "cpu" or name in REFERENCE.values()):
            refusal = "plain torch is not faster with them, and rounds rows to a dtype that is named alone"
        if refusal is not None:
            return InputRows(None, f"{made_for}, but {refusal}")
        return InputRows(dtype, made_for)

    def experts_names(self, layer: MoELayer) -> ExpertsNames:
        """The registry names of the experts that compute this layer, by activation format."""
        return choose_experts(layer.experts, self.moe_config, (), self.gemm_weights(layer)[0].device)

    def apply(
        self,
        layer: MoELayer,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        **more: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Runs the modular kernel; returns `[T, K]`, or (shared, `[T, K]`) with shared experts.

        Args:
            more: `deferred` and `most_tokens` of `Routing`, if they are known.
        """
        kernel = layer.modular_kernel
        w1, w2 = self.gemm_weights(layer)
        return kernel(
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation=layer.activation,
            global_num_experts=self.moe_config.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            **more,
        )

    @staticmethod
    def add_parameter(layer: MoELayer, name: str, data: torch.Tensor, layout: ParamLayout) -> None:
        """Registers an expert parameter that `weight_loader` fills."""
        layer.register_parameter(name, nn.Parameter(data, requires_grad=False))
        layer.loader.declare(name, layout)

    def add_biases(self, layer: MoELayer, num_experts: int, w13_rows: int, w2_rows: int, dtype: torch.dtype) -> None:
        """Adds `w13_bias` `[El, 2N]` and `w2_bias` `[El, K]`, if the layer has biases."""
        if self.moe_config.has_bias:
            self.add_parameter(layer, "w13_bias", torch.zeros(num_experts, w13_rows, dtype=dtype), bias_layout("w13"))
            self.add_parameter(layer, "w2_bias", torch.zeros(num_experts, w2_rows, dtype=dtype), bias_layout("w2"))

    def bias(self, layer: MoELayer, gemm: str) -> torch.Tensor | None:
        """The bias of "w13" or "w2", if the layer has biases."""
        return cast(torch.Tensor, getattr(layer, f"{gemm}_bias")).data if self.moe_config.has_bias else None

    def expert_tensors(self, layer: MoELayer) -> list[torch.Tensor]:
        """Everything `[El, ...]` that must move with an expert; the same list on every rank."""
        biases = [self.bias(layer, "w13"), self.bias(layer, "w2")]
        return [*self.weight_tensors(layer), *(bias for bias in biases if bias is not None)]

    def rebuild_derived_state(self, layer: MoELayer, slots: Sequence[int]) -> None:
        """Updates the method's state outside of `expert_tensors` after other experts have moved into local slots.

        It is called between two steps, in stream order; it must work in place and not wait for the device. By default
        it does nothing, for methods whose derived state moves with the expert.
        """
        return


def _sends_others(layer: MoELayer, dtype: torch.dtype | None) -> bool:
    """Whether a layer sends rows in an 8-bit dtype other than `dtype`."""
    return layer.parallel_config.use_all2all and layer.dispatch_dtype not in (None, dtype)


def w13_rows(moe_config: FusedMoEConfig) -> int:
    """The rows of w13 on this rank: 2N, gate then up, or N if the activation is ungated."""
    rows = moe_config.intermediate_size_per_partition
    return 2 * rows if MoEActivation.parse(moe_config.activation).is_gated else rows


def make_method(moe_config: FusedMoEConfig, quant_config: Any = None) -> FusedMoEMethodBase:
    """Creates the method that `quant_config.quant_method` names in the registry; None means plain weights.

    Raises:
        TypeError: a quant_config without a quant_method.
        ValueError: an unknown method; the known ones are listed.
    """
    if quant_config is not None and not hasattr(quant_config, "quant_method"):
        raise TypeError(f"quant_config is {quant_config!r}; it must be None or an object with a quant_method")
    name = "none" if quant_config is None else quant_config.quant_method
    return QUANT_METHODS.load(name)(moe_config, quant_config)


# ==== Plain weights in f32, f16 or bf16 ====


class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
    """`w13_weight` `[El, 2N, K]` (gate rows, then up rows; `[El, N, K]` ungated) and `w2_weight` `[El, K, N]`."""

    def create_weights(
        self,
        layer: MoELayer,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        rows, N, K = w13_rows(self.moe_config), intermediate_size_per_partition, hidden_size
        for gemm, shape in (("w13", (num_experts, rows, K)), ("w2", (num_experts, K, N))):
            self.add_parameter(layer, f"{gemm}_weight", torch.empty(shape, dtype=params_dtype), weight_layout(gemm))
        self.add_biases(layer, num_experts, rows, K, params_dtype)

    def gemm_weights(self, layer: MoELayer) -> tuple[torch.Tensor, torch.Tensor]:
        w13: Any = layer.w13_weight
        w2: Any = layer.w2_weight
        return w13.data, w2.data

    def get_fused_moe_quant_config(self, layer: MoELayer) -> FusedMoEQuantConfig:
        return FusedMoEQuantConfig(w1_bias=self.bias(layer, "w13"), w2_bias=self.bias(layer, "w2"))

    def weight_tensors(self, layer: MoELayer) -> list[torch.Tensor]:
        return list(self.gemm_weights(layer))

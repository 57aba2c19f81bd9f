"""All MoE layers of a checkpoint that have a router, in sequence: a model without its attention.

    stack = MoEStack(reader, model_spec(reader.config, reader), parallel_config, dtype=torch.bfloat16, device="cuda:0")
    hidden_states = stack(hidden_states)        # [T, K] -> [T, K], a collective step of all EP ranks

Layer l computes x <- x + moe(rmsnorm(x)), with the checkpoint's norm, router, experts and shared experts. If the
checkpoint also has a norm after the experts, or a residual multiplier, they are applied to the summand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import layer_norm, linear, pad, rms_norm

from moe_ep.activation import MoEActivation, apply_activation, gate_limit
from moe_ep.arguments import check_same_device, check_tensors, usable_device
from moe_ep.checkpoint import (
    CheckpointReader,
    LatentWeights,
    MoEModelSpec,
    RouterWeights,
    SharedExpertsWeights,
    check_beside_experts,
    check_experts,
    layer_options,
    layer_quantization,
    load_latent,
    load_moe_layer,
    load_norm,
    load_norm_bias,
    load_output_norm,
    load_router,
    load_shared_experts,
)
from moe_ep.checkpoint.formats import quantization_config
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.distributed.passes import one_pass
from moe_ep.errors import ConfigError, check_functions, one_of
from moe_ep.fixed_tensors import FixedTensors
from moe_ep.layer import FusedMoE
from moe_ep.layer.elastic import ElasticSlots
from moe_ep.layer.methods.canonical import ONLINE, OnlineConfig
from moe_ep.modular_kernel.invariant_ops import invariant_ops

QUANTIZE = ("none", *ONLINE)

# observer(layer index, MoE input [T, K], its output [T, K])
Observer = Callable[[int, torch.Tensor, torch.Tensor], None]


class SharedExperts(nn.Module):
    """An MLP from `[T, K]` to `[T, K]`, complete on every rank.

    Several shared experts of a checkpoint form one MLP of their total width. With `expert_gate` the output is
    multiplied by the sigmoid of one more projection, as in Qwen2-MoE (its `shared_expert_gate`).

    Parameters: `gate_proj.weight` and `up_proj.weight` `[N, K]`, `down_proj.weight` `[K, N]`, and with the gate
    `expert_gate.weight` `[1, K]`. An ungated activation reads `gate_proj` alone, and there is no `up_proj`.

    Raises:
        ValueError: an unknown activation, or a limit that it cannot have (`moe_ep.activation.gate_limit`).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: MoEActivation | str = "silu",
        *,
        clamp_limit: float | None = None,
        expert_gate: bool = False,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation, self._limit = MoEActivation.parse(activation), gate_limit(activation, clamp_limit)

        def projection(num_in: int, num_out: int) -> nn.Linear:
            return nn.Linear(num_in, num_out, bias=False, dtype=params_dtype).requires_grad_(False)

        self.gate_proj = projection(hidden_size, intermediate_size)
        self.up_proj = projection(hidden_size, intermediate_size) if self.activation.is_gated else None
        self.down_proj = projection(intermediate_size, hidden_size)
        self.expert_gate = projection(hidden_size, 1) if expert_gate else None

    def load(self, weights: SharedExpertsWeights) -> None:
        """Writes a checkpoint's weights in place of those in use."""
        pairs = (
            (self.gate_proj, weights.gate),
            (self.up_proj, weights.up),
            (self.down_proj, weights.down),
            (self.expert_gate, weights.expert_gate),
        )
        _copy_all((None if module is None else module.weight, value) for module, value in pairs)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_proj(hidden_states)
        if self.up_proj is not None:
            gate_up = torch.cat([gate_up, self.up_proj(hidden_states)], dim=-1)
        output = self.down_proj(apply_activation(self.activation, gate_up, clamp_limit=self._limit))
        if self.expert_gate is not None:
            output = output * torch.sigmoid(self.expert_gate(hidden_states))
        return output


class LatentProjections(nn.Module):
    """The projections around experts whose width differs from the model's; complete on every rank.

    Nemotron 3 Super and Kimi-K3 have such experts: they read and write `[T, L]` in a model of `[T, K]`, so that
    narrower rows are dispatched.

    Args:
        weights: down `[L, K]`, up `[K, L]`, and the weight `[L]` of an RMS norm on the experts' sum, or None.
    """

    def __init__(self, weights: LatentWeights, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        (L, K), self._eps = weights.down.shape, eps
        self.down = nn.Linear(K, L, bias=False, dtype=dtype).requires_grad_(False)
        self.up = nn.Linear(L, K, bias=False, dtype=dtype).requires_grad_(False)
        has_norm = weights.norm is not None
        self.norm_weight = nn.Parameter(torch.empty(L, dtype=dtype), requires_grad=False) if has_norm else None
        self.load(weights)

    def load(self, weights: LatentWeights) -> None:
        """Writes a checkpoint's weights in place of those in use."""
        own = (self.down.weight, self.up.weight, self.norm_weight)
        _copy_all(zip(own, (weights.down, weights.up, weights.norm), strict=True))

    def enter(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps `[T, K]` to the experts' `[T, L]`."""
        return self.down(hidden_states)

    def leave(self, output: torch.Tensor) -> torch.Tensor:
        """Maps the experts' sum `[T, L]` to `[T, K]`."""
        if self.norm_weight is not None:
            output = rms_norm(output.float(), output.shape[-1:], self.norm_weight.float(), self._eps).to(output.dtype)
        return self.up(output)


class MoEBlock(FixedTensors):
    """One layer: norm, router and experts. The router computes in f32, whatever the dtype of the activations.

    Args:
        quant_config: the model's, from `expert_quantization`.
        layer: further arguments of `FusedMoE`.
    """

    norm_weight: torch.Tensor
    norm_bias: torch.Tensor | None
    output_norm_weight: torch.Tensor | None
    router_weight: torch.Tensor
    router_bias: torch.Tensor | None

    def __init__(
        self,
        reader: CheckpointReader,
        spec: MoEModelSpec,
        layer_index: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        quant_config: Any,
        num_redundant_experts: int | None,
        slots: ElasticSlots | None,
        **layer: Any,
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.rms_norm_eps = spec.rms_norm_eps
        self._has_layer_norm = spec.has_layer_norm
        self._residual_multiplier = spec.residual_multiplier
        router = load_router(reader, spec, layer_index)
        for name, tensor in _norms_and_router(reader, spec, layer_index, router).items():
            self.register_buffer(name, None if tensor is None else tensor.float().to(device), persistent=False)
        self._num_identities = spec.routing.zero_expert_num
        if slots is not None:
            num_redundant_experts = slots.num_redundant_experts(spec.num_experts)
            layer["batch_balance"] = "off"
        # Parameters are created on their final device: a shard may not fit into host memory twice.
        with torch.device(device):
            shared_experts = _shared_experts(reader, spec, layer_index, dtype)
            latent = load_latent(reader, spec, layer_index)
            self.latent = None if latent is None else LatentProjections(latent, spec.rms_norm_eps, dtype)
            # Experts of another width read latent rows, and the shared experts the block's input.
            self.shared_experts = None if latent is None else shared_experts
            options = layer_options(reader, spec, layer_index, dtype)
            self.moe = FusedMoE(
                **options | {"quant_config": layer_quant_config(quant_config, spec, layer_index, reader)} | layer,
                shared_experts=shared_experts if latent is None else None,
                enable_eplb=num_redundant_experts is not None,
                num_redundant_experts=num_redundant_experts or 0,
            )
        if slots is not None:
            slots.place(self.moe)
        load_moe_layer(reader, spec, layer_index, self.moe)

    def update_beside_experts(self, reader: CheckpointReader, spec: MoEModelSpec) -> None:
        """Writes norms, router, shared experts and latent projections of a checkpoint in place of those in use."""
        router = load_router(reader, spec, self.layer_index)
        beside = _norms_and_router(reader, spec, self.layer_index, router)
        latent = load_latent(reader, spec, self.layer_index)
        shared = self.shared_experts or self.moe.shared_experts
        weights = load_shared_experts(reader, spec, self.layer_index) if isinstance(shared, SharedExperts) else None
        _copy_all((getattr(self, name), value) for name, value in beside.items())
        _copy_all([(self.moe.e_score_correction_bias, router.correction_bias)])
        if self.latent is not None and latent is not None:
            self.latent.load(latent)
        if isinstance(shared, SharedExperts) and weights is not None:
            shared.load(weights)

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the block's norm to `[T, K]` in f32: an RMS norm, or a layer norm if the family uses one."""
        if self._has_layer_norm:
            normalized = layer_norm(x.float(), x.shape[-1:], self.norm_weight, self.norm_bias, self.rms_norm_eps)
            return normalized.to(x.dtype)
        return self.rms_norm(x, self.norm_weight)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Applies an RMS norm with weights `[K]` to `[T, K]` in f32."""
        values = x.float()
        values = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + self.rms_norm_eps)
        return (values * weight).to(x.dtype)

    def router_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the router's logits, f32 `[T, E]`, identity experts included."""
        return linear(hidden_states.float(), self.router_weight, self.router_bias)

    def _logits(self, hidden_states: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        if given is None:
            return self.router_logits(hidden_states)
        # Given logits do not cover identity experts: no token goes to them.
        return pad(given, (0, self._num_identities), value=float("-inf"))

    def choices(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the router's (weights, logical ids) `[T, top_k]` for MoE inputs `[T, K]` or for the given logits;
        identity experts have ids from E on."""
        with invariant_ops(self.moe.batch_invariant):
            return self.moe.router.choose(hidden_states, self._logits(hidden_states, router_logits))

    def _experts(self, hidden_states: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Maps `[T, K]` to `[T, K]` through routed and shared experts."""
        if self.latent is None:
            return self.moe(hidden_states, logits)
        output = self.latent.leave(self.moe(self.latent.enter(hidden_states), logits))
        return output if self.shared_experts is None else output + self.shared_experts(hidden_states)

    def forward(
        self, x: torch.Tensor, observer: Observer | None = None, router_logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Maps `[T, K]` to `[T, K]`. All EP ranks must call it; T may differ between them and be 0.

        Args:
            router_logits: f32 `[T, E]`, used instead of the router's.
        """
        with invariant_ops(self.moe.batch_invariant):
            hidden_states = self.normalize(x)
            logits = self._logits(hidden_states, router_logits)
            output = self._experts(hidden_states, logits)
        if observer is not None:
            observer(self.layer_index, hidden_states, output)
        if self.output_norm_weight is not None:
            with invariant_ops(self.moe.batch_invariant):
                output = self.rms_norm(output, self.output_norm_weight)
        return torch.add(x, output, alpha=self._residual_multiplier)


class MoEStack(nn.Module):
    """Every MoE layer of a checkpoint that has a router, with this rank's experts.

    Args:
        dtype: dtype of the activations and of weights that are not quantized.
        quantize: "int4", "int8" or "fp8" quantizes plain experts while they are loaded; "none" keeps them as they are.
        num_redundant_experts: if given, even as 0, enables EPLB with that many physical experts beyond E.
        slots: the slots of a gang whose ranks join and leave (docs/elastic.md). Pass its `parallel_config` too; batches
            are not balanced.
        on_layer: called with (layers loaded, all layers) while loading progresses.
        layer: further arguments of `FusedMoE`, such as max_num_tokens, process_group, input_dtype and batch_balance.

    Attributes:
        spec, config: what the checkpoint says of the model.

    Raises:
        CheckpointError: tensors missing or not as the config says.
        ConfigError: quantization on load is asked for and the checkpoint is quantized already; a device that this
            machine does not have.
        ValueError: settings that do not fit together.
        TypeError: a reader, spec or on_layer of another kind.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        spec: MoEModelSpec,
        parallel_config: FusedMoEParallelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        quantize: str = "none",
        num_redundant_experts: int | None = None,
        slots: ElasticSlots | None = None,
        on_layer: Callable[[int, int], None] | None = None,
        **layer: Any,
    ) -> None:
        super().__init__()
        if not isinstance(reader, CheckpointReader):
            raise TypeError(f"reader is a {type(reader).__name__}; it must be a CheckpointReader(folder)")
        if not isinstance(spec, MoEModelSpec):
            raise TypeError(
                f"spec is a {type(spec).__name__}; it must be what model_spec(reader.config, reader) returns"
            )
        device = usable_device(device)
        check_functions(on_layer=on_layer)
        self.spec, self.config = spec, reader.config
        quant_config = expert_quantization(reader.config, quantize)
        check_experts(reader, spec)
        check_beside_experts(reader, spec)
        self.blocks = nn.ModuleList()
        for count, layer_index in enumerate(spec.router_layers):
            if on_layer is not None:
                on_layer(count, len(spec.router_layers))
            self.blocks.append(
                MoEBlock(
                    reader,
                    spec,
                    layer_index,
                    dtype=dtype,
                    device=device,
                    quant_config=quant_config,
                    num_redundant_experts=num_redundant_experts,
                    slots=slots,
                    parallel_config=parallel_config,
                    **layer,
                )
            )
        if on_layer is not None:
            on_layer(len(self.blocks), len(self.blocks))

    def layers(self) -> list[MoEBlock]:
        """The layers, first to last."""
        return [cast(MoEBlock, block) for block in self.blocks]

    def forward(
        self,
        x: torch.Tensor,
        observer: Observer | None = None,
        router_logits: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Maps `[T, K]` to `[T, K]`; calls `observer` with every layer's MoE input and output.

        Args:
            router_logits: f32 `[T, E]` for each layer, used instead of its router's.

        Raises:
            ValueError: another shape, dtype or device, or router logits that are not tensors or whose number differs
                from the number of layers.
            TypeError: an observer that is not callable.
        """
        layers = self.layers()
        check_tensors(x=x)
        if layers:
            layers[0].moe.check_rows("x", x, layers[0].norm_weight.numel())
            check_same_device("the stack", layers[0].norm_weight.device, x=x)
        check_functions(observer=observer)
        if router_logits is not None:
            _check_logits(router_logits, len(layers))
        with one_pass((block.moe for block in layers), x.size(0)):
            for position, block in enumerate(layers):
                x = block(x, observer, None if router_logits is None else router_logits[position])
        return x


def _check_logits(router_logits: Sequence[torch.Tensor | None], num_layers: int) -> None:
    """Raises ValueError unless there is one entry per layer: a tensor `[T, E]`, or None for the router's logits."""
    is_whole = isinstance(router_logits, torch.Tensor) and router_logits.dim() > 0
    if not is_whole and not isinstance(router_logits, Sequence):
        kind = type(router_logits).__name__
        raise ValueError(f"router_logits is a {kind}; it must be a list of tensors [T, E], one for each layer")
    if len(router_logits) != num_layers:
        raise ValueError(
            f"router_logits has those of {len(router_logits)} layers; it must have those of each of the {num_layers}"
        )
    for position, logits in enumerate(router_logits):
        if logits is None:
            continue
        check_tensors(**{f"router_logits[{position}]": logits})
        if logits.dim() != 2:
            raise ValueError(f"router_logits[{position}] is {tuple(logits.shape)}; it must be [T, E]")


def expert_quantization(config: dict[str, Any], quantize: str = "none") -> Any:
    """Returns how the experts of a checkpoint are quantized, in the checkpoint or on load; see `layer_quant_config`.

    Raises:
        ValueError: `quantize` is not one of `QUANTIZE`.
        ConfigError: quantization on load is asked for and the checkpoint is quantized already.
        CheckpointError: an unknown quantization.
    """
    if quantize not in QUANTIZE:
        raise ValueError(one_of("quantize", quantize, QUANTIZE))
    found = quantization_config(config)
    if quantize == "none":
        return found
    if found is not None:
        raise ConfigError(
            f"quantize is {quantize!r} and the checkpoint is quantized already ({found.quant_method}); pass quantize "
            f"none to run its experts as they are"
        )
    return ONLINE[quantize]


def layer_quant_config(
    quantization: Any, spec: MoEModelSpec, layer_index: int, reader: CheckpointReader | None = None
) -> Any:
    """Returns the `quant_config` of one layer, given the result of `expert_quantization` for the model.

    Args:
        reader: a reader of the checkpoint; where its tensors contradict the config, the tensors decide.

    Raises:
        CheckpointError: the layer's experts are quantized in different ways that one layer cannot combine.
    """
    if isinstance(quantization, OnlineConfig):
        return quantization
    return layer_quantization(quantization, spec, layer_index, reader)


def _shared_experts(
    reader: CheckpointReader, spec: MoEModelSpec, layer_index: int, dtype: torch.dtype
) -> SharedExperts | None:
    weights = load_shared_experts(reader, spec, layer_index)
    gate = spec.shared_gate(layer_index)
    if weights is None or spec.shared_experts is None or gate is None:
        return None
    shared = SharedExperts(
        spec.hidden_size,
        spec.shared_experts.intermediate_size,
        gate.activation,
        clamp_limit=gate.swiglu_limit,
        expert_gate=weights.expert_gate is not None,
        params_dtype=dtype,
    )
    shared.load(weights)
    return shared


def _norms_and_router(
    reader: CheckpointReader, spec: MoEModelSpec, layer_index: int, router: RouterWeights
) -> dict[str, torch.Tensor | None]:
    """Returns a block's norm and router tensors by the names of its buffers."""
    return {
        "norm_weight": load_norm(reader, spec, layer_index),
        "norm_bias": load_norm_bias(reader, spec, layer_index),
        "output_norm_weight": load_output_norm(reader, spec, layer_index),
        "router_weight": router.weight,
        "router_bias": router.bias,
    }


def _copy_all(pairs: Iterable[tuple[torch.Tensor | None, torch.Tensor | None]]) -> None:
    """Copies the second tensor of each pair into the first, in place, unless one is None."""
    for held, value in pairs:
        if held is not None and value is not None:
            held.data.copy_(value)

"""The layers that a benchmark runs: enough copies to exceed the L2 cache, and other inputs in every call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from moe_ep.activation import apply_activation
from moe_ep.bench.geometries import Geometry, WeightFormat
from moe_ep.bench.workload import Routing, draw_logits
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.manager import EPLBManager
from moe_ep.expert_map import expert_owner_table
from moe_ep.layer import FusedMoE
from moe_ep.layer.interface import MoELayer
from moe_ep.layer.methods.base import relative_error, w13_rows
from moe_ep.layer.methods.canonical import CanonicalFusedMoEMethod
from moe_ep.modular_kernel.choice import ExpertsNames
from moe_ep.quantization.canonical_weights import CanonicalWeights, dequantize
from moe_ep.routing import select_experts

# Experts have made-up weights, each a function of its number alone, so that any rank can make any of them to check.


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Quantized weights in this format, drawn with this seed where they will stay.

    Attributes:
        packed: the processed weights by the logical experts of the slots: layers made with the same object share them,
            so that another backend or capacity costs no drawing and packing.
    """

    quant_method: ClassVar[str] = "synthetic"

    weights: WeightFormat
    device: torch.device
    seed: int = 0
    packed: dict[tuple[int, ...], _Packed] = field(default_factory=dict, compare=False)


class _Packed(NamedTuple):
    types: dict[str, tuple[int, int]]
    device: torch.device | None
    experts_names: ExpertsNames | None
    buffers: dict[str, torch.Tensor]


class SyntheticFusedMoEMethod(CanonicalFusedMoEMethod):
    """Nothing is loaded: codes and scales are drawn when the layer is first used; biases are 0."""

    quant_config: SyntheticConfig

    def create_weights(
        self,
        layer: MoELayer,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        self.add_biases(layer, num_experts, w13_rows(self.moe_config), hidden_size, params_dtype)

    def process_weights_after_loading(self, layer: MoELayer) -> None:
        key = tuple(local_logical_experts(layer))
        packed = self.quant_config.packed
        if key not in packed:
            super().process_weights_after_loading(layer)
            buffers = {name: data for name, data in layer.named_buffers(recurse=False) if "_processed_" in name}
            packed[key] = _Packed(self._types, self._packed_on, self._experts_names, buffers)
            return
        self._types, self._packed_on, self._experts_names, buffers = packed[key]
        for name, data in buffers.items():
            layer.register_buffer(name, data)

    def unpack(self, layer: MoELayer, gemm: str) -> CanonicalWeights:
        experts = local_logical_experts(layer)
        made = draw_expert(experts[0], gemm, self.quant_config, self.moe_config)
        codes = made.codes.new_empty(len(experts), *made.codes.shape)
        scales = made.scales.new_empty(len(experts), *made.scales.shape)
        for slot, expert in enumerate(experts):
            made = draw_expert(expert, gemm, self.quant_config, self.moe_config)
            codes[slot], scales[slot] = made.codes, made.scales
        return made._replace(codes=codes, scales=scales)


def local_logical_experts(layer: MoELayer) -> list[int]:
    """The logical expert of each of this rank's routed slots, at the start."""
    by_slot = {
        slot: physical % layer.num_experts
        for physical in range(layer.slots.num_physical_experts)
        for slot in layer.slots.of_id(physical)
    }
    return [by_slot[slot] for slot in range(layer.slots.num_local_routed)]


def draw_expert(expert: int, gemm: str, config: SyntheticConfig, moe_config: FusedMoEConfig) -> CanonicalWeights:
    """The "w13" or "w2" of a logical expert, `[out, in]`; outputs of the layer have a scale near that of its inputs."""
    K, N = moe_config.hidden_dim, moe_config.intermediate_size_per_partition
    rows, columns = (w13_rows(moe_config), K) if gemm == "w13" else (K, N)
    seed = (config.seed * 1_000_003 + expert) * 2 + (gemm == "w2")
    generator = torch.Generator(config.device).manual_seed(seed)
    kind, group_size = config.weights, config.weights.group_size
    codes = torch.randint(
        0, 1 << kind.bits, (rows, columns), dtype=torch.uint8, device=config.device, generator=generator
    )
    groups, deviation = (rows, columns // group_size), (1 << kind.bits) / 12**0.5
    if kind.quant_type == "float8_e4m3fn":
        codes &= 0xBF  # magnitudes below 2, and no NaN
        deviation = 0.6
    if kind.scale_bits == 8:
        # e8m0: powers of two; e2m1 numbers have a deviation near 3.
        exponent = 127 - round(columns**0.5 * 3).bit_length()
        scales = torch.full(groups, exponent, dtype=torch.uint8, device=config.device)
    else:
        spread = torch.rand(groups, device=config.device, generator=generator) + 0.5
        scales = (spread / (deviation * columns**0.5)).to(moe_config.in_dtype)
    if kind.quant_type_id is None:
        raise ValueError("weights are plain; a synthetic layer needs a quant_type")
    return CanonicalWeights(codes, scales, kind.quant_type_id, group_size)


def reference_output(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    config: SyntheticConfig,
    moe_config: FusedMoEConfig,
) -> torch.Tensor:
    """The reference output of such a layer, f32 `[T, K]`, from dequantized weights one expert at a time."""
    total = torch.zeros(hidden_states.shape, device=hidden_states.device)
    for expert in topk_ids.unique().tolist():
        if expert < 0:
            continue
        token, slot = torch.nonzero(topk_ids == expert, as_tuple=True)
        gate_up = F.linear(hidden_states[token].float(), dequantize(draw_expert(expert, "w13", config, moe_config)))
        hidden = apply_activation(moe_config.activation, gate_up, clamp_limit=moe_config.swiglu_limit)
        output = F.linear(hidden, dequantize(draw_expert(expert, "w2", config, moe_config)))
        total.index_add_(0, token, output * topk_weights[token, slot, None])
    return total


# Weights of all copies together exceed the L2 cache of any GPU there is.
_COLD_BYTES = 150e6
_MAX_COPIES = 8
_NEVER = 1 << 30


class Batch(NamedTuple):
    """One call's input on this rank: hidden_states `[T, K]`, router_logits f32 `[T, E]`, and the ids they choose."""

    hidden_states: torch.Tensor
    router_logits: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def make_weights(geometry: Geometry, ep_size: int, device: torch.device, seed: int) -> list[SyntheticConfig]:
    """One object for each copy of a layer that a rank needs, so that its weights do not stay in the L2 cache."""
    local_bytes = geometry.bytes_per_expert * geometry.num_experts / ep_size
    copies = min(_MAX_COPIES, math.ceil(_COLD_BYTES / local_bytes)) if device.type == "cuda" else 1
    return [SyntheticConfig(weights=geometry.weights, device=device, seed=seed) for _ in range(copies)]


class BenchLayers:
    """Copies of one MoE layer on this rank, called in turn.

    Args:
        group: the EP ranks; None where there is one.
        capacity: max_num_tokens of the layers.
        eplb: with one redundant slot a rank, and experts placed by `balance`, which moves them: take weights that no
            other layers share.
        weights: of each copy; they keep what was packed from one set of layers to the next.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        ep_size: int = 1,
        ep_rank: int = 0,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        weights: Sequence[SyntheticConfig],
        dispatch_dtype: torch.dtype | None = None,
        eplb: bool = False,
        input_dtype: torch.dtype | str | None = None,
        batch_balance: str = "auto",
    ) -> None:
        self.geometry, self.ep_size, self.ep_rank, self.device, self.dtype = geometry, ep_size, ep_rank, device, dtype
        self.weights, self.eplb = weights[0], eplb
        routing = geometry.routing
        bias = torch.zeros(geometry.num_experts, device=device) if routing.has_correction_bias else None
        self.routing_args: dict[str, Any] = {
            "top_k": geometry.top_k,
            "e_score_correction_bias": bias,
            **routing.select_experts_options(),
            "zero_expert_num": 0,  # identity experts compute nothing
            "zero_expert_type": None,
        }
        redundant = ep_size + -geometry.num_experts % ep_size if eplb else 0
        with torch.device(device):
            self.layers = [
                FusedMoE(
                    num_experts=geometry.num_experts,
                    hidden_size=geometry.hidden_size,
                    intermediate_size=geometry.intermediate_size,
                    params_dtype=dtype,
                    quant_config=copy,
                    activation=geometry.activation,
                    has_bias=geometry.has_bias,
                    swiglu_limit=geometry.swiglu_limit,
                    parallel_config=FusedMoEParallelConfig.make(
                        ep_size=ep_size, rank=ep_rank, world_size=ep_size, all2all_backend=backend
                    ),
                    process_group=group,
                    max_num_tokens=capacity,
                    dispatch_dtype=dispatch_dtype,
                    input_dtype=input_dtype,
                    batch_balance=batch_balance,
                    enable_eplb=eplb,
                    num_redundant_experts=redundant,
                    **self.routing_args,
                )
                for copy in weights
            ]
        self.owners = expert_owner_table(ep_size, geometry.num_experts + redundant)

    def balance(self, batches: list[Batch]) -> None:
        """Records the load of these batches, plans, and moves the experts of every copy; a collective step."""
        config = EplbConfig(window_size=len(batches), first_plan=_NEVER, asynchronous=False, rebalance_below=1.0)
        manager = EPLBManager(self.layers, config)
        for batch in batches:
            for index in range(len(self.layers)):
                self.call(index, batch)
            manager.step()
        manager.plan_now()
        manager.close()

    def batches(
        self, routing: Routing, num_tokens: int, count: int, seed: int, popularity_seed: int | None = None
    ) -> list[Batch]:
        """Inputs of `count` calls, other ones for every rank and call."""
        popularity_seed = seed if popularity_seed is None else popularity_seed
        made = []
        for call in range(count):
            number = (seed * 1_000_003 + call) * self.ep_size + self.ep_rank
            geometry = self.geometry
            logits = draw_logits(
                routing, num_tokens, geometry.num_experts, geometry.top_k, seed=number,
                popularity_seed=popularity_seed, device=self.device,
            )  # fmt: skip
            generator = torch.Generator(self.device).manual_seed(number)
            rows = torch.randn(num_tokens, geometry.hidden_size, device=self.device, generator=generator)
            rows = rows.to(self.dtype)
            weights, ids, _ = select_experts(rows, logits, **self.routing_args)
            made.append(Batch(rows, logits, weights, ids))
        return made

    def call(self, index: int, batch: Batch) -> torch.Tensor:
        """The output `[T, K]` of one of the copies."""
        return self.layers[index % len(self.layers)](batch.hidden_states, batch.router_logits)

    def error(self, batch: Batch, num_rows: int = 2) -> float:
        """mean |difference| / mean |reference| of the first rows of one call, from dequantized weights; collective."""
        output = self.call(0, batch)[:num_rows]
        rows = slice(num_rows)
        expected = reference_output(
            batch.hidden_states[rows], batch.topk_weights[rows], batch.topk_ids[rows], self.weights,
            self.layers[0].moe_config,
        )  # fmt: skip
        return relative_error(output, expected)

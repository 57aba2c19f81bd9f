"""The layers that a benchmark runs: enough copies to exceed the L2 cache, and other inputs in every call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe_ep.bench.geometries import Geometry
from moe_ep.bench.synthetic import SyntheticConfig, reference_output
from moe_ep.bench.workload import Routing, draw_logits
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.manager import EPLBManager
from moe_ep.expert_map import expert_owner_table
from moe_ep.layer import FusedMoE
from moe_ep.layer.methods.base import relative_error
from moe_ep.routing import select_experts

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
        ep_size: int,
        ep_rank: int,
        group: dist.ProcessGroup | None,
        backend: str,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        dispatch_dtype: torch.dtype | None,
        eplb: bool,
        weights: Sequence[SyntheticConfig],
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

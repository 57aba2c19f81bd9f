"""Compiles the kernels of layers before they run, by all ranks of a host together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from moe_ep.bench.geometries import Geometry
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.modular_kernel.contracts import Compilation
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS


def compile_kernels(
    geometries: Sequence[Geometry],
    ep_sizes: Iterable[int],
    dtype: torch.dtype,
    wires: Sequence[torch.dtype | None],
    device: torch.device,
    share: tuple[int, int],
) -> None:
    """Compiles what experts and backends of one host's ranks need into the cache on disk; nothing on a CPU.

    Args:
        wires: dtypes of rows on the wire, None for the activations' own.
        share: (which of, how many) ranks of this host, which have the cache in common; each does its part.
    """
    if device.type == "cuda":
        first, step = share
        for kernel in compilations(geometries, ep_sizes, dtype, wires, device)[first::step]:
            kernel.compile_ahead(device)


def compilations(
    geometries: Sequence[Geometry],
    ep_sizes: Iterable[int],
    dtype: torch.dtype,
    wires: Sequence[torch.dtype | None],
    device: torch.device,
) -> list[Compilation]:
    """The kernels of all experts and backends of these layers, each once, the slowest of each layer first."""
    named: list[Sequence[Compilation]] = []
    for geometry, ep_size in itertools.product(geometries, ep_sizes):
        config, weights = _config_of(geometry, ep_size, dtype), geometry.weights
        scale_dtype = torch.float8_e8m0fnu if weights.scale_bits == 8 else dtype
        of_weights = FusedMoEQuantConfig(
            quant_type_id=weights.quant_type_id,
            group_size=weights.group_size,
            w1_scale=torch.empty(0, dtype=scale_dtype, device="cpu"),
        )
        named += [EXPERTS.load(name).compilations(config, of_weights, device) for name in EXPERTS]
        for name, wire in itertools.product(ALL2ALL_BACKENDS if ep_size > 1 else (), wires):
            backend = ALL2ALL_BACKENDS.load(name)
            named.append(backend.compilations(config, FusedMoEQuantConfig(dispatch_dtype=wire), device))
    by_cost = itertools.chain.from_iterable(itertools.zip_longest(*named))
    return list(dict.fromkeys(kernel for kernel in by_cost if kernel is not None))


def _config_of(geometry: Geometry, ep_size: int, dtype: torch.dtype) -> FusedMoEConfig:
    return FusedMoEConfig(
        num_experts=geometry.num_experts,
        experts_per_token=geometry.top_k,
        hidden_dim=geometry.hidden_size,
        intermediate_size_per_partition=geometry.intermediate_size,
        num_local_experts=geometry.num_experts // ep_size,
        moe_parallel_config=FusedMoEParallelConfig.make(ep_size=ep_size, rank=0, world_size=ep_size),
        in_dtype=dtype,
        max_num_tokens=1,
        activation=geometry.activation,
        swiglu_limit=geometry.swiglu_limit,
    )

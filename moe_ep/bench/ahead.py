"""Kernels that layers of known shapes will ask for, compiled before they do, by all ranks of a host together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from moe_ep.bench.geometries import Geometry
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig

if TYPE_CHECKING:
    from moe_ep.kernels.jit import KernelSource


# Of the backends whose kernels these are.
_MAX_RANKS = 8
_HOPPER = (9, 0)


def compile_kernels(
    geometries: Sequence[Geometry],
    ep_sizes: Iterable[int],
    dtype: torch.dtype,
    wires: Sequence[torch.dtype | None],
    device: torch.device,
    share: tuple[int, int],
) -> None:
    """Compiles into the cache on disk what `kernel_sources` names, on a Hopper GPU; elsewhere does nothing.

    Args:
        share: (which of, how many) ranks of this host, which have the cache in common; each does its part.
    """
    from moe_ep.kernels import jit

    if device.type == "cuda" and torch.cuda.get_device_capability(device) == _HOPPER and not jit.unusable_reason():
        first, step = share
        for source in kernel_sources(geometries, ep_sizes, dtype, wires)[first::step]:
            jit.compile_ahead(source, device)


def kernel_sources(
    geometries: Sequence[Geometry], ep_sizes: Iterable[int], dtype: torch.dtype, wires: Sequence[torch.dtype | None]
) -> list[KernelSource]:
    """What Hopper's experts and the NVSHMEM backends compile for ranks of one host, those that take longest first.

    Args:
        wires: dtypes of rows on the wire, None for the activations' own.
    """
    ep_sizes = list(ep_sizes)
    found = [
        source
        for geometry, ep_size in itertools.product(geometries, ep_sizes)
        for source in _of_experts(geometry, geometry.num_experts // ep_size, dtype)
    ]
    for ep_size in ep_sizes:
        for geometry, wire in itertools.product(geometries if 1 < ep_size <= _MAX_RANKS else (), wires):
            found += _of_dispatch(geometry, ep_size, dtype, wire)
    return sorted(dict.fromkeys(found), key=lambda source: _ORDER.index(source.entry))


# By the time that NVRTC needs.
_ORDER = (
    "prefill", "decode", "low_latency_dispatch", "low_latency_combine", "high_throughput_plan",
    "high_throughput_combine", "high_throughput_dispatch",
)  # fmt: skip


def _of_experts(geometry: Geometry, num_experts: int, dtype: torch.dtype) -> list[KernelSource]:
    from moe_ep.kernels.marlin import hopper
    from moe_ep.kernels.marlin.types import weight_type

    weights = geometry.weights
    if weights.quant_type_id is None:
        return []
    scale_dtype = torch.float8_e8m0fnu if weights.scale_bits == 8 else dtype
    per_step = hopper.groups_per_step(geometry.hidden_size, geometry.hidden_size // weights.group_size)
    kind = weight_type(weights.quant_type_id)
    tall = hopper.may_be_tall(
        num_experts, ((1 + geometry.activation.is_gated) * geometry.intermediate_size, geometry.hidden_size)
    )
    activation, limit = geometry.activation, geometry.swiglu_limit
    return [
        hopper.kernel_source(kind, dtype, scale_dtype, per_step, activation, few_rows, tall, limit)
        for few_rows in (False, True)
    ]


def _of_dispatch(geometry: Geometry, ep_size: int, dtype: torch.dtype, wire: torch.dtype | None) -> list[KernelSource]:
    from moe_ep.dispatch.nvshmem import high_throughput_block as prefill
    from moe_ep.dispatch.nvshmem import kernels as decode
    from moe_ep.dispatch.nvshmem.low_latency_setup import layout_of

    config = FusedMoEConfig(
        num_experts=geometry.num_experts,
        experts_per_token=geometry.top_k,
        hidden_dim=geometry.hidden_size,
        intermediate_size_per_partition=geometry.intermediate_size,
        num_local_experts=geometry.num_experts // ep_size,
        moe_parallel_config=FusedMoEParallelConfig.make(ep_size=ep_size, rank=0, world_size=ep_size),
        in_dtype=dtype,
        max_num_tokens=1,
    )
    small = layout_of(config, FusedMoEQuantConfig(dispatch_dtype=wire))
    large = prefill.Layout(
        num_ranks=ep_size, capacity=1, hidden_size=geometry.hidden_size, topk=geometry.top_k, fp8=wire is not None
    )
    return [
        *(decode.kernel_source(name, small, dtype) for name in decode.KERNELS),
        *(prefill.kernel_source(name, large, dtype) for name in prefill.KERNELS),
    ]

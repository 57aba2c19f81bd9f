"""Resolves "auto" for all2all_backend and for experts to registry names, and checks names that were given."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, check_keeps_batch_invariant
from moe_ep.distributed.exchange import answers_of_ranks, num_hosts
from moe_ep.errors import BackendUnavailableError, ConfigError
from moe_ep.modular_kernel.contracts import FusedMoEActivationFormat
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS

logger = logging.getLogger(__name__)

# Up to this capacity "auto" chooses a backend of the batched format, which was faster on 4 H200 up to 256 tokens per
# rank, and up to 1024 if its experts take rows by reference (docs/benchmarks/dispatch.md). But each expert's results
# need room for all tokens of all ranks, gigabytes from 512 on, so larger capacities get a backend without such gaps.
DECODE_MAX_NUM_TOKENS = 256
# The largest part of a GPU's memory that "auto" gives to a backend's symmetric buffers.
_SYMMETRIC_SHARE = 1 / 8


def choose_backend(backend: str, moe_config: FusedMoEConfig, process_group: dist.ProcessGroup | None = None) -> str:
    """Returns the registry name to use, and logs why.

    Args:
        backend: a registry name, or "auto", which takes MOE_EP_ALL2ALL_BACKEND if it is set.

    Raises:
        ValueError: an unknown name; the known ones are listed.
        ConfigError: no_ep for ranks that hold different tokens, which would not reach the experts of other ranks; a
            backend that cannot keep batch_invariant.
        BackendUnavailableError: the named backend cannot run on this machine.
    """
    ALL2ALL_BACKENDS.check(backend, also=("auto",))
    if backend == "auto":
        backend = env.ALL2ALL_BACKEND.get()
    if backend != "auto":
        name, reason = backend, "it was asked for"
    else:
        name, reason = _best(moe_config, process_group)
    if moe_config.batch_invariant:
        check_keeps_batch_invariant(name)
    if name == "no_ep" and moe_config.moe_parallel_config.use_all2all:
        raise ConfigError(
            f"all2all_backend is 'no_ep', which moves nothing, and ep_size is {moe_config.ep_size}, each rank with "
            f"tokens of its own; choose one that moves them: "
            f"{', '.join(other for other in ALL2ALL_BACKENDS if other != name)}"
        )
    unusable = ALL2ALL_BACKENDS.load(name).unusable_reason()
    if unusable is not None:
        raise BackendUnavailableError(f"all2all_backend {name!r} cannot run here: {unusable}")
    logger.info("all2all backend %s: %s", name, reason)
    return name


def _best(moe_config: FusedMoEConfig, process_group: dist.ProcessGroup | None) -> tuple[str, str]:
    if moe_config.ep_size == 1:
        return "no_ep", "one rank holds every expert"
    if not (torch.cuda.is_available() and dist.is_initialized() and "nccl" in dist.get_backend_config(process_group)):
        return "all_to_all", "no NCCL between the ranks; exact sizes, a token is sent once to each destination rank"
    capacity, is_small = moe_config.max_num_tokens, moe_config.max_num_tokens <= DECODE_MAX_NUM_TOKENS
    bound = "at most" if is_small else "above"
    size = f"a capacity of {capacity} tokens per rank ({bound} {DECODE_MAX_NUM_TOKENS})"
    name = "nvshmem_low_latency" if is_small else "nvshmem_high_throughput"
    obstacle = _obstacle_of_any(name, moe_config, process_group)
    if obstacle is None:
        return name, f"GPUs of one host that reach each other's memory, and {size}"
    instead = "batched_all_to_all" if is_small else "all_to_all"
    return instead, f"NCCL, and {size}; not {name}: {obstacle}"


def _obstacle_of_any(name: str, moe_config: FusedMoEConfig, process_group: dist.ProcessGroup | None) -> str | None:
    """Why some rank cannot use an NVSHMEM backend; None if all can. All ranks agree on whether it is None."""
    if num_hosts(process_group) > 1:
        return "the ranks are on several hosts"
    if moe_config.batch_invariant and ALL2ALL_BACKENDS.load(name).depends_on_batch() is not None:
        return "it cannot keep batch_invariant"
    mine = _nvshmem_obstacle(name, moe_config)
    layer = replace(moe_config, num_local_experts=0, moe_parallel_config=FusedMoEParallelConfig())
    obstacles = answers_of_ranks(("obstacle", name, layer), mine, process_group)
    others = (f"EP rank {rank}: {text}" for rank, text in enumerate(obstacles) if text is not None)
    return mine if mine is not None else next(others, None)


def _nvshmem_obstacle(name: str, moe_config: FusedMoEConfig) -> str | None:
    """Why this rank cannot use an NVSHMEM backend; None if it can."""
    backend = ALL2ALL_BACKENDS.load(name)
    reason = backend.refuses(moe_config) or backend.unusable_reason()
    if reason is not None:
        return reason
    here, visible = torch.cuda.current_device(), torch.cuda.device_count()
    if any(not torch.cuda.can_device_access_peer(here, peer) for peer in range(visible) if peer != here):
        return "not all GPUs of this host reach each other's memory"
    symmetric, there_is = backend.size_hint(moe_config)["symmetric"], torch.cuda.mem_get_info(here)[1]
    if symmetric > _SYMMETRIC_SHARE * there_is:
        return f"its buffers would take {symmetric / 1e9:.1f} of {there_is / 1e9:.1f} GB; lower max_num_tokens for it"
    return None


# ==== Experts ====

ExpertsNames = dict[FusedMoEActivationFormat, str]

# Both implementations of a pair read weights in the same layout.
PACKED: ExpertsNames = {
    FusedMoEActivationFormat.Standard: "marlin",
    FusedMoEActivationFormat.BatchedExperts: "batched_marlin",
}
GROUPED: ExpertsNames = {
    FusedMoEActivationFormat.Standard: "grouped",
    FusedMoEActivationFormat.BatchedExperts: "batched_grouped",
}
# These experts compute every kind of layer on every device.
REFERENCE: ExpertsNames = {
    FusedMoEActivationFormat.Standard: "reference",
    FusedMoEActivationFormat.BatchedExperts: "batched_reference",
}


def choose_experts(
    asked: str, moe_config: FusedMoEConfig, weights: tuple[CanonicalWeights, ...], device: torch.device
) -> ExpertsNames:
    """Returns a registry name for each activation format.

    Logs what "auto" chose and why; the log is a warning if experts on a GPU have to run without GPU kernels.

    Args:
        asked: "auto", or a registry name, which is then used for both formats.
        weights: w13 and w2 in the canonical quantized form; empty if they are plain.

    Raises:
        ValueError: an unknown name; the known ones are listed.
        BackendUnavailableError: the named experts cannot compute such a layer here.
    """
    EXPERTS.check(asked, also=("auto",))
    if asked != "auto":
        refusal = _refusal(asked, moe_config, weights, device)
        if refusal is not None:
            raise BackendUnavailableError(f"experts {asked!r} cannot compute this layer: {refusal}")
        return dict.fromkeys(FusedMoEActivationFormat, asked)
    kind, fast = ("quantized", PACKED) if weights else ("plain", GROUPED)
    name = fast[FusedMoEActivationFormat.Standard]
    refusal = _refusal(name, moe_config, weights, device)
    if refusal is None:
        logger.info("experts %s: the best that computes this layer", name)
        return fast
    if device.type == "cuda" and moe_config.num_local_experts:
        _warn_once(f"{kind} experts run in plain torch on {device}, many times slower than {name}: {refusal}")
    logger.info("experts reference: %s cannot compute this layer: %s", name, refusal)
    return REFERENCE


def _refusal(
    name: str, moe_config: FusedMoEConfig, weights: tuple[CanonicalWeights, ...], device: torch.device
) -> str | None:
    experts = EXPERTS.load(name)
    refusal: str | None = experts.refuses(moe_config, weights, device)
    if refusal is None and moe_config.batch_invariant:
        reason = experts.depends_on_batch(moe_config, device)
        refusal = reason and f"batch_invariant is set and {reason}"
    return refusal


@cache
def _warn_once(message: str) -> None:
    """Logs a message once per process, not for every layer of a model."""
    logger.warning(message)

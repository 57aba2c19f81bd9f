"""The one place that turns all2all_backend="auto" into a name, and checks a name that was given."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.config import FusedMoEConfig
from moe_ep.errors import BackendUnavailableError
from moe_ep.process_groups import num_hosts
from moe_ep.registry import ALL2ALL_BACKENDS

logger = logging.getLogger(__name__)

# Up to this capacity rows are sent at fixed size without asking how many there are; above it the empty part of
# fixed-size messages costs more than the exchange of counts.
DECODE_MAX_NUM_TOKENS = 256
_NVSHMEM_MAX_RANKS = 8


def choose_backend(backend: str, moe_config: FusedMoEConfig, process_group: dist.ProcessGroup | None = None) -> str:
    """The registry name to use; what "auto" chose, and why, is logged.

    Args:
        backend: "auto" (then MOE_EP_ALL2ALL_BACKEND decides where it is set) or a registry name.

    Raises:
        ValueError: an unknown name; the known ones are listed.
        BackendUnavailableError: the named backend cannot run on this machine.
    """
    ALL2ALL_BACKENDS.check(backend, also=("auto",))
    if backend == "auto":
        backend = env.ALL2ALL_BACKEND.get()
        ALL2ALL_BACKENDS.check(backend, also=("auto",))
    if backend != "auto":
        name, reason = backend, "it was asked for"
    else:
        name, reason = _best(moe_config, process_group)
    unusable = ALL2ALL_BACKENDS.load(name).unusable_reason()
    if unusable is not None:
        raise BackendUnavailableError(f"all2all_backend {name!r} cannot run here: {unusable}")
    logger.info("all2all backend %s: %s", name, reason)
    return name


def _best(moe_config: FusedMoEConfig, process_group: dist.ProcessGroup | None) -> tuple[str, str]:
    if moe_config.ep_size == 1:
        return "no_ep", "one rank holds every expert"
    capacity = moe_config.max_num_tokens
    on_cuda = torch.cuda.is_available() and dist.is_initialized() and "nccl" in _backend_names(process_group)
    if not on_cuda or capacity > DECODE_MAX_NUM_TOKENS:
        return "all_to_all", "exact sizes, a token travels once to each destination rank"
    few = f"a capacity of {capacity} tokens per rank (at most {DECODE_MAX_NUM_TOKENS})"
    obstacle = _nvshmem_obstacle("nvshmem_low_latency", moe_config, process_group)
    if obstacle is None:
        return "nvshmem_low_latency", f"GPUs of one host that reach each other's memory, and {few}"
    return "batched_all_to_all", f"NCCL, and {few}; not nvshmem_low_latency: {obstacle}"


def _nvshmem_obstacle(name: str, moe_config: FusedMoEConfig, process_group: dist.ProcessGroup | None) -> str | None:
    """Why an NVSHMEM backend is not for these ranks; None where it is."""
    if moe_config.in_dtype is torch.float32 or moe_config.hidden_dim % 16 or moe_config.ep_size > _NVSHMEM_MAX_RANKS:
        return f"it takes f16 or bf16 rows of a multiple of 16 columns, and at most {_NVSHMEM_MAX_RANKS} ranks"
    unusable = ALL2ALL_BACKENDS.load(name).unusable_reason()
    if unusable is not None:
        return unusable
    if num_hosts(process_group) > 1:
        return "the ranks are on several hosts"
    here, visible = torch.cuda.current_device(), torch.cuda.device_count()
    if any(not torch.cuda.can_device_access_peer(here, peer) for peer in range(visible) if peer != here):
        return "not all GPUs of this host reach each other's memory"
    return None


def _backend_names(process_group: dist.ProcessGroup | None) -> str:
    return dist.get_backend_config(process_group)

"""The one place that turns all2all_backend="auto" into a name, and checks a name that was given."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.config import FusedMoEConfig
from moe_ep.errors import BackendUnavailableError
from moe_ep.registry import ALL2ALL_BACKENDS

logger = logging.getLogger(__name__)

# Up to this capacity rows are sent at fixed size without asking how many there are; above it the empty part of
# fixed-size messages costs more than the exchange of counts.
DECODE_MAX_NUM_TOKENS = 256


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
    on_cuda = torch.cuda.is_available() and dist.is_initialized() and "nccl" in _backend_names(process_group)
    if on_cuda and moe_config.max_num_tokens <= DECODE_MAX_NUM_TOKENS:
        return "batched_all_to_all", (
            f"NCCL, and a capacity of {moe_config.max_num_tokens} tokens per rank (at most {DECODE_MAX_NUM_TOKENS}): "
            f"fixed sizes, no host synchronisation"
        )
    return "all_to_all", "exact sizes, a token travels once to each destination rank"


def _backend_names(process_group: dist.ProcessGroup | None) -> str:
    return dist.get_backend_config(process_group)

"""The only place that turns experts="auto" into names, and checks a name that was given."""

from __future__ import annotations

import logging
from functools import cache

import torch

from moe_ep.config import FusedMoEConfig
from moe_ep.errors import BackendUnavailableError
from moe_ep.modular_kernel.contracts import FusedMoEActivationFormat
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.registry import EXPERTS

logger = logging.getLogger(__name__)

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
# Computes every kind of layer on every device.
REFERENCE: ExpertsNames = {
    FusedMoEActivationFormat.Standard: "reference",
    FusedMoEActivationFormat.BatchedExperts: "batched_reference",
}


def choose_experts(
    asked: str, moe_config: FusedMoEConfig, weights: tuple[CanonicalWeights, ...], device: torch.device
) -> ExpertsNames:
    """Returns a registry name for each activation format.

    Logs what "auto" chose and why, as a warning if experts on a GPU have to run without GPU kernels.

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
    """Logs a message once and not for every layer of a model."""
    logger.warning(message)

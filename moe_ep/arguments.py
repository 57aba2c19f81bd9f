"""Checks of tensors that backends, experts and kernels have in common, made before anything runs."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from moe_ep.errors import ConfigError

INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
# As messages name them: torch has wider unsigned ones, too, of which ids are not made.
INTEGER_NAMES = "uint8, int8, int16, int32 or int64"


def check_tensors(**values: object) -> None:
    """Raises ValueError for a value that is not a tensor."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            kind = "None" if value is None else f"a {type(value).__name__}"
            raise ValueError(f"{name} is {kind}; it must be a tensor")


def check_integers(**tensors: torch.Tensor | None) -> None:
    """Raises ValueError for a tensor that does not hold integers; None is left alone."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in INTEGERS:
            raise ValueError(f"{name} is {tensor.dtype}; it must be {INTEGER_NAMES}")


def as_int32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in int32. `Tensor.to` takes microseconds on the host also where there is nothing to do."""
    return tensor if tensor.dtype is torch.int32 else tensor.to(torch.int32)


def check_id_range(num_experts: int, dtype: torch.dtype) -> None:
    """Raises ValueError where expert ids up to num_experts - 1 are too many for an integer dtype."""
    if num_experts - 1 > torch.iinfo(dtype).max:
        raise ValueError(
            f"{num_experts} experts have ids up to {num_experts - 1}, which {dtype} cannot hold; use torch.int32"
        )


def usable_device(device: object) -> torch.device:
    """The device of this name, on which a model can run.

    Raises:
        ValueError: no device or name of one.
        ConfigError: the meta device, or one that this machine does not have.
    """
    try:
        known = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device is {device!r}; it must be a torch.device or the name of one, as cpu or cuda:0"
        ) from None
    if known.type == "meta":
        raise ConfigError("device is meta, which keeps no values; pass the device that the model is to run on")
    if known.type == "cuda" and (known.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {known} and this machine has {torch.cuda.device_count()} GPUs; pass one of those")
    if known.type not in ("cpu", "cuda"):
        try:
            torch.empty(0, device=known)
        except (AssertionError, ImportError, RuntimeError):
            raise ConfigError(f"device is {known}, which torch cannot use here; pass cpu or a GPU as cuda:0") from None
    return known


def check_same_device(other: str, device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Raises ValueError for a tensor that is not on the device of `other`; None is left alone."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device} and {other} on {device}; move one")


def check_expert_map(expert_map: torch.Tensor) -> None:
    """Raises ValueError unless the map is integer `[global experts]`."""
    check_tensors(expert_map=expert_map)
    if expert_map.dtype not in INTEGERS or expert_map.dim() != 1 or expert_map.numel() == 0:
        raise ValueError(
            f"expert_map is {expert_map.dtype} {tuple(expert_map.shape)}; it must be {INTEGER_NAMES}, one number for "
            f"each global expert"
        )


def check_local_experts(expert_map: torch.Tensor, num_local_experts: int) -> None:
    """Raises ValueError for a map that is none, or one on the host that names more than the local experts."""
    check_expert_map(expert_map)
    if expert_map.device.type == "cpu" and (most := int(expert_map.max())) >= num_local_experts:
        raise ValueError(
            f"expert_map names local expert {most} and w1 has {num_local_experts} experts; pass the map of this rank's "
            f"experts, -1 for those of others"
        )


def check_ids(topk_ids: torch.Tensor, known_ids: int, known_as: str) -> None:
    """Raises ValueError for ids on the host that are neither -1 nor below `known_ids`; no others are looked at."""
    if topk_ids.device.type != "cpu" or not topk_ids.numel():
        return
    least, most = (int(bound) for bound in topk_ids.aminmax())
    if least < -1 or most >= known_ids:
        raise ValueError(
            f"topk_ids goes from {least} to {most}; ids must be at least -1 and below {known_as} ({known_ids})"
        )


def check_no_gradients(experts: str, *inputs: torch.Tensor) -> None:
    """Raises RuntimeError if gradients are enabled and an input of these experts requires one, or has a tangent."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        raise RuntimeError(
            f"{experts} are for inference and have no backward; call the model under torch.inference_mode() or "
            f"torch.no_grad()"
        )
    if torch.compiler.is_compiling() or getattr(forward_ad, "_current_level", -1) < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in inputs):
        raise RuntimeError(
            f"{experts} are for inference and have no derivative, as torch.func.jvp asks; detach the input"
        )

"""Reads transformers' fused experts modules, without importing transformers.

A model of transformers 5 keeps the experts of a layer in one module with parameters of all experts, `[E, ...]`, made by
its decorator `use_experts_implementation` (transformers/integrations/moe.py), whose flags say how they lie.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.checkpoint.formats.layout import FLOATS
from moe_ep.errors import ConfigError

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_LAYER = re.compile(r"layers\.(\d+)\.")
# Names of the activation modules of torch and transformers, and of functions.
_SILU, _GELU = ("silu", "SiLU", "SiLUActivation"), ("GELU", "GELUActivation")
_ACTIVATIONS = {
    **dict.fromkeys(_SILU, MoEActivation.SILU),
    **dict.fromkeys(_GELU, MoEActivation.GELU),
    **dict.fromkeys(("NewGELUActivation", "GELUTanh", "PytorchGELUTanh"), MoEActivation.GELU_TANH),
}
_UNGATED = {
    **dict.fromkeys(_SILU, MoEActivation.SILU_NO_MUL),
    **dict.fromkeys(_GELU, MoEActivation.GELU_NO_MUL),
    "ReLUSquaredActivation": MoEActivation.RELU2_NO_MUL,
}
# Attributes under which wrappers hold the module that they wrap, and what to do with each.
_WRAPPED = {
    "base_layer": "merge the adapters first (merge_and_unload of peft)",
    "_orig_mod": "call torch.compile behind parallelize",
}
# The module that defines the gate of experts without a gate of their own.
_DEFAULT_GATE_MODULE = "transformers.integrations.moe"
# An own gate is tried on so many numbers of so large magnitude, for each of gate and up.
_EXAMPLES, _EXAMPLES_UP_TO = 41, 20.0
# Attributes of modules that hold the clamp limit of gate and up.
LIMITS = ("swiglu_limit", "limit")
_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """The shape of one experts module.

    Attributes:
        swiglu_limit: as in `FusedMoE`.
        num_identities: experts that return what they read, whose ids follow the others'.
    """

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: MoEActivation
    has_bias: bool
    dtype: torch.dtype
    swiglu_limit: float | None = None
    num_identities: int = 0

    @property
    def layer_index(self) -> int:
        """The decoder layer that it is in; ConfigError if the path does not say."""
        return int(decoder_layer_of(self.name).rpartition(".")[2])


def decoder_layer_of(name: str) -> str:
    """The path of the decoder layer that a module's path is in; ConfigError if the path does not say."""
    found = _LAYER.search(name)
    if found is None:
        raise ConfigError(f"the experts {name} are in no layers.<number>; their layer in the files is unknown")
    return name[: found.end() - 1]


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every experts module of a model with its path, in the order of the layers."""
    for name, module in model.named_modules():
        if not isinstance(getattr(module, "down_proj", None), nn.Parameter):
            continue
        if _is_undecorated(module):
            vars(module).update(has_gate=True, has_bias=False, is_transposed=False, is_concatenated=True)
        if all(hasattr(module, flag) for flag in _FLAGS):
            yield name, module


def _is_undecorated(module: Any) -> bool:
    """Whether these are LongCat's or Step's experts, which lack the decorator and have the usual layout. What other
    modules without it compute is unknown."""
    if isinstance(getattr(module, "identity_expert", None), nn.Identity):
        return True
    return type(module).__name__ == "Step3p7Experts" and type(module).__module__.startswith("transformers.")


def check_not_wrapped(model: nn.Module, names: Iterable[str]) -> None:
    """ConfigError for an experts module inside another module that changes or replaces what it computes."""
    for name in names:
        parent, _, attribute = name.rpartition(".")
        if attribute in _WRAPPED:
            raise ConfigError(
                f"the experts {name} are inside a {type(model.get_submodule(parent)).__name__}, which needs them as "
                f"they are; {_WRAPPED[attribute]}"
            )


def check_one_in_a_layer(names: Iterable[str]) -> None:
    """ConfigError for two experts modules with one layer number: a pass may call only one of them, and ranks must call
    the same ones."""
    first: dict[str, str] = {}
    for name in names:
        for number in _LAYER.findall(name)[:1]:
            other = first.setdefault(number, name)
            if other != name:
                raise ConfigError(
                    f"layer {number} of the model has the experts {other} and {name}, of which a pass may call one "
                    f"alone; moe_ep parallelizes one language model with one experts module a layer: pass that"
                )


def experts_shape(name: str, module: Any) -> ExpertsShape:
    """Reads an experts module, which may be on the meta device.

    Raises:
        ConfigError: an activation that moe_ep does not have, or a norm behind the experts.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise ConfigError(
            f"the experts {name} of {type(module).__name__} are followed by a norm of their own; moe_ep does not take "
            f"such experts"
        )
    if module.down_proj.dtype not in FLOATS:
        raise ConfigError(
            f"the experts {name} of {type(module).__name__} are {module.down_proj.dtype} and must be "
            f"{', '.join(map(str, FLOATS))}; cast the model, or pass the folder of a quantized one's checkpoint"
        )
    if module.down_proj.dim() != 3:
        raise ConfigError(
            f"the experts {name} of {type(module).__name__} were sharded by a pass with experts_implementation "
            f"'moe_ep'; load the model again"
        )
    E, first, second = module.down_proj.shape
    K, N = (second, first) if module.is_transposed else (first, second)
    activation, swiglu_limit = _activation(name, module)
    return ExpertsShape(
        name=name,
        num_experts=E,
        hidden_size=K,
        intermediate_size=N,
        activation=activation,
        has_bias=module.has_bias,
        dtype=module.down_proj.dtype,
        swiglu_limit=swiglu_limit,
        num_identities=getattr(module, "zero_expert_num", 0),
    )


def expert_tensors(module: Any) -> dict[tuple[str, str], torch.Tensor]:
    """All experts' tensors by (parameter's suffix, shard), as views: weights `[E, out, in]` and biases `[E, out]`.

    Ungated experts have no w3.

    Example: `("weight", "w1")` is the gate projections `[E, N, K]`, ("bias", "w2") the biases of down `[E, K]`.
    """
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    for suffix, (gate_up, down) in _oriented(module).items():
        tensors |= {(suffix, "w1"): gate_up, (suffix, "w2"): down}
        if module.has_gate:
            gate, up = gate_up.chunk(2, dim=1) if module.is_concatenated else (gate_up[:, 0::2], gate_up[:, 1::2])
            tensors |= {(suffix, "w1"): gate, (suffix, "w3"): up}
    return tensors


def gemm_tensors(module: Any) -> dict[str, torch.Tensor]:
    """The module's tensors under the layer's parameter names and in their layout; copied only if the layout differs.

    Example: `"w13_weight"` is `[E, 2N, K]`, gate rows, then up rows.
    """
    tensors: dict[str, torch.Tensor] = {}
    for suffix, (gate_up, down) in _oriented(module).items():
        if module.has_gate and not module.is_concatenated:
            gate_up = torch.cat([gate_up[:, 0::2], gate_up[:, 1::2]], dim=1)
        tensors |= {f"w13_{suffix}": gate_up.contiguous(), f"w2_{suffix}": down.contiguous()}
    return tensors


def _oriented(module: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """gate_up, or up where there is no gate, and down by suffix: weights `[E, out, in]`, biases `[E, out]`."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    down = module.down_proj.detach()
    # Identity experts may have rows that nothing reads.
    gate_up = getattr(module, first).detach()[: down.size(0)]
    parts = {"weight": (gate_up.mT, down.mT) if module.is_transposed else (gate_up, down)}
    if module.has_bias:
        parts["bias"] = (getattr(module, f"{first}_bias").detach(), module.down_proj_bias.detach())
    return parts


def _activation(name: str, module: Any) -> tuple[MoEActivation, float | None]:
    """The activation, and the clamp limit of gate and up if it differs from the activation's own."""
    kind = type(module)
    own_gate = getattr(kind, "_apply_gate", None)
    if module.has_gate and own_gate is not None and own_gate.__module__ != _DEFAULT_GATE_MODULE:
        return _activation_of_own_gate(name, module)
    known = _ACTIVATIONS if module.has_gate else _UNGATED
    found = getattr(module.act_fn, "__name__", type(module.act_fn).__name__)
    if isinstance(module.act_fn, nn.GELU) and module.act_fn.approximate == "tanh":
        found = "GELUTanh"
    if found not in known:
        raise ConfigError(
            f"the experts {name} of {kind.__name__} have the activation {found}; moe_ep has {', '.join(known)}"
        )
    return known[found], None


def _activation_of_own_gate(name: str, module: Any) -> tuple[MoEActivation, float | None]:
    """The activation that the module's own gate computes, found by trying numbers below and above its limits."""
    held = [getattr(module, key, None) for key in LIMITS]
    limits = [float(limit) for limit in held if isinstance(limit, int | float) and 0 < limit < math.inf]
    most = 2 * max([_EXAMPLES_UP_TO / 2, *limits])
    values = torch.linspace(-most, most, _EXAMPLES, dtype=torch.float32, device="cpu")
    gate, up = torch.cartesian_prod(values, values).unbind(1)
    example = torch.cat([gate, up]) if module.is_concatenated else torch.stack([gate, up], dim=1).flatten()
    computed = module._apply_gate(example[None])[0]
    known = [activation for activation in MoEActivation if activation.is_gated]
    for activation, limit in itertools.product(known, [None, *limits]):
        if activation is MoEActivation.SITU and limit is not None:
            continue
        expected = apply_activation(activation, torch.cat([gate, up]), clamp_limit=limit)
        if computed.shape == expected.shape and torch.allclose(computed, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            return activation, limit
    raise ConfigError(
        f"the experts {name} of {type(module).__name__} have a gate of their own, which computes none of moe_ep's "
        f"activations, {', '.join(known)}, with a limit or without"
    )

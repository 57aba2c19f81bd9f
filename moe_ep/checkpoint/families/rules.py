"""Rules of model families: layers with experts, shared experts, activations, and further fields of the spec.

Each function reads a config.json; models.py assigns them to families.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moe_ep.activation import SITU_BETA, SITU_LINEAR_BETA, SWIGLUOAI_ALPHA, MoEActivation
from moe_ep.checkpoint.config_values import Config, number, one_known, positive, required, unexpected, whole
from moe_ep.checkpoint.families.routing import cohere_factor
from moe_ep.checkpoint.spec import Latent, SharedExpertsSpec

_ACTIVATIONS = {
    "silu": MoEActivation.SILU,
    "swish": MoEActivation.SILU,
    "gelu": MoEActivation.GELU,
    "gelu_new": MoEActivation.GELU_TANH,
    "gelu_pytorch_tanh": MoEActivation.GELU_TANH,
}


def named_activation(config: Config) -> MoEActivation:
    return one_known("hidden_act", required(config, "hidden_act"), _ACTIVATIONS)


def situ(gate_cap: str, up_cap: str) -> Callable[[Config], MoEActivation]:
    """SiTU, with its soft caps under these keys, although hidden_act may be silu."""

    def activation(config: Config) -> MoEActivation:
        for key, value in {gate_cap: SITU_BETA, up_cap: SITU_LINEAR_BETA}.items():
            if (found := config.get(key)) != value:
                raise unexpected(key, value, found)
        return MoEActivation.SITU

    return activation


def kimi_activation(config: Config) -> MoEActivation:
    """Kimi-K3: SiTU, or an ordinary activation."""
    if required(config, "hidden_act") != MoEActivation.SITU:
        return named_activation(config)
    return situ("activation_situ_beta", "activation_situ_linear_beta")(config)


def swigluoai(config: Config) -> MoEActivation:
    """GPT-OSS: silu with a further constant and a clamp limit, although hidden_act is silu."""
    if (found := config.get("swiglu_alpha", SWIGLUOAI_ALPHA)) != SWIGLUOAI_ALPHA:
        raise unexpected("swiglu_alpha", SWIGLUOAI_ALPHA, found)
    return MoEActivation.SWIGLUOAI


def relu2(config: Config) -> MoEActivation:
    """Nemotron: ungated experts."""
    return one_known("mlp_hidden_act", required(config, "mlp_hidden_act"), {"relu2": MoEActivation.RELU2_NO_MUL})


def listed_layers(config: Config) -> tuple[int, ...] | None:
    """The layers that transformers lists as sparse, in any family; None without such a list."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return None
    layers = all_layers(config)
    if not isinstance(kinds, list) or len(kinds) < len(layers) or not set(map(str, kinds)) <= {"dense", "sparse"}:
        raise unexpected("mlp_layer_types", f"dense or sparse for each of {len(layers)} layers", kinds)
    return tuple(i for i in layers if kinds[i] == "sparse")


def all_layers(config: Config) -> tuple[int, ...]:
    return tuple(range(positive(config, "num_hidden_layers")))


def sparse_step_layers(config: Config) -> tuple[int, ...]:
    """Qwen: every `decoder_sparse_step`-th layer except those listed as dense."""
    dense, step = config.get("mlp_only_layers") or [], whole(config, "decoder_sparse_step", 1, least=1)
    layers = all_layers(config)
    if not isinstance(dense, list) or len(dense) > len(layers):
        raise unexpected("mlp_only_layers", f"a list of at most {len(layers)} layers", dense)
    return tuple(i for i in layers if i not in dense and (i + 1) % step == 0)


def layers_after_dense(config: Config) -> tuple[int, ...]:
    """DeepSeek: after the first dense layers, every `moe_layer_freq`-th layer, or those listed there."""
    layers, first, listed = all_layers(config), whole(config, "first_k_dense_replace", 0), config.get("moe_layer_freq")
    if isinstance(listed, list):
        if len(listed) < len(layers):
            raise unexpected("moe_layer_freq", f"0 or 1 for each of {len(layers)} layers", listed)
        return tuple(i for i in layers if i >= first and listed[i])
    step = whole(config, "moe_layer_freq", 1, least=1)
    return tuple(i for i in layers if i >= first and i % step == 0)


def layers_after(key: str) -> Callable[[Config], tuple[int, ...]]:
    """All but the first layers, whose number is under that key."""
    return lambda config: tuple(i for i in all_layers(config) if i >= whole(config, key, 0))


def llama_layers(config: Config) -> tuple[int, ...]:
    """Llama 4: the listed layers, or every `interleave_moe_layer_step`-th."""
    layers, listed = all_layers(config), config.get("moe_layers")
    if listed is None:
        step = whole(config, "interleave_moe_layer_step", 1, least=1)
        return tuple(i for i in layers if (i + 1) % step == 0)
    if not isinstance(listed, list):
        raise unexpected("moe_layers", "a list of layers", listed)
    return tuple(i for i in layers if i in listed)


def enumerated_layers(config: Config) -> tuple[int, ...]:
    """Step: the layers of `moe_layers_enum`, a list or a string of one; all but the first three by default."""
    listed, layers = config.get("moe_layers_enum"), all_layers(config)
    if listed is None:
        return layers[3:]
    numbers = [each for each in listed.split(",") if each.strip()] if isinstance(listed, str) else listed
    try:
        chosen = {int(each) for each in numbers}
    except (TypeError, ValueError):
        raise unexpected("moe_layers_enum", "a list of layers, or a string of it", listed) from None
    return tuple(i for i in layers if i in chosen)


def jamba_layers(config: Config) -> tuple[int, ...]:
    """Jamba: every `expert_layer_period`-th layer from `expert_layer_offset` on."""
    step, first = whole(config, "expert_layer_period", 2, least=1), whole(config, "expert_layer_offset", 1)
    return tuple(i for i in all_layers(config) if i % step == first)


def layers_between(config: Config) -> tuple[int, ...]:
    """Ernie: every `moe_layer_interval`-th layer from a first to a last one."""
    first, step = whole(config, "moe_layer_start_index", 1), whole(config, "moe_layer_interval", 1, least=1)
    layers, last = all_layers(config), whole(config, "moe_layer_end_index", -1, least=-1)
    last = layers[-1] if last == -1 else last
    return tuple(i for i in layers if first <= i <= last and (i + 1) % step == 0)


def clamp_limits(config: Config, key: str) -> dict[str, Any]:
    """The clamp limits under that key, as the fields of a spec.

    One number for all layers is `swiglu_limit`; other keys have a list by layer, for layers with the activation
    swiglustep, in which 0 and null mean none.
    """
    found = config.get(key)
    if found is None:
        return {}
    if key == "swiglu_limit":
        if (limit := number(config, key)) <= 0:
            raise unexpected(key, "a positive number", found)
        return {"swiglu_limit": limit}
    layers = all_layers(config)
    if not isinstance(found, list) or len(found) < len(layers) or not all(map(_is_limit, found)):
        raise unexpected(key, f"null or a number from 0 on for each of {len(layers)} layers", found)
    limits = tuple(float(limit) if limit else None for limit in found[: len(layers)])
    return {"step_limits": limits} if any(limits) else {}


def _is_limit(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf)


def latent_experts(
    size: str, down: str, up: str, norm: str = "", has_norm: str = ""
) -> Callable[[Config], dict[str, Any]]:
    """Latent experts, if the config has the key `size`, with a norm if it says so under `has_norm`."""

    def fields(config: Config) -> dict[str, Any]:
        if config.get(size) is None:
            return {}
        return {"latent": Latent(positive(config, size), down, up, norm if config.get(has_norm) else None)}

    return fields


def deepseek_v4_fields(config: Config) -> dict[str, Any]:
    """Tensor names are the authors', or transformers' if the attention's settings are."""
    fields = {"table_layers": config["table_layers"]}
    if "compress_ratios" in config:
        fields |= {"layers_module": "layers", "embedding": "embed.weight"}
    return fields


def no_shared_experts(config: Config) -> None:
    return None


def one_mlp(module: str, size: str, **form: Any) -> Callable[[Config], SharedExpertsSpec | None]:
    """One shared expert with its size under that key; none if that is missing or 0."""

    def shared(config: Config) -> SharedExpertsSpec | None:
        found = whole(config, size, 0)
        return SharedExpertsSpec(module=module, num_experts=1, intermediate_size=found, **form) if found else None

    return shared


def several_in_one_mlp(
    module: str, size: str = "moe_intermediate_size", size_of_none: str = "", **form: Any
) -> Callable[[Config], SharedExpertsSpec | None]:
    """One MLP for all shared experts, each of the size under that key.

    Where their number is 0 there is no MLP, or, with `size_of_none`, one MLP of the size under that key.
    """

    def shared(config: Config) -> SharedExpertsSpec | None:
        keys = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        count = max(whole(config, key, 0) for key in keys)
        if not count and not size_of_none:
            return None
        for key in ("use_bias", "mlp_bias"):
            if config.get(key):
                raise unexpected(key, "false", config[key], "; shared experts with biases do not load")
        if not count:
            dense = positive(config, size_of_none)
            return SharedExpertsSpec(module=module, num_experts=1, intermediate_size=dense, **form)
        each = positive(config, size)
        as_routed = each == positive(config, "moe_intermediate_size")
        return SharedExpertsSpec(
            module=module, num_experts=count if as_routed else 1, intermediate_size=count * each, **form
        )

    return shared


counted_shared_experts = several_in_one_mlp("mlp.shared_experts")


def cohere_shared_experts(config: Config) -> SharedExpertsSpec | None:
    shared = counted_shared_experts(config)
    return None if shared is None else replace(shared, factor=cohere_factor(config))

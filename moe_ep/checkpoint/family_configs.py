"""Configurations that call things otherwise, under the names that the rest of the checkpoint code reads.

Each function turns a whole config.json into the language model's; which family has which is said in models.py.
"""

from __future__ import annotations

from moe_ep.checkpoint.config_values import Config, required
from moe_ep.errors import CheckpointError


def whole_config(config: Config) -> Config:
    return config


def mimo_config(config: Config) -> Config:
    """As transformers writes it, from the file that the models came with, which calls some things otherwise."""
    changes: Config = {"rms_norm_eps": config.get("rms_norm_eps") or config.get("layernorm_epsilon")}
    if config.get("routed_scaling_factor") is None:
        changes["routed_scaling_factor"] = 1.0
    if isinstance(sparse := config.get("moe_layer_freq"), list):
        changes |= {"moe_layer_freq": None, "mlp_layer_types": ["sparse" if layer else "dense" for layer in sparse]}
    return config | changes


def nemotron_config(config: Config) -> Config:
    """With names that others have; its layers are a list of kinds, or a string with E for those of experts."""
    for key, meaning in (("moe_latent_size", "experts of another width"), ("mlp_bias", "shared experts with biases")):
        if config.get(key):
            raise CheckpointError(f"config.json: {key}: expected none, found {config[key]!r}; {meaning} do not load")
    kinds = config.get("layers_block_type") or config.get("hybrid_override_pattern") or []
    if not isinstance(kinds, list | str) or not kinds:
        raise CheckpointError(
            f"config.json: layers_block_type or hybrid_override_pattern: expected the kinds of layers, found {kinds!r}"
        )
    return config | {
        "num_hidden_layers": len(kinds),
        "mlp_layer_types": ["sparse" if kind in ("moe", "E") else "dense" for kind in kinds],
        "rms_norm_eps": config.get("layer_norm_epsilon") or config.get("norm_eps"),
    }


def lfm_config(config: Config) -> Config:
    """With names that others have; its activation is fixed."""
    return config | {"rms_norm_eps": config.get("norm_eps"), "hidden_act": "silu"}


def text_part(config: Config) -> Config:
    """The language model's part of a config that has others, under the names of the whole where it is silent."""
    part = required(config, "text_config")
    if not isinstance(part, dict):
        raise CheckpointError(f"config.json: text_config: expected an object, found {part!r}")
    return {"dtype": config.get("dtype") or config.get("torch_dtype")} | part

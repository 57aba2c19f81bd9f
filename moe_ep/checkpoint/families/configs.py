"""Reads configs of model families: the language model's part, defaults of config classes, and keys that are derived.

models.py assigns these functions to families.
"""

from __future__ import annotations

from moe_ep.checkpoint.config_values import Config, MissingKey, positive, required, unexpected, whole
from moe_ep.errors import CheckpointError, one_of

# ==== Keys that are derived from others ====


def afmoe_keys(config: Config) -> Config:
    """Embeddings are scaled if `mup_enabled`."""
    return {"embedding_multiplier": positive(config, "hidden_size") ** 0.5 if config.get("mup_enabled") else 1.0}


def aria_keys(config: Config) -> Config:
    """`intermediate_size` is the experts'."""
    return {"moe_intermediate_size": config.get("intermediate_size")}


def inkling_keys(config: Config) -> Config:
    """If `dense_intermediate_size` is given, `intermediate_size` is the experts'."""
    return {} if config.get("dense_intermediate_size") is None else aria_keys(config)


def cohere_keys(config: Config) -> Config:
    """`intermediate_size` is the experts'; norms are layer norms if there is no epsilon of an RMS norm."""
    has_layer_norm = config.get("rms_norm_eps") is None
    epsilon = config.get("layer_norm_eps" if has_layer_norm else "rms_norm_eps")
    return {**aria_keys(config), "has_layer_norm": has_layer_norm, "rms_norm_eps": epsilon}


def nemotron_keys(config: Config) -> Config:
    """The kinds of layers are a list, or a string with E for MoE layers."""
    kinds = config.get("layers_block_type") or config.get("hybrid_override_pattern") or []
    if not isinstance(kinds, list | str) or not kinds:
        raise MissingKey(
            f"config.json: layers_block_type or hybrid_override_pattern: expected the kinds of layers, found {kinds!r}"
        )
    return {
        "num_hidden_layers": len(kinds),
        "mlp_layer_types": ["sparse" if kind in ("moe", "E") else "dense" for kind in kinds],
        "rms_norm_eps": config.get("layer_norm_epsilon") or config.get("norm_eps"),
    }


def longcat_keys(config: Config) -> Config:
    """A layer has two attentions and one MoE block."""
    return {"num_hidden_layers": config.get("num_layers")}


def deepseek_v4_keys(config: Config) -> Config:
    """Adds `table_layers`, the layers that choose experts by a table: those of kind hash_moe, or the first ones."""
    layers, kinds = range(positive(config, "num_hidden_layers")), config.get("mlp_layer_types")
    if kinds is None:
        table_layers = tuple(layers[: whole(config, "num_hash_layers", 3)])
    elif isinstance(kinds, list) and len(kinds) >= len(layers) and set(map(str, kinds)) <= {"hash_moe", "moe"}:
        table_layers = tuple(layer for layer in layers if kinds[layer] == "hash_moe")
    else:
        raise unexpected("mlp_layer_types", f"hash_moe or moe for each of {len(layers)} layers", kinds)
    return {"swiglu_limit": config.get("swiglu_limit", 10.0), "mlp_layer_types": None, "table_layers": table_layers}


def deepseek_v41_keys(config: Config) -> Config:
    """No layer chooses by a table."""
    return deepseek_v4_keys(config | {"num_hash_layers": 0})


# ==== Defaults of config classes ====


def _class_defaults() -> dict[str, Config]:
    shared, groups = {"n_shared_experts": 1}, {"n_group": 1, "topk_group": 1}
    deepseek_v3 = {**shared, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}
    one_dense, gated = {"first_k_dense_replace": 1}, {"shared_expert_intermediate_size": 512}
    other_shared = {"num_shared_experts": 1}
    by_types: dict[str, Config] = {
        "qwen2_moe": {"shared_expert_intermediate_size": 5632},
        "qwen3_next qwen3_5_moe_text qwen4_exp_text laguna": gated,
        "flint": {"shared_expert_intermediate_size": 1024},
        "aria_text ernie4_5_moe": {"moe_num_shared_experts": 2},
        "gpt_oss minimax_m3_vl_text": {"swiglu_limit": 7.0},
        "afmoe": {"num_shared_experts": 2, "num_dense_layers": 1},
        "lfm2_moe": {"num_dense_layers": 2},
        "deepseek_v2 deepseek_ocr2_text": {"n_shared_experts": 2},
        "unlimited_ocr_text": {"n_shared_experts": 2, **groups, **one_dense},
        "step3p5": {"share_expert_dim": 1280},
        "axk2": {"norm_topk_prob": True},
        "deepseek_v3 deepseek_v32": deepseek_v3,
        "glm4_moe glm4v_moe_text": {**shared, **groups, **one_dense},
        "glm_moe_dsa": {**shared, **groups, "first_k_dense_replace": 3},
        "solar_open glm4_moe_lite hy_v4 mistral4 dots3_note_text": {**shared, **groups},
        "glm5_next_text": {**shared, **groups, "swiglu_limit": 10.0},
        "granitemoehybrid": {"shared_intermediate_size": 1024},
        "nemotron_h": {"moe_shared_expert_intermediate_size": 7688, **groups},
        "mimo_v2_flash": groups,
        "mistral_large4_text": {**shared, **groups, **one_dense},
        "exaone_moe": {**other_shared, **groups, **one_dense},
        "kimi_linear": {**other_shared, "num_expert_group": 1, "topk_group": 1},
        "hy_v3": {**other_shared, "router_scaling_factor": 2.826},
        "bailing_hybrid": {**other_shared, "num_expert_group": 8, "topk_group": 4},
        "beam": {"n_group": 8, "topk_group": 4},
        "axk1": {**shared, "n_group": 8, "topk_group": 4},
        "deepseek_v4": shared,
        "longcat_flash": {"zero_expert_num": 256},
    }
    return {model_type: values for types, values in by_types.items() for model_type in types.split()}


# Defaults of transformers' configuration classes for keys that a config leaves out and that other families do not know.
# A key that is null stays null. Keys that every model of a family has are read from the class itself.
CLASS_DEFAULTS = _class_defaults()


def with_class_defaults(config: Config) -> Config:
    return CLASS_DEFAULTS.get(str(config.get("model_type")), {}) | config


# ==== Parts ====


def whole_config(config: Config) -> Config:
    return config


def part_of(config: Config, key: str) -> Config:
    """One part of a config, with the dtype of the whole if it has none."""
    part = required(config, key)
    if not isinstance(part, dict):
        raise unexpected(key, "an object", part)
    dtypes = (each.get(key) for each in (part, config) for key in ("dtype", "torch_dtype"))
    return with_class_defaults(part) | {"dtype": next(filter(None, dtypes), None)}


def text_part(config: Config) -> Config:
    """The language model's part."""
    return part_of(config, "text_config")


def thinker_part(config: Config) -> Config:
    """The language model's part in a model that also speaks."""
    return text_part(part_of(config, "thinker_config"))


def mistral4_part(config: Config) -> Config:
    """The language model's part; refuses other types of it, which have no experts."""
    text = text_part(config)
    if text.get("model_type") != "mistral4":
        raise CheckpointError(f"config.json: {one_of('text_config.model_type', text.get('model_type'), ['mistral4'])}")
    return text


def text_part_or_whole(config: Config) -> Config:
    """Published files may have the language model's keys at the top level, which transformers moves into a part."""
    return config if config.get("text_config") is None else text_part(config)

"""Builds a `MoEModelSpec` from config.json using the family registry."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from types import NoneType

import torch

from moe_ep.checkpoint.config_values import (
    LANGUAGE_PARTS,
    Config,
    MissingKey,
    not_negative,
    number,
    one_known,
    positive,
    unexpected,
)
from moe_ep.checkpoint.families import routing, rules
from moe_ep.checkpoint.families.configs import part_of, with_class_defaults
from moe_ep.checkpoint.families.models import FAMILIES, Family
from moe_ep.checkpoint.reader import CheckpointReader
from moe_ep.checkpoint.spec import OTHER_BLOCKS, PROJECTIONS, MoEModelSpec, SharedExpertsSpec
from moe_ep.errors import CheckpointError


def model_spec(config: Config, reader: CheckpointReader | None = None) -> MoEModelSpec:
    """The description of a checkpoint, from its config.json.

    Args:
        reader: of the tensors. With it, tensor names may have another prefix than transformers writes.

    Raises:
        CheckpointError: an unknown model_type (the known ones are listed), a missing key, or an invalid value.
        TypeError: the config is not a dict, or the reader no reader.
    """
    if not isinstance(config, Mapping):
        raise TypeError(
            f"config is a {type(config).__name__}; it must be the dict of a config.json, or config.to_dict()"
        )
    if not isinstance(reader, (CheckpointReader, NoneType)):
        raise TypeError(f"reader is {reader!r}; it must be a CheckpointReader, as CheckpointReader(folder), or None")
    try:
        return _model_spec(config, reader)
    except MissingKey:
        filled = _with_class_defaults(config)
        if filled is None:
            raise
    return _model_spec(filled, reader)


def _with_class_defaults(config: Config) -> Config | None:
    """The config with the defaults of transformers' config class for missing keys; None without such a class.

    The class itself reads the config, so values that it derives from others, such as kinds of layers, are there too.
    """
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return None
    filled = dict(config)
    for key in ("thinker_config", *LANGUAGE_PARTS):
        if isinstance(part := config.get(key), dict):
            filled[key] = _with_class_defaults(part) or part
    known = str(config.get("model_type"))
    if known not in CONFIG_MAPPING:
        return filled if filled != config else None
    whole: Config | None = None
    scalars = {key: value for key, value in filled.items() if not isinstance(value, list | dict)}
    for given in (filled, scalars, {}):
        # Config classes raise arbitrary exceptions for values that they refuse.
        with contextlib.suppress(Exception):
            whole = CONFIG_MAPPING[known].from_dict(given).to_dict()
            break
    if whole is None:
        return None
    parts = {
        key: whole[key] | filled[key]
        for key in ("thinker_config", *LANGUAGE_PARTS)
        if isinstance(whole.get(key), dict) and isinstance(filled.get(key), dict)
    }
    return whole | filled | parts


def _model_spec(config: Config, reader: CheckpointReader | None) -> MoEModelSpec:
    model_type, config = _known_part(config)
    family = FAMILIES[model_type]
    config = family.text_config(config)
    _check_limits(model_type, config, (family.limit, family.shared_limit))
    listed = rules.listed_layers(config)
    spec = MoEModelSpec(
        family=model_type,
        hidden_size=positive(config, "hidden_size"),
        num_hidden_layers=positive(config, "num_hidden_layers"),
        vocab_size=positive(config, "vocab_size"),
        dtype=_dtype(config),
        rms_norm_eps=not_negative(config, "rms_norm_eps"),
        moe_layers=family.moe_layers(config) if listed is None else listed,
        num_experts=positive(config, *_NUM_EXPERTS),
        top_k=routing.top_k(config),
        moe_intermediate_size=positive(config, family.intermediate_size),
        activation=family.activation(config),
        routing=family.routing(config),
        shared_experts=_shared_experts(family, config),
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        residual_multiplier=number(config, "residual_multiplier", 1.0),
        moe_module=family.moe_module,
        projections=family.projections,
        other_blocks=("mlp",) if family.moe_module in OTHER_BLOCKS and family.moe_module != "mlp" else (),
        **family.names | family.fields(config) | rules.clamp_limits(config, family.limit),
    )
    _check(spec)
    # Tools may write the module names of transformers, or another prefix if they extract a language model from a
    # multimodal one or insert it.
    return spec if reader is None else _with_layers_of(_with_block_of(spec, reader), reader)


def _shared_experts(family: Family, config: Config) -> SharedExpertsSpec | None:
    shared = family.shared_experts(config)
    return None if shared is None else replace(shared, **rules.clamp_limits(config, family.shared_limit))


def _known_part(config: Config) -> tuple[str, Config]:
    """A known model_type and the config that has it: the whole one, or its language model's part."""
    whole = config.get("model_type")
    if whole not in list(FAMILIES):  # it may be of any type
        for key in LANGUAGE_PARTS:
            part = config.get(key)
            if isinstance(part, Mapping) and part.get("model_type") in list(FAMILIES):
                return str(part["model_type"]), part_of(config, key)
    one_known("model_type", whole, dict.fromkeys(sorted(FAMILIES)))
    return str(whole), with_class_defaults(config)


def _with_block_of(spec: MoEModelSpec, reader: CheckpointReader) -> MoEModelSpec:
    """The spec with the files' names of the MoE block, its router, and an expert's matrices."""
    if not spec.other_blocks:
        return spec
    last, blocks = spec.moe_layers[-1], "|".join((spec.moe_module, *spec.other_blocks))
    experts = re.compile(rf"(?:.*\.)?layers\.{last}\.({blocks})\.experts\.(?:0\.)?(\w+)\.")
    found = {match.groups() for name in reader.names() if (match := experts.match(name))}
    modules = (spec.moe_module, *spec.other_blocks)
    known = [(spec.moe_module, spec.projections), *product(modules, (spec.projections, *PROJECTIONS))]
    module, projections = next((each for each in known if (each[0], each[1].gate) in found), known[0])
    if (module, projections) == known[0]:
        return spec
    block = f".layers.{last}.{module}."
    inside = {name.partition(block)[2] for name in reader.names() if block in name}

    def there(own: str, *others: str) -> str:
        return own if own in inside else next((each for each in others if each in inside), own)

    router = None if spec.router is None else there(f"{spec.router}.weight", "gate.weight", "router.weight")
    shared = spec.shared_experts
    if shared is not None and shared.module.startswith(f"{spec.moe_module}."):
        own = shared.projections or spec.projections
        stem = shared.module.removeprefix(f"{spec.moe_module}.")
        named = {name.split(".")[1] for name in inside if name.startswith(f"{stem}.")}
        shared = replace(
            shared,
            module=f"{module}.{stem}",
            projections=next((each for each in (own, *PROJECTIONS) if each.gate in named), own),
        )
    return replace(
        spec,
        moe_module=module,
        projections=projections,
        other_blocks=tuple(dict.fromkeys((spec.moe_module, *spec.other_blocks))),
        router=None if router is None else router.removesuffix(".weight"),
        correction_bias_tensor=there(
            spec.correction_bias_tensor, "gate.e_score_correction_bias", "e_score_correction_bias", "gate.bias"
        ),
        shared_experts=shared,
    )


def _with_layers_of(spec: MoEModelSpec, reader: CheckpointReader) -> MoEModelSpec:
    """The spec with the files' prefix of `layers`, if they do not use the family's and only one other."""
    base = spec.layers_module.rpartition("layers")[0]
    if reader.names(f"{base}layers."):
        return spec
    # Draft layers are numbered from 0 again, so the last layer is the language model's.
    last = spec.moe_prefix(spec.moe_layers[-1]).removeprefix(base)
    fused = "|".join(map(re.escape, spec.fused.by_role().values()))
    experts = re.compile(rf"(.*\.)?{re.escape(last)}\.(experts\.|{fused})")
    found = {match[1] or "" for name in reader.names() if (match := experts.match(name))}
    if len(found) != 1:
        return spec
    other = found.pop()
    return replace(
        spec,
        layers_module=other + spec.layers_module.removeprefix(base),
        embedding=other + spec.embedding.removeprefix(base),
    )


# transformers writes the number of routed experts under any of these, whatever the family.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _dtype(config: Config) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return one_known("dtype", name, _DTYPES)


def _check_limits(model_type: str, config: Config, known: tuple[str, ...]) -> None:
    """Refuses clamp limits of other keys: ignoring one would change results silently."""
    for key, value in config.items():
        is_limit = re.search("swiglu.*(limit|clamp)", str(key)) and key not in known
        if is_limit and (any(value) if isinstance(value, list | tuple) else value):
            raise unexpected(key, "none", value, f", a clamp limit that is not known for {model_type} models")


def _check(spec: MoEModelSpec) -> None:
    groups, kept = spec.routing.num_expert_group, spec.routing.topk_group
    if not spec.router_layers:
        raise CheckpointError(
            f"config.json: expected a layer with experts and a router among {spec.num_hidden_layers}, found none"
        )
    if spec.top_k > spec.num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok: expected at most the number of experts ({spec.num_experts}), "
            f"found {spec.top_k}"
        )
    if groups is not None and (kept is None or spec.num_experts % groups or not 1 <= kept <= groups):
        raise CheckpointError(
            f"config.json: n_group and topk_group: expected a divisor of {spec.num_experts} experts and at most that "
            f"many groups to keep, found {groups} and {kept}"
        )

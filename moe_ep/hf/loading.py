"""Loads a transformers model without its experts from a checkpoint: the part that every rank holds whole.

Experts are removed before transformers allocates memory, so no rank ever holds those of others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.functional import silu
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import CONFIG_MAPPING, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from moe_ep.activation import MoEActivation
from moe_ep.checkpoint import CheckpointReader, MoEModelSpec, model_spec
from moe_ep.checkpoint.finite import check_finite, count_nonfinite
from moe_ep.checkpoint.formats.layout import FLOATS
from moe_ep.checkpoint.loading import read_linear
from moe_ep.checkpoint.plan import find_module
from moe_ep.checkpoint.reader import TensorInfo, read_config
from moe_ep.errors import CheckpointError, ConfigError, MoeEpError
from moe_ep.hf.experts import LIMITS, ExpertsShape, check_one_in_a_layer, experts_shape, find_experts
from moe_ep.hf.untrusted import attention_without_hub, check_no_adapter, open_config, open_generation_config

# Parameters that a small model may have and its files lack.
_FEW_PARAMETERS = 10_000
# Model types that transformers has under another name.
_SAME_AS = {"kimi_k2": "deepseek_v3"}
# The part of a configuration that is the language model's, where transformers has a class for that part alone.
_PARTS = {"qwen3_omni_moe": "thinker_config"}


class ExpertsPlace(nn.Module):
    """Placeholder for the experts of a layer; its weights are empty, since some blocks initialize theirs."""

    gate_up_proj = down_proj = torch.empty(0)


def load_without_experts(
    reader: CheckpointReader, dtype: torch.dtype | None, attn_implementation: str | None, device: torch.device | str
) -> tuple[Any, list[ExpertsShape]]:
    """The causal language model of a checkpoint, and the shapes of the experts that it lacks.

    A family that transformers has only as a vision model comes with its vision part. Linear layers that are quantized
    on disk are dequantized, on the device.

    Args:
        reader: of the checkpoint. Nothing is fetched, and no code of the checkpoint is run.
        dtype: of weights and activations; None for the config's.
        attn_implementation: of transformers; None for its choice.

    Raises:
        CheckpointError: tensors that are missing.
        ConfigError: a model without experts that moe_ep can take.
    """
    path = reader.directory
    check_no_adapter(path)
    kind, config = _kind_and_config(path)
    shapes: list[ExpertsShape] = []
    # A model that sees may say it of its language model alone.
    options: dict[str, Any] = {"dtype": dtype or config.dtype or config.get_text_config().dtype or torch.float32}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    else:
        attention_without_hub(kind, config)
    settings = open_generation_config(path)
    with _quiet(), _refusals_of_transformers(path):
        model, info = _without_experts(kind, shapes, reader).from_pretrained(
            path,
            config=config,
            generation_config=None if settings is None else GenerationConfig.from_dict(settings),
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    model.__class__ = kind
    if not reader.allow_nonfinite:
        for name, tensor in model.state_dict().items():
            if count_nonfinite(tensor):
                stored = names_on_disk(model, reader).get(name, name)
                check_finite(reader.info(stored).file if stored in reader else reader.index_file, name, tensor)
    model.to(device)
    unread = set(info["missing_keys"]) | {key for key, *_ in info["mismatched_keys"]}
    _fill_dequantized(model, reader, unread)
    return model, shapes


def text_config(path: Path) -> Any:
    """transformers' configuration of the checkpoint's language model; ConfigError where it knows none."""
    return _kind_and_config(path)[1].get_text_config()


def context_length(config: Any) -> int | None:
    """Tokens that a language model reads at most, as far as its rotary embedding is stretched; None if nothing says."""
    known = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    # Some have one for each kind of attention.
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    stretched = [
        int(part["factor"] * part.get("original_max_position_embeddings", 0)) for part in kinds if part.get("factor")
    ]
    return max([known, *stretched]) if isinstance(known, int) else None


def _kind_and_config(path: Path) -> tuple[Any, Any]:
    """transformers' class of the checkpoint's language model, and its configuration."""
    # The experts read their own quantization; transformers would want a quantizer for it.
    values = open_config(read_config(path))
    model_type = str(values.get("model_type"))
    known = _SAME_AS.get(model_type, model_type)
    kind: Any = None
    # These mappings import as they are asked, and know nothing by `get`.
    if known in CONFIG_MAPPING:
        with _quiet(), _refusals_of_transformers(path):
            config = CONFIG_MAPPING[known].from_dict(values)
        # Some classes have one of their own, where a config.json has none.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        if known in _PARTS:
            config = getattr(config, _PARTS[known])
        kinds = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
        kind = next((mapping[type(config)] for mapping in kinds if type(config) in mapping), None)
    if kind is None:
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} has no causal language model of model_type "
            f"{model_type!r}; install one that has"
        )
    return kind, config if isinstance(config, kind.config_class) else config.get_text_config()


def _without_experts(kind: Any, shapes: list[ExpertsShape], reader: CheckpointReader) -> Any:
    """A subclass of the model class `kind` whose instances have no experts; their shapes are appended to `shapes`."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        with _about_as_many_as(reader):
            kind.__init__(self, config, *args, **kwargs)
        found = list(find_experts(self))
        if not found:
            raise ConfigError(
                f"{kind.__name__} of transformers {transformers.__version__} has no experts that can be taken out: it "
                f"computes all of them for every token; moe-ep run takes the layers of its checkpoint"
            )
        check_one_in_a_layer(name for name, _ in found)
        for name, module in found:
            shapes.append(experts_shape(name, module))
            self.set_submodule(name, ExpertsPlace())
        _check_sizes(self, reader)

    return type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__})


@contextmanager
def _about_as_many_as(reader: CheckpointReader) -> Iterator[None]:
    """CheckpointError as soon as the block has made far more parameters than the files have tensors."""
    most, made = 2 * len(reader.names()) + _FEW_PARAMETERS, itertools.count(1)

    def count(*_: object) -> None:
        if next(made) > most:
            raise CheckpointError(
                f"{reader.index_file}: expected a tensor for each weight of config.json, found {len(reader.names())} "
                f"tensors for more than {most} weights; correct its numbers of layers"
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _check_sizes(model: Any, reader: CheckpointReader) -> None:
    """CheckpointError for weights far larger than any that the files could fill, before memory is allocated for them.

    The model is on the meta device here. A byte holds at most two weights, and a name that the files have too may be
    of a module that transformers puts together from several tensors.
    """
    largest = max((reader.info(name).nbytes for name in reader.names()), default=0)
    for name, param in model.named_parameters():
        on_disk = reader.info(name) if name in reader else None
        held = 2 * largest if on_disk is None else 8 * on_disk.nbytes // on_disk.dtype.itemsize
        if param.numel() > held:
            found = f"none of more than {largest} bytes" if on_disk is None else str(on_disk.shape)
            raise CheckpointError(
                f"{reader.index_file}: expected {name} of shape {tuple(param.shape)} as config.json says, found {found}"
            )


@contextmanager
def _refusals_of_transformers(path: Path) -> Iterator[None]:
    """Turns any exception in the block into a ConfigError of one sentence: transformers checks few of the numbers in a
    configuration before it builds the model."""
    try:
        yield
    except (ImportError, MoeEpError):
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} makes no model of it: {type(error).__name__}: "
            f"{said}; correct its JSON files or the arguments, or fetch it again"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences transformers, which warns of every expert in the files and draws a progress bar on each rank."""
    logging = transformers.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _fill_dequantized(model: Any, reader: CheckpointReader, unread: set[str]) -> None:
    """Reads the weights that transformers did not find or misread: those quantized on disk."""
    on_disk = names_on_disk(model, reader)
    is_plain = reader.quantization is None
    params: dict[str, torch.Tensor] = dict(model.named_parameters())
    filled: set[str] = set()
    for assembled in assembled_weights(model, reader):
        # transformers has put codes together and left out their scales.
        if assembled.is_quantized(reader):
            for name, weight in assembled.read(reader, model).items():
                with torch.no_grad():
                    params[name].copy_(weight)
                filled.add(name)
    for name, param in params.items():
        stored = on_disk.get(name, name)
        quantized = stored in reader and reader.info(stored).dtype not in FLOATS
        if name in filled or (name not in unread and not quantized):
            continue
        module = stored.removesuffix(".weight")
        found = stored in reader or (not is_plain and reader.names(module + "."))
        if param.dim() != 2 or not found:
            raise _nothing_fits(reader, name, param)
        with torch.no_grad():
            param.copy_(read_linear(reader, module, (param.size(0), param.size(1)), param.device))
    may_miss = ".e_score_correction_bias" if model_spec(reader.config).correction_bias_may_miss else None
    # Such as the biases of a router's choice, which transformers leaves at zero with a word in its log.
    for name, buffer in model.named_buffers():
        if name in unread and not (may_miss and name.endswith(may_miss)):
            raise _nothing_fits(reader, name, buffer)


@dataclass(frozen=True)
class AssembledWeights:
    """Weights that transformers makes of several tensors of the files, such as gate and up of shared experts in one
    matrix, or parts of one tensor.

    Attributes:
        names: in the model.
        sources: the weights in the files, plain or packed, by the converter's patterns.
        num_columns: of a matrix; 0 for weights of another form.
    """

    names: tuple[str, ...]
    sources: dict[str, list[str]]
    num_columns: int
    converter: WeightConverter

    def is_quantized(self, reader: CheckpointReader) -> bool:
        return any(self._is_quantized(reader, name) for names in self.sources.values() for name in names)

    def tensors(self, reader: CheckpointReader, model: Any) -> list[str]:
        """The names of all tensors in the files; no data is read.

        Raises:
            CheckpointError: a tensor of a quantized matrix that is missing, or weights of other shapes than the model.
        """
        found: list[str] = []
        shapes: dict[str, list[torch.Tensor]] = {}
        for pattern, names in self.sources.items():
            shapes[pattern] = []
            for name in names:
                module, size = self._module(reader, name)
                is_quantized = self._is_quantized(reader, name)
                linear = find_module(reader, module, size)[1] if is_quantized else {}
                found += [stored.info.name for stored in linear.values()] or [name]
                shapes[pattern].append(torch.empty(size if is_quantized else reader.info(name).shape, device="meta"))
        params = dict(model.named_parameters())
        for name, made in self._converted(shapes, model).items():
            if made.shape != params[name].shape:
                raise _nothing_fits(reader, name, params[name])
        return found

    def read(self, reader: CheckpointReader, model: Any) -> dict[str, torch.Tensor]:
        """The weights by their names in the model, dequantized, on its device."""
        parts = {
            pattern: [self._read(reader, name, model.device) for name in names]
            for pattern, names in self.sources.items()
        }
        return self._converted(parts, model)

    def _read(self, reader: CheckpointReader, name: str, device: torch.device) -> torch.Tensor:
        if self._is_quantized(reader, name):
            return read_linear(reader, *self._module(reader, name), device)
        return reader.read(name).to(device)

    def _converted(self, parts: dict[str, Any], model: Any) -> dict[str, torch.Tensor]:
        sources, targets = self.converter.source_patterns, self.converter.target_patterns
        for operation in self.converter.operations:
            parts = operation.convert(parts, source_patterns=sources, target_patterns=targets, config=model.config)
        return {name: parts[pattern] for name, pattern in zip(self.names, targets, strict=True)}

    def _is_quantized(self, reader: CheckpointReader, name: str) -> bool:
        return _info_of(reader, name).dtype not in FLOATS

    def _module(self, reader: CheckpointReader, name: str) -> tuple[str, tuple[int, int]]:
        return name.removesuffix(".weight"), (_info_of(reader, name).shape[0], self.num_columns)


# What compressed-tensors adds to the name of a weight whose codes are packed along its columns.
_PACKED = "_packed"


def _info_of(reader: CheckpointReader, name: str) -> TensorInfo:
    """Of a weight, or of its packed codes, which have as many rows."""
    return reader.info(name if name in reader else name + _PACKED)


def assembled_weights(model: Any, reader: CheckpointReader) -> list[AssembledWeights]:
    """Those beside the experts.

    Raises:
        CheckpointError: some that are quantized on disk and no matrices.
    """
    conversions, params = _conversions(model), dict(model.named_parameters())
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    found: dict[str, AssembledWeights] = {}
    for in_file in reader.names():
        if ".experts." in in_file:
            continue
        stored = in_file.removesuffix(_PACKED) if in_file.endswith(f".weight{_PACKED}") else in_file
        name = _renamed(stored, conversions)
        for converter in converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is None or target not in params:
                continue
            param, (first, *_) = params[target], converter.target_patterns
            is_matrix = param.dim() == 2 and stored.endswith(".weight")
            if not is_matrix and _info_of(reader, stored).dtype not in FLOATS:
                raise _nothing_fits(reader, target, param)
            names = tuple(target.replace(first, each) for each in converter.target_patterns)
            new = AssembledWeights(names, {}, param.size(1) if is_matrix else 0, converter)
            found.setdefault(target, new).sources.setdefault(pattern, []).append(stored)
            break
    return list(found.values())


def _conversions(model: Any) -> list[Any]:
    """What transformers does to the names and tensors of a checkpoint when it loads them."""
    return getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model)


def _renamed(name: str, conversions: list[Any]) -> str:
    for each in conversions:
        if isinstance(each, WeightRenaming):
            name, _ = each.rename_source_key(name)
    return name


def names_on_disk(model: Any, reader: CheckpointReader) -> dict[str, str]:
    """Names of weights in the files by their names in the model, for those that transformers renames on load.

    Experts are left out. A quantized module has several tensors in the files, and none of that name.
    """
    conversions = _conversions(model)
    names = [name for name in reader.names() if ".experts." not in name or name.endswith("e_score_correction_bias")]
    modules = {f"{name.rpartition('.')[0]}.weight" for name in names}
    # What is in the files comes before the modules that may be quantized there.
    return {_renamed(name, conversions): name for name in (*modules.difference(names), *names)}


def _nothing_fits(reader: CheckpointReader, name: str, tensor: torch.Tensor) -> CheckpointError:
    return CheckpointError(
        f"{reader.index_file}: expected {name}, as transformers calls it, of shape {tuple(tensor.shape)}, found none "
        f"that fits"
    )


def as_trained(model: Any, shape: ExpertsShape, spec: MoEModelSpec) -> ExpertsShape:
    """The shape of a layer's routed experts with the clamp limit of its checkpoint; its shared experts get theirs.

    Some models of transformers ignore the limits that a checkpoint's config has: Ling 3 was trained with some in its
    last layers (`expert_swiglu_limit_list`), and without them some tokens are wrong.
    """
    routed, shared = spec.gate(shape.layer_index), spec.shared_gate(shape.layer_index)
    if shared is not None and shared.activation is MoEActivation.SWIGLUSTEP:
        _limit(model.get_submodule(f"{shape.name.rpartition('.')[0]}.shared_experts"), shared.swiglu_limit)
    return replace(shape, **routed._asdict()) if routed.activation is MoEActivation.SWIGLUSTEP else shape


class _LimitedSilu(nn.Module):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu(x).clamp(max=self._limit)


def _limit(mlp: Any, limit: float | None) -> None:
    """Clamps silu of the gate, and up, at the limit, unless the MLP does so itself."""
    if limit is None or any(getattr(mlp, name, None) is not None for name in LIMITS):
        return
    mlp.act_fn = _LimitedSilu(limit)
    mlp.up_proj.register_forward_hook(partial(_clamp, limit))


def _clamp(limit: float, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return output.clamp(min=-limit, max=limit)

"""Plans what a rank reads of a layer: which tensors hold which expert, in which format, checked against the headers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_ep.checkpoint.formats import LayerQuantization, ModelQuantization, PerGemm, QuantizationConfig
from moe_ep.checkpoint.formats.layout import FLOATS, Role, TensorLayout, plain_tensors
from moe_ep.checkpoint.reader import CheckpointReader, TensorInfo
from moe_ep.checkpoint.spec import MoEModelSpec
from moe_ep.errors import CheckpointError, check_below

GEMM_OF_ROLE = {"gate": "w13", "up": "w13", "down": "w2"}
# The endings of a plain linear layer's tensors behind the fused name.
_PLAIN_ENDINGS = {"weight": ("",), "bias": ("_bias",)}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of one linear layer on disk.

    Attributes:
        info: its bytes; of a fused tensor, those of one expert.
        part: the part of those bytes, as rows of outputs; empty for all of them.
        transposed: whether outputs run along the last dimension on disk.
    """

    info: TensorInfo
    layout: TensorLayout
    part: tuple[slice, ...] = ()
    transposed: bool = False

    def tensor(self, raw: torch.Tensor) -> torch.Tensor:
        """The linear layer's tensor, from what was read for `info`."""
        if self.transposed:
            raw = raw.T
        elif raw.dim() > len(self.layout.shape):
            raw = raw.flatten(1)
        return raw[self.part].reshape(self.layout.shape)


def check_source(reader: CheckpointReader, spec: MoEModelSpec) -> None:
    """Raises TypeError unless they are a reader and a model's specification."""
    if not isinstance(reader, CheckpointReader):
        raise TypeError(f"reader is {reader!r}; it must be a CheckpointReader, as CheckpointReader(folder)")
    if not isinstance(spec, MoEModelSpec):
        raise TypeError(f"spec is {spec!r}; it must be a MoEModelSpec, as model_spec(reader.config, reader)")


def layer_quantization(
    quantization: ModelQuantization | None, spec: MoEModelSpec, layer_index: int, reader: CheckpointReader | None = None
) -> LayerQuantization | None:
    """How the experts of one layer are quantized; None where they are plain.

    Args:
        reader: of the files. With it the dtypes, suffixes and shapes of the tensors decide where the config says
            something else of a matrix.

    Raises:
        CheckpointError: experts of one layer, gate and up of one expert, or only some of the matrices quantized alike;
            tensors that belong to no scheme of the config.
    """
    if quantization is None and reader is None:
        return None
    prefix = spec.expert_prefix(layer_index)
    found: dict[str, QuantizationConfig | None] = {}
    for role, name in spec.projections.by_role().items():
        experts: dict[QuantizationConfig | None, int] = {}
        for expert in range(1 if quantization is None else spec.num_experts):
            names = spec.expert_module_names(layer_index, expert, role)
            experts.setdefault(None if quantization is None else quantization.of_module(*names), expert)
        schemes = {
            said if reader is None else _scheme_on_disk(reader, spec, layer_index, expert, role, said): expert
            for said, expert in experts.items()
        }
        if len(schemes) > 1:
            first, different = sorted(schemes.values())[:2]
            raise CheckpointError(
                f"config.json: quantization_config: expected one scheme for all experts of a layer, found another for "
                f"{prefix}.{different}.{name} than for {prefix}.{first}.{name}"
            )
        found[role] = next(iter(schemes))
    w13, w2 = found["gate"], found["down"]
    if found.get("up", w13) != w13 or (w13 is None) != (w2 is None):
        said = {role: "plain" if scheme is None else scheme.quant_method for role, scheme in found.items()}
        if len(set(said.values())) == 1:  # of one method, with other settings
            said = {role: str(scheme) for role, scheme in found.items()}
        raise CheckpointError(
            f"config.json: quantization_config: {prefix}: expected gate and up of one scheme, and down quantized where "
            f"they are; found {', '.join(f'{role} {scheme}' for role, scheme in said.items())}"
        )
    if w13 is None or w2 is None or w13 == w2:
        return w13
    return PerGemm(w13, w2)


def _scheme_on_disk(
    reader: CheckpointReader,
    spec: MoEModelSpec,
    layer_index: int,
    expert: int,
    role: str,
    said: QuantizationConfig | None,
) -> QuantizationConfig | None:
    """The scheme of an expert's matrix by its tensors, given what the config says of it."""
    size = projection_size(role, spec.expert_hidden_size, spec.moe_intermediate_size)
    fused = spec.fused_stem(layer_index, role)
    name, prefix = getattr(spec.projections, role), spec.expert_prefix(layer_index)
    stems = [f"{prefix}.{expert}.{name}.", f"{prefix}.{name}.{expert}."]
    stem = next((each for each in stems if reader.names(each)), None)
    if stem is not None:
        return _scheme_of_tensors(reader, stem, role, size, said)
    return next((scheme for scheme in _schemes(reader, said) if _fits_fused(reader, fused, role, size, scheme)), said)


def _scheme_of_tensors(
    reader: CheckpointReader, stem: str, role: str, size: tuple[int, int], said: QuantizationConfig | None
) -> QuantizationConfig | None:
    """The scheme that the tensors named `stem` + suffix have: the one that the config says if they fit it, or the only
    other one of the config that they fit."""
    if _fits(reader, stem, role, size, said):
        return said
    fitting = [scheme for scheme in _schemes(reader, said)[1:] if _fits(reader, stem, role, size, scheme)]
    if len(fitting) == 1:
        return fitting[0]
    codes = _codes_suffix(linear_layouts(said, role, size))
    if stem + codes not in reader:
        held = ", ".join(
            f"{info.name.removeprefix(stem)} {info.dtype} {info.shape}" for info in map(reader.info, reader.names(stem))
        )
        says = "plain weights" if said is None else f"{said.quant_method}, with {codes}"
        raise CheckpointError(
            f"{reader.index_file}: {stem}*: expected {says} as quantization_config in config.json says, found {held}"
        )
    return said


def _schemes(reader: CheckpointReader, said: QuantizationConfig | None) -> list[QuantizationConfig | None]:
    """The scheme that the config says of a matrix, then plain weights and the config's others, each once."""
    return list(dict.fromkeys([said, None, *([] if reader.quantization is None else reader.quantization.schemes)]))


def _fits(
    reader: CheckpointReader, stem: str, role: str, size: tuple[int, int], scheme: QuantizationConfig | None
) -> bool:
    """Whether all tensors that a scheme needs are there, in its dtypes and shapes."""
    try:
        layouts = linear_layouts(scheme, role, size)
        for suffix, layout in layouts.items():
            names = [stem + each for each in (suffix, *layout.other_names) if stem + each in reader]
            if names:
                if layout.role is not Role.UNUSED:
                    check_tensor(reader.info(names[0]), layout)
            elif layout.default is None and layout.role is not Role.INDEX:
                return False
    except CheckpointError:
        return False
    return True


def _fits_fused(
    reader: CheckpointReader, stem: str, role: str, size: tuple[int, int], scheme: QuantizationConfig | None
) -> bool:
    """Whether the codes of all experts in one are there under a scheme's name, in its dtype."""
    try:
        layouts = linear_layouts(scheme, role, size)
    except CheckpointError:
        return False
    endings = _PLAIN_ENDINGS if scheme is None else scheme.fused_endings or {}
    codes = _codes_suffix(layouts)
    found = [reader.info(stem + ending) for ending in endings.get(codes, ()) if stem + ending in reader]
    return any(info.dtype in layouts[codes].dtypes for info in found)


def _codes_suffix(layouts: Mapping[str, TensorLayout]) -> str:
    return next(suffix for suffix, layout in layouts.items() if layout.role is Role.CODES)


def projection_size(role: str, hidden_size: int, intermediate_size: int) -> tuple[int, int]:
    """`(out_features, in_features)` of gate, up or down."""
    return (hidden_size, intermediate_size) if role == "down" else (intermediate_size, hidden_size)


def linear_layouts(quantization: LayerQuantization | None, role: str, size: tuple[int, int]) -> dict[str, TensorLayout]:
    """The tensors of a linear layer; CheckpointError for a size that the format cannot hold."""
    if quantization is None:
        return plain_tensors(*size)
    try:
        return quantization.of_gemm(GEMM_OF_ROLE[role]).tensors(*size)
    except ValueError as error:
        raise CheckpointError(f"config.json: the {role} projection of an expert: {error}") from None


def check_tensor(info: TensorInfo, layout: TensorLayout) -> None:
    """CheckpointError unless a tensor has the layout's shape, but for dimensions of 1, and one of its dtypes."""
    if _without_ones(info.shape) != _without_ones(layout.shape):
        raise CheckpointError(f"{info.file}: tensor {info.name}: expected shape {layout.shape}, found {info.shape}")
    if info.dtype not in layout.dtypes:
        expected = " or ".join(map(str, layout.dtypes))
        raise CheckpointError(f"{info.file}: tensor {info.name}: expected {expected}, found {info.dtype}")


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def find_linear(
    reader: CheckpointReader, stem: str, layouts: Mapping[str, TensorLayout], beside: str | None = None
) -> dict[str, StoredTensor]:
    """The tensors of a linear layer whose names are `stem` + suffix, by suffix, but for the one named `beside`.

    Raises:
        CheckpointError: one that is missing, that the format does not have, or of another shape or dtype; one by two
            of its names.
    """
    found: dict[str, StoredTensor] = {}
    own_names = {other: suffix for suffix, layout in layouts.items() for other in layout.other_names}
    for name in reader.names(stem):
        if name == beside:
            continue
        suffix, info = name.removeprefix(stem), reader.info(name)
        suffix = own_names.get(suffix, suffix)
        if suffix not in layouts:
            raise _unknown_tensor(info, layouts)
        if suffix in found:
            raise CheckpointError(f"{info.file}: tensor {name}: expected it or {found[suffix].info.name}, found both")
        if layouts[suffix].role is not Role.UNUSED:
            check_tensor(info, layouts[suffix])
        found[suffix] = StoredTensor(info, layouts[suffix])
    for suffix, layout in layouts.items():
        if suffix not in found and layout.default is None:
            raise reader.missing(stem + suffix)
    return found


class ExpertTensors:
    """The tensors of all experts of one layer.

    Raises:
        CheckpointError: more or fewer experts on disk than in the config, fused tensors of a format that has none here,
            or of other shapes than the config says.
    """

    def __init__(
        self, reader: CheckpointReader, spec: MoEModelSpec, layer_index: int, quantization: LayerQuantization | None
    ) -> None:
        self._reader, self._spec, self._layer_index = reader, spec, layer_index
        self.quantization = quantization
        self._prefix = spec.expert_prefix(layer_index)
        self._layouts = {
            role: linear_layouts(
                quantization, role, projection_size(role, spec.expert_hidden_size, spec.moe_intermediate_size)
            )
            for role in spec.projections.by_role()
        }
        self.fused = bool(reader.names(spec.fused_stem(layer_index, "gate")))
        # Model Optimizer takes the fused experts of Qwen3-VL apart in this order.
        self._by_projection = bool(reader.names(f"{self._prefix}.{spec.projections.gate}.0."))
        if self.fused:
            self._find_fused_form()
        else:
            self._check_expert_count()

    @property
    def roles(self) -> tuple[str, ...]:
        """The linear layers of an expert: gate, down, and up where it is gated."""
        return tuple(self._layouts)

    def layouts(self, role: str) -> dict[str, TensorLayout]:
        """The tensors of one linear layer of one expert."""
        return self._layouts[role]

    def scheme(self, role: str) -> QuantizationConfig | None:
        """How a linear layer is quantized; None where it is plain."""
        return None if self.quantization is None else self.quantization.of_gemm(GEMM_OF_ROLE[role])

    def name(self, expert: int, role: str, suffix: str) -> str:
        """The name that a tensor has or would have."""
        if self.fused and suffix in self._endings:
            return self._fused_name(role, suffix)
        projection = getattr(self._spec.projections, role)
        module = f"{projection}.{expert}" if self._by_projection else f"{expert}.{projection}"
        return f"{self._prefix}.{module}.{suffix}"

    def find(self, expert: int, role: str) -> dict[str, StoredTensor]:
        """The tensors that are there, by suffix; CheckpointError for a missing one, or another shape or dtype."""
        if self.fused:
            return {
                suffix: self._row(expert, role, suffix)
                for suffix, layout in self._layouts[role].items()
                if layout.default is None or self.name(expert, role, suffix) in self._reader
            }
        return find_linear(self._reader, self.name(expert, role, ""), self._layouts[role])

    def _check_expert_count(self) -> None:
        prefix = self._prefix + "." + (f"{self._spec.projections.gate}." if self._by_projection else "")
        parts = {name[len(prefix) :].split(".", 1)[0] for name in self._reader.names(prefix)}
        found = {int(part) for part in parts if part.isdecimal()}
        expected = set(range(self._spec.num_experts))
        # Some writers leave matrices for identity experts, which nothing reads.
        found -= set(range(self._spec.num_experts, self._spec.num_router_columns))
        if found != expected:
            first = min(found ^ expected)
            kind = "not in the config" if first in found else "missing"
            raise CheckpointError(
                f"{self._reader.index_file}: {prefix}*: expected {self._spec.num_experts} experts as config.json says, "
                f"found {len(found)}; expert {first} is {kind}"
            )

    def _fused_name(self, role: str, suffix: str) -> str:
        return self._spec.fused_stem(self._layer_index, role) + self._endings[suffix]

    def _find_fused_form(self) -> None:
        """The endings of names, and whether plain matrices lie transposed, which both shapes together always tell."""
        stem, quantization = self._spec.fused_stem(self._layer_index, "gate"), self.quantization
        endings = _PLAIN_ENDINGS if quantization is None else quantization.fused_endings
        if quantization is not None and endings is None:
            raise CheckpointError(
                f"{self._reader.index_file}: {stem}: expected a tensor for each expert, found all in one, which is "
                f"read in plain form, as mxfp4, as fp8, as pack-quantized and as Model Optimizer's nvfp4, not as "
                f"{quantization.quant_method}"
            )
        self._endings = {
            suffix: next((ending for ending in known if stem + ending in self._reader), known[0])
            for suffix, known in (endings or {}).items()
        }
        known = {self._fused_name(role, suffix) for role in self._layouts for suffix in self._endings}
        for name in self._reader.names(self._prefix + "."):
            if name not in known:
                raise _unknown_tensor(self._reader.info(name), dict.fromkeys(sorted(known)))
        self._check_blocks(stem)
        codes = _codes_suffix(self._layouts["gate"])
        sizes = {role: self._rows_and_columns(role, codes) for role in ("gate", "down")}
        shapes = {role: self._reader.info(self._fused_name(role, codes)).shape[1:] for role in sizes}
        self._transposed = shapes != sizes and all(shapes[role] == sizes[role][::-1] for role in sizes)

    def _check_blocks(self, stem: str) -> None:
        """Gate and up have scales of their own only where no block holds rows of both."""
        rows = 1 if self.quantization is None else self.quantization.of_gemm("w13").row_block
        if rows > 1 and not self._spec.fused.up and (self._spec.interleaved or self._spec.moe_intermediate_size % rows):
            raise CheckpointError(
                f"{self._reader.index_file}: {stem}: expected gate rows and then up rows, each a multiple of {rows}, "
                f"the rows of a block of scales; found {self._spec.moe_intermediate_size} of each"
                f"{' in turns' if self._spec.interleaved else ''}"
            )

    def _rows_and_columns(self, role: str, suffix: str) -> tuple[int, ...]:
        """The shape of one expert's part of a fused tensor."""
        rows, *columns = self._layouts[role][suffix].shape
        return (2 * rows if self._is_half(role) else rows, *columns)

    def _row(self, expert: int, role: str, suffix: str) -> StoredTensor:
        info, layout = self._reader.info(self.name(expert, role, suffix)), self._layouts[role][suffix]
        if not _without_ones(layout.shape):
            return self._number(info, expert, role, layout)
        transposed = self._transposed and len(layout.shape) == 2
        shape = self._rows_and_columns(role, suffix)
        expected = (self._spec.num_experts, *(shape[::-1] if transposed else shape))
        # The sixteen bytes of a group of mxfp4 have a dimension of their own.
        found = info.shape if len(info.shape) <= 3 else (*info.shape[:2], math.prod(info.shape[2:]))
        # Identity experts may have rows, which nothing reads.
        if found != expected and found != (self._spec.num_router_columns, *expected[1:]):
            raise CheckpointError(f"{info.file}: tensor {info.name}: expected shape {expected}, found {info.shape}")
        check_tensor(info.row(expert), TensorLayout(layout.dtypes, info.shape[1:]))
        return StoredTensor(info.row(expert), layout, self._rows_of(role, layout.shape[0]), transposed)

    def _number(self, info: TensorInfo, expert: int, role: str, layout: TensorLayout) -> StoredTensor:
        """A single number of one expert's linear layer; gate and up may have one together, and all experts too."""
        if not _without_ones(info.shape):
            check_tensor(info, layout)
            return StoredTensor(info, layout)
        E, of_each = self._spec.num_experts, [2] if self._is_half(role) else []
        rest = _without_ones(info.shape[1:])
        if info.shape[0] != E or rest not in ([], of_each):
            expected = f"{f'({E}, 2, 1) or ' if of_each else ''}({E}, 1, 1) or ()"
            raise CheckpointError(f"{info.file}: tensor {info.name}: expected shape {expected}, found {info.shape}")
        check_tensor(info.row(expert), TensorLayout(layout.dtypes, info.shape[1:]))
        # Transposed scales of one block a matrix are [E, 1, 2].
        return StoredTensor(
            info.row(expert), layout, self._rows_of(role, 1) if rest else (), transposed=info.shape[1:] == (1, 2)
        )

    def _is_half(self, role: str) -> bool:
        """Whether a fused tensor holds gate and up."""
        return role != "down" and "up" in self._layouts and not self._spec.fused.up

    def _rows_of(self, role: str, num_rows: int) -> tuple[slice, ...]:
        if not self._is_half(role):
            return ()
        second = role == "up"
        return (slice(int(second), None, 2),) if self._spec.interleaved else (
            slice(second * num_rows, (second + 1) * num_rows),
        )  # fmt: skip


def _unknown_tensor(info: TensorInfo, known: Mapping[str, object]) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {info.name}: expected only {', '.join(known)} of an expert's projection, as "
        f"quantization_config in config.json says"
    )


@dataclass(frozen=True)
class Slot:
    """One call of `weight_loader`, or a check that a tensor says nothing, where the layer has no parameter for it.

    Attributes:
        param_name: the layer's parameter; empty for a tensor that must equal its layout's default.
        shard_id: w1, w2 or w3.
        expert_id: physical expert; fused shared ones follow the redundant ones.
        stored: how it is taken out of what is read; None for the default.
        part: the part of the tensor that this expert is; empty for all of it.
    """

    param_name: str
    shard_id: str
    expert_id: int
    layout: TensorLayout
    stored: StoredTensor | None
    part: tuple[slice, ...] = ()

    def tensor(self, raw: torch.Tensor) -> torch.Tensor:
        """The tensor that the parameter takes, out of what was read."""
        tensor = raw if self.stored is None else self.stored.tensor(raw)
        return tensor[self.part] if self.part else tensor


@dataclass
class Source:
    """A range of bytes on disk, or what stands for a tensor that was left out, and the slots that take it.

    Attributes:
        name: of the tensor; `name[i]` for an index of its leading dimension.
        info: where it lies; None where it was left out.
    """

    name: str
    info: TensorInfo | None
    slots: list[Slot] = field(default_factory=list)

    def default(self) -> torch.Tensor:
        """The value of a tensor that was left out of the checkpoint."""
        return self.slots[0].layout.default()  # type: ignore[misc]


def plan_layer(
    reader: CheckpointReader,
    spec: MoEModelSpec,
    layer_index: int,
    layer: Any,
    experts: Collection[int] | None = None,
    param_names: Iterable[str] | None = None,
) -> list[Source]:
    """The sources of all experts that this rank holds, each once.

    Args:
        experts: only these of the routed experts, and no shared ones; None for all.
        param_names: the layer's parameters while it is loaded; None for those that it has now.

    Raises:
        CheckpointError: more or fewer experts on disk than in the config, a tensor that is missing, of another shape or
            dtype than the config says, or that the layer has no parameter for.
        ValueError: fused shared experts that cannot be loaded as experts, or experts that do not exist.
        TypeError: experts that are no collection of whole numbers.
    """
    if experts is not None:
        _check_ids(experts, spec.num_experts)
    params = [name for name, _ in layer.named_parameters(recurse=False)] if param_names is None else list(param_names)
    planned, tensors = _PlannedTensors(reader, params), expert_tensors(reader, spec, layer_index)
    projections = spec.projections
    roles = {name: role for role, name in projections.by_role().items()}
    shards: dict[str, tuple[str, str]] = {}
    rows = layer.make_expert_params_mapping(
        projections.gate, projections.down, projections.up, spec.num_experts, layer.num_redundant_experts
    )
    for param_name, weight_name, expert_id, shard_id in rows:
        role, expert = roles[weight_name.removesuffix(".").rsplit(".", 1)[-1]], expert_id % spec.num_experts
        shards[role] = (param_name.removeprefix("experts."), shard_id)
        if layer.is_local_expert(expert_id) and (experts is None or expert in experts):
            stem, found = f"{spec.moe_prefix(layer_index)}.{weight_name}", tensors.find(expert, role)
            planned.add(stem, found, tensors.layouts(role), *shards[role], expert_id)
    if layer.num_fused_shared_experts and experts is None:
        _plan_fused_shared(planned, spec, layer_index, layer, tensors.quantization, shards)
    return list(planned.sources.values())


def _check_ids(experts: Collection[int], num_experts: int) -> None:
    if not isinstance(experts, Collection):
        raise TypeError(f"experts is {experts!r}; it must be a collection of expert ids, as [0, 2], or None for all")
    for expert in experts:
        check_below("num_experts", num_experts, **{"an id in experts": expert})


class _PlannedTensors:
    """The sources of a plan by the names of their tensors, for parameters of the layer."""

    def __init__(self, reader: CheckpointReader, params: list[str]) -> None:
        self.reader, self._params = reader, params
        self.sources: dict[str, Source] = {}

    def add(
        self,
        stem: str,
        found: dict[str, StoredTensor],
        layouts: dict[str, TensorLayout],
        param_prefix: str,
        shard_id: str,
        expert_id: int,
        expert_layouts: dict[str, TensorLayout] | None = None,
        index: int = 0,
    ) -> None:
        """One linear layer of one physical expert.

        Args:
            found: its tensors on disk by suffix.
            expert_layouts: of the expert's part of them, where several experts share the tensors.
            index: of the expert among those.
        """
        wanted = {name.removeprefix(param_prefix) for name in self._params if name.startswith(param_prefix)}
        for suffix in sorted(wanted | layouts.keys()):
            stored, layout = found.get(suffix), layouts.get(suffix)
            if layout is None:
                raise CheckpointError(
                    f"{self.reader.missing(stem + suffix)}; the layer is for other experts: make it with "
                    f"moe_ep.checkpoint.layer_options"
                )
            if layout.role is Role.UNUSED or (stored is None and suffix not in wanted):
                continue
            key = stem + suffix if stored is None else stored.info.name
            source = self.sources.setdefault(key, Source(key, None if stored is None else stored.info))
            part = _part(layout.shape, (expert_layouts or layouts)[suffix].shape, index)
            param_name = param_prefix + suffix if suffix in wanted else ""
            source.slots.append(Slot(param_name, shard_id, expert_id, layout, stored, part))


def _plan_fused_shared(
    planned: _PlannedTensors,
    spec: MoEModelSpec,
    layer_index: int,
    layer: Any,
    quantization: LayerQuantization | None,
    shards: dict[str, tuple[str, str]],
) -> None:
    """Shared experts that the layer computes as experts of its own, behind the routed ones."""
    shared, count = spec.shared_experts, layer.num_fused_shared_experts
    way_out = "make the layer without n_shared_experts and use load_shared_experts"
    found = "none"
    if shared is not None:
        forms = {
            " with a gate": shared.has_gate,
            " whose gate and up are one": shared.fused,
            f" times {shared.factor:g}": shared.factor != 1,
            " of another width": spec.latent is not None,
            " of another activation": spec.shared_gate(layer_index) != spec.gate(layer_index),
        }
        form = next((words for words, has in forms.items() if has), "")
        found = f"{shared.num_experts}{form}"
    if shared is None or found != str(count):
        raise ValueError(f"n_shared_experts is {count} and a {spec.family} layer has {found} to fuse; {way_out}")
    if quantization is not None and count > 1:
        raise ValueError(f"n_shared_experts is {count}; quantized shared experts on disk are not divided: {way_out}")
    for index in range(count):
        for role, name in spec.shared_projections().by_role().items():
            stem = f"{spec.shared_experts_prefix(layer_index)}.{name}."
            layouts, of_expert = (
                linear_layouts(quantization, role, projection_size(role, spec.hidden_size, size))
                for size in (shared.intermediate_size, shared.intermediate_size // count)
            )
            expert_id = spec.num_experts + layer.num_redundant_experts + index
            stored = find_linear(planned.reader, stem, layouts)
            planned.add(stem, stored, layouts, *shards[role], expert_id, of_expert, index)


def _part(whole: tuple[int, ...], expert: tuple[int, ...], index: int) -> tuple[slice, ...]:
    """The expert's part of a tensor that holds several side by side."""
    if whole == expert:
        return ()
    return tuple(
        slice(None) if total == size else slice(index * size, (index + 1) * size)
        for total, size in zip(whole, expert, strict=True)
    )


def check_experts(reader: CheckpointReader, spec: MoEModelSpec) -> None:
    """Finds every tensor of every expert of a checkpoint in the files' headers; no data is read.

    Raises:
        CheckpointError: a tensor that is missing, or of another shape or dtype than the config says; a quantization or
            a form of experts that is not read.
        TypeError: no reader, or no specification.
    """
    check_source(reader, spec)
    for layer in spec.moe_layers:
        tensors = expert_tensors(reader, spec, layer)
        experts = range(spec.num_experts)
        indices = [{role: _index_suffixes(tensors.find(expert, role)) for role in tensors.roles} for expert in experts]
        of_any = {role: set().union(*(own[role] for own in indices)) for role in tensors.roles}
        for expert, own in zip(experts, indices, strict=True):
            # An expert that calibration never reached has no groups of columns, in none of its matrices.
            for role in tensors.roles if any(own.values()) else ():
                if lost := of_any[role] - own[role]:
                    raise reader.missing(tensors.name(expert, role, min(lost)))


def _index_suffixes(found: dict[str, StoredTensor]) -> set[str]:
    return {suffix for suffix, stored in found.items() if stored.layout.role is Role.INDEX}


def find_module(
    reader: CheckpointReader, module: str, size: tuple[int, int], beside: str | None = None
) -> tuple[QuantizationConfig | None, dict[str, StoredTensor]]:
    """How the linear layer of that name is quantized, and its tensors by the last part of their names; no data is read.

    Raises:
        CheckpointError: as `read_linear`.
    """
    stem, quantization = module + ".", reader.quantization
    scheme = None if quantization is None else quantization.of_module(module)
    if quantization is not None and beside is None and reader.names(stem):
        scheme = _scheme_of_tensors(reader, stem, "gate", size, scheme)
    elif stem + "weight" in reader and reader.info(stem + "weight").dtype in FLOATS:
        scheme = None
    return scheme, find_linear(reader, stem, linear_layouts(scheme, "gate", size), beside)


def expert_tensors(reader: CheckpointReader, spec: MoEModelSpec, layer_index: int) -> ExpertTensors:
    """Where the experts of one layer lie, in the format that config.json says; CheckpointError where they do not."""
    quantization = layer_quantization(reader.quantization, spec, layer_index, reader)
    return ExpertTensors(reader, spec, layer_index, quantization)

"""Where the tensors of one layer's experts lie: a tensor for each linear layer, or rows of tensors of all experts.

    per expert   prefix.3.gate_proj.weight [N, K], ...up_proj..., ...down_proj... [K, N]; or prefix.gate_proj.3.weight
    fused        prefix.gate_up_proj [E, 2N, K], prefix.down_proj [E, K, N]; or both with their last dimensions swapped;
                     or gate and up apart, each [E, N, K], here and below
                 prefix.gate_up_proj_blocks u8 [E, 2N, K / 32, 16], ..._scales u8 [E, 2N, K / 32], down_proj_... alike
                 prefix.gate_up_proj_scale_inv [E, 2N / 128, K / 128] beside e4m3, swapped where that is;
                     or [E, 2, 1] or [E, 1, 1]: a number of gate and one of up, or one of both; or [] for all experts
                 prefix.gate_up_proj u8 [E, 2N, K / 2], ..._weight_scale e4m3 [E, 2N, K / 16], ..._weight_scale_2, such
                     a number; the first two swapped as plain ones are
                 prefix.gate_up_proj_packed int32 [E, 2N, K b / 32], ..._scale [E, 2N, K / g]
                 prefix.gate_up_proj_bias [E, 2N], prefix.down_proj_bias [E, K]

Everything is checked against the files' headers; no data is read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moe_ep.checkpoint.formats import LayerQuantization, ModelQuantization, PerGemm, QuantizationConfig
from moe_ep.checkpoint.formats.layout import Role, TensorLayout, plain_tensors
from moe_ep.checkpoint.reader import CheckpointReader, TensorInfo
from moe_ep.checkpoint.spec import MoEModelSpec
from moe_ep.errors import CheckpointError

GEMM_OF_ROLE = {"gate": "w13", "up": "w13", "down": "w2"}
# What a linear layer's tensor is called behind the fused name.
_PLAIN_ENDINGS = {"weight": ("",), "bias": ("_bias",)}


@dataclass(frozen=True)
class Stored:
    """A tensor of one linear layer on disk.

    Attributes:
        info: its bytes; of a fused tensor, those of one expert.
        layout: what it is.
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


def layer_quantization(
    quantization: ModelQuantization | None, spec: MoEModelSpec, layer_index: int
) -> LayerQuantization | None:
    """How the experts of one layer are quantized; None where they are plain.

    Raises:
        CheckpointError: experts of one layer, gate and up of one expert, or only some of the matrices quantized alike.
    """
    if quantization is None:
        return None
    prefix = spec.expert_prefix(layer_index)
    found: dict[str, QuantizationConfig | None] = {}
    for role, name in spec.projections.by_role().items():
        schemes = {expert: quantization.of_module(f"{prefix}.{expert}.{name}") for expert in range(spec.num_experts)}
        different = next((expert for expert, scheme in schemes.items() if scheme != schemes[0]), None)
        if different is not None:
            raise CheckpointError(
                f"config.json: quantization_config: expected one scheme for all experts of a layer, found another for "
                f"{prefix}.{different}.{name} than for {prefix}.0.{name}"
            )
        found[role] = schemes[0]
    w13, w2 = found["gate"], found["down"]
    if found.get("up", w13) != w13 or (w13 is None) != (w2 is None):
        names = {role: "plain" if scheme is None else scheme.quant_method for role, scheme in found.items()}
        if len(set(names.values())) == 1:  # of one method, with other settings
            names = {role: str(scheme) for role, scheme in found.items()}
        raise CheckpointError(
            f"config.json: quantization_config: {prefix}: expected gate and up of one scheme, and down quantized where "
            f"they are; found {', '.join(f'{role} {name}' for role, name in names.items())}"
        )
    if w13 is None or w2 is None or w13 == w2:
        return w13
    return PerGemm(w13, w2)


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
) -> dict[str, Stored]:
    """The tensors of a linear layer whose names are `stem` + suffix, by suffix, but for the one named `beside`.

    Raises:
        CheckpointError: one that the format does not have, or of another shape or dtype; one by two of its names.
    """
    found: dict[str, Stored] = {}
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
        found[suffix] = Stored(info, layouts[suffix])
    return found


class ExpertTensors:
    """The tensors of all experts of one layer.

    Args:
        quantization: of the layer's experts.

    Raises:
        CheckpointError: more or fewer experts on disk than in the config, fused tensors of a format that has none here,
            or of other shapes than the config says.
    """

    def __init__(
        self, reader: CheckpointReader, spec: MoEModelSpec, layer_index: int, quantization: LayerQuantization | None
    ) -> None:
        self._reader, self._spec, self._layer_index = reader, spec, layer_index
        self._quantization = quantization
        self._prefix = spec.expert_prefix(layer_index)
        self._layouts = {
            role: linear_layouts(
                quantization, role, projection_size(role, spec.expert_hidden_size, spec.moe_intermediate_size)
            )
            for role in spec.projections.by_role()
        }
        self.fused = bool(reader.names(self._fused_stem("gate")))
        # Model Optimizer takes the fused experts of Qwen3-VL apart in this order.
        self._by_projection = bool(reader.names(f"{self._prefix}.{spec.projections.gate}.0."))
        if self.fused:
            self._endings, self._transposed = self._fused_form()
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
        return None if self._quantization is None else self._quantization.of_gemm(GEMM_OF_ROLE[role])

    def name(self, expert: int, role: str, suffix: str) -> str:
        """What a tensor is or would be called."""
        if self.fused and suffix in self._endings:
            return self._fused_name(role, suffix)
        projection = getattr(self._spec.projections, role)
        module = f"{projection}.{expert}" if self._by_projection else f"{expert}.{projection}"
        return f"{self._prefix}.{module}.{suffix}"

    def find(self, expert: int, role: str) -> dict[str, Stored]:
        """The tensors that are there, by suffix; CheckpointError for one of another shape or dtype."""
        if self.fused:
            return {
                suffix: self._row(expert, role, suffix)
                for suffix in self._endings
                if self._fused_name(role, suffix) in self._reader
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
        return self._fused_stem(role) + self._endings[suffix]

    def _fused_stem(self, role: str) -> str:
        names = self._spec.fused.by_role()
        return f"{self._spec.moe_prefix(self._layer_index)}.{names.get(role, names['gate'])}"

    def _fused_form(self) -> tuple[Mapping[str, str], bool]:
        """The endings of names, and whether plain matrices lie transposed, which both shapes together always tell."""
        stem, quantization = self._fused_stem("gate"), self._quantization
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
        self._check_blocks()
        codes = next(suffix for suffix, layout in self._layouts["gate"].items() if layout.role is Role.CODES)
        sizes = {role: self._rows_and_columns(role, codes) for role in ("gate", "down")}
        shapes = {role: self._reader.info(self._fused_name(role, codes)).shape[1:] for role in sizes}
        return self._endings, shapes != sizes and all(shapes[role] == sizes[role][::-1] for role in sizes)

    def _check_blocks(self) -> None:
        """Gate and up have scales of their own only where no block holds rows of both."""
        rows = 1 if self._quantization is None else self._quantization.of_gemm("w13").row_block
        if rows > 1 and not self._spec.fused.up and (self._spec.interleaved or self._spec.moe_intermediate_size % rows):
            raise CheckpointError(
                f"{self._reader.index_file}: {self._fused_stem('gate')}: expected gate rows and then up rows, each a "
                f"multiple of {rows}, the rows of a block of scales; found {self._spec.moe_intermediate_size} of each"
                f"{' in turns' if self._spec.interleaved else ''}"
            )

    def _rows_and_columns(self, role: str, suffix: str) -> tuple[int, ...]:
        """The shape of one expert's part of a fused tensor."""
        rows, *columns = self._layouts[role][suffix].shape
        return (2 * rows if self._is_half(role) else rows, *columns)

    def _row(self, expert: int, role: str, suffix: str) -> Stored:
        info, layout = self._reader.info(self._fused_name(role, suffix)), self._layouts[role][suffix]
        if not _without_ones(layout.shape):
            return self._number(info, expert, role, layout)
        transposed = self._transposed and len(layout.shape) == 2
        shape = self._rows_and_columns(role, suffix)
        expected = (self._spec.num_experts, *(shape[::-1] if transposed else shape))
        # The sixteen bytes of a group of mxfp4 have a dimension of their own.
        found = info.shape if len(info.shape) <= 3 else (*info.shape[:2], math.prod(info.shape[2:]))
        if found != expected:
            raise CheckpointError(f"{info.file}: tensor {info.name}: expected shape {expected}, found {info.shape}")
        check_tensor(info.row(expert), TensorLayout(layout.dtypes, info.shape[1:]))
        return Stored(info.row(expert), layout, self._rows_of(role, layout.shape[0]), transposed)

    def _number(self, info: TensorInfo, expert: int, role: str, layout: TensorLayout) -> Stored:
        """A single number of one expert's linear layer; gate and up may have one together, and all experts too."""
        if not _without_ones(info.shape):
            check_tensor(info, layout)
            return Stored(info, layout)
        E, of_each = self._spec.num_experts, [2] if self._is_half(role) else []
        rest = _without_ones(info.shape[1:])
        if info.shape[0] != E or rest not in ([], of_each):
            expected = f"{f'({E}, 2, 1) or ' if of_each else ''}({E}, 1, 1) or ()"
            raise CheckpointError(f"{info.file}: tensor {info.name}: expected shape {expected}, found {info.shape}")
        check_tensor(info.row(expert), TensorLayout(layout.dtypes, info.shape[1:]))
        return Stored(info.row(expert), layout, self._rows_of(role, 1) if rest else ())

    def _is_half(self, role: str) -> bool:
        """Whether a fused tensor holds gate and up."""
        return role != "down" and not self._spec.fused.up

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

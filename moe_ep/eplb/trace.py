"""Routing traces: which experts the tokens of a run chose.

A trace is read from a file of recorded routing (`moe_ep.rollouts.routing_file`), or from an .npz file of the arrays ids
`[N, top_k]`, layer, step and rank `[N]`, and the scalars num_experts and model; a row is one token in one layer. Ids
are logical, so a trace says nothing about placement and serves to try any.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_ep.eplb.policy.maps import Array
from moe_ep.errors import check_at_least
from moe_ep.files import replacing
from moe_ep.rollouts.routing_file import RoutingFile, is_routing_file

_ROWS = ("layer", "step", "rank")
_NAMES = ("ids", *_ROWS, "num_experts", "model")


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingTrace:
    """Choices of experts, a row for each token and layer, in any order.

    Attributes:
        ids: integer `[N, top_k]`, logical experts, -1 for none.
        layer, step: integer `[N]`, the position among the MoE layers, and the step, from 0.
        rank: integer `[N]`, the EP rank that had the token.
        model: what the model calls itself; a trace is of use for that model only.

    Raises ValueError or TypeError for arrays that do not fit together.
    """

    ids: Array
    layer: Array
    step: Array
    rank: Array
    num_experts: int
    model: str

    def __post_init__(self) -> None:
        check_at_least(1, num_experts=self.num_experts)
        for name in ("ids", *_ROWS):
            found = getattr(self, name)
            if not isinstance(found, np.ndarray):
                raise ValueError(f"{name} is a {type(found).__name__}; it must be an array of numpy")
            shape = self.ids.shape if name == "ids" else self.ids.shape[:1]
            if found.ndim != (2 if name == "ids" else 1) or found.shape != shape:
                raise ValueError(f"{name} has shape {found.shape}; ids must be (N, top_k) and the others (N,)")
            if not np.issubdtype(found.dtype, np.integer):
                raise ValueError(f"{name} has dtype {found.dtype}; it must hold integers")
        for name, low, high in (("ids", -1, self.num_experts), *((name, 0, None) for name in _ROWS)):
            found = getattr(self, name)
            if found.size and (found.min() < low or (high is not None and found.max() >= high)):
                limit = "" if high is None else f" and below num_experts ({high})"
                raise ValueError(
                    f"{name} holds {found.min()} to {found.max()}; its numbers must be at least {low}{limit}"
                )
            if found.dtype.kind == "u":  # with -1, or beside signed numbers, they overflow or become floats
                object.__setattr__(self, name, found.astype(np.int64))

    @property
    def num_layers(self) -> int:
        return int(self.layer.max(initial=-1)) + 1

    @property
    def num_steps(self) -> int:
        return int(self.step.max(initial=-1)) + 1

    def check_model(self, model: str, num_experts: int, num_layers: int) -> None:
        """Raises ValueError unless this trace is of that model."""
        if (self.model, self.num_experts) != (model, num_experts):
            raise ValueError(
                f"the routing trace is of {self.model!r} with {self.num_experts} experts and the model is {model!r} "
                f"with {num_experts}; record a trace of this model"
            )
        if self.num_layers != num_layers:
            raise ValueError(
                f"the routing trace has {self.num_layers} layers and the model {num_layers}; record a trace of it whole"
            )

    def counts(self) -> Array:
        """Tokens of each logical expert, over all ranks, int64 `[S, L, E]`."""
        shape = (self.num_steps, self.num_layers, self.num_experts)
        row = self.step.astype(np.int64) * shape[1] + self.layer
        chosen = self.ids >= 0
        flat = (row[:, None] * self.num_experts + self.ids)[chosen]
        return np.bincount(flat, minlength=shape[0] * shape[1] * shape[2]).reshape(shape)

    def save(self, path: Path | str) -> None:
        """Writes an .npz file; one that is there is replaced whole or not at all."""
        kind = np.int16 if self.num_experts <= np.iinfo(np.int16).max else np.int32
        with replacing(path) as partial, partial.open("wb") as file:
            np.savez_compressed(
                file,
                ids=self.ids.astype(kind),
                num_experts=np.int64(self.num_experts),
                model=np.str_(self.model),
                **{name: getattr(self, name).astype(np.int32) for name in _ROWS},
            )

    @classmethod
    def load(cls, path: Path | str) -> RoutingTrace:
        """Reads a file of `save`, or one of recorded prompts, each of which is a step of rank 0.

        Raises ValueError where it is neither, and FileNotFoundError.
        """
        if is_routing_file(path):
            return cls.of(RoutingFile.load(path))
        arrays = read_arrays(path)
        missing = [name for name in _NAMES if name not in arrays]
        if missing:
            raise ValueError(
                f"{path} is not a routing trace: it lacks {', '.join(missing)}; record one with moe-ep run"
            )
        try:
            return cls(
                **{name: arrays[name] for name in ("ids", *_ROWS)},
                num_experts=int(arrays["num_experts"]),
                model=str(arrays["model"]),
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a routing trace: {error}") from None

    @classmethod
    def of(cls, file: RoutingFile) -> RoutingTrace:
        """The same choices, without those of identity experts, which no rank computes."""
        num_ranks = file.num_ranks or 1
        shapes = [ids.shape for ids in file.ids.values()]
        sizes = [tokens * layers for tokens, layers, _ in shapes]
        prompts = np.repeat(np.array(list(file.ids), dtype=np.int32), sizes)
        num_experts = file.num_experts - file.num_identities
        ids = np.concatenate([ids.reshape(-1, ids.shape[-1]) for ids in file.ids.values()]).astype(np.int32)
        return cls(
            ids=np.where(ids < num_experts, ids, -1),
            layer=np.concatenate([np.tile(np.arange(layers, dtype=np.int32), tokens) for tokens, layers, _ in shapes]),
            step=prompts // num_ranks,
            rank=prompts % num_ranks,
            num_experts=num_experts,
            model=file.model,
        )


def is_trace(path: Path | str) -> bool:
    """Whether a file says of each token in which step and on which rank it was, as those of `moe-ep run` do."""
    if is_routing_file(path):
        return RoutingFile.load(path).num_ranks is not None
    return "ids" in read_arrays(path)


def model_name(family: str, checksum: str) -> str:
    """A model's name in its traces: its family, and the beginning of `placement_file.model_checksum`."""
    return f"{family} {checksum[:12]}"


def from_choices(choices: Array, tokens_per_step: int, num_ranks: int, *, num_experts: int, model: str) -> RoutingTrace:
    """A trace of recorded choices `[L, T, top_k]`, cut into steps, each step's tokens dealt to the ranks in order.

    Tokens behind the last whole step are left out. Raises ValueError or TypeError for what does not fit together.
    """
    check_at_least(1, tokens_per_step=tokens_per_step, num_ranks=num_ranks)
    if not isinstance(choices, np.ndarray) or choices.ndim != 3:
        held = f" {list(choices.shape)}" if isinstance(choices, np.ndarray) else ""
        raise ValueError(f"choices is a {type(choices).__name__}{held}; it must be an array [layer, token, top_k]")
    num_layers, num_tokens, top_k = choices.shape
    num_steps = num_tokens // tokens_per_step
    if num_steps == 0 or tokens_per_step % num_ranks:
        raise ValueError(
            f"tokens_per_step is {tokens_per_step}; it must be a multiple of the {num_ranks} ranks and at most the "
            f"{num_tokens} recorded tokens"
        )
    used = num_steps * tokens_per_step
    token = np.arange(used)
    ids, kind = choices[:, :used].reshape(-1, top_k), np.iinfo(np.int32)
    # Others are refused as they are: cast, they would be other experts.
    if np.issubdtype(ids.dtype, np.integer) and kind.min <= ids.min(initial=0) <= ids.max(initial=0) <= kind.max:
        ids = ids.astype(np.int32)
    return RoutingTrace(
        ids=ids,
        layer=np.repeat(np.arange(num_layers, dtype=np.int32), used),
        step=np.tile(token // tokens_per_step, num_layers),
        rank=np.tile(token % tokens_per_step // (tokens_per_step // num_ranks), num_layers),
        num_experts=num_experts,
        model=model,
    )


def plain_choices(arrays: dict[str, Array], path: Path) -> Array:
    """`[layer, token, top_k]`: the choices in arrays of a file that is no trace, one array after the other.

    Raises ValueError, with file and array, where they hold no choices.
    """
    found = {name: array for name, array in arrays.items() if array.ndim == 3}
    if not found:
        raise ValueError(f"{path} has no array of choices [layer, token, top_k]; give a file of recorded routing")
    for name, array in found.items():
        if not np.issubdtype(array.dtype, np.integer) or not array.size or array.min() < -1:
            raise ValueError(
                f"array {name!r} of {path}, {array.dtype} {list(array.shape)}, holds no choices; give integers "
                f"[layer, token, top_k] from -1, for none, on"
            )
    if len({(array.shape[0], array.shape[2]) for array in found.values()}) > 1:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in found.items())
        raise ValueError(f"the arrays of {path} differ in layers or top-k ({shapes}); give a file of one model")
    return np.concatenate(list(found.values()), axis=1)


def read_arrays(path: Path | str) -> dict[str, Array]:
    """All arrays of an .npz file, nothing unpickled, or the choices `[layer, token, top_k]` of each prompt of a file of
    recorded routing; ValueError where it is neither."""
    if is_routing_file(path):
        return {str(index): ids.swapaxes(0, 1) for index, ids in RoutingFile.load(path).ids.items() if ids.size}
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (FileNotFoundError, PermissionError):
        raise
    # zipfile raises RuntimeError and OSError too, for damage that reads as encryption or offsets.
    except (ValueError, TypeError, RuntimeError, OSError, zipfile.BadZipFile, zlib.error, EOFError):
        raise ValueError(f"{path} cannot be read as an .npz file of plain numbers: it is none, or damaged") from None

"""Files of recorded routing: safetensors with one tensor a prompt, of `moe-ep generate` and of `moe-ep run` alike.

Tensor "7" holds the choices of prompt 7, `[tokens, layers, top_k]`: a row for every token that was fed to the model,
logical ids in the order of the router. It is uint8 with 255 for "no expert" where all ids are below 255, and otherwise
int16 with -1. Tensor "7.weights", where there is one, holds the router's weights f32 of the same shape. The header's
metadata says:

    format       "moe_ep routed experts 1"
    num_experts  ids that a router can choose, identity experts included
    num_identities  how many of these, the last ones, are identity experts
    model        what the model is called
    num_ranks    in a file of `moe-ep run` only: prompt step * num_ranks + rank holds the tokens of a rank in a step
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from moe_ep.errors import check_flags
from moe_ep.files import replacing

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]
_FORMAT = "moe_ep routed experts 1"
_NONE = 255
_WEIGHTS = ".weights"
# As many experts as int16 ids can name.
_MOST_EXPERTS = 1 << 15


@dataclass(frozen=True, kw_only=True)
class RoutingFile:
    """The content of a file of recorded routing.

    Attributes:
        ids: int16 `[tokens, layers, top_k]` by prompt, -1 for no expert.
        weights: f32 of the same shapes; empty where they were not recorded.
        num_experts: ids that a router can choose, identity experts included.
        num_identities: how many of these, the last ones, are identity experts.
        model: what the model is called.
        num_ranks: of a run, whose prompt step * num_ranks + rank holds a rank's tokens of a step; None for prompts.
    """

    ids: Mapping[int, Array]
    weights: Mapping[int, Array]
    num_experts: int
    model: str
    num_identities: int = 0
    num_ranks: int | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file; one that is there is replaced whole or not at all."""
        from safetensors.numpy import save

        tensors = {str(index): _stored(ids) for index, ids in self.ids.items()}
        tensors |= {
            f"{index}{_WEIGHTS}": np.ascontiguousarray(weights, np.float32) for index, weights in self.weights.items()
        }
        numbers = {"num_experts": str(self.num_experts), "num_identities": str(self.num_identities)}
        metadata = {"format": _FORMAT, **numbers, "model": self.model}
        if self.num_ranks is not None:
            metadata["num_ranks"] = str(self.num_ranks)
        content = save(tensors, metadata)
        with replacing(path) as partial:
            partial.write_bytes(content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RoutingFile:
        """Reads a file of `save`.

        Raises:
            ValueError: it is none, or damaged, or the trace in an .npz file that `moe_ep.eplb.trace` reads.
            FileNotFoundError: there is none.
        """
        from safetensors import SafetensorError, safe_open

        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path} is no file; give one of recorded routing")
        if _is_trace(path):
            raise ValueError(
                f"{path} is a routing trace for moe-ep eplb, which moe-ep run records under a name that ends in .npz; "
                f"record one under another name, such as routing.safetensors, to read it here"
            )
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"its format is {metadata.get('format')!r} and must be {_FORMAT!r}")
            num_experts = _count(metadata, "num_experts", 1, _MOST_EXPERTS)
            num_identities = _count(metadata, "num_identities", 0, num_experts) if "num_identities" in metadata else 0
            ids, weights = {}, {}
            for name, each in tensors.items():
                if name.endswith(_WEIGHTS):
                    weights[_prompt(name.removesuffix(_WEIGHTS))] = _loaded_weights(name, each)
                else:
                    ids[_prompt(name)] = _loaded(name, each, num_experts)
            if any(index not in ids or ids[index].shape != each.shape for index, each in weights.items()):
                raise ValueError("it has weights of other shapes than the choices")
            if len({each.shape[1:] for each in ids.values()}) > 1:
                raise ValueError("its prompts differ in layers or top_k")
            return cls(
                ids=dict(sorted(ids.items())),
                weights=dict(sorted(weights.items())),
                num_experts=num_experts,
                model=metadata["model"],
                num_identities=num_identities,
                num_ranks=_count(metadata, "num_ranks", 1) if "num_ranks" in metadata else None,
            )
        except KeyError as error:
            raise ValueError(
                f"{path} is no file of recorded routing: it has no {error}; record one with moe-ep"
            ) from None
        except (SafetensorError, ValueError, TypeError) as error:
            raise ValueError(f"{path} is no file of recorded routing: {error}; record one with moe-ep") from None


def _stored(ids: Array) -> Array:
    if ids.max(initial=-1) < _NONE:
        return np.ascontiguousarray(np.where(ids < 0, _NONE, ids), np.uint8)
    return np.ascontiguousarray(ids, np.int16)


def _loaded(name: str, stored: Array, num_experts: int) -> Array:
    if stored.ndim != 3 or stored.dtype not in (np.uint8, np.int16):
        raise ValueError(f"tensor {name} is {stored.dtype} {list(stored.shape)} and no choices")
    ids = stored.astype(np.int16)
    if stored.dtype == np.uint8:
        ids = np.where(ids == _NONE, np.int16(-1), ids)
    if ids.size and not -1 <= ids.min() <= ids.max() < num_experts:
        raise ValueError(
            f"tensor {name} has ids from {ids.min()} to {ids.max()}, which must be at least -1 and below num_experts "
            f"({num_experts})"
        )
    return ids


def _loaded_weights(name: str, stored: Array) -> Array:
    if stored.dtype != np.float32:
        raise ValueError(f"tensor {name} is {stored.dtype} and weights are float32")
    return stored


def _prompt(name: str) -> int:
    """The prompt of a tensor's name; two names cannot mean the same one."""
    if not name.isdecimal() or str(int(name)) != name:
        raise ValueError(f"tensor {name!r} is not named by a prompt, 0, 1, 2, ...")
    return int(name)


def _count(metadata: Mapping[str, str], key: str, least: int, most: int | None = None) -> int:
    text = metadata[key]
    number = int(text) if text.isdecimal() else -1
    if number < least or (most is not None and number > most):
        up_to = "" if most is None else f" and at most {most}"
        raise ValueError(f"{key} is {text!r}, which must be a whole number of at least {least}{up_to}")
    return number


@overload
def read_routed_experts(
    path: str | os.PathLike[str], with_weights: Literal[False] = False
) -> dict[int, torch.Tensor]: ...
@overload
def read_routed_experts(
    path: str | os.PathLike[str], with_weights: Literal[True]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]: ...
def read_routed_experts(path: str | os.PathLike[str], with_weights: bool = False) -> dict[int, Any]:
    """The routing that `moe-ep generate --return-routed-experts` or `moe-ep run --record-routing` wrote.

    Args:
        path: of the file.
        with_weights: read the router's weights too.

    Returns:
        By prompt index int16 `[tokens, layers, top_k]`, -1 for no expert, with a row for every token that was fed to
        the model; with_weights gives (ids, f32 weights of the same shape). A run's prompt step * ranks + rank holds the
        tokens of a rank in a step.

    Raises:
        ValueError: another file, a damaged one, or one without the weights that are asked for.
        FileNotFoundError: there is none.
        TypeError: with_weights is neither True nor False.
    """
    import torch

    check_flags(with_weights=with_weights)
    file = RoutingFile.load(path)
    if not with_weights:
        return {index: torch.from_numpy(ids) for index, ids in file.ids.items()}
    if missing := [index for index in file.ids if index not in file.weights]:
        raise ValueError(
            f"{path} has no weights of prompt {missing[0]}; record them too (--return-routed-weights of generate, "
            f"--record-routed-weights of run)"
        )
    return {index: (torch.from_numpy(ids), torch.from_numpy(file.weights[index])) for index, ids in file.ids.items()}


def _is_trace(path: str | os.PathLike[str]) -> bool:
    """Whether a file is an .npz of the arrays of a trace (`moe_ep.eplb.trace`)."""
    try:
        with zipfile.ZipFile(path) as file:
            return {"ids.npy", "layer.npy"} <= set(file.namelist())
    except (zipfile.BadZipFile, RuntimeError, ValueError):
        return False


def is_routing_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as safetensors do: the length of the header, and a JSON object."""
    with Path(path).open("rb") as file:
        return file.read(9)[8:] == b"{"

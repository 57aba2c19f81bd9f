"""A placement as a JSON file, with checksums, so that a plan made elsewhere or earlier can be used at the start.

{"format": "moe_ep expert placement", "version": 1, "model": "<checksum>", "ep_size": R, "num_experts": E,
 "physical_to_logical": [[...], ...], "checksum": "<sha256 of all the rest>"}
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_ep.eplb.policy.maps import Array, check_placement
from moe_ep.errors import EplbError, check_at_least, check_whole
from moe_ep.files import parse_json, write_text

if TYPE_CHECKING:
    from moe_ep.checkpoint.reader import CheckpointReader

_FORMAT = "moe_ep expert placement"
_VERSION = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementFile:
    """The content of a placement file.

    Attributes:
        model: a checksum that says which model the placement is for (`model_checksum`).
        physical_to_logical: int64 `[L, P]`.

    Raises:
        ValueError: what is not a placement, or not one over so many ranks.
        TypeError: a model that is no text, or a number that is not whole.
    """

    model: str
    ep_size: int
    num_experts: int
    physical_to_logical: Array

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise TypeError(f"model is {self.model!r}; it must be a checksum, as model_checksum gives it")
        check_at_least(1, ep_size=self.ep_size)
        check_whole(num_experts=self.num_experts)
        try:
            slots = np.asarray(self.physical_to_logical)
        except (ValueError, OverflowError):  # layers of different lengths, or numbers beyond all integers
            slots = np.asarray(None)
        if slots.ndim != 2 or not np.issubdtype(slots.dtype, np.integer):
            raise ValueError("physical_to_logical must be a list of whole numbers for each layer, as many in all")
        if not 0 < self.num_experts <= slots.shape[1]:
            raise ValueError(
                f"num_experts is {self.num_experts}; it must be from 1 to the {slots.shape[1]} slots of a layer"
            )
        check_placement(slots, slots.shape, int(self.num_experts), "physical_to_logical")
        if slots.shape[1] % self.ep_size:
            raise ValueError(f"ep_size is {self.ep_size}; it must divide the {slots.shape[1]} slots of a layer")
        object.__setattr__(self, "physical_to_logical", slots.astype(np.int64))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file; one that is there is replaced whole or not at all."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self.model,
            "ep_size": int(self.ep_size),  # a number of numpy is none to JSON
            "num_experts": int(self.num_experts),
            "physical_to_logical": self.physical_to_logical.tolist(),
        }
        write_text(path, json.dumps(content | {"checksum": content_checksum(content)}) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PlacementFile:
        """Reads a file.

        Raises:
            EplbError: it cannot be read, is no such file, or is not what was written.
        """
        try:
            content = parse_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise EplbError(f"the placement {path} cannot be read: {error}") from None
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (_FORMAT, _VERSION):
            raise EplbError(f"{path} is not a placement of version {_VERSION}; save one with --save-placement")
        if content.pop("checksum", None) != content_checksum(content):
            raise EplbError(f"the placement {path} was changed or cut off after it was written; save it again")
        try:
            for name, kind in (("model", str), ("ep_size", int), ("num_experts", int)):
                if type(content[name]) is not kind:
                    raise ValueError(f"{name} is {content[name]!r}; it must be of type {kind.__name__}")
            return cls(**{field.name: content[field.name] for field in fields(cls)})
        except (KeyError, ValueError) as error:
            raise EplbError(f"the placement {path} does not hold one: {error}") from None

    def check(self, path: str | os.PathLike[str], *, model: str, ep_size: int, shape: tuple[int, int]) -> None:
        """Raises EplbError unless it is for this model over so many ranks, with `shape` = (L, P)."""
        if self.model != model:
            raise EplbError(
                f"the placement {path} is of another model (checksum {self.model[:16]}, this one has {model[:16]}); "
                f"make one for this model"
            )
        if (self.ep_size, self.physical_to_logical.shape) != (ep_size, shape):
            layers, slots = self.physical_to_logical.shape
            raise EplbError(
                f"the placement {path} is for {self.ep_size} ranks, {layers} layers and {slots} slots, and there are "
                f"{ep_size} ranks, {shape[0]} layers and {shape[1]} slots; run with as many, or make another"
            )


def model_checksum(reader: CheckpointReader) -> str:
    """A checksum that identifies a checkpoint without reading its data: sha256 of its config and of the names, shapes,
    dtypes and places of its tensors."""
    state = hashlib.sha256(json.dumps(reader.config, sort_keys=True).encode())
    for name in reader.names():
        info = reader.info(name)
        state.update(f"{name} {tuple(info.shape)} {info.dtype} {info.file.name} {info.offset}\n".encode())
    return state.hexdigest()


def content_checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

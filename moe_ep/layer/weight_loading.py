"""Copies tensors of a checkpoint to their places in a layer's parameters.

A parameter holds all local experts, `[El, ...]`. Its `ParamLayout` states what differs between kinds of parameters:
the dimension that gate and up share, the dimension that tensor parallelism divides, and which TP ranks add it. The
procedure is the same for all: find the local slots, take the shard's half of each, take this TP rank's part of the
tensor, compare shapes and dtypes, copy, and record that the tensor arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from moe_ep.arguments import check_tensors
from moe_ep.errors import check_at_least, one_of
from moe_ep.layer.expert_slots import ExpertSlots

# shard id -> (the GEMM that it belongs to, its half of w13)
SHARDS = {"w1": ("w13", 0), "w3": ("w13", 1), "w2": ("w2", 0)}
# (parameter, local slot, shard)
_Piece = tuple[str, int, str]
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class FusedMoeWeightScaleSupported(Enum):
    """What one scale covers: a whole matrix, an output channel, a group of input columns, or a 2-D block."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    GROUP = "group"
    BLOCK = "block"


@dataclass(frozen=True, kw_only=True)
class ParamLayout:
    """Where the shards of one expert lie in a parameter. Dimensions count without the leading El.

    Attributes:
        gemm: "w13" or "w2".
        halves_dim: the dimension along which gate and up are the two halves; None if they share the whole and must
            agree.
        tp_dim: the dimension that tensor parallelism divides; None if every TP rank takes the whole.
        first_tp_rank_only: zero on all other TP ranks, because the all-reduce would add it once per rank.
        optional: keeps its initial value if the checkpoint has no such tensor.
    """

    gemm: str
    halves_dim: int | None = None
    tp_dim: int | None = None
    first_tp_rank_only: bool = False
    optional: bool = False


def weight_layout(gemm: str) -> ParamLayout:
    """The layout of one expert's matrix `[out, in]`; packed dimensions are divided in the same way."""
    if gemm == "w13":
        return ParamLayout(gemm=gemm, halves_dim=0, tp_dim=0)
    return ParamLayout(gemm=gemm, tp_dim=1)


def bias_layout(gemm: str) -> ParamLayout:
    """The layout of one number per output row."""
    if gemm == "w13":
        return ParamLayout(gemm=gemm, halves_dim=0, tp_dim=0)
    return ParamLayout(gemm=gemm, first_tp_rank_only=True)


class ExpertWeightLoader:
    """Loads the expert parameters of one layer and keeps track of what is missing; threads may share the work.

    Args:
        name: the layer's name, for messages.
        slots: which checkpoint expert goes to which local slots.
        gated: whether w13 has two halves; an ungated w13 is loaded through shard w1.
        tp_rank, tp_size: this rank's part of N if TP shards experts, otherwise 0 of 1.
    """

    def __init__(self, *, name: str, slots: ExpertSlots, gated: bool, tp_rank: int, tp_size: int) -> None:
        self.name = name
        self.slots = slots
        self._gated = gated
        self._tp_rank = tp_rank
        self._tp_size = tp_size
        # Writes a tensor into the part of a parameter that is for it.
        self.copy: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_
        self._declared: dict[str, ParamLayout] = {}
        self._loaded: set[_Piece] = set()
        self._pending: set[_Piece] = set()
        self._has_begun = False
        self._closed = False
        self._again = False

    def declare(self, param_name: str, layout: ParamLayout) -> None:
        """Registers a parameter by its name."""
        self._declared[param_name] = layout
        self._pending.update(self._required(param_name))

    @property
    def param_names(self) -> list[str]:
        """The parameters of the layer while it is loaded."""
        return list(self._declared)

    def close(self) -> None:
        """Marks the parameters' storage as freed; loading from here on is an error."""
        self._closed = True

    def complete(self) -> None:
        """Marks that nothing is missing any more."""
        self._pending.clear()

    def reopen(self) -> None:
        """Marks the storage as allocated again, to load some or all experts; each slot must get all tensors or none."""
        self._closed, self._again, self._has_begun = False, True, False
        self._pending = {piece for param_name in self._declared for piece in self._required(param_name)}
        self._loaded.clear()

    def check_open(self, what: str) -> None:
        """Raises RuntimeError if the parameters' storage is freed; `what` names the tensor to load."""
        if self._closed:
            raise RuntimeError(
                f"{what}: the parameters of {self.name} were processed and freed already; call begin_reload to load "
                f"again"
            )

    @property
    def has_begun(self) -> bool:
        """Whether any tensor was passed to `load` since the last `reopen`, or ever without one."""
        return self._has_begun

    @property
    def slots_loaded_again(self) -> list[int] | None:
        """The local slots that received tensors since `reopen`; None if that was never called."""
        return sorted({slot for _, slot, _ in self._loaded}) if self._again else None

    def missing(self) -> list[str]:
        """What is still missing, such as "w13_weight of local expert 3 (shard w1)"; empty before loading begins."""
        if not (self._has_begun and self._pending):
            return []
        again, empty = self.slots_loaded_again, self.empty_slots
        return [
            f"{param_name} of local expert {slot} (shard {shard})"
            for param_name, slot, shard in sorted(self._pending)
            if slot not in empty and (again is None or slot in again)
        ]

    @property
    def empty_slots(self) -> list[int]:
        """The local slots that hold no expert, and so need no weights."""
        return [slot for slot, expert in enumerate(self.slots.local_experts) if expert < 0]

    def load(
        self,
        param_name: str,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
    ) -> bool:
        """Copies one checkpoint tensor to its place, as described for `FusedMoE.weight_loader`.

        Args:
            param_name: the name that `param` was declared with; empty if it is not one of the layer's.
        """
        self.check_open(weight_name)
        if param_name not in self._declared:
            raise ValueError(
                f"{weight_name}: param is not one of the expert parameters of {self.name}: {', '.join(self._declared)}"
            )
        if param.is_meta:
            raise RuntimeError(
                f"{weight_name}: {param_name} of {self.name} is on the meta device, which keeps no values; call "
                f"to_empty(device=...) of the layer before loading"
            )
        self._check_shard(weight_name, param_name, shard_id)
        self._has_begun = True
        # A tensor of all experts has as many dimensions as the parameter; a scalar is never one.
        if getattr(loaded_weight, "ndim", 0) == param.ndim and loaded_weight.numel() > 1:
            return self._load_all(param_name, param, loaded_weight, weight_name, shard_id)
        slots = self.slots.of_id(expert_id)
        for slot in slots:
            self._load_slot((param_name, slot, shard_id), param, loaded_weight, weight_name)
        return bool(slots)

    def _load_all(
        self, param_name: str, param: nn.Parameter, loaded_weight: torch.Tensor, weight_name: str, shard_id: str
    ) -> bool:
        """Loads a tensor `[E, ...]`, or `[E + S, ...]` if fused shared experts follow."""
        routed, shared = self.slots.num_experts, self.slots.num_fused_shared_experts
        if loaded_weight.shape[0] not in (routed, routed + shared):
            raise ValueError(
                f"{weight_name}: expected all {routed} experts (or {routed + shared} with shared ones) in dimension "
                f"0, found shape {tuple(loaded_weight.shape)}"
            )
        found = False
        for expert, weight in enumerate(loaded_weight):
            for slot in self.slots.of_checkpoint_expert(expert):
                self._load_slot((param_name, slot, shard_id), param, weight, weight_name)
                found = True
        return found

    @torch.inference_mode()  # can write to parameters whether or not they were created in inference mode
    def _load_slot(self, piece: _Piece, param: nn.Parameter, weight: torch.Tensor, weight_name: str) -> None:
        check_tensors(**{f"{weight_name}: loaded_weight": weight})
        if weight.is_meta:
            raise ValueError(f"{weight_name}: loaded_weight is on the meta device and has no values; read it first")
        param_name = piece[0]
        layout, target = self._declared[param_name], self._target(piece, param)
        part = self._part_of_this_rank(weight, target, layout, weight_name, param_name)
        if layout.first_tp_rank_only and self._tp_rank > 0:
            target.zero_()
        elif self._others_wrote(piece, layout) and not torch.equal(target, part.to(target)):
            raise ValueError(
                f"{weight_name}: expected what the other half of w13 has, which shares {param_name}; it differs"
            )
        else:
            self.copy(target, part)
        self._loaded.add(piece)
        self._pending.discard(piece)

    def _target(self, piece: _Piece, param: nn.Parameter) -> torch.Tensor:
        """The part of a parameter that a shard of the slot's expert goes to."""
        param_name, slot, shard_id = piece
        layout = self._declared[param_name]
        if layout.halves_dim is not None and layout.gemm == "w13" and self._gated:
            return param.data[slot].chunk(2, layout.halves_dim)[SHARDS[shard_id][1]]
        return param.data[slot]

    def targets(
        self, param_name: str, param: nn.Parameter, weight: torch.Tensor, shard_id: str, expert_id: int
    ) -> list[torch.Tensor] | None:
        """Returns the tensors into which `load` copies one expert's tensor as it is; None if it does more than that."""
        layout = self._declared.get(param_name)
        if self._tp_size > 1 or layout is None or (layout.halves_dim is None and len(self._shards(layout)) > 1):
            return None
        found = [self._target((param_name, slot, shard_id), param) for slot in self.slots.of_id(expert_id)]
        fits = all(target.shape == weight.shape and {target.dtype, weight.dtype} <= {*_FLOATS} for target in found)
        return found if fits else None

    def _part_of_this_rank(
        self, weight: torch.Tensor, target: torch.Tensor, layout: ParamLayout, weight_name: str, param_name: str
    ) -> torch.Tensor:
        """Checks a whole tensor's shape and dtype, and returns the part that belongs in `target`."""
        expected = list(target.shape)
        if layout.tp_dim is not None:
            expected[layout.tp_dim] *= self._tp_size
        if weight.numel() == 1 and target.numel() == 1:
            weight = weight.reshape(expected)
        same_dtype = weight.dtype == target.dtype or (weight.dtype in _FLOATS and target.dtype in _FLOATS)
        if list(weight.shape) != expected or not same_dtype:
            raise ValueError(
                f"{weight_name}: {param_name} expected shape {tuple(expected)} of {target.dtype}, found "
                f"{tuple(weight.shape)} of {weight.dtype}"
            )
        if layout.tp_dim is None:
            return weight
        size = target.shape[layout.tp_dim]
        return weight.narrow(layout.tp_dim, self._tp_rank * size, size)

    def _others_wrote(self, piece: _Piece, layout: ParamLayout) -> bool:
        if layout.halves_dim is not None:
            return False
        param_name, slot, shard_id = piece
        others = [shard for shard in self._shards(layout) if shard != shard_id]
        return any((param_name, slot, shard) in self._loaded for shard in others)

    def _required(self, param_name: str) -> Iterator[_Piece]:
        """What has to be loaded into a parameter."""
        layout = self._declared[param_name]
        slots = range(0 if layout.optional else self.slots.num_local)
        return ((param_name, slot, shard) for slot in slots for shard in self._shards(layout))

    def _shards(self, layout: ParamLayout) -> list[str]:
        return [shard for shard, (gemm, half) in SHARDS.items() if gemm == layout.gemm and (half == 0 or self._gated)]

    def _check_shard(self, weight_name: str, param_name: str, shard_id: str) -> None:
        allowed = self._shards(self._declared[param_name])
        if shard_id not in allowed:
            raise ValueError(f"{weight_name}: for {param_name} {one_of('shard_id', shard_id, allowed)}")


ExpertMapping = list[tuple[str, str, int, str]]


def make_expert_params_mapping(
    ckpt_gate_proj_name: str,
    ckpt_down_proj_name: str,
    ckpt_up_proj_name: str,
    num_experts: int,
    num_redundant_experts: int = 0,
) -> ExpertMapping:
    """Returns (param_name, weight_name, expert_id, shard_id) for each physical expert and shard w1, w2 and w3.

    Replacing weight_name by param_name in a checkpoint's tensor name gives the parameter's name. Redundant expert p
    is loaded from expert p mod E. Ungated experts, whose up name is empty, have no w3.

    Example: `("experts.w13_", "experts.3.gate_proj.", 3, "w1")`.

    Raises:
        ValueError: no experts, or a name that is missing or not a string.
        TypeError: a number that is not whole.
    """
    required = {"ckpt_gate_proj_name": ckpt_gate_proj_name, "ckpt_down_proj_name": ckpt_down_proj_name}
    for argument, given in required.items():
        if not isinstance(given, str) or not given:
            raise ValueError(f"{argument} is {given!r}; it must be what the checkpoint calls that projection")
    if not isinstance(ckpt_up_proj_name, str):
        raise ValueError(
            f"ckpt_up_proj_name is {ckpt_up_proj_name!r}; it must be a name, empty for experts without a gate"
        )
    check_at_least(1, num_experts=num_experts)
    check_at_least(0, num_redundant_experts=num_redundant_experts)
    projections = (("w1", ckpt_gate_proj_name), ("w2", ckpt_down_proj_name), ("w3", ckpt_up_proj_name))
    return [
        (f"experts.{SHARDS[shard_id][0]}_", f"experts.{physical % num_experts}.{name}.", physical, shard_id)
        for physical in range(num_experts + num_redundant_experts)
        for shard_id, name in projections
        if name
    ]


def check_mapping(mapping: object) -> None:
    """Raises ValueError unless it is a list of rows (param_name, weight_name, expert_id, shard_id)."""
    is_list = isinstance(mapping, Iterable) and not isinstance(mapping, str | Mapping)
    rows: list[Any] = list(mapping) if is_list else [mapping]  # type: ignore[call-overload]
    for row in rows:
        fits = isinstance(row, tuple | list) and [type(value) for value in row] == [str, str, int, str]
        if not fits or row[3] not in SHARDS:
            raise ValueError(
                f"expert_mapping has {row!r}; its rows must be (param_name, weight_name, expert_id, shard_id), as "
                f"make_expert_params_mapping gives them"
            )


def matching_rows(
    weights: Iterable[tuple[str, torch.Tensor]], mapping: ExpertMapping
) -> Iterator[tuple[str, torch.Tensor, str, str, int]]:
    """Yields (checkpoint name, tensor, the parameter's name in the layer, shard_id, expert_id) for each match."""
    if isinstance(weights, Mapping):
        raise TypeError(f"weights is a {type(weights).__name__}; pass its items(), pairs of a name and a tensor")
    if isinstance(weights, str) or not isinstance(weights, Iterable):
        raise TypeError(f"weights is {weights!r}; it must be pairs of a name and a tensor")
    for pair in weights:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"weights has a {type(pair).__name__}; it must be pairs of a name and a tensor")
        name, tensor = pair
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"weights has the pair ({name!r}, {type(tensor).__name__}); it must be pairs of a name and a tensor"
            )
        for param_name, weight_name, expert_id, shard_id in mapping:
            if weight_name in name:
                yield name, tensor, name.replace(weight_name, param_name).rpartition(".")[2], shard_id, expert_id

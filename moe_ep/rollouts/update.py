"""Writes new weights into a model in place, between two steps, under the names of its checkpoint.

    moe_ep.update_weights(model, trainer.state_dict().items())       # on every rank

The tensors are read as a checkpoint's are: planned against the model's spec, which finds what is missing or misshapen,
handed to the layers' loaders, quantized and packed as on load. So a layer holds, bit for bit, what it would hold if
these tensors were loaded from files. Experts go to the slots where EPLB has them now.

In this order: passes and moves of experts end -> ranks tell each other which tensors they have -> all plan, and agree
that nothing is missing -> tensors that only other ranks have are sent -> all write -> all say that they have.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from moe_ep.arguments import check_tensors
from moe_ep.checkpoint.formats.layout import FLOATS, TensorLayout
from moe_ep.checkpoint.loading import check_beside_experts, load_plan, read_linear
from moe_ep.checkpoint.model_spec import model_spec
from moe_ep.checkpoint.plan import Source, check_tensor, find_module, plan_layer
from moe_ep.checkpoint.reader import CheckpointReader, TensorInfo
from moe_ep.checkpoint.spec import MoEModelSpec, Projections
from moe_ep.distributed.exchange import gather_texts
from moe_ep.errors import CheckpointError, ConfigError, MoeEpError, WeightsError, rank_list
from moe_ep.expert_map import determine_expert_map
from moe_ep.hf.experts import decoder_layer_of
from moe_ep.hf.parallelized import steps_of
from moe_ep.hf.routed_experts import RoutedExperts
from moe_ep.layer.fused_moe import FusedMoE
from moe_ep.layer.stack import MoEStack

# (name, tensor) pairs, or the folder of a checkpoint.
Weights = Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor] | str | os.PathLike[str]
_T = TypeVar("_T")
# What messages call the place of tensors that are given, and the source that is a checkpoint.
_PLACE = Path("tensors")
_FOLDER = "a folder"


def update_weights(model: Any, tensors: Weights) -> None:
    """Writes tensors of a checkpoint in place of those in use; a collective call of the ranks, between two steps.

    CUDA graphs and registered buffers stay valid. Every expert of every layer must be among the tensors of some rank.
    Weights beside the experts may be left out, all of them together; whatever else is there is ignored. A rank may give
    all experts, or its shard of them (the experts that EP gives it without EPLB): those that are elsewhere by now are
    sent to their ranks. The ranks serve each other's passes until all have called it, and finish moves of experts.

    Args:
        model: what `parallelize` returns, or a `MoEStack`.
        tensors: (name, tensor) pairs in any order, named as in the model's checkpoint or as in its transformers class:
            one for each matrix of each expert or all experts in one, of which a shard may have a rank's experts alone,
            in their order. In the form of the checkpoint; plain floats where the layer was quantized on load, which
            quantizes them again. Or the folder of a checkpoint.

    Raises:
        WeightsError: a tensor that is missing, given twice, or of another shape or dtype; tensors of a rank that cannot
            be read, whose own error is the cause there; a folder on some ranks only. On every rank, and nothing is
            changed.
        CheckpointError: values that cannot be written; then no layer runs any more.
        ConfigError: an elastic model, whose lost experts are read from its checkpoint again.
        TypeError: something else than a parallelized model or a stack.
        DispatchTimeoutError: a rank did not come.
    """
    target = _target_of(model)
    group = target.layers[0][1].groups.ep
    with target.stopped(), contextlib.ExitStack() as stack:
        for _, layer in target.layers:
            if layer.eplb_state is not None:
                layer.eplb_state.finish_moving()
        known = _PLANS.get(model)
        reader = _open(target, tensors, group, None if known is None else known.names, stack)
        plan = _Plan([], [])
        absent: list[str] = []
        failure: Exception | None = None
        try:
            for _, layer in target.layers:
                layer.check_not_refused()
            plan = _plan(target, reader, known)
            absent = plan.absent(reader)
        except Exception as error:
            failure = error
        told = _exchange("missing weights", (_text_of(failure), absent), group)
        _check_all([text for text, _ in told], failure)
        if isinstance(reader, GivenTensors):
            reader.fetch(sorted({name for _, names in told for name in names}), group)
        _write(target, reader, plan, group)
        if isinstance(reader, GivenTensors):
            _PLANS[model] = plan


class _Stack:
    """A stack whose weights are updated; `_Parallelized` has the same attributes and methods for other models.

    Attributes:
        spec, config: what its checkpoint says of it.
        layers: by their index in the checkpoint, over all layers of the model.
        aliases: what names may begin with, and what they begin with in the checkpoint; renamed in this order.
    """

    def __init__(self, stack: MoEStack) -> None:
        self._stack = stack
        self.spec, self.config = stack.spec, stack.config
        self.layers = [(block.layer_index, block.moe) for block in stack.layers()]
        self.aliases: dict[str, str] = {}

    def spec_for(self, names: CheckpointReader | Mapping[str, Any]) -> MoEModelSpec:
        """What the experts of the tensors with these names are called."""
        return self.spec

    def stopped(self) -> contextlib.AbstractContextManager[None]:
        """A block in which no rank makes passes."""
        return contextlib.nullcontext()

    def check_beside(self, reader: CheckpointReader) -> list[str]:
        """The names of the tensors beside the experts; none where they are left out. CheckpointError for one that is
        missing or does not fit."""
        firsts = [
            name
            for layer in self.spec.router_layers
            for name in (self.spec.norm_weight(layer), self.spec.router_weight(layer))
            if name is not None
        ]
        return check_beside_experts(reader, self.spec) if any(name in reader for name in firsts) else []

    def write_beside(self, reader: CheckpointReader) -> None:
        for block in self._stack.layers():
            block.update_beside_experts(reader, self.spec)


class _Parallelized:
    def __init__(self, model: nn.Module) -> None:
        self._model, self._steps = model, steps_of(model)
        if self._steps.elastic is not None:
            raise ConfigError(
                "the model is elastic, and experts of a failed rank would be read from the checkpoint that it came "
                "from; load the new weights into a new model, or run without --elastic"
            )
        if self._steps.source is not None:
            self.spec, self.config = self._steps.source
        else:
            self.config = model.config.to_dict()  # type: ignore[operator, union-attr]
            self.spec = model_spec(self.config)
        found = {name: part for name, part in model.named_modules() if isinstance(part, RoutedExperts)}
        self._experts = tuple(f"{name}." for name in found)
        self.layers: list[tuple[int, FusedMoE]] = [
            (int(decoder_layer_of(name).rpartition(".")[2]), part) for name, part in found.items()
        ]
        self.aliases = {
            **self._alias_of_whole(),
            **{
                name: f"{self.spec.expert_prefix(index)}."
                for name, (index, _) in zip(self._experts, self.layers, strict=True)
            },
        }
        # Classes have all experts in one, gate rows before up rows; some files too, by other names and in turns.
        gate = "experts.gate_up_proj" if self.spec.projections.up else "experts.up_proj"
        in_class = Projections(gate, "experts.down_proj")
        self._class_spec = (
            self.spec if in_class == self.spec.fused else replace(self.spec, fused=in_class, interleaved=False)
        )

    def spec_for(self, names: CheckpointReader | Mapping[str, Any]) -> MoEModelSpec:
        index, _ = self.layers[0]
        return self._class_spec if self._class_spec.fused_stem(index, "gate") in names else self.spec

    def _alias_of_whole(self) -> dict[str, str]:
        """The prefix of a multimodal class, where this model is its language model alone (Dots3-Note)."""
        base = f"{getattr(self._model, 'base_model_prefix', '')}."
        whole = f"{base}language_model."
        own = any(name.startswith(whole) for name in (self.spec.layers_module, *self._model.state_dict()))
        return {} if own else {whole: base}

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        self._steps.serve()
        with self._steps.scheduler.lock:
            yield

    def _assembled(self, reader: CheckpointReader) -> list[Any]:
        """The weights beside the experts that have other tensors in the files, but for those given as in the model."""
        from moe_ep.hf.loading import assembled_weights

        found = assembled_weights(self._model, reader)
        return [each for each in found if not any(name in reader for name in each.names)]

    def _beside(self, reader: CheckpointReader, assembled: list[Any]) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Each other weight beside the experts: its name, itself, and its name in the files."""
        from moe_ep.hf.loading import names_on_disk

        on_disk, state = names_on_disk(self._model, reader), self._model.state_dict()
        buffers = [(name, tensor) for name, tensor in self._model.named_buffers() if name in state]
        left_out = {name for each in assembled for name in each.names}
        for name, tensor in (*self._model.named_parameters(), *buffers):
            if not name.startswith(self._experts) and name not in left_out:
                yield name, tensor, name if name in reader else on_disk.get(name, name)

    def check_beside(self, reader: CheckpointReader) -> list[str]:
        assembled = self._assembled(reader)
        names: list[str] = [name for each in assembled for name in each.tensors(reader, self._model)]
        absent: list[tuple[str, torch.Tensor]] = []
        for name, tensor, stored in self._beside(reader, assembled):
            module = stored.removesuffix(".weight")
            if stored in reader and reader.info(stored).dtype in (*FLOATS, tensor.dtype):
                check_tensor(reader.info(stored), TensorLayout((*FLOATS, tensor.dtype), tuple(tensor.shape)))
                names.append(stored)
            elif tensor.dim() == 2 and reader.names(module + "."):
                _, found = find_module(reader, module, (tensor.size(0), tensor.size(1)))
                names += [each.info.name for each in found.values()]
            # Families make other buffers themselves.
            elif isinstance(tensor, nn.Parameter) or (
                name.endswith("e_score_correction_bias") and not self.spec.correction_bias_may_miss
            ):
                absent.append((stored, tensor))
        if names and absent:
            name, tensor = absent[0]
            raise CheckpointError(
                f"{reader.index_file}: expected {name} of shape {tuple(tensor.shape)}, found none that fits; give all "
                f"weights beside the experts, or none of them"
            )
        return names

    def write_beside(self, reader: CheckpointReader) -> None:
        assembled, params = self._assembled(reader), dict(self._model.named_parameters())
        for each in assembled:
            for name, weight in each.read(reader, self._model).items():
                params[name].data.copy_(weight)
        for _, tensor, stored in self._beside(reader, assembled):
            module = stored.removesuffix(".weight")
            if stored in reader and reader.info(stored).dtype in (*FLOATS, tensor.dtype):
                tensor.data.copy_(reader.read(stored).view(tensor.shape))
            elif tensor.dim() == 2 and reader.names(module + "."):
                tensor.data.copy_(read_linear(reader, module, (tensor.size(0), tensor.size(1)), tensor.device))
        self._steps.num_updates += 1


_Target = _Stack | _Parallelized


def _target_of(model: Any) -> _Target:
    if isinstance(model, MoEStack):
        return _Stack(model)
    if not isinstance(model, nn.Module) or not hasattr(model, "_moe_ep_steps"):
        raise TypeError(
            f"model is a {type(model).__name__}; pass a MoEStack or what moe_ep.parallelize returns (a layer alone is "
            f"loaded again by begin_reload)"
        )
    return _Parallelized(model)


class GivenTensors(CheckpointReader):
    """Tensors of this process and of others, read as a checkpoint is, from memory.

    Args:
        config: of the model.
        tensors: of this process, by name, or by `name[i]` for an index of the leading dimension.
        infos: of the tensors that some process has, whole, by name.
        device: where tensors of other processes arrive.
        names: what follows from the names and forms of this process's.
    """

    in_memory = True

    def __init__(
        self,
        config: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        infos: dict[str, TensorInfo],
        device: torch.device,
        names: _Names,
    ) -> None:
        self.directory, self.config, self.allow_nonfinite = _PLACE, config, True
        self.given_names, self.infos = names, infos
        self._given, self._device = tensors, device
        self._tensors, self._names = infos, sorted(infos)

    @property
    def index_file(self) -> Path:
        return self.directory

    def base(self, name: str) -> tuple[str, torch.Tensor]:
        """The tensor that this process was given or sent, and that `name` is, or is an index of; and its name."""
        known = name if name in self._given else _whole(name)
        return known, self._given[known]

    def holds(self, name: str) -> bool:
        """Whether this process has a tensor, or `name[i]` of one."""
        return name in self._given or _whole(name) in self._given

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        if name in self._given:
            tensor = self._given[name]
        else:
            self.info(_whole(name))  # raises where no process has it
            tensor = self._given[_whole(name)][int(name[name.rindex("[") + 1 : -1])]
        return tensor if rows is None else tensor[rows]

    def read_many(
        self, names: Iterable[str | TensorInfo], reuse_buffers: bool = False, unchecked: Container[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name in dict.fromkeys(each if isinstance(each, str) else each.name for each in names):
            yield name, self.read(name)

    def fetch(self, names: list[str], group: dist.ProcessGroup | None) -> None:
        """Receives those that some rank lacks from the first rank that has them; the ranks give the same names.

        WeightsError on all ranks, before anything is sent, for a tensor that no rank has.
        """
        if not names or group is None:
            return
        told = _exchange("weights to send", [self.holds(name) for name in names], group)
        for number, name in enumerate(names):
            if not any(held[number] for held in told):
                raise WeightsError(
                    f"{_PLACE}: tensor {name}: expected it on some rank, found it on none; give all experts"
                )
        for number, name in enumerate(names):
            owner = next(rank for rank, held in enumerate(told) if held[number])
            info = self._tensors.get(name) or self._tensors[_whole(name)].row(0)
            buffer = torch.empty(info.shape, dtype=info.dtype, device=self._device)
            if dist.get_rank(group) == owner:
                buffer.copy_(self.read(name))
            # As bytes: transports do not know every dtype.
            dist.broadcast(buffer.flatten().view(torch.uint8), group=group, group_src=owner)
            if not self.holds(name):
                self._given[name] = buffer


def _whole(name: str) -> str:
    """The tensor that `name[i]` is a part of."""
    return name[: name.rindex("[")] if name.endswith("]") else name


@dataclass(frozen=True)
class _Names:
    """What follows from the names and forms of given tensors alone.

    Attributes:
        forms: of each tensor.
        held: what this rank has: the name, which of the given tensors it is, and of a shard the row of it.
        table: of the tensors, whole: names, dtypes and shapes.
        infos: of the same tensors.
    """

    forms: list[Any]
    held: list[tuple[str, int, int | None]]
    table: list[tuple[str, str, list[int]]]
    digest: str
    infos: dict[str, TensorInfo]


def _open(
    target: _Target,
    tensors: Any,
    group: dist.ProcessGroup | None,
    known: _Names | None,
    stack: contextlib.ExitStack,
) -> CheckpointReader:
    """A reader of a folder, which `stack` closes, or of the tensors of all ranks; a collective step of them."""
    failure: Exception | None = None
    folder: CheckpointReader | None = None
    kind, names = "(name, tensor) pairs", _Names([], [], [], "", {})
    held: dict[str, torch.Tensor] = {}
    # Runs code of the caller, which may raise anything. A rank that left here alone would miss the exchanges of this
    # call, and its next call would be paired with this one of the others.
    try:
        if isinstance(tensors, str | os.PathLike):
            kind, folder = _FOLDER, stack.enter_context(CheckpointReader(tensors))
        else:
            pairs = _pairs(tensors)
            kind = kind if pairs else "no tensors"
            forms = [(name, tensor.dtype, tensor.shape, tensor.stride(), tensor.device) for name, tensor in pairs]
            names = known if known is not None and known.forms == forms else _names_of(target, pairs, forms)
            held = {
                name: pairs[number][1].detach() if row is None else pairs[number][1].detach()[row]
                for name, number, row in names.held
            }
    except Exception as error:
        failure = error
    told = _exchange("weights", (_text_of(failure), kind, names.digest), group)
    _check_all([text for text, _, _ in told], failure)
    kinds: dict[str, list[int]] = {}
    for rank, (_, found, _) in enumerate(told):
        kinds.setdefault(found, []).append(rank)
    if _FOLDER in kinds and len(kinds) > 1:
        who = ", ".join(f"{found} on {rank_list(holders)}" for found, holders in kinds.items())
        raise WeightsError(f"{_PLACE}: found {who}; give a folder on all ranks or on none")
    if folder is not None:
        return folder
    infos = names.infos
    if any(digest != names.digest for _, _, digest in told):
        infos = _infos(row for table in _exchange("names", names.table, group) for row in table)
    return GivenTensors(target.config, held, infos, target.layers[0][1].expert_weights()[0].device, names)


def _text_of(failure: Exception | None) -> str:
    """What the other ranks are told of a failure; empty for none."""
    if failure is None:
        return ""
    said = str(failure)
    return said if said and isinstance(failure, MoeEpError) else f"{type(failure).__name__}: {said}"


def _check_all(texts: list[str], failure: Exception | None) -> None:
    """WeightsError on all ranks if one has a failure; `failure` is this rank's, `texts` are those of all, by rank."""
    first = next((text for text in texts if text), None)
    if first is not None:
        failed = [rank for rank, text in enumerate(texts) if text == first]
        who = "" if len(failed) == len(texts) else f"{rank_list(failed)}: "
        raise WeightsError(f"{who}{first}") from failure


def _pairs(tensors: Any) -> list[tuple[str, torch.Tensor]]:
    if not isinstance(tensors, Iterable):
        raise WeightsError(f"tensors is a {type(tensors).__name__}; it must be (name, tensor) pairs")
    pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise WeightsError(f"tensors has a {type(pair).__name__}; it must be (name, tensor) pairs")
        check_tensors(**{pair[0]: pair[1]})
    return pairs


def _names_of(target: _Target, pairs: list[tuple[str, torch.Tensor]], forms: list[Any]) -> _Names:
    named, layer = _named(target, pairs), target.layers[0][1]
    num_experts, parallel = target.spec.num_experts, layer.parallel_config
    owned = [*range(num_experts)]
    if parallel.use_ep:
        _, expert_map, _ = determine_expert_map(
            parallel.ep_size, parallel.ep_rank, num_experts, parallel.expert_placement_strategy
        )
        owned = owned if expert_map is None else (expert_map >= 0).nonzero().flatten().tolist()
    spec = target.spec_for(named)
    stems = tuple(
        f"{spec.moe_prefix(index)}.{fused}" for index, _ in target.layers for fused in spec.fused.by_role().values()
    )
    held: list[tuple[str, int, int | None]] = []
    table: list[tuple[str, str, list[int]]] = []
    for name, (number, tensor) in sorted(named.items()):
        sizes = list(tensor.shape)
        if name.startswith(stems) and sizes and sizes[0] == len(owned) < num_experts:
            sizes[0] = num_experts
            held += [(f"{name}[{expert}]", number, row) for row, expert in enumerate(owned)]
        else:
            held.append((name, number, None))
        table.append((name, str(tensor.dtype).removeprefix("torch."), sizes))
    digest = hashlib.sha256(json.dumps(table).encode()).hexdigest()
    return _Names(forms, held, table, digest, _infos(table))


def _infos(table: Iterable[Sequence[Any]]) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for name, kind, sizes in table:
        dtype, shape = getattr(torch, kind), tuple(sizes)
        info = TensorInfo(name, _PLACE, dtype, shape, 0, math.prod(shape) * dtype.itemsize)
        if infos.setdefault(name, info) != info:
            raise WeightsError(
                f"{_PLACE}: tensor {name}: expected the same on all ranks, found {infos[name].dtype} "
                f"{infos[name].shape} and {dtype} {shape}"
            )
    return infos


def _named(target: _Target, pairs: list[tuple[str, torch.Tensor]]) -> dict[str, tuple[int, torch.Tensor]]:
    """The tensors and their numbers by the checkpoint's names; WeightsError for what has no values or comes twice."""
    named: dict[str, tuple[int, torch.Tensor]] = {}
    for number, (name, tensor) in enumerate(pairs):
        if tensor.is_meta:
            raise WeightsError(f"{name} is on the meta device and has no values; give it some")
        for own, on_disk in target.aliases.items():
            if name.startswith(own):
                name = on_disk + name.removeprefix(own)
        if name in named:
            raise WeightsError(f"tensors has {name} twice; give each once")
        named[name] = number, tensor
    return named


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A part of a given tensor, as `torch.as_strided` takes it, and where it is copied; the part is None for all."""

    base: str
    part: tuple[torch.Size, tuple[int, ...], int] | None
    target: torch.Tensor


@dataclass
class _Plan:
    """What is read: for the experts of each layer, and, by name, for the rest of the model.

    Attributes:
        names: of the tensors that it was made of; None for a folder's.
        key: what it follows from besides: the infos of those tensors, and where the experts are.
        copies: for each layer that has nothing to do but to copy tensors, what is copied; made by the first update.
    """

    experts: list[list[Source]]
    beside: list[str]
    names: _Names | None = None
    key: Any = None
    copies: dict[int, list[_Copy]] = field(default_factory=dict)

    def absent(self, reader: CheckpointReader) -> list[str]:
        """What this rank has to receive."""
        if not isinstance(reader, GivenTensors):
            return []
        read = [source.info.name for sources in self.experts for source in sources if source.info is not None]
        return [name for name in dict.fromkeys((*read, *self.beside)) if not reader.holds(name)]


# The plan of each model's last update, as trainers send the same names every time.
_PLANS: WeakKeyDictionary[Any, _Plan] = WeakKeyDictionary()


def _plan(target: _Target, reader: CheckpointReader, known: _Plan | None) -> _Plan:
    """CheckpointError, which names a tensor, where one is missing or does not fit."""
    names, infos = (reader.given_names, reader.infos) if isinstance(reader, GivenTensors) else (None, None)
    key = infos, [(layer.slots.local_experts, *layer.tensor_addresses()) for _, layer in target.layers]
    if known is not None and known.names is names and known.key == key:
        return known
    experts, spec = [], target.spec_for(reader)
    for index, layer in target.layers:
        experts.append(plan_layer(reader, spec, index, layer, param_names=layer.loader.param_names))
    return _Plan(experts, target.check_beside(reader), names, key)


def _copies(reader: CheckpointReader, sources: list[Source], layer: FusedMoE) -> list[_Copy] | None:
    """What an update of a layer copies; None where that is not all of it."""
    if not (isinstance(reader, GivenTensors) and layer.quant_method.loads_in_place()):
        return None
    params, copies = dict(layer.named_parameters(recurse=False)), []
    for source in sources:
        if source.info is None:
            return None
        base_name, base = reader.base(source.name)
        raw = reader.read(source.name)
        for slot in source.slots:
            tensor = slot.layout.as_held(slot.tensor(raw))
            is_view = tensor.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
            targets = None
            if slot.param_name and is_view and tensor.dtype == base.dtype:
                args = params[slot.param_name], tensor, slot.shard_id, slot.expert_id
                targets = layer.loader.targets(slot.param_name, *args)
            if not targets:
                return None
            form = tensor.shape, tensor.stride(), int(tensor.storage_offset() - base.storage_offset())
            part = None if form == (base.shape, base.stride(), 0) else form
            copies += [_Copy(base=base_name, part=part, target=target) for target in targets]
    return copies


def _copy_all(reader: GivenTensors, copies: list[_Copy]) -> None:
    """On a GPU a few kernels for all of them."""
    sources = []
    for copy in copies:
        _, base = reader.base(copy.base)
        if copy.part is not None:
            size, stride, offset = copy.part
            base = base.as_strided(size, stride, base.storage_offset() + offset)
        sources.append(base)
    torch._foreach_copy_([copy.target for copy in copies], sources)


def _write(target: _Target, reader: CheckpointReader, plan: _Plan, group: dist.ProcessGroup | None) -> None:
    """Writes what was planned; where a rank fails, no layer of any rank runs any more."""
    failure, cause = "", None
    try:
        copied = []
        for (index, layer), sources in zip(target.layers, plan.experts, strict=True):
            if index not in plan.copies and (found := _copies(reader, sources, layer)) is not None:
                plan.copies[index] = found
            if index in plan.copies:
                copied += plan.copies[index]
                continue
            # The parameters of checkpoints are made beside the weights in use.
            with torch.device(layer.expert_weights()[0].device):
                layer.begin_reload()
            load_plan(reader, sources, layer, target.spec.expert_prefix(index))
        with torch.inference_mode():  # can write to parameters whether or not they were made in it
            if copied and isinstance(reader, GivenTensors):
                _copy_all(reader, copied)
            if plan.beside:
                target.write_beside(reader)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # whoever gave the tensors may reuse their memory
    except Exception as error:
        failure, cause = str(error) or repr(error), error
        _refuse(target, failure)
    except BaseException:
        _refuse(target, "it was interrupted")
        raise
    try:
        told = _exchange("weights that were written", failure, group)
    except BaseException:
        _refuse(target, "another rank did not say that it has written its part")
        raise
    if problems := [text for text in told if text]:
        _refuse(target, problems[0])
        raise CheckpointError(f"the weights are partly written and no layer runs any more: {problems[0]}") from cause


def _refuse(target: _Target, failure: str) -> None:
    for _, layer in target.layers:
        layer.refuse(f"an update of its weights failed half way: {failure}")


def _exchange(name: str, mine: _T, group: dist.ProcessGroup | None) -> list[_T]:
    """What each rank tells, as JSON, by rank."""
    if group is None:
        return [mine]
    return [json.loads(text) for text in gather_texts(f"update: {name}", json.dumps(mine), group)]

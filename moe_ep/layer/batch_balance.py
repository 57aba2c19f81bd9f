"""Balancing one batch by its own counts: a layer's hot experts are copied to other ranks for this batch alone.

A balanced pass, on every rank alike:

    counts of the batch, rows for each logical expert -> all ranks            one small exchange
    `plan_batch`: which experts are copied where, and who computes which rows
    copies in flight: an expert is one row of bytes (`moe_ep.eplb.packing`)
    dispatch -> experts in resident and scratch slots -> combine              as in any other pass

Rows go to ids that number the slots of all ranks, scratch slots behind a rank's resident ones: the ids of a layer that
has more experts. So dispatch and combine are an ordinary backend for that layer, and the experts are two of the layer's
own kind, one for the resident weights and one for the scratch slots. All layers of a process whose experts have the
same tensors share their scratch slots.

What one row gives does not depend on where it is computed. A token's sum is made in another order, because the results
of one rank are added first; in a batch-invariant layer it has the same bits too.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast
from weakref import WeakValueDictionary

import torch
from torch import nn

from moe_ep.activation import MoEActivation
from moe_ep.arguments import check_tensors
from moe_ep.config import FusedMoEConfig
from moe_ep.eplb.batch_plan import BatchPlan, plan_batch
from moe_ep.eplb.packing import ExpertRows
from moe_ep.errors import check_at_least, check_not_negative, one_of
from moe_ep.expert_map import expert_owner_table
from moe_ep.layer.interface import MoELayer
from moe_ep.modular_kernel import FusedMoEModularKernel
from moe_ep.modular_kernel.adapters import as_experts
from moe_ep.modular_kernel.contracts import (
    BatchExchange,
    Experts,
    ExpertsCall,
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEPermuteExpertsUnpermute,
    Pending,
)
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce
from moe_ep.observability.stages import stage, tell_copies

if TYPE_CHECKING:
    from moe_ep.layer.methods.base import FusedMoEMethodBase

CHOICES = ("auto", "off")


@dataclass(frozen=True)
class _Rates:
    """What says whether a copy pays: bytes a second out of a rank, operations a second of its experts."""

    link_bytes_per_s: float
    flops_per_s: float


# NVLink between H200s, and bf16 products there, as the experts reach them (docs/benchmarks); gloo over loopback and f32
# products of one CPU core.
_RATES = {"cuda": _Rates(290e9, 650e12), "cpu": _Rates(1e9, 30e9)}
# Planning takes 5 to 40 ms on the host at EP 8 to 32, and takes about 0.3 of the busiest rank's rows away.
_PLAN_S, _TAKEN_AWAY = 0.01, 0.3


@dataclass(frozen=True, kw_only=True)
class BatchBalance:
    """When a layer balances a batch by its own counts, and with what.

    Attributes:
        spare_slots: scratch slots of each rank, shared by all layers of one kind.
        min_rows: rows (tokens times top_k) of the rank that has most, from which on a batch is balanced; None for as
            many as pay for the plan on CPUs, and for no batch on GPUs: the plan is made on the host, which takes longer
            than it saves there.
        copy_cost_rows: rows that a copy must take off the busiest rank; None for as many as are computed in the time
            that an expert is sent in.

    Raises:
        ValueError: a number out of its range.
        TypeError: a number that is not one, or not whole.
    """

    spare_slots: int = 2
    min_rows: int | None = None
    copy_cost_rows: float | None = None

    def __post_init__(self) -> None:
        check_at_least(1, spare_slots=self.spare_slots)
        if self.min_rows is not None:
            check_at_least(0, min_rows=self.min_rows)
        if self.copy_cost_rows is not None:
            check_not_negative(copy_cost_rows=self.copy_cost_rows)

    @classmethod
    def of(cls, choice: str | BatchBalance) -> BatchBalance | None:
        """What a layer's `batch_balance` says; None for "off". ValueError for what is neither a choice nor this."""
        if isinstance(choice, cls):
            return choice
        if choice not in CHOICES:
            raise ValueError(one_of("batch_balance", choice, CHOICES))
        return cls() if choice == "auto" else None


class BatchBalancer:
    """Balances the batches of one layer, to which its quantization method belongs."""

    def __init__(self, method: FusedMoEMethodBase, options: BatchBalance) -> None:
        self._method, self.options = method, options
        self._parts: _Parts | None = None

    @classmethod
    def make(cls, method: FusedMoEMethodBase, choice: str | BatchBalance) -> BatchBalancer | None:
        """None where it is off, or ranks do not hold whole experts that can move and no others."""
        options, config = BatchBalance.of(choice), method.moe_config
        parallel = config.moe_parallel_config
        if options is None or not (parallel.use_all2all and parallel.ep_size > 1):
            return None
        if config.num_fused_shared_experts or not method.supports_eplb:
            return None
        return cls(method, options)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the layer makes its own parts."""
        return {**self.__dict__, "_parts": None}

    def forget(self) -> None:
        """Drops what was made for the layer's kernels."""
        self._parts = None

    def may_pay_on(self, device: torch.device) -> bool:
        """Whether any batch is balanced; if not, ranks need not tell each other their numbers of tokens for it."""
        return self.options.min_rows is not None or device.type != "cuda"

    def min_rows(self, device: torch.device) -> int:
        """Rows of the rank that has most, from which on a batch is balanced."""
        if self.options.min_rows is not None:
            return self.options.min_rows
        return int(_PLAN_S / (_TAKEN_AWAY * self._row_s(device)))

    def _row_s(self, device: torch.device) -> float:
        """Seconds that one row takes one rank."""
        config = self._method.moe_config
        halves = 3 if MoEActivation.parse(config.activation).is_gated else 2
        flops = 2 * halves * config.hidden_dim * config.intermediate_size_per_partition
        return flops / _rates(device).flops_per_s

    def run(
        self, layer: MoELayer, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
        """What the layer's experts make of a batch, as `quant_method.apply`; None where nothing is to be balanced.

        Args:
            topk_ids: logical `[T, top_k]`, -1 for none.
        """
        resident = layer.modular_kernel
        if self._parts is None or self._parts.made_for is not resident:
            self._parts = _Parts(layer, self._method, resident, self.options.spare_slots)
        parts, config = self._parts, self._method.moe_config
        with stage("eplb_batch_plan"):
            slots = self._physical_to_logical(layer)
            valid = (topk_ids >= 0) & (topk_ids < layer.num_experts)
            ids = torch.where(valid, topk_ids, layer.num_experts).long()
            counts = torch.zeros(layer.num_experts + 1, dtype=torch.int64, device=ids.device)
            counts.scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten()))
            everyones = parts.exchange.gather(counts[:-1])
            cost = self.options.copy_cost_rows
            if cost is None:
                seconds = parts.resident_rows.row_bytes / _rates(hidden_states.device).link_bytes_per_s
                cost = seconds / self._row_s(hidden_states.device)
            plan = plan_batch(everyones, slots, parts.exchange.size, self.options.spare_slots, cost)
            if not plan.copies and slots.numel() == layer.num_experts:
                return None
            tell_copies(layer, len(plan.copies), parts.resident_rows.expert_bytes)
            parts.experts.expect(*parts.send_copies(plan, slots))
            places = parts.places(plan, slots).to(ids.device)
            extended = places_of(ids, plan.shares[parts.exchange.rank].to(ids.device), places)
        w1, w2 = self._method.gemm_weights(layer)
        return cast(
            "torch.Tensor | tuple[torch.Tensor, torch.Tensor]",
            parts.kernel(
                hidden_states,
                w1,
                w2,
                topk_weights,
                extended.to(parts.kernel.prepare_finalize.topk_indices_dtype() or torch.int32),
                activation=layer.activation,
                global_num_experts=config.num_experts + parts.exchange.size * self.options.spare_slots,
                expert_map=parts.expert_map(hidden_states.device),
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
            ),
        )

    def _physical_to_logical(self, layer: MoELayer) -> torch.Tensor:
        """The expert in each slot `[P]` at the moment, slots in rank order, on the host."""
        if layer.eplb_state is None:
            parallel = self._method.moe_config.moe_parallel_config
            owners = expert_owner_table(parallel.ep_size, layer.num_experts, parallel.expert_placement_strategy)
            return owners.argsort(stable=True)
        table = layer.eplb_state.logical_to_physical_map.cpu().long()
        expert, column = (table >= 0).nonzero(as_tuple=True)
        slots = torch.full((self._method.moe_config.num_experts,), -1, dtype=torch.int64, device="cpu")
        slots[table[expert, column]] = expert
        return slots


def places_of(ids: torch.Tensor, shares: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The slot of each row: of an expert's rows, in their order, the first shares[e, 0] go to rank 0, and so on.

    Args:
        ids: int64 `[T, top_k]`, logical, E for none.
        shares: int64 `[E, R]`.
        places: int64 `[E, R]`, the id of a slot with the expert on that rank.

    Returns:
        int64 `[T, top_k]`, -1 for none.
    """
    num_experts = shares.size(0)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=num_experts + 1)
    first = counts.cumsum(0) - counts
    nth = torch.empty_like(flat)
    nth[order] = torch.arange(flat.numel(), device=flat.device) - first[flat[order]]
    expert = flat.clamp(max=num_experts - 1)
    rank = (nth[:, None] >= shares.cumsum(dim=1)[expert]).sum(dim=1).clamp(max=shares.size(1) - 1)
    return torch.where(flat < num_experts, places[expert, rank], -1).view_as(ids)


class _Parts:
    """What a balanced pass runs with.

    Attributes:
        made_for: the layer's own kernel.
        kernel: the same with scratch slots behind the resident ones.
    """

    def __init__(
        self, layer: MoELayer, method: FusedMoEMethodBase, made_for: FusedMoEModularKernel, spare_slots: int
    ) -> None:
        config = method.moe_config
        parallel = config.moe_parallel_config
        self.made_for, self._spare_slots = made_for, spare_slots
        self._num_resident = config.num_local_experts
        # Of slots in rank order.
        self._owners = expert_owner_table(parallel.ep_size, config.num_experts)
        extended = replace(
            config,
            num_experts=config.num_experts + parallel.ep_size * spare_slots,
            num_local_experts=self._num_resident + spare_slots,
            moe_parallel_config=replace(parallel, expert_placement_strategy="linear"),
        )
        with torch.device("cpu"):
            backend = _method_for(method, extended).maybe_make_prepare_finalize(layer.groups.ep, layer.dispatch_dtype)
        exchange = backend.batch_exchange()
        if exchange is None:
            raise RuntimeError(f"{type(backend).__name__} of {layer.layer_name} has no exchange for balancing a batch")
        self.exchange: BatchExchange = exchange
        # Where the ids of each rank begin: resident slots, then scratch slots.
        self._widths = self._owners.bincount(minlength=parallel.ep_size)
        self._first = (self._widths + spare_slots).cumsum(0) - self._widths - spare_slots
        before = self._widths.cumsum(0) - self._widths
        self._local = torch.arange(config.num_experts, device="cpu") - before[self._owners.long()]
        self.resident_rows = ExpertRows([tensor[: self._num_resident] for tensor in method.expert_tensors(layer)])
        self._scratch = _ScratchSlots.of(layer, method, spare_slots)
        scratch_method = _method_for(method, replace(config, num_local_experts=spare_slots))
        proxy = self._scratch.as_layer(layer)
        self.experts = SplitExperts(
            made_for.fused_experts,
            scratch_method.select_gemm_impl(backend, proxy),
            scratch_method.gemm_weights(proxy),
            self._num_resident,
            spare_slots,
        )
        self.kernel = FusedMoEModularKernel(backend, self.experts, made_for.shared_experts)
        self._map: torch.Tensor | None = None

    def expert_map(self, device: torch.device) -> torch.Tensor:
        """int32: local index of each id, -1 where it is on another rank."""
        if self._map is None or self._map.device != device:
            first, width = int(self._first[self.exchange.rank]), self._num_resident + self._spare_slots
            num_ids = self._owners.numel() + self.exchange.size * self._spare_slots
            ids = torch.arange(num_ids, device="cpu") - first
            self._map = torch.where((ids >= 0) & (ids < width), ids, -1).to(device, torch.int32)
        return self._map

    def places(self, plan: BatchPlan, slots: torch.Tensor) -> torch.Tensor:
        """The id of a slot with each expert on each rank, int64 `[E, R]`; -1 where there is none."""
        found = torch.full(plan.shares.shape[1:], -1, dtype=torch.int64, device="cpu")
        found[slots, self._owners.long()] = self._first[self._owners.long()] + self._local
        for expert, _, rank, slot in plan.copies:
            found[expert, rank] = self._first[rank] + self._widths[rank] + slot
        return found

    def send_copies(self, plan: BatchPlan, slots: torch.Tensor) -> tuple[Pending[torch.Tensor], list[int], ExpertRows]:
        """Starts sending this rank's experts to the ranks that copy them, and receiving.

        Returns:
            The rows of bytes in flight, the scratch slot of each, and where they are to be written.
        """
        rank, size = self.exchange.rank, self.exchange.size
        # In the order of the other rank on both sides, and of slots there.
        sends = sorted((to, slot, expert) for expert, source, to, slot in plan.copies if source == rank)
        receives = sorted((source, slot) for _, source, to, slot in plan.copies if to == rank)
        rows = torch.empty(
            len(sends), self.resident_rows.row_bytes, dtype=torch.uint8, device=self.resident_rows.device
        )
        held = [int(((slots == expert) & (self._owners == rank)).int().argmax()) for _, _, expert in sends]
        self.resident_rows.pack([int(self._local[physical]) for physical in held], list(rows))
        sent, received = [0] * size, [0] * size
        for to, _, _ in sends:
            sent[to] += 1
        for source, _ in receives:
            received[source] += 1
        return self.exchange.send_rows(rows, sent, received), [slot for _, slot in receives], self._scratch.rows


class _ScratchSlots:
    """Weights of copied experts, one set for all layers of a process whose experts have the same tensors.

    Attributes:
        tensors: by the layer's names of them, `[spare_slots, ...]`.
        rows: the same as rows of bytes.
    """

    _shared: ClassVar[WeakValueDictionary[tuple[object, ...], _ScratchSlots]] = WeakValueDictionary()

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.rows = ExpertRows(list(tensors.values()))

    @classmethod
    def of(cls, layer: MoELayer, method: FusedMoEMethodBase, spare_slots: int) -> _ScratchSlots:
        tensors = method.expert_tensors(layer)
        named = {**layer._parameters, **layer._buffers}
        names = []
        for tensor in tensors:
            names.append(next(n for n, t in named.items() if t is not None and _same(t, tensor) and n not in names))
        shapes = [(name, tensor.shape[1:], tensor.dtype) for name, tensor in zip(names, tensors, strict=True)]
        key = (spare_slots, tensors[0].device, *shapes)
        found = cls._shared.get(key)
        if found is None:
            with torch.inference_mode(False):
                # Zeros: what a slot held before its first copy is never read as a number that is not one.
                made = [tensor.new_zeros((spare_slots, *tensor.shape[1:])) for tensor in tensors]
            found = cls._shared[key] = cls(dict(zip(names, made, strict=True)))
        return found

    def as_layer(self, layer: MoELayer) -> MoELayer:
        """A layer that has these experts and no others, for quantization methods to look at."""
        proxy = nn.Module()
        for name, tensor in self.tensors.items():
            if layer._parameters.get(name) is not None:
                proxy.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                proxy.register_buffer(name, tensor)
        told = ("layer_name", "experts", "dispatch_dtype", "input_dtype", "parallel_config", "enable_eplb")
        proxy.__dict__.update({name: getattr(layer, name) for name in told})
        return cast(MoELayer, proxy)


class SplitExperts(Experts, unchecked=True):
    """Experts of resident slots and of scratch slots behind them, each with weights of its own.

    Args:
        resident, scratch: two of one kind.
        scratch_weights: w1 and w2 of the scratch slots.
    """

    def __init__(
        self,
        resident: FusedMoEPermuteExpertsUnpermute,
        scratch: FusedMoEPermuteExpertsUnpermute,
        scratch_weights: tuple[torch.Tensor, torch.Tensor],
        num_resident: int,
        spare_slots: int,
    ) -> None:
        super().__init__(resident.moe_config, resident.quant_config)
        self._resident, self._run_resident, self._run_scratch = resident, as_experts(resident), as_experts(scratch)
        self._weights, self._num_resident, self._spare_slots = scratch_weights, num_resident, spare_slots
        self._arriving: tuple[Pending[torch.Tensor], list[int], ExpertRows] | None = None
        self._is_used = False

    def expect(self, pending: Pending[torch.Tensor], slots: list[int], rows: ExpertRows) -> None:
        """The copies of the next batch: rows of bytes in flight, and the scratch slot of each."""
        self._arriving, self._is_used = (pending, slots, rows), bool(slots)

    def num_local_experts(self, w1: torch.Tensor) -> int:
        return w1.size(0) + self._spare_slots

    def run(self, call: ExpertsCall) -> None:
        resident, scratch = self._divided(call)
        self._run_resident.run(resident)
        if self._arriving is not None:
            pending, slots, rows = self._arriving
            with stage("eplb_batch_copies"), torch.inference_mode():
                rows.write(list(pending.receive()), slots)
            self._arriving = None
        if not self._is_used:
            return
        if self.activation_format() is FusedMoEActivationFormat.BatchedExperts:
            self._run_scratch.run(scratch)
            return
        scratch = scratch._replace(output=torch.empty_like(call.output))
        self._run_scratch.run(scratch)
        if call.output.dim() == 2:
            call.output.add_(scratch.output)
            return
        # Slots of each row, of which each kind has written its own.
        local = cast(torch.Tensor, scratch.expert_map)[call.topk_ids.long().clamp(min=0)]
        there = (call.topk_ids >= 0) & (local >= 0)
        call.output.copy_(torch.where(there[..., None], scratch.output, call.output))

    def _divided(self, call: ExpertsCall) -> tuple[ExpertsCall, ExpertsCall]:
        count, (w1, w2) = self._num_resident, self._weights
        check_tensors(expert_map=call.expert_map)
        expert_map = cast(torch.Tensor, call.expert_map)
        resident = call._replace(expert_map=torch.where(expert_map < count, expert_map, -1))
        scratch = call._replace(expert_map=(expert_map - count).clamp(min=-1), w1=w1, w2=w2)
        if self.activation_format() is FusedMoEActivationFormat.Standard:
            return resident, scratch
        parts = []
        for part, at in ((resident, slice(None, count)), (scratch, slice(count, None))):
            ids, tokens = call.batch.expert_row_ids, call.batch.expert_num_tokens
            meta = ExpertTokensMetadata(tokens[at], expert_row_ids=None if ids is None else ids[at])
            rows, scales = part.hidden_states, part.row_scales
            if rows.dim() == 3:
                rows, scales = rows[at], None if scales is None else scales[at]
            parts.append(part._replace(output=part.output[at], hidden_states=rows, row_scales=scales, meta=meta))
        return parts[0], parts[1]

    def activation_format(self) -> FusedMoEActivationFormat:
        return self._resident.activation_format()

    def supports_expert_map(self) -> bool:
        return self._resident.supports_expert_map()

    def supports_chunking(self) -> bool:
        return self._resident.supports_chunking()

    def supports_row_ids(self) -> bool:
        return self._resident.supports_row_ids()

    def may_round_rows(self) -> bool:
        return self._resident.may_round_rows()

    def takes_quantized_rows(self) -> bool:
        return self._resident.takes_quantized_rows()

    def supports_f32_output(self) -> bool:
        return self._resident.supports_f32_output()

    def workspace_dtype(self, act_dtype: torch.dtype) -> torch.dtype:
        return self._resident.workspace_dtype(act_dtype)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        return self._resident.finalize_weight_and_reduce_impl()

    def workspace_shapes(self, *args: Any, **kwargs: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return self._run_resident.workspace_shapes(*args, **kwargs)  # type: ignore[no-any-return]

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        E, *sizes = self._run_resident.moe_problem_size(a1, w1, w2, topk_ids)
        return (E + self._spare_slots, *sizes)  # type: ignore[return-value]


def _method_for(method: FusedMoEMethodBase, config: FusedMoEConfig) -> FusedMoEMethodBase:
    """The method of the same weights for other numbers of experts."""
    other = copy.copy(method)
    other.moe_config = config
    return other


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.dtype == other.dtype


def _rates(device: torch.device) -> _Rates:
    return _RATES.get(device.type, _RATES["cpu"])

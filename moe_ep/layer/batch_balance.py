"""Balancing one batch by its own counts: a layer's hot experts are copied to other ranks for this batch alone.

A balanced pass, on every rank alike:

    exchange the batch's row counts per logical expert between all ranks      one small exchange
    plan which experts are copied where, and which rank computes which rows   `plan_batch`, or `rank_plan` on a GPU
    copy experts while rows are dispatched                                    any tensors, as bytes
    dispatch -> experts in resident and scratch slots -> combine              as in any other pass

Rows are addressed by slot ids that number each rank's resident slots and, behind them, its scratch slots. These are the
ids of a layer with more experts, so an ordinary backend for such a layer dispatches and combines. The experts are two
objects of the layer's own kind, one for the resident weights and one for the scratch slots. All layers of a process
whose experts have the same tensors share their scratch slots.

A rank whose weights are replaced makes its experts anew. It does so alone, unless peers keep the addresses of its
experts. The backend, and the state that decides whether a batch is balanced, are the same on all ranks and stay until
the layer's ranks change.

The result of a row does not depend on the rank that computes it. A token's sum is added in another order, because the
results of one rank are added first; in a batch-invariant layer even the sum has the same bits.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch import nn

from moe_ep.activation import MoEActivation
from moe_ep.arguments import check_tensors
from moe_ep.config import FusedMoEConfig
from moe_ep.distributed.exchange import largest_over_ranks
from moe_ep.eplb.batch_plan import RankPlan, plan_batch
from moe_ep.eplb.batch_rounds import place_rows, rank_plan
from moe_ep.eplb.packing import ExpertRows
from moe_ep.errors import check_at_least, check_not_negative, one_of
from moe_ep.expert_map import expert_owner_table
from moe_ep.layer.interface import MoELayer
from moe_ep.modular_kernel import FusedMoEModularKernel
from moe_ep.modular_kernel.adapters import as_experts
from moe_ep.modular_kernel.contracts import (
    BatchExchange,
    Copied,
    Experts,
    ExpertsCall,
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEPermuteExpertsUnpermute,
    FusedMoEPrepareAndFinalize,
    Pending,
)
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce
from moe_ep.observability.stages import stage, tell_copies

if TYPE_CHECKING:
    from moe_ep.layer.methods.base import FusedMoEMethodBase

CHOICES = ("auto", "off")


@dataclass(frozen=True, kw_only=True)
class _Rates:
    """The rates by which a balancer estimates whether balancing pays.

    Attributes:
        link_bytes_per_s: bytes that a rank can send.
        flops_per_s: operations of a rank's experts.
        plan_s: time of the exchange and the plan of an even batch.
        plan_share: the share of a batch's compute time that exchange and plan may take.
        probed_share: the same for smaller batches, which are balanced only as probes and while copies are made.
    """

    link_bytes_per_s: float
    flops_per_s: float
    plan_s: float
    plan_share: float
    probed_share: float


# gloo over loopback, f32 products of one core, plans at EP 8. Balancing removes about 0.3 of the busiest rank's rows.
_OF_CPUS = _Rates(link_bytes_per_s=1e9, flops_per_s=30e9, plan_s=0.01, plan_share=0.3, probed_share=0.3)
# NVLink between H200s, and the bf16 rate that the experts reach (docs/benchmarks). An even batch gains nothing.
_OF_GPUS = _Rates(link_bytes_per_s=290e9, flops_per_s=650e12, plan_s=28e-6, plan_share=0.01, probed_share=0.02)
# "meta": the rates are also needed before a layer has its weights.
_RATES = {"cuda": _OF_GPUS, "cpu": _OF_CPUS, "meta": _OF_CPUS}
# One batch in this many is a probe.
_PROBE_EVERY = 16


@dataclass(frozen=True, kw_only=True)
class BatchBalance:
    """Configures when a layer balances a batch by its own counts, and with how many scratch slots.

    Attributes:
        spare_slots: scratch slots of each rank, shared by all layers of one kind.
        min_rows: a batch is balanced if its busiest rank has at least this many rows (tokens times top_k). None
            chooses the number that pays for the plan. On GPUs over NVSHMEM, that is where the experts take 100 times as
            long as the plan; from half of it on, batches are balanced that follow one with copies, and one in 16. Over
            NCCL no batch is.
        copy_cost_rows: the least rows that a copy must take off the busiest rank. None chooses the number of rows that
            are computed in the time that sending an expert takes.

    Raises:
        ValueError: a number out of its range.
        TypeError: a value that is not a number, or not a whole one.
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
        """Parses a layer's `batch_balance`; None for "off". Raises ValueError for any other value."""
        if isinstance(choice, cls):
            return choice
        if choice not in CHOICES:
            raise ValueError(one_of("batch_balance", choice, CHOICES))
        return cls() if choice == "auto" else None


class Thresholds(NamedTuple):
    """Rows of the busiest rank.

    Attributes:
        probed: from here on a batch may be balanced.
        always: from here on it is.
    """

    probed: int
    always: int


class BatchBalancer:
    """Balances the batches of one layer; the layer's quantization method owns it.

    Attributes:
        had_copies: whether the last balanced batch had copies on any rank.
    """

    def __init__(self, method: FusedMoEMethodBase, options: BatchBalance) -> None:
        self._method, self.options = method, options
        self.had_copies, self._num_probed = False, 0
        self._transport: _Transport | None = None
        self._parts: _Parts | None = None
        self._slots: torch.Tensor | None = None

    @classmethod
    def make(cls, method: FusedMoEMethodBase, choice: str | BatchBalance) -> BatchBalancer | None:
        """Returns None if balancing is off, the layer has no EP ranks, or its experts cannot move between them."""
        options, config = BatchBalance.of(choice), method.moe_config
        parallel = config.moe_parallel_config
        if options is None or not (parallel.use_all2all and parallel.ep_size > 1):
            return None
        if config.num_fused_shared_experts or not method.supports_eplb:
            return None
        return cls(method, options)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the parts, which a copy of the layer makes for itself."""
        return {**self.__dict__, "_transport": None, "_parts": None}

    def forget(self) -> None:
        """Drops what was made for the layer's kernels. A rank may call it alone."""
        self._parts = None

    def regroup(self) -> None:
        """Drops everything; all ranks call it when the layer moves to other ranks."""
        self.had_copies, self._num_probed = False, 0
        self._transport = self._parts = None

    def thresholds(self, device: torch.device, on_device: bool) -> Thresholds | None:
        """Returns the sizes of batches from which on balancing pays; None if no batch is balanced.

        Args:
            on_device: whether the exchange stays on the GPU. If the host plans, no batch on a GPU pays for the wait.
        """
        least = self.options.min_rows
        if least is not None:
            return Thresholds(least, least)
        if device.type == "cuda" and not on_device:
            return None
        rates, row_s = _RATES[device.type], self._row_s(device)
        probed, always = (int(rates.plan_s / (share * row_s)) for share in (rates.probed_share, rates.plan_share))
        return Thresholds(probed, always)

    def takes(self, most_rows: int, thresholds: Thresholds) -> bool:
        """Whether a batch whose busiest rank has most_rows rows is balanced.

        All ranks ask once for each batch and get the same answer, which depends on state that they share.
        """
        if most_rows < thresholds.probed:
            return False
        if most_rows >= thresholds.always:
            return True
        self._num_probed += 1
        return self.had_copies or self._num_probed % _PROBE_EVERY == 1

    def _row_s(self, device: torch.device) -> float:
        """Seconds in which a rank computes one row."""
        return self._row_flops / _RATES[device.type].flops_per_s

    @functools.cached_property
    def _row_flops(self) -> int:
        config = self._method.moe_config
        matrices = 3 if MoEActivation.parse(config.activation).is_gated else 2
        return 2 * matrices * config.hidden_dim * config.intermediate_size_per_partition

    def run(
        self, layer: MoELayer, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
        """Balances and computes a batch, like `quant_method.apply`; returns None if there is nothing to balance.

        Args:
            topk_ids: logical ids `[T, top_k]`, -1 for no expert.
        """
        parts, config = self._parts_for(layer), self._method.moe_config
        exchange, spare_slots = parts.exchange, self.options.spare_slots
        with stage("eplb_batch_plan"):
            cost = self.options.copy_cost_rows
            if cost is None:
                device = hidden_states.device
                cost = parts.resident_rows.row_bytes / _RATES[device.type].link_bytes_per_s / self._row_s(device)
            counts = exchange.gather(topk_ids, layer.num_experts)
            slots = self._physical_to_logical(layer, counts.device)
            if counts.is_cuda:
                plan = rank_plan(counts, slots, exchange.rank, spare_slots, cost)
            else:
                whole = plan_batch(counts, slots, exchange.size, spare_slots, cost)
                if not whole.copies and slots.numel() == layer.num_experts:
                    self.had_copies = False
                    return None
                plan = whole.of_rank(exchange.rank, slots, spare_slots)
            extended = place_rows(topk_ids, RankPlan(*(tensor.to(topk_ids.device) for tensor in plan)))
            parts.experts.expect(parts.copies.start(plan.sources))
        w1, w2 = self._method.gemm_weights(layer)
        result = parts.kernel(
            hidden_states,
            w1,
            w2,
            topk_weights,
            extended.to(parts.kernel.prepare_finalize.topk_indices_dtype() or torch.int32),
            activation=layer.activation,
            global_num_experts=config.num_experts + exchange.size * spare_slots,
            expert_map=parts.expert_map(hidden_states.device),
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
        )
        copied = parts.experts.copied()
        self.had_copies = copied.total > 0
        tell_copies(layer, copied.total, parts.resident_rows.expert_bytes)
        copied.release()
        return cast("torch.Tensor | tuple[torch.Tensor, torch.Tensor]", result)

    def _parts_for(self, layer: MoELayer) -> _Parts:
        """The parts for the layer's present weights."""
        resident, spare_slots = layer.modular_kernel, self.options.spare_slots
        if self._transport is None:
            self._transport = _Transport.make(layer, self._method, spare_slots)
        parts = self._parts
        if parts is not None and parts.made_for is not resident:
            parts = None
        if self._transport.exchange.opens_together:
            # Peers hold the addresses of this rank's experts. If any rank lacks its parts, all recreate theirs.
            group = layer.groups.ep
            if largest_over_ranks(int(parts is None), group, "whether weights were replaced"):
                parts = None
        if parts is None:
            self._parts = None  # closes peers' memory before it is opened again
            parts = self._parts = _Parts(layer, self._method, resident, self._transport, spare_slots)
        return parts

    def _physical_to_logical(self, layer: MoELayer, device: torch.device) -> torch.Tensor:
        """The current expert of each slot, int32 `[P]`, slots in rank order. Does not wait for the GPU."""
        state = layer.eplb_state
        if state is None:
            if self._slots is None or self._slots.device != device:
                parallel = self._method.moe_config.moe_parallel_config
                owners = expert_owner_table(parallel.ep_size, layer.num_experts, parallel.expert_placement_strategy)
                self._slots = owners.argsort(stable=True).to(device, torch.int32)
            return self._slots
        if state.physical_to_logical_map is not None:
            return state.physical_to_logical_map.to(device)
        table = state.logical_to_physical_map.to(device).long()
        num_slots = self._method.moe_config.num_experts
        slots = torch.full((num_slots + 1,), -1, dtype=torch.int32, device=device)
        experts = torch.arange(table.size(0), dtype=torch.int32, device=device)[:, None].expand_as(table)
        slots.scatter_(0, torch.where(table >= 0, table, num_slots).flatten(), experts.flatten())
        return slots[:-1]


class _Transport(NamedTuple):
    """Moves rows and experts between the ranks; independent of the addresses of a rank's weights."""

    backend: FusedMoEPrepareAndFinalize
    exchange: BatchExchange

    @classmethod
    def make(cls, layer: MoELayer, method: FusedMoEMethodBase, spare_slots: int) -> _Transport:
        """Makes the backend for resident and scratch slots; a collective step of the layer's ranks."""
        config = method.moe_config
        parallel = config.moe_parallel_config
        extended = replace(
            config,
            num_experts=config.num_experts + parallel.ep_size * spare_slots,
            num_local_experts=config.num_local_experts + spare_slots,
            moe_parallel_config=replace(parallel, expert_placement_strategy="linear"),
        )
        with torch.device("cpu"):
            backend = _method_for(method, extended).maybe_make_prepare_finalize(layer.groups.ep, layer.dispatch_dtype)
        exchange = backend.batch_exchange()
        if exchange is None:
            raise RuntimeError(f"{type(backend).__name__} of {layer.layer_name} has no exchange for balancing a batch")
        return cls(backend, exchange)


class _Parts:
    """The objects that a balanced pass uses.

    Attributes:
        made_for: the layer's own kernel.
        kernel: a kernel like it that has scratch slots behind the resident ones.
    """

    def __init__(
        self,
        layer: MoELayer,
        method: FusedMoEMethodBase,
        made_for: FusedMoEModularKernel,
        transport: _Transport,
        spare_slots: int,
    ) -> None:
        config, backend, exchange = method.moe_config, transport.backend, transport.exchange
        self.made_for, self.exchange, self._spare_slots = made_for, exchange, spare_slots
        self._num_resident = config.num_local_experts
        self._num_ids = config.num_experts + exchange.size * spare_slots
        # Where this rank's ids begin: resident slots, then scratch slots.
        before = (expert_owner_table(exchange.size, config.num_experts) < exchange.rank).sum()
        self._first = int(before) + exchange.rank * spare_slots
        self.resident_rows = ExpertRows([tensor[: self._num_resident] for tensor in method.expert_tensors(layer)])
        self._scratch = _ScratchSlots.of(layer, method, spare_slots)
        there, here = ([part for part, _ in rows.parts] for rows in (self.resident_rows, self._scratch.rows))
        self.copies = exchange.open(there, here, config.num_experts)
        num_experts = max(config.num_experts, spare_slots)
        scratch_method = _method_for(method, replace(config, num_experts=num_experts, num_local_experts=spare_slots))
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
        """int32 `[ids]`: the local index of each id, or -1 for an id of another rank."""
        if self._map is None or self._map.device != device:
            ids = torch.arange(self._num_ids, device="cpu") - self._first
            is_here = (ids >= 0) & (ids < self._num_resident + self._spare_slots)
            self._map = torch.where(is_here, ids, -1).to(device, torch.int32)
        return self._map


class _ScratchSlots:
    """Weights of copied experts, one set for all layers of a process whose experts have the same tensors.

    Attributes:
        tensors: `[spare_slots, ...]` by parameter name.
        rows: the same tensors as rows of bytes.
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
                # Zeros, so that a slot without a copy never holds NaN.
                made = [tensor.new_zeros((spare_slots, *tensor.shape[1:])) for tensor in tensors]
            found = cls._shared[key] = cls(dict(zip(names, made, strict=True)))
        return found

    def as_layer(self, layer: MoELayer) -> MoELayer:
        """Returns a stand-in for the layer, with these experts alone, that quantization methods can read."""
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
    """Experts of resident slots and, behind them, of scratch slots; each of the two has its own weights.

    Args:
        resident, scratch: two experts of the same class.
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
        self._resident, self._scratch = resident, scratch
        self._run_resident, self._run_scratch = as_experts(resident), as_experts(scratch)
        self._weights, self._num_resident, self._spare_slots = scratch_weights, num_resident, spare_slots
        self._arriving: Pending[Copied] | None = None
        self._copied = Copied(0, 0)
        self._maps: tuple[torch.Tensor, ...] = ()
        self._scratch_has_run = self._sums_are_left = False

    def leave_slots(self) -> None:
        self._sums_are_left = True
        for experts in (self._resident, self._scratch):
            experts.leave_slots()

    def expect(self, copies: Pending[Copied]) -> None:
        """Takes the copies of the next batch, which are in flight."""
        self._arriving = copies

    def copied(self) -> Copied:
        """Returns the copies of the batch; in stream order, they are in their slots."""
        if self._arriving is not None:
            with stage("eplb_batch_copies"), torch.inference_mode():
                self._copied = self._arriving.receive()
            self._arriving = None
        return self._copied

    def num_local_experts(self, w1: torch.Tensor) -> int:
        return w1.size(0) + self._spare_slots

    def run(self, call: ExpertsCall) -> None:
        resident, scratch = self._divided(call)
        self._run_resident.run(resident)
        copied = self.copied()
        # In the first batch with copies all ranks run the scratch slots, even those without copies. If only some ranks
        # compiled the kernels then, the others would wait in the combine.
        if not copied.here and (self._scratch_has_run or not copied.total):
            return
        self._scratch_has_run = True
        is_batched = self.activation_format() is FusedMoEActivationFormat.BatchedExperts
        # Both write only their own rows, or their own slots if these are left to the combine, so in place is safe.
        if is_batched or (self._sums_are_left and call.output.dim() == 3):
            self._run_scratch.run(scratch)
            return
        scratch = scratch._replace(output=torch.empty_like(call.output))
        self._run_scratch.run(scratch)
        if call.output.dim() == 2:
            call.output.add_(scratch.output)
            return
        # Each has written its own slots of each row; take those of the scratch experts from their output.
        local = cast(torch.Tensor, scratch.expert_map)[call.topk_ids.long().clamp(min=0)]
        there = (call.topk_ids >= 0) & (local >= 0)
        call.output.copy_(torch.where(there[..., None], scratch.output, call.output))

    def _divided(self, call: ExpertsCall) -> tuple[ExpertsCall, ExpertsCall]:
        count, (w1, w2) = self._num_resident, self._weights
        check_tensors(expert_map=call.expert_map)
        expert_map = cast(torch.Tensor, call.expert_map)
        if not self._maps or self._maps[0] is not expert_map:
            self._maps = expert_map, torch.where(expert_map < count, expert_map, -1), (expert_map - count).clamp(min=-1)
        resident = call._replace(expert_map=self._maps[1])
        scratch = call._replace(expert_map=self._maps[2], w1=w1, w2=w2)
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
    """Returns a copy of the method for other numbers of experts."""
    other = copy.copy(method)
    other.moe_config = config
    return other


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.dtype == other.dtype

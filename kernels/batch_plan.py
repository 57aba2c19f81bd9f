"""The plan of a batch and the places of its rows as CUDA kernels, as `moe_ep.eplb.batch_rounds` has them in torch."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

from moe_ep.eplb.batch_rounds import RankPlan, place_rows_reference, rank_plan_reference
from moe_ep.kernels import jit

CUDA = Path(__file__).parent / "cuda"
PLAN_THREADS = ROWS_THREADS = 1024
_TRIES = 9
# Limits of cuda/batch_plan.cu: ranks are lanes of a warp, and any GPU has this much shared memory.
_MOST_RANKS, _MOST_SLOTS, _MOST_SHARED = 32, 1024, 48 * 1024


class PlanParams(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("counts", "slots", "shares", "places", "sources")),
        *((name, ctypes.c_int) for name in ("rank", "copy_cost")),
    )


class RowsParams(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in ("ids", "shares", "places", "out")), ("num_rows", ctypes.c_int))


@cache
def plan_source(num_experts: int, num_slots: int, num_ranks: int, spare_slots: int) -> jit.KernelSource:
    """The kernel of plans for a layer of these sizes."""
    sizes = {"EXPERTS": num_experts, "SLOTS": num_slots, "RANKS": num_ranks, "SPARE": spare_slots}
    sizes["THREADS"] = PLAN_THREADS
    return jit.KernelSource(CUDA / "batch_plan.cu", "batch_plan", tuple((key, str(n)) for key, n in sizes.items()))


@cache
def rows_source(num_experts: int, num_ranks: int, ids: torch.dtype) -> jit.KernelSource:
    """The kernel of places, for ids int32 or int64."""
    sizes = {"EXPERTS": num_experts, "RANKS": num_ranks, "IDS_64": int(ids == torch.int64), "THREADS": ROWS_THREADS}
    return jit.KernelSource(CUDA / "batch_rows.cu", "batch_rows", tuple((key, str(n)) for key, n in sizes.items()))


@cache
def _load(source: jit.KernelSource, device: torch.device) -> jit.Kernel:
    return jit.load(source, device)


def plan_fits(num_experts: int, num_slots: int, num_ranks: int, spare_slots: int) -> bool:
    """Whether the kernel of plans takes such a layer."""
    copies = num_ranks * spare_slots
    of_try = 4 * num_slots + 6 * copies + 4 * num_ranks + 12
    shared = 9 * num_slots + 13 * num_experts + 4 * num_ranks + 32 + _TRIES * of_try
    return num_ranks <= _MOST_RANKS and num_slots <= _MOST_SLOTS and copies <= PLAN_THREADS and shared < _MOST_SHARED


def rank_plan(
    counts: torch.Tensor, physical_to_logical: torch.Tensor, rank: int, spare_slots: int, copy_cost_rows: int
) -> RankPlan:
    """As `rank_plan_reference`, which takes what does not fit, and for which the host waits."""
    num_ranks, num_experts = counts.shape
    sizes = (num_experts, physical_to_logical.numel(), num_ranks, spare_slots)
    if not plan_fits(*sizes):
        return rank_plan_reference(counts, physical_to_logical, rank, spare_slots, copy_cost_rows)
    plan, params, held = prepare_plan(counts, physical_to_logical, rank, spare_slots, copy_cost_rows)
    _load(plan_source(*sizes), counts.device).launch(params, (1,), PLAN_THREADS, early=True)
    del held  # in stream order
    return plan


def prepare_plan(
    counts: torch.Tensor, physical_to_logical: torch.Tensor, rank: int, spare_slots: int, copy_cost_rows: int
) -> tuple[RankPlan, PlanParams, tuple[torch.Tensor, ...]]:
    """The tensors that the kernel writes, its parameters, and what it reads, which must live as long."""
    num_ranks, num_experts = counts.shape
    counts, slots = counts.to(torch.int32).contiguous(), physical_to_logical.to(torch.int32).contiguous()
    shares = torch.empty((num_experts, num_ranks), dtype=torch.int32, device=counts.device)
    plan = RankPlan(shares, torch.empty_like(shares), shares.new_empty((num_ranks, spare_slots)))
    return plan, PlanParams(*map(jit.pointer, (counts, slots, *plan)), rank, copy_cost_rows), (counts, slots)


def place_rows(ids: torch.Tensor, plan: RankPlan) -> torch.Tensor:
    """As `place_rows_reference`, which takes what does not fit, and for which the host waits.

    The ids must have been there before the plan's kernel was launched.
    """
    num_experts, num_ranks = plan.shares.shape
    if (ROWS_THREADS // 32 + 4) * num_experts >= _MOST_SHARED:
        return place_rows_reference(ids, plan)
    out, params, held = prepare_rows(ids, plan)
    grid = (-(-ids.numel() // ROWS_THREADS),)  # a thread has one row
    _load(rows_source(num_experts, num_ranks, held.dtype), ids.device).launch(params, grid, ROWS_THREADS, early=True)
    del held  # in stream order
    return out


def prepare_rows(ids: torch.Tensor, plan: RankPlan) -> tuple[torch.Tensor, RowsParams, torch.Tensor]:
    """The tensor that the kernel writes, its parameters, and the ids that it reads, which must live as long."""
    ids = ids.contiguous() if ids.dtype == torch.int64 else ids.to(torch.int32).contiguous()
    out = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    return out, RowsParams(*map(jit.pointer, (ids, plan.shares, plan.places, out)), ids.numel()), ids

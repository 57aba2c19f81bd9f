"""Base of the backends on symmetric memory: shared buffers, failed waits on the device, and excluded ranks.

A kernel whose wait times out writes a record to pinned memory (kernels/cuda/deadline.cuh). The host reads it before it
launches the next kernel, without waiting for the GPU. Until the record is cleared, kernels of the same ranks do not
wait any more. When the ranks change, the host sets a word of the record, which also ends the waits of running kernels.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.dispatch.batch import Batch
from moe_ep.dispatch.nvshmem import arena
from moe_ep.dispatch.nvshmem.kernels import BufferLayout
from moe_ep.dispatch.rank_group import RankGroup
from moe_ep.dispatch.torch_distributed import TorchDistributedPrepareFinalize
from moe_ep.distributed.exchange import check_agreement, gather_texts
from moe_ep.distributed.membership import is_elastic
from moe_ep.errors import BackendUnavailableError, DispatchTimeoutError, RanksChangedError, rank_list
from moe_ep.kernels import jit
from moe_ep.modular_kernel.contracts import BatchExchange, Compilation

# Words of the record, as in kernels/cuda/deadline.cuh; one word for each rank follows.
_FAILED, _PHASE, _EPOCH, _ENDED, _RANKS = range(5)
_PHASES = {1: "dispatch", 2: "combine"}


class FailureRecord:
    """The record of one rank, and the error that it stands for.

    Args:
        timeout_s: the longest time that kernels wait.
        words: int32 `[4 + R]`, pinned if kernels write it; None allocates it.
    """

    def __init__(self, ranks: RankGroup, timeout_s: float, words: torch.Tensor | None = None) -> None:
        self.timeout_s = timeout_s
        self._ranks = ranks
        if words is None:
            words = torch.zeros(_RANKS + ranks.size, dtype=torch.int32, device="cpu", pin_memory=True)
        self.words = words
        self._numbers = words.numpy()
        self._ended_by = ""

    def end(self, why: str) -> None:
        """Ends all waits permanently, also those of running kernels."""
        self._ended_by = why
        self._numbers[_ENDED] = 1

    def check(self) -> None:
        """Raises DispatchTimeoutError if a wait has failed or was ended; costs one read of host memory."""
        if self._ended_by:
            raise RanksChangedError(self._ended_by)
        if self._numbers[_FAILED]:
            raise self._error()

    def clear(self) -> None:
        self._numbers[:_ENDED] = self._numbers[_RANKS:] = 0

    def _error(self) -> DispatchTimeoutError:
        named = self._ranks.ep_ranks
        missing = [named[rank] for rank in range(self._ranks.size) if self._numbers[_RANKS + rank]]
        phase, epoch = _PHASES[int(self._numbers[_PHASE])], int(self._numbers[_EPOCH]) & 0xFFFFFFFF
        story = (
            f"the {phase} of batch {epoch} did not finish on EP rank {named[self._ranks.rank]}: {rank_list(missing)} "
            f"sent nothing for {self.timeout_s:g} s (MOE_EP_NVSHMEM_TIMEOUT_S)"
        )
        try:
            refusals = {rank: text for rank, text in self._ranks.detector.refusals().items() if rank in missing}
        except RuntimeError as error:
            refusals = {}
            story += f"; the ranks' store cannot be reached ({error})"
        reasons = "; ".join(f"rank {rank} {text}" for rank, text in refusals.items())
        return DispatchTimeoutError(
            f"{story}; {reasons or 'it is dead, stuck or late'}; end the process, or end that one and go on without it "
            f"with recover(dead=...)",
            missing,
        )


_made: WeakKeyDictionary[arena.SymmetricArena, WeakValueDictionary[str, SymmetricBuffers]] = WeakKeyDictionary()


class SymmetricBuffers(ABC):
    """Buffers of one shape in symmetric memory and the state of this rank's kernels, shared by all layers of the shape.

    Args:
        symmetric: the arena in which the buffers are reserved, a collective step of the ranks.

    Attributes:
        NAME, INSTEAD: the backend's name, and that of a backend for layers that this one refuses.
        layout: the layout of the buffers.
        region: the buffers.
        record: failed waits, for the host.
        alive: the EP ranks that take part.
        status: int32 `[2]`, state of the kernels' waits: whether one has failed, and a bit mask of the ranks alive.
        order: the order of this process's kernels.
        recoveries: how often `recover` abandoned all open batches.

    Raises:
        BackendUnavailableError: a rank's memory is out of reach, and NVSHMEM's device library is not used.
    """

    NAME: ClassVar[str]
    INSTEAD: ClassVar[str]
    layout: BufferLayout

    @torch.inference_mode(False)
    def __init__(self, symmetric: arena.SymmetricArena, layout: BufferLayout, ranks: RankGroup) -> None:
        self.ranks, self.device, self.order = ranks, symmetric.device, symmetric.order
        self.layout = layout
        self.region = symmetric.reserve(layout.symmetric_bytes, self.NAME)
        unreachable = [str(rank) for rank, pointer in enumerate(self.region.peers) if not pointer]
        if unreachable and not layout.device_api:
            raise BackendUnavailableError(
                f"{self.NAME} needs every rank's memory within reach and EP rank {ranks.rank} cannot reach "
                f"{', '.join(unreachable)}; use all2all_backend={self.INSTEAD!r}"
            )
        self.record = FailureRecord(ranks, env.NVSHMEM_TIMEOUT_S.get())
        ranks.detector.ends_also(self.record)
        self.alive = list(range(ranks.size))
        self.recoveries = 0
        self.status = torch.zeros(2, dtype=torch.int32, device=self.device)

    @classmethod
    def of(cls, layout: BufferLayout, ranks: RankGroup, settings: dict[str, object], *more: torch.dtype) -> Self:
        """Returns the buffers of this shape, allocating them if any rank has none; a collective step of the ranks.

        Args:
            settings: the settings that must be the same on every rank.
            more: further constructor arguments.

        Raises:
            ValueError: the settings differ.
            DispatchTimeoutError: a rank did not join.
        """
        symmetric = arena.SymmetricArena.of(ranks.group)
        check_agreement(cls.NAME, settings, ranks.group)
        # Groups that divide the default group make symmetric memory together, so what each still has of a shape must
        # not depend on when its processes happened to collect garbage.
        if dist.is_initialized() and ranks.size < dist.get_world_size():
            gc.collect()
        known, key = _made.setdefault(symmetric, WeakValueDictionary()), f"{cls.NAME} {layout} {more}"
        found = known.get(key)
        everywhere = gather_texts(f"buffers of {cls.NAME}", "lacks" if found is None else "has", ranks.group)
        if not isinstance(found, cls) or "lacks" in everywhere:
            found = known[key] = cls(symmetric, layout, ranks, *more)
        return found

    def part(self, batch: int, name: str) -> torch.Tensor:
        """Returns a view of the bytes of one buffer of a batch."""
        start = batch * self.layout.batch_bytes + self.layout.offsets[name]
        return self.region.local[start : start + self.layout.sizes[name]]

    def recover(self, dead: Sequence[int]) -> None:
        """Excludes the EP ranks in `dead`; collective over the others, all of which abandon their open batches."""
        alive = [rank for rank in range(self.ranks.size) if rank not in dead]
        torch.cuda.synchronize(self.device)
        mine = " ".join(map(str, self._epochs()))
        self.ranks.detector.exclude(dead)
        told = gather_texts(f"recovery of {self.NAME}", mine, self.ranks.group, ranks=alive)
        self.alive = alive
        self.recoveries += 1
        self._go_on([[int(epoch) for epoch in text.split()] for text in told])
        self.record.clear()
        gather_texts(f"{self.NAME} recovered", "", self.ranks.group, ranks=alive)

    def _let_kernels_wait(self) -> None:
        """Clears the status for the ranks that are alive."""
        self.status.copy_(torch.tensor([0, sum(1 << rank for rank in self.alive)], dtype=torch.int32))
        torch.cuda.synchronize(self.device)

    @abstractmethod
    def begins_anew(self) -> bool:
        """Whether the next batch takes the first buffers of all, on every rank, and no batch needs them."""

    @abstractmethod
    def _epochs(self) -> Sequence[int]:
        """The numbers of this rank's latest batches; called while the GPU is idle."""

    @abstractmethod
    def _go_on(self, told: Sequence[Sequence[int]]) -> None:
        """Frees all buffers, and numbers the next batches after those of every rank, which `_epochs` returned there."""


def check_of_batch(memory: SymmetricBuffers) -> Callable[[], None]:
    """Returns the check of a batch that begins now. It raises RuntimeError once `recover` of any layer that shares the
    memory has abandoned the batch."""
    number = memory.recoveries

    def check() -> None:
        if memory.recoveries != number:
            raise RuntimeError(
                "this batch was given up by recover(), of this layer or of one that shares its memory; prepare it again"
            )

    return check


Memory = TypeVar("Memory", bound=SymmetricBuffers)


class NvshmemPrepareFinalize(TorchDistributedPrepareFinalize):
    """A backend whose kernels write into the other ranks' memory; a subclass makes a layout and shares memory.

    Attributes:
        NAME: the backend's name.
        INSTEAD: the name of a backend for layers that this one refuses.
        MAX_RANKS: the most ranks of a group.
        LAYOUT: the class of `layout`.
        memory: the buffers and state that the layers of this shape share.
        layout: the layout of the buffers in it.
        kernels: the kernels by name.

    Raises:
        ValueError: a layer or group that the kernels do not support.
    """

    NAME: ClassVar[str]
    INSTEAD: ClassVar[str]
    MAX_RANKS: ClassVar[int]
    LAYOUT: ClassVar[type[BufferLayout]]
    hidden_size_multiple = 16
    _recoveries = 0
    memory: SymmetricBuffers
    layout: BufferLayout
    kernels: dict[str, jit.Kernel]

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        refusal = self.refuses(self.moe_config)
        if refusal is not None:
            raise ValueError(f"{refusal}; all2all_backend='{self.INSTEAD}' has no such rule")

    def _share_memory(self, kind: type[Memory], *more: torch.dtype) -> Memory:
        """Finds or makes the memory of this shape, and loads the kernels; a collective step (`SymmetricBuffers.of`)."""
        dtype = self.moe_config.in_dtype
        memory = kind.of(self.layout, self.ranks, shared_settings(self.moe_config, self.layout), *more)
        self.memory, self.kernels = memory, jit.load_all(self.layout.sources(dtype), memory.device)
        self.placement.expert_map(memory.device)  # not made under capture
        if self.ranks.rank == 0 and is_elastic(self.ranks.group):
            # Ranks that remain after a death would compile these before they serve again.
            jit.compile_elsewhere(self.layout.sources_of_changes(dtype, self.MAX_RANKS), memory.device)
        return memory

    @classmethod
    def compilations(
        cls, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig, device: torch.device
    ) -> Sequence[Compilation]:
        if cls.unusable_reason() is not None or cls.refuses(moe_config) is not None:
            return ()
        return list(cls.LAYOUT.of(moe_config, quant_config).sources(moe_config.in_dtype).values())

    @classmethod
    def unusable_reason(cls) -> str | None:
        return arena.unusable_reason() or jit.unusable_reason()

    @classmethod
    def depends_on_batch(cls) -> str | None:
        return "it adds up the results of a rank's experts before they return"

    @classmethod
    def refuses(cls, moe_config: FusedMoEConfig) -> str | None:
        config, most, multiple = moe_config, cls.MAX_RANKS, cls.hidden_size_multiple
        rules = (
            (config.ep_size <= most, "ep_size", config.ep_size, f"be at most {most}"),
            (config.num_local_experts < 1 << 16, "num_local_experts", config.num_local_experts, "be below 65536"),
            (config.hidden_dim % multiple == 0, "hidden_dim", config.hidden_dim, f"be a multiple of {multiple}"),
            (config.in_dtype is not torch.float32, "in_dtype", config.in_dtype, "be torch.float16 or bfloat16"),
        )
        broken = (
            f"{name} is {value}; for {cls.NAME} it must {rule}" for holds, name, value, rule in rules if not holds
        )
        return next(broken, None)

    def batch_exchange(self) -> BatchExchange | None:
        return None

    def passes_codes(self, dtype: torch.dtype | None) -> bool:
        return dtype == self.layout.passed_dtype

    def max_num_tokens_per_rank(self) -> int | None:
        return self.moe_config.max_num_tokens

    def around_replay(self) -> AbstractContextManager[None] | None:
        # A graph's batch goes through the buffers that were next when it was captured.
        if not self.memory.begins_anew():
            return None
        self.check()
        return self.memory.order

    def check(self) -> None:
        """Raises DispatchTimeoutError if a wait in a finished kernel timed out; no host synchronization."""
        self.memory.record.check()

    def recover(self, dead: Sequence[int]) -> None:
        """Excludes the EP ranks `dead`, whose slots add nothing from now on; all other ranks call it together.

        The processes of dead ranks must have ended: a rank that is only late may still write into the others' memory.

        Batches between dispatch and combine are abandoned, also those of other layers of this shape, because they share
        the memory that this resets.
        """
        self._forget_batches()
        self.memory.recover(dead)

    def tokens_hit(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Returns which tokens lose a slot because its expert's rank was declared dead, bool `[T]`."""
        lost = torch.tensor([rank not in self.memory.alive for rank in range(self.ranks.size)], device=topk_ids.device)
        owners = self.placement.owners(topk_ids.device)[topk_ids.long().clamp(min=0)].long()
        return (lost[owners] & (topk_ids >= 0)).any(dim=1)

    def _begin_batch(self) -> Callable[[], None]:
        """Drops abandoned batches, and returns the check of a new one."""
        if self._recoveries != self.memory.recoveries:
            self._forget_batches()
            self._recoveries = self.memory.recoveries
        return check_of_batch(self.memory)

    def _must_agree(self, quant_config: FusedMoEQuantConfig, is_weighted: bool, device: torch.device) -> None:
        """Does nothing, because the ranks agreed when their backends were made."""

    def _check_batch(self, batch: Batch) -> None:
        """Raises ValueError if the kernels were not compiled for such a batch."""
        name = "dispatch_dtype" if batch.scales is None else "passed_dtype"
        dtype = self.layout.code_dtype if batch.scales is None else self.layout.passed_dtype
        given, made_for = (batch.code_dtype, batch.rows.device), (dtype, self.memory.order.device)
        if given != made_for:
            raise ValueError(
                f"the batch has ({name}, device) {given} and {self.NAME} was made for {made_for}; give the backend the "
                f"configuration of the batches"
            )


def shared_settings(moe_config: FusedMoEConfig, layout: BufferLayout) -> dict[str, object]:
    """The settings that must be the same on every rank."""
    names = (
        *("hidden_dim", "num_experts", "num_fused_shared_experts", "experts_per_token", "max_num_tokens", "in_dtype"),
        *("batch_invariant", "activation"),
    )
    return {
        **{name: getattr(moe_config, name) for name in names},
        "expert_placement_strategy": moe_config.moe_parallel_config.expert_placement_strategy,
        "rows on the wire": layout.code_dtype or moe_config.in_dtype,
        "codes that are passed on": layout.passed_dtype,
        "batches in flight": layout.batches_in_flight,
        "overlap": layout.overlaps,
        "puts by NVSHMEM's device library": layout.device_api,
    }

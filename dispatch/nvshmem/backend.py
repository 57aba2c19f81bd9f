"""What the backends on symmetric memory share: rules, failures of waits on the device, and excluded ranks.

A wait in a kernel that takes too long ends with a record in pinned memory (kernels/cuda/deadline.cuh). The host looks
at it, without waiting for the GPU, whenever it is about to launch the next kernel. Until the record is cleared, kernels
of the same ranks do not wait any more. Where the ranks change, the host ends the waits of running kernels too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import ClassVar, Protocol

import torch

from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.dispatch.batch import Batch
from moe_ep.dispatch.nvshmem import arena
from moe_ep.dispatch.nvshmem.kernels import Shape
from moe_ep.dispatch.nvshmem.order import Order
from moe_ep.dispatch.rank_group import RankGroup
from moe_ep.dispatch.torch_distributed import TorchDistributedPrepareFinalize
from moe_ep.errors import DispatchTimeoutError, RanksChangedError, rank_list
from moe_ep.kernels import jit
from moe_ep.kernels.kernel import Kernel
from moe_ep.modular_kernel.contracts import BatchExchange

# Words of the record, as in kernels/cuda/deadline.cuh; one word for each rank follows.
_FAILED, _PHASE, _EPOCH, _RANKS = range(4)
_PHASES = {1: "dispatch", 2: "combine"}
# kWaitsEnded in that header.
_ENDED = 2


class FailureRecord:
    """The record of one rank, and the error that it stands for.

    Args:
        timeout_s: what the kernels wait at most.
        words: int32 `[3 + R]`, pinned where kernels write it; None makes it.
    """

    def __init__(self, ranks: RankGroup, timeout_s: float, words: torch.Tensor | None = None) -> None:
        self.timeout_s = timeout_s
        self._ranks = ranks
        if words is None:
            words = torch.zeros(_RANKS + ranks.size, dtype=torch.int32, device="cpu", pin_memory=True)
        self.words = words
        self._numbers = words.numpy()
        self._ended_by = ""

    def covers(self, status: torch.Tensor) -> None:
        """Lets the waits that look at this status, int32 `[2]` on the device, end where the ranks change."""
        self._status, self._ended = status[:1], torch.full((1,), _ENDED, dtype=torch.int32, device="cpu")
        if status.is_cuda:
            # A stream of its own: others wait for the kernels whose waits are to end.
            self._ended, self._stream = self._ended.pin_memory(), torch.cuda.Stream(status.device)
        self._ranks.detector.ends_also(self)

    def end(self, why: str) -> None:
        """Ends all waits, also those of running kernels."""
        self._ended_by = why
        with torch.cuda.stream(self._stream) if self._status.is_cuda else nullcontext():
            self._status.copy_(self._ended, non_blocking=True)

    def check(self) -> None:
        """DispatchTimeoutError where a wait has failed or was ended; costs a read of host memory."""
        if self._ended_by:
            raise RanksChangedError(self._ended_by)
        if self._numbers[_FAILED]:
            raise self._error()

    def clear(self) -> None:
        self.words.zero_()

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


class SharedMemory(Protocol):
    """Symmetric memory in which the ranks of a backend meet, shared by the layers of one shape.

    Attributes:
        alive: the ranks that were not declared dead.
        order: of this process's kernels.
        recoveries: how often `recover` gave up all open batches.
    """

    record: FailureRecord
    order: Order
    recoveries: int

    @property
    def alive(self) -> Collection[int]: ...

    def recover(self, dead: Sequence[int]) -> None: ...


def check_of_batch(memory: SharedMemory) -> Callable[[], None]:
    """The check of a batch that begins now: it raises RuntimeError once `recover` of any layer that shares the memory
    has given the batch up."""
    number = memory.recoveries

    def check() -> None:
        if memory.recoveries != number:
            raise RuntimeError(
                "this batch was given up by recover(), of this layer or of one that shares its memory; prepare it again"
            )

    return check


class NvshmemPrepareFinalize(TorchDistributedPrepareFinalize):
    """A backend whose kernels write into the other ranks' memory; a subclass sets the last three.

    Attributes:
        NAME: of the backend.
        INSTEAD: a backend that takes what this one refuses.
        MAX_RANKS: of a group.
        memory: what the layers of this shape share.
        layout: of the buffers in it.
        kernels: by their names.
    """

    NAME: ClassVar[str]
    INSTEAD: ClassVar[str]
    MAX_RANKS: ClassVar[int]
    hidden_size_multiple = 16
    # Kernels convert rows of 8 bits as they arrive.
    keeps_codes = False
    _recoveries = 0
    memory: SharedMemory
    layout: Shape
    kernels: dict[str, Kernel]

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

    def max_num_tokens_per_rank(self) -> int | None:
        return self.moe_config.max_num_tokens

    def accepts_f32_output(self) -> bool:
        return True

    def _as_sent(self, expert_output: torch.Tensor) -> torch.Tensor:
        """Results of f16 layers in f32, also those of experts that cannot write it."""
        is_f16 = self.moe_config.in_dtype is expert_output.dtype is torch.float16
        return expert_output.float() if is_f16 else expert_output

    def check(self) -> None:
        """DispatchTimeoutError if a wait in a kernel that has ended timed out; no host synchronization."""
        self.memory.record.check()

    def recover(self, dead: Sequence[int]) -> None:
        """Goes on without the EP ranks `dead`, whose slots add nothing from now on; all other ranks call it together.

        Those must have ended: a rank that is only late may still write into the others' memory.

        Batches between dispatch and combine are given up, also those of other layers of this shape, which share the
        memory that this resets.
        """
        self._forget_batches()
        self.memory.recover(dead)

    def tokens_hit(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """bool `[T]`: tokens of which some slot is lost, because its expert's rank was declared dead."""
        lost = torch.tensor([rank not in self.memory.alive for rank in range(self.ranks.size)], device=topk_ids.device)
        owners = self.placement.owners(topk_ids.device)[topk_ids.long().clamp(min=0)].long()
        return (lost[owners] & (topk_ids >= 0)).any(dim=1)

    def _begin_batch(self) -> Callable[[], None]:
        """Drops batches that were given up, and returns the check of a new one."""
        if self._recoveries != self.memory.recoveries:
            self._forget_batches()
            self._recoveries = self.memory.recoveries
        return check_of_batch(self.memory)

    def _must_agree(self, quant_config: FusedMoEQuantConfig, device: torch.device) -> None:
        """Nothing: the ranks have agreed when their backends were made."""

    def _check_config(self) -> None:
        """ValueError where the kernels cannot do what the configuration asks for."""
        refusal = self.refuses(self.moe_config)
        if refusal is not None:
            raise ValueError(f"{refusal}; all2all_backend='{self.INSTEAD}' has no such rule")

    def _check_batch(self, batch: Batch) -> None:
        """ValueError where the batch is not what the kernels were compiled for."""
        given = (batch.code_dtype, batch.rows.device)
        made_for = (self.layout.code_dtype, self.memory.order.device)
        if given != made_for:
            raise ValueError(
                f"the batch has (dispatch_dtype, device) {given} and {self.NAME} was made for {made_for}; give the "
                f"backend the configuration of the batches"
            )


def shared_settings(
    moe_config: FusedMoEConfig, *, code_dtype: torch.dtype | None, device_api: bool, batches_in_flight: int
) -> dict[str, object]:
    """What must be the same on every rank."""
    return {
        "hidden_dim": moe_config.hidden_dim,
        "num_experts": moe_config.num_experts,
        "num_fused_shared_experts": moe_config.num_fused_shared_experts,
        "experts_per_token": moe_config.experts_per_token,
        "max_num_tokens": moe_config.max_num_tokens,
        "in_dtype": moe_config.in_dtype,
        "batch_invariant": moe_config.batch_invariant,
        "expert_placement_strategy": moe_config.moe_parallel_config.expert_placement_strategy,
        "rows on the wire": code_dtype or moe_config.in_dtype,
        "batches in flight": batches_in_flight,
        "puts by NVSHMEM's device library": device_api,
    }

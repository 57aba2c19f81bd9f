"""What becomes of a wait in a kernel that took too long: a record that the host reads, and the error made of it.

Kernels write the record into pinned memory and end (cuda/protocol.cuh); the host looks at it, without waiting for the
GPU, whenever it is about to launch the next one. Until `clear`, kernels of the same ranks do not wait any more.
"""

from __future__ import annotations

import torch

from moe_ep.dispatch.rank_group import RankGroup
from moe_ep.errors import DispatchTimeoutError, rank_list

# Words of the record, as in cuda/protocol.cuh; one word for each rank follows.
_FAILED, _PHASE, _EPOCH, _RANKS = range(4)
_PHASES = {1: "dispatch", 2: "combine"}


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

    def check(self) -> None:
        """DispatchTimeoutError where a wait has failed; costs a read of host memory."""
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
            refusals = {rank: text for rank, text in self._ranks.notes.read().items() if rank in missing}
        except RuntimeError as error:
            refusals = {}
            story += f"; the ranks' store cannot be reached ({error})"
        reasons = "; ".join(f"rank {rank} refused its batch: {text}" for rank, text in refusals.items())
        return DispatchTimeoutError(
            f"{story}; {reasons or 'it is dead, stuck or late'}; end the process, or end that one and go on without it "
            f"with recover(dead=...)",
            missing,
        )

"""Several EP ranks of the NVSHMEM backends in one process on one GPU: the kernels as they are, memory of one device.

Ranks differ only in where their buffers lie, so a rank's symmetric block is a tensor of its own here and the others'
pointers lead to it. Kernels of different ranks wait for each other, so each rank has a stream, and so few blocks that
those of all ranks run together. What is not covered: NVLink, NVSHMEM itself, and processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ep import env
from moe_ep.dispatch import torch_distributed
from moe_ep.dispatch.nvshmem import arena, backend
from moe_ep.dispatch.nvshmem.low_latency import Tuning
from moe_ep.dispatch.nvshmem.order import Order
from moe_ep.dispatch.rank_group import RankGroup
from moe_ep.distributed.failure_detection import FailureDetector
from tests.dispatch.backend_cases import Case, Setting, make_backend, make_setting, prepare_args

LOW_LATENCY = "nvshmem_low_latency"
# Each running kernel has one behind it that has come up early, and experts need room beside them.
_BLOCKS = 64
_LATE_CYCLES = 500_000


class Host:
    """The symmetric memory of all ranks: the n-th block that a rank reserves is the n-th of every other."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.blocks: list[list[torch.Tensor]] = []
        self.taken: dict[int, int] = defaultdict(int)

    def reserve(self, rank: int, nbytes: int, name: str) -> arena.Region:
        number = self.taken[rank]
        self.taken[rank] += 1
        if number == len(self.blocks):
            self.blocks.append([torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(self.num_ranks)])
        pointers = [block.data_ptr() for block in self.blocks[number]]
        return arena.Region(self.blocks[number][rank], pointers, tuple(range(self.num_ranks)))


class RankArena:
    """One rank's SymmetricArena."""

    is_mapped = carries_packets = True

    def __init__(self, host: Host, rank: int) -> None:
        self.host, self.rank, self.device = host, rank, host.device
        self.order = Order(self.device)

    def reserve(self, nbytes: int, name: str) -> arena.Region:
        return self.host.reserve(self.rank, nbytes, name)


class Group(RankGroup):
    """One rank's RankGroup, without torch.distributed."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.timeout_s = rank, size, 2 * env.NVSHMEM_TIMEOUT_S.get()
        self._group: Any = lambda: rank
        self.ep_ranks = range(size)
        self.detector = FailureDetector("", 0, 1)
        self.have_agreed = False


def on_one_gpu(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    """From here on backends of a process group find `num_ranks` ranks in this process, and agree with each other."""
    host = Host(num_ranks)
    arenas = [RankArena(host, rank) for rank in range(num_ranks)]
    monkeypatch.setattr(torch_distributed, "RankGroup", lambda config, _: Group(config.ep_rank, num_ranks))
    monkeypatch.setattr(arena.SymmetricArena, "of", lambda rank=None: arenas[rank])
    monkeypatch.setattr(backend, "check_agreement", lambda name, settings, group: None)
    monkeypatch.setattr(backend, "gather_texts", lambda name, text, group, ranks=None: [text])
    # Loading a kernel waits for those that run, which may wait for other ranks: torch's that tests use between.
    torch.cuda._sleep(1)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        torch.full((1,), float("nan"), dtype=dtype, device="cuda")


class Ranks:
    """A backend for each rank, called as the ranks would call theirs, all together.

    Args:
        in_halves: each kernel is launched in two halves, and no rank receives before all have sent. Then nobody waits
            for a kernel beside its own, and a tool may let them run one by one.

    Attributes:
        present: the ranks that are called; those that are not leave None where others leave something.
        late: the ranks whose kernels come up well behind those of the others.
    """

    def __init__(
        self,
        case: Case,
        num_ranks: int,
        backend: str,
        by_reference: bool = False,
        in_halves: bool = False,
        **options: object,
    ) -> None:
        self.in_halves, self.backend = in_halves, backend
        self.settings: list[Setting] = [make_setting(case, rank, num_ranks) for rank in range(num_ranks)]
        self.present: Sequence[int] = range(num_ranks)
        self.late: Sequence[int] = ()
        blocks = _BLOCKS // num_ranks
        few = {"tuning": Tuning(blocks=blocks)} if backend == LOW_LATENCY else {"num_sms": max(1, blocks // 2)}
        self.backends: list[Any] = [make_backend(setting, backend, **few, **options) for setting in self.settings]
        for each in self.backends:
            if by_reference:
                each.hand_over_row_ids()
        self.streams = [torch.cuda.Stream() for _ in self.settings]
        self.args = [prepare_args(setting, "cuda") for setting in self.settings]

    def prepare(self) -> list[Any]:
        if not self.in_halves and self.backend == LOW_LATENCY:
            return self.together(lambda rank: self.backends[rank].prepare(*self.args[rank]))
        # The host waits for the number of rows that a prefill receives, so all ranks begin first.
        begun = self.together(lambda rank: self.backends[rank].prepare_async(*self.args[rank]))
        return self.together(lambda rank: begun[rank][1]())

    def finalize(
        self, results: Sequence[torch.Tensor], weights_and_ids: Sequence[tuple], reduce_impl: Any
    ) -> list[torch.Tensor]:
        outputs = [torch.full_like(args[0], float("nan")) for args in self.args]

        def call(rank: int) -> Any:
            each, on_input = self.backends[rank], self.settings[rank].case.on_input
            finalize = each.finalize_async if self.in_halves else each.finalize
            return finalize(outputs[rank], results[rank], *weights_and_ids[rank], on_input, reduce_impl)

        begun = self.together(call)
        if self.in_halves:
            self.together(lambda rank: begun[rank][1]())
        for rank in self.present:
            self.backends[rank].check()
        return outputs

    def redraw(self, **changes: Any) -> None:
        """Other tokens, routing or rows for the same backends."""
        num_ranks = len(self.settings)
        self.settings = [make_setting(replace(s.case, **changes), r, num_ranks) for r, s in enumerate(self.settings)]
        self.args = [prepare_args(setting, "cuda") for setting in self.settings]

    def together(self, call: Callable[[int], Any]) -> list[Any]:
        torch.cuda.synchronize()
        found: list[Any] = [None] * len(self.streams)
        for rank in self.present:
            with torch.cuda.stream(self.streams[rank]):
                if rank in self.late:
                    torch.cuda._sleep(_LATE_CYCLES)
                found[rank] = call(rank)
        torch.cuda.synchronize()
        return found

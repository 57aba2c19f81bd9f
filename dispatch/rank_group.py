"""The ranks of a backend: their collectives, with a deadline, and errors that name the failed ranks.

On the CPU (gloo) the host waits for a step at most until the deadline; a failure becomes a DispatchTimeoutError. On
CUDA (NCCL) a step is queued on the current stream, and the host does not wait for it. If a backend needs a number on
the host anyway (`HostCopy`), that wait has the deadline. Otherwise NCCL's watchdog ends the process at the group's
timeout if a step never finishes; before that a thread logs a rank that failed. `moe_ep.distributed.failure_detection`
finds the failed ranks. After a DispatchTimeoutError the group's state is undefined: end the process, or make a new
group.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from moe_ep.arguments import check_expert_map
from moe_ep.config import FusedMoEConfig
from moe_ep.dispatch.batch import MAX_TOPK
from moe_ep.distributed.failure_detection import FailureDetector, deadline_of
from moe_ep.distributed.membership import is_elastic
from moe_ep.distributed.process_groups import GroupReference, is_initialized
from moe_ep.distributed.store import call_in_thread
from moe_ep.errors import ConfigError, DispatchTimeoutError, rank_list
from moe_ep.expert_map import expert_owner_table
from moe_ep.modular_kernel.contracts import Pending

Result = TypeVar("Result")

# Elastic groups whose NCCL communicator exists.
_connected: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


class RankGroup:
    """The EP ranks of one backend.

    Attributes:
        rank, size: this process's rank in the group, in ep_rank order, and the group's size.
        ep_ranks: the numbers of the group's ranks in messages; they differ from 0..size-1 only after `is_part_of`.
        timeout_s: the group's timeout, or MOE_EP_DISPATCH_TIMEOUT_S if that is shorter.
        have_agreed: whether must_agree found no difference between the ranks.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: the group's size is not ep_size, this process has another rank there than its ep_rank, or tokens
            have more experts than rows between ranks can name.
    """

    def __init__(self, moe_config: FusedMoEConfig, process_group: dist.ProcessGroup | None) -> None:
        if not is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised and this backend moves rows between ranks; call "
                "init_process_group first, or use all2all_backend='no_ep' on one rank"
            )
        slots = moe_config.experts_per_token + moe_config.num_fused_shared_experts
        if slots > MAX_TOPK:
            raise ValueError(
                f"a token has {moe_config.experts_per_token} experts (top_k) and "
                f"{moe_config.num_fused_shared_experts} fused shared ones; rows between ranks have at most {MAX_TOPK}"
            )
        group = process_group or dist.distributed_c10d._get_default_group()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.size != moe_config.ep_size:
            raise ValueError(
                f"process_group has {self.size} ranks and ep_size is {moe_config.ep_size}; pass the group of exactly "
                f"the EP ranks"
            )
        if self.rank != moe_config.ep_rank:
            raise ValueError(
                f"ep_rank is {moe_config.ep_rank} and this process is rank {self.rank} of process_group; pass the "
                f"group whose ranks are the EP ranks in their order"
            )
        self.ep_ranks: Sequence[int] = range(self.size)
        self._group = GroupReference(group)
        self.detector = FailureDetector.of(group)
        self.timeout_s = deadline_of(group)
        self.have_agreed = False

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; raises RuntimeError once it was destroyed."""
        return self._group()

    def is_part_of(self, ep_group: dist.ProcessGroup) -> None:
        """Declares this group a part of `ep_group`, whose rank numbers error messages use from now on. Failures are
        searched in all of `ep_group`, because a rank may wait for one that waits for another."""
        self.ep_ranks = [dist.get_group_rank(ep_group, rank) for rank in dist.get_process_group_ranks(self.group)]
        self.detector = FailureDetector.of(ep_group)

    def must_agree(self, settings: dict[str, int], device: torch.device) -> None:
        """Checks that all ranks have the same settings, before they exchange rows of unexpected sizes.

        It is a collective step that waits for the GPU. It does nothing while a CUDA graph is captured.

        Raises:
            ConfigError: a setting differs between ranks; raised on all of them.
        """
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        mine = torch.tensor(list(settings.values()), device=device)
        everybodys = mine.new_empty(self.size * len(settings))
        steps = self.steps("dispatch", device)
        steps.all_gather(everybodys, mine)
        of_ranks = steps.on_host(everybodys.view(self.size, -1)).get()
        for name, values in zip(settings, zip(*of_ranks, strict=True), strict=True):
            if len(set(values)) > 1:
                raise ConfigError(
                    f"{name} is {', '.join(map(str, values))} on EP {rank_list(self.ep_ranks)}; it must be the same "
                    f"on every rank of a layer"
                )
        self.have_agreed = True

    def steps(self, name: str, device: torch.device) -> Steps:
        """Returns the collective steps of one dispatch or combine, whose arguments were checked already."""
        # Withdrawn before the first wait for peers, which end theirs soon while this rank refuses a batch.
        self.detector.take_part()
        if device.type == "cuda":
            self.detector.logs_refusals = True
            if is_elastic(self.group) and self.group not in _connected:
                self._connect(name, device)
        return Steps(self, name, device)

    def _connect(self, name: str, device: torch.device) -> None:
        """Creates NCCL's communicator, as its first collective would, in a separate thread with a deadline: if a rank
        dies meanwhile, nothing ends that call, and the thread stays blocked in it."""
        group = self.group

        def connect() -> None:
            with torch.cuda.device(device):
                dist.all_reduce(torch.zeros(1, device=device), group=group)
                torch.cuda.current_stream().synchronize()

        connecting = call_in_thread("moe_ep-connect", connect)
        try:
            self.detector.wait_until(self.timeout_s, connecting.done)
            connecting.result()
        except RuntimeError as error:
            raise self.failed(name, error) from error
        _connected.add(group)

    def wait_for_sizes(self, name: str, have_come: Callable[[], bool]) -> None:
        """Waits on the host for sizes; raises DispatchTimeoutError if they do not arrive before the deadline, or if a
        rank has failed."""
        try:
            self.detector.wait_until(self.timeout_s, have_come)
        except RuntimeError as error:
            raise self.failed(name, f"{error} while the GPU waits for the ranks' sizes") from None

    def failed(self, name: str, cause: object) -> DispatchTimeoutError:
        """Returns the error for a step that failed or timed out; it names the failed ranks if they are known."""
        story = f"the {name} did not finish on EP rank {self.ep_ranks[self.rank]} (deadline {self.timeout_s:g} s)"
        return self.detector.error(story, cause)


class Steps:
    """Collective steps in flight; `wait()` returns when the data is there, in stream order on CUDA."""

    def __init__(self, ranks: RankGroup, name: str, device: torch.device) -> None:
        self._ranks, self._name = ranks, name
        self._on_cuda = device.type == "cuda"
        self._works: list[dist.Work] = []
        self._error: DispatchTimeoutError | None = None

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: list[int] | None = None,
        input_sizes: list[int] | None = None,
    ) -> None:
        """Sends rows of `input`, in rank order, to all ranks; sizes are rows per rank, None for equal parts."""
        self._start(dist.all_to_all_single, output, input, output_sizes, input_sizes)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Gathers `input` of every rank into `output`, in rank order."""
        # all_gather_single is the name from torch 2.13 on.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._start(gather, output, input)

    def wait(self) -> None:
        """Waits for the steps; raises DispatchTimeoutError if a peer did not take part. May be called again."""
        if self._error is not None:
            raise self._error
        deadline = time.monotonic() + self._ranks.timeout_s
        while self._works:
            try:
                self._ranks.detector.wait_for(self._works[0], deadline - time.monotonic())
            except RuntimeError as error:
                self._works.clear()
                self._error = self._ranks.failed(self._name, error)
                raise self._error from error
            self._works.pop(0)

    def then(self, finish: Callable[[], Result]) -> Pending[Result]:
        """Returns a Pending whose result is that of `finish`, which is called once, when the data is there."""
        results: list[Result] = []

        def wait() -> None:
            if not results:
                self.wait()
                results.append(finish())

        def receive() -> Result:
            wait()
            return results[0]

        return Pending(wait, receive)

    def on_host(self, numbers: torch.Tensor) -> HostCopy:
        """Starts a copy to the host, after the steps so far."""
        self.wait()
        return HostCopy(numbers, self._ranks, self._name)

    def _start(self, collective: Callable[..., dist.Work | None], *args: object) -> None:
        group = self._ranks.group
        try:
            work = collective(*args, group=group, async_op=not self._on_cuda)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._ranks.failed(self._name, error) from error
        if work is not None:
            self._works.append(work)


class HostCopy:
    """An asynchronous copy of integers to the host; kernels that are queued after it run while the host waits."""

    def __init__(self, numbers: torch.Tensor, ranks: RankGroup, name: str) -> None:
        self._ranks, self._name = ranks, name
        self._numbers, self._event = numbers, None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def get(self) -> Sequence:
        """Returns the numbers as (nested) lists; raises DispatchTimeoutError if they miss the deadline."""
        if self._event is not None:
            self._ranks.wait_for_sizes(self._name, self._event.query)
        return self._numbers.tolist()


# ==== Placement ====
#
# Which rank each expert id is sent to, and which ids are this rank's: the tables of a layer, on each device.


class Placement:
    """The tables of one rank.

    Args:
        owners: int32 `[E + shared]` on the host, the rank that each id is sent to.

    Attributes:
        num_local: how many ids this rank has.
    """

    def __init__(self, owners: torch.Tensor, rank: int) -> None:
        self.num_ids = owners.numel()
        self.num_local = int((owners == rank).sum())
        self.on_host, self._rank = owners, rank
        self._owners: dict[torch.device, torch.Tensor] = {owners.device: owners}
        self._maps: dict[torch.device, torch.Tensor] = {}
        self._known_maps: dict[int, weakref.ref[torch.Tensor]] = {}

    def owners(self, device: torch.device) -> torch.Tensor:
        """int32 `[E + shared]`: the rank that each id is sent to."""
        found = self._owners.get(device)
        if found is None:
            found = self._owners[device] = self.on_host.to(device)
        return found

    def expert_map(self, device: torch.device) -> torch.Tensor:
        """int32 `[E + shared]`: the index of each id among this rank's ids, in id order; -1 if it is on another
        rank."""
        found = self._maps.get(device)
        if found is None:
            here = self.owners(device) == self._rank
            found = self._maps[device] = torch.where(here, here.cumsum(0) - 1, -1).to(torch.int32)
        return found

    def checksum(self, num_experts: int) -> int:
        """Returns a checksum of the owners of the first num_experts ids, which must be the same on all ranks."""
        return zlib.crc32(self.on_host[:num_experts].numpy().tobytes())

    def check(self, expert_map: torch.Tensor) -> None:
        """Raises ValueError if expert_map contradicts the ranks that rows are sent to.

        Each map is read once, which waits for the GPU if the map is on one; not while a CUDA graph is captured.
        """
        known = self._known_maps.get(id(expert_map))
        if known is not None and known() is expert_map:
            return
        check_expert_map(expert_map)
        if expert_map.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        own = self.expert_map(expert_map.device)
        if expert_map.shape != own.shape or bool((expert_map != own).any()):
            raise ValueError(
                f"expert_map has experts {_experts(expert_map)} on EP rank {self._rank} and rows of {_experts(own)} "
                f"are sent to it, in this order; pass the map of the placement that moe_config names "
                f"(expert_placement_strategy), or make the backend with owners="
            )
        self._known_maps[id(expert_map)] = weakref.ref(expert_map)


def owners_of(moe_config: FusedMoEConfig) -> torch.Tensor:
    """Returns the rank to which this rank sends each id, int32 `[E + shared]`, by the layer's placement."""
    return expert_owner_table(
        moe_config.ep_size,
        moe_config.num_experts,
        moe_config.moe_parallel_config.expert_placement_strategy,
        moe_config.num_fused_shared_experts,
        moe_config.ep_rank,
    )


def _experts(expert_map: torch.Tensor) -> str:
    """Formats this rank's experts in the order of their local indices. Example: [1, 0, -1] gives "1, 0"."""
    order = expert_map.argsort(stable=True)
    numbers = order[expert_map[order] >= 0].tolist()
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")

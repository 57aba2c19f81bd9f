"""Elastic experts: the slots of a gang whose ranks come and go, and who rereads which experts when a rank is lost.

All ranks have the same number of slots, some of them empty at first. When the ranks change
(`moe_ep.distributed.membership`), the ranks tell each other what their slots hold, and this becomes the new placement.
Experts that no rank holds are read again from the checkpoint, byte range by byte range, into empty slots or into slots
of experts that have replicas. They are read either before the next step, or beside the steps, whose tokens skip these
experts until every rank has read its part.
"""

from __future__ import annotations

import copy
import itertools
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_ep.config import FusedMoEParallelConfig
from moe_ep.distributed.exchange import gather_values
from moe_ep.distributed.membership import Membership
from moe_ep.errors import ConfigError, CoverError, check_at_least, one_of
from moe_ep.routing.router import Router, WrappingRouter

if TYPE_CHECKING:
    from moe_ep.layer.fused_moe import FusedMoE

EMPTY = -1
# Called with (layer number, layer or a copy of it, logical experts) after `begin_reload`; reads the experts into their
# slots and returns the bytes read.
Read = Callable[[int, Any, Collection[int]], int]


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Configures how a gang goes on without some of its ranks.

    Attributes:
        min_ranks: a gang with fewer ranks ends.
        max_ranks: no more ranks are admitted; None for the number at the start.
        spare_slots: empty slots of each rank and layer; None for as many as min_ranks ranks need to hold all experts.
        when_uncovered: whether tokens "wait" for experts that are being read again, or "skip" them.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    spare_slots: int | None = None
    when_uncovered: str = "wait"

    def __post_init__(self) -> None:
        check_at_least(1, min_ranks=self.min_ranks)
        if self.max_ranks is not None:
            check_at_least(self.min_ranks, max_ranks=self.max_ranks)
        if self.spare_slots is not None:
            check_at_least(0, spare_slots=self.spare_slots)
        if self.when_uncovered not in ("wait", "skip"):
            raise ConfigError(one_of("when_uncovered", self.when_uncovered, ["wait", "skip"]))

    def num_slots(self, num_experts: int, num_ranks: int, num_redundant_experts: int = 0) -> int:
        """Slots of each rank in a gang that starts with num_ranks ranks: for its experts, its replicas, and spare ones.

        Example: 8 experts on 4 ranks, min_ranks 2: two experts and two spare slots.
        """
        held = -(-num_experts // num_ranks)
        fewest = -(-num_experts // self.min_ranks)
        spare = max(fewest - held, 0) if self.spare_slots is None else self.spare_slots
        return min(-(-(num_experts + num_redundant_experts) // num_ranks) + spare, max(num_experts, held))


def first_placement(num_experts: int, num_ranks: int, num_slots: int, num_filled: int) -> list[int]:
    """The logical expert in each slot `[num_ranks * num_slots]` at the start, in rank order; `EMPTY` for none.

    Each rank gets a contiguous range of experts. Replicas follow until num_filled slots are filled in total, each on a
    rank that does not hold the expert.

    Example: 3 experts, 2 ranks of 3 slots, 4 filled: [0, 1, -1, 2, 0, -1].
    """
    base, more = divmod(num_experts, num_ranks)
    rows: list[list[int]] = []
    for rank in range(num_ranks):
        first = rank * base + min(rank, more)
        rows.append(list(range(first, first + base + (rank < more))))
    replicas = itertools.cycle(range(num_experts))
    for _ in range(num_filled - num_experts):
        for expert in itertools.islice(replicas, num_experts):
            room = [row for row in rows if len(row) < num_slots and expert not in row]
            if room:
                min(room, key=len).append(expert)
                break
    return [expert for row in rows for expert in row + [EMPTY] * (num_slots - len(row))]


def plan_cover(held: Sequence[Sequence[int]], num_experts: int) -> list[tuple[int, int, int]]:
    """Chooses slots for the experts of one layer that no rank holds: (rank, slot, expert) for each.

    A slot is taken from the rank that has most of them to spare: empty ones first, then those whose expert has replicas
    elsewhere. The same arguments give the same plan on every rank.

    Args:
        held: the logical expert in each slot `[num_ranks][num_slots]`; `EMPTY` for none.

    Raises:
        CoverError: fewer slots than experts.
    """
    rows = [list(row) for row in held]
    count = Counter(expert for row in rows for expert in row if expert != EMPTY)
    given: Counter[int] = Counter()
    plan = []
    for expert in range(num_experts):
        if count[expert]:
            continue
        free = {rank: row.count(EMPTY) for rank, row in enumerate(rows)}
        rank = max(free, key=lambda one: (free[one] > 0, free[one] - given[one], -one))
        if free[rank]:
            slot = rows[rank].index(EMPTY)
        else:
            places = [(at, slot) for at, row in enumerate(rows) for slot in range(len(row))]
            spare = [(count[rows[at][slot]], -given[at], -at, slot) for at, slot in places]
            most, _, at, slot = max(spare, default=(0, 0, 0, 0))
            if most < 2:
                raise CoverError(
                    f"{len(rows)} ranks with {len(rows[0]) if rows else 0} slots each in a layer cannot hold its "
                    f"{num_experts} experts; start with more --spare-slots, or with a lower --min-ranks that has room "
                    f"for them"
                )
            rank = -at
            count[rows[rank][slot]] -= 1
        rows[rank][slot] = expert
        count[expert] += 1
        given[rank] += 1
        plan.append((rank, slot, expert))
    return plan


def free_bytes(device: torch.device | str) -> int:
    """Bytes that this process may still allocate on a GPU or on the host.

    On the host it is the least of what the kernel, the control group (version 2 or 1) and RLIMIT_AS allow.
    """
    where = torch.device(device)
    if where.type == "cuda":
        cached = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
        return torch.cuda.mem_get_info(where)[0] + cached
    bounds = []
    with suppress(OSError):
        bounds.append(_fields("/proc/meminfo")["MemAvailable"] << 10)
    for most, used, stat, kind in _CGROUP_FILES:
        with suppress(OSError, ValueError):  # the file may hold "max"
            # The kernel drops cached files when memory is short.
            cached = sum(_fields(stat)[f"{kind}{state}_file"] for state in ("active", "inactive"))
            bounds.append(int(Path(most).read_text()) - int(Path(used).read_text()) + cached)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        with suppress(OSError):
            bounds.append(soft - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize())
    return max(min(bounds, default=1 << 62), 0)


# Control groups version 2 and 1: the files of the limit, the use and its statistics, and the prefix of its sums there.
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat", ""),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_",
    ),
)


def _fields(path: str) -> dict[str, int]:
    """Parses a file whose lines are a name and a number."""
    pairs = (line.replace(":", " ").split() for line in Path(path).read_text().splitlines())
    return {name: int(number) for name, number, *_ in pairs}


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


class ElasticSlots:
    """Plans the slots of a gang's ranks while a model is made, without communication.

    Args:
        num_redundant_experts: replicas at the start, over all ranks.
        fills: whether replicas fill all slots, as EPLB needs them.
    """

    def __init__(
        self, membership: Membership, config: ElasticConfig, num_redundant_experts: int = 0, *, fills: bool = False
    ) -> None:
        self._config, self._fills = config, fills
        self._num_redundant = num_redundant_experts
        self._first = membership.first_ranks
        self._rank = membership.rank
        # Bytes of the slots of the layers so far, and the memory that was free before the first. The host takes memory
        # only as slots are filled, so free memory alone would not tell.
        self._bytes, self._free_at_first = 0, -1

    def parallel_config(self, backend: str) -> FusedMoEParallelConfig:
        """This rank's place among the first ranks; a rank that joined later takes the place of one of them."""
        size = len(self._first)
        return FusedMoEParallelConfig.make(ep_size=size, rank=self._place, world_size=size, all2all_backend=backend)

    def num_redundant_experts(self, num_experts: int) -> int:
        """The physical experts of a layer beyond its logical ones, over the first ranks."""
        return len(self._first) * self._num_slots(num_experts) - num_experts

    def place(self, layer: FusedMoE) -> None:
        """Sets what the layer's slots hold at the start, before it is loaded.

        Raises:
            ConfigError: the slots of this layer and those before it do not fit into memory.
        """
        self._check_memory(layer)
        E, num_slots, size = layer.num_experts, self._num_slots(layer.num_experts), len(self._first)
        num_filled = size * num_slots if self._fills else E + self._num_redundant
        placement = first_placement(E, size, num_slots, num_filled)
        if self._rank not in self._first:
            # A joining rank fills its slots with replicas, of other experts than ranks with neighbouring numbers.
            first = self._place * num_slots
            placement[first : first + num_slots] = [(self._rank * num_slots + slot) % E for slot in range(num_slots)]
        layer.place(placement)

    def _check_memory(self, layer: FusedMoE) -> None:
        if layer.device.type == "meta":
            return
        if self._free_at_first < 0:
            self._free_at_first = free_bytes(layer.device)
        self._bytes += sum(param.nbytes for param in layer.parameters(recurse=False))
        # The ranks of a host load at the same time, into the same memory.
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self._rank in self._first else 1
        needed = self._bytes * (1 if layer.device.type == "cuda" else here)
        if needed > self._free_at_first:
            slots, held = self._num_slots(layer.num_experts), -(-layer.num_experts // len(self._first))
            raise ConfigError(
                f"{slots} expert slots of each rank and layer ({slots - held} of them spare) take {_mib(needed)} by "
                f"{layer.layer_name}, and {_mib(self._free_at_first)} were free; raise --min-ranks, or give fewer "
                f"--spare-slots"
            )

    @property
    def _place(self) -> int:
        return self._first.index(self._rank) if self._rank in self._first else self._rank % len(self._first)

    def _num_slots(self, num_experts: int) -> int:
        return self._config.num_slots(num_experts, len(self._first), self._num_redundant)


@dataclass
class Recovery:
    """What one change of the ranks cost this rank.

    Attributes:
        epoch: its number.
        experts_read, bytes_read: what this rank read again.
        covered_at: when this rank had read its part, in seconds since 1970; 0 before.
        serving_at: when it began its first step, likewise.
    """

    epoch: int
    experts_read: int = 0
    bytes_read: int = 0
    covered_at: float = 0.0
    serving_at: float = 0.0


class Skipping:
    """Lets the tokens of a model's layers skip experts that are being read again, and notes which tokens do.

    Args:
        missing: by layer, the logical experts that no rank holds.
    """

    def __init__(self, layers: Sequence[FusedMoE], missing: Sequence[Collection[int]]) -> None:
        self._wrapped: list[tuple[FusedMoE, Callable[[Router], Router]]] = []
        self._hit = torch.zeros(0, dtype=torch.bool)
        for layer, experts in zip(layers, missing, strict=True):
            if experts:
                is_missing = torch.zeros(layer.num_experts, dtype=torch.bool, device=layer.device)
                is_missing[sorted(experts)] = True

                def wrap(router: Router, is_missing: torch.Tensor = is_missing) -> Router:
                    return _SkippingRouter(router, self, is_missing)

                layer.router_wrappers = (*layer.router_wrappers, wrap)
                self._wrapped.append((layer, wrap))

    def note(self, first: int, hit: torch.Tensor) -> None:
        """Records which tokens of a pass skip an expert; `hit` is bool `[T]`, for the tokens from `first` on."""
        end = first + hit.numel()
        if end > self._hit.numel():
            self._hit = torch.cat([self._hit, self._hit.new_zeros(end - self._hit.numel())])
        self._hit[first:end] |= hit.to(self._hit.device)

    def take_hits(self) -> list[int]:
        """Returns the rows whose tokens skipped an expert of any layer in the passes since the last call."""
        hit, self._hit = self._hit, self._hit.new_zeros(0)
        return hit.nonzero().flatten().tolist()

    def end(self) -> None:
        """Routes tokens to all experts again."""
        for layer, wrap in self._wrapped:
            layer.router_wrappers = tuple(each for each in layer.router_wrappers if each is not wrap)
        self._wrapped.clear()


class _SkippingRouter(WrappingRouter):
    """Drops choices of experts that no rank holds; the weights of the other choices stay."""

    def __init__(self, router: Router, skipping: Skipping, is_missing: torch.Tensor) -> None:
        super().__init__(router)
        self._skipping, self._is_missing, self._first = skipping, is_missing, 0

    def of_rows(self, rows: slice) -> Router:
        part = super().of_rows(rows)
        part._first = rows.start  # type: ignore[attr-defined]
        return part

    def choose(self, hidden_states: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = super().choose(hidden_states, *inputs)
        is_expert = (ids >= 0) & (ids < self._is_missing.numel())
        lacks = is_expert & self._is_missing[torch.where(is_expert, ids, 0).long()]
        self._skipping.note(self._first, lacks.any(dim=1))
        return weights.masked_fill(lacks, 0.0), ids.masked_fill(lacks, EMPTY)


class ElasticExperts:
    """Updates the placement of a model's experts whenever its ranks change, as a callback of `Membership.follow`.

    With when_uncovered "wait", `regroup` returns when this rank has read its part of the lost experts. With "skip", a
    background thread reads it while steps continue. The ranks then exchange `has_read` before each step, and once it is
    true on all of them they all call `end_skipping`.

    Args:
        layers: made for `ElasticConfig.num_slots` slots on each rank.
        read: reads experts of a layer again; None if there is no checkpoint to read from.
        when_uncovered: that of `ElasticConfig`.

    Attributes:
        recovery: what the present epoch cost.
        skipping: set on all ranks while tokens skip experts, else None.
    """

    def __init__(
        self, membership: Membership, layers: Sequence[FusedMoE], read: Read | None, *, when_uncovered: str = "wait"
    ) -> None:
        self._layers, self._read = list(layers), read
        self._membership, self._skips = membership, when_uncovered == "skip"
        # The ranks that each layer's maps describe.
        self._ranks: list[tuple[int, ...]] = [()] * len(self._layers)
        # (layer, slot) of experts that the maps already name, but that have not been read yet.
        self._unread: set[tuple[int, int]] = set()
        # By (layer, slot), experts that have been read, but that the maps do not name yet; and their bytes.
        self._ahead: dict[tuple[int, int], int] = {}
        self._bytes_ahead = 0
        self._placing = threading.Lock()
        self.recovery = Recovery(epoch=-1)
        self.skipping: Skipping | None = None
        self._on_cover: list[Callable[[], None]] = []
        self._problem: Exception | None = None
        membership.follow(self.regroup)
        membership.before_leaving(self.cover_without)

    def on_cover(self, callback: Callable[[], None]) -> None:
        """Adds a callback that `end_skipping` runs on every rank; it may make collective calls."""
        self._on_cover.append(callback)

    def remove_on_cover(self, callback: Callable[[], None]) -> None:
        """Removes a callback of `on_cover`, if it is still there."""
        if callback in self._on_cover:
            self._on_cover.remove(callback)

    def held(self) -> list[list[int]]:
        """The logical expert in each of this rank's slots, by layer."""
        rows = [layer.slots.local_experts for layer in self._layers]
        for layer, slot in self._unread:
            rows[layer][slot] = EMPTY
        for (layer, slot), expert in self._ahead.items():
            rows[layer][slot] = expert
        return rows

    def serves(self) -> None:
        """Reports to the launcher that this rank begins its first step in the current epoch."""
        self.recovery.serving_at = time.time()
        self._report()

    def _report(self) -> None:
        self._membership.log.report(self._membership.epoch, self._membership.rank, asdict(self.recovery))

    @property
    def has_read(self) -> bool:
        """Whether this rank has read its part of the lost experts.

        Raises:
            CoverError, CheckpointError: it could not.
        """
        if self._problem is not None:
            raise self._problem
        return bool(self.recovery.covered_at)

    def end_skipping(self) -> None:
        """Routes tokens to all experts again if they skip some; all ranks call it before the same step."""
        if self.skipping is None:
            return
        self.skipping.end()
        self.skipping = None
        self._report()
        for callback in self._on_cover:
            callback()

    def cover_without(self, rank: int) -> None:
        """Reads this rank's part of the experts that only the leaving `rank` holds, beside the steps.

        They go to empty slots, which no map names, through a copy of one layer at a time.

        Raises:
            CoverError: as in `regroup`, for the ranks without the leaving one.
        """
        for number, layer in enumerate(self._layers):
            with self._placing:
                ranks = self._ranks[number]  # some may be lost meanwhile
                others = [one for one in ranks if one != rank]
                if len(others) == len(ranks) or self._membership.rank not in others:
                    return
                own = others.index(self._membership.rank)
                logical = layer.slots.logical_of_physical()
                num_slots = len(logical) // len(ranks)
                rows = [logical[at * num_slots :][:num_slots] for at in range(len(ranks))]
                left = [row for one, row in zip(ranks, rows, strict=True) if one != rank]
                plan = plan_cover(left, layer.num_experts)
                self._check_readable(layer, len(plan))
                mine = {slot: expert for at, slot, expert in plan if at == own and left[own][slot] == EMPTY}
                if mine:
                    self._bytes_ahead += self._read_aside(number, mine)
                    self._ahead.update({(number, slot): expert for slot, expert in mine.items()})

    @torch.inference_mode(False)
    @torch.no_grad()
    def _read_aside(self, number: int, experts: dict[int, int]) -> int:
        """Reads experts into slots without tokens, while the layer serves; returns the bytes read."""
        layer = self._layers[number]
        self._check_memory(layer, len(experts), sum(tensor.nbytes for tensor in layer.expert_weights()))
        coordinator = getattr(layer.dispatcher, "coordinator", None)
        shared: tuple[Any, ...] = (coordinator, layer.shared_experts)
        # The copy has no router wrappers; they belong to the layer that serves.
        aside = copy.deepcopy(layer, {id(part): part for part in shared} | {id(layer.router_wrappers): ()})
        logical = aside.slots.logical_of_physical()
        first = layer.parallel_config.ep_rank * layer.slots.num_local_routed
        for slot, expert in experts.items():
            logical[first + slot] = expert
        aside.relabel_slots(logical)
        aside.begin_reload()
        num_bytes = self._read(number, aside, experts.values()) if self._read is not None else 0
        slots = list(experts)
        with torch.inference_mode():
            for held, read in zip(layer.expert_weights(), aside.expert_weights(), strict=True):
                for slot in slots:
                    held[slot].copy_(read[slot])
            layer.quant_method.rebuild_derived_state(layer, slots)
        return num_bytes

    def _check_readable(self, layer: FusedMoE, num_lost: int) -> None:
        if num_lost and self._read is None:
            raise CoverError(
                f"{num_lost} experts of {layer.layer_name} are on no rank that is left, and a model that was not "
                f"loaded from a folder cannot read them again; give parallelize the folder"
            )

    @staticmethod
    def _check_memory(layer: FusedMoE, num_lost: int, beside: int = 0) -> None:
        """Raises CoverError if memory does not suffice for reading experts again, with `beside` additional bytes."""
        needed, free = layer.quant_method.reload_bytes(layer) + beside, free_bytes(layer.device)
        if needed > free:
            raise CoverError(
                f"{num_lost} experts of {layer.layer_name} are to be read again, which takes {_mib(needed)} beside the "
                f"weights, and {_mib(free)} are free; start with more ranks, fewer --spare-slots, or with replicas "
                f"(--num-redundant-experts), which need not be read"
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def regroup(self, membership: Membership) -> None:
        """Places the experts on the current ranks, and reads this rank's part of the lost ones.

        Raises:
            CoverError: the ranks have too few slots or too little memory, or there is nothing to read lost experts
                from.
        """
        with self._placing:
            self._regroup(membership)

    def _regroup(self, membership: Membership) -> None:
        # A thread that reads for an earlier epoch ends when it sees another recovery.
        recovery = self.recovery = Recovery(membership.epoch.number, len(self._ahead), self._bytes_ahead)
        self._problem = None
        if self.skipping is not None:
            self.skipping.end()
            self.skipping = None
        group, rank = membership.group, membership.ep_rank
        mine = self.held()
        told = [mine] if group is None else gather_values("experts", mine, group)
        parallel = FusedMoEParallelConfig.make(
            ep_size=membership.ep_size,
            rank=rank,
            world_size=membership.ep_size,
            all2all_backend=self._layers[0].parallel_config.all2all_backend,
        )
        lost: list[dict[int, int]] = []
        missing: list[set[int]] = []
        for number, layer in enumerate(self._layers):
            rows = [list(of_rank[number]) for of_rank in told]
            plan = plan_cover(rows, layer.num_experts)
            self._check_readable(layer, len(plan))
            for at, slot, expert in plan:
                rows[at][slot] = expert
            own = {(number, slot) for at, slot, _ in plan if at == rank}
            # The union, since the maps may still name slots that an interrupted change has not filled.
            self._unread |= own
            layer.regroup(parallel, group, [expert for row in rows for expert in row])
            self._ranks[number] = membership.ranks
            self._unread -= {(number, slot) for slot in range(len(mine[number]))} - own
            lost.append({slot: expert for at, slot, expert in plan if at == rank})
            missing.append({expert for _, _, expert in plan})
        self._ahead.clear()
        self._bytes_ahead = 0
        if self._skips and any(missing):
            self.skipping = Skipping(self._layers, missing)
            arguments = recovery, lost
            threading.Thread(target=self._read_beside, args=arguments, name="moe_ep-cover", daemon=True).start()
            return
        for number, experts in enumerate(lost):
            if experts and self._read is not None:
                layer = self._layers[number]
                self._check_memory(layer, len(experts))
                layer.begin_reload()
                recovery.bytes_read += self._read(number, layer, experts.values())
                recovery.experts_read += len(experts)
                self._unread -= {at for at in self._unread if at[0] == number}
        recovery.covered_at = time.time()

    def _read_beside(self, recovery: Recovery, lost: Sequence[dict[int, int]]) -> None:
        """Reads this rank's part of the lost experts in a thread, while steps skip them."""
        try:
            self._membership.use_device()
            for number, experts in enumerate(lost):
                with self._placing:
                    if self.recovery is not recovery:
                        return
                    if experts:
                        recovery.bytes_read += self._read_aside(number, experts)
                        recovery.experts_read += len(experts)
                        self._unread -= {(number, slot) for slot in experts}
            recovery.covered_at = time.time()
        except Exception as error:
            if self.recovery is recovery:
                self._problem = error

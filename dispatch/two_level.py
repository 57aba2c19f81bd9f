"""Two-level dispatch across hosts: a token goes once to each host over the network, and from there over NVLink.

It nests two backends of the Standard format. `across` joins the ranks with the same local rank on every host; to it,
a host is the owner of an expert. `within` joins the ranks of one host and dispatches what arrived. So a token with
experts on several ranks of another host crosses the network once, to the rank with its sender's local rank. The results
of a host are added up there before one row goes back. docs/across_hosts.md derives the traffic.

Example: 2 hosts of 2 ranks; a token of rank 0 with experts on ranks 2 and 3 goes to rank 2 (local rank 0 of the other
host), which keeps a copy and sends one to rank 3; rank 2 adds both results and sends one row to rank 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.dispatch.batch import check_arguments, check_tensor, wire_dtype
from moe_ep.dispatch.rank_group import RankGroup, owners_of
from moe_ep.dispatch.torch_distributed import RankExchange
from moe_ep.distributed.exchange import answers_of_ranks, hosts_of
from moe_ep.distributed.process_groups import subgroup
from moe_ep.errors import ConfigError
from moe_ep.modular_kernel.contracts import (
    BatchExchange,
    Dispatched,
    Dispatcher,
    FusedMoEActivationFormat,
    Routing,
)
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceNoOP
from moe_ep.registry import ALL2ALL_BACKENDS

_PREFERRED, _ANYWHERE = "nvshmem_high_throughput", "all_to_all"


class Grid(NamedTuple):
    """The ranks of a group by host and local rank.

    Attributes:
        members: `[H][L]`, the group's ranks by host and local rank. Hosts are in the order of their ranks with this
            rank's local rank, which is the order of ranks in the group across hosts.
    """

    members: tuple[tuple[int, ...], ...]
    host: int
    local_rank: int

    @classmethod
    def of(cls, hosts: Sequence[str], rank: int) -> Grid:
        """Returns the grid of ranks, given the host of each.

        Example: hosts ["a", "b", "a", "b"] and rank 3 give ((0, 2), (1, 3)), host 1, local rank 1; hosts ["a", "b",
        "b", "a"] and rank 3 give ((1, 2), (0, 3)), host 1, local rank 1.

        Raises:
            ConfigError: hosts with different numbers of ranks.
        """
        by_host: dict[str, list[int]] = {}
        for index, name in enumerate(hosts):
            by_host.setdefault(name, []).append(index)
        sizes = [len(of_host) for of_host in by_host.values()]
        if len(set(sizes)) > 1:
            raise ConfigError(
                f"all2all_backend is 'two_level' and the hosts have {', '.join(map(str, sizes))} ranks; it needs the "
                f"same number on each, choose 'all_to_all' for other gangs"
            )
        local_rank = by_host[hosts[rank]].index(rank)
        members = tuple(sorted(map(tuple, by_host.values()), key=lambda of_host: of_host[local_rank]))
        return cls(members, members.index(tuple(by_host[hosts[rank]])), local_rank)

    @property
    def across(self) -> tuple[int, ...]:
        """The ranks with this one's local rank, by host."""
        return tuple(of_host[self.local_rank] for of_host in self.members)

    @property
    def within(self) -> tuple[int, ...]:
        """The ranks of this one's host, by local rank."""
        return self.members[self.host]

    def owners(self, owners: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Splits the owner of each id, int32, into its host, and its local rank on this host (-1 if on another)."""
        num_ranks = sum(map(len, self.members))
        hosts, local_ranks = (torch.empty(num_ranks, dtype=torch.int32, device="cpu") for _ in range(2))
        for host, ranks in enumerate(self.members):
            hosts[list(ranks)] = host
            local_ranks[list(ranks)] = torch.arange(len(ranks), dtype=torch.int32, device="cpu")
        host_of, local_rank_of = hosts[owners.long()], local_ranks[owners.long()]
        return host_of, torch.where(host_of == self.host, local_rank_of, -1)


class _Groups(NamedTuple):
    grid: Grid
    across: dist.ProcessGroup
    within: dist.ProcessGroup


# The groups of both levels, keyed by the group that they divide and its hosts; layers share them.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, ...], _Groups]] = WeakKeyDictionary()


def groups_of(group: dist.ProcessGroup) -> _Groups:
    hosts = hosts_of(group)
    made = _groups.setdefault(group, {})
    if hosts not in made:
        grid = Grid.of(hosts, dist.get_rank(group))
        across = subgroup(group, grid.across, "moe_ep_across_hosts")
        made[hosts] = _Groups(grid, across, subgroup(group, grid.within, "moe_ep_within_host"))
    return made[hosts]


class _Handle(NamedTuple):
    """The rows that arrived across hosts, and the handle of their dispatch within this host."""

    across: Dispatched
    within: Any


class TwoLevelPrepareFinalize(Dispatcher, unchecked=True):
    """Standard format across hosts with the same number of ranks each; prefill.

    Rows arrive ordered by (local rank, host, token) of their sources. Rows are quantized for the network only, unless
    the experts read codes: then both levels send the same codes. The combine adds the experts of a rank, then the ranks
    of a host by local rank, then the hosts in order, each sum in f32 and rounded to the activations' dtype. That is
    deterministic, with one rounding more than `all_to_all`. In a batch-invariant layer the combine returns one row per
    slot, and the token's rank adds them, with the same bits as `all_to_all`.

    Args:
        levels: backends of the Standard format across hosts and within one; None for nvshmem_high_throughput, or
            all_to_all if that cannot run or the layer is batch-invariant.

    Attributes:
        by_host: the ranks of each host by local rank, hosts in the order in which they are added up.

    Raises:
        ConfigError: hosts with different numbers of ranks, or invalid levels.
    """

    def __init__(
        self,
        *,
        moe_config: FusedMoEConfig,
        quant_config: FusedMoEQuantConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        levels: tuple[str, str] | None = None,
    ) -> None:
        group = process_group or dist.distributed_c10d._get_default_group()
        grid, across, within = groups_of(group)
        config, capacity, num_hosts = moe_config, moe_config.max_num_tokens, len(grid.members)
        if levels is not None and (not isinstance(levels, (tuple, list)) or len(levels) != 2):
            raise ConfigError(
                f"levels is {levels!r}; it must be two names, of the backends across hosts and within one"
            )
        if levels is None:
            levels = (choose_levels(config, num_hosts, group), choose_levels(config, len(grid.within), group))
        hosts, local_ranks = grid.owners(owners_of(config))
        self.across = _level(levels[0], config, capacity, hosts, quant_config, across)
        # Rows come from every host's rank with this local rank.
        unquantized = FusedMoEQuantConfig.unquantized()
        passed_dtype = None if quant_config is None else quant_config.dispatch_dtype
        self.within = _level(levels[1], config, capacity * num_hosts, local_ranks, unquantized, within, passed_dtype)
        for level in (self.across, self.within):
            level.ranks.is_part_of(group)
        has_room_for_any = all(level.max_num_tokens_per_rank() is None for level in (self.across, self.within))
        self._capacity = None if has_room_for_any else capacity
        self._ranks, self.by_host = RankGroup(config, group), grid.members
        self._is_batch_invariant = config.batch_invariant

    @classmethod
    def unusable_reason(cls) -> str | None:
        return ALL2ALL_BACKENDS.load(_ANYWHERE).unusable_reason()

    @classmethod
    def depends_on_batch(cls) -> str | None:
        return None

    def activation_format(self) -> FusedMoEActivationFormat:
        return FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        return self._capacity

    def num_dispatchers(self) -> int:
        return self._ranks.size

    def output_is_reduced(self) -> bool:
        return True

    def accepts_f32_output(self) -> bool:
        return True

    def batch_exchange(self) -> BatchExchange | None:
        return RankExchange(self._ranks)  # an expert may be copied to any host

    def check(self) -> None:
        for level in (self.across, self.within):
            level.check()

    def report_failure(self, error: Exception) -> None:
        self.across.report_failure(error)

    def dispatch(self, hidden_states: torch.Tensor, routing: Routing, quant_config: FusedMoEQuantConfig) -> Dispatched:
        with self.across.ranks.detector:
            # The level across hosts may take more, but the level within a host could not take what arrives.
            check_arguments(
                hidden_states, routing.topk_weights, routing.topk_ids, routing.apply_router_weight_on_input,
                routing.num_experts, self._capacity,
            )  # fmt: skip
            if not self._ranks.have_agreed:  # the levels agree on everything else
                is_weighted = int(routing.apply_router_weight_on_input)
                self._ranks.must_agree({"apply_router_weight_on_input": is_weighted}, hidden_states.device)
        if not self.within.passes_codes(quant_config.input_dtype):
            quant_config = quant_config.with_input_dtype(None)
        across = self.across.dispatch(hidden_states, replace(routing, expert_map=None), quant_config)
        on_host = Routing(
            topk_weights=across.topk_weights,
            topk_ids=across.topk_ids,
            num_experts=routing.num_experts,
            expert_map=routing.expert_map,
        )
        if across.row_scales is not None:
            within = self.within.pass_on(across, on_host)
        else:
            within = self.within.dispatch(across.rows, on_host, FusedMoEQuantConfig.unquantized())
        handle = _Handle(across, within.handle)
        return replace(within, rows_are_weighted=across.rows_are_weighted, handle=handle)

    def combine(
        self,
        output: torch.Tensor,
        expert_output: torch.Tensor,
        dispatched: Dispatched,
        reduce_impl: TopKWeightAndReduce,
    ) -> None:
        across, within = dispatched.handle
        with self.across.ranks.detector:
            handle = across.handle
            check_tensor("output", output, handle.shape, handle.dtype, handle.device)
            dtype, here = wire_dtype(output.dtype), replace(dispatched, handle=within)
            if self._is_batch_invariant:
                of_host = output.new_empty((*across.topk_ids.shape, output.size(1)), dtype=dtype)
                self.within.combine_slots(of_host, expert_output, here)
            else:
                of_host = output.new_empty((len(across.rows), output.size(1)), dtype=dtype)
                self.within.combine(of_host, expert_output, here, reduce_impl)
        self.across.combine(output, of_host, across, TopKWeightAndReduceNoOP())


def choose_levels(moe_config: FusedMoEConfig, num_ranks: int, group: dist.ProcessGroup) -> str:
    """Returns the name of the backend for a level of num_ranks ranks, the same on all ranks of the group."""
    if moe_config.batch_invariant:
        return _ANYWHERE  # results of single slots pass through both levels
    preferred: Any = ALL2ALL_BACKENDS.load(_PREFERRED)
    level = replace(moe_config, moe_parallel_config=FusedMoEParallelConfig(ep_size=num_ranks))
    runs_everywhere = all(answers_of_ranks(("runs", _PREFERRED), preferred.unusable_reason() is None, group))
    return _PREFERRED if runs_everywhere and preferred.refuses(level) is None else _ANYWHERE


def _level(
    name: str,
    moe_config: FusedMoEConfig,
    capacity: int,
    owners: torch.Tensor,
    quant_config: FusedMoEQuantConfig | None,
    group: dist.ProcessGroup,
    passed_dtype: torch.dtype | None = None,
) -> Any:
    """Creates the backend of one level, over the ranks of the group.

    Args:
        passed_dtype: dtype of codes that the backend may be given to pass on; None for none.

    Raises:
        ConfigError: the backend has another format, or does not accept `owners`.
    """
    kind = ALL2ALL_BACKENDS.load(name)
    rank = dist.get_rank(group)
    parallel = replace(
        FusedMoEParallelConfig.make(ep_size=dist.get_world_size(group), rank=rank),
        expert_placement_strategy=moe_config.moe_parallel_config.expert_placement_strategy,
    )
    config = replace(
        moe_config,
        moe_parallel_config=parallel,
        num_local_experts=int((owners == rank).sum()),
        max_num_tokens=capacity,
    )
    # Its rows pass on to no experts here.
    more: dict[str, Any] = {"overlap": False, "passed_dtype": passed_dtype} if name == _PREFERRED else {}
    given = {"moe_config": config, "quant_config": quant_config, "process_group": group, "owners": owners, **more}
    backend = kind(**given) if "owners" in inspect.signature(kind).parameters else None
    if backend is None or backend.activation_format() is not FusedMoEActivationFormat.Standard:
        raise ConfigError(
            f"levels names {name!r}; a level must be a backend of the Standard format that takes owners, as "
            f"{_PREFERRED!r} and {_ANYWHERE!r}"
        )
    return backend

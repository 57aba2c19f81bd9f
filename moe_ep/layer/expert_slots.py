"""Maps the experts of a checkpoint to this rank's slots.

A rank has a slot for each of its physical experts, followed by one for each fused shared expert. Initially physical
expert p holds the checkpoint's expert p mod E; EPLB changes that while serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_ep.arguments import check_integers, check_tensors
from moe_ep.errors import check_whole
from moe_ep.fixed_tensors import FixedTensors, table_device

# With "auto", a batch on a GPU with at most this many rows per slot of a rank uses one replica of each expert. Reading
# another replica takes as long as computing 37 to 94 rows; avoiding that saves more than uneven ranks cost
# (docs/benchmarks/balancing.md).
ROWS_PER_SLOT = 8

# Returns the physical experts that currently hold a logical one, first replica first.
Replicas = Callable[[int], list[int]]


def initial_physical_to_logical(num_experts: int, num_redundant_experts: int) -> list[int]:
    """The initial logical expert of each physical one: [0..E-1], then i mod E.

    Example: E=3 with 4 redundant: [0, 1, 2, 0, 1, 2, 0].
    """
    return [physical % num_experts for physical in range(num_experts + num_redundant_experts)]


class LayerEplbState(FixedTensors):
    """One layer's rows of the EPLB tensors: where the replicas of each logical expert are, and their loads.

    Attributes:
        expert_load_view: int32 `[P]`, this rank's tokens per physical expert, to which every pass adds.
        logical_to_physical_map: int `[E, max_replicas]`, -1 padded.
        logical_replica_count: int `[E]`.
        physical_to_logical_map: int32 `[P]`, the same by slot; None where maps were set without it.
        replica_rule: which replica a token takes (`moe_ep.eplb.config.REPLICA_RULES`).
        is_moving: returns whether this rank has fetched experts that are not in their slots yet.
        finish_moving: waits until there are none, as `EPLBManager.finish`; a collective step of the ranks.
        in_doubt: whether other ranks may have another placement of this layer because a rearrangement failed.
    """

    expert_load_view: torch.Tensor
    logical_to_physical_map: torch.Tensor
    logical_replica_count: torch.Tensor
    physical_to_logical_map: torch.Tensor | None
    _one: torch.Tensor

    def __init__(self, num_experts: int, num_redundant_experts: int) -> None:
        super().__init__()
        # An EPLBManager replaces these.
        self.replica_rule = "levelled"
        self.is_balanced: Callable[[], bool] = bool
        self.is_moving: Callable[[], bool] = bool
        self.finish_moving: Callable[[], Any] = bool
        self.place(initial_physical_to_logical(num_experts, num_redundant_experts), num_experts, table_device())

    def place(self, physical_to_logical: Sequence[int], num_experts: int, device: torch.device) -> None:
        """Creates the layer's own tensors for a placement `[P]` in which -1 is an empty slot; loads begin at 0."""
        self.in_doubt = False
        replicas: list[list[int]] = [[] for _ in range(num_experts)]
        for physical, logical in enumerate(physical_to_logical):
            if logical >= 0:
                replicas[logical].append(physical)
        width = max(map(len, replicas))
        state = {
            "expert_load_view": [0] * len(physical_to_logical),
            "logical_to_physical_map": [row + [-1] * (width - len(row)) for row in replicas],
            "logical_replica_count": [len(row) for row in replicas],
            "physical_to_logical_map": list(physical_to_logical),
            "_one": [1] * num_experts,
        }
        for name, values in state.items():
            tensor = torch.tensor(values, dtype=torch.int32, device=device)
            self.register_buffer(name, tensor, persistent=False)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not balanced."""
        return {**self.__dict__, "is_balanced": bool, "is_moving": bool, "finish_moving": bool}

    def maps(self, num_rows: int, slots_per_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logical_to_physical_map and logical_replica_count of the replicas that a batch may use.

        Args:
            num_rows: rows (tokens times top_k) that this rank sends to experts in the batch.
        """
        is_small = self._one.is_cuda and num_rows <= ROWS_PER_SLOT * slots_per_rank
        if self.replica_rule == "one" or (self.replica_rule == "auto" and is_small):
            return self.logical_to_physical_map[:, :1], self._one
        return self.logical_to_physical_map, self.logical_replica_count

    def replicas(self, logical: int) -> list[int]:
        """The physical experts that currently hold a logical one."""
        return [physical for physical in self.logical_to_physical_map[logical].tolist() if physical >= 0]

    def set(
        self,
        layer_index: int,
        expert_load_view: torch.Tensor,
        logical_to_physical_map: torch.Tensor,
        logical_replica_count: torch.Tensor,
    ) -> None:
        """Uses views of this layer's rows of `[L, ...]` tensors, so that the layer and the tensors' owner share state.

        Raises:
            ValueError: an index, shapes or dtypes that do not fit the layer.
            TypeError: an index that is not a whole number.
        """
        maps = {"logical_to_physical_map": logical_to_physical_map, "logical_replica_count": logical_replica_count}
        check_tensors(expert_load_view=expert_load_view, **maps)
        check_integers(**maps)
        check_whole(moe_layer_idx=layer_index)
        if expert_load_view.dtype is not torch.int32:
            raise ValueError(f"expert_load_view is {expert_load_view.dtype}; it must be torch.int32")
        (P,), E = self.expert_load_view.shape, self.logical_replica_count.size(0)
        given = {
            "expert_load_view": (expert_load_view, (P,)),
            "logical_to_physical_map": (logical_to_physical_map, (E, *logical_to_physical_map.shape[2:])),
            "logical_replica_count": (logical_replica_count, (E,)),
        }
        for name, (tensor, shape) in given.items():
            if tensor.dim() != 1 + len(shape) or tensor.shape[1:] != shape or not 0 <= layer_index < tensor.size(0):
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; with {E} logical and {P} physical experts it must be "
                    f"(L, {', '.join(map(str, shape))}), and moe_layer_idx ({layer_index}) below L"
                )
        for name, (tensor, _) in given.items():
            setattr(self, name, tensor[layer_index])
        self.physical_to_logical_map = None


class ExpertSlots:
    """Finds the local slots of a checkpoint's experts.

    Weight loading names physical experts: routed and redundant ones 0..P-1, then fused shared ones P..P+S-1. A logical
    expert with n initial replicas has n such ids; the r-th of them fills the current replicas r, r + n, r + 2n, ... So
    an id fills its own slot at first, and all ids together always fill every replica.

    Args:
        expert_map: int32 `[P + S]` (or `[P]`), physical -> local, -1 if not local; None if all are local.
        replicas: returns the current replicas of a logical expert, called at every use; None for the initial ones.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        num_redundant_experts: int = 0,
        num_fused_shared_experts: int = 0,
        expert_map: torch.Tensor | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.num_experts = num_experts
        self.num_fused_shared_experts = num_fused_shared_experts
        self.place(num_redundant_experts, expert_map)
        self._replicas = replicas or self._initial_replicas

    def place(self, num_redundant_experts: int, expert_map: torch.Tensor | None) -> None:
        """Changes the number of ranks, and thus of physical experts."""
        self.num_physical_experts = self.num_experts + num_redundant_experts
        physical_ids = range(self.num_physical_experts)
        self._local = list(physical_ids) if expert_map is None else expert_map.tolist()[: self.num_physical_experts]
        self.num_local_routed = sum(slot >= 0 for slot in self._local)

    def _initial_replicas(self, logical: int) -> list[int]:
        return list(range(logical, self.num_physical_experts, self.num_experts))

    @property
    def num_local(self) -> int:
        """Number of slots on this rank, routed and fused shared."""
        return self.num_local_routed + self.num_fused_shared_experts

    def of_id(self, expert_id: int) -> list[int]:
        """The local slots that a physical expert is loaded into; ValueError for an id that does not exist."""
        check_whole(expert_id=expert_id)
        shared = expert_id - self.num_physical_experts
        if not 0 <= expert_id < self.num_physical_experts + self.num_fused_shared_experts:
            raise ValueError(
                f"expert_id is {expert_id}; it must be at least 0 and below num_experts ({self.num_experts}) + "
                f"redundant ({self.num_physical_experts - self.num_experts}) + fused shared "
                f"({self.num_fused_shared_experts})"
            )
        if shared >= 0:
            return [self.num_local_routed + shared]
        nth, logical = divmod(expert_id, self.num_experts)
        return self._slots(self._replicas(logical)[nth :: len(self._initial_replicas(logical))])

    def of_checkpoint_expert(self, expert: int) -> list[int]:
        """All local slots of a logical expert (below E) or a fused shared one (from E on)."""
        if expert >= self.num_experts:
            return [self.num_local_routed + expert - self.num_experts]
        return self._slots(self._replicas(expert))

    def logical_of_physical(self) -> list[int]:
        """The current logical expert of each physical one, over all ranks; -1 for an empty slot."""
        logical = [-1] * self.num_physical_experts
        for expert in range(self.num_experts):
            for physical in self._replicas(expert):
                logical[physical] = expert
        return logical

    @property
    def local_experts(self) -> list[int]:
        """The logical expert in each of this rank's routed slots; -1 for an empty one."""
        logical = self.logical_of_physical()
        return [logical[physical] for physical, slot in enumerate(self._local) if slot >= 0]

    def _slots(self, physical_experts: list[int]) -> list[int]:
        return [self._local[physical] for physical in physical_experts if self._local[physical] >= 0]

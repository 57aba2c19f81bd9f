"""Experts from rank to rank, into the staging buffer and from there into their slots."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.distributed.process_groups import is_initialized
from moe_ep.eplb.handshake import SideChannel
from moe_ep.eplb.moves import LayerMoves, plan_moves
from moe_ep.eplb.packing import ExpertRows, intact, seal
from moe_ep.eplb.placement_state import placement_on_host
from moe_ep.eplb.policy.maps import Array, check_placement
from moe_ep.errors import EplbError

_SLEEP_S = 5e-5
_EXPERT_BITS = 20


class MessageTransport:
    """Moves packed experts as point-to-point messages of torch.distributed: gloo on CPUs, NCCL on GPUs.

    On a GPU everything is queued on the current stream; only `fetch`'s end waits, for the event behind it.

    Args:
        group: says which the EP ranks' group is, used by nobody else at the same time; None for one rank, or when it is
            closed.
        is_hopeless: says whether a rank has failed, so that no message will come from it.
        left: where `close` leaves the group for another transport, by timeout, unless messages are under way in it;
            None where it is the caller's.
    """

    name: ClassVar[str] = "messages"

    def __init__(
        self,
        group: Callable[[], dist.ProcessGroup | None],
        timeout_s: float,
        is_hopeless: Callable[[], bool] = lambda: False,
        left: dict[float, dist.ProcessGroup] | None = None,
    ) -> None:
        self._group, self._timeout_s, self._is_hopeless, self._left = group, timeout_s, is_hopeless, left
        self._under_way = False

    def connect(self, device: torch.device) -> None:
        """Opens the connections of all pairs, which takes long and must not happen while serving; a collective step."""
        word = torch.zeros(dist.get_world_size(self._group()), dtype=torch.int64, device=device)
        dist.all_to_all_single(torch.empty_like(word), word, group=self._group())
        torch.cuda.synchronize(device)

    def give_up(self) -> None:
        """Ends messages that wait for a peer; in the caller's group they end when the peer closes it."""
        left, self._left = self._left, None
        group = self._group()
        if left is not None and group is not None:
            group.abort()

    def close(self) -> None:
        """Leaves the group for another transport, unless messages are under way in it."""
        if self._under_way:
            self.give_up()
        left, self._left = self._left, None
        group = self._group()
        if left is not None and group is not None:
            left[self._timeout_s] = group

    def begin(self, number: int) -> None:
        """Nothing: messages come when they are sent."""
        return

    def fetch(self, experts: ExpertRows, moves: LayerMoves, rows: torch.Tensor, stamp: int) -> bool:
        """Brings every expert that is new on this rank into its staging row; False where one arrived broken.

        Args:
            rows: the staging buffer, as `experts.rows` gives it.
            stamp: names the rearrangement and the layer; the same on every rank.

        Raises:
            TimeoutError: a message did not come before the deadline.
            RuntimeError: the connection to a peer is gone.
        """
        deadline, self._under_way = time.monotonic() + self._timeout_s, True
        experts.pack([slot for _, slot, _ in moves.copies], [rows[row] for *_, row in moves.copies])
        stamps: dict[int, int] = {}
        for part in moves.rounds:
            packed = rows[moves.num_rows : moves.num_rows + len(part.sends)]
            experts.pack([slot for _, slot, _ in part.sends], list(packed))
            if part.sends:
                seal(packed, [_stamp(stamp, expert) for expert, *_ in part.sends])
            sends = [(row, peer) for row, (_, _, peers) in zip(packed, part.sends, strict=True) for peer in peers]
            receives = [(rows[row], peer) for _, row, peer, _ in part.receives]
            if sends or receives:
                _finish(self._start(sends, receives), experts.device, deadline)
            stamps |= {row: _stamp(stamp, expert) for expert, row, *_ in part.receives}
        _wait_for_device(experts.device, deadline, self._is_hopeless)
        self._under_way = False
        return not stamps or intact(rows[: moves.num_rows], stamps)

    def _start(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> Sequence[dist.Work]:
        """Messages (row, peer) of both kinds at once."""
        group = self._group()
        if group is None:
            raise RuntimeError("the connections to the other ranks are closed")
        if (sends or receives)[0][0].is_cuda:
            operations = [dist.P2POp(dist.isend, row, group=group, group_peer=peer) for row, peer in sends]
            operations += [dist.P2POp(dist.irecv, row, group=group, group_peer=peer) for row, peer in receives]
            return dist.batch_isend_irecv(operations)
        works = [group.send([row], peer, 0) for row, peer in sends]
        return works + [group.recv([row], peer, 0) for row, peer in receives]


def rearrange_expert_weights(
    expert_weights: Sequence[Sequence[torch.Tensor]],
    old_physical_to_logical: torch.Tensor | Array,
    new_physical_to_logical: torch.Tensor | Array,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Moves the experts of all layers in place, one layer after the other; a collective step of the ranks.

    Nothing may use the weights meanwhile. On GPUs it runs on the current stream.

    Args:
        expert_weights: of each layer the tensors `[local_slots, ...]` that move with an expert, contiguous; the same
            list on every rank, layers may differ.
        old_physical_to_logical, new_physical_to_logical: `[L, P]`, the logical expert of each slot, P = ranks *
            local_slots, before and after.
        process_group: the EP ranks; None for the default group, or one rank without torch.distributed.

    Raises:
        ValueError: placements or weights that do not fit together.
        EplbError: the ranks were given different placements, or one did not take part before the deadline
            (MOE_EP_DISPATCH_TIMEOUT_S).
    """
    if process_group is None and is_initialized():
        process_group = dist.group.WORLD
    rank, num_ranks = (0, 1) if process_group is None else (dist.get_rank(process_group), process_group.size())
    layers = [ExpertRows(tensors) for tensors in expert_weights]
    old = placement_on_host("old_physical_to_logical", old_physical_to_logical)
    new = placement_on_host("new_physical_to_logical", new_physical_to_logical)
    check_sizes(layers, old, new, num_ranks)
    if not layers:
        return
    timeout_s = env.DISPATCH_TIMEOUT_S.get()
    channel, device = SideChannel(process_group, timeout_s), layers[0].device
    transport = MessageTransport(lambda: process_group if device.type == "cuda" else channel.group, timeout_s)
    try:
        channel.agree("the placements", checksum=digest(old, new))
        staging = torch.zeros(max(r.staging_bytes for r in layers), dtype=torch.uint8, device=device)
        with torch.inference_mode():
            for index, experts in enumerate(layers):
                moves = plan_moves(old[index], new[index], num_ranks, rank)
                rows = experts.rows(staging)
                if not transport.fetch(experts, moves, rows, layer_stamp(0, index)):
                    raise EplbError(f"layer {index}: an expert arrived on EP rank {rank} with another checksum")
                experts.write([rows[row] for row, _ in moves.writes], [slot for _, slot in moves.writes])
        # Connections end only when nobody waits for this rank.
        channel.gather("the end of the moves", [0])
    except EplbError:
        raise
    except (RuntimeError, TimeoutError) as error:
        raise EplbError(f"moving experts did not finish on EP rank {rank} within {timeout_s:g} s: {error}") from None
    finally:
        channel.close()


def check_sizes(layers: Sequence[ExpertRows], old: Array, new: Array, num_ranks: int) -> None:
    """ValueError unless both placements are of these layers over so many ranks, and hold the same experts."""
    if old.ndim != 2 or old.shape != new.shape or old.shape[0] != len(layers):
        raise ValueError(
            f"old_physical_to_logical is {old.shape} and new_physical_to_logical {new.shape}; both must be (L, P) with "
            f"L the {len(layers)} layers of expert_weights"
        )
    for index, experts in enumerate(layers):
        if experts.num_slots * num_ranks != old.shape[1]:
            raise ValueError(
                f"layer {index} has {experts.num_slots} local slots on each of {num_ranks} ranks; the placements must "
                f"have {experts.num_slots * num_ranks} slots, not {old.shape[1]}"
            )
    num_experts = int(old.max(initial=-1)) + 1
    check_placement(old, old.shape, num_experts, "old_physical_to_logical")
    check_placement(new, old.shape, num_experts, "new_physical_to_logical")


def digest(*values: object) -> int:
    """63 bits of a checksum of arrays and texts, the same for the same values on every machine."""
    state = hashlib.sha256()
    for value in values:
        data = np.ascontiguousarray(value).tobytes() if isinstance(value, np.ndarray) else str(value).encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(state.digest()[:8], "little") >> 1


def layer_stamp(number: int, layer: int) -> int:
    """The stamp of one layer's messages in one rearrangement; `fetch` adds the expert."""
    return ((number << _EXPERT_BITS) + layer) & ((1 << 42) - 1)


def _stamp(stamp: int, expert: int) -> int:
    return (stamp << _EXPERT_BITS) + expert


def wait_for_event(event: torch.cuda.Event, deadline: float, is_hopeless: Callable[[], bool] = lambda: False) -> None:
    """Waits for an event and leaves the interpreter to other threads; TimeoutError at the deadline (time.monotonic)."""
    while not event.query():
        if is_hopeless():
            raise RuntimeError("a rank failed")
        if time.monotonic() > deadline:
            raise TimeoutError("the GPU did not get there")
        time.sleep(_SLEEP_S)


def _finish(works: Sequence[dist.Work], device: torch.device, deadline: float) -> None:
    """Waits for exchanges on CPUs, at most until the deadline; those of GPUs are queued on the current stream."""
    for work in works:
        if device.type == "cuda":
            work.wait()
        else:
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))


def _wait_for_device(device: torch.device, deadline: float, is_hopeless: Callable[[], bool]) -> None:
    """Waits for the current stream, at most until the deadline."""
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
        wait_for_event(event, deadline, is_hopeless)

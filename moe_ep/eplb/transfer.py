"""Experts from rank to rank, into the staging buffer and from there into their slots."""

from __future__ import annotations

import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.arguments import check_same_device
from moe_ep.distributed.failure_detection import comes_within
from moe_ep.distributed.liveness import machine
from moe_ep.distributed.peer_memory import PeerMemory
from moe_ep.distributed.process_groups import check_member, is_initialized, subgroup
from moe_ep.distributed.store import call_in_thread
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.handshake import SideChannel
from moe_ep.eplb.moves import LayerMoves, plan_moves
from moe_ep.eplb.packing import ExpertRows, intact, seal
from moe_ep.eplb.placement_state import placement_on_host
from moe_ep.eplb.policy.maps import Array, check_placement
from moe_ep.errors import BackendUnavailableError, EplbError

logger = logging.getLogger(__name__)

_SLEEP_S = 5e-5
_EXPERT_BITS = 20


class Transport(ABC):
    """Brings experts to this rank's staging buffer.

    Attributes:
        name: as `EplbConfig.transport` has it.
    """

    name: ClassVar[str]

    def begin(self, number: int) -> None:
        """Called by all ranks before the first layer of a rearrangement, when what was committed before is done."""
        return

    @abstractmethod
    def fetch(self, experts: ExpertRows, moves: LayerMoves, rows: torch.Tensor, stamp: int) -> bool:
        """Brings every expert that is new on this rank into its staging row; False where one arrived broken.

        Args:
            rows: the staging buffer, as `experts.rows` gives it.
            stamp: names the rearrangement and the layer; the same on every rank.

        Raises:
            TimeoutError: not all came before the deadline.
            RuntimeError: the connection to a peer is gone.
        """

    def give_up(self) -> None:
        """Ends a `fetch` that waits for a peer; called by another thread, and `close` comes next."""
        return

    def close(self) -> None:
        """Gives back what the transport holds."""
        return


class MessageTransport(Transport):
    """Moves packed experts as point-to-point messages of torch.distributed: gloo on CPUs, NCCL on GPUs.

    On a GPU everything is queued on the current stream; only `fetch`'s end waits, for the event behind it.

    Args:
        group: returns the EP ranks' group, which nothing else uses meanwhile; None for one rank, or when it is closed.
        is_hopeless: says whether a rank has failed, so that no message will come from it.
        left: where `close` leaves the group for another transport, by timeout; None where it is the caller's.
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
        self._part_with_group(abort=True)

    def close(self) -> None:
        """Leaves the group for another transport, unless messages are under way in it."""
        self._part_with_group(abort=self._under_way)

    def _part_with_group(self, abort: bool) -> None:
        left, self._left = self._left, None
        group = self._group()
        if left is None or group is None:
            return
        if abort:
            group.abort()
        else:
            left[self._timeout_s] = group

    def fetch(self, experts: ExpertRows, moves: LayerMoves, rows: torch.Tensor, stamp: int) -> bool:
        deadline, on_gpu, self._under_way = time.monotonic() + self._timeout_s, experts.device.type == "cuda", True
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
                works = self._start(sends, receives)
                if on_gpu:
                    for work in works:
                        work.wait()  # queued on the current stream
                else:
                    self._wait_on_host(works, deadline)
            stamps |= {row: _stamp(stamp, expert) for expert, row, *_ in part.receives}
        if on_gpu:
            event = torch.cuda.Event()
            event.record()
            wait_for_event(event, deadline, self._is_hopeless)
        self._under_way = False
        return not stamps or intact(rows[: moves.num_rows], stamps)

    def _wait_on_host(self, works: Sequence[dist.Work], deadline: float) -> None:
        """Waits for messages of gloo, of which a send may not end although its peer has closed the connection."""

        def wait_for_all() -> None:
            for work in works:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))

        # In a list, to be taken out: an error's traceback has this frame, and with it what the frame refers to.
        waiting = [call_in_thread("moe_ep-messages", wait_for_all)]
        comes_within(max(deadline - time.monotonic(), 0), lambda: waiting[0].done() or self._is_hopeless())
        if not waiting[0].done():
            raise RuntimeError("a rank failed" if self._is_hopeless() else "the deadline has passed")
        waiting.pop().result()

    def _start(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> Sequence[dist.Work]:
        """Starts messages (row, peer) of both kinds."""
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
        ValueError: placements or weights that do not fit together, or a group that this process is not in.
        TypeError: no process group.
        EplbError: the ranks were given different placements or tensors, or one did not take part before the deadline
            (MOE_EP_DISPATCH_TIMEOUT_S).
    """
    check_member(process_group)
    if process_group is None and is_initialized():
        process_group = dist.group.WORLD
    rank, num_ranks = (0, 1) if process_group is None else (dist.get_rank(process_group), process_group.size())
    layers = _rows_of_layers(expert_weights)
    old = placement_on_host("old_physical_to_logical", old_physical_to_logical)
    new = placement_on_host("new_physical_to_logical", new_physical_to_logical)
    check_sizes(layers, old, new, num_ranks)
    if not layers:
        return
    timeout_s = env.DISPATCH_TIMEOUT_S.get()
    channel, device = SideChannel(process_group, timeout_s), layers[0].device
    group = process_group if device.type == "cuda" else None
    transport = MessageTransport(lambda: group or channel.group, timeout_s, channel.is_hopeless)
    try:
        channel.agree("the placements", checksum=digest(old, new))
        channel.agree("the experts' tensors", checksum=digest(*(experts.signature for experts in layers)))
        staging = torch.zeros(max(r.staging_bytes for r in layers), dtype=torch.uint8, device=device)
        with torch.inference_mode():
            for index, experts in enumerate(layers):
                moves = plan_moves(old[index], new[index], num_ranks, rank)
                rows = experts.rows(staging)
                if not transport.fetch(experts, moves, rows, layer_stamp(0, index)):
                    raise EplbError(f"layer {index}: an expert arrived on EP rank {rank} with another checksum")
                experts.write([rows[row] for row, _ in moves.writes], [slot for _, slot in moves.writes])
        # Connections end only when no rank waits for this one.
        channel.gather("the end of the moves", [0])
    except EplbError:
        raise
    except (RuntimeError, TimeoutError) as error:
        raise EplbError(f"moving experts failed on EP rank {rank} (deadline {timeout_s:g} s): {error}") from None
    finally:
        channel.close()


def _rows_of_layers(expert_weights: Iterable[Sequence[torch.Tensor]]) -> list[ExpertRows]:
    """The rows of each layer; ValueError for weights that cannot move, or not through one staging buffer."""
    if not isinstance(expert_weights, Iterable):
        raise ValueError(
            f"expert_weights is {expert_weights!r}; it must be a list, of each layer the list of its tensors"
        )
    layers: list[ExpertRows] = []
    for index, tensors in enumerate(expert_weights):
        held = list(tensors) if isinstance(tensors, Iterable) and not isinstance(tensors, torch.Tensor) else tensors
        try:
            layers.append(ExpertRows(held))
        except ValueError as error:
            raise ValueError(f"layer {index}: {error}") from None
        for tensor in held:
            if tensor.is_meta:
                raise ValueError(f"layer {index}: expert_weights are on the meta device and have no values; load them")
            check_same_device("expert_weights of layer 0", layers[0].device, **{f"a tensor of layer {index}": tensor})
    return layers


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
    # Every expert has a slot, so that there are no more experts than slots.
    num_experts = min(int(old.max(initial=-1)) + 1, old.shape[1])
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


# ==== Choice of a transport ====

# Groups that closed managers left for the next ones, by EP group and timeout: NCCL ends a group only when all of its
# ranks do, and a rank closes its manager by itself.
_left: WeakKeyDictionary[dist.ProcessGroup, dict[float, dist.ProcessGroup]] = WeakKeyDictionary()


def choose_transport(
    channel: SideChannel, ep_group: dist.ProcessGroup | None, layers: Sequence[ExpertRows], config: EplbConfig
) -> Transport:
    """Peer copies where every GPU can read every other's memory, messages elsewhere; a collective step.

    Raises BackendUnavailableError if config.transport asks for peer copies and they cannot be had.
    """
    device, timeout_s = layers[0].device, config.deadline_s()
    on_gpus = device.type == "cuda" and channel.size > 1
    if config.transport == "peer_copies" and not on_gpus:
        raise BackendUnavailableError("transport 'peer_copies' is for several GPUs of one host; use 'messages' here")
    if on_gpus and config.transport != "messages":
        pace = config.max_transfer_gb_s * 1e9 if config.asynchronous and config.max_transfer_gb_s else None
        try:
            transport = PeerCopyTransport(channel, layers, timeout_s, pace)
            logger.info("EPLB moves experts by peer copies: all ranks are GPUs of one host")
            return transport
        except EplbError:
            raise
        except RuntimeError as error:
            if config.transport == "peer_copies":
                raise BackendUnavailableError(f"transport 'peer_copies' cannot be had here: {error}") from None
            logger.info("EPLB moves experts by messages: %s", error)
    if ep_group is None or device.type != "cuda":
        return MessageTransport(lambda: channel.group, timeout_s, channel.is_hopeless)
    left = _left.setdefault(ep_group, {})
    group = nccl_group(channel, ep_group, timeout_s, left)
    messages = MessageTransport(lambda: group, timeout_s, channel.is_hopeless, left)
    messages.connect(device)
    return messages


def nccl_group(
    channel: SideChannel, ep_group: dist.ProcessGroup, timeout_s: float, left: dict[float, dist.ProcessGroup]
) -> dist.ProcessGroup:
    """A group of the same ranks that nothing else uses: the one that was left on all of them, or a new one."""
    found = left.pop(timeout_s, None)
    # Where ranks closed several managers in different orders, each has left another group.
    names = channel.gather("what groups they have", [0 if found is None else digest(found.group_name)])
    if found is not None and names.count(names[0]) == len(names):
        return found
    deadline = timedelta(seconds=timeout_s)
    return subgroup(ep_group, range(channel.size), "moe_ep_eplb", backend="nccl", timeout=deadline)


# ==== Peer copies ====
#
# Experts between GPUs of one host by the copy engines: a rank reads its new experts out of its peers' weights.
#
# Each rank opens the others' weights once, through CUDA's inter-process memory handles, and then copies what it needs
# straight into its staging buffer. No rank packs or sends, no kernel runs, and the multiprocessors stay with the model.
# While the model serves, copies are paced: they take a share of the memory bandwidth that decoding lives on.

# A paced copy is cut into parts that are this far apart, so that none holds up the model's own messages for long.
_BEAT_S = 1e-4


class _Part(NamedTuple):
    """One tensor of a layer's experts on every rank.

    Attributes:
        addresses: where slot 0 begins, by rank, as this process sees it.
    """

    addresses: Sequence[int]
    slot_bytes: int
    start: int


class PeerCopyTransport(Transport):
    """Copies over NVLink or PCIe between GPUs of one host; making it is a collective step.

    Args:
        layers: whose weights the peers may read; they stay where they are until `close`.
        bytes_per_s: what a rank reads at most; None for as fast as it goes.

    Raises RuntimeError on all ranks where one cannot: other hosts, no peer access, memory that cannot be shared.
    """

    name: ClassVar[str] = "peer_copies"

    def __init__(
        self, channel: SideChannel, layers: Sequence[ExpertRows], timeout_s: float, bytes_per_s: float | None
    ) -> None:
        self._channel, self._timeout_s, self._bytes_per_s = channel, timeout_s, bytes_per_s
        parts = [part for experts in layers for part, _ in experts.parts]
        hosts = channel.gather("their hosts", [digest(machine())])
        refusal = "the ranks are on several hosts" if len({row[0] for row in hosts}) > 1 else ""
        self._peers = PeerMemory(channel.gather, channel.rank, parts, refusal)
        addresses = zip(*self._peers.addresses, strict=True)
        self._layers = {
            experts: [_Part(next(addresses), part.size(1), start) for part, start in experts.parts]
            for experts in layers
        }

    def begin(self, number: int) -> None:
        """Has all ranks begin together: what was committed before is in every peer's weights.

        Until a layer's own commit, which all ranks wait for with one another, its weights stay as they are.
        """
        self._channel.gather("the begin of the transfers", [number])

    def fetch(self, experts: ExpertRows, moves: LayerMoves, rows: torch.Tensor, stamp: int) -> bool:
        """As any transport does, on the current stream; always True."""
        deadline = time.monotonic() + self._timeout_s
        stream = torch.cuda.current_stream(experts.device)
        self._copy(_copier(stream.cuda_stream), self._pieces(experts, moves, rows))
        event = torch.cuda.Event()
        event.record(stream)
        wait_for_event(event, deadline)
        return True

    def close(self) -> None:
        self._peers.close()

    def _pieces(self, experts: ExpertRows, moves: LayerMoves, rows: torch.Tensor) -> Iterator[tuple[int, int, int]]:
        """Every tensor of every expert that is new here: (target, source, bytes)."""
        wanted = [(slot, row, self._channel.rank) for _, slot, row in moves.copies]
        wanted += [(slot, row, source) for part in moves.rounds for _, row, source, slot in part.receives]
        for slot, row, source in wanted:
            for part in self._layers[experts]:
                address = part.addresses[source] + slot * part.slot_bytes
                yield rows[row].data_ptr() + part.start, address, part.slot_bytes

    def _copy(self, copy: Callable[[int, int, int], None], pieces: Iterable[tuple[int, int, int]]) -> None:
        """Copies the pieces, paced by the host's clock where there is a limit."""
        pace = self._bytes_per_s
        started, copied = time.monotonic(), 0
        for target, source, whole in pieces:
            chunk = max(whole, 1) if pace is None else max(1 << 16, int(pace * _BEAT_S))
            for done in range(0, whole, chunk):
                size = min(chunk, whole - done)
                copy(target + done, source + done, size)
                copied += size
                ahead = 0.0 if pace is None else copied / pace - (time.monotonic() - started)
                if ahead > 0:
                    time.sleep(ahead)


def _copier(stream: int) -> Callable[[int, int, int], None]:
    """copy(target, source, size) on a stream."""
    from cuda.bindings import driver

    queue, call, done = driver.CUstream(stream), driver.cuMemcpyAsync, driver.CUresult.CUDA_SUCCESS

    def copy(target: int, source: int, size: int) -> None:
        (result,) = call(target, source, size, queue)
        if result != done:
            raise RuntimeError(f"cuMemcpyAsync failed with {result.name}")

    return copy

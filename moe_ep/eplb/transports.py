"""How experts are moved between ranks: the choice between messages and peer copies, and the copies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import ClassVar, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from moe_ep.distributed.liveness import machine
from moe_ep.distributed.peer_memory import PeerMemory
from moe_ep.distributed.process_groups import subgroup
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.handshake import SideChannel
from moe_ep.eplb.moves import LayerMoves
from moe_ep.eplb.packing import ExpertRows
from moe_ep.eplb.transfer import MessageTransport, digest, wait_for_event
from moe_ep.errors import BackendUnavailableError, EplbError

logger = logging.getLogger(__name__)

# Groups that closed managers left for the next ones, by EP group and timeout: NCCL ends a group only when all of its
# ranks do, and a rank closes its manager by itself.
_left: WeakKeyDictionary[dist.ProcessGroup, dict[float, dist.ProcessGroup]] = WeakKeyDictionary()


class Transport(Protocol):
    """Brings experts to this rank's staging buffer.

    Attributes:
        name: as `EplbConfig.transport` has it.
    """

    name: ClassVar[str]

    def begin(self, number: int) -> None:
        """Called by all ranks before the first layer of a rearrangement, when what was committed before is done."""

    def fetch(self, experts: ExpertRows, moves: LayerMoves, rows: torch.Tensor, stamp: int) -> bool:
        """Brings a layer's new experts into their rows and waits for them; False where one arrived broken."""

    def give_up(self) -> None:
        """Ends a `fetch` that waits for a peer; called by another thread, and `close` comes next."""

    def close(self) -> None:
        """Gives back what the transport holds."""


def choose_transport(
    channel: SideChannel, ep_group: dist.ProcessGroup | None, layers: Sequence[ExpertRows], config: EplbConfig
) -> Transport:
    """Peer copies where every GPU can read every other's memory, messages elsewhere; a collective step.

    Raises:
        BackendUnavailableError: config.transport asks for peer copies and they cannot be had.
        EplbError: a rank did not take part.
    """
    device, timeout_s = layers[0].device, config.deadline_s()
    on_gpus = device.type == "cuda" and channel.size > 1
    if config.transport == "peer_copies" and not on_gpus:
        raise BackendUnavailableError("transport 'peer_copies' is for several GPUs of one host; use 'messages' here")
    if on_gpus and config.transport != "messages":
        pace = config.max_transfer_gb_s * 1e9 if config.asynchronous and config.max_transfer_gb_s else None
        try:
            transport: Transport = PeerCopyTransport(channel, layers, timeout_s, pace)
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
    """A group of the same ranks that nobody else uses: the one that was left on all of them, or a new one."""
    found = left.pop(timeout_s, None)
    # Where ranks closed several managers in different orders, each has left another group.
    names = channel.gather("what groups they have", [0 if found is None else digest(found.group_name)])
    if found is not None and names.count(names[0]) == len(names):
        return found
    deadline = timedelta(seconds=timeout_s)
    return subgroup(ep_group, range(channel.size), "moe_ep_eplb", backend="nccl", timeout=deadline)


# ==== Copies ====
#
# Experts between GPUs of one host by the copy engines: a rank reads its new experts out of its peers' weights.
#
# Each rank opens the others' weights once, through CUDA's inter-process memory handles, and then copies what it needs
# straight into its staging buffer. Nobody packs or sends, no kernel runs, and the multiprocessors stay with the model.
# While the model serves, copies are paced: they take a share of the memory bandwidth that decoding lives on.

# A paced copy is cut into parts that are this far apart, so that none holds up the model's own messages for long.
_BEAT_S = 1e-4


class _Part(NamedTuple):
    """One tensor of a layer's experts on every rank.

    Attributes:
        addresses: where slot 0 begins, by rank, as this process sees it.
    """

    addresses: list[int]
    slot_bytes: int
    start: int


class _Piece(NamedTuple):
    """Bytes to be copied from one address to another."""

    target: int
    source: int
    size: int


class PeerCopyTransport:
    """Copies over NVLink or PCIe between GPUs of one host; making it is a collective step.

    Args:
        layers: whose weights the peers may read; they stay where they are until `close`.
        bytes_per_s: what a rank reads at most; None for as fast as it goes.

    Raises:
        RuntimeError: on all ranks, where one cannot: other hosts, no peer access, memory that cannot be shared.
    """

    name: ClassVar[str] = "peer_copies"

    def __init__(
        self, channel: SideChannel, layers: Sequence[ExpertRows], timeout_s: float, bytes_per_s: float | None
    ) -> None:
        self._channel, self._timeout_s, self._bytes_per_s = channel, timeout_s, bytes_per_s
        self._layers: dict[ExpertRows, list[_Part]] = {}
        parts = [part for experts in layers for part, _ in experts.parts]
        hosts = channel.gather("their hosts", [digest(machine())])
        refusal = "the ranks are on several hosts" if len({row[0] for row in hosts}) > 1 else ""
        self._peers = PeerMemory(channel.gather, channel.rank, parts, refusal)
        addresses = self._peers.addresses
        index = 0
        for experts in layers:
            self._layers[experts] = [
                _Part([row[index + i] for row in addresses], part.size(1), start)
                for i, (part, start) in enumerate(experts.parts)
            ]
            index += len(experts.parts)

    def begin(self, number: int) -> None:
        """Has all ranks begin a rearrangement together: what was committed before is in every peer's weights.

        Until a layer's own commit, which all ranks wait for with one another, its weights stay as they are.
        """
        self._channel.gather("the begin of the transfers", [number])

    def fetch(self, experts: ExpertRows, moves: LayerMoves, rows: torch.Tensor, stamp: int) -> bool:
        """Brings every expert that is new on this rank into its staging row, on the current stream; always True.

        Raises:
            TimeoutError: the copies did not end before the deadline.
        """
        deadline = time.monotonic() + self._timeout_s
        stream = torch.cuda.current_stream(experts.device)
        copy, pieces = _copier(stream.cuda_stream), self._pieces(experts, moves, rows)
        if self._bytes_per_s is None:
            for piece in pieces:
                copy(*piece)
        else:
            _copy_paced(copy, pieces, self._bytes_per_s)
        event = torch.cuda.Event()
        event.record(stream)
        wait_for_event(event, deadline)
        return True

    def give_up(self) -> None:
        """Nothing: copies wait for no peer."""
        return

    def close(self) -> None:
        """Lets go of the peers' weights."""
        self._peers.close()

    def _pieces(self, experts: ExpertRows, moves: LayerMoves, rows: torch.Tensor) -> Iterator[_Piece]:
        """Every tensor of every expert that is new here."""
        wanted = [(slot, row, self._channel.rank) for _, slot, row in moves.copies]
        wanted += [(slot, row, source) for part in moves.rounds for _, row, source, slot in part.receives]
        for slot, row, source in wanted:
            for part in self._layers[experts]:
                address = part.addresses[source] + slot * part.slot_bytes
                yield _Piece(rows[row].data_ptr() + part.start, address, part.slot_bytes)


def _copy_paced(copy: Callable[[int, int, int], None], pieces: Iterable[_Piece], bytes_per_s: float) -> None:
    """Copies the pieces, at most so many bytes a second of the host's clock."""
    started, copied = time.monotonic(), 0
    chunk = max(1 << 16, int(bytes_per_s * _BEAT_S))
    for target, source, whole in pieces:
        for done in range(0, whole, chunk):
            size = min(chunk, whole - done)
            copy(target + done, source + done, size)
            copied += size
            ahead = copied / bytes_per_s - (time.monotonic() - started)
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

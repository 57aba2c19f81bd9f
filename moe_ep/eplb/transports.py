"""The one place that chooses how experts travel."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from moe_ep.distributed.process_groups import subgroup
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.handshake import SideChannel
from moe_ep.eplb.moves import LayerMoves
from moe_ep.eplb.packing import ExpertRows
from moe_ep.eplb.transfer import MessageTransport, digest
from moe_ep.errors import BackendUnavailableError, EplbError

logger = logging.getLogger(__name__)

# Groups that closed managers left for the next ones, by EP group and timeout: NCCL ends a group only when all of its
# ranks do, and a rank closes its manager by itself.
_left: WeakKeyDictionary[dist.ProcessGroup, dict[float, dist.ProcessGroup]] = WeakKeyDictionary()


class Transport(Protocol):
    """A way for experts to come to this rank's staging buffer."""

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
        from moe_ep.eplb.peer_copies import PeerCopyTransport

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
    group = _nccl_group(channel, ep_group, timeout_s, left)
    messages = MessageTransport(lambda: group, timeout_s, channel.is_hopeless, left)
    messages.connect(device)
    return messages


def _nccl_group(
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

"""One layer at a time: its new experts into the staging buffer, then weights and maps in force together."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import astuple
from typing import TYPE_CHECKING

import torch

from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.handshake import SideChannel
from moe_ep.eplb.moves import LayerMoves, plan_moves
from moe_ep.eplb.packing import ExpertRows
from moe_ep.eplb.placement_state import PlacementState
from moe_ep.eplb.policy.maps import Array, experts_moved
from moe_ep.eplb.transfer import choose_transport, digest, wait_for_event
from moe_ep.errors import ConfigError

if TYPE_CHECKING:
    from moe_ep.layer import FusedMoE


class LayerMover:
    """Moves layers of a model between the ranks of its EP group; making it is a collective step.

    `fetch` belongs to the moving thread and `commit` to the serving one; they take turns.

    Args:
        layers: with their weights in the form, and on the device, that the experts read; not kept, their weights are.
    """

    def __init__(
        self,
        layers: Sequence[FusedMoE],
        placement: PlacementState,
        channel: SideChannel,
        config: EplbConfig,
    ) -> None:
        self._layers, self._placement = [weakref.ref(layer) for layer in layers], placement
        self._rank, self._num_ranks = channel.rank, channel.size
        self._ranks_per_host = channel.size // config.num_nodes
        self._timeout_s = channel.timeout_s
        self._experts = [ExpertRows(layer.expert_weights()) for layer in layers]
        channel.agree(
            "the model or its EPLB settings",
            layers=digest(placement.num_experts, placement.num_slots, *(part.signature for part in self._experts)),
            settings=digest(astuple(config)),
            # They differ after a commit that failed on some ranks, and then there is no placement to go on from.
            placement=digest(placement.host),
        )
        self.doubt(range(len(layers)), False)
        self.transport = choose_transport(channel, layers[0].groups.ep, self._experts, config)
        self.device = self._experts[0].device
        staging_bytes = max(experts.staging_bytes for experts in self._experts)
        self._staging = torch.zeros(staging_bytes, dtype=torch.uint8, device=self.device)
        on_gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if on_gpu else None
        # The streams that use the staging buffer; `close` may run in another thread than the one that serves.
        self._streams = set() if self._stream is None else {self._stream}
        # The last commit, which later uses of the staging buffer and the weights wait for.
        self._committed = torch.cuda.Event() if on_gpu else None
        self._waiting: tuple[int, Array, LayerMoves] | None = None

    @property
    def staging_bytes(self) -> int:
        """The memory that moving takes."""
        return self._staging.numel()

    def cost(self, layer: int, new: Array) -> tuple[int, int]:
        """(experts, bytes) that ranks must receive for a layer's new placement `[P]`."""
        num_experts = int(experts_moved(self._placement.host[layer][None], new[None], self._num_ranks)[0])
        return num_experts, num_experts * self._experts[layer].expert_bytes

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the CPU of what the serving thread had queued when it called `serving_is_at`."""
        if self._stream is None:
            return tensor.clone()
        self._wait_for_commit()
        with torch.cuda.stream(self._stream):
            return tensor.cpu()

    def warm_up(self) -> None:
        """Commits every layer once as it is, so that no step waits ten milliseconds for a kernel to be loaded."""
        for layer, experts in enumerate(self._experts):
            self._wait_for_commit()
            present = self._placement.host[layer]
            with torch.inference_mode():
                experts.pack([0], [experts.rows(self._staging)[0]])
                self._placement.stage(present)
            self._put_in_force(layer, present, LayerMoves(num_rows=1, copies=[], rounds=[], writes=[(0, 0)]))

    def begin(self, number: int) -> None:
        """Begins a rearrangement of some layers, each at most once; a collective step of the moving threads."""
        self._wait_for_commit()
        self.transport.begin(number)

    def fetch(self, layer: int, new: Array, stamp: int) -> bool:
        """Brings a layer's new experts into the staging buffer; returns when they are there, False where one is broken.

        Raises TimeoutError at the deadline, and RuntimeError where the connection to a peer is gone.
        """
        experts = self._experts[layer]
        moves = plan_moves(self._placement.host[layer], new, self._num_ranks, self._rank, self._ranks_per_host)
        self._wait_for_commit()
        with torch.inference_mode(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._placement.stage(new)
            intact = self.transport.fetch(experts, moves, experts.rows(self._staging), stamp)
        self._waiting = (layer, new, moves)
        return intact

    def commit(self) -> int:
        """Puts the fetched layer's weights and maps in force, in stream order; returns which it was."""
        if self._waiting is None:
            raise RuntimeError("commit was called and no layer was fetched")
        layer, new, moves = self._waiting
        try:
            self._put_in_force(layer, new, moves)
        except BaseException:
            why = "a move of its experts was interrupted, so that they are not where its maps say"
            self._layer(layer).refuse(why)
            raise
        self._waiting = None
        return layer

    def _put_in_force(self, layer: int, new: Array, moves: LayerMoves) -> None:
        experts, module = self._experts[layer], self._layer(layer)
        rows, slots = experts.rows(self._staging), [slot for _, slot in moves.writes]
        with torch.inference_mode():
            experts.write([rows[row] for row, _ in moves.writes], slots)
            self._placement.commit(layer, new)
            module.quant_method.rebuild_derived_state(module, slots)
        if self._committed is not None:
            self._streams.add(torch.cuda.current_stream(self.device))
            self._committed.record()

    def doubt(self, layers: Iterable[int], in_doubt: bool) -> None:
        """Says of layers whether other ranks may have another placement, so that they must not run."""
        for layer in layers:
            state = self._layer(layer).eplb_state
            if state is not None:
                state.in_doubt = in_doubt

    def check_loaded(self) -> None:
        """Raises RuntimeError where a layer's weights are being loaded again, for the slots of now."""
        for layer in range(len(self._layers)):
            self._layer(layer).check_loaded()

    def close(self) -> None:
        """Gives back what the transport holds, and the staging buffer."""
        self.transport.close()
        for stream in self._streams:
            self._staging.record_stream(stream)
        self._staging = self._staging.new_empty(0)

    def _layer(self, index: int) -> FusedMoE:
        layer = self._layers[index]()
        if layer is None:
            raise RuntimeError(f"layer {index} of this mover is gone; keep the layers as long as they move")
        return layer

    def _wait_for_commit(self) -> None:
        if self._committed is not None:
            wait_for_event(self._committed, time.monotonic() + self._timeout_s)

    def serving_is_at(self) -> None:
        """Has the next transfer wait for what the serving thread has queued so far."""
        if self._committed is not None:
            self._committed.record()


def check_layers(layers: Sequence[FusedMoE]) -> FusedMoE:
    """The first layer; ConfigError unless all can be balanced together."""
    if not layers:
        raise ConfigError("layers is empty; EPLB needs the model's MoE layers")
    first = layers[0]
    for index, layer in enumerate(layers):
        if any(layer is other for other in layers[:index]):
            raise ConfigError(f"layers has {layer.layer_name} twice; list each layer once, since its experts move once")
        if layer.eplb_state is None:
            raise ConfigError(f"the layer {layer.layer_name} was made without EPLB; make it with enable_eplb=True")
        if layer.eplb_state.is_balanced():
            raise ConfigError(f"the layer {layer.layer_name} is balanced by another EPLBManager; close that one first")
        sizes = [(one.num_experts, one.num_redundant_experts, one.parallel_config.ep_size) for one in (first, layer)]
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"{first.layer_name} has (experts, redundant, ep_size) {sizes[0]} and {layer.layer_name} {sizes[1]}; "
                f"layers that are balanced together must be alike"
            )
        strategy = layer.parallel_config.expert_placement_strategy
        if strategy != "linear":
            raise ConfigError(
                f"expert_placement_strategy of {layer.layer_name} is {strategy!r}; EPLB needs 'linear', slots in rank "
                f"order"
            )
    return first

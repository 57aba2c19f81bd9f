"""Balancing while serving: records the load, plans, moves experts beside the model, and commits between two steps.

A rearrangement that is due is carried out by a thread of the manager's own (`moe_ep.eplb.rearrangement`). Only commits
run on the serving thread, between two steps, and on a GPU they only queue copies. The thread keeps neither the manager
nor its layers alive, so a manager that is dropped ends.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moe_ep.distributed.passes import moe_layers
from moe_ep.distributed.store import close_at_exit
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.events import EplbTotals, Event, Listener, PlanReport
from moe_ep.eplb.handshake import SideChannel
from moe_ep.eplb.mover import LayerMover, check_layers
from moe_ep.eplb.placement_state import PlacementState, placement_on_host
from moe_ep.eplb.policy.maps import Array
from moe_ep.eplb.rearrangement import POLL_S, Job, Rearrangement, StepGate
from moe_ep.eplb.recorder import ExpertLoadRecorder
from moe_ep.errors import EplbError

if TYPE_CHECKING:
    from moe_ep.layer import FusedMoE


logger = logging.getLogger(__name__)


class MovingThread(threading.Thread):
    """Carries out rearrangements one after the other, and looks for errors of other ranks between them.

    After an error it takes no more jobs. It ends when it is closed, and closes the rearrangement then.

    Args:
        stop: is told once what went wrong, here or on another rank.
    """

    def __init__(
        self,
        rearrangement: Rearrangement,
        channel: SideChannel,
        device: torch.device,
        stop: Callable[[EplbError], None],
    ) -> None:
        super().__init__(name="moe_ep-eplb", daemon=True)
        self._rearrangement, self._channel, self._device, self._tell_error = rearrangement, channel, device, stop
        # A SimpleQueue, since its put is reentrant: garbage collected inside it may close this object.
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()

    def close(self) -> None:
        """Returns when the thread has ended, or will at once: it may itself collect this object as garbage."""
        self.jobs.put(None)
        if threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            try:
                error = self._take_jobs()
            except BaseException as cause:
                error = interrupted(self._channel, cause)
            if error is not None:
                self._tell_error(error)
                while self.jobs.get() is not None:
                    pass
        finally:
            self._rearrangement.close()

    def _take_jobs(self) -> EplbError | None:
        """Returns what went wrong, or None when the thread was closed."""
        error: EplbError | None = None
        while error is None:
            try:
                job = self.jobs.get(timeout=POLL_S)
            except queue.Empty:
                error = self._channel.heard()
                continue
            if job is None:
                return None
            error = self._rearrangement.carry_out(job, asynchronous=True)
        return error


def interrupted(channel: SideChannel, cause: BaseException) -> EplbError:
    """The error of all ranks for what is no error but ends a thread all the same, as SystemExit of a listener does."""
    return channel.failed(f"EPLB was interrupted on EP rank {channel.rank}: {cause!r}")


class EPLBManager:
    """Balances the MoE layers of one model over its EP ranks; making it is a collective step of them.

    It takes one staging buffer, as large as the largest layer's experts on this rank and one expert more, and keeps it:
    a run that measures memory sees it. Make it when the weights are where they stay, and before CUDA graphs are
    captured: a graph reads the maps that its layers had at capture, and only those of the present manager follow moves.

    Args:
        layers: the model's MoE layers in order, made with enable_eplb, with equal numbers of experts.
        config: the same on every rank.
        placement: int `[L, P]` to begin with; the experts are moved there at once. None leaves them as they are.
        listener: is told what happens (`moe_ep.eplb.events`); what it raises is logged, and nothing else comes of it.

    Attributes:
        totals: what was done so far.

    Raises:
        ConfigError: layers that cannot be balanced together or that another manager has, or settings that do not fit.
        EplbError: the ranks were given different layers, settings or placements.
        TypeError: layers or a config of another kind.
    """

    def __init__(
        self,
        layers: Sequence[FusedMoE],
        config: EplbConfig | None = None,
        *,
        placement: Array | torch.Tensor | None = None,
        listener: Listener | None = None,
    ) -> None:
        if not (config is None or isinstance(config, EplbConfig)):
            raise TypeError(f"config is {config!r}; it must be an EplbConfig, or None for the defaults")
        layers = moe_layers(layers)
        self.config = config or EplbConfig()
        self.totals = EplbTotals()
        self._listener = listener
        first = check_layers(layers)
        self.config.check_model(first.num_experts, first.parallel_config.ep_size)
        for layer in layers:
            # Weights that are packed on a GPU are packed by now, and are not replaced any more.
            _ = layer.modular_kernel
        device = first.expert_weights()[0].device
        present = np.array([layer.slots.logical_of_physical() for layer in layers], dtype=np.int64)
        # Ordinary tensors, also in inference mode: layers and commits write to them in any mode.
        with torch.inference_mode(False):
            self.placement = PlacementState(present, first.num_experts, first.parallel_config.ep_size, device)
            self.recorder = ExpertLoadRecorder(
                num_layers=len(layers),
                num_physical_experts=self.placement.num_slots,
                window_size=self.config.window_size,
                device=device,
            )
        self._channel = SideChannel(first.groups.ep, self.config.deadline_s())
        self._gate = StepGate()
        self._layers = layers
        self._mover = LayerMover(layers, self.placement, self._channel, self.config)
        self._rearrangement = Rearrangement(
            self.config,
            self._channel,
            self._gate,
            self._mover,
            self.placement,
            self.recorder,
            _of(self, EPLBManager._tell),
        )
        stop = _of(self, EPLBManager._stop)
        self._thread = MovingThread(self._rearrangement, self._channel, self._mover.device, stop)
        for index, layer in enumerate(layers):
            layer.set_eplb_state(
                index,
                self.recorder.expert_load_pass,
                self.placement.logical_to_physical_map,
                self.placement.logical_replica_count,
            )
            if layer.eplb_state is not None:
                layer.eplb_state.physical_to_logical_map = self.placement.physical_to_logical_map[index]
                layer.eplb_state.replica_rule = self.config.replica_rule
                layer.eplb_state.is_balanced = _of(self, EPLBManager._is_open, False)
                layer.eplb_state.is_moving = _of(self, lambda manager: manager.busy and manager._is_open(), False)
                layer.eplb_state.finish_moving = _of(self, lambda manager: manager._is_open() and manager.finish())
        self._telling, self._beginning = threading.Lock(), threading.Lock()
        self._num_jobs = 0
        # Whether a thread serves it; and, once it does not any more, whether nothing had gone wrong before.
        self._is_started = self._is_closing = False
        try:
            self._mover.warm_up()
            self.recorder.warm_up()
            if placement is not None:
                self._begin("EPLBManager", False, None, self._checked(placement))
        except BaseException:
            self._rearrangement.close()
            raise
        self._thread.start()
        self._is_started = True
        self._if_dropped = weakref.finalize(self, _end, self._rearrangement, self._thread)
        self._if_dropped.atexit = False
        close_at_exit(self)

    @property
    def busy(self) -> bool:
        """Whether a rearrangement is under way; after the same step the same on every rank."""
        return self._rearrangement.busy

    @property
    def staging_bytes(self) -> int:
        """Memory kept for moving experts."""
        return self._mover.staging_bytes

    @property
    def transport(self) -> str:
        """How experts are moved: "messages" or "peer_copies"."""
        return self._mover.transport.name

    def step(self) -> None:
        """Ends a step of the model: closes the load record, commits what is due, starts a plan that is due.

        Every rank calls it after every step. It queues work on the current stream and does not wait for the device.

        Raises:
            EplbError: a rearrangement failed; from then on always.
            RuntimeError: a plan is due, and a layer's weights are being loaded again.
        """
        self._gate.check()
        self.recorder.end_step()
        try:
            due = self._gate.advance(self._channel.verdict_s)
        except TimeoutError:
            error = self._channel.failed(
                f"the step of a commit was not agreed on within {self._channel.verdict_s:g} s; experts stay"
            )
            self._gate.fail(error)
            raise error from None
        except EplbError:
            raise
        except BaseException as cause:
            # The step is counted, and others commit after it.
            self._stop(interrupted(self._channel, cause))
            raise
        if due:
            self._commit()
        if not self.config.is_due(self._gate.step):
            return
        if self._rearrangement.busy:
            self._tell(PlanReport(step=self._gate.step, made=False, reason="experts are still moving"))
        else:
            self._begin("step", self.config.asynchronous, self.recorder.snapshot(), None)

    def profile_step(self) -> None:
        """Ends a step that only measured memory or time: its tokens are not load, and it is not counted."""
        self.recorder.discard_pass()

    def plan_now(self) -> None:
        """Plans from the steps recorded so far, whether one is due or not; every rank calls it after the same step.

        Raises:
            EplbError: experts are still moving.
            RuntimeError: a layer's weights are being loaded again.
        """
        self._begin("plan_now", self.config.asynchronous, self.recorder.snapshot(), None)

    def rearrange(self, physical_to_logical: Array | torch.Tensor) -> None:
        """Goes to a placement `[L, P]` that the caller planned; every rank calls it after the same step.

        Asynchronous or not as the configuration says; `busy` tells when it is done, `finish` waits for that.

        Raises:
            ValueError: not a placement of these experts.
            EplbError: experts are still moving, or (there or in a later step) the ranks gave different placements.
            RuntimeError: a layer's weights are being loaded again.
        """
        self._begin("rearrange", self.config.asynchronous, None, self._checked(physical_to_logical))

    def finish(self) -> None:
        """Returns when no experts move any more; every rank calls it after the same step.

        To be called before weights are loaded again: what is loaded then goes to the slots where the experts are.

        Raises:
            EplbError: the rearrangement failed.
        """
        self._gate.check()
        while self._rearrangement.busy:
            self._gate.wait_decided()
            self._commit()

    def close(self) -> None:
        """Ends the manager's thread and connections, and gives its memory back; `step` raises from here on.

        A rearrangement under way is given up, and peers that go on with it fail at their next exchange. A manager that
        is dropped ends in the same way, beside the thread that drops it.
        """
        if self._is_started:
            self._is_started = False
            self._if_dropped.detach()
            self._is_closing = not self._gate.failed
            self._rearrangement.give_up()
            self._thread.close()

    def _is_open(self) -> bool:
        return self._is_started and not self._gate.failed

    def _checked(self, placement: Array | torch.Tensor) -> Array:
        target = placement_on_host("physical_to_logical", placement)
        self.placement.check(target, "physical_to_logical")
        return target

    def _begin(self, called: str, asynchronous: bool, counts: torch.Tensor | None, target: Array | None) -> None:
        """Begins a rearrangement unless one is under way; synchronously, carries it out."""
        with self._beginning:
            self._gate.check()
            if self._rearrangement.busy:
                raise EplbError(f"{called} was called while experts are still moving; call finish first")
            self._mover.check_loaded()
            self._mover.serving_is_at()
            self._rearrangement.busy = True
            self._num_jobs += 1
        job = Job(self._num_jobs, self._gate.step, counts, target)
        if asynchronous:
            self._thread.jobs.put(job)
            return
        try:
            error = self._rearrangement.carry_out(job, asynchronous=False)
        except BaseException as cause:
            self._stop(interrupted(self._channel, cause))
            raise
        finally:
            self._rearrangement.busy = False
        if error is not None:
            self._stop(error)
            raise error

    def _stop(self, error: EplbError) -> None:
        """Has `step` raise this; peers that wait for this rank learn it at once."""
        self._gate.fail(error)
        doubtful = self._rearrangement.in_doubt
        if doubtful is not None and not self._is_closing:  # ranks that close after the same step agree on all layers
            self._mover.doubt([doubtful], True)
        # The traceback of the error's context would keep connections alive.
        error.__context__ = None
        self._channel.close()

    def _commit(self) -> None:
        try:
            layer = self._rearrangement.commit()
        except BaseException as cause:
            logger.exception("EPLB stopped")
            error = self._channel.failed(f"a commit failed on EP rank {self._channel.rank}: {cause!r}")
            self._gate.fail(error)
            if isinstance(cause, Exception):
                raise error from cause
            raise
        if layer is None:
            self._rearrangement.busy = False

    def _tell(self, event: Event) -> None:
        with self._telling:
            self.totals.add(event)
        if self._listener is None:
            return
        try:
            self._listener(event)
        except Exception:
            # A listener's error must not stop the balancing, nor leave the other ranks waiting.
            logger.exception("the listener of the EPLB manager failed at %s", event)


def _of(manager: EPLBManager, method: Callable[..., Any], otherwise: Any = None) -> Callable[..., Any]:
    """A method of a manager as long as there is one. Layers and the thread keep this, and not what it holds."""
    there = weakref.ref(manager)

    def call(*args: Any) -> Any:
        found = there()
        return otherwise if found is None else method(found, *args)

    return call


def _end(rearrangement: Rearrangement, thread: MovingThread) -> None:
    """Ends a manager that was dropped. Returns at once, since the thread that collects it may hold any lock."""
    rearrangement.give_up()
    thread.jobs.put(None)
    close_at_exit(thread)

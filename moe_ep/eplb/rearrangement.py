"""One rearrangement from the loads to the last commit: what the ranks do together, in this order.

    agree on what is due -> sum the loads -> plan on rank 0 -> for each layer that changes:
        fetch -> all ranks say whether their experts arrived -> agree on a step -> commit after that step
    -> agree on the step after which it is over

The agreement on a step comes only when nothing is under way on any device, so a rank that holds its model back for it
never waits for another rank's GPU.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.events import CommitReport, Event, PlanReport
from moe_ep.eplb.handshake import SideChannel
from moe_ep.eplb.mover import LayerMover
from moe_ep.eplb.placement_state import PlacementState
from moe_ep.eplb.planner import PlannerProcess, make_plan, measure_load
from moe_ep.eplb.policy.maps import Array
from moe_ep.eplb.recorder import ExpertLoadRecorder
from moe_ep.eplb.transfer import digest, layer_stamp
from moe_ep.errors import EplbError
from moe_ep.observability.stages import stage

logger = logging.getLogger(__name__)


class StepGate:
    """Counts steps, as the thread that serves and the one that moves experts see them.

    A commit must come after the same step on every rank, and the ranks learn which step that is while they go on. So a
    rank that announces its present step also promises not to begin step `present + margin` before it knows the answer;
    the answer is the largest present step and the margin, which no rank has passed. Ranks that are as fast as the
    exchange of two numbers never wait.

    Attributes:
        step: how many steps have ended.
    """

    def __init__(self) -> None:
        self.step = 0
        self._changed = threading.Condition()
        self._hold: int | None = None
        self._due: int | None = None
        self._error: EplbError | None = None

    @property
    def failed(self) -> bool:
        """Whether `check` raises."""
        return self._error is not None

    def advance(self, timeout_s: float) -> bool:
        """Ends a step; True where a commit is due before the next begins, which `done` then confirms.

        Raises TimeoutError where the moving thread did not decide before the deadline, and what `check` raises.
        """
        with self._changed:
            self.step += 1
            if not self.wait_for(lambda: self._hold is None or self.step < self._hold, timeout_s):
                raise TimeoutError
            return self._due == self.step

    def wait_decided(self) -> None:
        """Waits for the next decision without ending a step; a commit is due then. For ranks that stand at one step."""
        with self._changed:
            self.wait_for(lambda: self._due is not None, None)

    def done(self) -> None:
        """Confirms that the commit was made."""
        with self._changed:
            self._due = None
            self._changed.notify_all()

    def announce(self, margin: int) -> int:
        """Returns the present step, and promises not to pass it by the margin before `decide`."""
        with self._changed:
            self._hold = self.step + margin
            return self.step

    def decide(self, step: int) -> None:
        """Sets the step after which the commit comes, and ends the promise."""
        with self._changed:
            self._due, self._hold = step, None
            self._changed.notify_all()

    def wait_done(self, limit_s: float) -> bool:
        """Waits for the commit to be made, which takes as long as the model stands still; False at the limit."""
        with self._changed:
            return self.wait_for(lambda: self._due is None, limit_s)

    def fail(self, error: EplbError) -> None:
        """Has the serving thread raise this, or what it was to raise already."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what the moving thread failed with."""
        if self._error is not None:
            raise self._error

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Waits with the lock held, and returns whether it is ready; raises what `check` raises once it would."""
        self._changed.wait_for(lambda: self._error is not None or ready(), timeout_s)
        self.check()
        return ready()


POLL_S = 0.5
# The first number of rank 0's message: a plan follows, or planning failed; 0 if there is nothing to do.
_PLAN, _FAILED = 1, -1


class Job(NamedTuple):
    """A rearrangement that is due.

    Attributes:
        counts: int32 `[S, L, P]` of this rank, to be planned from; None with a target.
        target: the placement to go to; None if it is still to be planned.
    """

    number: int
    step: int
    counts: torch.Tensor | None
    target: Array | None


class Rearrangement:
    """Carries out jobs, on the moving thread or, synchronously, on the serving one.

    The serving thread alone calls `commit`: meanwhile this object waits in the gate.

    Attributes:
        busy: whether a job was begun and its end is not committed; its manager says so.
        in_doubt: the latest layer whose commit was to be agreed on, until all ranks have said that they made it.
    """

    def __init__(
        self,
        config: EplbConfig,
        channel: SideChannel,
        gate: StepGate,
        mover: LayerMover,
        placement: PlacementState,
        recorder: ExpertLoadRecorder,
        tell: Callable[[Event], None],
    ) -> None:
        self._config, self._channel, self._gate = config, channel, gate
        self._mover, self._placement, self._recorder, self._tell = mover, placement, recorder, tell
        # Of the layer that waits for its commit, as far as it is known; None at the end of a job.
        self._fetched: CommitReport | None = None
        in_process = config.planner == "process" and config.asynchronous and channel.rank == 0
        # Started early: it takes seconds to be there. It gives up before the others do, so that they learn why.
        self._planner = PlannerProcess(0.8 * channel.timeout_s) if in_process else None
        self.busy = False
        self.in_doubt: int | None = None
        # Whether there were steps to plan from before: a model that has served may stand idle.
        self._has_planned = False

    def give_up(self) -> None:
        """Ends a plan or a transfer under way; called by another thread than theirs, and `close` comes next."""
        self._gate.fail(EplbError("the EPLB manager was closed"))
        if not self.busy:
            return
        if self._planner is not None:
            self._planner.give_up()
        self._mover.transport.give_up()

    def close(self) -> None:
        """Gives back the planning process, the memory and the connections."""
        if self._planner is not None:
            self._planner.close()
        self._mover.close()
        self._channel.close()

    def carry_out(self, job: Job, asynchronous: bool) -> EplbError | None:
        """Does all of a job, and returns what went wrong."""
        try:
            target = self._target_of(job)
            changed = self._changed_layers(target)
            if changed:
                self._mover.begin(job.number)
            for layer in changed:
                self._move_layer(job, layer, target[layer], asynchronous)
            end = f"the end of rearrangement {job.number}"
            if asynchronous:
                self._wait_for_commit(end)
            else:
                self._channel.gather(end, [job.number])
            self.in_doubt = None
        except EplbError as error:
            return error
        except Exception as error:
            logger.exception("EPLB stopped")
            return self._channel.failed(f"EPLB stopped on EP rank {self._channel.rank}: {error!r}")
        return None

    def commit(self) -> int | None:
        """Puts in force what was agreed on, in stream order; returns the layer, or None for the end of the job."""
        if self._fetched is None:
            self._gate.done()
            return None
        started = time.perf_counter()
        fetched, self._fetched = self._fetched, None
        with stage("eplb_commit"):
            self._mover.commit()
            self._recorder.forget(fetched.layer)
        self._tell(replace(fetched, step=self._gate.step, commit_s=time.perf_counter() - started))
        self._gate.done()
        return fetched.layer

    def _changed_layers(self, target: Array) -> list[int]:
        return np.flatnonzero((target != self._placement.host).any(axis=1)).tolist()

    def _target_of(self, job: Job) -> Array:
        """The placement to go to, the same on every rank; the present one where no plan is made."""
        self._channel.agree(
            f"rearrangement {job.number}",
            number=job.number,
            step=job.step,
            placement=digest(self._placement.host),
            plan=0 if job.target is None else digest(job.target),
        )
        with stage("eplb_plan"):
            target, reason, seconds = (job.target, "", 0.0) if job.counts is None else self._plan(job, job.counts)
        if target is None:
            self._tell(PlanReport(step=job.step, made=False, reason=reason, seconds=seconds))
            return self._placement.host
        changed = self._changed_layers(target)
        costs = [self._mover.cost(layer, target[layer]) for layer in changed]
        self._tell(
            PlanReport(
                step=job.step,
                made=True,
                seconds=seconds,
                num_layers=len(changed),
                experts_moved=sum(experts for experts, _ in costs),
                bytes_moved=sum(size for _, size in costs),
            )
        )
        return target

    def _plan(self, job: Job, counts: torch.Tensor) -> tuple[Array | None, str, float]:
        """Rank 0 plans from the sum over ranks; the others learn the result: (plan or None, why none, seconds)."""
        total = self._channel.sum("the load", self._mover.to_host(counts)).long()
        load = measure_load(total, self._channel.size, job.step)
        self._tell(load)
        if load.num_steps and not self._has_planned and not total.any():
            logger.warning(
                "EPLB counted no tokens in %d steps; CUDA graphs that were captured before the manager was made count "
                "nothing and keep the maps of then: make the manager first, and capture again",
                load.num_steps,
            )
        self._has_planned |= load.num_steps > 0
        old = self._placement.host
        message = torch.zeros(1 + old.size, dtype=torch.int64, device="cpu")
        reason, seconds = "EP rank 0 made no plan", 0.0
        failure: EplbError | None = None
        if self._channel.rank == 0:
            started = time.perf_counter()
            planner = make_plan if self._planner is None else self._planner.make_plan
            try:
                plan, reason = planner(total, old, self._placement.num_experts, self._channel.size, self._config)
                if plan is not None:
                    message[0] = _PLAN
                    message[1:] = torch.from_numpy(plan).flatten()
            except Exception as error:
                if not self._gate.failed:  # if it has, the manager was closed, which ends a plan
                    logger.exception("EPLB could not plan")
                failure = self._channel.failed(f"no plan could be made on EP rank 0: {error!r}")
                message[0] = _FAILED
            seconds = time.perf_counter() - started
        self._channel.broadcast("the plan", message)
        if message[0] == _FAILED:
            raise failure or self._channel.failed_elsewhere("no plan could be made on EP rank 0")
        if message[0] != _PLAN:
            return None, reason, seconds
        return message[1:].view(old.shape).numpy(), "", seconds

    def _move_layer(self, job: Job, layer: int, new: Array, asynchronous: bool) -> None:
        started = time.perf_counter()
        (experts, size), cause = self._mover.cost(layer, new), ""
        try:
            with stage("eplb_transfer"), self._channel.waiting():
                intact = self._mover.fetch(layer, new, layer_stamp(job.number, layer))
            cause = "" if intact else "they came with another checksum than they left with"
        except EplbError:
            raise
        except (RuntimeError, TimeoutError) as error:
            cause = str(error)
            # Where the others are stuck too, the error of all says who did not take part, and not why.
            # The text alone: a record that is kept would keep the error's connections open, on which others wait.
            logger.error("EPLB: experts of layer %d did not arrive on EP rank %d: %s", layer, self._channel.rank, cause)
            heard = self._channel.heard()
            if heard is not None:
                raise heard from None
        seconds = time.perf_counter() - started
        statuses = [row[0] for row in self._channel.gather(f"the arrival of layer {layer}", [bool(cause)])]
        # All ranks have made the commit before.
        self.in_doubt = None
        if any(statuses):
            text = f"experts of layer {layer} did not arrive on EP rank {statuses.index(1)}"
            # Only that rank knows why.
            raise self._channel.failed(f"{text}: {cause}") if cause else self._channel.failed_elsewhere(text)
        self._fetched = CommitReport(
            step=job.step, layer=layer, experts_moved=experts, bytes_moved=size, transfer_s=seconds, commit_s=0.0
        )
        self.in_doubt = layer if self._channel.size > 1 else None
        if asynchronous:
            self._wait_for_commit(f"the commit of layer {layer}")
        else:
            self.commit()

    def _wait_for_commit(self, what: str) -> None:
        """Agrees on the step of the next commit, and returns when the serving thread has made it."""
        present = self._gate.announce(self._config.commit_margin)
        steps = [row[0] for row in self._channel.gather(what, [present])]
        self._gate.decide(max(steps) + self._config.commit_margin)
        while not self._gate.wait_done(POLL_S):
            error = self._channel.heard()
            if error is not None:
                raise error

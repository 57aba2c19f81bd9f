"""Events of a model's balancing, one dataclass each, and their totals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The load over the window, summed over ranks, when a plan was due.

    Attributes:
        step: steps that had ended.
        num_steps: of the window.
        balancedness: over steps and layers: sum of mean loads / sum of maximum loads.
        layer_balancedness: the same of each layer.
        max_tokens, mean_tokens: assignments of one rank in one step and layer: the busiest rank's on average over steps
            and layers, and the mean.
        active_experts: slots of a rank that got any token in a step and layer: of the rank with most, on average.
    """

    step: int
    num_steps: int
    balancedness: float
    layer_balancedness: tuple[float, ...]
    max_tokens: float
    mean_tokens: float
    active_experts: float


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan that was due.

    Attributes:
        made: whether experts will move; where not, `reason` says why.
        seconds: of planning, on the rank that planned; 0 elsewhere.
        num_layers: layers that change.
        experts_moved, bytes_moved: experts that a rank must receive, over all ranks and layers.
    """

    step: int
    made: bool
    reason: str = ""
    seconds: float = 0.0
    num_layers: int = 0
    experts_moved: int = 0
    bytes_moved: int = 0


@dataclass(frozen=True, kw_only=True)
class CommitReport:
    """One layer's new placement in force.

    Attributes:
        step: it is in force from the step after this one.
        layer: position among the MoE layers.
        experts_moved, bytes_moved: received by a rank, over all ranks.
        transfer_s: from the begin of the transfer to the last expert's arrival on this rank.
        commit_s: time of the serving thread on the host; on a GPU the copies themselves run in stream order.
    """

    step: int
    layer: int
    experts_moved: int
    bytes_moved: int
    transfer_s: float
    commit_s: float


Event = LoadReport | PlanReport | CommitReport
# Called on the thread where the event happens, the serving one for a CommitReport; it must return soon.
Listener = Callable[[Event], None]


@dataclass
class EplbTotals:
    """Sums over all events of a manager; experts and bytes are those committed.

    Attributes:
        load: the latest LoadReport.
    """

    plans_made: int = 0
    plans_skipped: int = 0
    layers_committed: int = 0
    experts_moved: int = 0
    bytes_moved: int = 0
    plan_s: float = 0.0
    transfer_s: float = 0.0
    commit_s: float = 0.0
    load: LoadReport | None = None

    def add(self, event: Event) -> None:
        if isinstance(event, LoadReport):
            self.load = event
        elif isinstance(event, PlanReport):
            self.plans_made += event.made
            self.plans_skipped += not event.made
            self.plan_s += event.seconds
        else:
            self.layers_committed += 1
            self.experts_moved += event.experts_moved
            self.bytes_moved += event.bytes_moved
            self.transfer_s += event.transfer_s
            self.commit_s += event.commit_s

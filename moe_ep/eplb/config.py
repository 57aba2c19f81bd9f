"""When experts are rearranged, by which planner, and how they move."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ep import env
from moe_ep.eplb.policy.problem import OBJECTIVES
from moe_ep.errors import ConfigError, check_at_least, check_not_negative, check_number, one_of
from moe_ep.registry import EPLB_POLICIES

PLANNERS = ("process", "thread")
# How the replica of a token is chosen. levelled: a rank's tokens are spread over all replicas. one: an expert has one
# replica for all tokens, so that fewer experts are read. auto: one for small batches, levelled for others.
REPLICA_RULES = ("auto", "levelled", "one")
TRANSPORTS = ("auto", "peer_copies", "messages")
# Nanoseconds, and bytes a second, that 64 bits hold.
_MOST = 1e9


@dataclass(frozen=True, kw_only=True)
class EplbConfig:
    """The settings of one model's balancing; the same on every rank.

    Attributes:
        window_size: steps whose counts a plan looks at, the latest ones.
        first_plan: the step after which the first plan is due; early, because the first placement knows no load.
        interval: steps between plans from then on. A plan that is due while experts still move is left out.
        rebalance_below: no plan is made while balancedness is at least this, and none for a layer that is: by the loads
            of the objective.
        min_gain, move_cost: what a layer's plan must gain (`moe_ep.eplb.rebalance_experts`).
        policy, objective, refine, num_groups, num_nodes: of the planner; num_nodes are hosts of consecutive ranks.
        replica_rule: which replica a token takes: "levelled" divides tokens over all of them, "one" sends all tokens of
            an expert to one, which leaves fewer experts to read, and "auto" does that for small batches on a GPU.
        planner: where EP rank 0 plans: in a "process" of its own, which does not hold up the serving thread, or in a
            "thread" of this one, which needs no time to start.
        asynchronous: move beside the model; False stops it after the step in which a plan is due.
        commit_margin: steps between the agreement on a commit and the commit. A rank waits where the agreement takes
            longer than that.
        transport: "peer_copies" between GPUs of one host, "messages" of torch.distributed, or "auto".
        max_transfer_gb_s: GB/s that peer copies bring to a rank at most while the model serves; None for no limit. It
            keeps moving from taking memory bandwidth that decoding needs.
        timeout_s: deadline of each exchange between ranks and of moving one layer; None takes
            MOE_EP_DISPATCH_TIMEOUT_S.

    Raises:
        ValueError: a number out of its range or an unknown name.
        TypeError: a value that is not a number, or not a whole one.
    """

    window_size: int = 128
    first_plan: int = 32
    interval: int = 512
    rebalance_below: float = 0.97
    min_gain: float = 0.0
    move_cost: float = 0.0
    policy: str = "incremental"
    objective: str = "tokens"
    refine: bool = True
    replica_rule: str = "auto"
    num_groups: int = 1
    num_nodes: int = 1
    planner: str = "process"
    asynchronous: bool = True
    commit_margin: int = 4
    transport: str = "auto"
    max_transfer_gb_s: float | None = 40.0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        counts = ("window_size", "first_plan", "interval", "num_groups", "num_nodes", "commit_margin")
        check_at_least(1, **{name: getattr(self, name) for name in counts})
        check_not_negative(rebalance_below=self.rebalance_below, min_gain=self.min_gain, move_cost=self.move_cost)
        # As JSON has them, and the same on ranks that were given 4 and numpy's 4.
        for kind, names in ((int, counts), (float, ("rebalance_below", "min_gain", "move_cost"))):
            for name in names:
                object.__setattr__(self, name, kind(getattr(self, name)))
        for name in ("timeout_s", "max_transfer_gb_s"):
            value = getattr(self, name)
            if value is None:
                continue
            check_number(**{name: value})
            if not 0 < value <= _MOST:
                raise ValueError(f"{name} is {value}; it must be a positive number up to {_MOST:g}, or None")
        for name in ("refine", "asynchronous"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        EPLB_POLICIES.check(self.policy)
        for name, allowed in (
            ("objective", OBJECTIVES),
            ("replica_rule", REPLICA_RULES),
            ("planner", PLANNERS),
            ("transport", TRANSPORTS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(one_of(name, getattr(self, name), allowed))

    def check_model(self, num_experts: int, num_ranks: int) -> None:
        """Raises ConfigError unless hosts divide these EP ranks, and groups these logical experts."""
        if num_ranks % self.num_nodes:
            raise ConfigError(f"num_nodes is {self.num_nodes}; it must divide the EP ranks ({num_ranks})")
        if num_experts % self.num_groups:
            raise ConfigError(f"num_groups is {self.num_groups}; it must divide the experts of a layer ({num_experts})")

    def deadline_s(self) -> float:
        """Seconds an exchange may take."""
        return env.DISPATCH_TIMEOUT_S.get() if self.timeout_s is None else self.timeout_s

    def is_due(self, step: int) -> bool:
        """Whether a plan is due after this many steps."""
        return step >= self.first_plan and (step - self.first_plan) % self.interval == 0

"""The rows of a scaling benchmark: what was measured, by this run or one before, and when there is no time for more."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from moe_ep import env
from moe_ep.bench.scaling import with_efficiency
from moe_ep.bench.timing import slowest_rank
from moe_ep.launch.gangs import progress

logger = logging.getLogger(__name__)

Row = dict[str, Any]

_CEILINGS = ("memory_tb_per_s", "tflop_per_s", "link_gb_per_s")
# A row has up to twice the tokens of the longest one before it.
_LONGER = 2.0
# A row that takes this and so many times as long as the longest before it is taken for one that never ends.
_GRACE_S, _MUCH_LONGER = 30.0, 5.0


class Setting(NamedTuple):
    """What is measured; num_tokens is of each rank."""

    phase: str
    num_tokens: int
    backend: str
    wire: str
    routing: str
    eplb: str


class Measurement(NamedTuple):
    """What rows of weak and strong scaling may have in common; the routing is a name, without the folder of a file."""

    geometry: str
    ep_size: int
    setting: Setting


class Rows:
    """The rows so far; each is handed to the driver as soon as it is there, with its efficiency.

    Args:
        about: what all rows of this run say: versions, machine, commit, seed, command, ceilings.
        total: rows that were asked for.
        before: of an earlier run, the same on every rank. Those that say the same of all but command and ceilings are
            taken for measured, where there is a commit to know their code by.
        speaks: whether this is rank 0.
    """

    def __init__(self, about: Row, total: int, before: Sequence[Row], *, speaks: bool) -> None:
        self._about, self._total, self._speaks = about, total, speaks
        self._found: dict[int, Row] = {}
        same = [key for key in about if key not in (*_CEILINGS, "command")]
        alike = [row for row in before if all(row.get(key) == about[key] for key in same)]
        if alike and _is_of_any_code(about["commit"]):
            if speaks:
                logger.warning(
                    "--resume measures everything anew: the commit is %s, which says nothing of the code that was "
                    "measured before; commit what was changed, or give --commit", about["commit"],
                )  # fmt: skip
            alike = []
        self._measured = {_measurement_of(row): row for row in alike}
        self._written = {(_measurement_of(row), row["scaling"], row["asked_tokens"]) for row in alike}

    def measured(self, what: Measurement) -> Row | None:
        """What came of it, if it was measured."""
        return self._measured.get(what)

    def keep(self, what: Measurement, result: Row) -> None:
        """Keeps what came of a measurement."""
        self._measured[what] = result

    def add(self, order: int, what: Measurement, scaling: str, asked_tokens: int) -> None:
        """The row of a measurement that there is.

        Args:
            order: its place among all rows, which are not measured in that order.
        """
        about = {"geometry": what.geometry, "ep_size": what.ep_size, "scaling": scaling, "asked_tokens": asked_tokens}
        row = about | {key: value for key, value in self._measured[what].items() if key not in about}
        row |= {key: value for key, value in self._about.items() if key not in row}
        # Smaller EP sizes come first, so what a row is compared with is there.
        self._found[order] = row = with_efficiency([*self._found.values(), row])[-1]
        if self._speaks:
            progress.report("measuring", len(self._found), self._total)
            if (what, scaling, asked_tokens) not in self._written:
                progress.hand_over(row)

    def finished(self) -> list[Row] | None:
        """All rows in the order in which they were asked for, where this is rank 0."""
        if not self._speaks:
            return None
        if len(self._found) < self._total:
            logger.warning(
                "--seconds are over: %d of %d rows were measured; with --json and --resume the same command measures "
                "the others", len(self._found), self._total,
            )  # fmt: skip
        return [row for _, row in sorted(self._found.items())]


class Clock:
    """Whether there is time for another row, the same on every rank.

    Args:
        seconds: that the command may take; None for any number.
        started: when it began, as `time.time` has it.
    """

    def __init__(self, seconds: float | None, started: float) -> None:
        self._seconds, self._started = seconds, started
        self._is_over = False
        self._longest: dict[str, float] = {}

    def is_over(self, phase: str) -> bool:
        """Whether the next row would end too late, by the slowest rank's clock; a collective step of all ranks.

        Where it would, so would all that come later.
        """
        if self._seconds is not None and not self._is_over:
            ends = self._spent() + _LONGER * self._longest.get(phase, 0.0)
            self._is_over = slowest_rank([ends])[0] > self._seconds
        return self._is_over

    def limit_s(self) -> float:
        """After which a row that begins now is taken for one that never ends: where time counts, and kernels are
        compiled, sooner."""
        longest = max(self._longest.values(), default=0.0)
        patience_s = _GRACE_S if self._seconds is not None and longest else env.DISPATCH_TIMEOUT_S.get()
        return patience_s + _MUCH_LONGER * longest

    def note(self, phase: str, took_s: float) -> None:
        """What a row took."""
        self._longest[phase] = max(took_s, self._longest.get(phase, 0.0))

    def _spent(self) -> float:
        return time.time() - self._started


def _is_of_any_code(commit: str) -> bool:
    """Whether rows of this commit (`bench.results.facts`) may be of several states of the code."""
    return commit == "unknown" or commit.endswith("-dirty")


def _measurement_of(row: Row) -> Measurement:
    setting = Setting(
        row["phase"], row["tokens_per_rank"], row["asked_backend"], row["wire"], row["routing"], row["eplb"]
    )
    return Measurement(row["geometry"], row["ep_size"], setting)

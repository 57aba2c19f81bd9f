"""The exceptions of moe_ep, and the sentences that they have in common.

A mistake in an argument is a plain ValueError or TypeError. The classes here are for everything else: a file that does
not contain what it should, a backend that cannot run here, a peer that did not answer, a gang that died. Every message
is one sentence that names the thing, its value, the rule and the way out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral, Real


class MoeEpError(RuntimeError):
    """Base of every error that moe_ep raises for a reason other than a bad argument."""


class CheckpointError(MoeEpError):
    """A checkpoint does not hold what its config or its index promises.

    The message names the file, the tensor, what was expected and what was found.
    """


class WeightsError(ValueError, CheckpointError):
    """Tensors given in place of a checkpoint's cannot be read, lack one, or have one of another shape or dtype."""


class BackendUnavailableError(MoeEpError):
    """A backend was chosen by name and cannot run on this machine; the message says how to fix that."""


class DispatchTimeoutError(MoeEpError):
    """A collective step of dispatch or combine did not finish before the group's deadline.

    Attributes:
        ranks: the EP ranks known to be at fault; empty if that could not be determined.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RanksChangedError(DispatchTimeoutError):
    """A collective step was ended because the gang has other ranks now (`moe_ep.distributed.membership`)."""


class CoverError(MoeEpError):
    """The ranks that are left cannot hold all experts; the message says how many they can."""


class EplbError(MoeEpError):
    """A rearrangement of experts cannot continue: the ranks disagree, or one did not take part in time.

    It is raised on every rank, with the same message on all that can reach each other.
    """


class GangError(MoeEpError):
    """A worker of a gang failed or died; the message names its rank, its node and the cause."""


class MinorityError(GangError):
    """A gang's side that cannot reach most of the ranks, which may go on without it, ends."""


class ConfigError(ValueError, MoeEpError):
    """A combination of settings that cannot run, found before any work starts."""


class NoRoomError(ConfigError, GangError):
    """The machines have no room for a gang; the message says what it needs and what there is."""


def missing_extra(package: str, extra: str, needed_for: str) -> ImportError:
    """The ImportError for an optional dependency, with the pip command that installs it."""
    return ImportError(f"{needed_for} needs {package}, which is not installed; run: pip install 'moe_ep[{extra}]'")


def rank_list(ranks: Sequence[int]) -> str:
    """The ranks in words: "rank 1", or "ranks 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def check_at_least(least: int, **values: int) -> None:
    """Raises TypeError for a value that is not a whole number, and ValueError for one that is too small."""
    check_whole(**values)
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


def check_below(bound: str, limit: int, **values: int) -> None:
    """Raises TypeError for a value that is not a whole number, and ValueError for one outside [0, limit)."""
    check_whole(**values)
    for name, value in values.items():
        if not 0 <= value < limit:
            raise ValueError(f"{name} is {value}; it must be at least 0 and below {bound} ({limit})")


def check_whole(**values: object) -> None:
    """Raises TypeError for a value that is not a whole number."""
    for name, value in values.items():
        # int is asked for first: an abstract class takes long, and layers ask in every pass.
        if isinstance(value, bool) or not isinstance(value, (int, Integral)):
            raise TypeError(f"{name} is {value!r}; it must be a whole number")


def check_flags(**values: object) -> None:
    """Raises TypeError for a value that is neither True nor False, such as the text "false", which counts as true."""
    for name, value in values.items():
        if value is not True and value is not False:
            raise TypeError(f"{name} is {value!r}; it must be True or False")


def check_functions(**values: object) -> None:
    """Raises TypeError for a value that is neither a function nor None."""
    for name, value in values.items():
        if value is not None and not callable(value):
            raise TypeError(f"{name} is {value!r}; it must be a function or None")


def check_paths(**values: object) -> None:
    """Raises TypeError for a value that is not the path of a file or folder."""
    for name, value in values.items():
        if not isinstance(value, (str, os.PathLike)):
            raise TypeError(f"{name} is {value!r}; it must be a path")


def check_number(**values: object) -> None:
    """Raises TypeError for a value that is not a real number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{name} is {value!r}; it must be a number")


def check_not_negative(**values: float) -> None:
    """Raises TypeError for a value that is not a real number, and ValueError for one that is below 0 or NaN."""
    check_number(**values)
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value}; it must be at least 0")


def check_router_weight_on_input(top_k: int) -> None:
    """Raises ValueError unless tokens have exactly one expert, whose weight can be applied to the input."""
    if top_k != 1:
        raise ValueError(
            f"apply_router_weight_on_input needs top_k 1 and top_k is {top_k}; apply the weights on the output instead"
        )


def one_of(argument: str, value: object, allowed: Sequence[str]) -> str:
    """The sentence about a value that is not in a fixed set."""
    return f"{argument} is {value!r}; it must be one of {', '.join(allowed)}"

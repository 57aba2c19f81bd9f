"""Every environment variable that moe_ep reads, with its type, default and meaning.

They are read when they are needed and not at import, so a test or a launcher may set them late. Command-line flags and
constructor arguments take precedence. The first reading warns of MOE_EP_* names in the environment that are none of
these, as a mistyped one has no effect.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from moe_ep.files import user_path
from moe_ep.registry import ALL2ALL_BACKENDS

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LARGEST = 2**31 - 1
_PREFIX = "MOE_EP_"
# Set by launchers for their workers, and for the tests of this project.
_OTHERS = ("MOE_EP_GANG_", "MOE_EP_TEST_", "MOE_EP_TEXT_MOE")
_has_warned = False


@dataclass(frozen=True)
class EnvVar(Generic[T]):
    """One variable: `VAR.get()` returns its parsed value, or the default's if it is unset or empty."""

    name: str
    parse: Callable[[str], T]
    default: str
    meaning: str

    def get(self) -> T:
        warn_of_unknown_names()
        given = os.environ.get(self.name, "")
        try:
            return self.parse(given or self.default)
        except ValueError as error:
            way_out = f"unset it to use the default ({self.default})" if given else f"set {self.name}"
            raise ValueError(f"{self.name} is {given or self.default!r}; {error}; {way_out}") from None


def warn_of_unknown_names() -> None:
    """Logs a warning for every MOE_EP_* name in the environment that nothing reads; once in a process, and not in the
    workers of a gang, whose launcher has done it."""
    global _has_warned
    if _has_warned or "MOE_EP_GANG_RANK" in os.environ:
        return
    _has_warned = True
    known = [variable.name for variable in ALL]
    for name in sorted(os.environ):
        if not name.startswith(_PREFIX) or name.startswith(_OTHERS) or name in known:
            continue
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the names are {', '.join(known)}"
        logger.warning("the environment has %s, which moe_ep does not read: %s", name, hint)


# ==== Values ====
#
# Parsers of values, which raise ValueError with the rule that a value breaks; command-line options share them.


def whole(digits: str) -> int:
    """Converts digits to an integer; ValueError if it does not fit into 31 bits, as counts and seeds must."""
    value = int(digits.lstrip("0")[: len(str(_LARGEST)) + 1] or 0)
    if value > _LARGEST:
        raise ValueError(f"it must be at most {_LARGEST}")
    return value


def at_least(minimum: int) -> Callable[[str], int]:
    """A whole number."""

    def parse(raw: str) -> int:
        if not raw.isdecimal() or whole(raw) < minimum:
            raise ValueError(f"it must be a whole number of at least {minimum}")
        return whole(raw)

    return parse


def number(rule: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """A finite number that satisfies `holds`; `rule` completes "it must be"."""

    def parse(raw: str) -> float:
        try:
            value = float(raw)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and holds(value)):
            raise ValueError(f"it must be {rule}")
        return value

    return parse


def one_of(*allowed: str) -> Callable[[str], str]:
    """One word of a fixed set."""
    return one_of_these(lambda: allowed)


def one_of_these(allowed: Callable[[], Sequence[str]]) -> Callable[[str], str]:
    """One word of a set that is known when a value is parsed."""

    def parse(raw: str) -> str:
        if raw not in allowed():
            raise ValueError(f"it must be one of {', '.join(allowed())}")
        return raw

    return parse


# Whole milliseconds that are more than none, and nanoseconds that 64 bits hold.
_seconds = number("a number of seconds from 0.001 to 1e9", lambda value: 1e-3 <= value <= 1e9)


def _seconds_or_off(raw: str) -> float:
    if raw == "off":
        return 0.0
    try:
        return _seconds(raw)
    except ValueError as error:
        raise ValueError(f"{error}, or off") from None


def _switch(raw: str) -> bool:
    return one_of("0", "1")(raw) == "1"


# The values of MOE_EP_INPUT_DTYPE and --input-dtype.
INPUT_DTYPE_NAMES = ("none", "int8", "fp8", "checkpoint")
_log_level = one_of("DEBUG", "INFO", "WARNING", "ERROR")

ALL2ALL_BACKEND = EnvVar(
    "MOE_EP_ALL2ALL_BACKEND", one_of_these(lambda: ("auto", *ALL2ALL_BACKENDS)), "auto",
    "dispatch backend of layers made with all2all_backend='auto'",
)  # fmt: skip
BATCH_INVARIANT = EnvVar(
    "MOE_EP_BATCH_INVARIANT", _switch, "0",
    "1: layers that are made without batch_invariant have it, so that a token's result does not depend on the batch",
)  # fmt: skip
CACHE_DIR = EnvVar(
    "MOE_EP_CACHE_DIR", user_path, (os.environ.get("XDG_CACHE_HOME") or "~/.cache") + "/moe_ep",
    "where made checkpoints, compiled kernels and tuned choices are kept",
)  # fmt: skip
CHUNK_SIZE = EnvVar(
    "MOE_EP_CHUNK_SIZE", at_least(1), "16384",
    "rows that experts in the Standard format compute at a time; bounds their scratch",
)  # fmt: skip
DISPATCH_TIMEOUT_S = EnvVar(
    "MOE_EP_DISPATCH_TIMEOUT_S", _seconds, "300",
    "seconds a collective step of dispatch, combine or start-up may take before the rank gives up",
)  # fmt: skip
INPUT_DTYPE = EnvVar(
    "MOE_EP_INPUT_DTYPE", one_of(*INPUT_DTYPE_NAMES), "checkpoint",
    "rows that quantized experts compute with. int8 or fp8: rounded to it, on GPUs where that is faster, which "
    "changes results by some 1.8 or 4.4 % of their size; checkpoint: on GPUs to what the checkpoint was made for; "
    "none: as they are",
)  # fmt: skip
LOG_LEVEL = EnvVar(
    "MOE_EP_LOG_LEVEL", lambda raw: _log_level(raw.upper()), "WARNING",
    "DEBUG, INFO, WARNING or ERROR, for the moe_ep loggers",
)  # fmt: skip
NVSHMEM_FORCE_DEVICE_API = EnvVar(
    "MOE_EP_NVSHMEM_FORCE_DEVICE_API", _switch, "0",
    "1: the NVSHMEM backends treat every other rank as one of another host (for tests on one host)",
)  # fmt: skip
NVSHMEM_NUM_SMS = EnvVar(
    "MOE_EP_NVSHMEM_NUM_SMS", at_least(0), "0", "SMs that nvshmem_high_throughput moves rows with; 0: its own choice"
)
NVSHMEM_TIMEOUT_S = EnvVar(
    "MOE_EP_NVSHMEM_TIMEOUT_S", _seconds_or_off, "10",
    "seconds that a kernel of the NVSHMEM backends waits for another rank before it ends with an error; off: no limit",
)  # fmt: skip
OVERLAP = EnvVar(
    "MOE_EP_OVERLAP", _switch, "0",
    "1: nvshmem_high_throughput sends rows and results while packed experts compute bf16 rows (Hopper, one host), "
    "which was slower where it was measured",
)  # fmt: skip
RANKS_PER_HOST = EnvVar(
    "MOE_EP_RANKS_PER_HOST", at_least(0), "0",
    "this many consecutive ranks count as one host (for tests of several hosts on one); 0: off",
)  # fmt: skip
REPLAY_MAX_TOKENS = EnvVar(
    "MOE_EP_REPLAY_MAX_TOKENS", at_least(0), "1024",
    "most tokens of a layer's call that is replayed from a CUDA graph of the layer after four calls of its kind (over "
    "ranks: with the NVSHMEM backends alone); 0: none is",
)  # fmt: skip

ALL: tuple[EnvVar, ...] = tuple(value for value in vars().values() if isinstance(value, EnvVar))

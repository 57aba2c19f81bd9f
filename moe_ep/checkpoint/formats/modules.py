"""Matches the module names in quantization configs with a model's linear layers."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import regex

from moe_ep.checkpoint.config_values import unexpected
from moe_ep.checkpoint.formats.layout import QuantizationConfig
from moe_ep.errors import CheckpointError

EVERY_LINEAR = "Linear"
# Prefixes of a language model's layers, alone or in a multimodal model. Quantization tools write the module names of
# the model they loaded, and files may have other prefixes.
_LANGUAGE_MODEL = re.compile(r"(?:(?:model|language_model|thinker|backbone)\.)*(?=layers\.)")
_MOST_LETTERS = 10_000
# Processor time of all expressions of a config, and how much of it matches of a millisecond or more may take: fast ones
# may be several for every matrix of every expert.
_MOST_SECONDS, _MOST_SLOW_SECONDS, _SLOW_FROM_SECONDS = 60.0, 1.0, 0.001
_BASES = ("model.", "model.language_model.", "language_model.model.", "backbone.")


# Keys of plain modules, by tool.
_IGNORED = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore")


def ignored_modules(values: Mapping[str, Any]) -> Iterable[str]:
    """The modules that quantization_config says to be plain."""
    return next(filter(None, map(values.get, _IGNORED)), ())


class ModulePatterns:
    """A set of module names, given by patterns of a quantization config.

    A pattern is `re:` and a regular expression that matches from the start (compressed-tensors), a name with `*`
    (modelopt, mxfp4), or whole parts of a dotted name: `mlp.gate` and `mlp.gate.` match the router, not
    `mlp.gate_proj`.

    Args:
        clock: of the config that the patterns are part of.

    Raises:
        CheckpointError: a pattern that is not text, or not a regular expression.
    """

    def __init__(self, patterns: Iterable[str], clock: Clock | None = None) -> None:
        if isinstance(patterns, str) or not isinstance(patterns, Iterable):
            raise unexpected("quantization_config", "a list of modules", patterns)
        self._clock = clock or Clock()
        self._exact: set[str] = set()
        self._expressions: list[regex.Pattern[str]] = []
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise unexpected("quantization_config", "names of modules", pattern)
            if pattern.startswith("re:"):
                self._expressions.append(_compiled(pattern.removeprefix("re:")))
            elif "*" in pattern:
                anything = ".*".join(re.escape(part) for part in pattern.split("*"))
                self._expressions.append(_compiled(anything + r"(\..*)?\Z"))
            elif name := pattern.strip("."):
                self._exact.add(name)
        self._lengths = {pattern.count(".") + 1 for pattern in self._exact}

    def __contains__(self, name: str) -> bool:
        # Called for every linear layer of every expert.
        parts = name.split(".")
        for length in self._lengths:
            for start in range(len(parts) - length + 1):
                if ".".join(parts[start : start + length]) in self._exact:
                    return True
        return any(self._clock.matches(expression, name) for expression in self._expressions)


def _compiled(expression: str) -> regex.Pattern[str]:
    try:
        if len(expression) > _MOST_LETTERS:
            raise re.error(f"it has more than {_MOST_LETTERS} letters")
        # `re` knows no recursion, which takes memory without end; `regex` can be stopped.
        re.compile(expression)
        return regex.compile(expression)
    except (re.error, regex.error, OverflowError, RecursionError) as error:
        raise unexpected("quantization_config", "a regular expression", expression[:200], f": {error}") from None


class Clock:
    """Bounds the time that all expressions of a config take.

    Checkpoints are untrusted data, and an expression such as `(([a-z])+)+!` takes exponential time.
    """

    def __init__(self) -> None:
        self._seconds = self._slow_seconds = 0.0

    def add(self, seconds: float, expression: str, name: str) -> None:
        """CheckpointError once the expressions of the config have taken too long."""
        self._seconds += seconds
        self._slow_seconds += seconds if seconds >= _SLOW_FROM_SECONDS else 0
        for took, most in ((self._seconds, _MOST_SECONDS), (self._slow_seconds, _MOST_SLOW_SECONDS)):
            if took >= most:
                raise unexpected(
                    "quantization_config",
                    f"expressions that are matched within {most:.0f} s",
                    expression[:200],
                    f", which takes longer on {name}; write fewer, and none with nested repetition",
                )

    def matches(self, expression: regex.Pattern[str], name: str) -> bool:
        """Whether it matches from the start of a name; CheckpointError once matching has taken too long."""
        while True:
            started, found = time.thread_time(), None
            # The timeout is of elapsed time, in which others may have had the processor.
            with contextlib.suppress(TimeoutError):
                found = expression.match(name, timeout=_MOST_SLOW_SECONDS) is not None
            self.add(time.thread_time() - started, expression.pattern, name)
            if found is not None:
                return found


@dataclass(frozen=True)
class Unreadable:
    """An unsupported scheme, with the reason; refused when a module with this scheme is requested."""

    reason: str


Scheme = QuantizationConfig | Unreadable | None


def if_readable(make: Callable[[], QuantizationConfig | None]) -> Scheme:
    """Returns make(), or `Unreadable` if it raises CheckpointError, since such a module may never be requested."""
    try:
        return make()
    except CheckpointError as error:
        return Unreadable(str(error))


def by_scheme(named: Iterable[tuple[str, Scheme]]) -> list[tuple[list[str], Scheme]]:
    """One entry per scheme: a config may name every layer, and every entry is searched for every matrix."""
    names: dict[Scheme, list[str]] = {}
    for name, scheme in named:
        names.setdefault(scheme, []).append(name)
    return [(modules, scheme) for scheme, modules in names.items()]


class ModuleSchemes:
    """The quantization of a model with several schemes, or with linear layers that stay plain.

    Args:
        quant_method: the name in config.json.
        schemes: (module patterns, their scheme or None for plain ones); the first match decides, and `Linear` matches
            modules that no other entry does.

    Raises:
        CheckpointError: no scheme is supported.
    """

    def __init__(
        self, quant_method: str, schemes: Sequence[tuple[Sequence[str], Scheme]], ignored: Iterable[str] = ()
    ) -> None:
        self.quant_method = quant_method
        clock = Clock()
        self._ignored = ModulePatterns(ignored, clock)
        self._named = [
            (ModulePatterns((name for name in names if name != EVERY_LINEAR), clock), scheme)
            for names, scheme in schemes
        ]
        # Cached for names that many modules share.
        self._of_others: dict[str, tuple[bool, int]] = {}
        self._others = next((scheme for names, scheme in schemes if EVERY_LINEAR in names), None)
        if isinstance(self._others, Unreadable) and all(isinstance(scheme, Unreadable) for _, scheme in schemes):
            raise CheckpointError(self._others.reason)

    @property
    def schemes(self) -> list[QuantizationConfig]:
        """All supported schemes, each once."""
        found = [*(scheme for _, scheme in self._named), self._others]
        return list(dict.fromkeys(scheme for scheme in found if isinstance(scheme, QuantizationConfig)))

    def of_module(self, name: str, *other_names: str) -> QuantizationConfig | None:
        """The scheme of the linear layer of that name; None if it is plain.

        Args:
            other_names: other names that tools may use for it.

        Raises:
            CheckpointError: an unsupported scheme.
        """
        ignored, first = self._found(name)
        for other in other_names:
            if other not in self._of_others:
                self._of_others[other] = self._found(other)
            also_ignored, also_first = self._of_others[other]
            ignored, first = ignored or also_ignored, min(first, also_first)
        if ignored:
            return None
        scheme = self._named[first][1] if first < len(self._named) else self._others
        if isinstance(scheme, Unreadable):
            raise CheckpointError(scheme.reason)
        return scheme

    def _found(self, name: str) -> tuple[bool, int]:
        """Whether a module is ignored, and the index of the first entry that matches it."""
        names = _names_of(name)
        indices = (i for i, (patterns, _) in enumerate(self._named) if any(each in patterns for each in names))
        return any(each in self._ignored for each in names), next(indices, len(self._named))


def _names_of(module: str) -> list[str]:
    """The module's name, and for modules of a language model the names with other prefixes."""
    base = _LANGUAGE_MODEL.match(module)
    if base is None:
        return [module]
    return list(dict.fromkeys((module, *(other + module[base.end() :] for other in _BASES))))


@dataclass(frozen=True)
class PerGemm:
    """Different schemes for w13 and w2 of a layer."""

    quant_method: ClassVar[str] = "mixed-precision"
    fused_endings: ClassVar[None] = None

    w13: QuantizationConfig
    w2: QuantizationConfig

    def of_gemm(self, gemm: str) -> QuantizationConfig:
        """The scheme of "w13" or "w2"."""
        return self.w13 if gemm == "w13" else self.w2


# The quantization of one layer's experts.
LayerQuantization = QuantizationConfig | PerGemm

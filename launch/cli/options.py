"""Command-line flags from a frozen dataclass: one field, one flag; its metadata says how it reads.

@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = field(default=8, metadata=option(at_least(1), "steps to run"))  # --steps N  steps to run (default: 8)

add_flags(parser, Config)
config = from_args(Config, parser.parse_args())                 # OptionError names flag, value and rule
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

C = TypeVar("C")
Parse = Callable[[str], Any]
_LARGEST = 2**31 - 1


class OptionError(ValueError):
    """An option has a value that it cannot have; the message is one sentence."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the command line in one line, and exits with code 2; its result's `prog` is the command,
    with its subcommand where it has some. Flags are written out: a shortened one would mean another when flags are
    added."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # Here, where the subcommand is known: the parser above would say it of the whole program.
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            hint = did_you_mean(unknown[0].partition("=")[0], flags)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        found.prog = getattr(found, "prog", self.prog)
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            self.error(
                f"argument {action.metavar}: invalid choice: {value!r} (choose from "
                f"{', '.join(map(repr, action.choices))}){did_you_mean(str(value), list(action.choices))}"
            )

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """A question after a word that is not known; empty where none is like it."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def option(parse: Parse | None, text: str, metavar: str = "") -> dict[str, Any]:
    """Metadata of a field that is a flag. `parse` turns text into its value or raises ValueError with the rule ("it
    must be ..."); None makes a yes/no flag. `text` is for help, which adds the default where there is one."""
    return {"parse": parse, "text": text, "metavar": metavar}


def add_flags(parser: argparse.ArgumentParser, config: type, *, config_file: bool = False) -> None:
    """A flag for every field, the command's own first; those of a base with an `options_title` under that title.

    Args:
        config_file: adds --config, a file that gives some of them.
    """
    by_name = {item.name: item for item in fields(config)}
    for owner in config.__mro__:
        title = owner.__dict__.get("options_title")
        group = parser.add_argument_group(title) if title else parser
        for name in inspect.get_annotations(owner):
            if name in by_name:
                _add_flag(group, by_name.pop(name))
    if config_file:
        text = "take options from this TOML or JSON file, where the command line has none"
        parser.add_argument("--config", metavar="FILE", help=text)


def _add_flag(group: argparse._ActionsContainer, item: Field[Any]) -> None:
    text = item.metadata["text"] + _shown_default(item.default)
    if item.metadata["parse"] is None:
        group.add_argument(flag(item.name), action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        group.add_argument(flag(item.name), metavar=item.metadata["metavar"] or _metavar(item.type), help=text)


def _shown_default(default: Any) -> str:
    """What help says a flag is without being given; nothing where the text has to explain it."""
    if default is None or default is False or default in ((), ""):
        return ""
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    return f" (default: {'yes' if default is True else default})"


def from_args(config: type[C], args: argparse.Namespace) -> C:
    """The configuration that the flags give, and --config for those that are not given.

    Raises:
        OptionError: a value that its flag cannot have, or a file that does not hold options of this command.
    """
    file = getattr(args, "config", None)
    given = {} if file is None else _read_config(file, config)
    values = {}
    for item in fields(config):  # type: ignore[arg-type]
        name, raw = flag(item.name), getattr(args, item.name)
        if raw is None and item.name in given:
            name = f"{name} in {file}"
            raw = _as_typed(name, given[item.name], is_switch=item.metadata["parse"] is None)
        if raw is not None:
            values[item.name] = parsed(name, raw, item.metadata["parse"]) if isinstance(raw, str) else raw
    return config(**values)


def _read_config(file: str, config: type) -> dict[str, Any]:
    """The options of a file by the names of their fields."""
    known = {item.name for item in fields(config)}
    try:
        text = Path(file).read_text(encoding="utf-8")
        found = json.loads(text) if file.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(f"--config is {file!r}, which cannot be read as TOML or .json: {error}") from None
    if not isinstance(found, dict):
        raise OptionError(f"--config is {file!r}; it must hold options and their values, such as steps = 8")
    by_name = {name.replace("-", "_"): value for name, value in found.items()}
    if unknown := sorted(by_name.keys() - known):
        hint = did_you_mean(unknown[0].replace("_", "-"), [name.replace("_", "-") for name in known])
        raise OptionError(f"--config is {file!r} and has {unknown[0]!r}, which is no option of this command{hint}")
    return by_name


def _as_typed(name: str, value: Any, *, is_switch: bool) -> Any:
    """A value of a file as the command line would have it."""
    if isinstance(value, bool) and is_switch:
        return value
    if isinstance(value, list) and all(isinstance(part, str | int | float) for part in value) and not is_switch:
        return ",".join(map(str, value))
    if isinstance(value, str | int | float) and not isinstance(value, bool) and not is_switch:
        return str(value)
    rule = "true or false" if is_switch else "text, a number, or a list of these"
    raise OptionError(f"{name} is {value!r}; it must be {rule}")


def parsed(name: str, raw: str, parse: Parse) -> Any:
    """What `parse` makes of the value of a flag or an argument; OptionError for one that it cannot have."""
    try:
        return parse(raw)
    except ValueError as error:
        raise OptionError(f"{name} is {raw!r}; {error}") from None
    except OSError as error:
        raise OptionError(f"{name} is {raw!r}, which cannot be used: {error.strerror}") from None


def _metavar(annotation: Any) -> str:
    """What stands for a value in help: a number, a name, or several of them."""
    text = str(annotation)
    one = "N" if "int" in text else "X" if "float" in text else "NAME"
    return f"{one},{one}" if text.startswith("tuple") else one


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def whole(digits: str) -> int:
    """A number of digits that 32 bits hold, as counts and seeds are; ValueError with the rule for a larger one."""
    value = int(digits.lstrip("0")[: len(str(_LARGEST)) + 1] or 0)
    if value > _LARGEST:
        raise ValueError(f"it must be at most {_LARGEST}")
    return value


def at_least(minimum: int) -> Parse:
    """A whole number."""

    def parse(raw: str) -> int:
        if not raw.isdecimal() or whole(raw) < minimum:
            raise ValueError(f"it must be a whole number of at least {minimum}")
        return whole(raw)

    return parse


def number(rule: str, holds: Callable[[float], bool]) -> Parse:
    """A finite number for which `holds`; `rule` says it after "it must be"."""

    def parse(raw: str) -> float:
        try:
            value = float(raw)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and holds(value)):
            raise ValueError(f"it must be {rule}")
        return value

    return parse


def one_of(*allowed: str) -> Parse:
    """One word of a fixed set."""
    return one_of_these(lambda: allowed)


def one_of_these(allowed: Callable[[], Sequence[str]]) -> Parse:
    """One word of a set that is asked for when the value is there."""

    def parse(raw: str) -> str:
        if raw not in allowed():
            raise ValueError(f"it must be one of {', '.join(allowed())}")
        return raw

    return parse

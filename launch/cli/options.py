"""Derives command-line flags from a frozen dataclass: one field is one flag, and its metadata says how it is parsed.

@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = option(8, at_least(1), "steps to run")  # --steps N  steps to run (default: 8)

add_flags(parser, Config)
config = from_args(Config, parser.parse_args())                 # OptionError names flag, value and rule

A parser of a value raises ValueError with the rule that the value breaks.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from moe_ep.env import whole
from moe_ep.files import MAX_CONFIG_BYTES, parse_json, read_bounded, user_path
from moe_ep.launch.gangs.rank_env import can_be_host
from moe_ep.registry import ALL2ALL_BACKENDS

C = TypeVar("C")
Parse = Callable[[str], Any]
Main = Callable[[argparse.Namespace], int]


class OptionError(ValueError):
    """An option has a value that is not allowed; the message is one sentence."""


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turns a ValueError of the block into an OptionError that says first which option it comes from."""
    try:
        yield
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(f"{what}{error}") from None


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line and exits with code 2. The result's `prog` is the command with its
    subcommand. Abbreviated flags are not accepted, because their meaning could change when flags are added."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # Reported here, where the subcommand is known; the parent parser would name the whole program.
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            hints = dict.fromkeys(did_you_mean(word, flags) for word in options)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{''.join(hints)}")
        found.prog = getattr(found, "prog", self.prog)
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            self.error(
                f"argument {action.metavar}: invalid choice: {value!r} (choose from "
                f"{', '.join(map(repr, action.choices))}){did_you_mean(str(value), list(action.choices))}"
            )

    def format_help(self) -> str:
        arguments = [f"{action.metavar} " for action in self._actions if not action.option_strings]
        self.usage = f"{self.prog} {''.join(arguments)}[options]"  # argparse's own names all of the flags
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Suggests the known word that is closest to an unknown one; empty if none is close."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def option(default: Any, parse: Parse | None, text: str, metavar: str = "", *, repeats: bool = False) -> Any:
    """A dataclass field that becomes a flag.

    Args:
        parse: turns text into the value, or raises ValueError with the rule ("it must be ..."); None for a yes/no flag.
        text: shown by --help, which adds the default.
        repeats: whether the flag may be given several times; the field is a tuple then.
    """
    metadata = {"parse": parse, "text": text, "metavar": metavar, "repeats": repeats}
    return field(default=default, metadata=metadata)


def add_flags(parser: argparse.ArgumentParser, config: type, *, config_file: bool = False) -> None:
    """Adds a flag for every field: the command's own, then groups by the `options_title` of the declaring class."""
    by_name = {item.name: item for item in fields(config)}
    for owner in sorted(config.__mro__, key=lambda owner: owner.__dict__.get("options_title", "")):
        title = owner.__dict__.get("options_title")
        group = parser.add_argument_group(title) if title else parser
        for name in inspect.get_annotations(owner):
            if name in by_name:
                _add_flag(group, by_name.pop(name))
    if config_file:
        text = "read options from this TOML or JSON file; the command line overrides them"
        parser.add_argument("--config", metavar="FILE", help=text)


def add_command(
    subparsers: argparse._SubParsersAction[Parser],
    name: str,
    main: Main,
    config: type | None,
    text: str,
    description: str,
) -> Parser:
    """Adds a command whose flags are the fields of `config`, or come from the file that --config names."""
    parser = subparsers.add_parser(name, help=text, description=description)
    if config is not None:
        add_flags(parser, config, config_file=True)
    parser.set_defaults(main=main)
    return parser


def _add_flag(group: argparse._ActionsContainer, item: Field[Any]) -> None:
    text = item.metadata["text"] + _shown_default(item.default)
    if item.metadata["parse"] is None:
        group.add_argument(flag(item.name), action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        metavar = item.metadata["metavar"] or _metavar(item.type)
        action = "append" if item.metadata["repeats"] else "store"
        group.add_argument(flag(item.name), metavar=metavar, action=action, help=text)


def _shown_default(default: Any) -> str:
    """The default as --help shows it; empty if the text has to explain it."""
    if default is None or default is False or default in ((), ""):
        return ""
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    return f" (default: {'yes' if default is True else default})"


def from_args(config: type[C], args: argparse.Namespace) -> C:
    """Makes the configuration from the flags, and from --config for flags that are not given; OptionError for a value
    that its flag does not allow, or a file that does not hold options of this command."""
    file = getattr(args, "config", None)
    given = {} if file is None else _read_config(file, config)
    values = {}
    for item in fields(config):  # type: ignore[arg-type]
        name, raw = flag(item.name), getattr(args, item.name)
        if raw is None and item.name in given:
            name, value, is_switch = f"{name} in {file}", given[item.name], item.metadata["parse"] is None
            if item.metadata["repeats"] and isinstance(value, list):
                raw = [_as_typed(name, part, is_switch=False) for part in value]
            else:
                raw = _as_typed(name, value, is_switch=is_switch)
        if item.metadata["repeats"] and raw is not None:
            several = [raw] if isinstance(raw, str) else raw
            values[item.name] = tuple(parsed(name, each, item.metadata["parse"]) for each in several)
        elif raw is not None:
            values[item.name] = parsed(name, raw, item.metadata["parse"]) if isinstance(raw, str) else raw
    return config(**values)


def _read_config(file: str, config: type) -> dict[str, Any]:
    """Reads a file of options into a dict by field name."""
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
    """Converts a value from a file to what the command line would give."""
    if isinstance(value, bool) and is_switch:
        return value
    if isinstance(value, list) and all(isinstance(part, str | int | float) for part in value) and not is_switch:
        return ",".join(map(str, value))
    if isinstance(value, str | int | float) and not isinstance(value, bool) and not is_switch:
        return str(value)
    rule = "true or false" if is_switch else "text, a number, or a list of these"
    raise OptionError(f"{name} is {value!r}; it must be {rule}")


def parsed(name: str, raw: str, parse: Parse) -> Any:
    """Parses the value of a flag or an argument; OptionError if it is not allowed."""
    try:
        with refusing(f"{name} is {raw!r}; "):
            return parse(raw)
    except OSError as error:
        raise OptionError(f"{name} is {raw!r}, which cannot be used: {error.strerror}") from None


def _metavar(annotation: Any) -> str:
    """The placeholder of a value in --help."""
    text = str(annotation)
    one = "N" if "int" in text else "X" if "float" in text else "NAME"
    return f"{one},{one}" if text.startswith("tuple") else one


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_needs(config: Any, switch: str, names: Iterable[str]) -> None:
    """Raises OptionError if one of these options is given without the switch that it belongs to."""
    defaults = {item.name: item.default for item in fields(config)}
    for name in () if getattr(config, switch) else names:
        if (value := getattr(config, name)) != defaults[name]:
            needed = flag(switch)
            raise OptionError(f"{flag(name)} is {str(value)!r} without {needed}; add {needed} or leave it out")


# The names of moe_ep.bench.geometries.PRESETS, repeated so that --help need not import torch.
GEOMETRY_NAMES = (
    "deepseek-v3, deepseek-v4-flash, kimi-k2, kimi-k3, qwen3-235b, qwen3-30b, mixtral-8x7b, gpt-oss-120b, small"
)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
BACKEND_NAMES = ", ".join(["auto", *ALL2ALL_BACKENDS])


def check_backends(names: Sequence[str], num_ranks: int | None, device: str | None) -> None:
    """Raises OptionError for dispatch backends that this many ranks on a device cannot use; None means unknown."""
    for name in names:
        if device == "cpu" and name.startswith("nvshmem"):
            raise OptionError(f"--backend is {name!r} and the workers run on CPUs; NVSHMEM needs GPUs, choose another")
        if num_ranks is not None and num_ranks > 1 and name == "no_ep":
            raise OptionError(
                f"--backend is 'no_ep', which moves nothing, and {num_ranks} workers share the experts; choose another"
            )


def checkpoint_folder(raw: str) -> Path:
    """A folder with a Hugging Face checkpoint, as an absolute path."""
    path = user_path(raw)
    rule = "it must be a folder with a Hugging Face checkpoint"
    if not raw or not path.exists():  # an empty one would be this folder
        way_out = "; to download it: hf download NAME --local-dir FOLDER" if _HUB_NAME.fullmatch(raw) else ""
        raise ValueError(f"{rule}, and there is none{way_out}")
    if not (path / "config.json").is_file():
        raise ValueError(f"{rule}, and there is no config.json in it")
    try:
        config = read_model_config(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{rule}, and its config.json cannot be read ({error})") from None
    if not isinstance(config, dict) or not config:
        raise ValueError(f"{rule}, and its config.json holds no JSON object with values")
    return path.absolute()


def read_model_config(folder: Path) -> dict[str, Any]:
    """Reads a checkpoint's config.json without importing torch, which `moe_ep.checkpoint` needs."""
    return parse_json(read_bounded(folder / "config.json", MAX_CONFIG_BYTES))


def input_file(raw: str, rule: str) -> Path:
    """An existing regular file, which every process of a gang can read; ValueError with the rule otherwise."""
    path = user_path(raw)
    if not path.is_file():
        found = "this is no plain file" if path.exists() else "there is no such file"
        raise ValueError(f"{rule}, and {found}")
    return path


def output_file(raw: str) -> Path:
    """A file to write, as an absolute path."""
    path = user_path(raw).absolute()
    # Writing to a dangling link creates its target. A circular link has none.
    made = Path(os.path.realpath(path)) if path.is_symlink() and not path.exists() else path
    if not raw or path.is_dir() or not made.parent.is_dir() or (made.is_symlink() and not made.exists()):
        raise ValueError("it must be a file to write, in a folder that exists")
    # A regular file is replaced by a new one in its folder; a link, a pipe or a device is written in place.
    needs_folder = not path.exists() or (path.is_file() and not path.is_symlink())
    if (needs_folder and not os.access(made.parent, os.W_OK)) or (path.exists() and not os.access(path, os.W_OK)):
        raise ValueError("it must be a file that may be written, and this user may not")
    return path


def check_apart(outputs: Mapping[str, Path | None], inputs: Mapping[str, str | Path | None]) -> None:
    """Raises OptionError if a command would overwrite a file that it reads, or write two outputs to one file.

    Args:
        outputs, inputs: paths by flag; None and paths that are not regular files are ignored.
    """
    seen: dict[str, str] = {}
    for flag, path in (*inputs.items(), *outputs.items()):
        real = os.path.realpath(path or "")
        if path is None or (os.path.exists(real) and not os.path.isfile(real)):
            continue
        if flag in outputs and real in seen:
            raise OptionError(
                f"{flag} is {str(path)!r}, as is {seen[real]}; it would be replaced, write to another file"
            )
        seen[real] = flag


def new_folder(raw: str) -> Path:
    """A folder to write into, which is created if it is missing, as an absolute path."""
    path = user_path(raw).absolute()
    is_dangling = path.is_symlink() and not path.exists()
    if not raw or path.is_file() or is_dangling or not path.parent.is_dir():
        raise ValueError("it must be a folder to write into, or a new one in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK | os.X_OK):
        raise ValueError("it must be a folder that may be written to, and this user may not")
    return path


def host(raw: str) -> str:
    """An address of this machine. An empty one is refused, because it would mean all of them."""
    if not raw or any(letter.isspace() for letter in raw) or not can_be_host(raw):
        raise ValueError("it must be an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all")
    return raw


def port(raw: str) -> int:
    """A TCP port."""
    if not _is_port(raw):
        raise ValueError("it must be a port, a whole number from 1 to 65535")
    return int(raw)


def _is_port(raw: str) -> bool:
    digits = raw.lstrip("0")
    return raw.isdecimal() and 0 < len(digits) < 6 and int(digits) < 65536


def endpoint(raw: str) -> str:
    """HOST:PORT."""
    host, _, port = raw.rpartition(":")
    if not host or "/" in host or not can_be_host(host) or not _is_port(port):
        raise ValueError("it must read HOST:PORT")
    return raw


def ray_address(raw: str) -> str:
    """HOST:PORT, auto or local."""
    if raw.startswith(("http://", "https://", "ray://")):
        raise ValueError("it must read HOST:PORT, as ray start printed it, not where jobs or Ray's clients are taken")
    return raw if raw in ("auto", "local") else endpoint(raw)


def whole_numbers(raw: str) -> tuple[int, ...]:
    """Numbers of at least 1, as in 1,2,4,8."""
    if not re.fullmatch(r"\d+(,\d+)*", raw) or 0 in (numbers := tuple(map(whole, raw.split(",")))):
        raise ValueError("it must be whole numbers of at least 1, as in 1,2,4,8")
    return numbers


def geometry_name(raw: str) -> str:
    """A preset of `moe_ep.bench.geometries`."""
    from moe_ep.bench.geometries import PRESETS

    if raw not in PRESETS:
        raise ValueError(f"it must be one of {', '.join(PRESETS)}")
    return raw

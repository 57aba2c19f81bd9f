"""Values of options that several commands have; each raises ValueError with the rule, as `option` wants it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_ep.files import MAX_CONFIG_BYTES, parse_json, read_bounded, user_path
from moe_ep.launch.cli.options import OptionError, whole
from moe_ep.registry import ALL2ALL_BACKENDS

# For help, which does not wait for torch: the names of moe_ep.bench.geometries.PRESETS.
GEOMETRY_NAMES = (
    "deepseek-v3, deepseek-v4-flash, kimi-k2, kimi-k3, qwen3-235b, qwen3-30b, mixtral-8x7b, gpt-oss-120b, small"
)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
BACKEND_NAMES = ", ".join(["auto", *ALL2ALL_BACKENDS])


def check_backends(names: Sequence[str], num_ranks: int | None, device: str | None) -> None:
    """Raises OptionError for dispatch backends that so many ranks on a device cannot use; None is for what is not known
    yet."""
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
    """The config.json of a checkpoint, as far as options go into it: without torch, which `moe_ep.checkpoint` needs."""
    return parse_json(read_bounded(folder / "config.json", MAX_CONFIG_BYTES))


def input_file(raw: str, rule: str) -> Path:
    """A plain file that is there, which each process of a gang may read for itself; ValueError with the rule."""
    path = user_path(raw)
    if not path.is_file():
        found = "this is no plain file" if path.exists() else "there is no such file"
        raise ValueError(f"{rule}, and {found}")
    return path


def output_file(raw: str) -> Path:
    """A file to write, as an absolute path."""
    path = user_path(raw).absolute()
    # A link to nothing makes what it leads to; one that leads in a circle stays a link.
    made = Path(os.path.realpath(path)) if path.is_symlink() and not path.exists() else path
    if not raw or path.is_dir() or not made.parent.is_dir() or (made.is_symlink() and not made.exists()):
        raise ValueError("it must be a file to write, in a folder that exists")
    # A file is replaced by a new one of its folder; a link, a pipe or a device is written to.
    needs_folder = not path.exists() or (path.is_file() and not path.is_symlink())
    if (needs_folder and not os.access(made.parent, os.W_OK)) or (path.exists() and not os.access(path, os.W_OK)):
        raise ValueError("it must be a file that may be written, and this user may not")
    return path


def check_apart(outputs: Mapping[str, Path | None], inputs: Mapping[str, str | Path | None]) -> None:
    """Raises OptionError where a command would replace a file that it reads, or one of its own outputs by another.

    Args:
        outputs, inputs: what is written and read, by flag; None, and what is no plain file, is left out.
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
    """A folder to write into, made where it is missing, as an absolute path."""
    path = user_path(raw).absolute()
    is_dangling = path.is_symlink() and not path.exists()
    if not raw or path.is_file() or is_dangling or not path.parent.is_dir():
        raise ValueError("it must be a folder to write into, or a new one in a folder that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK | os.X_OK):
        raise ValueError("it must be a folder that may be written to, and this user may not")
    return path


def host(raw: str) -> str:
    """An address of this machine; empty would mean all of them."""
    if not raw or any(letter.isspace() for letter in raw):
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
    if not host or "/" in host or not _is_port(port):
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

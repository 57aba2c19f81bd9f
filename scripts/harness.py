"""What benchmark scripts share: the GPU or gang that they measure on, their options, and the record of rows."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moe_ep.arguments import usable_device
from moe_ep.bench.results import append_line, facts
from moe_ep.env import at_least
from moe_ep.errors import ConfigError, MoeEpError
from moe_ep.launch.cli.gang_options import GangConfig, start_gang
from moe_ep.launch.cli.options import OptionError, Parser, add_flags, from_args, option, output_file, whole_numbers

C = TypeVar("C", bound=GangConfig)
T = TypeVar("T")


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A `type` of argparse whose errors are those of `parse`, which raises ValueError with the rule."""

    def convert(raw: str) -> T:
        try:
            return parse(raw)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"it is {raw!r}; {error}") from None

    return convert


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Names with commas between them, as a `type` of argparse."""

    def parse(raw: str) -> list[str]:
        if not set(names := raw.split(",")) <= set(known):
            raise ValueError(f"it must be some of {', '.join(known)}, with commas between them")
        return names

    return checked(parse)


def device_name(raw: str) -> str:
    """A device of this machine, as a `type` of argparse."""
    try:
        return str(usable_device(raw))
    except (ValueError, ConfigError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


positive, positives = checked(at_least(1)), checked(whole_numbers)


class Bench:
    """Options that every benchmark takes, and its rows, which --json keeps as they come.

    Args:
        description: the script's docstring.

    Attributes:
        parser: of --seed, --commit and --json; the script adds its own options before `parse`.
        about: versions, GPU, commit, seed and command; part of every line of --json.
        rows: those that were kept.
    """

    def __init__(self, description: str | None) -> None:
        self.parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.parser.add_argument("--seed", type=int, default=0)
        self.parser.add_argument("--commit", help="what to record where this is no git checkout")
        help_text = "append one JSON line a row to this file"
        self.parser.add_argument("--json", "--jsonl", type=Path, metavar="FILE", help=help_text)
        self.about: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self._json: Path | None = None

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The options; seeds torch."""
        options = self.parser.parse_args(argv)
        torch.manual_seed(options.seed)
        self.about = facts(seed=options.seed, commit=options.commit)
        self._json = options.json
        return options

    def keep(self, row: dict[str, Any]) -> dict[str, Any]:
        """Records a row, and gives it back."""
        self.rows.append(row)
        if self._json is not None:
            append_line(self._json, row | self.about)
        return row


def this_gpu() -> torch.device:
    """The GPU of a script in one process.

    Raises:
        SystemExit: torch sees no GPU.
    """
    _see_a_gpu()
    return torch.device("cuda", torch.cuda.current_device())


def use_gpu_of_rank() -> None:
    """Makes the GPU of a script that torchrun starts CUDA's current one.

    Raises:
        SystemExit: torch sees no GPU, or torchrun did not start this process.
    """
    _see_a_gpu()
    if "LOCAL_RANK" not in os.environ:
        name = Path(sys.argv[0]).name
        sys.exit(f"{name} is for several GPUs: torchrun --nproc-per-node GPUS scripts/{name}")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def _see_a_gpu() -> None:
    if not torch.cuda.is_available():
        sys.exit(f"{Path(sys.argv[0]).name} measures on a GPU, and torch sees none here; moe-ep doctor says more")


def spawn_ranks(size: int, run: Callable[..., None], *args: Any) -> None:
    """Calls `run(rank, size, *args, init_method)` in one process a rank, all on this machine."""
    with tempfile.TemporaryDirectory(prefix="moe_ep_bench_") as folder:
        mp.spawn(run, (size, *args, f"file://{folder}/store"), nprocs=size)


def join_ranks(rank: int, size: int, init_method: str, device_type: str, local_rank: int | None = None) -> torch.device:
    """Initializes torch.distributed in one of the processes; returns its device, a GPU of its own or the CPU."""
    device, backend, options = torch.device("cpu"), "gloo", {}
    if device_type == "cuda":
        device = torch.device("cuda", rank if local_rank is None else local_rank)
        torch.cuda.set_device(device)
        backend, options = "cpu:gloo,cuda:nccl", {"device_id": device}
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, **options)
    return device


@dataclass(frozen=True, kw_only=True)
class GangBenchConfig(GangConfig):
    """The options of every benchmark on a gang of workers."""

    commit: str | None = option(None, str, "what to record outside a checkout", "HASH")
    json: Path | None = option(None, output_file, "append one JSON line a row", "FILE")

    def keep(self, row: dict[str, Any], rank: int) -> dict[str, Any]:
        """The row with what a comparison needs; rank 0 adds it to --json."""
        row = row | facts(seed=0, commit=self.commit)
        if self.json is not None and rank == 0:
            append_line(self.json, row)
        return row


def measure_on_gang(
    script: str, description: str, config_type: type[C], measure: Callable[..., Any]
) -> tuple[C, list[Any] | None]:
    """(settings, what `measure(rank_env, config)` returned on each rank; None on workers that are not the driver).

    Raises:
        SystemExit: 2 for a wrong option, 1 for a gang that failed; after one message that says why.
    """
    parser = Parser(prog=script, description=description.split("\n")[0])
    add_flags(parser, config_type)
    args = parser.parse_args()
    try:
        config, gang = start_gang(from_args(config_type, args))
        try:
            results = gang.run(measure, config)
        finally:
            gang.close()
    except (OptionError, MoeEpError) as error:
        print(f"{script}: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, (OptionError, ConfigError)) else 1) from None
    return config, results if gang.is_driver else None

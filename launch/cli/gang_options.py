"""The options that all commands with a gang share: its workers, its model, its number types, whether it is elastic."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from moe_ep.env import INPUT_DTYPE_NAMES, at_least, one_of, one_of_these
from moe_ep.launch.cli.options import (
    BACKEND_NAMES,
    OptionError,
    check_backends,
    check_needs,
    checkpoint_folder,
    endpoint,
    option,
    ray_address,
    read_model_config,
)
from moe_ep.launch.gangs import control
from moe_ep.launch.gangs.gang import Gang, num_local_gpus
from moe_ep.launch.gangs.rank_env import RankEnv, is_torchrun_rank, resolve_rank_env, slurm_rank_env
from moe_ep.launch.gangs.ray_gang import joined_address
from moe_ep.registry import ALL2ALL_BACKENDS

if TYPE_CHECKING:
    import torch

    from moe_ep.layer.elastic import ElasticConfig


LAUNCHERS = ("ray", "torchrun", "local", "slurm")
DEFAULT_WORKERS = 4


@dataclass(frozen=True, kw_only=True)
class GangConfig:
    """The workers that a command runs on."""

    options_title: ClassVar[str] = "workers"

    launcher: str | None = option(
        None,
        one_of(*LAUNCHERS),
        "ray, torchrun, local or slurm (default: torchrun or slurm if torchrun or srun started this process, else ray)",
    )
    address: str | None = option(
        None,
        ray_address,
        "Ray cluster to join, or auto for the one on this machine (default: RAY_ADDRESS, or a new private cluster)",
        "HOST:PORT",
    )
    nnodes: int = option(1, at_least(1), "number of nodes, with --launcher torchrun; every node runs the same command")
    rdzv_endpoint: str | None = option(None, endpoint, "address at which those nodes meet", "HOST:PORT")
    ep_size: int | None = option(None, at_least(1), "number of workers (default: one for each GPU, or 4 without GPUs)")
    device: str = option("auto", one_of("auto", "cpu", "cuda"), "auto, cpu or cuda; auto takes GPUs if there are any")

    def check_fits(self, world_size: int | None, device: str | None) -> None:
        """Raises OptionError for options that this many workers on a device ("cpu", "cuda") cannot serve.

        It is called before anything starts, with None for what only a cluster knows, and again with the gang's values.
        """


G = TypeVar("G", bound=GangConfig)


def start_gang(config: G) -> tuple[G, Gang]:
    """Returns the configuration with its launcher filled in, and the gang. Workers start with the gang's first run.

    Raises:
        OptionError: flags contradict each other, or do not fit the gang.
        GangError: the machines cannot hold the gang.
    """
    if config.launcher is None:  # the one that started this process, if any
        source = resolve_rank_env().source
        config = replace(config, launcher=source if source in ("torchrun", "slurm") else "ray")
    _check_together(config)
    config.check_fits(*_foreseen(config))
    gang = make_gang(config)
    try:
        config.check_fits(gang.world_size, gang.device)
    except BaseException:
        gang.close()
        raise
    return config, gang


def _foreseen(config: GangConfig) -> tuple[int | None, str | None]:
    """(workers, device) of the gang, as far as they are known before it starts."""
    ray = sys.modules.get("ray")
    joins = joined_address(config.address) or (ray is not None and ray.is_initialized())
    if config.launcher == "ray" and joins:
        return config.ep_size, None if config.device == "auto" else config.device
    num_local, device = _here(config)
    started = _started_as(config)
    if started is not None:
        return started.world_size, device
    return config.ep_size or num_local * config.nnodes, device


def _here(config: GangConfig) -> tuple[int, str]:
    """The default (workers, device) on this machine."""
    num_gpus = num_local_gpus()
    device = config.device if config.device != "auto" else "cuda" if num_gpus else "cpu"
    return num_gpus if device == "cuda" and num_gpus else DEFAULT_WORKERS, device


def _check_together(config: GangConfig) -> None:
    """Raises OptionError for flags that contradict each other."""
    for name, value, launcher in (
        ("--address", config.address, "ray"), ("--rdzv-endpoint", config.rdzv_endpoint, "torchrun"),
    ):  # fmt: skip
        if value and config.launcher != launcher:
            raise OptionError(f"{name} is {value!r} with --launcher {config.launcher}; only {launcher} takes it")
    if config.nnodes > 1 and config.launcher != "torchrun":
        raise OptionError(f"--nnodes is {config.nnodes}; more than one is for --launcher torchrun, Ray finds its nodes")
    if config.nnodes > 1 and not config.rdzv_endpoint:
        raise OptionError(f"--nnodes is {config.nnodes} without --rdzv-endpoint; give the HOST:PORT where they meet")
    if config.ep_size and config.ep_size % config.nnodes:
        raise OptionError(f"--ep-size is {config.ep_size}; it must be a multiple of --nnodes ({config.nnodes})")


def _started_as(config: GangConfig) -> RankEnv | None:
    """This process's rank, if the launcher started it as a worker; None for a driver."""
    if config.launcher == "torchrun" and is_torchrun_rank():
        return resolve_rank_env()
    if config.launcher == "slurm":
        found = slurm_rank_env()
        if found is None:
            raise OptionError("--launcher is 'slurm' and srun did not start this process; start it by srun")
        return found
    return None


def make_gang(config: GangConfig) -> Gang:
    """Starts the workers of the launcher that the options name."""
    if getattr(config, "elastic", False):
        # torch would show a C++ stack for each call to a lost store.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    num_local, device = _here(config)
    if config.launcher == "local":
        from moe_ep.launch.gangs.local_gang import LocalGang

        return LocalGang(config.ep_size or num_local, device)
    if config.launcher in ("torchrun", "slurm"):
        from moe_ep.launch.gangs.torchrun_gang import TorchrunGang

        started = _started_as(config)
        if started is not None and config.ep_size not in (None, started.world_size):
            raise OptionError(
                f"--ep-size is {config.ep_size} and {config.launcher} started {started.world_size} ranks; leave it "
                f"out or start as many"
            )
        return TorchrunGang(
            config.ep_size // config.nnodes if config.ep_size else num_local,
            device,
            num_nodes=config.nnodes,
            rdzv_endpoint=config.rdzv_endpoint,
            started=started or RankEnv(),
        )
    from moe_ep.launch.gangs.ray_gang import RayGang

    return RayGang(config.ep_size, config.device, config.address, default_world_size=DEFAULT_WORKERS)


DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def torch_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype of `--dtype`; without it bf16 on GPUs and f32 on CPUs."""
    import torch

    return getattr(torch, DTYPES[name or ("bf16" if device.type == "cuda" else "f32")])


def input_dtype_option() -> Any:
    """The field of `--input-dtype`."""
    return option(
        None,
        one_of(*INPUT_DTYPE_NAMES),
        "row dtype that quantized experts compute with: int8, fp8, checkpoint (what the checkpoint was made for) or "
        "none (no rounding); on GPUs rows are rounded only if that is faster (default: MOE_EP_INPUT_DTYPE)",
        "DTYPE",
    )


def batch_balance_option() -> Any:
    """The field of `--batch-balance`."""
    return option(
        "auto",
        one_of("auto", "off"),
        "copy hot experts to other ranks for a single large batch: auto (if it pays) or off",
    )


def layer_input_dtype(name: str | None) -> torch.dtype | str | None:
    """The layers' input_dtype for the value of `--input-dtype`."""
    from moe_ep.quantization.input_rows import input_dtype_of

    return None if name is None else input_dtype_of(name)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(GangConfig):
    """The model of a gang's workers, its number types, and its dispatch backend."""

    options_title: ClassVar[str] = "model"

    model: Path | None = option(
        None, checkpoint_folder, "checkpoint folder (default: a small Qwen3-MoE checkpoint, which is made once)", "DIR"
    )
    backend: str = option(
        "auto", one_of_these(lambda: ("auto", *ALL2ALL_BACKENDS)), f"dispatch backend: {BACKEND_NAMES}"
    )
    dtype: str | None = option(
        None,
        one_of(*DTYPES),
        "f32, f16 or bf16, for activations and plain weights (default: bf16 on GPUs, f32 on CPUs)",
    )
    quantize: str = option(
        "none", one_of("none", "int4", "int8", "fp8"), "quantize plain experts while loading: none, int4, int8 or fp8"
    )

    input_dtype: str | None = input_dtype_option()
    batch_balance: str = batch_balance_option()
    allow_nonfinite: bool = option(False, None, "accept weights with NaN or infinity, which are refused otherwise")

    def check_fits(self, world_size: int | None, device: str | None) -> None:
        check_backends([self.backend], world_size, device)

    def check_quantize(self) -> None:
        """Raises OptionError if --quantize is given for a checkpoint that is already quantized."""
        if self.quantize == "none":
            return
        if self.model is None:
            raise OptionError(
                f"--quantize is {self.quantize!r}; the demo checkpoint is quantized already, pass --model"
            )
        if read_model_config(self.model).get("quantization_config") is not None:
            raise OptionError(f"--quantize is {self.quantize!r} and --model is quantized already; leave it out")


@dataclass(frozen=True, kw_only=True)
class ElasticOptions(ModelConfig):
    """Whether a gang goes on when workers fail, leave or join."""

    options_title: ClassVar[str] = "workers that come and go"

    elastic: bool = option(False, None, "keep running when workers die, hang, leave or join")
    min_ranks: int | None = option(None, at_least(1), "stop if fewer workers than this remain (default: 1)", "N")
    max_ranks: int | None = option(None, at_least(1), "let workers join up to this many (default: --ep-size)", "N")
    spare_slots: int | None = option(
        None,
        at_least(0),
        "empty expert slots of each worker, for the experts of lost workers (default: as many as --min-ranks workers "
        "need to hold all experts)",
        "N",
    )
    when_uncovered: str = option(
        "wait", one_of("wait", "skip"), "what tokens do whose experts are being reloaded: wait for them, or skip them"
    )

    def check_elastic(self) -> None:
        """Raises OptionError for an option that has no effect without --elastic, or numbers that do not fit."""
        check_needs(self, "elastic", ("min_ranks", "max_ranks", "spare_slots", "when_uncovered"))
        if self.min_ranks and self.ep_size and self.min_ranks > self.ep_size:
            raise OptionError(f"--min-ranks is {self.min_ranks} and --ep-size {self.ep_size}; start at least as many")
        if self.max_ranks and self.max_ranks < (self.ep_size or self.min_ranks or 1):
            raise OptionError(f"--max-ranks is {self.max_ranks}; it must be at least --ep-size and --min-ranks")
        if self.elastic and self.launcher == "torchrun" and is_torchrun_rank():
            raise OptionError(
                "--elastic is given under torchrun, which ends all workers when one fails; leave torchrun out and run "
                "moe-ep with --launcher torchrun, whose agent does not"
            )

    def run_in(
        self, gang: Gang, work: Callable[..., Any], *args: Any, on_item: Callable[[Any], None]
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """Runs `work(rank_env, self, *args)` in the gang's workers; returns the results and the recoveries."""
        if self.elastic:
            control.make_token_folder()  # A clear error before workers start.
        if self.model is None:
            from moe_ep.checkpoint.demo import demo_checkpoint

            demo_checkpoint()  # Made here to show its progress. Workers on other nodes make their own.
        if self.elastic:
            return gang.run_elastic(work, self, *args, config=self.elastic_config(), on_item=on_item)
        return gang.run(work, self, *args, on_item=on_item), []

    def elastic_config(self) -> ElasticConfig:
        """These options as the layers take them."""
        from moe_ep.layer.elastic import ElasticConfig

        return ElasticConfig(
            min_ranks=self.min_ranks or 1,
            max_ranks=self.max_ranks,
            spare_slots=self.spare_slots,
            when_uncovered=self.when_uncovered,
        )


@dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """The running gang that a command talks to."""

    address: str | None = option(None, endpoint, "address that the gang printed as `control:`", "HOST:PORT")
    token: str | None = option(
        None, str, "the gang's token (default: the one stored in MOE_EP_CACHE_DIR on the gang's machine)", "TEXT"
    )

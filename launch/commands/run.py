"""moe-ep run: the MoE layers of a checkpoint, divided over a gang of workers, driven, measured and verified."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from moe_ep.launch.gang import Gang, num_local_gpus, set_up_logging
from moe_ep.launch.options import OptionError, Parser, add_flags, from_args
from moe_ep.launch.rank_env import RankEnv, resolve_rank_env
from moe_ep.launch.report import RankReport, RunReport
from moe_ep.launch.run_config import RunConfig

DEFAULT_WORKERS = 4


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser(
        "run",
        help="run the MoE layers of a checkpoint on a gang of workers",
        description=(
            "Divides the experts of a checkpoint over a gang of workers, drives batches of tokens through every MoE "
            "layer, and prints placement, load, times and the error against a plain reference."
        ),
    )
    add_flags(parser, RunConfig)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    config = from_args(RunConfig, args)
    set_up_logging()
    _check_together(config)
    config = replace(config, launcher=_launcher(config))
    gang = _make_gang(config)
    try:
        if len(config.tokens_per_rank) not in (1, gang.world_size):
            raise OptionError(
                f"--tokens-per-rank has {len(config.tokens_per_rank)} numbers; it must be one number, or one for each "
                f"of the {gang.world_size} workers"
            )
        if config.model is None:
            from moe_ep.checkpoint.demo import demo_checkpoint

            # Here for its progress bar; workers of other nodes make their own.
            demo_checkpoint()
        results = gang.run(_work, config)
    finally:
        gang.close()
    if not gang.is_driver:
        return 0
    return _tell(config, RunReport(config, args.shown, results))


def _work(rank_env: RankEnv, config: RunConfig) -> RankReport:
    """The worker's part; what it needs is imported there, so that the driver starts without torch."""
    from moe_ep.launch.worker import run_worker

    return run_worker(rank_env, config)


def _check_together(config: RunConfig) -> None:
    """Options that contradict each other, found before anything starts."""
    if config.address and config.launcher not in (None, "ray"):
        raise OptionError(f"--address is {config.address!r} with --launcher {config.launcher}; only ray takes it")
    if config.nnodes > 1 and config.launcher != "torchrun":
        raise OptionError(f"--nnodes is {config.nnodes}; more than one is for --launcher torchrun, Ray finds its nodes")
    if config.nnodes > 1 and not config.rdzv_endpoint:
        raise OptionError(f"--nnodes is {config.nnodes} without --rdzv-endpoint; give the HOST:PORT where they meet")
    if config.ep_size and config.ep_size % config.nnodes:
        raise OptionError(f"--ep-size is {config.ep_size}; it must be a multiple of --nnodes ({config.nnodes})")
    if config.quantize != "none" and config.model is None:
        raise OptionError(f"--quantize is {config.quantize!r}; the demo checkpoint is quantized already, pass --model")
    if config.quantize != "none":
        from moe_ep.checkpoint.directory import read_json

        found = read_json(config.model / "config.json").get("quantization_config")  # type: ignore[operator]
        if found is not None:
            raise OptionError(
                f"--quantize is {config.quantize!r} and the experts of --model are quantized already; leave it out"
            )


def _launcher(config: RunConfig) -> str:
    if config.launcher is not None:
        return config.launcher
    return "torchrun" if resolve_rank_env().source in ("torchrun", "slurm") else "ray"


def _make_gang(config: RunConfig) -> Gang:
    num_gpus = num_local_gpus()
    device = config.device if config.device != "auto" else "cuda" if num_gpus else "cpu"
    local_default = num_gpus if device == "cuda" and num_gpus else DEFAULT_WORKERS
    if config.launcher == "local":
        from moe_ep.launch.local_gang import LocalGang

        return LocalGang(config.ep_size or local_default, device)
    if config.launcher == "torchrun":
        from moe_ep.launch.torchrun_gang import TorchrunGang

        gang = TorchrunGang(
            config.ep_size // config.nnodes if config.ep_size else local_default,
            device,
            num_nodes=config.nnodes,
            rdzv_endpoint=config.rdzv_endpoint,
        )
        if config.ep_size not in (None, gang.world_size):
            raise OptionError(
                f"--ep-size is {config.ep_size} and torchrun started {gang.world_size} ranks; leave it out or start as "
                f"many"
            )
        return gang
    from moe_ep.launch.ray_gang import RayGang

    return RayGang(config.ep_size, config.device, config.address, default_world_size=DEFAULT_WORKERS)


def _tell(config: RunConfig, report: RunReport) -> int:
    print("\n".join(report.lines()), flush=True)
    if config.json is not None:
        config.json.write_text("".join(f"{line}\n" for line in report.json_lines()))
    if config.verify and not report.verified:
        print(f"moe-ep run: {report.verification_line()}", file=sys.stderr)
        return 1
    return 0

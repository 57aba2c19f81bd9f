"""moe-ep generate: generates text with a model whose experts are sharded over a gang of workers."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

from moe_ep.errors import missing_extra
from moe_ep.launch.cli.gang_options import start_gang
from moe_ep.launch.cli.generate_config import GenerateConfig, PromptLine
from moe_ep.launch.cli.generate_report import CompletionLines, Finished, GenerationReport, RankGeneration, Recorded
from moe_ep.launch.cli.options import Parser, add_command, check_apart, from_args, refusing
from moe_ep.launch.gangs.gang import set_up_logging
from moe_ep.launch.gangs.local_gang import preload
from moe_ep.launch.gangs.rank_env import RankEnv


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    add_command(
        subparsers, "generate", main, GenerateConfig, "generate text with experts sharded over workers",
        "Shards the experts of a checkpoint over a gang of workers, spreads the prompts over them, and continues each "
        "one. Prints a JSON line for each prompt and a summary; timings go to stderr.",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    config = from_args(GenerateConfig, args)
    set_up_logging()
    if importlib.util.find_spec("transformers") is None:
        raise missing_extra("transformers", "hf", "generating text")
    config.check()
    written = {"--output": config.output, "--return-routed-experts": config.return_routed_experts}
    check_apart(written, {"--prompts": config.prompts})
    with refusing("--prompts: "):
        prompts, fields = config.read_prompts()
    finished = Finished()
    if config.resume and config.output is not None:
        with refusing(f"--output is {str(config.output)!r} and --resume is given; "):
            finished = Finished.read(config.output, fields)
    if finished.lines == len(prompts):  # on the node that has the output
        print(f"{config.output} has all {len(prompts)} prompts", file=sys.stderr)
        return 1 if finished.failures else 0
    # Keeps transformers from asking the hub for kernels of some families. The hub's library reads it on import.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    preload("moe_ep.launch.workers.generate_worker")
    config, gang = start_gang(config)
    lines = CompletionLines(fields, config.output, finished)
    completions: dict[int, dict[str, Any]] = {}
    recorded: dict[int, Recorded] = {}

    def take(completion: dict[str, Any]) -> None:
        if (routing := completion.pop("routing", None)) is not None:
            recorded[completion["index"]] = routing
        completions.setdefault(completion["index"], completion)
        lines.take(completion)

    try:
        with gang:
            results, recoveries = config.run_in(gang, work, prompts, finished.lines, on_item=take)
    except BaseException:
        lines.close()
        if lines.num_written:
            print(
                f"{config.output} has the first {lines.num_written} of {len(prompts)} prompts; run the same command "
                f"with --resume to do the rest",
                file=sys.stderr,
            )
        raise
    if not gang.is_driver:
        return 0
    report = GenerationReport(config, args.shown, results, recoveries, list(completions.values()))
    with contextlib.ExitStack() as files:  # each is written even if another fails
        if config.return_routed_experts is not None:
            files.callback(report.routing(recorded).save, config.return_routed_experts)
        for rank in report.ranks:
            for line in (*rank.refused, *rank.completions):
                lines.take(line)
        lines.end(report.summary())
        print("\n".join(report.lines()), file=sys.stderr, flush=True)
    return 1 if report.refused or report.failed or finished.failures else 0


def work(
    rank_env: RankEnv, config: GenerateConfig, prompts: Sequence[PromptLine], first: int, membership: Any = None
) -> RankGeneration:
    """The worker's part. It imports what it needs, so that the driver starts without torch."""
    from moe_ep.launch.workers.generate_worker import run_generate

    return run_generate(rank_env, config, prompts, first, membership)

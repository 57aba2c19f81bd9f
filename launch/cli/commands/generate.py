"""moe-ep generate: text in, text out, over a gang of workers that share a model's experts."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any

from moe_ep.errors import missing_extra
from moe_ep.launch.cli.generate_config import GenerateConfig, Prompt, prompt_of, read_prompts
from moe_ep.launch.cli.generate_lines import CompletionLines
from moe_ep.launch.cli.generate_report import GenerationReport, RankGeneration
from moe_ep.launch.cli.option_values import check_apart, check_backends
from moe_ep.launch.cli.options import OptionError, Parser, add_flags, from_args
from moe_ep.launch.gangs.gang import set_up_logging
from moe_ep.launch.gangs.gang_choice import start_gang
from moe_ep.launch.gangs.rank_env import RankEnv


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="generate text, the experts divided over workers",
        description=(
            "Divides the experts of a checkpoint over a gang of workers, spreads the prompts over them, and continues "
            "each one. Prints a JSON line for each prompt and a summary; timings go to stderr."
        ),
    )
    add_flags(parser, GenerateConfig)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    config = from_args(GenerateConfig, args)
    set_up_logging()
    if importlib.util.find_spec("transformers") is None:
        raise missing_extra("transformers", "hf", "generating text")
    config.check_quantize()
    config.check_sampling()
    check_apart({"--output": config.output}, {"--prompts": config.prompts})
    prompts = _prompts(config)
    config, gang = start_gang(config, lambda *found: check_backends([config.backend], *found))
    lines = CompletionLines(prompts, config.output)
    try:
        if config.model is None:
            from moe_ep.checkpoint.demo import demo_checkpoint

            # Here for its progress bar; workers of other nodes make their own.
            demo_checkpoint()
        results = gang.run(_work, config, [prompt_of(line, config.chat) for line in prompts], on_item=lines.take)
    except BaseException:
        lines.close()
        if lines.num_written:
            print(f"{config.output} has the first {lines.num_written} of {len(prompts)} prompts", file=sys.stderr)
        raise
    finally:
        gang.close()
    if not gang.is_driver:
        return 0
    report = GenerationReport(config, args.shown, results)
    _tell(lines, report)
    return 1 if report.refused else 0


def _work(rank_env: RankEnv, config: GenerateConfig, prompts: list[Prompt]) -> RankGeneration:
    """The worker's part; what it needs is imported there, so that the driver starts without torch."""
    from moe_ep.launch.workers.generate_worker import run_generate

    return run_generate(rank_env, config, prompts)


def _prompts(config: GenerateConfig) -> list[dict[str, Any]]:
    if config.prompts is None:
        raise OptionError("--prompts is missing; give a file with a prompt a line")
    if config.num_redundant_experts and not config.eplb:
        raise OptionError(f"--num-redundant-experts is {config.num_redundant_experts} without --eplb; add it")
    try:
        return read_prompts(config.prompts)
    except UnicodeDecodeError:
        raise OptionError(f"--prompts is {str(config.prompts)!r}; it must be text in UTF-8") from None
    except ValueError as error:
        raise OptionError(f"--prompts: {error}") from None


def _tell(lines: CompletionLines, report: GenerationReport) -> None:
    for rank in report.ranks:
        for told in (*rank.refused, *rank.completions):
            lines.take(told)
    lines.end(report.summary())
    print("\n".join(report.lines()), file=sys.stderr, flush=True)

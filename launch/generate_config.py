"""What `moe-ep generate` can be told, and the prompts it reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_ep.launch.model_options import ModelConfig
from moe_ep.launch.option_values import output_file
from moe_ep.launch.options import at_least, option


def _prompts_file(raw: str) -> Path:
    path = Path(raw).expanduser()
    if not path.is_file():
        raise ValueError("it must be a file with a prompt a line, and there is no such file")
    return path.absolute()


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ModelConfig):
    """The settings of one generation; the flags of `moe-ep generate` are these fields."""

    prompts: Path | None = field(
        default=None,
        metadata=option(
            _prompts_file,
            'prompts, one on each line (required); in a .jsonl file, a string or an object with "prompt"',
            "FILE",
        ),
    )
    output: Path | None = field(
        default=None,
        metadata=option(output_file, "write the JSON lines here instead of printing them", "FILE"),
    )
    max_new_tokens: int = field(
        default=64, metadata=option(at_least(1), "continue each prompt by at most this many tokens")
    )
    batch_size: int = field(default=8, metadata=option(at_least(1), "sequences that each worker decodes at a time"))
    eplb: bool = field(default=False, metadata=option(None, "balance the experts over the workers while they decode"))
    num_redundant_experts: int = field(
        default=0, metadata=option(at_least(0), "extra expert slots, over all workers, for replicas; with --eplb", "N")
    )
    graphs: bool = field(
        default=True, metadata=option(None, "decode in CUDA graphs, where the backend and the experts allow it")
    )


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of a file, each an object with "prompt"; blank lines are none.

    Raises:
        ValueError: a line of a .jsonl file that holds no prompt, or a file without any; the message names it.
    """
    # Not splitlines: what it also takes for ends of lines may stand within a prompt.
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ValueError(f"{path}: expected a prompt a line, found none")
    if path.suffix != ".jsonl":
        return [{"prompt": line} for _, line in numbered]
    prompts = []
    for number, line in numbered:
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, str):
            value = {"prompt": value}
        if not isinstance(value, dict) or not isinstance(value.get("prompt"), str) or not value["prompt"]:
            raise ValueError(
                f'{path}: line {number}: expected a string or an object with "prompt", found {line[:80]!r}'
            )
        prompts.append(value)
    return prompts

"""What `moe-ep generate` can be told, and the prompts it reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_ep.files import parse_json
from moe_ep.launch.cli.model_options import ModelConfig
from moe_ep.launch.cli.option_values import input_file, output_file
from moe_ep.launch.cli.options import OptionError, at_least, number, option

# A text, or the messages of a conversation.
Prompt = str | list[dict[str, Any]]


def _prompts_file(raw: str) -> Path:
    return input_file(raw, "it must be a file with a prompt a line").absolute()


def _some_text(raw: str) -> str:
    # Bytes that are no UTF-8 come as halves of surrogate pairs.
    if not raw or any("\ud800" <= letter <= "\udfff" for letter in raw):
        raise ValueError("it must be some text, in UTF-8")
    return raw


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ModelConfig):
    """The settings of one generation; the flags of `moe-ep generate` are these fields."""

    prompts: Path | None = field(
        default=None,
        metadata=option(
            _prompts_file,
            'prompts, one on each line (required); in a .jsonl file, a string or an object with "prompt" or "messages"',
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
    stop: str | None = field(
        default=None, metadata=option(_some_text, "end a text before this, wherever it comes up", "TEXT")
    )
    chat: bool = field(
        default=False, metadata=option(None, "take each prompt as a message to the model, by its chat template")
    )
    temperature: float = field(
        default=0.0,
        metadata=option(
            number("a number of at least 0", lambda value: value >= 0),
            "draw tokens at this temperature; at 0, take the likeliest",
        ),
    )
    top_k: int = field(
        default=0, metadata=option(at_least(0), "draw among this many of the likeliest tokens; at 0, among all")
    )
    top_p: float = field(
        default=1.0,
        metadata=option(
            number("above 0 and at most 1", lambda value: 0 < value <= 1),
            "draw among the likeliest tokens that together have this probability",
        ),
    )
    seed: int = field(default=0, metadata=option(at_least(0), "seed of the drawn tokens"))
    batch_size: int = field(default=8, metadata=option(at_least(1), "sequences that each worker decodes at a time"))
    prefill_tokens: int = field(
        default=4096,
        metadata=option(
            at_least(1),
            "a worker reads at most so many tokens of prompts in a step, padding included; a longer prompt alone",
        ),
    )
    eplb: bool = field(default=False, metadata=option(None, "balance the experts over the workers while they decode"))
    num_redundant_experts: int = field(
        default=0, metadata=option(at_least(0), "extra expert slots, over all workers, for replicas; with --eplb", "N")
    )
    graphs: bool = field(
        default=True, metadata=option(None, "decode in CUDA graphs, where the backend and the experts allow it")
    )

    def check_sampling(self) -> None:
        """Raises OptionError for settings of drawn tokens where none are drawn."""
        for flag, value, default in (("--top-k", self.top_k, 0), ("--top-p", self.top_p, 1.0)):
            if self.temperature == 0 and value != default:
                raise OptionError(f"{flag} is {value} and --temperature is 0, where nothing is drawn; raise it")


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of a file, each an object with "prompt" or "messages"; blank lines are none.

    Raises:
        ValueError: a line of a .jsonl file that holds no prompt, or a file without any; the message names it. A .json
            file, whose lines are parts of one value.
    """
    if path.suffix == ".json":
        raise ValueError(f"{path}: expected a prompt a line, found one JSON value; write each on a line of a .jsonl")
    # Not splitlines: what it also takes for ends of lines may stand within a prompt.
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    numbered = [(at, line) for at, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ValueError(f"{path}: expected a prompt a line, found none")
    if path.suffix != ".jsonl":
        return [{"prompt": line} for _, line in numbered]
    prompts = []
    for at, line in numbered:
        try:
            value = parse_json(line)
            json.dumps(value, allow_nan=False)  # it comes back in the output
        except ValueError:
            value = None
        if isinstance(value, str):
            value = {"prompt": value}
        if not _holds_a_prompt(value):
            raise ValueError(
                f'{path}: line {at}: expected a string or an object with "prompt" (a text) or "messages" (each with '
                f"role and content), and finite numbers, found {line[:80]!r}"
            )
        prompts.append(value)
    return prompts


def prompt_of(line: dict[str, Any], chat: bool) -> Prompt:
    """What the model is given for an object of `read_prompts`."""
    if "prompt" not in line:
        return line["messages"]
    return [{"role": "user", "content": line["prompt"]}] if chat else line["prompt"]


def _holds_a_prompt(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if "prompt" in value:
        return isinstance(value["prompt"], str) and bool(value["prompt"])
    messages = value.get("messages")
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)
        and all("content" in message for message in messages)
    )

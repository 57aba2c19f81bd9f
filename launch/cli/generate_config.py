"""The options of `moe-ep generate`, and the prompts that it reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_ep.env import at_least, number, one_of
from moe_ep.files import parse_json
from moe_ep.generation.conversation import TEMPLATE_FIELDS, Conversation
from moe_ep.launch.cli.gang_options import ElasticOptions
from moe_ep.launch.cli.options import OptionError, flag, input_file, option, output_file

_STDIN = Path("-")
# Settings of a request that an option gives for all prompts of a command.
_OPTIONS = {
    **{name: flag(name) for name in ("temperature", "top_p", "top_k", "seed", "stop")},
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), "--max-new-tokens"),
}
# The values without effect of settings, which are accepted in a prompt's line: those of chats and completions of
# OpenAI, and those that servers add.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,), "top_k": (-1, 0), "stop": ([],), "n": (1,), "min_p": (0,), "frequency_penalty": (0,),
    "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "logprobs": (False,),
    "top_logprobs": (0,), "response_format": ({"type": "text"},), "tool_choice": ("auto",), "functions": ([],),
    "function_call": ("auto",), "modalities": (["text"],), "verbosity": ("medium",), "best_of": (1,),
    "echo": (False,), "suffix": ("",), "stop_token_ids": ([],), "bad_words": ([],), "ignore_eos": (False,),
    "min_tokens": (0,), "structured_outputs": ({},),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
}  # fmt: skip


@dataclass(frozen=True)
class PromptLine:
    """One prompt with its place, for messages; or None and the error in its line."""

    index: int
    where: str
    prompt: str | Conversation | None
    error: str = ""


def _prompts_file(raw: str) -> Path:
    return (
        _STDIN if raw == "-" else input_file(raw, "it must be a file with a prompt a line, or - for stdin").absolute()
    )


def _some_text(raw: str) -> str:
    # Python decodes bytes that are not UTF-8 to lone surrogates.
    if not raw or any("\ud800" <= letter <= "\udfff" for letter in raw):
        raise ValueError("it must be some text, in UTF-8")
    return raw


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ElasticOptions):
    """The settings of one generation; the flags of `moe-ep generate` are these fields."""

    prompts: Path | None = option(
        None,
        _prompts_file,
        "prompts, one on each line, - for stdin (this or --prompt is required); in a .jsonl file, a string or an "
        'object with "prompt" or "messages"',
        "FILE",
    )
    prompt: tuple[str, ...] = option((), _some_text, "a prompt; may be repeated", "TEXT", repeats=True)
    output: Path | None = option(None, output_file, "write the JSON lines here instead of printing them", "FILE")
    resume: bool = option(False, None, "continue an interrupted run after the lines that --output already has")
    max_new_tokens: int = option(64, at_least(1), "continue each prompt by at most this many tokens")
    stop: str | None = option(None, _some_text, "end each text before this string", "TEXT")
    chat: bool = option(False, None, "treat each prompt as a user message, with the model's chat template")
    temperature: float = option(
        0.0,
        number("a number of at least 0", lambda value: value >= 0),
        "sampling temperature; 0 takes the likeliest token",
    )
    top_k: int = option(0, at_least(0), "sample from this many of the likeliest tokens; 0 is all")
    top_p: float = option(
        1.0,
        number("above 0 and at most 1", lambda value: 0 < value <= 1),
        "sample from the likeliest tokens that together have this probability",
    )
    seed: int = option(0, at_least(0), "seed of the sampling")
    logprobs: int | None = option(
        None, at_least(0), "report the log-probability of each token, and those of this many likeliest tokens", "K"
    )
    return_routed_experts: Path | None = option(
        None,
        output_file,
        "write the experts that every token chose in every layer (moe_ep.read_routed_experts)",
        "FILE",
    )
    return_routed_weights: bool = option(False, None, "write the router's weights too; with --return-routed-experts")
    batch_invariant: bool = option(
        False, None, "make each text independent, bit for bit, of the other prompts and of the number of workers"
    )
    batch_size: int = option(8, at_least(1), "sequences that each worker decodes at a time")
    prefill_tokens: int = option(
        4096,
        at_least(1),
        "most prompt tokens, padding included, that a worker reads in a step; a longer prompt is read alone",
    )
    eplb: bool = option(False, None, "balance the experts over the workers while they decode")
    num_redundant_experts: int = option(
        0, at_least(0), "extra expert slots, over all workers, for replicas; with --eplb or --elastic", "N"
    )
    graphs: bool = option(True, None, "run passes in CUDA graphs, if the backend and the experts allow it")
    prefill_graphs: str = option(
        "off",
        one_of("auto", "on", "off"),
        "read prompts in CUDA graphs of a few sizes, to which passes are padded: auto (if possible), on (pad even if "
        "nothing can be captured) or off",
    )

    def check(self) -> None:
        """Raises OptionError for options that contradict each other."""
        if (self.prompts is None) == (not self.prompt):
            problem = "and --prompt are both given" if self.prompt else "is missing"
            raise OptionError(f"--prompts {problem}; give a file with a prompt a line, or --prompt TEXT")
        if self.resume and self.output is None:
            raise OptionError("--resume is given without --output; name the file that the interrupted run wrote")
        if self.return_routed_weights and self.return_routed_experts is None:
            raise OptionError("--return-routed-weights is given without --return-routed-experts; name the file")
        if self.return_routed_experts is not None and self.resume:
            raise OptionError(
                "--return-routed-experts is given with --resume, and the file would lack the prompts of the "
                "interrupted run; leave one out"
            )
        self.check_elastic()
        if self.num_redundant_experts and not (self.eplb or self.elastic):
            raise OptionError(
                f"--num-redundant-experts is {self.num_redundant_experts} without --eplb or --elastic; add one"
            )
        self.check_quantize()
        for name, value, default in (("--top-k", self.top_k, 0), ("--top-p", self.top_p, 1.0)):
            if self.temperature == 0 and value != default:
                raise OptionError(f"{name} is {value} and --temperature is 0, where nothing is drawn; raise it")

    def read_prompts(self) -> tuple[list[PromptLine], list[dict[str, Any]]]:
        """Reads the prompts, and the fields of their lines, which the output repeats; ValueError, that of the first
        line, if no prompt is valid."""
        found: Sequence[tuple[str, dict[str, Any] | bytes]]
        are_json = False
        if self.prompts is None:
            found = [("--prompt", {"prompt": prompt}) for prompt in self.prompt]
        elif self.prompts == _STDIN:
            if sys.stdin is None:
                raise ValueError("stdin is closed; name a file, or give --prompt")
            found = raw_lines = _lines_of("stdin", sys.stdin.buffer.read())
            are_json = raw_lines[0][1].lstrip()[:1] in (b"{", b'"')
        else:
            found = _lines_of(str(self.prompts), self.prompts.read_bytes())
            are_json = self.prompts.suffix == ".jsonl"
        lines, fields = [], []
        for index, (where, raw) in enumerate(found):
            line: dict[str, Any] = {}
            try:
                line = raw if isinstance(raw, dict) else _object_of(raw, is_json=are_json)
                lines.append(PromptLine(index, where, self.prompt_of(line)))
            except ValueError as error:
                lines.append(PromptLine(index, where, None, f"{where}: {error}"))
            fields.append(line)
        if all(line.prompt is None for line in lines):
            raise ValueError(lines[0].error)
        return lines, fields

    def prompt_of(self, line: dict[str, Any]) -> str | Conversation:
        """Converts a line's object to a prompt; ValueError if it holds none, or settings that cannot be applied."""
        if "prompt" in line:
            if line.get("messages") is not None:
                raise ValueError("prompt and messages are both given; leave one out")
            if not isinstance(line["prompt"], str) or not line["prompt"]:
                raise ValueError(f"prompt is {_shown(line['prompt'])}; it must be a text")
            if self.chat:
                line = {**line, "messages": [{"role": "user", "content": line["prompt"]}]}
            elif given := [name for name in TEMPLATE_FIELDS if line.get(name) is not None]:
                raise ValueError(f"{given[0]} is for conversations; give messages, or --chat")
        elif "messages" not in line:
            raise ValueError(
                f'expected "prompt" (a text) or "messages" (each with role and content), found {_shown(line)}'
            )
        applied = {
            "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "seed": self.seed,
            "stop": self.stop, "tool_choice": None if line.get("tools") else "none",
            **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), self.max_new_tokens),
        }  # fmt: skip
        for name in _OPTIONS | _NEUTRAL:
            value = line.get(name)
            if value is not None and value not in (*_NEUTRAL.get(name, ()), applied.get(name)):
                way_out = f"give {_OPTIONS[name]} for all prompts" if name in _OPTIONS else "leave it out"
                raise ValueError(f"{name} is {_shown(value)}, which is not applied to one prompt; {way_out}")
        if "messages" not in line:
            return str(line["prompt"])
        return replace(Conversation.from_line(line), is_text="prompt" in line)


def _lines_of(name: str, data: bytes) -> list[tuple[str, bytes]]:
    """The lines that are not blank, each with its position."""
    if name.endswith(".json"):
        raise ValueError(f"{name}: expected a prompt a line, found one JSON value; write each on a line of a .jsonl")
    # Not splitlines, which also splits at characters that a prompt may contain.
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    numbered = [(f"line {at}", line) for at, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ValueError(f"{name}: expected a prompt a line, found none")
    return numbered


def _object_of(raw: bytes, *, is_json: bool) -> dict[str, Any]:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise ValueError("it must be text in UTF-8") from None
    if not is_json:
        return {"prompt": text.removesuffix("\r")}
    try:
        value = parse_json(text)
        json.dumps(value, allow_nan=False)  # the output repeats it
    except ValueError:
        raise ValueError(f"expected JSON with finite numbers, found {_shown(text)}") from None
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise ValueError(f"expected a string or an object, found {_shown(text)}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

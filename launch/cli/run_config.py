"""What `moe-ep run` can be told."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from moe_ep.files import parse_json
from moe_ep.launch.cli.eplb_options import EplbOptions
from moe_ep.launch.cli.model_options import ModelConfig
from moe_ep.launch.cli.option_values import host, input_file, new_folder, output_file, port
from moe_ep.launch.cli.options import at_least, option, whole
from moe_ep.launch.cli.outputs import ADDS_LINES


def _text_file(raw: str) -> Path:
    path = input_file(raw, "it must be a file with text, or JSON with strings")
    try:
        if not any(text.strip() for text in read_texts(path)):
            raise ValueError("it must be a file with text, and there is none in it")
    except (OSError, UnicodeDecodeError):
        raise ValueError("it must be a file with text in UTF-8 that can be read") from None
    return path.absolute()


def _token_counts(raw: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", raw) or not any(counts := tuple(map(whole, raw.split(",")))):
        raise ValueError("it must be a whole number of at least 1, or one number a rank as in 64,0,17,32")
    return counts


@dataclass(frozen=True, kw_only=True)
class RunConfig(ModelConfig, EplbOptions):
    """The settings of one run; the flags of `moe-ep run` are these fields."""

    tokens_per_rank: tuple[int, ...] = field(
        default=(64,),
        metadata=option(
            _token_counts, "tokens of each worker in a step, or one number for each worker: 64,0,17,32", "T"
        ),
    )
    steps: int = field(default=8, metadata=option(at_least(1), "steps to measure"))
    text: Path | None = field(
        default=None,
        metadata=option(
            _text_file,
            "take the tokens from this text (plain, or JSON with strings); without it they are drawn",
            "FILE",
        ),
    )
    graphs: bool | None = field(
        default=None,
        metadata=option(
            None, "run the measured steps as a CUDA graph (default: where the backend and the experts can be captured)"
        ),
    )
    verify: bool = field(default=True, metadata=option(None, "compare every layer with the plain reference"))
    seed: int = field(default=0, metadata=option(at_least(0), "seed of the drawn tokens"))
    metrics_port: int | None = field(
        default=None,
        metadata=option(port, "serve Prometheus metrics during the steps, each rank at PORT + its local rank", "PORT"),
    )
    metrics_host: str = field(
        default="127.0.0.1", metadata=option(host, "address to serve metrics at; 0.0.0.0 for all", "HOST")
    )
    trace: Path | None = field(
        default=None, metadata=option(new_folder, "write a Perfetto trace of each rank's steps into this folder", "DIR")
    )
    json: Path | None = field(
        default=None,
        metadata=option(
            output_file, f"write JSON lines: one for each layer and step, and a summary{ADDS_LINES}", "FILE"
        ),
    )

    def num_tokens(self, rank: int) -> int:
        """Tokens of one rank in a step."""
        return self.tokens_per_rank[rank if len(self.tokens_per_rank) > 1 else 0]


def read_texts(path: Path) -> list[str]:
    """The strings of a JSON file, the lists of its top level taking turns, or a plain file as one string."""
    content = path.read_text(encoding="utf-8")
    try:
        document = parse_json(content)
    except ValueError:
        return [content]
    branches = list(document.values()) if isinstance(document, dict) else [document]
    lists = [_strings(branch) for branch in branches]
    longest = max(map(len, lists), default=0)
    return [strings[i] for i in range(longest) for strings in lists if i < len(strings)]


def _strings(node: object) -> list[str]:
    if isinstance(node, str):
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [text for child in children for text in _strings(child)]

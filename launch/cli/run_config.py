"""The options of `moe-ep run`."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from moe_ep.env import at_least, number, one_of, one_of_these, whole
from moe_ep.errors import ConfigError, EplbError, missing_extra
from moe_ep.files import parse_json
from moe_ep.launch.cli.gang_options import ElasticOptions
from moe_ep.launch.cli.options import (
    OptionError,
    check_apart,
    check_needs,
    flag,
    host,
    input_file,
    new_folder,
    option,
    output_file,
    port,
)
from moe_ep.launch.cli.outputs import ADDS_LINES
from moe_ep.registry import EPLB_POLICIES

if TYPE_CHECKING:
    from moe_ep.eplb.placement_file import PlacementFile


def _routing(raw: str) -> str:
    """The routing as given, with the path of a recorded one made absolute."""
    if raw == "uniform" or re.fullmatch(r"zipf:\d+(\.\d+)?", raw):
        return raw
    if raw.startswith("recorded:"):
        return f"recorded:{_file(raw.removeprefix('recorded:'))}"
    raise ValueError("it must be uniform, zipf:S with a number such as zipf:0.8, or recorded:FILE")


def _file(raw: str) -> Path:
    return input_file(raw, "it must name a file").absolute()


# Options that have an effect without --eplb too.
_WITHOUT_EPLB = {"eplb", "routing", "record_routing", "record_routed_weights"}
_share = number("a number from 0 to 1", lambda share: 0 <= share <= 1)


@dataclass(frozen=True, kw_only=True)
class EplbOptions:
    """Load balancing of `moe-ep run`, and the routing that drives it."""

    options_title: ClassVar[str] = "routing and load balancing"

    eplb: bool = option(
        False, None, "run --steps steps, move experts to balance the load, then run as many steps again"
    )
    num_redundant_experts: int | None = option(
        None,
        at_least(0),
        "extra expert slots, over all workers, for replicas (default: those of --load-placement, or one for each "
        "worker, made even)",
        "N",
    )
    eplb_interval: int | None = option(
        None, at_least(1), "steps between further plans (default: there is one plan only)", "N"
    )
    eplb_policy: str = option("incremental", one_of_these(lambda: tuple(EPLB_POLICIES)), "incremental or deepseek")
    eplb_objective: str = option(
        "tokens", one_of("tokens", "active_experts", "auto"), "what a plan levels: tokens, active_experts or auto"
    )
    eplb_replicas: str = option(
        "auto",
        one_of("auto", "levelled", "one"),
        "the replica that a token takes: levelled over all, one for each expert, or auto (one for small batches)",
    )
    eplb_threshold: float = option(0.97, _share, "make no plan while balancedness is at least this", "SHARE")
    eplb_synchronous: bool = option(False, None, "move experts between two steps instead of in the background")
    load_placement: Path | None = option(
        None, _file, "start from this placement, as --save-placement writes it", "FILE"
    )
    save_placement: Path | None = option(None, output_file, "write the placement at the end of the run", "FILE")
    routing: str | None = option(
        None, _routing, "replace the routers: uniform, zipf:S, or recorded:FILE with a file of --record-routing", "HOW"
    )
    record_routing: Path | None = option(
        None, output_file, "write the experts that every token chose (moe_ep.read_routed_experts)", "FILE"
    )
    record_routed_weights: bool = option(False, None, "write the router's weights too; with --record-routing")

    def check_eplb(self) -> None:
        """Raises OptionError for an option that has no effect without another one."""
        if self.record_routed_weights and self.record_routing is None:
            raise OptionError("--record-routed-weights is given without --record-routing; name a file with that")
        if self.record_routed_weights and self.record_routing is not None and self.record_routing.suffix == ".npz":
            raise OptionError(
                f"--record-routed-weights is given with --record-routing {self.record_routing}; name a file that is no "
                f".npz"
            )
        needing = {item.name for item in fields(EplbOptions)} - _WITHOUT_EPLB
        check_needs(self, "eplb", sorted(needing))

    def placement(self) -> PlacementFile | None:
        """Reads the file of --load-placement; ConfigError if it is not a placement."""
        if self.load_placement is None:
            return None
        from moe_ep.eplb.placement_file import PlacementFile

        try:
            return PlacementFile.load(self.load_placement)
        except EplbError as error:
            raise ConfigError(str(error)) from None

    def redundant_experts(self, num_experts: int, ep_size: int) -> int | None:
        """Physical experts beyond `num_experts`, None without --eplb; ConfigError if --load-placement names none."""
        if not self.eplb:
            return None
        if self.num_redundant_experts is not None:
            return self.num_redundant_experts
        placement = self.placement()
        if placement is not None and (placement.ep_size, placement.num_experts) == (ep_size, num_experts):
            return placement.physical_to_logical.shape[1] - num_experts
        return ep_size + -num_experts % ep_size


# A step on CPUs makes megabytes of trace, and several times as much memory while it is written.
_MOST_TRACED_STEPS = 128
# Options that --elastic refuses: why, and what to do instead.
_NOT_ELASTIC = {
    "load_placement": "its workers have spare slots, which no placement file names; let --eplb plan anew",
    "record_routing": "what a lost worker has recorded would be lost; record with moe-ep generate --elastic "
    "--return-routed-experts",
}


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
class RunConfig(ElasticOptions, EplbOptions):
    """The settings of one run; the flags of `moe-ep run` are these fields."""

    tokens_per_rank: tuple[int, ...] = option(
        (64,), _token_counts, "tokens of each worker in a step, or one number for each worker: 64,0,17,32", "T"
    )
    steps: int = option(8, at_least(1), "steps to measure")
    text: Path | None = option(
        None,
        _text_file,
        "take the tokens from this text, plain or JSON with strings (default: random tokens)",
        "FILE",
    )
    graphs: bool | None = option(
        None,
        None,
        "run the measured steps as a CUDA graph (default: if the backend and the experts can be captured)",
    )
    verify: bool = option(True, None, "compare every layer with the plain reference")
    seed: int = option(0, at_least(0), "seed of the random tokens")
    metrics_port: int | None = option(
        None, port, "serve Prometheus metrics during the steps, each rank at PORT + its local rank", "PORT"
    )
    metrics_host: str = option("127.0.0.1", host, "address to serve metrics at; 0.0.0.0 for all", "HOST")
    trace: Path | None = option(None, new_folder, "write a Perfetto trace of each rank's steps into this folder", "DIR")
    json: Path | None = option(
        None, output_file, f"write JSON lines: one for each layer and step, and a summary{ADDS_LINES}", "FILE"
    )

    def check(self) -> None:
        """Raises OptionError for options that contradict each other."""
        if self.graphs and self.trace is not None:
            raise OptionError(
                "--trace shows what the host does between layers, and with --graphs it does nothing; leave one out"
            )
        if self.trace is not None and self.steps > _MOST_TRACED_STEPS:
            raise OptionError(
                f"--steps is {self.steps} with --trace, which keeps every operation of every step in memory; pass at "
                f"most {_MOST_TRACED_STEPS}, or leave --trace out"
            )
        if self.text is not None and self.model is not None and not (self.model / "tokenizer.json").is_file():
            raise OptionError(f"--text needs a tokenizer and {self.model} has no tokenizer.json; leave --text out")
        if self.metrics_port is None and self.metrics_host != RunConfig.metrics_host:
            raise OptionError(
                f"--metrics-host is {self.metrics_host!r} without --metrics-port, and no metrics are served; add "
                f"--metrics-port or leave it out"
            )
        if self.metrics_port is not None and importlib.util.find_spec("prometheus_client") is None:
            raise missing_extra("prometheus-client", "metrics", "a metrics endpoint")
        self.check_quantize()
        results = {"--json": self.json, "--record-routing": self.record_routing}
        recorded = (self.routing or "").removeprefix("recorded:")
        check_apart(results | {"--save-placement": self.save_placement}, {"--text": self.text, "--routing": recorded})
        check_apart(results, {"--load-placement": self.load_placement})  # --save-placement may replace it
        self.check_eplb()
        self.check_elastic()
        for name, why in _NOT_ELASTIC.items():
            if self.elastic and getattr(self, name):
                raise OptionError(f"{flag(name)} is given with --elastic, and {why}; or leave --elastic out")

    def check_fits(self, world_size: int | None, device: str | None) -> None:
        if self.graphs and device == "cpu":
            raise OptionError("--graphs was given and the workers run on CPUs; CUDA graphs need GPUs, leave it out")
        super().check_fits(world_size, device)
        if world_size is None:
            return
        if len(self.tokens_per_rank) not in (1, world_size):
            raise OptionError(
                f"--tokens-per-rank has {len(self.tokens_per_rank)} numbers; it must be one number, or one for each "
                f"of the {world_size} workers"
            )
        if self.metrics_port is not None and self.metrics_port + world_size > 65536:
            raise OptionError(
                f"--metrics-port is {self.metrics_port}; with a port for each of {world_size} workers it must be at "
                f"most {65536 - world_size}"
            )

    def num_tokens(self, rank: int) -> int:
        """Tokens of one rank in a step."""
        return self.tokens_per_rank[rank % len(self.tokens_per_rank)]


def read_texts(path: Path) -> list[str]:
    """Reads the strings of a JSON file, interleaving the lists at its top level, or a plain file as one string."""
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

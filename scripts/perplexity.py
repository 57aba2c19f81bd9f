"""Perplexity of a model whose experts are sharded over workers, for each list of texts of a JSON file.

python scripts/perplexity.py --model DIR --texts FILE [--ep-size 4] [--launcher local]

FILE is a JSON object of lists of strings, or of lists of token ids; of each text the first --max-tokens tokens count.
One JSON line comes out. With --routed-experts, text i (over all lists) takes the experts of prompt i of a file that
`moe-ep generate --return-routed-experts` wrote, weighted by the model's own routers or, with --routed-weights recorded,
as there.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ep.env import at_least, one_of
from moe_ep.errors import ConfigError, MoeEpError
from moe_ep.files import parse_json
from moe_ep.launch.cli.gang_options import (
    DTYPES,
    GangConfig,
    input_dtype_option,
    layer_input_dtype,
    start_gang,
    torch_dtype,
)
from moe_ep.launch.cli.options import OptionError, Parser, add_flags, checkpoint_folder, from_args, input_file, option
from moe_ep.launch.gangs.rank_env import RankEnv


def texts_file(raw: str) -> Path:
    """A file that is there."""
    return input_file(raw, "it must be a JSON file with an object of lists of strings")


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig(GangConfig):
    """The settings of one measurement."""

    model: Path | None = option(None, checkpoint_folder, "checkpoint folder, needed", "DIR")
    texts: Path | None = option(None, texts_file, "JSON object of lists of strings, needed", "FILE")
    max_tokens: int = option(1024, at_least(2), "tokens of each text (1024)")
    backend: str = option("auto", str, "dispatch backend, or auto (the default)")
    quantize: str = option("none", one_of("none", "int4", "int8", "fp8"), "quantize plain experts on load (none)")
    input_dtype: str | None = input_dtype_option()
    dtype: str | None = option(None, one_of(*DTYPES), "f32, f16 or bf16; bf16 on GPUs, f32 on CPUs")
    allow_nonfinite: bool = option(
        False, None, "load weights that hold NaN or infinity too, which are refused otherwise"
    )
    routed_experts: Path | None = option(
        None,
        lambda raw: input_file(raw, "it must be a file of recorded routing"),
        "text i takes the experts of prompt i of this file of recorded routing, in place of the routers'",
        "FILE",
    )
    routed_weights: str = option(
        "own", one_of("own", "recorded"), "the weights of these experts: the routers' of now (own), or recorded ones"
    )


def measure(rank_env: RankEnv, config: PerplexityConfig, texts: dict[str, list[str | list[int]]]) -> dict[str, Any]:
    """One worker's part."""
    import torch
    import transformers

    import moe_ep
    from moe_ep.generation.perplexity import perplexity
    from moe_ep.generation.tokenizer import ModelTokenizer
    from moe_ep.hf.parallelized import steps_of

    device = torch.device(rank_env.device)
    dtype = torch_dtype(config.dtype, device)
    tokenizer = ModelTokenizer(Path(config.model or "")).tokenizer
    tokens = {
        kind: [
            torch.tensor((tokenizer(text)["input_ids"] if isinstance(text, str) else text)[: config.max_tokens])
            for text in several
        ]
        for kind, several in texts.items()
    }
    routing = _routing(config, [ids for several in tokens.values() for ids in several])
    model = moe_ep.parallelize(
        config.model,
        backend=config.backend,
        quantize=config.quantize,
        dtype=dtype,
        device=device,
        allow_nonfinite=config.allow_nonfinite,
        input_dtype=layer_input_dtype(config.input_dtype),
    )
    layer = steps_of(model).layers[0]
    return {
        "perplexity": perplexity(model, tokens, routing),
        "dtype": str(dtype).removeprefix("torch."),
        "ep_size": rank_env.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": type(layer.prepare_finalize).__name__,
        "rows": str(layer.input_rows),
        "experts": type(layer.modular_kernel.fused_experts).__name__,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _routing(config: PerplexityConfig, texts: list[Any]) -> list[tuple[Any, Any]] | None:
    """The recorded choices of each text's tokens."""
    if config.routed_experts is None:
        return None
    from moe_ep.rollouts.routing_file import RoutingFile

    file = RoutingFile.load(config.routed_experts)
    if missing := set(range(len(texts))) - set(file.ids):
        raise ConfigError(f"--routed-experts is {config.routed_experts}, which has no prompt {min(missing)}")
    if config.routed_weights == "recorded" and not file.weights:
        raise ConfigError(f"--routed-weights is recorded and {config.routed_experts} has no weights; leave it out")
    weights = file.weights if config.routed_weights == "recorded" else {}
    return [
        (file.ids[number][: len(ids)], weights[number][: len(ids)] if weights else None)
        for number, ids in enumerate(texts)
    ]


def main() -> int:
    """Prints one JSON line."""
    parser = Parser(prog="perplexity.py", description=(__doc__ or "").split("\n")[0])
    add_flags(parser, PerplexityConfig)
    args: argparse.Namespace = parser.parse_args()
    try:
        config = from_args(PerplexityConfig, args)
        texts = read_texts(config)
        config, gang = start_gang(config)
        try:
            results = gang.run(measure, config, texts)
        finally:
            gang.close()
    except (OptionError, ConfigError) as error:
        print(f"perplexity.py: {error}", file=sys.stderr)
        return 2
    except (MoeEpError, ImportError, OSError) as error:
        print(f"perplexity.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("perplexity.py: interrupted", file=sys.stderr)
        return 130
    if gang.is_driver:
        print(json.dumps(results[0], allow_nan=False))
    return 0


def read_texts(config: PerplexityConfig) -> dict[str, list[str | list[int]]]:
    """The texts by kind; OptionError for options that are missing, or a file that holds something else."""
    if config.model is None or config.texts is None:
        raise OptionError("--model and --texts are needed; give both")
    try:
        texts = parse_json(config.texts.read_bytes())
    except ValueError as error:
        raise OptionError(f"--texts is {str(config.texts)!r}, which is no JSON: {error}") from None
    is_object = isinstance(texts, dict) and texts
    if not is_object or not all(isinstance(several, list) and several for several in texts.values()):
        raise OptionError(f"--texts is {str(config.texts)!r}; it must hold an object of lists of strings")
    for kind, several in texts.items():
        if not all(isinstance(text, str) or _are_ids(text) for text in several):
            raise OptionError(
                f"--texts is {str(config.texts)!r}, whose {kind!r} has something else than strings and lists of token "
                f"ids"
            )
    return texts


def _are_ids(text: object) -> bool:
    return isinstance(text, list) and all(type(token) is int for token in text)


if __name__ == "__main__":
    sys.exit(main())

"""Perplexity of a model whose experts are divided over workers, for each list of texts of a JSON file.

python scripts/perplexity.py --model DIR --texts FILE [--ep-size 4] [--launcher local]

FILE is a JSON object of lists of strings; of each string the first --max-tokens tokens count. One JSON line comes out.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_ep.launch.cli.model_options import DTYPES, torch_dtype
from moe_ep.launch.cli.option_values import checkpoint_folder
from moe_ep.launch.cli.options import OptionError, Parser, add_flags, at_least, from_args, one_of, option
from moe_ep.launch.gangs.gang_choice import GangConfig, start_gang
from moe_ep.launch.gangs.rank_env import RankEnv


@dataclass(frozen=True, kw_only=True)
class PerplexityConfig(GangConfig):
    """The settings of one measurement."""

    model: Path | None = field(default=None, metadata=option(checkpoint_folder, "checkpoint folder, needed", "DIR"))
    texts: Path | None = field(default=None, metadata=option(Path, "JSON object of lists of strings, needed", "FILE"))
    max_tokens: int = field(default=1024, metadata=option(at_least(2), "tokens of each text (1024)"))
    backend: str = field(default="auto", metadata=option(str, "dispatch backend, or auto (the default)"))
    quantize: str = field(
        default="none", metadata=option(one_of("none", "int4", "int8", "fp8"), "quantize plain experts on load (none)")
    )
    dtype: str | None = field(
        default=None, metadata=option(one_of(*DTYPES), "f32, f16 or bf16; bf16 on GPUs, f32 on CPUs")
    )


def measure(rank_env: RankEnv, config: PerplexityConfig, texts: dict[str, list[str]]) -> dict[str, Any]:
    """One worker's part."""
    import torch
    import transformers

    import moe_ep
    from moe_ep.generation.perplexity import perplexity
    from moe_ep.hf.divided import steps_of

    device = torch.device(rank_env.device)
    dtype = torch_dtype(config.dtype, device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model, local_files_only=True, trust_remote_code=False)
    tokens = {
        kind: [torch.tensor(tokenizer(text)["input_ids"][: config.max_tokens]) for text in several]
        for kind, several in texts.items()
    }
    model = moe_ep.parallelize(
        config.model, backend=config.backend, quantize=config.quantize, dtype=dtype, device=device
    )
    layer = steps_of(model).layers[0]
    return {
        "perplexity": perplexity(model, tokens),
        "dtype": str(dtype).removeprefix("torch."),
        "ep_size": rank_env.world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": type(layer.prepare_finalize).__name__,
        "experts": type(layer.modular_kernel.fused_experts).__name__,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def main() -> int:
    """Prints one JSON line."""
    parser = Parser(prog="perplexity.py", description=(__doc__ or "").split("\n")[0])
    add_flags(parser, PerplexityConfig)
    args: argparse.Namespace = parser.parse_args()
    try:
        config = from_args(PerplexityConfig, args)
        if config.model is None or config.texts is None:
            raise OptionError("--model and --texts are needed; give both")
        texts = json.loads(config.texts.read_text(encoding="utf-8"))
        config, gang = start_gang(config)
    except OptionError as error:
        print(f"perplexity.py: {error}", file=sys.stderr)
        return 2
    try:
        results = gang.run(measure, config, texts)
    finally:
        gang.close()
    if gang.is_driver:
        print(json.dumps(results[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

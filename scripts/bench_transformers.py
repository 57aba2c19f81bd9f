"""What a transformers model gains by moe_ep: its MoE blocks and its generation, with transformers' own experts and with
moe_ep's.

    python scripts/bench_transformers.py blocks [--models NAME ...] [--tokens T ...] [--json FILE]
    python scripts/bench_transformers.py generate [--layers 48] [--json FILE]
    python scripts/bench_transformers.py generate --layers 4 --compiled
    torchrun --nproc-per-node 2 scripts/bench_transformers.py generate --layers 12

Random weights of known sizes. A block is the router and all experts of a layer, as the model calls it: eagerly, and in
a CUDA graph where the implementation can be captured. Generation is of greedy text by `model.generate`, and by what
`moe-ep generate` runs, whose decoding is captured; of runs over the same prompts the first makes things ready, and the
median of the others is told. Each of several GPUs has prompts of its own; transformers' experts are whole on each, and
moe_ep's sharded.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from harness import Bench, positive, this_gpu, use_gpu_of_rank

import moe_ep
from moe_ep.bench.geometries import preset
from moe_ep.bench.results import markdown_table, read_lines
from moe_ep.bench.timing import slowest_rank, time_calls, timing_of
from moe_ep.generation.engine import Generation, Request
from moe_ep.layer.methods import relative_error

Row = dict[str, Any]

# Of transformers' own, "eager" is a loop over experts that waits for the host, and "batched_mm" copies the weights of
# each choice.
OWN = ("eager", "batched_mm", "grouped_mm")
QUANTIZED = {"moe_ep": "none", "moe_ep int4": "int4"}
# The attention of each preset; its MoE sizes are the preset's.
MODELS: dict[str, tuple[str, Row]] = {
    "qwen3-30b": ("Qwen3Moe", {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}),
    "qwen3-235b": ("Qwen3Moe", {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128}),
    "mixtral-8x7b": ("Mixtral", {"num_attention_heads": 32, "num_key_value_heads": 8}),
}
# Calls that are timed together, with inputs of their own, so that they choose experts of their own.
_CHAIN = 8
# Of generation, behind a first one.
_RUNS = 5
_VOCABULARY = 32768


def make_model(name: str, num_layers: int, seed: int) -> Any:
    """A model of these sizes on the GPU, the same for a seed."""
    sizes, (family, attention) = preset(name), MODELS[name]
    widths = {"intermediate_size": sizes.intermediate_size}
    experts = {"num_local_experts": sizes.num_experts}
    if family == "Qwen3Moe":
        widths, experts = {"moe_intermediate_size": sizes.intermediate_size}, {"num_experts": sizes.num_experts}
    config = getattr(transformers, f"{family}Config")(
        hidden_size=sizes.hidden_size,
        num_experts_per_tok=sizes.top_k,
        num_hidden_layers=num_layers,
        vocab_size=_VOCABULARY,
        eos_token_id=None,
        pad_token_id=0,
        **widths,
        **experts,
        **attention,
    )
    torch.manual_seed(seed)
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def variants(name: str, num_layers: int, options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The same model with each chosen implementation of its experts; each is used before the next is made."""
    own = [implementation for implementation in options.experts if implementation in OWN]
    model: Any = make_model(name, num_layers, options.seed) if own else None
    for implementation in own:
        model.set_experts_implementation(implementation)
        yield implementation, model
    for implementation in options.experts:
        if implementation in QUANTIZED:
            del model
            gc.collect()
            torch.cuda.empty_cache()
            model = make_model(name, num_layers, options.seed)
            # Steps of few tokens go over NVLink where there are several ranks, and by no backend where there is one.
            decoding = {"decode_max_num_tokens": options.prompts} if num_ranks() > 1 else {}
            model = moe_ep.parallelize(model, quantize=QUANTIZED[implementation], **decoding)
            yield implementation, model


def bench_blocks(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each model, number of tokens and implementation."""
    for name in options.models:
        generator = torch.Generator("cuda").manual_seed(options.seed)
        shape = (_CHAIN, 1, max(options.tokens), preset(name).hidden_size)
        inputs = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        expected: dict[int, torch.Tensor] = {}
        for implementation, model in variants(name, 1, options):
            block = next(module for module in model.modules() if hasattr(module, "experts"))
            for tokens in options.tokens:
                row = {"model": name, "tokens": tokens, "experts": implementation}
                try:
                    yield row | measure_block(block, inputs[:, :, :tokens], expected, implementation)
                except torch.OutOfMemoryError:
                    yield row | {"eager_us": "out of memory"}
                gc.collect()
                torch.cuda.empty_cache()
            del block, model


def measure_block(
    block: Any, inputs: torch.Tensor, expected: dict[int, torch.Tensor], implementation: str
) -> dict[str, Any]:
    """Microseconds of a call, and how far its result is from that of the implementation that came first."""
    tokens, device = inputs.size(2), inputs.device

    def call(i: int) -> torch.Tensor:
        result = block(inputs[i])
        return result[0] if isinstance(result, tuple) else result

    result = call(0)
    found = {"error": relative_error(result, expected.setdefault(tokens, result.clone()))}
    # Eagerly behind it: then layers of moe_ep make graphs of their own, beside which others are slower.
    if implementation != "eager":
        found["graph_us"] = timing_of(time_calls(call, device=device, chain=_CHAIN, repeats=7)).median
    found["eager_us"] = timing_of(time_calls(call, device=device, chain=_CHAIN, repeats=7, graph=False)).median
    return found


def bench_generate(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each way to continue the same prompts; with --compiled, in static caches, for which transformers
    compiles the model."""
    name = options.models[0]
    generator = torch.Generator("cuda").manual_seed(options.seed)
    shape = (num_ranks(), options.prompts, options.prompt_tokens)
    prompts = torch.randint(1, _VOCABULARY, shape, device="cuda", generator=generator)
    for implementation, model in variants(name, options.layers, options):
        row = {"model": name, "layers": options.layers, "gpus": num_ranks(), "experts": implementation}
        by = "model.generate" + ", static caches" * options.compiled
        sharded = implementation in QUANTIZED
        run = partial(by_transformers, sharded=sharded)
        yield row | {"by": by} | measure_generation(run, model, prompts, options)
        if sharded and not options.compiled:
            yield row | {"by": "moe-ep generate"} | measure_generation(by_slots, model, prompts, options)
        del model


def by_transformers(model: Any, prompts: torch.Tensor, options: argparse.Namespace, *, sharded: bool) -> int:
    """Continues this rank's of prompts `[ranks, sequences, tokens]`; how many tokens that makes."""
    caches = {"cache_implementation": "static"} if options.compiled else {}
    mine = prompts[dist.get_rank() if dist.is_initialized() else 0]
    with moe_ep.serving(model) if sharded else nullcontext():
        text = model.generate(mine, max_new_tokens=options.new_tokens, do_sample=False, **caches)
    return int(text[:, mine.size(1) :].numel())


def by_slots(model: Any, prompts: torch.Tensor, options: argparse.Namespace) -> int:
    """The same as `moe-ep generate` does it."""
    requests = [Request(index, prompt) for index, prompt in enumerate(prompts.flatten(0, 1).cpu())]
    sizes = {"max_new_tokens": options.new_tokens, "num_slots": options.prompts}
    completions = Generation(model, requests, stop_ids=(), **sizes).run()
    return sum(len(completion.token_ids) for completion in completions)


def measure_generation(run: Callable[..., int], *arguments: Any) -> Row:
    """Seconds of a first run and the median of those of later ones, on the slowest rank, and all ranks' tokens in each
    second of that."""
    seconds = []
    with torch.inference_mode():
        for _ in range(1 + _RUNS):
            meet()
            started = time.perf_counter()
            tokens = torch.tensor(run(*arguments))
            torch.cuda.synchronize()
            seconds += slowest_rank([time.perf_counter() - started])
    if num_ranks() > 1:
        dist.all_reduce(tokens)
    median = statistics.median(seconds[1:])
    return {"first_s": seconds[0], "seconds": median, "tokens_per_s": int(tokens) / median}


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def meet() -> None:
    """Returns when no GPU has anything to do."""
    torch.cuda.synchronize()
    if num_ranks() > 1:
        dist.barrier()


def main() -> int:
    bench = Bench(__doc__)
    parser = bench.parser
    parser.add_argument("what", choices=("blocks", "generate"), nargs="?", default="blocks", help="to measure (blocks)")
    parser.add_argument(
        "--experts", nargs="+", choices=[*OWN, *QUANTIZED], help="implementations (those that are quick)"
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="generate: one (all)")
    parser.add_argument(
        "--tokens", type=positive, nargs="+", default=[1, 8, 32, 128, 1024, 4096], help="of a block's call"
    )
    parser.add_argument("--layers", type=positive, default=48, help="generate: of the model (48)")
    parser.add_argument("--prompts", type=positive, default=8, help="generate: sequences (8)")
    parser.add_argument("--prompt-tokens", type=positive, default=128, help="generate: of each prompt (128)")
    parser.add_argument("--new-tokens", type=positive, default=64, help="generate: of each continuation (64)")
    parser.add_argument("--compiled", action="store_true", help="generate: in static caches, compiled by transformers")
    parser.add_argument("--markdown", type=Path, metavar="JSONL", help="print the tables of recorded lines and end")
    options = bench.parse()
    # A loop over experts takes a second a token, and to read prompts by copies more memory than there is.
    options.experts = options.experts or [*(OWN if options.what == "blocks" else ("grouped_mm",)), *QUANTIZED]
    if options.markdown is not None:
        print(tables(read_lines(options.markdown)))
        return 0
    if "LOCAL_RANK" in os.environ:
        if options.what == "blocks":
            parser.error("blocks are of one GPU; start them without torchrun")
        use_gpu_of_rank()
        dist.init_process_group("cpu:gloo,cuda:nccl")
    this_gpu()
    bench.about |= {"benchmark": f"transformers {options.what}", "transformers": transformers.__version__}
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with torch.inference_mode():
        for row in (bench_blocks if options.what == "blocks" else bench_generate)(options):
            if is_first:
                bench.keep(row)
    if is_first:
        print(tables([row | bench.about for row in bench.rows]))
    if dist.is_initialized():
        meet()
        dist.destroy_process_group()
    return 0


def tables(rows: Sequence[Row]) -> str:
    """Of the blocks, a column for each implementation, first in CUDA graphs and then eagerly; of the generation, a line
    for each way."""
    blocks, generated = ([row for row in rows if row["benchmark"].endswith(what)] for what in ("blocks", "generate"))
    found = []
    for field, how in (("graph_us", "in CUDA graphs, us"), ("eager_us", "eagerly, us")):
        names = dict.fromkeys(row["experts"] for row in blocks if field in row)
        lines: dict[tuple[str, int], Row] = {}
        for row in blocks:
            line = lines.setdefault((row["model"], row["tokens"]), {"model": row["model"], "tokens": row["tokens"]})
            line[row["experts"]] = row.get(field)
        if blocks:
            titles = {"model": "model", "tokens": "tokens"} | {name: name for name in names}
            found.append(f"{how}:\n\n{markdown_table(list(lines.values()), titles)}")
    if generated:
        titles = {"model": "model", "layers": "layers", "gpus": "GPUs", "experts": "experts", "by": "by"}
        titles |= {"seconds": "s", "tokens_per_s": "tokens/s"}
        # Rows of one GPU were recorded without that number.
        found.append(markdown_table([{"gpus": 1} | row for row in generated], titles))
    return "\n\n".join(found)


if __name__ == "__main__":
    sys.exit(main())

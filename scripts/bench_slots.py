"""Reading prompts and decoding in slots on one GPU, with lengths and packed prompts, and with masks and padding.

python scripts/bench_slots.py [--layers 4] [--steps 20] [--commit HASH] [--json FILE]

Models of known attention, few small experts, random weights in bf16. Times are of whole passes, host included: of a
third pass over the same prompts, and the median of decoding steps in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import transformers
from harness import Bench, positive, this_gpu

import moe_ep
from moe_ep.bench.results import table
from moe_ep.generation.decoder import WARM_UP_PASSES, SlotDecoder
from moe_ep.hf.steps import Step

SMALL = {"moe_intermediate_size": 128, "vocab_size": 1024, "num_experts_per_tok": 4}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    | {"num_experts": 8},
    "GptOss": {"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
    | {"num_local_experts": 8, "intermediate_size": 128, "sliding_window": 128},
}
# (model, tokens of each prompt, tokens that a slot has room for)
CASES = [
    ("Qwen3Moe", [40] * 8, 512),
    ("Qwen3Moe", [20, 60, 110, 150, 180, 220, 260, 290], 4096),
    ("Qwen3Moe", [500] * 8, 16384),
    ("Qwen3Moe", [40] * 64, 4096),
    ("GptOss", [40] * 8, 4096),
    ("GptOss", [1000] * 4, 4096),
    ("GptOss", [8000], 8192),
    ("GptOss", [16000] * 2, 16384),
]


@contextlib.contextmanager
def masked(on: bool) -> Iterator[None]:
    """A block in which decoders are made that take masks, and the models' own norms, routers and rotary positions."""
    if not on:
        yield
        return
    with (
        mock.patch("moe_ep.generation.decoder.can_attend", lambda model: False),
        mock.patch("moe_ep.generation.decoder.FusedModules", lambda model: mock.Mock(used=contextlib.nullcontext)),
    ):
        yield


def make_model(name: str, num_layers: int) -> Any:
    config = getattr(transformers, f"{name}Config")(**SMALL, **MODELS[name], num_hidden_layers=num_layers)
    with torch.device("cuda"):
        return moe_ep.parallelize(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


def measure(model: Any, lengths: Sequence[int], room: int, num_steps: int) -> dict[str, Any]:
    """Milliseconds of a pass over the prompts and of a decoding step, and GiB that the first takes at most."""
    decoder = SlotDecoder(model, len(lengths), room, graphs=True)
    steps, slots = decoder.steps, range(len(lengths))
    prompts = [torch.arange(1, 1 + length) % SMALL["vocab_size"] for length in lengths]
    gc.collect()  # the decoder before
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    def read() -> None:
        with steps.planned(Step((decoder.num_rows(lengths),))):
            decoder.append(slice(None), decoder.prefill(slots, prompts).argmax(-1))

    def decode() -> None:
        with steps.planned(Step((len(lengths),), decoder.can_replay_decode)):
            decoder.append(slice(None), decoder.decode().argmax(-1))

    read_ms = [_ms(read) for _ in range(3)][-1]
    held_gib = (torch.cuda.max_memory_allocated() - held) / 2**30
    step_ms = [_ms(decode) for _ in range(WARM_UP_PASSES + num_steps)][WARM_UP_PASSES:]
    row = {"read_ms": round(read_ms, 1), "gib": round(held_gib, 2), "step_ms": round(statistics.median(step_ms), 3)}
    decoder.close()
    return row


def _ms(run: Any) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def main() -> int:
    """Prints a table."""
    bench = Bench(__doc__)
    parser = bench.parser
    parser.add_argument("--layers", type=positive, default=4, help="of each model (4)")
    parser.add_argument("--steps", type=positive, default=20, help="decoding steps that are measured (20)")
    args = bench.parse()
    this_gpu()
    models = {name: make_model(name, args.layers) for name in MODELS}
    with torch.inference_mode():
        for name, lengths, room in CASES:
            for masks in (True, False):
                row = {"benchmark": "slots", "model": name, "masks": masks, "prompts": len(lengths)}
                row |= {"longest": max(lengths), "room": room, "layers": args.layers}
                try:
                    with masked(masks):
                        row |= measure(models[name], lengths, room, args.steps)
                except torch.OutOfMemoryError:
                    row["gib"] = "out of memory"
                torch.cuda.empty_cache()
                bench.keep(row)
    columns = {"model": "model", "prompts": "prompts", "longest": "longest", "room": "room", "masks": "masks"}
    print(table(bench.rows, columns | {"read_ms": "read ms", "gib": "GiB", "step_ms": "step ms"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

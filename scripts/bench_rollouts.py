"""What recording costs a decode step, and how long an update of weights takes beside a plain copy of the bytes.

python scripts/bench_rollouts.py [--experts 128] [--device cpu] [--what recording] [--json results.jsonl]

Updates are of one layer with the sizes of Qwen3-30B-A3B, in bf16; decoding is of a small model. Medians are printed; on
CPUs of the CPU time of the process.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Bench, device_name, positive, some_of
from loading_checkpoints import GEOMETRIES, make_checkpoint

import moe_ep
from moe_ep.checkpoint import CheckpointReader, model_spec
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.generation.engine import Generation, Request
from moe_ep.hf.parallelized import steps_of
from moe_ep.layer.stack import MoEStack
from moe_ep.rollouts.recording import RoutingLog
from moe_ep.routing.router import known_choices

K, N, _ = GEOMETRIES["qwen3-30b"]


def clock(device: torch.device) -> float:
    """Seconds; on CPUs those that this process computed, so that others on the machine count for less."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    started = clock(device)
    run()
    return clock(device) - started


def make_tensors(num_experts: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The experts of one layer, a tensor each."""
    prefix = "model.layers.0.mlp.experts"
    sizes = {"gate_proj": (N, K), "up_proj": (N, K), "down_proj": (K, N)}
    return {
        f"{prefix}.{expert}.{name}.weight": torch.randn(size, dtype=torch.bfloat16, device=device)
        for expert in range(num_experts)
        for name, size in sizes.items()
    }


def fused(tensors: dict[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """All experts in one tensor."""
    prefix = "model.layers.0.mlp.experts"

    def stacked(*names: str) -> torch.Tensor:
        experts = range(num_experts)
        return torch.stack([torch.cat([tensors[f"{prefix}.{i}.{name}.weight"] for name in names]) for i in experts])

    return {f"{prefix}.gate_up_proj": stacked("gate_proj", "up_proj"), f"{prefix}.down_proj": stacked("down_proj")}


def measure_updates(num_experts: int, device: torch.device, times: int) -> list[dict[str, Any]]:
    tensors, rows = make_tensors(num_experts, device), []
    total = sum(tensor.nbytes for tensor in tensors.values())
    held = [torch.empty_like(tensor) for tensor in tensors.values()]

    def copy() -> None:
        for to, tensor in zip(held, tensors.values(), strict=True):
            to.copy_(tensor)

    forms = {"a tensor for each matrix": tensors, "all experts in one tensor": fused(tensors, num_experts)}
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), "bf16", "qwen3-30b", 1, num_experts, whole=True)
        for quantize in ("none", "int4", "fp8"):
            started = clock(device)
            with CheckpointReader(Path(folder)) as reader:
                spec = model_spec(reader.config, reader)
                parallel = FusedMoEParallelConfig.make(ep_size=1, rank=0, world_size=1)
                stack = MoEStack(reader, spec, parallel, dtype=torch.bfloat16, device=device, quantize=quantize)
            loaded = clock(device) - started
            for form, given in forms.items():
                # In turns, so that both meet the machine in the same state. The first turn warms up, and finds what
                # follows from the names.
                update = partial(moe_ep.update_weights, stack, given)
                turns = [[seconds_of(run, device) for run in (copy, update)] for _ in range(times + 1)]
                plain, seconds = map(statistics.median, zip(*turns[1:], strict=True))
                if not rows:
                    rows.append({"what": "plain copy of the bytes", "s": plain, "bytes": total})
                what = f"update, {form}" + ("" if quantize == "none" else f", quantized to {quantize}")
                more = {"times_a_copy": seconds / plain, "first_s": turns[0][1], "load_s": loaded}
                rows.append({"what": what, "s": seconds} | more)
    return rows


def measure_recording(device: torch.device, times: int, quantize: str) -> list[dict[str, Any]]:
    """Decode steps of a few layers, with recording and without, in turns; on GPUs of the sizes of Qwen3-30B-A3B and in
    CUDA graphs, on CPUs of a small model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    on_gpu = device.type == "cuda"
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=K if on_gpu else 512,
        num_hidden_layers=4 if on_gpu else 8,
        num_attention_heads=32 if on_gpu else 8,
        head_dim=128 if on_gpu else 64,
        num_key_value_heads=4,
        moe_intermediate_size=N if on_gpu else 256,
        num_experts=128 if on_gpu else 32,
        num_experts_per_tok=8,
        dtype="bfloat16" if on_gpu else "float32",
    )
    with device:
        model: Any = Qwen3MoeForCausalLM(config).to(config.dtype)
    model = moe_ep.parallelize(model, device=device, quantize=quantize)
    requests = [Request(index, torch.randint(1, 512, (8,))) for index in range(8)]
    num_steps = 200 if on_gpu else 7
    runs: dict[Any, list[float]] = {"nothing": [], "ids": [], "weights": []}
    # Short runs in a random order: what ran before one changes its times by more than recording does.
    order = random.Random(0)
    for turn in range(2 * times + 1):
        for records in order.sample(list(runs), len(runs)):
            settings: dict[str, Any] = {"max_new_tokens": num_steps + 1, "num_slots": 8, "stop_ids": []}
            generation = Generation(model, requests, **settings, records=records)
            generation.run()
            runs[records] += (generation.times["replayed"] or generation.times["decode"]) if turn else []
    # The first decile: what else runs on the machine makes steps longer, and none shorter.
    deciles = {records: statistics.quantiles(steps, n=10) for records, steps in runs.items()}
    without = deciles["nothing"][0]
    rows: list[dict[str, Any]] = [
        {
            "what": f"decode step, recording {records}",
            "s": first,
            "median_s": rest[3],
            "more_than_without": first / without - 1,
        }
        for records, (first, *rest) in deciles.items()
    ]
    layer = steps_of(model).layers[0]
    ids, weights = (torch.zeros(8, layer.top_k, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32))
    rows_of_tokens = torch.arange(8, device=device)

    def clean(log: RoutingLog | None) -> None:
        for _ in range(1000):
            with contextlib.nullcontext() if log is None else log.at(rows_of_tokens):
                known_choices(weights, ids, layer.num_experts, log=None if log is None else log.next_rows(0, 8))

    logs = [None, *(RoutingLog([layer], 8, weights=with_weights) for with_weights in (False, True))]
    for name, log in zip(runs, logs, strict=True):
        rows.append(
            {"what": f"choices of one layer, recording {name}", "s": seconds_of(partial(clean, log), device) / 1000}
        )
    return rows


def main() -> None:
    bench = Bench(__doc__)
    parser = bench.parser
    parser.add_argument("--experts", type=positive, default=128)
    parser.add_argument("--device", type=device_name, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--times", type=positive, default=5, help="turns of updates, pairs of turns of recording")
    parser.add_argument("--what", type=some_of(("updates", "recording")), default=["updates", "recording"])
    parser.add_argument(
        "--quantize", choices=("none", "int4", "fp8"), default="none", help="experts of the decode steps"
    )
    args = bench.parse()
    device = torch.device(args.device)
    measured = {
        "updates": partial(measure_updates, args.experts, device, args.times),
        "recording": partial(measure_recording, device, args.times, args.quantize),
    }
    for row in (row for name in args.what for row in measured[name]()):
        bench.keep(row)
        print(
            f"{row['what']}: {1e3 * row['s']:.3f} ms",
            {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if k not in ("what", "s")},
        )


if __name__ == "__main__":
    main()

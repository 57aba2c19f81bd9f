"""Loading one rank's experts against plainly reading the same bytes: the ratio of the two speeds.

    python scripts/bench_loading.py                          # a made checkpoint of about 1 GB, rank 0 of 8
    python scripts/bench_loading.py --model DIR --ep-size 8 --rank 3 --device cuda

Both read the same byte ranges of the same files in file order. `--cache cold` drops the files from the page cache
before every repeat, `--cache warm` reads them once before. Plain is preadv of whole runs into one buffer that is
reused; loading ends with the bytes in the layers' parameters, before any repacking. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from moe_ep.checkpoint.formats import quantization_config
from moe_ep.checkpoint.loader import load_moe_layer
from moe_ep.checkpoint.models import MoEModelSpec, model_spec
from moe_ep.checkpoint.plan import plan_layer
from moe_ep.checkpoint.reader import CheckpointReader
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.layer import FusedMoE

Run = tuple[Path, int, int]
PLAIN_READ_BYTES = 32 << 20
TARGET_RATIO = 0.80


def make_checkpoint(directory: Path, num_layers: int) -> None:
    """Qwen3-MoE shapes, bf16: every layer has 64 experts of 3 x 768 x 2048, 604 MB."""
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": num_layers,
        "vocab_size": 16,
        "dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
    block = torch.randn(768, 2048).bfloat16()

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for layer in range(num_layers):
            for expert in range(64):
                for name in ("gate_proj", "up_proj", "down_proj"):
                    weight = block.T.contiguous() if name == "down_proj" else block.clone()
                    yield f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", weight

    write_checkpoint(directory, config, tensors(), max_shard_bytes=1 << 30)


def make_layer(spec: MoEModelSpec, reader: CheckpointReader, args: argparse.Namespace) -> FusedMoE:
    """The parameters of one rank, without a process group and with their memory touched."""
    parallel = FusedMoEParallelConfig(dp_size=args.ep_size, dp_rank=args.rank, ep_size=args.ep_size, ep_rank=args.rank)
    with torch.device(args.device):
        layer = FusedMoE(
            spec.num_experts,
            spec.top_k,
            spec.hidden_size,
            spec.moe_intermediate_size,
            params_dtype=spec.dtype,
            quant_config=quantization_config(reader.config),
            parallel_config=parallel,
        )
    for param in layer.parameters():
        param.data.zero_()
    layer.process_weights_after_loading = lambda: None  # type: ignore[method-assign]
    return layer


def runs_of(spec: MoEModelSpec, reader: CheckpointReader, layers: dict[int, FusedMoE]) -> list[Run]:
    """(file, offset, bytes) of what the rank loads, neighbours joined."""
    quantization = quantization_config(reader.config)
    sources = [
        source for index, layer in layers.items() for source in plan_layer(reader, spec, index, layer, quantization)
    ]
    infos = sorted((reader.info(source.name) for source in sources), key=lambda info: (info.file, info.offset))
    runs: list[Run] = []
    for info in infos:
        if runs and runs[-1][0] == info.file and runs[-1][1] + runs[-1][2] == info.offset:
            runs[-1] = (info.file, runs[-1][1], runs[-1][2] + info.nbytes)
        else:
            runs.append((info.file, info.offset, info.nbytes))
    return runs


def read_plainly(runs: list[Run]) -> int:
    """Bytes read by one thread into one buffer."""
    buffer = memoryview(bytearray(PLAIN_READ_BYTES))
    total = 0
    for file, offset, nbytes in runs:
        fd = os.open(file, os.O_RDONLY)
        try:
            while nbytes:
                count = os.preadv(fd, [buffer[:nbytes]], offset)
                offset, nbytes, total = offset + count, nbytes - count, total + count
        finally:
            os.close(fd)
    return total


def load(spec: MoEModelSpec, reader: CheckpointReader, layers: dict[int, FusedMoE], device: str) -> int:
    """Bytes loaded into the layers' parameters."""
    before = reader.bytes_read
    for index, layer in layers.items():
        load_moe_layer(reader, spec, index, layer)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return reader.bytes_read - before


def drop_from_cache(directory: Path) -> None:
    for file in directory.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def seconds(function: Callable[[], int], expected: int) -> float:
    start = time.perf_counter()
    num_bytes = function()
    elapsed = time.perf_counter() - start
    if num_bytes != expected:
        raise RuntimeError(f"{num_bytes} bytes were read and {expected} were planned")
    return elapsed


def check_loaded(spec: MoEModelSpec, reader: CheckpointReader, layers: dict[int, FusedMoE]) -> None:
    """Every loaded tensor equals a plain read of it: a benchmark of something wrong is none."""
    for index, layer in layers.items():
        params = dict(layer.named_parameters())
        for source in plan_layer(reader, spec, index, layer, quantization_config(reader.config)):
            expected = reader.read(source.name)
            for slot in source.slots:
                local = slot.expert_id if layer.expert_map is None else int(layer.expert_map[slot.expert_id])
                found = params[slot.param_name][local].cpu()
                if found.shape != expected.shape:
                    found = found.chunk(2, dim=0 if slot.param_name == "w13_weight" else 1)[slot.shard_id == "w3"]
                if not torch.equal(found, expected.to(found.dtype)):
                    raise RuntimeError(f"{source.name} was loaded wrongly into {slot}")


def measure(directory: Path, args: argparse.Namespace) -> dict[str, object]:
    reader = CheckpointReader(directory)
    spec = model_spec(reader.config)
    layers = {index: make_layer(spec, reader, args) for index in spec.moe_layers}
    runs = runs_of(spec, reader, layers)
    expected = sum(nbytes for _, _, nbytes in runs)
    times: dict[str, list[float]] = {"plain": [], "load": []}
    load(spec, reader, layers, args.device)
    check_loaded(spec, reader, layers)
    for _ in range(args.repeats):
        for name, function in (
            ("plain", lambda: read_plainly(runs)),
            ("load", lambda: load(spec, reader, layers, args.device)),
        ):
            if args.cache == "cold":
                drop_from_cache(directory)
            times[name].append(seconds(function, expected))
    rates = {name: expected / statistics.median(values) / 1e9 for name, values in times.items()}
    return {
        "bytes": expected,
        "runs": len(runs),
        "layers": len(layers),
        "ep_size": args.ep_size,
        "rank": args.rank,
        "device": args.device,
        "cache": args.cache,
        "plain_s": [round(value, 4) for value in sorted(times["plain"])],
        "load_s": [round(value, 4) for value in sorted(times["load"])],
        "plain_gb_s": round(rates["plain"], 3),
        "load_gb_s": round(rates["load"], 3),
        "ratio": round(rates["load"] / rates["plain"], 3),
        "target_ratio": TARGET_RATIO,
    }


def commit() -> str:
    result = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint directory; without it one is made and removed")
    parser.add_argument("--made-layers", type=int, default=2, help="layers of the made checkpoint, 604 MB each")
    parser.add_argument("--made-in", type=Path, help="folder for the made checkpoint; the system's temporary one")
    parser.add_argument("--ep-size", type=int, default=8)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cache", choices=("cold", "warm"), default="cold")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    made = None
    if args.model is None:
        made = Path(tempfile.mkdtemp(prefix="moe-ep-bench-loading-", dir=args.made_in))
        make_checkpoint(made, args.made_layers)
    try:
        row = measure(args.model or made, args)
    finally:
        if made is not None:
            shutil.rmtree(made)
    print(f"{row['bytes'] / 1e6:.0f} MB in {row['runs']} runs, {args.cache} cache, {args.device}")
    print(f"plain read {row['plain_gb_s']:.2f} GB/s, load {row['load_gb_s']:.2f} GB/s, ratio {row['ratio']:.2f}")
    versions = {"torch": torch.__version__, "python": platform.python_version(), "commit": commit()}
    print(json.dumps({"benchmark": "loading", **row, **versions, "command": " ".join(sys.argv)}))


if __name__ == "__main__":
    main()

"""Loading one rank's experts against plainly reading the same bytes: the ratio of the two speeds, and the memory.

    python scripts/bench_loading.py                                    # a made bf16 checkpoint of 1.2 GB, rank 0 of 8
    python scripts/bench_loading.py --format int4 --geometry deepseek-v3 --made-experts 64 --made-layers 1
    python scripts/bench_loading.py --model DIR --ep-size 8 --rank 3 --device cuda

Both read the same byte ranges of the same files in file order. `--cache cold` drops the files from the page cache
before every repeat, `--cache warm` reads them once before. Plain is preadv of whole runs into one buffer that is
reused; loading ends with the bytes in the layers' parameters, before any repacking. The memory is what the process
holds at most while it loads into fresh layers, over what it held before, as a multiple of the bytes loaded. A table;
--json keeps the row.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from harness import Bench, checked, device_name, positive
from loading_checkpoints import FORMATS, GEOMETRIES, make_checkpoint

from moe_ep.checkpoint import MoEModelSpec, model_spec
from moe_ep.checkpoint.loading import load_moe_layer
from moe_ep.checkpoint.plan import layer_quantization, plan_layer
from moe_ep.checkpoint.reader import CheckpointReader
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.env import at_least
from moe_ep.layer import FusedMoE

Run = tuple[Path, int, int]
PLAIN_READ_BYTES = 32 << 20
TARGET_RATIO = 0.80


def make_layer(
    spec: MoEModelSpec, reader: CheckpointReader, index: int, args: argparse.Namespace, touch: bool = True
) -> FusedMoE:
    """The parameters of one rank, without a process group and with their memory touched."""
    parallel = FusedMoEParallelConfig(dp_size=args.ep_size, dp_rank=args.rank, ep_size=args.ep_size, ep_rank=args.rank)
    with torch.device(args.device):
        layer = FusedMoE(
            spec.num_experts,
            spec.top_k,
            spec.hidden_size,
            spec.moe_intermediate_size,
            params_dtype=spec.dtype,
            quant_config=layer_quantization(reader.quantization, spec, index),
            parallel_config=parallel,
        )
    for param in layer.parameters() if touch else ():
        param.data.zero_()
    layer.process_weights_after_loading = lambda: None  # type: ignore[method-assign]
    return layer


def runs_of(spec: MoEModelSpec, reader: CheckpointReader, layers: dict[int, FusedMoE]) -> list[Run]:
    """(file, offset, bytes) of what the rank loads, neighbours joined."""
    infos = [
        source.info
        for index, layer in layers.items()
        for source in plan_layer(reader, spec, index, layer)
        if source.info is not None
    ]
    infos.sort(key=lambda info: (info.file, info.offset))
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


def seconds(function: Callable[[], int], expected: int) -> tuple[float, float]:
    """Elapsed time, and the processor's of all threads, which other processes of a loaded machine change less."""
    start, start_cpu = time.perf_counter(), time.process_time()
    num_bytes = function()
    elapsed, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    if num_bytes != expected:
        raise RuntimeError(f"{num_bytes} bytes were read and {expected} were planned")
    return elapsed, cpu


def check_loaded(spec: MoEModelSpec, reader: CheckpointReader, layers: dict[int, FusedMoE]) -> None:
    """Every loaded tensor equals a plain read of it: a benchmark of something wrong is none."""
    for index, layer in layers.items():
        params = dict(layer.named_parameters())
        for source in plan_layer(reader, spec, index, layer):
            if source.info is None:
                continue
            ((_, raw),) = reader.read_many([source.info])
            for slot in source.slots:
                if not slot.param_name:
                    continue
                expected = slot.tensor(raw)
                local = slot.expert_id if layer.expert_map is None else int(layer.expert_map[slot.expert_id])
                found = params[slot.param_name][local].cpu()
                if found.shape != expected.shape:
                    found = found.chunk(2, dim=slot.layout.out_dim)[slot.shard_id == "w3"]
                if not torch.equal(found.float(), expected.float()):
                    raise RuntimeError(f"{source.name} was loaded wrongly into {slot}")


def held_bytes() -> int:
    """Memory that the process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_over_share(spec: MoEModelSpec, reader: CheckpointReader, args: argparse.Namespace, expected: int) -> float:
    """The most that the process holds while it loads fresh layers, over what it held before, by the bytes loaded."""
    before, most, done = held_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, held_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        layers = {index: make_layer(spec, reader, index, args) for index in spec.moe_layers}
        load(spec, reader, layers, args.device)
    finally:
        done.set()
        watcher.join()
    return (max(most, held_bytes()) - before) / expected


def repack_seconds(layer: FusedMoE) -> float:
    """From the loaded parameters to what the experts take; the layer's second, as the first compiles."""
    before = time.perf_counter()
    FusedMoE.process_weights_after_loading(layer)
    if layer.quant_method.gemm_weights(layer)[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - before


def measure(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    reader = CheckpointReader(directory)
    spec = model_spec(reader.config, reader)
    # Memory that nobody has touched is none; it is looked at before anything else has used some.
    untouched = {index: make_layer(spec, reader, index, args, touch=False) for index in spec.moe_layers}
    runs = runs_of(spec, reader, untouched)
    untouched.clear()
    expected = sum(nbytes for _, _, nbytes in runs)
    peak = peak_over_share(spec, reader, args, expected)
    layers = {index: make_layer(spec, reader, index, args) for index in spec.moe_layers}
    times: dict[str, list[float]] = {"plain": [], "load": [], "unchecked": []}
    cpu: dict[str, list[float]] = {name: [] for name in times}
    load(spec, reader, layers, args.device)
    check_loaded(spec, reader, layers)
    functions: list[tuple[str, Callable[[], Any]]] = [
        ("plain", lambda: read_plainly(runs)),
        ("load", lambda: load(spec, reader, layers, args.device)),
        ("unchecked", lambda: load(spec, reader, layers, args.device)),
    ]
    for _ in range(args.repeats):
        for name, function in random.sample(functions, len(functions)):
            if args.cache == "cold":
                drop_from_cache(directory)
            # One reader, whose buffers are in the caches to the same degree.
            reader.allow_nonfinite = name == "unchecked"
            for kept, value in zip((times, cpu), seconds(function, expected), strict=True):
                kept[name].append(value)
    reader.allow_nonfinite = False
    repacks = []
    for index in (spec.moe_layers[0],) * 2:
        layer = layers[index] if not repacks else make_layer(spec, reader, index, args)
        load(spec, reader, {index: layer}, args.device)
        repacks.append(repack_seconds(layer))
    per_layer = statistics.median(times["load"]) / len(layers)
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
        # Of neighbours in time, so that what else the machine does meets both.
        "finite_check": round(statistics.median(map(truediv, times["load"], times["unchecked"])) - 1, 4),
        "finite_check_cpu": round(statistics.median(map(truediv, cpu["load"], cpu["unchecked"])) - 1, 4),
        "ratio": round(rates["load"] / rates["plain"], 3),
        "target_ratio": TARGET_RATIO,
        "repack_layer_s": round(repacks[1], 4),
        "repack_over_load": round(repacks[1] / per_layer, 3),
        "peak_over_share": round(peak, 3),
        "format": args.format if args.model is None else "as on disk",
        "geometry": args.geometry if args.model is None else "as on disk",
    }


def main() -> None:
    bench = Bench(__doc__)
    parser = bench.parser
    parser.add_argument("--model", type=Path, help="checkpoint directory; without it one is made and removed")
    parser.add_argument("--format", choices=FORMATS, default="bf16", help="of the made checkpoint")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-30b", help="of the made checkpoint")
    parser.add_argument("--made-layers", type=positive, default=2, help="layers of the made checkpoint")
    parser.add_argument("--made-experts", type=positive, default=64, help="experts of a layer of the made checkpoint")
    parser.add_argument("--made-in", type=Path, help="folder for the made checkpoint; the system's temporary one")
    parser.add_argument("--ep-size", type=positive, default=8)
    parser.add_argument("--rank", type=checked(at_least(0)), default=0)
    parser.add_argument("--device", type=device_name, default="cpu")
    parser.add_argument("--cache", choices=("cold", "warm"), default="cold")
    parser.add_argument("--repeats", type=positive, default=7)
    args = bench.parse()
    made = None
    if args.model is None:
        made = Path(tempfile.mkdtemp(prefix="moe-ep-bench-loading-", dir=args.made_in))
        # In a process of its own, whose memory is gone when this one's is looked at.
        sizes = (args.format, args.geometry, args.made_layers, args.made_experts)
        maker = multiprocessing.get_context("spawn").Process(target=make_checkpoint, args=(made, *sizes))
        maker.start()
        maker.join()
    try:
        row = measure(args.model or made, args)
    finally:
        if made is not None:
            shutil.rmtree(made)
    print(f"{row['bytes'] / 1e6:.0f} MB in {row['runs']} runs, {args.cache} cache, {args.device}")
    print(f"plain read {row['plain_gb_s']:.2f} GB/s, load {row['load_gb_s']:.2f} GB/s, ratio {row['ratio']:.2f}")
    print(
        f"looking for NaN and infinity: {row['finite_check']:+.1%} of loading without it, "
        f"{row['finite_check_cpu']:+.1%} of its processor time"
    )
    print(f"most host memory while loading: {row['peak_over_share']:.2f} x the bytes loaded")
    print(f"repacking a layer: {row['repack_layer_s'] * 1e3:.0f} ms, {row['repack_over_load']:.2f} of loading it")
    bench.keep({"benchmark": "loading", **row})


if __name__ == "__main__":
    main()

"""What batch invariance costs one MoE layer on one device: both layers are timed in turns, in one run.

python scripts/bench_batch_invariance.py [--geometry small] [--device cpu] [--tokens 1,32,256] [--json FILE]

A layer of a preset with made-up weights, one rank; on a GPU calls are chained in a CUDA graph. The ratio is that of
the medians.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from harness import Bench, checked, device_name, positives

from moe_ep import env
from moe_ep.bench.geometries import Geometry, preset
from moe_ep.bench.layers import BenchLayers, SyntheticConfig, make_weights
from moe_ep.bench.timing import time_calls, timing_of
from moe_ep.bench.workload import Routing
from moe_ep.launch.cli.options import geometry_name

ROUNDS, CHAIN = 5, 4


def make_layers(
    geometry: Geometry, device: torch.device, weights: Sequence[SyntheticConfig], invariant: bool
) -> BenchLayers:
    os.environ[env.BATCH_INVARIANT.name] = str(int(invariant))
    return BenchLayers(geometry, capacity=256, dtype=torch.bfloat16, device=device, weights=weights)


def main() -> None:
    bench = Bench(__doc__)
    parser = bench.parser
    parser.add_argument("--geometry", type=checked(geometry_name), default="small", help="preset of the layer")
    parser.add_argument("--device", type=device_name, default="cpu")
    parser.add_argument("--tokens", type=positives, default=(1, 32, 256), help="of a call, one row for each number")
    options = bench.parse()
    device = torch.device(options.device)
    geometry = preset(options.geometry)
    weights = make_weights(geometry, 1, device, seed=0)
    layers = {invariant: make_layers(geometry, device, weights, invariant) for invariant in (False, True)}
    print("tokens  us, as usual  us, batch-invariant  ratio")
    for num_tokens in options.tokens:
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(ROUNDS):
            for invariant, copies in layers.items():
                batches = copies.batches(Routing(), num_tokens, CHAIN, seed=1)
                times[invariant] += time_calls(
                    lambda i, copies=copies, batches=batches: copies.call(i, batches[i]), device=device, chain=CHAIN,
                    repeats=5,
                )  # fmt: skip
        usual, invariant_us = (timing_of(times[invariant]).median for invariant in (False, True))
        print(f"{num_tokens:6}  {usual:12.1f}  {invariant_us:19.1f}  {invariant_us / usual:5.2f}")
        row = {"tokens": num_tokens, "usual_us": usual, "invariant_us": invariant_us}
        bench.keep({"geometry": options.geometry, **row})


if __name__ == "__main__":
    main()

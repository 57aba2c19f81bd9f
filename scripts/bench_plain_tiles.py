"""Tiles for the two products of plain bf16 experts on one GPU: how long each takes, and whether it is right.

    python scripts/bench_plain_tiles.py --json tiles.jsonl

The product of w13 with the activation and the product of w2 are timed alone, in CUDA graphs of eight calls, each with
random routing of its own, with every tile that fits the GPU's shared memory. Results are compared with the plain form
for a small batch first; a tile that is wrong ends the script. moe_ep/kernels/grouped/products.py has the tiles that are
taken.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_plain_experts import LAYERS
from gemm_cases import BYTES_PER_S, FLOPS_PER_S
from harness import Bench, positive, this_gpu

from moe_ep.activation import MoEActivation
from moe_ep.bench.geometries import preset
from moe_ep.bench.results import markdown_table
from moe_ep.bench.timing import time_calls, timing_of
from moe_ep.kernels.align import moe_align_block_size
from moe_ep.kernels.grouped.products import (
    Activation,
    Blocks,
    Tiles,
    multiply_into_order,
    multiply_into_places,
    rows_of_blocks,
    shared_bytes,
    tiles_for,
    triton_multiply_into_order,
    triton_multiply_into_places,
)
from moe_ep.layer.methods import relative_error, tolerance

# Rows, columns, columns of the input in a step, warps, stages, and blocks that go through a block of columns together.
CANDIDATES = (
    *((16, columns, 128, 4, stages, 1) for columns, stages in ((64, 5), (64, 3), (128, 3))),
    *((32, columns, 128, 4, 3, 1) for columns in (64, 128)),
    *((64, 128, 64, 4, 4, group) for group in (1, 8)),
    *((64, 256, 64, 8, 3, group) for group in (1, 8)),
    *((128, 128, 64, 8, 4, group) for group in (1, 8, 16)),
    *((128, 256, 64, 8, 4, group) for group in (1, 8, 16)),
)
SILU = Activation(MoEActivation.SILU, None)
# Calls that are timed together.
CHAIN = 8


def main() -> None:
    bench = Bench(__doc__)
    parser = bench.parser
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1, 8, 64, 256, 512, 1024])
    options = bench.parse()
    device = this_gpu()
    lines = []
    for geometry, num_experts in LAYERS:
        layer = Layer(geometry, num_experts, device)
        for T in options.tokens:
            lines.append(summary([bench.keep(row) for row in layer.measure(T)]))
    print(markdown_table(lines, dict(zip(lines[0], lines[0], strict=True))))


class Layer:
    """The weights of a layer's experts, and the products with them."""

    def __init__(self, geometry: str, num_experts: int, device: torch.device) -> None:
        sizes = preset(geometry)
        self.name = f"{geometry}, {num_experts} experts"
        self.K, self.N, self.top_k = sizes.hidden_size, sizes.intermediate_size, sizes.top_k
        self.num_experts, self.like = num_experts, {"dtype": torch.bfloat16, "device": device}
        self.w13 = torch.randn(num_experts, 2 * self.N, self.K, **self.like) * self.K**-0.5
        self.w2 = torch.randn(num_experts, self.K, self.N, **self.like) * self.N**-0.5

    def measure(self, T: int) -> Iterator[dict[str, Any]]:
        """A row for each product and tile."""
        rows = torch.randn(T, self.K, **self.like)
        ids = [self._routing(T) for _ in range(CHAIN)]
        results = torch.empty(T * self.top_k, self.K, **self.like)
        for product, gated in (("w13", True), ("w2", False)):
            for tiles in (Tiles(*candidate) for candidate in CANDIDATES):
                if tiles.bytes_per_stage(gated) * tiles.num_stages > shared_bytes(self.w13.get_device()):
                    continue
                blocks = [self._blocks(each, tiles.rows) for each in ids]
                hidden = torch.zeros(blocks[0].most, self.N, **self.like)
                self._check(rows, blocks[0], product, tiles)

                def call(i: int) -> None:
                    if product == "w13":  # noqa: B023
                        self._first(triton_multiply_into_order, rows, blocks[i], hidden, tiles)  # noqa: B023
                    else:
                        triton_multiply_into_places(hidden, self.w2, None, blocks[i], results, tiles)  # noqa: B023

                us = timing_of(time_calls(call, device=rows.device, chain=CHAIN, repeats=5)).median
                taken = tiles == tiles_for(rows_of_blocks(T * self.top_k / self.num_experts), gated, rows.get_device())
                yield {
                    "layer": self.name, "tokens": T, "product": product, "tiles": list(vars(tiles).values()),
                    "taken": taken, "us": us, "floor_us": self._floor(ids[0], gated),
                }  # fmt: skip

    def _routing(self, T: int) -> torch.Tensor:
        return torch.rand(T, self.num_experts, device=self.w13.device).topk(self.top_k).indices.int()

    def _blocks(self, ids: torch.Tensor, size: int) -> Blocks:
        places, experts, used = moe_align_block_size(ids, size, self.num_experts, pad_sorted_ids=True)
        return Blocks(places, experts, used, size, ids.numel(), places.numel())

    def _first(
        self, multiply: Callable[..., None], rows: torch.Tensor, blocks: Blocks, hidden: torch.Tensor, *tiles: Tiles
    ) -> None:
        multiply(rows, None, self.top_k, self.w13, None, SILU, blocks, hidden, *tiles)

    def _check(self, rows: torch.Tensor, blocks: Blocks, product: str, tiles: Tiles) -> None:
        """Ends the script where the tiles compute something else than the plain form; of few rows, which takes long."""
        if blocks.num_places > 1024:
            return
        hidden = [torch.zeros(blocks.most, self.N, **self.like) for _ in range(2)]
        self._first(multiply_into_order.plain, rows, blocks, hidden[0])
        found = hidden
        if product == "w13":
            self._first(triton_multiply_into_order, rows, blocks, hidden[1], tiles)
        else:
            found = [torch.zeros(blocks.num_places, self.K, **self.like) for _ in range(2)]
            multiply_into_places.plain(hidden[0], self.w2, None, blocks, found[0])
            triton_multiply_into_places(hidden[0], self.w2, None, blocks, found[1], tiles)
        error = relative_error(found[1], found[0])
        if not error < tolerance(torch.bfloat16):
            sys.exit(f"{product} of {self.name} with {tiles} is off by {error:.3g} of its size")

    def _floor(self, ids: torch.Tensor, gated: bool) -> float:
        """Microseconds to read the weights of the experts that have rows, or for the products."""
        weights = (2 if gated else 1) * self.K * self.N
        active = int(ids.unique().numel())
        return max(active * weights * 2 / BYTES_PER_S, ids.numel() * weights * 2 / FLOPS_PER_S) * 1e6


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A line of the table: of each product the fastest tile, and the one that is taken."""
    line: dict[str, Any] = {"layer": rows[0]["layer"], "tokens": rows[0]["tokens"]}
    for product in ("w13", "w2"):
        of_it = [row for row in rows if row["product"] == product]
        best = min(of_it, key=lambda row: row["us"])
        taken = [row["us"] for row in of_it if row["taken"]]
        line |= {
            f"{product} floor us": best["floor_us"],
            f"{product} us": taken[0] if taken else None,
            f"{product} fastest us": best["us"],
            f"{product} fastest": str(tuple(best["tiles"])),
        }
    return line


if __name__ == "__main__":
    main()

"""Which tiles the products of plain experts are made of."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

_ITEM_BYTES = 2
# With fewer stages a tile waits for memory at every step.
_LEAST_STAGES = 2
# What Triton wants besides the stages.
_OTHER_BYTES = 1024


@dataclass(frozen=True)
class Tiles:
    """The tile of a program, and how it is computed.

    Attributes:
        rows: of one expert; what lists of rows are padded to.
        columns: of the output (with a gate, so many of gate and of up).
        inner: columns of the input in one step.
        num_warps: of a program.
        num_stages: steps that are on their way from memory, the present one among them.
        group: blocks of rows that go through a block of columns together, so that weights come from the L2 cache.
    """

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int
    group: int = 1

    def bytes_per_stage(self, gated: bool, has_f32_rows: bool = False) -> int:
        return (self.rows * (1 + has_f32_rows) + self.columns * (1 + gated)) * self.inner * _ITEM_BYTES


# Up to how many rows an expert has on average, and the tile that was fastest there on an H200
# (docs/benchmarks/plain_experts.md).
_BY_ROWS = (
    (6.0, Tiles(rows=16, columns=64, inner=128, num_warps=4, num_stages=5)),
    (20.0, Tiles(rows=32, columns=128, inner=128, num_warps=4, num_stages=3)),
    (160.0, Tiles(rows=64, columns=128, inner=64, num_warps=4, num_stages=4, group=8)),
    (float("inf"), Tiles(rows=128, columns=128, inner=64, num_warps=8, num_stages=4, group=8)),
)


def rows_of_blocks(rows_per_expert: float) -> int:
    """How many rows a block should have where experts have so many on average."""
    return next(tiles.rows for most, tiles in _BY_ROWS if rows_per_expert <= most)


@functools.lru_cache(maxsize=256)
def tiles_for(block_rows: int, gated: bool, device_index: int, has_f32_rows: bool = False) -> Tiles:
    """The tiles for blocks of so many rows that fit a GPU's shared memory."""
    return fitting(block_rows, gated, shared_bytes(device_index), has_f32_rows)


def shared_bytes(device_index: int) -> int:
    """Shared memory that a program may have; -1 is Triton's interpreter, which has no end."""
    if device_index < 0:
        return 1 << 20
    device = torch.cuda.get_device_properties(device_index)
    # Older versions of torch tell less.
    return int(getattr(device, "shared_memory_per_block_optin", device.shared_memory_per_block))


def fitting(block_rows: int, gated: bool, num_bytes: int, has_f32_rows: bool = False) -> Tiles:
    """The tiles for blocks of so many rows, with columns and stages for so much shared memory."""
    tiles = next(tiles for _, tiles in _BY_ROWS if tiles.rows == block_rows)
    room = num_bytes - _OTHER_BYTES
    while tiles.bytes_per_stage(gated, has_f32_rows) * _LEAST_STAGES > room:
        tiles = replace(tiles, columns=tiles.columns // 2)
    return replace(tiles, num_stages=min(tiles.num_stages, room // tiles.bytes_per_stage(gated, has_f32_rows)))

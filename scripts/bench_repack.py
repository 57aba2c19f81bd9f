"""How fast weights are packed and unpacked on a GPU: GB/s of source codes, one byte a weight.

    python scripts/bench_repack.py --json results.jsonl

DeepSeek-V3's w13 of eight experts, every number type; wanted: 100 GB/s.
"""

from __future__ import annotations

import torch
from harness import Bench, this_gpu

from moe_ep.bench.results import markdown_table
from moe_ep.bench.timing import time_calls, timing_of
from moe_ep.kernels.marlin.repack import pack_marlin, unpack_marlin
from moe_ep.kernels.marlin.types import WEIGHT_TYPES

EXPERTS, ROWS, COLUMNS = 8, 4096, 7168


def main() -> None:
    bench = Bench(__doc__)
    bench.parse()
    device = this_gpu()
    for type_id, kind in WEIGHT_TYPES.items():
        group = kind.group_sizes[-1]
        size = (EXPERTS, ROWS, COLUMNS)
        codes = torch.randint(0, 1 << kind.bits, size, dtype=torch.uint8, device=device)
        groups = (EXPERTS, ROWS, COLUMNS // group)
        scales = torch.rand(groups, device=device).bfloat16()
        if group == 32:  # mxfp4
            scales = torch.randint(118, 122, groups, dtype=torch.uint8, device=device)
        zeros = torch.randint(0, 16, groups, dtype=torch.uint8, device=device) if kind.has_zero_points else None
        packed = pack_marlin(codes, scales, type_id, group, zeros, gated=True)
        if not torch.equal(unpack_marlin(packed, type_id, group, gated=True)[0], codes):
            raise RuntimeError(f"{kind.scalar_type} does not come back")
        row = {"type": str(kind.scalar_type), "group": group}
        for name, call in (
            ("pack", lambda i: pack_marlin(codes, scales, type_id, group, zeros, gated=True)),  # noqa: B023
            ("unpack", lambda i: unpack_marlin(packed, type_id, group, gated=True)),  # noqa: B023
        ):
            us = timing_of(time_calls(call, device=device, chain=1, repeats=5, graph=False)).median
            row[f"{name}_ms"], row[f"{name}_gb_per_s"] = us / 1e3, codes.nbytes / us / 1e3
        bench.keep(row)
    columns = {"type": "number type", "group": "group", "pack_ms": "pack, ms", "pack_gb_per_s": "GB/s"}
    print(markdown_table(bench.rows, columns | {"unpack_ms": "unpack, ms", "unpack_gb_per_s": "unpack, GB/s"}))


if __name__ == "__main__":
    main()

"""The small kernels around the experts: routing, index lists, fp8 and back, the weighted sum; one GPU.

    python scripts/bench_index_kernels.py --json results.jsonl

Each beside an empty kernel and beside the rate of a large copy in the same run: few tokens cost launches, many cost
bytes. Times are of one call out of a chain in a CUDA graph. Every kernel is compared with its plain torch form first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from harness import Bench, positive, this_gpu

from moe_ep.bench.results import markdown_table, table
from moe_ep.bench.timing import measure_ceilings, time_calls, timing_of
from moe_ep.kernels.align import batched_moe_align_block_size, moe_align_block_size, sort_slots_by_expert
from moe_ep.kernels.mul_sum import moe_fused_mul_sum, mul_sum
from moe_ep.kernels.quantize import dequantize_rows, quantize_rows
from moe_ep.kernels.routing import fused_topk
from moe_ep.routing.topk import topk_reference

BLOCK_SIZE = 64


class Case(NamedTuple):
    """A kernel at one size: what to call, what it must give, and the bytes it has to move."""

    name: str
    call: Callable[[], object]
    is_right: Callable[[], bool]
    num_bytes: int


@triton.jit
def _empty_kernel():
    """Does nothing."""


def cases(T: int, E: int, top_k: int, K: int) -> Iterator[Case]:
    logits = torch.randn(T, E, device="cuda")
    weights, ids = fused_topk(logits, top_k, renormalize=True)
    yield Case(
        "fused top-k",
        lambda: fused_topk(logits, top_k, renormalize=True),
        lambda: torch.equal(ids, topk_reference(logits, top_k, renormalize=True)[1]),
        logits.nbytes + weights.nbytes + ids.nbytes,
    )
    aligned = moe_align_block_size(ids, BLOCK_SIZE, E)
    yield Case(
        "align",
        lambda: moe_align_block_size(ids, BLOCK_SIZE, E),
        lambda: all(map(torch.equal, (t.cpu() for t in aligned), moe_align_block_size(ids.cpu(), BLOCK_SIZE, E))),
        ids.nbytes + sum(part.nbytes for part in aligned),
    )
    expected = torch.sort(ids.flatten(), stable=True).indices.int()
    yield Case(
        "sort by expert",
        lambda: sort_slots_by_expert(ids, E),
        lambda: torch.equal(sort_slots_by_expert(ids, E)[0], expected),
        2 * ids.nbytes + 4 * E,
    )
    counts = sort_slots_by_expert(ids, E)[1][: E // 8].clone()
    room = max(T, int(counts.max()))
    batched = batched_moe_align_block_size(room, BLOCK_SIZE, counts)
    yield Case(
        "batched align",
        lambda: batched_moe_align_block_size(room, BLOCK_SIZE, counts),
        lambda: all(
            map(torch.equal, (t.cpu() for t in batched), batched_moe_align_block_size(room, BLOCK_SIZE, counts.cpu()))
        ),
        counts.nbytes + batched[0].nbytes + batched[1].nbytes,
    )
    rows = torch.randn(T, K, device="cuda").bfloat16()
    packed = quantize_rows(rows)
    yield Case(
        "fp8 quantization",
        lambda: quantize_rows(rows),
        lambda: torch.equal(packed.cpu(), quantize_rows(rows.cpu())),
        rows.nbytes + packed.nbytes,
    )
    yield Case(
        "fp8 to bf16",
        lambda: dequantize_rows(packed, K, rows.dtype),
        lambda: torch.equal(dequantize_rows(packed, K, rows.dtype).cpu(), dequantize_rows(packed.cpu(), K, rows.dtype)),
        rows.nbytes + packed.nbytes,
    )
    outputs = torch.randn(T, top_k, K, device="cuda").bfloat16()
    target = torch.empty_like(rows)
    yield Case(
        "weighted sum",
        lambda: moe_fused_mul_sum(outputs, weights, target, ids),
        lambda: torch.equal(target, mul_sum.plain(outputs, weights, torch.empty_like(rows), ids, None)),
        outputs.nbytes + target.nbytes + weights.nbytes + ids.nbytes,
    )


def by_tokens(rows: list[dict[str, Any]], tokens: list[int]) -> str:
    """A markdown table with a line for each kernel and a column for each number of tokens."""
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault(row["kernel"], {"kernel": row["kernel"]})
        line[str(row["tokens"])] = f"{row['us']:.2f}"
        line["share"] = f"{row['share_of_copy']:.2f}"
    columns = {"kernel": "kernel"} | {str(count): f"T = {count}, us" for count in tokens}
    return markdown_table(list(lines.values()), columns | {"share": f"share of that rate at {tokens[-1]}"})


def main() -> None:
    bench = Bench(__doc__)
    parser = bench.parser
    parser.add_argument("--tokens", nargs="+", type=positive, default=[1, 16, 128, 4096])
    parser.add_argument("--experts", type=positive, default=256)
    parser.add_argument("--topk", type=positive, default=8)
    parser.add_argument("--hidden", type=positive, default=7168)
    parser.add_argument("--markdown", action="store_true", help="a table with a column for each number of tokens")
    args = bench.parse()
    device = this_gpu()
    ceiling = measure_ceilings(device, torch.bfloat16).memory_bytes_per_s

    def time_us(call: Callable[[], object]) -> float:
        return timing_of(time_calls(lambda _: call(), device=device, chain=20)).median

    empty_us = time_us(lambda: _empty_kernel[(1,)]())
    for T in args.tokens:
        for case in cases(T, args.experts, args.topk, args.hidden):
            case.call()
            torch.cuda.synchronize()
            if not case.is_right():
                raise RuntimeError(f"{case.name} is wrong at {T} tokens")
            us = time_us(case.call)
            row = {"kernel": case.name, "tokens": T, "us": us, "over_empty_us": us - empty_us, "bytes": case.num_bytes}
            row["share_of_copy"] = case.num_bytes / us * 1e6 / ceiling
            bench.keep(row | {"empty_us": empty_us, "copy_tb_per_s": ceiling / 1e12})
    print(f"an empty kernel takes {empty_us:.2f} us, a large copy moves {ceiling / 1e12:.2f} TB/s")
    if args.markdown:
        print(by_tokens(bench.rows, args.tokens))
        return
    columns = {"kernel": "kernel", "tokens": "T", "us": "us", "over_empty_us": "over empty", "share_of_copy": "of copy"}
    print(table(bench.rows, columns))


if __name__ == "__main__":
    main()

"""Where everything of a low-latency batch lies in symmetric memory, and how much of it there is.

The buffers themselves are described in cuda/low_latency.cuh; offsets are computed here and handed to the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moe_ep.kernels.quantize import GROUP_SIZE, quantized_row_bytes

_ALIGNMENT = 512
_LINE_BYTES = 16
# Batches between prepare and finalize that have buffers of their own.
BATCHES_IN_FLIGHT = 2
# Up to so many tokens of a rank travel as lines: data and flag in one store, twice the bytes.
LINE_TOKENS = 16
# As cuda/low_latency.cuh describes them.
BUFFERS = (
    "header", "meta", "row_flags", "result_flags", "rows", "results", "row_lines", "result_lines", "meta_outbox",
    "outbox",
)  # fmt: skip
_LOCALS_OF_LINE, _WEIGHTS_OF_LINE = 4, 2


def align(num_bytes: int, alignment: int = _ALIGNMENT) -> int:
    """The next multiple."""
    return -(-num_bytes // alignment) * alignment


def offsets_of(sizes: dict[str, int]) -> dict[str, int]:
    """Where each part begins when they lie one after the other, aligned."""
    found, end = {}, 0
    for name, size in sizes.items():
        found[name] = end
        end += align(size)
    return found


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Buffers of one batch, the same on every rank.

    Example: 8 ranks, 128 tokens, K=7168, top-8, bf16 on the wire: 36.9 MB a batch.

    Attributes:
        num_ranks, capacity, hidden_size, topk: R, tokens per rank, K, slots of a token.
        fp8: rows travel as e4m3 codes with scales.
        device_api: some ranks are out of each other's reach and NVSHMEM's device library puts what goes to them.
    """

    num_ranks: int
    capacity: int
    hidden_size: int
    topk: int
    fp8: bool
    device_api: bool = False

    @property
    def line_tokens(self) -> int:
        return 0 if self.device_api else min(LINE_TOKENS, self.capacity)

    @property
    def meta_lines(self) -> int:
        return -(-self.topk // _LOCALS_OF_LINE) - (-self.topk // _WEIGHTS_OF_LINE)

    @property
    def row_bytes(self) -> int:
        return align(quantized_row_bytes(self.hidden_size), 16) if self.fp8 else 2 * self.hidden_size

    @property
    def lines_of_row(self) -> int:
        if self.fp8:
            return self.hidden_size // 8 + -(-self.hidden_size // GROUP_SIZE)
        return self.hidden_size // 4

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each buffer, in the order in which they lie."""
        rows, line_rows = self.num_ranks * self.capacity, self.num_ranks * self.line_tokens
        meta, outgoing = 2 * _LINE_BYTES * self.meta_lines * rows, int(self.device_api)
        sizes = (
            16 * self.num_ranks,
            meta,
            8 * rows,
            8 * rows,
            self.row_bytes * rows,
            2 * self.hidden_size * rows,
            _LINE_BYTES * self.lines_of_row * line_rows,
            _LINE_BYTES * (self.hidden_size // 4) * line_rows,
            meta * outgoing,
            2 * self.hidden_size * rows * outgoing,
        )
        return dict(zip(BUFFERS, sizes, strict=True))

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each buffer begins."""
        return offsets_of(self.sizes)

    @property
    def batch_bytes(self) -> int:
        return sum(align(size) for size in self.sizes.values())

    @property
    def symmetric_bytes(self) -> int:
        """What all batches in flight take of the arena."""
        return BATCHES_IN_FLIGHT * self.batch_bytes

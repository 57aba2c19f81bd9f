"""Where everything of a low-latency batch lies in symmetric memory, and how much of it there is.

The buffers themselves are described in cuda/low_latency.cuh; offsets are computed here and handed to the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moe_ep.kernels.quantize import quantized_row_bytes

_ALIGNMENT = 512
_LINE_BYTES = 16
# Batches between prepare and finalize that have buffers of their own.
BATCHES_IN_FLIGHT = 2
# Rows of 16 bits of up to so many tokens of a rank travel as packets, with a flag in every 128 bytes; those of more lie
# at once where experts read them by reference.
ROW_PACKET_TOKENS = 32
# As cuda/low_latency.cuh describes them.
BUFFERS = (
    "header", "meta", "row_flags", "result_flags", "rows", "results", "row_packets", "result_packets", "meta_outbox",
    "outbox",
)  # fmt: skip
_LOCALS_OF_LINE, _WEIGHTS_OF_LINE = 4, 2
# A warp stores four packets at a time.
_PACKET_BYTES, _DATA_OF_PACKET, _PACKETS_OF_WARP = 128, 112, 4


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


def _packet_bytes(num_bytes: int) -> int:
    return _PACKETS_OF_WARP * _PACKET_BYTES * -(-num_bytes // (_PACKETS_OF_WARP * _DATA_OF_PACKET))


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Buffers of one batch, the same on every rank.

    Example: 8 ranks, 128 tokens, K=7168, top-8, bf16 on the wire: 35.9 MB a batch.

    Attributes:
        num_ranks, capacity, hidden_size, topk: R, tokens per rank, K, slots of a token.
        fp8: rows travel as e4m3 codes with scales.
        device_api: some ranks are out of each other's reach or not joined by NVLink. NVSHMEM's device library puts what
            goes to the former, and nothing travels as packets; elsewhere all results and all rows in e4m3 do.
    """

    num_ranks: int
    capacity: int
    hidden_size: int
    topk: int
    fp8: bool
    device_api: bool = False

    @property
    def row_packet_tokens(self) -> int:
        """Up to so many tokens of a rank its rows travel as packets."""
        if self.device_api:
            return 0
        return self.capacity if self.fp8 else min(ROW_PACKET_TOKENS, self.capacity)

    @property
    def meta_lines(self) -> int:
        return -(-self.topk // _LOCALS_OF_LINE) - (-self.topk // _WEIGHTS_OF_LINE)

    @property
    def row_bytes(self) -> int:
        return align(quantized_row_bytes(self.hidden_size), 16) if self.fp8 else 2 * self.hidden_size

    @property
    def row_packet_bytes(self) -> int:
        """Of a row as packets; those of fp8 have their scales beside the epochs."""
        return _packet_bytes((1 if self.fp8 else 2) * self.hidden_size)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each buffer, in the order in which they lie."""
        rows = self.num_ranks * self.capacity
        meta, puts = 2 * _LINE_BYTES * self.meta_lines * rows, int(self.device_api)
        sizes = (
            16 * self.num_ranks,
            meta,
            8 * rows,
            8 * rows * puts,
            self.row_bytes * rows * int(puts or not self.fp8),
            2 * self.hidden_size * rows * puts,
            self.row_packet_bytes * self.num_ranks * self.row_packet_tokens,
            _packet_bytes(2 * self.hidden_size) * rows * (1 - puts),
            meta * puts,
            2 * self.hidden_size * rows * puts,
        )
        return dict(zip(BUFFERS, sizes, strict=True))

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each buffer begins."""
        return offsets_of(self.sizes)

    @cached_property
    def batch_bytes(self) -> int:
        return sum(align(size) for size in self.sizes.values())

    @property
    def symmetric_bytes(self) -> int:
        """What all batches in flight take of the arena."""
        return BATCHES_IN_FLIGHT * self.batch_bytes

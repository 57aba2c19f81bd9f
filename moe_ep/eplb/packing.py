"""An expert as one row of bytes: all its tensors side by side, so that one message carries it.

A row is the tensors' bytes in the order of the method's list, each from a multiple of 16 on, and 16 bytes at the end
that the sender writes and the receiver checks: the sum of everything before as int64 words, and a stamp that says which
expert of which rearrangement this is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from moe_ep.arguments import check_tensors

_ALIGNMENT = 16


class ExpertRows:
    """The experts of one layer on this rank, to be packed into rows and written back from rows.

    Args:
        tensors: everything that moves with an expert, each `[num_slots, ...]` and contiguous.

    Attributes:
        parts: each tensor as bytes uint8 `[num_slots, bytes]`, and where it begins in a row.
        expert_bytes, row_bytes: of one expert, without and with what fills a row up.
        signature: of shapes and dtypes, the same on every rank.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        if not isinstance(tensors, Sequence):
            kind = "a tensor" if isinstance(tensors, torch.Tensor) else repr(tensors)
            raise ValueError(f"expert_weights of a layer are {kind}; they must be a list of tensors (local_slots, ...)")
        check_tensors(**{f"tensor {index} of a layer's expert_weights": tensor for index, tensor in enumerate(tensors)})
        if not tensors or any(tensor.dim() < 1 or tensor.size(0) != tensors[0].size(0) for tensor in tensors):
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise ValueError(f"expert_weights of a layer have shapes {shapes}; they must all be (local_slots, ...)")
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(
                    f"expert_weights hold a tensor {tuple(tensor.shape)} with strides {tensor.stride()}; experts move "
                    f"as contiguous bytes, keep it contiguous"
                )
        self.num_slots = tensors[0].size(0)
        self.device = tensors[0].device
        self.parts: list[tuple[torch.Tensor, int]] = []
        size = 0
        for tensor in tensors:
            # A rank without experts has the same parts, of no slots.
            if width := math.prod(tensor.shape[1:]):
                part = tensor.view(self.num_slots, width).view(torch.uint8)
                self.parts.append((part, size))
                size += -(-part.size(1) // _ALIGNMENT) * _ALIGNMENT
        self.row_bytes = size + _ALIGNMENT
        self.expert_bytes = sum(part.size(1) for part, _ in self.parts)
        self.signature = hashlib.sha256(
            repr([(tuple(tensor.shape[1:]), str(tensor.dtype)) for tensor in tensors]).encode()
        ).hexdigest()

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging for moving any number of these experts: a row for each slot, and one more."""
        return (self.num_slots + 1) * self.row_bytes

    def rows(self, staging: torch.Tensor) -> torch.Tensor:
        """A staging buffer, uint8 `[at least staging_bytes]`, as rows `[num_slots + 1, row_bytes]`."""
        return staging[: self.staging_bytes].view(self.num_slots + 1, self.row_bytes)

    def pack(self, slots: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """Copies the experts in slots into rows."""
        in_slots, in_rows = self._pieces(slots, rows)
        if in_slots:
            torch._foreach_copy_(in_rows, in_slots)

    def write(self, rows: Sequence[torch.Tensor], slots: Sequence[int]) -> None:
        """Copies the experts in rows into slots, in place."""
        in_slots, in_rows = self._pieces(slots, rows)
        if in_slots:
            torch._foreach_copy_(in_slots, in_rows)

    def _pieces(
        self, slots: Sequence[int], rows: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors of each expert, and where they lie in its row; as words of 8 bytes, so that one fast kernel
        copies them."""
        in_slots, in_rows = [], []
        for slot, row in zip(slots, rows, strict=True):
            for part, start in self.parts:
                fits = not (part.size(1) % 8 or part.storage_offset() % 8 or part.data_ptr() % 8)
                dtype = torch.int64 if fits else torch.uint8
                in_slots.append(part[slot].view(dtype))
                in_rows.append(row[start : start + part.size(1)].view(dtype))
        return in_slots, in_rows


def seal(rows: torch.Tensor, stamps: Sequence[int]) -> None:
    """Writes sums and stamps at the ends of rows `[n, row_bytes]` that are going to be sent."""
    words = rows.view(torch.int64)
    words[:, -2] = words[:, :-2].sum(dim=1)
    words[:, -1] = torch.tensor(stamps, device="cpu").to(rows.device, non_blocking=True)


def intact(rows: torch.Tensor, stamps: dict[int, int]) -> bool:
    """Whether received rows `[n, row_bytes]` are what was to be sent, those that have a stamp; waits for the stream."""
    words = rows.view(torch.int64)
    expected = torch.tensor([stamps.get(row, -1) for row in range(len(rows))], device="cpu")
    expected = expected.to(rows.device, non_blocking=True)
    whole = (words[:, :-2].sum(dim=1) == words[:, -2]) & (words[:, -1] == expected)
    return bool((whole | (expected < 0)).all())

"""Which weights share a scale: all of them, an output row, a group of input columns, or a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_ep.checkpoint.formats.layout import Role, TensorLayout
from moe_ep.errors import CheckpointError
from moe_ep.layer.weight_loading import FusedMoeWeightScaleSupported as Kind


@dataclass(frozen=True)
class ScaleShape:
    """The scales of a matrix `[N, K]`.

    Attributes:
        kind: TENSOR (one), CHANNEL (`[N, 1]`), GROUP (`[N, ceil(K / columns)]`) or BLOCK
            (`[ceil(N / rows), ceil(K / columns)]`).
        columns: input columns that share a scale; 1 where they all do.
        rows: output rows that share one, of a block.
    """

    kind: Kind
    columns: int = 1
    rows: int = 1

    @classmethod
    def of_blocks(cls, argument: str, size: object) -> ScaleShape:
        """Of blocks of that size; CheckpointError with the argument's name unless it is two positive whole numbers."""
        if not isinstance(size, list) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
            raise CheckpointError(f"{argument} is {size!r}; it must be two positive whole numbers")
        return cls(Kind.BLOCK, rows=size[0], columns=size[1])

    @property
    def group_size(self) -> int:
        """As in `CanonicalWeights`."""
        return self.columns if self.kind in (Kind.GROUP, Kind.BLOCK) else -1

    def shape(self, num_rows: int, num_columns: int) -> tuple[int, ...]:
        """On disk; the last block of a side may be smaller."""
        if self.kind is Kind.TENSOR:
            return (1,)
        if self.kind is Kind.CHANNEL:
            return (num_rows, 1)
        return (-(-num_rows // self.rows), -(-num_columns // self.columns))

    def layout(
        self,
        dtypes: tuple[torch.dtype, ...],
        num_rows: int,
        num_columns: int,
        held: torch.dtype | None = None,
    ) -> TensorLayout:
        """What a format says of the tensor of the scales."""
        return TensorLayout(
            dtypes,
            self.shape(num_rows, num_columns),
            role=Role.GROUPS,
            out_dim=0,
            in_dim=1 if self.kind in (Kind.GROUP, Kind.BLOCK) else None,
            held=held,
        )

    def per_row(self, scales: torch.Tensor, num_rows: int) -> torch.Tensor:
        """`[..., N, G]`, from scales with any leading dimensions."""
        if self.kind is Kind.TENSOR:
            return scales.unsqueeze(-1).expand(*scales.shape[:-1], num_rows, 1).contiguous()
        if self.kind is Kind.BLOCK:
            return scales.repeat_interleave(self.rows, dim=-2)[..., :num_rows, :].contiguous()
        return scales

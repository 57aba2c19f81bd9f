"""Which weights share a scale: all of them, an output row, a group of input columns, or a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_ep.checkpoint.formats.layout import Role, TensorLayout


@dataclass(frozen=True)
class ScaleShape:
    """The scales of a matrix `[N, K]`.

    Attributes:
        kind: tensor (one), channel (`[N, 1]`), group (`[N, ceil(K / columns)]`) or block
            (`[ceil(N / rows), ceil(K / columns)]`).
        columns: input columns that share a scale; 1 where they all do.
        rows: output rows that share one, of a block.
    """

    kind: str
    columns: int = 1
    rows: int = 1

    @property
    def group_size(self) -> int:
        """As in `CanonicalWeights`."""
        return self.columns if self.kind in ("group", "block") else -1

    def shape(self, num_rows: int, num_columns: int) -> tuple[int, ...]:
        """On disk; the last block of a side may be smaller."""
        if self.kind == "tensor":
            return (1,)
        if self.kind == "channel":
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
            in_dim=1 if self.kind in ("group", "block") else None,
            held=held,
        )

    def per_row(self, scales: torch.Tensor, num_rows: int) -> torch.Tensor:
        """`[..., N, G]`, from scales with any leading dimensions."""
        if self.kind == "tensor":
            return scales.unsqueeze(-1).expand(*scales.shape[:-1], num_rows, 1).contiguous()
        if self.kind == "block":
            return scales.repeat_interleave(self.rows, dim=-2)[..., :num_rows, :].contiguous()
        return scales

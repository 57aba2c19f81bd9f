"""What a step of all ranks must bring and send home, by tensors in place of backend_cases' loops: for large batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_ep.dispatch.batch import wire_dtype
from moe_ep.kernels.quantize import GROUP_SIZE
from tests.dispatch.backend_cases import Case, Setting, expert


class BatchOracle:
    """The tokens of all ranks in the order (source rank, token), and what one rank gets of them.

    Attributes:
        rows: `[all tokens, K]` as they arrive.
        ids, weights, owners: `[all tokens, topk]`: ids, router weights, the rank that each slot goes to or -1.
    """

    def __init__(self, setting: Setting, device: torch.device | str = "cpu") -> None:
        case, sources = setting.case, setting.inputs
        self.setting, self.on_input = setting, case.on_input
        self.ids = torch.cat([source.ids for source in sources]).long().to(device)
        self.weights = torch.cat([source.weights for source in sources]).to(device)
        rows = torch.cat([source.rows for source in sources]).to(device)
        if case.on_input:
            rows = (rows * self.weights[:, :1]).to(case.dtype)
        self.rows = wire_rows(case, rows)
        numbers = [len(source.rows) for source in sources]
        source_of = torch.repeat_interleave(torch.arange(len(sources)), torch.tensor(numbers)).to(device)
        table = torch.tensor([setting.owner[number] for number in range(case.num_experts)], device=device)
        routed = table[self.ids.clamp(0, case.num_experts - 1)]
        owners = torch.where(self.ids < case.num_experts, routed, source_of[:, None])
        self.owners = torch.where(self.ids >= 0, owners, -1)
        first = sum(numbers[: setting.rank])
        self._own = slice(first, first + numbers[setting.rank])

    def batched(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(numbers of rows `[El]`, those rows expert by expert, ids of the experts `[El]`)."""
        local = sorted(self.setting.local.items(), key=lambda item: item[1])
        experts = torch.tensor([number for number, _ in local], device=self.ids.device)
        here = torch.where(self.owners == self.setting.rank, self.ids, -1)
        found = (here == experts[:, None, None]).any(dim=2)
        return found.sum(dim=1), self.rows[found.nonzero()[:, 1]], experts

    def standard(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows, ids with -1 for those elsewhere, weights) that arrive."""
        here = self.owners == self.setting.rank
        come = here.any(dim=1)
        return self.rows[come], torch.where(here, self.ids, -1)[come], self.weights[come]

    def reduced(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The stand-in experts' results of these rows, weighted and summed in slot order; -1 is left out."""
        total, seen = torch.zeros(rows.shape, device=rows.device), torch.zeros(len(rows), 1, device=rows.device) > 0
        for slot in range(ids.size(1)):
            number, has_expert = ids[:, slot, None], ids[:, slot, None] >= 0
            value = expert(number.float(), rows).float()  # type: ignore[arg-type]
            if not self.on_input:
                value = value * weights[:, slot, None]
            total = torch.where(has_expert, torch.where(seen, total + value, value), total)
            seen = seen | has_expert
        return total.to(wire_dtype(rows.dtype))

    def output(self) -> torch.Tensor:
        """What this rank's tokens come to: the sums of all ranks, added in rank order."""
        rows, ids, weights, owners = (part[self._own] for part in (self.rows, self.ids, self.weights, self.owners))
        total = torch.zeros(rows.shape, device=rows.device)
        for rank in range(len(self.setting.inputs)):
            on_rank = torch.where(owners == rank, ids, -1)
            part = self.reduced(rows, on_rank, weights).float()
            total = torch.where((on_rank >= 0).any(dim=1, keepdim=True), total + part, total)
        return total.to(rows.dtype)


def wire_rows(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """backend_cases.wire for all rows at once."""
    if case.code_dtype is None or not len(rows):
        return rows
    groups = F.pad(rows.float(), (0, -rows.size(1) % GROUP_SIZE)).view(len(rows), -1, GROUP_SIZE)
    largest = groups.abs().amax(dim=2, keepdim=True)
    # By a tensor: a GPU multiplies by the reciprocal of a number.
    is_int8 = case.code_dtype == torch.int8
    most = torch.full_like(largest, 127.0 if is_int8 else 448.0)
    scales = (largest / most).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (groups / scales).round() if is_int8 else (groups / scales).clamp(-448, 448).to(case.code_dtype)
    return (codes.float() * scales).view(len(rows), -1)[:, : rows.size(1)].to(rows.dtype)

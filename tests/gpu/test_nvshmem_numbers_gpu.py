"""8-bit codes of the NVSHMEM backends' kernels: every pair of mantissas of a column and its group's largest one."""

from __future__ import annotations

import pytest
import torch

from moe_ep.kernels.quantize import GROUP_SIZE, dequantize_rows, quantize_rows
from tests.dispatch.backend_cases import Case
from tests.gpu.ranks_of_one_gpu import Ranks, on_one_gpu

pytestmark = pytest.mark.gpu
HIDDEN_SIZE = 16 * GROUP_SIZE
# Below the largest column's, down to where codes are 0.
BINADES = 20


@pytest.mark.parametrize(
    ("dtype", "mantissa_bits", "largest_exponents"),
    [(torch.bfloat16, 7, (0, 3, -79, 88, -110, 127)), (torch.float16, 10, (15, 2))],
    ids=["bf16", "f16"],
)
@pytest.mark.parametrize("code_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_codes_of_all_mantissas(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    mantissa_bits: int,
    largest_exponents: tuple[int, ...],
    code_dtype: torch.dtype,
) -> None:
    groups = groups_of_all_mantissas(mantissa_bits)
    rows = groups[: len(groups) // 16 * 16].view(-1, HIDDEN_SIZE)
    on_one_gpu(monkeypatch, 1)
    shape = {"hidden_size": HIDDEN_SIZE, "topk": 1, "num_experts": 1, "tokens": (len(rows),), "capacity": len(rows)}
    case = Case(dtype=dtype, code_dtype=code_dtype, **shape)
    ranks = Ranks(case, 1, "nvshmem_high_throughput")
    for exponent in largest_exponents:
        given = torch.ldexp(rows, torch.tensor(exponent, device="cuda")).to(dtype)
        ranks.args[0] = (given, *ranks.args[0][1:])
        (received,) = ranks.prepare()
        expected = dequantize_rows(quantize_rows(given, code_dtype), HIDDEN_SIZE, dtype, code_dtype)
        assert torch.equal(received[0].view(torch.int16), expected.view(torch.int16)), exponent


def groups_of_all_mantissas(bits: int) -> torch.Tensor:
    """f32 `[groups, 128]` on the GPU: the first column is the largest, in [1, 2), and the others have signs."""
    mantissas = 1 + torch.arange(1 << bits, device="cuda") / (1 << bits)
    columns = torch.cat([mantissas * 2.0**-binade for binade in range(BINADES)])
    columns = torch.cat([columns, torch.zeros(-len(columns) % (GROUP_SIZE - 1), device="cuda")])
    columns = columns.view(1, -1, GROUP_SIZE - 1).expand(len(mantissas), -1, -1)
    largest = mantissas[:, None, None].expand(-1, columns.size(1), 1)
    groups = torch.cat([largest, columns.minimum(largest)], dim=2).flatten(0, 1)
    signs = torch.randint(2, groups.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) * 2 - 1
    return groups * signs

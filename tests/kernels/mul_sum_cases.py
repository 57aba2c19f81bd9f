"""Inputs of the weighted sum, shared by its tests on the CPU, on GPUs and in Triton's interpreter."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass

import torch

# Rounding of f32 sums of at most 32 products, relative to the sum of their magnitudes, and one rounding to the dtype.
SUM_RTOL = 32 * torch.finfo(torch.float32).eps


@dataclass(frozen=True, kw_only=True)
class Case:
    num_tokens: int
    topk: int
    hidden_size: int
    dtype: torch.dtype
    ids: str

    def __str__(self) -> str:
        return f"T{self.num_tokens}-k{self.topk}-K{self.hidden_size}-{str(self.dtype)[6:]}-{self.ids}"


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CASES = [
    Case(num_tokens=num_tokens, topk=topk, hidden_size=hidden_size, dtype=dtype, ids=ids)
    for num_tokens, topk, hidden_size, dtype, ids in itertools.product(
        (1, 5), (1, 3, 8), (32, 300, 2048), DTYPES, ("none", "ids", "mapped")
    )
]
# The interpreter is slow: several blocks a row, or several slots, not both.
INTERPRETER_CASES = [
    case for case in CASES if (case.num_tokens, case.topk, case.hidden_size) in ((5, 3, 300), (1, 8, 32))
]


def make_inputs(case: Case, device: str) -> dict[str, torch.Tensor | None]:
    """Arguments of moe_fused_mul_sum; slots that do not count hold NaN."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.num_tokens, case.topk)
    inputs = torch.randn(*shape, case.hidden_size, generator=generator)
    weights = torch.rand(shape, generator=generator)
    ids = expert_map = None
    if case.ids != "none":
        ids = torch.randint(-1, 6, shape, generator=generator, dtype=torch.int32)
        counts = ids >= 0
        if case.ids == "mapped":
            expert_map = torch.tensor([-1, 0, 1, -1, 2, -1], dtype=torch.int32)
            counts &= expert_map[ids.clamp(min=0)] >= 0
        inputs[~counts] = float("nan")
        weights[~counts] = float("nan")
    made = {"inputs": inputs.to(case.dtype), "topk_weights": weights, "topk_ids": ids, "expert_map": expert_map}
    return {name: None if tensor is None else tensor.to(device) for name, tensor in made.items()}


def sum_by_hand(
    inputs: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(f64 sums, f64 sums of magnitudes), a token and a slot at a time, skipped slots never touched."""
    total = torch.zeros(inputs.size(0), inputs.size(2), dtype=torch.float64)
    magnitude = torch.zeros_like(total)
    for token in range(inputs.size(0)):
        for slot in range(inputs.size(1)):
            expert = 0 if topk_ids is None else int(topk_ids[token, slot])
            if expert < 0 or (expert_map is not None and int(expert_map[expert]) < 0):
                continue
            term = inputs[token, slot].double().cpu() * float(topk_weights[token, slot])
            total[token] += term
            magnitude[token] += term.abs()
    return total, magnitude


def assert_is_the_sum(output: torch.Tensor, arguments: dict[str, torch.Tensor | None]) -> None:
    expected, magnitude = sum_by_hand(**arguments)
    allowed = magnitude * SUM_RTOL + expected.abs() * torch.finfo(output.dtype).eps
    assert ((output.double().cpu() - expected).abs() <= allowed + torch.finfo(output.dtype).tiny).all()


def check_triton(device: str, cases: list[Case]) -> None:
    """The Triton kernel on every case, in place, with the bits of the reference; the CPU needs TRITON_INTERPRET=1."""
    from moe_ep.kernels.mul_sum import mul_sum, triton_mul_sum

    for case in cases:
        arguments = make_inputs(case, device)
        inputs, weights, ids, expert_map = arguments.values()
        output = inputs.new_full((case.num_tokens, case.hidden_size), float("nan"))
        assert triton_mul_sum(inputs, weights, output, ids, expert_map) is output
        assert_is_the_sum(output, arguments)
        expected = mul_sum.plain(inputs, weights, torch.empty_like(output), ids, expert_map)
        # The interpreter rounds f32 to bf16 towards zero, so there bf16 agrees only as far as checked above.
        assert torch.equal(output, expected) or (device == "cpu" and case.dtype == torch.bfloat16), case


def check_far_rows() -> None:
    """Slots or columns that lie billions of elements apart, in a file of which little exists; in the interpreter."""
    from moe_ep.kernels.mul_sum import triton_mul_sum

    apart = 1 << 30
    with tempfile.NamedTemporaryFile() as file:
        memory = torch.from_file(file.name, shared=True, size=2 * apart + 3, dtype=torch.float16)
        for slot_stride, column_stride in ((apart, 1), (1, apart)):
            inputs = memory.as_strided((1, 3, 3), (0, slot_stride, column_stride))
            inputs.copy_(torch.arange(9.0).view(1, 3, 3))
            output = triton_mul_sum(inputs, torch.tensor([[1.0, 0.5, 0.25]]), torch.empty(1, 3), None, None)
            assert output.tolist() == [[3.0, 4.75, 6.5]]

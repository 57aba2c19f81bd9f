"""What bench_gemm.py times: layers of models on one of eight ranks, and the rows of their experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moe_ep.activation import MoEActivation
from moe_ep.kernels.marlin.types import WeightType, weight_type
from moe_ep.scalar_type import scalar_types

BYTES_PER_S, FLOPS_PER_S = 4.3e12, 790e12


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer on one rank: local experts, hidden and intermediate size, number type and group size."""

    experts: int
    K: int
    N: int
    kind: str = "uint4b8"
    group: int = 128
    activation: MoEActivation = MoEActivation.SILU
    bias: bool = False

    @property
    def type(self) -> WeightType:
        return weight_type(getattr(scalar_types, self.kind).id)

    @property
    def weights(self) -> str:
        """The name of the scheme in WEIGHTS."""
        return next(name for name, scheme in WEIGHTS.items() if scheme == (self.kind, self.group))

    @property
    def scale_dtype(self) -> torch.dtype:
        if self.kind != "float4_e2m1f":
            return torch.bfloat16
        return torch.float8_e4m3fn if self.group == 16 else torch.uint8

    @property
    def num_bytes(self) -> float:
        """Bytes of all codes, scales and zero points."""
        group_bytes = self.scale_dtype.itemsize * (2 if self.type.has_zero_points else 1)
        return self.experts * 3 * self.K * self.N * (self.type.bits / 8 + group_bytes / self.group)

    def floor_us(self, counts: list[int]) -> float:
        """The time below which no version runs much faster, for these rows of the experts."""
        num_bytes = self.num_bytes * sum(count > 0 for count in counts) / self.experts
        return 1e6 * max(num_bytes / BYTES_PER_S, 6 * sum(counts) * self.K * self.N / FLOPS_PER_S)


SHAPES = {
    "qwen3-235b": Shape(experts=16, K=4096, N=1536),
    "deepseek-v3": Shape(experts=32, K=7168, N=2048),
    "mixtral": Shape(experts=1, K=4096, N=14336),
    "qwen3-30b": Shape(experts=16, K=2048, N=768),
    "kimi-k2": Shape(experts=48, K=7168, N=2048),
    "deepseek-v4-flash": Shape(experts=32, K=4096, N=2048, kind="float4_e2m1f", group=32),
    "gpt-oss-120b": Shape(
        experts=16, K=2880, N=2880, kind="float4_e2m1f", group=32, activation=MoEActivation.SWIGLUOAI, bias=True
    ),
}

# Number type and group size of weights by the name of a scheme.
WEIGHTS = {
    "int4": ("uint4b8", 128),
    "int4-g32": ("uint4b8", 32),
    "uint4": ("uint4", 128),
    "int8": ("uint8b128", 128),
    "fp8": ("float8_e4m3fn", 128),
    "fp8-channel": ("float8_e4m3fn", -1),
    "mxfp8": ("float8_e4m3fn", 32),
    "mxfp4": ("float4_e2m1f", 32),
    "nvfp4": ("float4_e2m1f", 16),
}


# Those that peers are timed with.
OF_PEERS = {
    "torch": ("int4",),
    "humming": ("int4", "int4-g32", "int8", "fp8", "mxfp8", "mxfp4"),
    "humming-int8": ("int4", "int8"),
    "humming-fp8": ("int4", "fp8", "mxfp4"),
    "vllm": ("int4",),
    "deepgemm": ("fp8",),
}


def with_weights(shape: Shape, name: str) -> Shape:
    kind, group = WEIGHTS[name]
    return replace(shape, kind=kind, group=group)


def cases_of(name: str, shape: Shape, row_counts: list[int], skewed: bool) -> list[tuple[str, list[int]]]:
    """(label, rows of every expert) of all that is timed of a shape."""
    cases = [(str(count), [count] * shape.experts) for count in row_counts]
    if not skewed:
        return cases
    active = -(-shape.experts * 3 // 4)
    for mean in (8, 64) if shape.experts > 1 else ():
        weights = [(i + 1) ** -0.5 for i in range(active)]
        zipf = [max(1, round(mean * active * weight / sum(weights))) for weight in weights]
        even = [sum(zipf) * (i + 1) // active - sum(zipf) * i // active for i in range(active)]
        for label, counts in (("zipf", zipf), ("even", even)):
            cases.append((f"{label} {mean}", counts + [0] * (shape.experts - active)))
    for tokens in (1, 8, 32, 64, 128) if name.split()[0] == "deepseek-v3" else ():
        chosen = torch.rand(8 * tokens, 8 * shape.experts).topk(8).indices
        counts = torch.bincount(chosen.flatten(), minlength=8 * shape.experts)[: shape.experts].tolist()
        cases.append((f"T={tokens}", counts))
    return cases

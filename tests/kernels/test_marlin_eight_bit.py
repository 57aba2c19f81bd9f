"""The kernels for rows of 8 bits, without a GPU: scratch, where they are faster, how they compile."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ep.activation import MoEActivation
from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.kernels import jit
from moe_ep.kernels.marlin import compute, eight_bit
from moe_ep.kernels.marlin.experts import MarlinExperts
from moe_ep.kernels.marlin.functional import fused_marlin_moe
from moe_ep.kernels.marlin.params import Rows
from moe_ep.kernels.marlin.plain import TOLERANCES
from moe_ep.kernels.marlin.types import WEIGHT_TYPES, WeightType
from moe_ep.kernels.marlin.weights import WeightPair
from moe_ep.kernels.quantize import quantize_rows, round_rows, row_values, split_rows
from moe_ep.layer.methods.base import relative_error
from moe_ep.quantization.canonical_weights import CanonicalWeights
from moe_ep.scalar_type import scalar_types
from tests.kernels.marlin_cases import E, arguments, make, moe_config

FP8, INT8 = torch.float8_e4m3fn, torch.int8
E4M3, UINT4, UINT4B8, MXFP4 = (
    WEIGHT_TYPES[kind.id].packed_for(32, FP8)
    for kind in (
        scalar_types.float8_e4m3fn, scalar_types.uint4, scalar_types.uint4b8, scalar_types.float4_e2m1f,
    )
)  # fmt: skip
SILU, RELU2 = MoEActivation.SILU, MoEActivation.RELU2_NO_MUL
K, N = 256, 128
MEASURED = Path(__file__).parents[2] / "docs" / "benchmarks" / "eight_bit_rows_h200.jsonl"


def given_of(
    kind: WeightType = E4M3, activation: MoEActivation = SILU, K: int = K, N: int = N, group: int = -1
) -> dict[str, Any]:
    """Experts and 40 tokens that choose two each."""
    first = make(kind, group, 2 * N if activation.is_gated else N, K, activation.is_gated)
    second = make(kind, group, K, N, False, seed=1)
    rng = torch.Generator().manual_seed(2)
    return arguments(first, second, kind, activation) | {
        "hidden_states": torch.randn(40, K, generator=rng).bfloat16(),
        "topk_weights": torch.rand(40, 2, generator=rng),
        "topk_ids": torch.stack([torch.randperm(E, generator=rng)[:2] for _ in range(40)]),
    }


@pytest.mark.parametrize(
    ("wrong", "value"),
    [("w1_zeros", None), ("w2_zeros", torch.zeros(E, 1, K, dtype=torch.uint8)[:1]), ("w2", torch.zeros(1).int())],
    ids=str,
)
def test_mxfp4_that_is_packed_for_8_bit_rows_is_checked(wrong: str, value: torch.Tensor | None) -> None:
    """It comes with its rows' largest scales, and both matrices are packed alike."""
    given = given_of(MXFP4, group=32) | {"input_dtype": FP8}
    fused_marlin_moe(**given)
    with pytest.raises(ValueError, match=wrong):
        fused_marlin_moe(**given | {wrong: value})


def test_mxfp4_is_packed_for_8_bit_rows_where_a_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU always; as the experts of a GPU, where they refuse such rows, as for 16-bit rows."""
    codes, scales = torch.zeros(E, 2 * N, K, dtype=torch.uint8), torch.ones(E, 2 * N, K // 32, dtype=torch.uint8)
    w13 = CanonicalWeights(
        codes=codes, scales=scales, zero_points=None, g_idx=None, quant_type_id=MXFP4.scalar_type.id, group_size=32,
        global_scales=None,
    )  # fmt: skip
    w2 = w13._replace(codes=codes[:, :K, :N].contiguous(), scales=scales[:, :K, : N // 32].contiguous())
    sizes = {"hidden_dim": K, "intermediate_size_per_partition": N}
    for dtype, expected in ((FP8, torch.int64), (None, torch.int32)):
        packed = MarlinExperts.pack_weights(w13, w2, moe_config(**sizes), dtype)
        assert [part.weight.dtype for part in packed] == [expected] * 2
        assert (packed[0].zero_points is not None) == (dtype is not None)
    monkeypatch.setattr(MarlinExperts, "refuses_eight_bit_rows", lambda *args: "no kernel")
    assert MarlinExperts.pack_weights(w13, w2, moe_config(**sizes), FP8)[0].weight.dtype == torch.int32


def test_a_row_is_a_scale_and_codes() -> None:
    row = torch.tensor([[448.0, -1.0, 0.3, 2.0**-9, 0.0], [896.0, 2.0, 3.0, 2.0**-10, -0.0], [0.0] * 5])
    expected = torch.tensor([[448.0, -1.0, 0.3125, 2.0**-9, 0.0], [896.0, 2.0, 3.0, 0.0, 0.0], [0.0] * 5])
    assert torch.equal(round_rows(row, FP8), expected)
    hidden = torch.cat([torch.full((1, 128), 1.0), torch.full((1, 128), 2.0**-24)], dim=1)
    assert torch.equal(round_rows(hidden, FP8), hidden)
    assert not round_rows(hidden, FP8, 256)[0, 128:].any()  # too small beside the rest of the row


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_a_row_that_is_sent_is_rounded_as_experts_round_it(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 20, 5)[:, None]
    rows[3] = 0.0
    parts = split_rows(quantize_rows(rows, dtype, whole=True), 300, dtype, whole=True)
    assert torch.equal(row_values(*parts), round_rows(rows, dtype, 300))


def test_results_are_those_of_rounded_rows() -> None:
    """Off by what three bits of mantissa lose, and by less from what rows give that were rounded before."""
    given = given_of()
    plain, rounded = fused_marlin_moe(**given), fused_marlin_moe(**given, input_dtype=FP8)
    assert 0.01 < relative_error(rounded, plain) < TOLERANCES[FP8]
    again = given | {"hidden_states": round_rows(given["hidden_states"], FP8, K).bfloat16()}
    assert relative_error(fused_marlin_moe(**again), rounded) < relative_error(plain, rounded)
    assert torch.equal(fused_marlin_moe(**given, input_dtype=torch.bfloat16), plain)


@pytest.mark.parametrize("num_experts", [1, 3, 256])
@pytest.mark.parametrize("num_rows", [1, 7, 8, 1000])
@pytest.mark.parametrize("N", [128, 160])
def test_scratch_has_room_for_all(num_experts: int, num_rows: int, N: int) -> None:
    where = eight_bit.scratch_layout(num_experts, num_rows, K, N)
    sizes = (where.capacity * K, 4 * where.capacity, where.capacity * N, 4 * where.capacity * -(-N // 128))
    starts, ends = where[1:5], where[2:]
    for start, size, after in zip(starts, sizes, ends, strict=True):
        assert start % 128 == 0
        assert start + size <= after
    # However the rows are divided, each expert's begin at a multiple of 16.
    assert where.capacity % 16 == 0
    counts = [num_rows // num_experts + (i < num_rows % num_experts) for i in range(num_experts)]
    assert sum(-(-count // 16) * 16 for count in counts) <= where.capacity


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))


# As scripts/gemm_cases.py names them.
KINDS = {"int4": UINT4B8, "uint4": UINT4, "fp8": E4M3, "fp8-channel": E4M3, "mxfp4": MXFP4}


def experts(
    num_experts: int, K: int, N: int, input_dtype: torch.dtype | None = FP8, kind: WeightType | None = None
) -> WeightPair:
    """Experts without weights."""
    w13, w2 = (
        SimpleNamespace(
            num_rows=rows,
            num_columns=columns,
            qweight=torch.empty(num_experts, 0),
            g_idx=None,
            sort_indices=None,
            scales=torch.empty(num_experts, columns // 128, rows),
        )
        for rows, columns in ((2 * N, K), (K, N))
    )
    kind = kind or (UINT4B8 if input_dtype == INT8 else E4M3)
    return WeightPair(kind, SILU, torch.bfloat16, w13, w2, None, input_dtype)  # type: ignore[arg-type]


@pytest.mark.usefixtures("on_hopper")
def test_rows_are_rounded_where_that_is_faster() -> None:
    """DeepSeek-V3's and Qwen3-30B's sizes at EP 8, as they were measured."""
    deepseek, qwen = experts(32, 7168, 2048), experts(16, 2048, 768)
    assert [eight_bit.pays(deepseek, rows) for rows in (1, 32, 47.9, 48, 1024)] == [False, False, False, True, True]
    assert [eight_bit.pays(qwen, rows) for rows in (48, 128, 256, 1024)] == [False, False, True, True]
    int8 = experts(32, 7168, 2048, INT8)
    assert [eight_bit.pays(int8, rows) for rows in (32, 63.9, 64, 1024)] == [False, False, True, True]
    mxfp4 = experts(32, 7168, 2048, kind=MXFP4)
    assert [eight_bit.pays(mxfp4, rows) for rows in (48, 63.9, 64, 1024)] == [False, False, True, True]
    assert not eight_bit.pays(experts(32, 7168, 2048, None), 1024)
    assert not eight_bit.pays(experts(769, 7168, 2048), 1024)
    counts = torch.zeros(32, dtype=torch.int32)
    assert compute.takes_eight_bit(deepseek, Rows(counts, 4096, is_sorted=True, expected_m=512))
    assert not compute.takes_eight_bit(deepseek, Rows(counts, 4096, is_sorted=True))
    assert not compute.takes_eight_bit(deepseek, Rows(counts, 4096, expected_m=512))


@pytest.mark.usefixtures("on_hopper")
def test_the_rule_takes_8_bit_rows_where_the_measured_table_has_them_faster() -> None:
    """The newest row of each case; the rule names no shape."""
    sizes = {
        "deepseek-v3": (32, 7168, 2048), "qwen3-235b": (16, 4096, 1536), "kimi-k2": (48, 7168, 2048),
        "deepseek-v4-flash": (32, 4096, 2048),
    }  # fmt: skip
    rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    newest = {tuple(row[name] for name in ("shape", "weights", "input_dtype", "rows")): row for row in rows}
    assert newest
    for row in newest.values():
        dtype, kind = getattr(torch, row["input_dtype"]), KINDS[row["weights"]]
        pair = experts(*sizes[row["shape"]], dtype, kind)
        taken = eight_bit.pays(pair, row["rows"])
        assert taken == (row["ratio"] > 1), row


@pytest.mark.usefixtures("on_hopper")
def test_older_gpus_round_to_int8_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, rounds in (((8, 0), True), ((7, 5), False)):
        monkeypatch.setattr(jit, "capability", lambda index, found=capability: found)
        assert not eight_bit.pays(experts(32, 7168, 2048), 1024)
        assert eight_bit.pays(experts(32, 7168, 2048, INT8), 1024) is rounds


@pytest.mark.parametrize(
    ("dtype", "kind", "capability", "faster"),
    [
        (INT8, UINT4B8, (9, 0), True), (FP8, E4M3, (9, 0), True), (INT8, UINT4B8, (8, 0), False),
        (FP8, UINT4B8, (9, 0), True), (FP8, MXFP4, (9, 0), True), (INT8, UINT4, (9, 0), True),
        (FP8, UINT4, (9, 0), True),
    ],
    ids=str,
)  # fmt: skip
def test_a_checkpoint_takes_faster_pairs_and_a_name_takes_all(
    dtype: torch.dtype, kind: WeightType, capability: tuple[int, int], faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "capability", lambda index: capability)
    group, sizes = (32 if kind is MXFP4 else 128), {"hidden_dim": K, "intermediate_size_per_partition": N}
    first, second = make(kind, group, 2 * N, K, True), make(kind, group, K, N, False)
    quant = FusedMoEQuantConfig(
        quant_type_id=kind.scalar_type.id, w1_scale=first.packed.scales, w2_scale=second.packed.scales
    )
    for only, expected in ((True, faster), (False, True)):
        asked = quant.with_input_dtype(dtype, faster_only=only)
        refusal = MarlinExperts.refuses_input_dtype(moe_config(**sizes), asked, torch.device("cuda"))
        assert (refusal is None) is expected, refusal


def test_experts_round_to_the_dtype_of_their_configuration() -> None:
    given = given_of()
    parallel = FusedMoEParallelConfig.make(1, 1, 1)
    config = FusedMoEConfig(
        num_experts=E, experts_per_token=2, hidden_dim=K, intermediate_size_per_partition=N, num_local_experts=E,
        moe_parallel_config=parallel, in_dtype=torch.bfloat16, max_num_tokens=64,
    )  # fmt: skip
    quant = FusedMoEQuantConfig(
        quant_type_id=E4M3.scalar_type.id, w1_scale=given["w1_scale"], w2_scale=given["w2_scale"]
    )
    for asked, rounds in ((FP8, True), (None, False)):
        experts = MarlinExperts(config, quant.with_input_dtype(asked))
        assert experts.may_round_rows() is rounds
        output = torch.empty_like(given["hidden_states"])
        scratch = [torch.empty(0, dtype=torch.bfloat16)] * 2
        experts.apply(
            output, given["hidden_states"], given["w1"], given["w2"], given["topk_weights"], given["topk_ids"], SILU,
            E, None, None, None, *scratch, None, False,
        )  # fmt: skip
        assert torch.equal(output, fused_marlin_moe(**given, input_dtype=asked))
    with pytest.raises(ValueError, match="torch.int8 and weights are float8_e4m3fn"):
        MarlinExperts(config, quant.with_input_dtype(INT8))


COMPILED = [
    pytest.param(FP8, E4M3, 1, False, False, marks=pytest.mark.thorough),
    pytest.param(INT8, UINT4B8, 1, True, False, marks=pytest.mark.thorough),
    (FP8, MXFP4, 4, False, False),
    (INT8, UINT4, 4, True, True),
]


@pytest.mark.parametrize(("input_dtype", "kind", "groups", "sent", "older"), COMPILED, ids=str)
def test_kernels_compile(input_dtype: torch.dtype, kind: WeightType, groups: int, sent: bool, older: bool) -> None:
    """Without serialized products, and with next to no spills (of numbers that wait outside of the main loop)."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="the bindings of NVRTC are not installed")
    sources = eight_bit.kernel_sources(kind, input_dtype, torch.bfloat16, groups, SILU, sent=sent, older=older)
    for name, source in sources.items():
        resources = jit.compile_only(source, "sm_80" if older else "sm_90a")
        assert "serialized" not in resources.log
        assert resources.spill_load_bytes <= (600 if name == "experts" else 0)


def test_compiled_it_is_one_node() -> None:
    given = given_of()
    tokens = given.pop("hidden_states")
    compiled = torch.compile(lambda x: fused_marlin_moe(x, **given, input_dtype=FP8), fullgraph=True, backend="eager")
    assert torch.equal(compiled(tokens), fused_marlin_moe(tokens, **given, input_dtype=FP8))

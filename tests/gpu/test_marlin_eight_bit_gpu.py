"""Experts with rows of 8 bits: codes bit for bit, results against plain torch on the same rounded rows, rows of every
number, and a graph with other choices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_ep.activation import MoEActivation, apply_activation
from moe_ep.kernels.marlin import eight_bit
from moe_ep.kernels.marlin.compute import compute_tokens, sort_by_expert, takes_eight_bit
from moe_ep.kernels.marlin.functional import fused_marlin_moe
from moe_ep.kernels.marlin.params import Rows
from moe_ep.kernels.marlin.plain import TOLERANCES, compute_expert, dequantize_packed
from moe_ep.kernels.marlin.types import WEIGHT_TYPES, WeightType
from moe_ep.kernels.marlin.weights import WeightPair
from moe_ep.kernels.quantize import quantize_rows, round_rows, row_values, split_rows
from moe_ep.layer import FusedMoE
from moe_ep.layer.methods import OnlineFp8Config, relative_error, tolerance
from moe_ep.scalar_type import scalar_types
from tests.checkpoint.format_cases import write_case
from tests.gpu.captured import capture
from tests.gpu.marlin_cases import SILU, ampere_only, arguments, pair
from tests.kernels import tensor_core
from tests.layer.moe_oracle import load, make_inputs, make_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

FP8, INT8 = torch.float8_e4m3fn, torch.int8
# mean |d| / mean |ref| of plain torch with the same rounded rows, and with e4m3 rows the tensor cores' sums.
OFF_BY = 0.003
# The same where sums of e4m3 rows are in f32: some codes of `hidden` fall to the other side.
OFF_BY_F32 = 0.005
E4M3, UINT4, UINT4B8, UINT8B128, MXFP4 = (
    WEIGHT_TYPES[kind.id].packed_for(32, FP8)
    for kind in (
        scalar_types.float8_e4m3fn, scalar_types.uint4, scalar_types.uint4b8, scalar_types.uint8b128,
        scalar_types.float4_e2m1f,
    )
)  # fmt: skip
PAIRS = [(INT8, UINT4), (INT8, UINT4B8), (INT8, UINT8B128)]
PAIRS += [(FP8, E4M3), (FP8, UINT4), (FP8, UINT4B8), (FP8, MXFP4)]
every_pair = pytest.mark.parametrize(
    ("rows", "kind"), PAIRS, ids=lambda value: str(getattr(value, "scalar_type", value)).removeprefix("torch.")
)
sent_or_not = pytest.mark.parametrize("sent", [False, True], ids=["rounded", "sent"])


@pytest.fixture
def any_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Experts of any number of rows take these kernels."""
    monkeypatch.setattr(eight_bit, "pays", lambda pair, expected_m: True)
    yield


def weights(
    num_experts: int,
    shape: tuple[int, int],
    group: int = 128,
    activation: MoEActivation = SILU,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
    clamp_limit: float | None = None,
    kind: WeightType = E4M3,
    rows: torch.dtype | None = None,
) -> WeightPair:
    both = pair(kind, group, num_experts, shape, activation, dtype, bias)
    return WeightPair(kind, activation, dtype, *both, clamp_limit, rows or (FP8 if kind == E4M3 else INT8))


def ids_of(counts: list[int], unused: int = 3) -> torch.Tensor:
    """`[T, 1]` in random order: each expert as often as it counts, and some tokens without one."""
    ids = [expert for expert, count in enumerate(counts) for _ in range(count)] + [-1] * unused
    return torch.tensor(ids, device="cuda")[torch.randperm(len(ids), device="cuda")].view(-1, 1)


def slots_of(
    experts: WeightPair, tokens: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Each token's result, or zeros; scratch is full of NaN."""
    like = {"dtype": experts.act_dtype, "device": "cuda"}
    output = torch.full(tokens.shape, float("nan"), **like)
    scratch = (torch.full((60_000_000,), float("nan"), **like), torch.full((60_000_000,), float("nan"), **like))
    ones = torch.ones(ids.shape, device="cuda")
    compute_tokens(experts, output, tokens, ones, ids, None, scratch, row_scales=scales)
    return output


def check(experts: WeightPair, counts: list[int], sent: bool = False) -> None:
    """Against plain torch with the same rounded rows; with e4m3 rows against the tensor cores' sums, too."""
    ids, K = ids_of(counts), experts.w13.num_columns
    tokens, scales = torch.randn(ids.size(0), K, device="cuda").to(experts.act_dtype), None
    if sent:
        tokens, scales = split_rows(quantize_rows(tokens, experts.input_dtype, True), K, experts.input_dtype, True)
    output = slots_of(experts, tokens, ids, scales)
    assert torch.equal(output, slots_of(experts, tokens, ids, scales))
    assert not output[ids[:, 0] < 0].any()
    # What computes the expected results, and how far off they may be: all together, and those of one expert.
    forms = [(compute_expert, OFF_BY, OFF_BY)]
    if experts.input_dtype == FP8:
        forms = [(tensor_core.compute_expert, OFF_BY, OFF_BY), (compute_expert, OFF_BY_F32, 3 * OFF_BY_F32)]
    for compute, of_all, of_expert in forms:
        all_expected = torch.zeros_like(output, dtype=torch.float32)
        for expert in range(len(counts)):
            chosen = ids[:, 0] == expert
            if chosen.any():
                own = None if scales is None else scales[chosen]
                expected = all_expected[chosen] = compute(tokens[chosen], experts, expert, scales=own)
                error = relative_error(output[chosen], expected)
                assert error < of_expert, (expert, counts[expert], error)
        assert relative_error(output, all_expected) < of_all


@pytest.fixture
def older() -> Iterator[None]:
    """The kernels of GPUs before Hopper."""
    with ampere_only():
        yield


SHAPES = [(64, 64), (128, 128), (320, 192), (2048, 768), (2880, 2880)]


def check_groups(kind: WeightType, rows: torch.dtype, shape: tuple[int, int], sent: bool) -> None:
    """All groups of scales that divide the columns."""
    for group in (32,) if kind == MXFP4 else (-1, 32, 64, 128):
        if group == -1 or all(size % group == 0 for size in shape):
            check(weights(4, shape, group, kind=kind, rows=rows), [33, 0, 300, 130], sent)


@pytest.mark.usefixtures("any_rows")
@every_pair
@sent_or_not
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair(rows: torch.dtype, kind: WeightType, sent: bool, shape: tuple[int, int]) -> None:
    check_groups(kind, rows, shape, sent)


@pytest.mark.usefixtures("any_rows", "older")
@pytest.mark.parametrize("kind", [UINT4, UINT4B8, UINT8B128], ids=lambda kind: str(kind.scalar_type))
@sent_or_not
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_of_older_gpus(kind: WeightType, sent: bool, shape: tuple[int, int]) -> None:
    check_groups(kind, INT8, shape, sent)


@pytest.mark.usefixtures("any_rows")
@every_pair
@sent_or_not
def test_every_pair_in_f16(rows: torch.dtype, kind: WeightType, sent: bool) -> None:
    """With biases, and tiles of many sizes."""
    experts = weights(8, (256, 128), 32, dtype=torch.float16, bias=True, kind=kind, rows=rows)
    check(experts, [1, 15, 16, 17, 97, 112, 113, 129], sent)


@pytest.mark.usefixtures("any_rows")
@sent_or_not
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_of_mxfp4_differ_by_many_binades(sent: bool, shape: tuple[int, int]) -> None:
    """Scales of one row by up to 14 binades, of different rows by more; some rows have the least scale there is."""
    experts = weights(3, shape, 32, kind=MXFP4, rows=FP8)
    for part in (experts.w13, experts.w2):
        least = torch.randint(104, 112, (3, 1, part.num_rows), dtype=torch.uint8, device="cuda")
        part.scales.copy_(least + torch.randint(0, 15, part.scales.shape, dtype=torch.uint8, device="cuda"))
        part.scales[:, :, 5::64] = 0
        part.zeros.copy_(part.scales.amax(1, keepdim=True))
    check(experts, [65, 200, 1], sent)


@pytest.mark.parametrize("count", [1, 8, 16, 24, 32, 64, 128, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_that_are_packed_for_8_bit_rows_multiply_16_bit_rows(count: int, dtype: torch.dtype) -> None:
    """Same bits as those that are packed for 16-bit rows, by the kernels for few and for many rows, and the oldest."""
    shape, experts, ids = (512, 256), [], ids_of([count, 0, count])
    tokens = torch.randn(ids.size(0), shape[0], device="cuda").to(dtype)
    for kind in (MXFP4, replace(MXFP4, for_eight_bit_rows=False)):
        torch.manual_seed(3)
        both = pair(kind, 32, 3, shape, SILU, dtype, False)
        experts.append(WeightPair(kind, SILU, dtype, *both))
    assert torch.equal(*(slots_of(each, tokens, ids) for each in experts))
    with ampere_only():
        assert torch.equal(*(slots_of(each, tokens, ids) for each in experts))


def test_few_rows_that_were_sent_are_converted_back() -> None:
    experts = weights(4, (256, 128))
    ids = ids_of([2, 3, 0, 1])
    for whole in (False, True):
        rows = quantize_rows(torch.randn(ids.size(0), 256, device="cuda"), FP8, whole)
        codes, scales = split_rows(rows, 256, FP8, whole)
        output = slots_of(experts, codes, ids, scales)
        assert torch.equal(output, slots_of(experts, row_values(codes, scales).bfloat16(), ids))


@pytest.mark.usefixtures("any_rows")
@every_pair
def test_rows_have_the_same_bits_whether_they_were_sent(rows: torch.dtype, kind: WeightType) -> None:
    """They are rounded by the same rule; those that come with a scale for every 128 columns are rounded again."""
    experts = weights(4, (320, 192), 32, kind=kind, rows=rows)
    ids = ids_of([33, 0, 300, 130])
    tokens = torch.randn(ids.size(0), 320, device="cuda").bfloat16()
    expected = slots_of(experts, tokens, ids)
    whole = split_rows(quantize_rows(tokens, rows, True), 320, rows, True)
    assert torch.equal(slots_of(experts, whole[0], ids, whole[1]), expected)
    codes, scales = split_rows(quantize_rows(tokens, rows), 320, rows)
    again = slots_of(experts, row_values(codes, scales).bfloat16(), ids)
    assert torch.equal(slots_of(experts, codes, ids, scales), again)


@pytest.mark.usefixtures("any_rows")
@pytest.mark.parametrize("kind", [E4M3, UINT4, UINT4B8, UINT8B128], ids=lambda kind: str(kind.scalar_type))
@pytest.mark.parametrize("group", [128, 32, -1])
@pytest.mark.parametrize("shape", [(128, 128), (384, 256), (1024, 640), (2048, 768)], ids=str)
def test_types_groups_and_shapes(kind: WeightType, group: int, shape: tuple[int, int]) -> None:
    check(weights(4, shape, group, kind=kind), [33, 0, 300, 130])


@pytest.mark.usefixtures("any_rows")
@pytest.mark.parametrize("group", [128, 32])
@pytest.mark.parametrize("shape", [(384, 256), (7168, 2048)], ids=str)
def test_scales_of_e4m3_weights_are_the_same_in_blocks(shape: tuple[int, int], group: int) -> None:
    """Of 128 rows; one expert has some rows with scales of their own."""
    experts = weights(3, shape, group)
    for matrix in (experts.w13, experts.w2):
        rows = torch.arange(matrix.num_rows, device="cuda")
        matrix.scales.copy_(matrix.scales[:, :, rows // 128 * 128 + rows % 2].clone())
        matrix.scales[1, :, 130] *= 2
    check(experts, [128, 300, 97])


@pytest.mark.usefixtures("any_rows")
@pytest.mark.parametrize("kind", [E4M3, UINT4B8], ids=lambda kind: str(kind.scalar_type))
@pytest.mark.parametrize("shape", [(192, 64), (2880, 2880), (320, 192)], ids=str)
def test_sizes_that_are_no_multiples_of_128(kind: WeightType, shape: tuple[int, int]) -> None:
    """In f16, with groups of 32: the last scale covers the columns that remain."""
    check(weights(3, shape, 32, kind=kind, dtype=torch.float16), [65, 200, 1])


@pytest.mark.usefixtures("any_rows")
@pytest.mark.parametrize("kind", [E4M3, UINT4B8], ids=lambda kind: str(kind.scalar_type))
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 31, 32, 33, 64, 65, 96, 97, 127, 128, 129, 136, 256, 257, 1000])
def test_every_number_of_rows(rows: int, kind: WeightType) -> None:
    check(weights(5, (256, 256), kind=kind), [rows, 1, 0, rows, 3])


@pytest.mark.usefixtures("any_rows")
@pytest.mark.parametrize("activation", [act for act in MoEActivation if act.is_gated])
@pytest.mark.parametrize("clamp_limit", [None, 0.5])
def test_activations_biases_and_limits(activation: MoEActivation, clamp_limit: float | None) -> None:
    if activation in (MoEActivation.SWIGLUOAI, MoEActivation.SITU) and clamp_limit is not None:
        pytest.skip("it has limits of its own")
    for kind in (E4M3, UINT4B8):
        check(
            weights(3, (256, 384), activation=activation, bias=True, clamp_limit=clamp_limit, kind=kind), [65, 200, 1]
        )


@pytest.mark.usefixtures("any_rows")
@pytest.mark.parametrize("num_experts", [1, 31, 32, 33, 64, 257])
def test_numbers_of_experts(num_experts: int) -> None:
    check(weights(num_experts, (256, 128)), [(7 * expert) % 40 for expert in range(1, num_experts + 1)])


@pytest.mark.parametrize("kind", [E4M3, UINT4B8], ids=lambda kind: str(kind.scalar_type))
def test_deepseek_sizes(kind: WeightType) -> None:
    experts = weights(16, (7168, 2048), kind=kind)
    counts = [0, 1, 300, 90] + [100] * 12
    assert eight_bit.pays(experts, 80)
    check(experts, counts)


@pytest.mark.usefixtures("any_rows")
def test_codes_are_those_of_a_division() -> None:
    """One scale a row, the exponents of all columns and of whole rows, zeros, and columns as the kernel orders them."""
    counts, (K, N) = [100, 0, 33], (384, 128)
    experts, ids = weights(3, (K, N)), ids_of(counts)
    tokens = torch.randn(ids.size(0), K, device="cuda")
    tokens *= torch.exp2(torch.randint(-9, 9, tokens.shape, device="cuda")) * torch.exp2(
        torch.randint(-40, 40, (ids.size(0), 1), device="cuda")
    )
    tokens = tokens.bfloat16()
    tokens[5], tokens[6, 100] = 0, torch.finfo(torch.bfloat16).max
    rows = sort_by_expert(ids, 3)
    where = eight_bit.scratch_layout(3, rows.max_rows, K, N)
    scratch = torch.zeros(where.num_bytes, dtype=torch.uint8, device="cuda")
    eight_bit.run(torch.empty_like(tokens), tokens, experts, rows, scratch)
    codes = scratch[: where.capacity * K].view(where.capacity, K)
    scales = scratch[where.row_scales :][: 4 * where.capacity].view(torch.float32)
    start = 0
    place = torch.arange(16)
    column = place // 4 * 2 + place % 2 * 8 + place // 2 % 2  # of each byte
    for expert, count in enumerate(counts):
        own = tokens[rows.row_ids.long()[sum(counts[:expert]) :][:count]].float()
        largest = own.abs().amax(dim=1, keepdim=True)
        expected = (largest / torch.full_like(largest, 448.0)).clamp(min=2.0**-60)
        assert torch.equal(scales[start : start + count], expected[:, 0])
        plain = (own / expected).to(torch.float8_e4m3fn).view(torch.uint8)
        ordered = plain.view(count, K // 16, 16)[:, :, column.to("cuda")].reshape(count, K)
        assert torch.equal(codes[start : start + count] & 0x7F, ordered & 0x7F)
        start += -(-count // 16) * 16


def rounded_hidden(experts: WeightPair, counts: list[int], scratch: torch.Tensor, max_rows: int) -> list[torch.Tensor]:
    """Every expert's rows between the products, f32 `[rows, N]`, of codes and scales as the kernel left them."""
    K, N = experts.columns
    where = eight_bit.scratch_layout(len(counts), max_rows, K, N)
    codes = scratch[where.hidden :][: where.capacity * N].view(-1, N // 16, 4, 2, 2)
    codes = codes.permute(0, 1, 4, 2, 3).reshape(-1, N).view(experts.input_dtype)  # columns of two rows of 8 alternate
    groups = -(-N // 128)
    scales = scratch[where.hidden_scales :][: 4 * where.capacity * groups].view(torch.float32).view(groups, -1, 4, 2, 2)
    scales = scales.transpose(2, 3).reshape(groups, -1).T  # so do tokens
    starts = [sum(-(-count // 16) * 16 for count in counts[:expert]) for expert in range(len(counts))]
    return [
        row_values(codes[start : start + count], scales[start : start + count].contiguous())
        for start, count in zip(starts, counts, strict=True)
    ]


@every_pair
@pytest.mark.parametrize("shape", [(320, 192), (2048, 768), (7168, 2048)], ids=str)
def test_each_product_by_itself(rows: torch.dtype, kind: WeightType, shape: tuple[int, int]) -> None:
    """Within 0.003 of plain torch on the rows that it multiplied, w13 with rounded results; with e4m3 rows these are
    those of the tensor cores' sums."""
    counts, K = [33, 0, 300, 130], shape[0]
    experts, ids = weights(4, shape, 32 if kind == MXFP4 else 64, kind=kind, rows=rows), ids_of(counts)
    tokens = torch.randn(ids.size(0), K, device="cuda").bfloat16()
    by_expert = sort_by_expert(ids, 4)
    scratch = torch.zeros(eight_bit.scratch_bytes(experts, by_expert.max_rows), dtype=torch.uint8, device="cuda")
    output = torch.empty_like(tokens)
    eight_bit.run(output, tokens, experts, by_expert, scratch)
    for expert, hidden in enumerate(rounded_hidden(experts, counts, scratch, by_expert.max_rows)):
        chosen = ids[:, 0] == expert
        if chosen.any():
            order = by_expert.row_ids.long()[sum(counts[:expert]) :][: counts[expert]]
            w13, w2 = (dequantize_packed(part, kind, expert) for part in (experts.w13, experts.w2))
            expected = apply_activation(SILU, round_rows(tokens[order], rows, K) @ w13.T)
            assert relative_error(hidden, round_rows(expected, rows)) < 0.003, expert
            if rows == FP8:
                same = row_values(*tensor_core.compute_hidden(tokens[order], experts, expert))
                assert relative_error(hidden, same) < 0.0003, expert
            assert relative_error(output[order], hidden @ w2.T) < 0.003, expert


def test_few_rows_are_not_rounded() -> None:
    both = pair(E4M3, 128, 8, (1024, 512))
    tokens = torch.randn(64, 1024, device="cuda").bfloat16()
    ids = torch.randint(0, 8, (64, 2), device="cuda")
    more = arguments(*both, E4M3) | {"topk_weights": torch.rand(64, 2, device="cuda"), "topk_ids": ids}
    rounded = fused_marlin_moe(tokens, **more, input_dtype=FP8)
    assert torch.equal(rounded, fused_marlin_moe(tokens, **more))


def test_many_rows_in_a_graph() -> None:
    """A graph is replayed with other choices, among them all tokens to one expert, and none at all."""
    both = pair(E4M3, 128, 16, (2048, 1024))
    tokens = torch.randn(2048, 2048, device="cuda").bfloat16()
    experts = weights(16, (2048, 1024))
    ids = torch.randint(0, 16, (2048, 4), device="cuda")
    assert takes_eight_bit(experts, sort_by_expert(ids, 16))
    assert not takes_eight_bit(experts, Rows(torch.zeros(16, dtype=torch.int32), 2048))
    more = arguments(*both, E4M3) | {"topk_weights": torch.rand(2048, 4, device="cuda"), "topk_ids": ids}
    more["input_dtype"] = FP8
    plain = fused_marlin_moe(tokens, **(more | {"input_dtype": None}))
    rounded = fused_marlin_moe(tokens, **more)
    error = float((rounded.float() - plain.float()).abs().mean() / plain.float().abs().mean())
    assert 0.01 < error < TOLERANCES[FP8]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = fused_marlin_moe(tokens, **more)
    for choice in (torch.randint(0, 16, (2048, 4), device="cuda"), torch.full_like(ids, 3), torch.full_like(ids, -1)):
        ids.copy_(choice)
        graph.replay()
        assert torch.equal(output, fused_marlin_moe(tokens, **more))
        assert output.isfinite().all()


@pytest.mark.parametrize("kind", [E4M3, UINT4B8], ids=lambda kind: str(kind.scalar_type))
def test_infinities_stay_with_their_tokens(kind: WeightType) -> None:
    experts = weights(8, (1024, 1024), kind=kind)
    ids = ids_of([200] * 8)
    tokens = torch.randn(ids.size(0), 1024, device="cuda").bfloat16()
    clean = slots_of(experts, tokens, ids)
    tokens[10, 3], tokens[20, 5] = float("inf"), float("nan")
    output = slots_of(experts, tokens, ids)
    others = torch.ones(ids.size(0), dtype=torch.bool, device="cuda")
    others[[10, 20]] = False
    assert torch.equal(output[others], clean[others])
    for token in (10, 20):
        assert ids[token] < 0 or output[token].isnan().any()


def test_who_decides(tmp_path: Path) -> None:
    """A checkpoint's own dtype where its rows are faster, and a dtype that is named wherever there is a kernel."""
    for case, dtype in (("fp8 of one number", FP8), ("int8 rows", INT8), ("w4afp8", FP8)):
        folder = tmp_path / case.replace(" ", "-")
        write_case(case, folder, (256, 128), with_values=False)
        for asked in ("checkpoint", dtype):
            with torch.device("cuda"):
                layer = FusedMoE.from_checkpoint(folder, layer=0, dtype=torch.bfloat16, input_dtype=asked)
            assert (layer.input_rows.dtype, layer.rounds_rows_to) == (dtype, dtype)


def test_a_layer_with_and_without() -> None:
    """Many tokens are rounded and few are not; the layer's scratch has room for both under capture."""
    options = {"num_experts": 16, "top_k": 4, "hidden_size": 2048, "intermediate_size": 1024}
    options |= {"params_dtype": torch.bfloat16, "quant_config": OnlineFp8Config()}
    state = make_weights(16, 2048, 1024)
    rounds, plain = (load(FusedMoE(**options, input_dtype=dtype), state).cuda() for dtype in (FP8, None))
    for T, is_rounded in ((8, False), (2048, True)):
        hidden_states, router_logits = (x.cuda() for x in make_inputs(T, 2048, 16, seed=T))
        hidden_states = hidden_states.bfloat16()
        output, expected = rounds(hidden_states, router_logits), plain(hidden_states, router_logits)
        error = relative_error(output, expected)
        assert error < tolerance(torch.bfloat16, None, FP8)
        assert (error > 0.01) is is_rounded
    captured = torch.zeros_like(output)
    graph = capture(lambda: captured.copy_(rounds(hidden_states, router_logits)))
    graph.replay()
    assert torch.equal(captured, output)


def test_a_pass_of_few_rows_loads_what_a_captured_one_takes() -> None:
    experts = weights(8, (1024, 1024))
    few, many = (ids_of([rows] * 8) for rows in (2, 200))
    tokens = torch.randn(many.size(0), 1024, device="cuda").bfloat16()
    slots_of(experts, tokens[: few.size(0)], few)
    output, graph = torch.empty_like(tokens), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output.copy_(slots_of(experts, tokens, many))
    graph.replay()
    assert torch.equal(output, slots_of(experts, tokens, many))

"""The experts' kernels against weights dequantized to f32, their determinism, CUDA graphs and streams.

Every test runs twice on Hopper: on its own kernels, and on those that all GPUs from sm_80 on have.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import pytest
import torch

from moe_ep.activation import MoEActivation
from moe_ep.kernels.marlin.compute import partials_numel
from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe, fused_marlin_moe
from moe_ep.kernels.marlin.repack import pack_marlin
from moe_ep.kernels.marlin.types import WeightType
from moe_ep.scalar_type import scalar_types
from tests.gpu.marlin_cases import (
    UINT4B8,
    arguments,
    check_batched,
    check_tokens,
    check_values,
    compile_all,
    make,
    pair,
    reference,
)
from tests.gpu.marlin_grid import KINDS, Case, case_of, grid
from tests.kernels import marlin_cases as cases

__all__ = ["KINDS", "UINT4B8", "arguments", "check_batched", "make", "reference"]
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]
PARTS = 12


@pytest.fixture(scope="module")
def compiled() -> None:
    compile_all([(kind, group, dtype) for kind, group in KINDS for dtype in (torch.bfloat16, torch.float16)])


def check_case(case: Case) -> None:
    (kind, group), shape = case.kind, (case.K, case.N)
    if case.form == "standard":
        first, second = pair(kind, group, case.num_experts, shape, dtype=case.dtype)
        check_tokens(kind, first, second, case.rows, case.topk, 2 * case.num_experts, case.dtype)
        return
    counts = [case.rows, 0, case.rows // 2, 1, *(case.rows * i % 71 for i in range(case.num_experts - 5)), case.rows]
    check_batched(kind, group, counts, shape, dtype=case.dtype, by_reference=case.form == "reference")


@pytest.mark.parametrize("part", range(PARTS))
def test_grid(part: int, compiled: None) -> None:
    for number, places in enumerate(grid()[part::PARTS]):
        torch.manual_seed(number)
        case = case_of(places)
        try:
            check_case(case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize(("kind", "group"), KINDS, ids=lambda v: str(getattr(v, "scalar_type", v)))
def test_small_shapes(kind: WeightType, group: int) -> None:
    # What scripts/sanitize.sh runs.
    check_batched(kind, group, [2, 0, 33, 70], (256, 128), by_reference=group == 32)


@pytest.mark.parametrize(("kind", "group"), KINDS, ids=lambda v: str(getattr(v, "scalar_type", v)))
def test_small_shapes_of_few_rows(kind: WeightType, group: int) -> None:
    # The same: beside 70 rows the decode kernel has none of these.
    check_batched(kind, group, [2, 20, 0, 12, 27], (256, 128), by_reference=group == 32)


@pytest.mark.parametrize("activation", list(MoEActivation))
def test_every_activation_with_biases(activation: MoEActivation) -> None:
    check_batched(UINT4B8, 128, [3, 70], (256, 384), activation=activation, bias=True)


@pytest.mark.parametrize("counts", [[2, 20, 0, 12], [3, 70, 200]])
@pytest.mark.parametrize("activation", [MoEActivation.SILU, MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUSTEP])
def test_gate_and_up_end_at_a_limit(activation: MoEActivation, counts: list[int]) -> None:
    # Most of what biases of about 1 give is beyond it.
    for kind, group in ((UINT4B8, 128), KINDS[-1]):
        check_batched(kind, group, counts, (256, 384), activation=activation, bias=True, clamp_limit=0.5)


@pytest.mark.parametrize(
    ("shape", "group"), [((2880, 2880), 32), ((2880, 2880), 64), ((96, 160), -1), ((160, 96), 32), ((32, 32), 32)]
)
def test_shapes_that_are_multiples_of_32_only(shape: tuple[int, int], group: int) -> None:
    check_batched(UINT4B8, group, [9, 130, 2], shape)


def test_one_expert_has_all_and_many_have_little() -> None:
    check_batched(UINT4B8, 128, [700, *([1] * 40), 0, 0, 65], (1024, 512))


@pytest.mark.parametrize("by_reference", [False, True])
@pytest.mark.parametrize(
    ("kind", "group"), [(UINT4B8, 128), *KINDS[-2:]], ids=lambda v: str(getattr(v, "scalar_type", v))
)
def test_more_rows_than_expected(kind: WeightType, group: int, by_reference: bool) -> None:
    # The decode kernel computes all, experts of more than 32 rows as several.
    check_batched(kind, group, [100, 0, 33, 8, 64, 1, 31, 129], (512, 256), by_reference=by_reference, expected_m=4)
    check_batched(kind, group, [300, *([1] * 40), 0, 65], (256, 128), by_reference=by_reference, expected_m=16)


@pytest.mark.parametrize("count", [33, 60, 100])
def test_all_tokens_choose_one_expert_where_few_rows_are_expected(count: int) -> None:
    K, expert = 512, 3
    first, second = pair(UINT4B8, 128, 8, (K, 256))
    rows = torch.randn(count, K, device="cuda").bfloat16()
    ids = torch.full((count, 1), expert, device="cuda")
    weights = torch.rand(count, 1, device="cuda")
    output = fused_marlin_moe(rows, topk_weights=weights, topk_ids=ids, **arguments(first, second, UINT4B8))
    check_values(output, reference(rows, first, second, UINT4B8, expert) * weights)


@pytest.mark.parametrize("count", [2, 20, 150])
@pytest.mark.parametrize("shape", [(4096, 128), (128, 4096), (7168, 512), (2880, 2880)], ids=str)
def test_one_expert_is_spread_over_all_blocks(shape: tuple[int, int], count: int) -> None:
    check_batched(UINT4B8, 32, [count], shape)


def test_scales_of_different_spacing() -> None:
    weights = (pair(UINT4B8, 128, 2, (512, 256))[0], pair(UINT4B8, 32, 2, (512, 256))[1])
    check_batched(UINT4B8, 128, [7, 50], (512, 256), weights=weights)


@pytest.mark.parametrize("topk", [1, 6])
@pytest.mark.parametrize("num_tokens", [1, 33, 500])
def test_tokens_with_their_experts(num_tokens: int, topk: int) -> None:
    check_tokens(UINT4B8, *pair(UINT4B8, 128, 8, (512, 256)), num_tokens, topk, 12)


def test_results_may_be_written_over_the_rows() -> None:
    more = arguments(*pair(UINT4B8, 128, 3, (512, 256)), UINT4B8)
    rows = torch.randn(3, 90, 512, device="cuda").bfloat16()
    numbers = torch.tensor([5, 90, 33], dtype=torch.int32, device="cuda")
    expected = batched_fused_marlin_moe(rows, numbers, output=rows.clone(), **more)
    given = rows.clone()
    assert batched_fused_marlin_moe(given, numbers, inplace=True, **more) is given
    assert torch.equal(given, expected)


@pytest.mark.parametrize("expected_m", [None, 8])
def test_a_graph_replays_with_other_counts_and_inputs(expected_m: int | None) -> None:
    K, N, num_experts, capacity = 1024, 512, 6, 80
    more = arguments(*pair(UINT4B8, 128, num_experts, (K, N)), UINT4B8) | {"expected_m": expected_m}
    rows = torch.randn(num_experts, capacity, K, device="cuda").bfloat16()
    numbers = torch.full((num_experts,), 4, dtype=torch.int32, device="cuda")
    output = torch.zeros_like(rows)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        batched_fused_marlin_moe(rows, numbers, output=output, **more)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            batched_fused_marlin_moe(rows, numbers, output=output, **more)
    for counts in ([0, 0, 0, 0, 0, 0], [80, 1, 0, 33, 64, 7], [8, 1, 30, 2, 8, 8], [1, 1, 1, 1, 1, 1]):
        rows.copy_(torch.randn_like(rows))
        numbers.copy_(torch.tensor(counts, dtype=torch.int32))
        output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        eager = batched_fused_marlin_moe(rows, numbers, output=torch.full_like(rows, float("nan")), **more)
        assert torch.equal(output.view(torch.int16), eager.view(torch.int16))


def test_a_graph_of_more_rows_than_its_warm_up() -> None:
    # Few rows that are expected need one kernel of Hopper's. What others need is there too, after the first call.
    K, num_experts = 512, 6
    weights = pair(UINT4B8, 32, num_experts, (K, 256), MoEActivation.SWIGLUOAI, torch.float16)
    more = arguments(*weights, UINT4B8, MoEActivation.SWIGLUOAI)
    rows = torch.randn(num_experts, 200, K, device="cuda").half()
    numbers = torch.tensor([200, 3, 0, 70, 33, 8], dtype=torch.int32, device="cuda")
    output, stream = torch.full_like(rows, float("nan")), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        batched_fused_marlin_moe(rows[:, :8].contiguous(), numbers.clamp(max=4), expected_m=4, **more)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            batched_fused_marlin_moe(rows, numbers, output=output, **more)
        eager = batched_fused_marlin_moe(rows, numbers, output=torch.full_like(rows, float("nan")), **more)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output.view(torch.int16), eager.view(torch.int16))
    for expert, count in enumerate(numbers.tolist()):
        assert not output[expert, :count].isnan().any()


def test_a_graph_replays_with_other_experts_of_the_tokens() -> None:
    K, num_tokens, topk = 512, 90, 3
    more = arguments(*pair(UINT4B8, 128, 6, (K, 256)), UINT4B8)
    rows = torch.randn(num_tokens, K, device="cuda").bfloat16()
    ids = torch.zeros(num_tokens, topk, dtype=torch.int64, device="cuda")
    weights, output = torch.rand(num_tokens, topk, device="cuda"), torch.empty_like(rows)

    def run(output: torch.Tensor) -> torch.Tensor:
        return fused_marlin_moe(rows, topk_weights=weights, topk_ids=ids, output=output, **more)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(output)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run(output)
    for highest in (6, 1, 3):
        ids.copy_(torch.randint(-1, highest, ids.shape, device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, run(torch.empty_like(rows)))


def test_two_streams_at_once_give_what_one_gives() -> None:
    K, N, num_experts = 2048, 768, 8
    more = arguments(*pair(UINT4B8, 128, num_experts, (K, N)), UINT4B8)
    inputs = [torch.randn(num_experts, 40, K, device="cuda").bfloat16() for _ in range(2)]
    numbers = torch.randint(1, 41, (num_experts,), dtype=torch.int32, device="cuda")
    alone = [batched_fused_marlin_moe(rows, numbers, output=torch.zeros_like(rows), **more) for rows in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(30):
        for stream, rows, kept in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(batched_fused_marlin_moe(rows, numbers, output=torch.zeros_like(rows), **more))
    torch.cuda.synchronize()
    for expected, kept in zip(alone, results, strict=True):
        assert all(torch.equal(expected, got) for got in kept)


def test_a_thread_that_never_used_the_gpu_may_launch() -> None:
    more = arguments(*pair(UINT4B8, 128, 2, (256, 128)), UINT4B8)
    rows = torch.randn(2, 8, 256, device="cuda").bfloat16()
    numbers = torch.full((2,), 8, dtype=torch.int32, device="cuda")
    outputs = [batched_fused_marlin_moe(rows, numbers, **more), torch.zeros_like(rows)]
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: batched_fused_marlin_moe(rows, numbers, output=outputs[1], **more))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(*outputs)


def test_packing_on_the_gpu_equals_packing_on_the_cpu() -> None:
    codes = torch.randint(0, 16, (2, 192, 256), dtype=torch.uint8)
    scales = torch.rand(2, 192, 2).bfloat16()
    on_cpu = pack_marlin(codes, scales, scalar_types.uint4b8.id, 128, gated=True)
    on_gpu = pack_marlin(codes.cuda(), scales.cuda(), scalar_types.uint4b8.id, 128, gated=True)
    assert torch.equal(on_cpu.qweight, on_gpu.qweight.cpu())
    assert torch.equal(on_cpu.scales, on_gpu.scales.cpu())


def test_kernel_sources_are_installed_beside_the_code() -> None:
    from moe_ep.kernels.marlin import params

    folder = Path(params.__file__).parent
    installed = {path.name for parent in (folder, folder.parent) for path in parent.glob("cuda/*")}
    assert {"decode_sm90.cu", "prefill_sm90.cu", "ampere_gemm.cu", "ptx.cuh"} <= installed


@pytest.mark.parametrize("name", ["intermediate_cache13", "intermediate_cache2"])
def test_scratch_that_is_too_small_is_refused_under_capture(name: str) -> None:
    kind = UINT4B8
    first, second = cases.pair(kind, 32, MoEActivation.SILU)
    weights = {
        key: value.cuda() if isinstance(value, torch.Tensor) else value
        for key, value in cases.arguments(first, second, kind, MoEActivation.SILU).items()
    }
    rows = torch.randn(cases.ROWS, cases.K, device="cuda").bfloat16()
    topk = {
        "topk_weights": torch.rand(cases.ROWS, 1, device="cuda"),
        "topk_ids": torch.zeros(cases.ROWS, 1).cuda().int(),
    }
    small = {name: torch.empty(16, dtype=rows.dtype, device="cuda")}
    eager = fused_marlin_moe(rows, **topk, **weights, **small)
    assert torch.equal(eager, fused_marlin_moe(rows, **topk, **weights))
    with pytest.raises(ValueError, match=name), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fused_marlin_moe(rows, **topk, **weights, **small)


def test_scratch_for_sums_alone_is_taken_under_capture() -> None:
    """Batched rows leave no results in it, so what one expert's most rows need is enough, however many experts."""
    num_experts, K, most_rows = 64, 4096, 8
    first, second = pair(UINT4B8, 32, num_experts, (K, 128))
    rows = torch.randn(num_experts, most_rows, K, device="cuda").bfloat16()
    counts = torch.full((num_experts,), most_rows, dtype=torch.int32, device="cuda")
    scratch = torch.empty(2 * partials_numel(most_rows, rows.device), dtype=rows.dtype, device="cuda")
    assert scratch.numel() < rows.numel()
    more = arguments(first, second, UINT4B8) | {"intermediate_cache13": scratch}
    call = functools.partial(batched_fused_marlin_moe, rows, counts, **more)
    expected, graph = call(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    graph.replay()
    assert torch.equal(output, expected)

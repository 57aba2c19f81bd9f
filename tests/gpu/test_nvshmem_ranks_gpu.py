"""The NVSHMEM backends' kernels for more ranks than there are GPUs, on one of them: plain loops as the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ep.dispatch.nvshmem.low_latency import Tuning
from moe_ep.kernels import jit
from moe_ep.kernels.quantize import quantize_rows, row_values, split_rows
from moe_ep.modular_kernel.contracts import Dispatched
from moe_ep.modular_kernel.weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from tests.dispatch.backend_cases import (
    Case,
    check_batched,
    check_standard,
    dispatch_args,
    expected_output,
    owner_of,
    run_experts,
)
from tests.gpu.nvshmem_cases import BF16, expanded
from tests.gpu.ranks_of_one_gpu import LOW_LATENCY, Ranks, on_one_gpu

pytestmark = pytest.mark.gpu
# Few kernels: top-k, K, the wire and the number of ranks are compiled in.
CASES = {
    "random": Case(dtype=BF16, hidden_size=256, topk=8, num_experts=10, tokens=(5, 0, 8, 1)),
    "masked": Case(dtype=BF16, hidden_size=256, topk=8, num_experts=257, tokens=(8, 3), routing="masked", seed=1),
    "one rank": Case(dtype=BF16, hidden_size=256, topk=8, num_experts=64, tokens=(1, 7, 0), routing="one_rank", seed=2),
    "repeated": Case(dtype=BF16, hidden_size=256, topk=8, num_experts=8, tokens=(2,), routing="repeated", seed=3),
}
# More tokens than travel as packets, and few.
SMALL = replace(CASES["random"], tokens=(33, 2, 0), capacity=40)
# The same, and rows whose last packet is not full.
MANY = Case(dtype=BF16, hidden_size=2000, tokens=(70, 33, 1, 0), num_experts=9, topk=2, capacity=70)
# Ids as they come: none, the same twice in a token; ranks without experts; one token of room.
ODD = [
    (
        5,
        Case(
            dtype=BF16,
            hidden_size=48,
            topk=3,
            num_experts=257,
            tokens=(4, 0, 1),
            capacity=4,
            routing="any",
            code_dtype=torch.int8,
        ),
    ),
    (7, Case(dtype=BF16, hidden_size=16, topk=1, num_experts=3, tokens=(1,), capacity=1, routing="any")),
]
FACES = pytest.mark.parametrize("by_reference", [False, True], ids=["expanded", "by reference"])
WIRES = pytest.mark.parametrize("code_dtype", [None, torch.float8_e4m3fn, torch.int8], ids=str)


@WIRES
@FACES
@pytest.mark.parametrize("num_ranks", [3, 8])
def test_decode(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, by_reference: bool, code_dtype: torch.dtype | None
) -> None:
    on_one_gpu(monkeypatch, num_ranks)
    for name, case in CASES.items():
        check_decode(replace(case, code_dtype=code_dtype), name, num_ranks, by_reference)


@WIRES
@FACES
def test_decode_of_many_tokens(
    monkeypatch: pytest.MonkeyPatch, by_reference: bool, code_dtype: torch.dtype | None
) -> None:
    on_one_gpu(monkeypatch, 8)
    check_decode(replace(MANY, code_dtype=code_dtype), "many", 8, by_reference)


@WIRES
@FACES
def test_decode_in_halves(monkeypatch: pytest.MonkeyPatch, by_reference: bool, code_dtype: torch.dtype | None) -> None:
    # What scripts/sanitize.sh runs.
    on_one_gpu(monkeypatch, 3)
    check_decode(replace(SMALL, code_dtype=code_dtype), "small", 3, by_reference, in_halves=True)


@pytest.mark.parametrize("backend", [LOW_LATENCY, "nvshmem_high_throughput"])
@pytest.mark.parametrize(("num_ranks", "case"), ODD, ids=["5", "7"])
def test_odd_numbers(monkeypatch: pytest.MonkeyPatch, num_ranks: int, case: Case, backend: str) -> None:
    on_one_gpu(monkeypatch, num_ranks)
    ranks = Ranks(case, num_ranks, backend, by_reference=backend == LOW_LATENCY and case.code_dtype is not None)
    for seed in range(4):
        ranks.redraw(seed=seed)
        (check_decode_step if backend == LOW_LATENCY else check_prefill_step)(ranks, seed)


def test_f16_results_beyond_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results 2**16 times as large, and weights as much smaller, have the same sums."""
    on_one_gpu(monkeypatch, 2)
    ranks = Ranks(Case(tokens=(7, 4), dtype=torch.float16, hidden_size=256), 2, LOW_LATENCY)
    for rank, args in enumerate(ranks.args):
        ranks.args[rank] = (args[0], args[1] * 2.0**-16, *args[2:])
    results = []
    for setting, result in zip(ranks.settings, ranks.prepare(), strict=True):
        results.append(run_experts(setting, expanded(result), "batched")[0].float() * 2**16)
    assert any(part.nan_to_num().abs().max() > 65504 for part in results)
    outputs = ranks.finalize(results, [args[1:3] for args in ranks.args], TopKWeightAndReduceDelegate())
    for setting, output in zip(ranks.settings, outputs, strict=True):
        assert torch.equal(output.cpu(), expected_output(setting, 2))


def check_decode(case: Case, name: str, num_ranks: int, by_reference: bool, in_halves: bool = False) -> None:
    ranks = Ranks(case, num_ranks, LOW_LATENCY, by_reference, in_halves)
    for seed in range(2):
        ranks.redraw(seed=case.seed + 10 * seed)
        check_decode_step(ranks, name)


def check_decode_step(ranks: Ranks, name: object) -> None:
    results = []
    for setting, result in zip(ranks.settings, ranks.prepare(), strict=True):
        batch = expanded(result)
        check_batched(setting, batch)
        results.append(run_experts(setting, batch, "batched")[0])
    outputs = ranks.finalize(results, [args[1:3] for args in ranks.args], TopKWeightAndReduceDelegate())
    for setting, output in zip(ranks.settings, outputs, strict=True):
        assert torch.equal(output.cpu(), expected_output(setting, len(ranks.settings))), (name, setting.rank)


@WIRES
@FACES
def test_decode_when_batches_are_counted_anew(
    monkeypatch: pytest.MonkeyPatch, by_reference: bool, code_dtype: torch.dtype | None
) -> None:
    # All that lies in the buffers seems to be of batch 5, which comes soon, and late from two ranks.
    on_one_gpu(monkeypatch, 3)
    ranks = Ranks(replace(SMALL, code_dtype=code_dtype), 3, LOW_LATENCY, by_reference)
    for each in ranks.backends:
        each.channel.region.local.view(torch.int32).fill_(5)
        each.channel.start([2**32 - 3] * 2)
    for batch in range(-3, 7):
        ranks.late = (1, 2) if batch == 5 else ()
        ranks.redraw(seed=100 + batch, tokens=(40, 33, 7) if batch == 5 else (1, 2, 0))
        check_decode_step(ranks, batch)
    for each in ranks.backends:
        each.recover(dead=())
    assert {int(epoch) >> 32 for each in ranks.backends for epoch in each.channel.counters.flatten()} == {8, -2}


def test_batches_that_begin_in_another_order_on_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two kernels of this size are as many blocks as fit, and each waits for one of the other rank. Where the halves of
    # blocks that have sent make room, as on H200, this passes without turns too.
    monkeypatch.setenv("MOE_EP_NVSHMEM_TIMEOUT_S", "1")
    on_one_gpu(monkeypatch, 2)
    batches = [Ranks(replace(SMALL, seed=seed, tokens=(40,)), 2, LOW_LATENCY, True) for seed in (1, 2)]
    for ranks in batches:
        check_decode_step(ranks, "alone")  # kernels are loaded and maps are known from here on
    driver, kernel = jit.driver_bindings(), batches[0].backends[0].kernels["low_latency_dispatch"]
    of_sm = jit.checked(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel.function, 512, 0))
    blocks = torch.cuda.get_device_properties(0).multi_processor_count * of_sm // 2
    for each in (*batches[0].backends, *batches[1].backends):
        each.tuning = Tuning(blocks=blocks)
    torch.cuda._sleep(1)
    received = []
    torch.cuda.synchronize()
    for rank in range(2):
        for ranks in batches:
            with torch.cuda.stream(ranks.streams[rank]):
                if rank == 1 and ranks is batches[0]:
                    torch.cuda._sleep(20_000_000)
                received.append((ranks.settings[rank], ranks.backends[rank].prepare(*ranks.args[rank])))
    torch.cuda.synchronize()
    for each in batches[0].backends:
        each.check()
    for setting, result in received:
        check_batched(setting, expanded(result))


@FACES
def test_a_rank_without_experts_and_tokens_does_not_run_ahead(
    monkeypatch: pytest.MonkeyPatch, by_reference: bool
) -> None:
    monkeypatch.setenv("MOE_EP_NVSHMEM_TIMEOUT_S", "0.5")
    on_one_gpu(monkeypatch, 3)
    case = Case(dtype=BF16, hidden_size=256, topk=2, num_experts=2, tokens=(3, 2, 0))
    ranks = Ranks(case, 3, LOW_LATENCY, by_reference)
    check_decode_step(ranks, "alone")  # kernels are loaded and maps are known from here on
    outputs = [torch.full_like(args[0], float("nan")) for args in ranks.args]
    results = [torch.zeros((s.config.num_local_experts, 24, 256), dtype=BF16, device="cuda") for s in ranks.settings]
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    for rank in (2, 0, 1):
        backend, args = ranks.backends[rank], ranks.args[rank]
        with torch.cuda.stream(ranks.streams[rank]):
            if rank != 2:
                torch.cuda._sleep(2_000_000)
            for _ in range(5):
                backend.prepare(*args)
                backend.finalize(outputs[rank], results[rank], *args[1:3], False, TopKWeightAndReduceDelegate())
    torch.cuda.synchronize()
    for each, output in zip(ranks.backends, outputs, strict=True):
        each.check()
        assert not output.any()


@pytest.mark.parametrize("backend", [LOW_LATENCY, "nvshmem_high_throughput"])
def test_layers_of_one_shape_share_their_memory(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    on_one_gpu(monkeypatch, 3)
    layers = [Ranks(CASES["random"], 3, backend) for _ in range(2)]
    for first, second in zip(*(layer.backends for layer in layers), strict=True):
        assert first.memory is second.memory
    other = Ranks(replace(CASES["random"], capacity=9), 3, backend)
    assert other.backends[0].memory is not layers[0].backends[0].memory
    for layer in (*layers, other, layers[0]):
        layer.prepare()
        for each in layer.backends:
            each.recover(dead=())


@pytest.mark.parametrize("backend", [LOW_LATENCY, "nvshmem_high_throughput"])
def test_recovery_gives_up_the_batches_of_all_layers_of_the_shape(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    on_one_gpu(monkeypatch, 3)
    first, second = (Ranks(CASES["random"], 3, backend) for _ in range(2))
    rows, _, _, ids, weights = first.prepare()[0]
    begun = first.together(lambda rank: first.backends[rank].prepare_async(*first.args[rank]))
    for each in second.backends:
        each.recover(dead=())
    check_step = check_decode_step if backend == LOW_LATENCY else check_prefill_step
    check_step(second, "numbers and buffers are used again")
    args = first.args[0]
    given = args[1:3] if ids is None else (weights, ids)
    reduce_impl = TopKWeightAndReduceDelegate() if ids is None else TopKWeightAndReduceNoOP()
    with pytest.raises(RuntimeError, match=r"given up by recover\(\)"):
        first.backends[0].finalize(torch.empty_like(args[0]), rows, *given, False, reduce_impl)
    with pytest.raises(RuntimeError, match=r"given up by recover\(\)"):
        begun[0][1]()
    for layer in (first, second):
        check_step(layer, "afterwards")


@WIRES
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_prefill(monkeypatch: pytest.MonkeyPatch, num_ranks: int, code_dtype: torch.dtype | None) -> None:
    on_one_gpu(monkeypatch, num_ranks)
    for name, case in CASES.items():
        check_prefill(replace(case, code_dtype=code_dtype), name, num_ranks)


@pytest.mark.parametrize("hidden_size", [16, 2864])
@pytest.mark.parametrize("code_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_prefill_of_codes_that_are_passed_on(
    monkeypatch: pytest.MonkeyPatch, code_dtype: torch.dtype, hidden_size: int
) -> None:
    on_one_gpu(monkeypatch, 3)
    case, options = replace(CASES["random"], hidden_size=hidden_size), {"exact_rows": False, "passed_dtype": code_dtype}
    ranks = Ranks(case, 3, "nvshmem_high_throughput", **options)
    ranks.redraw(code_dtype=code_dtype, whole=True)
    given = []
    for args in ranks.args:
        rows, routing, _ = dispatch_args(args)
        codes, scales = split_rows(quantize_rows(rows, code_dtype, whole=True), hidden_size, code_dtype, whole=True)
        given.append((Dispatched(rows=codes, row_scales=scales), routing))
    passed = ranks.together(lambda rank: ranks.backends[rank].pass_on(*given[rank]))
    results, outputs = [], [torch.full_like(args[0], float("nan")) for args in ranks.args]
    for setting, each in zip(ranks.settings, passed, strict=True):
        assert each.rows.dtype == code_dtype and each.row_scales.shape == (len(each.rows), 1)
        values, count = row_values(each.rows, each.row_scales).to(BF16), int((each.topk_ids >= 0).any(dim=1).sum())
        arrived = (values[:count], None, None, each.topk_ids[:count], each.topk_weights[:count])
        check_standard(setting, arrived, padded=False)
        results.append(run_experts(setting, (values, *arrived[1:3], each.topk_ids, each.topk_weights), "noop")[0])
    ranks.together(
        lambda rank: ranks.backends[rank].combine(outputs[rank], results[rank], passed[rank], TopKWeightAndReduceNoOP())
    )
    for setting, output in zip(ranks.settings, outputs, strict=True):
        assert torch.equal(output.cpu(), expected_output(setting, 3))
    check_prefill_step(Ranks(case, 3, "nvshmem_high_throughput", passed_dtype=code_dtype), "rows of 16 bits")


@WIRES
def test_prefill_of_a_rank_for_which_all_has_come(
    monkeypatch: pytest.MonkeyPatch, code_dtype: torch.dtype | None
) -> None:
    # What scripts/sanitize.sh runs, whose tools let kernels run one by one: what the others send is there before.
    on_one_gpu(monkeypatch, 3)
    ranks = Ranks(replace(CASES["random"], code_dtype=code_dtype), 3, "nvshmem_high_throughput")
    ranks.present = (0,)
    first, *others = ranks.backends

    def part(backend: Any, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return backend.block.part(0, name).view(dtype).view(*shape)

    part(first, "counts", torch.int32, 2, 3, 4, 4)[1, 1:] = torch.tensor([[5, 1, 0, 1], *[[0, 1, 0, 1]] * 3]).cuda()
    part(first, "done", torch.int32, 3, 4)[:] = 1
    for name in ("row_flags", "result_flags"):
        part(first, name, torch.int64, -1).fill_(1)
    rows, _, _, ids, weights = ranks.prepare()[0]
    setting = ranks.settings[0]
    owners = torch.tensor([[owner_of(setting, 0, expert) for expert in row] for row in setting.inputs[0].ids.tolist()])
    mine = int((owners == 0).any(dim=1).sum())
    assert len(rows) == mine + 10
    results = torch.randn(rows.shape, device="cuda").to(BF16)
    ranks.finalize([results, None, None], [(weights, ids), None, None], TopKWeightAndReduceNoOP())
    for rank, other in enumerate(others, start=1):
        sent = int((owners == rank).any(dim=1).sum())
        assert sent and part(other, "row_flags", torch.int64, -1).tolist() == [
            int(code_dtype is not None and i < sent) for i in range(24)
        ]
        assert part(other, "result_flags", torch.int64, -1).tolist() == [1] * 5 + [0] * 19
        home = part(other, "results", BF16, 24, 256)
        assert torch.equal(home[:5], results[mine + 5 * (rank - 1) :][:5])


@WIRES
def test_prefill_of_many_tokens(monkeypatch: pytest.MonkeyPatch, code_dtype: torch.dtype | None) -> None:
    on_one_gpu(monkeypatch, 8)
    check_prefill(replace(MANY, code_dtype=code_dtype), "many", 8)


@WIRES
def test_prefill_when_batches_are_counted_anew(monkeypatch: pytest.MonkeyPatch, code_dtype: torch.dtype | None) -> None:
    on_one_gpu(monkeypatch, 3)
    ranks = Ranks(replace(CASES["random"], code_dtype=code_dtype), 3, "nvshmem_high_throughput")
    for last in (2**31, 2**32):
        for each in ranks.backends:
            each.block.batches[0].number = last - 4
            each.block.batches[0].epoch.fill_(last - 4)
        for batch in range(7):
            ranks.redraw(seed=batch)
            check_prefill_step(ranks, (last, batch))


def check_prefill(case: Case, name: str, num_ranks: int) -> None:
    ranks = Ranks(case, num_ranks, "nvshmem_high_throughput")
    for seed in range(2):
        ranks.redraw(seed=case.seed + 10 * seed)
        for kind in ("noop", "contiguous"):
            check_prefill_step(ranks, (name, kind), kind)


def check_prefill_step(ranks: Ranks, name: object, kind: str = "noop") -> None:
    """Experts that sum a row's slots, or (contiguous) leave that to the combine."""
    received = ranks.prepare()
    results = []
    for setting, result in zip(ranks.settings, received, strict=True):
        check_standard(setting, result, padded=False)
        made = run_experts(setting, result, kind)[0]
        results.append(made if len(result[0]) or kind == "contiguous" else torch.empty_like(result[0]))
    reduce_impl = TopKWeightAndReduceNoOP() if kind == "noop" else TopKWeightAndReduceContiguous()
    outputs = ranks.finalize(results, [(result[4], result[3]) for result in received], reduce_impl)
    for setting, output in zip(ranks.settings, outputs, strict=True):
        assert torch.equal(output.cpu(), expected_output(setting, len(ranks.settings))), (name, setting.rank)

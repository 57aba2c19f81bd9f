"""The NVSHMEM decode backend without a GPU: kernels compile, buffers have room, errors name who is at fault."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moe_ep.bench.cost_model import Machine, predict
from moe_ep.bench.geometries import preset
from moe_ep.config import FusedMoEQuantConfig
from moe_ep.dispatch.nvshmem import arena, order
from moe_ep.dispatch.nvshmem.backend import FailureRecord, shared_settings
from moe_ep.dispatch.nvshmem.high_throughput import HighThroughputPrepareFinalize
from moe_ep.dispatch.nvshmem.kernels import kernel_source
from moe_ep.dispatch.nvshmem.low_latency import (
    KERNELS,
    BatchLayout,
    LowLatencyPrepareFinalize,
    Tuning,
    latest,
    local_indices,
)
from moe_ep.distributed.exchange import check_agreement
from moe_ep.errors import BackendUnavailableError, DispatchTimeoutError
from moe_ep.kernels import jit
from tests.dispatch.backend_cases import Case, make_setting
from tests.dispatch.device_library import skip_without_device_library
from tests.ranks import ranks

DEEPSEEK = BatchLayout(num_ranks=8, capacity=128, hidden_size=7168, topk=8, code_dtype=None)
ODD = BatchLayout(num_ranks=3, capacity=7, hidden_size=2880, topk=32, code_dtype=None)
DEEPSEEK_CASE = Case(hidden_size=7168, topk=8, num_experts=256, capacity=128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("layout", "dtype", "arch"),
    [
        (DEEPSEEK, torch.bfloat16, "sm_90a"),
        (replace(ODD, code_dtype=torch.float8_e4m3fn), torch.float16, "sm_80"),
        (replace(ODD, code_dtype=torch.int8), torch.bfloat16, "sm_90a"),
    ],
    ids=str,
)
def test_kernels_compile(layout: BatchLayout, dtype: torch.dtype, arch: str) -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    pytest.importorskip("cuda.bindings.nvrtc", reason="the bindings of NVRTC are not installed")
    for name in KERNELS:
        # Two blocks of 512 threads must fit an SM.
        resources = jit.compile_only(kernel_source(name, layout, dtype), arch)
        assert resources.registers <= 64, name
        assert (resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0), name


def test_kernels_across_hosts_compile() -> None:
    skip_without_device_library()
    layout = replace(ODD, num_ranks=16, hidden_size=128, topk=2, code_dtype=torch.float8_e4m3fn, device_api=True)
    for name in KERNELS:
        assert jit.compile_only(kernel_source(name, layout, torch.bfloat16), "sm_90a").registers <= 64, name


@pytest.mark.parametrize("device_api", [False, True])
@pytest.mark.parametrize("code_dtype", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("topk", [1, 8, 31])
def test_buffers_do_not_overlap_and_are_aligned(code_dtype: torch.dtype | None, topk: int, device_api: bool) -> None:
    layout = BatchLayout(
        num_ranks=3, capacity=5, hidden_size=2000, topk=topk, code_dtype=code_dtype, device_api=device_api
    )
    begins = list(layout.offsets.values())
    ends = [offset + layout.sizes[name] for name, offset in layout.offsets.items()]
    assert all(begin % 512 == 0 for begin in begins)
    assert all(end <= begin for end, begin in zip(ends, [*begins[1:], layout.batch_bytes], strict=True))
    rows, meta = 3 * 5, 2 * 16 * {1: 2, 8: 6, 31: 24}[topk] * 3 * 5
    flags = {"header": 2 * 8 * 3, "meta": meta, "row_flags": 8 * rows}
    to_others = {"result_flags": 8 * rows, "results": 4000 * rows, "meta_outbox": meta}
    flags |= {name: size if device_api else 0 for name, size in to_others.items()}
    assert flags.items() <= layout.sizes.items()
    # Rows of 8 bits travel as packets, of 112 bytes in 128 and four at a time; to ranks out of reach none do.
    packets = {"row_packets": 3 * 5 * 128 * (20 if code_dtype else 36), "result_packets": 3 * 5 * 128 * 36, "outbox": 0}
    if device_api:
        packets = {"row_packets": 0, "result_packets": 0, "outbox": 60000}
    assert packets.items() <= layout.sizes.items()
    assert layout.sizes["rows"] == 3 * 5 * ((2064 if device_api else 0) if code_dtype else 4000)


def test_rows_of_many_tokens_travel_as_packets_in_8_bits_alone() -> None:
    of_many = replace(DEEPSEEK, capacity=100)
    tokens = [
        replace(of_many, **kind).row_packet_tokens for kind in ({}, {"code_dtype": torch.int8}, {"device_api": True})
    ]
    assert tokens == [32, 100, 0] and replace(DEEPSEEK, capacity=7).row_packet_tokens == 7


def test_symmetric_memory_at_deepseeks_shape_is_below_80_mb() -> None:
    assert DEEPSEEK.symmetric_bytes == 2 * DEEPSEEK.batch_bytes < 80e6
    assert replace(DEEPSEEK, code_dtype=torch.float8_e4m3fn).symmetric_bytes < 60e6


def test_size_hints_say_what_is_taken() -> None:
    setting = make_setting(replace(DEEPSEEK_CASE, tokens=(0,)), 0, 8)
    e4m3 = FusedMoEQuantConfig(dispatch_dtype=torch.float8_e4m3fn)
    hint = LowLatencyPrepareFinalize.size_hint(setting.config)
    assert hint["symmetric"] == DEEPSEEK.symmetric_bytes
    numbers = 4 * 32 + 4 * 8 * 128 * 8
    assert hint["expanded"] - numbers == hint["expert_outputs"] == 2 * 32 * 8 * 128 * 7168
    assert hint["by_reference"] - numbers == 4 * 32 * 8 * 128
    by_reference = LowLatencyPrepareFinalize.size_hint(setting.config, e4m3)["by_reference"]
    assert by_reference - hint["by_reference"] == 2 * 8 * 128 * 7168
    two = HighThroughputPrepareFinalize.size_hint(setting.config, e4m3, batches_in_flight=2)
    one = HighThroughputPrepareFinalize.size_hint(setting.config, e4m3)
    assert two == {where: 2 * num_bytes for where, num_bytes in one.items()}
    # Rows at multiples of 128 bytes (7168 codes, 56 magnitudes of 16 bits, 8 ids and weights), results, and below 2 %.
    rows, results = 8 * 128 * 7424, 128 * 8 * 14336
    assert 1.0 < one["symmetric"] / (rows + results) < 1.02


def test_an_expert_has_a_block_for_each_row_of_a_full_one() -> None:
    asked = ((0.0, 64), (0.125, 64), (1.0, 64), (1.0, 32), (16.0, 32), (16.0, 300))
    assert [Tuning().blocks_of_expert(rows, experts) for rows, experts in asked] == [1, 1, 3, 3, 8, 1]


def test_fused_shared_experts_have_slots_of_their_own() -> None:
    assert BatchLayout.of(make_setting(Case(num_shared=2), 0, 2).config, None).topk == 3 + 2


def test_experts_of_a_rank_are_numbered_in_the_order_of_their_ids() -> None:
    assert local_indices(torch.tensor([0, 1, 0, 2, 1, 1])).tolist() == [0, 0, 1, 0, 1, 2]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 256}, "hidden_dim is 128 on rank 0, 256 on rank 1"),
        ({"num_experts": 12}, "num_experts is 10 on rank 0, 12 on rank 1"),
        ({"topk": 2}, "experts_per_token is 3 on rank 0, 2 on rank 1"),
        ({"capacity": 9}, "max_num_tokens is 8 on rank 0, 9 on rank 1"),
        ({"dtype": torch.float16}, "in_dtype is torch.bfloat16 on rank 0, torch.float16 on rank 1"),
        ({"placement": "round_robin"}, "expert_placement_strategy is linear on rank 0, round_robin on rank 1"),
        ({"code_dtype": torch.int8}, "rows on the wire is torch.bfloat16 on rank 0, torch.int8 on rank 1"),
    ],
)
def test_what_ranks_must_agree_on(change: dict[str, object], named: str) -> None:
    assert all(named in message for message in ranks(2).run(disagree, change))


def disagree(rank: int, world_size: int, change: dict[str, Any]) -> str:
    case = Case(hidden_size=128, dtype=torch.bfloat16)
    case = replace(case, **change) if rank == 1 else case
    config = make_setting(case, rank, world_size).config
    layout = BatchLayout.of(config, FusedMoEQuantConfig(dispatch_dtype=case.code_dtype))
    with pytest.raises(ValueError, match="the ranks are configured differently") as raised:
        check_agreement("name", shared_settings(config, layout))
    return str(raised.value)


@pytest.mark.parametrize("all_come", [True, False])
def test_symmetric_memory_is_given_back_where_all_ranks_come(monkeypatch: pytest.MonkeyPatch, all_come: bool) -> None:
    done: list[object] = []

    def gather_texts(name: str) -> None:
        if not all_come:
            raise DispatchTimeoutError("rank 1 did not come", [1])

    core, bindings = SimpleNamespace(finalize=lambda: done.append("finalize")), SimpleNamespace(free=done.append)
    runtime = arena.NvshmemRuntime(core, bindings, torch.device("cpu"))
    runtime.blocks += [arena.SymmetricBlock(pointer, lambda: None) for pointer in (1, 2)]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(arena, "gather_texts", gather_texts)
    monkeypatch.setattr(arena.kernels, "stop_device_library", lambda: done.append("stop"))
    runtime.close()
    assert done == ([1, 2, "stop", "finalize"] if all_come else [])


@pytest.mark.parametrize("ranks_per_host", ["0", "1"])
def test_memory_of_changed_ranks_is_kept_until_they_change_again(ranks_per_host: str) -> None:
    assert ranks(2).run(change_twice, ranks_per_host) == [[[], [1]] if ranks_per_host == "0" else []] * 2


def change_twice(rank: int, world_size: int, ranks_per_host: str) -> list[list[int]]:
    """What is free after each change; nothing where the ranks are on several hosts, which is refused."""
    freed: list[int] = []
    found = []
    with (
        patch.dict(os.environ, MOE_EP_RANKS_PER_HOST=ranks_per_host),
        patch.object(arena, "joins_peers", lambda device: True),
        patch.object(arena, "driver_call", lambda name, pointer: freed.append(pointer)),
        patch.object(torch.cuda, "synchronize"),
    ):
        before = None
        for number in range(1, 4):
            runtime = arena.EpochRuntime(torch.device("cpu"), before)
            try:
                runtime.start()
            except BackendUnavailableError:
                return []
            found.append(list(freed))
            runtime.blocks.append(arena.SymmetricBlock(number, lambda: None))
            before = runtime
    return found[1:]


@pytest.mark.parametrize(
    ("refusals", "reason"),
    [({}, "it is dead, stuck or late"), ({2: "refused its batch: too much"}, "rank 2 refused its batch: too much")],
)
def test_a_failed_wait_names_ranks_phase_and_batch(refusals: dict[int, str], reason: str) -> None:
    group = SimpleNamespace(rank=0, size=4, ep_ranks=range(4), detector=SimpleNamespace(refusals=lambda: refusals))
    record = FailureRecord(group, 0.5, torch.zeros(8, dtype=torch.int32))
    record.check()
    record.words[:] = torch.tensor([1, 2, 77, 0, 0, 0, 1, 1])
    with pytest.raises(
        DispatchTimeoutError, match="combine of batch 77 did not finish on EP rank 0: ranks 2, 3"
    ) as raised:
        record.check()
    assert raised.value.ranks == (2, 3) and reason in str(raised.value)
    record.clear()
    record.check()


def test_a_failed_wait_is_told_where_notes_cannot_be_read() -> None:
    def read() -> dict[int, str]:
        raise RuntimeError("gone")

    group = SimpleNamespace(rank=1, size=2, ep_ranks=range(2), detector=SimpleNamespace(refusals=read))
    record = FailureRecord(group, 0.5, torch.tensor([1, 1, -1, 0, 1, 0], dtype=torch.int32))
    story = r"dispatch of batch 4294967295 did not finish on EP rank 1: .*; the ranks' store cannot be reached \(gone"
    with pytest.raises(DispatchTimeoutError, match=story):
        record.check()


def test_the_document_has_the_models_numbers() -> None:
    text = (Path(__file__).parents[2] / "docs" / "across_hosts.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (bf16|fp8) \|(.*)\|$", text, flags=re.MULTILINE)
    assert len(rows) == 4 * 2
    for hosts, tokens, wire, numbers in rows:
        expected = []
        for two_level in (False, True):
            step = predict(
                preset("deepseek-v3"), 8 * int(hosts), int(tokens), Machine(),
                wire_bytes=1 if wire == "fp8" else 2, two_level=two_level,
            )  # fmt: skip
            times = [f"{step.dispatch_us:.0f}", f"{step.combine_us:.0f}"]
            expected += [f"{step.network_bytes / 1e6:.1f}", f"{step.link_bytes / 1e6:.1f}", *times]
        assert [number.strip() for number in numbers.split("|")] == expected, (hosts, tokens, wire)


def test_the_latest_epoch_where_they_are_counted_anew() -> None:
    assert latest([5, 7, 6]) == 7
    assert latest([2**32 - 2, 1, 0]) == latest([-2, 0, 1]) == 1
    assert latest([2**32 - 1]) == latest([-1, -2]) == -1
    assert latest([2**31 - 1, 2**31]) == -(2**31)


def test_turns_of_several_streams_run_in_the_order_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, str]] = []

    def stream(name: str) -> SimpleNamespace:
        def record_event() -> str:
            log.append(("record", name))
            return name

        return SimpleNamespace(record_event=record_event, wait_event=lambda event: log.append((name, event)))

    streams = {1: stream("a"), 2: stream("b")}
    now = [1, 0]
    monkeypatch.setattr(order, "current_stream", lambda device: now[0])
    monkeypatch.setattr(order, "number_of_capture", lambda device: now[1])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[now[0]])
    turns = order.Order(torch.device("cpu"))

    def take(number: int, capture: int = 0) -> list[tuple[str, str]]:
        now[:] = number, capture
        log.clear()
        with turns:
            pass
        return list(log)

    assert take(1) == take(1) == []
    assert take(2) == [("record", "a"), ("b", "a"), ("record", "b")]
    assert take(1) == [("a", "b"), ("record", "a")]
    # What is captured cannot wait for what is not, nor for another capture; behind it turns go on as before.
    assert take(2, capture=3) == []
    assert take(1, capture=3) == [("record", "b"), ("a", "b"), ("record", "a")]
    assert take(2) == [("b", "a"), ("record", "b")]
    assert take(2, capture=4) == []
    assert take(1) == [("a", "b"), ("record", "a")]
    for _ in range(1000):  # launches on one stream alone
        take(1)
    assert take(1) == []

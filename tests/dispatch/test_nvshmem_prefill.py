"""The NVSHMEM prefill backend without a GPU: its kernels compile, and its symmetric block has room for everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from moe_ep.dispatch.nvshmem.high_throughput import (
    BatchParts,
    Block,
    HighThroughputPrepareFinalize,
    Layout,
    kernel_source,
    senders_of,
)
from moe_ep.kernels import jit
from tests.dispatch.backend_cases import Case, make_setting
from tests.dispatch.device_library import skip_without_device_library


@pytest.fixture
def compiler() -> None:
    pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    pytest.importorskip("cuda.bindings.nvrtc", reason="the bindings of NVRTC are not installed")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(
    ("hidden_size", "topk", "num_ranks", "code_dtype", "dtype"),
    [
        (7168, 8, 8, None, torch.bfloat16),
        (2880, 32, 1, torch.float8_e4m3fn, torch.float16),
        pytest.param(2880, 32, 1, torch.int8, torch.bfloat16, marks=pytest.mark.thorough),
    ],
)
def test_kernels_compile_without_spills(
    arch: str, hidden_size: int, topk: int, num_ranks: int, code_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    layout = Layout(num_ranks=num_ranks, capacity=64, hidden_size=hidden_size, topk=topk, code_dtype=code_dtype)
    may_overlap = dtype is torch.bfloat16 and code_dtype is None and arch == "sm_90a"
    beside_experts = [replace(layout, overlaps=True)] if may_overlap else []
    for each in (layout, *beside_experts):
        for name in each.kernels:
            resources = jit.compile_only(kernel_source(name, each, dtype), arch)
            # Slots are loaded several at a time, which costs a few words on sm_80 and beside the largest top-k.
            most = 24 if name == "combine_slots" and (arch, topk) != ("sm_90a", 8) else 0
            assert max(resources.spill_store_bytes, resources.spill_load_bytes) <= most, name


CODES = [{"code_dtype": torch.int8}, {"code_dtype": None, "passed_dtype": torch.float8_e4m3fn}]


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("codes", CODES, ids=["sent", "passed_on"])
def test_the_dispatch_of_codes_compiles(arch: str, codes: dict[str, torch.dtype | None]) -> None:
    for hidden_size in (16, 2864):
        layout = Layout(num_ranks=8, capacity=64, hidden_size=hidden_size, topk=8, **codes)
        resources = jit.compile_only(kernel_source("dispatch_codes", layout, torch.bfloat16), arch)
        assert resources.spill_store_bytes == resources.spill_load_bytes == 0


def test_kernels_across_hosts_compile() -> None:
    skip_without_device_library()
    layout = Layout(num_ranks=2, capacity=64, hidden_size=16, topk=8, code_dtype=torch.int8, device_api=True)
    for name, source in layout.sources(torch.bfloat16).items():
        resources = jit.compile_only(source, "sm_90a")
        assert resources.spill_store_bytes == resources.spill_load_bytes == 0, name


@pytest.mark.parametrize("device_api", [False, True])
@pytest.mark.parametrize("codes", CODES, ids=["sent", "passed_on"])
@pytest.mark.parametrize(("hidden_size", "topk"), [(16, 1), (48, 32), (112, 1), (2864, 8), (7168, 8)])
def test_a_row_has_room_in_either_dispatch(
    hidden_size: int, topk: int, codes: dict[str, torch.dtype | None], device_api: bool
) -> None:
    layout = Layout(num_ranks=4, capacity=5, hidden_size=hidden_size, topk=topk, device_api=device_api, **codes)
    for name in ("dispatch", "dispatch_codes"):
        defines = dict(kernel_source(name, replace(layout, device_api=False), torch.bfloat16).defines)
        columns, is_quantized = int(defines["HIDDEN"]), defines["EIGHT_BIT"] == "1"
        # As cuda/high_throughput.cuh has it.
        tail = 8 * topk + (4 * ((-(-columns // 128) + 1) // 2) if is_quantized else 0)
        column_bytes = columns if is_quantized else 2 * columns
        row_bytes = -(-(column_bytes + tail) // 128) * 128 if is_quantized or device_api else column_bytes
        assert layout.sizes["rows"] >= 4 * 5 * row_bytes
        if device_api:
            assert layout.sizes["staged_rows"] >= 5 * row_bytes
        if device_api or is_quantized:
            assert layout.plain_bytes >= 4 * 4 * 5 + 4 * 5 * 2 * columns
    assert layout.code_row_bytes >= hidden_size + 4 and layout.code_row_bytes % 128 == 0
    without = replace(layout, code_dtype=None, passed_dtype=None)
    assert without.code_row_bytes == 0 and "dispatch_codes" not in without.kernels
    assert without.sizes["rows"] <= replace(without, passed_dtype=torch.int8).sizes["rows"]


def test_codes_of_16_bits_are_not_passed_on() -> None:
    config = make_setting(Case(tokens=(0,)), 0, 1).config
    with pytest.raises(ValueError, match="passed_dtype is torch.float16; it must be .*int8"):
        HighThroughputPrepareFinalize(moe_config=config, passed_dtype=torch.float16)


@pytest.mark.parametrize("code_dtype", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("topk", [1, 8, 32])
def test_parts_of_the_block_do_not_overlap_and_are_aligned(code_dtype: torch.dtype | None, topk: int) -> None:
    layout = Layout(num_ranks=4, capacity=5, hidden_size=2000, topk=topk, code_dtype=code_dtype, batches_in_flight=3)
    ends = [offset + layout.sizes[name] for name, offset in layout.offsets.items()]
    begins = list(layout.offsets.values())
    assert all(begin % 512 == 0 for begin in begins)
    assert all(end <= begin for end, begin in zip(ends, [*begins[1:], layout.batch_bytes], strict=True))
    quantized_row = {1: 2048, 8: 2176, 32: 2304}[
        topk
    ]  # 2000 codes, 16 magnitudes, ids and weights, up to a multiple of 128
    assert layout.sizes["rows"] == 4 * 5 * (quantized_row if code_dtype else 4000)
    assert layout.sizes["results"] == 5 * min(4, topk) * 4000
    flags = {"counts": 2 * 4 * 4 * 16, "done": 4 * 16, "row_flags": 8 * 4 * 5}
    flags["result_flags"] = 2 * 8 * 5 * min(4, topk)  # of parts of 1024 columns
    slots = {"ids": 4 * topk * 4 * 5, "weights": 4 * topk * 4 * 5}
    assert (flags | slots).items() <= layout.sizes.items()
    assert layout.sizes["staged_rows"] == layout.sizes["staged_results"] == 0
    of_hosts = replace(layout, device_api=True).sizes
    assert (of_hosts["staged_rows"] * 4, of_hosts["staged_results"]) == (of_hosts["rows"], 4000 * 4 * 5)
    assert layout.symmetric_bytes == 3 * layout.batch_bytes
    assert layout.plain_bytes == 3 * (4 * 4 * 5 + (2 * 2000 * 4 * 5 if code_dtype else 0))


@pytest.mark.parametrize(("num_ranks", "sending"), [(1, 24), (2, 16), (4, 12), (8, 10)])
def test_few_sms_are_divided_into_those_that_send_and_those_that_take(num_ranks: int, sending: int) -> None:
    layout = Layout(num_ranks=num_ranks, capacity=64, hidden_size=7168, topk=8, code_dtype=torch.float8_e4m3fn)
    assert senders_of(layout, 24) == (sending, 31)
    assert all(1 <= senders_of(layout, num_sms)[0] <= num_sms for num_sms in range(1, 133))
    for other, num_sms in (
        (layout, 48),
        (replace(layout, code_dtype=None), 24),
        (replace(layout, device_api=True), 24),
    ):
        assert senders_of(other, num_sms) == (num_sms, 16)


def test_the_number_of_rows_is_that_of_the_batch_when_numbers_have_more_than_32_bits() -> None:
    for number in (1, 2**31, 2**32, 2**40 + 3):
        word = torch.tensor([((number % 2**32) << 32 | 2**31 + 7) - (2**64 if number % 2**32 >= 2**31 else 0)])
        parts = SimpleNamespace(_arriving=word.numpy())
        assert BatchParts.rows_of(parts, number) == 2**31 + 7
        assert BatchParts.rows_of(parts, number + 1) is None


class Handshake(NamedTuple):
    """A block that sends (cuda/high_throughput.cuh): two warps, each with rows to one rank.

    Attributes:
        stored, left: rows that each warp has stored, and flags that it has left.
        places: the flag that each warp has left, None for none.
        through: warps that leave no more.
        taken: the releasing warp's flags; None between two looks.
        at: its next step.
        is_last: all warps were through when it looked.
        on_the_way, there: what other ranks do not see yet, and see: rows and flags.
    """

    stored: tuple[int, ...] = (0, 0)
    left: tuple[int, ...] = (0, 0)
    places: tuple[tuple | None, ...] = (None, None)
    through: frozenset[int] = frozenset()
    taken: tuple[tuple, ...] = ()
    at: str = "through"
    is_last: bool = False
    on_the_way: frozenset[tuple] = frozenset()
    there: frozenset[tuple] = frozenset()


ROWS = 2


def next_states(now: Handshake, fences: bool, reads_through_first: bool) -> Iterator[Handshake]:
    """What may come next: a step of a warp, or something on its way arrives."""
    for thing in now.on_the_way:
        yield now._replace(on_the_way=now.on_the_way - {thing}, there=now.there | {thing})
    for warp in range(2):

        def with_own(values: tuple, value: object, warp: int = warp) -> tuple:
            return (*values[:warp], value, *values[warp + 1 :])

        stored, left = now.stored[warp], now.left[warp]
        if stored == left < ROWS:
            row = ("row", warp, stored)
            yield now._replace(stored=with_own(now.stored, stored + 1), on_the_way=now.on_the_way | {row})
        elif left < stored and now.places[warp] is None:
            flag = ("flag", warp, left)
            yield now._replace(left=with_own(now.left, left + 1), places=with_own(now.places, flag))
        elif left == ROWS and warp not in now.through:
            yield now._replace(through=now.through | {warp})
    order = ("through", "places") if reads_through_first else ("places", "through")
    if now.at == "through":
        following = "places" if reads_through_first else "fence"
        yield now._replace(is_last=len(now.through) == 2, at=following)
    elif now.at == "places":
        taken = tuple(flag for flag in now.places if flag)
        yield now._replace(taken=taken, places=(None, None), at="fence" if reads_through_first else "through")
    elif now.at == "fence" and now.taken:
        if not fences or not now.on_the_way:
            flags = frozenset(now.taken)
            yield now._replace(on_the_way=now.on_the_way | flags, taken=(), at=order[0])
    elif now.at == "fence":
        yield now._replace(at="ended" if now.is_last else order[0])


def mistakes_of(**how: bool) -> set[str]:
    """What goes wrong in any order of the steps."""
    found, known, left = set(), set(), [Handshake(at="through" if how["reads_through_first"] else "places")]
    while left:
        now = left.pop()
        for kind, *row in now.there:
            if kind == "flag" and ("row", *row) not in now.there:
                found.add("a flag before its row")
        following = list(next_states(now, **how))
        if not following and (now.at != "ended" or len(now.there) < 2 * 2 * ROWS):
            found.add("flags that nobody releases")
        fresh = set(following) - known
        known |= fresh
        left += fresh
    return found


def test_flags_follow_their_rows_and_none_is_lost_in_any_order_of_steps() -> None:
    assert mistakes_of(fences=True, reads_through_first=True) == set()
    assert mistakes_of(fences=False, reads_through_first=True) == {"a flag before its row"}
    assert mistakes_of(fences=True, reads_through_first=False) == {"flags that nobody releases"}


def test_a_batch_takes_free_parts_and_then_those_of_the_oldest() -> None:
    parts = [SimpleNamespace(number=0, is_open=False) for _ in range(2)]
    block = SimpleNamespace(batches=parts)
    assert [parts.index(Block.take(block)) for _ in range(3)] == [0, 1, 0]
    assert [each.number for each in parts] == [3, 2]
    parts[1].is_open = False
    assert Block.take(block) is parts[1]
    parts[0].is_open = parts[1].is_open = False
    assert Block.take(block) is parts[0]

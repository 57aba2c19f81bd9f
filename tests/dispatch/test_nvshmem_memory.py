"""Where the NVSHMEM backends' kernels are told that everything lies, without a GPU: ranks' memory is the host's."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ep.dispatch.nvshmem import backend
from moe_ep.dispatch.nvshmem.arena import Region, SymmetricArena, joins_peers
from moe_ep.dispatch.nvshmem.backend import check_of_batch
from moe_ep.dispatch.nvshmem.high_throughput import Block, Layout
from moe_ep.dispatch.nvshmem.low_latency import BATCHES_IN_FLIGHT, BatchLayout, Channel
from moe_ep.distributed.failure_detection import FailureDetector
from moe_ep.errors import BackendUnavailableError, RanksChangedError
from moe_ep.kernels import jit

NUM_RANKS, RANK = 3, 1
GROUP: Any = SimpleNamespace(rank=RANK, size=NUM_RANKS, group=None, detector=None)
DECODE = BatchLayout(num_ranks=NUM_RANKS, capacity=4, hidden_size=32, topk=2, code_dtype=None)
PREFILL = Layout(num_ranks=NUM_RANKS, capacity=4, hidden_size=32, topk=2, code_dtype=None, batches_in_flight=2)


class Arena:
    """Rank RANK's, of three; `reaches` says whose memory is mapped."""

    def __init__(self, reaches: tuple[int, ...] = (0, 1, 2)) -> None:
        self.device, self.order, self.reaches = torch.device("cpu"), None, reaches

    def reserve(self, nbytes: int, name: str) -> Region:
        self.of_ranks = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(NUM_RANKS)]
        pointers = [part.data_ptr() if rank in self.reaches else 0 for rank, part in enumerate(self.of_ranks)]
        return Region(self.of_ranks[RANK], pointers, (7, 8, 9))

    def address(self, rank: int) -> int:
        return self.of_ranks[rank].data_ptr()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory is pinned and no GPU waited for; what other ranks tell each other is what this one does. The waits of
    another test may have been ended."""
    monkeypatch.setattr(GROUP, "detector", FailureDetector("", 0, 1))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **options: zeros(*args, **options))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(backend, "gather_texts", lambda name, text, group, ranks=None: [text] * NUM_RANKS)


def test_batches_of_decode_have_memory_of_their_own() -> None:
    arena: Any = Arena()
    made = Channel(arena, DECODE, GROUP)
    for batch in range(BATCHES_IN_FLIGHT):
        start = batch * DECODE.batch_bytes
        common = made.common(batch)
        assert list(common.buffers.peers) == [arena.address(rank) + start for rank in range(NUM_RANKS)]
        assert list(common.buffers.pes) == [7, 8, 9] and common.buffers.reachable == 0b111
        assert (common.buffers.rank, common.buffers.capacity, common.buffers.row_packet_tokens) == (RANK, 4, 4)
        assert {name: getattr(common.buffers, name) for name in DECODE.offsets} == DECODE.offsets
        assert common.counters == made.counters.data_ptr() + 24 * batch
        rows = made.rows(batch, torch.bfloat16)
        assert rows.shape == (NUM_RANKS * 4, 32)
        assert rows.data_ptr() == arena.address(RANK) + start + DECODE.offsets["rows"]
    assert made.common(0).timeout_ns == 10_000_000_000
    assert made.counters.tolist() == [[1 << 32] * 3] * 2 and made.status.tolist() == [0, 0b111]


def test_a_batch_of_decode_takes_the_first_free_set_of_buffers() -> None:
    arena: Any = Arena()
    made = Channel(arena, DECODE, GROUP)
    assert [made.take(), made.take()] == [0, 1]
    with pytest.raises(RuntimeError, match="2 batches are between prepare and finalize"):
        made.take()
    made.give_back(1)
    assert made.take() == 1
    # Epoch 6 was under way in the first set and its combine had begun the next; the other ranks got no further.
    made.counters.copy_(torch.tensor([[6 << 32 | 5, 5 << 32, 0], [3 << 32, 3 << 32 | 1, 1 << 32 | 1]]))
    made.record.words[0] = 1
    made.recover([2])
    assert made.alive == [0, 1] and made.status.tolist() == [0, 0b011]
    assert made.counters.tolist() == [[7 << 32] * 3, [4 << 32] * 3]
    assert made.take() == 0 and not made.record.words.any()


def test_decode_needs_all_memory_mapped_or_the_device_library() -> None:
    arena: Any = Arena(reaches=(1, 2))
    with pytest.raises(
        BackendUnavailableError, match="EP rank 1 cannot reach 0; use all2all_backend='batched_all_to_all'"
    ):
        Channel(arena, DECODE, GROUP)
    layout = BatchLayout(num_ranks=NUM_RANKS, capacity=4, hidden_size=32, topk=2, code_dtype=None, device_api=True)
    buffers = Channel(arena, layout, GROUP).common(1).buffers
    assert buffers.peers[0] == 0 and buffers.peers[2] == arena.address(2) + layout.batch_bytes
    assert buffers.reachable == 0b110


def test_packets_travel_where_nvlink_joins_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    attribute = "native atomic operations"
    kinds = SimpleNamespace(CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED=attribute)
    asked: list[tuple[str, int, int]] = []

    def link(which: str, here: int, peer: int) -> tuple[int, int]:
        asked.append((which, here, peer))
        return 0, int(peer != 3)

    driver = SimpleNamespace(CUdevice_P2PAttribute=kinds, cuDeviceGetP2PAttribute=link)
    monkeypatch.setattr(jit, "driver_bindings", lambda: driver)
    for count, joined in ((2, True), (3, True), (4, False)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert joins_peers(torch.device("cuda", 1)) == joined
    assert asked == [(attribute, 1, peer) for peer in (0, 0, 2, 0, 2, 3)]
    runtime: Any = SimpleNamespace(joined=[True, True, False], hosts="aaa", device=None, order=None)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    for members, hosts, expected in (([0, 1], "aaa", True), ([0, 1, 2], "aaa", False), ([0, 1], "aba", False)):
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group, members=members: members)
        runtime.hosts = hosts
        assert SymmetricArena(runtime, None).carries_packets == expected  # type: ignore[arg-type]


def test_batches_of_prefill_have_memory_of_their_own() -> None:
    arena: Any = Arena()
    block = Block(arena, PREFILL, GROUP, torch.bfloat16)
    assert len(block.batches) == 2 and block.status.tolist() == [0, 0b111]
    for batch, parts in enumerate(block.batches):
        start = batch * PREFILL.batch_bytes
        common, numbers = parts.common, parts.numbers.data_ptr()
        assert list(common.peers) == [arena.address(rank) + start for rank in range(NUM_RANKS)]
        assert list(common.pes) == [7, 8, 9] and common.rank == RANK
        assert {name: getattr(common, name) for name in PREFILL.offsets} == PREFILL.offsets
        # As in high_throughput.cuh: epoch, finished blocks, what was taken; four numbers of each rank, and one.
        assert (common.epoch, common.finished, common.taken, common.placement) == (
            numbers, numbers + 8, numbers + 12, numbers + 24
        )  # fmt: skip
        assert parts.numbers.nbytes == 24 + 4 * (4 * NUM_RANKS + 1)
        views = {"rows": (parts.rows, (12, 32)), "ids": (parts.ids, (12, 2)), "weights": (parts.weights, (12, 2))}
        for name, (view, shape) in views.items():
            assert view.data_ptr() == arena.address(RANK) + start + PREFILL.offsets[name]
            assert view.shape == shape
        assert parts.slots.shape == (4, NUM_RANKS)


def test_prefill_goes_on_behind_the_last_epoch_of_all_ranks() -> None:
    arena: Any = Arena()
    block = Block(arena, PREFILL, GROUP, torch.bfloat16)
    taken = block.take()
    taken.epoch.fill_(2**32 + 5)
    taken.numbers[4:] = 3
    block.record.words[0] = 1
    block.recover([0])
    assert not block.record.words.any()
    assert block.alive == [1, 2] and block.status.tolist() == [0, 0b110]
    for parts in block.batches:
        assert int(parts.epoch) == 2**32 + 5 and not parts.numbers[2:].any()
        assert (parts.number, parts.is_open) == (0, False)


def test_rows_that_do_not_stay_where_they_arrive_are_read_elsewhere() -> None:
    arena: Any = Arena()
    layout = Layout(num_ranks=NUM_RANKS, capacity=4, hidden_size=32, topk=2, code_dtype=torch.float8_e4m3fn)
    (parts,) = Block(arena, layout, GROUP, torch.float16).batches
    assert parts.rows.shape == (12, 32) and parts.rows.dtype == torch.float16
    assert not arena.address(RANK) <= parts.rows.data_ptr() < arena.address(RANK) + layout.symmetric_bytes


def test_prefill_needs_all_memory_mapped() -> None:
    arena: Any = Arena(reaches=(1,))
    with pytest.raises(BackendUnavailableError, match="EP rank 1 cannot reach 0, 2; use all2all_backend='all_to_all'"):
        Block(arena, PREFILL, GROUP, torch.bfloat16)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_layers_of_one_shape_share_memory_that_all_ranks_have(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    arena, others = Arena(), "has"
    monkeypatch.setattr(backend, "check_agreement", lambda name, settings, group: None)
    monkeypatch.setattr(backend, "gather_texts", lambda name, text, group: [text, others, text])
    monkeypatch.setattr(SymmetricArena, "of", lambda group: arena)

    def made(**sizes: int) -> object:
        if kind == "decode":
            return Channel.of(replace(DECODE, **sizes), GROUP, {})  # type: ignore[arg-type]
        return Block.of(replace(PREFILL, **sizes), GROUP, {}, torch.bfloat16)

    first = made()
    assert made() is first and made(capacity=5) is not first
    # Another rank's layers of this shape are gone: all make it anew, since memory is reserved together.
    others = "lacks"
    assert made() is not first


@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("world_size", [3, 6])
def test_groups_of_a_world_do_not_depend_on_when_garbage_is_collected(
    monkeypatch: pytest.MonkeyPatch, kind: str, world_size: int
) -> None:
    arena: Any = Arena()
    monkeypatch.setattr(backend, "check_agreement", lambda name, settings, group: None)
    monkeypatch.setattr(SymmetricArena, "of", lambda group: arena)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)

    def made() -> Any:
        if kind == "decode":
            return Channel.of(DECODE, GROUP, {})
        return Block.of(PREFILL, GROUP, {}, torch.bfloat16)

    gc.disable()
    try:
        layer: Any = SimpleNamespace(memory=made())
        layer.itself = layer
        before = weakref.ref(layer.memory)
        del layer
        after = made()
        # A group that is the whole world finds the same on all ranks or makes it anew on all.
        assert (after is before()) == (world_size == NUM_RANKS)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_recovery_ends_the_batches_that_are_open(kind: str) -> None:
    arena: Any = Arena()
    memory: Any
    if kind == "decode":
        memory = Channel(arena, DECODE, GROUP)
    else:
        memory = Block(arena, PREFILL, GROUP, torch.bfloat16)
    before = check_of_batch(memory)
    before()
    memory.recover([2])
    with pytest.raises(RuntimeError, match=r"given up by recover\(\), of this layer or of one that shares its memory"):
        before()
    check_of_batch(memory)()


@pytest.mark.parametrize("ends_first", [True, False])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_kernels_do_not_wait_for_ranks_that_have_changed(kind: str, ends_first: bool) -> None:
    arena: Any = Arena()
    detector = FailureDetector(kind, 0, 1)
    group: Any = SimpleNamespace(rank=RANK, size=NUM_RANKS, group=None, detector=detector)
    if ends_first:
        detector.end_waits("other ranks")
    memory = Channel(arena, DECODE, group) if kind == "decode" else Block(arena, PREFILL, group, torch.bfloat16)
    assert memory.status.tolist() == [0, 0b111] and ends_first == memory.record.words.any()
    detector.end_waits("other ranks")
    assert memory.record.words.any()  # kernels read them
    with pytest.raises(RanksChangedError, match="other ranks"):
        memory.record.check()

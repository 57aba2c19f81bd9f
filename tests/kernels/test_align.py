"""Index lists for grouped GEMMs against naive loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ep.kernels.align import batched_moe_align_block_size, moe_align_block_size, sort_slots_by_expert
from moe_ep.kernels.jit import compile_only
from tests.kernels.align_cases import CASES, Case, check_batched, check_lists
from tests.wrong_tensors import FORMS, check_refused


def round_up(value: int, unit: int) -> int:
    return (value + unit - 1) // unit * unit


def lists_by_hand(
    rows_of_expert: dict[int, list[int]], block_size: int, length: int, sentinel: int
) -> tuple[list[int], list[int], list[int]]:
    """Experts in rising order, each padded to whole blocks; then the unused rest."""
    sorted_ids: list[int] = []
    experts: list[int] = []
    for expert, rows in sorted(rows_of_expert.items()):
        padded = round_up(len(rows), block_size)
        sorted_ids += rows + [sentinel] * (padded - len(rows))
        experts += [expert] * (padded // block_size)
    used = len(sorted_ids)
    num_blocks = round_up(length, block_size) // block_size
    return sorted_ids + [sentinel] * (length - used), experts + [-1] * (num_blocks - len(experts)), [used]


def align_by_hand(
    ids: list[list[int]],
    top_k: int,
    block_size: int,
    num_experts: int,
    expert_map: list[int] | None,
    pad: bool,
    ignore: bool,
) -> tuple[list[int], list[int], list[int]]:
    flat = [expert for row in ids for expert in row]
    rows: dict[int, list[int]] = {}
    for slot, expert in enumerate(flat):
        if not 0 <= expert < num_experts:
            continue
        if expert_map is not None and ignore:
            if expert_map[expert] < 0:
                continue
            expert = expert_map[expert]
        rows.setdefault(expert, []).append(slot)
    length = len(flat) + num_experts * (block_size - 1)
    if len(flat) < num_experts:
        length = min(length, len(flat) * block_size)
    if pad:
        length = round_up(length, block_size)
    sorted_ids, experts, used = lists_by_hand(rows, block_size, length, len(flat))
    if expert_map is not None and not ignore:
        experts = [expert_map[expert] if expert >= 0 else -1 for expert in experts]
    return sorted_ids, experts, used


def as_lists(result: tuple[torch.Tensor, ...]) -> tuple[list[int], ...]:
    assert all(tensor.dtype == torch.int32 and tensor.dim() == 1 for tensor in result)
    return tuple(tensor.tolist() for tensor in result)


def test_worked_example() -> None:
    result = moe_align_block_size(torch.tensor([[1, 0], [1, -1]]), 2, 3)
    assert as_lists(result) == ([1, 4, 0, 2, 4, 4, 4], [0, 1, -1, -1], [4])


def test_batched_worked_examples() -> None:
    counts = torch.tensor([2, 3, 0, 6, 8], dtype=torch.int32)
    sorted_ids, experts, used = as_lists(batched_moe_align_block_size(8, 4, counts))
    listed = [0, 1, 40, 40, 8, 9, 10, 40, *range(24, 30), 40, 40, *range(32, 40)]
    assert sorted_ids == listed + [40] * (40 - len(listed))
    assert experts == [0, 1, 3, 3, 4, 4, -1, -1, -1, -1]
    assert used == [24]
    small = batched_moe_align_block_size(3, 2, torch.tensor([1, 3]))
    assert as_lists(small) == ([0, 6, 3, 4, 5, 6, 6, 6], [0, 1, 1, -1], [6])


@given(data=st.data())
def test_align_against_a_loop(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 12), "num_experts")
    top_k = data.draw(st.integers(1, 4), "top_k")
    block_size = data.draw(st.sampled_from([1, 2, 3, 8, 16]), "block_size")
    row = st.lists(st.integers(-1, num_experts), min_size=top_k, max_size=top_k)
    ids = data.draw(st.lists(row, max_size=12), "ids")
    expert_map = None
    if data.draw(st.booleans(), "mapped"):
        local = data.draw(st.permutations(range(num_experts)), "local")
        held = data.draw(st.integers(0, num_experts), "held")
        expert_map = [index if index < held else -1 for index in local]
    pad, ignore = data.draw(st.booleans(), "pad"), data.draw(st.booleans(), "ignore")
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]), "dtype")

    result = moe_align_block_size(
        torch.tensor(ids, dtype=dtype).view(len(ids), top_k),
        block_size,
        num_experts,
        None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32),
        pad,
        ignore,
    )
    assert as_lists(result) == align_by_hand(ids, top_k, block_size, num_experts, expert_map, pad, ignore)


@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_slots_by_expert(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(-1, 6, (num_tokens, 3), generator=generator)
    slots, counts = sort_slots_by_expert(ids, 5)
    flat = ids.flatten().tolist()
    expected = [slot for expert in range(5) for slot, id in enumerate(flat) if id == expert]
    assert slots[: len(expected)].tolist() == expected
    assert counts.tolist() == [flat.count(expert) for expert in range(5)]


@pytest.mark.parametrize(("arch", "blocks"), [("sm_80", 1), ("sm_90a", 1), ("sm_90a", 8)])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_the_kernel_compiles_without_spills(arch: str, blocks: int, ids: torch.dtype) -> None:
    pytest.importorskip("cuda.core")
    from moe_ep.kernels.align import kernel_source

    resources = compile_only(kernel_source(ids, blocks), arch)
    assert resources.spill_store_bytes == resources.spill_load_bytes == 0
    assert resources.registers <= 64


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lists_on_a_gpu(case: Case) -> None:
    check_lists(case)


@pytest.mark.gpu
def test_triton_on_a_gpu() -> None:
    check_batched("cuda")


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=10),
    spare=st.integers(0, 5),
    block_size=st.sampled_from([1, 2, 3, 4, 8, 64]),
)
def test_batched_against_a_loop(counts: list[int], spare: int, block_size: int) -> None:
    room = max(1, *counts) + spare
    rows = {e: list(range(e * room, e * room + count)) for e, count in enumerate(counts)}
    length = len(counts) * round_up(room, block_size)
    result = batched_moe_align_block_size(room, block_size, torch.tensor(counts, dtype=torch.int32))
    assert as_lists(result) == lists_by_hand(rows, block_size, length, len(counts) * room)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_sizes_depend_on_shapes_alone(num_tokens: int) -> None:
    """What a CUDA graph needs: other ids, the same shapes."""
    everyone_to_one = torch.zeros(num_tokens, 2, dtype=torch.int32)
    nobody = torch.full((num_tokens, 2), -1, dtype=torch.int32)
    for pad in (False, True):
        some = moe_align_block_size(everyone_to_one, 4, 6, pad_sorted_ids=pad)
        none = moe_align_block_size(nobody, 4, 6, pad_sorted_ids=pad)
        assert [t.shape for t in some] == [t.shape for t in none]
        assert int(none[2]) == 0 and (none[1] == -1).all() and (none[0] == 2 * num_tokens).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ids: moe_align_block_size(ids, 0, 4), "block_size is 0; it must be at least 1"),
        (lambda ids: moe_align_block_size(ids, 4, 0), "num_experts is 0; it must be at least 1"),
        (lambda ids: moe_align_block_size(ids, 4, 4, ids[0]), r"expert_map has shape \(2,\).*num_experts \(4\)"),
        (lambda ids: batched_moe_align_block_size(0, 4, ids[0]), "max_tokens_per_batch is 0"),
        (lambda ids: batched_moe_align_block_size(4, 0, ids[0]), "block_size is 0"),
        (lambda ids: batched_moe_align_block_size(4, 2, ids[0] + 5), "expert_num_tokens"),
        (lambda ids: batched_moe_align_block_size(4, 2, ids[0] - 1), "expert_num_tokens"),
        (lambda ids: moe_align_block_size(ids, 4, 2, ids[0] + 2), "expert_map"),
    ],
)
def test_bad_arguments(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(3, 2, dtype=torch.int32))


@pytest.mark.parametrize("name", ["pad_sorted_ids", "ignore_invalid_experts"])
def test_flags_are_true_or_false(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} is 'false'; it must be True or False"):
        moe_align_block_size(torch.zeros(3, 2, dtype=torch.int32), 4, 4, **{name: "false"})


IDS = {"topk_ids": torch.zeros(3, 2, dtype=torch.int32), "expert_map": torch.zeros(4, dtype=torch.int32)}
NO_INTEGERS = ("list", "complex", "f64", "bool")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("topk_ids", form) for form in ("nothing", *NO_INTEGERS)),
        *(
            ("expert_map", form)
            for form in (*NO_INTEGERS, "no dimension", "one dimension more", "longer", "shorter", "elsewhere")
        ),
    ],
)
def test_wrong_tensors(name: str, form: str) -> None:
    check_refused(moe_align_block_size, IDS | {"block_size": 4, "num_experts": 4, name: FORMS[form](IDS[name])}, name)


@pytest.mark.parametrize("form", ["nothing", *NO_INTEGERS, "no dimension", "one dimension more"])
def test_wrong_counts(form: str) -> None:
    wrong = FORMS[form](torch.zeros(4, dtype=torch.int32))
    given = {"max_tokens_per_batch": 3, "block_size": 4, "expert_num_tokens": wrong}
    check_refused(batched_moe_align_block_size, given, "expert_num_tokens")


@pytest.mark.gpu
def test_captured_lists_follow_the_ids() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(64, 4, dtype=torch.int32, device="cuda")
    counts = torch.zeros(8, dtype=torch.int32, device="cuda")

    def run() -> tuple[torch.Tensor, ...]:
        return (*moe_align_block_size(ids, 16, 8), *batched_moe_align_block_size(32, 16, counts))

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        fresh_ids = torch.randint(-1, 8, (64, 4), generator=generator, dtype=torch.int32)
        fresh_counts = torch.randint(0, 33, (8,), generator=generator, dtype=torch.int32)
        ids.copy_(fresh_ids)
        counts.copy_(fresh_counts)
        graph.replay()
        expected = (*moe_align_block_size(fresh_ids, 16, 8), *batched_moe_align_block_size(32, 16, fresh_counts))
        for got, want in zip(captured, expected, strict=True):
            assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("num_experts", [2, 300])
def test_a_map_of_unsigned_numbers_leaves_out_what_is_no_expert(num_experts: int) -> None:
    ids = torch.tensor([[1, -1], [num_experts, 0]])
    expert_map = torch.arange(num_experts).clamp(max=254)
    given = (ids, 1, num_experts)
    for lists in zip(
        moe_align_block_size(*given, expert_map.to(torch.uint8), ignore_invalid_experts=True),
        moe_align_block_size(*given, expert_map, ignore_invalid_experts=True),
        strict=True,
    ):
        assert torch.equal(*lists)
    slots, counts = sort_slots_by_expert(ids, num_experts, expert_map.to(torch.uint8))
    assert slots[:2].tolist() == [3, 0]
    assert counts.nonzero().flatten().tolist() == [0, 1]

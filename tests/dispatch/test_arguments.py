"""What backends take and refuse, on every rank before anything is sent, and what they remember of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from moe_ep.config import FusedMoEConfig, FusedMoEQuantConfig
from moe_ep.dispatch.batch import check_tensor, keep_for, side_by_side
from moe_ep.modular_kernel import make_prepare_finalize
from moe_ep.modular_kernel.contracts import MAX_OPEN_BATCHES, ExpertTokensMetadata
from moe_ep.modular_kernel.weight_and_reduce import TopKWeightAndReduceDelegate, TopKWeightAndReduceNoOP
from moe_ep.registry import ALL2ALL_BACKENDS
from tests.dispatch.backend_cases import (
    BACKENDS,
    Case,
    Setting,
    as_tuple,
    check_batched,
    check_case,
    dispatch_args,
    expected_output,
    finalize_ids,
    kinds,
    make_backend,
    make_setting,
    prepare_args,
    run_experts,
)
from tests.ranks import ranks
from tests.wrong_tensors import FORMS, check_refused

NUMBERS, SHAPES = ("nothing", "list", "complex", "bool"), ("no dimension", "one dimension more", "longer", "shorter")
PREPARE = ("a1", "topk_weights", "topk_ids", "num_experts", "expert_map", "apply_router_weight_on_input")
# Where two tensors do not fit each other the sentence begins with the other one.
OTHERS = {("topk_ids", "longer"): "topk_weights", ("topk_ids", "shorter"): "topk_weights"}
OTHERS |= {("topk_ids", "one more"): "topk_weights", ("a1", "elsewhere"): "topk_ids"}
QUANT = FusedMoEQuantConfig.unquantized()


def check_bad_arguments(rank: int, world_size: int) -> int:
    setting = make_setting(Case(tokens=(3,)), rank, world_size)
    rows, weights, ids, num_ids, expert_map, _, quant_config = prepare_args(setting, "cpu")
    wide = torch.zeros(3, 33, dtype=torch.int32)
    changes = [
        ({"rows": rows.double()}, r"a1 is \(3, 40\) of torch.float64; it must be \(T, K\) of f32, f16 or bf16"),
        ({"rows": rows[0]}, r"a1 is \(40,\)"),
        ({"rows": rows[:2]}, "a1 has 2 tokens and topk_ids 3"),
        ({"ids": ids.float()}, "topk_ids is .* of torch.float32; it must be"),
        ({"weights": weights.half()}, "topk_weights is .* of torch.float16; it must be f32"),
        ({"weights": weights[:, :1]}, r"topk_weights is \(3, 1\)"),
        ({"ids": wide, "weights": wide.float()}, r"have \(K, topk, dtype\) \(40, 33, .* was made for \(40, 3, torch.f"),
        ({"ids": wide[:, :0], "weights": wide[:, :0].float()}, "topk_ids has no columns; it must have at least 1"),
        ({"rows": rows[:, 1:]}, r"\(39, 3, torch.float32\) and the backend was made for \(40, 3, torch.float32\)"),
        ({"rows": rows.half()}, r"\(40, 3, torch.float16\) and the backend was made for \(40, 3, torch.float32\)"),
        ({"ids": ids + 10}, r"topk_ids goes from 1\d to 1\d; ids must be at least -1 and below num_experts \(10\)"),
        ({"ids": torch.full_like(ids, -2)}, "topk_ids goes from -2 to -2; ids must be at least -1"),
        ({"num_ids": 11}, r"num_experts is 11; the backend was made for 10 ids \(10 routed, 0 shared\)"),
        ({"on_input": True}, "apply_router_weight_on_input needs top_k 1 and top_k is 3"),
    ]
    for name in BACKENDS:
        backend = make_backend(setting, name)
        for change, message in changes:
            given = {"rows": rows, "weights": weights, "ids": ids, "num_ids": num_ids, "on_input": False, **change}
            with pytest.raises(ValueError, match=message):
                backend.prepare(
                    given["rows"], given["weights"], given["ids"], given["num_ids"], expert_map, given["on_input"],
                    quant_config,
                )  # fmt: skip
        check_case(rank, world_size, Case(), name)
    return len(changes)


def test_bad_arguments() -> None:
    assert ranks(1).run(check_bad_arguments) == [14]


def check_wrong_tensors(rank: int, world_size: int) -> int:
    setting, checked = make_setting(Case(tokens=(3,), dtype=torch.bfloat16), rank, world_size), 0
    for name in ("no_ep", *BACKENDS, "two_level"):
        wrong = [
            *(("a1", form) for form in (*NUMBERS, *SHAPES[:2], "one more", "elsewhere")),
            *(("topk_weights", form) for form in (*NUMBERS, *SHAPES, "one more", "elsewhere")),
            *(("topk_ids", form) for form in (*NUMBERS, *SHAPES, "one more", "elsewhere")),
            *(("expert_map", form) for form in ("list", "complex", "f64", "bool", *SHAPES)),
        ]
        for argument, form in wrong:
            check_wrong_tensor(setting, name, argument, form)
            checked += 1
        if name == "batched_all_to_all":  # which keeps weights and ids itself
            results = [("fused_expert_output", form) for form in (*NUMBERS, *SHAPES, "elsewhere")]
        else:
            results = [("fused_expert_output", form) for form in (*NUMBERS, *SHAPES[:2])]
            results += [(part, form) for part in ("topk_weights", "topk_ids") for form in (*NUMBERS, *SHAPES)]
        for argument, form in (*results, *(("output", form) for form in (*NUMBERS[1:], *SHAPES, "elsewhere"))):
            check_wrong_result(setting, name, argument, form)
            checked += 1
    return checked


def check_wrong_tensor(setting: Setting, name: str, argument: str, form: str) -> None:
    given = dict(zip(PREPARE, prepare_args(setting, "cpu"), strict=False)) | {"quant_config": QUANT}
    if given["expert_map"] is None:
        given["expert_map"] = torch.arange(given["num_experts"], dtype=torch.int32)
    wrong = given | {argument: FORMS[form](given[argument])}
    check_refused(make_backend(setting, name).prepare, wrong, OTHERS.get((argument, form), argument))


def check_wrong_result(setting: Setting, name: str, argument: str, form: str) -> None:
    backend, args = make_backend(setting, name), prepare_args(setting, "cpu")
    batch = backend.prepare(*args)
    results, reduce_impl = run_experts(setting, batch, kinds(backend)[0])
    weights, ids = finalize_ids(args, batch)
    given: dict[str, Any] = {"output": torch.zeros_like(args[0]), "fused_expert_output": results}
    given |= {"topk_weights": weights, "topk_ids": ids}
    wrong = given | {argument: FORMS[form](given[argument])}
    more = {"apply_router_weight_on_input": False, "weight_and_reduce_impl": reduce_impl}
    check_refused(backend.finalize, wrong | more, OTHERS.get((argument, form), argument))
    backend.finalize(**given, **more)  # a batch whose results were refused stays open


def test_wrong_tensors() -> None:
    (checked,) = ranks(1).run(check_wrong_tensors)
    assert checked > 200


def check_construction(rank: int, world_size: int) -> None:
    config = make_setting(Case(), rank, world_size).config
    with pytest.raises(ValueError, match=r"num_local_experts is 9"):
        make_prepare_finalize("all_to_all", replace(config, num_local_experts=9))
    of_four = make_setting(Case(), rank, 4).config
    with pytest.raises(ValueError, match="process_group has 2 ranks and ep_size is 4"):
        make_prepare_finalize("batched_all_to_all", of_four)
    of_the_other = make_setting(Case(), 1 - rank, world_size).config
    with pytest.raises(ValueError, match=f"ep_rank is {1 - rank} and this process is rank {rank} of process_group"):
        make_prepare_finalize("all_to_all", of_the_other)
    backend = make_prepare_finalize("all_to_all", config)
    with pytest.raises(RuntimeError, match="one of the 0 batches between prepare and finalize"):
        backend.finalize(*[torch.zeros(2, 40)] * 3, torch.zeros(2, 3), False, TopKWeightAndReduceNoOP())
    backend = make_prepare_finalize("batched_all_to_all", config)
    args = prepare_args(make_setting(Case(), rank, world_size), "cpu")
    rows = backend.prepare(*args)[0]
    for wrong in (args[4].flip(0), torch.where(args[4] >= 0, 4 - args[4], -1)):
        story = f"expert_map has experts [049], .* on EP rank {rank} and rows of [05], .* are sent to it, in this order"
        with pytest.raises(ValueError, match=story):
            backend.prepare(*args[:4], wrong, *args[5:])
    output, delegate = torch.empty_like(args[0]), TopKWeightAndReduceDelegate()
    with pytest.raises(ValueError, match=r"weight_and_reduce_impl is TopKWeightAndReduceNoOP\(\)"):
        backend.finalize(output, rows, args[1], args[2], False, TopKWeightAndReduceNoOP())
    with pytest.raises(ValueError, match=r"output is \(\d, 39\) of torch.float32 on cpu"):
        backend.finalize(output[:, 1:], rows, args[1], args[2], False, delegate)
    with pytest.raises(ValueError, match=r"fused_expert_output is \(5, 15, 40\) .* it must be \(5, 16, 40\) of torch"):
        backend.finalize(output, rows[:, 1:], args[1], args[2], False, delegate)
    # A batch whose results were refused stays open.
    backend.finalize(output, rows, args[1], args[2], False, delegate)
    # Where experts are is known without a map.
    check_batched(make_setting(Case(), rank, world_size), backend.prepare(*args[:4], None, *args[5:]))


def test_what_cannot_be_made() -> None:
    ranks(2).run(check_construction)


def test_a_group_is_needed() -> None:
    setting = make_setting(Case(), 0, 2)
    for name in BACKENDS:
        assert ALL2ALL_BACKENDS.load(name).unusable_reason() is None
        with pytest.raises(RuntimeError, match="torch.distributed is not initialised .* init_process_group first"):
            make_prepare_finalize(name, setting.config)


def test_a_tensor_of_another_kind_is_refused() -> None:
    host, f32 = torch.device("cpu"), torch.float32
    right = torch.zeros(2, 3)
    check_tensor("it", right, (2, 3), f32, host, contiguous=True)
    check_tensor("it", torch.zeros(3, 2).T, (2, 3), f32, host)
    for wrong in (torch.zeros(2, 2), right.half(), right.to("meta")):
        with pytest.raises(ValueError, match=r"it is \(2,"):
            check_tensor("it", wrong, (2, 3), f32, host)
    with pytest.raises(ValueError, match=r"it has strides \(1, 2\)"):
        check_tensor("it", torch.zeros(3, 2).T, (2, 3), f32, host, contiguous=True)
    with pytest.raises(ValueError, match="it does not begin at a multiple of 16 bytes"):
        check_tensor("it", torch.zeros(7)[1:].view(2, 3), (2, 3), f32, host, contiguous=True)


@pytest.mark.parametrize(
    "rows", [torch.zeros(3, 2).T, torch.zeros(7)[1:].view(2, 3), torch.zeros(0, 6)[:, ::2], torch.zeros(2, 2)[:, ::2]]
)
def test_rows_as_kernels_read_them(rows: torch.Tensor) -> None:
    read = side_by_side(rows)
    assert read.stride() == (rows.size(1), 1) and read.data_ptr() % 16 == 0 and torch.equal(read, rows)
    assert side_by_side(read) is read


def check_batches_by_signature(rank: int, world_size: int, name: str) -> None:
    """Without handles a batch is found by the ids that finalize is given, or where it is the only one."""
    setting = make_setting(Case(), rank, world_size)
    args, backend = prepare_args(setting, "cpu"), make_backend(setting, name)
    inputs = [(*args[:2], args[2].clone(), *args[3:]) for _ in range(MAX_OPEN_BATCHES + 2)]
    batches = [backend.prepare(*given) for given in inputs]

    def finalize(index: int, ids: torch.Tensor | None = None) -> bool:
        results, reduce_impl = run_experts(setting, batches[index], kinds(backend)[0])
        weights, own = finalize_ids(inputs[index], batches[index])
        output = torch.empty_like(args[0])
        backend.finalize(output, results, weights, own if ids is None else ids, False, reduce_impl)
        return torch.equal(output, expected_output(setting, world_size))

    assert finalize(4)
    with pytest.raises(RuntimeError, match=f"one of the {MAX_OPEN_BATCHES - 1} batches"):
        finalize(1)  # as it was forgotten
    assert all(finalize(index) for index in (9, 2, 3, 5, 6, 8))
    assert finalize(7, finalize_ids(inputs[7], batches[7])[1].clone())


@pytest.mark.parametrize("name", ["all_to_all", "batched_all_to_all"])
def test_open_batches(name: str) -> None:
    ranks(2).run(check_batches_by_signature, name)


def check_handles(rank: int, world_size: int) -> None:
    """A handle is good for one combine, in any order, however often its results were refused before."""
    setting = make_setting(Case(), rank, world_size)
    args = dispatch_args(prepare_args(setting, "cpu"))
    for name in BACKENDS:
        backend: Any = make_backend(setting, name)
        batches = [backend.dispatch(*args) for _ in range(3)]
        for batch in (batches[1], batches[0], batches[2]):
            results, reduce_impl = run_experts(setting, as_tuple(batch), kinds(backend)[0])
            output = torch.empty_like(args[0])
            with pytest.raises(ValueError, match="output"):
                backend.combine(output[:, 1:], results, batch, reduce_impl)
            backend.combine(output, results, batch, reduce_impl)
            assert torch.equal(output, expected_output(setting, world_size))
            with pytest.raises(RuntimeError, match="combined already"):
                backend.combine(output, results, batch, reduce_impl)


def test_handles() -> None:
    ranks(2).run(check_handles)


class OnGpu(torch.Tensor):
    """Says that it is, and keeps the streams that it was handed to."""

    is_cuda = True  # type: ignore[assignment]

    def record_stream(self, stream: object) -> None:
        self.streams = [*getattr(self, "streams", []), stream]


class Pair(NamedTuple):
    first: object
    second: object


def test_memory_is_kept_for_a_stream_wherever_it_is_handed_over() -> None:
    tensors = [torch.zeros(1).as_subclass(OnGpu) for _ in range(4)]
    here: Any = "stream"
    keep_for(here, [Pair(tensors[0], None), (1, [tensors[1]]), ExpertTokensMetadata(*tensors[2:]), torch.zeros(1)])
    assert [tensor.streams for tensor in tensors] == [[here]] * 4


def test_no_ep_masks_what_is_elsewhere() -> None:
    config: FusedMoEConfig = make_setting(Case(topk=2), 0, 1).config
    backend = make_prepare_finalize("no_ep", config)
    assert backend.max_num_tokens_per_rank() is None and backend.num_dispatchers() == 1
    rows, weights = torch.randn(2, 40), torch.rand(2, 2)
    ids = torch.tensor([[0, 2], [-1, 1]])
    expert_map = torch.tensor([-1, 0, 1], dtype=torch.int32)
    quant_config = FusedMoEQuantConfig.unquantized()
    found = backend.prepare(rows, weights, ids, 3, expert_map, False, quant_config)
    assert found[0] is rows and found[3].tolist() == [[-1, 2], [-1, 1]] and found[4] is weights
    output = torch.empty_like(rows)
    per_slot = torch.full((2, 2, 40), float("nan"))
    per_slot[found[3] >= 0] = 1.0
    backend.finalize(output, per_slot, weights, found[3], False, TopKWeightAndReduceDelegate())
    assert torch.equal(output, weights[:, 1:].expand(2, 40))
    one_slot = make_prepare_finalize("no_ep", replace(config, experts_per_token=1))
    on_input = one_slot.prepare(rows, weights[:, :1], ids[:, :1], 3, expert_map, True, quant_config)[0]
    assert torch.equal(on_input, rows * weights[:, :1])
    with pytest.raises(ValueError, match=r"topk_weights is \(2, 1\) of torch.float32"):
        backend.prepare(rows, weights[:, :1], ids, 3, expert_map, False, quant_config)
    for other in (rows.half(), rows[:, 1:]):
        with pytest.raises(ValueError, match=r"a1 and topk_ids have .* was made for \(40, 2, torch.float32\)"):
            backend.prepare(other, weights, ids, 3, expert_map, False, quant_config)
    with pytest.raises(ValueError, match=r"expert_map has shape \(3,\)"):
        backend.prepare(rows, weights, ids, 4, expert_map, False, quant_config)

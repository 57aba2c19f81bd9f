"""User-defined backends and experts, by signatures or by structs: they run, and what breaks their contract is named."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig
from moe_ep.kernels.reference import BatchedReferenceExperts, ReferenceExperts
from moe_ep.modular_kernel import (
    FusedMoEModularKernel,
    make_experts,
    make_prepare_finalize,
)
from moe_ep.modular_kernel.adapters import check_backend, check_workspace_shapes
from moe_ep.modular_kernel.contracts import (
    Dispatched,
    Dispatcher,
    Experts,
    ExpertTokensMetadata,
    FusedMoEActivationFormat,
    FusedMoEPrepareAndFinalize,
)
from moe_ep.registry import ALL2ALL_BACKENDS

E, K, N, T, TOPK = 4, 8, 16, 5, 2
CONFIG = FusedMoEConfig(
    num_experts=E,
    experts_per_token=TOPK,
    hidden_dim=K,
    intermediate_size_per_partition=N,
    num_local_experts=E,
    moe_parallel_config=FusedMoEParallelConfig.make(),
    in_dtype=torch.float32,
    max_num_tokens=64,
)


class Own(FusedMoEPrepareAndFinalize):
    """Moves nothing."""

    def __init__(self, **options: Any) -> None:
        pass

    def activation_format(self):
        return FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self):
        return None

    def max_num_tokens_per_rank(self):
        return None

    def num_dispatchers(self):
        return 1

    def output_is_reduced(self):
        return True

    def prepare(self, a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config):
        return a1, None, None, topk_ids, topk_weights

    def finalize(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, impl):
        impl.apply(output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input)


class OwnBatched(Own):
    def activation_format(self):
        return FusedMoEActivationFormat.BatchedExperts


def run(backend: Any, experts: Any = None) -> Any:
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(T, K), torch.randn(E, 2 * N, K), torch.randn(E, K, N)
    ids, weights = torch.randint(0, E, (T, TOPK)), torch.rand(T, TOPK)
    return FusedMoEModularKernel(backend, ReferenceExperts(CONFIG) if experts is None else experts)(
        x, w1, w2, weights, ids
    )


def varied(base: type, **answers: Any) -> Any:
    """An instance named Odd whose methods of these names return what is given, whatever they are asked."""

    def answer(value: Any) -> Any:
        return lambda self, *args: value

    return type("Odd", (base,), {name: answer(value) for name, value in answers.items()})(moe_config=CONFIG)


ROWS, IDS, WEIGHTS = torch.zeros(T, K), torch.zeros(T, TOPK, dtype=torch.int32), torch.ones(T, TOPK)
META = ExpertTokensMetadata.make_from_list([1] * E, "cpu")
BATCHED = torch.zeros(E, 3, K)


class Returns(Own):
    def finalize(self, output, *args):
        super().finalize(output, *args)
        return output


def test_one_that_keeps_to_it_runs() -> None:
    expected = run(Own())
    assert expected.shape == (T, K) and torch.equal(run(Returns()), expected)
    config = replace(CONFIG, max_num_tokens=np.int64(8), experts_per_token=np.int32(TOPK))
    rows = BatchedReferenceExperts(config, max_num_tokens=np.int64(8), num_dispatchers=1)
    assert check_workspace_shapes(rows, rows.workspace_shapes(np.int64(8), N, K, TOPK, E, E, None, "silu"))
    check_backend(varied(Own, max_num_tokens_per_rank=np.int64(8)))


@pytest.mark.parametrize(
    ("prepared", "words"),
    [
        (None, "a NoneType; it must be .rows, scales"),
        ((ROWS, IDS, WEIGHTS), "a tuple of 3; it must be .rows, scales"),
        ((None, None, None, IDS, WEIGHTS), r"\(NoneType, NoneType, NoneType, Tensor, Tensor\); it must be .rows"),
        ((ROWS, None, [1] * E, IDS, WEIGHTS), r"\(Tensor, NoneType, list, Tensor, Tensor\); it must be .rows"),
        ((ROWS[None], None, None, IDS, WEIGHTS), r"rows of torch.float32 \(1, 5, 8\); they must be \(rows, 8\)"),
        ((ROWS[:, :4], None, None, IDS, WEIGHTS), r"rows of torch.float32 \(5, 4\); they must be \(rows, 8\)"),
        ((ROWS.half(), None, None, IDS, WEIGHTS), "rows of torch.float16 .*; they must be .* of torch.float32"),
        ((ROWS[:3], None, None, IDS, WEIGHTS), r"ids torch.int32 \(5, 2\) and .* of 3 rows; ids must be integers \(3"),
        ((ROWS[:3], None, None, None, None), "3 rows for 5 tokens and no ids"),
        ((ROWS, None, None, WEIGHTS, IDS), r"ids torch.float32 \(5, 2\) and weights torch.int32"),
        ((ROWS, None, None, IDS, None), "ids torch.int32 .* and weights None of 5 rows"),
        ((ROWS, None, None, IDS, WEIGHTS[:, :1]), r".* and weights torch.float32 \(5, 1\)"),
    ],
)
def test_what_prepare_returns(prepared: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^Odd.prepare returned {words}"):
        run(varied(Own, prepare=prepared))


@pytest.mark.parametrize(
    ("prepared", "words"),
    [
        ((ROWS, None, META, None, None), r"rows of torch.float32 \(5, 8\); they must be \(local experts, rows, 8\)"),
        ((BATCHED, None, None, None, None), "rows in the BatchedExperts format without metadata"),
        ((BATCHED, None, META, IDS, WEIGHTS), "rows in the BatchedExperts format with ids or weights"),
    ],
)
def test_what_prepare_returns_in_the_batched_format(prepared: Any, words: str) -> None:
    experts = BatchedReferenceExperts(CONFIG, max_num_tokens=3, num_dispatchers=1)
    with pytest.raises(ValueError, match=f"^Odd.prepare returned {words}"):
        run(varied(OwnBatched, prepare=prepared), experts)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"finalize": ROWS}, "finalize returned a tensor; it must write output in place"),
        ({"activation_format": "standard"}, "activation_format returned 'standard'; it must be FusedMoEActivation"),
        ({"max_num_tokens_per_rank": 0}, "max_num_tokens_per_rank returned 0; it must be at least 1, or None"),
        ({"max_num_tokens_per_rank": "8"}, "max_num_tokens_per_rank returned '8'; it must be at least 1"),
        ({"topk_indices_dtype": torch.float32}, "topk_indices_dtype returned torch.float32; it must be an integer"),
    ],
)
def test_what_a_backend_says(answers: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^Odd.{words}"):
        run(varied(Own, **answers))


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"apply": ROWS}, "apply returned a tensor; it must write output in place"),
        ({"activation_format": None}, "activation_format returned None; it must be FusedMoEActivation"),
        ({"finalize_weight_and_reduce_impl": None}, "finalize_weight_and_reduce_impl returned None; it must be a TopK"),
        (
            {"workspace_shapes": ((0,), (T, K))},
            r"workspace_shapes returned \(\(0,\), \(5, 8\)\); it must be the shapes",
        ),
        ({"workspace_shapes": None}, "workspace_shapes returned None; it must be the shapes"),
        ({"workspace_shapes": ((0,), (0,), (T / 1, K))}, "workspace_shapes returned .*; it must be the shapes"),
        ({"workspace_shapes": ((-1,), (0,), (T, K))}, "workspace_shapes returned .*; no size may be below 0"),
        ({"workspace_dtype": None}, "workspace_dtype returned None; it must be a dtype"),
        ({"moe_problem_size": (E, T)}, r"moe_problem_size returned \(4, 5\); it must be \(E, M, N, K, topk\)"),
    ],
)
def test_what_experts_say(answers: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^Odd.{words}"):
        run(Own(), varied(ReferenceExperts, **answers))


class Handed(Dispatcher):
    """By structs; the handle is what `combine` needs."""

    activation_format, topk_indices_dtype = Own.activation_format, Own.topk_indices_dtype
    max_num_tokens_per_rank, num_dispatchers = Own.max_num_tokens_per_rank, Own.num_dispatchers
    output_is_reduced = Own.output_is_reduced

    def __init__(self, **options: Any) -> None:
        self.handles: list[object] = []

    def dispatch(self, hidden_states, routing, quant_config):
        handle = object()
        return Dispatched(
            rows=hidden_states, topk_ids=routing.topk_ids, topk_weights=routing.topk_weights, handle=handle
        )

    def combine(self, output, expert_output, dispatched, reduce_impl):
        self.handles.append(dispatched.handle)
        reduce_impl.apply(output, expert_output, dispatched.topk_weights, dispatched.topk_ids, False)


def test_a_backend_by_structs_runs_and_answers_the_signatures_too() -> None:
    backend = Handed()
    assert torch.equal(run(backend), run(Own()))
    rows, scales, meta, ids, weights = backend.prepare(ROWS, WEIGHTS, IDS, E, None, False, None)
    assert rows is ROWS and scales is None and meta is None
    backend.finalize(
        torch.empty_like(ROWS), ROWS, weights, ids, False, ReferenceExperts(CONFIG).finalize_weight_and_reduce_impl()
    )
    assert len(backend.handles) == 2 and backend.handles[0] is not backend.handles[1]


@pytest.mark.parametrize(
    ("dispatched", "words"),
    [
        ((ROWS, None, None, IDS, WEIGHTS), "a tuple; it must be a Dispatched"),
        (Dispatched(rows=ROWS[:, :4], topk_ids=IDS, topk_weights=WEIGHTS), r"rows of torch.float32 \(5, 4\)"),
        (Dispatched(rows=ROWS[:3]), "3 rows for 5 tokens"),
    ],
)
def test_what_dispatch_returns(dispatched: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^Odd.dispatch returned {words}"):
        run(varied(Handed, dispatch=dispatched))


class Doubled(ReferenceExperts):
    """By the struct; what our own do, twice."""

    def run(self, call):
        super().run(call)
        call.output.mul_(2)


class DoubledBySignature(ReferenceExperts):
    def apply(self, output, *args):
        super().apply(output, *args)
        output.mul_(2)


class Late(type(make_prepare_finalize("no_ep", CONFIG))):  # type: ignore[misc]
    """One of ours, of which `prepare` is overridden."""

    def prepare(self, *args):
        rows, *more = super().prepare(*args)
        return (rows * 2, *more)


def test_the_most_derived_form_of_a_contract_runs() -> None:
    plain = run(make_prepare_finalize("no_ep", CONFIG))
    for experts in (Doubled(CONFIG), DoubledBySignature(CONFIG)):
        assert torch.equal(run(Own(), experts), 2 * plain)
    assert not torch.equal(run(Late(moe_config=CONFIG)), plain)
    # What our own classes promise does not pass to those that are derived from them.
    with pytest.raises(TypeError, match="Odd.run returned a tensor"):
        run(Own(), varied(ReferenceExperts, run=ROWS))
    assert issubclass(ReferenceExperts, Experts) and not Doubled.is_unchecked


def test_a_kernel_with_user_defined_parts_can_be_copied() -> None:
    kernel = FusedMoEModularKernel(Own(), varied(ReferenceExperts))
    assert torch.equal(run(copy.deepcopy(kernel).prepare_finalize), run(Own()))


def test_what_is_no_backend_or_no_experts() -> None:
    for backend, experts, words in (
        (Own, None, "prepare_finalize is <class .*Own.>; it must be an instance"),
        (None, None, "prepare_finalize is None; it must be an instance"),
        (Own(), ReferenceExperts, "fused_experts is <class .*ReferenceExperts.>; it must be an instance"),
        (Own(), type("Bare", (ReferenceExperts,), {"__init__": lambda self: None})(), "Bare has no quant_config; its"),
    ):
        with pytest.raises(TypeError, match=f"^{words}"):
            run(backend, experts)
    for make, name in ((make_prepare_finalize, "no_ep"), (make_experts, "reference")):
        with pytest.raises(TypeError, match="^moe_config is None"):
            make(name, None)


def test_a_backend_is_asked_before_a_layer_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ALL2ALL_BACKENDS, "entries", dict(ALL2ALL_BACKENDS.entries))
    ALL2ALL_BACKENDS.register("none_at_all", f"{__name__}:NoRoom", "")
    with pytest.raises(ValueError, match="^NoRoom.max_num_tokens_per_rank returned 0"):
        make_prepare_finalize("none_at_all", CONFIG)


class NoRoom(Own):
    def max_num_tokens_per_rank(self):
        return 0

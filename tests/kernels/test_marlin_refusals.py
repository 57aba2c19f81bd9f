"""What the packed experts' functions refuse: in one sentence that names the argument, and before anything runs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ep.activation import MoEActivation
from moe_ep.errors import BackendUnavailableError
from moe_ep.kernels.marlin import functional
from moe_ep.kernels.marlin.compute import run_experts
from moe_ep.kernels.marlin.experts import BatchedMarlinExperts, MarlinExperts
from moe_ep.kernels.marlin.functional import batched_fused_marlin_moe, fused_marlin_moe
from moe_ep.kernels.marlin.params import Rows
from moe_ep.kernels.marlin.types import WEIGHT_TYPES, weight_type
from moe_ep.kernels.marlin.weights import WeightPair, Weights
from moe_ep.modular_kernel.contracts import ExpertTokensMetadata
from moe_ep.scalar_type import scalar_types
from tests.kernels.marlin_cases import ROWS, E, K, N, arguments, configs, pair
from tests.wrong_tensors import FORMS, check_refused

UINT4, UINT4B8 = WEIGHT_TYPES[scalar_types.uint4.id], WEIGHT_TYPES[scalar_types.uint4b8.id]
SILU = MoEActivation.SILU


def rows(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


WEIGHTS = arguments(*pair(UINT4, 32, SILU, act_order=True), UINT4, SILU) | {
    "bias1": rows(E, 2 * N), "bias2": rows(E, K), "global_scale1": torch.ones(E, 2), "global_scale2": torch.ones(E)
}  # fmt: skip
BATCHED = {"hidden_states": rows(E, ROWS, K), "expert_num_tokens": ints(E), "output": rows(E, ROWS, K)}
BY_REFERENCE = {"hidden_states": rows(9, K), "expert_num_tokens": ints(E), "expert_row_ids": ints(E, ROWS)}
TOKENS = {
    "hidden_states": rows(ROWS, K),
    "topk_weights": torch.zeros(ROWS, 2),
    "topk_ids": ints(ROWS, 2),
    "expert_map": ints(E + 2),
    "output": rows(ROWS, K),
    "intermediate_cache13": rows(8 * ROWS, K),
    "intermediate_cache2": rows(8 * ROWS, N),
}
OPTIONAL = ("bias", "global_scale", "g_idx", "sort_indices", "output", "expert_map", "intermediate_cache")
FITS = {
    *((name, "spread") for name in ("topk_weights", "topk_ids", "expert_map")),
    *(("expert_map", form) for form in ("longer", "shorter", "one more")),
    *(("expert_row_ids", form) for form in ("longer", "shorter")),
    *(
        (f"intermediate_cache{which}", form)
        for which in (13, 2)
        for form in ("longer", "shorter", "one more", "no dimension", "one dimension more")
    ),
}
# Where two tensors do not fit each other the sentence may begin with the other one.
OTHERS = {
    ("w1", "elsewhere"): "w1_scale",
    ("w1", "one more"): "w1_scale",
    ("w2", "one more"): "w2_scale",
    ("topk_ids", "longer"): "topk_weights",
    ("topk_ids", "shorter"): "topk_weights",
    ("expert_row_ids", "nothing"): "hidden_states",
}


def wrong(given: dict[str, Any], base: dict[str, Any]) -> list[Any]:
    """(what else is given, argument, form) for each tensor of `base` and all that it must not be."""
    return [
        pytest.param(given, name, form, id=f"{name}-{form}")
        for name, tensor in base.items()
        for form in FORMS
        if isinstance(tensor, torch.Tensor)
        and (name, form) not in FITS
        and not (form == "nothing" and name.startswith(OPTIONAL))
        and not (name == "hidden_states" and form == "one more" and base is not BATCHED)
    ]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise RuntimeError("it ran")

    monkeypatch.setattr(functional, "compute_batch", run)
    monkeypatch.setattr(functional, "compute_tokens", run)


@pytest.mark.parametrize("given", [BATCHED, BY_REFERENCE], ids=["batched", "by reference"])
def test_what_fits_runs(given: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="it ran"):
        batched_fused_marlin_moe(**WEIGHTS, **given)


@pytest.mark.parametrize("expected_m", [-1, float("nan"), float("inf"), True, "8"])
def test_expected_m_is_a_number(expected_m: Any) -> None:
    with pytest.raises(ValueError, match="^expected_m is"):
        batched_fused_marlin_moe(**WEIGHTS, **BATCHED, expected_m=expected_m)


def test_tokens_that_fit_run() -> None:
    for name, form in (("output", "shorter"), *FITS):
        if name in TOKENS:
            change = {} if name == "output" else {name: FORMS[form](TOKENS[name])}
            with pytest.raises(RuntimeError, match="it ran"):
                fused_marlin_moe(**WEIGHTS, **(TOKENS | change))


@pytest.mark.parametrize(
    ("given", "name", "form"), [*wrong(BATCHED, WEIGHTS), *wrong(BATCHED, BATCHED), *wrong(BY_REFERENCE, BY_REFERENCE)]
)
def test_a_wrong_tensor_is_named(given: dict[str, Any], name: str, form: str) -> None:
    whole = WEIGHTS | given
    check_refused(batched_fused_marlin_moe, whole | {name: FORMS[form](whole[name])}, OTHERS.get((name, form), name))


@pytest.mark.parametrize(("given", "name", "form"), wrong(TOKENS, TOKENS))
def test_a_wrong_tensor_beside_tokens_is_named(given: dict[str, Any], name: str, form: str) -> None:
    whole = WEIGHTS | given
    check_refused(fused_marlin_moe, whole | {name: FORMS[form](whole[name])}, OTHERS.get((name, form), name))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_states": rows(E, ROWS, K).half()}, "w1_scale"),
        ({"hidden_states": rows(E, ROWS, K + 32)}, "hidden_states"),
        ({"w2": torch.zeros(E, N // 16 + 1, K * 2, dtype=torch.int32)}, "w2"),
        ({"w1_scale": rows(E, 3, 2 * N), "w1_zeros": rows(E, 3, 2 * N)}, "w1_scale"),
        ({"quant_type_id": UINT4B8.scalar_type.id}, "w1_zeros"),
        ({"w1_zeros": None}, "w1_zeros"),
        ({"quant_type_id": 5}, "quant_type_id"),
        ({"bias1": rows(E, N)}, "bias1"),
        ({"global_scale1": torch.zeros(E, 3)}, "global_scale1"),
        ({"activation": "tanh"}, "activation"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input"),
        ({"inplace": True}, "inplace"),
        ({"inplace": True, "output": None} | BY_REFERENCE, "inplace"),
    ],
)
def test_arguments_that_do_not_fit_each_other(change: dict[str, Any], named: str) -> None:
    check_refused(batched_fused_marlin_moe, WEIGHTS | BATCHED | change, named)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_states": rows(ROWS, K).half()}, "w1_scale"),
        ({"hidden_states": rows(ROWS + 1, K)}, "topk_ids"),
        ({"topk_ids": ints(ROWS, 0), "topk_weights": torch.zeros(ROWS, 0)}, "topk_ids"),
        ({"expert_map": ints(0)}, "expert_map"),
        ({"apply_router_weight_on_input": True}, "apply_router_weight_on_input needs top_k 1 and top_k"),
        ({"input_dtype": torch.float8_e5m2}, "input_dtype"),
        ({"input_global_scale1": torch.ones(E)}, "input_global_scale1"),
        ({"input_global_scale2": torch.ones(E)}, "input_global_scale2"),
        ({"inplace": True}, "inplace"),
    ],
)
def test_arguments_beside_tokens_that_do_not_fit_each_other(change: dict[str, Any], named: str) -> None:
    check_refused(fused_marlin_moe, WEIGHTS | TOKENS | change, named)


@pytest.mark.parametrize("name", ["apply_router_weight_on_input", "is_k_full", "inplace"])
@pytest.mark.parametrize("value", ["false", 0, None])
def test_flags_are_true_or_false(name: str, value: Any) -> None:
    for function, given in ((batched_fused_marlin_moe, BATCHED), (fused_marlin_moe, TOKENS)):
        with pytest.raises(TypeError, match=f"^{name} is {value!r}; it must be True or False"):
            function(**WEIGHTS | given | {"output": None, name: value})


@pytest.mark.parametrize("value", [[], {}, None])
def test_a_type_is_known_by_its_id(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^quant_type_id is {re.escape(repr(value))}; it must be one of uint4 "):
        batched_fused_marlin_moe(**WEIGHTS | BATCHED | {"quant_type_id": value})
    with pytest.raises(ValueError, match=f"^quant_type_id is {re.escape(repr(value))}; it must be one of uint4 "):
        weight_type(value)


def test_nvfp4_asks_for_its_global_scale() -> None:
    kind = WEIGHT_TYPES[scalar_types.float4_e2m1f.id]
    whole = arguments(*pair(kind, 16, SILU), kind, SILU) | BATCHED | {"global_scale1": None}
    check_refused(batched_fused_marlin_moe, whole, "global_scale1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_type_id": None}, "quant_config lacks quant_type_id, w1_scale or w2_scale"),
        ({"w2_scale": None}, "quant_config lacks quant_type_id, w1_scale or w2_scale"),
        ({"w2_quant_type_id": UINT4.scalar_type.id}, "quant_config has quant_type_id"),
        ({"quant_type_id": 5}, "quant_type_id is 5; it must be one of"),
    ],
)
def test_configurations_of_no_packed_experts(change: dict[str, Any], message: str) -> None:
    moe_config, quant_config = configs(*pair(UINT4B8, 32, SILU), UINT4B8)
    with pytest.raises(ValueError, match=f"^{message}"):
        MarlinExperts(moe_config, replace(quant_config, **change))


@pytest.mark.parametrize("name", ["max_num_tokens", "num_dispatchers"])
def test_batches_have_room(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        BatchedMarlinExperts(*configs(*pair(UINT4B8, 32, SILU), UINT4B8), **{name: 0})


@pytest.mark.parametrize(
    ("batched", "hidden_states", "output", "row_ids"),
    [
        (True, rows(E, ROWS, K), rows(E, ROWS - 1, K), None),
        (True, rows(9, K), rows(E, ROWS, K), ints(E, ROWS + 1)),
        (True, rows(E, ROWS, K), rows(E, ROWS, K).half(), None),
        (False, rows(ROWS, K), rows(ROWS - 1, K), None),
        (False, rows(ROWS, K), rows(ROWS, 2 * K)[:, ::2], None),
    ],
)
def test_experts_refuse_an_output_without_room(
    batched: bool, hidden_states: torch.Tensor, output: torch.Tensor, row_ids: torch.Tensor | None
) -> None:
    first, second = pair(UINT4B8, 32, SILU)
    experts = (BatchedMarlinExperts if batched else MarlinExperts)(*configs(first, second, UINT4B8))
    meta = ExpertTokensMetadata(torch.full((E,), 2, dtype=torch.int32), None, row_ids) if batched else None
    with pytest.raises(ValueError, match="^output is "):
        experts.apply(
            output, hidden_states, first.packed.qweight, second.packed.qweight, torch.ones(ROWS, 2), ints(ROWS, 2),
            SILU, E, None, None, None, rows(0), rows(0), meta, False,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_states": rows(ROWS, K + 1)}, "hidden_states"),
        ({"topk_weights": torch.ones(ROWS, 1)}, "topk_weights"),
        ({"topk_ids": torch.zeros(ROWS, 2)}, "topk_ids"),
        ({"expert_map": torch.zeros(E)}, "expert_map"),
        ({"w1": ints(E, 2, 2)}, "w1"),
        ({"activation": "tanh"}, "activation"),
    ],
)
def test_experts_refuse_what_the_functions_do(change: dict[str, Any], named: str) -> None:
    first, second = pair(UINT4B8, 32, SILU)
    given = {name: TOKENS[name] for name in ("hidden_states", "topk_weights", "topk_ids", "output")}
    given |= {"w1": first.packed.qweight, "w2": second.packed.qweight, "activation": SILU, "global_num_experts": E}
    given |= {"workspace13": rows(0), "workspace2": rows(0), "apply_router_weight_on_input": False}
    given |= dict.fromkeys(("expert_map", "a1q_scale", "a2_scale", "expert_tokens_meta"))
    check_refused(MarlinExperts(*configs(first, second, UINT4B8)).apply, given | change, named)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_ids": ints(ROWS, 2) + E, "expert_map": None}, f"topk_ids goes from {E} to {E}; .* w1's experts .{E}"),
        ({"topk_ids": ints(ROWS, 2) + E + 2}, rf"topk_ids goes .* and below expert_map's length \({E + 2}\)"),
        ({"topk_ids": ints(ROWS, 2) - 2}, "topk_ids goes from -2 to -2; ids must be at least -1"),
        ({"expert_map": ints(E + 2) + E}, rf"expert_map has local experts up to {E}; .* below w1's experts \({E}\)"),
    ],
)
def test_ids_of_experts_that_are_not_there_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        fused_marlin_moe(**WEIGHTS, **(TOKENS | change))


def test_batched_experts_refuse_counts_of_another_kind() -> None:
    first, second = pair(UINT4B8, 32, SILU)
    experts, given = BatchedMarlinExperts(*configs(first, second, UINT4B8)), rows(E, ROWS, K)
    with pytest.raises(ValueError, match="^expert_num_tokens is torch.int64"):
        experts.apply(
            given, given, first.packed.qweight, second.packed.qweight, torch.ones(ROWS, 2), ints(ROWS, 2), SILU, E,
            None, None, None, rows(0), rows(0), ExpertTokensMetadata(ints(E).long()), False,
        )  # fmt: skip


@pytest.mark.parametrize("name", ["workspace13", "workspace2"])
@pytest.mark.parametrize("batched", [False, True])
def test_experts_refuse_scratch_of_another_kind(batched: bool, name: str) -> None:
    first, second = pair(UINT4B8, 32, SILU)
    experts = (BatchedMarlinExperts if batched else MarlinExperts)(*configs(first, second, UINT4B8))
    given = rows(E, ROWS, K) if batched else rows(ROWS, K)
    meta = ExpertTokensMetadata(ints(E)) if batched else None
    scratch = {"workspace13": rows(100), "workspace2": rows(100), name: torch.zeros(100)}
    with pytest.raises(ValueError, match=f"^{name} is torch.float32 on cpu; it must be torch.bfloat16 on cpu"):
        experts.apply(
            rows(*given.shape), given, first.packed.qweight, second.packed.qweight, torch.ones(ROWS, 2), ints(ROWS, 2),
            SILU, E, None, None, None, scratch["workspace13"], scratch["workspace2"], meta, False,
        )  # fmt: skip


def launchable() -> WeightPair:
    weights = [
        Weights(made.packed.qweight, made.packed.scales, None, None, None, None, None, gated, *made.values.shape[1:])
        for made, gated in zip(pair(UINT4B8, 32, SILU), (True, False), strict=True)
    ]
    return WeightPair(UINT4B8, SILU, torch.bfloat16, *weights)


def test_a_gpu_older_than_sm_80_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "an old GPU")
    given, none = rows(E, ROWS, K), torch.empty(0)
    with pytest.raises(BackendUnavailableError, match=r"an old GPU has compute capability 7.5"):
        run_experts(given, given, launchable(), Rows(ints(E), ROWS), none, none)


@pytest.mark.parametrize("name", ["hidden_states", "output", "intermediate_cache13", "intermediate_cache2", "w2_scale"])
def test_what_kernels_could_not_read_at_once_is_refused(name: str) -> None:
    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)

    given = dict.fromkeys(("hidden_states", "output", "intermediate_cache13", "intermediate_cache2"), rows(E, ROWS, K))
    weights = launchable()
    if name in given:
        given[name] = shifted(given[name])
    else:
        weights.w2 = weights.w2._replace(scales=shifted(weights.w2.scales))
    with pytest.raises(ValueError, match=f"^{name} does not begin at a multiple of 16 bytes"):
        run_experts(
            given["output"], given["hidden_states"], weights, Rows(ints(E), ROWS), given["intermediate_cache2"],
            given["intermediate_cache13"],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"expert_map": ints(E - 1)}, "expert_map"),
        ({"expert_map": ints(E + 2), "global_num_experts": E + 3}, "expert_map"),
        ({"expert_map": ints(E + 2), "global_num_experts": E + 1}, "expert_map"),
        ({"expert_map": None, "global_num_experts": E + 1}, "global_num_experts"),
        ({"global_num_experts": E - 1}, "global_num_experts"),
        ({"g_idx1": WEIGHTS["g_idx1"] + K // 32}, "g_idx1"),
        ({"g_idx2": WEIGHTS["g_idx2"] - 1, "sort_indices2": None}, "g_idx2"),
        ({"sort_indices1": WEIGHTS["sort_indices1"] + 1}, "sort_indices1"),
        ({"sort_indices2": ints(E, N)}, "sort_indices2"),
        ({"workspace": [1]}, "workspace"),
        ({"moe_sum": 3}, "moe_sum"),
        ({"activation_func": "silu"}, "activation_func"),
    ],
)
def test_maps_and_functions_that_do_not_fit(change: dict[str, Any], named: str) -> None:
    check_refused(fused_marlin_moe, WEIGHTS | TOKENS | change, named)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"expert_num_tokens": ints(E) - 1}, "expert_num_tokens"),
        ({"expert_num_tokens": ints(E) + ROWS + 1}, "expert_num_tokens"),
        ({"expert_map": ints(E - 1)}, "expert_map"),
        ({"expert_map": ints(9), "global_num_experts": 8}, "expert_map"),
        ({"expert_num_tokens": ints(E) + 1, "expert_row_ids": ints(E, ROWS) + 9} | {"output": None}, "expert_row_ids"),
        ({"expert_num_tokens": ints(E) + 1, "expert_row_ids": ints(E, ROWS) - 1} | {"output": None}, "expert_row_ids"),
    ],
)
def test_counts_and_row_ids_out_of_range(change: dict[str, Any], named: str) -> None:
    base = BY_REFERENCE if "expert_row_ids" in change else BATCHED
    check_refused(batched_fused_marlin_moe, WEIGHTS | base | change, named)


def test_row_ids_behind_the_counts_are_not_looked_at() -> None:
    given = BY_REFERENCE | {"expert_num_tokens": ints(E), "expert_row_ids": ints(E, ROWS) + (1 << 30)}
    with pytest.raises(RuntimeError, match="it ran"):
        batched_fused_marlin_moe(**WEIGHTS, **given)


ROOM = torch.zeros(E + 1, ROWS, K, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_states": ROOM[:E], "output": ROOM[1:]},
        {"hidden_states": ROOM[1:], "output": ROOM[:E]},
        BY_REFERENCE | {"hidden_states": ROOM.view(-1, K), "output": ROOM[:E]},
    ],
    ids=["behind", "before", "by reference"],
)
def test_rows_that_other_experts_read_are_not_written_over(change: dict[str, Any]) -> None:
    check_refused(batched_fused_marlin_moe, WEIGHTS | BATCHED | change, "output")


def test_rows_may_be_written_over_themselves() -> None:
    with pytest.raises(RuntimeError, match="it ran"):
        batched_fused_marlin_moe(**WEIGHTS | BATCHED | {"hidden_states": ROOM[:E], "output": ROOM[:E]})

"""Every backend against plain loops: cases, the oracle, and what each rank checks. Shared by CPU and GPU tests.

Each rank knows the inputs of all ranks (they are drawn from a seed), so it can say which rows must arrive here, in
which order, and what its own output must be, bit for bit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.dispatch.batch import wire_dtype
from moe_ep.expert_map import determine_expert_map
from moe_ep.kernels.quantize import GROUP_SIZE
from moe_ep.modular_kernel.contracts import (
    Dispatched,
    FusedMoEActivationFormat,
    FusedMoEPrepareAndFinalize,
    PrepareResult,
    Routing,
)
from moe_ep.modular_kernel.weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from moe_ep.registry import ALL2ALL_BACKENDS

BACKENDS = ("allgather_reducescatter", "all_to_all", "batched_all_to_all")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step of all ranks. `tokens` are dealt out over the ranks in turn; `routing` says how ids are drawn; `whole`
    rows have one scale, for experts that read codes."""

    tokens: tuple[int, ...] = (5, 0, 3, 4)
    num_experts: int = 10
    topk: int = 3
    hidden_size: int = 40
    dtype: torch.dtype = torch.float32
    routing: str = "random"
    placement: str = "linear"
    num_shared: int = 0
    code_dtype: torch.dtype | None = None
    whole: bool = False
    on_input: bool = False
    capacity: int = 8
    ids_dtype: torch.dtype = torch.int32
    seed: int = 0


CASES = [
    Case(),
    Case(dtype=torch.bfloat16, placement="round_robin"),
    Case(dtype=torch.float16, routing="one_rank"),
    Case(routing="one_expert", topk=1),
    Case(routing="masked", dtype=torch.bfloat16),
    Case(routing="none"),
    Case(routing="repeated"),
    Case(tokens=(0,)),
    Case(tokens=(0, 0, 7, 0)),
    Case(tokens=(8,), num_experts=32, topk=32, hidden_size=1, ids_dtype=torch.int64),
    Case(num_experts=3, topk=2, hidden_size=33, dtype=torch.float16),
    Case(topk=1, on_input=True, dtype=torch.bfloat16),
    Case(num_shared=2, placement="round_robin"),
    Case(num_shared=1, code_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16, hidden_size=300),
    Case(code_dtype=torch.float8_e4m3fn, hidden_size=128, routing="masked", placement="round_robin"),
    Case(code_dtype=torch.float8_e4m3fn, hidden_size=7, dtype=torch.float16, topk=1, on_input=True),
    Case(num_shared=1, code_dtype=torch.int8, dtype=torch.bfloat16, hidden_size=300),
    Case(code_dtype=torch.int8, hidden_size=7, dtype=torch.float16, topk=1, on_input=True),
    *(Case(tokens=(1, 8, 2, 5), num_experts=7, topk=5, seed=seed) for seed in range(1, 4)),
]


class Inputs(NamedTuple):
    """What one rank hands to prepare."""

    rows: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class Setting(NamedTuple):
    """A case on one rank of a world."""

    case: Case
    inputs: list[Inputs]
    rank: int
    owner: dict[int, int]
    local: dict[int, int]
    expert_map: torch.Tensor | None
    config: FusedMoEConfig


def draw(case: Case, world_size: int) -> list[Inputs]:
    """The inputs of all ranks."""
    drawn = []
    for rank, num_tokens in zip(range(world_size), itertools.cycle(case.tokens), strict=False):
        generator = torch.Generator().manual_seed(1000 * case.seed + rank)
        rows = torch.randn(num_tokens, case.hidden_size, generator=generator).to(case.dtype)
        scores = torch.rand(num_tokens, case.num_experts, generator=generator)
        if case.routing == "one_rank":
            scores[:, max(1, case.num_experts // world_size) :] -= 1.0
        if case.routing == "one_expert":
            scores[:, case.num_experts // 2] += 1.0
        if case.routing == "any":
            ids = torch.randint(-1, case.num_experts, (num_tokens, case.topk), generator=generator)
        else:
            ids = scores.topk(case.topk, dim=1).indices
        if case.routing == "masked":
            ids[torch.rand(ids.shape, generator=generator) < 0.5] = -1
        if case.routing == "none":
            ids[:] = -1
        if case.routing == "repeated":
            ids[:, 1] = ids[:, 0]
        shared = case.num_experts + torch.arange(case.num_shared).expand(num_tokens, -1)
        ids = torch.cat([ids, shared], dim=1).to(case.ids_dtype)
        weights = torch.rand(ids.shape, generator=generator)
        # The weight of a slot without an expert is nobody's business.
        weights[ids < 0] = float("nan")
        drawn.append(Inputs(rows, ids, weights))
    return drawn


def make_setting(case: Case, rank: int, world_size: int) -> Setting:
    parallel = FusedMoEParallelConfig.make(ep_size=world_size, rank=rank, expert_placement_strategy=case.placement)
    num_local, expert_map, _ = determine_expert_map(
        world_size, rank, case.num_experts, case.placement, case.num_shared, return_expert_mask=True
    )
    owner, local = {}, {}
    for other in range(world_size):
        _, its_map, _ = determine_expert_map(world_size, other, case.num_experts, case.placement)
        for expert in range(case.num_experts):
            if its_map is None or its_map[expert] >= 0:
                owner[expert] = other
                if other == rank:
                    local[expert] = expert if its_map is None else int(its_map[expert])
    for shared in range(case.num_shared):
        local[case.num_experts + shared] = num_local + shared
    config = FusedMoEConfig(
        num_experts=case.num_experts,
        experts_per_token=case.topk,
        hidden_dim=case.hidden_size,
        intermediate_size_per_partition=32,
        num_local_experts=num_local + case.num_shared,
        moe_parallel_config=parallel,
        in_dtype=case.dtype,
        max_num_tokens=case.capacity,
        num_fused_shared_experts=case.num_shared,
    )
    return Setting(case, draw(case, world_size), rank, owner, local, expert_map, config)


def owner_of(setting: Setting, source: int, expert: int) -> int:
    """The rank that an id of `source` goes to, -1 for none."""
    if expert < 0:
        return -1
    return setting.owner.get(expert, source)


def wire(case: Case, row: torch.Tensor) -> torch.Tensor:
    """What arrives of a row: itself, or what codes with a scale for 128 columns, or for all, leave of it."""
    if case.code_dtype is None:
        return row
    groups = []
    for group in row.float().split(len(row) if case.whole else GROUP_SIZE):
        most = 127.0 if case.code_dtype == torch.int8 else 448.0
        scale = (group.abs().max() / most).clamp(min=torch.finfo(torch.float32).tiny)
        codes = (group / scale).clamp(-most, most)
        codes = codes.round() if case.code_dtype == torch.int8 else codes.to(case.code_dtype).float()
        groups.append(codes * scale)
    return torch.cat(groups).to(row.dtype)


def sent_row(setting: Setting, source: int, token: int) -> torch.Tensor:
    rows, _, weights = setting.inputs[source]
    row = rows[token]
    if setting.case.on_input:
        row = (row * weights[token, 0]).to(row.dtype)
    return wire(setting.case, row)


def expert(expert_id: int, row: torch.Tensor) -> torch.Tensor:
    """The stand-in for an expert: different for each, and rounded to the row's dtype as a real one."""
    return (row.float() * (1.0 + expert_id / 8.0) + expert_id).to(row.dtype)


def rank_sum(
    setting: Setting, source: int, token: int, rank: int, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    """The weighted sum of a token's experts on one rank in the wire's dtype, or another; None where there are none."""
    _, ids, weights = setting.inputs[source]
    total = None
    for slot, expert_id in enumerate(ids[token].tolist()):
        if owner_of(setting, source, expert_id) == rank:
            value = expert(expert_id, sent_row(setting, source, token)).float()
            if not setting.case.on_input:
                value = value * weights[token, slot]
            total = value if total is None else total + value
    return None if total is None else total.to(dtype or wire_dtype(setting.case.dtype))


def expected_output(setting: Setting, world_size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sum over ranks in order; results are of `dtype` on the wire, or of `wire_dtype`."""
    rows = setting.inputs[setting.rank].rows
    output = torch.zeros_like(rows)
    for token in range(len(rows)):
        total = torch.zeros(rows.size(1))
        for rank in range(world_size):
            part = rank_sum(setting, setting.rank, token, rank, dtype)
            if part is not None:
                total = total + part.float()
        output[token] = total.to(rows.dtype)
    return output


def expected_of_slots(setting: Setting) -> torch.Tensor:
    """The sum over slots in order, as batch-invariant layers have it, for results in the rows' dtype."""
    rows, ids, weights = setting.inputs[setting.rank]
    output = torch.zeros_like(rows)
    for token in range(len(rows)):
        total = torch.zeros(rows.size(1))
        for slot, expert_id in enumerate(ids[token].tolist()):
            if owner_of(setting, setting.rank, expert_id) >= 0:
                value = expert(expert_id, sent_row(setting, setting.rank, token)).float()
                total = total + (value if setting.case.on_input else value * weights[token, slot])
        output[token] = total.to(rows.dtype)
    return output


def check_standard(setting: Setting, result: PrepareResult, padded: bool) -> None:
    """Rows, ids and weights that arrived: those of each source in token order; `padded` ones of every token."""
    rows, scales, meta, ids, weights = result
    assert scales is None and meta is None
    room = max(len(source.rows) for source in setting.inputs) if padded else 0
    index = 0
    for source, inputs in enumerate(setting.inputs):
        for token in range(max(room, len(inputs.rows))):
            owners = []
            if token < len(inputs.rows):
                owners = [owner_of(setting, source, expert_id) for expert_id in inputs.ids[token].tolist()]
            if not padded and setting.rank not in owners:
                continue
            expected_ids = [
                int(inputs.ids[token, slot]) if owner == setting.rank else -1 for slot, owner in enumerate(owners)
            ] or [-1] * inputs.ids.size(1)
            assert ids[index].tolist() == expected_ids
            if owners:
                assert torch.equal(rows[index].cpu(), sent_row(setting, source, token))
                is_mine = torch.tensor(expected_ids) >= 0
                assert torch.equal(weights[index].cpu()[is_mine], inputs.weights[token][is_mine])
            index += 1
    assert len(rows) == len(ids) == len(weights) == index
    assert rows.dtype == setting.case.dtype


def check_batched(setting: Setting, result: PrepareResult) -> None:
    """Each local expert's rows by (source rank, token), and how many there are."""
    rows, scales, meta, ids, weights = result
    assert scales is None and ids is None and weights is None
    counts = meta.expert_num_tokens.tolist()
    assert rows.shape == (
        setting.config.num_local_experts, setting.config.ep_size * setting.case.capacity, setting.case.hidden_size
    )  # fmt: skip
    assert rows.dtype == setting.case.dtype
    for expert_id, local in setting.local.items():
        expected = [
            sent_row(setting, source, token)
            for source, inputs in enumerate(setting.inputs)
            for token in range(len(inputs.rows))
            if expert_id in inputs.ids[token] and owner_of(setting, source, expert_id) == setting.rank
        ]
        assert counts[local] == len(expected)
        for index, row in enumerate(expected):
            assert torch.equal(rows[local, index].cpu(), row)


def run_experts(
    setting: Setting, result: PrepareResult, kind: str, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, TopKWeightAndReduce]:
    """What experts would leave, with NaN wherever nothing is owned; `kind` is contiguous, noop or batched; `dtype` is
    that of sums, `wire_dtype` if None."""
    rows, _, meta, ids, weights = result
    global_of = {local: expert_id for expert_id, local in setting.local.items()}
    if kind == "batched":
        output = torch.full_like(rows, float("nan"))
        for local, count in enumerate(meta.expert_num_tokens.tolist()):
            output[local, :count] = expert(global_of[local], rows[local, :count])
        return output, TopKWeightAndReduceDelegate()
    per_slot = rows.new_full((*ids.shape, rows.size(1)), float("nan"))
    for index, slot in (ids >= 0).nonzero().tolist():
        per_slot[index, slot] = expert(int(ids[index, slot]), rows[index])
    if kind == "contiguous" or not len(rows):
        return per_slot, TopKWeightAndReduceContiguous()
    reduced = torch.empty_like(rows, dtype=dtype or wire_dtype(rows.dtype))
    TopKWeightAndReduceContiguous().apply(reduced, per_slot, weights, ids, setting.case.on_input)
    reduced[(ids < 0).all(dim=1)] = float("nan")
    return reduced, TopKWeightAndReduceNoOP()


def make_backend(setting: Setting, backend: str, **options: object) -> FusedMoEPrepareAndFinalize:
    quant_config = FusedMoEQuantConfig(dispatch_dtype=setting.case.code_dtype)
    return ALL2ALL_BACKENDS.load(backend)(moe_config=setting.config, quant_config=quant_config, **options)


def prepare_args(setting: Setting, device: str) -> tuple:
    rows, ids, weights = setting.inputs[setting.rank]
    expert_map = None if setting.expert_map is None else setting.expert_map.to(device)
    num_ids = setting.case.num_experts + setting.case.num_shared
    quant_config = FusedMoEQuantConfig.unquantized()
    return (
        rows.to(device), weights.to(device), ids.to(device), num_ids, expert_map, setting.case.on_input, quant_config
    )  # fmt: skip


def dispatch_args(args: tuple) -> tuple[torch.Tensor, Routing, FusedMoEQuantConfig]:
    """The same, as `dispatch` takes them."""
    rows, weights, ids, num_ids, expert_map, on_input, quant_config = args
    routing = Routing(
        topk_weights=weights,
        topk_ids=ids,
        num_experts=num_ids,
        expert_map=expert_map,
        apply_router_weight_on_input=on_input,
    )
    return rows, routing, quant_config


def as_tuple(dispatched: Dispatched) -> PrepareResult:
    """What prepare returns of it."""
    rows, scales, meta = dispatched.rows, dispatched.row_scales, dispatched.expert_tokens_meta
    return rows, scales, meta, dispatched.topk_ids, dispatched.topk_weights


def finalize_ids(args: tuple, result: PrepareResult) -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_weights, topk_ids) that the modular kernel hands to finalize."""
    return (args[1] if result[4] is None else result[4]), (args[2] if result[3] is None else result[3])


def kinds(backend: FusedMoEPrepareAndFinalize) -> tuple[str, ...]:
    batched = backend.activation_format() is FusedMoEActivationFormat.BatchedExperts
    return ("batched",) if batched else ("contiguous", "noop")


def check_case(rank: int, world_size: int, case: Case, name: str, device: str = "cpu") -> None:
    """One dispatch and combine for each way in which experts may leave their output, against the oracle."""
    setting = make_setting(case, rank, world_size)
    backend = make_backend(setting, name)
    assert backend.num_dispatchers() == world_size and backend.output_is_reduced()
    for kind in kinds(backend):
        args = prepare_args(setting, device)
        result = backend.prepare(*args)
        if kind == "batched":
            check_batched(setting, result)
        else:
            check_standard(setting, result, padded=name == "allgather_reducescatter")
        dtype = wire_dtype(case.dtype) if backend.accepts_f32_output() else case.dtype
        expert_output, reduce_impl = run_experts(setting, result, kind, dtype)
        output = torch.full_like(args[0], float("nan"))
        weights, ids = finalize_ids(args, result)
        backend.finalize(output, expert_output, weights, ids, case.on_input, reduce_impl)
        assert torch.equal(output.cpu(), expected_output(setting, world_size, dtype))


def check_cases(rank: int, world_size: int, cases: list[Case], names: tuple[str, ...], device: str = "cpu") -> int:
    """All cases in one go; the number that was checked."""
    checked = 0
    for case, name in itertools.product(cases, names):
        try:
            check_case(rank, world_size, case, name, device)
        except AssertionError as error:
            raise AssertionError(f"{name}, {case}, rank {rank} of {world_size}: {error}") from error
        checked += 1
    return checked


def check_interleaved(rank: int, world_size: int, name: str, mode: str, device: str = "cpu") -> None:
    """Three batches open at once, finished in another order than they were begun in; twice, with the same bits."""
    cases = [replace(CASES[0], seed=seed, tokens=tokens) for seed, tokens in enumerate([(5, 0, 3, 4), (8,), (0, 2)])]
    settings = [make_setting(case, rank, world_size) for case in cases]
    backend = make_backend(settings[0], name)
    assert backend.supports_async()
    runs = [_run_interleaved(backend, settings, mode, device) for _ in range(2)]
    for setting, first, second in zip(settings, *runs, strict=True):
        assert torch.equal(first.cpu(), expected_output(setting, world_size))
        assert torch.equal(first, second)


def _run_interleaved(
    backend: FusedMoEPrepareAndFinalize, settings: list[Setting], mode: str, device: str
) -> list[torch.Tensor]:
    kind = kinds(backend)[0]
    all_args = [prepare_args(setting, device) for setting in settings]
    if mode == "sync":
        results = [backend.prepare(*args) for args in all_args]
    else:
        halves = [backend.prepare_async(*args) for args in all_args]
        for hook, _ in halves:
            hook()
        results = [receive() for _, receive in halves]
    outputs = [torch.full_like(args[0], float("nan")) for args in all_args]
    receivers = []
    for index in (1, 0, 2):
        setting, args, result = settings[index], all_args[index], results[index]
        expert_output, reduce_impl = run_experts(setting, result, kind)
        call = (outputs[index], expert_output, *finalize_ids(args, result), setting.case.on_input, reduce_impl)
        if mode == "sync":
            backend.finalize(*call)
        else:
            receivers.append(backend.finalize_async(*call))
    for hook, receive in reversed(receivers):
        hook()
        assert receive() is None
    return outputs

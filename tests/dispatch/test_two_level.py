"""two_level: which ranks make up its levels, and both levels over gloo against plain loops."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from moe_ep.dispatch import two_level
from moe_ep.dispatch.all_to_all import AllToAllPrepareFinalize
from moe_ep.dispatch.two_level import Grid
from moe_ep.errors import ConfigError
from moe_ep.layer.methods import relative_error, tolerance
from moe_ep.registry import ALL2ALL_BACKENDS
from tests.dispatch.backend_cases import CASES, Case, make_backend, make_setting, prepare_args, run_experts
from tests.dispatch.backend_cases import expected_output as output_of_one_level
from tests.dispatch.two_level_cases import check_two_level, expected_output
from tests.ranks import ranks

LEVELS = ("all_to_all", "all_to_all")
# Of both placements and all dtypes, with masked ids, ranks without tokens, shared experts, fp8, weights on the input.
SOME_CASES = [CASES[index] for index in (0, 1, 2, 4, 8, 11, 13)]
# Of experts that read codes.
SOME_CASES += [replace(CASES[index], whole=True) for index in (13, 16)]


def test_ranks_are_found_by_host_and_local_rank() -> None:
    grid = Grid.of(["a", "b", "a", "b"], 3)
    assert grid == (((0, 2), (1, 3)), 1, 1)
    assert (grid.across, grid.within) == ((2, 3), (1, 3))
    assert Grid.of(["a", "b", "b", "a"], 3) == (((1, 2), (0, 3)), 1, 1)
    owners = torch.tensor([0, 1, 2, 3, 3, 0])
    with torch.device("meta"):
        hosts, local_ranks = grid.owners(owners)
    assert hosts.tolist() == [0, 1, 0, 1, 1, 0] and local_ranks.tolist() == [-1, 0, -1, 1, 1, -1]


def outputs_on_hosts(rank: int, world_size: int, hosts: str) -> float:
    """The error of an output where rank i is on host hosts[i]."""
    with pytest.MonkeyPatch.context() as machine:
        machine.setattr(two_level, "hosts_of", lambda group: tuple(hosts))
        setting = make_setting(Case(tokens=(5, 2, 3, 4)), rank, world_size)
        backend = make_backend(setting, "two_level", levels=LEVELS)
        args = prepare_args(setting, "cpu")
        result = backend.prepare(*args)
        results, reduce_impl = run_experts(setting, result, "noop")
        output = torch.empty_like(args[0])
        backend.finalize(output, results, result[4], result[3], False, reduce_impl)
    return relative_error(output, output_of_one_level(setting, world_size))


@pytest.mark.parametrize("hosts", ["abab", "abba", "bbaa"])
def test_ranks_lie_on_hosts_in_any_order(hosts: str) -> None:
    assert max(ranks(4).run(outputs_on_hosts, hosts)) < tolerance(torch.float32)


def test_hosts_of_different_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="the hosts have 2, 1 ranks"):
        Grid.of(["a", "a", "b"], 0)


def deadlines_of_levels(rank: int, world_size: int) -> list[float]:
    with pytest.MonkeyPatch.context() as machine:
        machine.setenv("MOE_EP_RANKS_PER_HOST", "2")
        backend = make_backend(make_setting(Case(), rank, world_size), "two_level", levels=LEVELS)
    return [level.ranks.timeout_s for level in (backend.across, backend.within)]  # type: ignore[attr-defined]


def test_levels_have_the_deadline_of_the_group() -> None:
    pool = ranks(4)
    assert pool.run(deadlines_of_levels) == [[pool.timeout_s] * 2] * 4


def test_two_hosts_of_two_ranks_against_plain_loops() -> None:
    assert ranks(4).run(check_two_level, SOME_CASES, "cpu", LEVELS) == [len(SOME_CASES)] * 4


def three_batches_at_once(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as machine:
        machine.setenv("MOE_EP_RANKS_PER_HOST", "2")
        settings = [make_setting(replace(Case(), seed=seed), rank, world_size) for seed in range(3)]
        backend = make_backend(settings[0], "two_level", levels=LEVELS)
        all_args = [prepare_args(setting, "cpu") for setting in settings]
        batches = [backend.prepare(*args) for args in all_args]
        for index in (1, 0, 2):
            result, output = batches[index], torch.empty_like(all_args[index][0])
            results, reduce_impl = run_experts(settings[index], result, "noop")
            backend.finalize(output, results, result[4], result[3], False, reduce_impl)
            assert torch.equal(output, expected_output(settings[index], world_size))


def test_batches_in_flight_do_not_mix() -> None:
    ranks(4).run(three_batches_at_once)


class Limited(AllToAllPrepareFinalize):
    """A level with a capacity."""

    def max_num_tokens_per_rank(self) -> int | None:
        return self.moe_config.max_num_tokens


def capacities(rank: int, world_size: int, *levels: tuple[str, str]) -> list[int | None]:
    """What each pair of levels takes; one that has a capacity refuses more, on this rank alone."""
    found = []
    with pytest.MonkeyPatch.context() as machine:
        machine.setenv("MOE_EP_RANKS_PER_HOST", "2")
        machine.setattr(ALL2ALL_BACKENDS, "entries", dict(ALL2ALL_BACKENDS.entries))
        ALL2ALL_BACKENDS.register("limited", f"{__name__}:Limited", "")
        for pair in levels:
            backend = make_backend(make_setting(Case(capacity=4), rank, world_size), "two_level", levels=pair)
            found.append(backend.max_num_tokens_per_rank())
            if found[-1] is not None:
                args = prepare_args(make_setting(Case(tokens=(5,)), rank, world_size), "cpu")
                with pytest.raises(ValueError, match="a1 has 5 tokens and the capacity is 4 per rank"):
                    backend.prepare(*args)
    return found


def test_a_capacity_of_either_level_is_that_of_both() -> None:
    pairs = [LEVELS, ("all_to_all", "limited"), ("limited", "all_to_all")]
    assert ranks(4).run(capacities, *pairs) == [[None, 4, 4]] * 4


class OfInt8(AllToAllPrepareFinalize):
    """A level that passes no other codes on."""

    def passes_codes(self, dtype: torch.dtype | None) -> bool:
        return dtype == torch.int8


def handed_over(rank: int, world_size: int) -> list[torch.dtype]:
    """What experts get that read codes of int8, and of e4m3."""
    found = []
    with pytest.MonkeyPatch.context() as machine:
        machine.setenv("MOE_EP_RANKS_PER_HOST", "2")
        machine.setattr(ALL2ALL_BACKENDS, "entries", dict(ALL2ALL_BACKENDS.entries))
        ALL2ALL_BACKENDS.register("of_int8", f"{__name__}:OfInt8", "")
        for code_dtype in (torch.int8, torch.float8_e4m3fn):
            setting = make_setting(Case(dtype=torch.bfloat16, code_dtype=code_dtype), rank, world_size)
            *args, quant_config = prepare_args(setting, "cpu")
            backend = make_backend(setting, "two_level", levels=("all_to_all", "of_int8"))
            rows, scales, *_ = backend.prepare(*args, quant_config.with_input_dtype(code_dtype))
            assert (scales is not None) == (rows.dtype == code_dtype)
            found.append(rows.dtype)
    return found


def test_rows_go_back_to_16_bits_where_a_host_does_not_pass_codes_on() -> None:
    assert ranks(4).run(handed_over) == [[torch.int8, torch.bfloat16]] * 4


def refused_levels(rank: int, world_size: int, *levels: Any) -> list[str]:
    told = []
    with pytest.MonkeyPatch.context() as machine:
        machine.setenv("MOE_EP_RANKS_PER_HOST", "2")
        for pair in levels:
            with pytest.raises(ValueError, match="levels|all2all_backend is") as raised:
                make_backend(make_setting(Case(), rank, world_size), "two_level", levels=pair)
            told.append(str(raised.value))
    return told


def test_levels_that_are_none_are_refused() -> None:
    others = ("no_ep", "two_level", "batched_all_to_all", "nvshmem_low_latency")
    pairs = [("all_to_all", name) for name in others] + [("unheard_of", "all_to_all"), ("all_to_all",), "all_to_all"]
    for told in ranks(4).run(refused_levels, *pairs):
        assert all(f"levels names '{name}'" in text for name, text in zip(others, told, strict=False))
        assert "unheard_of" in told[4] and all("two names" in text for text in told[5:])


def test_a_level_is_of_nvshmem_where_it_serves_such_rows_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    preferred = ALL2ALL_BACKENDS.load("nvshmem_high_throughput")
    monkeypatch.setattr(preferred, "unusable_reason", classmethod(lambda cls: None))
    can_run = [True, True]
    monkeypatch.setattr(two_level, "answers_of_ranks", lambda question, mine, group: tuple(can_run))
    config = make_setting(Case(dtype=torch.bfloat16, hidden_size=64), 0, 16).config
    choose: Any = partial(two_level.choose_levels, group=None)
    assert [choose(config, num_ranks) for num_ranks in (2, 8, 9)] == [preferred.NAME, preferred.NAME, "all_to_all"]
    assert choose(replace(config, in_dtype=torch.float32), 2) == "all_to_all"
    can_run[1] = False
    assert choose(config, 2) == "all_to_all"

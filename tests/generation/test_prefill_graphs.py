"""Passes over prompts that are filled up to buckets: the same results, nothing of the padding recorded or counted, and
ranks that replay in the same steps. Functions stand in for CUDA graphs; these are tested on GPUs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

import moe_ep
from moe_ep.errors import ConfigError
from moe_ep.generation import decoder, slot_cache
from moe_ep.generation.engine import Generation, Request
from moe_ep.generation.prompts import Buckets, packed_prompts
from moe_ep.hf.parallelized import steps_of
from moe_ep.kernels.reference import ReferenceExperts
from moe_ep.layer.methods import relative_error, tolerance
from tests.generation.test_slot_attention import decoded, plain_flash
from tests.hf.hf_models import SIZES, make_model
from tests.ranks import ranks

CPU = torch.device("cpu")


@given(st.integers(1, 20), st.integers(1, 5000), st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_a_bucket_has_room_and_is_the_smallest(num_slots: int, most_rows: int, lengths: list[int]) -> None:
    buckets, lengths = Buckets(num_slots, most_rows), lengths[:num_slots]
    found = buckets.rows_of(lengths)
    # A row for each sequence without a prompt, and one of padding.
    needed = sum(lengths) + num_slots + 1 - len(lengths)
    assert (found is None) == (needed > most_rows)
    assert found == min((size for size in buckets.sizes if size >= needed), default=None)
    assert all(after <= 1.5 * size for size, after in itertools.pairwise(buckets.sizes))
    assert all(size == most_rows or size & (size - 1) == 0 or size % 3 == 0 for size in buckets.sizes)


def test_what_a_filled_pass_reads() -> None:
    assert Buckets(2, 100).sizes == [16, 24, 32, 48, 64, 96, 100] and Buckets(2, 100, 40).sizes == [48, 64, 96, 100]
    assert not Buckets(8, 8).sizes
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([8, 9], dtype=torch.int32)]
    batch = packed_prompts(prompts, CPU, [3, 1], num_rows=9, num_sequences=5)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, -1, -1, -1, -1]]
    assert batch.slots[0, :5].tolist() == [3, 3, 3, 1, 1] and batch.rows is not None
    assert batch.rows.tolist() == [True] * 5 + [False] * 4
    # Sequences without a prompt have one token each, the last one has the rest.
    assert batch.lengths.tolist() == [3, 2, 1, 1, 2]
    assert batch.last().tolist() == [2, 4, 5, 6]


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_filled_passes_give_the_logits_of_plain_ones(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_cache, "flash_attention", plain_flash)
    monkeypatch.setattr(slot_cache, "runs_flash_attention", lambda device, dtype: True)
    model = moe_ep.parallelize(make_model(family))
    expected, plain = decoded(model)
    got, filled = decoded(model, prefill_graphs="on")
    assert (plain.num_rows([4, 13]), filled.num_rows([4, 13])) == (17, 24)
    # Longer than every bucket: as it is.
    assert filled.num_rows([5000]) == 5000
    for mine, theirs in zip(got, expected, strict=True):
        assert relative_error(mine, theirs) < tolerance(torch.float32)


def test_passes_that_cannot_be_filled_up_are_refused_or_left_alone() -> None:
    for family, reason in (("Qwen3Moe", "masks"), ("Qwen3Next", "layers keep")):
        model = moe_ep.parallelize(make_model(family))
        settings: dict[str, Any] = {"max_new_tokens": 1, "num_slots": 1, "stop_ids": []}
        with pytest.raises(ConfigError, match=f"prefill_graphs is on and .*{reason}"):
            Generation(model, [], **settings, prefill_graphs="on")
        for choice, told in (("auto", reason), ("off", "there is no GPU")):
            generation = Generation(model, [Request(0, torch.tensor([1]))], **settings, prefill_graphs=choice)
            generation.run()
            assert told in generation.how_passes_run()["prefill"]
            assert "GPU" in generation.how_passes_run()["decode"]
    with pytest.raises(ValueError, match="prefill_graphs"):
        Generation(model, [], **settings, prefill_graphs="yes")


NUM_SLOTS = 2


class StandIn:
    """A graph whose replay calls the function that was captured, on the inputs that it was captured with."""

    def __init__(self, run: Callable[[], Any], replays: list[int]) -> None:
        self._run, self._replays = run, replays
        # A capture runs nothing.
        self.output = torch.empty(NUM_SLOTS, SIZES["vocab_size"])

    def replay(self) -> None:
        found = self._run()
        self._replays.append(0 if found is None else len(found))
        if found is not None:
            self.output.copy_(found)

    def reset(self) -> None:
        return


def requests() -> list[Request]:
    """Prompts of 1 to 40 tokens, so that ranks read in several buckets."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 30, 4, 40, 2, 35, 1, 38, 5, 33, 3, 36, 21, 37, 43, 2, 31, 4]
    return [
        Request(index, torch.randint(1, SIZES["vocab_size"], (length,), generator=generator))
        for index, length in enumerate(lengths)
    ]


def generated(
    rank: int, world_size: int, prefill_graphs: str, captures: bool, options: dict[str, Any]
) -> tuple[dict[int, Any], list[list[int]], dict[str, int], int]:
    """This rank's (tokens and recorded ids by prompt, rows by layer and expert, steps by kind, replays)."""
    replays: list[int] = []
    model = moe_ep.parallelize(make_model("Qwen3Moe"), batch_invariant=True, **options)
    for layer in steps_of(model).layers:
        layer.counts_load = True

    def capture(run: Callable[[], Any], first: Any) -> tuple[StandIn, torch.Tensor]:
        graph = StandIn(run, replays)
        return graph, graph.output

    with (
        mock.patch.object(decoder, "may_capture_on", lambda device: captures),
        mock.patch.object(decoder, "capture_pass", capture),
        mock.patch.object(ReferenceExperts, "supports_cuda_graph", lambda self: True),
    ):
        settings: dict[str, Any] = {"max_new_tokens": 3, "num_slots": NUM_SLOTS, "stop_ids": [], "records": "ids"}
        generation = Generation(model, requests(), **settings, prefill_tokens=64, prefill_graphs=prefill_graphs)
        done = generation.run()
    steps = {kind: len(times) for kind, times in generation.times.items()}
    found = {each.index: (each.token_ids, each.routing.ids.tolist()) for each in done if each.routing is not None}
    return found, [layer.load.tolist() for layer in steps_of(model).layers], steps, len(replays)


@functools.cache
def plain() -> tuple[dict[int, Any], list[list[int]]]:
    found, load, _, replays = generated(0, 1, "off", False, {})
    assert len(found) == len(requests()) and not replays
    return found, load


def test_filled_passes_are_plain_ones_bit_for_bit() -> None:
    """And record the same routing, and count the same rows."""
    *found, steps, replays = generated(0, 1, "on", False, {})
    assert tuple(found) == plain() and not replays and not steps["prefill_replayed"]


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (2, {"backend": "batched_all_to_all", "max_num_tokens": 48, "decode_max_num_tokens": NUM_SLOTS}),
        (4, {"backend": "batched_all_to_all", "max_num_tokens": 48}),
    ],
)
def test_replayed_passes_are_plain_ones_bit_for_bit(world_size: int, options: dict[str, Any]) -> None:
    """And all ranks replay in the same steps, whether they read, decode or serve in them."""
    args = "auto", True, options
    results = [generated(0, 1, *args)] if world_size == 1 else ranks(world_size).run(generated, *args)
    found = {index: told for completions, *_ in results for index, told in completions.items()}
    load = torch.tensor([of_rank for _, of_rank, *_ in results]).sum(dim=0).tolist()
    assert (found, load) == plain()
    assert len({replays for *_, replays in results}) == 1 and results[0][3] > 0
    kinds = {kind for *_, steps, _ in results for kind, count in steps.items() if count}
    # What fits into no bucket is read eagerly.
    assert kinds >= {"prefill", "prefill_replayed", "decode", "replayed"}

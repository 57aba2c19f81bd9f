"""Choices that follow what was asked for, and layers whose weights are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_ep.bench.geometries import MXFP4, PRESETS, preset
from moe_ep.bench.layers import BenchLayers, make_weights
from moe_ep.bench.scaling import WrongOutputError, measure_row
from moe_ep.bench.timing import Ceilings
from moe_ep.bench.workload import Routing, draw_logits, parse_routing

CPU = torch.device("cpu")


def test_uniform_and_zipf_shares() -> None:
    """With one choice a token, an expert's share is its popularity."""
    for routing, popularity in (
        (Routing(), torch.ones(4)),
        (Routing(zipf=1.0), 1 / torch.arange(1, 5)),
    ):
        ids = draw_logits(routing, 40_000, 4, 1, seed=1).argmax(dim=1)
        shares = torch.bincount(ids, minlength=4).sort(descending=True).values / 40_000
        assert torch.allclose(shares, popularity / popularity.sum(), atol=0.01)


def test_draws_follow_their_seeds() -> None:
    routing = Routing(zipf=0.5)
    first, again, other = (draw_logits(routing, 8, 16, 2, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_recorded_choices_are_replayed(tmp_path: Path) -> None:
    choices = np.array([[[0, 5], [3, 1], [7, 2]]], dtype=np.uint8)
    np.savez(tmp_path / "seen.npz", english=choices)
    routing = parse_routing(str(tmp_path / "seen.npz"))
    ids = draw_logits(routing, 64, 8, 2, seed=0).topk(2, dim=1).indices.sort(dim=1).values
    assert {tuple(row) for row in ids.tolist()} == {(0, 5), (1, 3), (2, 7)}
    with pytest.raises(ValueError, match="has top-2 choices of at least 8 experts, and the layer takes top-2 of 6"):
        draw_logits(routing, 4, 6, 2, seed=0)
    (tmp_path / "damaged.npz").write_bytes((tmp_path / "seen.npz").read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"damaged.npz cannot be read as an .npz file"):
        draw_logits(parse_routing(str(tmp_path / "damaged.npz")), 4, 8, 2, seed=0)


@pytest.mark.parametrize("raw", ["zipf", "zipf:-1", "skewed", "/nowhere/seen.npz"])
def test_unknown_routing(raw: str) -> None:
    with pytest.raises(ValueError, match="it must be uniform, zipf:S"):
        parse_routing(raw)


def test_presets_count_bytes_and_operations() -> None:
    deepseek = preset("deepseek-v3")
    # 3 x 7168 x 2048 numbers of 4 bits and a 16-bit scale for each 128 of them.
    assert deepseek.bytes_per_expert == 3 * 7168 * 2048 * (4 + 16 / 128) / 8
    assert deepseek.flops_per_row == 6 * 7168 * 2048
    assert PRESETS["gpt-oss-120b"].weights is MXFP4
    with pytest.raises(ValueError, match="deepseek-v3, deepseek-v4-flash, kimi-k2"):
        preset("gpt-5")


def layers_of_small() -> BenchLayers:
    geometry = preset("small")
    weights = make_weights(geometry, 1, CPU, seed=0)
    return BenchLayers(geometry, capacity=8, dtype=torch.float32, device=CPU, weights=weights)


def test_layers_compute_what_their_weights_say_and_wrong_ones_are_not_timed() -> None:
    layers = layers_of_small()
    ceilings = Ceilings(memory_bytes_per_s=1e9, flops_per_s=1e9, link_bytes_per_s=None)

    def row() -> dict:
        return measure_row(layers, Routing(), 8, ceilings, chain=2, repeats=3, seed=0, group=None)

    with torch.inference_mode():
        made = row()
        assert made["us"] <= made["p99_us"] <= made["max_us"]
        assert set(made["stages_us"]) == {"route", "dispatch", "experts", "combine"}
        assert sum(made["rows_per_rank"]) == 8 * 4
        assert made["bytes_sent"] == 0
        layers.layers[0].get_buffer("w2_processed_scales")[:] *= 1.01
        with pytest.raises(WrongOutputError, match="small at EP 1 differs from the reference"):
            row()

"""scripts/bench_replica_rules.py on a small trace: what each rank computes, and a row for both rules."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import bench_replica_rules
from bench_replica_rules import RankExperts, choose, slot_counts

from moe_ep.bench.geometries import preset

EXPERTS, TOP_K, RANKS, TOKENS = 8, 2, 2, 4
GEOMETRY = replace(preset("small"), num_experts=EXPERTS, top_k=TOP_K)


@pytest.fixture
def domains() -> dict[str, np.ndarray]:
    """Choices `[layer, token, top_k]`, in which low experts are taken often."""
    rng = np.random.default_rng(0)
    scores = rng.random((2, 2, 10 * RANKS * TOKENS, EXPERTS)) ** np.arange(1, EXPERTS + 1)
    first, second = np.argsort(-scores, axis=3)[..., :TOP_K].astype(np.uint8)
    return {"one": first, "other": second}


def test_every_choice_is_a_row_of_one_rank(domains: dict[str, np.ndarray]) -> None:
    experts = RankExperts(GEOMETRY, RANKS, TOKENS, torch.device("cpu"))
    found = list(choose(domains, EXPERTS, RANKS, TOKENS, pairs=5, seed=0))
    assert len(found) == 5
    for chosen in found:
        active = {}
        for rule, slots in chosen.items():
            counts = slot_counts(slots, RANKS, experts.width)
            assert counts.sum() == RANKS * TOKENS * TOP_K
            served = set()
            for rank in range(RANKS):
                batch = experts.batch(slots, rank)
                assert batch.expert_num_tokens.tolist() == counts[rank].tolist() and batch.expert_row_ids is not None
                for slot, (count, tokens) in enumerate(zip(counts[rank], batch.expert_row_ids.tolist(), strict=True)):
                    served |= {(token, rank * experts.width + slot) for token in tokens[:count]}
            assert served == {(token, int(slot)) for token, row in enumerate(slots) for slot in row}
            active[rule] = np.count_nonzero(counts)
        assert active["one"] <= active["levelled"]


def test_a_row_for_each_size(
    domains: dict[str, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "routing.npz", **domains)  # type: ignore[arg-type]
    options = "--device cpu --geometry small --ep-sizes 2,4 --tokens 4 --pairs 2 --ranks 1 --repeats 1"
    rows = tmp_path / "rows.jsonl"
    argv = [str(tmp_path / "routing.npz"), *options.split(), "--json", str(rows)]
    assert bench_replica_rules.main(argv) == 0
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["routing"], row["experts"], row["ep_size"]) for row in found] == [("routing", 8, 2), ("routing", 8, 4)]
    for row in found:
        assert row["pairs"] == 2 and row["one_us"] > 0 and row["levelled_us"] > 0
        assert row["ratio"] == pytest.approx(row["one_us"] / row["levelled_us"])
        assert 1 <= row["one_active"] <= EXPERTS // row["ep_size"] + 1 and row["one_peak"] >= 1
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(found)


def test_a_file_without_choices_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "empty.npz", ids=np.zeros((3, 2), dtype=np.int32))
    with pytest.raises(SystemExit, match="2"):
        bench_replica_rules.main([str(tmp_path / "empty.npz"), "--device", "cpu"])
    assert "empty.npz" in capsys.readouterr().err

"""Pictures and tables of many kinds of rows: what differs is named, and every name has its room."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from moe_ep.bench import plots
from moe_ep.bench.scaling_tables import balancing
from moe_ep.eplb.pictures import draw_load
from tests.full_disk import files_of_at_most

SCALING = Path(__file__).parents[2] / "docs" / "benchmarks" / "scaling" / "scaling_2xh200.jsonl"
BACKENDS, WIRES, ROUTINGS = ("all_to_all", "two_level"), ("activations", "fp8"), ("uniform", "zipf:0.5")


def rows() -> list[dict[str, Any]]:
    """A row of EP 2 as it was measured, said to be of every kind and both phases."""
    with SCALING.open() as file:
        row = next(row for row in map(json.loads, file) if row["ep_size"] == 2 and row["scaling"] == "weak")
    kinds = itertools.product(("decode", "prefill"), BACKENDS, WIRES, ROUTINGS, ("off", "on"))
    names = ("phase", "asked_backend", "wire", "routing", "eplb")
    return [row | dict(zip(names, kind, strict=True)) | {"backend": kind[1]} for kind in kinds]


def test_balancing_names_backend_and_wire_where_there_are_several() -> None:
    lines = [line.split(" | ") for line in balancing(rows()).splitlines()[2:]]
    assert len({tuple(line[:6]) for line in lines}) == len(lines) == 2 * 8
    assert {tuple(line[4:6]) for line in lines} == set(itertools.product(BACKENDS, WIRES))
    one = [row for row in rows() if (row["asked_backend"], row["wire"]) == (BACKENDS[0], WIRES[0])]
    assert "wire" not in balancing(one) and "backend" not in balancing(one)


def test_every_line_of_a_picture_has_room(tmp_path: Path, monkeypatch: Any) -> None:
    drawn: dict[str, Figure] = {}

    def keep(figure: Figure, path: Path) -> Path:
        figure.draw_without_rendering()
        drawn[path.stem.rpartition("-")[2]] = figure
        return path

    monkeypatch.setattr(plots, "write_figure", keep)
    plots.plot_scaling(rows(), tmp_path)
    left, right = drawn["stages"].axes[:2]
    names = [label for label in left.get_yticklabels() if label.get_text()]
    assert len(names) == 2 * 2 * 2 * 2 and not any(label.get_text() for label in right.get_yticklabels())
    places = sorted((label.get_window_extent() for label in names), key=lambda box: box.y0)
    assert all(lower.y1 <= upper.y0 for lower, upper in itertools.pairwise(places))
    # The load is that of the routing, whatever moved its rows.
    lines = [label.get_text() for label in drawn["load"].axes[0].get_yticklabels()]
    assert len(set(lines)) == len(lines) == 2 * 2 * 2


def test_a_picture_that_a_disk_has_no_room_for_leaves_the_one_before(tmp_path: Path) -> None:
    loads = {"before": np.ones((2, 4), dtype=np.int64)}
    for name in ("small-scaling.png", "load.SVG"):
        (tmp_path / name).write_text("of another run")
        with files_of_at_most(100), pytest.raises(OSError, match=f"File too large: '{tmp_path / name}'"):
            if name == "load.SVG":
                draw_load(loads, 2, "a title", tmp_path / name)
            else:
                plots.write_figure(Figure(), tmp_path / name)
        assert (tmp_path / name).read_text() == "of another run"
    assert len([*tmp_path.iterdir()]) == 2

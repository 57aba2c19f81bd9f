"""Heat maps of expert load, before and after a plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moe_ep.eplb.policy.maps import Array
from moe_ep.errors import missing_extra


def draw_load(panels: dict[str, Array], num_ranks: int, title: str, path: Path) -> None:
    """Writes a PNG with a row of two heat maps for each panel: tokens of each slot, and of each rank, over the mean.

    Args:
        panels: by title, tokens of each slot `[L, P]`, slots in rank order.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "bench", "a heat map") from None
    figure = Figure(figsize=(12, 2.2 + 2.2 * len(panels)), layout="constrained")
    figure.suptitle(title, fontsize=10)
    grid = figure.subplots(len(panels), 2, squeeze=False, width_ratios=(3, 2))
    for row, (name, slots) in zip(grid, panels.items(), strict=True):
        ranks = slots.reshape(slots.shape[0], num_ranks, -1).sum(axis=2)
        for axes, loads, what in ((row[0], slots, "physical expert"), (row[1], ranks, "rank")):
            mean = np.maximum(loads.mean(axis=1, keepdims=True), 1e-12)
            # Beyond these a cell is as bright or dark as can be; the same scale in all rows, so that they compare.
            limit = 3.0 if what == "physical expert" else 2.0
            image = axes.imshow(loads / mean, aspect="auto", interpolation="nearest", vmin=0, vmax=limit, cmap="magma")
            axes.set_title(f"{name}: tokens of each {what} over the layer's mean", fontsize=9)
            axes.set_xlabel(what)
            axes.set_ylabel("layer")
            figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=130)

"""Pictures of expert load: heat maps before and after a plan, and how even the steps are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_ep.eplb.policy.maps import Array
from moe_ep.eplb.recorder import balancedness
from moe_ep.errors import missing_extra
from moe_ep.files import replacing

# Brightest at so many times the mean and beyond; the same in all panels, so that they compare.
_LIMITS = {"slot": 3.0, "rank": 2.0}
# Cells of so many ranks and layers have room for their numbers.
_MOST_NUMBERED = 16
_LINES = ("-", "--", "-.", ":")


def draw_load(panels: dict[str, Array], num_ranks: int, title: str, path: Path) -> None:
    """Writes a picture with a row of two heat maps for each panel: tokens of each slot, and of each rank, over the
    mean.

    Brightness alone tells the load, so that it can be read in grey; thin lines part the ranks' slots, and ranks are
    numbered where there is room.

    Args:
        panels: by title, tokens of each slot `[L, P]`, slots in rank order.
    """
    figure = _figure((12, 1.2 + 2.6 * len(panels)), title)
    grid = figure.subplots(len(panels), 2, squeeze=False, width_ratios=(3, 2))
    images = {}
    for row, (name, slots) in zip(grid, panels.items(), strict=True):
        ranks = slots.reshape(slots.shape[0], num_ranks, -1).sum(axis=2)
        evenness = balancedness(torch.from_numpy(ranks))
        images["slot"] = _draw(row[0], slots, "slot", f"{name}: physical experts")
        images["rank"] = _draw(
            row[1], ranks, "rank", f"{name}: ranks, balancedness over all steps together {evenness:.2f}"
        )
        for rank in range(1, num_ranks):
            row[0].axvline(rank * slots.shape[1] / num_ranks - 0.5, color="white", linewidth=0.6)
    for column, (what, image) in enumerate(images.items()):
        label = f"tokens of a {what} / mean of its layer"
        figure.colorbar(image, ax=grid[:, column], extend="max", location="bottom", shrink=0.7, label=label)
    _save(figure, path)


def draw_evenness(peaks: dict[str, Array], title: str, path: Path) -> None:
    """Writes a picture of the busiest rank's tokens over the mean in every step and layer, sorted, a line for each
    name."""
    figure = _figure((7.5, 4.2), title)
    axes = figure.subplots()
    for number, (name, found) in enumerate(peaks.items()):
        share = (np.arange(found.size) + 1) / max(found.size, 1)
        grey = str(round(0.7 * number / max(len(peaks) - 1, 1), 2))
        axes.plot(share, np.sort(found), label=name, color=grey, linestyle=_LINES[number % len(_LINES)], linewidth=1.4)
    axes.set_xlabel("share of steps and layers", fontsize=9)
    axes.set_ylabel("busiest rank / mean, tokens", fontsize=9)
    axes.set_ylim(bottom=1.0)
    axes.grid(True, color="0.92", linewidth=0.6)
    axes.legend(fontsize=8)
    _save(figure, path)


def _figure(size: tuple[float, float], title: str) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "bench", "a picture of load") from None
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=10)
    return figure


def _save(figure: Any, path: Path) -> None:
    with replacing(path) as partial:
        figure.savefig(partial, format=path.suffix[1:].lower(), dpi=130)


def _draw(axes: Any, loads: Array, what: str, title: str) -> Any:
    """Loads `[L, X]` over the mean of each row."""
    from matplotlib.ticker import MaxNLocator

    relative = loads / np.maximum(loads.mean(axis=1, keepdims=True), 1e-12)
    limit = _LIMITS[what]
    image = axes.imshow(relative, aspect="auto", interpolation="nearest", vmin=0, vmax=limit, cmap="magma")
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("physical expert, by rank" if what == "slot" else what)
    axes.set_ylabel("layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    if what == "rank" and max(loads.shape) <= _MOST_NUMBERED:
        for (layer, rank), value in np.ndenumerate(relative):
            color = "black" if value > 0.6 * limit else "white"
            axes.text(rank, layer, f"{value:.2f}", ha="center", va="center", fontsize=6, color=color)
    return image

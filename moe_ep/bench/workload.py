"""Which experts the tokens of a benchmark choose: uniform, Zipf, or recorded from a trained model."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moe_ep.eplb.trace import plain_choices, read_arrays
from moe_ep.files import user_path

_CHOSEN = 8.0


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens choose.

    Attributes:
        zipf: exponent of the experts' popularity; 0 is uniform. Which expert is how popular is drawn with the seed.
        recorded: an .npz file of choices, integers `[layer, token, top_k]` in each of its arrays.
    """

    zipf: float = 0.0
    recorded: Path | None = None

    def __str__(self) -> str:
        if self.recorded is not None:
            return f"recorded({self.recorded.name})"
        return f"zipf({self.zipf:g})" if self.zipf else "uniform"


def parse_routing(raw: str) -> Routing:
    """From "uniform", "zipf:0.5" or the path of an .npz file; ValueError with the rule for anything else."""
    if raw == "uniform":
        return Routing()
    if found := re.fullmatch(r"zipf:(\d+(?:\.\d+)?)", raw):
        return Routing(zipf=float(found[1]))
    if raw.endswith(".npz") and user_path(raw).is_file():
        return Routing(recorded=user_path(raw).absolute())
    raise ValueError("it must be uniform, zipf:S with a number such as zipf:0.5, or an .npz file of recorded choices")


def draw_logits(
    routing: Routing,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    *,
    seed: int,
    popularity_seed: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Router logits f32 `[T, E]` whose top-k chooses as `routing` says, without repeats in a row.

    Gumbel noise over log popularity: the top-k of it is a draw without replacement in proportion to popularity.

    Raises:
        ValueError: recorded choices of more experts or another top_k.
    """
    generator = torch.Generator(device).manual_seed(seed)
    uniform = torch.rand(num_tokens, num_experts, generator=generator, device=device).clamp_(1e-7, 1 - 1e-7)
    noise = uniform.log_().neg_().log_().neg_()
    if routing.recorded is not None:
        ids = recorded_ids(routing.recorded, num_experts, top_k).to(device)
        rows = torch.randint(ids.size(0), (num_tokens,), generator=generator, device=device)
        return noise.mul_(0.1).scatter_add_(1, ids[rows], torch.full((num_tokens, top_k), _CHOSEN, device=device))
    ranks = torch.randperm(num_experts, generator=torch.Generator().manual_seed(popularity_seed))
    return noise - routing.zipf * torch.log1p(ranks.to(device, torch.float32))


@functools.cache
def recorded_ids(path: Path, num_experts: int, top_k: int) -> torch.Tensor:
    """int64 `[tokens, top_k]`: the first layer's choices, all arrays one after the other.

    Raises:
        ValueError: a file without choices, or with those of some tokens only, of more experts or another top_k.
    """
    ids = plain_choices(read_arrays(path), path)[0]
    if ids.min() < 0:
        raise ValueError(f"{path} has tokens without an expert (-1); give choices of {top_k} experts for every token")
    if ids.shape[1] != top_k or int(ids.max()) >= num_experts:
        raise ValueError(
            f"{path} has top-{ids.shape[1]} choices of at least {int(ids.max()) + 1} experts, and the layer takes "
            f"top-{top_k} of {num_experts}; choose a geometry of that model"
        )
    return torch.from_numpy(ids.astype(np.int64))

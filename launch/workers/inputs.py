"""What a run is driven with: tokens, of a text or drawn, and router logits in place of the routers': uniform, Zipf, or
as a recorded run chose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from moe_ep.bench.workload import Routing, draw_logits
from moe_ep.checkpoint import CheckpointReader, MoEModelSpec, embed_rows
from moe_ep.eplb.trace import RoutingTrace
from moe_ep.errors import CheckpointError, ConfigError
from moe_ep.launch.cli.report import RankReport
from moe_ep.launch.cli.run_config import RunConfig, read_texts
from moe_ep.rollouts.routing_file import RoutingFile


class TokenSource:
    """Activations of this rank, step by step; every rank and step has tokens of its own."""

    def __init__(
        self, config: RunConfig, reader: CheckpointReader, spec: MoEModelSpec, rank: int, world_size: int
    ) -> None:
        self._reader, self._spec = reader, spec
        self._seed = config.seed
        self._rank, self._world_size = rank, world_size
        counts = [config.num_tokens(peer) for peer in range(world_size)]
        self.num_tokens = counts[rank]
        self._stride, self._offset = sum(counts), sum(counts[:rank])
        self._text_ids = None if config.text is None else self._tokenize(config, num_steps=config.steps)

    def token_ids(self, step: int) -> torch.Tensor:
        """int64 `[T]`."""
        if self._text_ids is not None:
            start = step * self._stride + self._offset
            return self._text_ids[(start + torch.arange(self.num_tokens)) % self._text_ids.numel()]
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + step) * self._world_size + self._rank)
        return torch.randint(self._spec.vocab_size, (self.num_tokens,), generator=generator)

    def hidden_states(self, step: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Embeddings `[T, K]` of the step's tokens."""
        return embed_rows(self._reader, self._spec, self.token_ids(step)).to(device=device, dtype=dtype)

    def _tokenize(self, config: RunConfig, num_steps: int) -> torch.Tensor:
        """Token ids of the text, as far as the steps reach; the same on every rank."""
        from tokenizers import Tokenizer

        file = self._reader.directory / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{file}: expected the checkpoint's tokenizer, found none; leave --text out")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # of no class of its own
            raise CheckpointError(f"{file}: expected a tokenizer, found a file that is none: {error}") from None
        ids: list[int] = []
        for text in read_texts(config.text):  # type: ignore[arg-type]
            ids += tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) >= num_steps * self._stride:
                break
        if not ids:
            raise ConfigError(f"--text is {config.text}, and the checkpoint's tokenizer makes no tokens of it")
        return torch.tensor(ids)


_CHOSEN, _STEP_DOWN = 4.0, 0.125


class RoutingSource:
    """Logits f32 `[T, E]` for every step, layer and rank, the same wherever they are asked for; ConfigError if the
    recorded run is of another model."""

    def __init__(self, config: RunConfig, spec: MoEModelSpec, model: str, world_size: int) -> None:
        self._config, self._spec, self._world_size = config, spec, world_size
        self._recorded: list[np.ndarray] | None = None
        self._routing: Routing | None = None
        how = config.routing
        if how is None:
            return
        if how.startswith("recorded:"):
            self._recorded = _load(Path(how.removeprefix("recorded:")), spec, model)
        else:
            self._routing = Routing(zipf=float(how.partition(":")[2] or 0))

    def logits(self, step: int, rank: int, device: torch.device) -> list[torch.Tensor] | None:
        """Router logits of all layers; None if the checkpoint's routers choose."""
        if self._config.routing is None:
            return None
        return [self.layer_logits(position, step, rank).to(device) for position in range(len(self._spec.router_layers))]

    def layer_logits(self, position: int, step: int, rank: int) -> torch.Tensor:
        """Router logits of one layer, by its position among the MoE layers."""
        num_tokens, E, top_k = self._config.num_tokens(rank), self._spec.num_experts, self._spec.top_k
        number = ((self._config.seed * 1_000_003 + step) * 4096 + position) * self._world_size + rank
        number %= 2**63  # all that a generator takes
        if self._routing is not None:
            # Which experts are popular differs from layer to layer.
            popularity = self._config.seed * 4096 + position
            return draw_logits(self._routing, num_tokens, E, top_k, seed=number, popularity_seed=popularity)
        if self._recorded is None:
            raise RuntimeError("layer_logits was called and the checkpoint's routers choose")
        rows = self._recorded[position]
        counts = [self._config.num_tokens(peer) for peer in range(self._world_size)]
        first = step * sum(counts) + sum(counts[:rank])
        ids = torch.from_numpy(rows[(first + np.arange(num_tokens)) % len(rows)])
        # The first choice is the likeliest; -1 is no choice, and its place goes to column E, which is cut off.
        falling = _CHOSEN - _STEP_DOWN * torch.arange(top_k, dtype=torch.float32)
        logits = torch.full((num_tokens, E + 1), -_CHOSEN)
        return logits.scatter_(1, torch.where(ids < 0, E, ids), falling.expand(num_tokens, top_k))[:, :E].contiguous()


def save_routing(path: Path, ranks: Sequence[RankReport]) -> None:
    """Writes the choices that the ranks kept: a file of recorded routing, or a trace of .npz."""
    model = ranks[0].model
    chosen = {step * len(ranks) + rank.rank: pair for rank in ranks for step, pair in rank.choices.items()}
    file = RoutingFile(
        ids={prompt: ids for prompt, (ids, _) in sorted(chosen.items())},
        weights={prompt: weights for prompt, (_, weights) in sorted(chosen.items()) if weights is not None},
        num_experts=model["num_experts"] + model["num_identities"],
        num_identities=model["num_identities"],
        model=model["name"],
        num_ranks=len(ranks),
    )
    if path.suffix == ".npz":
        RoutingTrace.of(file).save(path)
    else:
        file.save(path)


def _load(path: Path, spec: MoEModelSpec, model: str) -> list[np.ndarray]:
    """The recorded choices of each layer int64 `[N, top_k]`, in the order of steps and ranks."""
    try:
        trace = RoutingTrace.load(path)
        trace.check_model(model, spec.num_experts, len(spec.router_layers))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if trace.ids.shape[1] != spec.top_k:
        raise ConfigError(
            f"the routing trace {path} has top-{trace.ids.shape[1]}, and the model top-{spec.top_k}; record a trace of "
            f"this model"
        )
    order = np.lexsort((trace.rank, trace.step))
    return [trace.ids[order[trace.layer[order] == layer]].astype(np.int64) for layer in range(trace.num_layers)]

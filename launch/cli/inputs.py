"""The tokens that a run is driven with: of a text, or drawn."""

from __future__ import annotations

import torch

from moe_ep.checkpoint import CheckpointReader, MoEModelSpec, embed_rows
from moe_ep.errors import CheckpointError, ConfigError
from moe_ep.launch.cli.run_config import RunConfig, read_texts


class TokenSource:
    """Activations of this rank, step by step; every rank and step has tokens of its own.

    Raises:
        CheckpointError: a text is asked for and the checkpoint has no tokenizer.
        ConfigError: the tokenizer makes no tokens of the text.
    """

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

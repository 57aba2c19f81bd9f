"""Where a run's tokens come from: drawn with a seed, or a text dealt out to ranks and steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from moe_ep.checkpoint import CheckpointReader, model_spec
from moe_ep.eplb.trace import from_choices
from moe_ep.errors import CheckpointError, ConfigError
from moe_ep.launch.cli.run_config import RunConfig
from moe_ep.launch.workers.inputs import RoutingSource, TokenSource
from tests.checkpoint.checkpoints import make_checkpoint, qwen3_config


@pytest.fixture
def reader(tmp_path: Path) -> CheckpointReader:
    make_checkpoint(tmp_path / "model")
    return CheckpointReader(tmp_path / "model")


def source(reader: CheckpointReader, rank: int, world_size: int, **changes: object) -> TokenSource:
    config = RunConfig(**{"tokens_per_rank": (6,), "steps": 2, **changes})
    return TokenSource(config, reader, model_spec(reader.config), rank, world_size)


def test_drawn_tokens_depend_on_seed_rank_and_step_alone(reader: CheckpointReader) -> None:
    drawn = {
        (seed, rank, step): source(reader, rank, 2, seed=seed).token_ids(step).tolist()
        for seed in (0, 1)
        for rank in (0, 1)
        for step in (0, 1)
    }
    assert len({tuple(ids) for ids in drawn.values()}) == len(drawn)
    assert drawn[1, 1, 0] == source(reader, 1, 2, seed=1).token_ids(0).tolist()
    assert all(0 <= token < 96 and len(ids) == 6 for ids in drawn.values() for token in ids)


def test_hidden_states_are_rows_of_the_embedding_table(reader: CheckpointReader) -> None:
    made = source(reader, 0, 1)
    table = reader.read("model.embed_tokens.weight")
    hidden_states = made.hidden_states(1, torch.float32, torch.device("cpu"))
    assert torch.equal(hidden_states, table[made.token_ids(1)].float())


def write_tokenizer(reader: CheckpointReader) -> None:
    """Words w0 to w9 are the tokens 0 to 9."""
    vocabulary = {f"w{i}": i for i in range(10)} | {"?": 10}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(reader.directory / "tokenizer.json"))


def test_text_is_dealt_out_in_order_and_goes_round(reader: CheckpointReader, tmp_path: Path) -> None:
    write_tokenizer(reader)
    file = tmp_path / "text.json"
    file.write_text(json.dumps({"a": ["w0 w1 w2", "w6 w7 w8 w9"], "b": ["w3 w4 w5"]}))
    dealt = [
        source(reader, rank, 3, text=file, tokens_per_rank=(2, 0, 3)).token_ids(step).tolist()
        for step in (0, 1, 2)
        for rank in (0, 1, 2)
    ]
    assert dealt == [[0, 1], [], [2, 3, 4], [5, 6], [], [7, 8, 9], [0, 1], [], [2, 3, 4]]


def test_recorded_choices_are_dealt_out_in_order_and_go_round(tmp_path: Path) -> None:
    spec = model_spec(qwen3_config(num_experts=8, num_hidden_layers=1))
    recorded = np.array([[0, 1], [2, 3], [4, 5], [7, 6], [1, -1]])
    from_choices(recorded[None], 1, 1, num_experts=8, model="model").save(tmp_path / "trace.npz")
    config = RunConfig(routing=f"recorded:{tmp_path / 'trace.npz'}", tokens_per_rank=(1, 2))
    made = RoutingSource(config, spec, "model", 2)
    dealt = [made.layer_logits(0, step, rank).topk(2).indices.tolist() for step in (0, 1) for rank in (0, 1)]
    assert dealt[:3] == [[[0, 1]], [[2, 3], [4, 5]], [[7, 6]]]
    # A choice that was not made is nobody's.
    assert dealt[3][0][0] == 1 and dealt[3][1] == [0, 1]


def test_a_text_of_which_the_tokenizer_makes_nothing_is_refused(reader: CheckpointReader, tmp_path: Path) -> None:
    Tokenizer(models.BPE()).save(str(reader.directory / "tokenizer.json"))
    (tmp_path / "text").write_text("w0")
    with pytest.raises(ConfigError, match=r"text, and the checkpoint's tokenizer makes no tokens of it"):
        source(reader, 0, 1, text=tmp_path / "text")
    (reader.directory / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: expected a tokenizer, found a file that is none"):
        source(reader, 0, 1, text=tmp_path / "text")


def test_a_text_needs_the_checkpoint_s_tokenizer(reader: CheckpointReader, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("w0")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: expected the checkpoint's tokenizer, found none"):
        source(reader, 0, 1, text=tmp_path / "text")

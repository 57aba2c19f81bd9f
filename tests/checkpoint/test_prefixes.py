"""Language models that other tools took out of a larger one, or put into one: the same tensors under other names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_ep.checkpoint import (
    CheckpointReader,
    check_experts,
    embed_rows,
    expert_tensors,
    load_norm,
    load_router,
    model_spec,
    read_expert,
)
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.errors import CheckpointError
from tests.checkpoint.format_cases import write_case

EMBEDDING = torch.arange(96 * 64).view(96, 64).bfloat16()


def renamed(directory: Path, name: str, old: str, new: str) -> tuple[CheckpointReader, dict[str, torch.Tensor]]:
    """A case whose names start otherwise; what it held before."""
    write_case(name, directory / "before", with_values=False)
    with CheckpointReader(directory / "before") as reader:
        before = {name: reader.read(name) for name in reader.names()} | {f"{old}embed_tokens.weight": EMBEDDING}
        tensors = {new + name.removeprefix(old): tensor for name, tensor in before.items()}
        # A part that looks at images has layers too, and so has one for drafts, with experts.
        tensors["model.visual.layers.1.mlp.fc1.weight"] = torch.ones(2)
        tensors["mtp.layers.0.mlp.experts.0.gate_proj.weight"] = torch.ones(2)
        write_checkpoint(directory / "after", reader.config, tensors.items())
    return CheckpointReader(directory / "after"), before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("bf16", "model.", "model.language_model."),
        ("packed int4", "model.", "language_model.model."),
        ("fp8 blocks", "model.", ""),
        ("bf16 fused rows", "model.language_model.", "model."),
        ("bf16 fused rows", "model.language_model.", "language_model."),
        ("packed int4", "model.", "model.language_model.language_model."),
    ],
)
def test_names_that_start_otherwise(tmp_path: Path, name: str, old: str, new: str) -> None:
    reader, before = renamed(tmp_path, name, old, new)
    spec, of_family = model_spec(reader.config, reader), model_spec(reader.config)
    assert spec.layers_module == f"{new}layers" and of_family.layers_module == f"{old}layers"
    check_experts(reader, spec)
    with CheckpointReader(tmp_path / "before") as original:
        expected = read_expert(original, expert_tensors(original, of_family, 1), 3)
    found = read_expert(reader, expert_tensors(reader, spec, 1), 3)
    assert all(torch.equal(getattr(found, role), getattr(expected, role)) for role in ("gate", "up", "down"))
    assert torch.equal(load_router(reader, spec, 1).weight, before[of_family.router_weight(1)])
    assert torch.equal(load_norm(reader, spec, 1), before[f"{old}layers.1.post_attention_layernorm.weight"])
    if spec.hidden_size == 64:
        assert torch.equal(embed_rows(reader, spec, torch.tensor([5])), EMBEDDING[5:6])


def test_names_of_the_family_come_first_and_two_others_are_none(tmp_path: Path) -> None:
    reader, _ = renamed(tmp_path, "bf16", "model.", "model.language_model.")
    tensors = {name: reader.read(name) for name in reader.names()}
    write_checkpoint(tmp_path / "own", reader.config, (tensors | {"model.layers.0.x": torch.ones(1)}).items())
    own = CheckpointReader(tmp_path / "own")
    assert model_spec(own.config, own) == model_spec(own.config)
    write_checkpoint(
        tmp_path / "two", reader.config, (tensors | {"talker.layers.1.mlp.experts.0.x": torch.ones(1)}).items()
    )
    two = CheckpointReader(tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.experts\.\*: expected 4 experts"):
        check_experts(two, model_spec(two.config, two))

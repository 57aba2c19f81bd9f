"""Scales as different writers name and shape them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_ep.checkpoint import CheckpointReader, expert_tensors, load_moe_layer, model_spec, read_expert
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.errors import CheckpointError
from tests.checkpoint.format_cases import write_case
from tests.checkpoint.test_format_cases import make_layer

Change = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]


def by_its_other_name(name: str, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    other = name.removesuffix("_inv") if name.endswith("_inv") else f"{name}_inv"
    return {other: scale}


def without_ones(name: str, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: scale.squeeze()}


def by_both_names(name: str, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: scale.clone()} | by_its_other_name(name, scale)


def change_scales(name: str, directory: Path, change: Change) -> CheckpointReader:
    """Writes a case with its scales changed."""
    write_case(name, directory / "before", with_values=False)
    with CheckpointReader(directory / "before") as reader:
        tensors: dict[str, torch.Tensor] = {}
        for key in reader.names():
            is_scale = ".weight_scale" in key
            tensors |= change(key, reader.read(key)) if is_scale else {key: reader.read(key)}
        write_checkpoint(directory / "after", reader.config, tensors.items())
    return CheckpointReader(directory / "after")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fp8 of one number", by_its_other_name),  # transformers writes it so
        ("fp8 blocks", by_its_other_name),
        ("fp8 of one number", without_ones),
        ("fp8 rows", without_ones),
        ("int8", without_ones),
    ],
)
def test_other_names_and_shapes_mean_the_same(name: str, change: Change, tmp_path: Path) -> None:
    changed, before = change_scales(name, tmp_path, change), CheckpointReader(tmp_path / "before")
    spec, outputs = model_spec(before.config), []
    for expert in range(spec.num_experts):
        found, expected = (read_expert(reader, expert_tensors(reader, spec, 1), expert) for reader in (changed, before))
        assert all(torch.equal(*pair) for pair in zip(found[:3], expected[:3], strict=True))
    for reader in (changed, before):
        layer = make_layer(reader, 1)
        load_moe_layer(reader, spec, 1, layer)
        generator = torch.Generator().manual_seed(0)
        x, logits = (torch.randn(5, size, generator=generator) for size in (spec.hidden_size, spec.num_experts))
        outputs.append(layer(x, logits))
    assert torch.equal(*outputs)


def test_a_scale_by_both_names_is_refused(tmp_path: Path) -> None:
    reader = change_scales("fp8 of one number", tmp_path, by_both_names)
    with pytest.raises(CheckpointError, match=r"weight_scale_inv: expected it or .*weight_scale, found both"):
        expert_tensors(reader, model_spec(reader.config), 0).find(0, "gate")

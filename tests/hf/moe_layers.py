"""The layers with experts of a checkpoint, against those of a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moe_ep.checkpoint import CheckpointReader, model_spec
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.launch.workers import verify
from moe_ep.layer.methods import relative_error, tolerance
from moe_ep.layer.stack import MoEStack


def check_layers(folder: Path, blocks: list[Any]) -> None:
    """The layers with experts of `moe-ep run` and of the reference, against the model's blocks behind their norms."""
    with CheckpointReader(folder) as reader, torch.inference_mode():
        spec = model_spec(reader.config, reader)
        stack = MoEStack(reader, spec, FusedMoEParallelConfig.make(), dtype=torch.float32)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        stack(torch.randn(9, 64), lambda layer, x, y: seen.append((x, y)))
        for layer, block, (x, y) in zip(spec.moe_layers, blocks, seen, strict=True):
            expected = block(x[None])[0].view(y.shape)
            assert relative_error(y, expected) < tolerance(torch.float32)
            assert relative_error(verify.reference_moe(reader, spec, layer, x), expected) < tolerance(torch.float32)

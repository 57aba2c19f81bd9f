"""Families in formats, loaded and run, against the dequantized experts, on 1, 2 and 4 processes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ep.checkpoint import CheckpointReader, MoEModelSpec, model_spec
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.launch.workers import verify
from moe_ep.layer.stack import MoEStack
from tests.checkpoint.format_cases import CASES, make_experts
from tests.checkpoint.model_cases import MODELS, config_of
from tests.of_transformers import is_known
from tests.ranks import ranks

# Fused tensors belong to the families that write them: test_format_cases.py and test_saved_models.py have those.
FORMATS = [name for name, case in CASES.items() if case.fused is None]
# Granite with shared experts is Granite here; its shared experts, one matrix, are in test_models.py.
FAMILIES = [family for family, (name, _) in MODELS.items() if is_known(f"{name}Config")]
FAMILIES[FAMILIES.index("granitemoeshared")] = "kimi_k2"


def part(start: int, step: int) -> list[tuple[str, str]]:
    """Every `step`-th format of each family, and every `step`-th family of each format."""
    return [
        (family, format_name)
        for i, family in enumerate(FAMILIES)
        for j, format_name in enumerate(FORMATS)
        if (i + j) % step == start
    ]


PAIRS_BY_RANKS = {1: part(0, 6), 2: part(1, 24), 4: part(2, 24)}
Errors = dict[tuple[str, str], float]


def family_config(family: str, format_name: str) -> dict[str, Any]:
    """Of four experts, one for each of four ranks."""
    config = config_of("deepseek_v3") | {"model_type": family} if family == "kimi_k2" else config_of(family)
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    config |= {key: 4 for key in counts if config.get(key)}
    for key in ("n_group", "num_expert_group"):
        if config.get(key):
            config |= {key: 2, "topk_group": 1}
    return config | {"intermediate_size": 32, "quantization_config": CASES[format_name].quantization}


def one_layer(config: dict[str, Any]) -> MoEModelSpec:
    """The model as if its last layer were the only one with experts."""
    spec = model_spec(config)
    return dataclasses.replace(spec, moe_layers=spec.moe_layers[-1:])


def write(directory: Path, family: str, format_name: str) -> None:
    """One layer's experts in the format, and all else of the layer in bf16."""
    config = family_config(family, format_name)
    spec = one_layer(config)
    (layer,), K, E = spec.moe_layers, spec.hidden_size, spec.num_experts
    torch.manual_seed(len(family) * len(format_name))
    case = dataclasses.replace(CASES[format_name], sizes=(K, spec.moe_intermediate_size), has_bias=spec.has_bias)
    tensors, _ = make_experts(case, spec.expert_prefix(layer), False, False, E, spec.projections.by_role())
    plain = {
        spec.router_weight(layer): (spec.num_router_columns, K),
        spec.router_bias(layer): (spec.num_router_columns,),
        spec.correction_bias(layer): (spec.num_router_columns,),
        spec.norm_weight(layer): (K,),
        spec.norm_bias(layer): (K,),
        spec.output_norm_weight(layer): (K,),
    }
    if spec.shared_experts is not None:
        prefix, size = spec.shared_experts_prefix(layer), spec.shared_experts.intermediate_size
        for role, name in spec.shared_projections().by_role().items():
            plain[f"{prefix}.{name}.weight"] = (K, size) if role == "down" else (size, K)
        if spec.shared_experts.has_gate:
            plain[f"{prefix}_gate.weight"] = (1, K)
    tensors |= {name: (torch.randn(shape) * 0.2).bfloat16() for name, shape in plain.items() if name is not None}
    write_checkpoint(directory, config, tensors.items())
    for file, content in case.files.items():
        (directory / file).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("family", "format_name"),
    [("deepseek_v3", "mxfp4 per expert"), ("gpt_oss", "mxfp8 of blocks"), ("mixtral", "gptq 8 bits act-order")],
)
def test_other_defaults_of_torch_change_nothing(tmp_path: Path, family: str, format_name: str) -> None:
    """A default device that holds no values shows what is made on it; of GPUs it would be mixed with what is read."""
    write(tmp_path, family, format_name)
    parallel, outputs = FusedMoEParallelConfig.make(ep_size=1, rank=0, world_size=1), []
    for dtype, device in (
        (torch.float32, None),
        (torch.float64, None),
        (torch.bfloat16, None),
        (torch.float32, "meta"),
    ):
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        try:
            with CheckpointReader(tmp_path) as reader, torch.inference_mode():
                spec = one_layer(reader.config)
                x = torch.linspace(-1, 1, 3 * spec.hidden_size, dtype=torch.float32, device="cpu").view(3, -1)
                stack = MoEStack(reader, spec, parallel, dtype=torch.float32)
                outputs.append((stack(x), verify.reference_moe(reader, spec, spec.moe_layers[0], x)))
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
    for layers, reference in outputs[1:]:
        assert torch.equal(layers, outputs[0][0]) and torch.equal(reference, outputs[0][1])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("families")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for family, format_name in chain(*PAIRS_BY_RANKS.values()):
        write(root / family / format_name, family, format_name)
    yield root
    torch.set_num_threads(threads)


def run(rank: int, world_size: int, root: Path) -> Errors:
    """The error of each checkpoint's layer on this rank's tokens."""
    errors: Errors = {}
    parallel = FusedMoEParallelConfig.make(ep_size=world_size, rank=rank, world_size=world_size)
    for family, format_name in PAIRS_BY_RANKS[world_size]:
        with CheckpointReader(root / family / format_name) as reader, torch.inference_mode():
            spec = one_layer(reader.config)
            stack = MoEStack(reader, spec, parallel, dtype=torch.float32, max_num_tokens=4)
            seen: list[torch.Tensor] = []
            x = torch.randn(2 + rank % 2, spec.hidden_size)
            stack(x, lambda layer, x, y: seen.extend((x, y.clone())))  # noqa: B023
            expected = verify.reference_moe(reader, spec, spec.moe_layers[0], seen[0])
            assert expected.abs().max() > 0
            errors[family, format_name] = verify.max_relative_error(seen[1], expected)
    return errors


@pytest.mark.parametrize("world_size", PAIRS_BY_RANKS)
def test_equals_the_dequantized_experts(written: Path, world_size: int) -> None:
    results = [run(0, 1, written)] if world_size == 1 else ranks(world_size).run(run, written)
    for errors in results:
        assert list(errors) == PAIRS_BY_RANKS[world_size]
        assert {pair: error for pair, error in errors.items() if error > verify.tolerance(torch.float32)} == {}

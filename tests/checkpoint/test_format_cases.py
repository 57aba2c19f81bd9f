"""Every format, written as its writers write it: unpacked bit for bit, loaded by rank, run on one to four processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_ep.checkpoint import (
    CheckpointReader,
    expert_tensors,
    load_moe_layer,
    load_router,
    model_spec,
    read_expert,
)
from moe_ep.checkpoint.formats.layout import Role
from moe_ep.layer import FusedMoE
from moe_ep.layer.methods import relative_error, tolerance
from moe_ep.layer.stack import expert_quantization, layer_quant_config
from tests.checkpoint.format_cases import CASES, LAYERS, TOP_K, E, Expert, moe, write_case
from tests.ranks import ranks

Written = dict[str, tuple[Path, list[list[Expert]]]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Every case's directory and values."""
    directory = tmp_path_factory.mktemp("formats")
    return {name: (directory / name, write_case(name, directory / name)) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_unpacked_bit_for_bit(written: Written, name: str) -> None:
    directory, layers = written[name]
    reader = CheckpointReader(directory)
    spec = model_spec(reader.config)
    for layer, experts in enumerate(layers):
        tensors = expert_tensors(reader, spec, layer)
        for index, expert in enumerate(experts):
            found = read_expert(reader, tensors, index)
            assert torch.equal(found.gate, expert.gate)
            assert torch.equal(found.up, expert.up)
            assert torch.equal(found.down, expert.down)
            for role in ("gate", "up", "down"):
                bias = getattr(found, f"{role}_bias")
                assert (bias is None) == (role not in expert.biases)
                assert bias is None or torch.equal(bias, expert.biases[role])


def make_layer(reader: CheckpointReader, layer: int, dtype: torch.dtype = torch.float32, **options: object) -> FusedMoE:
    spec = model_spec(reader.config)
    settings = {
        "num_experts": spec.num_experts,
        "top_k": spec.top_k,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.moe_intermediate_size,
        "params_dtype": dtype,
        "renormalize": spec.routing.renormalize,
        "activation": spec.activation,
        "has_bias": spec.has_bias,
        "quant_config": layer_quant_config(expert_quantization(reader.config), spec, layer),
    }
    return FusedMoE(**(settings | options))


def logits_of(reader: CheckpointReader, layer: int, x: torch.Tensor) -> torch.Tensor:
    router = load_router(reader, model_spec(reader.config), layer)
    return torch.nn.functional.linear(x, router.weight.float(), None if router.bias is None else router.bias.float())


def inputs(rank: int, K: int) -> torch.Tensor:
    return torch.randn(3 + rank, K, generator=torch.Generator().manual_seed(rank))


def run(rank: int, world_size: int, directories: dict[str, Path]) -> dict[str, list[tuple[torch.Tensor, int]]]:
    """Output and bytes read of every layer of every case, on this rank's tokens."""
    results: dict[str, list[tuple[torch.Tensor, int]]] = {}
    for name, directory in directories.items():
        results[name] = []
        for index in range(LAYERS):
            with CheckpointReader(directory) as reader:
                spec = model_spec(reader.config)
                layer = make_layer(reader, index, ep_size=world_size)
                assert layer.quant_method.uses_weight_scale_2_pattern() == (
                    name.startswith("nvfp4") and name != "nvfp4 packed"
                )
                load_moe_layer(reader, spec, index, layer)
                bytes_read = reader.bytes_read
                x = inputs(rank, spec.hidden_size)
                results[name].append((layer(x, logits_of(reader, index, x)), bytes_read))
    return results


def bytes_of(reader: CheckpointReader, layer: int, experts: range) -> int:
    """What some experts take up in the files, less what is not read."""
    tensors = expert_tensors(reader, model_spec(reader.config), layer)
    infos = {
        stored.info.name: stored.info.nbytes
        for expert in experts
        for role in ("gate", "up", "down")
        for stored in tensors.find(expert, role).values()
        if stored.layout.role is not Role.UNUSED
    }
    return sum(infos.values())


def check(written: Written, results: list[dict[str, list[tuple[torch.Tensor, int]]]]) -> None:
    for name, (directory, layers) in written.items():
        reader = CheckpointReader(directory)
        share = E // len(results)
        for rank, outputs in enumerate(results):
            for index, (output, bytes_read) in enumerate(outputs[name]):
                x = inputs(rank, output.size(1))
                expected = moe(layers[index], x, logits_of(reader, index, x))
                assert relative_error(output, expected) < tolerance(torch.float32), (name, rank)
                mine = range(rank * share, (rank + 1) * share)
                assert bytes_read == bytes_of(reader, index, mine), (name, rank)


def test_runs_alone_as_the_values_say(written: Written) -> None:
    check(written, [run(0, 1, {name: directory for name, (directory, _) in written.items()})])


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_runs_over_ranks_as_the_values_say(written: Written, world_size: int) -> None:
    directories = {name: directory for name, (directory, _) in written.items()}
    check(written, ranks(world_size).run(run, directories))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_activations_of_two_bytes(written: Written, dtype: torch.dtype) -> None:
    for name, (directory, layers) in written.items():
        reader = CheckpointReader(directory)
        spec = model_spec(reader.config)
        layer = make_layer(reader, 1, dtype)
        load_moe_layer(reader, spec, 1, layer)
        x = inputs(0, spec.hidden_size).to(dtype)
        logits = logits_of(reader, 1, x.float())
        assert relative_error(layer(x, logits), moe(layers[1], x.float(), logits)) < tolerance(dtype), name
    assert spec.top_k == TOP_K

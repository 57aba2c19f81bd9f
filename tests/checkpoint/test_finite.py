"""NaN and infinity in a checkpoint: found in whatever is read, with the tensor, its file and their number."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moe_ep.checkpoint import CheckpointReader, load_norm, load_router, model_spec
from moe_ep.checkpoint.finite import CheckedCopy, check_finite, count_nonfinite, has_nonfinite, read_checked
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.errors import CheckpointError
from moe_ep.layer import FusedMoE
from moe_ep.layer.stack import MoEStack
from tests.checkpoint.checkpoints import make_checkpoint, qwen3_config
from tests.checkpoint.test_loading import deepseek_config

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
MLP = "model.layers.1.mlp"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_bit_pattern(dtype: torch.dtype) -> None:
    bits = 8 * dtype.itemsize
    patterns = torch.arange(-(1 << (bits - 1)), 1 << (bits - 1)).to(getattr(torch, f"int{bits}")).view(dtype)
    expected = ~patterns.float().isfinite()
    found = [has_nonfinite(value.view(1).view(torch.uint8).numpy().data, dtype) for value in patterns]
    assert found == expected.tolist()
    assert count_nonfinite(patterns) == int(expected.sum())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_anywhere_in_a_tensor(dtype: torch.dtype, value: float) -> None:
    if dtype == torch.float8_e4m3fn:
        value = math.nan
    largest = torch.finfo(dtype).max
    for position in (0, 123_456, 299_999):
        tensor = torch.full((300_000,), largest, dtype=torch.float64)
        tensor[::2] = -largest
        tensor = tensor.to(dtype)
        assert count_nonfinite(tensor) == 0
        tensor[position] = value
        with pytest.raises(CheckpointError, match=r"a\.file: tensor x: .*1 of 300000"):
            check_finite("a.file", "x", tensor.view(100, 3000))
    assert count_nonfinite(torch.empty(0, dtype=dtype)) == 0


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("filler", [0.5, "largest"])
def test_in_a_large_read(tmp_path: Path, dtype: torch.dtype, filler: float | str) -> None:
    """At the ends of a span, in its middle and where the reader divides it, among small and among large numbers."""
    start, count = 3, (1 << 20) // dtype.itemsize + 37
    largest = torch.finfo(dtype).max
    values = torch.full((count,), largest if filler == "largest" else 0.5, dtype=torch.float64).to(dtype)
    values[1::2] = -values[0].double()
    infinite = torch.tensor([] if dtype == torch.float8_e4m3fn else [math.inf, -math.inf], dtype=torch.float64)
    nan = torch.tensor([math.nan], dtype=torch.float64)
    # Bytes around the span that would be NaN in it.
    data = torch.full((start + count * dtype.itemsize + 5,), 0xFF, dtype=torch.uint8)
    span = data[start:-5]
    span[:] = values.view(torch.uint8)
    file, buffer = tmp_path / "data", torch.empty_like(data)
    for position in (None, 0, (1 << 17) // dtype.itemsize - 1, count // 2, count - 1):
        for bad in torch.cat([nan, -nan, infinite]).to(dtype):
            element = (
                slice(0, 0) if position is None else slice(position * dtype.itemsize, (position + 1) * dtype.itemsize)
            )
            whole = span[element].clone()
            span[element] = bad.view(1).view(torch.uint8)[: len(whole)]
            data.numpy().tofile(file)
            span[element] = whole
            with file.open("rb") as opened:
                spans = [(start, len(data) - 5, dtype)]
                done, found = read_checked(opened.fileno(), buffer.numpy().data, 0, spans)
            assert (done, found) == (len(data), position is not None)
            assert buffer.numpy().tobytes() == file.read_bytes()


def test_integers_have_none() -> None:
    assert count_nonfinite(torch.full((4,), -1, dtype=torch.int32)) == 0


@pytest.mark.parametrize(
    "name",
    [
        f"{MLP}.experts.3.up_proj.weight",
        f"{MLP}.gate.weight",
        f"{MLP}.gate.e_score_correction_bias",
        f"{MLP}.shared_experts.down_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
    ],
)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_model_with_one_is_refused_by_name(tmp_path: Path, name: str, value: float) -> None:
    config = deepseek_config(1)
    damaged = dict(make_checkpoint(tmp_path / "whole", config))[name].clone()
    damaged.view(-1)[-2:] = value
    make_checkpoint(tmp_path, config, tensors={name: damaged})
    one = FusedMoEParallelConfig.make()
    with CheckpointReader(tmp_path) as reader:
        file = reader.info(name).file.name
        with pytest.raises(CheckpointError, match=rf"{file}: tensor {name}: .* 2 of {damaged.numel()}"):
            MoEStack(reader, model_spec(reader.config, reader), one, dtype=torch.bfloat16)
    with CheckpointReader(tmp_path, allow_nonfinite=True) as reader:
        MoEStack(reader, model_spec(reader.config, reader), one, dtype=torch.bfloat16)


@pytest.mark.parametrize("value", ["false", None, 1])
def test_accepting_them_is_true_or_false(tmp_path: Path, value: Any) -> None:
    make_checkpoint(tmp_path, qwen3_config())
    with pytest.raises(TypeError, match="allow_nonfinite"):
        CheckpointReader(tmp_path, allow_nonfinite=value)
    with pytest.raises(TypeError, match="allow_nonfinite"):
        FusedMoE.from_checkpoint(tmp_path, 1, allow_nonfinite=value)


def test_one_layer_with_one(tmp_path: Path) -> None:
    name = f"{MLP}.experts.0.gate_proj.weight"
    damaged = torch.zeros(32, 64, dtype=torch.bfloat16)
    damaged[3, 3] = math.inf
    make_checkpoint(tmp_path, qwen3_config(), tensors={name: damaged})
    with pytest.raises(CheckpointError, match=name):
        FusedMoE.from_checkpoint(tmp_path, 1)
    assert FusedMoE.from_checkpoint(tmp_path, 0) is not None
    assert FusedMoE.from_checkpoint(tmp_path, 1, allow_nonfinite=True) is not None


def test_of_tensors_that_are_read_in_parts(tmp_path: Path) -> None:
    """A tensor of several batches, one that shares a batch with others, and rows: only what is read is looked at."""
    large = torch.zeros(3000, 4000)
    large[2999, 3999] = math.nan
    tensors = {"a": torch.ones(3, dtype=torch.int8), "large": large, "small": torch.ones(1000), "z": torch.ones(5)}
    tensors["small"][7] = math.inf
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        for bad in ("large", "small"):
            with pytest.raises(CheckpointError, match=f"tensor {bad}: .* 1 of"):
                list(reader.read_many(["a", bad, "z"]))
            with pytest.raises(CheckpointError, match=f"tensor {bad}: .* 1 of"):
                reader.read(bad)
        assert {name for name, _ in reader.read_many(["a", "z"])} == {"a", "z"}
        assert reader.read("large", slice(0, 2999)).shape == (2999, 4000)
        reader.read_rows("large", torch.tensor([5, 2998]))
        with pytest.raises(CheckpointError, match="tensor large"):
            reader.read_rows("large", torch.tensor([5, 2999]))


def test_norms_and_routers_that_overflow_are_found_where_they_are_read(tmp_path: Path) -> None:
    tensors = {f"{MLP}.gate.weight": torch.full((4, 64), math.inf)}
    make_checkpoint(tmp_path, qwen3_config(), tensors=tensors)
    with CheckpointReader(tmp_path) as reader:
        spec = model_spec(reader.config, reader)
        load_norm(reader, spec, 1)
        with pytest.raises(CheckpointError, match="256 of 256"):
            load_router(reader, spec, 1)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32])
def test_in_a_copy(dtype: torch.dtype) -> None:
    """At the ends and in the middle, at any alignment of the source and beside bytes that are not copied."""
    count = (1 << 20) // dtype.itemsize + 3
    largest = 100 if dtype == torch.int32 else torch.finfo(dtype).max
    bad = -1 if dtype == torch.int32 else math.nan
    base = torch.full((count + 8,), bad, dtype=torch.float64).to(dtype)
    for offset, position in ((0, None), (1, None), (3, 0), (1, count // 2), (2, count - 4), (1, count - 1)):
        source = base.clone()[offset : offset + count]
        source.copy_(torch.full((count,), largest, dtype=torch.float64))
        if position is not None:
            source[position] = bad
        target = torch.zeros(2, count + (-count % 16), dtype=dtype)[1, :count]
        copy = CheckedCopy(source.nbytes)
        copy(target, source)
        assert not copy.found
        copy.looks = True
        target.zero_()
        copy(target, source)
        assert copy.found == (position is not None and dtype != torch.int32)
        assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))
        copy.found = False
        strided = torch.zeros(count, 2, dtype=dtype)
        copy(strided[:, 0], source)
        assert copy.found == (position is not None and dtype != torch.int32)
        assert torch.equal(strided[:, 0].contiguous().view(torch.uint8), source.view(torch.uint8))


@pytest.mark.parametrize("row", [0, 700])
def test_large_experts_with_one(tmp_path: Path, row: int) -> None:
    """Experts that are large enough to be checked while they are copied."""
    config = qwen3_config(hidden_size=1024, moe_intermediate_size=768, num_experts=2, num_hidden_layers=1)
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    damaged = torch.zeros(1024, 768, dtype=torch.bfloat16)
    damaged[row, 3] = math.nan
    make_checkpoint(tmp_path, config, tensors={name: damaged})
    with pytest.raises(CheckpointError, match=f"tensor {name}: .* 1 of"):
        FusedMoE.from_checkpoint(tmp_path, 0)
    layer = FusedMoE.from_checkpoint(tmp_path, 0, allow_nonfinite=True)
    assert torch.equal(layer.w2_weight[1].isfinite(), damaged.isfinite())

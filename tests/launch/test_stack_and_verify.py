"""The stack of MoE layers against the plain reference, on one rank; and that the reference notices what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu

from moe_ep.checkpoint import CheckpointReader, model_spec
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.errors import ConfigError
from moe_ep.launch.workers import verify
from moe_ep.launch.workers.worker import why_not_captured
from moe_ep.layer.stack import MoEStack
from tests.checkpoint.checkpoints import DEEPSEEK, GPTQ, make_checkpoint, qwen3_config

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3-not-renormalized": {"norm_topk_prob": False},
    "qwen3-gptq": {"quantization_config": GPTQ},
    "deepseek-v3": DEEPSEEK,
}


def check(
    directory: Path,
    dtype: torch.dtype,
    quantize: str = "none",
    disturb: float = 0.0,
    input_dtype: torch.dtype | None = None,
) -> dict[int, tuple[float, float]]:
    """Layer -> (error, tolerance) of a stack on one rank; `disturb` is added to one number of every output."""
    reader = CheckpointReader(directory)
    spec = model_spec(reader.config)
    with torch.inference_mode():
        stack = MoEStack(
            reader,
            spec,
            FusedMoEParallelConfig(),
            dtype=dtype,
            quantize=quantize,
            max_num_tokens=16,
            input_dtype=input_dtype,
        )
        x = torch.randn(16, spec.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
        errors = {}

        def observe(layer: int, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
            online = getattr(stack.layers()[layer].moe.quant_method, "as_quantized", None)
            reference = verify.reference_moe(reader, spec, layer, hidden_states, online)
            output = output.clone()
            output[3, 5] += disturb * reference.abs().max()
            errors[layer] = verify.max_relative_error(output, reference), verify.tolerance(dtype, input_dtype)

        result = stack(x, observe)
    assert result.shape == x.shape and result.dtype == dtype
    assert list(errors) == list(spec.moe_layers)
    return errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_what_the_reference_says(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", qwen3_config(**FAMILIES[family]))
    for error, allowed in check(tmp_path / "model", dtype).values():
        assert error <= allowed


@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8"])
def test_quantized_on_load(quantize: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    for error, allowed in check(tmp_path / "model", torch.float32, quantize).values():
        assert error <= allowed


@pytest.mark.parametrize("input_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_rows_of_8_bits_have_the_tolerance_of_their_dtype(input_dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    for error, allowed in check(tmp_path / "model", torch.float32, "int4", input_dtype=input_dtype).values():
        assert verify.tolerance(torch.float32) < error <= allowed


def test_quantizing_what_is_quantized_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", qwen3_config(quantization_config=GPTQ))
    with pytest.raises(ConfigError, match="quantized already"):
        check(tmp_path / "model", torch.float32, "int4")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_wrong_number_is_noticed(dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    for error, allowed in check(tmp_path / "model", dtype, disturb=0.1).values():
        assert error > allowed


def test_rows_and_logits_that_do_not_fit_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    stack = MoEStack(reader, model_spec(reader.config), FusedMoEParallelConfig(), dtype=torch.float32)
    K = stack.layers()[0].moe.moe_config.hidden_dim
    for x, message in (
        (torch.zeros(2, K + 1), rf"x is \(2, {K + 1}\) of torch.float32; the layer .* takes \(T, {K}\)"),
        (torch.zeros(2, K).half(), "x is .* of torch.float16; the layer .* takes .* of torch.float32"),
        ([1.0], "x is a list; it must be a tensor"),
        (torch.zeros(2, K, device="meta"), "x is on meta and the stack on cpu; move one"),
    ):
        with pytest.raises(ValueError, match=message):
            stack(x)
    x, logits = torch.zeros(2, K), torch.zeros(2, 4)
    wrong: list[tuple[Any, str]] = [
        ([], "router_logits has those of 0 layers; it must have those of each of the 2"),
        (5, r"router_logits is a int; it must be a list of tensors \[T, E\], one for each layer"),
        ({0: logits, 1: logits}, "router_logits is a dict; it must be a list of tensors"),
        (torch.tensor(5.0), "router_logits is a Tensor; it must be a list of tensors"),
        ("xx", r"router_logits\[0\] is a str; it must be a tensor"),
        ([None, 5], r"router_logits\[1\] is a int; it must be a tensor"),
        ([logits, torch.tensor(1.0)], r"router_logits\[1\] is \(\); it must be \[T, E\]"),
    ]
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            stack(x, router_logits=given)
    with pytest.raises(TypeError, match="observer is 5; it must be a function or None"):
        stack(x, 5)  # type: ignore[arg-type]
    with torch.inference_mode():
        assert torch.equal(stack(x, router_logits=torch.stack([logits] * 2)), stack(x, router_logits=[logits] * 2))


def test_arguments_of_other_kinds_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    good = {"reader": reader, "spec": model_spec(reader.config), "parallel_config": FusedMoEParallelConfig()}
    wrong: list[tuple[str, Any, type[Exception], str]] = [
        ("device", "cuda:99", ConfigError, r"device is cuda:99 and this machine has \d+ GPUs; pass one of those"),
        ("device", "meta", ConfigError, "device is meta, which keeps no values"),
        ("device", "ipu", ConfigError, "device is ipu, which torch cannot use here; pass cpu or a GPU as cuda:0"),
        ("device", "x", ValueError, "device is 'x'; it must be a torch.device or the name of one, as cpu or cuda:0"),
        ("device", None, ValueError, "device is None; it must be a torch.device"),
        ("reader", None, TypeError, r"reader is a NoneType; it must be a CheckpointReader\(folder\)"),
        ("reader", "x", TypeError, "reader is a str; it must be a CheckpointReader"),
        ("spec", None, TypeError, r"spec is a NoneType; it must be what model_spec\(reader.config, reader\) returns"),
        ("on_layer", 3, TypeError, "on_layer is 3; it must be a function or None"),
    ]
    for name, value, error, message in wrong:
        with pytest.raises(error, match=message):
            MoEStack(**{**good, name: value}, dtype=torch.float32)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device is cuda and this machine has 0 GPUs"):
            MoEStack(**good, dtype=torch.float32, device="cuda")


def test_rows_of_zeros_are_normalized_to_zeros(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    stack = MoEStack(reader, model_spec(reader.config), FusedMoEParallelConfig(), dtype=torch.float32)
    assert torch.equal(stack(torch.zeros(2, 64)), torch.zeros(2, 64))


def test_what_is_not_finite_is_an_infinite_error() -> None:
    assert verify.max_relative_error(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")
    assert verify.max_relative_error(torch.zeros(0, 4), torch.zeros(0, 4)) == 0.0
    assert verify.max_relative_error(torch.tensor([1.0, 4.5]), torch.tensor([1.0, 4.0])) == 0.125


def test_the_reference_is_the_sum_it_says(tmp_path: Path) -> None:
    """One token by hand, from the tensors on disk."""
    tensors = make_checkpoint(tmp_path / "model")
    reader = CheckpointReader(tmp_path / "model")
    spec = model_spec(reader.config)
    x = torch.randn(1, spec.hidden_size)
    scores = linear(x, tensors["model.layers.1.mlp.gate.weight"].float()).softmax(-1)[0]
    best = scores.argsort(descending=True)[: spec.top_k].tolist()
    expected = torch.zeros_like(x)
    for expert in best:
        gate, up, down = (
            tensors[f"model.layers.1.mlp.experts.{expert}.{name}.weight"].float()
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        output = linear(silu(linear(x, gate)) * linear(x, up), down)
        expected += scores[expert] / scores[best].sum() * output
    torch.testing.assert_close(verify.reference_moe(reader, spec, 1, x), expected)


def test_graphs_need_gpus(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    reader = CheckpointReader(tmp_path)
    stack = MoEStack(reader, model_spec(reader.config), FusedMoEParallelConfig(), dtype=torch.float32)
    assert "GPUs" in (why_not_captured(stack, 1, torch.device("cpu")) or "")

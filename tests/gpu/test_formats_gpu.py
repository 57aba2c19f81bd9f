"""Every format on a GPU: loaded, packed for the kernels where they take it, and equal to the values in the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_ep.checkpoint import CheckpointReader, expert_tensors, load_moe_layer, model_spec, read_expert, read_linear
from moe_ep.layer.methods import relative_error, tolerance
from moe_ep.registry import EXPERTS
from tests.checkpoint.checkpoints import make_checkpoint, qwen3_config
from tests.checkpoint.format_cases import CASES, E, Expert, moe, write_case
from tests.checkpoint.test_format_cases import logits_of, make_layer

pytestmark = pytest.mark.gpu
K, N = 256, 128
PLAIN = {"bf16", "bf16 fused rows", "bf16 fused columns", "bf16 gpt-oss"}
# Number types and pairs of types that the packed kernels do not take.
NOT_PACKED = {
    "gptq 8 bits act-order",
    "gptq v1 8 bits",
    "packed int8 zero points",
    "mixed int4 and fp8",
    "mixed mxfp4 and fp8 quark",
}


def experts_for(name: str) -> str:
    """The registry's name of what computes a case here."""
    if name in PLAIN:
        fast = "grouped"
    else:
        fast = None if name in NOT_PACKED else "marlin"
    return fast if fast is not None and EXPERTS.load(fast).unusable_reason() is None else "reference"


def values_of(reader: CheckpointReader, layer: int) -> list[Expert]:
    tensors = expert_tensors(reader, model_spec(reader.config), layer)
    experts = []
    for index in range(E):
        gate, up, down, *biases = read_expert(reader, tensors, index)
        named = {role: bias for role, bias in zip(("gate", "up", "down"), biases, strict=True) if bias is not None}
        experts.append(Expert(gate, up, down, named))
    return experts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_runs_as_the_values_say(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    write_case(name, tmp_path, (K, N), with_values=False)
    reader = CheckpointReader(tmp_path)
    with torch.device("cuda"):
        layer = make_layer(reader, 1, dtype)
    load_moe_layer(reader, model_spec(reader.config), 1, layer)
    assert layer.quant_method.gemm_weights(layer)[0].is_cuda
    assert type(layer.modular_kernel.fused_experts) is EXPERTS.load(experts_for(name))
    experts = values_of(reader, 1)
    for T in (1, 40):
        x = torch.randn(T, K, generator=torch.Generator().manual_seed(T)).to(dtype)
        logits = logits_of(reader, 1, x.float())
        output = layer(x.cuda(), logits.cuda()).cpu()
        assert relative_error(output, moe(experts, x.float(), logits)) < tolerance(torch.bfloat16)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.fused is None])
def test_a_linear_layer_is_unpacked_here_as_on_a_cpu(tmp_path: Path, name: str) -> None:
    write_case(name, tmp_path, (K, N), with_values=False)
    reader = CheckpointReader(tmp_path)
    for role, size in {"gate_proj": (N, K), "down_proj": (K, N)}.items():
        module = f"model.layers.1.mlp.experts.0.{role}"
        found = read_linear(reader, module, size, "cuda")
        assert found.is_cuda
        assert torch.equal(found.cpu(), read_linear(reader, module, size))


@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8"])
def test_quantized_on_load(tmp_path: Path, quantize: str) -> None:
    from moe_ep.layer.stack import expert_quantization

    make_checkpoint(tmp_path, qwen3_config(hidden_size=K, moe_intermediate_size=N), max_shard_bytes=1 << 20)
    reader = CheckpointReader(tmp_path)
    with torch.device("cuda"):
        layer = make_layer(reader, 1, torch.bfloat16, quant_config=expert_quantization(reader.config, quantize))
    load_moe_layer(reader, model_spec(reader.config), 1, layer)
    as_quantized = layer.quant_method.as_quantized
    experts = [Expert(as_quantized(e.gate), as_quantized(e.up), as_quantized(e.down), {}) for e in values_of(reader, 1)]
    x = torch.randn(40, K, generator=torch.Generator().manual_seed(3)).bfloat16()
    logits = logits_of(reader, 1, x.float())
    output = layer(x.cuda(), logits.cuda()).cpu()
    assert relative_error(output, moe(experts, x.float(), logits)) < tolerance(torch.bfloat16)

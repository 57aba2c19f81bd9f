"""Models whose gates end at a limit: GLM-5's next one, and DeepSeek-V4 and V4.1 as their authors publish them, with
their names and settings, experts of fp4, and the rest of fp8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")


import moe_ep
from moe_ep.checkpoint import CheckpointReader, model_spec
from moe_ep.checkpoint.writer import write_checkpoint
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.errors import CheckpointError
from moe_ep.launch.workers import verify
from moe_ep.layer.methods import relative_error, tolerance
from moe_ep.layer.stack import MoEStack
from tests.checkpoint.format_encoders import e2m1
from tests.hf.hf_models import GROUPED, MLA, SIZES, make_model
from tests.hf.moe_layers import check_layers
from tests.hf.test_families import INDEXER, V4, check
from tests.hf.test_models_that_see import VISION
from tests.of_transformers import known, random_model

KINDS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
# Of an expert's weights, as an e8m0 scale says it.
EXPONENT = 124
NUMBERS = torch.tensor([e2m1(code) for code in range(16)]) * 2.0 ** (EXPONENT - 127)
OF_FP8 = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")


def make_whole(**changes: Any) -> Any:
    """A model whose weights the formats of its files hold without loss."""
    sizes = V4 | {"compress_rates": None, "n_routed_experts": 6, "swiglu_limit": 0.5}
    model = make_model("DeepseekV4", **sizes | changes)
    generator = torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        if ".experts." in name:
            param.copy_(NUMBERS[torch.randint(0, 16, param.shape, generator=generator)])
        elif param.dim() == 2 and ("self_attn" in name or "shared_experts" in name) and "compressor" not in name:
            param.copy_((torch.randn(param.shape, generator=generator) / 8).to(torch.float8_e4m3fn))
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(len(buffer), 6, generator=generator).argsort(dim=1)[:, :2])
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3, generator=generator)
    return model


def publish(model: Any, directory: Path) -> None:
    """Writes the model into `directory` with its authors' names, numbers and settings."""
    model.save_pretrained(directory / "saved")
    tensors: dict[str, torch.Tensor] = {}
    with CheckpointReader(directory / "saved") as reader:
        for saved in reader.names():
            name = saved.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
            tensor, module = reader.read(saved).clone(), name.removesuffix(".weight")
            if ".experts." in name:
                codes = (tensor[..., None] - NUMBERS).abs().argmin(dim=-1)
                tensors[name] = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
                groups = torch.full((len(tensor), tensor.size(1) // 32), EXPONENT, dtype=torch.uint8)
                tensors[f"{module}.scale"] = groups.view(torch.float8_e8m0fnu)
            elif module.rpartition(".")[2] in OF_FP8 and ".compressor." not in name:
                tensors[name] = tensor.to(torch.float8_e4m3fn)
                blocks = [-(-size // 128) for size in tensor.shape]
                tensors[f"{module}.scale"] = torch.ones(blocks).to(torch.float8_e8m0fnu)
            else:
                tensors[name] = tensor
        config = reader.config
    # Experts of what predicts several tokens at once, which nobody reads here.
    tensors |= {
        f"mtp.0.{name.partition('.0.')[2]}": tensors[name].clone() for name in list(tensors) if ".0.ffn." in name
    }
    kinds = [KINDS[kind] for kind in config["layer_types"]]
    theirs = {"layer_types", "compress_rates", "mlp_layer_types", "partial_rotary_factor", "rope_parameters"}
    settings = {key: value for key, value in config.items() if key not in theirs}
    settings |= {"compress_ratios": kinds, "num_hash_layers": 1, "expert_dtype": "fp4", "quantization_config": FP8}
    write_checkpoint(directory, settings, tensors.items())


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder, and the model whole."""
    directory, model = tmp_path_factory.mktemp("published"), make_whole()
    publish(model, directory)
    return directory, model


def test_whole_models(published: tuple[Path, Any]) -> None:
    path, alone = published
    check(moe_ep.parallelize(path, dtype=torch.float32), alone)


def test_experts_as_model_optimizer_writes_them(published: tuple[Path, Any], tmp_path: Path) -> None:
    """The same codes in nvfp4; what predicts several tokens at once stays as it was."""
    path, alone = published
    tensors: dict[str, torch.Tensor] = {}
    with CheckpointReader(path) as reader:
        for name in reader.names():
            tensor, module = reader.read(name).clone(), name.rpartition(".")[0]
            if ".experts." not in name or name.startswith("mtp."):
                tensors[name] = tensor
            elif name.endswith(".weight"):
                tensors[name] = tensor.view(torch.uint8)
                tensors[f"{module}.weight_scale"] = torch.ones(len(tensor), tensor.size(1) // 8).to(torch.float8_e4m3fn)
                tensors[f"{module}.weight_scale_2"] = torch.tensor(2.0 ** (EXPONENT - 127))
                tensors[f"{module}.input_scale"] = torch.tensor(1.0)
        listed = {f"layers.{layer}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for layer in range(3)}
        settings = FP8 | {"quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "quantized_layers": listed}
        write_checkpoint(tmp_path, reader.config | {"quantization_config": settings}, tensors.items())
    check(moe_ep.parallelize(tmp_path, dtype=torch.float32), alone)


def test_layers_with_a_router(published: tuple[Path, Any]) -> None:
    """The first layer's experts are chosen by a table of token ids: it is none of the stack's."""
    path, alone = published
    reader = CheckpointReader(path)
    spec = model_spec(reader.config)
    assert (spec.moe_layers, spec.router_layers, spec.layers_module) == ((0, 1, 2), (1, 2), "layers")
    stack = MoEStack(reader, spec, FusedMoEParallelConfig.make(), dtype=torch.float32)
    assert [block.layer_index for block in stack.layers()] == [1, 2]
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(5))
    for block in stack.layers():
        layer = alone.model.layers[block.layer_index]
        normed = layer.post_attention_layernorm(x)
        expected = layer.mlp(normed[None])[0]
        assert relative_error(block(x) - x, expected) < 2 * tolerance(torch.float32)
        by_loops = verify.reference_moe(reader, spec, block.layer_index, normed)
        assert relative_error(by_loops, expected) < 2 * tolerance(torch.float32)


def test_layers_of_its_successor(tmp_path: Path) -> None:
    """V4.1, which transformers 5.23 does not have: it has no such table, and a bias more, for tokens of images."""
    alone = make_whole(mlp_layer_types=["moe"] * 3)
    publish(alone, tmp_path)
    with CheckpointReader(tmp_path) as reader:
        tensors = {name: reader.read(name).clone() for name in reader.names()}
        ours = {"num_hash_layers", "quantization_config", "expert_dtype"}
        text = {key: value for key, value in reader.config.items() if key not in ours}
    tensors |= {f"layers.{layer}.ffn.gate.bias_vl": torch.randn(6) for layer in range(3)}
    of_experts = FP8 | {"expert_dtype": "fp4"}
    config = {"model_type": "deepseek_v41", "quantization_config": of_experts, "dtype": "float32"}
    config["text_config"] = text | {"model_type": "deepseek_v41_text", "gate_temp": 1.0}
    write_checkpoint(tmp_path / "next", config, tensors.items())
    check_layers(tmp_path / "next", [layer.mlp for layer in alone.model.layers])


def test_experts_of_another_type_are_refused(published: tuple[Path, Any], tmp_path: Path) -> None:
    reader = CheckpointReader(published[0])
    tensors = ((name, reader.read(name).clone()) for name in reader.names())
    write_checkpoint(tmp_path, reader.config | {"expert_dtype": "fp6"}, tensors)
    with pytest.raises(CheckpointError, match="expert_dtype is 'fp6'"):
        moe_ep.parallelize(tmp_path)


def test_glm_that_sees_and_limits_its_gates(tmp_path: Path) -> None:
    text = {**SIZES, **MLA, **GROUPED, **INDEXER, "qk_rope_head_dim": 0, "index_kpool": 2, "hc_mult": 2}
    text |= {"linear_head_dim": 16, "linear_num_heads": 2, "layer_types": ["linear_attention", "full_attention"]}
    text |= {"swiglu_limit": 0.5, "mlp_layer_types": ["dense", "sparse"]}
    config = known("Glm5NextConfig")(text_config=text, vision_config=VISION)
    alone = random_model("Glm5NextForConditionalGeneration", config)
    alone.save_pretrained(tmp_path)
    check(moe_ep.parallelize(tmp_path, dtype=torch.float32), alone)
    reader = CheckpointReader(tmp_path)
    spec = model_spec(reader.config)
    (block,) = MoEStack(reader, spec, FusedMoEParallelConfig.make(), dtype=torch.float32).layers()
    x = torch.randn(7, 64)
    layer = alone.model.language_model.layers[1]
    expected = layer.mlp(layer.post_attention_layernorm(x)[None])[0]
    assert relative_error(block(x) - x, expected) < 2 * tolerance(torch.float32)


def test_hunyuan_that_limits_its_routed_gates_alone(tmp_path: Path) -> None:
    sizes = {**MLA, **GROUPED, **INDEXER, "hc_mult": 2, "swiglu_limit": 0.5}
    alone = make_model("HYV4", **sizes)
    alone.save_pretrained(tmp_path / "saved")
    with CheckpointReader(tmp_path / "saved") as reader:
        # transformers gives shared experts the name that the files have for an attention's gate.
        names = {
            name.replace("shared_experts.linear_gate", "shared_experts.gate_proj"): name for name in reader.names()
        }
        write_checkpoint(tmp_path, reader.config, ((new, reader.read(old)) for new, old in names.items()))
    reader = CheckpointReader(tmp_path)
    (block,) = MoEStack(reader, model_spec(reader.config), FusedMoEParallelConfig.make(), dtype=torch.float32).layers()
    x = torch.randn(7, 64)
    layer = alone.model.layers[1]
    expected = layer.mlp(layer.post_attention_layernorm(x)[None])[0]
    assert relative_error(block(x) - x, expected) < 2 * tolerance(torch.float32)

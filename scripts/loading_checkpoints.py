"""Made checkpoints for benchmarks: sizes of known models, formats as on disk, contents of no meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from moe_ep.checkpoint.writer import write_checkpoint

# Hidden size, intermediate size and top_k of the made models.
GEOMETRIES = {"qwen3-30b": (2048, 768, 8), "deepseek-v3": (7168, 2048, 8), "tiny": (256, 128, 4)}
GROUP = 128
# Beside the experts, as Qwen3-30B has it but for a small vocabulary, that of the demo checkpoint's tokenizer.
VOCABULARY, HEADS, KV_HEADS, HEAD_DIM = 4096, 32, 4, 128


def gptq_tensors(n: int, k: int, salt: int) -> dict[str, torch.Tensor]:
    return {
        "qweight": words(k // 8, n, salt=salt),
        "qzeros": torch.full((k // GROUP, n // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.ones(k // GROUP, n, dtype=torch.float16),
        "g_idx": torch.arange(k, dtype=torch.int32) // GROUP,
    }


def packed_tensors(n: int, k: int, salt: int) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": words(n, k // 8, salt=salt),
        "weight_scale": torch.full((n, k // GROUP), 0.005, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([n, k]),
    }


def fp8_tensors(n: int, k: int, salt: int) -> dict[str, torch.Tensor]:
    codes = words(n, k // 4, salt=salt).view(torch.uint8) & 0x77
    return {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(n // 128, k // 128)}


def mxfp4_tensors(n: int, k: int, salt: int) -> dict[str, torch.Tensor]:
    scales = torch.full((n, k // 32), 120, dtype=torch.uint8)
    return {"weight_packed": words(n, k // 8, salt=salt).view(torch.uint8), "weight_scale": scales}


def bf16_tensors(n: int, k: int, salt: int) -> dict[str, torch.Tensor]:
    return {"weight": (words(n, k // 2, salt=salt) & 0x3FFF3FFF).view(torch.bfloat16)}


def words(rows: int, columns: int, salt: int) -> torch.Tensor:
    """int32 of some content, another for every salt."""
    return torch.arange(salt, salt + rows * columns, dtype=torch.int32).view(rows, columns)


def compressed(form: str, kind: str) -> dict[str, object]:
    weights = {"num_bits": 4, "type": kind, "strategy": "group", "group_size": GROUP if kind == "int" else 32}
    group = {"targets": ["Linear"], "weights": weights}
    plain = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": plain}


FORMATS: dict[str, tuple[dict[str, object] | None, Callable[[int, int, int], dict[str, torch.Tensor]]]] = {
    "bf16": (None, bf16_tensors),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq_tensors),
    "int4": (compressed("pack-quantized", "int"), packed_tensors),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_tensors),
    "mxfp4": (compressed("mxfp4-pack-quantized", "float"), mxfp4_tensors),
}


def beside_experts(k: int, num_layers: int, num_experts: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Embeddings, attention, norms and routers, drawn."""
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).bfloat16()

    yield "model.embed_tokens.weight", drawn(VOCABULARY, k)
    yield "lm_head.weight", drawn(VOCABULARY, k)
    yield "model.norm.weight", torch.ones(k, dtype=torch.bfloat16)
    for layer in range(num_layers):
        stem = f"model.layers.{layer}"
        for name, rows, columns in (
            ("q_proj", HEADS * HEAD_DIM, k),
            ("k_proj", KV_HEADS * HEAD_DIM, k),
            ("v_proj", KV_HEADS * HEAD_DIM, k),
            ("o_proj", k, HEADS * HEAD_DIM),
        ):
            yield f"{stem}.self_attn.{name}.weight", drawn(rows, columns)
        for name, size in (
            ("self_attn.q_norm", HEAD_DIM),
            ("self_attn.k_norm", HEAD_DIM),
            ("input_layernorm", k),
            ("post_attention_layernorm", k),
        ):
            yield f"{stem}.{name}.weight", torch.ones(size, dtype=torch.bfloat16)
        yield f"{stem}.mlp.gate.weight", drawn(num_experts, k)


def make_checkpoint(
    directory: Path, form: str, geometry: str, num_layers: int, num_experts: int, *, whole: bool = False
) -> None:
    """Qwen3-MoE's names, in the sizes and the format asked for.

    Args:
        whole: write all that a model has beside its experts too.
    """
    K, N, top_k = GEOMETRIES[geometry]
    quantization, linear = FORMATS[form]
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": K,
        "num_hidden_layers": num_layers,
        "vocab_size": VOCABULARY,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": N,
        "norm_topk_prob": True,
    }
    if quantization is not None:
        config["quantization_config"] = quantization

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        if whole:
            yield from beside_experts(K, num_layers, num_experts)
        for layer in range(num_layers):
            for expert in range(num_experts):
                for salt, (name, size) in enumerate((("gate", (N, K)), ("up", (N, K)), ("down", (K, N)))):
                    made = linear(*size, 3 * expert + salt)
                    stem = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
                    yield from ((f"{stem}.{suffix}", tensor) for suffix, tensor in made.items())

    write_checkpoint(directory, config, tensors(), max_shard_bytes=1 << 30)

"""Every format as a checkpoint of two small layers in the real on-disk layout, with the values that it stands for.

`format_encoders` makes the tensors of a linear layer; here they become experts, shards and configurations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from moe_ep.checkpoint.writer import write_checkpoint
from tests.checkpoint.checkpoints import qwen3_config
from tests.checkpoint.format_encoders import (
    Encode,
    Tensors,
    as_quark,
    awq,
    fp8,
    gptq,
    int4_bytes,
    int8_blocks,
    int_quantized,
    mxfp4,
    mxfp4_beside_fp8,
    mxfp8,
    nvfp4,
    packed,
    packed_of_one,
    plain,
    values,
    without_shape,
)

E, TOP_K, LAYERS = 4, 2, 2
# What the tensors of all experts in one are called behind gate_up_proj and down_proj.
FUSED_ENDINGS = {"weight": "", "weight_packed": "_blocks", "weight_scale": "_scales", "weight_scale_inv": "_scale_inv"}
FUSED_ENDINGS |= {"input_scale": "_activation_scale"}
# As Model Optimizer calls them.
MODELOPT_ENDINGS = {"weight": ""} | {key: f"_{key}" for key in ("weight_scale", "weight_scale_2", "input_scale")}
PACKED_ENDINGS = {"weight_packed": "_packed", "weight_scale": "_scale"}
Names = dict[str, str]
GATE_DOWN_UP = {"gate": "gate_proj", "down": "down_proj", "up": "up_proj"}


@dataclass
class Case:
    """One checkpoint.

    Attributes:
        encode: of gate and up; `down` of down, the same where it is None.
        fused: how all experts lie in one tensor: None, "blocks" (gpt-oss mxfp4), "rows", or "columns", where what is
            one number of a matrix is one of all experts.
        endings: of the names of such tensors.
        plain_layers: layers whose experts are not quantized.
        files: more JSON files, by name.
    """

    quantization: dict[str, Any] | None
    encode: Encode
    down: Encode | None = None
    fused: str | None = None
    endings: Names = field(default_factory=lambda: FUSED_ENDINGS)
    interleaved: bool = False
    has_bias: bool = False
    sizes: tuple[int, int] = (64, 32)
    plain_layers: tuple[int, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)


def ct(form: str, bits: int = 4, kind: str = "int", **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": ct_weights(bits, kind, **weights)}},
    }


def ct_weights(bits: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "group", "group_size": 32, **more}


def mixed(first: tuple[str, dict[str, Any]], second: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    groups = {
        "group_0": {"targets": ["re:.*(gate_proj|up_proj|w1|w3)$"], "format": first[0], "weights": first[1]},
        "group_1": {"targets": [r"re:.*experts\.\d+\.(down_proj|w2)"], "format": second[0], "weights": second[1]},
    }
    ignored = ["lm_head", "re:model.layers.0.mlp.*"]
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ignored,
    }


def quark(weight: Any, **by_name: Any) -> dict[str, Any]:
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": None},
        "layer_quant_config": {name: {"weight": changed} for name, changed in by_name.items()},
        "exclude": ["lm_head", "*mlp.gate"],
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    }


def quark_weight(dtype: str, qscheme: str, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "qscheme": qscheme, "is_dynamic": False, "symmetric": None, "is_scale_quant": False, **more}


QUARK_MXFP4 = quark_weight("fp4", "per_group", group_size=32, scale_format="e8m0")
QUARK_FP8 = quark_weight("fp8_e4m3", "per_tensor", symmetric=True)
QUARK_NVFP4 = [
    quark_weight("fp4", "per_group", group_size=16, scale_format="float32"),
    QUARK_FP8 | {"is_scale_quant": True},
]
INT4_GROUPS = ("pack-quantized", ct_weights(4, "int"))
INT8_ROWS = ("pack-quantized", ct_weights(8, "int", strategy="channel", group_size=None))
FP8_ROWS = ("float-quantized", ct_weights(8, "float", strategy="channel", group_size=None))
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": E,
    "num_experts": None,
    "moe_intermediate_size": None,
}
QWEN3_VL = {"model_type": "qwen3_vl_moe"}
BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_not_convert": ["mlp.gate"]}
MODELOPT = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*.mlp.gate"]}}
MODELOPT_NVFP4 = {"quant_method": "modelopt", **MODELOPT["quantization"]}
NVFP4 = nvfp4("weight", "weight_scale_2", False)
# With one number for all experts.
NVFP4_OF_ALL = nvfp4("weight", "weight_scale_2", False, factor=0.03)

CASES: dict[str, Case] = {
    "gptq 4 bits": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(4, 32, False),
    ),
    "gptq 8 bits act-order": Case(
        {"quant_method": "gptq", "bits": 8, "group_size": 16, "sym": False, "desc_act": True, "format": "gptq_v2"},
        gptq(8, 16, True),
    ),
    "gptq v1 4 bits act-order": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
        gptq(4, 32, True, version=1),
    ),
    "gptq v1 8 bits": Case(
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False, "checkpoint_format": "gptq"},
        gptq(8, 32, False, version=1),
    ),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq(32)),
    "packed int4": Case(ct("pack-quantized"), packed(4, 32)),
    "packed int4 fused rows": Case(
        ct("pack-quantized"), without_shape(packed(4, 32)), fused="rows", endings=PACKED_ENDINGS, config=QWEN3_VL
    ),
    "packed int4 zero points": Case(ct("pack-quantized", symmetric=False), packed(4, 32, symmetric=False)),
    "packed int4 one zero point": Case(
        ct("pack-quantized", symmetric=False, strategy="tensor", group_size=None), packed_of_one(4)
    ),
    "packed int4 act-order": Case(ct("pack-quantized", actorder="group"), packed(4, 32, scattered=True)),
    "packed int8 rows": Case(ct("pack-quantized", 8, strategy="channel", group_size=None), packed(8, None)),
    "packed int8 zero points": Case(ct("pack-quantized", 8, symmetric=False), packed(8, 32, symmetric=False)),
    "int8": Case(ct("int-quantized", 8, strategy="channel", group_size=None), int_quantized),
    "int8 rows": Case({"quant_method": "w8a8_int8", "is_dynamic": True, "ignore": ["mlp.gate"]}, int_quantized),
    "int8 blocks": Case(
        {"quant_method": "blockwise_int8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        int8_blocks,
        sizes=(160, 96),
    ),
    "w4afp8": Case({"quant_method": "w4afp8", "group_size": 32, "ignore": ["lm_head", "mlp.gate"]}, int4_bytes(32)),
    "fp8 tensor": Case(
        ct("float-quantized", 8, "float", strategy="tensor", group_size=None),
        fp8("weight_scale", None, torch.float32),
    ),
    "fp8 rows": Case(
        ct("float-quantized", 8, "float", strategy="channel", group_size=None),
        fp8("weight_scale", None, torch.bfloat16, per_row=True),
    ),
    "fp8 blocks": Case(BLOCK, fp8("weight_scale_inv", (128, 128), torch.float32), sizes=(160, 96)),
    "fp8 blocks e8m0": Case(BLOCK, fp8("weight_scale_inv", (128, 128), torch.float8_e8m0fnu), sizes=(128, 160)),
    "fp8 blocks fused columns": Case(
        BLOCK,
        fp8("weight_scale_inv", (128, 128), torch.float32),
        fused="columns",
        sizes=(160, 128),
        config=QWEN3_VL,
    ),
    "fp8 of one block fused columns": Case(
        BLOCK, fp8("weight_scale_inv", (128, 128), torch.float32), fused="columns", sizes=(64, 128), config=QWEN3_VL
    ),
    "fp8 of one number fused rows": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        fp8("weight_scale_inv", None, torch.float32),
        fused="rows",
        config=QWEN3_VL,
    ),
    "fp8 of one number": Case(
        {"quant_method": "fp8", "activation_scheme": "static"}, fp8("weight_scale", None, torch.float32)
    ),
    "mxfp4 gpt-oss": Case(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]},
        mxfp4,
        fused="blocks",
        interleaved=True,
        has_bias=True,
        config=GPT_OSS,
    ),
    "mxfp4 per expert": Case(ct("mxfp4-pack-quantized", 4, "float"), mxfp4),
    "mxfp4 beside fp8": Case(BLOCK | {"scale_fmt": "ue8m0", "expert_dtype": "fp4"}, mxfp4_beside_fp8),
    "mxfp8": Case(
        {"quant_method": "mxfp8", "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head", "mlp.gate"]},
        mxfp8("weight_scale_inv"),
    ),
    "mxfp8 of blocks": Case(
        BLOCK | {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"}, mxfp8("weight_scale_inv", torch.float8_e8m0fnu)
    ),
    "mxfp8 compressed-tensors": Case(
        ct("mxfp8-quantized", 8, "float", scale_dtype="torch.uint8"), mxfp8("weight_scale")
    ),
    "mxfp8 modelopt": Case(
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head", "*.mlp.gate"]}, mxfp8("weight_scale")
    ),
    "nvfp4 modelopt": Case(None, NVFP4, files={"hf_quant_config.json": MODELOPT}),
    "nvfp4 modelopt fused rows": Case(
        MODELOPT_NVFP4, NVFP4, fused="rows", endings=MODELOPT_ENDINGS, sizes=(64, 48), config=QWEN3_VL
    ),
    "nvfp4 modelopt fused columns": Case(
        MODELOPT_NVFP4,
        NVFP4_OF_ALL,
        fused="columns",
        endings=MODELOPT_ENDINGS,
        sizes=(64, 16),
        config=QWEN3_VL,
    ),
    "nvfp4 modelopt gpt-oss": Case(
        MODELOPT_NVFP4,
        NVFP4_OF_ALL,
        fused="columns",
        endings=MODELOPT_ENDINGS,
        interleaved=True,
        has_bias=True,
        config=GPT_OSS,
    ),
    "fp8 modelopt fused columns": Case(
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "*.mlp.gate"]},
        fp8("weight_scale", None, torch.float32, number=1e-3),
        fused="columns",
        endings=MODELOPT_ENDINGS,
        config=QWEN3_VL,
    ),
    "nvfp4 packed": Case(
        ct("nvfp4-pack-quantized", 4, "float", strategy="tensor_group", group_size=16),
        nvfp4("weight_packed", "weight_global_scale", True),
    ),
    "mxfp4 quark": Case(quark(QUARK_MXFP4), as_quark(mxfp4)),
    "nvfp4 quark": Case(quark(QUARK_NVFP4), NVFP4),
    "int8 rows quark": Case(quark(quark_weight("int8", "per_channel", symmetric=True)), as_quark(int_quantized)),
    "mixed mxfp4 and fp8 quark": Case(
        quark(QUARK_MXFP4, **dict.fromkeys(("*.experts.*.down_*", "*.experts.*.w2"), QUARK_FP8)),
        as_quark(mxfp4),
        as_quark(fp8("weight_scale", None, torch.bfloat16)),
    ),
    "mixed int4 and fp8": Case(
        mixed(INT4_GROUPS, FP8_ROWS),
        packed(4, 32),
        fp8("weight_scale", None, torch.bfloat16, per_row=True),
        plain_layers=(0,),
    ),
    "mixed int4 and int8": Case(mixed(INT4_GROUPS, INT8_ROWS), packed(4, 32), packed(8, None), plain_layers=(0,)),
    "bf16": Case(None, plain),
    "bf16 fused rows": Case(None, plain, fused="rows", config=QWEN3_VL),
    "bf16 fused columns": Case(None, plain, fused="columns", config=QWEN3_VL),
    "bf16 gpt-oss": Case(None, plain, fused="columns", interleaved=True, has_bias=True, config=GPT_OSS),
}


@dataclass
class Expert:
    """The values of one expert, f32, and its biases."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    biases: dict[str, torch.Tensor]


def write_case(
    name: str, directory: Path, sizes: tuple[int, int] | None = None, with_values: bool = True
) -> list[list[Expert]]:
    """Writes the checkpoint; the values of its experts by layer, empty where nobody wants to wait for the loops."""
    case = CASES[name] if sizes is None else replace(CASES[name], sizes=sizes)
    torch.manual_seed(sum(name.encode()))
    K, N = case.sizes
    tensors: Tensors = {}
    layers = "model.language_model.layers" if case.config is QWEN3_VL else "model.layers"
    router = "router" if case.has_bias else "gate"
    experts = []
    for layer in range(LAYERS):
        prefix = f"{layers}.{layer}.mlp"
        tensors[f"{layers}.{layer}.post_attention_layernorm.weight"] = torch.ones(K).bfloat16()
        tensors[f"{prefix}.{router}.weight"] = torch.randn(E, K).bfloat16()
        if case.has_bias:
            tensors[f"{prefix}.router.bias"] = torch.randn(E).bfloat16()
        found, made = make_experts(case, f"{prefix}.experts", layer in case.plain_layers, with_values)
        tensors |= found
        experts.append(made)
    config = qwen3_config(hidden_size=K, moe_intermediate_size=N, quantization_config=case.quantization) | case.config
    if case.config is GPT_OSS:
        config["intermediate_size"] = N
    if case.config is QWEN3_VL:
        of_text = config | {"model_type": "qwen3_vl_moe_text"}
        quantization = of_text.pop("quantization_config")
        config = {"model_type": "qwen3_vl_moe", "text_config": of_text, "quantization_config": quantization}
    write_checkpoint(
        directory, {k: v for k, v in config.items() if v is not None}, tensors.items(), max_shard_bytes=8_000
    )
    for file, content in case.files.items():
        (directory / file).write_text(json.dumps(content))
    return experts


def make_experts(
    case: Case, prefix: str, is_plain: bool, with_values: bool, num_experts: int = E, names: Names = GATE_DOWN_UP
) -> tuple[Tensors, list[Expert]]:
    K, N = case.sizes
    tensors, experts, fused = {}, [], []
    for expert in range(num_experts):
        matrices, biases, raw = {}, {}, {}
        for role, (n, k) in (("gate", (N, K)), ("up", (N, K)), ("down", (K, N))):
            encode = plain if is_plain else case.down if role == "down" and case.down else case.encode
            raw[role], value = encode(n, k)
            matrices[role] = values(n, k, value) if with_values else torch.empty(0)
            if case.has_bias:
                biases[role] = torch.randn(n).bfloat16()
            if not case.fused and role in names:
                tensors |= {f"{prefix}.{expert}.{names[role]}.{suffix}": tensor for suffix, tensor in raw[role].items()}
        experts.append(Expert(**matrices, biases=biases))
        fused.append((raw, biases))
    if case.fused:
        tensors = dict(fused_tensors(case, prefix, fused))
    return tensors, experts


def fused_tensors(case: Case, prefix: str, experts: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """All experts of one layer in one tensor a role."""

    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        if len(parts) == 1 or not case.interleaved:
            return torch.cat(parts)
        return torch.stack(parts, dim=1).flatten(0, 1)

    for role, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        for suffix in experts[0][0]["gate"]:
            whole = torch.stack([joined([torch.atleast_1d(raw[part][suffix]) for part in parts]) for raw, _ in experts])
            if case.fused == "blocks" and suffix == "weight_packed":
                whole = whole.unflatten(-1, (-1, 16))
            if case.fused == "columns":
                whole = whole.transpose(1, 2) if whole.dim() == 3 else whole.unique().squeeze()
            yield f"{prefix}.{role}{case.endings[suffix]}", whole.contiguous()
        if case.has_bias:
            yield (
                f"{prefix}.{role}_bias",
                torch.stack([joined([biases[part] for part in parts]) for _, biases in experts]),
            )


def moe(experts: list[Expert], x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The layer's output f32 `[T, K]`: top 2 of the experts, renormalized."""
    output = torch.zeros_like(x)
    for t, row in enumerate(x):
        weights = torch.softmax(logits[t], 0)
        chosen = weights.argsort(descending=True)[:TOP_K]
        for expert in chosen.tolist():
            e, bias = experts[expert], {k: v.float() for k, v in experts[expert].biases.items()}
            gate, up = e.gate @ row + bias.get("gate", 0), e.up @ row + bias.get("up", 0)
            if bias:
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                hidden = F.silu(gate) * up
            output[t] += weights[expert] / weights[chosen].sum() * (e.down @ hidden + bias.get("down", 0))
    return output

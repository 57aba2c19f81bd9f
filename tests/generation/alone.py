"""Checkpoints whose experts are quantized as transformers alone would run them: dequantized, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from moe_ep.checkpoint import CheckpointReader
from moe_ep.checkpoint.loading import read_linear


def load_alone(folder: Path) -> Any:
    """The model of a Qwen3-MoE checkpoint, f32, with every expert dequantized on its own."""
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with CheckpointReader(folder) as reader, torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(_values(reader, name, param))
    return model.eval()


def _values(reader: CheckpointReader, name: str, param: torch.Tensor) -> torch.Tensor:
    """What the parameter of that name holds, dequantized."""
    if param.dim() == 1:
        return reader.read(name)
    if param.dim() == 2:
        return read_linear(reader, name.removesuffix(".weight"), (param.size(0), param.size(1)))
    experts, fused = name.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if fused == "gate_up_proj" else ("down_proj",)
    size = (param.size(1) // len(parts), param.size(2))
    return torch.stack(
        [torch.cat([read_linear(reader, f"{experts}.{i}.{part}", size) for part in parts]) for i in range(len(param))]
    )


def continue_alone(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> str:
    """What transformers alone continues a prompt by, greedily."""
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(
        inputs["input_ids"],
        attention_mask=torch.ones_like(inputs["input_ids"]),
        max_new_tokens=max_new_tokens,
        do_sample=False,
    )
    return tokenizer.decode(output[0, inputs["input_ids"].size(1) :], skip_special_tokens=True)

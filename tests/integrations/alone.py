"""Checkpoints whose experts are quantized as transformers alone would run them: dequantized, in one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers

from moe_ep.checkpoint import CheckpointReader
from moe_ep.checkpoint.matrices import read_linear


def load_alone(folder: Path) -> Any:
    """The model of a Qwen3-MoE checkpoint, f32, with every expert dequantized on its own."""
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    K, N = config.hidden_size, config.moe_intermediate_size
    with CheckpointReader(folder) as reader, torch.no_grad():
        for name, param in model.named_parameters():
            found = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
            if found is None:
                param.copy_(reader.read(name))
                continue
            stem = found.group(1)
            for expert, weight in enumerate(param):
                parts = {
                    "gate_up_proj": lambda at: [
                        read_linear(reader, f"{at}.{part}_proj", (N, K)) for part in ("gate", "up")
                    ],
                    "down_proj": lambda at: [read_linear(reader, f"{at}.down_proj", (K, N))],
                }[found.group(2)](f"{stem}.{expert}")
                weight.copy_(torch.cat(parts))
    return model.eval()


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

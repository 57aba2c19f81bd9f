"""Loads one MoE layer of a checkpoint, each rank its own experts, and runs it on random tokens.

    python examples/layer_from_checkpoint.py path/to/checkpoint 3
    torchrun --nproc-per-node 2 examples/layer_from_checkpoint.py path/to/checkpoint 3

The number is that of a decoder layer with experts.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from moe_ep import FusedMoE


def main(path: str, index: int, num_tokens: int = 16) -> None:
    on_gpus = torch.cuda.is_available()
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpus else torch.device("cpu")
    layer = FusedMoE.from_checkpoint(path, layer=index, dtype=torch.bfloat16).to(device)

    generator = torch.Generator().manual_seed(rank)  # every rank has tokens of its own
    hidden_states = torch.randn(num_tokens, layer.hidden_size, generator=generator).bfloat16().to(device)
    router_logits = torch.randn(num_tokens, layer.num_experts, generator=generator).to(device)
    with torch.inference_mode():
        output = layer(hidden_states, router_logits)  # a collective step: all ranks call it
    num_local = layer.moe_config.num_local_experts
    text = f"rank {rank}: {num_local} of {layer.num_experts} experts, output {tuple(output.shape)}"
    print(f"{text}\n", end="", flush=True)  # in one write, since ranks share the terminal
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/layer_from_checkpoint.py CHECKPOINT LAYER")
    main(sys.argv[1], int(sys.argv[2]))

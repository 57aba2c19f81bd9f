"""Continues prompts with a transformers model whose hot experts move and are replicated meanwhile.

    torchrun --nproc-per-node 2 examples/decode_with_eplb.py path/to/checkpoint "A first prompt" "A second one"

Every rank holds its shard of the experts and a replica slot for a hot one, and takes every R-th prompt.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

import moe_ep
from moe_ep.eplb import EplbConfig


def main(path: str, prompts: list[str]) -> None:
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    model = moe_ep.parallelize(
        path,
        dtype=torch.bfloat16 if on_gpus else torch.float32,
        device=device,
        eplb=EplbConfig(first_plan=8, interval=64),  # passes of the model until the first plan, and between plans
        num_redundant_experts=num_ranks,
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    with moe_ep.serving(model):  # at its end this rank's experts serve the others until all are done
        for prompt in prompts[rank::num_ranks]:
            inputs = tokenizer(prompt, return_tensors="pt").to(device)
            tokens = model.generate(**inputs, max_new_tokens=32, do_sample=False)
            text = tokenizer.decode(tokens[0], skip_special_tokens=True)
            print(f"rank {rank}: {text}\n", end="", flush=True)  # in one write, since ranks share the terminal
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: torchrun --nproc-per-node 2 examples/decode_with_eplb.py CHECKPOINT PROMPT [PROMPT ...]")
    main(sys.argv[1], sys.argv[2:])

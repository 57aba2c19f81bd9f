"""Reinforcement learning in the manner of GRPO: moe_ep generates, plain torch trains, and the weights go back in place.

    python examples/grpo.py [--steps 12]                                                    # one process
    torchrun --nproc-per-node 2 examples/grpo.py                                            # experts over two ranks

The model is a Qwen3-MoE of two layers with random weights, made here. The reward of a text is the share of its new
tokens that are even. Each step:

1. `Generation` continues every prompt several times, and records log-probabilities and the experts of every token;
2. the trainer computes the same log-probabilities, with these experts (`token_logprobs`). With batch_invariant they
   are equal bit for bit, so the ratio of the two policies is exactly 1 where training is on policy;
3. the policy gradient: texts are compared with the others of their prompt;
4. `update_weights` writes the trainer's weights into the engine.

Each rank trains on the texts that it has generated, and the ranks add up their gradients.
"""

from __future__ import annotations

import argparse
import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_ep
from moe_ep.generation.engine import Completion, Generation, Request
from moe_ep.generation.sampling import Sampling

VOCABULARY, NUM_PROMPTS, GROUP, NEW_TOKENS = 64, 4, 8, 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of a training run."""

    steps: int = 12
    learning_rate: float = 3e-3
    batch_invariant: bool = True


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Of one step, over all ranks.

    Attributes:
        reward: the mean over all texts.
        difference: the largest of a log-probability of the trainer and the engine's of the same token.
    """

    reward: float
    difference: float


def make_model() -> Any:
    """The same model on every rank, in f32."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config).float()


def rollout(engine: Any, prompts: list[torch.Tensor], step: int) -> list[Completion]:
    """This rank's share of GROUP texts for each prompt."""
    requests = [Request(index, prompts[index // GROUP]) for index in range(len(prompts) * GROUP)]
    generation = Generation(
        engine,
        requests,
        max_new_tokens=NEW_TOKENS,
        num_slots=len(requests) // world_size(),
        stop_ids=[],
        sampling=Sampling(temperature=1.0, seed=step),
        logprobs=0,
        records="ids",
    )
    return generation.run()


def reward_of(completion: Completion) -> float:
    """The share of even tokens."""
    return sum(token % 2 == 0 for token in completion.token_ids) / len(completion.token_ids)


def advantages_of(completions: list[Completion], num_texts: int) -> tuple[torch.Tensor, float]:
    """How much better than the others of its prompt each text is, in standard deviations; and the mean reward."""
    rewards = torch.zeros(num_texts)
    for completion in completions:
        rewards[completion.index] = reward_of(completion)
    sum_over_ranks(rewards)
    groups = rewards.view(-1, GROUP)
    spread = groups.std(dim=1, keepdim=True).clamp(min=1e-4)
    advantages = ((groups - groups.mean(dim=1, keepdim=True)) / spread).flatten()
    return advantages[[completion.index for completion in completions]], float(rewards.mean())


def train_step(
    trainer: Any, optimizer: Any, prompts: list[torch.Tensor], done: list[Completion], settings: Settings
) -> StepReport:
    """One step of the policy gradient on texts of all ranks."""
    num_texts = len(prompts) * GROUP
    advantages, reward = advantages_of(done, num_texts)
    texts = [torch.cat([prompts[each.index // GROUP], torch.tensor(each.token_ids)]) for each in done]
    routing = [each.routing.ids for each in done]
    logprobs = moe_ep.token_logprobs(trainer, texts, routing, batch_invariant=settings.batch_invariant)
    # Of new tokens only: [texts, NEW_TOKENS].
    new = torch.stack([found[-NEW_TOKENS:] for found in logprobs])
    generated = torch.tensor([[token.chosen for token in each.logprobs] for each in done])
    ratio = (new - generated).exp()
    clipped = ratio.clamp(0.8, 1.2)
    loss = -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None]).sum() / (num_texts * NEW_TOKENS)
    optimizer.zero_grad()
    loss.backward()
    for param in trainer.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        sum_over_ranks(param.grad)
    optimizer.step()
    difference = (new - generated).abs().max().detach()
    if world_size() > 1:
        dist.all_reduce(difference, dist.ReduceOp.MAX)
    return StepReport(reward=reward, difference=float(difference))


def train(settings: Settings) -> list[StepReport]:
    """All steps on one rank; the same report on each."""
    trainer = make_model()
    engine = moe_ep.parallelize(copy.deepcopy(trainer), batch_invariant=settings.batch_invariant)
    optimizer = torch.optim.Adam(trainer.parameters(), lr=settings.learning_rate)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, VOCABULARY, (4 + index,), generator=generator) for index in range(NUM_PROMPTS)]
    reports = []
    for step in range(settings.steps):
        done = rollout(engine, prompts, step)
        reports.append(train_step(trainer, optimizer, prompts, done, settings))
        moe_ep.update_weights(engine, trainer.state_dict().items())
        if rank() == 0:
            print(f"step {step}: reward {reports[-1].reward:.3f}, difference {reports[-1].difference:.1e}", flush=True)
    return reports


def sum_over_ranks(tensor: torch.Tensor) -> None:
    if world_size() > 1:
        dist.all_reduce(tensor)


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=Settings.steps)
    steps = parser.parse_args().steps
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    train(Settings(steps=steps))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

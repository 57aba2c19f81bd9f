"""MoE layers for the EPLB tests: numbers that add up exactly in f32 in whatever order, and placements to go to."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_ep.checkpoint.formats.gptq import GPTQConfig, pack_gptq
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.policy.maps import logical_maps
from moe_ep.layer import FusedMoE
from moe_ep.layer.methods import OnlineIntConfig
from moe_ep.quantization.canonical_weights import quantize_int

E, K, N, TOP_K = 10, 64, 32, 3
L = 3
CONFIG = EplbConfig(
    first_plan=4, interval=10**6, rebalance_below=1.0, refine=False, commit_margin=1, timeout_s=20, planner="thread"
)

# Layers of one model, each quantized in its own way.
SCHEMES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain with biases": {"has_bias": True},
    "quantized on load": {"quant_config": OnlineIntConfig(bits=4)},
    "GPTQ": {"quant_config": GPTQConfig(bits=4, group_size=32)},
    "GPTQ, act-order and zero points": {"quant_config": GPTQConfig(bits=4, group_size=32, desc_act=True, sym=False)},
}


def exact_routing(
    hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits, with weights 4, 2 and 1."""
    ids = gating_output.topk(topk, dim=1).indices.to(torch.int32)
    weights = 2.0 ** torch.arange(topk - 1, -1, -1, dtype=torch.float32, device=ids.device)
    return weights.expand(ids.shape).contiguous(), ids


def make_layer(scheme: str = "plain", redundant: int = 0, **options: Any) -> FusedMoE:
    """A layer that is not loaded; squared ReLU of whole numbers is a whole number."""
    settings: dict[str, Any] = {
        "num_experts": E,
        "top_k": TOP_K,
        "hidden_size": K,
        "intermediate_size": N,
        "activation": "relu2_no_mul",
        "custom_routing_function": exact_routing,
        "enable_eplb": True,
        "num_redundant_experts": redundant,
        "max_num_tokens": 16,
    }
    return FusedMoE(**(settings | SCHEMES[scheme] | options))


def load_layer(layer: FusedMoE, seed: int, experts: Container[int] = range(E)) -> FusedMoE:
    """Whole numbers from -1 to 1, the same for the same seed on every rank, through the weight loader."""
    params = dict(layer.named_parameters())
    for physical in range(layer.num_experts + layer.num_redundant_experts):
        if physical % layer.num_experts not in experts:
            continue
        generator = torch.Generator().manual_seed(1000 * seed + physical % layer.num_experts)
        for shard, gemm, shape in (("w1", "w13", (N, K)), ("w2", "w2", (K, N))):
            weight = torch.randint(-1, 2, shape, generator=generator).float()
            tensors = {"weight": weight, "bias": weight.sum(dim=1)}
            config = layer.quant_method.quant_config
            if isinstance(config, GPTQConfig):
                codes = quantize_int(weight, config.bits, config.group_size)
                if config.desc_act:
                    order = torch.randperm(shape[1], generator=generator)
                    codes = codes._replace(g_idx=(order // config.group_size).to(torch.int32))
                if not config.sym:
                    zeros = torch.randint(1, 16, codes.scales.shape, generator=generator).to(torch.uint8)
                    codes = codes._replace(zero_points=zeros)
                tensors |= pack_gptq(codes, config)._asdict()
            for name, tensor in tensors.items():
                if (param := params.get(f"{gemm}_{name}")) is not None:
                    layer.weight_loader(param, tensor, f"experts.{physical}.{gemm}.{name}", shard, physical)
    layer.process_weights_after_loading()
    return layer


def inputs(T: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers, and logits that prefer low experts."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, E, generator=generator) - torch.arange(E) * 0.3
    return torch.randint(-2, 3, (T, K), generator=generator).float(), logits


def random_placement(num_layers: int, num_slots: int, seed: int, num_experts: int = E) -> np.ndarray:
    """int64 `[L, P]`: every expert once, the rest of the slots anything, in any order."""
    rng = np.random.default_rng(seed)
    extra = rng.integers(0, num_experts, (num_layers, num_slots - num_experts))
    return rng.permuted(np.concatenate([np.tile(np.arange(num_experts), (num_layers, 1)), extra], axis=1), axis=1)


def redundancy(ep_size: int, least: int) -> int:
    """The least redundant experts, from `least` on, that give every rank as many slots."""
    return least + -(E + least) % ep_size


def my_slots(placement: np.ndarray, layer: int) -> list[int]:
    """The experts in this rank's slots."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return np.split(placement[layer], size)[rank].tolist()


def set_placement(layer: FusedMoE, row: np.ndarray, num_experts: int = E) -> None:
    """Has a layer that is not loaded yet take its experts where a placement `[P]` wants them."""
    table, counts = logical_maps(row[None], num_experts)
    load = torch.zeros(1, len(row), dtype=torch.int32)
    layer.set_eplb_state(0, load, torch.from_numpy(table).int(), torch.from_numpy(counts).int())


def fresh_weights(scheme: str, redundant: int, seed: int, row: np.ndarray) -> list[torch.Tensor]:
    """What `expert_weights` is of a layer that was loaded into a placement `[P]`."""
    layer = make_layer(scheme, redundant)
    set_placement(layer, row)
    return load_layer(layer, seed).expert_weights()


def make_model(world_size: int, spare: int = 2, **options: Any) -> list[FusedMoE]:
    """Layers of one model, loaded, with about so many spare slots."""
    redundant = redundancy(world_size, spare)
    return [load_layer(make_layer("plain", redundant, **options), seed) for seed in range(L)]


def on_one_rank(**settings: Any) -> EPLBManager:
    return EPLBManager(make_model(1, ep_size=1), EplbConfig(**{**vars(CONFIG), "asynchronous": False, **settings}))

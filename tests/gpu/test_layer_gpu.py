"""The layer on GPUs: over NCCL ranks as alone, captured in a CUDA graph, and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ep.layer import FusedMoE
from moe_ep.layer.methods import OnlineIntConfig, relative_error, tolerance
from moe_ep.layer.stack import SharedExperts
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS
from tests.layer.moe_oracle import load, make_inputs, make_weights, run_moe
from tests.ranks import needs_gpu_ranks, ranks

E, K, N, TOP_K = 16, 256, 128, 4
BACKENDS = [name for name in ALL2ALL_BACKENDS if name != "no_ep"]
WORLD_SIZES = [
    pytest.param(2, marks=pytest.mark.gpu2),
    pytest.param(4, marks=[pytest.mark.gpu2, needs_gpu_ranks(4)]),
    pytest.param(8, marks=pytest.mark.gpu8),
]
# torch.compile's, without and with CUDA graphs.
MODES = ["default", "reduce-overhead"]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp8 rows on the wire": {"dispatch_dtype": torch.float8_e4m3fn},
    "more tokens than the capacity": {"max_num_tokens": 8},
    "shared experts": {"shared_experts": True},
    "fused shared experts": {"n_shared_experts": 1},
    "identity experts": {"zero_expert_num": 4, "zero_expert_type": "identity"},
    "redundant experts": {"num_redundant_experts": 8, "enable_eplb": True},
    "round robin": {"expert_placement_strategy": "round_robin"},
    "4-bit experts": {"quant_config": OnlineIntConfig()},
}


def make_layer(options: dict[str, Any], **more: Any) -> FusedMoE:
    settings: dict[str, Any] = {"num_experts": E, "top_k": TOP_K, "hidden_size": K, "intermediate_size": N}
    settings |= {"params_dtype": torch.bfloat16} | options | more
    if settings.pop("shared_experts", False):
        torch.manual_seed(3)
        settings["shared_experts"] = SharedExperts(K, N, params_dtype=settings["params_dtype"])
    return load(FusedMoE(**settings), make_weights(E + settings.get("n_shared_experts", 0), K, N)).cuda()


def make_pair(options: dict[str, Any], **parallel: Any) -> tuple[FusedMoE, FusedMoE]:
    alone = {key: value for key, value in options.items() if key != "dispatch_dtype"}
    return make_layer(options, **parallel), make_layer(alone, ep_size=1)


def inputs_of(layer: FusedMoE, T: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    hidden_states, router_logits = make_inputs(T, K, layer.num_router_columns, seed)
    return hidden_states.to("cuda", layer.moe_config.in_dtype), router_logits.cuda()


def check(output: torch.Tensor, expected: torch.Tensor, options: dict[str, Any]) -> None:
    assert output.shape == expected.shape
    assert relative_error(output, expected) < tolerance(output.dtype, options.get("dispatch_dtype"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_gpu_against_plain_loops(dtype: torch.dtype) -> None:
    layer = make_layer({"params_dtype": dtype})
    hidden_states, router_logits = make_inputs(33, K, E)
    expected = run_moe(make_weights(E, K, N), hidden_states, router_logits, TOP_K)
    check(layer(hidden_states.to("cuda", dtype), router_logits.cuda()).cpu(), expected, {})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantized_experts_run_packed(dtype: torch.dtype) -> None:
    options = {"params_dtype": dtype, "quant_config": OnlineIntConfig()}
    packed, plain = make_layer(options), make_layer(options | {"experts": "reference"})
    for T in (1, 7, 130):
        inputs = inputs_of(packed, T, seed=T)
        check(packed(*inputs), plain(*inputs), {})
    usable = EXPERTS.load("marlin").unusable_reason() is None
    assert type(packed.modular_kernel.fused_experts).__name__ == ("MarlinExperts" if usable else "ReferenceExperts")


@pytest.mark.gpu
def test_autocast_stops_at_the_layer() -> None:
    layer = make_layer({"params_dtype": torch.float32, "shared_experts": True})
    inputs = inputs_of(layer, 9, seed=9)
    expected = layer(*inputs)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(layer(*inputs), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["plain", "shared experts", "4-bit experts"])
def test_one_gpu_compiled(case: str, mode: str) -> None:
    """Also where nothing has run before, so that what layers keep is made while a CUDA graph is warmed up."""
    layer, eager = (make_layer(CASES[case]) for _ in range(2))
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for step, T in enumerate((5, 5, 5, 17, 17, 17, 5)):  # warmed up, recorded, replayed
        inputs = inputs_of(layer, T, seed=step)
        check(compiled(*inputs).clone(), eager(*inputs), {})


def over_ranks(rank: int, world_size: int, backend: str, options: dict[str, Any]) -> None:
    layer, alone = make_pair(options, all2all_backend=backend)
    for tokens in ((31 * rank) % 40, 0 if rank else 20, 0):
        inputs = inputs_of(layer, tokens, seed=rank)
        check(layer(*inputs), alone(*inputs), options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_over_ranks_as_alone(world_size: int, backend: str, case: str) -> None:
    ranks(world_size, "nccl").run(over_ranks, backend, CASES[case])


def compiled_over_ranks(rank: int, world_size: int, backend: str, mode: str) -> None:
    torch.compiler.reset()  # Layers of other cases count towards the limit of recompilations.
    layer, alone = make_pair({"shared_experts": True}, all2all_backend=backend)
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for step, tokens in enumerate((8, 8 + rank, 8, 8, 8 + rank)):
        inputs = inputs_of(layer, tokens, seed=rank + step)
        check(compiled(*inputs).clone(), alone(*inputs), {})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_compiled_over_ranks(world_size: int, backend: str, mode: str) -> None:
    ranks(world_size, "nccl").run(compiled_over_ranks, backend, mode)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("T", [1, 8, 130, 700])
def test_kernels_that_come_early_wait_for_those_before(T: int, shared: bool) -> None:
    """Replays of a chain in which each layer's choices follow from the output before have the bits of one kernel at a
    time: what a kernel reads is there, and what it writes is no longer read."""
    layers = [make_layer({"quant_config": OnlineIntConfig(), "shared_experts": shared}) for _ in range(2)]
    static, _ = inputs_of(layers[0], T, seed=0)

    def chain(hidden_states: torch.Tensor, wait: bool = False) -> torch.Tensor:
        for layer in layers * 4:
            output = layer(hidden_states, hidden_states[:, : layer.num_router_columns])
            hidden_states = output / output.float().square().mean().sqrt().to(output.dtype)
            if wait:
                torch.cuda.synchronize()
        return hidden_states

    chain(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = chain(static)
    for seed in range(1, 6):
        fresh, _ = inputs_of(layers[0], T, seed=seed)
        static.copy_(fresh)
        graph.replay()
        assert torch.equal(output, chain(fresh, wait=True))


def captured(rank: int, world_size: int, options: dict[str, Any], backend: str = "batched_all_to_all") -> str:
    layer, alone = make_pair(options, all2all_backend=backend)
    T = layer.moe_config.max_num_tokens // 2
    static = inputs_of(layer, T, seed=rank)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            layer(*static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            output = layer(*static)
    for step in range(4):
        fresh = inputs_of(layer, T, seed=100 * step + rank)
        if step == 3:  # Every token of every rank to the experts of rank 0.
            fresh[1][:, :TOP_K] += 100
        for target, source in zip(static, fresh, strict=True):
            target.copy_(source)
        graph.replay()
        check(output, alone(*fresh), options)

    too_many = inputs_of(layer, layer.moe_config.max_num_tokens + 1, seed=rank)
    message = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side, capture_error_mode="thread_local"):
            layer(*too_many)
    except ValueError as error:
        message = str(error)
    return message


@pytest.mark.parametrize("case", ["plain", "fp8 rows on the wire", "shared experts", "redundant experts"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_captured_and_replayed_with_changing_routing(world_size: int, case: str) -> None:
    for message in ranks(world_size, "nccl").run(captured, {"max_num_tokens": 32} | CASES[case]):
        assert message.startswith("hidden_states has 33 tokens under CUDA-graph capture and the capacity is 32")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_prefill_captured_and_replayed_with_changing_routing(world_size: int) -> None:
    if reason := EXPERTS.load("marlin").unusable_reason():
        pytest.skip(reason)
    options = {"max_num_tokens": 256} | CASES["4-bit experts"]
    for message in ranks(world_size, "nccl").run(captured, options, "nvshmem_high_throughput"):
        assert message.startswith("hidden_states has 257 tokens under CUDA-graph capture and the capacity is 256")

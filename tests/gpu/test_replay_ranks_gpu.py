"""Replays of layers whose experts are sharded over ranks: as passes that run eagerly, to the bit; and ranks that come
too late to one are told of."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import moe_ep
from moe_ep.eplb.config import EplbConfig
from moe_ep.errors import DispatchTimeoutError
from moe_ep.generation.engine import Generation, Request
from moe_ep.hf.parallelized import steps_of
from moe_ep.layer import FusedMoE
from moe_ep.layer.methods import OnlineIntConfig, relative_error, tolerance
from moe_ep.layer.replay import EAGER_CALLS, StreamGraphs
from moe_ep.observability import stages
from tests.gpu.test_transformers_gpu import PACKED, make
from tests.hf.hf_models import SIZES
from tests.layer.moe_oracle import load, make_inputs, make_weights
from tests.ranks import num_gpu_ranks, ranks

pytestmark = pytest.mark.gpu2
WORLD_SIZE = max(2, min(4, torch.cuda.device_count()))
ONE: dict[str, Any] = {"backend": "nvshmem_low_latency"}  # of decode and prefill
TWO = pytest.param(
    {"decode_max_num_tokens": 6},
    marks=pytest.mark.skipif(num_gpu_ranks() > torch.cuda.device_count(), reason="ranks of one GPU have one backend"),
    id="two backends",
)


def parallelized(replay_tokens: int, made: Any, **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_EP_REPLAY_MAX_TOKENS", str(replay_tokens))
        return moe_ep.parallelize(made, **options)


def one_pass(model: Any, tokens: torch.Tensor | None) -> torch.Tensor | None:
    """Logits of these tokens, `[1, T]`; of a rank that has none, nothing."""
    if tokens is not None:
        logits: torch.Tensor = model(tokens, use_cache=False).logits
        return logits
    steps = steps_of(model)
    with steps.planned(steps.begin(None)):
        steps.pass_without_tokens()
    return None


def draw(num_tokens: int, seed: int) -> torch.Tensor | None:
    if num_tokens == 0:
        return None
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(1, SIZES["vocab_size"], (1, num_tokens), device="cuda", generator=generator)


@contextmanager
def counted_replays() -> Iterator[list[torch.cuda.CUDAGraph]]:
    """A block in which every graph that is replayed is added to the list, once for each time."""
    replays: list[torch.cuda.CUDAGraph] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(graph)
        replay(graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.CUDAGraph, "replay", counted)
        yield replays


def as_eager_passes(rank: int, world_size: int, quantize: str, options: dict[str, Any]) -> tuple[int, int]:
    """Passes with other tokens on every rank, few and many, on two streams, by a model with replays and by one without
    that share buffers; returns (replays, layers)."""
    made = make("Qwen3Moe", torch.bfloat16, **PACKED, num_experts=8)
    eager = parallelized(0, copy.deepcopy(made), quantize=quantize, **options)
    model = parallelized(256, made, quantize=quantize, **options)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    with torch.inference_mode(), counted_replays() as replays:
        for number in range(8 * (EAGER_CALLS + 4)):
            # Every rank has its own turn of 1, 5, nothing and 6 tokens, and all have many now and then.
            num_tokens = 20 + rank if number % 9 == 8 else (1, 5, 0, 6)[(number + rank) % 4]
            tokens = draw(num_tokens, seed=number * world_size + rank)
            torch.cuda.synchronize()
            with torch.cuda.stream(streams[number // 4 % 2]):
                got, expected = one_pass(model, tokens), one_pass(eager, tokens)
            torch.cuda.synchronize()
            assert (got is None) == (expected is None)
            assert got is None or expected is None or torch.equal(got, expected), f"pass {number}"
    return len(replays), len(steps_of(model).layers)


@pytest.mark.parametrize("options", [TWO, pytest.param(ONE, id="one")])
@pytest.mark.parametrize("quantize", ["none", "int4"])
def test_replays_are_eager_passes(quantize: str, options: dict[str, Any]) -> None:
    for num_replays, num_layers in ranks(WORLD_SIZE, "nccl").run(as_eager_passes, quantize, options):
        # Of each of four kinds on each of two streams all but those that are captured or come before.
        assert num_replays >= num_layers * 8


def layers_that_route(rank: int, world_size: int, backend: str, options: dict[str, Any]) -> int:
    """Calls of a layer with logits, of other numbers of tokens on every rank: those that replay, beside others or one
    that does not, have the bits of the first, eager call of the same inputs; returns the replays."""
    tokens = ((5, 3), (1, 0), (0, 17), (64, 40), (33, 48), (100, 128))
    settings: dict[str, Any] = {"num_experts": 16, "top_k": 4, "hidden_size": 256, "intermediate_size": 128}
    settings |= {"params_dtype": torch.bfloat16, "max_num_tokens": 512} | options
    layer, plain = (
        load(FusedMoE(**settings, all2all_backend=name), make_weights(16, 256, 128)).cuda()
        for name in (backend, "all_to_all")
    )
    first: list[torch.Tensor] = []
    with torch.inference_mode(), counted_replays() as replays:
        for number in range(len(tokens) * (EAGER_CALLS + 6)):
            which = number % len(tokens)
            inputs = make_inputs(tokens[which][rank % 2], 256, layer.num_router_columns, seed=which * world_size + rank)
            rows, logits = inputs[0].to("cuda", torch.bfloat16), inputs[1].cuda()
            is_eager = number % 5 == 4 and rank == number // 5 % world_size
            with stages.record("cuda") if is_eager else nullcontext():
                found = layer(rows, logits)
            if number < len(tokens):
                first.append(found)
                expected = plain(rows, logits)
                assert not len(rows) or relative_error(found, expected) < tolerance(torch.bfloat16)
            assert torch.equal(found, first[which]), f"call {number}"
    return len(replays)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"quant_config": OnlineIntConfig(), "enable_eplb": True}, id="int4, EPLB"),
        pytest.param({"quant_config": OnlineIntConfig(), "dispatch_dtype": torch.int8}, id="int8 on the wire"),
        pytest.param({"zero_expert_num": 2, "zero_expert_type": "identity"}, id="identities"),
    ],
)
@pytest.mark.parametrize("backend", ["nvshmem_low_latency", "nvshmem_high_throughput"])
def test_layers_that_route(backend: str, options: dict[str, Any]) -> None:
    # Of each of six numbers of rows ten calls, five of them before there is a graph, and some that are made eagerly.
    assert min(ranks(WORLD_SIZE, "nccl").run(layers_that_route, backend, options)) >= 15


def balanced_as_eager_passes(rank: int, world_size: int) -> None:
    """Replays count the load that eager passes count, and go where the experts are after they have moved."""
    made = make("Qwen3Moe", torch.bfloat16, **PACKED, num_experts=8)
    config = EplbConfig(first_plan=1000, asynchronous=False)
    options: dict[str, Any] = {**ONE, "quantize": "int4", "eplb": config, "num_redundant_experts": world_size}
    models = [parallelized(tokens, copy.deepcopy(made), **options) for tokens in (0, 256)]
    managers = [steps_of(model).eplb for model in models]
    with torch.inference_mode(), counted_replays() as replays:
        for moved in (False, True):
            for number in range(3 * (EAGER_CALLS + 3)):
                tokens = draw((1, 5, 0)[(number + rank) % 3], seed=number * world_size + rank)
                expected, got = (one_pass(model, tokens) for model in models)
                assert got is None or expected is None or torch.equal(got, expected), f"{moved}, pass {number}"
            loads = [manager.recorder.snapshot() for manager in managers]
            assert torch.equal(*loads) and loads[0].any()
            if not moved:
                for manager in managers:
                    manager.rearrange(manager.placement.host[:, ::-1].copy())
    # The second time no graph had to be made again.
    num_layers, calls = len(steps_of(models[1]).layers), 3 * (EAGER_CALLS + 3)
    assert len(replays) >= num_layers * (2 * calls - 3 * (EAGER_CALLS + 1))
    for manager in managers:
        manager.close()


def test_replays_of_balanced_layers() -> None:
    ranks(WORLD_SIZE, "nccl").run(balanced_as_eager_passes)


def compiled(rank: int, world_size: int) -> int:
    """Passes of a model that torch.compile captures in CUDA graphs but for its experts, which replay their own between
    them; returns how often."""
    # Of all experts: where others round otherwise, few of many would be other ones.
    made = make("Qwen3Moe", torch.bfloat16, **PACKED, num_experts=8, num_experts_per_tok=8)
    eager, model = (parallelized(tokens, copy.deepcopy(made), **ONE, quantize="int4") for tokens in (0, 256))
    passes = torch.compile(model, mode="reduce-overhead")
    num_replays, replay = 0, StreamGraphs.replay

    def counted(*args: Any) -> torch.Tensor:
        nonlocal num_replays
        num_replays += 1
        return replay(*args)

    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamGraphs, "replay", counted)
        for number in range(EAGER_CALLS + 6):
            tokens = draw(5, seed=number * world_size + rank)
            assert tokens is not None
            got = passes(tokens, use_cache=False).logits.clone()
            expected = eager(tokens, use_cache=False).logits
            assert relative_error(got, expected) < 2 * len(steps_of(model).layers) * tolerance(torch.bfloat16)
    return num_replays


def test_replays_between_the_graphs_of_a_compiled_model() -> None:
    assert min(ranks(WORLD_SIZE, "nccl").run(compiled)) > 0


def late_to_a_step_of_generation(rank: int, world_size: int) -> int:
    """Rank 1 comes too late to a replayed step; returns the replayed steps that were known to be right."""
    requests = [Request(index, torch.arange(1, 4 + index)) for index in range(3 * world_size)]

    def wait(finished: Any) -> None:
        if rank == 1 and len(generation.times["replayed"]) == 4:
            time.sleep(2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_EP_NVSHMEM_TIMEOUT_S", "0.5")
        model = parallelized(0, make("Qwen3Moe", torch.bfloat16, **PACKED, num_experts=8), **ONE, max_num_tokens=70)
        generation = Generation(model, requests, max_new_tokens=24, num_slots=3, stop_ids=[], on_progress=wait)
        with pytest.raises(DispatchTimeoutError):
            generation.run()
    return len(generation.times["replayed"])


def test_a_rank_that_is_late_to_a_replayed_step_ends_generation() -> None:
    assert ranks(WORLD_SIZE, "nccl").run(late_to_a_step_of_generation) == [4] * WORLD_SIZE


def late_to_a_pass(rank: int, world_size: int) -> int:
    """Rank 1 comes too late to a pass of replayed layers; returns the pass that begins with the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_EP_NVSHMEM_TIMEOUT_S", "0.5")
        model = parallelized(256, make("Qwen3Moe", torch.bfloat16, **PACKED, num_experts=8), **ONE, max_num_tokens=90)
        steps, number = steps_of(model), 0

        def wait(*_: Any) -> None:
            if rank == 1 and number == EAGER_CALLS + 4:
                time.sleep(2)

        steps.layers[0].register_forward_pre_hook(wait)
        with torch.inference_mode():
            for number in range(EAGER_CALLS + 8):
                try:
                    one_pass(model, draw(3, seed=number))
                except DispatchTimeoutError:
                    return number
                torch.cuda.synchronize()
    return -1


def test_a_rank_that_is_late_to_a_replayed_layer_is_told_of() -> None:
    assert ranks(WORLD_SIZE, "nccl").run(late_to_a_pass) == [EAGER_CALLS + 5] * WORLD_SIZE

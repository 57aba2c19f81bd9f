"""transformers models with sharded experts on GPUs: packed 4-bit experts, NCCL ranks, decoding in CUDA graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import moe_ep
from moe_ep.generation.decoder import SlotDecoder
from moe_ep.generation.engine import Completion, Generation, Request
from moe_ep.hf.experts import find_experts
from moe_ep.hf.parallelized import steps_of
from moe_ep.hf.steps import Step
from moe_ep.layer.methods import relative_error, tolerance
from moe_ep.quantization.canonical_weights import dequantize, quantize_int
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS
from tests.generation.test_slot_attention import decoded
from tests.hf.hf_models import SIZES, make_model
from tests.ranks import ranks

WORLD_SIZES = [
    pytest.param(1, marks=pytest.mark.gpu),
    pytest.param(max(2, min(4, torch.cuda.device_count())), marks=pytest.mark.gpu2),
]
# What packed experts take: widths of whole tiles.
PACKED = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64, "num_attention_heads": 4}
SLOTS = 4


def make(family: str, dtype: torch.dtype, **changes: Any) -> Any:
    return make_model(family, dtype, **changes).cuda()


def in_f32(model: Any, quantize: str) -> Any:
    """The model in f32, its experts quantized to int4 and back where asked."""
    model = copy.deepcopy(model).float()
    for _, experts in find_experts(model) if quantize == "int4" else ():
        for param in experts.parameters():
            param.data = dequantize(quantize_int(param.data.bfloat16(), 4, 128))
    return model


def in_bf16(model: Any) -> Any:
    return copy.deepcopy(model).bfloat16()


def check_layers(parallel: Any, exact: Any) -> None:
    """From here on every layer's output is held to the experts in f32 on the very same inputs and choices."""
    for layer, (_, experts) in zip(steps_of(parallel).layers, find_experts(exact), strict=True):

        def check(layer: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor, experts: Any = experts) -> None:
            x, ids, weights = args
            error = relative_error(output, experts(x.float(), ids, weights.float())) if len(x) else 0.0
            assert error < tolerance(x.dtype), f"{layer.layer_name}: {error:.4f} for {len(x)} tokens"

        layer.register_forward_hook(check)


def logits_as_alone(rank: int, world_size: int, quantize: str, options: dict[str, Any]) -> str:
    """The parallelized bf16 model is as close to the whole one in f32 as the whole one in bf16, but for its layers."""
    # Every token takes every expert: rounding cannot turn a choice.
    made = make("Qwen3Moe", torch.bfloat16, **PACKED, num_experts=8, num_experts_per_tok=8)
    exact = in_f32(made, quantize)
    alone = in_bf16(exact)
    parallel = moe_ep.parallelize(made, quantize=quantize, **options)
    check_layers(parallel, exact)
    layers = steps_of(parallel).layers
    allowed = len(layers) * tolerance(torch.bfloat16)
    torch.manual_seed(rank)
    with torch.inference_mode(), moe_ep.serving(parallel):
        for length in range(3, 3 + 5 * rank + 1, 5):
            tokens = torch.randint(1, SIZES["vocab_size"], (2, length), device="cuda")
            caches: list[Any] = [None, None, None]
            logits: list[list[torch.Tensor]] = [[], [], []]
            for _ in range(3):
                for number, model in enumerate((parallel, alone, exact)):
                    output = model(tokens, past_key_values=caches[number], use_cache=True)
                    caches[number] = output.past_key_values
                    logits[number].append(output.logits)
                tokens = logits[2][-1][:, -1:].argmax(-1)
            # Of all passes together: a single token's logits may be small, and its error of any size.
            got, rounded, expected = (torch.cat(passes, dim=1) for passes in logits)
            error, unavoidable = relative_error(got, expected), relative_error(rounded, expected)
            assert error < unavoidable + allowed, f"{error:.4f} and alone {unavoidable:.4f}, length {length}"
    return type(layers[0].modular_kernel.fused_experts).__name__


@pytest.mark.parametrize("options", [{}, {"decode_max_num_tokens": 4}], ids=["one backend", "two backends"])
@pytest.mark.parametrize("quantize", ["none", "int4"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_logits(world_size: int, quantize: str, options: dict[str, Any]) -> None:
    for experts in ranks(world_size, "nccl").run(logits_as_alone, quantize, options):
        usable = EXPERTS.load("marlin").unusable_reason() is None
        assert ("Marlin" in experts) == (quantize == "int4" and usable)


def generated(rank: int, world_size: int, family: str, graphs: bool) -> tuple[list[Completion], int]:
    model = moe_ep.parallelize(make(family, torch.float32), decode_max_num_tokens=SLOTS)
    generator = torch.Generator().manual_seed(0)
    requests = [
        Request(index, torch.randint(1, SIZES["vocab_size"], (3 + 4 * index,), generator=generator))
        for index in range(6 * world_size)
    ]
    generation = Generation(model, requests, max_new_tokens=16, num_slots=SLOTS, stop_ids=[5], graphs=graphs)
    completions = generation.run()
    return completions, len(generation.times["replayed"])


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "NemotronH"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_generation_in_graphs_is_that_of_eager_passes(world_size: int, family: str) -> None:
    pool = ranks(world_size, "nccl")
    eager, captured = (pool.run(generated, family, graphs) for graphs in (False, True))
    assert [completions for completions, _ in captured] == [completions for completions, _ in eager]
    assert all(replayed == 0 for _, replayed in eager)
    # One rank has plain experts in the Standard format, whose loops no graph can hold: it decodes eagerly.
    assert (captured[0][1] > 0) == (world_size > 1)


def compiled_logits(rank: int, world_size: int, quantize: str) -> None:
    """Passes of changing tokens by a compiled model, which warms its CUDA graphs up, records and replays them."""
    made = make("Qwen3Moe", torch.bfloat16, **PACKED, num_experts=8, num_experts_per_tok=8)
    eager = moe_ep.parallelize(copy.deepcopy(made), quantize=quantize)
    model = moe_ep.parallelize(made, quantize=quantize)
    compiled = torch.compile(model, mode="reduce-overhead")
    generator = torch.Generator("cuda").manual_seed(rank)
    with torch.inference_mode():
        for _ in range(4):
            tokens = torch.randint(1, SIZES["vocab_size"], (2, 6), device="cuda", generator=generator)
            got = compiled(tokens, use_cache=False).logits.clone()
            expected = eager(tokens, use_cache=False).logits
            assert relative_error(got, expected) < 2 * len(steps_of(model).layers) * tolerance(torch.bfloat16)


@pytest.mark.parametrize("quantize", ["none", "int4"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_compiled_with_cuda_graphs(world_size: int, quantize: str) -> None:
    ranks(world_size, "nccl").run(compiled_logits, quantize)


@pytest.mark.gpu
@pytest.mark.parametrize("quantize", ["none", "int4"])
def test_static_caches(quantize: str) -> None:
    """transformers compiles the decoding of them, with CUDA graphs."""
    made = make("Qwen3Moe", torch.bfloat16, **PACKED, num_experts=8, num_experts_per_tok=8, eos_token_id=None)
    model = moe_ep.parallelize(made, quantize=quantize)
    prompts = torch.randint(1, SIZES["vocab_size"], (3, 9), device="cuda")
    settings = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    exact, compiled = (
        model.generate(prompts, **settings, **cache) for cache in ({}, {"cache_implementation": "static"})
    )
    # Of the tokens up to the first on which rounding decided otherwise.
    same = (exact.sequences == compiled.sequences).all(0)[prompts.size(1) :].cumprod(0).sum()
    assert same >= 1
    got, expected = (torch.stack(found.logits[: int(same)]) for found in (compiled, exact))
    assert relative_error(got, expected) < 2 * len(steps_of(model).layers) * tolerance(torch.bfloat16)


@pytest.mark.gpu
def test_ungated_experts() -> None:
    """Of Nemotron-H, in int4: few rows, many, and one of each of four slots."""
    made = make("NemotronH", torch.bfloat16, **PACKED, n_routed_experts=8)
    parallel = moe_ep.parallelize(copy.deepcopy(made), quantize="int4", decode_max_num_tokens=4)
    check_layers(parallel, in_f32(made, "int4"))
    with torch.inference_mode():
        for length in (1, 5, 300):
            parallel(torch.randint(1, SIZES["vocab_size"], (4, length), device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "GptOss", "Qwen3Next"])
def test_attention_without_masks(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed prompts and slots of known lengths are as close to f32 as masks are: windows, sinks, shared heads."""
    sizes = {**PACKED, "num_key_value_heads": 2, "num_experts_per_tok": 6, "num_experts": 6}
    made = make(family, torch.bfloat16, **sizes)
    exact, _ = decoded(moe_ep.parallelize(copy.deepcopy(made).float()))
    got, decoder = decoded(moe_ep.parallelize(copy.deepcopy(made)))
    assert decoder.num_rows([4, 13]) == (26 if family == "Qwen3Next" else 17)
    monkeypatch.setattr("moe_ep.generation.decoder.can_attend", lambda model: False)
    masked, _ = decoded(moe_ep.parallelize(made))
    got_error, masked_error = (relative_error(torch.cat(mine), torch.cat(exact)) for mine in (got, masked))
    assert got_error < masked_error + tolerance(torch.bfloat16)


def replayed_and_eager(rank: int, world_size: int) -> None:
    """Replayed steps of packed 4-bit experts against eager ones on the same tokens, with a slot free; none waits."""
    model = moe_ep.parallelize(
        make("Qwen3Moe", torch.bfloat16, **PACKED, num_experts=8), quantize="int4", decode_max_num_tokens=SLOTS
    )
    decoder = SlotDecoder(model, SLOTS, 32, graphs=True)
    steps = decoder.steps
    with torch.inference_mode():
        slots = list(range(SLOTS - 1))
        with steps.planned(steps.begin((3 + rank) * len(slots))):
            first = decoder.prefill(slots, [torch.arange(1, 4 + rank)] * len(slots)).argmax(-1)
            decoder.append(slots, first)
        for number in range(8):
            step = Step((SLOTS,) * world_size, decoder.can_replay_decode)
            assert step.can_replay == (number >= 2)
            with steps.planned(step):
                # Once everything is made, nothing on the way through the layers may wait for the GPU: it would raise.
                torch.cuda.set_sync_debug_mode("error" if step.can_replay else "default")
                expected = decoder.decode_pass().clone()
                logits = decoder.decode()
                torch.cuda.set_sync_debug_mode("default")
                assert relative_error(logits[: SLOTS - 1], expected[: SLOTS - 1]) < tolerance(torch.bfloat16)
                decoder.append(slice(None), logits.argmax(-1))
    decoder.close()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_replayed_step_is_an_eager_one(world_size: int) -> None:
    ranks(world_size, "nccl").run(replayed_and_eager)


def read_in_graphs(rank: int, world_size: int, options: dict[str, Any]) -> int:
    """Prompts of 1 to 60 tokens, read eagerly and in graphs of several sizes; returns the replayed steps."""
    made = make("Qwen3Moe", torch.bfloat16, **PACKED, num_experts=8)
    model = moe_ep.parallelize(made, quantize="int4", **options)
    generator = torch.Generator().manual_seed(0)
    requests = [
        Request(index, torch.randint(1, SIZES["vocab_size"], (1 + 7 * index % 60,), generator=generator))
        for index in range(24 * world_size)
    ]
    settings: dict[str, Any] = {"max_new_tokens": 6, "num_slots": SLOTS, "stop_ids": [], "logprobs": 0}
    settings |= {"prefill_tokens": 128, "records": "ids"}
    found: list[dict[int, Completion]] = []
    for choice in ("off", "auto"):
        generation = Generation(model, requests, **settings, prefill_graphs=choice)
        found.append({done.index: done for done in generation.run()})
        assert generation.how_passes_run()["prefill"].startswith("CUDA graphs" if choice == "auto" else "eager")
    eager, captured = found
    assert len(captured) == len(eager)
    for index in eager.keys() & captured.keys():
        mine, theirs = captured[index], eager[index]
        assert mine.routing is not None and theirs.routing is not None
        assert mine.routing.ids.shape == theirs.routing.ids.shape and int(mine.routing.ids.min()) >= 0
        if options.get("batch_invariant"):
            assert (mine.token_ids, mine.logprobs) == (theirs.token_ids, theirs.logprobs)
            assert torch.equal(mine.routing.ids, theirs.routing.ids)
        # Rounding may turn a later token.
        assert abs(mine.logprobs[0].chosen - theirs.logprobs[0].chosen) < 0.1
    return len(generation.times["prefill_replayed"])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_prompts_are_read_in_graphs(world_size: int, batch_invariant: bool) -> None:
    options: dict[str, Any] = {"batch_invariant": batch_invariant or None, "decode_max_num_tokens": SLOTS}
    if world_size > 1:
        options |= {"backend": "batched_all_to_all", "max_num_tokens": 128}
    replayed = ranks(world_size, "nccl").run(read_in_graphs, options)
    assert replayed[0] > 0


@pytest.mark.gpu2
@pytest.mark.parametrize("backend", ["nvshmem_high_throughput", "allgather_reducescatter"])
def test_prompts_are_read_in_graphs_by_backends_of_prefill(backend: str) -> None:
    if (reason := ALL2ALL_BACKENDS.load(backend).unusable_reason()) is not None:
        pytest.skip(reason)
    options = {"backend": backend, "max_num_tokens": 128, "decode_max_num_tokens": SLOTS}
    assert ranks(2, "nccl").run(read_in_graphs, options)[0] > 0

"""Passes that ranks make in different ways at once: ways of generating, models inside of others, and passes that leave
layers out, fail, or are interrupted."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import moe_ep
from moe_ep.errors import ConfigError
from moe_ep.hf.parallelized import steps_of
from moe_ep.hf.steps import StepScheduler
from moe_ep.layer import BatchBalance
from moe_ep.layer.methods import relative_error, tolerance
from moe_ep.observability import stages
from tests.hf.hf_models import SIZES, make_model
from tests.of_transformers import known
from tests.ranks import ranks


def tokens_of(rank: int, batch: int = 1, length: int = 5) -> torch.Tensor:
    return torch.randint(1, SIZES["vocab_size"], (batch, length + rank), generator=torch.Generator().manual_seed(rank))


def generate(model: Any, rank: int, tokens: torch.Tensor | None = None, **settings: Any) -> torch.Tensor:
    """What the model goes on with; a rank of a higher number makes more passes."""
    torch.manual_seed(1)
    tokens = tokens_of(rank) if tokens is None else tokens
    settings = {"max_new_tokens": 4 + 2 * rank, "do_sample": False, "attention_mask": (tokens > 0).long()} | settings
    continued: torch.Tensor = model.generate(tokens, **settings)
    return continued


def small_dense_model() -> Any:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})).eval()


def padded(rank: int) -> torch.Tensor:
    tokens = tokens_of(rank, batch=3, length=8)
    tokens[0, :4] = tokens[1, : 7 - rank] = 0
    return tokens


def from_a_thread(model: Any, rank: int) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(generate(model, rank)), daemon=True)
    thread.start()
    thread.join(20)
    return found[0]


def stopped(model: Any, rank: int) -> torch.Tensor:
    """A stopping criterion that raises, and what comes after it."""

    def criterion(tokens: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        generate(model, rank, stopping_criteria=transformers.StoppingCriteriaList([criterion]))
    return generate(model, rank)


WAYS: tuple[Callable[[Any, int], torch.Tensor], ...] = (
    lambda model, rank: generate(model, rank, num_beams=3, num_return_sequences=2),
    lambda model, rank: generate(model, rank, do_sample=True, top_k=10, num_return_sequences=3),
    lambda model, rank: generate(model, rank, prompt_lookup_num_tokens=3),
    lambda model, rank: generate(model, rank, assistant_model=small_dense_model()),
    lambda model, rank: generate(model, rank, assistant_early_exit=1),
    lambda model, rank: generate(model, rank, prefill_chunk_size=3),
    lambda model, rank: generate(model, rank, cache_implementation="static"),
    lambda model, rank: generate(model, rank, padded(rank)),
    from_a_thread,
    stopped,
)


def in_different_ways(rank: int, world_size: int) -> None:
    """Ranks go through the ways in two orders."""
    alone = make_model("Qwen3Moe")
    parallel = moe_ep.parallelize(copy.deepcopy(alone))
    ways = WAYS[::-1] if rank else WAYS
    with moe_ep.serving(parallel):
        found = [way(parallel, rank) for way in ways]
    for number, (way, tokens) in enumerate(zip(ways, found, strict=True)):
        assert torch.equal(tokens, way(alone, rank)), f"way {number} on rank {rank}"


def test_ranks_generate_in_different_ways_at_once() -> None:
    ranks(2).run(in_different_ways)


def in_continuous_batches(rank: int, world_size: int) -> None:
    """transformers makes the passes in a thread of its own."""
    alone = make_model("Qwen3Moe")
    parallel = moe_ep.parallelize(copy.deepcopy(alone))
    prompts = [tokens_of(number) for number in range(2 - rank)]
    settings = {"max_new_tokens": 3 + 2 * rank, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    with moe_ep.serving(parallel):
        found = parallel.generate_batch(
            [tokens[0].tolist() for tokens in prompts],
            generation_config=transformers.GenerationConfig(**settings),
            continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32),
        )
    for tokens, output in zip(prompts, found.values(), strict=True):
        expected = generate(alone, rank, tokens, max_new_tokens=settings["max_new_tokens"])
        assert output.error is None and output.generated_tokens == expected[0, tokens.size(1) :].tolist()


def test_continuous_batches() -> None:
    known("ContinuousBatchingConfig")
    ranks(2).run(in_continuous_batches)


def with_a_parallelized_assistant(rank: int, world_size: int) -> None:
    """Ranks make passes of two models, each in an order of its own, or serve in both."""
    alone, drafts = make_model("Qwen3Moe"), make_model("Mixtral")
    parallel, assistant = (moe_ep.parallelize(copy.deepcopy(model)) for model in (alone, drafts))
    with moe_ep.serving(parallel):
        several = [generate(parallel, each, assistant_model=assistant) for each in range(rank)]
    with moe_ep.serving(assistant), ThreadPoolExecutor(2) as threads:
        own = list(threads.map(lambda model: generate(model, rank), (parallel, assistant)))
    expected = [generate(alone, each, assistant_model=drafts) for each in range(rank)]
    assert all(map(torch.equal, several + own, expected + [generate(model, rank) for model in (alone, drafts)]))
    if rank == 0:
        del assistant
        with pytest.raises(ConfigError, match=r"as number \d+ .* has dropped"):
            moe_ep.serve(parallel)
    else:
        assert steps_of(assistant).agree(1) is not None


def test_ranks_make_passes_of_several_models() -> None:
    ranks(3).run(with_a_parallelized_assistant)


def test_the_step_order_of_models() -> None:
    scheduler = StepScheduler(None)
    wanted = [0, 0], [2, 0, 3], [2, 3], [2, 3, 1], [1, 2], [1, 0], [1, 3], [0]
    assert [scheduler.next_of(numbers) for numbers in wanted] == [0, 2, 3, 1, 2, 1, 3, 0]


class Around(torch.nn.Module):
    """As peft's classes stand around a model: what they lack, as `generate`, is the model's own."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.base_model = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)


def inside_of_others(rank: int, world_size: int) -> None:
    alone = make_model("Qwen3Moe")
    inner = copy.deepcopy(alone)
    parallel = moe_ep.parallelize(Around(Around(inner)))
    with torch.inference_mode(), moe_ep.serving(parallel):
        continued = generate(parallel, rank)
        logits = [model(tokens_of(rank)).logits for model in (parallel, inner)][rank]
        embedded = inner.get_input_embeddings()(tokens_of(rank))
        hidden = inner.model.forward(None, None, None, None, embedded).last_hidden_state
    assert torch.equal(continued, generate(alone, rank))
    with torch.inference_mode():
        assert relative_error(logits, alone(tokens_of(rank)).logits) < tolerance(torch.float32)
        assert relative_error(hidden, alone.model(tokens_of(rank)).last_hidden_state) < tolerance(torch.float32)
    assert moe_ep.serve(inner) == 0


def test_passes_of_a_model_inside_of_others_are_steps() -> None:
    ranks(2).run(inside_of_others)


def failing(rank: int, world_size: int) -> None:
    """Rank 0 has passes that fail, of which the others hear nothing."""
    alone = make_model("Qwen3Moe")
    parallel = moe_ep.parallelize(copy.deepcopy(alone), eplb=True, num_redundant_experts=1)
    with torch.inference_mode(), moe_ep.serving(parallel):
        if rank == 0:
            with pytest.raises(IndexError):
                parallel(torch.full((1, 3), SIZES["vocab_size"]))
            hook = parallel.model.layers[1].self_attn.register_forward_pre_hook(lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError) as caught:
                parallel(tokens_of(rank))
            hook.remove()
            assert not hasattr(caught.value, "__notes__")
        continued = generate(parallel, rank)
        if rank == 0:
            first = parallel.model.layers[0].mlp
            first.forward = lambda rows: type(first).forward(first, type(first).forward(first, rows))
            with pytest.raises(ConfigError, match=r"a pass calls the experts of model\.layers\.0\S* twice, or after"):
                parallel(tokens_of(rank))
            del first.forward
            with pytest.MonkeyPatch.context() as patch:  # As transformers' batches do on GPUs.
                for name in ("is_initialized", "is_current_stream_capturing"):
                    patch.setattr(torch.cuda, name, lambda: True)
                with pytest.raises(ConfigError, match="captured in a CUDA graph, whose replays would not agree with"):
                    parallel(tokens_of(rank))
        again = generate(parallel, rank)
    assert torch.equal(continued, generate(alone, rank)) and torch.equal(again, continued)
    steps = steps_of(parallel)
    steps.begin_pass(2)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(steps.layers[0], "serve", lambda: 1 / 0)
        steps.end_pass()
    assert steps.current is None and moe_ep.serve(parallel) == 0


def test_ranks_stay_together_where_the_pass_of_one_fails() -> None:
    ranks(2).run(failing)


def in_blocks_of_threads(rank: int, world_size: int) -> list[torch.Tensor]:
    """Of rank 0, threads with blocks of their own: the first one ends while another thinks, before the last begins."""
    model = moe_ep.parallelize(make_model("Qwen3Moe"))
    if rank == 1:
        with moe_ep.serving(model):
            pass
        return []
    began, ended = threading.Event(), threading.Event()

    def first(number: int) -> torch.Tensor:
        with moe_ep.serving(model):
            began.wait(20)
            found = generate(model, number)
        ended.set()
        return found

    def second(number: int) -> torch.Tensor:
        with moe_ep.serving(model):
            began.set()
            ended.wait(20)
            time.sleep(0.5)  # in which rank 1 has nobody to serve
            return generate(model, number)

    with ThreadPoolExecutor(3) as threads:
        found = [threads.submit(thread, number) for number, thread in enumerate((first, second, first))]
        return [each.result() for each in found]


def in_blocks_of_which_the_last_raises(rank: int, world_size: int) -> None:
    """The first block's end counts on the second one's."""
    model = moe_ep.parallelize(make_model("Qwen3Moe"))
    if rank == 1:
        with moe_ep.serving(model):
            generate(model, 1)  # goes on when rank 0 has nothing more to ask
        return
    both = threading.Barrier(2)

    def second() -> None:
        with pytest.raises(KeyError, match="enough"), moe_ep.serving(model):
            both.wait(20)
            both.wait(20)
            raise KeyError("enough")

    thread = threading.Thread(target=second)
    thread.start()
    with moe_ep.serving(model):
        both.wait(20)
    both.wait(20)
    thread.join(20)
    assert not thread.is_alive()


def test_blocks_that_ended_well_are_served_behind_one_that_raises() -> None:
    ranks(2).run(in_blocks_of_which_the_last_raises)


def test_threads_with_blocks_of_their_own() -> None:
    alone = make_model("Qwen3Moe")
    (found, _) = ranks(2).run(in_blocks_of_threads)
    for number, tokens in enumerate(found):
        assert torch.equal(tokens, generate(alone, number))


def test_another_thread_goes_on_where_a_pass_was_interrupted() -> None:
    """As who interrupts a cell of a notebook, and runs the next one."""
    model = moe_ep.parallelize(make_model("Qwen3Moe"))

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].self_attn.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), torch.inference_mode():
        model(tokens_of(0))
    hook.remove()
    assert steps_of(model).current is None
    assert torch.equal(from_a_thread(model, 0), generate(make_model("Qwen3Moe"), 0))


def balanced_batches(rank: int, world_size: int) -> int:
    """Passes and generation with batches that are balanced by their own counts; returns the copies that were made."""

    class Copies(stages.Listener):
        found = 0

        def copied(self, layer: Any, num_copies: int, expert_bytes: int) -> None:
            self.found += num_copies

    alone = make_model("Qwen3Moe")
    always = BatchBalance(min_rows=0, copy_cost_rows=0)
    parallel = moe_ep.parallelize(copy.deepcopy(alone), backend="all_to_all", batch_balance=always)
    with stages.listening(copies := Copies()), moe_ep.serving(parallel):
        tokens = tokens_of(rank, batch=2, length=9)
        assert relative_error(parallel(tokens).logits, alone(tokens).logits) < tolerance(torch.float32)
        assert torch.equal(generate(parallel, rank), generate(alone, rank))
    return copies.found


def test_batches_of_a_model_that_are_balanced_by_their_own_counts() -> None:
    first, second = ranks(2).run(balanced_batches)
    assert first == second > 0

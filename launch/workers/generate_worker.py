"""What every worker of `moe-ep generate` does: loads its share of the model, and continues its prompts."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from jinja2 import TemplateError

import moe_ep
from moe_ep.bench.results import peak_memory
from moe_ep.checkpoint.demo import demo_checkpoint
from moe_ep.eplb.metrics import balancedness
from moe_ep.errors import ConfigError
from moe_ep.expert_map import expert_owner_table
from moe_ep.generation.engine import Completion, Generation
from moe_ep.generation.prompt_queue import Request
from moe_ep.generation.sampling import Sampling
from moe_ep.hf.divided import steps_of
from moe_ep.hf.loading import context_length, text_config
from moe_ep.hf.steps import StepCoordinator
from moe_ep.launch.cli.facts import backend_name, device_name, experts_name, versions
from moe_ep.launch.cli.generate_config import GenerateConfig, Prompt
from moe_ep.launch.cli.generate_lines import CompletionRelay
from moe_ep.launch.cli.generate_report import RankGeneration
from moe_ep.launch.cli.model_options import torch_dtype
from moe_ep.launch.gangs import progress
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.modular_kernel.backend_choice import DECODE_MAX_NUM_TOKENS

# Settings of generation_config.json that are not applied, though they change the likeliest text too, with the values
# by which they do not.
_OTHER_SETTINGS: dict[str, Any] = {
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "guidance_scale": 1,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
    "sequence_bias": {},
    "stop_strings": [],
}


def run_generate(rank_env: RankEnv, config: GenerateConfig, prompts: Sequence[Prompt]) -> RankGeneration:
    """One rank's part of the generation, in its process group.

    Raises:
        CheckpointError: the checkpoint does not hold what it says.
        ConfigError: a model that cannot be divided or decoded in slots, no tokenizer, or prompts of which the model
            can take none.
    """
    device = torch.device(rank_env.device)
    dtype = torch_dtype(config.dtype, device)
    folder = config.model if config.model is not None else demo_checkpoint()
    tokenizer, of_text = _tokenizer(folder), text_config(folder)
    requests, refused = _requests(tokenizer, of_text, rank_env, prompts)
    started = time.perf_counter()
    model = _load(config, folder, device, dtype)
    load_s = time.perf_counter() - started
    steps = steps_of(model)
    for layer in steps.layers:
        layer.counts_load = True
    relay = CompletionRelay(rank_env.rank, len(prompts), refused)
    generation = Generation(
        model,
        requests,
        max_new_tokens=config.max_new_tokens,
        num_slots=config.batch_size,
        stop_ids=_stop_ids(model, tokenizer, config.chat, config.stop),
        ends=None if config.stop is None else partial(_has_come_to, tokenizer, config.stop),
        sampling=Sampling(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, seed=config.seed),
        max_length=context_length(of_text),
        prefill_tokens=config.prefill_tokens,
        graphs=config.graphs,
        on_progress=relay.collect,
        on_completion=lambda completion: relay.leave(_told(tokenizer, completion, rank_env.rank, config.stop)),
    )
    dist.barrier()
    started = time.perf_counter()
    completions = generation.run()
    elapsed_s = time.perf_counter() - started
    if steps.eplb is not None:
        steps.eplb.finish()
        steps.end_balancing()
    progress.report("sequences", len(prompts), len(prompts))
    return RankGeneration(
        rank=rank_env.rank,
        node=platform.node(),
        device=rank_env.device,
        device_name=device_name(device),
        backends=_backends(steps, config.batch_size),
        experts_name=experts_name(steps.layers[0].modular_kernel.fused_experts),
        dtype=str(dtype).removeprefix("torch."),
        num_layers=len(steps.layers),
        num_experts=steps.layers[0].num_experts,
        model=str(folder),
        load_s=load_s,
        versions=versions() | {"transformers": transformers.__version__},
        completions=[_told(tokenizer, completion, rank_env.rank, config.stop) for completion in completions],
        not_applied=_not_applied(model.generation_config),
        refused=[told for told in refused if told["rank"] == rank_env.rank],
        step_s=asdict(generation.times),
        elapsed_s=elapsed_s,
        balancedness=_balancedness(steps),
        memory_bytes=peak_memory(device),
    )


def _requests(
    tokenizer: Any, of_text: Any, rank_env: RankEnv, prompts: Sequence[Prompt]
) -> tuple[list[Request], list[dict[str, Any]]]:
    """All requests, the same on every rank, and what is told of the prompts that the model cannot take: one that it
    cannot does not keep it from the others. ConfigError where it can take none."""
    mine: list[Request | dict[str, Any]] = []
    for index in range(rank_env.rank, len(prompts), rank_env.world_size):
        try:
            mine.append(Request(index, _token_ids(tokenizer, of_text, index, prompts[index])))
        except ConfigError as error:
            mine.append({"index": index, "finish": "refused", "error": str(error), "rank": rank_env.rank})
    by_rank: list[list[Request | dict[str, Any]]] = [[]] * rank_env.world_size
    dist.all_gather_object(by_rank, mine)
    everything = list(chain.from_iterable(by_rank))
    requests = [found for found in everything if isinstance(found, Request)]
    refused = [found for found in everything if isinstance(found, dict)]
    refused.sort(key=lambda told: told["index"])
    if len(refused) == len(prompts):
        raise ConfigError(refused[0]["error"])
    return sorted(requests, key=lambda request: request.index), refused


def _load(config: GenerateConfig, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    return moe_ep.parallelize(
        folder,
        backend=config.backend,
        quantize=config.quantize,
        eplb=config.eplb,
        num_redundant_experts=config.num_redundant_experts,
        dtype=dtype,
        device=device,
        # Decoding sends few rows, and on GPUs a backend of fixed capacity needs no host for that.
        decode_max_num_tokens=min(config.batch_size, DECODE_MAX_NUM_TOKENS) if device.type == "cuda" else None,
        on_layer=lambda done, total: progress.report("loading layers", done, total),
    )


def _tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer; ConfigError where there is none that can be read without code of its own."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f"{folder}: transformers cannot read its tokenizer: {str(error).splitlines()[0]}") from None
    # Without any of its files transformers makes an empty one of the model's kind.
    names = sorted(tokenizer.vocab_files_names.values())
    if not any((folder / name).is_file() for name in names):
        raise ConfigError(
            f"{folder}: expected a tokenizer ({' or '.join(names)}), found none; put it beside config.json"
        )
    return tokenizer


def _token_ids(tokenizer: Any, of_text: Any, index: int, prompt: Prompt) -> torch.Tensor:
    # A chat template writes special tokens itself.
    text = prompt if isinstance(prompt, str) else _conversation(tokenizer, index, prompt)
    try:
        ids = tokenizer(text, add_special_tokens=isinstance(prompt, str), verbose=False)["input_ids"]
    except (TypeError, UnicodeError) as error:  # half of a surrogate pair
        raise ConfigError(f"prompt {index} is {prompt!r} and the tokenizer does not read it: {error}") from None
    if not ids:
        raise ConfigError(f"prompt {index} is {prompt!r} and has no tokens; give it some text")
    if max(ids) >= of_text.vocab_size:
        raise ConfigError(
            f"prompt {index} has the token {max(ids)} and the model knows {of_text.vocab_size}; the tokenizer is "
            f"another model's"
        )
    most = context_length(of_text)
    if most is not None and len(ids) >= most:
        raise ConfigError(
            f"prompt {index} has {len(ids)} tokens and the model reads {most}, continuation included; shorten it"
        )
    return torch.tensor(ids)


def _conversation(tokenizer: Any, index: int, messages: Sequence[dict[str, str]]) -> str:
    """The text of a conversation up to where the model answers; the template runs in jinja's sandbox."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            f"prompt {index} is a conversation and the model's tokenizer has no chat template; give it as text, "
            f"without --chat"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except (TemplateError, ValueError, TypeError) as error:
        raise ConfigError(f"prompt {index}: the model's chat template does not take it: {error}") from None


def _stop_ids(model: Any, tokenizer: Any, chat: bool, stop: str | None) -> list[int]:
    """The tokens that end a text, as transformers' generate knows them; an answer ends with the tokenizer's own too.

    A special token may stand for `stop`: texts are decoded without it, so it would never come up in one. Only what all
    tokenizers have tells: those of mistral_common do not list the tokens that were added.
    """
    ids = model.generation_config.eos_token_id
    found = [] if ids is None else list(ids) if isinstance(ids, list) else [ids]
    own = tokenizer.eos_token_id
    if chat and own is not None:
        found.append(own)
    index = None if stop is None else tokenizer.convert_tokens_to_ids(stop)
    # A text that is no token may be given the index of the token for unknown ones.
    if index is not None and tokenizer.convert_ids_to_tokens(index) == stop:
        found += [] if tokenizer.decode([index], skip_special_tokens=True) else [index]
    return found


def _not_applied(settings: Any) -> dict[str, Any]:
    """What transformers' generate would obey of a model's settings and this one does not."""
    found = {name: getattr(settings, name, None) for name in _OTHER_SETTINGS}
    return {name: value for name, value in found.items() if value not in (None, _OTHER_SETTINGS[name])}


def _has_come_to(tokenizer: Any, stop: str, token_ids: list[int]) -> bool:
    """Whether a text ends with a token that completes `stop`."""
    # A token is a byte at least; a few more tokens, so that the first of these is whole.
    last = token_ids[-len(stop.encode()) - 4 :]
    return stop in tokenizer.decode(last, skip_special_tokens=True)


def _told(tokenizer: Any, completion: Completion, rank: int, stop: str | None) -> dict[str, Any]:
    text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    return {
        "index": completion.index,
        "text": text if stop is None else text.partition(stop)[0],
        "num_prompt_tokens": completion.num_prompt_tokens,
        "num_tokens": len(completion.token_ids),
        "finish": completion.finish,
        "rank": rank,
    }


def _backends(steps: StepCoordinator, batch_size: int) -> tuple[str, str]:
    """Names of the backends of prompts and of decoding."""
    layer = steps.layers[0]
    prefill = backend_name(layer.prepare_finalize)
    with steps.pretending(batch_size):
        return prefill, backend_name(layer.prepare_finalize)


def _balancedness(steps: StepCoordinator) -> float:
    """Of the rows that all ranks sent to each rank, over all layers and steps."""
    parallel = steps.layers[0].parallel_config
    owners = expert_owner_table(parallel.ep_size, steps.layers[0].load.numel(), parallel.expert_placement_strategy)
    loads = torch.stack([layer.load.cpu() for layer in steps.layers])
    per_rank = loads.new_zeros(len(loads), parallel.ep_size).index_add_(1, owners.long(), loads)
    dist.all_reduce(per_rank)
    return balancedness(per_rank)

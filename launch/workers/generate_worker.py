"""The worker of `moe-ep generate`: loads this rank's share of the model, and continues its prompts."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import moe_ep
from moe_ep.bench.results import device_name, peak_memory, versions
from moe_ep.checkpoint import CheckpointReader, model_spec
from moe_ep.checkpoint.demo import demo_checkpoint
from moe_ep.distributed.exchange import gather_values
from moe_ep.distributed.membership import Membership
from moe_ep.eplb.placement_file import model_checksum
from moe_ep.eplb.trace import model_name
from moe_ep.errors import ConfigError
from moe_ep.expert_map import expert_owner_table
from moe_ep.generation.decoder import Records
from moe_ep.generation.engine import Completion, Generation, Request, vocabulary_of
from moe_ep.generation.sampling import Sampling
from moe_ep.generation.tokenizer import ModelTokenizer
from moe_ep.hf.parallelized import steps_of
from moe_ep.hf.steps import StepCoordinator
from moe_ep.launch.cli.gang_options import layer_input_dtype, torch_dtype
from moe_ep.launch.cli.generate_config import GenerateConfig, PromptLine
from moe_ep.launch.cli.generate_report import CompletionRelay, RankGeneration
from moe_ep.launch.gangs import progress
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.modular_kernel.choice import DECODE_MAX_NUM_TOKENS
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS
from moe_ep.rollouts.recording import num_columns
from moe_ep.rollouts.routing_file import RoutingFile

# Settings of generation_config.json that are not applied though they change the likeliest text, each with its neutral
# value.
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


def run_generate(
    rank_env: RankEnv,
    config: GenerateConfig,
    prompts: Sequence[PromptLine],
    first: int = 0,
    membership: Membership | None = None,
) -> RankGeneration:
    """One rank's part of the generation, in its process group.

    Args:
        first: the prompt to begin with; rank 0's counts, whose node has the output of an interrupted run.
        membership: of ranks that come and go; then no rank needs another before the first step.

    Raises:
        CheckpointError: the checkpoint does not hold what it says.
        ConfigError: a model that cannot be parallelized or decoded in slots, no tokenizer, or prompts of which the
            model can take none.
    """
    device = torch.device(rank_env.device)
    dtype = torch_dtype(config.dtype, device)
    folder = config.model if config.model is not None else demo_checkpoint()
    tokenizer = ModelTokenizer(folder)
    if membership is None:
        prompts = prompts[gather_values("first", first)[0] :]
        mine = prompts[rank_env.rank :: rank_env.world_size]
        requests, refused = _together(gather_values("requests", _tokenized(tokenizer, rank_env.rank, mine)))
    else:
        prompts = prompts[first:]
        requests, refused = _together([_tokenized(tokenizer, rank_env.rank, prompts)])
    started = time.perf_counter()
    model = _load(config, folder, device, dtype, membership)
    load_s = time.perf_counter() - started
    steps = steps_of(model)
    vocabulary = vocabulary_of(model)
    requests = [replace(request, stop_ids=_producible(request.stop_ids, vocabulary)) for request in requests]
    for layer in steps.layers:
        layer.counts_load = True
    relay = CompletionRelay(rank_env.rank, len(prompts), refused, is_elastic=membership is not None)

    def leave(completion: Completion) -> None:
        line = _line_of(tokenizer, completion, rank_env.rank, config.stop)
        # Otherwise it would be lost with this rank.
        if membership is not None and completion.routing is not None:
            ids, weights = completion.routing
            line["routing"] = ids.numpy(), None if weights is None else weights.numpy()
        relay.leave(line)

    generation = Generation(
        model,
        requests,
        max_new_tokens=config.max_new_tokens,
        num_slots=config.batch_size,
        stop_ids=_producible(_stop_ids(model.generation_config, tokenizer, config.stop), vocabulary),
        ends=None if config.stop is None else partial(tokenizer.ends_with, config.stop),
        sampling=Sampling(temperature=config.temperature, top_k=config.top_k, top_p=config.top_p, seed=config.seed),
        max_length=tokenizer.context_length,
        prefill_tokens=config.prefill_tokens,
        graphs=config.graphs,
        prefill_graphs=config.prefill_graphs,
        logprobs=config.logprobs,
        records=_records(config),
        on_progress=relay.collect,
        on_completion=leave,
        membership=membership,
        on_ranks=None if steps.elastic is None else steps.elastic.serves,
    )
    if membership is None:
        dist.barrier()
    started = time.perf_counter()
    completions = generation.run()
    elapsed_s = time.perf_counter() - started
    if steps.eplb is not None:
        if membership is None:
            steps.eplb.finish()
        steps.end_balancing()
    progress.report("sequences", len(prompts), len(prompts))
    return RankGeneration(
        rank=rank_env.rank,
        node=platform.node(),
        device=rank_env.device,
        device_name=device_name(device),
        about={
            "model": str(folder),
            "num_layers": len(steps.layers),
            "num_experts": steps.layers[0].num_experts,
            "backend": _backends(steps, config.batch_size),
            "experts": EXPERTS.name_of(steps.layers[0].modular_kernel.fused_experts),
            "dtype": str(dtype).removeprefix("torch."),
            "passes": generation.how_passes_run(),
            "not_applied": _not_applied(model.generation_config),
            "versions": versions() | {"transformers": transformers.__version__},
        },
        load_s=load_s,
        completions=[_line_of(tokenizer, completion, rank_env.rank, config.stop) for completion in completions],
        refused=[
            line for line in refused if line["rank"] == rank_env.rank and (membership is None or not membership.ep_rank)
        ],
        step_s=generation.times,
        elapsed_s=elapsed_s,
        rank_loads=_rank_loads(steps),
        memory_bytes=peak_memory(device),
        routing=None if config.return_routed_experts is None else _routing(folder, steps, completions),
    )


def _tokenized(tokenizer: ModelTokenizer, rank: int, prompts: Sequence[PromptLine]) -> dict[str, Any]:
    """The requests of these prompts, and the lines of those that the model cannot take, as JSON has them."""
    requests: list[Any] = []
    refused: list[dict[str, Any]] = []
    for line in prompts:
        try:
            if line.prompt is None:
                raise ConfigError(line.error)
            ids = tokenizer.token_ids(line.prompt)
        except ConfigError as error:
            said = str(error) if line.prompt is None else f"{line.where}: {error}"
            refused.append({"index": line.index, "finish": "refused", "error": said, "rank": rank})
        else:
            ends = [] if isinstance(line.prompt, str) else tokenizer.end_ids
            requests.append([line.index, ids.tolist(), ends])
    tokenizer.close()
    return {"requests": requests, "refused": refused}


def _together(by_rank: Sequence[dict[str, Any]]) -> tuple[list[Request], list[dict[str, Any]]]:
    """All requests, the same on every rank, and the lines of the prompts that the model cannot take; ConfigError where
    it can take none."""
    everything = [
        Request(index, torch.tensor(ids), tuple(ends)) for found in by_rank for index, ids, ends in found["requests"]
    ]
    refused = [line for found in by_rank for line in found["refused"]]
    refused.sort(key=lambda line: line["index"])
    if not everything:
        raise ConfigError(refused[0]["error"])
    return sorted(everything, key=lambda request: request.index), refused


def _load(
    config: GenerateConfig, folder: Path, device: torch.device, dtype: torch.dtype, membership: Membership | None
) -> Any:
    return moe_ep.parallelize(
        folder,
        backend=config.backend,
        quantize=config.quantize,
        input_dtype=layer_input_dtype(config.input_dtype),
        batch_balance=config.batch_balance,
        batch_invariant=config.batch_invariant or None,
        eplb=config.eplb,
        num_redundant_experts=config.num_redundant_experts,
        dtype=dtype,
        device=device,
        allow_nonfinite=config.allow_nonfinite,
        # Decoding sends few rows, and on GPUs a backend of fixed capacity needs no host for that.
        decode_max_num_tokens=min(config.batch_size, DECODE_MAX_NUM_TOKENS) if device.type == "cuda" else None,
        on_layer=lambda done, total: progress.report("loading layers", done, total),
        membership=membership,
        elastic=None if membership is None else config.elastic_config(),
    )


def _stop_ids(settings: Any, tokenizer: ModelTokenizer, stop: str | None) -> list[int]:
    """The tokens that end every text: those of the model's settings, and the one that `stop` is."""
    ids = settings.eos_token_id
    ends = [] if ids is None else list(ids) if isinstance(ids, list) else [ids]
    return ends if stop is None else ends + tokenizer.special_token(stop)


def _producible(ids: Iterable[int], vocabulary: int) -> tuple[int, ...]:
    """Without the ids that the model never produces: -1 of a config that ends nothing, or tokens that only the
    tokenizer has."""
    return tuple(token for token in ids if not isinstance(token, int) or 0 <= token < vocabulary)


def _not_applied(settings: Any) -> dict[str, Any]:
    """The settings of a model that transformers' `generate` applies and this command does not."""
    found = {name: getattr(settings, name, None) for name in _OTHER_SETTINGS}
    return {name: value for name, value in found.items() if value not in (None, _OTHER_SETTINGS[name])}


def _line_of(tokenizer: ModelTokenizer, completion: Completion, rank: int, stop: str | None) -> dict[str, Any]:
    line: dict[str, Any] = {
        "index": completion.index,
        "text": tokenizer.text(completion.token_ids, stop),
        "num_prompt_tokens": completion.num_prompt_tokens,
        "num_tokens": len(completion.token_ids),
        "finish": completion.finish,
        "rank": rank,
    }
    if completion.error:
        line["error"] = completion.error
    if completion.tokens_hit:
        line["tokens_hit"] = sorted(set(completion.tokens_hit))
    if completion.logprobs:
        line["logprobs"] = [
            _token(tokenizer, index, found.chosen) | {"top": [_token(tokenizer, *best) for best in found.best]}
            for index, found in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
    return line


def _records(config: GenerateConfig) -> Records:
    if config.return_routed_experts is None:
        return "nothing"
    return "weights" if config.return_routed_weights else "ids"


def _routing(folder: Path, steps: StepCoordinator, completions: Sequence[Completion]) -> RoutingFile:
    """The routing of this rank's completions."""
    found = {done.index: done.routing for done in completions if done.routing is not None}
    with CheckpointReader(folder, allow_nonfinite=True) as reader:
        model = model_name(model_spec(reader.config, reader).family, model_checksum(reader))
    return RoutingFile(
        ids={index: routing.ids.numpy() for index, routing in found.items()},
        weights={index: routing.weights.numpy() for index, routing in found.items() if routing.weights is not None},
        num_experts=max(map(num_columns, steps.layers)),
        num_identities=max(num_columns(layer) - layer.num_experts for layer in steps.layers),
        model=model,
    )


def _token(tokenizer: ModelTokenizer, index: int, logprob: float) -> dict[str, Any]:
    return {"token_id": index, "token": tokenizer.tokenizer.decode([index]), "logprob": logprob}


def _backends(steps: StepCoordinator, batch_size: int) -> dict[str, str]:
    """Names of the backends of prompts and of decoding."""
    layer = steps.layers[0]
    prefill = ALL2ALL_BACKENDS.name_of(layer.prepare_finalize)
    with steps.pretending(batch_size):
        return {"prefill": prefill, "decode": ALL2ALL_BACKENDS.name_of(layer.prepare_finalize)}


def _rank_loads(steps: StepCoordinator) -> list[list[int]]:
    """Rows that this rank sent to each rank, by layer, over all steps."""
    parallel = steps.layers[0].parallel_config
    owners = expert_owner_table(parallel.ep_size, steps.layers[0].load.numel(), parallel.expert_placement_strategy)
    loads = torch.stack([layer.load.cpu() for layer in steps.layers])
    return loads.new_zeros(len(loads), parallel.ep_size).index_add_(1, owners.long(), loads).tolist()

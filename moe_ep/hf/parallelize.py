"""Expert parallelism for models of transformers 5: experts sharded over the ranks, everything else data-parallel.

    model = moe_ep.parallelize("Qwen3-30B-A3B", device="cuda:0")    # on every rank
    with moe_ep.serving(model):
        model.generate(**requests_of_this_rank)

Each rank holds its share of the experts and all of the rest, and has requests of its own. Every pass of the model is a
step that all ranks make together; `serving` says what a rank does that has nothing to compute.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist

from moe_ep import env
from moe_ep.arguments import usable_device
from moe_ep.checkpoint import CheckpointReader, check_experts, load_moe_layer, model_spec
from moe_ep.checkpoint.formats.layout import FLOATS
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.distributed.membership import Membership
from moe_ep.distributed.process_groups import check_member, is_initialized
from moe_ep.eplb.config import EplbConfig
from moe_ep.errors import ConfigError, check_flags, check_whole, missing_extra, one_of
from moe_ep.hf.experts import ExpertsShape, check_not_wrapped, check_one_in_a_layer, experts_shape, find_experts
from moe_ep.hf.parallelized import make_parallelized, steps_of
from moe_ep.hf.routed_experts import PREFILL_MAX_NUM_TOKENS, RoutedExperts, load_shard, make_routed_experts
from moe_ep.hf.steps import StepCoordinator
from moe_ep.layer.batch_balance import BatchBalance
from moe_ep.layer.elastic import ElasticConfig, ElasticExperts, ElasticSlots, Read
from moe_ep.layer.stack import expert_quantization, layer_quant_config
from moe_ep.modular_kernel.choice import DECODE_MAX_NUM_TOKENS
from moe_ep.registry import ALL2ALL_BACKENDS

try:
    from moe_ep.hf import loading as hf_loading
    from moe_ep.hf import registration as hf_registration
except ModuleNotFoundError as error:
    if error.name and error.name.partition(".")[0] == "transformers":
        raise missing_extra("transformers", "hf", "moe_ep.parallelize") from None
    raise

hf_registration.register()

# Names of top_k in configurations.
TOP_K_NAMES = ("num_experts_per_tok", "moe_topk", "top_k_experts")
# (layers loaded, layers)
OnLayer = Callable[[int, int], None]


def parallelize(
    model_or_path: Any,
    ep_size: int | None = None,
    backend: str = "auto",
    quantize: str = "none",
    eplb: EplbConfig | bool | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str | None = None,
    allow_nonfinite: bool = False,
    num_redundant_experts: int = 0,
    process_group: dist.ProcessGroup | None = None,
    max_num_tokens: int | None = None,
    decode_max_num_tokens: int | None = None,
    input_dtype: torch.dtype | str | None = None,
    batch_invariant: bool | None = None,
    batch_balance: str | BatchBalance = "auto",
    on_layer: OnLayer | None = None,
    membership: Membership | None = None,
    elastic: ElasticConfig | None = None,
) -> Any:
    """Shards the experts of a transformers model over the ranks; a collective call.

    From a path, no rank ever holds experts of others: the model is built without them, and each rank reads the bytes of
    its own, in any supported format. A model object is changed in place, and the memory of experts of other ranks is
    freed. The model is for inference.

    Args:
        model_or_path: a causal language model of transformers, or the folder of its checkpoint.
        ep_size: number of ranks; None for all of the process group.
        backend: a name of the dispatch registry, or "auto".
        quantize: "int4", "int8" or "fp8" quantizes plain experts on load; "none" leaves them as they are.
        eplb: balances the experts while the model runs, as `EplbConfig` says; True for its defaults.
        dtype: from a path: of activations and weights that are not quantized; None for the config's.
        device: where the model goes; None leaves it where it is, on the CPU from a path.
        attn_implementation: from a path, of transformers; None for its choice.
        allow_nonfinite: from a path: whether weights may hold NaN or infinity; they are refused otherwise.
        num_redundant_experts: physical experts beyond the model's, replicas for `eplb`.
        process_group: the EP ranks; None for the default group, or this process alone.
        max_num_tokens: capacity of a fixed-capacity backend, tokens per rank of one pass; larger batches take several.
            None lets "auto" choose one without, and is 256 for one that is named.
        decode_max_num_tokens: with it, steps of at most as many tokens on every rank use a backend of that capacity
            (`RoutedExperts`).
        input_dtype: the rows that quantized experts compute with, as `FusedMoE` takes it.
        batch_invariant: the experts give a token the same bits in every batch, and so does all of the model in
            `moe-ep generate` and `Generation` (docs/rollouts.md); None takes it from MOE_EP_BATCH_INVARIANT.
        batch_balance: as `FusedMoE` takes it; off where ranks come and go.
        on_layer: called with (layers loaded, layers) as loading goes on.
        membership: of a gang whose ranks come and go (docs/elastic.md). The model is loaded without any other rank, and
            runs from `membership.settle()` on, which is the collective call then.
        elastic: how many slots its ranks have, with `membership`.

    Returns:
        The model, in evaluation mode.

    Raises:
        ImportError: transformers is not installed.
        ConfigError: a model without experts that moe_ep can take, or settings that do not fit together.
        CheckpointError: a checkpoint that does not hold what it says.
        TypeError: neither a model nor a path, or an argument of another type.
        ValueError: sizes that are not divisible, unknown names.
    """
    ALL2ALL_BACKENDS.check(backend, also=("auto",))
    check_flags(allow_nonfinite=allow_nonfinite)
    if not isinstance(eplb, (EplbConfig, bool, NoneType)):
        raise TypeError(f"eplb is {eplb!r}; it must be an EplbConfig, True, False or None")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is {dtype!r}; it must be a torch.dtype, as torch.bfloat16, or None for the config's")
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(one_of("dtype", dtype, list(map(str, FLOATS))))
    if not isinstance(attn_implementation, (str, dict, NoneType)):  # a dict has names by parts of the model
        raise TypeError(
            f"attn_implementation is {attn_implementation!r}; it must be a name that transformers knows, as 'sdpa', or "
            f"None for its choice"
        )
    if not isinstance(membership, (Membership, NoneType)):
        raise TypeError(f"membership is {membership!r}; it must be a moe_ep.distributed.membership.Membership, or None")
    if not isinstance(elastic, (ElasticConfig, NoneType)):
        raise TypeError(f"elastic is {elastic!r}; it must be an ElasticConfig, or None for its defaults")
    if on_layer is not None and not callable(on_layer):
        raise TypeError(f"on_layer is {on_layer!r}; it must be a function of (layers loaded, layers)")
    on_layer = on_layer or (lambda done, total: None)
    device = None if device is None else usable_device(device)
    if max_num_tokens is None:
        named = backend != "auto" or env.ALL2ALL_BACKEND.get() != "auto"
        max_num_tokens = DECODE_MAX_NUM_TOKENS if named else PREFILL_MAX_NUM_TOKENS
    if membership is None:
        parallel, group = _ranks(ep_size, backend, process_group)
        slots = None
    else:
        if process_group is not None or ep_size is not None:
            raise ConfigError("membership is given, whose ranks are the model's; leave out ep_size and process_group")
        slots = ElasticSlots(membership, elastic or ElasticConfig(), num_redundant_experts, fills=bool(eplb))
        parallel, group = slots.parallel_config(backend), None
    steps = StepCoordinator(group)
    options: dict[str, Any] = {
        "parallel_config": parallel,
        "process_group": group,
        "max_num_tokens": max_num_tokens,
        "coordinator": steps,
        "decode_max_num_tokens": decode_max_num_tokens,
        "decode_backend": backend,
        "input_dtype": input_dtype,
        "enable_eplb": bool(eplb),
        "num_redundant_experts": num_redundant_experts,
        "batch_invariant": batch_invariant,
        "batch_balance": batch_balance if membership is None else "off",
        "slots": slots,
    }
    with torch.no_grad():
        if isinstance(model_or_path, (str, os.PathLike)):
            with CheckpointReader(Path(model_or_path), allow_nonfinite) as reader:
                model = _from_checkpoint(reader, dtype, device, attn_implementation, quantize, options, on_layer)
        else:
            for name, value in {"dtype": dtype, "attn_implementation": attn_implementation}.items():
                if value is not None:
                    raise ConfigError(
                        f"{name} is {value} and model_or_path a {type(model_or_path).__name__}, which has its own; "
                        f"give the model that before, or pass the folder of its checkpoint"
                    )
            model = _from_model(model_or_path, device, quantize, options, on_layer)
    model.requires_grad_(False).eval()
    decoder = make_parallelized(model, steps)
    balance = partial(_balance, steps, eplb if isinstance(eplb, EplbConfig) else None)
    if membership is not None:
        membership.follow(lambda membership: steps.regroup(membership.group))
        read = _reading_again(model_or_path, allow_nonfinite)
        when_uncovered = (elastic or ElasticConfig()).when_uncovered
        steps.elastic = ElasticExperts(membership, steps.layers, read, when_uncovered=when_uncovered)
        if eplb:
            membership.follow(lambda membership: balance())
            steps.elastic.on_cover(balance)
    elif eplb:
        balance()
    # The manager keeps the layers, and these the steps: break the cycle when the model is dropped.
    weakref.finalize(decoder, setattr, steps, "eplb", None).atexit = False
    return model


def _balance(steps: StepCoordinator, config: EplbConfig | None) -> None:
    """Begins to balance the model's experts, anew where its ranks have changed."""
    from moe_ep.eplb.manager import EPLBManager

    steps.end_balancing()
    if steps.elastic is None or steps.elastic.skipping is None:  # experts that are being read cannot move
        steps.eplb = EPLBManager(steps.layers, config)


def _reading_again(source: Any, allow_nonfinite: bool) -> Read | None:
    """How ranks that are left read the experts of one that is lost."""
    if not isinstance(source, (str, os.PathLike)):
        return None
    reader = CheckpointReader(Path(source), allow_nonfinite)
    spec = model_spec(reader.config, reader)

    def read(number: int, layer: RoutedExperts, experts: Collection[int]) -> int:
        before = reader.bytes_read
        load_moe_layer(reader, spec, layer.layer_index, layer, experts)
        return reader.bytes_read - before

    return read


def serve(model: Any) -> int:
    """Computes this rank's experts for the other ranks' tokens until every rank has called it; thus also a barrier.

    It serves the passes of all models that are parallelized over the same ranks.

    Returns:
        The steps that were served.

    Raises:
        ValueError: a model that `parallelize` did not make.
    """
    return steps_of(model).serve()


@contextmanager
def serving(model: Any) -> Iterator[None]:
    """Runs this rank's requests in the block, and serves the others' from its end until they are through too.

    In the block a rank calls the model as often as it likes, or never. Each call is a step in which every rank takes
    part: with a pass of its own, in its own block, or without tokens, behind it. A rank that does neither for longer
    than MOE_EP_DISPATCH_TIMEOUT_S holds up the others until they fail. An error in the block is raised at once. Several
    threads of a rank may have a block each: the last one to end serves for all, also where it raises.
    """
    steps = steps_of(model)
    try:
        with steps.scheduler.requests():
            yield
    except Exception as error:
        if steps.scheduler.is_owed():
            try:
                steps.serve_behind_requests()
            except Exception as another:
                error.add_note(f"after that this rank could not serve the other ranks: {another}")
        raise
    steps.serve_behind_requests()


def _ranks(
    ep_size: int | None, backend: str, process_group: dist.ProcessGroup | None
) -> tuple[FusedMoEParallelConfig, dist.ProcessGroup | None]:
    check_member(process_group)
    group = process_group or (dist.group.WORLD if is_initialized() else None)
    if ep_size is not None:
        check_whole(ep_size=ep_size)
    num_ranks = 1 if group is None else dist.get_world_size(group)
    ep_size = num_ranks if ep_size is None else ep_size
    if ep_size not in (1, num_ranks):
        raise ValueError(
            f"ep_size is {ep_size} and the process group has {num_ranks} ranks; leave it out, or pass the group of "
            f"exactly those ranks as process_group"
        )
    group = group if ep_size > 1 else None
    rank = 0 if group is None else dist.get_rank(group)
    return FusedMoEParallelConfig.make(ep_size=ep_size, rank=rank, world_size=ep_size, all2all_backend=backend), group


def _from_checkpoint(
    reader: CheckpointReader,
    dtype: torch.dtype | None,
    device: torch.device | None,
    attn_implementation: str | None,
    quantize: str,
    options: dict[str, Any],
    on_layer: OnLayer,
) -> Any:
    spec = model_spec(reader.config, reader)
    check_experts(reader, spec)
    quantization = expert_quantization(reader.config, quantize)
    device = device or torch.device("cpu")
    model, shapes = hf_loading.load_without_experts(reader, dtype, attn_implementation, device)
    for count, shape in enumerate(shapes):
        on_layer(count, len(shapes))
        quant_config = layer_quant_config(quantization, spec, shape.layer_index, reader)
        shape = hf_loading.as_trained(model, shape, spec)
        layer = make_routed_experts(shape, _top_k(model), device=device, quant_config=quant_config, **options)
        layer.layer_index = shape.layer_index
        load_moe_layer(reader, spec, shape.layer_index, layer)
        _put(model, shape, layer, options["coordinator"])
    on_layer(len(shapes), len(shapes))
    options["coordinator"].source = spec, reader.config
    return model


def _from_model(
    model: Any, device: torch.device | str | None, quantize: str, options: dict[str, Any], on_layer: OnLayer
) -> Any:
    kind = type(model).__name__
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model_or_path is a {kind}; it must be a model of transformers or a checkpoint's folder")
    found = list(find_experts(model))
    if not found and any(isinstance(part, RoutedExperts) for part in model.modules()):
        raise ConfigError(f"the experts of this {kind} are sharded already; use it as it is")
    if type(model).forward is torch.nn.Module.forward:
        raise ConfigError(f"model is a {kind}, which makes no passes itself; pass the part of it that does")
    if not found:
        way_out = "pass one"
        if getattr(model, "hf_quantizer", None) is not None:
            way_out = "transformers has quantized it, so pass the folder of its checkpoint"
        raise ConfigError(f"model is a {kind} and has no experts module of transformers 5; {way_out}")
    if not isinstance(getattr(model, "base_model", None), torch.nn.Module):
        raise ConfigError(
            f"model is a {kind}, which is no model of transformers; pass the one that it is a part of, or the one in it"
        )
    check_not_wrapped(model, (name for name, _ in found))
    check_one_in_a_layer(name for name, _ in found)
    if any(param.is_meta for _, module in found for param in module.parameters()):
        raise ConfigError("model is on the meta device; pass the folder of its checkpoint in its place")
    # All of them before the first one is sharded, so that a model that is refused is not changed.
    shapes = [experts_shape(name, module) for name, module in found]
    quant_config, top_k = expert_quantization({}, quantize), _top_k(model)
    for count, (shape, (_, module)) in enumerate(zip(shapes, found, strict=True)):
        on_layer(count, len(found))
        where: Any = device or module.down_proj.device
        layer = make_routed_experts(shape, top_k, device=where, quant_config=quant_config, **options)
        load_shard(layer, module)
        _put(model, shape, layer, options["coordinator"])
    on_layer(len(found), len(found))
    return model if device is None else model.to(device)


def _put(model: Any, shape: ExpertsShape, layer: RoutedExperts, steps: StepCoordinator) -> None:
    model.set_submodule(shape.name, layer)
    steps.add(layer)


def configured_top_k(model: Any) -> int | None:
    """Experts per token by the model's config; None where it has no one number, and for a wrapper without a config."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in TOP_K_NAMES:
        found = getattr(config, name, None)
        # Hunyuan has one for each layer.
        numbers = set(found) if isinstance(found, list) else {found}
        if len(numbers) == 1 and isinstance(number := numbers.pop(), int):
            return number
    return None


def _top_k(model: Any) -> int:
    if (found := configured_top_k(model)) is not None:
        return found
    config = model.config.get_text_config()
    raise ConfigError(
        f"the {type(config).__name__} of the model has one number in none of {', '.join(TOP_K_NAMES)}; set one of them"
    )

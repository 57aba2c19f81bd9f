"""What every worker of `moe-ep run` does: loads its experts, runs the steps, and accounts for them."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from moe_ep.bench.results import peak_memory
from moe_ep.checkpoint import CheckpointReader, MoEModelSpec, load_moe_layer, model_spec
from moe_ep.checkpoint.demo import demo_checkpoint
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.distributed.exchange import gather_tensors, gather_texts, gather_values
from moe_ep.distributed.membership import FinishedError, Membership
from moe_ep.eplb.placement_file import model_checksum
from moe_ep.eplb.trace import model_name
from moe_ep.errors import ConfigError
from moe_ep.launch.cli.gang_options import layer_input_dtype, torch_dtype
from moe_ep.launch.cli.report import RankReport, StepReport
from moe_ep.launch.cli.run_config import RunConfig
from moe_ep.launch.gangs import progress
from moe_ep.launch.gangs.gang import ignore
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.launch.workers import verify
from moe_ep.launch.workers.balancing import Balancing
from moe_ep.launch.workers.facts import backend_name, device_name, experts_name, versions
from moe_ep.launch.workers.inputs import RoutingSource, TokenSource
from moe_ep.launch.workers.steps import MeasuredSteps
from moe_ep.layer import FusedMoE
from moe_ep.layer.elastic import ElasticExperts, ElasticSlots
from moe_ep.layer.stack import MoEBlock, MoEStack
from moe_ep.modular_kernel.backend_choice import DECODE_MAX_NUM_TOKENS
from moe_ep.observability.metrics import MetricsSink, PrometheusSink, RaySink, Sinks
from moe_ep.observability.monitor import LayerMonitor
from moe_ep.observability.trace import trace_to

_WARM_UP_STEPS = {"cpu": 1, "cuda": 3}


def run_worker(
    rank_env: RankEnv,
    config: RunConfig,
    on_step: Callable[[StepReport], None] = progress.hand_over,
    membership: Membership | None = None,
) -> RankReport:
    """The main job on one rank, in its process group.

    Args:
        on_step: is given the account of each measured step, of all ranks; by default it goes to the driver.
        membership: of ranks that come and go; they go on with their own tokens where others are lost.

    Raises:
        CheckpointError: the checkpoint does not hold what it says.
        ValueError: settings that do not fit the model.
    """
    device = torch.device(rank_env.device)
    dtype = torch_dtype(config.dtype, device)
    with CheckpointReader(_model(config), config.allow_nonfinite) as reader, torch.inference_mode():
        spec = model_spec(reader.config, reader)
        started = time.perf_counter()
        stack = _load(config, rank_env, reader, spec, dtype, device, membership)
        load_s = time.perf_counter() - started
        elastic = None if membership is None else _follow(membership, reader, spec, stack)
        report = _new_report(config, rank_env, reader, spec, stack, dtype, load_s)
        report.experts = _experts_held(stack)
        source = TokenSource(config, reader, spec, rank_env.rank, rank_env.world_size)
        routing = RoutingSource(config, spec, report.model["name"], rank_env.world_size)
        with observing(
            rank_env, metrics_port=config.metrics_port, metrics_host=config.metrics_host, trace=config.trace
        ) as monitor:
            listener = ignore if monitor is None else monitor.on_eplb_event
            balancing = Balancing(config, rank_env, stack, reader, listener) if config.eplb else None
            steps = MeasuredSteps(
                stack,
                source,
                routing,
                balancing,
                report,
                rank_env,
                dtype=dtype,
                on_step=on_step,
                keep_choices=config.record_routing is not None,
                keep_weights=config.record_routed_weights,
            )
            with closing(steps):
                if membership is None or elastic is None:
                    drive(config, steps, balancing, monitor, device, report)
                else:
                    verify_all = partial(_verify_own, config, stack, steps, routing, report, reader, spec)
                    _drive_with(membership, elastic, config, steps, monitor, report, verify_all)
            if balancing is not None:
                report.eplb = balancing.close()
                if config.save_placement is not None and rank_env.rank == 0:
                    report.placement = balancing.placement()
        report.experts = _experts_held(stack)
        report.memory_bytes = peak_memory(device)
        progress.report("steps", config.steps, config.steps)
        if membership is None:
            _verify_own(config, stack, steps, routing, report, reader, spec)
    return report


def _follow(membership: Membership, reader: CheckpointReader, spec: MoEModelSpec, stack: MoEStack) -> ElasticExperts:
    """Has the stack follow the ranks, and meets them for the first time."""

    def read(number: int, layer: FusedMoE, experts: Collection[int]) -> int:
        before = reader.bytes_read
        load_moe_layer(reader, spec, stack.layers()[number].layer_index, layer, experts)
        return reader.bytes_read - before

    elastic = ElasticExperts(membership, [block.moe for block in stack.layers()], read)
    membership.settle()
    return elastic


def _drive_with(
    membership: Membership,
    elastic: ElasticExperts,
    config: RunConfig,
    steps: MeasuredSteps,
    monitor: LayerMonitor | None,
    report: RankReport,
    verify_all: Callable[[], None],
) -> None:
    """The steps and their verification where ranks come and go: what a change interrupts is made again."""
    device, next_step = membership.device, 0

    def meet(membership: Membership) -> None:
        nonlocal next_step
        steps.close()
        steps.forget_load()
        # A rank may have ended the step that others did not.
        next_step = max(gather_values("step", next_step)) if membership.ep_size > 1 else next_step

    membership.follow(meet)
    error: Exception | None = None
    before: set[int] = set()
    while True:
        try:
            with record_function("moe_ep_recovery") if error is not None else nullcontext():
                membership.settle(error)
            for step in range(-_WARM_UP_STEPS[device.type], 0):
                steps.warm_up(max(step + config.steps, 0))
            steps.forget_load()
            if monitor is not None and error is None:
                monitor.start()
            steps.capture(False if config.trace is not None else config.graphs)
            accounts = _of_all_ranks(report)
            if membership.ep_rank == 0:
                progress.hand_over(accounts)
            took = elastic.recovery.to_dict() | {"serving_at": time.time()}
            membership.log.report(membership.epoch, membership.rank, took)
            if monitor is not None:
                lost, before = before - set(membership.ranks), set(membership.ranks)
                monitor.on_ranks(membership.ep_size, len(lost), time.time() - membership.epoch.decided_at)
            while next_step < config.steps:
                membership.check()
                progress.report("steps", next_step, config.steps)
                steps.run(next_step, "")
                next_step += 1
                if monitor is not None:
                    monitor.end_step(replayed=report.graphs)
            verify_all()
            gather_texts("the end")
            membership.finish()
        except FinishedError:
            return
        except Exception as caught:
            error = caught
        else:
            return


def _verify_own(
    config: RunConfig,
    stack: MoEStack,
    steps: MeasuredSteps,
    routing: RoutingSource,
    report: RankReport,
    reader: CheckpointReader,
    spec: MoEModelSpec,
) -> None:
    if config.verify:
        report.errors.clear()
        _verify(stack, *steps.inputs(0), routing, report, reader, spec)


def drive(
    config: RunConfig,
    steps: MeasuredSteps,
    balancing: Balancing | None,
    monitor: LayerMonitor | None,
    device: torch.device,
    report: RankReport,
) -> None:
    """The warm-up and all measured steps, which alone the monitor is told of."""
    for step in range(-_WARM_UP_STEPS[device.type], 0):
        steps.warm_up(max(step + config.steps, 0))
    if monitor is not None:
        monitor.start()
    steps.capture(False if config.trace is not None else config.graphs)
    # For what is shown of a run that does not get to its end.
    progress.hand_over(_of_all_ranks(report))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    phases = repeat("", config.steps) if balancing is None else balancing.phases()
    for step, phase in enumerate(phases):
        progress.report("steps", min(step, config.steps), config.steps)
        steps.run(step, phase)
        if monitor is not None:
            monitor.end_step(replayed=report.graphs)


def _model(config: RunConfig) -> Path:
    """The checkpoint; the demo one is made here where this node does not have it yet."""
    return config.model if config.model is not None else demo_checkpoint()


def _load(
    config: RunConfig,
    rank_env: RankEnv,
    reader: CheckpointReader,
    spec: MoEModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    membership: Membership | None,
) -> MoEStack:
    most_tokens = max(config.num_tokens(rank) for rank in range(rank_env.world_size))
    slots = None if membership is None else ElasticSlots(membership, config.elastic_config())
    parallel = FusedMoEParallelConfig.make(
        ep_size=rank_env.world_size,
        rank=rank_env.rank,
        world_size=rank_env.world_size,
        all2all_backend=config.backend,
    )
    return MoEStack(
        reader,
        spec,
        parallel if slots is None else slots.parallel_config(config.backend),
        slots=slots,
        dtype=dtype,
        device=device,
        quantize=config.quantize,
        input_dtype=layer_input_dtype(config.input_dtype),
        batch_balance=config.batch_balance,
        # "auto" chooses by the capacity; a backend with a fixed one takes larger batches in several passes.
        num_redundant_experts=config.redundant_experts(spec.num_experts, rank_env.world_size),
        max_num_tokens=most_tokens if config.backend == "auto" else min(most_tokens, DECODE_MAX_NUM_TOKENS),
        on_layer=lambda done, total: progress.report("loading layers", done, total),
    )


def _verify(
    stack: MoEStack,
    x: torch.Tensor,
    logits: list[torch.Tensor] | None,
    routing: RoutingSource,
    report: RankReport,
    reader: CheckpointReader,
    spec: MoEModelSpec,
) -> None:
    """Runs the first step once more and compares each layer's output with the reference on the very same inputs.

    Layers are dealt out to the ranks, so that each expert is read once; the rank of a layer checks everybody's tokens.
    """
    passes: list[tuple[torch.Tensor, torch.Tensor]] = []
    own, size = dist.get_rank(), dist.get_world_size()
    stack(x, lambda layer, hidden_states, output: passes.append((hidden_states, output.clone())), logits)
    mine: list[tuple[int, MoEBlock, list[Any]]] = []
    for position, (block, observed) in enumerate(zip(stack.layers(), passes, strict=True)):
        gathered = [_rows_of_all_ranks(tensor) for tensor in observed]
        if own == position % size:
            mine.append((position, block, list(zip(*gathered, strict=True))))
    for count, (position, block, gathered) in enumerate(mine):
        progress.report("verifying layers", count, len(mine))
        layer = block.layer_index
        online = getattr(block.moe.quant_method, "as_quantized", None)
        # By what matrices were quantized to, and, where --quantize did that, by those on disk.
        for errors, as_quantized in ((report.errors, online), (report.errors_of_quantizing, None))[: 1 + bool(online)]:
            # Each rank's tokens by themselves: router logits then have the very bits they had there.
            outputs = [
                verify.reference_moe(
                    reader,
                    spec,
                    layer,
                    hidden_states.to(x.device),
                    as_quantized,
                    None if logits is None else routing.layer_logits(position, 0, rank).to(x.device),
                )
                for rank, (hidden_states, _) in enumerate(gathered)
            ]
            computed = torch.cat([output for _, output in gathered])
            errors[layer] = verify.max_relative_error(computed, torch.cat(outputs).cpu())
    progress.report("verifying layers", len(mine), len(mine))


def _of_all_ranks(report: RankReport) -> list[dict[str, Any]]:
    """The accounts of all ranks before the first step, of plain values, in rank order."""
    text = bytearray(json.dumps(asdict(report)).encode())
    sizes = gather_tensors(torch.tensor([len(text)]))
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(text, dtype=torch.uint8)
    gathered = gather_tensors(padded)
    texts = (bytes(found[: int(size)].tolist()) for found, size in zip(gathered, sizes, strict=True))
    return [json.loads(found) for found in texts]


def _rows_of_all_ranks(rows: torch.Tensor) -> list[torch.Tensor]:
    """The rows of every rank on the host, by rank; their number may differ."""
    counts = [int(text) for text in gather_texts("rows", str(len(rows)))]
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    return [part[:count].cpu() for part, count in zip(gather_tensors(padded), counts, strict=True)]


def _experts_held(stack: MoEStack) -> list[list[int]]:
    """For each layer, the routed experts that this rank holds now."""
    return [sorted({expert for expert in block.moe.slots.local_experts if expert >= 0}) for block in stack.layers()]


def _new_report(
    config: RunConfig,
    rank_env: RankEnv,
    reader: CheckpointReader,
    spec: MoEModelSpec,
    stack: MoEStack,
    dtype: torch.dtype,
    load_s: float,
) -> RankReport:
    layer = stack.layers()[0].moe
    device = torch.device(rank_env.device)
    quantization = reader.config.get("quantization_config") or {}
    return RankReport(
        rank=rank_env.rank,
        node=platform.node(),
        device=rank_env.device,
        device_name=device_name(device),
        num_tokens=config.num_tokens(rank_env.rank),
        backend=backend_name(layer.prepare_finalize),
        experts_name=experts_name(layer.modular_kernel.fused_experts),
        load_s=load_s,
        bytes_read=reader.bytes_read,
        versions=versions(),
        model={
            "path": str(reader.directory),
            "name": model_name(spec.family, model_checksum(reader)),
            "family": spec.family,
            "moe_layers": list(spec.router_layers),
            "num_experts": spec.num_experts,
            "num_identities": spec.routing.zero_expert_num,
            "top_k": spec.top_k,
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.moe_intermediate_size,
            "quantization": quantization.get("quant_method", config.quantize),
        },
        dtype=str(dtype).removeprefix("torch."),
        tolerance=max(verify.tolerance(dtype, block.moe.rounds_rows_to) for block in stack.layers()),
        rows=list(dict.fromkeys(str(block.moe.input_rows) for block in stack.layers())),
    )


@contextmanager
def observing(
    rank_env: RankEnv, *, metrics_port: int | None, metrics_host: str, trace: Path | None
) -> Iterator[LayerMonitor | None]:
    """Serves metrics at metrics_port + local rank, and writes a trace of what happens inside the block.

    Yields:
        The monitor to start and to tell of every step, where metrics were asked for.

    Raises:
        ConfigError: the port is taken.
    """
    with ExitStack() as stack:
        monitor = None
        if metrics_port is not None:
            sink = _sink(rank_env, metrics_port + rank_env.local_rank, metrics_host)
            monitor = LayerMonitor(sink, rank=rank_env.rank, device=rank_env.device)
            stack.push(monitor)
        if trace is not None:
            # The profiler's library writes lines of its own to stderr otherwise.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            stack.enter_context(trace_to(trace, rank=rank_env.rank))
        yield monitor


def _sink(rank_env: RankEnv, port: int, host: str) -> MetricsSink:
    try:
        endpoint = PrometheusSink(port, host)
    except OSError as error:
        raise ConfigError(
            f"--metrics-host and --metrics-port give rank {rank_env.rank} {host}:{port}, which it cannot listen at "
            f"({error.strerror}); choose an address of this machine, and a range of ports that is free"
        ) from None
    return Sinks(endpoint, RaySink()) if rank_env.source == "ray" else endpoint

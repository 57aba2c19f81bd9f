"""The worker of `moe-ep run`: loads its experts, runs and measures the steps, and verifies the layers."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_ep.bench.results import device_name, peak_memory, versions
from moe_ep.checkpoint import CheckpointReader, load_moe_layer, model_spec
from moe_ep.checkpoint.demo import demo_checkpoint
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.distributed.exchange import gather_tensors, gather_texts, gather_values
from moe_ep.distributed.membership import Membership
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
from moe_ep.launch.workers.inputs import RoutingSource, TokenSource
from moe_ep.launch.workers.steps import Balancing, MeasuredSteps
from moe_ep.layer import FusedMoE
from moe_ep.layer.elastic import ElasticExperts, ElasticSlots
from moe_ep.layer.stack import MoEBlock, MoEStack
from moe_ep.modular_kernel.choice import DECODE_MAX_NUM_TOKENS
from moe_ep.observability.metrics import MetricsSink, PrometheusSink, RaySink, Sinks
from moe_ep.observability.monitor import LayerMonitor
from moe_ep.observability.trace import trace_to
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS

_WARM_UP_STEPS = {"cpu": 1, "cuda": 3}
# How often a run that has no steps left looks whether lost experts have been read.
_COVER_POLL_S = 0.02


def run_worker(
    rank_env: RankEnv,
    config: RunConfig,
    on_step: Callable[[StepReport], None] = progress.hand_over,
    membership: Membership | None = None,
) -> RankReport:
    """Runs, measures and verifies this rank's part of a run, in its process group.

    Args:
        on_step: called with the account of each measured step, of all ranks; by default it goes to the driver.
        membership: of ranks that join and leave. The others go on with their own tokens when a rank is lost.

    Raises:
        CheckpointError: the checkpoint does not match its own config.
        ValueError: settings that do not fit the model.
    """
    directory = config.model if config.model is not None else demo_checkpoint()
    with CheckpointReader(directory, config.allow_nonfinite) as reader, torch.inference_mode():
        run = Run(rank_env, config, reader, membership)
        report, stack = run.report, run.stack
        source = TokenSource(config, reader, run.spec, rank_env.rank, rank_env.world_size)
        with observing(
            rank_env, metrics_port=config.metrics_port, metrics_host=config.metrics_host, trace=config.trace
        ) as monitor:
            listener = ignore if monitor is None else monitor.on_eplb_event

            def balance() -> Balancing | None:
                return Balancing(config, rank_env, stack, reader, listener) if config.eplb else None

            steps = MeasuredSteps(
                stack, source, run.routing, report, rank_env,
                elastic=run.elastic, dtype=run.dtype, on_step=on_step,
                keep_choices=config.record_routing is not None,
                keep_weights=config.record_routed_weights,
            )  # fmt: skip
            with closing(steps):
                if membership is None:
                    steps.balancing = balance()
                    drive(run, steps, monitor)
                else:
                    _drive_elastic(run, membership, steps, balance, monitor)
            if steps.balancing is not None:
                report.eplb = steps.balancing.close()
                is_first = (rank_env.rank if membership is None else membership.ep_rank) == 0
                if config.save_placement is not None and is_first:
                    report.placement = steps.balancing.placement()
        report.experts = _experts_held(stack)
        report.memory_bytes = peak_memory(run.device)
        progress.report("steps", config.steps, config.steps)
        if membership is None:
            run.verify(steps)
    return report


class Run:
    """One rank's layers, its report, and the reference that verifies them."""

    def __init__(
        self, rank_env: RankEnv, config: RunConfig, reader: CheckpointReader, membership: Membership | None
    ) -> None:
        self.rank_env, self.config, self.reader, self._membership = rank_env, config, reader, membership
        self.device = torch.device(rank_env.device)
        self.dtype = torch_dtype(config.dtype, self.device)
        self.spec = model_spec(reader.config, reader)
        started = time.perf_counter()
        self.stack = self._load()
        load_s = time.perf_counter() - started
        self.elastic = None if membership is None else self._follow(membership)
        self.report = self._new_report(load_s)
        self.routing = RoutingSource(config, self.spec, self.report.model["name"], rank_env.world_size)

    def _load(self) -> MoEStack:
        config, world_size, membership = self.config, self.rank_env.world_size, self._membership
        most_tokens = max(config.num_tokens(rank) for rank in range(world_size))
        first_size = world_size if membership is None else len(membership.first_ranks)
        num_redundant = config.redundant_experts(self.spec.num_experts, first_size)
        slots = None
        if membership is not None:
            slots = ElasticSlots(membership, config.elastic_config(), num_redundant or 0, fills=config.eplb)
        parallel = FusedMoEParallelConfig.make(
            ep_size=world_size, rank=self.rank_env.rank, world_size=world_size, all2all_backend=config.backend
        )
        return MoEStack(
            self.reader,
            self.spec,
            parallel if slots is None else slots.parallel_config(config.backend),
            slots=slots,
            dtype=self.dtype,
            device=self.device,
            quantize=config.quantize,
            input_dtype=layer_input_dtype(config.input_dtype),
            batch_balance=config.batch_balance,
            # "auto" chooses by the capacity. A backend of fixed capacity takes larger batches in several passes.
            num_redundant_experts=num_redundant,
            max_num_tokens=most_tokens if config.backend == "auto" else min(most_tokens, DECODE_MAX_NUM_TOKENS),
            on_layer=lambda done, total: progress.report("loading layers", done, total),
        )

    def _follow(self, membership: Membership) -> ElasticExperts:
        """Makes the stack follow changes of the ranks."""

        def read(number: int, layer: FusedMoE, experts: Collection[int]) -> int:
            before = self.reader.bytes_read
            load_moe_layer(self.reader, self.spec, self.stack.layers()[number].layer_index, layer, experts)
            return self.reader.bytes_read - before

        layers = [block.moe for block in self.stack.layers()]
        return ElasticExperts(membership, layers, read, when_uncovered=self.config.when_uncovered)

    def _new_report(self, load_s: float) -> RankReport:
        spec, reader = self.spec, self.reader
        quantization = reader.config.get("quantization_config") or {}
        return RankReport(
            rank=self.rank_env.rank,
            node=platform.node(),
            device=self.rank_env.device,
            device_name=device_name(self.device),
            num_tokens=self.config.num_tokens(self.rank_env.rank),
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
                "quantization": quantization.get("quant_method", self.config.quantize),
            },
            dtype=str(self.dtype).removeprefix("torch."),
            experts=_experts_held(self.stack),
        )

    def all_reports(self) -> list[dict[str, Any]]:
        """The reports of all ranks as plain values, in rank order; a collective step, behind a pass, which has made the
        layers' backends."""
        layers = [block.moe for block in self.stack.layers()]
        self.report.backend = ALL2ALL_BACKENDS.name_of(layers[0].prepare_finalize)
        self.report.experts_name = EXPERTS.name_of(layers[0].modular_kernel.fused_experts)
        self.report.tolerance = max(verify.tolerance(self.dtype, layer.rounds_rows_to) for layer in layers)
        self.report.rows = list(dict.fromkeys(str(layer.input_rows) for layer in layers))
        return gather_values("reports", asdict(self.report))

    def warm_up(self, steps: MeasuredSteps) -> None:
        """Passes that are not measured."""
        for step in range(-_WARM_UP_STEPS[self.device.type], 0):
            steps.warm_up(max(step + self.config.steps, 0))

    def capture(self, steps: MeasuredSteps) -> None:
        """Captures the measured steps in a CUDA graph if that is asked for or possible. A trace shows eager steps, and
        steps that skip experts tell the host which tokens do."""
        is_eager = self.config.trace is not None or (self.elastic is not None and self.elastic.skipping is not None)
        steps.capture(False if is_eager else self.config.graphs)

    def verify(self, steps: MeasuredSteps) -> None:
        """Runs the first step once more and compares each layer's output with the reference on the very same inputs.

        Layers are dealt out to the ranks, so that each expert is read once; the rank of a layer checks the tokens of
        all ranks.
        """
        if not self.config.verify:
            return
        report = self.report
        report.errors.clear()
        x, logits = steps.inputs(0)
        passes: list[tuple[torch.Tensor, torch.Tensor]] = []
        own, size = dist.get_rank(), dist.get_world_size()
        ranks = range(size) if self._membership is None else self._membership.ranks
        self.stack(x, lambda layer, hidden_states, output: passes.append((hidden_states, output.clone())), logits)
        mine: list[tuple[int, MoEBlock, list[Any]]] = []
        for position, (block, observed) in enumerate(zip(self.stack.layers(), passes, strict=True)):
            gathered = [_rows_of_all_ranks(tensor) for tensor in observed]
            if own == position % size:
                mine.append((position, block, list(zip(*gathered, strict=True))))
        for count, (position, block, gathered) in enumerate(mine):
            progress.report("verifying layers", count, len(mine))
            online = getattr(block.moe.quant_method, "as_quantized", None)
            # Against the values that weights were quantized to and, if --quantize did that, against those on disk.
            for errors, as_quantized in ((report.errors, online), (report.errors_of_quantizing, None))[
                : 2 if online else 1
            ]:
                # Each rank's tokens by themselves: router logits then have the very bits they had there.
                outputs = [
                    verify.reference_moe(
                        self.reader, self.spec, block.layer_index, hidden_states.to(x.device), as_quantized,
                        None if logits is None else self.routing.layer_logits(position, 0, rank).to(x.device),
                    )
                    for rank, (hidden_states, _) in zip(ranks, gathered, strict=True)
                ]  # fmt: skip
                computed = torch.cat([output for _, output in gathered])
                errors[block.layer_index] = verify.max_relative_error(computed, torch.cat(outputs).cpu())
        progress.report("verifying layers", len(mine), len(mine))


def drive(run: Run, steps: MeasuredSteps, monitor: LayerMonitor | None) -> None:
    """Warms up and runs all measured steps. The monitor sees only the measured ones."""
    num_steps = run.config.steps
    run.warm_up(steps)
    if monitor is not None:
        monitor.start()
    run.capture(steps)
    # The driver shows it of a run that is interrupted.
    progress.hand_over(run.all_reports())
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    phases = repeat("", num_steps) if steps.balancing is None else steps.balancing.phases()
    for step, phase in enumerate(phases):
        progress.report("steps", min(step, num_steps), num_steps)
        steps.run(step, phase)
        if monitor is not None:
            monitor.end_step(replayed=run.report.graphs)


def _drive_elastic(
    run: Run,
    membership: Membership,
    steps: MeasuredSteps,
    balance: Callable[[], Balancing | None],
    monitor: LayerMonitor | None,
) -> None:
    """Runs and verifies the steps of ranks that join and leave.

    A step that a change interrupts is repeated. With EPLB all steps begin anew, and with a new manager.
    """
    num_steps, next_step = run.config.steps, 0
    elastic = run.elastic
    if elastic is None:
        raise RuntimeError("the layers do not follow the ranks; load them with a membership")
    before: set[int] = set()

    def meet(membership: Membership) -> None:
        nonlocal next_step
        steps.forget_load()
        # A rank may have ended a step that others did not.
        next_step = max(gather_values("step", next_step)) if membership.ep_size > 1 else next_step

    def begin() -> None:
        """The steps that are not measured, and the report that the present ranks serve."""
        nonlocal before
        # Experts that are being read again cannot move.
        steps.balancing = balance() if elastic.skipping is None else None
        run.warm_up(steps)
        steps.forget_load()
        if monitor is not None and not before:
            monitor.start()
        run.capture(steps)
        reports = run.all_reports()
        if membership.ep_rank == 0:
            progress.hand_over(reports)
        lost, before = before - set(membership.ranks), set(membership.ranks)
        if monitor is not None:
            monitor.on_ranks(membership.ep_size, len(lost), time.time() - membership.epoch.decided_at)
        elastic.serves()

    def end_skipping() -> None:
        steps.balancing = balance()
        run.capture(steps)

    def phases() -> Iterator[str]:
        """The phase of each remaining step."""
        while run.config.eplb and steps.balancing is None:
            yield "before"
        yield from repeat("", num_steps - next_step) if steps.balancing is None else steps.balancing.phases()

    def work() -> None:
        nonlocal next_step
        try:
            begin()
            for phase in phases():
                membership.check()
                steps.look_at_cover()
                progress.report("steps", min(next_step, num_steps), num_steps)
                steps.run(next_step, phase)
                next_step += 1
                if monitor is not None:
                    monitor.end_step(replayed=run.report.graphs)
            while elastic.skipping is not None:
                membership.check()
                steps.look_at_cover()
                time.sleep(_COVER_POLL_S)
            run.verify(steps)
            gather_texts("the end")
        except Exception:
            steps.end_balancing()
            raise

    membership.before_change(steps.close)
    membership.follow(meet)
    elastic.on_cover(end_skipping)
    membership.serve(work)


def _rows_of_all_ranks(rows: torch.Tensor) -> list[torch.Tensor]:
    """The rows of every rank on the host, by rank; their number may differ."""
    counts = gather_values("rows", len(rows))
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    return [part[:count].cpu() for part, count in zip(gather_tensors(padded), counts, strict=True)]


def _experts_held(stack: MoEStack) -> list[list[int]]:
    """For each layer, the routed experts that this rank holds now."""
    return [sorted({expert for expert in block.moe.slots.local_experts if expert >= 0}) for block in stack.layers()]


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

"""The worker of `moe-ep run`: loads its experts, runs and measures the steps, and verifies the layers.

Sections: the run; steps of ranks that come and go; passes; balancing; metrics and traces.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_ep.bench.results import device_name, peak_memory, versions
from moe_ep.checkpoint import CheckpointReader, load_moe_layer, model_spec
from moe_ep.checkpoint.demo import demo_checkpoint
from moe_ep.config import FusedMoEParallelConfig
from moe_ep.distributed.exchange import gather_tensors, gather_texts, gather_values
from moe_ep.distributed.membership import Membership
from moe_ep.distributed.passes import one_pass
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.events import EplbTotals
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.placement_file import PlacementFile, model_checksum
from moe_ep.eplb.recorder import balancedness
from moe_ep.eplb.trace import model_name
from moe_ep.errors import ConfigError, EplbError
from moe_ep.expert_map import expert_owner_table
from moe_ep.launch.cli.gang_options import layer_input_dtype, torch_dtype
from moe_ep.launch.cli.report import STAGES, RankReport, StepReport
from moe_ep.launch.cli.run_config import RunConfig
from moe_ep.launch.gangs import progress
from moe_ep.launch.gangs.gang import ignore
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.launch.workers import verify
from moe_ep.launch.workers.inputs import RoutingSource, TokenSource
from moe_ep.layer import FusedMoE
from moe_ep.layer.elastic import ElasticExperts, ElasticSlots
from moe_ep.layer.stack import MoEBlock, MoEStack
from moe_ep.modular_kernel.choice import DECODE_MAX_NUM_TOKENS
from moe_ep.observability import stages
from moe_ep.observability.metrics import PrometheusSink, RaySink, Sinks
from moe_ep.observability.monitor import LayerMonitor
from moe_ep.observability.trace import trace_to
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS

_WARM_UP_STEPS = {"cpu": 1, "cuda": 3}
# How often a run that has no steps left looks whether lost experts have been read.
_COVER_POLL_S = 0.02
_NEVER = 10**9


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
        run = Run(rank_env, config, reader, membership, on_step)
        report = run.report
        with _observing(rank_env, config) as run.monitor:
            with closing(run):
                if membership is None:
                    run.drive()
                else:
                    _drive_elastic(run, membership)
            if run.balancing is not None:
                report.eplb = run.balancing.close()
                is_first = (rank_env.rank if membership is None else membership.ep_rank) == 0
                if config.save_placement is not None and is_first:
                    report.placement = run.balancing.placement()
        report.experts = run.experts_held()
        report.memory_bytes = peak_memory(run.device)
        progress.report("steps", config.steps, config.steps)
        if membership is None:
            run.verify()
    return report


class Run:
    """One rank's layers, the steps that it measures, and its report.

    Attributes:
        balancing: is told of every step's end; None without EPLB. To be set between steps, before `capture`.
        monitor: is told of every measured step; None without metrics.
    """

    def __init__(
        self,
        rank_env: RankEnv,
        config: RunConfig,
        reader: CheckpointReader,
        membership: Membership | None,
        on_step: Callable[[StepReport], None],
    ) -> None:
        self.rank_env, self.config, self.reader, self._membership = rank_env, config, reader, membership
        self._on_step = on_step
        self.device = torch.device(rank_env.device)
        self.dtype = torch_dtype(config.dtype, self.device)
        self.spec = model_spec(reader.config, reader)
        started = time.perf_counter()
        self.stack = self._load()
        load_s = time.perf_counter() - started
        self.blocks = self.stack.layers()
        self.layers = [block.moe for block in self.blocks]
        self.elastic = None if membership is None else self._follow(membership)
        self.report = self._new_report(load_s)
        self._routing = RoutingSource(config, self.spec, self.report.model["name"], rank_env.world_size)
        self._tokens = TokenSource(config, reader, self.spec, rank_env.rank, rank_env.world_size)
        self.balancing: Balancing | None = None
        self.monitor: LayerMonitor | None = None
        self._captured: CapturedPass | None = None

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
            load_moe_layer(self.reader, self.spec, self.blocks[number].layer_index, layer, experts)
            return self.reader.bytes_read - before

        return ElasticExperts(membership, self.layers, read, when_uncovered=self.config.when_uncovered)

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
            experts=self.experts_held(),
        )

    def experts_held(self) -> list[list[int]]:
        """For each layer, the routed experts that this rank holds now."""
        return [sorted({expert for expert in layer.slots.local_experts if expert >= 0}) for layer in self.layers]

    def all_reports(self) -> list[dict[str, Any]]:
        """The reports of all ranks as plain values, in rank order; a collective step, behind a pass, which has made the
        layers' backends."""
        first = self.layers[0]
        self.report.backend = ALL2ALL_BACKENDS.name_of(first.prepare_finalize)
        self.report.experts_name = EXPERTS.name_of(first.modular_kernel.fused_experts)
        self.report.tolerance = max(verify.tolerance(self.dtype, layer.rounds_rows_to) for layer in self.layers)
        self.report.rows = list(dict.fromkeys(str(layer.input_rows) for layer in self.layers))
        return gather_values("reports", asdict(self.report))

    @property
    def _ranks(self) -> Sequence[int]:
        """The present ranks."""
        return range(self.rank_env.world_size) if self._membership is None else self._membership.ranks

    def drive(self) -> None:
        """Warms up and runs all measured steps. The monitor sees only the measured ones."""
        num_steps = self.config.steps
        self.balance()
        self.warm_up()
        if self.monitor is not None:
            self.monitor.start()
        self.capture()
        # The driver shows it of a run that is interrupted.
        progress.hand_over(self.all_reports())
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        phases = repeat("", num_steps) if self.balancing is None else self.balancing.phases()
        for step, phase in enumerate(phases):
            self.step(step, phase)

    def balance(self) -> None:
        """Begins EPLB, if it is asked for."""
        if self.config.eplb:
            self.balancing = Balancing(self)

    def end_balancing(self) -> None:
        """Ends EPLB, if it is on; experts stay where they are."""
        if self.balancing is not None:
            self.balancing.manager.close()
            self.balancing = None

    def warm_up(self) -> None:
        """Passes that are not measured; their load is forgotten."""
        for step in range(-_WARM_UP_STEPS[self.device.type], 0):
            x, logits = self._inputs(max(step + self.config.steps, 0))
            self.stack(x, None, logits)
            if self.balancing is not None:
                self.balancing.manager.profile_step()

    def capture(self) -> None:
        """Measured passes are replays of a CUDA graph from here on, if that is asked for, or possible on every rank. A
        trace shows eager passes, and those that skip experts tell the host which tokens do.

        Raises:
            ConfigError: --graphs is given and a backend, or experts, cannot be captured.
        """
        asked, is_skipping = self.config.graphs, self.elastic is not None and self.elastic.skipping is not None
        if asked is False or self.config.trace is not None or is_skipping:
            return
        x, logits = self._inputs(0)
        why = why_not_captured(self.stack, len(x), self.device)
        if why is not None and asked:
            raise ConfigError(
                f"--graphs was given and {why}; leave it out, or choose another --backend or --tokens-per-rank"
            )
        possible = all(gather_tensors(torch.tensor([why is None])))
        if possible:
            self._captured = CapturedPass(self.stack, x, logits)
        self.report.graphs = possible
        if not possible:
            self.report.why_eager = why or "another rank cannot be captured"

    def close(self) -> None:
        """Gives the graph up, where there is one."""
        if self._captured is not None:
            self._captured.close()
            self._captured = None

    def _inputs(self, step: int) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """(activations `[T, K]`, router logits of the layers or None)."""
        return (
            self._tokens.hidden_states(step, self.dtype, self.device),
            self._routing.logits(step, self.rank_env.rank, self.device),
        )

    def step(self, step: int, phase: str) -> None:
        """A measured pass; what its tokens chose is looked at after the clock has stopped."""
        progress.report("steps", min(step, self.config.steps), self.config.steps)
        x, logits = self._inputs(step)
        skipping = None if self.elastic is None else self.elastic.skipping
        if skipping is not None:
            skipping.take_hits()  # of passes that were not measured
        if x.is_cuda:
            torch.cuda.synchronize(self.device)
        gather_tensors(torch.zeros(1))  # all ranks begin together
        started = time.perf_counter()
        inputs, recorders = (self._captured or partial(pass_through, self.stack))(x, logits)
        counts = None if self.balancing is None else self.balancing.end_step()
        if x.is_cuda:
            torch.cuda.synchronize(self.device)
        step_ms, ended_at = (time.perf_counter() - started) * 1e3, time.time()
        for layer in self.layers:
            layer.check()
        stage_ms = [{name: sum(spans) for name, spans in recorder.durations_ms().items()} for recorder in recorders]
        keeps_choices = self.config.record_routing is not None
        if counts is None or keeps_choices:
            weights, choices = self._choices(inputs, logits)
            if keeps_choices:
                kept = torch.stack(weights, dim=1).float().numpy() if self.config.record_routed_weights else None
                self.report.choices[step] = torch.stack(choices, dim=1).numpy().astype(np.int16), kept
            if counts is None:
                counts = torch.stack([self._load_per_rank(*each) for each in zip(self.layers, choices, strict=True)])
                self.forget_load()
        loads = torch.stack(gather_tensors(counts.cpu())).sum(dim=0)
        hit = [] if skipping is None else gather_values("tokens hit", skipping.take_hits())
        times = _of_all_ranks(step_ms, stage_ms)
        self._on_step(
            StepReport(
                step=step,
                phase=phase,
                step_ms=[ms for ms, _ in times],
                stage_ms=[stages for _, stages in times],
                loads=loads.tolist(),
                balancedness=[balancedness(layer[None]) for layer in loads],
                num_tokens=sum(map(self.config.num_tokens, self._ranks)),
                ended_at=ended_at,
                tokens_hit=hit,
            )
        )
        if self.monitor is not None:
            self.monitor.end_step(replayed=self.report.graphs)

    def _choices(
        self, inputs: list[torch.Tensor], logits: list[torch.Tensor] | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The weights and ids `[T, top_k]` of this rank's tokens in each layer, on the host."""
        chosen = [
            block.choices(hidden_states, None if logits is None else logits[position])
            for position, (block, hidden_states) in enumerate(zip(self.blocks, inputs, strict=True))
        ]
        return [weights.cpu() for weights, _ in chosen], [ids.cpu() for _, ids in chosen]

    def forget_load(self) -> None:
        """Forgets what was counted of a pass that is not measured, or did not end."""
        for layer in self.layers:
            if layer.eplb_state is not None:
                layer.eplb_state.expert_load_view.zero_()

    def _load_per_rank(self, layer: FusedMoE, ids: torch.Tensor) -> torch.Tensor:
        """Assignments to the experts of each rank, int64 `[R]`: where those lie in order, or as the layer counted."""
        if layer.eplb_state is not None:
            loads = layer.eplb_state.expert_load_view.cpu().long()
            return loads.view(layer.parallel_config.ep_size, -1).sum(dim=1)
        chosen, world_size = ids.flatten().long(), self.rank_env.world_size
        owners = expert_owner_table(world_size, layer.num_experts)
        routed = chosen[(chosen >= 0) & (chosen < layer.num_experts)]
        return torch.bincount(owners[routed].long(), minlength=world_size)

    def verify(self) -> None:
        """Runs the first step once more and compares each layer's output with the reference on the very same inputs.

        Layers are dealt out to the ranks, so that each expert is read once; the rank of a layer checks the tokens of
        all ranks.
        """
        if not self.config.verify:
            return
        report = self.report
        report.errors.clear()
        x, logits = self._inputs(0)
        passes: list[tuple[torch.Tensor, torch.Tensor]] = []
        own, size = dist.get_rank(), dist.get_world_size()
        self.stack(x, lambda layer, hidden_states, output: passes.append((hidden_states, output.clone())), logits)
        mine: list[tuple[int, MoEBlock, list[Any]]] = []
        for position, (block, observed) in enumerate(zip(self.blocks, passes, strict=True)):
            gathered = [_rows_of_all_ranks(tensor) for tensor in observed]
            if own == position % size:
                mine.append((position, block, list(zip(*gathered, strict=True))))
        for count, (position, block, gathered) in enumerate(mine):
            progress.report("verifying layers", count, len(mine))
            online = getattr(block.moe.quant_method, "as_quantized", None)
            # Against the values that weights were quantized to and, if --quantize did that, against those on disk.
            compared = [(report.errors, online)]
            if online is not None:
                compared.append((report.errors_of_quantizing, None))
            for errors, as_quantized in compared:
                # Each rank's tokens by themselves: router logits then have the very bits they had there.
                outputs = [
                    verify.reference_moe(
                        self.reader, self.spec, block.layer_index, hidden_states.to(x.device), as_quantized,
                        None if logits is None else self._routing.layer_logits(position, 0, rank).to(x.device),
                    )
                    for rank, (hidden_states, _) in zip(self._ranks, gathered, strict=True)
                ]  # fmt: skip
                computed = torch.cat([output for _, output in gathered])
                errors[block.layer_index] = verify.max_relative_error(computed, torch.cat(outputs).cpu())
        progress.report("verifying layers", len(mine), len(mine))


def _rows_of_all_ranks(rows: torch.Tensor) -> list[torch.Tensor]:
    """The rows of every rank on the host, by rank; their number may differ."""
    counts = gather_values("rows", len(rows))
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: len(rows)] = rows
    return [part[:count].cpu() for part, count in zip(gather_tensors(padded), counts, strict=True)]


def _of_all_ranks(step_ms: float, stage_ms: list[dict[str, float]]) -> list[tuple[float, list[dict[str, float]]]]:
    """Every rank's times of a step, in rank order."""
    mine = [step_ms, *(layer.get(stage, 0.0) for layer in stage_ms for stage in STAGES)]
    mine_ms = torch.tensor(mine, dtype=torch.float64)
    return [
        (float(times[0]), [dict(zip(STAGES, layer, strict=True)) for layer in times[1:].view(-1, len(STAGES)).tolist()])
        for times in gather_tensors(mine_ms)
    ]


# ==== Steps of ranks that come and go ====


def _drive_elastic(run: Run, membership: Membership) -> None:
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
        run.forget_load()
        # A rank may have ended a step that others did not.
        next_step = max(gather_values("step", next_step)) if membership.ep_size > 1 else next_step

    def begin() -> None:
        """The steps that are not measured, and the report that the present ranks serve."""
        nonlocal before
        if elastic.skipping is None:  # experts that are being read again cannot move
            run.balance()
        run.warm_up()
        run.forget_load()
        if run.monitor is not None and not before:
            run.monitor.start()
        run.capture()
        reports = run.all_reports()
        if membership.ep_rank == 0:
            progress.hand_over(reports)
        lost, before = before - set(membership.ranks), set(membership.ranks)
        if run.monitor is not None:
            run.monitor.on_ranks(membership.ranks, len(lost), time.time() - membership.epoch.decided_at)
        elastic.serves()

    def end_skipping() -> None:
        run.balance()
        run.capture()

    def look() -> None:
        """Lets tokens go to all experts again once every rank has read its part of the lost ones; a collective step
        while tokens skip experts."""
        membership.check()
        if elastic.skipping is not None and all(gather_values("cover", elastic.has_read)):
            elastic.end_skipping()

    def phases() -> Iterator[str]:
        """The phase of each remaining step."""
        while run.config.eplb and run.balancing is None:
            yield "before"
        yield from repeat("", num_steps - next_step) if run.balancing is None else run.balancing.phases()

    def work() -> None:
        nonlocal next_step
        try:
            begin()
            for phase in phases():
                look()
                run.step(next_step, phase)
                next_step += 1
            while elastic.skipping is not None:
                look()
                time.sleep(_COVER_POLL_S)
            run.verify()
            gather_texts("the end")
        except Exception:
            run.end_balancing()
            raise

    membership.before_change(run.close)
    membership.follow(meet)
    elastic.on_cover(end_skipping)
    membership.serve(work)


# ==== Passes ====

# The MoE inputs `[T, K]` and the stages of each layer; the times of a CUDA graph are those of its last replay.
Passed = tuple[list[torch.Tensor], list[stages.StageRecorder]]


def why_not_captured(stack: MoEStack, num_tokens: int, device: torch.device) -> str | None:
    """Why a pass of so many tokens cannot be a CUDA graph; None where it can."""
    if device.type != "cuda":
        return f"the workers run on {device}, and CUDA graphs need GPUs"
    layer = stack.layers()[0].moe
    for part in (layer.prepare_finalize, layer.modular_kernel.fused_experts):
        if not part.supports_cuda_graph():
            return f"{type(part).__name__} cannot be captured in a CUDA graph"
    most = layer.prepare_finalize.max_num_tokens_per_rank()
    if most is not None and num_tokens > most:
        return f"{num_tokens} tokens take several passes of {type(layer.prepare_finalize).__name__}, of {most} each"
    return None


class CapturedPass:
    """A pass through a stack as a CUDA graph, which has run outside a capture before."""

    def __init__(self, stack: MoEStack, x: torch.Tensor, logits: Sequence[torch.Tensor] | None) -> None:
        self._x, self._logits = x.clone(), None if logits is None else [tensor.clone() for tensor in logits]
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(x.device)
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._passed = pass_through(stack, self._x, self._logits)

    def __call__(self, x: torch.Tensor, logits: Sequence[torch.Tensor] | None) -> Passed:
        """Replays the graph with other activations and logits of the same shapes."""
        self._x.copy_(x)
        for held, given in zip(self._logits or (), logits or (), strict=True):
            held.copy_(given)
        self._graph.replay()
        return self._passed

    def close(self) -> None:
        """Gives the graph up. NCCL does not leave a process group while graphs with its collectives exist."""
        self._graph.reset()


def pass_through(stack: MoEStack, x: torch.Tensor, logits: Sequence[torch.Tensor] | None) -> Passed:
    """One pass through every layer, each timed."""
    inputs: list[torch.Tensor] = []
    recorders = []
    with one_pass((block.moe for block in stack.layers()), x.size(0)):
        for position, block in enumerate(stack.layers()):
            with stages.record(x.device) as recorder:
                x = block(
                    x,
                    lambda layer, hidden_states, output: inputs.append(hidden_states),
                    None if logits is None else logits[position],
                )
            recorders.append(recorder)
    return inputs, recorders


# ==== Balancing ====


class Balancing:
    """EPLB in a run: the manager of its layers, which begin where --load-placement says; ConfigError if that is of
    another model, or for other ranks."""

    def __init__(self, run: Run) -> None:
        config = self._config = run.config
        self._model = model_checksum(run.reader)
        first = run.layers[0]
        self._ep_size = first.parallel_config.ep_size
        file = config.placement()
        if file is not None and config.load_placement is not None:
            shape = (len(run.layers), first.num_experts + first.num_redundant_experts)
            try:
                file.check(config.load_placement, model=self._model, ep_size=self._ep_size, shape=shape)
            except EplbError as error:
                raise ConfigError(str(error)) from None
        hosts, rest = divmod(self._ep_size, run.rank_env.local_world_size)
        self.manager = EPLBManager(
            run.layers,
            EplbConfig(
                window_size=config.steps,
                first_plan=config.steps,
                interval=config.eplb_interval or _NEVER,
                rebalance_below=config.eplb_threshold,
                policy=config.eplb_policy,
                objective=config.eplb_objective,
                replica_rule=config.eplb_replicas,
                # A short run would wait longer for the process to start than for the plan.
                planner="thread",
                # Ranks that join may be on any host.
                num_nodes=1 if rest or config.elastic else hosts,
                asynchronous=not config.eplb_synchronous,
            ),
            placement=None if file is None else file.physical_to_logical,
            listener=ignore if run.monitor is None else run.monitor.on_eplb_event,
        )
        # Moves to the first placement do not count as the run's.
        self._first, self.manager.totals = self.manager.placement.host, EplbTotals()

    def end_step(self) -> torch.Tensor:
        """Ends a step; the assignments of this rank's tokens to slots of each rank, int64 `[L, R]` on the device."""
        counts = self.manager.recorder.expert_load_pass.long()
        self.manager.step()
        return counts.unflatten(1, (self._ep_size, -1)).sum(dim=2)

    def phases(self) -> Iterator[str]:
        """The phase of each step to run: --steps before the first plan, those while experts move, and --steps after."""
        yield from ["before"] * self._config.steps
        while self.manager.busy:
            yield "moving"
        yield from ["after"] * self._config.steps

    def close(self) -> dict[str, Any]:
        """Ends what moves, and says what was done."""
        self.manager.finish()
        placement = self.manager.placement
        self.manager.close()
        totals = asdict(self.manager.totals)
        totals.pop("load")
        return {
            "num_redundant_experts": placement.num_slots - placement.num_experts,
            "policy": self._config.eplb_policy,
            "asynchronous": not self._config.eplb_synchronous,
            "layers_changed": int(np.any(self._first != placement.host, axis=1).sum()),
            **totals,
        }

    def placement(self) -> PlacementFile:
        """Where the experts are."""
        placement = self.manager.placement
        return PlacementFile(
            model=self._model,
            ep_size=self._ep_size,
            num_experts=placement.num_experts,
            physical_to_logical=placement.host,
        )


# ==== Metrics and traces ====


@contextmanager
def _observing(rank_env: RankEnv, config: RunConfig) -> Iterator[LayerMonitor | None]:
    """Serves metrics, and writes a trace of what happens inside the block; yields the metrics' monitor, if any."""
    with ExitStack() as stack:
        monitor = None
        if config.metrics_port is not None:
            port = config.metrics_port + rank_env.local_rank
            try:
                endpoint = PrometheusSink(port, config.metrics_host)
            except OSError as error:
                raise ConfigError(
                    f"--metrics-host and --metrics-port give rank {rank_env.rank} {config.metrics_host}:{port}, which "
                    f"it cannot listen at ({error.strerror}); choose an address of this machine, and a range of ports "
                    f"that is free"
                ) from None
            sink = Sinks(endpoint, RaySink()) if rank_env.source == "ray" else endpoint
            monitor = LayerMonitor(sink, rank=rank_env.rank, device=rank_env.device)
            stack.push(monitor)
        if config.trace is not None:
            # The profiler's library writes lines of its own to stderr otherwise.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            stack.enter_context(trace_to(config.trace, rank=rank_env.rank))
        yield monitor

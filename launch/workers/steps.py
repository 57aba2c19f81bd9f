"""The measured passes of a run on one rank: through every layer, timed by stage, with the load they made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from moe_ep.checkpoint import CheckpointReader
from moe_ep.distributed.exchange import gather_tensors, gather_values
from moe_ep.distributed.passes import one_pass
from moe_ep.eplb.config import EplbConfig
from moe_ep.eplb.events import EplbTotals, Listener
from moe_ep.eplb.manager import EPLBManager
from moe_ep.eplb.placement_file import PlacementFile, model_checksum
from moe_ep.eplb.recorder import balancedness
from moe_ep.errors import ConfigError, EplbError
from moe_ep.expert_map import expert_owner_table
from moe_ep.launch.cli.report import STAGES, RankReport, StepReport
from moe_ep.launch.cli.run_config import RunConfig
from moe_ep.launch.gangs.rank_env import RankEnv
from moe_ep.launch.workers.inputs import RoutingSource, TokenSource
from moe_ep.layer import FusedMoE
from moe_ep.layer.elastic import ElasticExperts
from moe_ep.layer.stack import MoEStack
from moe_ep.observability import stages

# ==== Balancing ====
#
# EPLB in a run: the steps before, while and after experts move, and what is said of them.

_NEVER = 10**9


class Balancing:
    """The manager of a run's layers, which begin where --load-placement says.

    Raises:
        ConfigError: that placement is of another model, or for other ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        rank_env: RankEnv,
        stack: MoEStack,
        reader: CheckpointReader,
        listener: Listener,
    ) -> None:
        self._config = config
        self._model = model_checksum(reader)
        layers = [block.moe for block in stack.layers()]
        self._ep_size = layers[0].parallel_config.ep_size
        file = config.placement()
        if file is not None and config.load_placement is not None:
            shape = (len(layers), layers[0].num_experts + layers[0].num_redundant_experts)
            try:
                file.check(config.load_placement, model=self._model, ep_size=self._ep_size, shape=shape)
            except EplbError as error:
                raise ConfigError(str(error)) from None
        hosts, rest = divmod(self._ep_size, rank_env.local_world_size)
        self.manager = EPLBManager(
            layers,
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
            listener=listener,
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


@dataclass(frozen=True)
class Passed:
    """What a pass left.

    Attributes:
        inputs: the MoE inputs `[T, K]` of each layer.
        stages: the times of each layer; those of a CUDA graph's last replay.
    """

    inputs: list[torch.Tensor]
    stages: list[stages.StageRecorder]


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
    return Passed(inputs, recorders)


class MeasuredSteps:
    """Runs steps and accounts for them in a report.

    Args:
        elastic: the layers' experts in an elastic gang.
        on_step: is given the account of each step, of all ranks, on every rank.
        keep_choices, keep_weights: keep in the report what the tokens chose, and with which weights.

    Attributes:
        balancing: is told of every step's end; None without EPLB. To be set between steps, before `capture`.
    """

    def __init__(
        self,
        stack: MoEStack,
        source: TokenSource,
        routing: RoutingSource,
        report: RankReport,
        rank_env: RankEnv,
        *,
        elastic: ElasticExperts | None = None,
        dtype: torch.dtype,
        on_step: Callable[[StepReport], None],
        keep_choices: bool,
        keep_weights: bool = False,
    ) -> None:
        self._stack, self._source, self._routing = stack, source, routing
        self.balancing: Balancing | None = None
        self._elastic = elastic
        self._report, self._rank_env, self._dtype = report, rank_env, dtype
        self._keep_choices, self._keep_weights = keep_choices, keep_weights
        self._device = torch.device(rank_env.device)
        self._on_step = on_step
        self._captured: CapturedPass | None = None

    def inputs(self, step: int) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """(activations `[T, K]`, router logits of the layers or None)."""
        return (
            self._source.hidden_states(step, self._dtype, self._device),
            self._routing.logits(step, self._rank_env.rank, self._device),
        )

    def warm_up(self, step: int) -> None:
        """A pass that is not measured; its load is forgotten."""
        x, logits = self.inputs(step)
        self._stack(x, None, logits)
        if self.balancing is not None:
            self.balancing.manager.profile_step()

    def capture(self, asked: bool | None) -> None:
        """Measured passes are replays of a CUDA graph from here on, if that is possible on every rank; after `warm_up`.

        Args:
            asked: True where nothing else will do, False for eager passes, None for what is possible.

        Raises:
            ConfigError: a backend, or experts, that cannot be captured, and `asked`.
        """
        if asked is False:
            return
        x, logits = self.inputs(0)
        why = why_not_captured(self._stack, len(x), self._device)
        if why is not None and asked:
            raise ConfigError(
                f"--graphs was given and {why}; leave it out, or choose another --backend or --tokens-per-rank"
            )
        possible = all(gather_tensors(torch.tensor([why is None])))
        if possible:
            self._captured = CapturedPass(self._stack, x, logits)
        self._report.graphs = possible
        if not possible:
            self._report.why_eager = why or "another rank cannot be captured"

    def look_at_cover(self) -> None:
        """Lets tokens go to all experts again once every rank has read its part of the lost ones; a collective step
        while tokens skip experts."""
        elastic = self._elastic
        if elastic is not None and elastic.skipping is not None and all(gather_values("cover", elastic.has_read)):
            elastic.end_skipping()

    def end_balancing(self) -> None:
        """Ends EPLB, if it is on; experts stay where they are."""
        if self.balancing is not None:
            self.balancing.manager.close()
            self.balancing = None

    def close(self) -> None:
        """Gives the graph up, where there is one."""
        if self._captured is not None:
            self._captured.close()
            self._captured = None

    def run(self, step: int, phase: str) -> None:
        """A measured pass; what its tokens chose is looked at after the clock has stopped."""
        x, logits = self.inputs(step)
        skipping = None if self._elastic is None else self._elastic.skipping
        if skipping is not None:
            skipping.take_hits()  # of passes that were not measured
        self._wait_for_all()
        started = time.perf_counter()
        passed = pass_through(self._stack, x, logits) if self._captured is None else self._captured(x, logits)
        counts = None if self.balancing is None else self.balancing.end_step()
        if x.is_cuda:
            torch.cuda.synchronize(self._device)
        step_ms, ended_at = (time.perf_counter() - started) * 1e3, time.time()
        for block in self._stack.layers():
            block.moe.check()
        stage_ms = [{name: sum(spans) for name, spans in recorder.durations_ms().items()} for recorder in passed.stages]
        if counts is None or self._keep_choices:
            weights, choices = self._choices(passed.inputs, logits)
            if self._keep_choices:
                kept = torch.stack(weights, dim=1).float().numpy() if self._keep_weights else None
                self._report.choices[step] = torch.stack(choices, dim=1).numpy().astype(np.int16), kept
            if counts is None:
                layers = [block.moe for block in self._stack.layers()]
                counts = torch.stack([self._load_per_rank(*each) for each in zip(layers, choices, strict=True)])
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
                ended_at=ended_at,
                tokens_hit=hit,
            )
        )

    def _choices(
        self, inputs: list[torch.Tensor], logits: list[torch.Tensor] | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The weights and ids `[T, top_k]` of this rank's tokens in each layer, on the host."""
        chosen = [
            block.choices(hidden_states, None if logits is None else logits[position])
            for position, (block, hidden_states) in enumerate(zip(self._stack.layers(), inputs, strict=True))
        ]
        return [weights.cpu() for weights, _ in chosen], [ids.cpu() for _, ids in chosen]

    def forget_load(self) -> None:
        """Forgets what was counted of a pass that is not measured, or did not end."""
        for block in self._stack.layers():
            if block.moe.eplb_state is not None:
                block.moe.eplb_state.expert_load_view.zero_()

    def _load_per_rank(self, moe: FusedMoE, ids: torch.Tensor) -> torch.Tensor:
        """Assignments to the experts of each rank, int64 `[R]`: where those lie in order, or as the layer counted."""
        if moe.eplb_state is not None:
            loads = moe.eplb_state.expert_load_view.cpu().long()
            return loads.view(moe.parallel_config.ep_size, -1).sum(dim=1)
        chosen = ids.flatten().long()
        owners = expert_owner_table(self._rank_env.world_size, moe.num_experts)
        routed = chosen[(chosen >= 0) & (chosen < moe.num_experts)]
        return torch.bincount(owners[routed].long(), minlength=self._rank_env.world_size)

    def _wait_for_all(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        gather_tensors(torch.zeros(1))


def _of_all_ranks(step_ms: float, stage_ms: list[dict[str, float]]) -> list[tuple[float, list[dict[str, float]]]]:
    """Every rank's times of a step, in rank order."""
    mine = [step_ms, *(layer.get(stage, 0.0) for layer in stage_ms for stage in STAGES)]
    mine_ms = torch.tensor(mine, dtype=torch.float64)
    return [
        (float(times[0]), [dict(zip(STAGES, layer, strict=True)) for layer in times[1:].view(-1, len(STAGES)).tolist()])
        for times in gather_tensors(mine_ms)
    ]

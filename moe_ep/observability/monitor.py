"""Turns what the layers of this rank do into metrics, without ever waiting for the GPU.

    monitor = LayerMonitor(PrometheusSink(port), rank=rank, device=device)
    with monitor:
        for batch in serving:
            model(batch)
            monitor.end_step()

One step in `sample_every` is looked at; the others cost a comparison. Durations are read when their CUDA events have
passed. Stages inside a CUDA graph that was captured while the monitor listened are timed in every replay, and read at
`end_step`; where the tokens of a captured pass go is not counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moe_ep.eplb.events import CommitReport, LoadReport, PlanReport
from moe_ep.eplb.metrics import balancedness
from moe_ep.expert_map import expert_owner_table
from moe_ep.observability import metrics
from moe_ep.observability.metrics import Metric, MetricsSink
from moe_ep.stages import Listener, listening, timing_event

if TYPE_CHECKING:
    from moe_ep.config import FusedMoEConfig
    from moe_ep.eplb.events import Event
    from moe_ep.layer import FusedMoE

_HISTOGRAMS: dict[str, Metric] = {
    "dispatch": metrics.DISPATCH_SECONDS,
    "experts": metrics.EXPERTS_SECONDS,
    "combine": metrics.COMBINE_SECONDS,
}
_NOTHING: AbstractContextManager[None] = nullcontext()


class _Span(NamedTuple):
    metric: Metric
    start: torch.cuda.Event
    end: torch.cuda.Event


class _Choices(NamedTuple):
    """Loads of one pass: assignments by rank `[R]` and rows that leave this rank, on the host once `ready`."""

    loads: torch.Tensor
    rows: torch.Tensor
    ready: torch.cuda.Event | None
    bytes_there: int
    bytes_back: int


class LayerMonitor(Listener):
    """Metrics of this rank's layers.

    Args:
        rank: the value of the `rank` label.
        sample_every: steps of which one is looked at; counts are scaled up by it.
    """

    def __init__(
        self, sink: MetricsSink, *, rank: int, device: torch.device | str = "cpu", sample_every: int = 16
    ) -> None:
        if sample_every < 1:
            raise ValueError(f"sample_every is {sample_every}; it must be at least 1")
        self._sink, self._rank, self._device = sink, str(rank), torch.device(device)
        self._sample_every = sample_every
        self._step = 0
        self._pending: deque[_Span] = deque()
        self._captured: list[_Span] = []
        self._choices: deque[_Choices] = deque()
        self._owners: dict[tuple[int, int, str, int, int], torch.Tensor] = {}
        self._listening: AbstractContextManager[None] = _NOTHING

    def __enter__(self) -> LayerMonitor:
        self._listening = listening(self)
        self._listening.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._listening.__exit__(*exception)
        self._sink.close()

    @property
    def _sampled(self) -> bool:
        return self._step % self._sample_every == 0

    def span(self, name: str) -> AbstractContextManager[None]:
        metric = _HISTOGRAMS.get(name)
        if metric is None or not (self._sampled or self._capturing()):
            return _NOTHING
        return self._gpu_span(metric) if self._device.type == "cuda" else self._host_span(metric)

    @contextmanager
    def _host_span(self, metric: Metric) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._sink.put(metric, time.perf_counter() - start, rank=self._rank)

    @contextmanager
    def _gpu_span(self, metric: Metric) -> Iterator[None]:
        start = timing_event()
        yield
        (self._captured if self._capturing() else self._pending).append(_Span(metric, start, timing_event()))

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def routed(self, layer: FusedMoE, topk_ids: torch.Tensor) -> None:
        if not self._sampled or self._capturing():
            return
        config, K = layer.moe_config, layer.moe_config.hidden_dim
        num_ranks, owners = config.ep_size, self._owner_table(config)
        ranks = torch.where(topk_ids >= 0, owners[topk_ids.clamp(min=0).long()], num_ranks)
        has = torch.zeros(topk_ids.size(0), num_ranks + 1, dtype=torch.bool, device=topk_ids.device)
        has.scatter_(1, ranks, True)
        loads = torch.zeros(num_ranks + 1, dtype=torch.float32, device=topk_ids.device)
        loads.index_add_(0, ranks.flatten(), loads.new_ones(1).expand(ranks.numel()))
        rows = has[:, :num_ranks].sum() - has[:, config.ep_rank].sum()
        row_bytes = K * config.in_dtype.itemsize
        there = row_bytes if layer.dispatch_dtype is None else K + 4 * -(-K // 128)
        ready = None
        if self._device.type == "cuda":
            loads, rows = loads.to("cpu", non_blocking=True), rows.to("cpu", non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        self._choices.append(_Choices(loads[:num_ranks], rows, ready, there, row_bytes))

    def _owner_table(self, config: FusedMoEConfig) -> torch.Tensor:
        strategy = config.moe_parallel_config.expert_placement_strategy
        key = (config.ep_size, config.num_experts, strategy, config.num_fused_shared_experts, config.ep_rank)
        if key not in self._owners:
            self._owners[key] = expert_owner_table(*key).long().to(self._device)
        return self._owners[key]

    def end_step(self, *, replayed: bool = False) -> None:
        """Call after every step; hands over what is known by now.

        Args:
            replayed: the step replayed CUDA graphs that were captured while this monitor listened.
        """
        while self._pending and self._pending[0].end.query():
            self._observe(self._pending.popleft())
        if replayed and self._sampled:
            for span in self._captured:
                if span.end.query():
                    self._observe(span)
        while self._choices and (self._choices[0].ready is None or self._choices[0].ready.query()):
            self._tell_choices(self._choices.popleft())
        self._step += 1

    def _observe(self, span: _Span) -> None:
        self._sink.put(span.metric, span.start.elapsed_time(span.end) * 1e-3, rank=self._rank)

    def _tell_choices(self, choices: _Choices) -> None:
        for expert_rank, load in enumerate(choices.loads.tolist()):
            self._sink.put(metrics.RANK_TOKENS, load, rank=self._rank, expert_rank=str(expert_rank))
        self._sink.put(metrics.BALANCEDNESS, balancedness(choices.loads[None]), rank=self._rank)
        rows = float(choices.rows) * self._sample_every
        for direction, row_bytes in (("sent", choices.bytes_there), ("received", choices.bytes_back)):
            self._sink.put(metrics.A2A_BYTES, rows * row_bytes, rank=self._rank, direction=direction)

    def on_eplb_event(self, event: Event) -> None:
        """A listener for an EPLB manager."""
        if isinstance(event, LoadReport):
            self._sink.put(metrics.BALANCEDNESS, event.balancedness, rank=self._rank)
        elif isinstance(event, PlanReport):
            self._sink.put(metrics.EPLB_PLAN_SECONDS, event.seconds, rank=self._rank)
        elif isinstance(event, CommitReport):
            self._sink.put(metrics.EPLB_MOVES, event.experts_moved, rank=self._rank)

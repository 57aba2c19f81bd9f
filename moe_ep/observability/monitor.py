"""Derives metrics from the layers of this rank, without synchronizing with the GPU.

    monitor = LayerMonitor(PrometheusSink(port), rank=rank, device=device)
    with monitor:
        for batch in serving:
            model(batch)
            monitor.end_step()

One step in `sample_every` is sampled; in the others the monitor does not listen, and layers have no overhead.
Durations and choices are read once a CUDA event behind the step has completed. A CUDA graph keeps the events it was
captured with, so capture two, and replay the watched one in sampled steps:

    with monitor.watching():
        watched = capture(model)
    ...
    graph = watched if monitor.sampled else plain
    graph.replay()
    monitor.end_step(replayed=graph is watched)

Its stages are timed; where the tokens of a captured pass go is not counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from moe_ep.eplb.events import CommitReport, LoadReport, PlanReport
from moe_ep.eplb.recorder import balancedness
from moe_ep.expert_map import expert_owner_table
from moe_ep.observability import metrics
from moe_ep.observability.metrics import Metric, MetricsSink
from moe_ep.observability.stages import Listener, listen, stop_listening, timing_event

if TYPE_CHECKING:
    from moe_ep.config import FusedMoEConfig
    from moe_ep.eplb.events import Event
    from moe_ep.layer import FusedMoE

_HISTOGRAMS: dict[str, Metric] = {
    "dispatch": metrics.DISPATCH_SECONDS,
    "experts": metrics.EXPERTS_SECONDS,
    "combine": metrics.COMBINE_SECONDS,
    "eplb_batch_plan": metrics.BATCH_BALANCE_SECONDS,
    "eplb_batch_copies": metrics.BATCH_COPY_SECONDS,
}


class _Span(NamedTuple):
    metric: Metric
    start: torch.cuda.Event
    end: torch.cuda.Event


class _Choices(NamedTuple):
    """Physical ids of one pass `[T, top_k]`, on the host once the step's event has passed, the EP rank of each id, and
    the names of the EP ranks."""

    ids: torch.Tensor
    owners: np.ndarray
    ranks: tuple[int, ...]
    ep_rank: int
    bytes_there: int
    bytes_back: int


class _Sample(NamedTuple):
    """The records of one step, to be read once `ready` has completed."""

    spans: list[_Span]
    choices: list[_Choices]
    ready: torch.cuda.Event | None

    @property
    def is_ready(self) -> bool:
        # Spans may end on other streams than the event lies on.
        return self.ready is None or (self.ready.query() and all(span.end.query() for span in self.spans))


class LayerMonitor(Listener):
    """Metrics of this rank's layers.

    Args:
        rank: the value of the `rank` label.
        sample_every: one step in so many is sampled; counts are scaled up by it.
    """

    def __init__(
        self, sink: MetricsSink, *, rank: int, device: torch.device | str = "cpu", sample_every: int = 64
    ) -> None:
        if sample_every < 1:
            raise ValueError(f"sample_every is {sample_every}; it must be at least 1")
        self._sink, self._rank, self._device = sink, str(rank), torch.device(device)
        self._sample_every = sample_every
        self._step = 0
        self._spans: list[_Span] = []
        self._captured: list[_Span] = []
        self._choices: list[_Choices] = []
        self._unread: deque[_Sample] = deque()
        self._owners: dict[tuple[int, int, str, int, int], np.ndarray] = {}
        self._ranks: tuple[int, ...] = ()  # of an elastic gang

    def __enter__(self) -> LayerMonitor:
        self.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        stop_listening(self)
        self._sink.close()

    def start(self) -> None:
        """Starts to sample steps, as the beginning of the `with` block does."""
        if self.sampled:
            listen(self)

    @property
    def sampled(self) -> bool:
        """Whether the current step is sampled."""
        return self._step % self._sample_every == 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """For the capture of CUDA graphs that sampled steps will replay; drops what was captured before."""
        self._captured = []
        stop_listening(self)
        listen(self)
        try:
            yield
        finally:
            if not self.sampled:
                stop_listening(self)

    def span(self, name: str) -> AbstractContextManager[None]:
        metric = _HISTOGRAMS.get(name)
        if metric is None:
            return super().span(name)
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
        (self._captured if self._capturing() else self._spans).append(_Span(metric, start, timing_event()))

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def routed(self, layer: FusedMoE, topk_ids: torch.Tensor) -> None:
        if self._capturing():
            return
        config, K = layer.moe_config, layer.moe_config.hidden_dim
        back = K * config.in_dtype.itemsize
        there = back if layer.dispatch_dtype is None else K + 4 * -(-K // 128)
        if not config.moe_parallel_config.use_all2all:  # Ranks with the same tokens send none.
            there = back = 0
        on_gpu = topk_ids.is_cuda
        # Only pinned memory is copied to without waiting.
        ids = torch.empty(topk_ids.shape, dtype=topk_ids.dtype, device="cpu", pin_memory=on_gpu)
        ids.copy_(topk_ids, non_blocking=on_gpu)
        owners = self._owner_table(config)
        ranks = self._ranks if len(self._ranks) == config.ep_size else tuple(range(config.ep_size))
        self._choices.append(_Choices(ids, owners, ranks, config.ep_rank, there, back))

    def _owner_table(self, config: FusedMoEConfig) -> np.ndarray:
        strategy = config.moe_parallel_config.expert_placement_strategy
        key = (config.ep_size, config.num_experts, strategy, config.num_fused_shared_experts, config.ep_rank)
        if key not in self._owners:
            self._owners[key] = expert_owner_table(*key).cpu().numpy()
        return self._owners[key]

    def end_step(self, *, replayed: bool = False) -> None:
        """Ends a step, and emits what is complete by now; to be called after every step.

        Args:
            replayed: the step replayed CUDA graphs that were captured while this monitor was `watching`, all of them.
        """
        if self.sampled:
            self._keep_sample(self._captured if replayed else [])
        while self._unread and self._unread[0].is_ready:
            self._tell(self._unread.popleft())
        was_sampled = self.sampled
        self._step += 1
        if was_sampled != self.sampled:
            (listen if self.sampled else stop_listening)(self)

    def _keep_sample(self, captured: list[_Span]) -> None:
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        self._unread.append(_Sample(self._spans + captured, self._choices, ready))
        self._spans, self._choices = [], []

    def _tell(self, sample: _Sample) -> None:
        for span in sample.spans:
            self._sink.put(span.metric, span.start.elapsed_time(span.end) * 1e-3, rank=self._rank)
        loads: dict[tuple[int, ...], list[np.ndarray]] = {}
        sent = received = 0
        for choices in sample.choices:
            load, rows = _count(choices)
            loads.setdefault(choices.ranks, []).append(load)
            sent += rows * choices.bytes_there * self._sample_every
            received += rows * choices.bytes_back * self._sample_every
        if loads:
            self._sink.put(metrics.A2A_BYTES, sent, rank=self._rank, direction="sent")
            self._sink.put(metrics.A2A_BYTES, received, rank=self._rank, direction="received")
        # Layers over another number of ranks have loads of their own; gauges keep those of the last kind.
        for ranks, of_passes in loads.items():
            alike = np.stack(of_passes)
            for expert_rank, load in zip(ranks, alike.mean(axis=0).tolist(), strict=True):
                self._sink.put(metrics.RANK_TOKENS, load, rank=self._rank, expert_rank=str(expert_rank))
            self._sink.put(metrics.BALANCEDNESS, balancedness(torch.from_numpy(alike)), rank=self._rank)

    def copied(self, layer: FusedMoE, num_copies: int, expert_bytes: int) -> None:
        self._sink.put(metrics.BATCH_COPIES, num_copies * self._sample_every, rank=self._rank)
        self._sink.put(metrics.BATCH_COPY_BYTES, num_copies * expert_bytes * self._sample_every, rank=self._rank)

    def on_ranks(self, ranks: Sequence[int], num_lost: int, seconds: float) -> None:
        """Reports a change of an elastic gang's ranks, when the present ranks begin their first step. What was sampled
        of steps before it, which may not have ended, is dropped.

        Args:
            ranks: the names of the present ranks, in EP order.
            num_lost: ranks lost since the last call.
            seconds: since the change was decided.
        """
        self._spans, self._choices = [], []
        self._unread.clear()
        for gone in set(self._ranks) - set(ranks):
            self._sink.put(metrics.RANK_TOKENS, 0, rank=self._rank, expert_rank=str(gone))
        self._ranks = tuple(ranks)
        self._sink.put(metrics.RANKS, len(ranks), rank=self._rank)
        self._sink.put(metrics.RECOVERIES, num_lost, rank=self._rank)
        if num_lost:
            self._sink.put(metrics.RECOVERY_SECONDS, seconds, rank=self._rank)

    def on_eplb_event(self, event: Event) -> None:
        """A listener for an EPLB manager."""
        if isinstance(event, LoadReport):
            self._sink.put(metrics.BALANCEDNESS, event.balancedness, rank=self._rank)
        elif isinstance(event, PlanReport):
            if event.seconds:  # Only the rank that planned knows them.
                self._sink.put(metrics.EPLB_PLAN_SECONDS, event.seconds, rank=self._rank)
        elif isinstance(event, CommitReport):
            self._sink.put(metrics.EPLB_MOVES, event.experts_moved, rank=self._rank)


def _count(choices: _Choices) -> tuple[np.ndarray, int]:
    """(assignments to the experts of each rank, int64 `[R]`; rows that are sent, a token once to each rank)."""
    ids, num_ranks = choices.ids.numpy(), len(choices.ranks)
    ranks = np.where(ids >= 0, choices.owners[np.maximum(ids, 0)], num_ranks)
    goes_to = np.zeros((len(ids), num_ranks + 1), dtype=bool)
    goes_to[np.arange(len(ids))[:, None], ranks] = True
    rows = int(goes_to[:, :num_ranks].sum() - goes_to[:, choices.ep_rank].sum())
    return np.bincount(ranks.ravel(), minlength=num_ranks + 1)[:num_ranks], rows

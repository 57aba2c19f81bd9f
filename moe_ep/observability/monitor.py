"""Turns what the layers of this rank do into metrics, without ever waiting for the GPU.

    monitor = LayerMonitor(PrometheusSink(port), rank=rank, device=device)
    with monitor:
        for batch in serving:
            model(batch)
            monitor.end_step()

One step in `sample_every` is looked at; the others cost a comparison. Durations and choices are read when their CUDA
events have passed. A CUDA graph keeps the events it was captured with, so capture two, and replay the watched one when
a step is looked at:

    graph = watched if monitor.sampled else plain      # `watched` was captured while the monitor listened
    graph.replay()
    monitor.end_step(replayed=graph is watched)

Its stages are timed; where the tokens of a captured pass go is not counted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
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
    """Physical ids of one pass, on the host once `ready`.

    Attributes:
        owners: the rank of each physical id.
    """

    ids: torch.Tensor
    ready: torch.cuda.Event | None
    owners: np.ndarray
    ep_size: int
    ep_rank: int
    bytes_there: int
    bytes_back: int


class LayerMonitor(Listener):
    """Metrics of this rank's layers.

    Args:
        rank: the value of the `rank` label.
        sample_every: steps of which one is looked at; counts are scaled up by it.
    """

    def __init__(
        self, sink: MetricsSink, *, rank: int, device: torch.device | str = "cpu", sample_every: int = 32
    ) -> None:
        if sample_every < 1:
            raise ValueError(f"sample_every is {sample_every}; it must be at least 1")
        self._sink, self._rank, self._device = sink, str(rank), torch.device(device)
        self._sample_every = sample_every
        self._step = 0
        self._pending: deque[_Span] = deque()
        self._captured: list[_Span] = []
        self._unread: list[_Span] = []
        self._choices: deque[_Choices] = deque()
        self._owners: dict[tuple[int, int, str, int, int], np.ndarray] = {}
        self._listening: AbstractContextManager[None] = _NOTHING

    def __enter__(self) -> LayerMonitor:
        self._listening = listening(self)
        self._listening.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._listening.__exit__(*exception)
        self._sink.close()

    @property
    def sampled(self) -> bool:
        """Whether the present step is looked at."""
        return self._step % self._sample_every == 0

    def span(self, name: str) -> AbstractContextManager[None]:
        metric = _HISTOGRAMS.get(name)
        if metric is None or not (self.sampled or self._capturing()):
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
        if not self.sampled or self._capturing():
            return
        config, K = layer.moe_config, layer.moe_config.hidden_dim
        row_bytes = K * config.in_dtype.itemsize
        there = row_bytes if layer.dispatch_dtype is None else K + 4 * -(-K // 128)
        ready, on_gpu = None, topk_ids.is_cuda
        # Only pinned memory is copied to without waiting.
        ids = torch.empty(topk_ids.shape, dtype=topk_ids.dtype, pin_memory=on_gpu).copy_(topk_ids, non_blocking=on_gpu)
        if on_gpu:
            ready = torch.cuda.Event()
            ready.record()
        self._choices.append(
            _Choices(ids, ready, self._owner_table(config), config.ep_size, config.ep_rank, there, row_bytes)
        )

    def _owner_table(self, config: FusedMoEConfig) -> np.ndarray:
        strategy = config.moe_parallel_config.expert_placement_strategy
        key = (config.ep_size, config.num_experts, strategy, config.num_fused_shared_experts, config.ep_rank)
        if key not in self._owners:
            self._owners[key] = expert_owner_table(*key).cpu().numpy()
        return self._owners[key]

    def end_step(self, *, replayed: bool = False) -> None:
        """Call after every step; hands over what is known by now.

        Args:
            replayed: the step replayed CUDA graphs that were captured while this monitor listened, all of them.
        """
        while self._pending and self._pending[0].end.query():
            self._observe(self._pending.popleft())
        if replayed and self.sampled:
            self._unread = self._captured
        if all(span.end.query() for span in self._unread):
            for span in self._unread:
                self._observe(span)
            self._unread = []
        while self._choices and (self._choices[0].ready is None or self._choices[0].ready.query()):
            self._tell_choices(self._choices.popleft())
        self._step += 1

    def _observe(self, span: _Span) -> None:
        self._sink.put(span.metric, span.start.elapsed_time(span.end) * 1e-3, rank=self._rank)

    def _tell_choices(self, choices: _Choices) -> None:
        ids, num_ranks = choices.ids.numpy(), choices.ep_size
        ranks = np.where(ids >= 0, choices.owners[np.maximum(ids, 0)], num_ranks)
        loads = np.bincount(ranks.ravel(), minlength=num_ranks + 1)[:num_ranks]
        goes_to = np.zeros((len(ids), num_ranks + 1), dtype=bool)
        goes_to[np.arange(len(ids))[:, None], ranks] = True
        rows = int(goes_to[:, :num_ranks].sum() - goes_to[:, choices.ep_rank].sum()) * self._sample_every
        for expert_rank, load in enumerate(loads.tolist()):
            self._sink.put(metrics.RANK_TOKENS, load, rank=self._rank, expert_rank=str(expert_rank))
        self._sink.put(metrics.BALANCEDNESS, balancedness(torch.from_numpy(loads)[None]), rank=self._rank)
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

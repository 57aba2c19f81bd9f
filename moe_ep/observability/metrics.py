"""The exported metrics and their sinks: a Prometheus endpoint, or Ray's metrics agents.

Labels are few and bounded: `rank` is the reporting rank, `expert_rank` a rank that holds experts, `direction` sent or
received.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from moe_ep.errors import check_below, missing_extra

_MOST_PORTS = 1 << 16
# The method of both libraries that takes a value, by the kind of metric.
_METHODS = {"histogram": "observe", "gauge": "set", "counter": "inc"}
_SECONDS = (25e-6, 50e-6, 100e-6, 200e-6, 400e-6, 800e-6, 1.6e-3, 3.2e-3, 6.4e-3, 12.8e-3, 25.6e-3, 0.1, 0.4, 1.6)


@dataclass(frozen=True)
class Metric:
    """One metric: its kind is histogram, gauge or counter."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...] = ("rank",)


DISPATCH_SECONDS = Metric("moe_ep_dispatch_seconds", "histogram", "dispatch of one layer's pass")
COMBINE_SECONDS = Metric("moe_ep_combine_seconds", "histogram", "combine of one layer's pass")
EXPERTS_SECONDS = Metric("moe_ep_experts_seconds", "histogram", "experts of one layer's pass")
RANK_TOKENS = Metric(
    "moe_ep_rank_tokens", "gauge", "assignments of this rank's tokens to the experts of a rank, mean of a layer's pass",
    ("rank", "expert_rank"),
)  # fmt: skip
BALANCEDNESS = Metric(
    "moe_ep_balancedness", "gauge",
    "mean over maximum of the ranks' loads; of this rank's tokens, and of all ranks' where EPLB sums them",
)  # fmt: skip
A2A_BYTES = Metric(
    "moe_ep_a2a_bytes_total", "counter",
    "bytes of rows that dispatch sends to, and combine receives from, other ranks; estimated from sampled passes",
    ("rank", "direction"),
)  # fmt: skip
EPLB_MOVES = Metric("moe_ep_eplb_moves_total", "counter", "experts that a rank had to receive, all ranks")
EPLB_PLAN_SECONDS = Metric("moe_ep_eplb_plan_seconds", "histogram", "planning of a placement")
_SAMPLED = "copied for single batches, all ranks; estimated from sampled passes"
BATCH_COPIES = Metric("moe_ep_batch_copies_total", "counter", f"experts {_SAMPLED}")
BATCH_COPY_BYTES = Metric("moe_ep_batch_copy_bytes_total", "counter", f"bytes of experts {_SAMPLED}")
BATCH_BALANCE_SECONDS = Metric(
    "moe_ep_batch_balance_seconds", "histogram", "exchange of a batch's counts, and its plan"
)
BATCH_COPY_SECONDS = Metric("moe_ep_batch_copy_seconds", "histogram", "time left to wait for a batch's copied experts")
RANKS = Metric("moe_ep_ranks", "gauge", "ranks of an elastic gang")
RECOVERIES = Metric("moe_ep_recoveries_total", "counter", "ranks that the others went on without")
RECOVERY_SECONDS = Metric(
    "moe_ep_recovery_seconds", "histogram", "from the decision that the ranks change to their first step"
)  # fmt: skip

ALL = tuple(value for value in vars().values() if isinstance(value, Metric))


class MetricsSink(ABC):
    """Receives metric values; a call takes little time and never blocks."""

    @abstractmethod
    def put(self, metric: Metric, value: float, **labels: str) -> None:
        """Observes a histogram, sets a gauge, or adds to a counter; every label of the metric must be given."""

    def close(self) -> None:
        """Releases the sink's resources."""
        return


class PrometheusSink(MetricsSink):
    """Serves the metrics over HTTP at /metrics, on the loopback interface unless told otherwise.

    Args:
        port: to listen at; 0 takes a free one, `port` says which.

    Raises:
        ImportError: prometheus-client is missing.
        OSError: the port is taken.
        ValueError, TypeError: no port has such a number.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        check_below("the end of all ports", _MOST_PORTS, port=port)
        try:
            import prometheus_client as prometheus
        except ImportError:
            raise missing_extra("prometheus-client", "metrics", "a metrics endpoint") from None
        # A registry of its own: several runtimes of a process do not share names, and nothing else is served.
        self._registry = prometheus.CollectorRegistry()
        self._made: dict[str, Any] = {}
        self._children: dict[tuple[str, ...], Any] = {}
        for metric in ALL:
            # The client adds _total to a counter's name by itself.
            name = metric.name.removesuffix("_total")
            options: dict[str, Any] = {"labelnames": metric.labels, "registry": self._registry}
            if metric.kind == "histogram":
                options["buckets"] = _SECONDS
            self._made[metric.name] = getattr(prometheus, metric.kind.title())(name, metric.text, **options)
        try:
            self._server, self._thread = prometheus.start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            raise OSError(error.errno, error.strerror, f"{host}:{port}") from None
        self.port: int = self._server.server_port

    def put(self, metric: Metric, value: float, **labels: str) -> None:
        key = (metric.name, *labels.values())
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._made[metric.name].labels(*(labels[name] for name in metric.labels))
        getattr(child, _METHODS[metric.kind])(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class RaySink(MetricsSink):
    """Exports the metrics through Ray's agents, with the prefix ray_; for a Ray worker."""

    def __init__(self) -> None:
        from ray.util import metrics

        self._made: dict[Metric, Any] = {}
        for metric in ALL:
            options: dict[str, Any] = {"description": metric.text, "tag_keys": metric.labels}
            if metric.kind == "histogram":
                options["boundaries"] = list(_SECONDS)
            self._made[metric] = getattr(metrics, metric.kind.title())(metric.name, **options)

    def put(self, metric: Metric, value: float, **labels: str) -> None:
        if value or metric.kind != "counter":  # Ray's counters refuse 0
            getattr(self._made[metric], _METHODS[metric.kind])(value, tags=labels)


class Sinks(MetricsSink):
    """Forwards every value to several sinks."""

    def __init__(self, *sinks: MetricsSink) -> None:
        self._sinks = sinks

    def put(self, metric: Metric, value: float, **labels: str) -> None:
        for sink in self._sinks:
            sink.put(metric, value, **labels)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
